//! Quantization of one head of one token. Simulations of the cache must follow this definition.
//!
//! Keys (after rotary embedding) and values are quantized with one grid per token and head, as in QServe (§3.3 and
//! §4.2.3):
//!
//! ```text
//! zero  = f16↓(min x)                       the value of code 0, rounded down
//! scale = f16↑((max x − zero) / levels)     rounded up; levels = 15 or 255
//! code  = round((x − zero) / scale)         half to even; 0 where the scale is 0
//! x̂     = scale · code + zero               the product is exact in f32, the sum rounded once
//! ```
//!
//! Codes are computed from the scale and zero as stored. These are rounded outwards, so the grid spans all values and
//! nothing is clipped: `|x − x̂| ≤ scale / 2` up to `f32` rounding. A constant that f16 represents has scale 0 and is
//! stored exactly.
//!
//! In QServe, the zero is `−min / scale`, which is unbounded for a nearly constant head; here it is the value of code
//! 0. Apart from rounding, both give the same grid.

use half::f16;

use crate::KernelError;

/// The largest allowed magnitude of a key or value: the largest f16.
pub const MAX_MAGNITUDE: f32 = 65504.0;

/// The grid of one head of one token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadGrid {
    /// The distance between neighbouring codes; not negative.
    pub scale: f16,
    /// The value of code 0.
    pub zero: f16,
}

/// Quantizes the values `x` of one head of one token to `bits`, 4 or 8: codes from 0 to `2^bits − 1`.
///
/// # Errors
/// When `codes` has the wrong length, `bits` is neither 4 nor 8, or a value is NaN or exceeds 65504 in magnitude.
pub fn quantize_head(x: &[f32], bits: u32, codes: &mut [u8]) -> Result<HeadGrid, KernelError> {
    KernelError::length("codes", x.len(), codes.len())?;
    let levels = match bits {
        4 => 15.0_f32,
        8 => 255.0,
        _ => return Err(KernelError::Scheme("a quantized cache must have 4 or 8 bits")),
    };
    check_values(x)?;
    let [low, high] = ends(x);
    // Adding 0.0 changes a zero of −0.0 to 0.0.
    let zero = rounded_down(low + 0.0);
    let from = zero.to_f32();
    // The difference can be −0.0 too: zeros of different sign compare as equal, so `high` may be −0.0.
    let scale = rounded_up((high - from) / levels + 0.0);
    let step = scale.to_f32();
    if step == 0.0 {
        codes.fill(0);
        return Ok(HeadGrid { scale, zero });
    }
    for (code, &x) in codes.iter_mut().zip(x) {
        // The sum is so large that `f32` has no fraction bits there, so the addition rounds to an integer, half to
        // even.
        let rounded = (x - from) / step + ROUND;
        *code = rounded.to_bits() as u8;
    }
    Ok(HeadGrid { scale, zero })
}

/// Computes `out = scale · code + zero`.
///
/// # Errors
/// When `out` has the wrong length.
pub fn dequantize_head(codes: &[u8], grid: HeadGrid, out: &mut [f32]) -> Result<(), KernelError> {
    KernelError::length("output", codes.len(), out.len())?;
    let (scale, zero) = (grid.scale.to_f32(), grid.zero.to_f32());
    out.iter_mut().zip(codes).for_each(|(out, &code)| *out = scale * f32::from(code) + zero);
    Ok(())
}

/// `1.5 · 2²³`. Adding it to a number of magnitude below `2²²` rounds the number half to even; the lowest bits of the
/// sum are then the integer.
pub(crate) const ROUND: f32 = 12_582_912.0;

pub(crate) fn check_values(x: &[f32]) -> Result<(), KernelError> {
    // Compared as integers, the bits of magnitudes have the same order as the magnitudes, with infinity and NaN on top.
    let largest = x.iter().fold(0, |largest, x| (x.to_bits() & 0x7fff_ffff).max(largest));
    match f32::from_bits(largest) {
        largest if largest <= MAX_MAGNITUDE => Ok(()),
        largest if largest.is_finite() => Err(KernelError::TooLarge("a key or value")),
        _ => Err(KernelError::Scheme("a key or value is not finite")),
    }
}

/// Returns the smallest and the largest of finite values; zeros for an empty slice.
fn ends(x: &[f32]) -> [f32; 2] {
    const LANES: usize = 16;
    let Some(&first) = x.first() else { return [0.0; 2] };
    let (mut low, mut high) = ([first; LANES], [first; LANES]);
    let mut join = |i: usize, v: f32| {
        low[i] = if v < low[i] { v } else { low[i] };
        high[i] = if v > high[i] { v } else { high[i] };
    };
    let chunks = x.chunks_exact(LANES);
    chunks.remainder().iter().for_each(|&v| join(0, v));
    for chunk in chunks {
        chunk.iter().enumerate().for_each(|(i, &v)| join(i, v));
    }
    [low.into_iter().fold(first, f32::min), high.into_iter().fold(first, f32::max)]
}

/// The largest f16 that is at most `x`.
fn rounded_down(x: f32) -> f16 {
    let near = f16::from_f32(x);
    match near.to_f32() > x {
        false => near,
        true if near.to_bits() & 0x7fff == 0 => f16::from_bits(0x8001),
        true if near.is_sign_negative() => f16::from_bits(near.to_bits() + 1),
        true => f16::from_bits(near.to_bits() - 1),
    }
}

/// The smallest f16 that is at least `x`, for `x ≥ 0`.
fn rounded_up(x: f32) -> f16 {
    let near = f16::from_f32(x);
    if near.to_f32() < x { f16::from_bits(near.to_bits() + 1) } else { near }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn round_trip(x: &[f32], bits: u32) -> (Vec<u8>, HeadGrid, Vec<f32>) {
        let (mut codes, mut out) = (vec![0xa5; x.len()], vec![f32::NAN; x.len()]);
        let grid = quantize_head(x, bits, &mut codes).unwrap();
        dequantize_head(&codes, grid, &mut out).unwrap();
        (codes, grid, out)
    }

    proptest! {
        #[test]
        fn values_are_within_half_a_step(
            bits in prop_oneof![Just(4_u32), Just(8)],
            centre in -60000.0_f32..60000.0,
            spread in -40_i32..13,
            parts in prop::collection::vec(-1.0_f32..1.0, 0..70),
            around in any::<bool>(),
        ) {
            let spread = 2.0_f32.powi(spread);
            let centre = if around { centre / 65536.0 * spread } else { centre };
            let x = parts.iter().map(|v| (centre + v * spread).clamp(-MAX_MAGNITUDE, MAX_MAGNITUDE));
            let x: Vec<f32> = x.collect();
            let (codes, grid, out) = round_trip(&x, bits);
            let step = f64::from(grid.scale.to_f32());
            prop_assert!(step.is_finite() && step >= 0.0 && grid.zero.is_finite());
            for ((x, out), code) in x.iter().zip(&out).zip(&codes) {
                prop_assert!(u32::from(*code) < 1 << bits);
                let off = (f64::from(*x) - f64::from(*out)).abs();
                let bound = step * (0.5 + 1e-4) + f64::from(x.abs().max(out.abs())) * 2.0_f64.powi(-23);
                prop_assert!(off <= bound, "{x} became {out}, step {step}");
            }
        }
    }

    #[test]
    fn grids_by_hand() {
        let (codes, grid, out) = round_trip(&[-1.0, 14.0, 0.5, 1.5, 6.51], 4);
        assert_eq!((grid.scale.to_f32(), grid.zero.to_f32()), (1.0, -1.0));
        // Ties go to even codes.
        assert_eq!(codes, [0, 15, 2, 2, 8]);
        assert_eq!(out, [-1.0, 14.0, 1.0, 1.0, 7.0]);
        let (codes, grid, out) = round_trip(&[0.0, 255.0, 127.4], 8);
        assert_eq!((grid.scale.to_f32(), codes), (1.0, vec![0, 255, 127]));
        assert_eq!(out, [0.0, 255.0, 127.0]);
    }

    #[test]
    fn constants_and_ends_are_kept() {
        for v in
            [0.0, -0.0, 3.0, -3.0, MAX_MAGNITUDE, -MAX_MAGNITUDE, 2.0_f32.powi(-24), -(2.0_f32.powi(-24))]
        {
            for bits in [4, 8] {
                let (codes, grid, out) = round_trip(&[v; 9], bits);
                assert_eq!((codes, grid.scale.to_f32(), out), (vec![0; 9], 0.0, vec![v; 9]));
                assert!((v != 0.0 || grid.zero.to_bits() == 0) && grid.scale.to_bits() == 0);
            }
        }
        // The widest range, then constants that f16 does not represent, then values below the smallest f16.
        let (codes, grid, out) = round_trip(&[-MAX_MAGNITUDE, MAX_MAGNITUDE], 4);
        assert!(grid.scale.is_finite() && codes == [0, 15] && out[0] == -MAX_MAGNITUDE);
        for v in [1.0 / 3.0, -1.0 / 3.0, 1000.3, 1e-9, -1e-9] {
            let (_, _, out) = round_trip(&[v; 4], 4);
            assert!((out[0] - v).abs() <= v.abs() * 1e-6 + 1e-6, "{v} {}", out[0]);
        }
        let (_, grid, _) = round_trip(&[1e-30, 2e-30], 4);
        assert_eq!((grid.scale.to_bits(), grid.zero.to_bits()), (1, 0));
        assert_eq!(round_trip(&[], 8).1, HeadGrid { scale: f16::ZERO, zero: f16::ZERO });
    }

    #[test]
    fn what_cannot_be_stored_is_refused() {
        let code = |x: &[f32], bits, len| quantize_head(x, bits, &mut vec![0; len]).unwrap_err().code();
        assert_eq!(code(&[1.0, 65504.1], 4, 2), 2);
        assert_eq!(code(&[1.0, f32::NAN], 4, 2), 3);
        assert_eq!(code(&[f32::NEG_INFINITY], 8, 1), 3);
        assert_eq!(code(&[1.0], 5, 1), 3);
        assert_eq!(code(&[1.0], 4, 2), 1);
        let grid = HeadGrid { scale: f16::ONE, zero: f16::ZERO };
        assert_eq!(dequantize_head(&[1], grid, &mut []).unwrap_err().code(), 1);
    }
}
