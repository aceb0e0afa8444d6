//! The rows of a weight in memory, widened or dequantized tile by tile on use.

use std::ops::Range;
use std::sync::Arc;

use quant_kernels_cpu::candle::QuantizedLinear;
use quant_kernels_cpu::{WeightView, dequantize_rows};

use super::BlockWeight;
use super::body::kernel_error;
use crate::checkpoint::Dtype;
use crate::quantize::{SourceRows, restore_input_order};
use crate::vector::vectorized;
use crate::{Error, Result};

/// The rows of a weight `[n, k]`. Threads may share the work on them, because no file is read.
#[derive(Debug)]
pub struct WeightRows<'a> {
    shape: [usize; 2],
    values: Values<'a>,
}

#[derive(Debug)]
enum Values<'a> {
    Float(SourceRows<'a>),
    Stored(Dtype, Arc<Vec<u8>>),
    Blocks(&'a BlockWeight),
    /// Columns, and the input of each unless they are in the order of the inputs.
    Quantized(WeightView<'a>, Option<&'a [u32]>),
    Packed(&'a QuantizedLinear),
}

impl<'a> WeightRows<'a> {
    /// Creates the rows of a float weight, as stored in a file or computed by a transform.
    ///
    /// # Errors
    /// [`Error::Internal`] when the size of `rows` does not match the shape, or their dtype is not F32, F16 or BF16.
    pub fn float(shape: [usize; 2], rows: SourceRows<'a>) -> Result<Self> {
        let fits = |len: usize, size: usize| {
            let elements = shape[0].checked_mul(shape[1]);
            elements.and_then(|elements| elements.checked_mul(size)) == Some(len)
        };
        let fits = match rows {
            SourceRows::Bytes(bytes, dtype) => dtype.is_weight_float() && fits(bytes.len(), dtype.size()),
            SourceRows::Floats(values) => fits(values.len(), 1),
        };
        match fits {
            true => Ok(Self { shape, values: Values::Float(rows) }),
            false => Err(Error::Internal(format!("values do not form a weight of shape {shape:?}"))),
        }
    }

    pub(in crate::model) fn stored(shape: [usize; 2], dtype: Dtype, bytes: Arc<Vec<u8>>) -> Self {
        Self { shape, values: Values::Stored(dtype, bytes) }
    }

    pub(super) fn blocks(weight: &'a BlockWeight) -> Self {
        Self { shape: weight.shape(), values: Values::Blocks(weight) }
    }

    pub(super) fn quantized((view, order): (WeightView<'a>, Option<&'a [u32]>), shape: [usize; 2]) -> Self {
        Self { shape, values: Values::Quantized(view, order) }
    }

    pub(super) fn packed(linear: &'a QuantizedLinear, shape: [usize; 2]) -> Self {
        Self { shape, values: Values::Packed(linear) }
    }

    /// Returns the shape `[n, k]`: output and input features.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Returns all rows in the form that quantizers use, if they are float.
    pub fn as_float(&self) -> Option<SourceRows<'_>> {
        match &self.values {
            Values::Float(rows) => Some(*rows),
            Values::Stored(dtype, bytes) => Some(SourceRows::Bytes(bytes, *dtype)),
            Values::Blocks(_) | Values::Quantized(..) | Values::Packed(_) => None,
        }
    }

    /// Whether all weights are stored in bf16.
    pub(super) fn is_bf16(&self) -> bool {
        matches!(self.as_float(), Some(SourceRows::Bytes(_, Dtype::Bf16)))
    }

    /// Returns all rows as stored, with their dtype, if they were created by [`stored`](Self::stored).
    pub(in crate::model) fn stored_bytes(&self) -> Option<(Dtype, Arc<Vec<u8>>)> {
        match &self.values {
            Values::Stored(dtype, bytes) => Some((*dtype, bytes.clone())),
            _ => None,
        }
    }

    /// Returns a range of rows as `f32` `[rows.len(), k]`, borrowed or widened into `scratch`.
    ///
    /// # Errors
    /// When a quantized weight's parts do not match.
    ///
    /// # Panics
    /// When the range is out of bounds.
    pub fn rows<'s>(&'s self, rows: Range<usize>, scratch: &'s mut Vec<f32>) -> Result<&'s [f32]> {
        let k = self.shape[1];
        if let Values::Float(SourceRows::Floats(values)) = &self.values {
            return Ok(&values[rows.start * k..rows.end * k]);
        }
        scratch.resize(rows.len() * k, 0.0);
        self.copy_rows(rows, scratch)?;
        Ok(scratch)
    }

    /// Writes a range of rows as `f32` to `out`, `[rows.len(), k]`.
    ///
    /// # Errors
    /// As [`rows`](Self::rows).
    ///
    /// # Panics
    /// As [`rows`](Self::rows), and when the length of `out` does not match.
    pub fn copy_rows(&self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let span = rows.start * self.shape[1]..rows.end * self.shape[1];
        assert_eq!(out.len(), span.len(), "out is not [rows, k]");
        match &self.values {
            Values::Float(SourceRows::Floats(values)) => out.copy_from_slice(&values[span]),
            Values::Float(SourceRows::Bytes(bytes, dtype)) => widen(*dtype, bytes, span, out),
            Values::Stored(dtype, bytes) => widen(*dtype, bytes, span, out),
            Values::Blocks(weight) => weight.decode(rows.start, out),
            Values::Quantized(view, order) => {
                dequantize_rows(view, rows, out).map_err(kernel_error)?;
                if let Some(order) = order {
                    restore_input_order(out, order);
                }
            }
            Values::Packed(linear) => {
                linear.weight().view().dequantize_rows(rows, out).map_err(kernel_error)?;
            }
        }
        Ok(())
    }

    /// Returns the whole weight as `f32`, `[n, k]` row-major.
    ///
    /// # Errors
    /// As [`rows`](Self::rows).
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let [n, k] = self.shape;
        let mut values = vec![0.0; n * k];
        self.copy_rows(0..n, &mut values)?;
        Ok(values)
    }
}

/// Widens the elements `span`.
fn widen(dtype: Dtype, bytes: &[u8], span: Range<usize>, out: &mut [f32]) {
    let bytes = &bytes[span.start * dtype.size()..span.end * dtype.size()];
    vectorized(|| dtype.widen(bytes, out));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_the_same_however_they_are_stored() {
        let values: Vec<f32> = (0..12).map(|i| i as f32 / 4.0).collect();
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let bytes = dtype.narrow(&values);
            let (floats, narrow) = (SourceRows::Floats(&values), SourceRows::Bytes(&bytes, dtype));
            let stored = WeightRows::stored([4, 3], dtype, Arc::new(bytes.clone()));
            for weight in [
                WeightRows::float([4, 3], floats).unwrap(),
                WeightRows::float([4, 3], narrow).unwrap(),
                stored,
            ] {
                assert_eq!(weight.rows(1..3, &mut vec![9.0; 50]).unwrap(), &values[3..9]);
                assert_eq!(weight.to_f32().unwrap(), values);
                assert!(weight.as_float().is_some());
            }
        }
    }

    #[test]
    fn values_of_another_shape_are_refused() {
        let refuses =
            |shape, rows| assert!(matches!(WeightRows::float(shape, rows), Err(Error::Internal(_))));
        refuses([2, 2], SourceRows::Floats(&[0.0; 3]));
        refuses([2, 2], SourceRows::Bytes(&[0; 16], Dtype::F16));
        refuses([2, 2], SourceRows::Bytes(&[0; 16], Dtype::I32));
        refuses([usize::MAX, 2], SourceRows::Floats(&[]));
        assert!(WeightRows::float([2, 0], SourceRows::Floats(&[])).is_ok());
    }
}
