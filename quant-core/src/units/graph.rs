//! The units of a job, their dependencies and their predicted costs.

use std::ops::Range;

use serde::Serialize;

use crate::calibrate::{TokenWindows, windows_per_piece};
use crate::checkpoint::TensorSpec;
use crate::model::Model;
use crate::recipe::{PassPlan, Plan, Rates};
use crate::{Error, Result};

/// Inputs per layer are computed for this many tokens at a time, together with the embeddings.
const PIECE_TOKENS: usize = 2048;
/// The header and the description of a result are shorter than this.
const MAX_DESCRIPTION_BYTES: u64 = 512 << 20;

/// A part of a job that one process computes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unit {
    /// Its name: `forward/SHARD/GROUP`, `blocks/GROUP`, `blocks/GROUP/experts/PART` or `outside`.
    pub id: String,
    /// The tensors or hidden states that it computes.
    pub work: Work,
    /// The names of the units whose results it reads.
    pub needs: Vec<String>,
}

/// The tensors or hidden states that a unit computes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Work {
    /// The hidden states of some calibration windows after some blocks of the float model.
    Forward {
        /// The number of the shard of windows.
        shard: usize,
        /// The windows.
        windows: Range<usize>,
        /// The blocks.
        blocks: Range<usize>,
    },
    /// The tensors of some blocks.
    Blocks(Range<usize>),
    /// A part of the tensors of a block whose experts are split over units.
    Experts {
        /// The block.
        block: usize,
        /// The experts whose linears it computes; `None` for everything that belongs to no expert.
        experts: Option<Range<usize>>,
    },
    /// The tensors outside the blocks.
    Outside,
}

/// The predicted cost of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Cost {
    /// Seconds on this machine.
    pub seconds: f64,
    /// Peak memory in bytes, with hidden states in memory.
    pub memory_bytes: u64,
    /// Peak memory in bytes, with hidden states in files.
    pub smallest_budget_bytes: u64,
    /// Bytes of tensors and hidden states that are read.
    pub input_bytes: u64,
    /// Bytes of the result.
    pub output_bytes: u64,
}

/// How the work of a job is split into units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Split {
    pub(super) blocks_per_unit: usize,
    /// The requested number of shards of calibration windows for the passage through the float model.
    pub(super) forward_shards: usize,
    /// The number of experts whose linears a unit computes; `None` leaves blocks whole.
    pub(super) experts_per_unit: Option<usize>,
}

/// Returns the units of a plan, in an order in which each follows those that it needs.
///
/// # Errors
/// [`Error::Usage`] if a result would depend on the results of all earlier blocks, if a unit would not consist of whole
/// spans, or if experts cannot be split.
pub(super) fn units(
    plan: &Plan,
    model: &Model,
    windows: Option<&TokenWindows>,
    Split { blocks_per_unit, forward_shards, experts_per_unit }: Split,
) -> Result<Vec<Unit>> {
    if experts_per_unit.is_some() {
        require_experts(plan, model, blocks_per_unit)?;
    }
    let groups: Vec<Range<usize>> = plan
        .blocks()
        .step_by(blocks_per_unit.max(1))
        .map(|first| first..(first + blocks_per_unit.max(1)).min(plan.blocks().end))
        .collect();
    let passes = PassPlan::new(plan, false);
    let in_spans = passes.follow_quantized();
    if in_spans && !groups.iter().all(|blocks| plan.begins_span(blocks.start)) {
        return Err(match plan.span_blocks() {
            None => Error::usage(
                "with inputs of the quantized model, each block depends on the results of all blocks before it",
                match plan.method.rounding.independent_blocks() {
                    Some(settings) => format!("{settings}; or run ‹quantize()›"),
                    None => "run ‹quantize()›".to_owned(),
                },
            ),
            Some(span) => Error::usage(
                format!("a unit of {blocks_per_unit} blocks does not consist of spans of {span} blocks"),
                "choose a multiple for ‹blocks_per_unit›, or leave it out",
            ),
        });
    }
    let shards = match windows.filter(|_| passes.follow_float() || in_spans) {
        Some(windows) => shards(windows, model, forward_shards),
        None => Vec::new(),
    };
    let forward = |shard: usize, group: usize| format!("forward/{shard}/{group}");
    let mut units = Vec::new();
    // The last group has no successor that would read states after it.
    for (group, blocks) in groups.iter().enumerate().take(groups.len().saturating_sub(1)) {
        for (shard, windows) in shards.iter().enumerate() {
            let needs = group.checked_sub(1).map(|before| forward(shard, before));
            let work = Work::Forward { shard, windows: windows.clone(), blocks: blocks.clone() };
            units.push(Unit { id: forward(shard, group), work, needs: needs.into_iter().collect() });
        }
    }
    for (group, blocks) in groups.into_iter().enumerate() {
        let before = group.checked_sub(1);
        let needs = before.into_iter().flat_map(|before| (0..shards.len()).map(move |s| forward(s, before)));
        let (id, needs) = (format!("blocks/{group}"), needs.collect::<Vec<_>>());
        let experts = model.architecture().graph(blocks.start).experts();
        let Some(step) = experts_per_unit.filter(|_| experts > 0) else {
            units.push(Unit { id, work: Work::Blocks(blocks), needs });
            continue;
        };
        let ranges = (0..experts).step_by(step).map(|first| first..(first + step).min(experts));
        for (part, experts) in std::iter::once(None).chain(ranges.map(Some)).enumerate() {
            let id = match part {
                0 => id.clone(),
                _ => format!("{id}/experts/{}", part - 1),
            };
            let mut unit =
                Unit { id, work: Work::Experts { block: blocks.start, experts }, needs: Vec::new() };
            let part = unit.part(plan, model)?;
            if part.entries.is_empty() {
                continue;
            }
            if part.needs_blocks() {
                unit.needs.clone_from(&needs);
            }
            units.push(unit);
        }
    }
    if !plan.only_outside().entries.is_empty() {
        units.push(Unit { id: "outside".into(), work: Work::Outside, needs: Vec::new() });
    }
    Ok(units)
}

/// Fails if the experts of a block cannot be split over units.
fn require_experts(plan: &Plan, model: &Model, blocks_per_unit: usize) -> Result<()> {
    plan.require_independent_experts()?;
    if blocks_per_unit != 1 {
        return Err(Error::usage(
            format!("‹experts_per_unit› splits blocks, but ‹blocks_per_unit› is {blocks_per_unit}"),
            "leave one of them out",
        ));
    }
    let mut blocks = plan.blocks();
    match blocks.any(|layer| model.architecture().graph(layer).experts() > 0) {
        true => Ok(()),
        false => {
            Err(Error::usage("‹experts_per_unit› has no effect: the model has no experts", "leave it out"))
        }
    }
}

/// Splits the calibration windows into at most `count` shards. The batch passes through the model in pieces; each shard
/// consists of whole pieces, so it has the same states as in the whole batch.
fn shards(windows: &TokenWindows, model: &Model, count: usize) -> Vec<Range<usize>> {
    let piece = windows_per_piece(windows.length());
    let pieces = windows.len().div_ceil(piece);
    let has_other_pieces = model.architecture().per_layer_inputs.is_some()
        && !(piece * windows.length()).is_multiple_of(PIECE_TOKENS);
    let count = if has_other_pieces { 1 } else { count.clamp(1, pieces.max(1)) };
    let at = |shard: usize| (pieces * shard / count * piece).min(windows.len());
    (0..count).map(|shard| at(shard)..at(shard + 1)).collect()
}

impl Unit {
    pub(super) fn part(&self, plan: &Plan, model: &Model) -> Result<Plan> {
        match &self.work {
            Work::Forward { windows, blocks, .. } => {
                let mut part = plan.only_forward(blocks.clone())?;
                part.sampling.samples = windows.len();
                Ok(part)
            }
            Work::Blocks(blocks) => plan.only_blocks(blocks.clone()),
            Work::Experts { block, experts } => {
                plan.only_experts(model.architecture().graph(*block), *block, experts.clone())
            }
            Work::Outside => Ok(plan.only_outside()),
        }
    }

    /// Returns the tensors of the unit's file; none if it holds hidden states.
    pub(super) fn tensors(&self, plan: &Plan, model: &Model) -> Result<Vec<TensorSpec>> {
        Ok(self.part(plan, model)?.outputs())
    }

    pub(super) fn shard(&self) -> Option<usize> {
        match self.work {
            Work::Forward { shard, .. } => Some(shard),
            _ => None,
        }
    }

    /// The blocks whose weights the unit reads; empty for the tensors outside the blocks.
    pub(super) fn blocks(&self) -> Range<usize> {
        match &self.work {
            Work::Forward { blocks, .. } | Work::Blocks(blocks) => blocks.clone(),
            Work::Experts { block, .. } => *block..*block + 1,
            Work::Outside => 0..0,
        }
    }

    /// Whether the result holds hidden states instead of tensors.
    pub fn is_forward(&self) -> bool {
        matches!(self.work, Work::Forward { .. })
    }

    /// Returns an upper bound of the size of the result, which is far above the predicted size.
    pub(super) fn max_bytes(&self, plan: &Plan, model: &Model) -> Result<u64> {
        let (_, output_bytes) = self.bytes(plan, model)?;
        Ok(output_bytes.saturating_mul(2).saturating_add(MAX_DESCRIPTION_BYTES))
    }

    /// Predicts the cost of the unit on a machine with these rates.
    pub(super) fn cost(&self, plan: &Plan, model: &Model, rates: Rates) -> Result<Cost> {
        let part = self.part(plan, model)?;
        let parts = std::slice::from_ref(&part);
        let (input_bytes, output_bytes) = self.bytes(plan, model)?;
        let memory_bytes = Plan::peak_memory(parts, model);
        // No run fits into a budget of 0 bytes.
        let smallest = Plan::residence(parts, model, 0, false).err();
        let seconds = match self.work {
            Work::Outside => 2.0 * (input_bytes + output_bytes) as f64 / rates.hashed,
            _ => Plan::seconds(parts, model, rates),
        };
        Ok(Cost {
            seconds,
            memory_bytes,
            smallest_budget_bytes: smallest.unwrap_or(memory_bytes),
            input_bytes,
            output_bytes,
        })
    }

    /// Predicts the bytes that the unit reads and writes.
    fn bytes(&self, plan: &Plan, model: &Model) -> Result<(u64, u64)> {
        let part = self.part(plan, model)?;
        let states = |layer: usize, windows: usize| {
            (4 * model.architecture().state_width(layer) as u64)
                .saturating_mul(windows as u64)
                .saturating_mul(part.sampling.length as u64)
        };
        Ok(match &self.work {
            Work::Forward { windows, blocks, .. } => {
                let before = if blocks.start == 0 { 0 } else { states(blocks.start, windows.len()) };
                let weights = plan.only_blocks(blocks.clone())?.input_bytes();
                (weights.saturating_add(before), states(blocks.end, windows.len()))
            }
            Work::Blocks(_) | Work::Experts { .. } => {
                let before = match self.needs.is_empty() {
                    true => 0,
                    false => states(self.blocks().start, part.sampling.samples),
                };
                (part.bytes_read().saturating_add(before), part.output_bytes())
            }
            Work::Outside => (part.input_bytes(), part.output_bytes()),
        })
    }
}
