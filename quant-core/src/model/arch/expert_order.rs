//! The split of a block into what precedes its experts, the experts, and what follows them, so that experts can run one
//! at a time over a whole batch.

use super::{BlockGraph, NodeId, Op};

/// A block whose experts can run one after the other, each on all its tokens, so that each expert's weights are needed
/// in one part of a pass only.
///
/// No expert reads the output of another, and no other linear reads their outputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExpertOrder {
    /// The node at which the block is split: everything after it depends only on its value, and on a token's own row.
    pub(crate) from: NodeId,
    /// The router's weights.
    pub(crate) weights: NodeId,
    /// The node that sums the experts.
    pub(crate) sum: NodeId,
    /// For each expert, in order, the node that selects its rows, and its output.
    pub(crate) experts: Vec<(NodeId, NodeId)>,
}

impl ExpertOrder {
    /// `None` if the block has no experts, or if they cannot run one after the other.
    pub(crate) fn of(graph: &BlockGraph) -> Option<Self> {
        let nodes = graph.nodes();
        let mut sums = (0..nodes.len()).filter(|&id| nodes[id].op.sums_experts());
        let sum = sums.next().filter(|_| sums.next().is_none())?;
        let (&weights, outputs) = nodes[sum].inputs.split_first()?;
        let experts = outputs.iter().map(|&output| Some((graph.rows_selected_by(output)?, output)));
        let experts: Vec<_> = experts.collect::<Option<_>>()?;
        let input = nodes[experts.first()?.0].inputs[0];
        // The rows of an expert must be computed from those of its tokens alone, bit for bit. A linear would prevent
        // this, because the rounding of its products depends on the number of rows.
        let alike = |&(selects, _): &(NodeId, NodeId)| nodes[selects].inputs == [input, weights];
        let from = (graph.input()..=input).rev().find(|&id| graph.is_cut(id) || id == graph.input())?;
        let apart = experts.iter().all(alike)
            && !graph.mixes_tokens(from, graph.output())
            && !has_linear(graph, from, input)
            && reads_no_expert(graph, sum);
        apart.then_some(Self { from, weights, sum, experts })
    }

    pub(crate) fn has(&self, selects: NodeId) -> bool {
        self.experts.iter().any(|(id, _)| *id == selects)
    }

    /// Returns the linears after the split that do not belong to an expert.
    pub(crate) fn other_linears(&self, graph: &BlockGraph) -> Vec<NodeId> {
        let linears = graph.linears().map(|(id, ..)| id).filter(|id| *id > self.from);
        linears.filter(|id| graph.expert_of(*id).is_none()).collect()
    }
}

/// Whether node `to` depends on a linear after node `from`.
fn has_linear(graph: &BlockGraph, from: NodeId, to: NodeId) -> bool {
    let mut needed = vec![false; to + 1];
    needed[to] = true;
    (from + 1..=to).rev().any(|id| {
        if needed[id] {
            graph.nodes()[id].inputs.iter().for_each(|&input| needed[input] = true);
        }
        needed[id] && matches!(graph.nodes()[id].op, Op::Linear { .. })
    })
}

/// Whether no linear depends on the sum of the experts, so that all others can run before the experts.
fn reads_no_expert(graph: &BlockGraph, sum: NodeId) -> bool {
    let mut depends = vec![false; graph.nodes().len()];
    depends[sum] = true;
    (sum + 1..graph.nodes().len()).all(|id| {
        depends[id] = graph.nodes()[id].inputs.iter().any(|&input| depends[input]);
        !(depends[id] && graph.nodes()[id].op.linear_shape().is_some())
    })
}
