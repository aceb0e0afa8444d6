//! Special tokens and chat templates of a file, as fields of the JSON files of a model directory.

use serde_json::{Map, Value as Json, json};

use super::About;
use super::config::shortest;
use crate::Result;
use crate::checkpoint::printable;
use crate::gguf::file::{GgufFile, Value};
use crate::gguf::tokenizer::{CHAT_TEMPLATE, NAMES, kinds, token_key};

/// Texts of tokens that end a turn of a conversation. As in llama.cpp, such a token ends a text even if the file does not
/// name it as one that does.
const ENDS_OF_TURNS: [&str; 5] = ["<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<|end|>"];
const END_OF_MESSAGE: &str = "<|eom_id|>";
/// In vocabularies with this token, it ends a turn, and `<|end|>` only a part of one.
const RETURN: &str = "<|return|>";

/// Whether a value is within the range of a setting.
type InRange = fn(f64) -> bool;

/// The settings of `generation_config.json` that files recommend: the field, the key, and the values that are copied.
const SAMPLING: [(&str, &str, InRange); 5] = [
    ("temperature", "temp", |v| v > 0.0),
    ("top_k", "top_k", |v| v >= 0.0),
    ("top_p", "top_p", |v| v > 0.0 && v <= 1.0),
    ("min_p", "min_p", |v| (0.0..=1.0).contains(&v)),
    ("repetition_penalty", "penalty_repeat", |v| v > 0.0),
];

/// The ID of a special token as stored in the file, which may be negative or outside the vocabulary.
pub(super) fn stated(about: &About<'_>, name: &str) -> Result<Option<i128>> {
    about.typed(&token_key(name), "an integer", |value| match *value {
        Value::I32(v) if v < 0 => Some(v.into()),
        Value::I64(v) if v < 0 => Some(v.into()),
        ref other => other.as_u64().map(i128::from),
    })
}

/// The ID of a special token, if it is one of the first `tokens`.
fn known(about: &About<'_>, name: &str, tokens: usize) -> Result<Option<usize>> {
    let id = stated(about, name)?.and_then(|id| usize::try_from(id).ok());
    Ok(id.filter(|id| *id < tokens))
}

/// The fields of special tokens in `config.json` and `generation_config.json`, for a model with this number of tokens.
pub(super) fn fields(about: &About<'_>, tokens: usize) -> Result<Map<String, Json>> {
    let mut fields = Map::new();
    let mut set = |field: &str, value: Json| fields.insert(format!("{field}_token_id"), value);
    if let Some(id) = known(about, "bos", tokens)? {
        set("bos", json!(id));
    }
    let mut ends: Vec<usize> = Vec::new();
    for (name, texts) in [("eos", &[][..]), ("eot", &ENDS_OF_TURNS[..]), ("eom", &[END_OF_MESSAGE][..])] {
        let id = known(about, name, tokens)?.or_else(|| control_token(about, texts, tokens));
        ends.extend(id.filter(|id| !ends.contains(id)));
    }
    match ends[..] {
        [] => {}
        [only] => drop(set("eos", json!(only))),
        _ => drop(set("eos", json!(ends))),
    }
    if let Some(id) = known(about, "padding", tokens)? {
        set("pad", json!(id));
    }
    Ok(fields)
}

/// The control token with the first of these texts that is in the vocabulary.
fn control_token(about: &About<'_>, texts: &[&str], tokens: usize) -> Option<usize> {
    if texts.is_empty() {
        return None;
    }
    let all = about.global("tokenizer.ggml.tokens").and_then(Value::as_strings)?;
    let types = about.global("tokenizer.ggml.token_type").and_then(Value::as_integers)?;
    let control = i64::from(kinds::CONTROL);
    let all = all.iter().zip(types).take(tokens).map(|(text, kind)| (text.as_str(), kind));
    let control: Vec<(usize, &str)> = (all.enumerate())
        .filter(|(_, (_, kind))| *kind == control)
        .map(|(id, (text, _))| (id, text))
        .collect();
    let find = |sought: &str| control.iter().find(|(_, text)| *text == sought).map(|(id, _)| *id);
    let texts = texts.iter().filter(|text| **text != "<|end|>" || find(RETURN).is_none());
    texts.into_iter().find_map(|text| find(text))
}

/// `generation_config.json` with these special tokens and the recommended sampling; `None` if there are neither.
pub(super) fn generation(about: &About<'_>, tokens: &Map<String, Json>) -> Option<Json> {
    let mut fields = tokens.clone();
    for (field, key, in_range) in SAMPLING {
        let (value, number) = match about.global(&format!("general.sampling.{key}")) {
            Some(Value::I32(n)) => (json!(n), f64::from(*n)),
            Some(Value::F32(x)) if x.is_finite() => (json!(shortest((*x).into())), f64::from(*x)),
            _ => continue,
        };
        if field == "temperature" {
            fields.insert("do_sample".into(), json!(number > 0.0));
        }
        if in_range(number) {
            fields.insert(field.into(), value);
        }
    }
    (!fields.is_empty()).then_some(Json::Object(fields))
}

/// The fields of `tokenizer_config.json`: the texts of special tokens and, if the file has templates with names, all chat
/// templates. Otherwise the template has a file of its own.
pub(super) fn settings(about: &About<'_>, tokens: &[String], templates: &Templates<'_>) -> Result<Json> {
    let mut settings = Map::new();
    for (name, key) in NAMES {
        if let Some(id) = known(about, key, tokens.len())? {
            settings.insert(format!("{name}_token"), json!(tokens[id]));
        }
    }
    if !templates.named.is_empty() {
        let default = templates.default.iter().map(|template| ("default", *template));
        let all = default.chain(templates.named.iter().copied());
        let all = all.map(|(name, template)| json!({ "name": name, "template": template }));
        settings.insert("chat_template".into(), json!(all.collect::<Vec<_>>()));
    }
    Ok(Json::Object(settings))
}

/// The chat templates of a file.
pub(super) struct Templates<'a> {
    pub(super) default: Option<&'a str>,
    named: Vec<(&'a str, &'a str)>,
}

impl<'a> Templates<'a> {
    pub(super) fn of(about: &About<'a>) -> Result<Self> {
        let mut named = Vec::new();
        for (key, value) in &about.file.header().metadata {
            let name = key.strip_prefix(CHAT_TEMPLATE).and_then(|rest| rest.strip_prefix('.'));
            let Some(name) = name.filter(|name| *name != "default") else { continue };
            let fault = || {
                let key = printable(key);
                GgufFile::broken(about.file.path(), format!("`{key}` must be a string"))
            };
            named.push((name, value.as_str().ok_or_else(fault)?));
        }
        Ok(Self { default: about.text(CHAT_TEMPLATE)?, named })
    }

    /// The template that has a file of its own.
    pub(super) fn single(&self) -> Option<&'a str> {
        self.default.filter(|_| self.named.is_empty())
    }
}
