//! Sorts tokens by expert, so that the rows of each expert are contiguous.

use crate::KernelError;

/// Marks an unused slot, for a token with fewer than `top_k` experts.
pub const NO_EXPERT: u32 = u32::MAX;

/// The experts that each token is routed to, with their weights.
#[derive(Debug, Clone, Copy)]
pub struct Routing<'a> {
    /// Slots per token.
    pub top_k: usize,
    /// Indices of experts, or [`NO_EXPERT`], `[tokens, top_k]`.
    pub experts: &'a [u32],
    /// The factor of each expert's output, `[tokens, top_k]`; not read for unused slots.
    pub weights: &'a [f32],
}

/// The rows of all experts, sorted by expert, then token, then slot.
#[derive(Debug, Default)]
pub(super) struct SortedRows {
    pub(super) tokens: Vec<u32>,
    pub(super) weights: Vec<f32>,
    /// The index of the first row of each expert, followed by the total number of rows.
    pub(super) starts: Vec<u32>,
}

impl SortedRows {
    /// Sorts without allocating: `tokens` and `weights` must have capacity for all slots, and `starts` for the number
    /// of experts plus one.
    ///
    /// # Errors
    /// When the index of an expert is out of range.
    pub(super) fn sort(&mut self, routing: &Routing<'_>, experts: usize) -> Result<(), KernelError> {
        self.starts.clear();
        self.starts.resize(experts + 1, 0);
        for &expert in routing.experts {
            if expert == NO_EXPERT {
                continue;
            }
            // Counts are stored at the next index, so that their running sum gives the starts.
            match self.starts.get_mut(expert as usize + 1) {
                Some(count) => *count += 1,
                None => {
                    let got = expert as usize;
                    return Err(KernelError::Mismatch {
                        what: "expert numbers must be less than the number of experts,",
                        expected: experts,
                        got,
                    });
                }
            }
        }
        let mut sum = 0;
        for start in &mut self.starts {
            sum += *start;
            *start = sum;
        }
        self.tokens.clear();
        self.tokens.resize(sum as usize, 0);
        self.weights.clear();
        self.weights.resize(sum as usize, 0.0);
        let slots = routing.experts.iter().zip(routing.weights).enumerate();
        for (slot, (&expert, &weight)) in slots.filter(|(_, (expert, _))| **expert != NO_EXPERT) {
            let next = &mut self.starts[expert as usize];
            self.tokens[*next as usize] = (slot / routing.top_k) as u32;
            self.weights[*next as usize] = weight;
            *next += 1;
        }
        // Placing the rows advanced each start to that of the next expert, so shift them back.
        self.starts.rotate_right(1);
        self.starts[0] = 0;
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// The range of an expert's rows.
    pub(super) fn of(&self, expert: usize) -> core::ops::Range<usize> {
        self.starts[expert] as usize..self.starts[expert + 1] as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sorted_by_expert_token_and_slot() {
        let experts = [2, 0, 2, NO_EXPERT, 0, 2, 2, 2];
        let weights = [0.1, 0.2, 0.3, f32::NAN, 0.5, 0.6, 0.7, 0.8];
        let mut rows = SortedRows::default();
        rows.sort(&Routing { top_k: 2, experts: &experts, weights: &weights }, 4).unwrap();
        assert_eq!([0, 1, 2, 3].map(|e| rows.of(e)), [0..2, 2..2, 2..7, 7..7]);
        assert_eq!(rows.tokens, [0, 2, 0, 1, 2, 3, 3]);
        assert_eq!(rows.weights, [0.2, 0.5, 0.1, 0.3, 0.6, 0.7, 0.8]);
        let none = Routing { top_k: 1, experts: &[], weights: &[] };
        rows.sort(&none, 1).unwrap();
        assert_eq!((rows.len(), rows.of(0)), (0, 0..0));
        let error = rows.sort(&Routing { top_k: 2, experts: &experts, weights: &weights }, 2).unwrap_err();
        assert_eq!(
            error,
            KernelError::Mismatch {
                what: "expert numbers must be less than the number of experts,",
                expected: 2,
                got: 2
            }
        );
    }
}
