//! Special tokens and chat templates.

use serde_json::Value as Json;

use super::Vocabulary;
use crate::calibrate::{TextTokenizer, TokenizerSettings};
use crate::checkpoint::{ModelDirectory, parse_strictly};
use crate::gguf::description;
use crate::gguf::file::{Array, Value};
use crate::{Error, Result};

/// Names of special tokens in tokenizer settings, and in keys of the file.
pub(in crate::gguf) const NAMES: [(&str, &str); 6] = [
    ("bos", "bos"),
    ("eos", "eos"),
    ("unk", "unknown"),
    ("sep", "seperator"),
    ("pad", "padding"),
    ("mask", "mask"),
];
/// Names in keys of special tokens that tokenizer settings do not have. They are copied from file to file.
pub(in crate::gguf) const FURTHER_NAMES: [&str; 12] = [
    "eot", "eom", "cls", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "prefix",
    "suffix", "middle",
];
/// The key of the chat template. Those of templates with names begin with it.
pub(in crate::gguf) const CHAT_TEMPLATE: &str = "tokenizer.chat_template";
const TEMPLATE: &str = "chat_template.jinja";
const TEMPLATE_JSON: &str = "chat_template.json";
const MAX_TEMPLATE_BYTES: u64 = 1 << 20;

/// The key of a special token's ID.
pub(in crate::gguf) fn token_key(name: &str) -> String {
    format!("tokenizer.ggml.{name}_token_id")
}

pub(super) struct Specials {
    pub(super) entries: Vec<(String, Value)>,
    /// A note for the user if llama.cpp adds fewer tokens to texts than the tokenizer.
    pub(super) note: Option<String>,
}

/// `roles` are those of a family ([`GgufFamily`](crate::gguf::families::GgufFamily)).
pub(super) fn read(
    directory: &ModelDirectory,
    json: &Json,
    tokenizer: &TextTokenizer,
    vocabulary: &Vocabulary,
    roles: &[(&'static str, &str)],
) -> Result<Specials> {
    let settings = TokenizerSettings::open(directory)?;
    let named = settings.special_tokens()?;
    let added = super::added::added(json).map_err(|reason| super::unwritable(tokenizer.path(), reason))?;
    let of_settings = |name: &str| {
        let (_, text) = named.iter().find(|(known, _)| known.strip_suffix("_token") == Some(name))?;
        let added = added.iter().find(|token| token.content == text).map(|token| token.id as u32);
        added.or_else(|| vocabulary.id(text))
    };
    // Some models have a list of EOS tokens, which is skipped.
    let of_config = |name: &str| {
        let id = directory.config().get(&format!("{name}_token_id")).and_then(Json::as_u64);
        id.filter(|id| *id < vocabulary.tokens.len() as u64).map(|id| id as u32)
    };
    let mut ids: Vec<(&str, u32)> = Vec::new();
    for (name, key) in NAMES {
        ids.extend(of_settings(name).or_else(|| of_config(name)).map(|id| (key, id)));
    }
    // The vocabulary is that of the file, too.
    let of_file = |name: &'static str| Some((name, description::token(directory.description(), name)?));
    let of_file = FURTHER_NAMES.into_iter().filter_map(of_file);
    ids.extend(of_file.filter(|(_, id)| (*id as usize) < vocabulary.tokens.len()));
    for (role, text) in roles {
        let id = added.iter().find(|token| token.content == *text).map(|token| token.id as u32);
        if let Some(id) = id.filter(|_| !ids.iter().any(|(known, _)| known == role)) {
            ids.push((*role, id));
        }
    }
    let ([first, last], note) = ends(tokenizer)?;
    let (adds_bos, adds_eos) = (first.is_some(), last.is_some());
    for (key, id) in [("bos", first), ("eos", last)] {
        let Some(id) = id else { continue };
        let tokens = vocabulary.tokens.len();
        if id as usize >= tokens {
            let reason = format!("adds the token {id} to texts, but the vocabulary has {tokens} tokens");
            return Err(super::unwritable(tokenizer.path(), reason));
        }
        match ids.iter_mut().find(|(known, _)| *known == key) {
            // The token that the tokenizer actually adds takes precedence.
            Some(known) => known.1 = id,
            None => ids.push((key, id)),
        }
    }
    let mut entries: Vec<(String, Value)> =
        ids.into_iter().map(|(key, id)| (token_key(key), Value::U32(id))).collect();
    for (key, adds) in [("bos", adds_bos), ("eos", adds_eos)] {
        entries.push((format!("tokenizer.ggml.add_{key}_token"), Value::Bool(adds)));
    }
    Ok(Specials { entries, note })
}

/// The first token that the tokenizer adds before every text, the last one that it adds after it, and a note if there
/// are more.
fn ends(tokenizer: &TextTokenizer) -> Result<([Option<u32>; 2], Option<String>)> {
    const TEXT: &str = "a";
    let with = tokenizer.encode(TEXT)?;
    let without: Vec<u32> = tokenizer.encode_rendered(TEXT)?.into_iter().map(|(id, _)| id).collect();
    let place = (0..=with.len().saturating_sub(without.len())).find(|&at| with[at..].starts_with(&without));
    let fault = |reason: &str| super::unwritable(tokenizer.path(), reason.into());
    let place = place.ok_or_else(|| fault("adds tokens within a text, which GGUF cannot express"))?;
    let (before, after) = (&with[..place], &with[place + without.len()..]);
    let note = (before.len() > 1 || after.len() > 1).then(|| {
        format!(
            "the tokenizer adds {} tokens before texts and {} after them; llama.cpp adds at most the first and the \
            last",
            before.len(),
            after.len()
        )
    });
    Ok(([before.first().copied(), after.last().copied()], note))
}

/// Reads the chat templates from the first file that has any.
pub(super) fn chat_templates(directory: &ModelDirectory) -> Result<Vec<(String, Value)>> {
    let text = |name: &str| -> Result<Option<String>> {
        let Some(sidecar) = directory.sidecar(name) else { return Ok(None) };
        let fault = |reason| Error::Tokenizer { path: sidecar.path.clone(), reason };
        let bytes = sidecar.read(MAX_TEMPLATE_BYTES)?.map_err(fault)?;
        String::from_utf8(bytes).map(Some).map_err(|_| fault("is not UTF-8".into()))
    };
    let settings = TokenizerSettings::open(directory)?;
    let (path, template) = match text(TEMPLATE)? {
        Some(template) => (directory.path().join(TEMPLATE), Json::String(template)),
        None => match settings.fields().get("chat_template").filter(|t| !t.is_null()) {
            Some(template) => (settings.path().to_owned(), template.clone()),
            None => {
                let Some(text) = text(TEMPLATE_JSON)? else { return Ok(Vec::new()) };
                let path = directory.path().join(TEMPLATE_JSON);
                let json = parse_strictly(text.as_bytes());
                let json = json.map_err(|reason| Error::Tokenizer { path: path.clone(), reason })?;
                (path, json.get("chat_template").cloned().unwrap_or_default())
            }
        },
    };
    let fault = || Error::Tokenizer {
        path: path.clone(),
        reason: "`chat_template` must be a string or a list of named templates".into(),
    };
    match &template {
        Json::Null => Ok(Vec::new()),
        Json::String(text) => Ok(vec![(CHAT_TEMPLATE.into(), Value::string(text))]),
        Json::Array(named) => {
            let (mut entries, mut names) = (Vec::new(), Vec::new());
            for one in named {
                let field = |key: &str| one.get(key).and_then(Json::as_str).ok_or_else(fault);
                match field("name")? {
                    "default" => entries.push((CHAT_TEMPLATE.to_owned(), Value::string(field("template")?))),
                    name => {
                        entries.push((format!("{CHAT_TEMPLATE}.{name}"), Value::string(field("template")?)));
                        names.push(name.to_owned());
                    }
                }
            }
            if !names.is_empty() {
                entries.push(("tokenizer.chat_templates".into(), Value::Array(Array::String(names))));
            }
            Ok(entries)
        }
        _ => Err(fault()),
    }
}
