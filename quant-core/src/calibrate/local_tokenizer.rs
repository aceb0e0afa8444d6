//! A tokenizer that runs in this process.

use std::borrow::Cow;
use std::path::PathBuf;

use tokenizers::{ModelWrapper, Tokenizer};

use super::in_process::in_order;
use super::tokenizer::guard_panics;
use crate::worker::{Answer, Content, Encoded, Fault, Loadable, Question, TextWorker};
use crate::{Error, Result};

pub(super) fn load(path: PathBuf, json: &[u8]) -> Result<Box<dyn TextWorker>> {
    let held = LoadedFile { loadable: Loadable { path, content: Content::Tokenizer(Vec::new()) } };
    let tokenizer = parse(json).map_err(|reason| held.fault(reason))?;
    Ok(Box::new(LocalTokenizer { held, tokenizer }))
}

/// Disables truncation and padding, because evaluation must see the whole text, and BPE dropout, which is meant for
/// training and would make tokens random.
fn parse(json: &[u8]) -> Result<Tokenizer, String> {
    let parsed = guard_panics(|| Tokenizer::from_bytes(json)).ok_or(PANICS)?;
    let mut tokenizer = parsed.map_err(|e| format!("is not a tokenizer: {e}"))?;
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None).map_err(|e| e.to_string())?;
    if let ModelWrapper::BPE(bpe) = tokenizer.get_model()
        && bpe.dropout.is_some()
    {
        let mut bpe = bpe.clone();
        bpe.dropout = None;
        tokenizer.with_model(ModelWrapper::BPE(bpe));
    }
    Ok(tokenizer)
}

/// A crafted vocabulary can make the tokenizers crate panic. This must not end the process.
const PANICS: &str = "makes the tokenizer library panic";

#[derive(Debug)]
struct LoadedFile {
    loadable: Loadable,
}

impl LoadedFile {
    fn fault(&self, reason: String) -> Error {
        self.loadable.error(Fault { reason, ..Fault::default() })
    }
}

#[derive(Debug)]
struct LocalTokenizer {
    held: LoadedFile,
    tokenizer: Tokenizer,
}

impl LocalTokenizer {
    fn guarded<T>(&self, work: impl FnOnce() -> tokenizers::Result<T>, on: &str) -> Result<T> {
        let done = guard_panics(work).ok_or_else(|| self.held.fault(PANICS.into()))?;
        done.map_err(|e| self.held.fault(format!("fails on {on}: {e}")))
    }

    fn encode(&self, text: &str, special: bool, places: bool) -> Result<Encoded> {
        let encoding = self.guarded(
            || match places {
                true => self.tokenizer.encode(text, special),
                false => self.tokenizer.encode_fast(text, special),
            },
            "the text",
        )?;
        let place = |&(from, to): &(usize, usize)| Some([u32::try_from(from).ok()?, u32::try_from(to).ok()?]);
        let placed = match places {
            true => encoding.get_offsets().iter().map(place).collect(),
            false => Some(Vec::new()),
        };
        let places =
            placed.ok_or_else(|| self.held.fault("does not support texts of more than 4 GiB".into()))?;
        Ok(Encoded { ids: encoding.get_ids().to_vec(), places })
    }
}

impl TextWorker for LocalTokenizer {
    fn ask(&self, question: &Question<'_>) -> Result<Answer> {
        match question {
            Question::Encode { texts, special, places } => {
                let each = |text: &&str| self.encode(text, *special, *places);
                Ok(Answer::Encoded(in_order(texts, each)?))
            }
            Question::Decode { tokens } => {
                let each =
                    |tokens: &Cow<'_, [u32]>| self.guarded(|| self.tokenizer.decode(tokens, true), "tokens");
                Ok(Answer::Decoded(tokens.iter().map(each).collect::<Result<_>>()?))
            }
            Question::LargestToken => {
                Ok(Answer::LargestToken(self.tokenizer.get_vocab(true).into_values().max()))
            }
            Question::TokenId(token) => Ok(Answer::TokenId(self.tokenizer.token_to_id(token))),
            Question::Render { .. } => Err(Error::Internal("a tokenizer was asked to render".into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::TextTokenizer;
    use std::path::Path;

    #[test]
    fn merges_are_not_dropped() {
        let json = serde_json::json!({
            "version": "1.0",
            "added_tokens": [],
            "model": {
                "type": "BPE", "dropout": 0.9, "vocab": { "a": 0, "b": 1, "ab": 2 }, "merges": [["a", "b"]],
                "unk_token": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            },
        });
        let tokenizer =
            TextTokenizer::from_bytes(Path::new("tokenizer.json"), json.to_string().as_bytes()).unwrap();
        assert_eq!(tokenizer.encode(&"ab".repeat(100)).unwrap(), [2; 100]);
    }
}
