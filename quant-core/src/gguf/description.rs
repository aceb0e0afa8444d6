//! Metadata that are copied when a file is made from another file: what people wrote about a model, such as its name,
//! license and recommended sampling, and special tokens that only GGUF files name.
//!
//! Keys that are unknown, describe the source file, or depend on its tensors (`general.uuid`, `general.quantized_by`) are
//! not copied, because they may be false for the new file.

use serde_json::{Map, Value as Json, json};

use super::file::{Array, GgufHeader, Value};
use super::general::NAME;
use super::tokenizer::{FURTHER_NAMES, token_key};

/// The type of the values of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Texts,
    /// A count of entries, which files store as U32.
    Count,
    /// An integer setting, which files store as I32.
    Integer,
    Float,
}

use Kind::{Count, Float, Integer, Text, Texts};

/// The keys that are copied, without the prefix `general.`. `#` stands for the number of an entry.
const KEYS: [(&str, Kind); 52] = [
    ("name", Text),
    ("author", Text),
    ("version", Text),
    ("organization", Text),
    ("finetune", Text),
    ("basename", Text),
    ("description", Text),
    ("license", Text),
    ("license.name", Text),
    ("license.link", Text),
    ("url", Text),
    ("doi", Text),
    ("repo_url", Text),
    ("source.url", Text),
    ("source.doi", Text),
    ("source.uuid", Text),
    ("source.repo_url", Text),
    ("source.huggingface.repository", Text),
    ("base_model.count", Count),
    ("base_model.#.name", Text),
    ("base_model.#.author", Text),
    ("base_model.#.version", Text),
    ("base_model.#.organization", Text),
    ("base_model.#.description", Text),
    ("base_model.#.url", Text),
    ("base_model.#.doi", Text),
    ("base_model.#.uuid", Text),
    ("base_model.#.repo_url", Text),
    ("dataset.count", Count),
    ("dataset.#.name", Text),
    ("dataset.#.author", Text),
    ("dataset.#.version", Text),
    ("dataset.#.organization", Text),
    ("dataset.#.description", Text),
    ("dataset.#.url", Text),
    ("dataset.#.doi", Text),
    ("dataset.#.uuid", Text),
    ("dataset.#.repo_url", Text),
    ("tags", Texts),
    ("languages", Texts),
    ("sampling.sequence", Text),
    ("sampling.top_k", Integer),
    ("sampling.top_p", Float),
    ("sampling.min_p", Float),
    ("sampling.xtc_probability", Float),
    ("sampling.xtc_threshold", Float),
    ("sampling.temp", Float),
    ("sampling.penalty_last_n", Integer),
    ("sampling.penalty_repeat", Float),
    ("sampling.mirostat", Integer),
    ("sampling.mirostat_tau", Float),
    ("sampling.mirostat_eta", Float),
];

fn kind(key: &str) -> Option<Kind> {
    let key = key.strip_prefix("general.")?;
    let is_number = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let numberless: Vec<&str> =
        key.split('.').map(|part| if is_number(&part) { "#" } else { part }).collect();
    let key = numberless.join(".");
    KEYS.iter().find(|(known, _)| *known == key).map(|(_, kind)| *kind)
}

/// The description in a file, by key. Values of an unexpected type are left out: no program reads them.
pub(super) fn of(header: &GgufHeader) -> Map<String, Json> {
    let value = |key: &str, value: &Value| match (kind(key)?, value) {
        (Text, Value::String(text)) => Some(json!(text)),
        (Texts, Value::Array(Array::String(texts))) => Some(json!(texts)),
        (Count, Value::U32(n)) => Some(json!(n)),
        (Integer, Value::I32(n)) => Some(json!(n)),
        (Float, Value::F32(x)) if x.is_finite() => Some(json!(x)),
        _ => None,
    };
    let entries = header.metadata.iter();
    let described = entries.filter_map(|(key, found)| Some((key.clone(), value(key, found)?)));
    let token = |name: &str| {
        let key = token_key(name);
        let id = header.get(&key)?.as_u64()?;
        Some((key, json!(id)))
    };
    described.chain(FURTHER_NAMES.into_iter().filter_map(token)).collect()
}

/// The ID of a special token in a description.
pub(super) fn token(description: &Map<String, Json>, name: &str) -> Option<u32> {
    description.get(&token_key(name))?.as_u64()?.try_into().ok()
}

/// The entries of a file with this description, except the name and the special tokens, which are written with the
/// vocabulary.
pub(super) fn entries(description: &Map<String, Json>) -> Vec<(String, Value)> {
    let value = |key: &str, value: &Json| match kind(key)? {
        Text => Some(Value::string(value.as_str()?)),
        Texts => {
            let texts = value.as_array()?.iter().map(|text| text.as_str().map(str::to_owned));
            Some(Value::Array(Array::String(texts.collect::<Option<_>>()?)))
        }
        Count => Some(Value::U32(value.as_u64()?.try_into().ok()?)),
        Integer => Some(Value::I32(value.as_i64()?.try_into().ok()?)),
        Float => Some(Value::F32(value.as_f64()? as f32)),
    };
    let described = description.iter().filter(|(key, _)| *key != NAME);
    described.filter_map(|(key, stated)| Some((key.clone(), value(key, stated)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::file::write_file;

    fn text(text: &str) -> Value {
        Value::string(text)
    }

    #[test]
    fn descriptions_are_copied_and_properties_of_the_file_are_not() {
        let texts = |texts: &[&str]| Value::Array(Array::String(texts.iter().map(|t| (*t).into()).collect()));
        let copied = [
            ("general.author", text("A. Writer")),
            ("general.license", text("other")),
            ("general.license.link", text("https://example.org/\u{1b}[31m")),
            ("general.base_model.count", Value::U32(11)),
            ("general.base_model.10.repo_url", text("https://example.org")),
            ("general.dataset.0.name", text("")),
            ("general.tags", texts(&["a", "b"])),
            ("general.languages", texts(&[])),
            ("general.sampling.sequence", text("top_k;temp")),
            ("general.sampling.top_k", Value::I32(-1)),
            ("general.sampling.temp", Value::F32(0.6)),
            ("general.sampling.min_p", Value::F32(f32::MIN_POSITIVE / 4.0)),
        ];
        let left_out = [
            ("general.architecture", text("llama")),
            ("general.type", text("model")),
            ("general.size_label", text("7B")),
            ("general.file_type", Value::U32(7)),
            ("general.quantized_by", text("B. Rounder")),
            ("general.uuid", text("1-2")),
            ("general.unknown", text("x")),
            ("general.base_model..name", text("x")),
            ("general.base_model.one.name", text("x")),
            ("general.base_model.1.size_label", text("x")),
            ("general.version", Value::U32(2)),
            ("general.sampling.top_p", Value::F32(f32::NAN)),
            ("general.sampling.mirostat", Value::U32(1)),
            ("general.dataset.count", Value::I32(1)),
            ("sampling.top_k", Value::I32(1)),
        ];
        let name = ("general.name", text("The model"));
        let all = left_out.iter().chain(&copied).chain([&name]);
        let metadata: Vec<(String, Value)> = all.map(|(key, v)| ((*key).to_owned(), v.clone())).collect();
        let bytes = write_file(&metadata, &[]).unwrap();
        let header = GgufHeader::parse(&bytes[..], bytes.len() as u64).unwrap();
        let description = of(&header);
        assert_eq!(description["general.name"], "The model");
        assert_eq!(description.len(), copied.len() + 1);
        let expected: Vec<_> = copied.iter().map(|(key, v)| ((*key).to_owned(), v.clone())).collect();
        assert_eq!(entries(&description), expected);
    }
}
