//! The searches for one part at a time, as the reference computes them. The searches in lanes must give the same
//! results.

use super::super::iq4::LEVELS;
use super::{NEGLIGIBLE, Offsets, largest, nearest};

/// `Σ w·x·l` and `Σ w·l²`, whose quotient is the optimal scale for codes `l`.
#[derive(Clone, Copy, Default)]
struct Fit {
    xl: f32,
    ll: f32,
}

impl Fit {
    #[inline(always)]
    fn add(&mut self, w: f32, x: f32, l: i32) {
        let l = l as f32;
        self.xl += w * x * l;
        self.ll += w * l * l;
    }

    #[inline(always)]
    fn without(self, w: f32, x: f32, l: i32) -> Self {
        let l = l as f32;
        Self { xl: self.xl - w * x * l, ll: self.ll - w * l * l }
    }

    fn scale(self) -> f32 {
        if self.ll > 0.0 { self.xl / self.ll } else { 0.0 }
    }
}

/// Searches a symmetric grid of codes `-n..n`; writes the codes plus `n`. `weights` default to `x²`.
pub(super) fn symmetric(n: i32, x: &[f32], weights: Option<&[f32]>, codes: &mut [u8]) -> f32 {
    let max = largest(x);
    if max.abs() < NEGLIGIBLE {
        codes.fill(0);
        return 0.0;
    }
    let weight = |i: usize| weights.map_or_else(|| x[i] * x[i], |w| w[i]);
    let round = |inverse: f32, x: f32| nearest(inverse * x).clamp(-n, n - 1);
    let fit = |inverse: f32| {
        let mut fit = Fit::default();
        for (i, &x) in x.iter().enumerate() {
            fit.add(weight(i), x, round(inverse, x));
        }
        fit
    };
    let mut inverse = -n as f32 / max;
    let first = fit(inverse);
    let mut scale = if first.ll != 0.0 { first.xl / first.ll } else { 0.0 };
    let mut best = scale * first.xl;
    for step in (-9..=9).filter(|step| *step != 0) {
        let candidate = -(n as f32 + 0.1 * step as f32) / max;
        let found = fit(candidate);
        if found.ll > 0.0 && found.xl * found.xl > best * found.ll {
            inverse = candidate;
            scale = found.xl / found.ll;
            best = scale * found.xl;
        }
    }
    for (code, &x) in codes.iter_mut().zip(x) {
        *code = (round(inverse, x) + n) as u8;
    }
    scale
}

/// See [`symmetric_by_descent`](super::symmetric_by_descent). For at most 16 values.
pub(super) fn symmetric_by_descent(n: i32, x: &[f32], codes: &mut [u8]) -> f32 {
    let max = largest(x);
    if max.abs() < NEGLIGIBLE {
        codes.fill(0);
        return 0.0;
    }
    let inverse = -n as f32 / max;
    let mut fit = Fit::default();
    let mut signed = [0_i32; 16];
    for (l, &x) in signed.iter_mut().zip(x) {
        *l = nearest(inverse * x).clamp(-n, n - 1);
        fit.add(x * x, x, *l);
    }
    for _ in 0..5 {
        let mut changed = false;
        for (l, &x) in signed.iter_mut().zip(x) {
            let w = x * x;
            let mut other = fit.without(w, x, *l);
            if other.xl <= 0.0 {
                continue;
            }
            let new = nearest(x * other.ll / other.xl).clamp(-n, n - 1);
            if new == *l {
                continue;
            }
            other.add(w, x, new);
            if other.ll > 0.0 && other.xl * other.xl * fit.ll > fit.xl * fit.xl * other.ll {
                (*l, fit, changed) = (new, other, true);
            }
        }
        if !changed {
            break;
        }
    }
    for (code, l) in codes.iter_mut().zip(signed) {
        *code = (l + n) as u8;
    }
    fit.scale()
}

/// Searches a grid `scale·code − minimum` with codes `0..=top` and `minimum ≥ 0`.
pub(super) fn with_minimum(search: Offsets, x: &[f32], weights: &[f32], codes: &mut [u8]) -> (f32, f32) {
    let Offsets { top, first, step, steps, absolute } = search;
    let (mut min, mut max) = (x[0], x[0]);
    let mut sum_w = weights[0];
    let mut sum_x = sum_w * x[0];
    for (&x, &w) in x.iter().zip(weights).skip(1) {
        if x < min {
            min = x;
        }
        if x > max {
            max = x;
        }
        sum_w += w;
        sum_x += w * x;
    }
    if min > 0.0 {
        min = 0.0;
    }
    if max <= min {
        codes.fill(0);
        return (0.0, -min);
    }
    let cost = |error: f32| if absolute { error.abs() } else { error * error };
    let error = |scale: f32, min: f32, codes: &[u8]| {
        let mut sum = 0.0;
        for ((&x, &w), &l) in x.iter().zip(weights).zip(codes) {
            sum += w * cost(scale * f32::from(l) + min - x);
        }
        sum
    };
    let round = |inverse: f32, min: f32, codes: &mut [u8]| {
        for (code, &x) in codes.iter_mut().zip(x) {
            *code = nearest(inverse * (x - min)).clamp(0, top) as u8;
        }
    };
    let inverse = top as f32 / (max - min);
    let mut scale = 1.0 / inverse;
    round(inverse, min, codes);
    let mut best = error(scale, min, codes);
    let mut other = [0_u8; 32];
    let other = &mut other[..x.len()];
    for candidate in 0..=steps {
        // Uses the best minimum so far, as the reference does.
        let inverse = (first + step * candidate as f32 + top as f32) / (max - min);
        round(inverse, min, other);
        let (mut sum_l, mut sum_ll, mut sum_xl) = (0.0, 0.0, 0.0);
        for ((&x, &w), &l) in x.iter().zip(weights).zip(other.iter()) {
            let l = f32::from(l);
            sum_l += w * l;
            sum_ll += w * l * l;
            sum_xl += w * l * x;
        }
        let determinant = sum_w * sum_ll - sum_l * sum_l;
        if determinant <= 0.0 || determinant.is_nan() {
            continue;
        }
        let mut new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
        let mut new_min = (sum_ll * sum_x - sum_l * sum_xl) / determinant;
        if new_min > 0.0 {
            new_min = 0.0;
            new_scale = sum_xl / sum_ll;
        }
        let found = error(new_scale, new_min, other);
        if found < best {
            codes.copy_from_slice(other);
            (best, scale, min) = (found, new_scale, new_min);
        }
    }
    (scale, -min)
}

/// Returns the common scale of nonnegative values, such as the scales of sub-blocks, and writes their codes `0..=top`.
pub(super) fn positive(top: i32, x: &[f32], weights: &[f32], codes: &mut [u8]) -> f32 {
    let mut max = 0.0_f32;
    for &x in x {
        if x > max {
            max = x;
        }
    }
    if max < NEGLIGIBLE {
        codes.fill(0);
        return 0.0;
    }
    let squared = |inverse: f32, capped: bool| {
        let scale = 1.0 / inverse;
        let mut sum = 0.0;
        for (&x, &w) in x.iter().zip(weights) {
            let l = nearest(inverse * x);
            let error = x - scale * if capped { l.min(top) } else { l & 0xff } as f32;
            sum += w * error * error;
        }
        sum
    };
    let mut inverse = top as f32 / max;
    let mut best = squared(inverse, false);
    for step in (-4..=4).filter(|step| *step != 0) {
        let candidate = (0.1 * step as f32 + top as f32) / max;
        let found = squared(candidate, true);
        if found < best {
            (best, inverse) = (found, candidate);
        }
    }
    let mut fit = Fit::default();
    for ((code, &x), &w) in codes.iter_mut().zip(x).zip(weights) {
        let l = nearest(inverse * x).min(top);
        *code = l as u8;
        fit.add(w, x, l);
    }
    for _ in 0..5 {
        let mut changed = false;
        for ((code, &x), &w) in codes.iter_mut().zip(x).zip(weights) {
            let mut other = fit.without(w, x, i32::from(*code));
            if other.xl <= 0.0 || other.ll <= 0.0 {
                continue;
            }
            let new = nearest(x * other.ll / other.xl).min(top);
            if new == i32::from(*code) {
                continue;
            }
            other.add(w, x, new);
            if other.xl * other.xl * fit.ll > fit.xl * fit.xl * other.ll {
                (*code, fit, changed) = (new as u8, other, true);
            }
        }
        if !changed {
            break;
        }
    }
    fit.scale()
}

const TRIES: i32 = 7;

/// The code of the nearest level; the upper one on ties.
pub(super) fn code(x: f32) -> u8 {
    let level = |i: usize| f32::from(LEVELS[i]);
    if x <= level(0) {
        return 0;
    }
    if x >= level(15) {
        return 15;
    }
    let above = (1..16).find(|&i| x < level(i)).unwrap_or(15);
    (if x - level(above - 1) < level(above) - x { above - 1 } else { above }) as u8
}

/// Finds the scale of a part.
pub(super) fn level_scale(x: &[f32], weights: &[f32]) -> f32 {
    let max = largest(x);
    if max.abs() < NEGLIGIBLE {
        return 0.0;
    }
    let fit = |inverse: f32| {
        let (mut qx, mut qq) = (0.0, 0.0);
        for (&x, &w) in x.iter().zip(weights) {
            let q = f32::from(LEVELS[usize::from(code(inverse * x))]);
            qx += w * q * x;
            qq += w * q * q;
        }
        (qx, qq)
    };
    let first = f32::from(LEVELS[0]);
    let (qx, qq) = fit(1.0 / (-max / first));
    let mut scale = qx / qq;
    let mut best = scale * qx;
    for step in -TRIES..=TRIES {
        let (qx, qq) = fit((step as f32 + first) / max);
        if qq > 0.0 && qx * qx > best * qq {
            scale = qx / qq;
            best = scale * qx;
        }
    }
    scale
}
