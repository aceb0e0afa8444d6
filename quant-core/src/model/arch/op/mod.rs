//! The operations of a decoder block, and everything the rest of the pipeline needs to know about each.
//!
//! The matches are exhaustive, so the compiler requires every method here to handle a new operation. Other code calls
//! these methods instead of matching on operations; `tests/stages.rs` lists the exceptions. Values are `[batch,
//! positions, features]`.

mod answers;
mod kinds;
mod properties;

pub use answers::{AttentionInput, ChannelOrder, Computes, Parameter, Reach, RowCoverage, ScalePass};
pub use kinds::{Activation, LayerNormParameters, PositionScale};

use super::recurrent::Recurrent;
use super::{AttentionShape, Correction, RoutingRule};
use crate::model::rope::Rope;

/// The operation of a node.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Op {
    /// The hidden states that enter the block.
    Input {
        /// Features per token.
        width: usize,
    },
    /// Root-mean-square norm of every `width` consecutive features, times a weight of `width`.
    RmsNorm {
        /// Module name inside the block.
        name: String,
        /// Number of features that are normalized together: all input features, or those of a head.
        width: usize,
        /// Added to the mean square.
        eps: f64,
        /// Whether the stored weight is centered at 0: the norm multiplies by `1 + weight`.
        zero_centered: bool,
    },
    /// Every `width` consecutive features divided by their root mean square.
    Normalize {
        /// Number of features that are normalized together.
        width: usize,
        /// Added to the mean square.
        eps: f64,
    },
    /// Every `width` consecutive features normalized to mean 0 and variance 1, then times a weight and plus a bias of
    /// `width`, if it has them.
    LayerNorm {
        /// Module name inside the block.
        name: String,
        /// Number of features that are normalized together.
        width: usize,
        /// The stored parameters.
        parameters: LayerNormParameters,
        /// Added to the variance.
        eps: f64,
    },
    /// `x Wᵀ (+ b)`.
    Linear {
        /// Module name inside the block.
        name: String,
        /// `[out, in]` features.
        shape: [usize; 2],
        /// Whether it has a bias.
        bias: bool,
        /// Whether the weight takes part in folds but is never quantized, such as a router's: rounding would change
        /// which experts run.
        stays_float: bool,
    },
    /// Computes expert weights from a router's logits `[…, experts]`: the weights of the experts that each token is
    /// routed to, and 0 for all others.
    Route(RoutingRule),
    /// Selects the rows of the tokens that are routed to an expert, from the inputs `[x, weights]`. With the router's
    /// logits as a third input, each row is multiplied by the sigmoid of its logit for the expert.
    ExpertInput {
        /// The expert.
        expert: usize,
        /// The routing.
        routing: RoutingRule,
    },
    /// The weighted sum of the expert outputs: each row times its token's weight for the expert, added in the order of
    /// the experts. The inputs are the weights, then the output of each expert.
    Experts {
        /// Module name inside the block.
        name: String,
    },
    /// Rotary position embedding of all heads of the input.
    Rope(Rope),
    /// The input times a position-dependent factor.
    PositionScale(PositionScale),
    /// Causal attention with inputs `[queries, keys, values]`.
    Attention(AttentionShape),
    /// `activation(gate) · up`, with inputs `[gate, up]`.
    Gated(Activation),
    /// An elementwise function of the input.
    Activation(Activation),
    /// Selects `width` of every `period` consecutive features, beginning with feature `start`: one of the values that a
    /// fused linear computes.
    Slice {
        /// The period, which divides the input's width.
        period: usize,
        /// The first selected feature of each period.
        start: usize,
        /// Number of selected features per period.
        width: usize,
    },
    /// The features of all inputs, concatenated.
    Concatenate,
    /// An operation that carries a state from token to token.
    Recurrent(Recurrent),
    /// `min(g, limit) · σ(alpha · min(g, limit)) · (clamp(u, ±limit) + 1)`, with inputs `[g, u]` (gpt-oss).
    ClampedGated {
        /// Factor of the gate inside the sigmoid.
        alpha: f32,
        /// Upper bound of `g`, and of the magnitude of `u`.
        limit: f32,
    },
    /// The first input times the sigmoid of the second, which has one feature per token.
    TokenGate,
    /// Concatenates two inputs per head: for each of `heads` heads, the features of the first input, then those of the
    /// second. An input with a single head is broadcast to all heads.
    JoinHeads {
        /// Number of output heads.
        heads: usize,
        /// Features per head of the two inputs.
        widths: [usize; 2],
    },
    /// The first input, unchanged. The others are the queries, keys and head weights of an indexer, which selects the
    /// keys that each query attends to (DeepSeek-V3.2). Windows are limited to as many tokens as it selects, so that
    /// every key is selected. So the other inputs are never computed; they only take part in folds.
    SelectKeys,
    /// The elementwise product of its two inputs.
    Multiply,
    /// The input times a constant.
    Scale(f32),
    /// The input times stored factors of the block: one for all channels, or one per channel.
    ScaleBy {
        /// The tensor's name inside the block.
        tensor: &'static str,
        /// Number of factors.
        width: usize,
        /// Number of heads, if it is stored as a matrix with one row per head.
        heads: Option<usize>,
    },
    /// The sum of its two inputs.
    Add,
}

enum Stored<'a> {
    Norm {
        name: &'a str,
        width: usize,
        parameters: LayerNormParameters,
        zero_centered: bool,
    },
    Linear {
        shape: [usize; 2],
        stays_float: bool,
    },
    /// Other tensors, or nothing.
    Other,
}

impl Op {
    /// Returns the module name inside the block; empty if the operation is not a module.
    pub fn name(&self) -> &str {
        match self {
            Self::RmsNorm { name, .. }
            | Self::LayerNorm { name, .. }
            | Self::Linear { name, .. }
            | Self::Experts { name } => name,
            Self::Recurrent(recurrent) => &recurrent.name,
            Self::Route(routing) => routing.correction.map_or("", |stored| stored.module),
            Self::Attention(shape) => shape.sinks.unwrap_or(""),
            Self::Input { .. }
            | Self::ExpertInput { .. }
            | Self::Rope(_)
            | Self::PositionScale(_)
            | Self::Gated(_)
            | Self::ClampedGated { .. }
            | Self::TokenGate
            | Self::JoinHeads { .. }
            | Self::SelectKeys
            | Self::Activation(_)
            | Self::Slice { .. }
            | Self::Normalize { .. }
            | Self::Multiply
            | Self::ScaleBy { .. }
            | Self::Concatenate
            | Self::Scale(_)
            | Self::Add => "",
        }
    }

    /// Returns a parameter's name inside the block.
    pub fn tensor_name(&self, parameter: &Parameter) -> String {
        match self.name() {
            "" => parameter.name.to_owned(),
            module => format!("{module}.{}", parameter.name),
        }
    }

    /// Returns the tensors that a checkpoint stores for the operation.
    pub fn parameters(&self) -> Vec<Parameter> {
        let weight = |shape: &[usize]| Parameter { name: "weight", shape: shape.to_vec() };
        let bias = |width: usize| Parameter { name: "bias", shape: vec![width] };
        match self {
            Self::RmsNorm { width, .. } => vec![weight(&[*width])],
            Self::LayerNorm { width, parameters, .. } => match parameters {
                LayerNormParameters::None => Vec::new(),
                LayerNormParameters::Weight => vec![weight(&[*width])],
                LayerNormParameters::WeightAndBias => vec![weight(&[*width]), bias(*width)],
            },
            Self::Linear { shape, bias: true, .. } => vec![weight(shape), bias(shape[0])],
            Self::Linear { shape, bias: false, .. } => vec![weight(shape)],
            Self::Recurrent(recurrent) => recurrent.parameters(),
            Self::Route(routing) => {
                let stored = |c: Correction| Parameter { name: c.tensor, shape: c.shape(routing.experts) };
                routing.correction.map(stored).into_iter().collect()
            }
            Self::Attention(shape) => {
                let stored = |_| Parameter { name: "sinks", shape: vec![shape.heads()] };
                shape.sinks.map(stored).into_iter().collect()
            }
            Self::ScaleBy { tensor, width, heads } => {
                let shape = heads.map_or(vec![*width], |heads| vec![heads, width / heads.max(1)]);
                vec![Parameter { name: tensor, shape }]
            }
            Self::Input { .. }
            | Self::ExpertInput { .. }
            | Self::Experts { .. }
            | Self::Rope(_)
            | Self::PositionScale(_)
            | Self::Gated(_)
            | Self::ClampedGated { .. }
            | Self::TokenGate
            | Self::JoinHeads { .. }
            | Self::SelectKeys
            | Self::Activation(_)
            | Self::Slice { .. }
            | Self::Normalize { .. }
            | Self::Multiply
            | Self::Concatenate
            | Self::Scale(_)
            | Self::Add => Vec::new(),
        }
    }

    /// Returns the name and width of a norm with parameters, and whether it has a bias in addition to the weight.
    pub fn stored_norm(&self) -> Option<(&str, usize, bool)> {
        match self.stored() {
            Stored::Norm { name, width, parameters, .. } => match parameters {
                LayerNormParameters::None => None,
                LayerNormParameters::Weight => Some((name, width, false)),
                LayerNormParameters::WeightAndBias => Some((name, width, true)),
            },
            Stored::Linear { .. } | Stored::Other => None,
        }
    }

    /// Returns the offset that a norm adds to its stored weight: 1 if the weight is zero-centered, else 0.
    pub fn weight_offset(&self) -> f32 {
        match self.stored() {
            Stored::Norm { zero_centered: true, .. } => 1.0,
            Stored::Norm { zero_centered: false, .. } | Stored::Linear { .. } | Stored::Other => 0.0,
        }
    }

    /// Returns whether the operation is a norm with a module name, with or without parameters.
    pub fn is_norm(&self) -> bool {
        matches!(self.stored(), Stored::Norm { .. })
    }

    /// Returns the `[out, in]` features of a linear.
    pub fn linear_shape(&self) -> Option<[usize; 2]> {
        match self.stored() {
            Stored::Linear { shape, .. } => Some(shape),
            Stored::Norm { .. } | Stored::Other => None,
        }
    }

    /// Returns whether the operation is a linear whose weight may be quantized.
    pub fn is_quantizable(&self) -> bool {
        matches!(self.stored(), Stored::Linear { stays_float: false, .. })
    }

    fn stored(&self) -> Stored<'_> {
        match self {
            Self::RmsNorm { name, width, zero_centered, .. } => Stored::Norm {
                name,
                width: *width,
                parameters: LayerNormParameters::Weight,
                zero_centered: *zero_centered,
            },
            Self::LayerNorm { name, width, parameters, .. } => {
                Stored::Norm { name, width: *width, parameters: *parameters, zero_centered: false }
            }
            Self::Linear { shape, stays_float, .. } => {
                Stored::Linear { shape: *shape, stays_float: *stays_float }
            }
            Self::Input { .. }
            | Self::Route(_)
            | Self::ExpertInput { .. }
            | Self::Experts { .. }
            | Self::Rope(_)
            | Self::PositionScale(_)
            | Self::Attention(_)
            | Self::Gated(_)
            | Self::ClampedGated { .. }
            | Self::TokenGate
            | Self::JoinHeads { .. }
            | Self::SelectKeys
            | Self::Activation(_)
            | Self::Slice { .. }
            | Self::Normalize { .. }
            | Self::Multiply
            | Self::ScaleBy { .. }
            | Self::Concatenate
            | Self::Recurrent(_)
            | Self::Scale(_)
            | Self::Add => Stored::Other,
        }
    }

    /// Returns the computation of the operation, with the numbers that exporters need.
    pub fn computes(&self) -> Computes<'_> {
        match self {
            Self::RmsNorm { eps, .. } | Self::LayerNorm { eps, .. } => Computes::Norm { eps: *eps },
            Self::Scale(factor) => Computes::Factor(*factor),
            Self::Rope(rope) => Computes::Rotation(rope),
            Self::Route(routing) => Computes::RoutingRule(routing),
            Self::ExpertInput { expert, .. } => Computes::ExpertRows(*expert),
            Self::Experts { .. } => Computes::ExpertSum,
            Self::Linear { name, shape, bias, .. } => Computes::Linear { name, shape: *shape, bias: *bias },
            Self::Gated(activation) | Self::Activation(activation) => Computes::Activation(*activation),
            Self::ClampedGated { alpha, limit } => Computes::ClampedGated { alpha: *alpha, limit: *limit },
            Self::Input { .. }
            | Self::Attention(_)
            | Self::Slice { .. }
            | Self::TokenGate
            | Self::Recurrent(_)
            | Self::Add => Computes::Structure,
            Self::Normalize { .. }
            | Self::PositionScale(_)
            | Self::JoinHeads { .. }
            | Self::SelectKeys
            | Self::Multiply
            | Self::ScaleBy { .. }
            | Self::Concatenate => Computes::Other,
        }
    }

    /// Returns how many of the operation's inputs, counted from the first, are needed to compute it; `None` for all.
    pub fn needed_inputs(&self) -> Option<usize> {
        matches!(self, Self::SelectKeys).then_some(1)
    }

    /// Returns the routing, if the operation routes tokens to experts.
    pub fn routing(&self) -> Option<&RoutingRule> {
        match self.computes() {
            Computes::RoutingRule(routing) => Some(routing),
            _ => None,
        }
    }

    /// Returns the expert whose rows the operation selects.
    pub fn selected_expert(&self) -> Option<usize> {
        match self.computes() {
            Computes::ExpertRows(expert) => Some(expert),
            _ => None,
        }
    }

    /// Returns whether the operation adds the outputs of all experts.
    pub fn sums_experts(&self) -> bool {
        self.computes() == Computes::ExpertSum
    }

    /// Returns whether the output counts as the residual stream, normalized or not. An engine that splits a model
    /// across devices has the complete stream on each.
    pub fn gives_stream(&self) -> bool {
        match self {
            Self::Input { .. } | Self::Add | Self::RmsNorm { .. } | Self::LayerNorm { .. } => true,
            Self::Linear { .. }
            | Self::Route(_)
            | Self::ExpertInput { .. }
            | Self::Experts { .. }
            | Self::Rope(_)
            | Self::PositionScale(_)
            | Self::Attention(_)
            | Self::Gated(_)
            | Self::ClampedGated { .. }
            | Self::TokenGate
            | Self::JoinHeads { .. }
            | Self::SelectKeys
            | Self::Activation(_)
            | Self::Slice { .. }
            | Self::Normalize { .. }
            | Self::Multiply
            | Self::ScaleBy { .. }
            | Self::Concatenate
            | Self::Recurrent(_)
            | Self::Scale(_) => false,
        }
    }
}
