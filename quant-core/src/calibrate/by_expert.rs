//! A pass of the batch through a block, one expert at a time. The weights of an expert are dropped when it has run.
//!
//! The batch is divided into the same pieces as in a pass of the whole block, so all values are bit-identical to it.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::{Device, Tensor};

use super::experts::ExpertStates;
use super::observe::{CHUNK_TOKENS, PieceTap, piece_of, run_piece_to};
use super::{HiddenStates, StatisticsPass};
use crate::model::{Block, ExpertOrder, NodeId, Tap, TokenRows};
use crate::{CancelToken, Result};

/// Adapts a tap on the whole batch to some of its tokens.
pub(super) struct TokensTap<'a, 't> {
    pub(super) tap: &'a mut (dyn Tap + 't),
    pub(super) tokens: &'a [u32],
}

impl Tap for TokensTap<'_, '_> {
    fn watches(&self) -> bool {
        self.tap.watches()
    }

    fn linear_input(&mut self, linear: NodeId, x: &Tensor, _tokens: TokenRows<'_>) -> Result<()> {
        self.tap.linear_input(linear, x, TokenRows::indices(self.tokens))
    }
}

impl HiddenStates {
    /// The pieces of the batch in which a pass evaluates the part of a block after its last operation that mixes
    /// tokens.
    pub(super) fn parts(&self, block: &Block) -> Vec<Range<usize>> {
        let (length, tokens) = (self.layout().length(), self.tokens());
        let splits = length > CHUNK_TOKENS && block.graph().only_mixing().is_some();
        let windows = self.window_piece();
        let pieces = (0..tokens).step_by(windows.max(1)).map(|first| first..(first + windows).min(tokens));
        let inner = |piece: Range<usize>| {
            let size = if splits { CHUNK_TOKENS } else { piece.len().max(1) };
            piece.clone().step_by(size).map(move |first| first..(first + size).min(piece.end))
        };
        pieces.flat_map(inner).collect()
    }

    /// Replaces the states, which are the block's input, with the values of a later node.
    fn advance_watched_to(
        &mut self,
        block: &Block,
        to: NodeId,
        cancel: &CancelToken,
        tap: &mut dyn Tap,
    ) -> Result<()> {
        let (layout, piece) = (self.layout().clone(), self.window_piece());
        if to == block.graph().input() {
            return Ok(());
        }
        self.replace(block.graph().width(to), piece, |first, states, width, put| {
            cancel.check()?;
            let before = piece_of(states, width, layout.length(), piece)?;
            run_piece_to(block, &layout, first, &before, to, tap, put)
        })
    }

    /// Evaluates some nodes from the states, which are the values of `from`.
    pub(super) fn watch_parts(
        &self,
        block: &Block,
        (from, targets): (NodeId, &[NodeId]),
        cancel: &CancelToken,
        tap: &mut dyn Tap,
        take: &mut dyn FnMut(usize, &[Tensor]) -> Result<()>,
    ) -> Result<()> {
        for part in self.parts(block) {
            cancel.check()?;
            let first = part.start;
            let known = [(from, self.part(part)?)];
            let mut tap = PieceTap { tap: &mut *tap, first };
            take(first, &block.evaluate(&known, targets, &mut tap)?)?;
        }
        Ok(())
    }

    /// Replaces the states, which are the values of `from`, with the output of the block, given the sum of its experts.
    pub(crate) fn advance_parts(
        &mut self,
        block: &Block,
        order: &ExpertOrder,
        experts: ExpertStates,
        cancel: &CancelToken,
    ) -> Result<()> {
        let graph = block.graph();
        let (parts, length, output) = (self.parts(block), self.layout().length(), graph.output());
        let (sum, sums) = experts.into_sum();
        let features = graph.width(sum);
        let piece = self.window_piece();
        self.replace(graph.width(output), piece, |first, states, width, put| {
            let end = first + states.len() / width.max(1);
            for part in parts.iter().filter(|part| first <= part.start && part.start < end) {
                cancel.check()?;
                let rows = &states[(part.start - first) * width..(part.end - first) * width];
                let known = sums.read(part.start * features..part.end * features)?;
                let known = [
                    (order.from, piece_of(rows, width, length, part.len())?),
                    (sum, piece_of(&known, features, length, part.len())?),
                ];
                let tap = &mut crate::model::CancelTap(cancel);
                let after = block.evaluate(&known, &[output], tap)?.swap_remove(0);
                put(part.start - first, &after)?;
            }
            Ok(())
        })
    }

    /// The states of a part of the batch, in the shape in which a pass evaluates it.
    fn part(&self, part: Range<usize>) -> Result<Tensor> {
        let (width, tokens) = (self.width(), part.len());
        let values = self.values().read(part.start * width..part.end * width)?;
        piece_of(&values, width, self.layout().length(), tokens)
    }
}

impl StatisticsPass<'_> {
    /// Runs everything that depends on no expert. The states, which are the input of the block, become the values of
    /// [`ExpertOrder::from`].
    pub(crate) fn run_before_experts(
        &mut self,
        states: &mut HiddenStates,
        order: &ExpertOrder,
    ) -> Result<ExpertStates> {
        let (block, cancel) = (self.block(), self.cancel());
        states.advance_watched_to(block, order.from, cancel, self)?;
        let others = order.other_linears(block.graph());
        states.watch_parts(block, (order.from, &others), cancel, self, &mut |_, _| Ok(()))?;
        ExpertStates::in_parts(states, block, order, cancel)
    }

    /// Runs the pass one expert at a time, and drops an expert's weights when it has run. The result, and the states if
    /// `advance` is set, are those of [`run`](Self::run).
    pub(crate) fn run_by_expert(
        mut self,
        states: &mut HiddenStates,
        advance: bool,
        order: &ExpertOrder,
    ) -> Result<BTreeMap<NodeId, u64>> {
        let mut copy;
        let states = match advance {
            true => states,
            false => {
                copy = states.try_clone()?;
                &mut copy
            }
        };
        let (block, cancel) = (self.block(), self.cancel());
        let mut experts = self.run_before_experts(states, order)?;
        for &(selects, _) in &order.experts {
            experts.pass_next(states, block, &mut self, advance, cancel)?;
            block.release_expert(selects);
        }
        if advance {
            states.advance_parts(block, order, experts, cancel)?;
        }
        Ok(self.into_tokens())
    }
}

/// An input without rows, as a linear of an expert without tokens sees it.
pub(super) fn no_rows(width: usize) -> Result<Tensor> {
    Ok(Tensor::from_vec(Vec::<f32>::new(), (1, 0, width), &Device::Cpu)?)
}
