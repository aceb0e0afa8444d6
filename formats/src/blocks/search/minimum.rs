//! Grids with a minimum.

use super::{LANES, Lanes, Offsets, nearest};

/// The results of the search, with one part per lane.
pub(in crate::blocks) struct Minimums {
    pub(in crate::blocks) scale: Lanes,
    /// The value that is subtracted; nonnegative.
    pub(in crate::blocks) minimum: Lanes,
    pub(in crate::blocks) weight: Lanes,
    /// The codes are those of `inverse·(x − from)`. They are zero for `flat` parts, whose values are all equal and at
    /// most 0.
    inverse: Lanes,
    from: Lanes,
    flat: [bool; LANES],
    top: i32,
}

impl Minimums {
    /// Writes the codes of the part in a lane.
    #[inline(always)]
    pub(in crate::blocks) fn codes(&self, lane: usize, x: &[f32], codes: &mut [u8]) {
        if self.flat[lane] {
            codes.fill(0);
            return;
        }
        let (inverse, from) = (self.inverse[lane], self.from[lane]);
        for (code, &x) in codes.iter_mut().zip(x) {
            *code = nearest(inverse * (x - from)).max(0).min(self.top) as u8;
        }
    }
}

/// Searches a grid `scale·code − minimum` with codes `0..=top` and `minimum ≥ 0`.
#[inline(always)]
pub(in crate::blocks) fn with_minimum<const N: usize>(
    search: Offsets,
    x: &[Lanes; N],
    w: &[Lanes; N],
) -> Minimums {
    let Offsets { top, first, step, steps, absolute } = search;
    let (mut min, mut max, mut sum_w, mut sum_x) = (x[0], x[0], w[0], [0.0; LANES]);
    for i in 0..LANES {
        sum_x[i] = w[0][i] * x[0][i];
    }
    for e in 1..N {
        for i in 0..LANES {
            let (x, w) = (x[e][i], w[e][i]);
            min[i] = if x < min[i] { x } else { min[i] };
            max[i] = if x > max[i] { x } else { max[i] };
            sum_w[i] += w;
            sum_x[i] += w * x;
        }
    }
    let (mut flat, mut inverse, mut scale) = ([false; LANES], [0.0; LANES], [0.0; LANES]);
    for i in 0..LANES {
        min[i] = if min[i] > 0.0 { 0.0 } else { min[i] };
        flat[i] = max[i] <= min[i];
        inverse[i] = top as f32 / (max[i] - min[i]);
        scale[i] = 1.0 / inverse[i];
    }
    let smallest = min;
    let mut codes = [[0.0; LANES]; N];
    round(top, &inverse, &min, x, &mut codes);
    let mut best = error(absolute, &scale, &min, &codes, x, w);
    let mut from = min;
    for candidate in 0..=steps {
        // Uses the best minimum so far, as the reference does.
        let intervals = first + step * candidate as f32 + top as f32;
        let mut other = [0.0; LANES];
        for i in 0..LANES {
            other[i] = intervals / (max[i] - min[i]);
        }
        round(top, &other, &min, x, &mut codes);
        let (mut sum_l, mut sum_ll, mut sum_xl) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
        for e in 0..N {
            for i in 0..LANES {
                let (l, wl) = (codes[e][i], w[e][i] * codes[e][i]);
                sum_l[i] += wl;
                sum_ll[i] += wl * l;
                sum_xl[i] += wl * x[e][i];
            }
        }
        let (mut new_scale, mut new_min, mut solvable) = ([0.0; LANES], [0.0; LANES], [false; LANES]);
        for i in 0..LANES {
            let determinant = sum_w[i] * sum_ll[i] - sum_l[i] * sum_l[i];
            let of_both = (sum_w[i] * sum_xl[i] - sum_x[i] * sum_l[i]) / determinant;
            let min = (sum_ll[i] * sum_x[i] - sum_l[i] * sum_xl[i]) / determinant;
            let positive = min > 0.0;
            new_min[i] = if positive { 0.0 } else { min };
            new_scale[i] = if positive { sum_xl[i] / sum_ll[i] } else { of_both };
            solvable[i] = determinant > 0.0;
        }
        let found = error(absolute, &new_scale, &new_min, &codes, x, w);
        for i in 0..LANES {
            let better = solvable[i] & (found[i] < best[i]);
            best[i] = if better { found[i] } else { best[i] };
            scale[i] = if better { new_scale[i] } else { scale[i] };
            inverse[i] = if better { other[i] } else { inverse[i] };
            from[i] = if better { min[i] } else { from[i] };
            min[i] = if better { new_min[i] } else { min[i] };
        }
    }
    let mut minimum = [0.0; LANES];
    for i in 0..LANES {
        scale[i] = if flat[i] { 0.0 } else { scale[i] };
        minimum[i] = -if flat[i] { smallest[i] } else { min[i] };
    }
    Minimums { scale, minimum, weight: sum_w, inverse, from, flat, top }
}

/// Writes the codes of `inverse·(x − min)`, as floats.
#[inline(always)]
fn round<const N: usize>(top: i32, inverse: &Lanes, min: &Lanes, x: &[Lanes; N], codes: &mut [Lanes; N]) {
    for e in 0..N {
        for i in 0..LANES {
            codes[e][i] = nearest(inverse[i] * (x[e][i] - min[i])).max(0).min(top) as f32;
        }
    }
}

/// The weighted error of codes.
#[inline(always)]
fn error<const N: usize>(
    absolute: bool,
    scale: &Lanes,
    min: &Lanes,
    codes: &[Lanes; N],
    x: &[Lanes; N],
    w: &[Lanes; N],
) -> Lanes {
    let mut sum = [0.0; LANES];
    for e in 0..N {
        for i in 0..LANES {
            let off = scale[i] * codes[e][i] + min[i] - x[e][i];
            sum[i] += w[e][i] * if absolute { off.abs() } else { off * off };
        }
    }
    sum
}
