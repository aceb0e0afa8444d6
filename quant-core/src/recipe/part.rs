//! Parts of a plan, for jobs that each cover some of the blocks.

use std::ops::Range;

use super::Plan;
use crate::{Error, Result};

impl Plan {
    /// The blocks covered by the plan.
    pub fn blocks(&self) -> Range<usize> {
        self.blocks.clone()
    }

    /// The part of this plan that covers `blocks`. Tensors before the blocks (the embedding) belong to the part with
    /// the first block, tensors after them (the final norm, the head) to the part with the last.
    ///
    /// If separate jobs write the parts of a plan, the result is byte for byte that of one job for the whole plan.
    ///
    /// # Errors
    /// [`Error::Usage`] when `blocks` is empty or not within the blocks of the plan.
    pub fn part(&self, blocks: Range<usize>) -> Result<Self> {
        let whole = self.blocks.clone();
        if blocks.is_empty() || blocks.start < whole.start || blocks.end > whole.end {
            return Err(Error::usage(
                format!(
                    "blocks {}..{} are not a non-empty range within {}..{}",
                    blocks.start, blocks.end, whole.start, whole.end
                ),
                format!("choose blocks within {}..{}; the end is exclusive", whole.start, whole.end),
            ));
        }
        let first = self.entries.iter().position(|e| e.layer.is_some()).unwrap_or(self.entries.len());
        let belongs = |index: usize, layer: Option<usize>| match layer {
            Some(layer) => blocks.contains(&layer),
            None if index < first => blocks.start == whole.start,
            None => blocks.end == whole.end,
        };
        let entries = self.entries.iter().enumerate().filter(|(i, e)| belongs(*i, e.layer));
        let entries = entries.map(|(_, entry)| entry.clone()).collect();
        Ok(Self { entries, blocks, ..self.clone() })
    }
}
