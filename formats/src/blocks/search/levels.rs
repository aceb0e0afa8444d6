//! The uneven levels of IQ4.

use super::super::iq4::LEVELS;
use super::lanes::largest;
use super::{LANES, Lanes, NEGLIGIBLE};

/// Candidates on each side of the first.
const TRIES: i32 = 7;

/// The midpoint between level `k` and the one below it; a value at the midpoint rounds up. The reference compares
/// distances, which are exact in `f32` near the midpoint, so the level is the same.
const fn middle(k: usize) -> f32 {
    (LEVELS[k - 1] as i32 + LEVELS[k] as i32) as f32 / 2.0
}

/// The code of the nearest level; the upper one on ties, and the last one for NaN.
#[inline(always)]
pub(in crate::blocks) fn level_code(x: f32) -> u8 {
    let mut code = 0;
    for k in 1..LEVELS.len() {
        code += if x < middle(k) { 0 } else { 1 };
    }
    code
}

/// The nearest level; the upper one on ties, and the last one for NaN.
#[inline(always)]
fn level(x: f32) -> f32 {
    // The terms are integers, so the order of the sum does not matter. Two sums are faster than one.
    let (mut odd, mut even) = (f32::from(LEVELS[0]), 0.0);
    for k in 1..LEVELS.len() {
        let step = if x < middle(k) { 0.0 } else { (LEVELS[k] as i32 - LEVELS[k - 1] as i32) as f32 };
        match k % 2 {
            1 => odd += step,
            _ => even += step,
        }
    }
    odd + even
}

/// Returns the scale of each part; 0 for parts whose values are all negligible.
#[inline(always)]
pub(in crate::blocks) fn level_scales<const N: usize>(x: &[Lanes; N], w: &[Lanes; N]) -> Lanes {
    let max = largest(x);
    let first = f32::from(LEVELS[0]);
    let (mut scale, mut best) = ([0.0; LANES], [0.0; LANES]);
    let mut inverse = [0.0; LANES];
    for i in 0..LANES {
        inverse[i] = 1.0 / (-max[i] / first);
    }
    let [qx, qq] = fit(&inverse, x, w);
    for i in 0..LANES {
        scale[i] = qx[i] / qq[i];
        best[i] = scale[i] * qx[i];
    }
    for step in -TRIES..=TRIES {
        let end = step as f32 + first;
        for i in 0..LANES {
            inverse[i] = end / max[i];
        }
        let [qx, qq] = fit(&inverse, x, w);
        for i in 0..LANES {
            let better = (qq[i] > 0.0) & (qx[i] * qx[i] > best[i] * qq[i]);
            scale[i] = if better { qx[i] / qq[i] } else { scale[i] };
            best[i] = if better { scale[i] * qx[i] } else { best[i] };
        }
    }
    for i in 0..LANES {
        scale[i] = if max[i].abs() < NEGLIGIBLE { 0.0 } else { scale[i] };
    }
    scale
}

/// `Σ w·q·x` and `Σ w·q²` for the levels `q` of `inverse·x`.
#[inline(always)]
fn fit<const N: usize>(inverse: &Lanes, x: &[Lanes; N], w: &[Lanes; N]) -> [Lanes; 2] {
    let (mut qx, mut qq) = ([0.0; LANES], [0.0; LANES]);
    for (x, w) in x.iter().zip(w) {
        for i in 0..LANES {
            let q = level(inverse[i] * x[i]);
            let wq = w[i] * q;
            qx[i] += wq * x[i];
            qq[i] += wq * q;
        }
    }
    [qx, qq]
}
