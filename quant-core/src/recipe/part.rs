//! Parts of a plan, for jobs that each cover some of the blocks.

use std::ops::Range;

use super::{Plan, PlanEntry};
use crate::{Error, Result};

/// The calibration of the whole plan. A part must make the same passes, even if its own tensors do not need them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Calibrated {
    pub(super) static_activations: bool,
    pub(super) cache: bool,
    /// The end of the blocks whose input states this part or a later one computes.
    pub(super) until: usize,
}

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
        let whole = self.within(&blocks)?;
        let first = self.entries.iter().position(|e| e.layer.is_some()).unwrap_or(self.entries.len());
        let belongs = |index: usize, layer: Option<usize>| match layer {
            Some(layer) => blocks.contains(&layer),
            None if index < first => blocks.start == whole.start,
            None => blocks.end == whole.end,
        };
        let entries = self.entries.iter().enumerate().filter(|(i, e)| belongs(*i, e.layer));
        let entries = entries.map(|(_, entry)| entry.clone()).collect();
        Ok(self.with(entries, blocks, self.last_reader()))
    }

    /// The part with the tensors of `blocks` and no others. It does not write states for later blocks.
    ///
    /// # Errors
    /// As [`part`](Self::part).
    pub fn only_blocks(&self, blocks: Range<usize>) -> Result<Self> {
        self.within(&blocks)?;
        let of_blocks = |e: &&PlanEntry| e.layer.is_some_and(|layer| blocks.contains(&layer));
        let entries = self.entries.iter().filter(of_blocks).cloned().collect();
        let until = blocks.end;
        Ok(self.with(entries, blocks, until))
    }

    /// The part with the tensors outside the blocks: the embedding, the head, and all others. It covers no block.
    pub fn only_outside(&self) -> Self {
        let entries = self.entries.iter().filter(|e| e.layer.is_none()).cloned().collect();
        let first = self.blocks.start;
        self.with(entries, first..first, first)
    }

    /// The part that writes no tensor: the batch passes through `blocks` of the float model.
    ///
    /// # Errors
    /// As [`part`](Self::part).
    pub fn only_forward(&self, blocks: Range<usize>) -> Result<Self> {
        self.within(&blocks)?;
        let bytes_of = |layer: usize| {
            let entries = self.entries.iter().filter(|e| e.layer == Some(layer));
            entries.map(|e| e.info.byte_len()).sum::<u64>()
        };
        let largest = blocks.clone().map(bytes_of).max();
        let until = blocks.end;
        Ok(Self { forward: largest, ..self.with(Vec::new(), blocks, until) })
    }

    /// Whether this is a part [that writes no tensor](Self::only_forward).
    pub fn is_forward(&self) -> bool {
        self.forward.is_some()
    }

    fn within(&self, blocks: &Range<usize>) -> Result<Range<usize>> {
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
        Ok(whole)
    }

    /// The end of the blocks whose input states this plan or a later part computes.
    pub(super) fn last_reader(&self) -> usize {
        self.calibrated.map_or(self.blocks.end, |whole| whole.until)
    }

    fn with(&self, entries: Vec<PlanEntry>, blocks: Range<usize>, until: usize) -> Self {
        let calibrated = Calibrated {
            static_activations: self.has_static_activations(),
            cache: self.calibrates_cache(),
            until,
        };
        Self { entries, blocks, calibrated: Some(calibrated), ..self.clone() }
    }
}
