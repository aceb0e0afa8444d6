//! What a linear's weight may be: float in the checkpoint's dtype, or quantized.

use std::sync::Arc;

use quant_kernels_cpu::candle::{Activations, QuantizedLinear, Runner};
use quant_kernels_cpu::{Isa, KernelError, Rayon};

use super::cuda::{CudaLinear, CudaRunner};
use super::{StoredWeight, WeightRows};
use crate::quantize::{InputGrid, QuantizedTensor, Rows};
use crate::{Error, Result};

/// A weight `[n, k]`, row-major.
#[derive(Debug)]
#[non_exhaustive]
pub enum WeightBody {
    /// Widened already.
    F32 {
        /// `[n, k]`.
        shape: [usize; 2],
        /// Row-major values.
        values: Vec<f32>,
    },
    /// As it stands in the checkpoint, widened tile by tile when used.
    Stored(StoredWeight),
    /// Codes, dequantized tile by tile when used. An input with a grid is rounded to it, and stays float.
    Quantized(QuantizedTensor),
    /// The same in the order in which the kernels read them, multiplied without becoming floats in memory; by
    /// integers, where the input has a grid of integers.
    Packed {
        /// The weight and how it is multiplied.
        linear: QuantizedLinear,
        /// A grid of floating-point numbers, which the input is rounded to before it is multiplied as floats.
        grid: Option<InputGrid>,
    },
    /// The same on a GPU, which activations go to and results come from.
    Cuda {
        /// The weight there.
        linear: CudaLinear,
        /// As of those that are packed.
        grid: Option<InputGrid>,
    },
}

impl WeightBody {
    /// The same weight packed for the kernels, where it is quantized and they have vector instructions here:
    /// their portable path is a definition, and slower than dense products. It is multiplied by the runner.
    ///
    /// # Errors
    /// When its parts do not fit each other, or its scheme is none that the kernels multiply.
    pub fn packed(&self, runner: &Runner) -> Result<Option<Self>> {
        let Self::Quantized(tensor) = self else { return Ok(None) };
        if Isa::detect() == Isa::Scalar {
            return Ok(None);
        }
        let (activations, grid) = match tensor.input_grid()? {
            None => (Activations::Float, None),
            Some(InputGrid::Token) => (Activations::PerToken, None),
            Some(InputGrid::Static(by)) => (Activations::Static(by), None),
            // An integer product of two floating-point formats would take a scale of every group of every token within
            // the inner loop, and there is no engine on processors whose numbers that would be.
            Some(
                grid @ (InputGrid::Fp8Token
                | InputGrid::Fp8Group
                | InputGrid::Fp8Static { .. }
                | InputGrid::Mxfp8
                | InputGrid::Nvfp4 { .. }),
            ) => (Activations::Float, Some(grid)),
        };
        let linear = QuantizedLinear::new(Arc::new(tensor.pack(None, &Rayon)?), activations, runner);
        Ok(Some(Self::Packed { linear: linear.map_err(kernel_error)?, grid }))
    }

    /// The same weight on a GPU, where it is quantized.
    ///
    /// # Errors
    /// When its parts do not fit each other, its scheme is none that the kernels multiply, or the GPU has no room.
    pub fn on_cuda(&self, runner: &CudaRunner) -> Result<Option<Self>> {
        let Self::Quantized(tensor) = self else { return Ok(None) };
        let (linear, grid) = runner.put(tensor)?;
        Ok(Some(Self::Cuda { linear, grid }))
    }

    /// `[n, k]`: output and input features.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            Self::F32 { shape, .. } => *shape,
            Self::Stored(weight) => weight.shape(),
            Self::Quantized(tensor) => tensor.shape,
            Self::Packed { linear, .. } => [linear.weight().layout().n(), linear.weight().layout().k()],
            Self::Cuda { linear, .. } => [linear.n(), linear.k()],
        }
    }

    /// Its rows, at hand: read now from the checkpoint where they were not before.
    ///
    /// # Errors
    /// When they cannot be read or are not finite, a quantized weight's parts do not fit each other, or the weight is
    /// on a GPU.
    pub fn read(&self) -> Result<WeightRows<'_>> {
        let shape = self.shape();
        match self {
            Self::F32 { values, .. } => WeightRows::float(shape, Rows::Floats(values)),
            Self::Stored(weight) => Ok(WeightRows::stored(shape, weight.dtype(), weight.bytes()?)),
            Self::Quantized(tensor) => Ok(WeightRows::quantized(tensor.view()?, shape)),
            Self::Packed { linear, .. } => Ok(WeightRows::packed(linear, shape)),
            Self::Cuda { .. } => {
                Err(Error::Internal("weights on a GPU are multiplied there, not read".into()))
            }
        }
    }

    /// The whole weight as `f32`, `[n, k]` row-major.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        self.read()?.to_f32()
    }

    /// Reads it now, if it is one that is read when first used.
    ///
    /// # Errors
    /// When it cannot be read or is not finite.
    pub fn load(&self) -> Result<()> {
        self.as_stored().map_or(Ok(()), |weight| weight.bytes().map(drop))
    }

    /// The weight of a checkpoint that is read when it is first used, if it is one.
    pub fn as_stored(&self) -> Option<&StoredWeight> {
        match self {
            Self::Stored(weight) => Some(weight),
            _ => None,
        }
    }
}

/// Shapes were checked when the weight was read, so a kernel that refuses one is our mistake.
pub(in crate::model) fn kernel_error(error: KernelError) -> Error {
    Error::Internal(format!("a kernel refuses its operands: {error}"))
}
