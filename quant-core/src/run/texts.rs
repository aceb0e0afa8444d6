//! Texts as a request names or gives them.

use std::path::{Path, PathBuf};

use super::host::{Host, Opened};
use crate::calibrate::{
    ChatTemplate, Corpus, Sampling, TextTokenizer, TokenWindows, read_corpus, read_documents,
};
use crate::model::Model;
use crate::{Error, Result};

/// The name of the calibration text that is taken where none is named.
pub const BUILTIN: &str = "builtin";
/// The name of the evaluation text that programs bring along.
pub const HELDOUT: &str = "builtin-heldout";

/// A text.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Text {
    /// A file, or the name of a text that the program knows.
    Named(String),
    /// Documents or conversations, and what messages call them.
    Given(Corpus, String),
}

impl Text {
    /// What messages call it.
    pub fn name(&self) -> &str {
        match self {
            Self::Named(name) | Self::Given(_, name) => name,
        }
    }

    /// The file, where it is one.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Named(name) => Some(Path::new(name)),
            Self::Given(..) => None,
        }
    }

    /// How a message names the setting with it as its value.
    pub(super) fn setting(&self, name: &str) -> String {
        match self {
            Self::Named(text) => format!("{name}={text}"),
            Self::Given(..) => name.to_owned(),
        }
    }
}

/// The calibration windows of a text.
///
/// # Errors
/// When the text cannot be read or is too short, or does not fit the model's tokenizer or chat template.
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

/// Fails when a window holds a token that the model does not know.
fn check(model: &Model, windows: &TokenWindows) -> Result<()> {
    match windows.tokens().iter().max() {
        Some(&largest) => model.check_token(largest),
        None => Ok(()),
    }
}

/// The documents of a text, and what to call it in messages.
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
            reason: "holds conversations; only texts are evaluated".into(),
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
