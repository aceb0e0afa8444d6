//! The return types of the methods of [`Op`](super::Op).

use super::Activation;
use crate::model::arch::{AttentionShape, RoutingRule};
use crate::model::rope::Rope;

/// How much of the batch one token's value depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Reach {
    /// A token's value depends only on the same token's inputs.
    Token,
    /// A token's value depends on its inputs and its position.
    Position,
    /// A token's value depends on other tokens of its window.
    Window,
}

/// The effect of positive scales on the channels of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScalePass {
    /// The output is not proportional to the scales.
    Stopped,
    /// If an input channel is multiplied by `s`, its `repeat` output channels are multiplied by `s^exponent`.
    Passed {
        /// The exponent of the scale.
        exponent: u32,
        /// Number of times each channel appears in the output.
        repeat: usize,
        /// Number of consecutive channels that are repeated together.
        run: usize,
    },
}

impl ScalePass {
    /// Every channel passes with its scale unchanged.
    pub(in crate::model::arch) const UNCHANGED: Self = Self::Passed { exponent: 1, repeat: 1, run: 1 };
}

/// The origin of an output's channels, with regard to reordering.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum ChannelOrder {
    /// Rows of a weight: they can have any order.
    OfRows,
    /// The same channels as all inputs.
    OfInputs,
    /// The channels of one input, which can be reordered within heads.
    OfHeads {
        /// The input.
        port: usize,
        /// The attention that repeats its heads.
        shape: AttentionShape,
    },
    /// The order is fixed.
    Fixed,
}

/// The tokens for which a value has rows.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum RowCoverage {
    /// All tokens.
    All,
    /// The same tokens as the inputs.
    OfInputs,
    /// Some of the tokens of one input, whose rows are selected.
    Selected {
        /// The input.
        port: usize,
        /// The fraction of all tokens, if they are distributed evenly.
        share: f64,
    },
}

/// The role of an attention's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttentionInput {
    /// Queries. Their errors pass through a softmax.
    Queries,
    /// Keys. Their errors pass through a softmax.
    Keys,
    /// Values, which are averaged with the attention weights.
    Values,
}

/// A stored tensor of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Parameter {
    /// The name within the module, such as `weight`.
    pub name: &'static str,
    /// The shape.
    pub shape: Vec<usize>,
}

/// The computation of an operation, for code that exports a graph to another program.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Computes<'a> {
    /// A norm with a module name, with or without parameters.
    Norm {
        /// The epsilon that is added to the mean square or the variance.
        eps: f64,
    },
    /// A product with a constant.
    Factor(f32),
    /// A rotary position embedding.
    Rotation(&'a Rope),
    /// The routing of tokens to experts.
    RoutingRule(&'a RoutingRule),
    /// The selection of one expert's rows.
    ExpertRows(usize),
    /// The sum of all experts' outputs.
    ExpertSum,
    /// A matrix product.
    Linear {
        /// Module name inside the block.
        name: &'a str,
        /// `[out, in]` features.
        shape: [usize; 2],
        /// Whether there is a bias.
        bias: bool,
    },
    /// An elementwise function, possibly multiplied by another value.
    Activation(Activation),
    /// gpt-oss's clamped product of gate and up.
    ClampedGated {
        /// Factor of the gate inside the sigmoid.
        alpha: f32,
        /// Upper bound of the gate, and of the magnitude of the other factor.
        limit: f32,
    },
    /// An operation whose other properties exporters read from the graph.
    Structure,
    /// Anything else: the exporter must handle it by name or reject it.
    Other,
}
