//! Conversations become text through the model's own chat template, and of that text it is known
//! what the assistant wrote.

mod generation;
mod python;
mod render;
mod template;

use std::path::Path;

use serde_json::Value;

pub use self::template::ChatTemplate;
use super::packing::Document;
use super::{Mask, Packing, Sampling, TextTokenizer, TokenUse, TokenWindows};
use crate::{CancelToken, Error, Result};

/// More messages of one conversation are refused: finding what the assistant wrote renders it once a
/// message.
const MOST_MESSAGES: usize = 1024;

/// One line of a file of conversations: `{"messages": [{"role": …, "content": …}, …]}`, optionally
/// with the `tools` that its template is given.
#[derive(Debug, Clone, PartialEq)]
pub struct Conversation {
    line: usize,
    messages: Vec<Value>,
    tools: Value,
}

impl Conversation {
    /// From a line's object.
    ///
    /// # Errors
    /// What is wrong with it, fit for a message that names the line.
    pub fn new(line: usize, object: Value) -> Result<Self, String> {
        let Value::Object(mut fields) = object else { return Err("is no JSON object".into()) };
        let messages = match fields.remove("messages") {
            Some(Value::Array(messages)) if !messages.is_empty() => messages,
            Some(_) => return Err("has a field `messages` that is no list with something in it".into()),
            None => return Err("has no field `messages`, which others have".into()),
        };
        if messages.len() > MOST_MESSAGES {
            return Err(format!("has {} messages; at most {MOST_MESSAGES} are read", messages.len()));
        }
        let no_role = |m: &Value| m.get("role").and_then(Value::as_str).is_none();
        if let Some(at) = messages.iter().position(no_role) {
            return Err(format!("has no string field `role` in its message {}", at + 1));
        }
        let tools = match fields.remove("tools") {
            Some(Value::Array(tools)) if !tools.is_empty() => Value::Array(tools),
            None | Some(Value::Null | Value::Array(_)) => Value::Null,
            Some(_) => return Err("has a field `tools` that is no list".into()),
        };
        Ok(Self { line, messages, tools })
    }

    /// Its line in the file, counted from 1.
    pub fn line(&self) -> usize {
        self.line
    }
}

/// A conversation as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedChat {
    /// The text, with the special tokens that the template writes.
    pub text: String,
    /// What the assistant wrote, in bytes of the text, in order and without overlap; nothing unless it
    /// was asked for.
    pub assistant: Vec<std::ops::Range<usize>>,
}

impl TokenWindows {
    /// Samples windows of conversations by the rule of [`windows`](super::windows); `origin` names
    /// their file in messages.
    ///
    /// [`Packing::Auto`] means [`Packing::Documents`] here. The template writes the special tokens, so
    /// the tokenizer adds none.
    ///
    /// # Errors
    /// When the template or the tokenizer fails on a conversation, there are fewer windows than asked
    /// for, the token pulls, or prompts are masked and no assistant wrote anything.
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
        for conversation in conversations {
            cancel.check()?;
            let chat = template.render(conversation, sampling.mask, origin)?;
            let document = document(tokenizer, &chat, sampling.mask)?;
            answered |= document.uses.as_ref().is_some_and(|u| u.contains(&TokenUse::Counted));
            documents.push(document);
        }
        if sampling.mask == Mask::Prompts && !answered {
            return Err(Error::Chat {
                path: origin.to_owned(),
                line: None,
                reason: "holds no token that an assistant wrote, and prompts are masked".into(),
                remedy: "give conversations with messages of the role `assistant`, or count all tokens \
                         (--mask none)"
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
    /// The tokens of the text, and which of them the assistant wrote: a token is the assistant's if any
    /// of its text is, and so are those between two such tokens of one answer.
    ///
    /// # Errors
    /// When the tokenizer fails on the text.
    pub fn tokenize(&self, tokenizer: &TextTokenizer) -> Result<(Vec<u32>, Vec<bool>)> {
        let (tokens, places) = tokenizer.encode_rendered(&self.text)?;
        let mut assistant = vec![false; tokens.len()];
        let mut after = 0;
        for span in &self.assistant {
            // Spans and tokens stand in order; a token may reach into two spans.
            let within = |&(from, to): &(usize, usize)| from < span.end && span.start < to;
            let Some(first) = places[after..].iter().position(within).map(|i| after + i) else { continue };
            let beyond = places[first..].iter().position(|&(from, _)| from >= span.end);
            let end = beyond.map_or(places.len(), |i| first + i);
            let last = places[first..end].iter().rposition(within).map_or(first, |i| first + i);
            assistant[first..=last].fill(true);
            after = last;
        }
        Ok((tokens, assistant))
    }
}

fn document(tokenizer: &TextTokenizer, chat: &RenderedChat, mask: Mask) -> Result<Document> {
    let (tokens, assistant) = chat.tokenize(tokenizer)?;
    let uses = (mask == Mask::Prompts).then(|| {
        let of = |written: bool| if written { TokenUse::Counted } else { TokenUse::Context };
        assistant.into_iter().map(of).collect()
    });
    Ok(Document { tokens, uses })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_line_must_be_a_conversation() {
        let ok = json!({"messages": [{"role": "user", "content": "x"}], "tools": [], "id": 3});
        assert_eq!(Conversation::new(7, ok).unwrap().line(), 7);
        for (line, says) in [
            (json!([1]), "no JSON object"),
            (json!({"text": "x"}), "no field `messages`"),
            (json!({"messages": []}), "no list with something"),
            (json!({"messages": "x"}), "no list with something"),
            (json!({"messages": [{"role": "user"}, {"content": "x"}]}), "`role` in its message 2"),
            (json!({"messages": [{"role": 1}]}), "`role` in its message 1"),
            (json!({"messages": [{"role": "user"}], "tools": 3}), "`tools`"),
            (json!({"messages": vec![json!({"role": "user"}); 1025]}), "1025 messages"),
        ] {
            let error = Conversation::new(1, line).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
