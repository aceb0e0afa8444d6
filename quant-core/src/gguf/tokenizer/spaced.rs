//! BPE with `▁` for spaces and byte fallback, stored with its merges: the tokenizers of Gemma 4. For other families,
//! such tokenizers are stored with scores, as SentencePiece.

use serde_json::Value as Json;

use super::added::added;
use super::bpe::merges;
use super::sentencepiece::is_byte;
use super::{Vocabulary, kinds};

/// The value of `tokenizer.ggml.model`.
pub(in crate::gguf) const MODEL: &str = "gemma4";
/// llama.cpp does not use the scores of these files; its converter gives all tokens the same.
const SCORE: f32 = -1000.0;
/// Special tokens that are shown, because llama.cpp's parser of chats needs to see them.
const VISIBLE: [&str; 7] = [
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|\"|>",
];

pub(super) fn read(json: &Json, rows: usize) -> Result<Vocabulary, String> {
    let mut vocabulary = Vocabulary::unused(MODEL, rows);
    let known = json.get("model").and_then(|model| model.get("vocab")).and_then(Json::as_object);
    let known = known.ok_or("`model.vocab` is missing or malformed")?;
    for (text, id) in known {
        let id = id.as_u64().ok_or_else(|| format!("`model.vocab` has an invalid ID for `{text}`"))?;
        let kind = if is_byte(text) { kinds::BYTE } else { kinds::NORMAL };
        vocabulary.set(id, text, kind)?;
    }
    for token in added(json)? {
        let kind = match token.content {
            text if VISIBLE.contains(&text) => kinds::USER_DEFINED,
            _ if token.special => kinds::CONTROL,
            // Some added tokens, such as runs of newlines, are in the vocabulary, too.
            text if known.contains_key(text) => continue,
            _ => kinds::USER_DEFINED,
        };
        vocabulary.set(token.id, token.content, kind)?;
    }
    vocabulary.scores = Some(vec![SCORE; rows]);
    vocabulary.merges = Some(merges(json)?.iter().map(|[left, right]| format!("{left} {right}")).collect());
    vocabulary.adds_space = Some(false);
    Ok(vocabulary)
}
