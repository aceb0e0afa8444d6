//! Byte-level BPE: the vocabulary and merges of `tokenizer.json` are copied.

use serde_json::Value as Json;

use super::added::added;
use super::{NFC, NO_VOCABULARY, Vocabulary, kinds, list, pre};

pub(super) enum Kind {
    ByteLevel,
    SentencePiece,
}

impl Kind {
    pub(super) fn of(json: &Json) -> Result<Self, String> {
        let model = json.get("model").ok_or("`model` is missing")?;
        // Old files have no type.
        let named = model.get("type").and_then(Json::as_str);
        let kind = named.unwrap_or(if model.get("merges").is_some() { "BPE" } else { "unknown" });
        if kind != "BPE" {
            return Err(format!("`model.type` is {kind}; only BPE can be written as GGUF"));
        }
        if model.get("byte_fallback").and_then(Json::as_bool) == Some(true) {
            return Ok(Self::SentencePiece);
        }
        let is_byte_level = |key: &str| json.get(key).is_some_and(pre::has_byte_level);
        match is_byte_level("pre_tokenizer") || is_byte_level("decoder") {
            true => Ok(Self::ByteLevel),
            false => {
                Err("is a BPE tokenizer that is neither byte-level nor has byte fallback, so it cannot \
                    encode all bytes"
                    .into())
            }
        }
    }
}

/// `pre` is the name of the pre-tokenizer, and how it was found.
pub(super) fn read(json: &Json, rows: usize, pre: (String, String)) -> Result<Vocabulary, String> {
    let mut vocabulary = Vocabulary::unused("gpt2", rows);
    let by_default = pre::Form::named(&pre.0).is_some_and(|form| form.composes);
    vocabulary.normalizer = match pre::composes(json) {
        Some(composes) if composes != by_default => Some(if composes { NFC } else { NO_VOCABULARY }),
        _ => None,
    };
    vocabulary.pre = Some(pre);
    let model = json.get("model").and_then(|model| model.get("vocab")).and_then(Json::as_object);
    for (text, id) in model.ok_or("`model.vocab` is missing or malformed")? {
        let id = id.as_u64().ok_or_else(|| format!("`model.vocab` has an invalid ID for `{text}`"))?;
        vocabulary.set(id, text, kinds::NORMAL)?;
    }
    for token in added(json)? {
        token.put(&mut vocabulary)?;
    }
    vocabulary.merges = Some(merges(json)?.iter().map(|[left, right]| format!("{left} {right}")).collect());
    Ok(vocabulary)
}

/// The merges as pairs. A space within a part is replaced by its symbol in the byte-level alphabet.
pub(super) fn merges(json: &Json) -> Result<Vec<[String; 2]>, String> {
    let merges = list(json.get("model").unwrap_or(&Json::Null), "merges")?;
    let one = |(i, merge): (usize, &Json)| {
        let parts = match merge {
            Json::String(text) => text.split_once(' ').map(|(left, right)| [left, right]),
            Json::Array(parts) => match parts.as_slice() {
                [Json::String(left), Json::String(right)] => Some([left.as_str(), right.as_str()]),
                _ => None,
            },
            _ => None,
        };
        let parts = parts.ok_or_else(|| format!("`model.merges[{i}]` is not a pair of strings"))?;
        Ok(parts.map(|part| part.replace(' ', "Ġ")))
    };
    merges.iter().enumerate().map(one).collect()
}
