//! The layout of a calibration batch.

use std::ops::Range;
use std::sync::Arc;

use crate::model::{Segments, TokenRows};

/// The role of a token in a calibration batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum TokenUse {
    /// The token runs through the model, and statistics include it.
    Counted,
    /// The token runs through the model as context for other tokens, but statistics ignore it.
    Context,
    /// The token fills the end of a window that no document fills. No other token attends to it.
    Padding,
}

/// The shape of a batch of windows, the starts of its documents, and which of its tokens count.
///
/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct BatchLayout {
    windows: usize,
    length: usize,
    /// `[windows, length]`: the start of each token's segment in its window; `None` if every window is a single
    /// segment.
    starts: Option<Arc<[u32]>>,
    /// The number of counted tokens before each token, followed by the total; `None` if all count.
    ranks: Option<Arc<[u32]>>,
    padding: Option<Arc<[bool]>>,
}

impl BatchLayout {
    /// Windows of one segment each, in which all tokens count.
    pub fn plain(windows: usize, length: usize) -> Self {
        Self { windows, length, starts: None, ranks: None, padding: None }
    }

    /// Windows with segments and uses; each is `[windows, length]` if given.
    ///
    /// # Panics
    /// When one of them has a length other than `windows · length`, or some tokens are not counted and there are 2³² or
    /// more in total.
    pub fn new(windows: usize, length: usize, starts: Option<&[u32]>, uses: Option<&[TokenUse]>) -> Self {
        let tokens = windows * length;
        assert!(starts.is_none_or(|s| s.len() == tokens), "starts are not [windows, length]");
        assert!(uses.is_none_or(|u| u.len() == tokens), "uses are not [windows, length]");
        let ranks = uses.filter(|u| u.iter().any(|u| *u != TokenUse::Counted)).map(|uses| {
            assert!(u32::try_from(tokens).is_ok(), "2^32 or more tokens");
            let mut rank = 0;
            let before = uses.iter().map(|u| {
                rank += u32::from(*u == TokenUse::Counted);
                rank
            });
            std::iter::once(0).chain(before).collect()
        });
        let is_padding = |u: &TokenUse| *u == TokenUse::Padding;
        let padding = uses.filter(|uses| uses.iter().any(is_padding));
        let padding = padding.map(|uses| uses.iter().map(is_padding).collect());
        Self { windows, length, starts: starts.map(Arc::from), ranks, padding }
    }

    /// The number of windows.
    pub fn windows(&self) -> usize {
        self.windows
    }

    /// Tokens per window.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Tokens in all windows.
    pub fn tokens(&self) -> usize {
        self.windows * self.length
    }

    /// The number of counted tokens.
    pub fn counted(&self) -> usize {
        self.counted_before(self.tokens())
    }

    /// The number of counted tokens among the first `tokens`.
    ///
    /// # Panics
    /// May panic when the batch has fewer tokens.
    pub fn counted_before(&self, tokens: usize) -> usize {
        self.ranks.as_ref().map_or(tokens, |r| r[tokens] as usize)
    }

    /// Whether a token counts.
    ///
    /// # Panics
    /// May panic when there is no such token.
    pub fn counts(&self, token: usize) -> bool {
        self.ranks.as_ref().is_none_or(|r| r[token] < r[token + 1])
    }

    /// Whether a token is padding, which no other token attends to.
    ///
    /// # Panics
    /// May panic when there is no such token.
    pub fn is_padding(&self, token: usize) -> bool {
        self.padding.as_ref().is_some_and(|padding| padding[token])
    }

    /// A token's position in its segment, from 0.
    ///
    /// # Panics
    /// May panic when there is no such token.
    pub fn place(&self, token: usize) -> usize {
        token % self.length - self.starts.as_ref().map_or(0, |s| s[token] as usize)
    }

    /// The segments of a token range that consists of whole windows.
    ///
    /// # Panics
    /// When the range exceeds the batch.
    pub fn segments(&self, tokens: Range<usize>) -> Segments<'_> {
        self.starts.as_ref().map_or_else(Segments::whole, |s| Segments::new(&s[tokens]))
    }

    /// `None` if every window is a single segment.
    pub(crate) fn start(&self, token: usize) -> Option<u32> {
        self.starts.as_ref().map(|s| s[token])
    }

    /// Returns how many of these tokens count.
    ///
    /// # Panics
    /// When a token is outside the batch.
    pub fn count(&self, tokens: TokenRows<'_>) -> usize {
        match (tokens, &self.ranks) {
            (_, None) => tokens.count(),
            (TokenRows::Range { first, count }, _) => {
                self.counted_before(first + count) - self.counted_before(first)
            }
            (TokenRows::Indices { .. }, _) => tokens.iter().filter(|&token| self.counts(token)).count(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::TokenUse::{Context, Counted, Padding};
    use super::*;

    #[test]
    fn ranks_rows_and_places_agree() {
        let uses = [Context, Counted, Counted, Context, Counted, Padding, Counted, Counted];
        let layout = BatchLayout::new(2, 4, Some(&[0, 0, 2, 2, 0, 1, 2, 2]), Some(&uses));
        assert_eq!((layout.tokens(), layout.counted()), (8, 5));
        assert_eq!((0..8).filter(|t| layout.is_padding(*t)).collect::<Vec<_>>(), [5]);
        assert_eq!((0..8).map(|t| layout.place(t)).collect::<Vec<_>>(), [0, 1, 0, 1, 0, 0, 0, 1]);
        assert_eq!(layout.count(TokenRows::range(2, 4)), 2);
        assert_eq!(layout.count(TokenRows::indices(&[0, 1, 4, 5, 7])), 3);
        assert_eq!((layout.counted_before(3), layout.counts(3), layout.counts(4)), (2, false, true));
        let plain = BatchLayout::new(2, 4, None, Some(&[Counted; 8]));
        assert_eq!((plain.counted(), plain.place(6), plain.counts(7)), (8, 2, true));
        assert!(plain.segments(0..4).is_whole() && !plain.is_padding(3));
    }
}
