//! The statistics of one position, accumulated tile by tile over its logits.

use super::exp::exp;

const TOP: usize = 5;

/// The largest logits of a position and their tokens, in descending order; ties keep the first token.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Top {
    count: usize,
    values: [f32; TOP],
    tokens: [u32; TOP],
}

/// Sums over the part of the vocabulary seen so far, for one model at one position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sums {
    /// The largest logit, which is subtracted before exponentials.
    largest: f32,
    /// `Σ exp(x − largest)`.
    total: f64,
    /// `Σ exp(r − largest of r) (r − x)`, `r` the reference's logits.
    cross: f64,
    /// The logit of the next token; NaN until it is seen.
    next: f32,
    top: Top,
}

impl Sums {
    pub(super) const NONE: Self = Self {
        largest: f32::NEG_INFINITY,
        total: 0.0,
        cross: 0.0,
        next: f32::NAN,
        top: Top { count: 0, values: [0.0; TOP], tokens: [0; TOP] },
    };

    #[inline(always)]
    fn shift(&self) -> f64 {
        // If all logits are −∞ the sum is 0, and the difference would be NaN.
        if self.largest == f32::NEG_INFINITY { 0.0 } else { f64::from(self.largest) }
    }

    /// The factor that rescales the sums from their own largest logit to `largest`, which must not be smaller.
    #[inline(always)]
    fn factor(&self, largest: f32) -> f64 {
        match self.largest {
            mine if mine == largest => 1.0,
            f32::NEG_INFINITY => 0.0,
            mine => (f64::from(mine) - f64::from(largest)).exp(),
        }
    }

    /// `ln Σ exp(x)`.
    fn log_total(&self) -> f64 {
        f64::from(self.largest) + self.total.ln()
    }

    /// The negative log-likelihood of the next token.
    pub(crate) fn nll(&self) -> f64 {
        self.log_total() - f64::from(self.next)
    }

    pub(crate) fn confidence(&self) -> f64 {
        (f64::from(self.top.values[0]) - self.log_total()).exp()
    }

    /// At most five tokens, most likely first; ties keep the first token.
    pub(crate) fn top(&self) -> &[u32] {
        &self.top.tokens[..self.top.count]
    }

    /// Returns `KL(reference ‖ self)`. These sums must have been accumulated together with those of `reference`.
    pub(crate) fn divergence_from(&self, reference: &Self) -> f64 {
        let shifts = f64::from(reference.largest) - f64::from(self.largest);
        let kl = self.cross / reference.total - (shifts + (reference.total / self.total).ln());
        // Rounding can push a vanishing divergence below zero; NaN stays.
        if kl < 0.0 { 0.0 } else { kl }
    }
}

impl Top {
    /// Whether a value would be among the largest.
    #[inline(always)]
    fn takes(&self, value: f32) -> bool {
        // While there is room, NaN is accepted too, ranked below all numbers.
        self.count < TOP || value > self.values[TOP - 1]
    }

    #[inline(always)]
    fn offer(&mut self, value: f32, token: u32) {
        if !self.takes(value) {
            return;
        }
        let place = (0..self.count).find(|&i| value > self.values[i]).unwrap_or(self.count);
        if place == TOP {
            return;
        }
        self.count = (self.count + 1).min(TOP);
        for i in (place + 1..self.count).rev() {
            (self.values[i], self.tokens[i]) = (self.values[i - 1], self.tokens[i - 1]);
        }
        (self.values[place], self.tokens[place]) = (value, token);
    }

    /// Accumulates a row whose first logit belongs to token `first`.
    #[inline(always)]
    fn scan(&mut self, row: &[f32], first: u32) {
        const PIECE: usize = 32;
        for (piece, values) in row.chunks(PIECE).enumerate() {
            if !self.takes(largest(values)) {
                continue;
            }
            for (i, &value) in values.iter().enumerate() {
                self.offer(value, first + (piece * PIECE + i) as u32);
            }
        }
    }
}

/// The largest value, ignoring NaN.
#[inline(always)]
fn largest(row: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut pieces = row.chunks_exact(LANES);
    for piece in &mut pieces {
        for (m, &x) in lanes.iter_mut().zip(piece) {
            *m = if x > *m { x } else { *m };
        }
    }
    let rest = pieces.remainder().iter();
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m })
}

const LANES: usize = 8;

/// Writes `exp(x − shift)` of every logit to `terms` and returns their sum.
#[inline(always)]
fn exponentials(row: &[f32], shift: f64, terms: &mut [f64]) -> f64 {
    for (term, &x) in terms.iter_mut().zip(row) {
        *term = exp(f64::from(x) - shift);
    }
    let mut lanes = [0.0_f64; LANES];
    let mut pieces = terms.chunks_exact(LANES);
    for piece in &mut pieces {
        for (lane, term) in lanes.iter_mut().zip(piece) {
            *lane += term;
        }
    }
    lanes.iter().sum::<f64>() + pieces.remainder().iter().sum::<f64>()
}

/// `Σ w (r − x)` over the reference's terms `w` and logits `r` and a model's logits `x`.
#[inline(always)]
fn cross(weights: &[f64], reference: &[f32], row: &[f32]) -> f64 {
    let term = |w: f64, r: f32, x: f32| {
        // The model's logit does not matter where the reference's probability is zero, even if it is not finite.
        let product = w * (f64::from(r) - f64::from(x));
        if w == 0.0 { 0.0 } else { product }
    };
    let mut lanes = [0.0_f64; LANES];
    let (mut w, mut r, mut x) =
        (weights.chunks_exact(LANES), reference.chunks_exact(LANES), row.chunks_exact(LANES));
    for ((w, r), x) in (&mut w).zip(&mut r).zip(&mut x) {
        for (lane, ((&w, &r), &x)) in lanes.iter_mut().zip(w.iter().zip(r).zip(x)) {
            *lane += term(w, r, x);
        }
    }
    let rest = w.remainder().iter().zip(r.remainder()).zip(x.remainder());
    lanes.iter().sum::<f64>() + rest.map(|((&w, &r), &x)| term(w, r, x)).sum::<f64>()
}

/// Accumulates each model's logits for the tokens starting at `first`. The first of `sums` and of `rows` is the
/// reference's; `next` is the token that follows. `terms` has twice the length of a row.
#[inline(always)]
pub(super) fn accumulate(
    sums: &mut [Sums],
    rows: &[&[f32]],
    (first, next): (u32, u32),
    ranked: bool,
    terms: &mut [f64],
) {
    let width = rows[0].len();
    let (reference_terms, terms) = terms.split_at_mut(width);
    for (s, row) in rows.iter().enumerate() {
        let max = largest(row);
        if max > sums[s].largest {
            let factor = sums[s].factor(max);
            sums[s].total *= factor;
            sums[s].largest = max;
            if s == 0 {
                sums[1..].iter_mut().for_each(|other| other.cross *= factor);
            }
        }
        let shift = sums[s].shift();
        match s {
            0 => sums[0].total += exponentials(row, shift, reference_terms),
            _ => {
                sums[s].total += exponentials(row, shift, &mut terms[..width]);
                sums[s].cross += cross(reference_terms, rows[0], row);
            }
        }
        if ranked && sums[s].top.takes(max) {
            sums[s].top.scan(row, first);
        }
        if let Some(&logit) = next.checked_sub(first).and_then(|i| row.get(i as usize)) {
            sums[s].next = logit;
        }
    }
}

/// Merges the sums of one part of the vocabulary with those of the next part, model by model.
pub(super) fn join(sums: &mut [Sums], behind: &[Sums]) {
    let mut reference = [1.0, 1.0];
    for (s, (a, b)) in sums.iter_mut().zip(behind).enumerate() {
        let largest = if b.largest > a.largest { b.largest } else { a.largest };
        let factors = [a.factor(largest), b.factor(largest)];
        if s == 0 {
            reference = factors;
        }
        a.cross = a.cross * reference[0] + b.cross * reference[1];
        a.total = a.total * factors[0] + b.total * factors[1];
        a.largest = largest;
        if !b.next.is_nan() {
            a.next = b.next;
        }
        for i in 0..b.top.count {
            a.top.offer(b.top.values[i], b.top.tokens[i]);
        }
    }
}
