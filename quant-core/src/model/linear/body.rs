//! What a linear's weight may be: float in the checkpoint's dtype, or quantized.

use std::ops::Range;
use std::sync::Arc;

use quant_kernels_cpu::candle::{Activations, QuantizedLinear, Runner};
use quant_kernels_cpu::{Isa, KernelError, PackedLinear, Rayon, dequantize_rows};

use super::cuda::CudaRunner;
use crate::checkpoint::Dtype;
use crate::quantize::{InputGrid, QuantizedTensor};
use crate::{Error, Result};

/// A weight `[n, k]`, row-major.
#[derive(Debug)]
pub enum WeightBody {
    /// Widened already.
    F32 {
        /// `[n, k]`.
        shape: [usize; 2],
        /// Row-major values.
        values: Vec<f32>,
    },
    /// Little-endian elements as they stand in the file, widened tile by tile when used.
    Raw {
        /// `[n, k]`.
        shape: [usize; 2],
        /// F32, F16 or BF16.
        dtype: Dtype,
        /// `n · k` elements.
        bytes: Vec<u8>,
    },
    /// Codes, dequantized tile by tile when used. An input with a grid is rounded to it, and stays float.
    Quantized(QuantizedTensor),
    /// The same in the order in which the kernels read them, multiplied without becoming floats in memory; by
    /// integers, where the input has a grid.
    Packed(QuantizedLinear),
    /// The same on a GPU, which activations go to and results come from.
    Cuda(quant_kernels_cuda::standalone::Linear),
}

impl WeightBody {
    /// A float weight in its file's dtype.
    ///
    /// # Errors
    /// When the byte count does not fit the shape.
    pub fn raw(shape: [usize; 2], dtype: Dtype, bytes: Vec<u8>) -> Result<Self> {
        if !dtype.is_weight_float() || bytes.len() != shape[0] * shape[1] * dtype.size() {
            return Err(Error::Internal(format!("{} bytes are no {dtype} weight {shape:?}", bytes.len())));
        }
        Ok(Self::Raw { shape, dtype, bytes })
    }

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
        let (activations, sums) = match tensor.input_grid()? {
            None => (Activations::Float, false),
            Some(InputGrid::Token) => (Activations::PerToken, false),
            Some(InputGrid::Static(by)) => (Activations::Static(by), by.zero != 0),
        };
        let packed = PackedLinear::pack(&tensor.view()?, None, sums, &Rayon).map_err(kernel_error)?;
        let linear = QuantizedLinear::new(Arc::new(packed), activations, runner);
        Ok(Some(Self::Packed(linear.map_err(kernel_error)?)))
    }

    /// The same weight on a GPU, where it is quantized.
    ///
    /// # Errors
    /// When its parts do not fit each other, its scheme is none that the kernels multiply, or the GPU has no room.
    pub fn on_cuda(&self, runner: &CudaRunner) -> Result<Option<Self>> {
        let Self::Quantized(tensor) = self else { return Ok(None) };
        Ok(Some(Self::Cuda(runner.put(tensor)?)))
    }

    /// `[n, k]`: output and input features.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            Self::F32 { shape, .. } | Self::Raw { shape, .. } => *shape,
            Self::Quantized(tensor) => tensor.shape,
            Self::Packed(linear) => [linear.weight().layout().n(), linear.weight().layout().k()],
            Self::Cuda(linear) => [linear.n(), linear.k()],
        }
    }

    /// Bytes the weight occupies in memory, here or on the GPU.
    pub fn resident_bytes(&self) -> usize {
        match self {
            Self::F32 { values, .. } => values.len() * 4,
            Self::Raw { bytes, .. } => bytes.len(),
            Self::Packed(linear) => linear.weight().layout().bytes(),
            Self::Cuda(linear) => linear.bytes(),
            Self::Quantized(t) => t.codes.len() + t.scales.len() * 4 + t.zeros.as_ref().map_or(0, Vec::len),
        }
    }

    /// Some rows as `f32` `[rows.len(), k]`, in place or widened into `scratch`.
    ///
    /// # Errors
    /// When a quantized weight's parts do not fit each other, or it is on a GPU.
    pub fn rows<'a>(&'a self, rows: Range<usize>, scratch: &'a mut Vec<f32>) -> Result<&'a [f32]> {
        let k = self.shape()[1];
        let span = rows.start * k..rows.end * k;
        match self {
            Self::F32 { values, .. } => Ok(&values[span]),
            Self::Raw { dtype, bytes, .. } => {
                scratch.resize(span.len(), 0.0);
                dtype.widen(&bytes[span.start * dtype.size()..span.end * dtype.size()], scratch);
                Ok(scratch)
            }
            Self::Quantized(tensor) => {
                scratch.resize(span.len(), 0.0);
                dequantize_rows(&tensor.view()?, rows, scratch).map_err(kernel_error)?;
                Ok(scratch)
            }
            Self::Packed(linear) => {
                scratch.resize(span.len(), 0.0);
                linear.weight().view().dequantize_rows(rows, scratch).map_err(kernel_error)?;
                Ok(scratch)
            }
            Self::Cuda(_) => Err(Error::Internal("weights on a GPU are multiplied there, not read".into())),
        }
    }

    /// The whole weight as `f32`, `[n, k]` row-major.
    ///
    /// # Errors
    /// As [`rows`](Self::rows).
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let mut scratch = Vec::new();
        Ok(self.rows(0..self.shape()[0], &mut scratch)?.to_vec())
    }
}

/// Shapes were checked when the weight was read, so a kernel that refuses one is our mistake.
pub(super) fn kernel_error(error: KernelError) -> Error {
    Error::Internal(format!("a kernel refuses its operands: {error}"))
}
