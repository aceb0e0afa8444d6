//! Checks the vocabulary of a `tokenizer.json` without loading it, so that a run that reads no text does not copy a
//! broken one.

use std::collections::HashSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// The largest known vocabularies have about a million tokens.
const MAX_TOKENS: usize = 1 << 22;

/// The part of the file that is checked. The rest is skipped, and takes no memory.
#[derive(Deserialize)]
struct File {
    model: Model,
}

#[derive(Deserialize)]
struct Model {
    vocab: Vocabulary,
}

/// The number of tokens.
struct Vocabulary(usize);

/// Returns the reason why the file is not a tokenizer, if the check finds one.
pub(super) fn fault(bytes: &[u8]) -> Option<String> {
    match serde_json::from_slice::<File>(bytes) {
        Ok(File { model: Model { vocab: Vocabulary(0) } }) => Some("has an empty vocabulary".into()),
        Ok(_) => None,
        Err(error) => Some(format!("is not a tokenizer: {error}")),
    }
}

impl<'de> Deserialize<'de> for Vocabulary {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Tokens)
    }
}

struct Tokens;

impl<'de> Visitor<'de> for Tokens {
    type Value = Vocabulary;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tokens with numbers, or a list of tokens")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocabulary, A::Error> {
        let mut numbers = HashSet::new();
        while let Some((IgnoredAny, number)) = map.next_entry::<IgnoredAny, u32>()? {
            if !numbers.insert(number) {
                return Err(de::Error::custom(format!("two tokens have the number {number}")));
            }
            if numbers.len() > MAX_TOKENS {
                return Err(de::Error::custom(format!("more than {MAX_TOKENS} tokens")));
            }
        }
        Ok(Vocabulary(numbers.len()))
    }

    /// The tokens of a unigram model are numbered by their position.
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vocabulary, A::Error> {
        let mut count = 0;
        while list.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok(Vocabulary(count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vocabularies_are_checked() {
        for text in [
            r#"{"model":{"type":"BPE","vocab":{"a":0,"b":1},"merges":[]},"added_tokens":[{"id":1}]}"#,
            r#"{"version":"1.0","model":{"vocab":[["a",-1.5],["b",-2]],"unk_id":0}}"#,
            r#"{"model":{"vocab":{"a":1000000}},"pre_tokenizer":null}"#,
        ] {
            assert_eq!(fault(text.as_bytes()), None, "{text}");
        }
        let deep = format!("{{\"x\":{}", "[".repeat(1 << 20));
        for (text, says) in [
            (r#"{"model":{"vocab":{"a":3,"b":3}}}"#, "two tokens have the number 3"),
            (r#"{"model":{"vocab":{}}}"#, "empty vocabulary"),
            (r#"{"model":{"vocab":[]}}"#, "empty vocabulary"),
            (r#"{"model":{"vocab":{"a":-1}}}"#, "is not a tokenizer"),
            (r#"{"model":{"vocab":{"a":4294967296}}}"#, "is not a tokenizer"),
            (r#"{"model":{"vocab":7}}"#, "tokens with numbers"),
            (r#"{"model":{}}"#, "missing field `vocab`"),
            ("{}", "missing field `model`"),
            ("[]", "is not a tokenizer"),
            ("", "is not a tokenizer"),
            ("<html>", "is not a tokenizer"),
            (&deep, "is not a tokenizer"),
        ] {
            let found = fault(text.as_bytes()).unwrap();
            assert!(found.contains(says), "{found}");
        }
    }
}
