//! The stored parameters of operations that are neither norms nor linears.

use crate::{Error, Result};

/// The values of an operation's tensors, in the order of [`Op::parameters`](super::arch::Op::parameters).
#[derive(Debug, Clone)]
pub struct OpParameters(pub(super) Vec<Vec<f32>>);

impl OpParameters {
    pub(super) fn first(&self) -> Option<&[f32]> {
        self.0.first().map(Vec::as_slice)
    }

    pub(super) fn number(&self) -> Result<f32> {
        match &self.0[..] {
            [values] if values.len() == 1 => Ok(values[0]),
            _ => Err(Error::Internal("an operation has parameters other than a single number".into())),
        }
    }
}
