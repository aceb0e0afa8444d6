//! A quantized matrix in logical order: what every method produces and every format packs.

use quant_kernels_cpu::{WeightView, dequantize_rows};

use crate::checkpoint::Dtype;
use crate::recipe::WeightScheme;
use crate::{Error, Result};

/// Codes, scales and zeros of a linear's weight `[n, k]`, unpacked.
///
/// `ŵ[o, i] = (codes[o, i] − zeros[o, g]) · scales[o, g]` with `g = i / group_size`; a symmetric
/// scheme stores no zeros and means `2^(bits − 1)`.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedTensor {
    /// `[n, k]`: output and input features.
    pub shape: [usize; 2],
    /// The grid.
    pub scheme: WeightScheme,
    /// `[n, k]` row-major, one unsigned code below `2^bits` a byte.
    pub codes: Vec<u8>,
    /// `[n, k / group_size]` row-major; each value is exact in `scale_dtype`.
    pub scales: Vec<f32>,
    /// The type that scales are stored in: F16, BF16 or F32.
    pub scale_dtype: Dtype,
    /// `[n, k / group_size]` row-major, for asymmetric schemes.
    pub zeros: Option<Vec<u8>>,
}

impl QuantizedTensor {
    /// The same matrix as the kernels see it.
    ///
    /// # Errors
    /// When the parts do not fit each other, which readers of files must rule out by calling this.
    pub fn view(&self) -> Result<WeightView<'_>> {
        let group_size = self.scheme.granularity.group_size(self.shape[1]);
        WeightView::new(
            self.shape,
            self.scheme.bits,
            group_size,
            &self.codes,
            &self.scales,
            self.zeros.as_deref(),
        )
        .map_err(|e| Error::Internal(format!("quantized tensor is inconsistent: {e}")))
    }

    /// Whether a container can write it as it is.
    ///
    /// # Errors
    /// [`Error::Internal`] when the parts do not fit each other, zeros do not go with the scheme, a
    /// code has too many bits (it would change its neighbours), or a scale is not exact in its type.
    pub(crate) fn require_storable(&self, module: &str) -> Result<()> {
        let inconsistent = |what: &str| Error::Internal(format!("quantized `{module}.weight`: {what}"));
        self.view()?;
        if self.zeros.is_none() != self.scheme.symmetric {
            return Err(inconsistent("zeros do not go with the scheme's symmetry"));
        }
        let fits = |codes: &[u8]| codes.iter().fold(0, |max, &c| max.max(c)) <= self.scheme.max_code();
        if !fits(&self.codes) || !self.zeros.as_deref().is_none_or(fits) {
            return Err(inconsistent("a code has more bits than the scheme"));
        }
        if self.scales.iter().any(|&s| self.scale_dtype.round(s) != s) {
            return Err(inconsistent("a scale is not exact in the type it is stored in"));
        }
        Ok(())
    }

    /// The whole matrix as `f32`, `[n, k]` row-major.
    ///
    /// # Errors
    /// As [`view`](Self::view).
    pub fn dequantize(&self) -> Result<Vec<f32>> {
        let mut out = vec![0.0; self.shape[0] * self.shape[1]];
        dequantize_rows(&self.view()?, 0..self.shape[0], &mut out);
        Ok(out)
    }
}
