//! SentencePiece BPE: pieces with scores. The merge whose result has the highest score comes first.
//!
//! `tokenizer.model` contains pieces and scores. Without it, the merges in `tokenizer.json` are ordered, and the score
//! of a piece is minus the rank of the first merge that produces it, so that scores give the same order as ranks.

use std::collections::HashMap;

use serde_json::Value as Json;

use super::added::added;
use super::bpe::merges;
use super::{MAX_FILE_BYTES, Vocabulary, kinds, protobuf};
use crate::checkpoint::ModelDirectory;
use crate::{Error, Result};

const MODEL: &str = "tokenizer.model";
/// The score of added tokens, and of tokens that no merge produces.
const ADDED_SCORE: f32 = -1000.0;
/// The score of IDs without a token.
const UNUSED_SCORE: f32 = -10_000.0;

pub(super) fn read(directory: &ModelDirectory, json: &Json, rows: usize) -> Result<Vocabulary> {
    let fault = super::unwritable;
    let mut vocabulary = Vocabulary::unused("llama", rows);
    vocabulary.scores = Some(vec![UNUSED_SCORE; rows]);
    let json_path = directory.path().join(super::JSON);
    match directory.sidecar(MODEL) {
        Some(sidecar) => {
            let broken = |reason| fault(&sidecar.path, reason);
            let bytes = sidecar.read(MAX_FILE_BYTES)?.map_err(broken)?;
            from_model(&bytes, &mut vocabulary).map_err(broken)?;
        }
        None => from_json(json, &mut vocabulary).map_err(|reason| fault(&json_path, reason))?,
    }
    let put_added = |vocabulary: &mut Vocabulary| -> Result<(), String> {
        for token in added(json)? {
            let place = token.id as usize;
            // In some files, the unknown token and byte tokens are added tokens, too. They keep their types.
            let keeps =
                vocabulary.types.get(place).is_some_and(|k| matches!(*k, kinds::UNKNOWN | kinds::BYTE));
            if keeps && vocabulary.tokens[place] == token.content {
                continue;
            }
            token.put(vocabulary)?;
            if let Some(scores) = &mut vocabulary.scores {
                scores[place] = ADDED_SCORE;
            }
        }
        Ok(())
    };
    put_added(&mut vocabulary).map_err(|reason| fault(&json_path, reason))?;
    // llama.cpp aborts if a text contains a byte without a token.
    let bytes = vocabulary.types.iter().filter(|kind| **kind == kinds::BYTE).count();
    if bytes != 256 {
        return Err(Error::InputFile {
            path: json_path,
            line: None,
            reason: format!(
                "has {bytes} byte tokens; llama.cpp needs 256, one per byte, for characters outside the vocabulary"
            ),
            remedy: "set ‹pre=none› to write a file without a tokenizer; programs that read it, including this one, \
                need token IDs as input then"
                .into(),
        });
    }
    Ok(vocabulary)
}

fn from_model(bytes: &[u8], vocabulary: &mut Vocabulary) -> Result<(), String> {
    let model = protobuf::read(bytes)?;
    if model.algorithm != 2 {
        return Err(format!(
            "uses SentencePiece algorithm {}; only BPE (2) can be written as GGUF",
            model.algorithm
        ));
    }
    vocabulary.adds_space = model.adds_space;
    for (id, piece) in model.pieces.iter().enumerate() {
        let kind = match piece.kind {
            2 => kinds::UNKNOWN,
            3 => kinds::CONTROL,
            4 => kinds::USER_DEFINED,
            5 => kinds::UNUSED,
            6 => kinds::BYTE,
            _ => kinds::NORMAL,
        };
        if !piece.score.is_finite() {
            return Err(format!("piece {id} has a score of {}; scores must be finite", piece.score));
        }
        vocabulary.set(id as u64, &piece.text, kind)?;
        if let Some(scores) = &mut vocabulary.scores {
            scores[id] = piece.score;
        }
    }
    Ok(())
}

fn from_json(json: &Json, vocabulary: &mut Vocabulary) -> Result<(), String> {
    let model = json.get("model").unwrap_or(&Json::Null);
    let vocab =
        model.get("vocab").and_then(Json::as_object).ok_or("`model.vocab` is missing or malformed")?;
    let unknown = model.get("unk_token").and_then(Json::as_str);
    let mut ranks: HashMap<String, usize> = HashMap::new();
    for (rank, [left, right]) in merges(json)?.into_iter().enumerate() {
        ranks.entry(format!("{left}{right}")).or_insert(rank);
    }
    for (text, id) in vocab {
        let id = id.as_u64().ok_or_else(|| format!("`model.vocab` has an invalid ID for `{text}`"))?;
        let kind = match () {
            () if unknown == Some(text) => kinds::UNKNOWN,
            () if is_byte(text) => kinds::BYTE,
            () => kinds::NORMAL,
        };
        vocabulary.set(id, text, kind)?;
        if let Some(scores) = &mut vocabulary.scores {
            // No merge produces a single character, so the score of such a piece is never used.
            scores[id as usize] = match kind {
                kinds::NORMAL => ranks.get(text).map_or(ADDED_SCORE, |rank| -(*rank as f32)),
                _ => 0.0,
            };
        }
    }
    vocabulary.adds_space = Some(adds_space(json));
    Ok(())
}

pub(super) fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|t| t.strip_suffix('>'));
    digits.is_some_and(|d| d.len() == 2 && u8::from_str_radix(d, 16).is_ok())
}

fn adds_space(json: &Json) -> bool {
    fn within(json: &Json) -> bool {
        let parts = ["normalizers", "pretokenizers"].into_iter().filter_map(|key| json.get(key)?.as_array());
        let kind = json.get("type").and_then(Json::as_str);
        let scheme = json.get("prepend_scheme").and_then(Json::as_str);
        let flag = json.get("add_prefix_space").and_then(Json::as_bool).unwrap_or(true);
        kind == Some("Prepend")
            || kind == Some("Metaspace") && scheme.map_or(flag, |scheme| scheme != "never")
            || parts.flatten().any(within)
    }
    ["normalizer", "pre_tokenizer"].into_iter().filter_map(|key| json.get(key)).any(within)
}
