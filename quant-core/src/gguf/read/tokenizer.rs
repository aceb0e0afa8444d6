//! Converts the tokenizer of a file to the files of a model directory.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Map, Value as Json, json};

use super::About;
use super::special_tokens::{self, Templates, stated};
use crate::checkpoint::{Sidecar, printable};
use crate::gguf::file::{GgufFile, Value};
use crate::gguf::tokenizer::{Form, NFC, NO_VOCABULARY, NORMALIZER, SPACED, kinds, token_key};
use crate::{Error, Result};

/// The maximum length of a token for which merges are reconstructed, since all its splits are tried.
const MAX_TOKEN_BYTES: usize = 1024;
/// The maximum number of merges per token, on average. Published vocabularies have two or three.
const MERGES_PER_TOKEN: usize = 32;

pub(super) const NONE: &str = "the file has no tokenizer";

struct Vocabulary<'a> {
    tokens: &'a [String],
    types: Vec<i64>,
}

/// `tokenizer.json`, `tokenizer_config.json` and the chat templates, or the reason why the tokenizer cannot be
/// converted.
pub(super) fn files(about: &About<'_>) -> Result<Result<Vec<Sidecar>, String>> {
    let Some(model) = about.text("tokenizer.ggml.model")? else {
        return Ok(Err(NONE.into()));
    };
    if model == "none" {
        return Ok(Err(NONE.into()));
    }
    let vocabulary = vocabulary(about)?;
    let json = match model {
        "gpt2" => {
            let pre = about.text("tokenizer.ggml.pre")?.unwrap_or("default");
            match Form::named(pre) {
                Some(form) => byte_level(about, &vocabulary, form)?,
                None => return Ok(Err(format!("the pre-tokenizer `{}` is not supported", printable(pre)))),
            }
        }
        "llama" => sentencepiece(about, &vocabulary)?,
        SPACED => spaced(about, &vocabulary)?,
        other => return Ok(Err(format!("the tokenizer model `{}` is not supported", printable(other)))),
    };
    let templates = Templates::of(about)?;
    let settings = special_tokens::settings(about, vocabulary.tokens, &templates)?;
    let mut files = vec![
        file(about, "tokenizer.json", json.to_string()),
        file(about, "tokenizer_config.json", settings.to_string()),
    ];
    files.extend(templates.single().map(|template| file(about, "chat_template.jinja", template.into())));
    Ok(Ok(files))
}

/// A file of a model directory with these contents.
pub(super) fn file(about: &About<'_>, name: &str, text: String) -> Sidecar {
    let path = about.file.path();
    Sidecar { path: path.join(name), real: path.to_owned(), contents: Some(Arc::from(text.into_bytes())) }
}

fn broken(about: &About<'_>, key: &str, reason: &str) -> Error {
    GgufFile::broken(about.file.path(), format!("`{key}` {reason}"))
}

fn vocabulary<'a>(about: &About<'a>) -> Result<Vocabulary<'a>> {
    const TOKENS: &str = "tokenizer.ggml.tokens";
    const TYPES: &str = "tokenizer.ggml.token_type";
    let tokens = about.global(TOKENS).and_then(Value::as_strings);
    let tokens = tokens.ok_or_else(|| broken(about, TOKENS, "is missing or not a list of strings"))?;
    let types = match about.global(TYPES) {
        Some(types) => {
            types.as_integers().ok_or_else(|| broken(about, TYPES, "must be a list of integers"))?
        }
        None => vec![i64::from(kinds::NORMAL); tokens.len()],
    };
    match types.len() == tokens.len() {
        true => Ok(Vocabulary { tokens, types }),
        false => Err(broken(about, TYPES, "must have one entry per token")),
    }
}

fn added_token(id: usize, token: &str, special: bool) -> Json {
    json!({
        "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": special,
    })
}

impl Vocabulary<'_> {
    fn is(&self, id: usize, kind: i32) -> bool {
        self.types[id] == i64::from(kind)
    }

    fn parts(&self) -> (Map<String, Json>, Vec<Json>) {
        let (mut vocab, mut added) = (Map::new(), Vec::new());
        for (id, token) in self.tokens.iter().enumerate() {
            if self.is(id, kinds::UNUSED) {
                continue;
            }
            let special = self.is(id, kinds::CONTROL) || self.is(id, kinds::UNKNOWN);
            if special || self.is(id, kinds::USER_DEFINED) {
                added.push(added_token(id, token, special));
            }
            // The tokenizers crate keeps the IDs of added tokens only if the vocabulary contains them.
            vocab.insert(token.clone(), json!(id));
        }
        (vocab, added)
    }
}

fn ends(about: &About<'_>, vocabulary: &Vocabulary<'_>, bos_by_default: bool) -> Result<Json> {
    let token = |name: &str, by_default: bool| -> Result<Option<usize>> {
        let id = stated(about, name)?;
        let adds = about.flag(&format!("tokenizer.ggml.add_{name}_token"))?.unwrap_or(by_default);
        let Some(id) = id.filter(|_| adds) else { return Ok(None) };
        let known = usize::try_from(id).ok().filter(|id| *id < vocabulary.tokens.len());
        let key = token_key(name);
        let reason = format!("is {id}, but the vocabulary has {} tokens", vocabulary.tokens.len());
        known.map(Some).ok_or_else(|| broken(about, &key, &reason))
    };
    let (bos, eos) = (token("bos", bos_by_default)?, token("eos", false)?);
    let piece = |id: &usize| json!({ "SpecialToken": { "id": vocabulary.tokens[*id], "type_id": 0 } });
    let sequence = |name: &str| json!({ "Sequence": { "id": name, "type_id": 0 } });
    let around = |middle: Json| -> Vec<Json> {
        bos.iter().map(piece).chain([middle]).chain(eos.iter().map(piece)).collect()
    };
    let special: Map<String, Json> = [bos, eos]
        .into_iter()
        .flatten()
        .map(|id| {
            let token = &vocabulary.tokens[id];
            (token.clone(), json!({ "id": token, "ids": [id], "tokens": [token] }))
        })
        .collect();
    let pair: Vec<Json> = around(sequence("A")).into_iter().chain(around(sequence("B"))).collect();
    Ok(json!({
        "type": "TemplateProcessing", "single": around(sequence("A")), "pair": pair, "special_tokens": special,
    }))
}

fn pairs(about: &About<'_>) -> Result<Vec<Json>> {
    const MERGES: &str = "tokenizer.ggml.merges";
    let merges = about.global(MERGES).and_then(Value::as_strings);
    let merges = merges.ok_or_else(|| broken(about, MERGES, "is missing or not a list of strings"))?;
    let pair = |merge: &String| {
        // The first space after the first character separates the two parts.
        let from = merge.chars().next().map_or(0, char::len_utf8);
        let at = merge[from..].find(' ').map(|at| from + at);
        let at = at.ok_or_else(|| {
            broken(about, MERGES, "contains a merge that is not two tokens separated by a space")
        })?;
        Ok(json!([&merge[..at], &merge[at + 1..]]))
    };
    merges.iter().map(pair).collect()
}

fn byte_level(about: &About<'_>, vocabulary: &Vocabulary<'_>, form: &Form) -> Result<Json> {
    let (vocab, added) = vocabulary.parts();
    let composes = match about.text(NORMALIZER)? {
        None => form.composes,
        Some(NFC) => true,
        Some(NO_VOCABULARY) => false,
        Some(_) => return Err(broken(about, NORMALIZER, "is neither NFC nor none")),
    };
    let normalizer = composes.then(|| json!({ "type": NFC }));
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": form.json(), "post_processor": ends(about, vocabulary, form.adds_bos)?,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": form.whole,
            "vocab": vocab, "merges": pairs(about)?,
        },
    }))
}

/// A BPE with `▁` for spaces and byte fallback. Texts begin with BOS unless the file states otherwise.
fn spaced(about: &About<'_>, vocabulary: &Vocabulary<'_>) -> Result<Json> {
    let (vocab, mut added) = vocabulary.parts();
    // A run of newlines is encoded as one token if the vocabulary contains it, regardless of the merges.
    let is_newlines = |token: &str| !token.is_empty() && token.bytes().all(|byte| byte == b'\n');
    for (id, token) in vocabulary.tokens.iter().enumerate().filter(|(_, token)| is_newlines(token)) {
        added.extend(vocabulary.is(id, kinds::NORMAL).then(|| added_token(id, token, false)));
    }
    let unknown = stated(about, "unknown")?.and_then(|id| vocabulary.tokens.get(usize::try_from(id).ok()?));
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": { "type": "Replace", "pattern": { "String": " " }, "content": "▁" }, "pre_tokenizer": null,
        "post_processor": ends(about, vocabulary, true)?,
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
            { "type": "ByteFallback" }, { "type": "Fuse" },
        ] },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": pairs(about)?,
        },
    }))
}

fn sentencepiece(about: &About<'_>, vocabulary: &Vocabulary<'_>) -> Result<Json> {
    const SCORES: &str = "tokenizer.ggml.scores";
    let (vocab, added) = vocabulary.parts();
    let scores = about.global(SCORES).and_then(Value::as_f32s);
    let scores = scores.filter(|scores| scores.len() == vocabulary.tokens.len());
    let scores =
        scores.ok_or_else(|| broken(about, SCORES, "must be present and have one entry per token"))?;
    if let Some(id) = scores.iter().position(|score| !score.is_finite()) {
        return Err(broken(
            about,
            SCORES,
            &format!("is {} for token {id}; scores must be finite", scores[id]),
        ));
    }
    let adds_space = about.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    let prepend = json!({ "type": "Prepend", "prepend": "▁" });
    let normalizers: Vec<Json> = adds_space.then_some(prepend).into_iter().chain([replace]).collect();
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if adds_space {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    let unknown = (0..vocabulary.tokens.len()).find(|&id| vocabulary.is(id, kinds::UNKNOWN));
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": { "type": "Sequence", "normalizers": normalizers }, "pre_tokenizer": null,
        "post_processor": ends(about, vocabulary, true)?,
        "decoder": { "type": "Sequence", "decoders": decoders },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown.map(|id| &vocabulary.tokens[id]),
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
            "ignore_merges": false, "vocab": vocab, "merges": merges(about, vocabulary, scores)?,
        },
    }))
}

/// All pairs of tokens whose concatenation is a normal token, in descending order of its score.
fn merges(about: &About<'_>, vocabulary: &Vocabulary<'_>, scores: &[f32]) -> Result<Vec<Json>> {
    const TOKENS: &str = "tokenizer.ggml.tokens";
    let max = MERGES_PER_TOKEN.saturating_mul(vocabulary.tokens.len());
    let ids: HashMap<&str, usize> =
        vocabulary.tokens.iter().enumerate().map(|(id, t)| (t.as_str(), id)).collect();
    let mut merges: Vec<(f32, usize, usize, usize)> = Vec::new();
    for (id, token) in
        vocabulary.tokens.iter().enumerate().filter(|(id, _)| vocabulary.is(*id, kinds::NORMAL))
    {
        if token.len() > MAX_TOKEN_BYTES {
            let reason = format!("has {} bytes for token {id}; the limit is {MAX_TOKEN_BYTES}", token.len());
            return Err(GgufFile::unread(about.file.path(), format!("`{TOKENS}` {reason}")));
        }
        for (at, _) in token.char_indices().skip(1) {
            if let (Some(&left), Some(&right)) = (ids.get(&token[..at]), ids.get(&token[at..])) {
                merges.push((scores[id], id, left, right));
            }
        }
        if merges.len() > max {
            let reason = format!(
                "`{TOKENS}` has more than {max} pairs that merge into a token, which is not supported"
            );
            return Err(GgufFile::unread(about.file.path(), reason));
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| (a.1, a.2, a.3).cmp(&(b.1, b.2, b.3))));
    let text = |id: usize| vocabulary.tokens[id].as_str();
    Ok(merges.into_iter().map(|(_, _, left, right)| json!([text(left), text(right)])).collect())
}
