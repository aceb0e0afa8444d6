//! Experts in addition to the MLP of a block. The router reads the residual stream, divided by its root mean square and
//! by `√hidden`, and multiplied by a stored scale.

use super::experts::{GATE_UP_DOWN, GatedExperts, Product, routing_by};
use super::parts::DecoderBlock;
use super::{GraphBuilder, NodeId, Op, RoutingRule};
use crate::Result;
use crate::checkpoint::ConfigFields;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ParallelExperts(pub(super) GatedExperts);

impl ParallelExperts {
    pub(super) fn read(config: &ConfigFields<'_>) -> Result<Self> {
        let routing = routing_by(config, &["num_experts"], &["top_k_experts"])?;
        let routing = RoutingRule { normalized: true, ..routing };
        let intermediate = config.require_positive("moe_intermediate_size")?;
        Ok(Self(GatedExperts {
            router: "router.proj",
            prefix: "experts",
            linears: GATE_UP_DOWN,
            product: Product::GeluTanh,
            fused: ["experts.gate_up_proj", "experts.down_proj"],
            ..GatedExperts::new(routing, intermediate)
        }))
    }

    /// Adds the experts for the residual stream `x`; returns the sum of their output and the MLP's.
    pub(super) fn add(&self, g: &mut GraphBuilder, x: NodeId, mlp: NodeId, block: &DecoderBlock) -> NodeId {
        let (experts, hidden) = (&self.0, block.hidden);
        let norm = |g: &mut GraphBuilder, name: &str, x: NodeId| g.add(block.norm.op(name, hidden), &[x]);
        let mlp = norm(g, "post_feedforward_layernorm_1", mlp);
        let normalized = g.add(Op::Normalize { width: hidden, eps: block.norm.eps }, &[x]);
        let scaled = g.add(Op::ScaleBy { tensor: "router.scale", width: hidden, heads: None }, &[normalized]);
        let scaled = g.add(Op::Scale((1.0 / (hidden as f64).sqrt()) as f32), &[scaled]);
        let logits = g.add(experts.router(hidden), &[scaled]);
        let weights = g.add(Op::Route(experts.routing), &[logits]);
        let (tensor, width) = ("router.per_expert_scale", experts.routing.experts);
        let scales = Op::ScaleBy { tensor, width, heads: None };
        let weights = g.add(scales, &[weights]);
        let normed = norm(g, "pre_feedforward_layernorm_2", x);
        let routed = experts.add_routed(g, normed, [weights, logits], hidden);
        let routed = norm(g, "post_feedforward_layernorm_2", routed);
        g.add(Op::Add, &[mlp, routed])
    }
}
