//! Decodes tokens to text incrementally: a character may span several tokens, and a stop string may begin in one token
//! and end in another.

use crate::Result;
use crate::calibrate::TextTokenizer;

/// Tokenizers decode bytes of an incomplete or invalid character to this.
const REPLACEMENT: char = '\u{fffd}';
/// Prompt tokens kept as context for decoding the first new token.
const CONTEXT: usize = 8;

/// The text of tokens that are generated one at a time.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a TextTokenizer,
    stop: &'a [String],
    /// The most recent tokens. The text of the first `decoded` tokens is already emitted; they are kept because some
    /// tokenizers decode a token depending on its predecessors.
    tokens: Vec<u32>,
    decoded: usize,
    /// Text that may be the beginning of a stop string.
    held: String,
    stopped: bool,
}

impl<'a> TextStream<'a> {
    /// Creates a stream for the text after `prompt`, which ends before the first of the `stop` strings; empty ones are
    /// ignored.
    pub fn new(tokenizer: &'a TextTokenizer, prompt: &[u32], stop: &'a [String]) -> Self {
        let tokens = prompt[prompt.len().saturating_sub(CONTEXT)..].to_vec();
        Self { tokenizer, stop, decoded: tokens.len(), tokens, held: String::new(), stopped: false }
    }

    /// Returns whether a stop string has occurred. If so, no more text follows.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Adds a token. Returns the text that can be emitted now, which may be empty; later tokens do not change it.
    ///
    /// # Errors
    /// When the tokenizer cannot decode the token.
    pub fn push(&mut self, token: u32) -> Result<String> {
        self.tokens.push(token);
        let new = self.new_text()?;
        if new.ends_with(REPLACEMENT) {
            return Ok(String::new());
        }
        self.tokens.drain(..self.decoded);
        self.decoded = self.tokens.len();
        self.held.push_str(&new);
        Ok(self.certain())
    }

    /// Returns the text that is still held back, after the last token.
    ///
    /// # Errors
    /// When the tokenizer cannot decode the last tokens.
    pub fn finish(mut self) -> Result<String> {
        let new = self.new_text()?;
        self.held.push_str(&new);
        let certain = self.certain();
        Ok(if self.stopped { certain } else { certain + &self.held })
    }

    /// The text of the tokens after the first `decoded`.
    fn new_text(&self) -> Result<String> {
        let [before, all] = self.tokenizer.decode_each([&self.tokens[..self.decoded], &self.tokens])?;
        // Some tokenizers change the end of the preceding text, such as a space before a comma.
        Ok(match all.strip_prefix(before.as_str()) {
            Some(new) => new.to_owned(),
            None => self.tokenizer.decode(&self.tokens[self.decoded..])?,
        })
    }

    /// Removes text from `held` and returns it: the text before a stop string, or, if there is none, all text except
    /// the possible beginning of one.
    fn certain(&mut self) -> String {
        if self.stopped {
            self.held.clear();
            return String::new();
        }
        let stop = || self.stop.iter().filter(|stop| !stop.is_empty());
        if let Some(at) = stop().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.stopped = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let begins = |at: &usize| stop().any(|stop| stop.starts_with(&self.held[*at..]));
        let at = self.held.char_indices().map(|(at, _)| at).find(begins).unwrap_or(self.held.len());
        let rest = self.held.split_off(at);
        std::mem::replace(&mut self.held, rest)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    /// One token per byte, in the alphabet of byte-level BPE.
    fn bytes() -> TextTokenizer {
        let printable = |b: u8| (33..=126).contains(&b) || (161..=172).contains(&b) || b >= 174;
        let mut beyond = 256_u32..;
        let mut vocab = serde_json::Map::new();
        for byte in 0..=255_u8 {
            let code = if printable(byte) { u32::from(byte) } else { beyond.next().unwrap() };
            vocab.insert(char::from_u32(code).unwrap().to_string(), byte.into());
        }
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
            "post_processor": null,
            "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
            "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": vocab, "merges": [] },
        });
        TextTokenizer::from_bytes(Path::new("tokenizer.json"), file.to_string().as_bytes()).unwrap()
    }

    /// The pieces emitted as the bytes of `text` are pushed, and whether a stop string occurred.
    fn pieces(text: &[u8], stop: &[&str]) -> (Vec<String>, bool) {
        let tokenizer = bytes();
        let stop: Vec<String> = stop.iter().map(|stop| (*stop).to_owned()).collect();
        let mut stream = TextStream::new(&tokenizer, &[u32::from(b'>')], &stop);
        let mut pieces = Vec::new();
        for byte in text {
            pieces.push(stream.push(u32::from(*byte)).unwrap());
            if stream.is_stopped() {
                break;
            }
        }
        let stopped = stream.is_stopped();
        pieces.push(stream.finish().unwrap());
        pieces.retain(|piece| !piece.is_empty());
        (pieces, stopped)
    }

    #[test]
    fn characters_come_whole() {
        assert_eq!(
            pieces("aé😀b".as_bytes(), &[]),
            (["a", "é", "😀", "b"].map(String::from).to_vec(), false)
        );
        // Bytes that never become a character are emitted with the text that follows, or at the end.
        assert_eq!(pieces(b"a\xffb", &[]).0, ["a", "\u{fffd}b"]);
        assert_eq!(pieces(b"a\xf0\x9f", &[]).0.concat(), "a\u{fffd}");
        assert_eq!(pieces(b"", &[]).0, [""; 0]);
    }

    #[test]
    fn stop_strings_are_never_shown() {
        assert_eq!(
            pieces(b"yes\nUser: no", &["\nUser:"]),
            (["y", "e", "s"].map(String::from).to_vec(), true)
        );
        assert_eq!(pieces(b"a\nUse it", &["\nUser:"]).0.concat(), "a\nUse it");
        assert_eq!(
            pieces(b"a\nUse", &["\nUser:"]).0.concat(),
            "a\nUse",
            "a partial stop string does not stop"
        );
        // Among several stop strings the first occurrence wins, also if it begins within a partial match.
        assert_eq!(pieces(b"abcd", &["cd", "bc", ""]), (vec!["a".into()], true));
        assert_eq!(pieces(b"xaaab", &["aab"]), (vec!["x".into(), "a".into()], true));
        assert_eq!(pieces("né".as_bytes(), &["é"]), (vec!["n".into()], true));
    }
}
