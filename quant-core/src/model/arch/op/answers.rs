//! What the methods of [`Op`](super::Op) answer.

use super::Activation;
use crate::model::arch::{AttentionShape, Routing};
use crate::model::rope::Rope;

/// How much of the batch one token's value depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// The same token's inputs alone.
    Token,
    /// The token's inputs and its position.
    Position,
    /// Other tokens of its window.
    Window,
}

/// What becomes of positive scales on the channels of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScalePass {
    /// The output does not scale with them.
    Stopped,
    /// A channel scaled by `s` comes out scaled by `s^exponent`, `repeat` times.
    Passed {
        /// The power of the scale.
        exponent: u32,
        /// How often each channel appears in the output.
        repeat: usize,
        /// Consecutive channels that are repeated together.
        run: usize,
    },
}

impl ScalePass {
    /// Every channel passes as it is.
    pub(in crate::model::arch) const UNCHANGED: Self = Self::Passed { exponent: 1, repeat: 1, run: 1 };
}

/// What the channels of an output are made of, as far as they can be reordered.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ChannelOrder {
    /// Rows of a weight: any order.
    OfRows,
    /// The same channel of all inputs.
    OfInputs,
    /// The channels of one input, each within its head.
    OfHeads {
        /// The input.
        port: usize,
        /// The attention that repeats its heads.
        shape: AttentionShape,
    },
    /// An order of their own, which stays.
    Fixed,
}

/// For which tokens a value has a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rows {
    /// For all tokens.
    All,
    /// For the tokens that the inputs have rows for.
    OfInputs,
    /// For some of the tokens of one input, which it takes the rows of.
    Selected {
        /// The input.
        port: usize,
        /// The share of all tokens, if they are spread evenly.
        share: f64,
    },
}

/// What an input is to the attention that reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionInput {
    /// Compared with keys; its error passes through a softmax.
    Queries,
    /// Compared with queries; its error passes through a softmax.
    Keys,
    /// Averaged.
    Values,
}

/// A stored tensor of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Its name after the module's, such as `weight`.
    pub name: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// What an operation computes, for those that describe a graph to another program.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Computes<'a> {
    /// A norm with a place in the checkpoint, with this ε.
    Norm {
        /// Added to the mean square or the variance.
        eps: f64,
    },
    /// A product with a constant.
    Factor(f32),
    /// A rotary position embedding.
    Rotation(&'a Rope),
    /// The choice of experts.
    Routing(&'a Routing),
    /// The selection of one expert's rows.
    ExpertRows(usize),
    /// The sum of all experts' outputs.
    ExpertSum,
    /// A product with a matrix.
    Linear {
        /// Module name inside the block.
        name: &'a str,
        /// `[out, in]` features.
        shape: [usize; 2],
        /// Whether a bias is added.
        bias: bool,
    },
    /// An elementwise function, alone or times another value.
    Activation(Activation),
    /// gpt-oss's product of gate and up.
    ClampedGated {
        /// What the gate is multiplied by inside the sigmoid.
        alpha: f32,
        /// The bound of both inputs.
        limit: f32,
    },
    /// Nothing that its inputs, its module or the shape of its attention do not say.
    Structure,
    /// Something else, which whoever describes the graph must know by name or refuse.
    Other,
}
