//! Runs a block's experts one at a time. The input of an expert is computed from the hidden states when it is needed,
//! and only for the tokens routed to that expert, which are kept as an index. Outputs are added up as experts run, so
//! an expert's weights are needed only while it is processed.

use candle_core::D;

use super::observe::CHUNK_TOKENS;
use super::{BatchLayout, ExpertSampling, HiddenStates, InputRows, Statistic, Values};
use crate::model::{Block, BlockGraph, CancelTap, NodeId, TokenRows, add_expert, with_values};
use crate::{CancelToken, Error, Result};

/// The tokens routed to each expert of a block, and the sum of the outputs of the experts that have run. The inputs of
/// experts are computed from the states passed to [`new`](Self::new), which must not change.
pub struct ExpertStates {
    layout: BatchLayout,
    /// The node whose values are the input states.
    from: NodeId,
    /// For each expert, its tokens in ascending order with their router weights.
    tokens: Vec<Vec<(u32, f32)>>,
    /// The node that sums the experts, its number of features, and the sum so far, `[tokens, width]`.
    sum: NodeId,
    width: usize,
    sums: Values,
    /// The output node of each expert.
    outputs: Vec<NodeId>,
    /// The number of experts in the sum.
    added: usize,
}

impl ExpertStates {
    /// Routes the tokens of `states`, which are the values of node `from`. `selects` is the node that selects rows for
    /// any one of the experts.
    ///
    /// # Errors
    /// When the block fails or the run is cancelled; [`Error::Internal`] when `selects` belongs to no expert.
    pub fn new(
        states: &HiddenStates,
        block: &Block,
        from: NodeId,
        selects: NodeId,
        cancel: &CancelToken,
    ) -> Result<Self> {
        let graph = block.graph();
        let [_, weights, ..] = graph.nodes()[selects].inputs[..] else { return Err(no_experts(selects)) };
        let sum = sum_of(graph, weights).ok_or_else(|| no_experts(selects))?;
        let experts = graph.width(weights);
        let mut tokens: Vec<Vec<(u32, f32)>> = vec![Vec::new(); experts];
        let mut first = 0_u32;
        states.values_between(block, from, [weights; 2], cancel, &mut |values| {
            with_values(&values[0], |values| {
                for row in values.chunks_exact(experts.max(1)) {
                    let chosen = tokens.iter_mut().zip(row).filter(|(_, weight)| **weight != 0.0);
                    chosen.for_each(|(tokens, weight)| tokens.push((first, *weight)));
                    first = first
                        .checked_add(1)
                        .ok_or_else(|| Error::Internal("a batch has 2^32 or more tokens".into()))?;
                }
                Ok(())
            })
        })?;
        let (layout, width) = (states.layout().clone(), graph.width(sum));
        let sums = states.values().zeros_like(states.tokens() * width)?;
        let outputs = graph.nodes()[sum].inputs[1..].to_vec();
        Ok(Self { layout, from, tokens, sum, width, sums, outputs, added: 0 })
    }

    /// Gathers a statistic of a value inside the expert for which `selects` selects rows. Depending on `sampling`, the
    /// statistic covers the tokens routed to the expert, or all tokens. If it covers all tokens, returns how many
    /// counted tokens are routed to the expert.
    ///
    /// # Errors
    /// When the block or the statistic fails, or the run is cancelled.
    pub fn gather(
        &self,
        states: &HiddenStates,
        block: &Block,
        [selects, value]: [NodeId; 2],
        (sampling, cancel): (ExpertSampling, &CancelToken),
        statistic: &mut dyn Statistic,
    ) -> Result<Option<u64>> {
        let expert = self.expert_of(block.graph(), selects).ok_or_else(|| no_experts(selects))?;
        let own = self.tokens[expert].iter().filter(|(token, _)| self.layout.counts(*token as usize));
        let routed = own.count() as u64;
        let takes_all = sampling.takes_all(routed);
        let all: Vec<u32> = if takes_all { (0..self.layout.tokens() as u32).collect() } else { Vec::new() };
        let own: Vec<u32> = self.tokens[expert].iter().map(|(token, _)| *token).collect();
        let tokens = if takes_all { &all } else { &own };
        self.each_piece(states, block, [selects, value], tokens, cancel, |tokens, values, width| {
            statistic.take(&InputRows::new(values, width, TokenRows::indices(tokens), &self.layout)?)
        })?;
        Ok(takes_all.then_some(routed))
    }

    /// The expert for which `selects` selects rows.
    fn expert_of(&self, graph: &BlockGraph, selects: NodeId) -> Option<usize> {
        self.outputs.iter().position(|output| graph.rows_selected_by(*output) == Some(selects))
    }

    /// The experts that are not yet in the sum and precede the expert of `selects`, or all experts that are not yet in
    /// the sum if `selects` is `None`.
    pub fn left_before(&self, graph: &BlockGraph, selects: Option<NodeId>) -> std::ops::Range<usize> {
        let end = selects.and_then(|selects| self.expert_of(graph, selects));
        self.added..end.unwrap_or(self.outputs.len()).max(self.added)
    }

    /// Whether `selects` selects rows for one of these experts.
    pub fn have(&self, graph: &BlockGraph, selects: NodeId) -> bool {
        self.expert_of(graph, selects).is_some()
    }

    /// Runs the next expert and adds its output to the sum, or skips the expert if the sum is not `wanted`. Returns the
    /// node that selects its rows.
    ///
    /// # Errors
    /// When the block fails or the run is cancelled; [`Error::Internal`] when no expert is left.
    pub fn add_next(
        &mut self,
        states: &HiddenStates,
        block: &Block,
        wanted: bool,
        cancel: &CancelToken,
    ) -> Result<NodeId> {
        let expert = self.added;
        let output = *self.outputs.get(expert).ok_or_else(|| no_experts(expert))?;
        let selects = block.graph().rows_selected_by(output).ok_or_else(|| no_experts(output))?;
        if wanted {
            let (width, weights) = (self.width, &self.tokens[expert]);
            let tokens: Vec<u32> = weights.iter().map(|(token, _)| *token).collect();
            // Nothing reads the sums while a piece is computed.
            let mut sums = std::mem::replace(&mut self.sums, Values::from(Vec::new()));
            let added =
                self.each_piece(states, block, [selects, output], &tokens, cancel, |tokens, values, _| {
                    let weight = |token: u32| {
                        let found = weights.binary_search_by_key(&token, |(token, _)| *token);
                        found.map_or(0.0, |i| weights[i].1)
                    };
                    sums.update_rows(tokens, width, |sums, token| {
                        add_expert(sums, width, |row| weight(token(row)), values)
                    })
                });
            self.sums = sums;
            added?;
        }
        self.added += 1;
        Ok(selects)
    }

    /// The node that sums the experts, and its values after all experts have run.
    pub fn into_sum(self) -> (NodeId, Values) {
        (self.sum, self.sums)
    }

    /// Computes a value inside an expert for these tokens, which are ascending, and passes it to `take` piece by piece:
    /// the tokens of the piece, the rows, and their width.
    fn each_piece(
        &self,
        states: &HiddenStates,
        block: &Block,
        [selects, value]: [NodeId; 2],
        tokens: &[u32],
        cancel: &CancelToken,
        mut take: impl FnMut(&[u32], &[f32], usize) -> Result<()>,
    ) -> Result<()> {
        // Pieces have the same boundaries as if the whole block ran at once, so matrix products have the same shapes.
        for piece in tokens.chunk_by(|a, b| *a as usize / CHUNK_TOKENS == *b as usize / CHUNK_TOKENS) {
            let tap = &mut CancelTap(cancel);
            cancel.check()?;
            let before = [(self.from, states.rows(piece)?)];
            let read = block.expert_rows(&before, selects, tap)?;
            let rows = block.evaluate(&[(selects, read)], &[value], tap)?.swap_remove(0);
            let width = rows.dim(D::Minus1)?;
            with_values(&rows, |rows| take(piece, rows, width))?;
        }
        Ok(())
    }
}

/// The node that sums the experts with these router weights.
fn sum_of(graph: &BlockGraph, weights: NodeId) -> Option<NodeId> {
    let sums = |id: &NodeId| graph.nodes()[*id].op.sums_experts();
    graph.users(weights).map(|(user, _)| user).find(sums)
}

fn no_experts(node: usize) -> Error {
    Error::Internal(format!("node {node} does not belong to an expert"))
}
