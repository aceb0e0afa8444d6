//! MXFP4 checkpoints as published for gpt-oss, `quant_method: "mxfp4"`: experts in three-dimensional tensors, in blocks
//! of 32 along a matrix's columns. Read, not written.
//!
//! | tensor | type | shape | holds |
//! |---|---|---|---|
//! | `X_blocks` | U8 | `[experts, n, k / 32, 16]` | two E2M1 codes per byte, with the lower column in the low nibble |
//! | `X_scales` | U8 | `[experts, n, k / 32]` | exponents: `2^(byte − 127)` |
//!
//! The values are exact in bf16 and are read as such: to callers, all of the model's linears are float. A conversion to
//! another format takes the codes instead, as [`unpacked`] returns them. [`QuantizedCheckpoint`](super::QuantizedCheckpoint)
//! shows each expert's matrices as quantized linears.

mod experts;

use std::path::PathBuf;

use quant_kernels_cpu::e8m0_value;
use serde_json::Value;

pub(super) use experts::{ExpertReader, Experts};

use super::{PackedReader, PackedWeight};
use crate::checkpoint::{Dtype, TensorSource, TensorSpec};
use crate::quantize::QuantizedTensor;
use crate::scheme::{FloatFormat, Granularity, LinearScheme, MX_GROUP, WeightFormat};
use crate::{Error, Result};

/// `quant_method`.
pub(super) const METHOD: &str = "mxfp4";
/// Name suffixes of codes and scales, after the name of the float tensor.
pub const SUFFIXES: [&str; 2] = ["_blocks", "_scales"];
/// Columns that share a scale.
pub const BLOCK: usize = 32;

/// Returns the reader for a checkpoint with this `quantization_config`; `None` for other methods. It never fails.
pub(super) fn reader(config: &Value) -> Result<Option<Box<dyn PackedReader>>, String> {
    Ok(is_own(config).then(|| Box::new(Mxfp4) as Box<dyn PackedReader>))
}

/// Whether a `quantization_config` describes this format.
pub(super) fn is_own(config: &Value) -> bool {
    config.get("quant_method").and_then(Value::as_str) == Some(METHOD)
}

/// The scheme of these weights.
pub const SCHEME: LinearScheme =
    LinearScheme::weight_only(WeightFormat::Float(FloatFormat::E2m1), Granularity::Group(MX_GROUP));

/// Returns a matrix `[n, k]` from its stored codes and scales.
///
/// # Errors
/// [`Error::NonFinite`] if a scale is NaN.
pub fn unpacked(
    [n, k]: [usize; 2],
    [codes, scales]: [&[u8]; 2],
    (path, tensor): (PathBuf, &str),
) -> Result<QuantizedTensor> {
    let is_nan = |scale: &&u8| **scale == u8::MAX;
    if let Some(first) = scales.iter().position(|scale| is_nan(&scale)) {
        let count = scales.iter().filter(is_nan).count() as u64;
        return Err(Error::NonFinite { path, tensor: tensor.to_owned(), count, first_index: first as u64 });
    }
    Ok(QuantizedTensor {
        shape: [n, k],
        scheme: SCHEME,
        codes: codes.iter().flat_map(|pair| [pair & 15, pair >> 4]).collect(),
        scales: scales.iter().map(|&scale| e8m0_value(scale)).collect(),
        scale_dtype: Dtype::F8E8M0,
        levels: None,
        zeros: None,
        global: None,
        input: None,
        input_order: None,
    })
}

/// Appends a row of a matrix as bf16 to `out`, from its codes, two per byte, and its scales.
pub fn decode_row(codes: &[u8], scales: &[u8], out: &mut Vec<u8>) {
    for (codes, &scale) in codes.chunks_exact(BLOCK / 2).zip(scales) {
        let scale = e8m0_value(scale);
        for &pair in codes {
            for code in [pair & 15, pair >> 4] {
                let value = FloatFormat::E2m1.value(code) * scale;
                // Both factors have few significant bits, so the bits that are cut off are 0.
                out.extend_from_slice(&((value.to_bits() >> 16) as u16).to_le_bytes());
            }
        }
    }
}

/// A reader that reads all linears as floats.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mxfp4;

impl Mxfp4 {
    fn none<T>(weight: &str) -> Result<T> {
        Err(Error::Internal(format!("`{weight}` was requested packed, but is read as floats")))
    }
}

impl PackedReader for Mxfp4 {
    fn code_suffixes(&self) -> &'static [&'static str] {
        &[]
    }

    fn scheme(&self, _module: &str) -> Option<LinearScheme> {
        None
    }

    fn scale_dtype(&self, _source: &dyn TensorSource, module: &str) -> Result<Dtype> {
        Self::none(module)
    }

    fn shape(&self, _source: &dyn TensorSource, _module: &str) -> Result<Option<[usize; 2]>> {
        Ok(None)
    }

    fn tensors(&self, _source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Vec<TensorSpec>> {
        Self::none(weight.module)
    }

    fn zeros(&self, _source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Option<Vec<u8>>> {
        Self::none(weight.module)
    }

    fn read(&self, _source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<QuantizedTensor> {
        Self::none(weight.module)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_codes_under_all_scales_are_exact() {
        let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for scale in 0..=254_u8 {
            let codes: Vec<u8> = (0..16).map(|i| ((2 * i) % 16) | (((2 * i + 1) % 16) << 4)).collect();
            let mut out = Vec::new();
            decode_row(&codes, &[scale], &mut out);
            for (i, bytes) in out.chunks_exact(2).enumerate() {
                let found = half::bf16::from_le_bytes([bytes[0], bytes[1]]);
                let (code, sign) = (i % 16, if i % 16 < 8 { 1.0 } else { -1.0 });
                let exact = sign * magnitudes[code % 8] * 2.0_f64.powi(i32::from(scale) - 127);
                if exact.abs() < f64::from(f32::MAX) {
                    assert_eq!(found.to_f64(), exact, "code {code}, scale {scale}");
                } else {
                    assert!(found.is_infinite());
                }
            }
        }
        let mut out = Vec::new();
        decode_row(&[0x21; 16], &[255], &mut out);
        assert!(out.chunks_exact(2).all(|b| half::bf16::from_le_bytes([b[0], b[1]]).is_nan()));
    }
}
