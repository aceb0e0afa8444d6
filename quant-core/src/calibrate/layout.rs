//! What the tokens of a batch are to a search: which positions belong together, and which count.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use crate::model::Segments;

/// What a token of a calibration batch is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum TokenUse {
    /// It runs through the model, and a search looks at it.
    Counted,
    /// It runs through the model as what other tokens see before them, and no search looks at it.
    Context,
    /// It fills a window that documents leave open; nothing sees it.
    Padding,
}

/// The shape of a batch of windows, where its documents begin, and which of its tokens count.
///
/// Cheap to clone.
#[derive(Debug, Clone)]
pub struct BatchLayout {
    windows: usize,
    length: usize,
    /// `[windows, length]`: where each token's segment begins in its window; `None` where every
    /// window is one segment.
    starts: Option<Arc<[u32]>>,
    /// How many tokens that count stand before each, and in all; `None` where all count.
    ranks: Option<Arc<[u32]>>,
}

impl BatchLayout {
    /// Windows of one segment each, all of whose tokens count.
    pub fn plain(windows: usize, length: usize) -> Self {
        Self { windows, length, starts: None, ranks: None }
    }

    /// Windows with segments and uses, each `[windows, length]` where it is given.
    ///
    /// # Panics
    /// When there are other than `windows · length` of them, or more than 2³² tokens.
    pub fn new(windows: usize, length: usize, starts: Option<&[u32]>, uses: Option<&[TokenUse]>) -> Self {
        let tokens = windows * length;
        assert!(starts.is_none_or(|s| s.len() == tokens), "starts are not [windows, length]");
        assert!(uses.is_none_or(|u| u.len() == tokens), "uses are not [windows, length]");
        let ranks = uses.filter(|u| u.iter().any(|u| *u != TokenUse::Counted)).map(|uses| {
            assert!(u32::try_from(tokens).is_ok(), "more than 2^32 tokens");
            let mut rank = 0;
            let before = uses.iter().map(|u| {
                rank += u32::from(*u == TokenUse::Counted);
                rank
            });
            std::iter::once(0).chain(before).collect()
        });
        Self { windows, length, starts: starts.map(Arc::from), ranks }
    }

    /// Windows.
    pub fn windows(&self) -> usize {
        self.windows
    }

    /// Tokens of a window.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Tokens of all windows.
    pub fn tokens(&self) -> usize {
        self.windows * self.length
    }

    /// How many of all tokens count.
    pub fn counted(&self) -> usize {
        self.counted_before(self.tokens())
    }

    /// How many of the first `tokens` tokens count.
    ///
    /// # Panics
    /// When the batch has fewer.
    pub fn counted_before(&self, tokens: usize) -> usize {
        self.ranks.as_ref().map_or(tokens, |r| r[tokens] as usize)
    }

    /// Whether a token counts.
    ///
    /// # Panics
    /// When there is no such token.
    pub fn counts(&self, token: usize) -> bool {
        self.ranks.as_ref().is_none_or(|r| r[token] < r[token + 1])
    }

    /// A token's place in its segment.
    ///
    /// # Panics
    /// When there is no such token.
    pub fn place(&self, token: usize) -> usize {
        token % self.length - self.starts.as_ref().map_or(0, |s| s[token] as usize)
    }

    /// The segments of some whole windows, by their tokens.
    ///
    /// # Panics
    /// When the batch ends before.
    pub fn segments(&self, tokens: Range<usize>) -> Segments<'_> {
        self.starts.as_ref().map_or_else(Segments::whole, |s| Segments::new(&s[tokens]))
    }

    /// Where a token's segment begins in its window, if windows have several.
    pub(crate) fn start(&self, token: usize) -> Option<u32> {
        self.starts.as_ref().map(|s| s[token])
    }

    /// Of rows `[tokens, channels]`, the first of which is token `first` of the batch, those that
    /// count.
    ///
    /// # Panics
    /// When the batch ends before.
    pub fn counted_rows<'x>(&self, first: usize, channels: usize, x: &'x [f32]) -> Cow<'x, [f32]> {
        let Some(ranks) = &self.ranks else { return Cow::Borrowed(x) };
        let rows = x.len().checked_div(channels).unwrap_or(0);
        if (ranks[first + rows] - ranks[first]) as usize == rows {
            return Cow::Borrowed(x);
        }
        let rows = x.chunks_exact(channels.max(1)).enumerate();
        Cow::Owned(rows.filter(|(i, _)| self.counts(first + i)).flat_map(|(_, row)| row).copied().collect())
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
        assert_eq!((0..8).map(|t| layout.place(t)).collect::<Vec<_>>(), [0, 1, 0, 1, 0, 0, 0, 1]);
        let x: Vec<f32> = (0..8).map(|i| i as f32).collect();
        assert_eq!(*layout.counted_rows(2, 2, &x), [0.0, 1.0, 4.0, 5.0]);
        assert!(matches!(layout.counted_rows(6, 1, &x[..2]), Cow::Borrowed(_)));
        assert_eq!((layout.counted_before(3), layout.counts(3), layout.counts(4)), (2, false, true));
        let plain = BatchLayout::new(2, 4, None, Some(&[Counted; 8]));
        assert_eq!((plain.counted(), plain.place(6), plain.counts(7)), (8, 2, true));
        assert!(plain.segments(0..4).is_whole());
    }
}
