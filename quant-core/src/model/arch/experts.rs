//! Mixtures of experts in a block graph: a router, the experts, and the sum of their outputs.
//!
//! Every expert has nodes of its own in the graph, so its linears are quantized and balanced like all others. Values
//! inside an expert have rows only for the tokens routed to it. A shared expert reads all tokens; it is an ordinary MLP
//! whose output is added to that of the experts.

use super::parts::fused_gated;
use super::{Activation, Blocks, FusedExperts, GraphBuilder, NodeId, Op, RoutingRule};
use crate::Result;
use crate::checkpoint::ConfigFields;

/// A larger number means that the configuration is damaged.
const MAX_EXPERTS: usize = 4096;

pub(super) const GATE_UP_DOWN: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Gated experts and the names of their weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct GatedExperts {
    pub(super) router: &'static str,
    pub(super) router_bias: bool,
    /// The prefix of expert module names, before the expert's index.
    pub(super) prefix: &'static str,
    /// Modules of an expert: gate, up, down.
    pub(super) linears: [&'static str; 3],
    pub(super) bias: bool,
    pub(super) product: Product,
    pub(super) routing: RoutingRule,
    pub(super) intermediate: usize,
    /// Names inside the block of the tensors that may hold the gates and ups of all experts, and the downs of all
    /// experts.
    pub(super) fused: [&'static str; 2],
    /// Whether gates and ups alternate in the first of these tensors.
    pub(super) alternate: bool,
    /// The expert that reads every token, if there is one.
    pub(super) shared: Option<SharedExpert>,
    /// Whether the shared expert's output and the sum of the others are averaged; otherwise they are added.
    pub(super) averages: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Product {
    /// `silu(gate) · up`.
    Silu,
    /// `gelu(gate) · up`, with the tanh approximation.
    GeluTanh,
    /// The clamped product of gpt-oss; see [`Op::ClampedGated`].
    Clamped { alpha: f32, limit: f32 },
}

/// The shared expert, which reads every token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct SharedExpert {
    /// The module. Its linears are named like those of a dense MLP.
    pub(super) prefix: &'static str,
    pub(super) intermediate: usize,
    /// The linear whose sigmoid scales its output.
    pub(super) gate: Option<&'static str>,
    /// Full names of its linears, if gate and up are fused.
    pub(super) fused: Option<[&'static str; 2]>,
}

impl GatedExperts {
    /// Experts with the names of most families, without biases or a shared expert.
    pub(super) fn new(routing: RoutingRule, intermediate: usize) -> Self {
        Self {
            router: "mlp.gate",
            router_bias: false,
            prefix: "mlp.experts",
            linears: GATE_UP_DOWN,
            bias: false,
            product: Product::Silu,
            routing,
            intermediate,
            fused: ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            alternate: false,
            shared: None,
            averages: false,
        }
    }

    pub(super) fn fused(&self, hidden: usize) -> FusedExperts {
        FusedExperts {
            gate_up: self.fused[0],
            down: self.fused[1],
            bias: self.bias.then_some("_bias"),
            alternate: self.alternate,
            prefix: self.prefix,
            linears: self.linears,
            experts: self.routing.experts,
            hidden,
            intermediate: self.intermediate,
        }
    }

    /// Adds the experts for the input `x` with `hidden` features; returns the sum of all outputs.
    pub(super) fn add(&self, g: &mut GraphBuilder, x: NodeId, hidden: usize) -> NodeId {
        let logits = g.add(self.router(hidden), &[x]);
        let weights = g.add(Op::Route(self.routing), &[logits]);
        let routed = self.add_routed(g, x, [weights, logits], hidden);
        match self.shared {
            None => routed,
            Some(shared) => {
                let shared = shared.add(g, x, hidden);
                let sum = g.add(Op::Add, &[routed, shared]);
                if self.averages { g.add(Op::Scale(0.5), &[sum]) } else { sum }
            }
        }
    }

    pub(super) fn router(&self, hidden: usize) -> Op {
        Op::Linear {
            name: self.router.to_owned(),
            shape: [self.routing.experts, hidden],
            bias: self.router_bias,
            stays_float: true,
        }
    }

    /// Adds only the routed experts, given the token weights and the router's logits; returns their sum.
    pub(super) fn add_routed(
        &self,
        g: &mut GraphBuilder,
        x: NodeId,
        [weights, logits]: [NodeId; 2],
        hidden: usize,
    ) -> NodeId {
        let Self { prefix, linears: [gate, up, down], routing, intermediate, bias, .. } = *self;
        let product = match self.product {
            Product::Silu => Op::Gated(Activation::Silu),
            Product::GeluTanh => Op::Gated(Activation::GeluTanh),
            Product::Clamped { alpha, limit } => Op::ClampedGated { alpha, limit },
        };
        let mut terms = vec![weights];
        for expert in 0..routing.experts {
            let linear = |name: &str, shape: [usize; 2]| {
                let name = format!("{prefix}.{expert}.{name}");
                Op::Linear { name, shape, bias, stays_float: false }
            };
            let inputs = [x, weights, logits];
            let inputs = if routing.on_inputs { &inputs[..] } else { &inputs[..2] };
            let rows = g.add(Op::ExpertInput { expert, routing }, inputs);
            let gated = g.add(linear(gate, [intermediate, hidden]), &[rows]);
            let raised = g.add(linear(up, [intermediate, hidden]), &[rows]);
            let product = g.add(product.clone(), &[gated, raised]);
            terms.push(g.add(linear(down, [hidden, intermediate]), &[product]));
        }
        g.add(Op::Experts { name: prefix.to_owned() }, &terms)
    }
}

impl SharedExpert {
    /// The shared expert of the Qwen families, with the width from the configuration.
    pub(super) fn gated(config: &ConfigFields<'_>) -> Result<Self> {
        Ok(Self {
            prefix: "mlp.shared_expert",
            intermediate: config.require_positive("shared_expert_intermediate_size")?,
            gate: Some("mlp.shared_expert_gate"),
            fused: None,
        })
    }

    fn add(self, g: &mut GraphBuilder, x: NodeId, hidden: usize) -> NodeId {
        let linear = |name: &str, shape: [usize; 2]| {
            let name = format!("{}.{name}", self.prefix);
            Op::Linear { name, shape, bias: false, stays_float: false }
        };
        if let Some(names) = self.fused {
            return fused_gated(g, x, names, Activation::Silu, [self.intermediate, hidden]);
        }
        let [gate, up, down] = GATE_UP_DOWN;
        let gated = g.add(linear(gate, [self.intermediate, hidden]), &[x]);
        let raised = g.add(linear(up, [self.intermediate, hidden]), &[x]);
        let product = g.add(Op::Gated(Activation::Silu), &[gated, raised]);
        let out = g.add(linear(down, [hidden, self.intermediate]), &[product]);
        match self.gate {
            None => out,
            Some(name) => {
                let name = name.to_owned();
                let gate =
                    g.add(Op::Linear { name, shape: [1, hidden], bias: false, stays_float: true }, &[x]);
                g.add(Op::TokenGate, &[out, gate])
            }
        }
    }
}

pub(super) fn routing(config: &ConfigFields<'_>, keys: &[&'static str]) -> Result<RoutingRule> {
    routing_by(config, keys, &["num_experts_per_tok"])
}

/// Reads the number of experts and the number of experts per token. The first key that is present is used; published
/// configurations have the last one.
pub(super) fn routing_by(
    config: &ConfigFields<'_>,
    experts: &[&'static str],
    top_k: &[&'static str],
) -> Result<RoutingRule> {
    let key = |keys: &[&'static str]| {
        let there = keys.iter().find(|key| config.has(key));
        there.or(keys.last()).copied().unwrap_or_default()
    };
    let (experts, top_k) = (key(experts), key(top_k));
    let found = config.require_positive(experts)?;
    if found > MAX_EXPERTS {
        return Err(config.error(experts, format!("is {found}; at most {MAX_EXPERTS} are supported")));
    }
    match config.require_positive(top_k)? {
        max if max <= found => Ok(RoutingRule::new(found, max)),
        max => Err(config.error(top_k, format!("is {max}, but there are only {found} experts"))),
    }
}

/// Returns whether each layer has experts.
pub(super) fn sparse_layers(config: &ConfigFields<'_>) -> Result<Vec<bool>> {
    let step = config.optional_positive("decoder_sparse_step")?.unwrap_or(1);
    let mut sparse: Vec<bool> = (1..=Blocks::layers(config)?).map(|n| n.is_multiple_of(step)).collect();
    for dense in config.optional_usize_list("mlp_only_layers")?.unwrap_or_default() {
        if let Some(layer) = sparse.get_mut(dense) {
            *layer = false;
        }
    }
    Ok(sparse)
}

/// Returns whether each layer is dense (has an MLP and no experts) according to `mlp_layer_types`, if that is present.
pub(super) fn mlp_layer_types(config: &ConfigFields<'_>, layers: usize) -> Result<Option<Vec<bool>>> {
    const TYPES: &str = "mlp_layer_types";
    let Some(types) = config.optional_str_list(TYPES)? else { return Ok(None) };
    if types.len() != layers {
        return Err(config.error(TYPES, format!("has {} entries for {layers} blocks", types.len())));
    }
    match types.iter().find(|kind| !["dense", "sparse"].contains(kind)) {
        Some(other) => {
            let reason = format!("contains an unknown entry, `{}`", other.escape_default());
            Err(config.error(TYPES, reason))
        }
        None => Ok(Some(types.iter().map(|kind| *kind == "dense").collect())),
    }
}
