//! Grids without minimums: `d·factor·level`.

use super::super::grid::{Fields, Grid, Levels, PARTS, Scales};
use super::{LANES, MAX_ITERATIONS, total};

/// Number of starting scales of a part's search, for each sign; a multiple of the lanes.
const STARTS: usize = 24;
/// Number of block scales that are refined, out of all candidates.
const REFINED: usize = 4;
/// Number of candidates for a block's scale, for each end of the factors' range. Between neighboring candidates, the
/// factor of the part with the largest scale differs by `CANDIDATE`.
const CANDIDATES: usize = 24;
const CANDIDATE: f32 = 0.4;

/// `Σ w·x·l` and `Σ w·l²` for the levels `l` nearest to `x·inverse`.
#[inline(always)]
fn sums<L: Levels>(levels: L, inverse: f32, x: &[f32], w: &[f32]) -> (f32, f32) {
    let (mut xl, mut ll) = ([0.0; LANES], [0.0; LANES]);
    for (x, w) in x.chunks_exact(LANES).zip(w.chunks_exact(LANES)) {
        for i in 0..LANES {
            let l = levels.level(x[i] * inverse);
            xl[i] += w[i] * x[i] * l;
            ll[i] += w[i] * l * l;
        }
    }
    (total(xl), total(ll))
}

/// The [`sums`] for several scales in parallel, in the same order.
#[inline(always)]
fn sums_of_scales<L: Levels>(levels: L, inverse: &[f32; LANES], x: &[f32], w: &[f32]) -> [[f32; LANES]; 2] {
    let mut of_lanes = [[[0.0; LANES]; LANES]; 2];
    for lane in 0..LANES {
        let (mut xl, mut ll) = ([0.0; LANES], [0.0; LANES]);
        for (x, w) in x.chunks_exact(LANES).zip(w.chunks_exact(LANES)) {
            let (x, w) = (x[lane], w[lane]);
            for i in 0..LANES {
                let l = levels.level(x * inverse[i]);
                xl[i] += w * x * l;
                ll[i] += w * l * l;
            }
        }
        [of_lanes[0][lane], of_lanes[1][lane]] = [xl, ll];
    }
    of_lanes.map(|lanes| std::array::from_fn(|i| total(lanes.map(|lane| lane[i]))))
}

/// The weighted squared error for a scale.
#[inline(always)]
fn error<L: Levels>(levels: L, scale: f32, x: &[f32], w: &[f32]) -> f32 {
    let inverse = if scale != 0.0 { 1.0 / scale } else { 0.0 };
    let mut sum = [0.0; LANES];
    for (x, w) in x.chunks_exact(LANES).zip(w.chunks_exact(LANES)) {
        for i in 0..LANES {
            let off = x[i] - scale * levels.level(x[i] * inverse);
            sum[i] += w[i] * off * off;
        }
    }
    total(sum)
}

/// Returns the best scale found for a part, and `Σ w·l²` for the levels for which it is optimal.
#[inline(always)]
fn fit<L: Levels>(levels: L, x: &[f32], w: &[f32]) -> (f32, f32) {
    let max = x.iter().fold(0.0_f32, |max, v| max.max(v.abs()));
    if max == 0.0 {
        return (0.0, 0.0);
    }
    let [low, step] = [levels.ends()[0], levels.step()];
    // Starting scales range from one at which the last level is about the largest value to one at which the largest
    // values saturate.
    let (first, last) = ((0.09 * low).max(-step), levels.beyond());
    let mut best = (0.0, 0.0, 0.0);
    for end in [low, -low] {
        for start in (0..STARTS).step_by(LANES) {
            let mut inverse = [0.0; LANES];
            for (i, inverse) in inverse.iter_mut().enumerate() {
                let beyond = first + (last - first) * (start + i) as f32 / (STARTS - 1) as f32;
                *inverse = (end + end.signum() * beyond) / max;
            }
            // Most starting points are no better than those before, and need only these first sums.
            let [xl, ll] = sums_of_scales(levels, &inverse, x, w);
            for (xl, ll) in xl.into_iter().zip(ll) {
                let (mut xl, mut ll) = (xl, ll);
                for step in 0..3 {
                    if ll <= 0.0 || xl * xl <= best.0 * ll {
                        break;
                    }
                    best = (xl * xl / ll, xl / ll, ll);
                    if step < 2 {
                        (xl, ll) = sums(levels, ll / xl, x, w);
                    }
                }
            }
        }
    }
    (best.1, best.2)
}

/// Finds the fields of a block, without its codes.
#[inline(always)]
pub(super) fn fields<L: Levels>(
    levels: L,
    grid: &Grid,
    x: &[f32],
    w: &[f32],
    half: impl Fn(f32) -> f32,
) -> Fields {
    let parts = || x.chunks_exact(grid.part).zip(w.chunks_exact(grid.part));
    let count = x.len() / grid.part;
    let (mut scales, mut curves) = ([0.0_f32; PARTS], [0.0_f32; PARTS]);
    for (j, (x, w)) in parts().enumerate() {
        (scales[j], curves[j]) = fit(levels, x, w);
    }
    let [low, high] = grid.factors;
    let factor = |scale: f32, d: f32| ((scale / d).round().max(low as f32).min(high as f32)) as i32;
    let mut best = (f32::INFINITY, Fields::ZERO);
    for d in starts(&scales[..count], &curves[..count], grid.factors) {
        let mut d = half(d);
        let mut before = f32::INFINITY;
        for _ in 0..MAX_ITERATIONS {
            if d == 0.0 || !d.is_finite() {
                break;
            }
            let mut fields = Fields { d, ..Fields::ZERO };
            let (mut sum, mut xl, mut ll) = (0.0, 0.0, 0.0);
            for (j, (x, w)) in parts().enumerate() {
                let near = factor(scales[j], d);
                let mut found = (f32::INFINITY, near);
                for f in (near - 1).max(low)..=(near + 1).min(high) {
                    let e = error(levels, d * f as f32, x, w);
                    if e < found.0 {
                        found = (e, f);
                    }
                }
                let (e, f) = found;
                fields.factors[j] = f;
                sum += e;
                if f != 0 {
                    let f = f as f32;
                    let (part_xl, part_ll) = sums(levels, 1.0 / (d * f), x, w);
                    xl += f * part_xl;
                    ll += f * f * part_ll;
                }
            }
            if sum < best.0 {
                best = (sum, fields);
            }
            if sum >= before || ll <= 0.0 {
                break;
            }
            before = sum;
            let next = half(xl / ll);
            if next == d {
                break;
            }
            d = next;
        }
    }
    if best.0 == f32::INFINITY {
        // No candidate gave a finite error. The caller checks the encoded bytes for overflow.
        let d =
            half(scales[..count].iter().fold(0.0_f32, |max, s| if s.abs() > max.abs() { *s } else { max }));
        let d = d / if low == high { 1.0 } else { high as f32 };
        return Fields { d: half(d), factors: [high; PARTS], ..Fields::ZERO };
    }
    best.1
}

/// Finds the fields of a block whose parts have scale codes of their own, without its codes. The values `x` have been
/// divided by `power`.
#[inline(always)]
pub(super) fn own_scales<L: Levels>(levels: L, grid: &Grid, x: &[f32], w: &[f32], power: f32) -> Fields {
    let mut fields = Fields::ZERO;
    let Scales::Own(scale) = grid.scales else { return fields };
    let [low, high] = grid.factors;
    let scale = |code: i32| scale(code as u8) / power;
    for (j, (x, w)) in x.chunks_exact(grid.part).zip(w.chunks_exact(grid.part)).enumerate() {
        let max = x.iter().fold(0.0_f32, |max, v| max.max(v.abs()));
        let mut best = (f32::INFINITY, low);
        // Search around the optimal scale, and around the one that maps the largest value to the last level.
        for wanted in [fit(levels, x, w).0.abs(), max / levels.ends()[1]] {
            let (mut below, mut above) = (low, high);
            while below < above {
                let middle = (below + above) / 2;
                if scale(middle) < wanted { below = middle + 1 } else { above = middle }
            }
            for code in (below - 2).max(low)..=(below + 1).min(high) {
                let e = error(levels, scale(code), x, w);
                if e < best.0 {
                    best = (e, code);
                }
            }
        }
        fields.factors[j] = best.1;
    }
    fields
}

/// Returns candidates for a block's scale, best first, from the optimal scales of its parts; for blocks without
/// factors, these scales. The error from rounding the parts' factors is modeled as a parabola around each optimum.
#[inline(always)]
fn starts(scales: &[f32], curves: &[f32], [low, high]: [i32; 2]) -> Vec<f32> {
    if low == high {
        return scales.to_vec();
    }
    let max = scales.iter().fold(0.0_f32, |max, s| if s.abs() > max.abs() { *s } else { max });
    let mut found: Vec<(f32, f32)> = Vec::with_capacity(2 * CANDIDATES);
    for end in [low as f32, high as f32] {
        for i in 0..CANDIDATES {
            let d = max / (end - end.signum() * CANDIDATE * i as f32);
            let mut sum = 0.0;
            for (s, curve) in scales.iter().zip(curves) {
                let off = s - d * (s / d).round().max(low as f32).min(high as f32);
                sum += curve * off * off;
            }
            if sum.is_finite() {
                found.push((sum, d));
            }
        }
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    found.into_iter().take(REFINED).map(|(_, d)| d).collect()
}
