//! The output head on its own: logits of hidden states for one range of the vocabulary at a time, so the matrix of all
//! logits need not be in memory.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::linear::{ProductTiles, TileBuffers};
use super::soft_cap::soft_cap_in_place;
use super::{Linear, LogitsTransform, WeightBody, WeightRows};
use crate::checkpoint::Dtype;
use crate::{Error, Result};

/// Maximum number of output features per tile.
pub const HEAD_TILE: usize = 256;

/// A head whose weight is in memory.
#[derive(Debug)]
pub struct Head<'a> {
    linear: Option<&'a Linear>,
    /// `None` for a head that can only compute all logits at once.
    rows: Option<WeightRows<'a>>,
    shape: [usize; 2],
    bias: Option<Vec<f32>>,
    transform: LogitsTransform,
}

/// A float head in the form in which it is written to a file and read back.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadParts {
    /// `[vocabulary, width]`.
    pub shape: [usize; 2],
    /// F32, F16 or BF16.
    pub dtype: Dtype,
    /// Row-major little-endian weights.
    pub weight: Arc<Vec<u8>>,
    /// One value per token, if there is a bias.
    pub bias: Option<Vec<f32>>,
    /// The transform of the products.
    pub transform: LogitsTransform,
}

impl<'a> Head<'a> {
    pub(super) fn new(linear: &'a Linear, transform: LogitsTransform) -> Result<Self> {
        let weight = linear.weight();
        let rows = match &**weight {
            WeightBody::Packed { .. } | WeightBody::Cuda { .. } => None,
            _ => Some(weight.read()?),
        };
        let bias = linear.bias().map(|b| b.to_vec1::<f32>()).transpose()?;
        Ok(Self { linear: Some(linear), rows, shape: weight.shape(), bias, transform })
    }

    /// Creates a head from its parts. For the same [`inputs`](Self::inputs), its logits are bit-identical to those of
    /// the head that [returned](Self::to_parts) the parts.
    ///
    /// # Errors
    /// [`Error::Internal`] when the parts do not match.
    pub fn from_parts(parts: HeadParts) -> Result<Head<'static>> {
        let HeadParts { shape, dtype, weight, bias, transform } = parts;
        let bytes = shape[0].checked_mul(shape[1]).and_then(|n| n.checked_mul(dtype.size()));
        let fits = dtype.is_weight_float()
            && bytes == Some(weight.len())
            && bias.as_ref().is_none_or(|bias| bias.len() == shape[0]);
        if !fits {
            return Err(Error::Internal(format!("parts do not form a head of shape {shape:?}")));
        }
        let rows = Some(WeightRows::stored(shape, dtype, weight));
        Ok(Head { linear: None, rows, shape, bias, transform })
    }

    /// Returns the parts of a head that multiplies floats.
    ///
    /// # Errors
    /// [`Error::Internal`] when the head [is whole](Self::is_whole), or its weight cannot be read.
    pub fn to_parts(&self) -> Result<HeadParts> {
        let rows = self.rows.as_ref().ok_or_else(|| Error::Internal("a packed head has no floats".into()))?;
        let (dtype, weight) = match rows.stored_bytes() {
            Some((dtype, bytes)) => (dtype, bytes),
            None => (Dtype::F32, Arc::new(Dtype::F32.narrow(&rows.to_f32()?))),
        };
        Ok(HeadParts { shape: self.shape, dtype, weight, bias: self.bias.clone(), transform: self.transform })
    }

    /// Returns the vocabulary size.
    pub fn vocab(&self) -> usize {
        self.shape[0]
    }

    /// Returns the number of features of a hidden state.
    pub fn width(&self) -> usize {
        self.shape[1]
    }

    /// Returns whether the head can only compute all logits at once, with [`all_logits`](Self::all_logits), because its
    /// weight is packed for the kernels or is on a GPU.
    pub fn is_whole(&self) -> bool {
        self.rows.is_none()
    }

    /// Returns the hidden states in the form in which the head multiplies them: rounded to the grid of its input, if it
    /// has one.
    ///
    /// # Errors
    /// When the width does not match.
    pub fn inputs(&self, hidden: Vec<f32>) -> Result<Vec<f32>> {
        match (self.linear, &self.rows) {
            // A head without rows quantizes its inputs itself. The inputs of a head created from parts were rounded
            // before they were saved.
            (Some(linear), Some(_)) if linear.grid()?.is_some() => {
                let rows = hidden.len().checked_div(self.width()).unwrap_or(0);
                let x = Tensor::from_vec(hidden, (rows, self.width()), &Device::Cpu)?;
                Ok(linear.rounded(&x)?.flatten_all()?.to_vec1()?)
            }
            _ => Ok(hidden),
        }
    }

    /// Prepares [`inputs`](Self::inputs) `[m, width]` for the logits of several ranges of tokens.
    ///
    /// # Errors
    /// When the head [is whole](Self::is_whole), or memory allocation fails.
    pub fn at<'h>(&'h self, inputs: &'h [f32]) -> Result<HeadInputs<'h>> {
        let rows = self.rows.as_ref().ok_or_else(|| Error::Internal("a packed head has no tiles".into()))?;
        Ok(HeadInputs { head: self, rows, product: ProductTiles::new(inputs, rows)? })
    }

    /// Computes the logits of all tokens, `[m, vocabulary]`.
    ///
    /// # Errors
    /// When the head was created [from parts](Self::from_parts), or a kernel or a GPU fails.
    pub fn all_logits(&self, inputs: &[f32], out: &mut Vec<f32>) -> Result<()> {
        let linear = self.linear.ok_or_else(|| Error::Internal("a head without a linear".into()))?;
        let m = inputs.len().checked_div(self.width()).unwrap_or(0);
        let x = Tensor::from_slice(inputs, (1, m, self.width()), &Device::Cpu)?;
        *out = linear.product(&x)?.flatten_all()?.to_vec1()?;
        self.finish(0..self.vocab(), out);
        Ok(())
    }

    fn finish(&self, columns: Range<usize>, out: &mut [f32]) {
        let LogitsTransform { scale, softcap } = self.transform;
        if let Some(bias) = &self.bias {
            let bias = &bias[columns];
            out.chunks_exact_mut(bias.len().max(1))
                .for_each(|row| row.iter_mut().zip(bias).for_each(|(x, b)| *x += b));
        }
        if scale != 1.0 {
            out.iter_mut().for_each(|x| *x *= scale);
        }
        if let Some(cap) = softcap {
            soft_cap_in_place(out, cap);
        }
    }
}

/// Buffers of a thread for the logits of a head.
#[derive(Debug, Default)]
pub struct HeadBuffers(TileBuffers);

/// Inputs of a head, prepared for the logits of several ranges of tokens, which threads may compute at the same time.
#[derive(Debug)]
pub struct HeadInputs<'h> {
    head: &'h Head<'h>,
    rows: &'h WeightRows<'h>,
    product: ProductTiles<'h>,
}

impl HeadInputs<'_> {
    /// Computes the logits of the tokens `columns`, `[m, columns]`, on this thread. Callers pass at most [`HEAD_TILE`]
    /// columns, to limit the size of the buffers.
    ///
    /// # Errors
    /// When the weight cannot be dequantized.
    ///
    /// # Panics
    /// When a column is out of range.
    pub fn logits(&self, columns: Range<usize>, buffers: &mut HeadBuffers, out: &mut Vec<f32>) -> Result<()> {
        self.product.multiply(self.rows, columns.clone(), &mut buffers.0, out)?;
        self.head.finish(columns, out);
        Ok(())
    }
}

#[cfg(test)]
#[path = "head_tests.rs"]
mod tests;
