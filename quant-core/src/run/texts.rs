//! Calibration and evaluation texts, named or given in a request.

use std::borrow::Cow;
use std::io::ErrorKind;
use std::path::Path;

use super::host::{Host, Opened};
use crate::calibrate::{ChatTemplate, Corpus, Sampling, TextTokenizer, TokenWindows, read_corpus};
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
    let windows = match &*corpus(text, host)? {
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
    // The same text gives the same output, from whatever place it comes. So only the default is named.
    let known = (*text == Text::Named(BUILTIN.to_owned())).then_some(BUILTIN);
    Ok(windows.named(known))
}

/// Fails if a window holds a token outside the model's vocabulary.
fn check(model: &Model, windows: &TokenWindows) -> Result<()> {
    match windows.tokens().iter().max() {
        Some(&largest) => model.check_token(largest),
        None => Ok(()),
    }
}

/// Texts to evaluate.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Documents {
    /// The texts.
    pub texts: Vec<String>,
    /// Whether they are conversations that the model's chat template has rendered, with all special tokens.
    pub rendered: bool,
}

/// Returns the documents of an evaluation text. Conversations are rendered with the chat template of `opened`.
///
/// # Errors
/// When it cannot be read or fetched, is unknown ([`Error::UnknownText`]), or holds conversations that the model has no
/// chat template for, or that its template rejects.
pub fn documents(opened: &Opened, text: &Text, host: &Host<'_>) -> Result<Documents> {
    match corpus(text, host)?.into_owned() {
        Corpus::Texts(texts) => Ok(Documents { texts, rendered: false }),
        Corpus::Chats(chats) => {
            let template = ChatTemplate::open(&opened.directory)?;
            let texts = template.texts(&chats, Path::new(text.name()), host.cancel)?;
            Ok(Documents { texts, rendered: true })
        }
    }
}

fn corpus<'a>(text: &'a Text, host: &Host<'_>) -> Result<Cow<'a, Corpus>> {
    let name = match text {
        Text::Given(corpus, _) => return Ok(Cow::Borrowed(corpus)),
        Text::Named(name) => name,
    };
    if let Some(documents) = host.catalog.built_in(name) {
        return Ok(Cow::Owned(Corpus::Texts(documents)));
    }
    let path = Path::new(name);
    match std::fs::metadata(path) {
        Ok(_) => return read_corpus(path).map(Cow::Owned),
        // Not a path, but a name.
        Err(e)
            if matches!(
                e.kind(),
                ErrorKind::NotFound
                    | ErrorKind::NotADirectory
                    | ErrorKind::InvalidInput
                    | ErrorKind::InvalidFilename
            ) => {}
        Err(e) => return Err(Error::io("open", path, e)),
    }
    match host.catalog.fetched(name)? {
        Some(documents) => Ok(Cow::Owned(Corpus::Texts(documents))),
        None => Err(Error::UnknownText { name: name.to_owned(), known: host.catalog.texts()? }),
    }
}
