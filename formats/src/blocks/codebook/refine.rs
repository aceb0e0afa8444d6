//! This crate's own search. It starts from the result of the reference. Alternately, it chooses factors, points and
//! signs for a small weighted error of the stored values, and fits the block's scale to them.

use half::f16;

use super::super::SUPER;
use super::{Fields, Form};

const MAX_ITERATIONS: usize = 4;

/// A block with its stored scale, and its weighted error.
struct State {
    d: f32,
    fields: Fields,
    error: f32,
}

/// Improves a block. `weights` are nonnegative.
pub(super) fn block(form: &Form, x: &[f32], weights: &[f32], (d, fields): (f32, Fields)) -> (f32, Fields) {
    let mut best = State { d: f16::from_f32(d).to_f32(), fields, error: 0.0 };
    best.error = error(form, x, weights, &best);
    if best.d == 0.0 || !best.error.is_finite() {
        return (d, best.fields);
    }
    let mut now = State { d: best.d, fields: best.fields.clone(), error: best.error };
    for _ in 0..MAX_ITERATIONS {
        for part in 0..SUPER / form.part {
            improve(form, x, weights, &mut now, part);
        }
        fit(form, x, weights, &mut now);
        now.error = error(form, x, weights, &now);
        // Also ends if the error is not a number.
        if !matches!(now.error.partial_cmp(&best.error), Some(std::cmp::Ordering::Less)) {
            break;
        }
        best = State { d: now.d, fields: now.fields.clone(), error: now.error };
    }
    (best.d, best.fields)
}

fn signed(form: &Form, fields: &Fields, e: usize) -> f32 {
    let book = form.points.book;
    let n = book.elements();
    let point = book.points[usize::from(fields.indices[e / n])];
    let magnitude = f32::from(form.magnitudes[book.level(point, e % n)]);
    if fields.signs[e / 8] >> (e % 8) & 1 == 1 { -magnitude } else { magnitude }
}

fn error(form: &Form, x: &[f32], weights: &[f32], state: &State) -> f32 {
    let mut sum = 0.0;
    for (e, (x, w)) in x.iter().zip(weights).enumerate() {
        let scale = (form.scale)(state.d, state.fields.factors[e / form.part]);
        sum += w * (x - scale * signed(form, &state.fields, e)).powi(2);
    }
    sum
}

fn fit(form: &Form, x: &[f32], weights: &[f32], state: &mut State) {
    let (mut xv, mut vv) = (0.0, 0.0);
    for (e, (x, w)) in x.iter().zip(weights).enumerate() {
        let value = (form.scale)(1.0, state.fields.factors[e / form.part]) * signed(form, &state.fields, e);
        xv += w * x * value;
        vv += w * value * value;
    }
    let d = f16::from_f32(xv / vv).to_f32();
    if d > 0.0 && d.is_finite() {
        state.d = d;
    }
}

#[derive(Clone, Copy)]
struct Octet {
    indices: [u16; 2],
    signs: u8,
    error: f32,
}

/// Tries the factors next to the current one of a part, each with the best points.
fn improve(form: &Form, x: &[f32], weights: &[f32], state: &mut State, part: usize) {
    let (first, octets) = (part * form.part, form.part / 8);
    let groups = 8 / form.points.book.elements();
    let known = state.fields.factors[part];
    let mut best: Option<(f32, u8, [Octet; 4])> = None;
    for factor in known.saturating_sub(1)..=(known + 1).min(15) {
        let scale = (form.scale)(state.d, factor);
        let mut found = [Octet { indices: [0; 2], signs: 0, error: 0.0 }; 4];
        let mut sum = 0.0;
        for (o, octet) in found.iter_mut().enumerate().take(octets) {
            let at = first + 8 * o..first + 8 * o + 8;
            *octet = choose(form, &x[at.clone()], &weights[at], scale);
            sum += octet.error;
        }
        if best.is_none_or(|(error, ..)| sum < error) {
            best = Some((sum, factor, found));
        }
    }
    let Some((_, factor, found)) = best else { return };
    state.fields.factors[part] = factor;
    for (o, octet) in found.iter().enumerate().take(octets) {
        let at = first / 8 + o;
        state.fields.signs[at] = octet.signs;
        state.fields.indices[at * groups..][..groups].copy_from_slice(&octet.indices[..groups]);
    }
}

/// The points and signs of eight elements with the least error at a given scale.
fn choose(form: &Form, x: &[f32], weights: &[f32], scale: f32) -> Octet {
    let n = form.points.book.elements();
    let mut octet = Octet { indices: [0; 2], signs: 0, error: 0.0 };
    for (i, x) in x.iter().enumerate() {
        octet.signs |= u8::from(x.is_sign_negative()) << i;
    }
    let odd = form.even_signs && octet.signs.count_ones() % 2 == 1;
    // The extra error of the cheapest wrong sign, its group, index and element.
    let mut wrong: Option<(f32, usize, u16, usize)> = None;
    for (g, (x, weights)) in x.chunks_exact(n).zip(weights.chunks_exact(n)).enumerate() {
        let found = point(form, x, weights, scale);
        octet.indices[g] = found.index;
        octet.error += found.error;
        if odd {
            let extra = found.flipped.0 - found.error;
            if wrong.is_none_or(|(least, ..)| extra < least) {
                wrong = Some((extra, g, found.flipped.1, g * n + found.flipped.2));
            }
        }
    }
    if let Some((extra, g, index, element)) = wrong {
        octet.error += extra;
        octet.indices[g] = index;
        octet.signs ^= 1 << element;
    }
    octet
}

/// The best point of a group: with all signs right, and with the sign of one element wrong.
struct Best {
    error: f32,
    index: u16,
    /// Error, index and element.
    flipped: (f32, u16, usize),
}

fn point(form: &Form, x: &[f32], weights: &[f32], scale: f32) -> Best {
    let book = form.points.book;
    let n = book.elements();
    let mut errors = [[0.0_f32; 8]; 8];
    let mut levels = [0_u8; 8];
    for (i, x) in x.iter().take(n).enumerate() {
        let mut least = f32::INFINITY;
        for (level, (error, magnitude)) in errors[i].iter_mut().zip(form.magnitudes).enumerate() {
            let off = x.abs() - scale * f32::from(*magnitude);
            *error = weights[i] * off * off;
            if off.abs() < least {
                (least, levels[i]) = (off.abs(), level as u8);
            }
        }
    }
    let mut best = Best { error: f32::INFINITY, index: 0, flipped: (f32::INFINITY, 0, 0) };
    for index in form.points.candidates(&levels[..n]) {
        let point = book.points[usize::from(*index)];
        let mut error = 0.0;
        // The cheapest wrong sign, which costs `4·w·|x|·scale·m`.
        let (mut least, mut element) = (f32::INFINITY, 0);
        for i in 0..n {
            let level = book.level(point, i);
            error += errors[i][level];
            let cost = weights[i] * x[i].abs() * f32::from(form.magnitudes[level]);
            if cost < least {
                (least, element) = (cost, i);
            }
        }
        if error < best.error {
            (best.error, best.index) = (error, *index);
        }
        let flipped = error + 4.0 * scale * least;
        if flipped < best.flipped.0 {
            best.flipped = (flipped, *index, element);
        }
    }
    best
}
