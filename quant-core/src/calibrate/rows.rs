//! Rows of a value, with the tokens of the batch to which they belong.

use std::borrow::Cow;
use std::cell::OnceCell;

use super::BatchLayout;
use crate::model::TokenRows;
use crate::{Error, Result};

/// Rows `[rows, channels]` of a value, row-major, with the tokens of the batch to which they belong.
#[derive(Debug)]
pub struct InputRows<'a> {
    values: &'a [f32],
    channels: usize,
    tokens: TokenRows<'a>,
    layout: &'a BatchLayout,
    /// The rows that count, contiguous; computed on first use.
    counted: OnceCell<Cow<'a, [f32]>>,
}

impl<'a> InputRows<'a> {
    /// Rows of `channels` values, one per token.
    ///
    /// # Errors
    /// [`Error::Internal`] when there are not `tokens · channels` values, or the batch has fewer tokens.
    pub fn new(
        values: &'a [f32],
        channels: usize,
        tokens: TokenRows<'a>,
        layout: &'a BatchLayout,
    ) -> Result<Self> {
        if tokens.count().checked_mul(channels) != Some(values.len()) || tokens.end() > layout.tokens() {
            return Err(Error::Internal(format!(
                "got {} values of {channels} channels for {} tokens, the last of which is before {} in a \
                batch of {}",
                values.len(),
                tokens.count(),
                tokens.end(),
                layout.tokens()
            )));
        }
        Ok(Self { values, channels, tokens, layout, counted: OnceCell::new() })
    }

    /// The number of channels of a row.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// The number of rows that count.
    pub fn count(&self) -> usize {
        self.layout.count(self.tokens)
    }

    /// All rows in order, counted or not, each with its token.
    pub fn all(&self) -> impl Iterator<Item = (usize, &'a [f32])> {
        // Rows without channels are skipped.
        self.tokens.iter().zip(self.values.chunks_exact(self.channels.max(1)))
    }

    /// The rows that count, in order, each with its rank: the number of counted tokens of the batch before its own.
    pub fn counted(&self) -> impl Iterator<Item = (usize, &'a [f32])> {
        let layout = self.layout;
        let rows = self.all().filter(move |(token, _)| layout.counts(*token));
        rows.map(move |(token, row)| (layout.counted_before(token), row))
    }

    /// The rows that count, as contiguous `[rows, channels]`; copied only if some rows do not count.
    pub fn counted_values(&self) -> &[f32] {
        self.counted.get_or_init(|| match self.count() == self.tokens.count() {
            true => Cow::Borrowed(self.values),
            false => Cow::Owned(self.counted().flat_map(|(_, row)| row).copied().collect()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::TokenUse::{Context, Counted, Padding};
    use super::*;

    #[test]
    fn rows_count_for_their_own_tokens() {
        let uses = [Context, Counted, Counted, Context, Counted, Padding, Counted, Counted];
        let layout = BatchLayout::new(2, 4, None, Some(&uses));
        let values: Vec<f32> = (0..6).map(|i| i as f32).collect();
        let range = InputRows::new(&values, 2, TokenRows::range(3, 3), &layout).unwrap();
        assert_eq!(range.counted().collect::<Vec<_>>(), [(2, &[2.0, 3.0][..])]);
        assert_eq!((range.count(), range.counted_values()), (1, &[2.0, 3.0][..]));
        let some = InputRows::new(&values, 2, TokenRows::indices(&[0, 2, 7]), &layout).unwrap();
        assert_eq!(some.all().map(|(token, _)| token).collect::<Vec<_>>(), [0, 2, 7]);
        assert_eq!(some.counted().map(|(rank, _)| rank).collect::<Vec<_>>(), [1, 4]);
        assert_eq!((some.count(), some.counted_values()), (2, &values[2..]));
        let all = InputRows::new(&values, 3, TokenRows::range(6, 2), &layout).unwrap();
        assert!(std::ptr::eq(all.counted_values(), values.as_slice()), "nothing is copied where all count");
    }

    #[test]
    fn rows_that_do_not_fit_are_refused() {
        let layout = BatchLayout::plain(2, 4);
        let refuses = |values: &[f32], channels, tokens| {
            assert!(InputRows::new(values, channels, tokens, &layout).is_err());
        };
        refuses(&[0.0; 7], 2, TokenRows::range(0, 4));
        refuses(&[0.0; 8], 2, TokenRows::range(5, 4));
        refuses(&[0.0; 4], 2, TokenRows::indices(&[1, 8]));
        assert!(InputRows::new(&[], 2, TokenRows::indices(&[]), &layout).is_ok());
    }
}
