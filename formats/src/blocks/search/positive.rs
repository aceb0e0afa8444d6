//! A common scale of nonnegative values, such as the scales of a block's parts.

use super::symmetric::Fit;
use super::{LANES, Lanes, NEGLIGIBLE, nearest};

/// Returns the scale of the values in each lane and writes their codes, at most `top`.
#[inline(always)]
pub(in crate::blocks) fn positive<const N: usize>(
    top: i32,
    x: &[Lanes; N],
    w: &[Lanes; N],
    codes: &mut [[u8; LANES]; N],
) -> Lanes {
    let max = largest(x);
    let mut inverse = [0.0; LANES];
    for i in 0..LANES {
        inverse[i] = top as f32 / max[i];
    }
    // In the reference, this candidate's codes are not limited, but stored as bytes.
    let mut best = squared(|code| code & 0xff, &inverse, x, w);
    for step in (-4..=4).filter(|step| *step != 0) {
        let intervals = 0.1 * step as f32 + top as f32;
        let mut candidate = [0.0; LANES];
        for i in 0..LANES {
            candidate[i] = intervals / max[i];
        }
        let found = squared(|code| code.min(top), &candidate, x, w);
        for i in 0..LANES {
            let better = found[i] < best[i];
            best[i] = if better { found[i] } else { best[i] };
            inverse[i] = if better { candidate[i] } else { inverse[i] };
        }
    }
    let (mut fit, mut own) = (Fit::ZERO, [[0.0; LANES]; N]);
    for e in 0..N {
        let mut l = [0.0; LANES];
        for i in 0..LANES {
            let code = nearest(inverse[i] * x[e][i]).min(top);
            l[i] = code as f32;
            own[e][i] = low_bits(code);
        }
        fit.add(&w[e], &x[e], &l);
    }
    for _ in 0..5 {
        let mut changed = false;
        for e in 0..N {
            let mut other = fit.without(&w[e], &x[e], &own[e]);
            let (mut l, mut new, mut open) = ([0.0; LANES], [0.0; LANES], [false; LANES]);
            for i in 0..LANES {
                let code = nearest(x[e][i] * other.ll[i] / other.xl[i]).min(top);
                l[i] = code as f32;
                new[i] = low_bits(code);
                // Also holds for NaN, as in the reference.
                open[i] = !(other.xl[i] <= 0.0) & !(other.ll[i] <= 0.0) & (l[i] != own[e][i]);
            }
            other.add(&w[e], &x[e], &l);
            let mut better = fit.is_improved_by(&other);
            for i in 0..LANES {
                better[i] &= open[i];
                own[e][i] = if better[i] { new[i] } else { own[e][i] };
                changed |= better[i];
            }
            fit.take(&other, &better);
        }
        if !changed {
            break;
        }
    }
    let mut scale = fit.scale();
    for i in 0..LANES {
        let zero = max[i] < NEGLIGIBLE;
        scale[i] = if zero { 0.0 } else { scale[i] };
        for (codes, own) in codes.iter_mut().zip(&own) {
            codes[i] = if zero { 0 } else { own[i] as u8 };
        }
    }
    scale
}

/// Returns the common scale with which the largest value in each lane gets the code `top`, and writes all codes.
#[inline(always)]
pub(in crate::blocks) fn by_largest<const N: usize>(
    top: i32,
    x: &[Lanes; N],
    codes: &mut [[u8; LANES]; N],
) -> Lanes {
    let max = largest(x);
    let (mut inverse, mut scale) = ([0.0; LANES], [0.0; LANES]);
    for i in 0..LANES {
        inverse[i] = if max[i] > 0.0 { top as f32 / max[i] } else { 0.0 };
        scale[i] = max[i] / top as f32;
    }
    for (codes, x) in codes.iter_mut().zip(x) {
        for i in 0..LANES {
            codes[i] = nearest(inverse[i] * x[i]).min(top) as u8;
        }
    }
    scale
}

/// The largest value in each lane, or 0.
#[inline(always)]
fn largest<const N: usize>(x: &[Lanes; N]) -> Lanes {
    let mut max = [0.0_f32; LANES];
    for x in x {
        for i in 0..LANES {
            max[i] = if x[i] > max[i] { x[i] } else { max[i] };
        }
    }
    max
}

#[inline(always)]
fn low_bits(code: i32) -> f32 {
    (code & 0xff) as f32
}

#[inline(always)]
fn squared<const N: usize>(
    limit: impl Fn(i32) -> i32,
    inverse: &Lanes,
    x: &[Lanes; N],
    w: &[Lanes; N],
) -> Lanes {
    let mut scale = [0.0; LANES];
    for i in 0..LANES {
        scale[i] = 1.0 / inverse[i];
    }
    let mut sum = [0.0; LANES];
    for (x, w) in x.iter().zip(w) {
        for i in 0..LANES {
            let off = x[i] - scale[i] * limit(nearest(inverse[i] * x[i])) as f32;
            sum[i] += w[i] * off * off;
        }
    }
    sum
}
