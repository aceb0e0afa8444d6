//! State-space operations with one decay per head (Mamba 2), token by token and in chunks.

use faer::Accum;
use rayon::prelude::*;

use super::Run;
use super::delta_net::{matrix, product, softplus};
use crate::model::arch::StateSpace;
use crate::vector::vectorized;

const CHUNK: usize = 64;
/// Runs of at least this many tokens are computed in chunks.
const CHUNKED_FROM: usize = 16;

/// The stored parameters, `[heads]` each.
pub(super) struct Parameters<'a> {
    pub(super) a_log: &'a [f32],
    pub(super) d: &'a [f32],
    pub(super) dt_bias: &'a [f32],
}

struct Head {
    /// `[tokens, state_dim]` each: `B`, which writes to the state, and `C`, which reads it.
    b: Vec<f32>,
    c: Vec<f32>,
    /// `[tokens, head_dim]`.
    x: Vec<f32>,
    /// The inputs `x` times each token's step.
    stepped: Vec<f32>,
    /// Logarithms of the state's decay factors, one per token.
    decay: Vec<f32>,
    /// Factor of the inputs `x` when they are added to the output.
    skip: f32,
}

impl Head {
    fn new(
        space: &StateSpace,
        head: usize,
        x: &[f32],
        steps: &[f32],
        parameters: &Parameters<'_>,
        run: &Run,
    ) -> Self {
        let (n, p, heads) = (space.state_dim, space.head_dim, space.heads);
        let (group, mixed) = (head / (heads / space.groups), space.mixed_width());
        let tokens = run.begin..run.begin + run.length;
        let columns = |start: usize, count: usize| -> Vec<f32> {
            tokens.clone().flat_map(|t| &x[t * mixed + start..][..count]).copied().collect()
        };
        let b = columns(space.width() + group * n, n);
        let c = columns(space.width() + (space.groups + group) * n, n);
        let x = columns(head * p, p);
        let rate = -parameters.a_log[head].exp();
        let step = |t: usize| {
            let step = softplus(steps[t * heads + head] + parameters.dt_bias[head]);
            step.clamp(space.steps[0], space.steps[1])
        };
        let taken: Vec<f32> = tokens.map(step).collect();
        let stepped = x.chunks_exact(p).zip(&taken).flat_map(|(row, step)| row.iter().map(move |v| v * step));
        let stepped = stepped.collect();
        let decay = taken.iter().map(|step| step * rate).collect();
        Self { b, c, x, stepped, decay, skip: parameters.d[head] }
    }
}

/// Applies the operation to `x` `[tokens, mixed_width]` with steps `[tokens, heads]`, each run separately; returns
/// `[tokens, width]`.
///
/// With a `state` `[heads, state_dim, head_dim]` there must be a single run, which starts from this state and replaces
/// it.
pub(super) fn apply(
    space: &StateSpace,
    parameters: &Parameters<'_>,
    [x, steps]: [&[f32]; 2],
    runs: &[Run],
    state: Option<&mut [f32]>,
) -> Vec<f32> {
    let (p, width) = (space.head_dim, space.width());
    let each = space.state_dim * p;
    let compute = |run: &Run, head: usize, state: &mut [f32]| {
        let head = Head::new(space, head, x, steps, parameters, run);
        let mut out = match run.length {
            length if length < CHUNKED_FROM => stepwise(space, &head, state),
            _ => chunked(space, &head, state),
        };
        out.iter_mut().zip(&head.x).for_each(|(o, x)| *o += head.skip * x);
        out
    };
    let parts: Vec<(&Run, usize, Vec<f32>)> = match (state, runs) {
        (Some(state), [run]) => (state.par_chunks_mut(each).enumerate())
            .map(|(head, state)| (run, head, compute(run, head, state)))
            .collect(),
        _ => {
            let heads = 0..space.heads;
            let tasks: Vec<_> =
                runs.iter().flat_map(|run| heads.clone().map(move |head| (run, head))).collect();
            let work = |state: &mut Vec<f32>, (run, head)| {
                state.fill(0.0);
                (run, head, compute(run, head, state))
            };
            tasks.into_par_iter().map_init(|| vec![0.0; each], work).collect()
        }
    };
    let mut out = vec![0.0; x.len() / space.mixed_width() * width];
    for (run, head, values) in parts {
        for (token, row) in values.chunks_exact(p).enumerate() {
            out[(run.begin + token) * width + head * p..][..p].copy_from_slice(row);
        }
    }
    out
}

/// The definition, one token after the other.
fn stepwise(space: &StateSpace, head: &Head, state: &mut [f32]) -> Vec<f32> {
    let (n, p) = (space.state_dim, space.head_dim);
    let mut out = vec![0.0; head.x.len()];
    let rows = head.b.chunks_exact(n).zip(head.c.chunks_exact(n)).zip(head.stepped.chunks_exact(p));
    for (((b, c), x), (&decay, out)) in rows.zip(head.decay.iter().zip(out.chunks_exact_mut(p))) {
        let factor = decay.exp();
        vectorized(
            #[inline(always)]
            || {
                for ((row, &b), &c) in state.chunks_exact_mut(p).zip(b).zip(c) {
                    for ((s, &x), o) in row.iter_mut().zip(x).zip(out.iter_mut()) {
                        *s = *s * factor + b * x;
                        *o += *s * c;
                    }
                }
            },
        );
    }
    out
}

/// Computes the operation in chunks (Dao and Gu, "Transformers are SSMs", 2024): as attention with decays inside a
/// chunk, and through the state from one chunk to the next.
fn chunked(space: &StateSpace, head: &Head, state: &mut [f32]) -> Vec<f32> {
    let (n, p) = (space.state_dim, space.head_dim);
    let mut out = vec![0.0; head.x.len()];
    let (mut scores, mut decayed) = (Vec::new(), Vec::new());
    for (i, out) in out.chunks_mut(CHUNK * p).enumerate() {
        let (first, tokens) = (i * CHUNK, out.len() / p);
        let (b, c) = (&head.b[first * n..][..tokens * n], &head.c[first * n..][..tokens * n]);
        let x = &head.stepped[first * p..][..tokens * p];
        // Cumulative sums of the log decays from the chunk's first token on.
        let sums: Vec<f32> = head.decay[first..][..tokens]
            .iter()
            .scan(0.0_f32, |sum, d| {
                *sum += d;
                Some(*sum)
            })
            .collect();
        let last = sums.last().copied().unwrap_or(0.0);
        // The contribution of the state before the chunk.
        decay_rows(&mut decayed, c, n, sums.iter().map(|sum| sum.exp()));
        product(out, Accum::Replace, matrix(&decayed, tokens, n), matrix(state, n, p), 1.0);
        // The contribution of the chunk's own tokens.
        scores.resize(tokens * tokens, 0.0);
        product(&mut scores, Accum::Replace, matrix(c, tokens, n), matrix(b, tokens, n).transpose(), 1.0);
        for (i, row) in scores.chunks_exact_mut(tokens).enumerate() {
            let (seen, unseen) = row.split_at_mut(i + 1);
            seen.iter_mut().zip(&sums).for_each(|(s, sum)| *s *= (sums[i] - sum).exp());
            unseen.fill(0.0);
        }
        product(out, Accum::Add, matrix(&scores, tokens, tokens), matrix(x, tokens, p), 1.0);
        // The state after the chunk.
        decay_rows(&mut decayed, b, n, sums.iter().map(|sum| (last - sum).exp()));
        let factor = last.exp();
        state.iter_mut().for_each(|s| *s *= factor);
        product(state, Accum::Add, matrix(&decayed, tokens, n).transpose(), matrix(x, tokens, p), 1.0);
    }
    out
}

fn decay_rows(into: &mut Vec<f32>, rows: &[f32], width: usize, factors: impl Iterator<Item = f32>) {
    into.clear();
    for (row, factor) in rows.chunks_exact(width).zip(factors) {
        into.extend(row.iter().map(|v| v * factor));
    }
}

#[cfg(test)]
#[path = "state_space_tests.rs"]
mod tests;
