//! A chat template, compiled and rendered as transformers does. Templates are programs that come with the model, so
//! their run time, nesting and output are limited.

use std::borrow::Cow;
use std::path::PathBuf;

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, State, Value};

use super::generation::{FILTER, MARKS, replace_tags};
use super::python::{is_sequence, raise_exception, strftime_now, title, tojson};
use super::template::{REMEDY, fault};
use crate::calibrate::guard_panics;
use crate::calibrate::in_process::in_order;
use crate::checkpoint::printable;
use crate::worker::{Answer, Chat, Question, TextWorker};
use crate::{Error, Result};

/// The maximum number of steps for rendering one conversation.
const FUEL: u64 = 10_000_000;
/// The maximum nesting depth of macros and blocks.
const DEPTH: usize = 200;

#[derive(Debug)]
pub(super) struct Compiled {
    /// The template without marks, and with marks if it has generation blocks.
    pub(super) environment: Environment<'static>,
    pub(super) marks_generation: bool,
    pub(super) tokens: Vec<(String, String)>,
    pub(super) path: PathBuf,
}

/// `path` is for messages.
pub(in crate::calibrate) fn load(
    source: String,
    tokens: Vec<(String, String)>,
    path: PathBuf,
) -> Result<Box<dyn TextWorker>> {
    Ok(Box::new(Compiled::new(source, tokens, path)?))
}

pub(super) const PLAIN: &str = "template";
pub(super) const MARKED: &str = "marked template";

impl Compiled {
    /// `path` is for messages.
    fn new(source: String, tokens: Vec<(String, String)>, path: PathBuf) -> Result<Self> {
        if source.contains(MARKS) {
            return Err(fault(&path, "contains a noncharacter (U+FDD0 or U+FDD1)".into()));
        }
        let mut environment = environment();
        let (replaced, generations) = replace_tags(&source);
        let plain = replaced.replace(FILTER, UNMARKED);
        let compiled = guard_panics(|| {
            environment.add_template_owned(PLAIN, plain)?;
            if generations > 0 { environment.add_template_owned(MARKED, replaced) } else { Ok(()) }
        });
        match compiled {
            Some(Ok(())) => Ok(Self { environment, marks_generation: generations > 0, tokens, path }),
            Some(Err(error)) => {
                let (line, reason) = (error.line(), describe(&error));
                Err(Error::InputFile { path, line, reason, remedy: REMEDY.into() })
            }
            None => Err(fault(&path, "makes the template library panic".into())),
        }
    }
}

impl TextWorker for Compiled {
    fn ask(&self, question: &Question<'_>) -> Result<Answer> {
        match question {
            Question::Render { chats, form } => {
                let each = |chat: &Cow<'_, Chat>| Ok(self.render(chat, *form));
                Ok(Answer::Rendered(in_order(chats, each)?))
            }
            _ => Err(Error::Internal("a template was asked to tokenize".into())),
        }
    }
}

/// The filter for generation blocks in the form without marks. Its name is as long as `quant_generation`, so that error
/// positions are the same in both forms.
const UNMARKED: &str = "quant_unmarked__";

/// A block tag removes the white space before it and the newline after it.
fn whitespace() -> SyntaxConfig {
    // Building fails only for invalid delimiters, which are the defaults here.
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap_or_default()
}

/// Jinja as transformers configures it, with limits.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_syntax(whitespace());
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(DEPTH);
    environment.set_unknown_method_callback(method);
    environment.add_test("sequence", |value: &Value| is_sequence(value));
    environment.add_function("raise_exception", |message: &str| raise_exception(message));
    environment.add_function("strftime_now", |format: &str| strftime_now(format));
    environment.add_filter("tojson", tojson);
    environment.add_filter(FILTER, |text: Value| format!("{}{text}{}", MARKS[0], MARKS[1]));
    environment.add_filter(UNMARKED, |text: Value| text);
    environment
}

/// The methods of Python's types. Those of `minijinja_contrib` are used but for `title`, which capitalizes only words
/// after white space.
fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> std::result::Result<Value, minijinja::Error> {
    match (name, value.as_str(), arguments) {
        ("title", Some(text), []) => Ok(Value::from(title(text))),
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments),
    }
}

/// The message of an error, with its causes but without its position.
pub(super) fn describe(error: &minijinja::Error) -> String {
    let mut text = match error.detail() {
        Some(detail) if detail.starts_with(super::python::RAISED) => detail.to_owned(),
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    let mut cause = std::error::Error::source(error);
    while let Some(deeper) = cause {
        text.push_str(&format!(": {deeper}"));
        cause = deeper.source();
    }
    printable(&text)
}
