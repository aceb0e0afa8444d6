//! The gated delta rule, token by token and in chunks.

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;

use super::Run;
use crate::model::arch::DeltaNet;
use crate::vector::vectorized;

const CHUNK: usize = 64;
/// Runs of at least this many tokens are computed in chunks.
const CHUNKED_FROM: usize = 16;
/// Added to the sum of squares of a query or key.
const EPS: f32 = 1e-6;

/// The decay and the step of every token and value head, both `[tokens, value_heads]`.
pub(super) struct Gates {
    /// Logarithms of the states' decay factors.
    decay: Vec<f32>,
    /// How far the value stored for a key moves towards the token's value.
    step: Vec<f32>,
}

impl Gates {
    /// Computes the gates from the parameters `[value_heads]` and the inputs `[tokens, value_heads]`.
    pub(super) fn new(a_log: &[f32], dt_bias: &[f32], b: &[f32], a: &[f32]) -> Self {
        let rates: Vec<f32> = a_log.iter().map(|a| -a.exp()).collect();
        let heads = rates.iter().zip(dt_bias).cycle();
        let decay = a.iter().zip(heads).map(|(a, (rate, bias))| rate * softplus(a + bias)).collect();
        Self { decay, step: b.iter().map(|b| 1.0 / (1.0 + (-b).exp())).collect() }
    }
}

/// `ln(1 + eˣ)`.
pub(super) fn softplus(x: f32) -> f32 {
    // Beyond 20, the result rounds to `x`.
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

struct Head {
    /// `[tokens, key_dim]` each.
    q: Vec<f32>,
    k: Vec<f32>,
    /// `[tokens, value_dim]`.
    v: Vec<f32>,
    decay: Vec<f32>,
    step: Vec<f32>,
}

impl Head {
    fn new(net: &DeltaNet, head: usize, x: &[f32], gates: &Gates, run: &Run) -> Self {
        let (dk, dv, key_head) = (net.key_dim, net.value_dim, head / net.repeat);
        let (queries, width, heads) = (net.key_heads * dk, net.mixed_width(), net.value_heads());
        let tokens = run.begin..run.begin + run.length;
        let columns = |start: usize, count: usize| -> Vec<f32> {
            tokens.clone().flat_map(|t| &x[t * width + start..][..count]).copied().collect()
        };
        let mut q = columns(key_head * dk, dk);
        let mut k = columns(queries + key_head * dk, dk);
        let v = columns(2 * queries + head * dv, dv);
        normalize(&mut q, dk, 1.0 / (dk as f32).sqrt());
        normalize(&mut k, dk, 1.0);
        let of_head = |values: &[f32]| tokens.clone().map(|t| values[t * heads + head]).collect();
        Self { q, k, v, decay: of_head(&gates.decay), step: of_head(&gates.step) }
    }
}

fn normalize(rows: &mut [f32], width: usize, factor: f32) {
    for row in rows.chunks_exact_mut(width) {
        let squares: f32 = row.iter().map(|v| v * v).sum();
        let inverse = 1.0 / (squares + EPS).sqrt();
        row.iter_mut().for_each(|v| *v = *v * inverse * factor);
    }
}

/// Applies the rule to `x` `[tokens, mixed_width]`, each run separately; returns `[tokens, width]`.
///
/// With a `state` `[value_heads, key_dim, value_dim]` there must be a single run, which starts from this state and
/// replaces it.
pub(super) fn apply(
    net: &DeltaNet,
    x: &[f32],
    gates: &Gates,
    runs: &[Run],
    state: Option<&mut [f32]>,
) -> Vec<f32> {
    let (heads, dv, width) = (net.value_heads(), net.value_dim, net.width());
    let each = net.key_dim * dv;
    let compute = |run: &Run, head: usize, state: &mut [f32]| {
        let head = Head::new(net, head, x, gates, run);
        match run.length {
            length if length < CHUNKED_FROM => stepwise(net, &head, state),
            _ => chunked(net, &head, state),
        }
    };
    let parts: Vec<(&Run, usize, Vec<f32>)> = match (state, runs) {
        (Some(state), [run]) => (state.par_chunks_mut(each).enumerate())
            .map(|(head, state)| (run, head, compute(run, head, state)))
            .collect(),
        _ => {
            let tasks: Vec<_> = runs.iter().flat_map(|run| (0..heads).map(move |head| (run, head))).collect();
            let new = || vec![0.0; each];
            let work = |state: &mut Vec<f32>, (run, head)| {
                state.fill(0.0);
                (run, head, compute(run, head, state))
            };
            tasks.into_par_iter().map_init(new, work).collect()
        }
    };
    let mut out = vec![0.0; x.len() / net.mixed_width() * width];
    for (run, head, values) in parts {
        for (token, row) in values.chunks_exact(dv).enumerate() {
            out[(run.begin + token) * width + head * dv..][..dv].copy_from_slice(row);
        }
    }
    out
}

/// The definition, one token after the other.
fn stepwise(net: &DeltaNet, head: &Head, state: &mut [f32]) -> Vec<f32> {
    let (dk, dv) = (net.key_dim, net.value_dim);
    let mut out = vec![0.0; head.v.len()];
    let (mut known, mut change) = (vec![0.0; dv], vec![0.0; dv]);
    let rows = head.q.chunks_exact(dk).zip(head.k.chunks_exact(dk)).zip(head.v.chunks_exact(dv));
    let gates = head.decay.iter().zip(&head.step);
    for (((q, k), v), ((&decay, &step), out)) in rows.zip(gates.zip(out.chunks_exact_mut(dv))) {
        let factor = decay.exp();
        vectorized(
            #[inline(always)]
            || {
                known.fill(0.0);
                for (row, &k) in state.chunks_exact_mut(dv).zip(k) {
                    for (s, known) in row.iter_mut().zip(&mut known) {
                        *s *= factor;
                        *known += *s * k;
                    }
                }
                for ((change, &v), &known) in change.iter_mut().zip(v).zip(&known) {
                    *change = (v - known) * step;
                }
                for ((row, &k), &q) in state.chunks_exact_mut(dv).zip(k).zip(q) {
                    for ((s, &change), o) in row.iter_mut().zip(&change).zip(out.iter_mut()) {
                        *s += k * change;
                        *o += *s * q;
                    }
                }
            },
        );
    }
    out
}

pub(super) fn matrix(values: &[f32], rows: usize, columns: usize) -> MatRef<'_, f32> {
    MatRef::from_row_major_slice(values, rows, columns)
}

/// `into = factor · a b`, or `into += factor · a b` with [`Accum::Add`].
pub(super) fn product(into: &mut [f32], accum: Accum, a: MatRef<'_, f32>, b: MatRef<'_, f32>, factor: f32) {
    let into = MatMut::from_row_major_slice_mut(into, a.nrows(), b.ncols());
    matmul(into, accum, a, b, factor, Par::Seq);
}

/// Computes the rule in chunks (Yang et al., "Parallelizing Linear Transformers with the Delta Rule", 2024).
///
/// Inside a chunk, each token's change of the state follows from the earlier ones by a triangular system. Its
/// right-hand sides are `β v` for the values that the chunk's own tokens write, and `β e^G k` for the values that the
/// state before the chunk already holds. `G` is the cumulative sum of the log decays from the chunk's first token on.
fn chunked(net: &DeltaNet, head: &Head, state: &mut [f32]) -> Vec<f32> {
    let (dk, dv) = (net.key_dim, net.value_dim);
    let mut out = vec![0.0; head.v.len()];
    let mut scratch = Chunk::default();
    for (i, out) in out.chunks_mut(CHUNK * dv).enumerate() {
        let (first, tokens) = (i * CHUNK, out.len() / dv);
        let (q, k) = (&head.q[first * dk..][..tokens * dk], &head.k[first * dk..][..tokens * dk]);
        let v = &head.v[first * dv..][..tokens * dv];
        let step = &head.step[first..][..tokens];
        scratch.advance([dk, dv], [q, k, v], &head.decay[first..][..tokens], step, state, out);
    }
    out
}

#[derive(Default)]
struct Chunk {
    /// Cumulative sums of the log decays.
    sums: Vec<f32>,
    /// `[tokens, tokens]`: products of keys with keys, then of queries with keys.
    scores: Vec<f32>,
    /// `[tokens, value_dim + key_dim]`: the triangular system's right-hand sides, then its solutions.
    solved: Vec<f32>,
    /// `[tokens, value_dim]`: changes of the state.
    changes: Vec<f32>,
    /// `[tokens, key_dim]`: keys or queries times decays.
    decayed: Vec<f32>,
}

impl Chunk {
    fn advance(
        &mut self,
        [dk, dv]: [usize; 2],
        [q, k, v]: [&[f32]; 3],
        decay: &[f32],
        step: &[f32],
        state: &mut [f32],
        out: &mut [f32],
    ) {
        let n = step.len();
        self.sums.clear();
        self.sums.extend(decay.iter().scan(0.0_f32, |sum, d| {
            *sum += d;
            Some(*sum)
        }));
        self.scores.resize(n * n, 0.0);
        product(&mut self.scores, Accum::Replace, matrix(k, n, dk), matrix(k, n, dk).transpose(), 1.0);
        self.solve([dk, dv], k, v, step);
        self.changes.clear();
        self.changes.extend(self.solved.chunks_exact(dv + dk).flat_map(|row| &row[..dv]));
        self.decayed.clear();
        self.decayed.extend(self.solved.chunks_exact(dv + dk).flat_map(|row| &row[dv..]));
        let before = matrix(state, dk, dv);
        product(&mut self.changes, Accum::Add, matrix(&self.decayed, n, dk), before, -1.0);

        // Outputs: from the state before the chunk, and from the changes up to each token.
        self.decay_rows(q, dk, |sum, _| sum);
        product(out, Accum::Replace, matrix(&self.decayed, n, dk), before, 1.0);
        product(&mut self.scores, Accum::Replace, matrix(q, n, dk), matrix(k, n, dk).transpose(), 1.0);
        for (i, row) in self.scores.chunks_exact_mut(n).enumerate() {
            let (seen, unseen) = row.split_at_mut(i + 1);
            seen.iter_mut().zip(&self.sums).for_each(|(s, sum)| *s *= (self.sums[i] - sum).exp());
            unseen.fill(0.0);
        }
        product(out, Accum::Add, matrix(&self.scores, n, n), matrix(&self.changes, n, dv), 1.0);

        // The state after the chunk.
        self.decay_rows(k, dk, |sum, last| last - sum);
        let factor = self.sums.last().map_or(1.0, |last| last.exp());
        state.iter_mut().for_each(|s| *s *= factor);
        let keys = matrix(&self.decayed, n, dk).transpose();
        product(state, Accum::Add, keys, matrix(&self.changes, n, dv), 1.0);
    }

    /// Solves `(1 + A) y = β v` and `(1 + A) y = β e^G k` for all columns. `A[i, j]` is `β_i k_i · k_j e^{G_i − G_j}`
    /// for `j < i`, and 0 elsewhere.
    fn solve(&mut self, [dk, dv]: [usize; 2], k: &[f32], v: &[f32], step: &[f32]) {
        let (n, width) = (step.len(), dv + dk);
        self.solved.resize(n * width, 0.0);
        for i in 0..n {
            let (done, rest) = self.solved.split_at_mut(i * width);
            let row = &mut rest[..width];
            let (sum, step) = (self.sums[i], step[i]);
            let (values, keys) = row.split_at_mut(dv);
            values.iter_mut().zip(&v[i * dv..]).for_each(|(r, v)| *r = step * v);
            let factor = step * sum.exp();
            keys.iter_mut().zip(&k[i * dk..]).for_each(|(r, k)| *r = factor * k);
            vectorized(
                #[inline(always)]
                || {
                    for (j, before) in done.chunks_exact(width).enumerate() {
                        let a = step * self.scores[i * n + j] * (sum - self.sums[j]).exp();
                        row.iter_mut().zip(before).for_each(|(r, y)| *r -= a * y);
                    }
                },
            );
        }
    }

    fn decay_rows(&mut self, rows: &[f32], width: usize, power: impl Fn(f32, f32) -> f32) {
        let last = self.sums.last().copied().unwrap_or(0.0);
        self.decayed.clear();
        for (row, &sum) in rows.chunks_exact(width).zip(&self.sums) {
            let factor = power(sum, last).exp();
            self.decayed.extend(row.iter().map(|v| v * factor));
        }
    }
}

#[cfg(test)]
mod tests;
