//! Who watches what the linears of a block read while it runs.

use candle_core::Tensor;

use super::TokenRows;
use super::arch::NodeId;
use crate::{CancelToken, Result};

/// Watches the inputs of linears while a block runs.
pub trait Tap {
    /// Whether it looks at the inputs of linears. If it does not, linears may run several at once, and with the norm or
    /// gate before them: what [`linear_input`](Self::linear_input) is given is then what that reads.
    fn watches(&self) -> bool {
        true
    }

    /// Called before a linear runs, with its input `[…, k]` and the tokens that its rows belong to, by their
    /// places in what the block was given.
    ///
    /// # Errors
    /// Whatever stops the run.
    fn linear_input(&mut self, linear: NodeId, x: &Tensor, tokens: TokenRows<'_>) -> Result<()>;

    /// Called before attention runs, with queries `[batch, positions, heads · head_dim]`, keys
    /// `[batch, positions, kv_heads · head_dim]`, both rotated to their positions, and the tokens of their rows.
    ///
    /// # Errors
    /// Whatever stops the run.
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

/// A [`Tap`] that watches nothing.
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

/// A [`Tap`] that watches nothing, but stops the run between two linears when it is cancelled: in
/// long windows a block takes its time.
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
