//! Grids with minimums: `d·factor·q − dmin·minimum`.

use super::super::grid::{Fields, Grid, PARTS, code_above};
use super::{LANES, MAX_ITERATIONS, total};

/// Starting points of a part's search: the range of its values, shrunk at each end by these fractions, or widened if
/// they are negative.
const DRAWN_IN: [f32; 6] = [-0.04, 0.0, 0.04, 0.09, 0.15, 0.23];
/// Number of candidates for a block's scale, and for the scale of its minimums. Between neighboring candidates, the
/// factor of the part with the largest value differs by `CANDIDATE`, or less if factors have fewer than six bits. All
/// pairs of the best `REFINED` of each are refined.
const CANDIDATES: usize = 24;
const CANDIDATE: f32 = 0.4;
const REFINED: usize = 2;

/// Sums over a part for one choice of codes.
#[derive(Clone, Copy, Default)]
struct Sums {
    l: f32,
    ll: f32,
    xl: f32,
}

#[inline(always)]
fn sums(top: i32, [scale, minimum]: [f32; 2], x: &[f32], w: &[f32]) -> Sums {
    let inverse = if scale != 0.0 { 1.0 / scale } else { 0.0 };
    let (mut l_, mut ll, mut xl) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
    for (x, w) in x.chunks_exact(LANES).zip(w.chunks_exact(LANES)) {
        for i in 0..LANES {
            let l = code_above((x[i] + minimum) * inverse, top);
            l_[i] += w[i] * l;
            ll[i] += w[i] * l * l;
            xl[i] += w[i] * x[i] * l;
        }
    }
    Sums { l: total(l_), ll: total(ll), xl: total(xl) }
}

#[inline(always)]
fn error(top: i32, [scale, minimum]: [f32; 2], x: &[f32], w: &[f32]) -> f32 {
    let inverse = if scale != 0.0 { 1.0 / scale } else { 0.0 };
    let mut sum = [0.0; LANES];
    for (x, w) in x.chunks_exact(LANES).zip(w.chunks_exact(LANES)) {
        for i in 0..LANES {
            let off = x[i] - (scale * code_above((x[i] + minimum) * inverse, top) - minimum);
            sum[i] += w[i] * off * off;
        }
    }
    total(sum)
}

/// `Σ w` and `Σ w·x` of a part.
#[inline(always)]
fn moments(x: &[f32], w: &[f32]) -> [f32; 2] {
    let (mut sum_w, mut sum_x) = ([0.0; LANES], [0.0; LANES]);
    for (x, w) in x.chunks_exact(LANES).zip(w.chunks_exact(LANES)) {
        for i in 0..LANES {
            sum_w[i] += w[i];
            sum_x[i] += w[i] * x[i];
        }
    }
    [total(sum_w), total(sum_x)]
}

/// Returns the best scale and minimum found for a part, and the curvature of the error with respect to each. The
/// minimum is nonnegative unless `any_sign`.
#[inline(always)]
fn fit(top: i32, x: &[f32], w: &[f32], any_sign: bool) -> ([f32; 2], [f32; 2]) {
    let [sum_w, sum_x] = moments(x, w);
    let mut low = x.iter().fold(f32::INFINITY, |low, v| low.min(*v));
    let high = x.iter().fold(f32::NEG_INFINITY, |high, v| high.max(*v));
    if !any_sign {
        low = low.min(0.0);
    }
    if high <= low {
        // All values are equal, and not positive unless `any_sign`: the minimum alone represents them.
        return ([0.0, -low], [0.0, sum_w]);
    }
    let mut best = (f32::INFINITY, [0.0, (-low).max(if any_sign { -low } else { 0.0 })], [0.0, sum_w]);
    for above in DRAWN_IN {
        for below in DRAWN_IN {
            let range = high - low;
            let first = low + below * range;
            let first = if any_sign { first } else { first.min(0.0) };
            let mut now = [(high - above * range - first) / top as f32, -first];
            let mut before = f32::INFINITY;
            for _ in 0..3 {
                let s = sums(top, now, x, w);
                let determinant = sum_w * s.ll - s.l * s.l;
                if determinant <= 0.0 || s.ll <= 0.0 {
                    break;
                }
                let mut scale = (sum_w * s.xl - sum_x * s.l) / determinant;
                let mut offset = (s.ll * sum_x - s.l * s.xl) / determinant;
                if offset > 0.0 && !any_sign {
                    (scale, offset) = (s.xl / s.ll, 0.0);
                }
                if scale <= 0.0 || !scale.is_finite() {
                    break;
                }
                now = [scale, -offset];
                let e = error(top, now, x, w);
                if e < best.0 {
                    best = (e, now, [s.ll, sum_w]);
                }
                if e >= before {
                    break;
                }
                before = e;
            }
        }
    }
    (best.1, best.2)
}

/// Finds the fields of a block, without its codes.
#[inline(always)]
pub(super) fn fields(top: i32, grid: &Grid, x: &[f32], w: &[f32], half: impl Fn(f32) -> f32) -> Fields {
    let parts = || x.chunks_exact(grid.part).zip(w.chunks_exact(grid.part));
    let count = x.len() / grid.part;
    let [low, high] = grid.factors;
    let single = low == high;
    let (mut scales, mut minimums) = ([0.0_f32; PARTS], [0.0_f32; PARTS]);
    let (mut curves, mut weights) = ([0.0_f32; PARTS], [0.0_f32; PARTS]);
    for (j, (x, w)) in parts().enumerate() {
        let (found, curve) = fit(top, x, w, single);
        [scales[j], minimums[j]] = found;
        [curves[j], weights[j]] = curve;
    }
    let integer = |value: f32, unit: f32| match unit {
        0.0 => 0.clamp(low, high),
        _ => (value / unit).round().max(low as f32).min(high as f32) as i32,
    };
    let mut best = (f32::INFINITY, Fields::ZERO);
    let of_scales = starts(&scales[..count], &curves[..count], grid.factors);
    let of_minimums = starts(&minimums[..count], &weights[..count], grid.factors);
    for (d, dmin) in of_scales.iter().flat_map(|d| of_minimums.iter().map(move |dmin| (*d, *dmin))) {
        let (mut d, mut dmin) = (half(d), half(dmin));
        let mut before = f32::INFINITY;
        for _ in 0..MAX_ITERATIONS {
            if !(d.is_finite() && dmin.is_finite()) {
                break;
            }
            let mut fields = Fields { d, dmin, ..Fields::ZERO };
            let mut sum = 0.0;
            // Normal equations of `x ≈ d·a − dmin·b`.
            let (mut aa, mut ab, mut bb, mut xa, mut xb) = (0.0_f32, 0.0_f32, 0.0_f32, 0.0_f32, 0.0_f32);
            for (j, (x, w)) in parts().enumerate() {
                let [sum_w, sum_x] = [weights[j], moments(x, w)[1]];
                let near = integer(scales[j], d);
                let mut found = (f32::INFINITY, near, integer(minimums[j], dmin));
                for f in (near - 1).max(low)..=(near + 1).min(high) {
                    let scale = d * f as f32;
                    // The second candidate is the optimal minimum for the codes of the first.
                    let first = integer(minimums[j], dmin);
                    let s = sums(top, [scale, dmin * first as f32], x, w);
                    let second = integer((scale * s.l - sum_x) / sum_w, dmin);
                    for m in [first, second].into_iter().take(if first == second { 1 } else { 2 }) {
                        let e = error(top, [scale, dmin * m as f32], x, w);
                        if e < found.0 {
                            found = (e, f, m);
                        }
                    }
                }
                let (e, f, m) = found;
                (fields.factors[j], fields.minimums[j]) = (f, m);
                sum += e;
                let s = sums(top, [d * f as f32, dmin * m as f32], x, w);
                let (f, m) = (f as f32, m as f32);
                aa += f * f * s.ll;
                ab += f * m * s.l;
                bb += m * m * sum_w;
                xa += f * s.xl;
                xb += m * sum_x;
            }
            if sum < best.0 {
                best = (sum, fields);
            }
            if sum >= before {
                break;
            }
            before = sum;
            let determinant = aa * bb - ab * ab;
            let next = match determinant > 1e-6 * aa * bb {
                true => [half((bb * xa - ab * xb) / determinant), half((ab * xa - aa * xb) / determinant)],
                false if aa > 0.0 => [half((xa + dmin * ab) / aa), dmin],
                false => break,
            };
            if next == [d, dmin] {
                break;
            }
            [d, dmin] = next;
        }
    }
    best.1
}

/// Returns candidates for a scale of a block, best first, from the optimal values of its parts.
#[inline(always)]
fn starts(values: &[f32], curves: &[f32], [low, high]: [i32; 2]) -> Vec<f32> {
    let max = values.iter().fold(0.0_f32, |max, v| max.max(*v));
    if low == high {
        return values.to_vec();
    }
    if max <= 0.0 {
        return vec![0.0];
    }
    let mut found: Vec<(f32, f32)> = (0..CANDIDATES)
        .map(|i| {
            let d = max / (high as f32 - CANDIDATE * i as f32 * high as f32 / 63.0);
            let mut sum = 0.0;
            for (v, curve) in values.iter().zip(curves) {
                let off = v - d * (v / d).round().max(0.0).min(high as f32);
                sum += curve * off * off;
            }
            (sum, d)
        })
        .collect();
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    found.into_iter().take(REFINED).map(|(_, d)| d).collect()
}
