//! Builds a decoder block from parts: the placement of its norms, its attention and its MLP.

use super::experts::GatedExperts;
use super::gemma4_experts::ParallelExperts;
use super::latent::Latent;
use super::mixers::Mixer;
use super::side_values::{Parts, Sharing, SideValues};
use super::{
    Activation, AttentionShape, BlockGraph, GraphBuilder, LayerNormParameters, NodeId, Op, PositionScale,
};
use crate::model::rope::Rope;

#[derive(Debug, Clone, PartialEq)]
pub(super) struct DecoderBlock {
    /// Width of the residual stream.
    pub(super) hidden: usize,
    pub(super) norm: Norms,
    pub(super) placement: Placement,
    pub(super) attention: Attention,
    pub(super) mixer: Option<Mixer>,
    pub(super) mlp: Mlp,
    /// The factor of the outputs of attention and MLP before they are added to the residual stream.
    pub(super) residual_scale: Option<f32>,
    /// The tensor with a scalar factor of the whole output, if there is one.
    pub(super) output_scale: Option<&'static str>,
    pub(super) parallel_experts: Option<ParallelExperts>,
    pub(super) side_values: SideValues,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Norms {
    pub(super) kind: NormKind,
    pub(super) eps: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NormKind {
    /// RMSNorm: `x / rms(x)` times the weight.
    Rms,
    /// RMSNorm with a weight centered at 0: `x / rms(x)` times 1 + weight.
    RmsZeroCentered,
    /// Layer norm: mean subtracted, divided by the standard deviation, times the weight.
    LayerNormWithoutBias,
    LayerNorm,
}

impl Norms {
    pub(super) fn op(self, name: &str, width: usize) -> Op {
        let (name, eps) = (name.to_owned(), self.eps);
        let layer_norm = |parameters| Op::LayerNorm { name: name.clone(), width, parameters, eps };
        match self.kind {
            NormKind::Rms => Op::RmsNorm { name, width, eps, zero_centered: false },
            NormKind::RmsZeroCentered => Op::RmsNorm { name, width, eps, zero_centered: true },
            NormKind::LayerNormWithoutBias => layer_norm(LayerNormParameters::Weight),
            NormKind::LayerNorm => layer_norm(LayerNormParameters::WeightAndBias),
        }
    }

    fn without_parameters(self, name: &str, width: usize) -> Op {
        let (name, eps, parameters) = (name.to_owned(), self.eps, LayerNormParameters::None);
        match self.kind {
            NormKind::Rms | NormKind::RmsZeroCentered => Op::Normalize { width, eps },
            NormKind::LayerNormWithoutBias | NormKind::LayerNorm => {
                Op::LayerNorm { name, width, parameters, eps }
            }
        }
    }
}

/// The placement of a block's norms, with the module names for attention and MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Placement {
    /// `x + f(norm(x))`.
    Pre([&'static str; 2]),
    /// `x + norm(f(x))`.
    Post([&'static str; 2]),
    /// `x + after(f(before(x)))`: the names of the `before` norms, then of the `after` norms.
    Sandwich([&'static str; 2], [&'static str; 2]),
    /// `x + attention(norm(x)) + mlp(norm(x))`, one norm for both.
    Shared(&'static str),
    /// `x + attention(first(x)) + mlp(second(x))`.
    Parallel([&'static str; 2]),
}

/// The names in most families.
pub(super) const PRE: Placement = Placement::Pre(["input_layernorm", "post_attention_layernorm"]);

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Attention {
    pub(super) shape: AttentionShape,
    pub(super) projections: Projections,
    /// Module name of the output projection.
    pub(super) output: &'static str,
    /// Whether queries, keys and values have biases, and whether the output projection has one.
    pub(super) bias: [bool; 2],
    pub(super) head_norms: Option<HeadNorms>,
    /// Whether value heads are divided by their root mean square.
    pub(super) norms_values: bool,
    /// `None` if queries and keys are not rotated.
    pub(super) rope: Option<Rope>,
    pub(super) position_scale: Option<PositionScale>,
    /// How keys and values are shared with other blocks; `None` if they are not shared.
    pub(super) sharing: Option<Sharing>,
}

/// The linears that compute queries, keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Projections {
    /// One linear each: `self_attn.{q,k,v}_proj`.
    Separate,
    /// One linear each. In the query projection, the rows of each head's query are followed by those of a gate; the
    /// attention output is multiplied by the gate's sigmoid.
    WithOutputGate,
    /// One linear for queries, and one for both keys and values, which are equal before their norms.
    SharedKeysAndValues,
    /// One linear for all, with the rows of queries first, then those of keys and values.
    Fused(&'static str),
    /// One linear for all, with rows grouped by key head: those of its queries, its key and its value.
    FusedByHead(&'static str),
    /// The projections of latent attention.
    Latent(Latent),
}

/// Norms of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HeadNorms {
    pub(super) names: [&'static str; 2],
    /// Whether one norm covers the whole projection; otherwise each head is normalized.
    pub(super) whole_width: bool,
    /// Whether each head has its own weight, stored as `[heads, head_dim]`; otherwise all heads share one.
    pub(super) by_head: bool,
    /// Whether the norms come after the rotation.
    pub(super) after_rope: bool,
    /// Whether the norms have no weight.
    pub(super) weightless: bool,
}

impl HeadNorms {
    pub(super) const DEFAULT: Self = Self {
        names: ["self_attn.q_norm", "self_attn.k_norm"],
        whole_width: false,
        by_head: false,
        after_rope: false,
        weightless: false,
    };
}

// Boxing the large variant is not worth it: only a few values are created per model.
#[allow(clippy::large_enum_variant)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Mlp {
    /// `down(activation(gate) · up)`.
    Gated { activation: Activation, intermediate: usize, bias: bool },
    /// A gated MLP without biases, with the module names of gate, up and down.
    GatedAs { names: [&'static str; 3], activation: Activation, intermediate: usize },
    /// A gated MLP with gate and up in one linear, gate first.
    FusedGated { activation: Activation, intermediate: usize },
    /// A gated MLP with gate and up in one linear, with the module names of both linears.
    FusedGatedAs { names: [&'static str; 2], activation: Activation, intermediate: usize },
    /// `down(activation(up))`, with module names of up and down.
    Plain { names: [&'static str; 2], activation: Activation, intermediate: usize, bias: bool },
    /// A mixture of experts in place of the MLP.
    Experts(GatedExperts),
}

impl DecoderBlock {
    pub(super) fn new(hidden: usize, norm: Norms, attention: Attention, mlp: Mlp) -> Self {
        Self {
            hidden,
            norm,
            placement: PRE,
            attention,
            mixer: None,
            mlp,
            residual_scale: None,
            output_scale: None,
            parallel_experts: None,
            side_values: SideValues::default(),
        }
    }

    pub(super) fn graph(&self) -> BlockGraph {
        let mut g = GraphBuilder::default();
        let mut parts = self.side_values.enter(&mut g, self.hidden);
        let input = parts.stream;
        let side_by_side = match self.placement {
            Placement::Shared(norm) => Some((norm, None)),
            Placement::Parallel([first, second]) => Some((first, Some(second))),
            Placement::Pre(_) | Placement::Post(_) | Placement::Sandwich(..) => None,
        };
        if let Some((first, second)) = side_by_side {
            let x = g.add(self.norm.op(first, self.hidden), &[input]);
            let y = second.map_or(x, |second| g.add(self.norm.op(second, self.hidden), &[input]));
            let attended = self.mix(&mut g, x, &mut parts);
            let out = self.mlp.add(&mut g, y, self.hidden);
            // The two outputs are added before they join the residual stream, so that a search can observe their sum.
            let both = g.add(Op::Add, &[attended, out]);
            let output = self.add_to(&mut g, input, both);
            return self.finish(g, output, &parts);
        }
        let norm = |g: &mut GraphBuilder, name: Option<&str>, x: NodeId| match name {
            Some(name) => g.add(self.norm.op(name, self.hidden), &[x]),
            None => x,
        };
        let (before, after) = match self.placement {
            Placement::Pre(names) => (names.map(Some), [None; 2]),
            Placement::Post(names) => ([None; 2], names.map(Some)),
            Placement::Sandwich(before, after) => (before.map(Some), after.map(Some)),
            Placement::Shared(_) | Placement::Parallel(_) => ([None; 2], [None; 2]),
        };
        let x = norm(&mut g, before[0], input);
        let attended = self.mix(&mut g, x, &mut parts);
        let attended = norm(&mut g, after[0], attended);
        let attended_stream = self.add_to(&mut g, input, attended);
        let x = norm(&mut g, before[1], attended_stream);
        let mut out = self.mlp.add(&mut g, x, self.hidden);
        if let Some(experts) = &self.parallel_experts {
            out = experts.add(&mut g, attended_stream, out, self);
        }
        let out = norm(&mut g, after[1], out);
        let output = self.add_to(&mut g, attended_stream, out);
        self.finish(g, output, &parts)
    }

    fn finish(&self, mut g: GraphBuilder, output: NodeId, parts: &Parts) -> BlockGraph {
        let mut output = self.side_values.add_own(&mut g, output, parts, self);
        if let Some(tensor) = self.output_scale {
            output = g.add(Op::ScaleBy { tensor, width: 1, heads: None }, &[output]);
        }
        self.side_values.leave(&mut g, output, parts);
        g.finish()
    }

    fn mix(&self, g: &mut GraphBuilder, x: NodeId, parts: &mut Parts) -> NodeId {
        match &self.mixer {
            Some(mixer) => mixer.add(g, x, self),
            None => self.attention.add(g, x, self, parts),
        }
    }

    fn add_to(&self, g: &mut GraphBuilder, stream: NodeId, value: NodeId) -> NodeId {
        let value = match self.residual_scale {
            Some(scale) => g.add(Op::Scale(scale), &[value]),
            None => value,
        };
        g.add(Op::Add, &[stream, value])
    }
}

pub(super) fn fused_gated(
    g: &mut GraphBuilder,
    x: NodeId,
    [both, down]: [&str; 2],
    activation: Activation,
    [intermediate, hidden]: [usize; 2],
) -> NodeId {
    let period = 2 * intermediate;
    let both = g.add(linear(both, [period, hidden], false), &[x]);
    let [gate, up] =
        [0, intermediate].map(|start| g.add(Op::Slice { period, start, width: intermediate }, &[both]));
    let product = g.add(Op::Gated(activation), &[gate, up]);
    g.add(linear(down, [hidden, intermediate], false), &[product])
}

pub(super) fn linear(name: &str, shape: [usize; 2], bias: bool) -> Op {
    Op::Linear { name: name.to_owned(), shape, bias, stays_float: false }
}

impl Attention {
    fn add(&self, g: &mut GraphBuilder, x: NodeId, block: &DecoderBlock, parts: &mut Parts) -> NodeId {
        let (hidden, head_dim, [bias, o_bias]) = (block.hidden, self.shape.head_dim, self.bias);
        let out = linear(self.output, [hidden, self.shape.heads() * self.shape.value_dim], o_bias);
        if let Some(Sharing::Reads(pair)) = self.sharing
            && let Some([k, v]) = parts.shared[pair]
        {
            let q_width = self.shape.heads() * head_dim;
            let mut q = g.add(linear("self_attn.q_proj", [q_width, hidden], bias), &[x]);
            if let Some(norms) = self.head_norms {
                q = g.add(block.norm.op(norms.names[0], head_dim), &[q]);
            }
            if let Some(rope) = &self.rope {
                q = g.add(Op::Rope(rope.clone()), &[q]);
            }
            let attended = g.add(Op::Attention(self.shape), &[q, k, v]);
            return g.add(out, &[attended]);
        }
        if let (Projections::Latent(latent), Some(rope)) = (self.projections, &self.rope) {
            let mut inputs = latent.add(g, x, hidden, (self.shape, rope, bias));
            if let Some(scale) = self.position_scale {
                inputs[0] = g.add(Op::PositionScale(scale), &[inputs[0]]);
            }
            let attended = g.add(Op::Attention(self.shape), &inputs);
            return g.add(out, &[attended]);
        }
        let (q_width, kv_width) = (self.shape.heads() * head_dim, self.shape.kv_heads * head_dim);
        let mut gate = None;
        let [mut q, mut k, mut v] = match self.projections {
            Projections::WithOutputGate => {
                let both = g.add(linear("self_attn.q_proj", [2 * q_width, hidden], bias), &[x]);
                let [k, v] = ["k", "v"].map(|letter| {
                    g.add(linear(&format!("self_attn.{letter}_proj"), [kv_width, hidden], bias), &[x])
                });
                let [q, output] = [0, head_dim]
                    .map(|start| g.add(Op::Slice { period: 2 * head_dim, start, width: head_dim }, &[both]));
                gate = Some(output);
                [q, k, v]
            }
            Projections::Separate | Projections::Latent(_) => {
                [("q", q_width), ("k", kv_width), ("v", kv_width)].map(|(letter, width)| {
                    g.add(linear(&format!("self_attn.{letter}_proj"), [width, hidden], bias), &[x])
                })
            }
            Projections::SharedKeysAndValues => {
                let [q, k] = [("q", q_width), ("k", kv_width)].map(|(letter, width)| {
                    g.add(linear(&format!("self_attn.{letter}_proj"), [width, hidden], bias), &[x])
                });
                [q, k, k]
            }
            Projections::FusedByHead(name) => {
                let all = g.add(linear(name, [q_width + 2 * kv_width, hidden], bias), &[x]);
                let (period, queries) = ((self.shape.repeat + 2) * head_dim, self.shape.repeat * head_dim);
                [(0, queries), (queries, head_dim), (queries + head_dim, head_dim)]
                    .map(|(start, width)| g.add(Op::Slice { period, start, width }, &[all]))
            }
            Projections::Fused(name) => {
                let period = q_width + 2 * kv_width;
                let all = g.add(linear(name, [period, hidden], bias), &[x]);
                [(0, q_width), (q_width, kv_width), (q_width + kv_width, kv_width)]
                    .map(|(start, width)| g.add(Op::Slice { period, start, width }, &[all]))
            }
        };
        if let Some(norms) = self.head_norms.filter(|norms| !norms.after_rope) {
            [q, k] = norms.add(g, [q, k], self.shape, block.norm);
        }
        if let Some(rope) = &self.rope {
            [q, k] = [q, k].map(|value| g.add(Op::Rope(rope.clone()), &[value]));
        }
        if let Some(norms) = self.head_norms.filter(|norms| norms.after_rope) {
            [q, k] = norms.add(g, [q, k], self.shape, block.norm);
        }
        if let Some(scale) = self.position_scale {
            q = g.add(Op::PositionScale(scale), &[q]);
        }
        if self.norms_values {
            v = g.add(Op::Normalize { width: head_dim, eps: block.norm.eps }, &[v]);
        }
        if let Some(Sharing::Makes(pair)) = self.sharing {
            parts.shared[pair] = Some([k, v]);
        }
        let mut attended = g.add(Op::Attention(self.shape), &[q, k, v]);
        if let Some(gate) = gate {
            attended = g.add(Op::Gated(Activation::Sigmoid), &[gate, attended]);
        }
        g.add(out, &[attended])
    }
}

impl HeadNorms {
    fn add(
        self,
        g: &mut GraphBuilder,
        values: [NodeId; 2],
        shape: AttentionShape,
        norm: Norms,
    ) -> [NodeId; 2] {
        if self.by_head {
            const WEIGHTS: [&str; 2] = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"];
            return [(0, shape.heads()), (1, shape.kv_heads)].map(|(i, heads)| {
                let normed = g.add(norm.without_parameters(self.names[i], shape.head_dim), &[values[i]]);
                let scale =
                    Op::ScaleBy { tensor: WEIGHTS[i], width: heads * shape.head_dim, heads: Some(heads) };
                g.add(scale, &[normed])
            });
        }
        if self.weightless {
            let norm = |i: usize| norm.without_parameters(self.names[i], shape.head_dim);
            return [0, 1].map(|i| g.add(norm(i), &[values[i]]));
        }
        let widths = match self.whole_width {
            true => [shape.heads(), shape.kv_heads].map(|heads| heads * shape.head_dim),
            false => [shape.head_dim; 2],
        };
        [0, 1].map(|i| g.add(norm.op(self.names[i], widths[i]), &[values[i]]))
    }
}

impl Mlp {
    fn add(&self, g: &mut GraphBuilder, x: NodeId, hidden: usize) -> NodeId {
        match *self {
            Self::Gated { activation, intermediate, bias } => {
                let gate = g.add(linear("mlp.gate_proj", [intermediate, hidden], bias), &[x]);
                let up = g.add(linear("mlp.up_proj", [intermediate, hidden], bias), &[x]);
                let product = g.add(Op::Gated(activation), &[gate, up]);
                g.add(linear("mlp.down_proj", [hidden, intermediate], bias), &[product])
            }
            Self::GatedAs { names: [gate, up, down], activation, intermediate } => {
                let gate = g.add(linear(gate, [intermediate, hidden], false), &[x]);
                let up = g.add(linear(up, [intermediate, hidden], false), &[x]);
                let product = g.add(Op::Gated(activation), &[gate, up]);
                g.add(linear(down, [hidden, intermediate], false), &[product])
            }
            Self::FusedGated { activation, intermediate } => {
                let names = ["mlp.gate_up_proj", "mlp.down_proj"];
                fused_gated(g, x, names, activation, [intermediate, hidden])
            }
            Self::FusedGatedAs { names, activation, intermediate } => {
                fused_gated(g, x, names, activation, [intermediate, hidden])
            }
            Self::Plain { names: [up, down], activation, intermediate, bias } => {
                let up = g.add(linear(up, [intermediate, hidden], bias), &[x]);
                let activated = g.add(Op::Activation(activation), &[up]);
                g.add(linear(down, [hidden, intermediate], bias), &[activated])
            }
            Self::Experts(experts) => experts.add(g, x, hidden),
        }
    }
}
