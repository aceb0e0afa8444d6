//! The reference of `quant eval`: another model, or a stored reference.

use std::path::Path;

use quant_core::calibrate::TextTokenizer;
use quant_core::model::Decoder;
use quant_core::{Error, Result, gguf};
use quant_evaluator::{EvaluationText, ModelIdentity, Reference, StoredReference, is_stored_reference};

use super::{Session, eval};
use crate::inputs::{self, Opened};
use crate::provenance;

/// An opened reference.
pub enum OpenedReference {
    /// A model whose weights have not been read yet.
    Model(Box<Opened>),
    /// A stored reference.
    Stored(Box<StoredReference>),
}

/// A loaded reference.
pub enum LoadedReference {
    /// A model.
    Model(Box<Decoder>),
    /// A stored reference.
    Stored(Box<StoredReference>),
}

/// Opens the model at this path, or the stored reference.
pub fn open(path: &Path, session: &Session) -> Result<OpenedReference> {
    match is_stored_reference(path) && !gguf::is_gguf(path) {
        true => Ok(OpenedReference::Stored(Box::new(StoredReference::open(path)?))),
        false => Ok(OpenedReference::Model(Box::new(inputs::open(path, session)?))),
    }
}

impl OpenedReference {
    /// Checks that the reference and the model read the same tokens. If the reference is a model, `theirs` tokenizes
    /// the text with its tokenizer.
    pub fn check(
        &self,
        model: &Opened,
        text: &EvaluationText,
        theirs: impl FnOnce(&Opened) -> Result<EvaluationText>,
    ) -> Result<()> {
        match self {
            Self::Model(reference) => same_tokenizer(model, reference, || {
                Ok([text.tokens_sha256.clone(), theirs(reference)?.tokens_sha256])
            }),
            Self::Stored(stored) => stored.check(text, made_tokenizer(model).is_none()),
        }
    }

    /// Returns the identity of the reference model. `path` is the argument that named it; a stored reference has the path
    /// that named the model when it was stored.
    pub fn identity(&self, path: &Path, session: &Session) -> Result<ModelIdentity> {
        match self {
            Self::Model(opened) => {
                let path = path.display().to_string();
                provenance::identity(opened, path, opened.model.kv_scheme(), session)
            }
            Self::Stored(stored) => Ok(stored.model().clone()),
        }
    }

    /// Returns the digest of a stored reference; `None` for a model.
    pub fn digest(&self) -> Option<&str> {
        match self {
            Self::Model(_) => None,
            Self::Stored(stored) => Some(stored.digest()),
        }
    }

    /// Reads the weights if the reference is a model.
    pub fn load(self, text: &EvaluationText, session: &Session) -> Result<LoadedReference> {
        Ok(match self {
            Self::Model(opened) => {
                LoadedReference::Model(Box::new(eval::load(&opened, text, "load reference", session)?))
            }
            Self::Stored(stored) => LoadedReference::Stored(stored),
        })
    }
}

impl LoadedReference {
    /// Returns the reference in the evaluator's form. For a model, its noise floor is measured too.
    pub fn compared(&self) -> Reference<'_> {
        match self {
            Self::Model(decoder) => Reference::Model { decoder, floor: true },
            Self::Stored(stored) => Reference::Stored(stored),
        }
    }

    /// Returns the model itself, unless the reference is stored.
    pub fn decoder(&self) -> Option<&Decoder> {
        match self {
            Self::Model(decoder) => Some(decoder),
            Self::Stored(_) => None,
        }
    }
}

fn made_tokenizer(opened: &Opened) -> Option<&[u8]> {
    opened.directory.sidecar("tokenizer.json")?.contents.as_deref()
}

/// Returns an error if the tokenizers differ, because their results cannot be compared position by position.
///
/// If their files differ, or a tokenizer was built from metadata and has none, the tokens of the text decide; `tokens`
/// returns their hashes for the model and for the reference.
fn same_tokenizer(
    model: &Opened,
    reference: &Opened,
    tokens: impl FnOnce() -> Result<[String; 2]>,
) -> Result<()> {
    let have_files = [model, reference].iter().all(|opened| made_tokenizer(opened).is_none());
    if have_files
        && TextTokenizer::bytes_of(&model.directory)? == TextTokenizer::bytes_of(&reference.directory)?
    {
        return Ok(());
    }
    let [one, other] = tokens()?;
    if one == other {
        return Ok(());
    }
    Err(Error::usage(
        format!(
            "{} and the reference {} have different tokenizers",
            model.directory.path().display(),
            reference.directory.path().display()
        ),
        "compare the model with the one it was quantized from; only models with the same tokenizer can be \
        compared",
    ))
}
