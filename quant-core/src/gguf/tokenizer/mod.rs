//! A model's tokenizer as metadata.
//!
//! ```text
//! tokenizer.json (byte-level BPE)            ─► bpe ──────────► tokens, types, merges, name of the pre-tokenizer
//! tokenizer.model, or tokenizer.json (▁ BPE) ─► sentencepiece ─► tokens, types, scores
//! tokenizer.json (▁ BPE of some families)    ─► spaced ───────► tokens, types, merges
//! ```
//!
//! The tokens added at the start and end of texts are found by running the tokenizer, not from its settings.

mod added;
mod bpe;
mod pre;
mod protobuf;
mod sentencepiece;
mod spaced;
mod special;

pub(super) use pre::Form;
pub(crate) use pre::check_name as check_pre;
pub(super) use spaced::MODEL as SPACED;
pub(super) use special::{CHAT_TEMPLATE, FURTHER_NAMES, NAMES, token_key};

use std::path::Path;

use serde_json::Value as Json;

use super::families::GgufFamily;
use super::file::{Array, Value};
use crate::calibrate::TextTokenizer;
use crate::checkpoint::{ModelDirectory, parse_strictly};
use crate::{Error, Result};

const MAX_FILE_BYTES: u64 = 256 << 20;
const JSON: &str = "tokenizer.json";
/// The key for the normalizer, [`NFC`] or [`NO_VOCABULARY`], if it is not that of the published tokenizers with the
/// same pre-tokenizer. Other programs ignore it.
pub(super) const NORMALIZER: &str = "quant.tokenizer.normalizer";
pub(super) const NFC: &str = "NFC";
/// The value of ‹pre› and of `tokenizer.ggml.model` for a file without a vocabulary, and of [`NORMALIZER`] for a
/// tokenizer without a normalizer.
pub(super) const NO_VOCABULARY: &str = "none";

pub(super) mod kinds {
    pub(in crate::gguf) const NORMAL: i32 = 1;
    pub(in crate::gguf) const UNKNOWN: i32 = 2;
    pub(in crate::gguf) const CONTROL: i32 = 3;
    pub(in crate::gguf) const USER_DEFINED: i32 = 4;
    pub(in crate::gguf) const UNUSED: i32 = 5;
    pub(in crate::gguf) const BYTE: i32 = 6;
}

#[derive(Debug, Clone, Default)]
pub(super) struct Vocabulary {
    /// `tokenizer.ggml.model`.
    model: &'static str,
    /// `tokenizer.ggml.pre`, and how it was found.
    pre: Option<(String, String)>,
    tokens: Vec<String>,
    types: Vec<i32>,
    scores: Option<Vec<f32>>,
    merges: Option<Vec<String>>,
    adds_space: Option<bool>,
    normalizer: Option<&'static str>,
}

pub(super) struct TokenizerMetadata {
    pub(super) entries: Vec<(String, Value)>,
    pub(super) notes: Vec<String>,
}

/// `rows` is the number of rows of the embedding, and `pre` the pre-tokenizer, if the user names one.
pub(super) fn metadata(
    directory: &ModelDirectory,
    family: &GgufFamily,
    rows: usize,
    pre: Option<&str>,
) -> Result<TokenizerMetadata> {
    let mut notes = Vec::new();
    let Some(sidecar) = directory.sidecar(JSON) else {
        if pre.is_some() {
            return Err(Error::usage("‹pre› has no effect: the model has no tokenizer.json", "omit it"));
        }
        notes.push(
            "the model has no tokenizer.json, so the file will have no vocabulary and accept token IDs only"
                .into(),
        );
        return Ok(TokenizerMetadata { entries: vec![without_vocabulary()], notes });
    };
    if pre == Some(NO_VOCABULARY) {
        return Ok(TokenizerMetadata { entries: vec![without_vocabulary()], notes });
    }
    let path = sidecar.path.clone();
    let fault = |reason: String| unwritable(&path, reason);
    let bytes = sidecar.read(MAX_FILE_BYTES)?.map_err(fault)?;
    let json = parse_strictly(&bytes).map_err(|reason| fault(format!("is not valid JSON: {reason}")))?;
    let tokenizer = TextTokenizer::load(directory.text_workers(), &path, bytes)?;
    let mut vocabulary = match bpe::Kind::of(&json).map_err(fault)? {
        bpe::Kind::ByteLevel => {
            let named = match pre {
                Some(name) => {
                    let how = match pre::contradicted(&json, name) {
                        None => "as requested".to_owned(),
                        Some(own) => format!(
                            "as requested, but the tokenizer has the steps of {own}; llama.cpp will split some texts \
                             into other tokens than the model was trained on"
                        ),
                    };
                    (name.to_owned(), how)
                }
                None => pre::find(&json, &tokenizer.encode(pre::PROBE)?)
                    .ok_or_else(|| pre::unrecognized(&path))?,
            };
            bpe::read(&json, rows, named).map_err(fault)?
        }
        bpe::Kind::SentencePiece => {
            if pre.is_some() {
                return Err(Error::usage(
                    "‹pre› has no effect: SentencePiece tokenizers have no pre-tokenizer",
                    "omit it",
                ));
            }
            match family.keeps_merges {
                true => spaced::read(&json, rows).map_err(fault)?,
                false => sentencepiece::read(directory, &json, rows)?,
            }
        }
    };
    if let Some((name, how)) = &vocabulary.pre {
        notes.push(format!("pre-tokenizer {name}, {how}"));
    }
    make_distinct(&mut vocabulary.tokens);
    let specials = special::read(directory, &json, &tokenizer, &vocabulary, family.roles)?;
    notes.extend(specials.note);
    let mut entries = vocabulary.entries();
    entries.extend(specials.entries);
    entries.extend(special::chat_templates(directory)?);
    Ok(TokenizerMetadata { entries, notes })
}

fn without_vocabulary() -> (String, Value) {
    ("tokenizer.ggml.model".to_owned(), Value::string(NO_VOCABULARY))
}

/// Renames empty and repeated tokens, because llama.cpp's loader aborts on them.
fn make_distinct(tokens: &mut [String]) {
    let mut seen = std::collections::HashSet::new();
    for (id, token) in tokens.iter_mut().enumerate() {
        if token.is_empty() || seen.contains(token) {
            *token = format!("[UNUSED{id}:{token}]");
        }
        seen.insert(token.clone());
    }
}

impl Vocabulary {
    fn unused(model: &'static str, rows: usize) -> Self {
        Self {
            model,
            tokens: (0..rows).map(|id| format!("[PAD{id}]")).collect(),
            types: vec![kinds::UNUSED; rows],
            ..Self::default()
        }
    }

    fn set(&mut self, id: u64, text: &str, kind: i32) -> Result<(), String> {
        let rows = self.tokens.len();
        let place = usize::try_from(id).ok().filter(|id| *id < rows);
        let place = place.ok_or_else(|| format!("has token {id}, but the embedding has only {rows} rows"))?;
        self.tokens[place] = text.to_owned();
        self.types[place] = kind;
        Ok(())
    }

    fn id(&self, text: &str) -> Option<u32> {
        self.tokens.iter().position(|token| token == text).map(|id| id as u32)
    }

    fn entries(self) -> Vec<(String, Value)> {
        let mut entries = vec![("model", Value::string(self.model))];
        entries.extend(self.pre.map(|(name, _)| ("pre", Value::String(name))));
        entries.push(("tokens", Value::Array(Array::String(self.tokens))));
        entries.extend(self.scores.map(|scores| ("scores", Value::Array(Array::F32(scores)))));
        entries.push(("token_type", Value::Array(Array::I32(self.types))));
        entries.extend(self.merges.map(|merges| ("merges", Value::Array(Array::String(merges)))));
        entries.extend(self.adds_space.map(|adds| ("add_space_prefix", Value::Bool(adds))));
        let named = entries.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value));
        let ours = self.normalizer.map(|name| (NORMALIZER.to_owned(), Value::string(name)));
        named.chain(ours).collect()
    }
}

fn unwritable(path: &Path, reason: String) -> Error {
    Error::InputFile {
        path: path.to_owned(),
        line: None,
        reason,
        remedy: "use the tokenizer of the original model, or set ‹pre=none› to write a file without a tokenizer; programs \
            that read it, including this one, need token IDs as input then"
            .into(),
    }
}

/// An array of a JSON object; empty if it is missing or `null`.
fn list<'a>(json: &'a Json, key: &str) -> Result<&'a [Json], String> {
    match json.get(key) {
        None | Some(Json::Null) => Ok(&[]),
        Some(Json::Array(items)) => Ok(items),
        Some(_) => Err(format!("`{key}` must be a list")),
    }
}
