//! The tokens and heads that queries attend to.

use super::kernel::CHUNK;

/// The part of the cache that one key-value head attends to.
///
/// Tokens are counted along the list, regardless of the page numbers. To attend to selected pages or to a window, list
/// only those pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageList<'a> {
    /// Page numbers, in order.
    pub pages: &'a [u32],
    /// The number of tokens in these pages. The last page with tokens may be partly filled; any pages after it are
    /// unused.
    pub tokens: usize,
    /// The number of tokens at the beginning that no query sees.
    pub first: usize,
    /// The number of tokens up to the last one that the first query sees. Each query sees one more than the previous
    /// one, up to `tokens`. If it is 0 or negative, the first queries see no tokens.
    pub seen: isize,
}

impl<'a> PageList<'a> {
    /// Creates a list for queries that see all tokens.
    pub fn all(pages: &'a [u32], tokens: usize) -> Self {
        Self { pages, tokens, first: 0, seen: isize::MAX }
    }

    /// Creates a list for causal attention: the queries belong to the last tokens, and none sees a later token.
    pub fn causal(pages: &'a [u32], tokens: usize, queries: usize) -> Self {
        let seen = (tokens as isize).saturating_sub(queries as isize).saturating_add(1);
        Self { pages, tokens, first: 0, seen }
    }

    /// The number of tokens up to the last one that a query sees.
    pub(super) fn seen_by(&self, query: usize) -> usize {
        let seen = self.seen.saturating_add_unsigned(query).max(0) as usize;
        seen.min(self.tokens)
    }

    pub(super) fn chunks(&self) -> usize {
        self.tokens.div_ceil(CHUNK)
    }
}

/// The numbers of heads, and the scale of scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Heads {
    /// The number of query heads: a multiple of `kv`, at most [`MAX_HEADS`](super::MAX_HEADS). Query head `h` uses
    /// key-value head `h / (query / kv)`.
    pub query: usize,
    /// The number of key-value heads.
    pub kv: usize,
    /// The factor of `q · k` in scores, normally `1 / √head_dim`.
    pub scale: f32,
}
