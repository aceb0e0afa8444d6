//! Calibration and evaluation texts, named or given in a request.

use std::path::{Path, PathBuf};

use super::host::{Host, Opened};
use crate::calibrate::{
    ChatTemplate, Corpus, Sampling, TextTokenizer, TokenWindows, read_corpus, read_documents,
};
use crate::model::Model;
use crate::{Error, Result};

/// The name of the default calibration text.
pub const BUILTIN: &str = "builtin";
/// The name of the evaluation text that is built into programs.
pub const HELDOUT: &str = "builtin-heldout";

/// A calibration or evaluation text.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Text {
    /// A file, or the name of a text in the catalog.
    Named(String),
    /// Documents or conversations, and their name in messages.
    Given(Corpus, String),
}

impl Text {
    /// Returns the name of the text in messages.
    pub fn name(&self) -> &str {
        match self {
            Self::Named(name) | Self::Given(_, name) => name,
        }
    }

    /// Returns the name as a path, if the text is named. It may also be a name in the catalog.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Named(name) => Some(Path::new(name)),
            Self::Given(..) => None,
        }
    }

    pub(crate) fn setting(&self, name: &str) -> String {
        match self {
            Self::Named(text) => format!("{name}={text}"),
            Self::Given(..) => name.to_owned(),
        }
    }
}

/// Returns the calibration windows of a text.
///
/// # Errors
/// When the text cannot be read, is too short, or does not fit the model's tokenizer or chat template.
pub fn calibration(
    opened: &Opened,
    text: &Text,
    sampling: Sampling,
    host: &Host<'_>,
) -> Result<TokenWindows> {
    let path = Path::new(text.name());
    let read;
    let corpus = match text {
        Text::Given(corpus, _) => corpus,
        Text::Named(name) => {
            read = match host.catalog.built_in(name) {
                Some(documents) => Corpus::Texts(documents),
                None if path.exists() => read_corpus(path)?,
                None => Corpus::Texts(documents_of(name, host)?.0),
            };
            &read
        }
    };
    let windows = match corpus {
        Corpus::Texts(texts) => {
            TokenWindows::sample(&TextTokenizer::of(&opened.directory)?, texts, sampling, path)?
        }
        Corpus::Chats(chats) => {
            let template = ChatTemplate::open(&opened.directory)?;
            let tokenizer = TextTokenizer::of(&opened.directory)?;
            TokenWindows::sample_chats(&tokenizer, &template, chats, sampling, path, host.cancel)?
        }
    };
    check(&opened.model, &windows)?;
    Ok(windows)
}

/// Fails if a window holds a token outside the model's vocabulary.
fn check(model: &Model, windows: &TokenWindows) -> Result<()> {
    match windows.tokens().iter().max() {
        Some(&largest) => model.check_token(largest),
        None => Ok(()),
    }
}

/// Returns the documents of a text, and its name in messages.
///
/// # Errors
/// When it cannot be read or fetched, is unknown ([`Error::UnknownText`]), or holds conversations.
pub fn documents(text: &Text, host: &Host<'_>) -> Result<(Vec<String>, PathBuf)> {
    match text {
        Text::Named(name) => documents_of(name, host),
        Text::Given(Corpus::Texts(texts), name) => Ok((texts.clone(), name.into())),
        Text::Given(Corpus::Chats(_), name) => Err(Error::Text {
            path: name.into(),
            line: None,
            reason: "contains conversations, but only plain texts can be evaluated".into(),
        }),
    }
}

fn documents_of(name: &str, host: &Host<'_>) -> Result<(Vec<String>, PathBuf)> {
    if let Some(documents) = host.catalog.built_in(name) {
        return Ok((documents, name.into()));
    }
    let path = Path::new(name);
    if path.exists() {
        return Ok((read_documents(path)?, path.to_owned()));
    }
    match host.catalog.fetched(name)? {
        Some(documents) => Ok((documents, name.into())),
        None => Err(Error::UnknownText { name: name.to_owned(), known: host.catalog.texts()? }),
    }
}
