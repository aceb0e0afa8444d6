//! A block's experts one at a time: what they read is computed once and kept, each expert runs on the rows of its
//! tokens, and what it puts out is added up, so that an expert's weights are needed only while it is worked on.

use candle_core::{D, Device, Tensor};

use super::observe::CHUNK_TOKENS;
use super::{BatchLayout, ExpertSampling, HiddenStates, InputRows, Statistic};
use crate::model::{Block, BlockGraph, CancelTap, NodeId, Op, Segments, TokenRows, add_expert, with_values};
use crate::{CancelToken, Error, Result};

/// A value of the whole batch: a node, its features, and `[tokens, features]`.
struct Kept {
    node: NodeId,
    width: usize,
    values: Vec<f32>,
}

impl Kept {
    /// The rows of `tokens` tokens from `first` on.
    fn piece(&self, first: usize, tokens: usize) -> Result<(NodeId, Tensor)> {
        let rows = &self.values[first * self.width..(first + tokens) * self.width];
        Ok((self.node, Tensor::from_slice(rows, (1, tokens, self.width), &Device::Cpu)?))
    }
}

/// The inputs of a block's experts, and the sum of those that have run.
pub struct ExpertStates {
    layout: BatchLayout,
    /// What the experts read, and each token's weights for them.
    inputs: [Kept; 2],
    /// The node that adds the experts up, and the sum so far.
    sum: Kept,
    /// The output of each expert.
    outputs: Vec<NodeId>,
    /// Experts that are in the sum.
    added: usize,
}

impl ExpertStates {
    /// The inputs of the experts among which `selects` is one that takes its tokens' rows, from states that are the
    /// values of node `from`.
    ///
    /// # Errors
    /// When the block fails or the run is cancelled; [`Error::Internal`] when `selects` belongs to no experts.
    pub fn new(
        states: &HiddenStates,
        block: &Block,
        from: NodeId,
        selects: NodeId,
        cancel: &CancelToken,
    ) -> Result<Self> {
        let graph = block.graph();
        let [x, weights] = graph.nodes()[selects].inputs[..] else { return Err(no_experts(selects)) };
        let node = sum_of(graph, weights).ok_or_else(|| no_experts(selects))?;
        let kept = |node| Kept { node, width: graph.width(node), values: Vec::new() };
        let mut inputs = [kept(x), kept(weights)];
        states.values_between(block, from, [x, weights], cancel, &mut |values| {
            for (kept, value) in inputs.iter_mut().zip(values) {
                with_values(value, |value| {
                    kept.values.extend_from_slice(value);
                    Ok(())
                })?;
            }
            Ok(())
        })?;
        let width = graph.width(node);
        let sum = Kept { node, width, values: vec![0.0; states.tokens() * width] };
        let outputs = graph.nodes()[node].inputs[1..].to_vec();
        Ok(Self { layout: states.layout().clone(), inputs, sum, outputs, added: 0 })
    }

    /// Gathers a statistic of a value inside the expert that `selects` takes rows for: of the expert's own tokens, or of
    /// all, as `sampling` says. Gives how many of these that count are its own, where it was of all.
    ///
    /// # Errors
    /// When the block or the statistic fails, or the run is cancelled.
    pub fn gather(
        &self,
        block: &Block,
        [selects, value]: [NodeId; 2],
        sampling: ExpertSampling,
        cancel: &CancelToken,
        statistic: &mut dyn Statistic,
    ) -> Result<Option<u64>> {
        let expert = self.expert_of(block.graph(), selects).ok_or_else(|| no_experts(selects))?;
        let routed = self.routed(expert);
        if sampling.takes_all(routed) {
            self.gather_all(block, [selects, value], cancel, statistic)?;
            return Ok(Some(routed));
        }
        self.each_piece(block, value, cancel, |first, values, width, tokens| {
            let tokens = TokenRows::indices(tokens).shifted(first);
            match tokens.count() {
                0 => Ok(()),
                _ => statistic.take(&InputRows::new(values, width, tokens, &self.layout)?),
            }
        })?;
        Ok(None)
    }

    /// The same of all tokens, as if each were routed to the expert.
    fn gather_all(
        &self,
        block: &Block,
        [selects, value]: [NodeId; 2],
        cancel: &CancelToken,
        statistic: &mut dyn Statistic,
    ) -> Result<()> {
        for first in (0..self.layout.tokens()).step_by(CHUNK_TOKENS) {
            cancel.check()?;
            let tokens = CHUNK_TOKENS.min(self.layout.tokens() - first);
            let (_, rows) = self.inputs[0].piece(first, tokens)?;
            let tap = &mut CancelTap(cancel);
            let rows = block.evaluate(&[(selects, rows)], &[value], tap)?.swap_remove(0);
            let width = rows.dim(D::Minus1)?;
            with_values(&rows, |rows| {
                statistic.take(&InputRows::new(rows, width, TokenRows::range(first, tokens), &self.layout)?)
            })?;
        }
        Ok(())
    }

    /// How many tokens that count are routed to an expert.
    fn routed(&self, expert: usize) -> u64 {
        let weights = &self.inputs[1];
        let rows = weights.values.chunks_exact(weights.width.max(1)).enumerate();
        rows.filter(|(token, row)| row[expert] != 0.0 && self.layout.counts(*token)).count() as u64
    }

    /// The expert that `selects` takes rows for.
    fn expert_of(&self, graph: &BlockGraph, selects: NodeId) -> Option<usize> {
        self.outputs.iter().position(|output| graph.rows_selected_by(*output) == Some(selects))
    }

    /// The experts that are not in the sum yet, up to the one that `selects` takes rows for; all of them without one.
    pub fn left_before(&self, graph: &BlockGraph, selects: Option<NodeId>) -> std::ops::Range<usize> {
        let end = selects.and_then(|selects| self.expert_of(graph, selects));
        self.added..end.unwrap_or(self.outputs.len()).max(self.added)
    }

    /// Whether the expert that `selects` takes rows for is one of these.
    pub fn have(&self, graph: &BlockGraph, selects: NodeId) -> bool {
        self.expert_of(graph, selects).is_some()
    }

    /// Runs the next expert and adds what it puts out to the sum, or passes it by if the sum is not `wanted`. Gives the
    /// node that selects its rows.
    ///
    /// # Errors
    /// When the block fails or the run is cancelled; [`Error::Internal`] when there is none left.
    pub fn add_next(&mut self, block: &Block, wanted: bool, cancel: &CancelToken) -> Result<Option<NodeId>> {
        let expert = self.added;
        let output = *self.outputs.get(expert).ok_or_else(|| no_experts(expert))?;
        if !wanted {
            self.added += 1;
            return Ok(block.graph().rows_selected_by(output));
        }
        let (width, experts) = (self.sum.width, self.inputs[1].width);
        let mut sum = std::mem::take(&mut self.sum.values);
        let weights = &self.inputs[1].values;
        let added = self.each_piece(block, output, cancel, |first, values, _, _| {
            let tokens = CHUNK_TOKENS.min(self.layout.tokens() - first);
            let weight = |token: usize| weights[(first + token) * experts + expert];
            add_expert(&mut sum[first * width..(first + tokens) * width], width, weight, values)
        });
        self.sum.values = sum;
        added?;
        self.added += 1;
        Ok(block.graph().rows_selected_by(output))
    }

    /// The node that adds the experts up, and its values once all of them ran.
    pub fn into_sum(self) -> (NodeId, Vec<f32>) {
        (self.sum.node, self.sum.values)
    }

    /// Hands over a value inside an expert piece by piece: the piece's first token, the rows, their width, and their
    /// tokens in the piece.
    fn each_piece(
        &self,
        block: &Block,
        value: NodeId,
        cancel: &CancelToken,
        mut take: impl FnMut(usize, &[f32], usize, &[u32]) -> Result<()>,
    ) -> Result<()> {
        for first in (0..self.layout.tokens()).step_by(CHUNK_TOKENS) {
            cancel.check()?;
            let tokens = CHUNK_TOKENS.min(self.layout.tokens() - first);
            let known = [self.inputs[0].piece(first, tokens)?, self.inputs[1].piece(first, tokens)?];
            let (rows, of) = block.evaluate_rows(&known, value, Segments::whole(), &mut CancelTap(cancel))?;
            let (width, of) = (rows.dim(D::Minus1)?, of.ok_or_else(|| no_experts(value))?);
            with_values(&rows, |rows| take(first, rows, width, &of))?;
        }
        Ok(())
    }
}

/// The node that adds up the experts with these weights.
fn sum_of(graph: &BlockGraph, weights: NodeId) -> Option<NodeId> {
    let sums = |id: &NodeId| matches!(graph.nodes()[*id].op, Op::Experts { .. });
    graph.users(weights).map(|(user, _)| user).find(sums)
}

fn no_experts(node: usize) -> Error {
    Error::Internal(format!("node {node} belongs to no expert"))
}
