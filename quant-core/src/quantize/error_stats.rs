//! What rounding cost: the error between weights and what their codes mean.

use std::ops::Range;

use quant_kernels_cpu::dequantize_rows;
use rayon::prelude::*;

use super::rows::{Rows, RowsError};
use super::tensor::QuantizedTensor;
use crate::{Error, Result};

/// Sums over the weights of a tensor, in `f64`.
///
/// Each row is summed by itself and rows are added in order, so the result depends neither on the
/// number of threads nor on how a tensor is cut into calls of [`add_rows`](Self::add_rows).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ErrorStats {
    /// Weights compared.
    pub count: u64,
    /// `Σ w²`.
    pub signal: f64,
    /// `Σ (w − ŵ)²`.
    pub noise: f64,
    /// `max |w − ŵ|`.
    pub max_error: f64,
}

impl ErrorStats {
    /// The error of a whole tensor against the weights `[n, k]` it came from.
    ///
    /// # Errors
    /// [`Error::Internal`] when the two do not have the same shape.
    pub fn of(weights: &[f32], tensor: &QuantizedTensor) -> Result<Self> {
        let mut stats = Self::default();
        stats.add_rows(Rows::Floats(weights), tensor, 0..tensor.shape[0])?;
        Ok(stats)
    }

    /// Adds the error of some rows of `tensor`; `original` holds just these.
    ///
    /// # Errors
    /// [`Error::Internal`] when they do not fit each other.
    pub fn add_rows(
        &mut self,
        original: Rows<'_>,
        tensor: &QuantizedTensor,
        rows: Range<usize>,
    ) -> Result<()> {
        let [n, k] = tensor.shape;
        let view = tensor.view()?;
        let misfit = |e: RowsError| Error::Internal(format!("rows to compare: {e}"));
        if rows.start > rows.end || rows.end > n || original.count(k).map_err(misfit)? != rows.len() {
            return Err(misfit(RowsError::Layout(format!("{rows:?} of {n} rows were asked for"))));
        }
        let parts: Vec<Self> = (0..rows.len())
            .into_par_iter()
            .map_init(
                || (vec![0.0; k], vec![0.0; k]),
                |(exact, rounded), r| {
                    original.load(r, exact);
                    dequantize_rows(&view, rows.start + r..rows.start + r + 1, rounded);
                    Self::of_row(exact, rounded)
                },
            )
            .collect();
        for part in parts {
            self.count += part.count;
            self.signal += part.signal;
            self.noise += part.noise;
            self.max_error = self.max_error.max(part.max_error);
        }
        Ok(())
    }

    fn of_row(exact: &[f32], rounded: &[f32]) -> Self {
        // Four running sums, in a fixed pattern, so that they can stand in vector registers.
        const LANES: usize = 4;
        let (mut signal, mut noise, mut max) = ([0.0; LANES], [0.0; LANES], [0.0f64; LANES]);
        for (w, v) in exact.chunks(LANES).zip(rounded.chunks(LANES)) {
            for (i, (&w, &v)) in w.iter().zip(v).enumerate() {
                let (w, error) = (f64::from(w), f64::from(w) - f64::from(v));
                signal[i] += w * w;
                noise[i] += error * error;
                max[i] = if error.abs() > max[i] { error.abs() } else { max[i] };
            }
        }
        Self {
            count: exact.len() as u64,
            signal: signal.iter().sum(),
            noise: noise.iter().sum(),
            max_error: max.into_iter().fold(0.0, f64::max),
        }
    }

    /// `√(Σ(w − ŵ)² / Σw²)`: 0 is exact, 1 as wrong as all zeros. 0 for a tensor of zeros that
    /// came back as zeros.
    pub fn relative_rms(&self) -> f64 {
        if self.noise == 0.0 { 0.0 } else { (self.noise / self.signal).sqrt() }
    }

    /// Signal-to-quantization-noise ratio in decibels, `10 · log₁₀(Σw² / Σ(w − ŵ)²)`; infinite when
    /// nothing was lost.
    pub fn sqnr_db(&self) -> f64 {
        -20.0 * self.relative_rms().log10()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Dtype;
    use crate::quantize::quantize_rtn;
    use crate::recipe::WeightScheme;

    fn wave(n: usize, k: usize) -> Vec<f32> {
        (0..n * k).map(|i| (i as f32 * 0.37).sin() * 0.02).collect()
    }

    #[test]
    fn a_known_error() {
        // 0.4 is rounded to 0 on a grid of step 1; the others are exact.
        let weights = [-8.0, 7.0, 0.4, 1.0];
        let tensor = QuantizedTensor {
            shape: [1, 4],
            scheme: "w4a16-channel".parse().unwrap(),
            codes: vec![0, 15, 8, 9],
            scales: vec![1.0],
            scale_dtype: Dtype::F32,
            zeros: None,
        };
        let stats = ErrorStats::of(&weights, &tensor).unwrap();
        let lost = f64::from(0.4f32);
        assert_eq!((stats.count, stats.max_error), (4, lost));
        assert_eq!(stats.noise, lost * lost);
        assert!((stats.signal - 114.16).abs() < 1e-5);
        assert!((stats.relative_rms() - 0.4 / 114.16f64.sqrt()).abs() < 1e-8);
        assert!((stats.sqnr_db() - 10.0 * (114.16f64 / 0.16).log10()).abs() < 1e-6);
    }

    #[test]
    fn zeros_lose_nothing() {
        let scheme = WeightScheme::default();
        let tensor = quantize_rtn("t", &[0.0; 128], [1, 128], scheme, Dtype::F16, None).unwrap();
        let stats = ErrorStats::of(&[0.0; 128], &tensor).unwrap();
        assert_eq!(stats.relative_rms(), 0.0);
        assert_eq!(stats.sqnr_db(), f64::INFINITY);
    }

    #[test]
    fn more_bits_lose_less() {
        let weights = wave(16, 256);
        let loss = |scheme: &str| {
            let tensor =
                quantize_rtn("t", &weights, [16, 256], scheme.parse().unwrap(), Dtype::F16, None).unwrap();
            ErrorStats::of(&weights, &tensor).unwrap().sqnr_db()
        };
        let (w3, w4, w8) = (loss("w3a16"), loss("w4a16"), loss("w8a16"));
        assert!(w3 > 10.0 && w4 > w3 + 4.0 && w8 > w4 + 20.0, "{w3} {w4} {w8}");
    }

    #[test]
    fn neither_threads_nor_cuts_change_a_bit() {
        let weights = wave(67, 384);
        let tensor =
            quantize_rtn("t", &weights, [67, 384], WeightScheme::default(), Dtype::F16, None).unwrap();
        let whole = ErrorStats::of(&weights, &tensor).unwrap();
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            assert_eq!(pool.install(|| ErrorStats::of(&weights, &tensor)).unwrap(), whole);
        }
        let mut parts = ErrorStats::default();
        let bytes = Dtype::F32.narrow(&weights);
        for rows in [0..1, 1..40, 40..40, 40..67] {
            let part = &bytes[rows.start * 384 * 4..rows.end * 384 * 4];
            parts.add_rows(Rows::Bytes(part, Dtype::F32), &tensor, rows).unwrap();
        }
        assert_eq!(parts, whole);
    }

    #[test]
    fn misfits_are_errors() {
        let tensor =
            quantize_rtn("t", &wave(2, 128), [2, 128], WeightScheme::default(), Dtype::F16, None).unwrap();
        let mut stats = ErrorStats::default();
        let one_row = wave(1, 128);
        for rows in [0..2, 2..3, 1..usize::MAX, Range { start: 2, end: 1 }] {
            assert!(stats.add_rows(Rows::Floats(&one_row), &tensor, rows).is_err());
        }
        assert!(ErrorStats::of(&one_row[1..], &tensor).is_err());
        assert_eq!(stats, ErrorStats::default());
    }
}
