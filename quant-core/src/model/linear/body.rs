//! The storage of a linear's weight: float in the checkpoint's dtype, or quantized.

use std::sync::Arc;

use quant_kernels_cpu::candle::{QuantizedLinear, Runner};
use quant_kernels_cpu::{Activations, Isa, KernelError, Rayon};

use super::cuda::{CudaLinear, CudaRunner};
use super::{BlockWeight, StoredWeight, WeightRows};
use crate::quantize::{InputGrid, QuantizedTensor, SourceRows};
use crate::{Error, Result};

/// A weight `[n, k]`, row-major.
#[derive(Debug)]
#[non_exhaustive]
pub enum WeightBody {
    /// Already widened to `f32`.
    F32 {
        /// `[n, k]`.
        shape: [usize; 2],
        /// Row-major values.
        values: Vec<f32>,
    },
    /// As stored in the checkpoint, widened tile by tile on use.
    Stored(StoredWeight),
    /// Blocks of a GGUF file, decoded tile by tile on use.
    Blocks(BlockWeight),
    /// Codes, dequantized tile by tile on use. If the input has a grid, the input is rounded to that grid and
    /// multiplied in float.
    Quantized(QuantizedTensor),
    /// Codes in the kernels' order. The product uses integers if the input has an integer grid.
    Packed {
        /// The weight, and how it is multiplied.
        linear: QuantizedLinear,
        /// The floating-point grid that the input is rounded to before it is multiplied as floats.
        grid: Option<InputGrid>,
    },
    /// Codes on a GPU. Activations are copied there, and results are copied back.
    Cuda {
        /// The weight on the GPU.
        linear: CudaLinear,
        /// The floating-point grid that the input is rounded to before it is multiplied as floats.
        grid: Option<InputGrid>,
    },
}

/// Returns how the kernels treat activations with this input grid, and the floating-point grid that the input must be
/// rounded to first, if there is one.
pub(super) fn kernel_activations(grid: Option<InputGrid>) -> (Activations, Option<InputGrid>) {
    match grid {
        None => (Activations::Float, None),
        Some(InputGrid::Token) => (Activations::PerToken, None),
        Some(InputGrid::Static(by)) => (Activations::Static(by), None),
        // The kernels have no product of two floating-point formats, which would apply a scale per group and token
        // within the inner loop.
        Some(
            grid @ (InputGrid::Fp8Token
            | InputGrid::Fp8Group
            | InputGrid::Fp8Static { .. }
            | InputGrid::Mxfp8
            | InputGrid::Nvfp4 { .. }),
        ) => (Activations::Float, Some(grid)),
    }
}

impl WeightBody {
    /// Returns the weight packed for the kernels, to be multiplied by `runner`. For blocks of a GGUF file, activations
    /// are rounded to 8 bits, with a scale per token.
    ///
    /// Returns `None` if the weight is float, was packed before or has an
    /// [order of inputs](QuantizedTensor::input_order), or if this CPU has no vector instructions that the
    /// kernels use: their portable path is a reference, and slower than dense products.
    ///
    /// # Errors
    /// When the parts of the weight do not match, or the kernels do not support its scheme.
    pub fn packed(&self, runner: &Runner) -> Result<Option<Self>> {
        if Isa::detect() == Isa::Scalar {
            return Ok(None);
        }
        let tensor = match self {
            // The kernels know no order of inputs: such a weight is multiplied as floats.
            Self::Quantized(tensor) if tensor.input_order.is_some() => return Ok(None),
            Self::Quantized(tensor) => tensor,
            // llama.cpp rounds the activations of these types too, with a scale per block.
            Self::Blocks(weight) => {
                let linear = QuantizedLinear::new(Arc::new(weight.pack()?), Activations::PerToken, runner);
                return Ok(Some(Self::Packed { linear: linear.map_err(kernel_error)?, grid: None }));
            }
            _ => return Ok(None),
        };
        let (activations, grid) = kernel_activations(tensor.input_grid()?);
        let linear = QuantizedLinear::new(Arc::new(tensor.pack(None, &Rayon)?), activations, runner);
        Ok(Some(Self::Packed { linear: linear.map_err(kernel_error)?, grid }))
    }

    /// Returns a [`Quantized`](Self::Quantized) weight on a GPU; `None` for all other weights, and for one with an
    /// [order of inputs](QuantizedTensor::input_order).
    ///
    /// # Errors
    /// When the parts of the weight do not match, the kernels do not support its scheme, or the GPU is out of memory.
    pub fn on_cuda(&self, runner: &CudaRunner) -> Result<Option<Self>> {
        let Self::Quantized(tensor) = self else { return Ok(None) };
        if tensor.input_order.is_some() {
            return Ok(None);
        }
        let (linear, grid) = runner.put(tensor)?;
        Ok(Some(Self::Cuda { linear, grid }))
    }

    /// Returns the shape `[n, k]`: output and input features.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            Self::F32 { shape, .. } => *shape,
            Self::Stored(weight) => weight.shape(),
            Self::Blocks(weight) => weight.shape(),
            Self::Quantized(tensor) => tensor.shape,
            Self::Packed { linear, .. } => [linear.weight().layout().n(), linear.weight().layout().k()],
            Self::Cuda { linear, .. } => [linear.n(), linear.k()],
        }
    }

    /// Returns the rows of the weight, read from the checkpoint if they are not yet in memory.
    ///
    /// # Errors
    /// When the rows cannot be read or are not finite, the parts of a quantized weight do not match, or the weight is
    /// on a GPU.
    pub fn read(&self) -> Result<WeightRows<'_>> {
        let shape = self.shape();
        match self {
            Self::F32 { values, .. } => WeightRows::float(shape, SourceRows::Floats(values)),
            Self::Stored(weight) => Ok(WeightRows::stored(shape, weight.dtype(), weight.bytes()?)),
            Self::Blocks(weight) => Ok(WeightRows::blocks(weight)),
            Self::Quantized(tensor) => Ok(WeightRows::quantized(tensor.sorted_view()?, shape)),
            Self::Packed { linear, .. } => Ok(WeightRows::packed(linear, shape)),
            Self::Cuda { .. } => Err(Error::Internal("weights on a GPU cannot be read back".into())),
        }
    }

    /// Returns the whole weight as `f32`, `[n, k]` row-major.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        self.read()?.to_f32()
    }

    /// Reads a weight now that would otherwise be read on first use.
    ///
    /// # Errors
    /// When it cannot be read or is not finite.
    pub fn load(&self) -> Result<()> {
        self.as_stored().map_or(Ok(()), |weight| weight.bytes().map(drop))
    }

    /// Returns the checkpoint weight that is read on first use, if it is one.
    pub fn as_stored(&self) -> Option<&StoredWeight> {
        match self {
            Self::Stored(weight) => Some(weight),
            _ => None,
        }
    }
}

/// Shapes were checked when the weight was read, so the error is a bug in this crate.
pub(in crate::model) fn kernel_error(error: KernelError) -> Error {
    Error::Internal(format!("a kernel rejected its operands: {error}"))
}
