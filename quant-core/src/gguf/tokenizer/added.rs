//! Added tokens, which are not part of the trained vocabulary.

use serde_json::Value as Json;

use super::{Vocabulary, kinds, list};

pub(super) struct Added<'a> {
    pub(super) id: u64,
    pub(super) content: &'a str,
    pub(super) special: bool,
}

pub(super) fn added(json: &Json) -> Result<Vec<Added<'_>>, String> {
    let tokens = list(json, "added_tokens")?.iter().enumerate();
    let read = tokens.map(|(i, token)| {
        let fault = |field: &str| format!("`added_tokens[{i}].{field}` is missing or malformed");
        let id = token.get("id").and_then(Json::as_u64).ok_or_else(|| fault("id"))?;
        let content = token.get("content").and_then(Json::as_str).ok_or_else(|| fault("content"))?;
        let special = token.get("special").and_then(Json::as_bool).unwrap_or(false);
        Ok(Added { id, content, special })
    });
    read.collect()
}

impl Added<'_> {
    /// Whether it is a control token. Some models do not mark theirs as special.
    fn controls(&self) -> bool {
        let t = self.content;
        let between = |begin: &str, end: &str| t.starts_with(begin) && t.ends_with(end);
        self.special
            || matches!(t, "<pad>" | "<mask>" | "<2mass>" | "[@BOS@]")
            || between("<|", "|>")
            || between("<｜", "｜>")
            || between("<unused", ">")
    }

    /// Adds the token to a vocabulary. In user-defined tokens, `▁` becomes a space.
    pub(super) fn put(&self, vocabulary: &mut Vocabulary) -> Result<(), String> {
        match self.controls() {
            true => vocabulary.set(self.id, self.content, kinds::CONTROL),
            false => vocabulary.set(self.id, &self.content.replace('▁', " "), kinds::USER_DEFINED),
        }
    }
}
