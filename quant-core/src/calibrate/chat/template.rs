//! A model's chat template, as transformers would run it, but within bounds: it comes with the model,
//! and is a program.

use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Value};
use serde_json::{Map, Value as Json};

use super::generation::{FILTER, MARKS, replace_tags};
use super::python::{raise_exception, strftime_now, tojson};
use crate::calibrate::settings::CONFIG;
use crate::calibrate::{TokenizerSettings, guard_panics};
use crate::checkpoint::{ModelDirectory, printable};
use crate::{Error, Result};

const TEMPLATE: &str = "chat_template.jinja";
/// Longer templates are refused; real ones have some kilobytes.
const LARGEST_TEMPLATE: u64 = 1 << 20;
/// Steps that rendering one conversation may take.
const FUEL: u64 = 10_000_000;
/// Macros and blocks in each other.
const DEPTH: usize = 200;
/// What helps where a template cannot be used.
pub(super) const REMEDY: &str = "correct the model's chat template, or put another one as \
                                 chat_template.jinja beside it, which is taken first";

/// A compiled chat template with the special tokens that it may write.
#[derive(Debug)]
pub struct ChatTemplate {
    /// The template without marks, and with them where it has generation blocks.
    pub(super) environment: Environment<'static>,
    pub(super) marks_generation: bool,
    pub(super) tokens: Vec<(&'static str, String)>,
    pub(super) path: PathBuf,
}

/// The names of the two forms of a template.
pub(super) const PLAIN: &str = "template";
pub(super) const MARKED: &str = "marked template";

impl ChatTemplate {
    /// The template of a model: `chat_template.jinja` beside it, or else `chat_template` in its
    /// `tokenizer_config.json`, a text or a list of named ones of which `default` is taken. Special
    /// tokens come from `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`Error::InputFile`] when there is none, or it or the settings cannot be read.
    pub fn open(directory: &ModelDirectory) -> Result<Self> {
        let settings = TokenizerSettings::open(directory)?;
        let tokens = settings.special_tokens()?;
        let config_path = settings.path().to_owned();
        let path = directory.path().join(TEMPLATE);
        if let Some(sidecar) = directory.sidecar(TEMPLATE) {
            let bytes = sidecar.read(LARGEST_TEMPLATE)?;
            let bytes = bytes.map_err(|reason| fault(&sidecar.path, reason))?;
            let source = String::from_utf8(bytes).map_err(|e| {
                fault(&path, format!("is not UTF-8 at byte {}", e.utf8_error().valid_up_to()))
            })?;
            return Self::compile(source, tokens, path);
        }
        let source = configured(settings.fields()).map_err(|reason| fault(&config_path, reason))?;
        match source {
            Some(source) if source.len() as u64 <= LARGEST_TEMPLATE => {
                Self::compile(source, tokens, config_path)
            }
            Some(source) => {
                let reason = format!(
                    "`chat_template` has {} bytes; at most {LARGEST_TEMPLATE} are read",
                    source.len()
                );
                Err(fault(&config_path, reason))
            }
            None => Err(Error::InputFile {
                path: directory.path().to_owned(),
                line: None,
                reason: format!(
                    "has no chat template, neither {TEMPLATE} nor `chat_template` in {CONFIG}, and so \
                     conversations cannot be rendered"
                ),
                remedy: format!(
                    "take a chat model, put its {TEMPLATE} beside the weights, or calibrate on plain text"
                ),
            }),
        }
    }

    /// A template from its source, with special tokens by name; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::InputFile`] with the line of the template that is no template.
    pub fn compile(source: String, tokens: Vec<(&'static str, String)>, path: PathBuf) -> Result<Self> {
        if source.contains(MARKS) {
            return Err(fault(&path, "holds a noncharacter (U+FDD0 or U+FDD1)".into()));
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

    /// The file that it comes from.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The filter of generation blocks where nothing is marked. As long as the other, so that nothing
/// else differs.
const UNMARKED: &str = "quant_unmarked__";

/// A block's tag takes the white space before it and the line's end after it.
fn whitespace() -> SyntaxConfig {
    // Nothing but delimiters can be refused.
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap_or_default()
}

/// What transformers makes of Jinja, with bounds.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_syntax(whitespace());
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(DEPTH);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |message: &str| raise_exception(message));
    environment.add_function("strftime_now", |format: &str| strftime_now(format));
    environment.add_filter("tojson", tojson);
    environment.add_filter(FILTER, |text: Value| format!("{}{text}{}", MARKS[0], MARKS[1]));
    environment.add_filter(UNMARKED, |text: Value| text);
    environment
}

pub(super) fn fault(path: &Path, reason: String) -> Error {
    Error::InputFile { path: path.to_owned(), line: None, reason, remedy: REMEDY.into() }
}

/// What an error of the template library says, with its causes, without the place.
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

/// The template that a configuration holds.
fn configured(config: &Map<String, Json>) -> Result<Option<String>, String> {
    match config.get("chat_template") {
        None | Some(Json::Null) => Ok(None),
        Some(Json::String(source)) => Ok(Some(source.clone())),
        Some(Json::Array(named)) => {
            let default = named.iter().find(|t| t.get("name").and_then(Json::as_str) == Some("default"));
            match default.and_then(|t| t.get("template")).and_then(Json::as_str) {
                Some(source) => Ok(Some(source.to_owned())),
                None => Err("`chat_template` is a list without a template named `default`".into()),
            }
        }
        Some(_) => Err("`chat_template` is neither a text nor a list of named ones".into()),
    }
}
