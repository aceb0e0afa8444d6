//! Quantization of queries.

use super::grid::ROUND;
use crate::KernelError;
use crate::activation::SMALLEST;

/// The bound beyond which the scores of a query might overflow `f32`, so that its result is NaN. For quantized pages it
/// applies to the factor of the integer products, `|scale| · max |q| / 127`; for f16 pages to `max |q|` and
/// `|scale| · max |q|`.
pub const MAX_QUERY: f32 = 1e27;

pub(super) fn largest(q: &[f32]) -> f32 {
    f32::from_bits(q.iter().fold(0, |largest, x| (x.to_bits() & 0x7fff_ffff).max(largest)))
}

/// Quantizes a query of one head to int8, as [`Int8Rows`](crate::Int8Rows) quantizes rows: `s = max |q| / 127`, `a =
/// round(q · (127 / max |q|))` half to even. Returns `s` and `Σ a`. If the largest magnitude is below [`SMALLEST`], the
/// codes and results are all zero; if a value is not finite, `s` is NaN.
///
/// # Errors
/// When `codes` has the wrong length.
pub fn quantize_query(q: &[f32], codes: &mut [i8]) -> Result<(f32, i32), KernelError> {
    KernelError::length("codes", q.len(), codes.len())?;
    Ok(quantize(q, codes))
}

/// Quantizes a query as [`quantize_query`] does. `codes` must have the length of `q`.
pub(super) fn quantize(q: &[f32], codes: &mut [i8]) -> (f32, i32) {
    let largest = largest(q);
    if !largest.is_finite() || largest < SMALLEST {
        codes.fill(0);
        return (if largest.is_finite() { 0.0 } else { f32::NAN }, 0);
    }
    let inverse = 127.0 / largest;
    for (code, q) in codes.iter_mut().zip(q) {
        *code = (q * inverse + ROUND).to_bits() as i8;
    }
    (largest / 127.0, codes.iter().map(|&c| i32::from(c)).sum())
}
