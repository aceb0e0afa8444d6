//! The search of the reference for a block: signs first, then scale and points of each part, and finally the factors.
//!
//! Levels stand for the values 1, 3, 5 … times a part's scale. Sums run in element order in `f32`, so that the result
//! equals the reference's.

use super::super::SUPER;
use super::super::search::{LANES, NEGLIGIBLE, nearest, positive};
use super::points::Points;
use super::{Fields, Form};

pub(super) struct Settings {
    /// The candidates for the inverse scale give the largest value `2·top + 1 + i·step`, `i` from `-tries` to `tries`.
    tries: i32,
    step: f32,
    /// Whether the candidates start from the scale of an even grid, instead of the largest value.
    starts_even: bool,
    /// The multiple of the mean square of a block that is added to squares in weights.
    spread: f32,
    /// The weight of an element without importance.
    plain: fn(f32, f32) -> f32,
    /// Parts whose largest value is below this are zero.
    negligible: f32,
    /// Which groups of the best candidate are rounded again with its scale.
    again: Again,
    /// The factor by which the stored `d` exceeds the found one.
    correction: f32,
}

#[derive(Clone, Copy, PartialEq)]
enum Again {
    All,
    /// All if one was not in the book.
    AllIfAny,
    /// Those that were not in the book.
    Outside,
}

pub(super) const IQ2_XXS: Settings = Settings {
    tries: 6,
    step: 0.1,
    starts_even: true,
    spread: 1.0,
    // Unweighted blocks of this type occur only outside the reference.
    plain: |sigma2, x| (sigma2 + x * x).sqrt(),
    negligible: NEGLIGIBLE,
    again: Again::All,
    correction: 1.0,
};

pub(super) const IQ2_XS: Settings =
    Settings { tries: 9, starts_even: false, again: Again::Outside, ..IQ2_XXS };

pub(super) const IQ2_S: Settings = Settings {
    spread: 2.0,
    plain: |sigma2, x| 0.25 * sigma2 + x * x,
    negligible: 1e-8,
    correction: 0.9875,
    ..IQ2_XS
};

pub(super) const IQ3_XXS: Settings =
    Settings { tries: 15, step: 0.2, plain: |_, x| x * x, correction: 1.0125, ..IQ2_S };

pub(super) const IQ3_S: Settings =
    Settings { tries: 9, negligible: 0.0, again: Again::AllIfAny, correction: 1.033, ..IQ3_XXS };

/// `Σ w·x·q` and `Σ w·q²`, whose quotient is the optimal scale.
fn fit(w: &[f32], x: &[f32], levels: &[u8]) -> (f32, f32) {
    let (mut xq, mut qq) = (0.0, 0.0);
    for ((w, x), level) in w.iter().zip(x).zip(levels) {
        let q = f32::from(2 * level + 1);
        xq += w * x * q;
        qq += w * q * q;
    }
    (xq, qq)
}

/// A part: magnitudes, which may be negative if a sign was changed, their weights, and the roots of these.
struct Part<'a> {
    points: &'a Points,
    x: &'a [f32],
    weights: &'a [f32],
    roots: &'a [f32],
}

impl Part<'_> {
    /// Rounds group `g`, and then chooses the candidate with the least error. Returns whether the rounded values are in
    /// the book.
    #[inline(always)]
    fn round(&self, g: usize, inverse: f32, scale: f32, levels: &mut [u8]) -> bool {
        let book = self.points.book;
        let (n, top) = (book.elements(), i32::from(book.top()));
        let x = &self.x[g * n..][..n];
        let levels = &mut levels[g * n..][..n];
        for (level, x) in levels.iter_mut().zip(x) {
            *level = nearest(0.5 * (inverse * x - 1.0)).clamp(0, top) as u8;
        }
        let candidates = self.points.candidates(levels);
        if let [_] = candidates
            && self.points.index(levels).is_some()
        {
            return true;
        }
        let roots = &self.roots[g * n..][..n];
        let mut best = (f32::MAX, candidates[0]);
        for candidate in candidates {
            let point = book.points[usize::from(*candidate)];
            let mut error = 0.0;
            for i in 0..n {
                let off = scale * (2 * book.level(point, i) + 1) as f32 - x[i];
                error += roots[i] * off * off;
            }
            if error < best.0 {
                best = (error, *candidate);
            }
        }
        let point = book.points[usize::from(best.1)];
        levels.iter_mut().enumerate().for_each(|(i, level)| *level = book.level(point, i) as u8);
        false
    }
}

/// Finds the stored scale and the fields of a block.
pub(super) fn block(form: &Form, x: &[f32], importance: Option<&[f32]>) -> (f32, Fields) {
    let settings = &form.search;
    let (mut fields, mut scales) = (Fields::ZERO, [0.0_f32; 16]);
    let mut sum = 0.0;
    for x in x {
        sum += x * x;
    }
    let sigma2 = settings.spread * sum / SUPER as f32;
    let (mut weights, mut roots, mut magnitudes) = ([0.0; SUPER], [0.0; SUPER], [0.0; SUPER]);
    for e in 0..SUPER {
        weights[e] = match importance {
            Some(importance) => importance[e] * (sigma2 + x[e] * x[e]).sqrt(),
            None => (settings.plain)(sigma2, x[e]),
        };
        roots[e] = weights[e].sqrt();
    }
    for (g, signs) in fields.signs.iter_mut().enumerate() {
        let group = 8 * g..8 * g + 8;
        *signs = split(form.even_signs, &x[group.clone()], &weights[group.clone()], &mut magnitudes[group]);
    }
    let even = if settings.starts_even { even_scales(&magnitudes, &weights) } else { [0.0; LANES] };
    let groups = form.part / form.points.book.elements();
    let mut max_scale = 0.0_f32;
    for (p, scale) in scales.iter_mut().enumerate().take(SUPER / form.part) {
        let at = p * form.part..(p + 1) * form.part;
        let part = Part {
            points: form.points,
            x: &magnitudes[at.clone()],
            weights: &weights[at.clone()],
            roots: &roots[at.clone()],
        };
        let mut levels = [0; 32];
        let levels = &mut levels[..form.part];
        let Some(found) = search(settings, &part, groups, even[p], levels) else {
            fields.signs[at.start / 8..at.end / 8].fill(0);
            continue;
        };
        *scale = found;
        if *scale < 0.0 {
            *scale = -*scale;
            fields.signs[at.start / 8..at.end / 8].iter_mut().for_each(|signs| *signs = !*signs);
        }
        let group = levels.len() / groups;
        for (g, levels) in levels.chunks_exact(group).enumerate() {
            fields.indices[at.start / group + g] = form.points.index(levels).unwrap_or_default();
        }
        // As in the reference, also for NaN.
        max_scale = if max_scale > *scale { max_scale } else { *scale };
    }
    if max_scale == 0.0 {
        // With stored signs, the points of parts whose scale is 0 stay.
        return (0.0, if form.even_signs { Fields::ZERO } else { fields });
    }
    let d = max_scale / 31.0;
    let inverse = 1.0 / d;
    for (factor, scale) in fields.factors.iter_mut().zip(scales).take(SUPER / form.part) {
        *factor = nearest(0.5 * (inverse * scale - 1.0)).clamp(0, 15) as u8;
    }
    (d * settings.correction, fields)
}

/// Splits eight values into signs and magnitudes. If the number of negative signs must be even but is not, the sign of
/// the element for which this costs least is wrong, and its magnitude negative.
fn split(even: bool, x: &[f32], weights: &[f32], magnitudes: &mut [f32]) -> u8 {
    let mut signs = 0_u8;
    for (i, (x, magnitude)) in x.iter().zip(&mut *magnitudes).enumerate() {
        let positive = *x >= 0.0;
        *magnitude = if positive { *x } else { -x };
        signs |= u8::from(!positive) << i;
    }
    if even && signs.count_ones() % 2 == 1 {
        let cost = |i: usize| weights[i] * x[i] * x[i];
        let (mut least, mut at) = (cost(0), 0);
        for i in 1..8 {
            if cost(i) < least {
                (least, at) = (cost(i), i);
            }
        }
        magnitudes[at] = -magnitudes[at];
        signs ^= 1 << at;
    }
    signs
}

/// For each part of 32 elements, the scale of a grid of five values from 0 on.
fn even_scales(magnitudes: &[f32], weights: &[f32]) -> [f32; LANES] {
    use super::super::search::load;
    crate::vector::vectorized(
        #[inline(always)]
        || positive(4, &load::<32>(magnitudes), &load::<32>(weights), &mut [[0; LANES]; 32]),
    )
}

/// Writes the levels of a part, which are in the book, and returns its scale; `None` if the part is zero.
fn search(settings: &Settings, part: &Part<'_>, groups: usize, even: f32, levels: &mut [u8]) -> Option<f32> {
    let max = part.x.iter().skip(1).fold(part.x[0], |max, x| if max > *x { max } else { *x });
    if max < settings.negligible || (settings.negligible == 0.0 && max == 0.0) {
        return None;
    }
    let top = part.points.book.top();
    let intervals = f32::from(2 * top + 1);
    let (mut scale, largest) = match settings.starts_even {
        true => (even, even * f32::from(top + 1)),
        false => (max / intervals, max),
    };
    if settings.starts_even && largest <= 0.0 {
        return None;
    }
    let mut best = 0.0;
    let mut inside = [settings.again == Again::Outside; 8];
    let (mut tried, mut tried_inside) = ([0; 32], [false; 8]);
    let tried = &mut tried[..levels.len()];
    for i in -settings.tries..=settings.tries {
        let inverse = (intervals + i as f32 * settings.step) / largest;
        let candidate = 1.0 / inverse;
        for (g, inside) in tried_inside.iter_mut().enumerate().take(groups) {
            *inside = part.round(g, inverse, candidate, tried);
        }
        let (xq, qq) = fit(part.weights, part.x, tried);
        if qq > 0.0 && xq * xq > best * qq {
            scale = xq / qq;
            best = scale * xq;
            levels.copy_from_slice(tried);
            inside = tried_inside;
        }
    }
    let some_outside = inside[..groups].contains(&false);
    if scale > 0.0 && (settings.again == Again::All || some_outside) {
        let inverse = 1.0 / scale;
        for (g, inside) in inside.iter().enumerate().take(groups) {
            if settings.again != Again::Outside || !inside {
                part.round(g, inverse, scale, levels);
            }
        }
        let (xq, qq) = fit(part.weights, part.x, levels);
        if qq > 0.0 {
            scale = xq / qq;
        }
    }
    Some(scale)
}
