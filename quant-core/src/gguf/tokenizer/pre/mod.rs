//! Finds which of llama.cpp's pre-tokenizers a byte-level BPE uses.
//!
//! llama.cpp has built-in pre-tokenizers, identified by name. Its converter finds the name by the hash of the tokens of
//! one text, which recognizes published vocabularies. For others, the steps in `tokenizer.json` are compared with those
//! of known names.

mod forms;
mod hashes;
mod names;

use std::path::Path;

use serde_json::Value as Json;

pub(in crate::gguf) use forms::Form;

use super::NO_VOCABULARY;
use crate::digest::sha256_hex;
use crate::names::unknown;
use crate::{Error, Result};

/// The text whose tokens are hashed.
pub(super) const PROBE: &str = "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u{200d}🌫\u{fe0f} (multiple emojis concatenated) ✅ 🦙🦙 3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ ------======= нещо на Български ''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL";

pub(super) fn has_byte_level(json: &Json) -> bool {
    let parts = ["pretokenizers", "decoders"].into_iter().filter_map(|key| json.get(key)?.as_array());
    json.get("type").and_then(Json::as_str) == Some("ByteLevel") || parts.flatten().any(has_byte_level)
}

/// Whether texts are normalized to NFC before the pre-tokenizer; `None` if they are changed in other ways.
pub(super) fn composes(json: &Json) -> Option<bool> {
    let normalizer = json.get("normalizer").unwrap_or(&Json::Null);
    match normalizer.get("type").and_then(Json::as_str) {
        None => Some(false),
        Some("NFC") => Some(true),
        Some("Sequence") => match normalizer.get("normalizers")?.as_array()?.as_slice() {
            [] => Some(false),
            [only] if only.get("type").and_then(Json::as_str) == Some("NFC") => Some(true),
            _ => None,
        },
        Some(_) => None,
    }
}

/// The name and how it was found: by the hash of the tokens of [`PROBE`], or by the steps. If both are known and
/// contradict each other, the steps are right: several models may share a vocabulary.
pub(super) fn find(json: &Json, probe: &[u32]) -> Option<(String, String)> {
    let ids: Vec<String> = probe.iter().map(u32::to_string).collect();
    let hash = sha256_hex(format!("[{}]", ids.join(", ")));
    let whole = keeps_whole_words(json);
    let steps = json.get("pre_tokenizer").and_then(forms::steps);
    let by_steps = steps.as_ref().and_then(|steps| Form::name(steps, whole));
    if let Some((name, _)) = hashes::HASHES.iter().find(|(_, known)| *known == hash) {
        let contradicts = Form::named(name).is_some_and(|form| Some(form.steps) != steps.as_deref());
        if by_steps.is_none() || !contradicts {
            return Some(((*name).to_owned(), "recognized by its vocabulary".into()));
        }
    }
    let name = by_steps.filter(|_| composes(json).is_some())?;
    Some((name.to_owned(), "recognized by its pre-tokenization steps".into()))
}

/// The pre-tokenizer that has the steps of a `tokenizer.json`, if those of `name` are known and split texts differently.
pub(super) fn contradicted(json: &Json, name: &str) -> Option<&'static str> {
    let (steps, whole) = (json.get("pre_tokenizer").and_then(forms::steps)?, keeps_whole_words(json));
    let named = Form::named(name)?;
    let own = Form::name(&steps, whole)?;
    (named.steps != steps || named.whole != whole).then_some(own)
}

fn keeps_whole_words(json: &Json) -> bool {
    json.get("model").and_then(|m| m.get("ignore_merges")).and_then(Json::as_bool) == Some(true)
}

/// Checks that a pre-tokenizer that the user names is one that llama.cpp accepts, or [`NO_VOCABULARY`].
///
/// # Errors
/// [`Error::Usage`] that lists the names.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let known = [names::KNOWN, &[NO_VOCABULARY]].concat();
    match known.contains(&name) {
        true => Ok(()),
        false => Err(unknown("pre-tokenizer", name, "names in llama.cpp", &known)),
    }
}

pub(super) fn unrecognized(path: &Path) -> Error {
    Error::InputFile {
        path: path.to_owned(),
        line: None,
        reason: "has a pre-tokenizer that is not recognized".into(),
        remedy: "set ‹pre=NAME› to llama.cpp's name of the equivalent pre-tokenizer, or ‹pre=none› to write \
            a file without a vocabulary"
            .into(),
    }
}

#[cfg(test)]
mod tests;
