//! Renders conversations with the model's own chat template, and identifies the assistant's part of the text.

#[cfg_attr(not(feature = "chat-templates"), path = "without_templates.rs")]
mod compiled;
#[cfg(feature = "chat-templates")]
mod generation;
#[cfg(feature = "chat-templates")]
mod python;
#[cfg(feature = "chat-templates")]
mod render;
mod template;

use std::ops::Range;
use std::path::Path;

use serde_json::Value;

pub(super) use self::compiled::load;
pub use self::template::ChatTemplate;
use super::packing::Document;
use super::{Mask, Packing, Sampling, TextTokenizer, TokenUse, TokenWindows};
use crate::worker::Chat;
use crate::{CancelToken, Error, Result};

/// Finding the assistant's text can render the conversation twice per answer, so longer conversations are rejected.
const MAX_MESSAGES: usize = 1024;
const CONVERSATIONS_PER_BATCH: usize = 64;

/// One line of a file of conversations: `{"messages": [{"role": …, "content": …}, …]}`, optionally with a list `tools`,
/// which is passed to the template.
#[derive(Debug, Clone, PartialEq)]
pub struct Conversation {
    line: usize,
    chat: Chat,
}

impl Conversation {
    /// Builds a conversation from the JSON object of a line.
    ///
    /// # Errors
    /// A description of the fault, for a message that names the line.
    pub fn new(line: usize, object: Value) -> Result<Self, String> {
        let Value::Object(mut fields) = object else { return Err("is not a JSON object".into()) };
        let messages = match fields.remove("messages") {
            Some(Value::Array(messages)) if !messages.is_empty() => messages,
            Some(_) => return Err("has a field `messages` that is empty or not a list".into()),
            None => return Err("has no field `messages`, which other rows have".into()),
        };
        if messages.len() > MAX_MESSAGES {
            return Err(format!("has {} messages; the limit is {MAX_MESSAGES}", messages.len()));
        }
        let no_role = |m: &Value| m.get("role").and_then(Value::as_str).is_none();
        if let Some(at) = messages.iter().position(no_role) {
            return Err(format!("has no string field `role` in message {}", at + 1));
        }
        let tools = match fields.remove("tools") {
            Some(Value::Array(tools)) if !tools.is_empty() => Value::Array(tools),
            None | Some(Value::Null | Value::Array(_)) => Value::Null,
            Some(_) => return Err("has a field `tools` that is not a list".into()),
        };
        Ok(Self { line, chat: Chat { messages, tools } })
    }

    /// Builds a conversation from messages in memory, each with a string `role`; errors name line 1.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_messages(messages: &[Value]) -> Result<Self, String> {
        Self::new(1, serde_json::json!({ "messages": messages }))
    }

    /// The line in the file, counted from 1.
    pub fn line(&self) -> usize {
        self.line
    }
}

/// A conversation as text.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RenderedChat {
    /// The text, with the special tokens that the template writes.
    pub text: String,
    /// The byte ranges of the text that the assistant wrote, in order and without overlap; empty unless requested.
    pub assistant: Vec<Range<usize>>,
}

impl TokenWindows {
    /// Samples windows from conversations by the rule of [`sample`](Self::sample); `origin` names their file in
    /// messages.
    ///
    /// [`Packing::Auto`] means [`Packing::Documents`] here. The template writes the special tokens, so the tokenizer
    /// adds none.
    ///
    /// # Errors
    /// If [`Sampling::check`] fails, the template or the tokenizer fails on a conversation, there are fewer windows
    /// than requested, prompts are masked but there are no assistant tokens, or the run is cancelled.
    pub fn sample_chats(
        tokenizer: &TextTokenizer,
        template: &ChatTemplate,
        conversations: &[Conversation],
        sampling: Sampling,
        origin: &Path,
        cancel: &CancelToken,
    ) -> Result<Self> {
        sampling.check()?;
        let mut documents = Vec::with_capacity(conversations.len());
        let mut answered = false;
        for some in conversations.chunks(CONVERSATIONS_PER_BATCH) {
            cancel.check()?;
            let rendered = template.render_all(some, sampling.mask, origin)?;
            let texts: Vec<&str> = rendered.iter().map(|chat| chat.text.as_str()).collect();
            for (chat, tokens) in rendered.iter().zip(tokenizer.encode_all_rendered(&texts)?) {
                let document = document(chat, tokens, sampling.mask);
                answered |= document.uses.as_ref().is_some_and(|u| u.contains(&TokenUse::Counted));
                documents.push(document);
            }
        }
        if sampling.mask == Mask::Prompts && !answered {
            return Err(Error::InputFile {
                path: origin.to_owned(),
                line: None,
                reason: "has no assistant tokens, but all other tokens are masked".into(),
                remedy: "give conversations with messages of the role `assistant`, or count all tokens \
                    (‹mask=none›)"
                    .into(),
            });
        }
        let packing = match sampling.packing {
            Packing::Auto => Packing::Documents,
            chosen => chosen,
        };
        Self::of_documents(documents, Sampling { packing, ..sampling }, origin)
    }
}

impl RenderedChat {
    /// Returns the tokens of the text, and which of them the assistant wrote: a token belongs to the assistant if any
    /// of its text does, or if it lies between two such tokens of one answer.
    ///
    /// # Errors
    /// When the tokenizer fails on the text.
    pub fn tokenize(&self, tokenizer: &TextTokenizer) -> Result<(Vec<u32>, Vec<bool>)> {
        Ok(self.attribute(tokenizer.encode_rendered(&self.text)?))
    }

    fn attribute(&self, tokens: Vec<(u32, Range<usize>)>) -> (Vec<u32>, Vec<bool>) {
        let mut assistant = vec![false; tokens.len()];
        let mut after = 0;
        for span in &self.assistant {
            // Spans and tokens are in order; a token may extend into two spans.
            let within = |(_, at): &(u32, Range<usize>)| at.start < span.end && span.start < at.end;
            let Some(first) = tokens[after..].iter().position(within).map(|i| after + i) else { continue };
            let beyond = tokens[first..].iter().position(|(_, at)| at.start >= span.end);
            let end = beyond.map_or(tokens.len(), |i| first + i);
            let last = tokens[first..end].iter().rposition(within).map_or(first, |i| first + i);
            assistant[first..=last].fill(true);
            after = last;
        }
        (tokens.into_iter().map(|(token, _)| token).collect(), assistant)
    }
}

fn document(chat: &RenderedChat, tokens: Vec<(u32, Range<usize>)>, mask: Mask) -> Document {
    let (tokens, assistant) = chat.attribute(tokens);
    let uses = (mask == Mask::Prompts).then(|| {
        let of = |written: bool| if written { TokenUse::Counted } else { TokenUse::Context };
        assistant.into_iter().map(of).collect()
    });
    Document { tokens, uses }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_line_must_be_a_conversation() {
        let ok = json!({"messages": [{"role": "user", "content": "x"}], "tools": [], "id": 3});
        assert_eq!(Conversation::new(7, ok).unwrap().line(), 7);
        for (line, expected) in [
            (json!([1]), "not a JSON object"),
            (json!({"text": "x"}), "no field `messages`"),
            (json!({"messages": []}), "empty or not a list"),
            (json!({"messages": "x"}), "empty or not a list"),
            (json!({"messages": [{"role": "user"}, {"content": "x"}]}), "`role` in message 2"),
            (json!({"messages": [{"role": 1}]}), "`role` in message 1"),
            (json!({"messages": [{"role": "user"}], "tools": 3}), "`tools`"),
            (json!({"messages": vec![json!({"role": "user"}); 1025]}), "1025 messages"),
        ] {
            let error = Conversation::new(1, line).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
