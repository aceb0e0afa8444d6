//! The searches of the reference for the scale and minimum of a block, which aim at a small weighted error.
//!
//! They try candidate scales, or move single codes, and take the closed-form optimal scale for the resulting codes.
//! Sums run in element order in `f32` and nothing is fused, so that the result equals the reference's, bit for bit.
//! [`LANES`] parts are searched in parallel: every operation is a loop over lanes, which the compiler turns into
//! vector instructions.
//!
//! All functions on lanes are inlined into a closure of [`vectorized`](crate::vector::vectorized).

#![allow(
    clippy::needless_range_loop,
    clippy::neg_cmp_op_on_partial_ord,
    reason = "lanes index several arrays at once; negated comparisons also hold for NaN"
)]

mod lanes;
mod levels;
mod minimum;
mod positive;
#[cfg(test)]
mod scalar;
mod symmetric;
#[cfg(test)]
mod tests;

pub(super) use lanes::{LANES, Lanes, load, square_sums, squares, weigh_lanes};
pub(super) use levels::{level_code, level_scales};
pub(super) use minimum::with_minimum;
pub(super) use positive::{by_largest, positive};
pub(super) use symmetric::{symmetric, symmetric_by_descent};

/// Values, or scales of sub-blocks, whose largest magnitude is below this get the scale 0.
pub(super) const NEGLIGIBLE: f32 = 1e-15;

/// Rounds to the nearest integer, half to even, for magnitudes below 2²². Beyond that, and for NaN, the result is taken
/// from the low bits of the sum with 1.5·2²³, as in the reference.
#[inline(always)]
pub(super) fn nearest(value: f32) -> i32 {
    ((value + 12_582_912.0).to_bits() & 0x007f_ffff) as i32 - 0x0040_0000
}

/// Returns the low eight bits of the integer part. Values that do not fit 32 bits, such as quotients by subnormal
/// scales, give 0, as on x86.
#[inline(always)]
pub(super) fn truncate(value: f32) -> i8 {
    match value.abs() < 2_147_483_648.0 {
        true => value as i32 as i8,
        false => 0,
    }
}

/// The element of largest magnitude, with its sign; the first one on ties.
pub(super) fn largest(values: &[f32]) -> f32 {
    let mut found = 0.0_f32;
    for &v in values {
        if v.abs() > found.abs() {
            found = v;
        }
    }
    found
}

/// Parameters of the search for a grid with a minimum.
#[derive(Clone, Copy)]
pub(super) struct Offsets {
    /// The largest code.
    pub(super) top: i32,
    /// The first candidate has `top + first` steps between the smallest and the largest value.
    pub(super) first: f32,
    /// Increment between candidates.
    pub(super) step: f32,
    /// Candidates after the first.
    pub(super) steps: i32,
    /// Whether the cost is the absolute error instead of the squared one.
    pub(super) absolute: bool,
}

impl Offsets {
    /// The search that uses an importance matrix.
    pub(super) const fn weighted(top: i32) -> Self {
        Self { top, first: -0.9, step: 0.05, steps: 36, absolute: false }
    }
}

pub(super) fn mean_square(x: &[f32]) -> f32 {
    let mut sum = 0.0;
    for &x in x {
        sum += x * x;
    }
    sum / x.len() as f32
}
