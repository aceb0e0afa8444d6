//! Grids of codes `-n..n`.

use super::lanes::{largest, squares};
use super::{LANES, Lanes, NEGLIGIBLE, nearest};

/// The results of the search, with one part per lane.
pub(in crate::blocks) struct Scales {
    /// The scale; 0 for parts whose values are all negligible.
    pub(in crate::blocks) scale: Lanes,
    /// The codes are `inverse·x`, rounded. For `zero` parts, whose values are all negligible, all codes are `-n`.
    inverse: Lanes,
    zero: [bool; LANES],
    n: i32,
}

impl Scales {
    /// The codes of the part in a lane, plus `n`.
    #[inline(always)]
    pub(in crate::blocks) fn codes(&self, lane: usize, x: &[f32], codes: &mut [u8]) {
        if self.zero[lane] {
            codes.fill(0);
            return;
        }
        let (inverse, n) = (self.inverse[lane], self.n);
        for (code, &x) in codes.iter_mut().zip(x) {
            *code = (nearest(inverse * x).max(-n).min(n - 1) + n) as u8;
        }
    }
}

/// `Σ w·x·l` and `Σ w·l²`, whose quotient is the optimal scale for codes `l`.
#[derive(Clone, Copy)]
pub(super) struct Fit {
    pub(super) xl: Lanes,
    pub(super) ll: Lanes,
}

impl Fit {
    pub(super) const ZERO: Self = Self { xl: [0.0; LANES], ll: [0.0; LANES] };

    #[inline(always)]
    pub(super) fn add(&mut self, w: &Lanes, x: &Lanes, l: &Lanes) {
        for i in 0..LANES {
            self.xl[i] += w[i] * x[i] * l[i];
            self.ll[i] += w[i] * l[i] * l[i];
        }
    }

    #[inline(always)]
    pub(super) fn without(&self, w: &Lanes, x: &Lanes, l: &Lanes) -> Self {
        let mut fit = *self;
        for i in 0..LANES {
            fit.xl[i] -= w[i] * x[i] * l[i];
            fit.ll[i] -= w[i] * l[i] * l[i];
        }
        fit
    }

    #[inline(always)]
    pub(super) fn is_improved_by(&self, other: &Self) -> [bool; LANES] {
        let mut better = [false; LANES];
        for i in 0..LANES {
            better[i] = other.xl[i] * other.xl[i] * self.ll[i] > self.xl[i] * self.xl[i] * other.ll[i];
        }
        better
    }

    #[inline(always)]
    pub(super) fn scale(&self) -> Lanes {
        let mut scale = [0.0; LANES];
        for i in 0..LANES {
            scale[i] = if self.ll[i] > 0.0 { self.xl[i] / self.ll[i] } else { 0.0 };
        }
        scale
    }

    #[inline(always)]
    pub(super) fn take(&mut self, other: &Self, take: &[bool; LANES]) {
        for i in 0..LANES {
            self.xl[i] = if take[i] { other.xl[i] } else { self.xl[i] };
            self.ll[i] = if take[i] { other.ll[i] } else { self.ll[i] };
        }
    }
}

#[inline(always)]
pub(in crate::blocks) fn symmetric<const N: usize>(n: i32, x: &[Lanes; N], w: &[Lanes; N]) -> Scales {
    let max = largest(x);
    let (mut inverse, mut zero) = ([0.0; LANES], [false; LANES]);
    for i in 0..LANES {
        zero[i] = max[i].abs() < NEGLIGIBLE;
        inverse[i] = -n as f32 / max[i];
    }
    let first = fit(n, &inverse, x, w);
    let (mut scale, mut best) = ([0.0; LANES], [0.0; LANES]);
    for i in 0..LANES {
        scale[i] = if first.ll[i] != 0.0 { first.xl[i] / first.ll[i] } else { 0.0 };
        best[i] = scale[i] * first.xl[i];
    }
    for step in (-9..=9).filter(|step| *step != 0) {
        let intervals = -(n as f32 + 0.1 * step as f32);
        let mut candidate = [0.0; LANES];
        for i in 0..LANES {
            candidate[i] = intervals / max[i];
        }
        let found = fit(n, &candidate, x, w);
        for i in 0..LANES {
            let (xl, ll) = (found.xl[i], found.ll[i]);
            let better = (ll > 0.0) & (xl * xl > best[i] * ll);
            inverse[i] = if better { candidate[i] } else { inverse[i] };
            scale[i] = if better { xl / ll } else { scale[i] };
            best[i] = if better { scale[i] * xl } else { best[i] };
        }
    }
    for i in 0..LANES {
        scale[i] = if zero[i] { 0.0 } else { scale[i] };
    }
    Scales { scale, inverse, zero, n }
}

#[inline(always)]
fn fit<const N: usize>(n: i32, inverse: &Lanes, x: &[Lanes; N], w: &[Lanes; N]) -> Fit {
    let mut fit = Fit::ZERO;
    for (x, w) in x.iter().zip(w) {
        fit.add(w, x, &round(n, inverse, x));
    }
    fit
}

#[inline(always)]
fn round(n: i32, inverse: &Lanes, x: &Lanes) -> Lanes {
    let mut l = [0.0; LANES];
    for i in 0..LANES {
        l[i] = nearest(inverse[i] * x[i]).max(-n).min(n - 1) as f32;
    }
    l
}

/// Searches a symmetric grid of codes `-n..n`, weighted by `x²`. Moves one code at a time as long as that reduces the
/// error, in at most five passes over the values. Returns the scale of each part, and writes the codes of part `i` in
/// lane `i`, plus `n`.
#[inline(always)]
pub(in crate::blocks) fn symmetric_by_descent<const N: usize>(
    n: i32,
    x: &[Lanes; N],
    codes: &mut [Lanes; N],
) -> Lanes {
    let max = largest(x);
    let mut inverse = [0.0; LANES];
    for i in 0..LANES {
        inverse[i] = -n as f32 / max[i];
    }
    let (mut fit, weights) = (Fit::ZERO, squares(x));
    for ((l, x), w) in codes.iter_mut().zip(x).zip(&weights) {
        *l = round(n, &inverse, x);
        fit.add(w, x, l);
    }
    for _ in 0..5 {
        let mut changed = false;
        for ((l, x), w) in codes.iter_mut().zip(x).zip(&weights) {
            let mut other = fit.without(w, x, l);
            let (mut new, mut open) = ([0.0; LANES], [false; LANES]);
            for i in 0..LANES {
                new[i] = nearest(x[i] * other.ll[i] / other.xl[i]).max(-n).min(n - 1) as f32;
                // Also holds for NaN, as in the reference.
                open[i] = !(other.xl[i] <= 0.0) & (new[i] != l[i]);
            }
            other.add(w, x, &new);
            let mut better = fit.is_improved_by(&other);
            for i in 0..LANES {
                better[i] &= open[i] & (other.ll[i] > 0.0);
                l[i] = if better[i] { new[i] } else { l[i] };
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
        let zero = max[i].abs() < NEGLIGIBLE;
        scale[i] = if zero { 0.0 } else { scale[i] };
        for l in codes.iter_mut() {
            l[i] = if zero { 0.0 } else { l[i] + n as f32 };
        }
    }
    scale
}
