//! What is kept of a position while its logits pass by, tile by tile.

use super::exp::exp;

/// Positions of the largest logits that are kept.
const TOP: usize = 5;

/// The largest logits of a position and their tokens, largest first, the first of equals.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Top {
    count: usize,
    values: [f32; TOP],
    tokens: [u32; TOP],
}

/// Sums over the part of the vocabulary that was seen, of one model at one position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sums {
    /// The largest logit; exponentials are taken of differences from it.
    largest: f32,
    /// `Σ exp(x − largest)`.
    total: f64,
    /// `Σ exp(r − largest of r) (r − x)`, `r` the reference's logits.
    cross: f64,
    /// The logit of the token that follows; NaN until it was seen.
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

    /// What exponentials are taken of differences from.
    #[inline(always)]
    fn shift(&self) -> f64 {
        // Of −∞ alone the sum is 0, and no difference is to be taken of it.
        if self.largest == f32::NEG_INFINITY { 0.0 } else { f64::from(self.largest) }
    }

    /// What sums must be multiplied by so that they are of differences from `largest`, which is not below ours.
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

    /// The negative log-likelihood of the token that follows.
    pub(crate) fn nll(&self) -> f64 {
        self.log_total() - f64::from(self.next)
    }

    /// The probability of the most likely token.
    pub(crate) fn confidence(&self) -> f64 {
        (f64::from(self.top.values[0]) - self.log_total()).exp()
    }

    /// The most likely tokens, most likely first, the first of equals; five where there are so many.
    pub(crate) fn top(&self) -> &[u32] {
        &self.top.tokens[..self.top.count]
    }

    /// `KL(reference ‖ self)`, where `reference` is what these sums were taken with.
    pub(crate) fn divergence_from(&self, reference: &Self) -> f64 {
        let shifts = f64::from(reference.largest) - f64::from(self.largest);
        // The mean of `r − x` under the reference, less the difference of what they are normalized by.
        let kl = self.cross / reference.total - (shifts + (reference.total / self.total).ln());
        // Rounding can push a vanishing divergence below zero; NaN stays.
        if kl < 0.0 { 0.0 } else { kl }
    }
}

impl Top {
    /// Whether a value would be among the largest.
    #[inline(always)]
    fn takes(&self, value: f32) -> bool {
        // What is not a number is taken while there is room, as a value that is below all.
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

    /// Takes in a row whose first logit is that of `first`.
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

/// The largest value, whatever is not a number.
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

/// Partial sums of a row: as many as fill a few vectors, in a fixed order.
const LANES: usize = 8;

/// `exp(x − shift)` of every logit into `terms`; their sum.
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

/// `Σ w (r − x)` of the reference's terms `w` and logits `r` and a model's logits `x`.
#[inline(always)]
fn cross(weights: &[f64], reference: &[f32], row: &[f32]) -> f64 {
    let term = |w: f64, r: f32, x: f32| {
        // Where the reference sees no chance, it does not matter what the model sees.
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

/// Takes in the logits that each model has for the tokens from `first` on. The first of `sums` and of `rows` is the
/// reference's; `next` is the token that follows. With `ranked` the largest are kept. `terms` is as long as a row twice.
#[inline(always)]
pub(super) fn take_in(
    sums: &mut [Sums],
    rows: &[&[f32]],
    (first, next): (u32, u32),
    ranked: bool,
    terms: &mut [f64],
) {
    let width = rows[0].len();
    let (reference_terms, terms) = terms.split_at_mut(width);
    for (s, row) in rows.iter().enumerate() {
        let most = largest(row);
        if most > sums[s].largest {
            let factor = sums[s].factor(most);
            sums[s].total *= factor;
            sums[s].largest = most;
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
        if ranked && sums[s].top.takes(most) {
            sums[s].top.scan(row, first);
        }
        if let Some(&logit) = next.checked_sub(first).and_then(|i| row.get(i as usize)) {
            sums[s].next = logit;
        }
    }
}

/// Joins sums of one part of the vocabulary with those of the part behind it, model by model.
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
