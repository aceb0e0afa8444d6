//! What queries attend to, and with which heads.

use super::kernel::CHUNK;

/// What of the cache one key-value head attends to.
///
/// Tokens are counted along the list, whatever pages it names: a selection of pages, or of a window, is a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageList<'a> {
    /// Numbers of pages, in order.
    pub pages: &'a [u32],
    /// Tokens in them; the last pages may be unfilled or unused.
    pub tokens: usize,
    /// Tokens at the beginning that no query sees.
    pub first: usize,
    /// Tokens up to the last that the first query sees; each query sees one more than the one before it, and
    /// none sees more than there are. May be negative: then the first queries see nothing.
    pub seen: isize,
}

impl<'a> PageList<'a> {
    /// All queries see all tokens.
    pub fn all(pages: &'a [u32], tokens: usize) -> Self {
        Self { pages, tokens, first: 0, seen: isize::MAX }
    }

    /// The last tokens are those of the queries, and a query sees none that comes after it.
    pub fn causal(pages: &'a [u32], tokens: usize, queries: usize) -> Self {
        let seen = (tokens as isize).saturating_sub(queries as isize).saturating_add(1);
        Self { pages, tokens, first: 0, seen }
    }

    /// Tokens up to the last that a query sees.
    pub(super) fn seen_by(&self, query: usize) -> usize {
        let seen = self.seen.saturating_add_unsigned(query).max(0) as usize;
        seen.min(self.tokens)
    }

    pub(super) fn chunks(&self) -> usize {
        self.tokens.div_ceil(CHUNK)
    }
}

/// Heads, and what scores are multiplied with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Heads {
    /// A multiple of the key-value heads, up to [`MAX_HEADS`](super::MAX_HEADS): query head `h` attends with head `h / (query / kv)`.
    pub query: usize,
    /// Key-value heads.
    pub kv: usize,
    /// Usually `1 / √head_dim`.
    pub scale: f32,
}
