//! Parts of a plan, for jobs that each cover some of the blocks.

use std::ops::Range;

use super::{Action, Plan, PlanEntry};
use crate::model::{BlockGraph, NodeId};
use crate::round::LayerInputs;
use crate::{Error, Result};

/// The calibration of the whole plan. A part must make the same passes, even if its own tensors do not need them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Calibrated {
    pub(super) static_activations: bool,
    pub(super) cache: bool,
    /// The end of the blocks whose input states this part or a later one computes.
    pub(super) until: usize,
}

/// The part of a block that a plan covers, if it covers only some of the block's experts.
#[derive(Debug, Clone)]
pub(super) struct ExpertPart {
    /// The experts; `None` for everything that belongs to no expert.
    experts: Option<Range<usize>>,
    /// The bytes of the block's weights that the batch passes through, but that are not part of the plan.
    pub(super) beside: u64,
}

impl PlanEntry {
    /// The node of a weight or norm that is quantized or rewritten in its block.
    pub(super) fn node(&self) -> Option<NodeId> {
        match self.action {
            Action::Quantize { node, .. } => node,
            Action::Rewrite { node, .. } => Some(node),
            Action::Copy | Action::Repack { .. } => None,
        }
    }
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

    /// The part with the weights of some experts of a block, or, with `None`, with everything else in the block. The
    /// batch passes only through what the part needs. Plans that [cannot be split](Self::require_independent_experts)
    /// have no such parts.
    ///
    /// # Errors
    /// As [`part`](Self::part).
    pub(crate) fn only_experts(
        &self,
        graph: &BlockGraph,
        layer: usize,
        experts: Option<Range<usize>>,
    ) -> Result<Self> {
        self.within(&(layer..layer + 1))?;
        let of_block = || self.entries.iter().filter(|e| e.layer == Some(layer));
        let expert = |entry: &PlanEntry| entry.node().and_then(|node| graph.expert_number(node));
        let is_in = |entry: &&PlanEntry| match (expert(entry), &experts) {
            (Some(expert), Some(experts)) => experts.contains(&expert),
            (None, None) => true,
            _ => false,
        };
        let entries: Vec<PlanEntry> = of_block().filter(is_in).cloned().collect();
        // No part computes states for another one, so each makes only the passes that its own tensors need.
        let calibrated = Calibrated {
            static_activations: entries.iter().any(PlanEntry::has_static_activations),
            cache: entries.iter().any(|entry| !entry.cache.is_empty()),
            until: layer + 1,
        };
        // Ranges are gathered in the whole block.
        let passed = |entry: &&PlanEntry| calibrated.static_activations || expert(entry).is_none();
        let beside = of_block().filter(passed).filter(|e| !is_in(e)).map(|e| e.info.byte_len()).sum();
        let part = ExpertPart { experts, beside };
        Ok(Self {
            entries,
            blocks: layer..layer + 1,
            calibrated: Some(calibrated),
            experts: Some(part),
            ..self.clone()
        })
    }

    /// Whether this is a part [of a block](Self::only_experts).
    pub(crate) fn is_expert_part(&self) -> bool {
        self.experts.is_some()
    }

    /// The bytes of weights that are read: those of the tensors, and others that the batch passes through.
    pub(crate) fn bytes_read(&self) -> u64 {
        let beside = self.experts.as_ref().filter(|_| self.needs_blocks()).map_or(0, |part| part.beside);
        self.input_bytes().saturating_add(beside)
    }

    /// Whether the batch passes through a node of a block.
    pub(super) fn passes_through(&self, graph: &BlockGraph, node: NodeId) -> bool {
        let Some(part) = self.experts.as_ref().filter(|_| !self.needs_ranges()) else { return true };
        let is_in = |expert: usize| part.experts.as_ref().is_some_and(|experts| experts.contains(&expert));
        graph.expert_number(node).is_none_or(is_in)
    }

    /// Fails if what is computed for an expert depends on other experts of its block.
    ///
    /// # Errors
    /// [`Error::Usage`] with the reason.
    pub(crate) fn require_independent_experts(&self) -> Result<()> {
        let depends = |why: String| {
            let message = format!("the experts of a block cannot be split over units: {why}");
            Err(Error::usage(message, "leave out ‹experts_per_unit›"))
        };
        if let Some(transform) = self.transforms().first() {
            return depends(format!(
                "`{}` searches scales that all experts of a block share",
                transform.name()
            ));
        }
        let rounding = self.method.rounding;
        match rounding.inputs(&self.settings) {
            None => Ok(()),
            Some(LayerInputs::Float) if rounding.rounds_experts_apart() => Ok(()),
            Some(LayerInputs::Float) => {
                depends(format!("the rounding `{}` processes whole blocks", rounding.name()))
            }
            Some(LayerInputs::Quantized) => {
                depends(format!("`{}` calibrates them on inputs of the quantized model", rounding.name()))
            }
        }
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
