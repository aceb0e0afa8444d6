//! Blocks some of whose experts run on all tokens: what calibration watches where those that are routed to an expert say
//! too little of its inputs. What the block puts out stays the same: the sum of experts takes the rows of routed tokens.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::Block;
use super::arch::NodeId;

impl Block {
    /// The same block with these experts, each by the node that selects its tokens' rows, run on all tokens.
    pub fn unrouted(&self, experts: BTreeSet<NodeId>) -> Self {
        let mut block = self.clone();
        block.unrouted = Arc::new(experts);
        block
    }

    /// The same block with every expert run on its own tokens.
    pub fn routed(&self) -> Self {
        self.unrouted(BTreeSet::new())
    }

    /// Whether some expert runs on all tokens.
    pub fn runs_unrouted(&self) -> bool {
        !self.unrouted.is_empty()
    }

    /// Whether a node that selects an expert's rows takes those of all tokens.
    pub(super) fn takes_all_rows(&self, selects: NodeId) -> bool {
        self.unrouted.contains(&selects)
    }

    /// The share of all tokens that a node's value has rows for, if tokens are spread evenly over experts.
    pub fn share_of_tokens(&self, id: NodeId) -> f64 {
        match self.graph().rows_selected_by(id) {
            Some(selects) if self.takes_all_rows(selects) => 1.0,
            _ => self.graph().share_of_tokens(id),
        }
    }
}
