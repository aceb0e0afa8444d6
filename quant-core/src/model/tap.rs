//! Observers of the inputs of a block's linears while it runs.

use candle_core::Tensor;

use super::TokenRows;
use super::arch::NodeId;
use crate::{CancelToken, Result};

/// Observes the inputs of linears while a block runs.
pub trait Tap {
    /// Returns whether the tap observes the inputs of linears. If not, operations may be fused:
    /// [`linear_input`](Self::linear_input) may then get the input of a fused operation, and may not be called for
    /// experts.
    fn watches(&self) -> bool {
        true
    }

    /// Called before a linear runs, with its input `[…, k]` and the tokens of its rows, as indices into the block's
    /// input.
    ///
    /// # Errors
    /// Any error stops the run.
    fn linear_input(&mut self, linear: NodeId, x: &Tensor, tokens: TokenRows<'_>) -> Result<()>;

    /// Called before attention runs, with queries `[batch, positions, heads · head_dim]` and keys
    /// `[batch, positions, kv_heads · head_dim]`, both after the rotary embedding, and the tokens of their rows.
    ///
    /// # Errors
    /// Any error stops the run.
    fn attention_input(
        &mut self,
        _attention: NodeId,
        _q: &Tensor,
        _k: &Tensor,
        _tokens: TokenRows<'_>,
    ) -> Result<()> {
        Ok(())
    }
}

/// A [`Tap`] that observes nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoTap;

impl Tap for NoTap {
    fn watches(&self) -> bool {
        false
    }

    fn linear_input(&mut self, _linear: NodeId, _x: &Tensor, _tokens: TokenRows<'_>) -> Result<()> {
        Ok(())
    }
}

/// A [`Tap`] that observes nothing, but stops a cancelled run at the next linear.
#[derive(Debug, Clone, Copy)]
pub struct CancelTap<'a>(pub &'a CancelToken);

impl Tap for CancelTap<'_> {
    fn watches(&self) -> bool {
        false
    }

    fn linear_input(&mut self, _linear: NodeId, _x: &Tensor, _tokens: TokenRows<'_>) -> Result<()> {
        self.0.check()
    }
}
