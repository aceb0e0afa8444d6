//! Renders a conversation with a template, and finds the assistant's text in the result.
//!
//! If the template has `{% generation %}` blocks, they mark that text. Otherwise, the conversation is rendered up to
//! each answer with the generation prompt added, and again with the answer. The text that the second rendering adds is
//! the assistant's, including the end of its turn. This holds only if each rendering is a prefix of the next one, which
//! is checked.

use std::io::{self, Write};
use std::ops::Range;

use minijinja::value::Serde;
use minijinja::{ErrorKind, Value};
use serde_json::Value as Json;

use super::compiled::{Compiled, MARKED, PLAIN, describe};
use super::generation::{MARKS, take_marks};
use super::template::REMEDY;
use crate::calibrate::guard_panics;
use crate::worker::{Chat, ChatForm, Fault, RenderedText};

/// The maximum length of a rendered text.
const MAX_TEXT_BYTES: usize = 16 << 20;
const ASSISTANT: &str = "assistant";

impl Compiled {
    pub(super) fn render(&self, chat: &Chat, form: ChatForm) -> Result<RenderedText, Fault> {
        let one = One { template: self, chat };
        let text = one.text(PLAIN, &chat.messages, form == ChatForm::Prompt)?;
        let assistant = match form {
            ChatForm::Whole | ChatForm::Prompt => Vec::new(),
            ChatForm::Marked if self.marks_generation => one.marked(&text)?,
            ChatForm::Marked => one.by_prefixes(&text)?,
        };
        Ok(RenderedText { text, assistant })
    }
}

struct One<'a> {
    template: &'a Compiled,
    chat: &'a Chat,
}

impl One<'_> {
    fn fault(&self, reason: impl std::fmt::Display, remedy: &str) -> Fault {
        let reason = format!("{} {reason}", self.template.path.display());
        Fault { line: None, reason, remedy: remedy.into() }
    }

    fn text(&self, form: &str, messages: &[Json], ask_for_answer: bool) -> Result<String, Fault> {
        let template = self.template;
        let mut context: Vec<(&str, Value)> = template
            .tokens
            .iter()
            .map(|(name, token)| (name.as_str(), Value::from(token.as_str())))
            .collect();
        context.push(("messages", Value::from(Serde(messages))));
        context.push(("tools", Value::from(Serde(&self.chat.tools))));
        context.push(("documents", Value::from(())));
        context.push(("add_generation_prompt", Value::from(ask_for_answer)));
        let context = Value::from_pairs(context);
        let mut output = Bounded { bytes: Vec::new(), full: false };
        let rendered = guard_panics(|| {
            template.environment.get_template(form)?.render_captured_to(context, &mut output).map(drop)
        });
        let other = "remove the conversation, or give a template that accepts it (chat_template.jinja next \
            to the model takes precedence)";
        match rendered {
            None => Err(self.fault("makes the template library panic on it", REMEDY)),
            Some(Err(_)) if output.full => {
                Err(self.fault(format_args!("renders it to more than {MAX_TEXT_BYTES} bytes"), other))
            }
            Some(Err(e)) if innermost(&e) == ErrorKind::OutOfFuel => {
                Err(self.fault("exceeds the step limit on it", REMEDY))
            }
            Some(Err(error)) => {
                let place = error.line().map(|l| format!("line {l}: ")).unwrap_or_default();
                Err(self.fault(format_args!("fails on it: {place}{}", describe(&error)), other))
            }
            Some(Ok(())) => {
                String::from_utf8(output.bytes).map_err(|_| self.fault("renders it to invalid UTF-8", REMEDY))
            }
        }
    }

    fn marked(&self, text: &str) -> Result<Vec<Range<usize>>, Fault> {
        if text.contains(MARKS) {
            let remedy = "remove this character from the conversation";
            return Err(self.fault("copies a noncharacter (U+FDD0 or U+FDD1) from it into the text", remedy));
        }
        let marked = self.text(MARKED, &self.chat.messages, false)?;
        let (without, spans) = take_marks(&marked).map_err(|e| self.unmaskable(&e))?;
        if without != text {
            return Err(self.unmaskable("the rendered text changes when generation blocks are marked"));
        }
        Ok(spans)
    }

    fn by_prefixes(&self, text: &str) -> Result<Vec<Range<usize>>, Fault> {
        let messages = &self.chat.messages;
        let mut spans: Vec<Range<usize>> = Vec::new();
        for (i, message) in messages.iter().enumerate() {
            if message.get("role").and_then(Json::as_str) != Some(ASSISTANT) {
                continue;
            }
            let up_to = |end: usize, ask_for_answer| {
                self.text(PLAIN, &messages[..end], ask_for_answer).map_err(|Fault { reason, .. }| {
                    self.unmaskable(&format!("in the first {end} messages, {reason}"))
                })
            };
            let before = up_to(i, true)?;
            let with = match i + 1 == messages.len() {
                true => text.to_owned(),
                false => up_to(i + 1, false)?,
            };
            if !with.starts_with(&before) {
                let reason = format!("the text before message {} depends on that message", i + 1);
                return Err(self.unmaskable(&reason));
            }
            if !text.starts_with(&with) {
                let reason = format!("the text up to message {} depends on later messages", i + 1);
                return Err(self.unmaskable(&reason));
            }
            // If two answers are consecutive, the end of the first may overlap the beginning of the second.
            let start = before.len().max(spans.last().map_or(0, |s| s.end));
            if start < with.len() {
                spans.push(start..with.len());
            }
        }
        Ok(spans)
    }

    fn unmaskable(&self, reason: &str) -> Fault {
        self.fault(
            format_args!("does not allow separating prompts from answers: {reason}"),
            "give a template with {% generation %} blocks around the assistant's text (chat_template.jinja \
            next to the model takes precedence), or count all tokens (‹mask=none›)",
        )
    }
}

fn innermost(error: &minijinja::Error) -> ErrorKind {
    let mut kind = error.kind();
    let mut cause = std::error::Error::source(error);
    while let Some(deeper) = cause {
        kind = deeper.downcast_ref::<minijinja::Error>().map_or(kind, minijinja::Error::kind);
        cause = deeper.source();
    }
    kind
}

/// Accepts up to a fixed number of bytes.
struct Bounded {
    bytes: Vec<u8>,
    full: bool,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_TEXT_BYTES {
            self.full = true;
            return Err(io::Error::other("too long"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
#[path = "render_tests.rs"]
mod tests;
