//! Grids with minimums: `d·factor·q − dmin·minimum`.

#![allow(
    clippy::needless_range_loop,
    clippy::neg_cmp_op_on_partial_ord,
    reason = "lanes index several arrays at once; negated comparisons also hold for NaN"
)]

use super::super::grid::{Fields, Grid, MAX_CODES, PARTS, code_above};
use super::{LANES, MAX_ITERATIONS, total};

/// Starting points of a part's search: the range of its values, shrunk at each end by these fractions, or widened if
/// they are negative.
const DRAWN_IN: [f32; 6] = [-0.04, 0.0, 0.04, 0.09, 0.15, 0.23];
/// Number of candidates for a block's scale, and for the scale of its minimums. `CANDIDATE` is their distance, in
/// factors of the part with the largest value. All pairs of the best `REFINED` of each are refined.
const CANDIDATES: usize = 24;
const CANDIDATE: f32 = 0.4;
const REFINED: usize = 2;

/// Number of starting points, or of parts, that are computed in parallel.
const WIDTH: usize = 8;
type Wide = [f32; WIDTH];

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

/// `Σ w·l`, `Σ w·l²` and `Σ w·x·l` for several scales and minimums in parallel. `at` returns value and weight of an
/// element for each of them.
#[inline(always)]
fn sums(
    top: i32,
    [scale, minimum]: [&Wide; 2],
    elements: usize,
    at: impl Fn(usize, usize) -> [f32; 2],
) -> [Wide; 3] {
    let inverse = inverses(scale);
    let mut of_lanes = [[[0.0; WIDTH]; LANES]; 3];
    for lane in 0..LANES {
        let (mut l_, mut ll, mut xl) = ([0.0; WIDTH], [0.0; WIDTH], [0.0; WIDTH]);
        for first in (0..elements).step_by(LANES) {
            for i in 0..WIDTH {
                let [x, w] = at(first + lane, i);
                let l = code_above((x + minimum[i]) * inverse[i], top);
                l_[i] += w * l;
                ll[i] += w * l * l;
                xl[i] += w * x * l;
            }
        }
        [of_lanes[0][lane], of_lanes[1][lane], of_lanes[2][lane]] = [l_, ll, xl];
    }
    [total_of(&of_lanes[0]), total_of(&of_lanes[1]), total_of(&of_lanes[2])]
}

/// The weighted squared errors for several scales and minimums in parallel, see [`sums`].
#[inline(always)]
fn errors(
    top: i32,
    [scale, minimum]: [&Wide; 2],
    elements: usize,
    at: impl Fn(usize, usize) -> [f32; 2],
) -> Wide {
    let inverse = inverses(scale);
    let mut of_lanes = [[0.0; WIDTH]; LANES];
    for (lane, sum) in of_lanes.iter_mut().enumerate() {
        for first in (0..elements).step_by(LANES) {
            for i in 0..WIDTH {
                let [x, w] = at(first + lane, i);
                let off = x - (scale[i] * code_above((x + minimum[i]) * inverse[i], top) - minimum[i]);
                sum[i] += w * off * off;
            }
        }
    }
    total_of(&of_lanes)
}

#[inline(always)]
fn inverses(scale: &Wide) -> Wide {
    let mut inverse = [0.0; WIDTH];
    for i in 0..WIDTH {
        inverse[i] = if scale[i] != 0.0 { 1.0 / scale[i] } else { 0.0 };
    }
    inverse
}

#[inline(always)]
fn total_of(lanes: &[Wide; LANES]) -> Wide {
    let [a, b, c, d, e, f, g, h] = lanes;
    let mut sum = [0.0; WIDTH];
    for i in 0..WIDTH {
        sum[i] = ((a[i] + e[i]) + (b[i] + f[i])) + ((c[i] + g[i]) + (d[i] + h[i]));
    }
    sum
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
    let range = high - low;
    let start = |i: usize| {
        let (above, below) = (DRAWN_IN[i / DRAWN_IN.len()], DRAWN_IN[i % DRAWN_IN.len()]);
        let first = low + below * range;
        let first = if any_sign { first } else { first.min(0.0) };
        [(high - above * range - first) / top as f32, -first]
    };
    let at = |e: usize, _| [x[e], w[e]];
    const STARTS: usize = DRAWN_IN.len() * DRAWN_IN.len();
    for first in (0..STARTS).step_by(WIDTH) {
        let (mut scale, mut minimum, mut open) = ([0.0; WIDTH], [0.0; WIDTH], [false; WIDTH]);
        for i in 0..WIDTH.min(STARTS - first) {
            [scale[i], minimum[i]] = start(first + i);
            open[i] = true;
        }
        // The best of each start, and its scale, minimum and curvature.
        let mut own = [[f32::INFINITY; WIDTH], [0.0; WIDTH], [0.0; WIDTH], [0.0; WIDTH]];
        let mut before = [f32::INFINITY; WIDTH];
        for _ in 0..3 {
            let [l, ll, xl] = sums(top, [&scale, &minimum], x.len(), at);
            for i in 0..WIDTH {
                let determinant = sum_w * ll[i] - l[i] * l[i];
                let of_both = (sum_w * xl[i] - sum_x * l[i]) / determinant;
                let offset = (ll[i] * sum_x - l[i] * xl[i]) / determinant;
                let at_zero = (offset > 0.0) & !any_sign;
                let new = if at_zero { xl[i] / ll[i] } else { of_both };
                // The negated comparisons keep the search going for NaN.
                open[i] &= !(determinant <= 0.0) & !(ll[i] <= 0.0) & !(new <= 0.0) & new.is_finite();
                scale[i] = if open[i] { new } else { scale[i] };
                minimum[i] = if open[i] { -if at_zero { 0.0 } else { offset } } else { minimum[i] };
            }
            let found = errors(top, [&scale, &minimum], x.len(), at);
            let mut any = false;
            for i in 0..WIDTH {
                let better = open[i] & (found[i] < own[0][i]);
                own[0][i] = if better { found[i] } else { own[0][i] };
                own[1][i] = if better { scale[i] } else { own[1][i] };
                own[2][i] = if better { minimum[i] } else { own[2][i] };
                own[3][i] = if better { ll[i] } else { own[3][i] };
                open[i] &= !(found[i] >= before[i]);
                before[i] = found[i];
                any |= open[i];
            }
            if !any {
                break;
            }
        }
        for i in 0..WIDTH {
            if own[0][i] < best.0 {
                best = (own[0][i], [own[1][i], own[2][i]], [own[3][i], sum_w]);
            }
        }
    }
    (best.1, best.2)
}

/// Finds the fields of a block, without its codes.
#[inline(always)]
pub(super) fn fields(top: i32, grid: &Grid, x: &[f32], w: &[f32], half: impl Fn(f32) -> f32) -> Fields {
    let count = x.len() / grid.part;
    let [low, high] = grid.factors;
    let single = low == high;
    let (mut scales, mut minimums) = ([0.0_f32; PARTS], [0.0_f32; PARTS]);
    let (mut curves, mut weights, mut sums_x) = ([0.0_f32; PARTS], [0.0_f32; PARTS], [0.0_f32; PARTS]);
    let mut sides = [[[0.0_f32; WIDTH]; 2]; MAX_CODES];
    for (j, (x, w)) in x.chunks_exact(grid.part).zip(w.chunks_exact(grid.part)).enumerate() {
        let (found, curve) = fit(top, x, w, single);
        [scales[j], minimums[j]] = found;
        [curves[j], weights[j]] = curve;
        sums_x[j] = moments(x, w)[1];
        for (e, side) in sides[j / WIDTH * grid.part..][..grid.part].iter_mut().enumerate() {
            (side[0][j % WIDTH], side[1][j % WIDTH]) = (x[e], w[e]);
        }
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
            for first in (0..count).step_by(WIDTH) {
                let side = &sides[first / WIDTH * grid.part..][..grid.part];
                let at = |e: usize, i: usize| [side[e][0][i], side[e][1][i]];
                let (mut near, mut rounded) = ([0; WIDTH], [0; WIDTH]);
                for i in 0..WIDTH {
                    near[i] = integer(scales[first + i], d);
                    rounded[i] = integer(minimums[first + i], dmin);
                }
                let minimum = rounded.map(|m| dmin * m as f32);
                let (mut errors_of, mut f, mut m) = ([f32::INFINITY; WIDTH], near, rounded);
                for step in -1..=1 {
                    let scale = near.map(|near| d * (near + step) as f32);
                    let [l, ..] = sums(top, [&scale, &minimum], grid.part, at);
                    // The second candidate is the optimal minimum for the codes of the first.
                    let mut second = [0; WIDTH];
                    for i in 0..WIDTH {
                        second[i] = integer((scale[i] * l[i] - sums_x[first + i]) / weights[first + i], dmin);
                    }
                    for (candidate, again) in [(rounded, false), (second, true)] {
                        let minimum = candidate.map(|m| dmin * m as f32);
                        let found = errors(top, [&scale, &minimum], grid.part, at);
                        for i in 0..WIDTH {
                            let factor = near[i] + step;
                            let fits =
                                (factor >= low) & (factor <= high) & !(again & (second[i] == rounded[i]));
                            let better = fits & (found[i] < errors_of[i]);
                            errors_of[i] = if better { found[i] } else { errors_of[i] };
                            f[i] = if better { factor } else { f[i] };
                            m[i] = if better { candidate[i] } else { m[i] };
                        }
                    }
                }
                let scale = f.map(|f| d * f as f32);
                let minimum = m.map(|m| dmin * m as f32);
                let [l, ll, xl] = sums(top, [&scale, &minimum], grid.part, at);
                for i in 0..WIDTH.min(count - first) {
                    let j = first + i;
                    (fields.factors[j], fields.minimums[j]) = (f[i], m[i]);
                    sum += errors_of[i];
                    let (f, m) = (f[i] as f32, m[i] as f32);
                    aa += f * f * ll[i];
                    ab += f * m * l[i];
                    bb += m * m * weights[j];
                    xa += f * xl[i];
                    xb += m * sums_x[j];
                }
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
