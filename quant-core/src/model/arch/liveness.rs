//! How much of a block's values is in memory at a time while some of them are computed.

use super::{BlockGraph, NodeId};

impl BlockGraph {
    /// Features of a token that are held at the most while the value of a node is computed from that of another, where each
    /// value goes when nothing that is still to be computed reads it.
    pub fn live_features(&self, from: NodeId, to: NodeId) -> usize {
        let nodes = self.nodes();
        let mut needed = vec![false; nodes.len()];
        let mut uses = vec![0_usize; nodes.len()];
        needed[to] = true;
        uses[to] = 1;
        for id in (0..nodes.len()).rev().filter(|id| *id != from) {
            if needed[id] {
                for &input in &nodes[id].inputs {
                    needed[input] = true;
                    uses[input] += 1;
                }
            }
        }
        let mut live = self.width(from);
        let mut most = live;
        for id in (0..=to).filter(|id| *id != from && needed[*id]) {
            live += self.width(id);
            most = most.max(live);
            for &input in &nodes[id].inputs {
                uses[input] -= 1;
                // What was not counted when it came is a constant, or lies before `from`.
                if uses[input] == 0 {
                    live = live.saturating_sub(self.width(input));
                }
            }
        }
        most
    }
}

#[cfg(test)]
mod tests {
    use crate::model::arch::{Activation, GraphBuilder, Op};

    #[test]
    fn values_go_with_their_last_reader() {
        let mut g = GraphBuilder::default();
        let linear = |name: &str, shape: [usize; 2]| Op::Linear {
            name: name.to_owned(),
            shape,
            bias: false,
            stays_float: false,
        };
        let x = g.add(Op::Input { width: 8 }, &[]);
        let gate = g.add(linear("gate", [20, 8]), &[x]);
        let up = g.add(linear("up", [20, 8]), &[x]);
        let product = g.add(Op::Gated(Activation::Silu), &[gate, up]);
        let down = g.add(linear("down", [8, 20]), &[product]);
        let sum = g.add(Op::Add, &[x, down]);
        let graph = g.finish();
        assert_eq!(graph.live_features(x, gate), 28);
        assert_eq!(graph.live_features(x, product), 8 + 3 * 20);
        assert_eq!(graph.live_features(x, sum), 8 + 3 * 20);
        assert_eq!(graph.live_features(product, down), 28);
    }
}
