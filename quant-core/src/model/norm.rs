//! Norms: their parameters and computation.

use candle_core::{CpuStorage, CustomOp3, Layout, Shape, Tensor};
use rayon::prelude::*;

use super::arch::Op;
use super::attention::slice;
use crate::vector::vectorized;
use crate::{Error, Result};

/// The parameters of a norm.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Norm {
    /// `[width]`, as stored: [`Op::weight_offset`] is added when it is applied.
    pub weight: Tensor,
    /// `[width]`, if there is one.
    pub bias: Option<Tensor>,
}

impl Norm {
    /// The parameters of a layer norm that stores none.
    pub(super) fn plain(width: usize) -> Result<Self> {
        let filled = |value: f32| Tensor::full(value, width, &candle_core::Device::Cpu);
        Ok(Self { weight: filled(1.0)?, bias: Some(filled(0.0)?) })
    }

    /// Returns the factors of an RMSNorm, `[width]`.
    pub(super) fn factors(&self, op: &Op) -> Result<Tensor> {
        Ok(match op {
            Op::RmsNorm { zero_centered: true, .. } => (&self.weight + f64::from(op.weight_offset()))?,
            _ => self.weight.clone(),
        })
    }

    /// Applies `op` to `x` `[batch, positions, features]`, normalizing `width` features at a time.
    pub(super) fn apply(&self, op: &Op, x: &Tensor) -> Result<Tensor> {
        let (batch, positions, features) = x.dims3()?;
        let rows = |width: usize| x.contiguous()?.reshape((batch, positions, features / width, width));
        let y = match (op, &self.bias) {
            (Op::RmsNorm { width, eps, .. }, None) => {
                candle_nn::ops::rms_norm(&rows(*width)?, &self.factors(op)?, *eps as f32)?
            }
            (Op::LayerNorm { width, eps, .. }, bias) => {
                let zeros;
                let bias = match bias {
                    Some(bias) => bias,
                    None => {
                        zeros = self.weight.zeros_like()?;
                        &zeros
                    }
                };
                rows(*width)?.apply_op3_no_bwd(&self.weight, bias, &LayerNorm { eps: *eps as f32 })?
            }
            (op, _) => {
                return Err(Error::Internal(format!("{op:?} with the parameters of a different norm")));
            }
        };
        Ok(y.reshape((batch, positions, features))?)
    }
}

/// Divides every `width` consecutive features of `x` `[batch, positions, features]` by their root mean square.
pub(super) fn normalize(x: &Tensor, width: usize, eps: f64) -> Result<Tensor> {
    let (batch, positions, features) = x.dims3()?;
    let rows = x.contiguous()?.reshape((batch, positions, features / width, width))?;
    let ones = Tensor::ones(width, candle_core::DType::F32, x.device())?;
    Ok(candle_nn::ops::rms_norm(&rows, &ones, eps as f32)?.reshape((batch, positions, features))?)
}

/// `(x − mean) / √(variance + eps) · weight + bias` along the last dimension.
///
/// The variance is computed in a second pass, because `E[x²] − E[x]²` would lose precision in `f32` if a few features
/// are much larger than the others.
struct LayerNorm {
    eps: f32,
}

impl CustomOp3 for LayerNorm {
    fn name(&self) -> &'static str {
        "layer-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (x, weight, bias) =
            (slice(x, x_layout)?, slice(weight, weight_layout)?, slice(bias, bias_layout)?);
        let width = weight.len();
        if bias.len() != width || x_layout.dims().last() != Some(&width) {
            candle_core::bail!("layer norm of width {width} got an input of shape {:?}", x_layout.dims());
        }
        let mut out = vec![0.0_f32; x.len()];
        let rows = out.par_chunks_mut(width.max(1)).zip(x.par_chunks(width.max(1)));
        rows.for_each(|(out, x)| {
            vectorized(
                #[inline(always)]
                || layer_norm(x, weight, bias, self.eps, out),
            );
        });
        Ok((CpuStorage::F32(out), x_layout.shape().clone()))
    }
}

#[inline(always)]
fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    let count = x.len() as f32;
    let mean = sum(x, |v| v) / count;
    let variance = sum(x, |v| (v - mean) * (v - mean)) / count;
    let inverse = 1.0 / (variance + eps).sqrt();
    for ((o, &v), (&w, &b)) in out.iter_mut().zip(x).zip(weight.iter().zip(bias)) {
        *o = (v - mean) * inverse * w + b;
    }
}

/// `Σ f(x)`, with enough partial sums to fill a vector register.
#[inline(always)]
fn sum(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0_f32; LANES];
    for part in x.chunks(LANES) {
        for (sum, &v) in sums.iter_mut().zip(part) {
            *sum += f(v);
        }
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::arch::LayerNormParameters::{self, WeightAndBias};
    use candle_core::Device;

    fn rms(width: usize, zero_centered: bool) -> Op {
        Op::RmsNorm { name: String::new(), width, eps: 1e-5, zero_centered }
    }

    /// A zero-centered norm multiplies by 1 + weight; a layer norm without a bias adds nothing.
    #[test]
    fn weights_centered_at_zero_and_missing_biases() {
        let tensor = |v: &[f32]| Tensor::from_slice(v, v.len(), &Device::Cpu).unwrap();
        let x = Tensor::from_slice(&[1.0_f32, -2.0, 3.0, 0.5], (1, 1, 4), &Device::Cpu).unwrap();
        let flat = |y: Tensor| y.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (stored, whole) = ([0.25_f32, -1.0, 0.0, -0.5], [1.25_f32, 0.0, 1.0, 0.5]);
        let centered = Norm { weight: tensor(&stored), bias: None };
        let plain = Norm { weight: tensor(&whole), bias: None };
        let expected = flat(plain.apply(&rms(4, false), &x).unwrap());
        assert_eq!(flat(centered.apply(&rms(4, true), &x).unwrap()), expected);
        assert_ne!(flat(centered.apply(&rms(4, false), &x).unwrap()), expected);
        let parameters = LayerNormParameters::Weight;
        let layer = Op::LayerNorm { name: String::new(), width: 4, parameters, eps: 1e-5 };
        let zeros = Norm { weight: tensor(&whole), bias: Some(tensor(&[0.0; 4])) };
        assert_eq!(flat(plain.apply(&layer, &x).unwrap()), flat(zeros.apply(&layer, &x).unwrap()));
    }

    fn normed(rows: usize, width: usize, x: Vec<f32>, norm: &Norm) -> Vec<f32> {
        let x = Tensor::from_vec(x, (1, rows, width), &Device::Cpu).unwrap();
        let op = Op::LayerNorm { name: String::new(), width, parameters: WeightAndBias, eps: 1e-5 };
        norm.apply(&op, &x).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn layer_norm_matches_its_definition_with_outliers() {
        for (rows, width, outlier) in
            [(1, 1, 1.0), (3, 2, 1.0), (5, 33, 1.0), (4, 768, 300.0), (2, 4096, 3e4)]
        {
            let value = |i: usize| (i as f32 * 0.37).sin() + if i % width == 1 { outlier } else { 5.0 };
            let x: Vec<f32> = (0..rows * width).map(value).collect();
            let vector = |phase: f32| -> Vec<f32> { (0..width).map(|i| (i as f32 + phase).cos()).collect() };
            let (w, b) = (vector(0.1), vector(2.0));
            let tensor = |v: &Vec<f32>| Tensor::from_slice(v, width, &Device::Cpu).unwrap();
            let norm = Norm { weight: tensor(&w), bias: Some(tensor(&b)) };
            let found = normed(rows, width, x.clone(), &norm);
            for (found, x) in found.chunks(width).zip(x.chunks(width)) {
                let x: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
                let mean = x.iter().sum::<f64>() / width as f64;
                let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / width as f64;
                let exact = x
                    .iter()
                    .zip(w.iter().zip(&b))
                    .map(|(v, (w, b))| (v - mean) / (variance + 1e-5).sqrt() * f64::from(*w) + f64::from(*b));
                let exact: Vec<f64> = exact.collect();
                // Each addition to a partial sum, and each of the few operations after it, may be off by half an ulp.
                let largest = exact.iter().fold(0.0_f64, |m, v| m.max(v.abs()));
                let bound = (width / 16 + 16) as f64 * f64::from(f32::EPSILON) * largest;
                for (found, exact) in found.iter().zip(exact) {
                    approx::assert_abs_diff_eq!(f64::from(*found), exact, epsilon = bound);
                }
            }
        }
    }

    #[test]
    fn what_is_not_a_number_stays_so_and_misfits_are_errors() {
        let plain = Norm::plain(4).unwrap();
        let found = normed(2, 4, vec![1.0, f32::NAN, 2.0, 3.0, 1.0, 1.0, 1.0, 1.0], &plain);
        assert!(found[..4].iter().all(|v| v.is_nan()));
        assert_eq!(found[4..], [0.0; 4]);
        let x = Tensor::zeros((1, 2, 8), candle_core::DType::F32, &Device::Cpu).unwrap();
        let parameters = LayerNormParameters::None;
        let layer = |width| Op::LayerNorm { name: String::new(), width, parameters, eps: 1e-5 };
        assert!(plain.apply(&layer(4), &x).is_ok());
        assert!(plain.apply(&layer(8), &x).is_err());
        assert!(plain.apply(&rms(4, false), &x).is_err());
        assert!(plain.apply(&Op::Add, &x).is_err());
    }
}
