//! The tokens that the rows of a value belong to.
//!
//! Inside an expert, a value has rows for only some tokens. Their indices let observers count the right tokens.

/// The tokens of rows `[rows, channels]`, as indices into the tokens of the run, or into those of a whole batch. They
/// are strictly ascending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenRows<'a> {
    /// Row `i` is token `first + i`.
    Range {
        /// The token of the first row.
        first: usize,
        /// Number of rows.
        count: usize,
    },
    /// Row `i` is token `first + indices[i]`.
    Indices {
        /// The token that indices are relative to.
        first: usize,
        /// One ascending index per row.
        indices: &'a [u32],
    },
}

impl<'a> TokenRows<'a> {
    /// Creates the rows of `count` consecutive tokens, beginning with `first`.
    pub fn range(first: usize, count: usize) -> Self {
        Self::Range { first, count }
    }

    /// Creates the rows of the tokens `indices`, which must be ascending.
    pub fn indices(indices: &'a [u32]) -> Self {
        Self::Indices { first: 0, indices }
    }

    /// Returns the number of rows.
    pub fn count(self) -> usize {
        match self {
            Self::Range { count, .. } => count,
            Self::Indices { indices, .. } => indices.len(),
        }
    }

    /// Returns the token of a row.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn token(self, row: usize) -> usize {
        match self {
            Self::Range { first, .. } => first + row,
            Self::Indices { first, indices } => first + indices[row] as usize,
        }
    }

    /// Returns the tokens of all rows, in order.
    pub fn iter(self) -> impl Iterator<Item = usize> + 'a {
        (0..self.count()).map(move |row| self.token(row))
    }

    /// Returns one more than the last token; 0 if there are no rows.
    pub fn end(self) -> usize {
        self.count().checked_sub(1).map_or(0, |last| self.token(last) + 1)
    }

    /// Returns the rows with every token index increased by `by`, for a part of a longer sequence.
    #[must_use]
    pub fn shifted(self, by: usize) -> Self {
        match self {
            Self::Range { first, count } => Self::Range { first: first + by, count },
            Self::Indices { first, indices } => Self::Indices { first: first + by, indices },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_name_their_tokens() {
        let range = TokenRows::range(3, 2).shifted(10);
        assert_eq!(range.iter().collect::<Vec<_>>(), [13, 14]);
        assert_eq!((range.count(), range.end()), (2, 15));
        let some = TokenRows::indices(&[0, 4, 5]).shifted(10);
        assert_eq!(some.iter().collect::<Vec<_>>(), [10, 14, 15]);
        assert_eq!((some.count(), some.end(), some.token(1)), (3, 16, 14));
        assert_eq!((TokenRows::range(7, 0).end(), TokenRows::indices(&[]).end()), (0, 0));
    }
}
