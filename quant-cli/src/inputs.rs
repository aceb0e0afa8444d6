//! What the verbs read: model directories, calibration texts, evaluation texts.

use std::path::{Path, PathBuf};

use quant_calibration_data::{CORPUS, HELDOUT, documents, public_sets};
use quant_core::calibrate::{
    ChatTemplate, Corpus, Sampling, TextTokenizer, TokenWindows, read_corpus, read_documents,
};
use quant_core::checkpoint::ModelDirectory;
use quant_core::model::Model;
use quant_core::{Error, Result, gguf};

use crate::commands::Session;
use crate::hub;

/// The name of the built-in calibration corpus.
pub const BUILTIN: &str = "builtin";
/// The name of the built-in evaluation text.
pub const HELDOUT_NAME: &str = "builtin-heldout";

/// A model directory and the model in it.
pub struct Opened {
    /// The directory.
    pub directory: ModelDirectory,
    /// Its model.
    pub model: Model,
}

/// Opens a GGUF file, or a model directory, fetched first where a hub's name for it was given, and tells of what is
/// odd about it.
pub fn open(path: &Path, session: &Session) -> Result<Opened> {
    let directory = match gguf::is_gguf(path) {
        true => gguf::open(path)?,
        false => ModelDirectory::open(&hub::model_directory(path, session)?)?,
    }
    .with_text_workers(session.text_workers.clone());
    for warning in directory.warnings() {
        session.progress.note(&format!("warning: {warning}"));
    }
    let model = Model::open(&directory)?;
    Ok(Opened { directory, model })
}

/// The tokenizer of a model directory, checked against the model's embedding.
pub fn tokenizer(directory: &ModelDirectory) -> Result<TextTokenizer> {
    TextTokenizer::of(directory)
}

/// The calibration windows of `source`: a file, or the name of a set.
pub fn calibration(
    opened: &Opened,
    source: &str,
    sampling: Sampling,
    session: &Session,
) -> Result<TokenWindows> {
    let path = Path::new(source);
    let corpus = match is_set(source) || !path.exists() {
        true => Corpus::Texts(texts(source, session)?.0),
        false => read_corpus(path)?,
    };
    let windows = match &corpus {
        Corpus::Texts(texts) => TokenWindows::sample(&tokenizer(&opened.directory)?, texts, sampling, path)?,
        Corpus::Chats(chats) => {
            let template = ChatTemplate::open(&opened.directory)?;
            let tokenizer = tokenizer(&opened.directory)?;
            TokenWindows::sample_chats(&tokenizer, &template, chats, sampling, path, &session.cancel)?
        }
    };
    check(&opened.model, &windows)?;
    Ok(windows)
}

/// Fails when a window holds a token that the model does not know.
pub fn check(model: &Model, windows: &TokenWindows) -> Result<()> {
    match windows.tokens().iter().max() {
        Some(&largest) => model.check_token(largest),
        None => Ok(()),
    }
}

/// Whether this is the name of a text that ships with the program.
fn is_set(source: &str) -> bool {
    matches!(source, BUILTIN | HELDOUT_NAME)
}

/// The documents of a file or a named set, and what to call it in messages.
pub fn texts(source: &str, session: &Session) -> Result<(Vec<String>, PathBuf)> {
    let built_in = match source {
        BUILTIN => Some(CORPUS),
        HELDOUT_NAME => Some(HELDOUT),
        _ => None,
    };
    if let Some(set) = built_in {
        return Ok((documents(set).map(|d| d.text.to_owned()).collect(), source.into()));
    }
    let path = Path::new(source);
    if path.exists() {
        return Ok((read_documents(path)?, path.to_owned()));
    }
    let public = public_sets().map_err(|e| Error::Internal(format!("the manifest of sets: {e}")))?;
    match public.iter().find(|s| s.name == source) {
        Some(set) => Ok((hub::documents(set, session)?, source.into())),
        None => {
            let known = [BUILTIN, HELDOUT_NAME].into_iter().chain(public.iter().map(|s| s.name.as_str()));
            Err(Error::UnknownText { name: source.to_owned(), known: known.map(str::to_owned).collect() })
        }
    }
}
