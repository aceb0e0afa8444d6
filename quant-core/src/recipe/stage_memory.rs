//! The memory of GPTQ on a block whose experts come one at a time: the largest of its stages.
//!
//! What a stage holds is what `pipeline/gptq.rs` does: the values between the last point at which the block falls in two
//! and what the stage's linears read, a Hessian and its factor, the weights of the stage, and the codes of the linears that
//! lie between. Where experts run, the sum of their outputs is kept for the whole batch.

use std::collections::BTreeMap;

use super::Plan;
use crate::model::{BlockGraph, Node, NodeId, Op};
use crate::quantize::gptq::Hessian;

/// Tokens that go through a block at a time, unless one window has more.
const CHUNK_TOKENS: u64 = 2048;
/// Bytes of a weight on its way: as it is stored and widened, its codes, and those of the weight before it, packed.
const ON_ITS_WAY: u64 = 2 + 4 + 1 + 1;

impl Plan {
    /// Bytes that the stages of a block hold beside the hidden states that enter it, of a batch of so many tokens.
    pub(super) fn stage_memory(&self, graph: &BlockGraph, tokens: u64) -> u64 {
        let mut stages: BTreeMap<NodeId, Vec<NodeId>> = BTreeMap::new();
        for (id, ..) in graph.linears() {
            stages.entry(graph.nodes()[id].inputs[0]).or_default().push(id);
        }
        let length = self.sampling.length as u64;
        // A longer window goes through attention whole.
        let at_once = CHUNK_TOKENS.max(length).min(tokens.max(1));
        let routed = self.kept_for_experts(graph).saturating_mul(tokens);
        let mut most = 0;
        let mut has_experts = false;
        for (&value, linears) in &stages {
            let from = (0..=value).rev().find(|&node| node == graph.input() || graph.is_cut(node));
            let from = from.unwrap_or(graph.input());
            let selects = graph.rows_selected_by(value);
            has_experts |= selects.is_some();
            let running = 4 * at_once * graph.live_features(selects.unwrap_or(from), value) as u64;
            let weights = |ids: &[NodeId]| ids.iter().map(|id| elements(graph, *id)).sum::<u64>();
            let between: Vec<NodeId> = graph
                .linears()
                .map(|(id, ..)| id)
                .filter(|id| {
                    (from..value).contains(id) && graph.expert_of(*id).is_none_or(|e| Some(e) == selects)
                })
                .collect();
            let codes = weights(&between);
            let largest = linears.iter().map(|id| elements(graph, *id)).max().unwrap_or(0);
            let channels = graph.width(value) as u64;
            let gathering = Hessian::kept_bytes(channels).saturating_add(running);
            let solving = Hessian::peak_bytes(channels);
            let kept = if has_experts { routed } else { 0 };
            let stage = gathering.max(solving).saturating_add(3 * weights(linears) + ON_ITS_WAY * largest);
            most = most.max(kept.saturating_add(codes).saturating_add(stage));
        }
        most
    }

    /// Bytes that are kept for each token while experts run one after the other: the sum of their outputs, and which
    /// experts it is routed to.
    fn kept_for_experts(&self, graph: &BlockGraph) -> u64 {
        let sum = |(id, node): (NodeId, &Node)| {
            matches!(node.op, Op::Experts { .. }).then(|| 4 * graph.width(id) as u64)
        };
        let chosen = |node: &Node| match node.op {
            Op::Route(routing) => Some(8 * routing.top_k as u64),
            _ => None,
        };
        let sums = graph.nodes().iter().enumerate().filter_map(sum).max().unwrap_or(0);
        sums + graph.nodes().iter().filter_map(chosen).max().unwrap_or(0)
    }
}

/// Weights of a linear.
fn elements(graph: &BlockGraph, id: NodeId) -> u64 {
    graph.nodes()[id].op.linear_shape().map_or(0, |[n, k]| (n * k) as u64)
}
