//! Token mixers that replace attention, as parts of a block graph.

use super::mamba::Mamba2;
use super::parts::{DecoderBlock, linear};
use super::{Activation, Convolution, DeltaNet, GraphBuilder, NodeId, Op, Recurrent, RecurrentKind};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Mixer {
    /// Linear attention with the gated delta rule.
    GatedDeltaNet(GatedDeltaNet),
    /// A convolution between two gates.
    ShortConvolution(ShortConvolution),
    /// A state-space layer.
    Mamba2(Mamba2),
}

/// `out(c · convolution(b · x))`, where `b`, `c` and `x` are thirds of one linear's output.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ShortConvolution {
    /// Kernel size of the convolution, in tokens.
    pub(super) kernel: usize,
    /// Whether the linears and the convolution have biases.
    pub(super) bias: bool,
}

/// Linear attention with the gated delta rule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct GatedDeltaNet {
    pub(super) net: DeltaNet,
    /// Kernel size of the convolution, in tokens.
    pub(super) kernel: usize,
    pub(super) projections: DeltaProjections,
}

/// The input projections of a gated delta net.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DeltaProjections {
    /// One linear for queries, keys and values, and one each for the gate `z`, `b` and `a`.
    Separate,
    /// Two linears, with rows grouped by key head: one holds its queries and keys, and the values and gates of its
    /// value heads; the other the `b` and `a` of its value heads.
    ByKeyHead,
}

impl Mixer {
    /// Adds the mixer for the input `x`; returns the output of its output projection.
    pub(super) fn add(&self, g: &mut GraphBuilder, x: NodeId, block: &DecoderBlock) -> NodeId {
        match self {
            Self::GatedDeltaNet(net) => net.add(g, x, block),
            Self::ShortConvolution(convolution) => convolution.add(g, x, block.hidden),
            Self::Mamba2(mamba) => mamba.add(g, x, block.hidden),
        }
    }
}

impl ShortConvolution {
    fn add(self, g: &mut GraphBuilder, x: NodeId, hidden: usize) -> NodeId {
        let Self { kernel, bias } = self;
        let all = g.add(linear("conv.in_proj", [3 * hidden, hidden], bias), &[x]);
        let mut third =
            |i: usize| g.add(Op::Slice { period: 3 * hidden, start: i * hidden, width: hidden }, &[all]);
        // Fold groups use the first of several producers. Only a product lies between the output gate and the output
        // projection, so the gate is sliced first.
        let [after, before, x] = [1, 0, 2].map(&mut third);
        let gated = g.add(Op::Multiply, &[before, x]);
        let kind = Convolution { channels: hidden, kernel, bias, activation: None };
        let kind = RecurrentKind::Convolution(kind);
        let convolved = g.add(Op::Recurrent(Recurrent { name: "conv.conv".to_owned(), kind }), &[gated]);
        let product = g.add(Op::Multiply, &[after, convolved]);
        g.add(linear("conv.out_proj", [hidden, hidden], bias), &[product])
    }
}

impl GatedDeltaNet {
    fn add(&self, g: &mut GraphBuilder, x: NodeId, block: &DecoderBlock) -> NodeId {
        let (net, hidden) = (self.net, block.hidden);
        let [qkv, z, b, a] = self.projections.add(g, x, net, hidden);
        let convolution = Convolution {
            channels: net.mixed_width(),
            kernel: self.kernel,
            bias: false,
            activation: Some(Activation::Silu),
        };
        let recurrent = |name: &str, kind| Op::Recurrent(Recurrent { name: name.to_owned(), kind });
        let convolution = recurrent("linear_attn.conv1d", RecurrentKind::Convolution(convolution));
        let mixed = g.add(convolution, &[qkv]);
        let attended = g.add(recurrent("linear_attn", RecurrentKind::DeltaNet(net)), &[mixed, b, a]);
        // Not zero-centered, regardless of the block's other norms.
        let (name, width, eps) = ("linear_attn.norm".to_owned(), net.value_dim, block.norm.eps);
        let normed = g.add(Op::RmsNorm { name, width, eps, zero_centered: false }, &[attended]);
        let gated = g.add(Op::Gated(Activation::Silu), &[z, normed]);
        g.add(linear("linear_attn.out_proj", [hidden, net.width()], false), &[gated])
    }
}

impl DeltaProjections {
    /// Returns queries, keys and values; `z`; `b`; `a`.
    fn add(self, g: &mut GraphBuilder, x: NodeId, net: DeltaNet, hidden: usize) -> [NodeId; 4] {
        // `a` and `b` stay float: errors in a token's decay and step accumulate over all later tokens.
        let float = |name: &str, rows: usize| Op::Linear {
            name: name.to_owned(),
            shape: [rows, hidden],
            bias: false,
            stays_float: true,
        };
        match self {
            Self::Separate => {
                let qkv = g.add(linear("linear_attn.in_proj_qkv", [net.mixed_width(), hidden], false), &[x]);
                let z = g.add(linear("linear_attn.in_proj_z", [net.width(), hidden], false), &[x]);
                let b = g.add(float("linear_attn.in_proj_b", net.value_heads()), &[x]);
                let a = g.add(float("linear_attn.in_proj_a", net.value_heads()), &[x]);
                [qkv, z, b, a]
            }
            Self::ByKeyHead => {
                let values = net.repeat * net.value_dim;
                let period = 2 * net.key_dim + 2 * values;
                let name = "linear_attn.in_proj_qkvz";
                let all = g.add(linear(name, [net.key_heads * period, hidden], false), &[x]);
                let both = g.add(float("linear_attn.in_proj_ba", 2 * net.value_heads()), &[x]);
                let mut slice =
                    |of: NodeId, period, start, width| g.add(Op::Slice { period, start, width }, &[of]);
                let queries = slice(all, period, 0, net.key_dim);
                let keys = slice(all, period, net.key_dim, net.key_dim);
                let v = slice(all, period, 2 * net.key_dim, values);
                let z = slice(all, period, 2 * net.key_dim + values, values);
                let b = slice(both, 2 * net.repeat, 0, net.repeat);
                let a = slice(both, 2 * net.repeat, net.repeat, net.repeat);
                [g.add(Op::Concatenate, &[queries, keys, v]), z, b, a]
            }
        }
    }
}
