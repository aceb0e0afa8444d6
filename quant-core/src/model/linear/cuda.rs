//! Quantized linears on an NVIDIA GPU: weights stay there; activations and results are copied.

use std::sync::Arc;

pub use quant_kernels_cuda::standalone::CudaLinear;
use quant_kernels_cuda::standalone::Launcher;

use super::body::kernel_activations;
use crate::quantize::{InputGrid, QuantizedTensor};
use crate::{Error, Result};

/// The GPU that multiplies a model's quantized linears; clones share it.
#[derive(Debug, Clone)]
pub struct CudaRunner(Arc<Launcher>);

impl CudaRunner {
    /// Opens the first GPU.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when there is no usable GPU, or this program cannot load the driver's library.
    pub fn new() -> Result<Self> {
        if cfg!(target_feature = "crt-static") {
            return Err(Error::Unavailable {
                what: "an NVIDIA GPU".into(),
                reason: "this program is statically linked and cannot load the CUDA driver".into(),
                remedy: "use a dynamically linked build, or omit ‹device›".into(),
            });
        }
        let runner = Launcher::new().map_err(|e| Error::Unavailable {
            what: "an NVIDIA GPU".into(),
            reason: e.to_string(),
            remedy: "run on a machine with an NVIDIA GPU and its driver, or omit ‹device›".into(),
        })?;
        Ok(Self(Arc::new(runner)))
    }

    /// Returns the device name reported by the driver.
    pub fn device(&self) -> &str {
        self.0.device()
    }

    /// Packs a weight and copies it to the GPU. Also returns the floating-point grid that its input must be rounded to
    /// first, if there is one.
    pub(super) fn put(&self, tensor: &QuantizedTensor) -> Result<(CudaLinear, Option<InputGrid>)> {
        let (activations, grid) = kernel_activations(tensor.input_grid()?);
        let codes = tensor.global.and_then(|_| tensor.scale_codes());
        let linear = CudaLinear::new(&tensor.view_with(codes.as_deref())?, activations, &self.0);
        Ok((linear.map_err(|e| failed(&e))?, grid))
    }
}

pub(super) fn failed(error: &quant_kernels_cuda::Error) -> Error {
    let (what, remedy) = match error {
        quant_kernels_cuda::Error::Operands(_) => {
            ("a matrix product on the GPU", "omit ‹device›: the CPU kernels support these weights")
        }
        _ => (
            "a matrix product on the GPU",
            "omit ‹device›, or check the requirements in docs/kernels/cuda-host.md",
        ),
    };
    Error::Unavailable { what: what.into(), reason: error.to_string(), remedy: remedy.into() }
}
