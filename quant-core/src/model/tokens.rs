//! Which tokens the rows of a value belong to.
//!
//! A value that holds a row for every token has its rows in the order of tokens. One that holds only some of
//! them says which, so that whoever watches it counts the right tokens.

/// The tokens of rows `[rows, channels]`: their places among the tokens that are run, or among those of a whole
/// batch. Tokens ascend, and none stands twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenRows<'a> {
    /// Row `i` is token `first + i`.
    Range {
        /// The token of the first row.
        first: usize,
        /// How many rows there are.
        count: usize,
    },
    /// Row `i` is token `first + indices[i]`.
    Indices {
        /// What the indices are counted from.
        first: usize,
        /// One for each row, ascending.
        indices: &'a [u32],
    },
}

impl<'a> TokenRows<'a> {
    /// The rows of `count` consecutive tokens from `first` on.
    pub fn range(first: usize, count: usize) -> Self {
        Self::Range { first, count }
    }

    /// The rows of the tokens `indices`, which ascend.
    pub fn indices(indices: &'a [u32]) -> Self {
        Self::Indices { first: 0, indices }
    }

    /// How many rows there are.
    pub fn count(self) -> usize {
        match self {
            Self::Range { count, .. } => count,
            Self::Indices { indices, .. } => indices.len(),
        }
    }

    /// The token of a row.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn token(self, row: usize) -> usize {
        match self {
            Self::Range { first, .. } => first + row,
            Self::Indices { first, indices } => first + indices[row] as usize,
        }
    }

    /// The token of every row, in order.
    pub fn iter(self) -> impl Iterator<Item = usize> + 'a {
        (0..self.count()).map(move |row| self.token(row))
    }

    /// One more than the last token; 0 where there are no rows.
    pub fn end(self) -> usize {
        self.count().checked_sub(1).map_or(0, |last| self.token(last) + 1)
    }

    /// The same rows where token 0 is token `by` of a longer sequence.
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
