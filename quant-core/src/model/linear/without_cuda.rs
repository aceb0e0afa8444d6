//! In the place of GPUs, where this crate is built without the feature `cuda`: none is ever found, so there are no weights
//! on one.

use std::convert::Infallible;

use crate::quantize::{InputGrid, QuantizedTensor};
use crate::{Error, Result};

/// The GPU that a model's quantized linears are multiplied on. There is none.
#[derive(Debug, Clone)]
pub struct CudaRunner(Infallible);

impl CudaRunner {
    /// The first GPU.
    ///
    /// # Errors
    /// Always, in this build.
    pub fn new() -> Result<Self> {
        Err(Error::Unavailable {
            what: "an NVIDIA GPU".into(),
            reason: "this program was built without the feature `cuda` of quant-core".into(),
            remedy: "build with it, or leave ‹device› out".into(),
        })
    }

    /// The driver's name of it.
    pub fn device(&self) -> &str {
        match self.0 {}
    }

    pub(super) fn put(&self, _: &QuantizedTensor) -> Result<(CudaLinear, Option<InputGrid>)> {
        match self.0 {}
    }
}

/// A weight on it.
#[derive(Debug)]
pub struct CudaLinear(Infallible);

impl CudaLinear {
    pub(super) fn n(&self) -> usize {
        match self.0 {}
    }

    pub(super) fn k(&self) -> usize {
        match self.0 {}
    }

    pub(super) fn multiply(&self, _: &[f32], _: &mut [f32]) -> std::result::Result<(), Infallible> {
        match self.0 {}
    }
}

/// What went wrong there.
pub(super) fn failed(error: &Infallible) -> Error {
    match *error {}
}
