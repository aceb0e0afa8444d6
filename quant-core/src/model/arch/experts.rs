//! Mixtures of experts in a block graph: a router, the experts, and the sum of what they put out.
//!
//! Every expert is a part of the graph like any other, with nodes of its own: its linears have names, folds, grids and
//! statistics as all linears have, and a balance list that begins at a norm holds the router and the linears of every
//! expert. What differs is that the values inside an expert have a row for its tokens alone.

use super::{Activation, GraphBuilder, NodeId, Op, Routing};

/// Experts with a gated product each, and where their weights are stored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct GatedExperts {
    /// The router's module.
    pub(super) router: &'static str,
    /// What the module names of experts begin with, before the expert's number.
    pub(super) prefix: &'static str,
    /// Modules of an expert: gate, up, down.
    pub(super) linears: [&'static str; 3],
    /// How a token's experts are chosen.
    pub(super) routing: Routing,
    /// Features between an expert's linears.
    pub(super) intermediate: usize,
}

impl GatedExperts {
    /// Adds the experts that read `x`, `hidden` features wide; gives their sum.
    pub(super) fn add(&self, g: &mut GraphBuilder, x: NodeId, hidden: usize) -> NodeId {
        let Self { router, prefix, linears: [gate, up, down], routing, intermediate } = *self;
        let router = Op::Linear {
            name: router.to_owned(),
            shape: [routing.experts, hidden],
            bias: false,
            stays_float: true,
        };
        let logits = g.add(router, &[x]);
        let weights = g.add(Op::Route(routing), &[logits]);
        let mut terms = vec![weights];
        for expert in 0..routing.experts {
            let linear = |name: &str, shape: [usize; 2]| {
                let name = format!("{prefix}.{expert}.{name}");
                Op::Linear { name, shape, bias: false, stays_float: false }
            };
            let rows = g.add(Op::ExpertInput { expert, routing }, &[x, weights]);
            let gated = g.add(linear(gate, [intermediate, hidden]), &[rows]);
            let raised = g.add(linear(up, [intermediate, hidden]), &[rows]);
            let product = g.add(Op::Gated(Activation::Silu), &[gated, raised]);
            terms.push(g.add(linear(down, [hidden, intermediate]), &[product]));
        }
        g.add(Op::Experts { name: prefix.to_owned() }, &terms)
    }
}
