//! Learned positions: rows that are added to the embeddings of tokens, by their positions.

use crate::{Error, Result};

/// A table with one row per position, from position 0 on.
#[derive(Debug, Clone)]
pub struct PositionTable {
    hidden: usize,
    values: Vec<f32>,
}

impl PositionTable {
    pub(super) fn new(hidden: usize, values: Vec<f32>) -> Self {
        Self { hidden, values }
    }

    /// Adds the row of each token's position to `states` `[tokens, hidden]`. `place` returns the position of a token,
    /// given its index in `states`.
    ///
    /// # Errors
    /// When a position is beyond the table.
    pub fn add_to(&self, states: &mut [f32], place: impl Fn(usize) -> usize) -> Result<()> {
        for (token, state) in states.chunks_exact_mut(self.hidden.max(1)).enumerate() {
            let position = place(token);
            let row = self.values.chunks_exact(self.hidden.max(1)).nth(position).ok_or_else(|| {
                Error::Internal(format!("position {position} is beyond the loaded positions"))
            })?;
            state.iter_mut().zip(row).for_each(|(s, p)| *s += p);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_added_by_place() {
        let table = PositionTable::new(2, vec![1.0, 2.0, 10.0, 20.0]);
        let mut states = vec![0.5; 6];
        table.add_to(&mut states, |token| token % 2).unwrap();
        assert_eq!(states, [1.5, 2.5, 10.5, 20.5, 1.5, 2.5]);
        assert!(table.add_to(&mut states, |token| token).is_err());
    }
}
