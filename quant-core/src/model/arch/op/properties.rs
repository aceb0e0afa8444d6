//! Properties of operations.

use super::{Activation, AttentionInput, ChannelOrder, Op, Reach, RowCoverage, ScalePass};
use crate::model::arch::AttentionShape;

impl Op {
    /// Returns the tokens for which the output has rows.
    pub fn rows(&self) -> RowCoverage {
        match self {
            Self::ExpertInput { routing, .. } => {
                RowCoverage::Selected { port: 0, share: routing.top_k as f64 / routing.experts.max(1) as f64 }
            }
            Self::Input { .. } | Self::Experts { .. } => RowCoverage::All,
            Self::RmsNorm { .. }
            | Self::LayerNorm { .. }
            | Self::Linear { .. }
            | Self::Route(_)
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
            | Self::Add => RowCoverage::OfInputs,
        }
    }

    pub(in crate::model::arch) fn width(&self, inputs: &[usize]) -> usize {
        match self {
            Self::Input { width } => *width,
            Self::Linear { shape, .. } => shape[0],
            Self::Experts { .. } => inputs.last().copied().unwrap_or(0),
            Self::Attention(shape) => shape.heads() * shape.value_dim,
            Self::Concatenate => inputs.iter().sum(),
            Self::Recurrent(recurrent) => recurrent.width(),
            Self::JoinHeads { heads, widths } => heads * (widths[0] + widths[1]),
            Self::Slice { period, width, .. } => inputs.first().map_or(0, |x| x / (*period).max(1) * width),
            Self::RmsNorm { .. }
            | Self::LayerNorm { .. }
            | Self::Route(_)
            | Self::ExpertInput { .. }
            | Self::Rope(_)
            | Self::PositionScale(_)
            | Self::Gated(_)
            | Self::ClampedGated { .. }
            | Self::TokenGate
            | Self::SelectKeys
            | Self::Activation(_)
            | Self::Scale(_)
            | Self::Normalize { .. }
            | Self::Multiply
            | Self::ScaleBy { .. }
            | Self::Add => inputs.first().copied().unwrap_or(0),
        }
    }

    /// Returns how much of the batch one token's output depends on.
    pub fn reach(&self) -> Reach {
        match self {
            Self::Attention(_) | Self::Recurrent(_) => Reach::Window,
            Self::Rope(_) | Self::PositionScale(_) => Reach::Position,
            Self::Input { .. }
            | Self::RmsNorm { .. }
            | Self::LayerNorm { .. }
            | Self::Linear { .. }
            | Self::Route(_)
            | Self::ExpertInput { .. }
            | Self::Experts { .. }
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
            | Self::Add => Reach::Token,
        }
    }

    /// Returns the effect of positive scales on the channels of input `port`.
    pub fn scale_pass(&self, port: usize) -> ScalePass {
        match self {
            Self::Gated(_) if port == 1 => ScalePass::UNCHANGED,
            Self::Activation(Activation::Relu) | Self::Scale(_) | Self::ScaleBy { .. } | Self::Multiply => {
                ScalePass::UNCHANGED
            }
            Self::Activation(Activation::ReluSquared) => ScalePass::Passed { exponent: 2, repeat: 1, run: 1 },
            Self::ExpertInput { .. } if port == 0 => ScalePass::UNCHANGED,
            Self::Attention(shape) if port == 2 => {
                ScalePass::Passed { exponent: 1, repeat: shape.repeat, run: shape.value_dim }
            }
            Self::Recurrent(recurrent) => recurrent.scale_pass(port),
            // A linear absorbs a scale in its columns and is therefore a consumer. An addition would require the same
            // scale on its other inputs, and a concatenation has channels of several inputs. The remaining activations
            // do not commute with scales. The fold group of a fused linear starts after the slice.
            Self::Gated(_)
            | Self::Activation(
                Activation::Silu | Activation::Sigmoid | Activation::Gelu | Activation::GeluTanh,
            )
            | Self::ClampedGated { .. }
            | Self::TokenGate
            | Self::JoinHeads { .. }
            | Self::SelectKeys
            | Self::Slice { .. }
            | Self::Normalize { .. }
            | Self::Concatenate
            | Self::PositionScale(_)
            | Self::Attention(_)
            | Self::Input { .. }
            | Self::RmsNorm { .. }
            | Self::LayerNorm { .. }
            | Self::Linear { .. }
            | Self::Route(_)
            | Self::ExpertInput { .. }
            | Self::Experts { .. }
            | Self::Rope(_)
            | Self::Add => ScalePass::Stopped,
        }
    }

    /// Returns the origin of the output's channels.
    pub fn channel_order(&self) -> ChannelOrder {
        match self {
            Self::Linear { .. } => ChannelOrder::OfRows,
            Self::Activation(_)
            | Self::Gated(_)
            | Self::ClampedGated { .. }
            | Self::Multiply
            | Self::Scale(_)
            | Self::ScaleBy { width: 1, .. } => ChannelOrder::OfInputs,
            Self::Attention(shape) => ChannelOrder::OfHeads { port: 2, shape: *shape },
            Self::Input { .. }
            | Self::RmsNorm { .. }
            | Self::LayerNorm { .. }
            | Self::Route(_)
            | Self::ExpertInput { .. }
            | Self::Experts { .. }
            | Self::Rope(_)
            | Self::PositionScale(_)
            | Self::Slice { .. }
            | Self::Normalize { .. }
            | Self::Concatenate
            | Self::Recurrent(_)
            | Self::TokenGate
            | Self::JoinHeads { .. }
            | Self::SelectKeys
            | Self::ScaleBy { .. }
            | Self::Add => ChannelOrder::Fixed,
        }
    }

    /// Returns the role of input `port` of an attention.
    pub fn attention_input(&self, port: usize) -> Option<AttentionInput> {
        match self {
            Self::Attention(_) => Some(match port {
                0 => AttentionInput::Queries,
                1 => AttentionInput::Keys,
                _ => AttentionInput::Values,
            }),
            Self::Input { .. }
            | Self::RmsNorm { .. }
            | Self::LayerNorm { .. }
            | Self::Linear { .. }
            | Self::Route(_)
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
            | Self::ScaleBy { .. }
            | Self::Concatenate
            | Self::Recurrent(_)
            | Self::Scale(_)
            | Self::Add => None,
        }
    }

    /// Returns whether the output has the same heads as the input, so that both are queries, keys or values alike.
    pub fn keeps_heads(&self) -> bool {
        match self {
            Self::Rope(_)
            | Self::PositionScale(_)
            | Self::Scale(_)
            | Self::ScaleBy { .. }
            | Self::Normalize { .. }
            | Self::Slice { .. }
            | Self::JoinHeads { .. }
            | Self::SelectKeys
            | Self::RmsNorm { .. }
            | Self::LayerNorm { .. } => true,
            Self::Input { .. }
            | Self::Linear { .. }
            | Self::Route(_)
            | Self::ExpertInput { .. }
            | Self::Experts { .. }
            | Self::Attention(_)
            | Self::Gated(_)
            | Self::ClampedGated { .. }
            | Self::TokenGate
            | Self::Activation(_)
            | Self::Concatenate
            | Self::Multiply
            | Self::Recurrent(_)
            | Self::Add => false,
        }
    }

    /// Returns the shape of the keys and values that an attention caches while decoding; recurrent operations cache
    /// their own state.
    pub fn cached(&self) -> Option<AttentionShape> {
        match self {
            Self::Attention(shape) => Some(*shape),
            Self::Input { .. }
            | Self::RmsNorm { .. }
            | Self::LayerNorm { .. }
            | Self::Linear { .. }
            | Self::Route(_)
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
            | Self::ScaleBy { .. }
            | Self::Concatenate
            | Self::Recurrent(_)
            | Self::Scale(_)
            | Self::Add => None,
        }
    }

    /// Returns the number of floating-point operations of matrix products on `tokens` tokens in windows of `length`
    /// tokens, for time estimates. Elementwise operations are not counted.
    pub fn product_operations(&self, tokens: f64, length: f64) -> f64 {
        match self {
            Self::Linear { shape: [n, k], .. } => 2.0 * tokens * *n as f64 * *k as f64,
            Self::Recurrent(recurrent) => recurrent.product_operations(tokens),
            // Products for scores and for weighted values; half of them are masked.
            Self::Attention(shape) => {
                tokens * length * (shape.heads() * (shape.head_dim + shape.value_dim)) as f64
            }
            Self::Input { .. }
            | Self::RmsNorm { .. }
            | Self::LayerNorm { .. }
            | Self::Route(_)
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
            | Self::ScaleBy { .. }
            | Self::Concatenate
            | Self::Scale(_)
            | Self::Add => 0.0,
        }
    }
}
