//! Runs a block's experts one at a time. The input of an expert is computed when it is needed, and only for its tokens.
//! Outputs are added up as experts run, so an expert's weights are needed only while it is processed.

use candle_core::{D, Tensor};

use super::by_expert::{TokensTap, no_rows};
use super::observe::CHUNK_TOKENS;
use super::{BatchLayout, BatchValues, ExpertSampling, HiddenStates, InputRows, Statistic};
use crate::model::{
    Block, BlockGraph, CancelTap, ExpertOrder, NodeId, Tap, TokenRows, add_expert, with_values,
};
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
    sums: BatchValues,
    outputs: Vec<NodeId>,
    /// The number of experts in the sum.
    added: usize,
    /// The first token of each piece of the batch; `None` for pieces of [`CHUNK_TOKENS`].
    pieces: Option<Vec<usize>>,
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
        let mut routed = Routed::new(experts);
        states.values_between(block, from, [weights; 2], cancel, &mut |values| routed.take(&values[0]))?;
        let tokens = routed.tokens;
        let (layout, width) = (states.layout().clone(), graph.width(sum));
        let sums = states.values().zeros_like(states.tokens() * width)?;
        let outputs = graph.nodes()[sum].inputs[1..].to_vec();
        Ok(Self { layout, from, tokens, sum, width, sums, outputs, added: 0, pieces: None })
    }

    /// Routes the tokens of `states`, which are the values of [`ExpertOrder::from`]. All values are computed in the
    /// pieces of a pass of the whole block, so they are bit-identical to those of that pass.
    pub(crate) fn in_parts(
        states: &HiddenStates,
        block: &Block,
        order: &ExpertOrder,
        cancel: &CancelToken,
    ) -> Result<Self> {
        let graph = block.graph();
        let mut routed = Routed::new(graph.width(order.weights));
        let (nodes, tap) = ((order.from, &[order.weights][..]), &mut CancelTap(cancel));
        states.watch_parts(block, nodes, cancel, tap, &mut |_, values| routed.take(&values[0]))?;
        let (layout, sum, width) = (states.layout().clone(), order.sum, graph.width(order.sum));
        let sums = states.values().zeros_like(states.tokens() * width)?;
        let outputs = order.experts.iter().map(|(_, output)| *output).collect();
        let pieces = Some(states.parts(block).into_iter().map(|part| part.start).collect());
        let (from, tokens) = (order.from, routed.tokens);
        Ok(Self { layout, from, tokens, sum, width, sums, outputs, added: 0, pieces })
    }

    /// The number of counted tokens that statistics of an expert see.
    pub(crate) fn counted(&self, block: &Block, selects: NodeId) -> u64 {
        if block.takes_all_rows(selects) {
            return self.layout.counted() as u64;
        }
        let tokens = self.expert_of(block.graph(), selects).map_or(&[][..], |expert| &self.tokens[expert]);
        tokens.iter().filter(|(token, _)| self.layout.counts(*token as usize)).count() as u64
    }

    /// Runs the next expert, and adds its output to the sum if that is `wanted`. If the block runs the expert on all
    /// tokens, `tap` sees all of them, but only those routed to the expert are added.
    pub(crate) fn pass_next(
        &mut self,
        states: &HiddenStates,
        block: &Block,
        tap: &mut dyn Tap,
        wanted: bool,
        cancel: &CancelToken,
    ) -> Result<()> {
        let (expert, graph) = (self.added, block.graph());
        let output = *self.outputs.get(expert).ok_or_else(|| no_experts(expert))?;
        let selects = graph.rows_selected_by(output).ok_or_else(|| no_experts(output))?;
        let nodes = [selects, output];
        if block.takes_all_rows(selects) {
            self.each_piece(states, block, nodes, &self.all_tokens(), (tap, cancel), |_, _, _| Ok(()))?;
            // The sum is computed from products of the same shapes as if the expert had run on its own tokens only.
            if wanted {
                self.add(states, block, (nodes, expert), &mut CancelTap(cancel), true, cancel)?;
            }
            self.added += 1;
            return Ok(());
        }
        if self.tokens[expert].is_empty() {
            // An observer counts linears without tokens too.
            for (id, _, [_, k], _) in graph.linears().filter(|(id, ..)| graph.expert_of(*id) == Some(selects))
            {
                tap.linear_input(id, &no_rows(k)?, TokenRows::indices(&[]))?;
            }
        }
        self.add(states, block, (nodes, expert), tap, wanted, cancel)?;
        self.added += 1;
        Ok(())
    }

    fn all_tokens(&self) -> Vec<u32> {
        (0..self.layout.tokens() as u32).collect()
    }

    fn add(
        &mut self,
        states: &HiddenStates,
        block: &Block,
        (nodes, expert): ([NodeId; 2], usize),
        tap: &mut dyn Tap,
        wanted: bool,
        cancel: &CancelToken,
    ) -> Result<()> {
        let (width, weights) = (self.width, &self.tokens[expert]);
        let tokens: Vec<u32> = weights.iter().map(|(token, _)| *token).collect();
        // Nothing reads the sums while a piece is computed.
        let mut sums = std::mem::replace(&mut self.sums, BatchValues::from(Vec::new()));
        let added = self.each_piece(states, block, nodes, &tokens, (tap, cancel), |tokens, values, _| {
            if !wanted {
                return Ok(());
            }
            let weight = |token: u32| {
                let found = weights.binary_search_by_key(&token, |(token, _)| *token);
                found.map_or(0.0, |i| weights[i].1)
            };
            sums.update_rows(tokens, width, |sums, token| {
                add_expert(sums, width, |row| weight(token(row)), values)
            })
        });
        self.sums = sums;
        added
    }

    /// Gathers a statistic of a value inside the expert for which `selects` selects rows. If the statistic covers all
    /// tokens, as `sampling` may require, returns how many counted tokens are routed to the expert.
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
        let tokens = match takes_all {
            true => self.all_tokens(),
            false => self.tokens[expert].iter().map(|(token, _)| *token).collect(),
        };
        let tap = &mut CancelTap(cancel);
        self.each_piece(states, block, [selects, value], &tokens, (tap, cancel), |tokens, values, width| {
            statistic.take(&InputRows::new(values, width, TokenRows::indices(tokens), &self.layout)?)
        })?;
        Ok(takes_all.then_some(routed))
    }

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
            self.add(states, block, ([selects, output], expert), &mut CancelTap(cancel), true, cancel)?;
        }
        self.added += 1;
        Ok(selects)
    }

    /// The node that sums the experts, and its values after all experts have run.
    pub fn into_sum(self) -> (NodeId, BatchValues) {
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
        (tap, cancel): (&mut dyn Tap, &CancelToken),
        mut take: impl FnMut(&[u32], &[f32], usize) -> Result<()>,
    ) -> Result<()> {
        // Pieces have the same boundaries as if the whole block ran at once, so matrix products have the same shapes.
        let piece_of = |token: u32| match &self.pieces {
            None => token as usize / CHUNK_TOKENS,
            Some(starts) => starts.partition_point(|start| *start <= token as usize),
        };
        for piece in tokens.chunk_by(|a, b| piece_of(*a) == piece_of(*b)) {
            cancel.check()?;
            let before = [(self.from, states.rows(piece)?)];
            let read = block.expert_rows(&before, selects, &mut CancelTap(cancel))?;
            let mut tap = TokensTap { tap: &mut *tap, tokens: piece };
            let rows = block.evaluate(&[(selects, read)], &[value], &mut tap)?.swap_remove(0);
            let width = rows.dim(D::Minus1)?;
            with_values(&rows, |rows| take(piece, rows, width))?;
        }
        Ok(())
    }
}

struct Routed {
    tokens: Vec<Vec<(u32, f32)>>,
    next: u32,
}

impl Routed {
    fn new(experts: usize) -> Self {
        Self { tokens: vec![Vec::new(); experts], next: 0 }
    }

    /// Takes the router weights `[…, experts]` of the next tokens.
    fn take(&mut self, weights: &Tensor) -> Result<()> {
        let Self { tokens, next } = self;
        with_values(weights, |weights| {
            for row in weights.chunks_exact(tokens.len().max(1)) {
                let chosen = tokens.iter_mut().zip(row).filter(|(_, weight)| **weight != 0.0);
                chosen.for_each(|(tokens, weight)| tokens.push((*next, *weight)));
                *next = next
                    .checked_add(1)
                    .ok_or_else(|| Error::Internal("a batch exceeds 2^32 tokens".into()))?;
            }
            Ok(())
        })
    }
}

fn sum_of(graph: &BlockGraph, weights: NodeId) -> Option<NodeId> {
    let sums = |id: &NodeId| graph.nodes()[*id].op.sums_experts();
    graph.users(weights).map(|(user, _)| user).find(sums)
}

fn no_experts(node: usize) -> Error {
    Error::Internal(format!("node {node} does not belong to an expert"))
}
