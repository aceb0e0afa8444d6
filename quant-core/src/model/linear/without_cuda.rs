//! Replaces GPU support in builds without the feature `cuda`. The types have no values.

use std::convert::Infallible;

use crate::quantize::{InputGrid, QuantizedTensor};
use crate::{Error, Result};

/// The GPU that multiplies quantized linears; has no values in this build.
#[derive(Debug, Clone)]
pub struct CudaRunner(Infallible);

impl CudaRunner {
    /// Returns an error: this build has no GPU support.
    ///
    /// # Errors
    /// [`Error::Unavailable`], always.
    pub fn new() -> Result<Self> {
        Err(Error::Unavailable {
            what: "an NVIDIA GPU".into(),
            reason: "this program was built without the feature `cuda` of quant-core".into(),
            remedy: "build with this feature, or omit ‹device›".into(),
        })
    }

    /// Returns the device name reported by the driver.
    pub fn device(&self) -> &str {
        match self.0 {}
    }

    pub(super) fn put(&self, _: &QuantizedTensor) -> Result<(CudaLinear, Option<InputGrid>)> {
        match self.0 {}
    }
}

/// A weight on the GPU; has no values in this build.
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

pub(super) fn failed(error: &Infallible) -> Error {
    match *error {}
}
