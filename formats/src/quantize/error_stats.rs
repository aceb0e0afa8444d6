//! The quantization error: the difference between weights and their dequantized codes.

use quant_kernels_cpu::dequantize_rows;
use rayon::prelude::*;

use super::tensor::QuantizedTensor;
use crate::{Error, Result};

/// In shorter groups, one weight may well dominate the others.
const MIN_GROUP: usize = 8;

/// Sums over the weights of a tensor, in `f64`. The result does not depend on the number of threads.
///
/// ```
/// use quant_formats::checkpoint::Dtype;
/// use quant_formats::quantize::{ErrorStats, quantize_rtn};
///
/// let mut weight = vec![0.02; 64]; // two groups
/// weight[5] = 60000.0;
/// let tensor = quantize_rtn("proj", &weight, [1, 64], "w4a16-g32-sym".parse()?, Dtype::F32, None)?;
/// let error = ErrorStats::of(&weight, &tensor)?;
/// assert_eq!(error.vanished_groups, 1);
/// # Ok::<(), quant_formats::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub struct ErrorStats {
    /// Number of weights.
    pub count: u64,
    /// `Σ w²`.
    pub signal: f64,
    /// `Σ (w − ŵ)²`.
    pub noise: f64,
    /// `max |w − ŵ|`.
    pub max_error: f64,
    /// The number of groups of at least 8 weights in which at most one is not rounded to zero, although several are not
    /// zero.
    pub vanished_groups: u64,
}

impl ErrorStats {
    /// Returns the error of a tensor relative to the weights `[n, k]` it was quantized from.
    ///
    /// # Errors
    /// [`Error::Internal`] when the two do not have the same shape.
    pub fn of(weights: &[f32], tensor: &QuantizedTensor) -> Result<Self> {
        let [n, k] = tensor.shape;
        let view = tensor.view()?;
        if weights.len() != n * k {
            let reason = format!("{} weights cannot be compared with a weight of [{n}, {k}]", weights.len());
            return Err(Error::Internal(reason));
        }
        let group_size = tensor.scheme.granularity.group_size(k);
        let rows = weights
            .par_chunks(k.max(1))
            .enumerate()
            .map_init(
                || vec![0.0; k],
                |rounded, (r, exact)| {
                    dequantize_rows(&view, r..r + 1, rounded).map_err(|e| Error::Internal(e.to_string()))?;
                    Ok::<_, Error>(Self::of_row(exact, rounded, group_size))
                },
            )
            .collect::<Result<Vec<Self>>>()?;
        Ok(rows.iter().fold(Self::default(), Self::plus))
    }

    /// Adds two errors. The result depends on the order, which is that of the rows.
    #[must_use]
    pub fn plus(self, other: &Self) -> Self {
        Self {
            count: self.count + other.count,
            signal: self.signal + other.signal,
            noise: self.noise + other.noise,
            max_error: self.max_error.max(other.max_error),
            vanished_groups: self.vanished_groups + other.vanished_groups,
        }
    }

    /// The error of one row with groups of this size.
    #[inline(always)]
    pub fn of_row(exact: &[f32], rounded: &[f32], group_size: usize) -> Self {
        const LANES: usize = 16;
        let (mut signal, mut noise, mut max) = ([0.0; LANES], [0.0; LANES], [0.0f32; LANES]);
        let mut step = |i: usize, w: f32, v: f32| {
            let (w, v) = (f64::from(w), f64::from(v));
            let error = w - v;
            signal[i] += w * w;
            noise[i] += error * error;
            // Rounding is monotone, so the largest magnitude stays the largest.
            let size = (error as f32).abs();
            max[i] = if size > max[i] { size } else { max[i] };
        };
        let (exact_lanes, exact_rest) = exact.as_chunks::<LANES>();
        let (rounded_lanes, rounded_rest) = rounded.as_chunks::<LANES>();
        for (w, v) in exact_lanes.iter().zip(rounded_lanes) {
            for i in 0..LANES {
                step(i, w[i], v[i]);
            }
        }
        for (i, (&w, &v)) in exact_rest.iter().zip(rounded_rest).enumerate() {
            step(i, w, v);
        }
        Self {
            count: exact.len() as u64,
            signal: signal.iter().sum(),
            noise: noise.iter().sum(),
            max_error: f64::from(max.into_iter().fold(0.0, f32::max)),
            vanished_groups: vanished_groups(exact, rounded, group_size),
        }
    }

    /// `√(Σ(w − ŵ)² / Σw²)`; 0 if the result is exact.
    pub fn relative_rms(&self) -> f64 {
        if self.noise == 0.0 { 0.0 } else { (self.noise / self.signal).sqrt() }
    }

    /// Signal-to-quantization-noise ratio in decibels, `10 · log₁₀(Σw² / Σ(w − ŵ)²)`; infinite for an exact result.
    pub fn sqnr_db(&self) -> f64 {
        -20.0 * self.relative_rms().log10()
    }
}

#[inline(always)]
fn vanished_groups(exact: &[f32], rounded: &[f32], group_size: usize) -> u64 {
    if group_size < MIN_GROUP {
        return 0;
    }
    let left = |values: &[f32]| values.iter().filter(|value| **value != 0.0).count();
    let groups = exact.chunks_exact(group_size).zip(rounded.chunks_exact(group_size));
    // The first values settle nearly all groups.
    let vanished = groups
        .filter(|(exact, rounded)| left(&rounded[..MIN_GROUP]) < 2 && left(rounded) < 2 && left(exact) > 1);
    vanished.count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Dtype;
    use crate::quantize::{SourceRows, quantize_rtn, quantize_tensor};
    use crate::scheme::LinearScheme;

    fn wave(n: usize, k: usize) -> Vec<f32> {
        (0..n * k).map(|i| (i as f32 * 0.37).sin() * 0.02).collect()
    }

    #[test]
    fn a_known_error() {
        let weights = [-8.0, 7.0, 0.4, 1.0];
        let tensor = QuantizedTensor {
            shape: [1, 4],
            scheme: "w4a16-channel".parse().unwrap(),
            codes: vec![0, 15, 8, 9],
            scales: vec![1.0],
            scale_dtype: Dtype::F32,
            zeros: None,
            levels: None,
            global: None,
            input: None,
            input_order: None,
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
        let scheme = LinearScheme::default();
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
    fn threads_do_not_change_a_bit() {
        let weights = wave(67, 384);
        let tensor =
            quantize_rtn("t", &weights, [67, 384], LinearScheme::default(), Dtype::F16, None).unwrap();
        let whole = ErrorStats::of(&weights, &tensor).unwrap();
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            assert_eq!(pool.install(|| ErrorStats::of(&weights, &tensor)).unwrap(), whole);
        }
    }

    #[test]
    fn what_quantizing_reports_is_the_same() {
        let clip: Vec<f32> = (0..67 * 3).map(|g| 0.004 * (g % 7) as f32).collect();
        let weights = wave(67, 384);
        let bytes = Dtype::F32.narrow(&weights);
        for scheme in ["w3a16", "w4a16", "w8a16-asym"] {
            for clip in [None, Some(&clip[..])] {
                let rows = SourceRows::Bytes(&bytes, Dtype::F32);
                let (tensor, reported) =
                    quantize_tensor(rows, [67, 384], scheme.parse().unwrap(), Dtype::Bf16, clip).unwrap();
                assert_eq!(reported, ErrorStats::of(&weights, &tensor).unwrap(), "{scheme}");
            }
        }
    }

    #[test]
    fn misfits_are_errors() {
        let tensor =
            quantize_rtn("t", &wave(2, 128), [2, 128], LinearScheme::default(), Dtype::F16, None).unwrap();
        for weights in [wave(1, 128), wave(2, 127), wave(3, 128)] {
            assert!(ErrorStats::of(&weights, &tensor).is_err());
        }
    }

    #[test]
    fn a_group_with_an_outlier_vanishes() {
        let [n, k] = [3, 256];
        let plain = wave(n, k);
        let mut with_outlier = plain.clone();
        with_outlier[k + 5] = -60000.0;
        for scheme in [
            "w4a16-g128-sym",
            "w4a16-g128-asym",
            "w8a16-g32-sym",
            "w3a16-g64-sym",
            "w4a16-channel-sym",
            "w8a8-channel-sym",
            "fp8",
            "mxfp4a16",
            "nvfp4a16",
        ] {
            let parsed = scheme.parse().unwrap();
            let count = |weights: &[f32]| {
                let scale = if scheme == "mxfp4a16" { Dtype::F8E8M0 } else { Dtype::F32 };
                let scale = if scheme == "nvfp4a16" { Dtype::F8E4M3 } else { scale };
                let rows = SourceRows::Floats(weights);
                let (tensor, error) = quantize_tensor(rows, [n, k], parsed, scale, None).unwrap();
                assert_eq!(ErrorStats::of(weights, &tensor).unwrap().vanished_groups, error.vanished_groups);
                error.vanished_groups
            };
            assert_eq!(count(&plain), 0, "{scheme}");
            // The global scale of NVFP4 is that of the whole weight.
            let expected = if scheme == "nvfp4a16" { (n * k / 16) as u64 } else { 1 };
            assert_eq!(count(&with_outlier), expected, "{scheme}");
            let mut alone = vec![0.0; n * k];
            alone[9] = 3.0;
            assert_eq!(count(&alone), 0, "{scheme}");
            assert_eq!(count(&vec![0.0; n * k]), 0, "{scheme}");
        }
    }
}
