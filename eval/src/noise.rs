//! The noise floor: the divergence between a model and a numerically equivalent computation of it.
//!
//! A different order of summation or a different kernel rounds differently. This is simulated by multiplying every
//! output value of a block by `1 + u · 2⁻⁹`, with `u` uniform in `[−1, 1)`. A divergence near that between a model and
//! its disturbed copy is not evidence of a difference.

use candle_core::{Device, Tensor};
use quant_formats::Result;
use quant_formats::random::mix;
use rayon::prelude::*;

/// The largest relative disturbance.
const SCALE: f32 = 1.0 / 512.0;
const CHUNK: usize = 1 << 14;

/// Disturbs the output of block `block` for consecutive windows, the first of which has the index `first`. The noise
/// does not depend on how windows are batched.
pub(crate) fn disturb(hidden: &Tensor, seed: u64, block: usize, first: usize) -> Result<Tensor> {
    let (windows, length, width) = hidden.dims3()?;
    let mut values = hidden.flatten_all()?.to_vec1::<f32>()?;
    for (row, window) in values.chunks_mut((length * width).max(1)).enumerate() {
        let stream = mix(mix(mix(seed) ^ block as u64) ^ (first + row) as u64);
        window.par_chunks_mut(CHUNK).enumerate().for_each(|(piece, values)| {
            for (i, value) in values.iter_mut().enumerate() {
                let bits = mix(stream ^ (piece * CHUNK + i) as u64);
                let uniform = (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
                *value *= 1.0 + uniform * SCALE;
            }
        });
    }
    Ok(Tensor::from_vec(values, (windows, length, width), &Device::Cpu)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_small_centred_and_the_same_however_batched() {
        let ones = Tensor::ones((3, 100, 64), candle_core::DType::F32, &Device::Cpu).unwrap();
        let all = disturb(&ones, 7, 2, 10).unwrap().to_vec3::<f32>().unwrap();
        let one = disturb(&ones.narrow(0, 1, 1).unwrap(), 7, 2, 11).unwrap().to_vec3::<f32>().unwrap();
        assert_eq!(all[1], one[0]);
        let changes: Vec<f32> = all.iter().flatten().flatten().map(|v| v - 1.0).collect();
        assert!(changes.iter().all(|c| c.abs() <= SCALE * 1.001));
        let n = changes.len() as f32;
        let mean = changes.iter().sum::<f32>() / n;
        let variance = changes.iter().map(|c| c * c).sum::<f32>() / n;
        assert!(mean.abs() < 4.0 * SCALE / (3.0 * n).sqrt(), "{mean}");
        approx::assert_relative_eq!(variance, SCALE * SCALE / 3.0, max_relative = 0.05);
    }
}
