//! Quantized linears on an NVIDIA GPU: weights lie there, activations go there and come back.

use std::sync::Arc;

pub use quant_kernels_cuda::standalone::Linear as CudaLinear;
use quant_kernels_cuda::standalone::{Activations, Runner};

use crate::quantize::{InputGrid, QuantizedTensor};
use crate::{Error, Result};

/// The GPU that a model's quantized linears are multiplied on; clones share it.
#[derive(Debug, Clone)]
pub struct CudaRunner(Arc<Runner>);

impl CudaRunner {
    /// The first GPU.
    ///
    /// # Errors
    /// When there is no driver or device, it is too old, or this program cannot load a driver's library.
    pub fn new() -> Result<Self> {
        if cfg!(target_feature = "crt-static") {
            return Err(Error::Unavailable {
                what: "an NVIDIA GPU".into(),
                reason: "this program is linked statically, and loads no libraries".into(),
                remedy: "build one with `cargo build --release`, or leave ‹device› out".into(),
            });
        }
        let runner = Runner::new().map_err(|e| Error::Unavailable {
            what: "an NVIDIA GPU".into(),
            reason: e.to_string(),
            remedy: "run where there is one with its driver, or leave ‹device› out".into(),
        })?;
        Ok(Self(Arc::new(runner)))
    }

    /// The driver's name of it.
    pub fn device(&self) -> &str {
        self.0.device()
    }

    /// Packs a weight and puts it there; with the grid of floating-point numbers that its input is rounded to before.
    ///
    /// # Errors
    /// When the kernels have no such scheme, or there is not enough memory.
    pub(super) fn put(&self, tensor: &QuantizedTensor) -> Result<(CudaLinear, Option<InputGrid>)> {
        let (activations, grid) = match tensor.input_grid()? {
            None => (Activations::Float, None),
            Some(InputGrid::Token) => (Activations::PerToken, None),
            Some(InputGrid::Static(by)) => (Activations::Static(by), None),
            // Rounded here, and multiplied there as floats: a product of two floating-point formats there is not.
            Some(grid) => (Activations::Float, Some(grid)),
        };
        let codes = tensor.global.and_then(|_| tensor.scale_codes());
        let linear = CudaLinear::new(&tensor.view_with(codes.as_deref())?, activations, &self.0);
        Ok((linear.map_err(|e| failed(&e))?, grid))
    }
}

/// What went wrong there, and what to do about it.
pub(super) fn failed(error: &quant_kernels_cuda::Error) -> Error {
    let (what, remedy) = match error {
        quant_kernels_cuda::Error::Operands(_) => {
            ("a product on a GPU", "leave ‹device› out: the kernels for processors take these weights")
        }
        _ => ("a product on a GPU", "leave ‹device› out, or see docs/kernels/cuda-host.md"),
    };
    Error::Unavailable { what: what.into(), reason: error.to_string(), remedy: remedy.into() }
}
