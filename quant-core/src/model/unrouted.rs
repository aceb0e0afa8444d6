//! Blocks in which some experts run on all tokens. Calibration uses them if too few tokens are routed to an expert. The
//! block's output is unchanged, because the sum of experts only uses the rows of routed tokens.

use std::collections::BTreeSet;
use std::sync::Arc;

use candle_core::{D, Tensor};

use super::arch::NodeId;
use super::{Block, Tap, experts};
use crate::{Error, Result};

impl Block {
    /// Returns the block with these experts, each given by the node that selects its rows, run on all tokens.
    pub fn unrouted(&self, experts: BTreeSet<NodeId>) -> Self {
        let mut block = self.clone();
        block.unrouted = Arc::new(experts);
        block
    }

    /// Returns the block with every expert run on its own tokens.
    pub fn routed(&self) -> Self {
        self.unrouted(BTreeSet::new())
    }

    /// Returns whether some expert runs on all tokens.
    pub fn runs_unrouted(&self) -> bool {
        !self.unrouted.is_empty()
    }

    /// Whether an expert, given by the node that selects its rows, runs on all tokens.
    pub(crate) fn takes_all_rows(&self, selects: NodeId) -> bool {
        self.unrouted.contains(&selects)
    }

    /// Returns the input of an expert for all known tokens, as if each were routed to it: `[…, width]`. `selects` is
    /// the node that selects the expert's rows.
    pub(crate) fn expert_rows(
        &self,
        known: &[(NodeId, Tensor)],
        selects: NodeId,
        tap: &mut dyn Tap,
    ) -> Result<Tensor> {
        let node = &self.graph().nodes()[selects];
        let (input, logits, expert) = match (&node.inputs[..], node.op.selected_expert()) {
            ([input, _], Some(expert)) => (*input, None, expert),
            ([input, _, logits], Some(expert)) => (*input, Some(*logits), expert),
            _ => {
                return Err(Error::Internal(format!("node {selects} does not select the rows of an expert")));
            }
        };
        let Some(logits) = logits else { return Ok(self.evaluate(known, &[input], tap)?.swap_remove(0)) };
        let [rows, logits] = &self.evaluate(known, &[input, logits], tap)?[..] else {
            return Err(Error::Internal("expected exactly one value per node".into()));
        };
        let tokens = rows.elem_count() / rows.dim(D::Minus1)?.max(1);
        experts::scale_rows(rows, logits, &(0..tokens as u32).collect::<Vec<_>>(), expert)
    }

    /// Returns the fraction of all tokens that a node's value has rows for, if tokens are distributed evenly over
    /// experts.
    pub fn share_of_tokens(&self, id: NodeId) -> f64 {
        match self.graph().rows_selected_by(id) {
            Some(selects) if self.takes_all_rows(selects) => 1.0,
            _ => self.graph().share_of_tokens(id),
        }
    }
}
