//! The output that a scale search watches, for a norm that feeds experts: computed for several candidates by running
//! the experts one after the other, so that only one expert's weights are in memory.
//!
//! The values are those of an evaluation with all experts in memory.

use candle_core::{Device, Tensor};

use super::BlockTask;
use super::objective::candidate_block;
use crate::model::{Block, CancelTap, ExpertOrder, FoldGroup, NodeId, Segments, add_expert, with_values};
use crate::{Error, Result};

/// The memory for the sums of candidates beyond the first.
pub(super) const SUM_BYTES: u64 = 256 << 20;

/// The number of candidates whose sums are computed at the same time, each of this many values.
pub(super) fn at_once(values: usize) -> usize {
    let each = 4 * values as u64;
    1 + usize::try_from(SUM_BYTES / each.max(1)).unwrap_or(usize::MAX - 1)
}

/// The memory in bytes of a token in addition to its input and output: one sum of the experts, and the router's
/// weights.
pub(super) fn token_bytes(width: usize, experts: usize) -> u64 {
    4 * (width + experts) as u64
}

/// A piece of the batch: the input of the group's consumers, `[windows, length, channels]`, and its segments.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) x: &'a Tensor,
    pub(super) segments: Segments<'a>,
}

struct Running {
    /// The sum of the experts so far for each piece, `[tokens, width]`.
    sums: Vec<Vec<f32>>,
}

/// Returns the watched value of each piece, for each candidate: with the quantized consumers rounded under these
/// scales, or the float value for `None`.
pub(super) fn watched(
    task: &BlockTask<'_>,
    (group, order): (&FoldGroup, &ExpertOrder),
    pieces: &[Rows<'_>],
    candidates: &[Option<&[f32]>],
) -> Result<Vec<Result<Vec<Tensor>>>> {
    let block = task.block.routed();
    let graph = block.graph().clone();
    let width = graph.width(order.sum);
    let tap = || CancelTap(task.cancel);
    let weights = pieces.iter().map(|piece| {
        let known = [(group.input, piece.x.clone())];
        Ok(block.evaluate_packed(&known, &[order.weights], piece.segments, &mut tap())?.swap_remove(0))
    });
    let weights: Vec<Tensor> = weights.collect::<Result<_>>()?;
    let tokens: Vec<usize> = weights.iter().map(|w| w.elem_count() / order.experts.len().max(1)).collect();
    let start = || Running { sums: tokens.iter().map(|tokens| vec![0.0; tokens * width]).collect() };
    let mut running: Vec<Result<Running>> = candidates.iter().map(|_| Ok(start())).collect();
    for (expert, &(selects, output)) in order.experts.iter().enumerate() {
        task.cancel.check()?;
        let rows = pieces.iter().zip(&weights).map(|(piece, weights)| {
            let known = [(group.input, piece.x.clone()), (order.weights, weights.clone())];
            Ok(block.evaluate_packed(&known, &[selects], piece.segments, &mut tap())?.swap_remove(0))
        });
        let rows: Vec<Tensor> = rows.collect::<Result<_>>()?;
        let own = consumers(group, |node| graph.expert_of(node) == Some(selects));
        for (candidate, state) in candidates.iter().zip(&mut running) {
            let Ok(Running { sums }) = state else { continue };
            let mut add = |block: &Block| -> Result<()> {
                for ((rows, weights), sums) in rows.iter().zip(&weights).zip(&mut *sums) {
                    if rows.elem_count() == 0 {
                        continue;
                    }
                    let known = [(selects, rows.clone())];
                    let y = block.evaluate(&known, &[output], &mut tap())?.swap_remove(0);
                    with_values(weights, |weights| {
                        let weight = |token: usize| weights[token * order.experts.len() + expert];
                        with_values(&y, |y| add_expert(sums, width, weight, y))
                    })?;
                }
                Ok(())
            };
            if let Err(error) = rounded(task, &block, &own, *candidate).and_then(|block| add(&block)) {
                *state = Err(numeric(error)?);
            }
        }
        block.release_expert(selects);
    }
    let others = consumers(group, |node| graph.expert_of(node).is_none());
    let finished = candidates.iter().zip(running).map(|(candidate, state)| {
        let Running { sums } = match state {
            Ok(running) => running,
            Err(error) => return Ok(Err(error)),
        };
        let finish = |block: Block| -> Result<Vec<Tensor>> {
            let each = pieces.iter().zip(sums).map(|(piece, sums)| {
                let (windows, length, _) = piece.x.dims3()?;
                let sum = Tensor::from_vec(sums, (windows, length, width), &Device::Cpu)?;
                let known = [(group.input, piece.x.clone()), (order.sum, sum)];
                let targets = [group.inspected];
                Ok(block.evaluate_packed(&known, &targets, piece.segments, &mut tap())?.swap_remove(0))
            });
            each.collect()
        };
        match rounded(task, &block, &others, *candidate).and_then(finish) {
            Ok(values) => Ok(Ok(values)),
            Err(error) => Ok(Err(numeric(error)?)),
        }
    });
    finished.collect()
}

fn consumers(group: &FoldGroup, which: impl Fn(NodeId) -> bool) -> Vec<NodeId> {
    group.consumers.iter().copied().filter(|&consumer| which(consumer)).collect()
}

fn rounded(
    task: &BlockTask<'_>,
    float: &Block,
    consumers: &[NodeId],
    scales: Option<&[f32]>,
) -> Result<Block> {
    match scales {
        Some(scales) => candidate_block(task, consumers, scales),
        None => Ok(float.clone()),
    }
}

/// Returns the error of a candidate whose weights cannot be rounded; other errors end the search.
fn numeric(error: Error) -> Result<Error> {
    match error {
        Error::Numeric { .. } => Ok(error),
        other => Err(other),
    }
}
