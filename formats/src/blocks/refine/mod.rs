//! This crate's own search: chooses scales, factors and minimums of a block together, for a small weighted squared
//! error of the stored values.
//!
//! The reference searches each part's scale independently and rounds it to the block's grid afterwards. Here, the error
//! of every candidate is that of the stored bytes:
//!
//! 1. Parts are fitted from many starting points, alternating between codes and scales.
//! 2. The block's scale is searched among candidates that fit the scales of all parts. Each part takes the best integer
//!    factor near its optimum.
//! 3. Scale and factors are refined alternately.
//!
//! If parts have scales of their own, their scale codes near the optimum are tried instead. Sums run in eight lanes, in
//! the same order on all machines.

mod levels;
mod minimum;
#[cfg(test)]
mod tests;

use half::f16;

use super::grid::{Even, Fields, Fp4, Grid, MAX_CODES, Scales, Steps, Ternary, Uneven};
use super::search::mean_square;
use crate::vector::vectorized;

pub(super) const LANES: usize = 8;
/// Maximum number of iterations that alternate between a block's scale and its parts' factors.
const MAX_ITERATIONS: usize = 4;

/// The weight of elements in parts without importance, relative to a mean of 1.
const UNIMPORTANT: f32 = 1e-6;

/// Finds the fields of every block of a row, with `elements` elements each; `take` receives them with the block's
/// index. The weight of an element is its importance times the fourth root of `σ² + x²`, with `σ²` the mean square of
/// the row.
pub(super) fn row(
    grid: &Grid,
    row: &[f32],
    importance: Option<&[f32]>,
    elements: usize,
    mut take: impl FnMut(usize, &Fields),
) {
    let sigma2 = mean_square(row);
    let mut weights = [0.0_f32; MAX_CODES];
    let weights = &mut weights[..elements];
    for (b, x) in row.chunks_exact(elements).enumerate() {
        for (w, x) in weights.iter_mut().zip(x) {
            *w = (sigma2 + x * x).sqrt().sqrt();
        }
        if let Some(importance) = importance {
            let importance = &importance[b * elements..][..elements];
            weights.iter_mut().zip(importance).for_each(|(w, im)| *w *= im);
        }
        take(b, &block(grid, x, weights));
    }
}

/// Finds the fields of one block of values. `weights` are nonnegative; if all weights of a part are zero, its elements
/// have equal weights.
pub(super) fn block(grid: &Grid, x: &[f32], weights: &[f32]) -> Fields {
    let mut own = [0.0_f32; MAX_CODES];
    let own = &mut own[..x.len()];
    own.copy_from_slice(weights);
    // Normalize to a mean of 1, so that sums do not overflow.
    let mean = own.iter().sum::<f32>() / own.len() as f32;
    let inverse = 1.0 / mean;
    match inverse.is_normal() {
        true => own.iter_mut().for_each(|w| *w *= inverse),
        false => own.fill(1.0),
    }
    for part in own.chunks_exact_mut(grid.part) {
        if part.iter().all(|w| *w <= 0.0) {
            part.fill(UNIMPORTANT);
        }
    }
    let max = x.iter().fold(0.0_f32, |max, v| max.max(v.abs()));
    if max == 0.0 || !max.is_finite() {
        return zero(grid, max);
    }
    let [low, high] = grid.limits();
    if x.iter().any(|v| !(low < *v && *v < high)) {
        return zero(grid, f32::INFINITY);
    }
    // Normalize values to a magnitude of about 1, by a power of two so that nothing is rounded.
    let power = power_of_two_below(max);
    let mut scaled = [0.0_f32; MAX_CODES];
    let scaled = &mut scaled[..x.len()];
    scaled.iter_mut().zip(x).for_each(|(s, v)| *s = v / power);
    let half = |d: f32| f16::from_f32(d * power).to_f32() / power;
    let mut fields = vectorized(
        #[inline(always)]
        || match grid.steps {
            Steps::Even { half: n } => levels::fields(Even(n), grid, scaled, own, half),
            Steps::Ternary => levels::fields(Ternary, grid, scaled, own, half),
            Steps::Uneven => levels::fields(Uneven, grid, scaled, own, half),
            Steps::Fp4 => levels::own_scales(Fp4, grid, scaled, own, power),
            Steps::Minimum { top } => minimum::fields(top, grid, scaled, own, half),
        },
    );
    let is_large = max > f16::MAX.to_f32() / 2.0;
    if is_large && fields.d == 0.0 && fields.dmin == 0.0 && matches!(grid.scales, Scales::Multiples) {
        // Every candidate overflowed.
        return zero(grid, f32::INFINITY);
    }
    fields.d *= power;
    fields.dmin *= power;
    for (e, x) in x.iter().enumerate() {
        fields.codes[e] = grid.round(grid.part(&fields, e / grid.part), *x).0;
    }
    fields
}

/// A block of zeros. If `max` is infinite or the block's scale would be, `d` is, and the caller's check of the encoded
/// bytes finds it.
fn zero(grid: &Grid, max: f32) -> Fields {
    let mut fields = Fields { d: if max == 0.0 { 0.0 } else { f32::INFINITY }, ..Fields::ZERO };
    let (code, _) = grid.round([0.0, 0.0], 0.0);
    fields.codes.fill(code);
    let neutral = 0_i32.clamp(grid.factors[0], grid.factors[1]);
    fields.factors.fill(neutral);
    fields.minimums.fill(neutral);
    fields
}

/// The largest power of two that is at most a positive value; the smallest normal number for subnormal values.
fn power_of_two_below(value: f32) -> f32 {
    f32::from_bits(value.to_bits() & 0x7f80_0000).max(f32::MIN_POSITIVE)
}

#[inline(always)]
fn total(lanes: [f32; LANES]) -> f32 {
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (b + f)) + ((c + g) + (d + h))
}
