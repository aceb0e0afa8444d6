//! State-space operations: chunks and single steps against the definition in double precision.

use super::*;

fn wave(count: usize, phase: f64, scale: f64) -> Vec<f32> {
    (0..count).map(|i| ((i as f64 * 0.61 + (i as f64 * 0.017).sin() + phase).sin() * scale) as f32).collect()
}

struct Case {
    space: StateSpace,
    tokens: usize,
    x: Vec<f32>,
    steps: Vec<f32>,
    a_log: Vec<f32>,
    d: Vec<f32>,
    dt_bias: Vec<f32>,
}

impl Case {
    /// With `slow`, states decay slowly, so that chunks depend on each other.
    fn new(space: StateSpace, tokens: usize, slow: bool) -> Self {
        let rates = if slow { -5.0 } else { 0.5 };
        Self {
            space,
            tokens,
            x: wave(tokens * space.mixed_width(), 0.2, 1.0),
            steps: wave(tokens * space.heads, 2.3, 2.0),
            a_log: wave(space.heads, 0.4, 0.5).into_iter().map(|v| v + rates).collect(),
            d: wave(space.heads, 1.7, 1.0),
            dt_bias: wave(space.heads, 3.1, 0.5),
        }
    }

    fn apply(&self, tokens: std::ops::Range<usize>, runs: &[Run], state: Option<&mut [f32]>) -> Vec<f32> {
        let parameters = Parameters { a_log: &self.a_log, d: &self.d, dt_bias: &self.dt_bias };
        let (mixed, heads) = (self.space.mixed_width(), self.space.heads);
        let x = &self.x[tokens.start * mixed..tokens.end * mixed];
        let steps = &self.steps[tokens.start * heads..tokens.end * heads];
        apply(&self.space, &parameters, [x, steps], runs, state)
    }

    fn naive(&self, runs: &[Run]) -> Vec<f64> {
        let StateSpace { heads, groups, head_dim: p, state_dim: n, steps: limits } = self.space;
        let mixed = heads * p + 2 * groups * n;
        let mut out = vec![0.0; self.tokens * heads * p];
        for (run, head) in runs.iter().flat_map(|run| (0..heads).map(move |head| (run, head))) {
            let mut state = vec![vec![0.0_f64; n]; p];
            let group = head * groups / heads;
            for t in run.begin..run.begin + run.length {
                let at = |i: usize| f64::from(self.x[t * mixed + i]);
                let raw = f64::from(self.steps[t * heads + head]) + f64::from(self.dt_bias[head]);
                let dt = (1.0 + raw.exp()).ln().clamp(f64::from(limits[0]), f64::from(limits[1]));
                let factor = (-dt * f64::from(self.a_log[head]).exp()).exp();
                for (j, row) in state.iter_mut().enumerate() {
                    let x = at(head * p + j);
                    let mut y = x * f64::from(self.d[head]);
                    for (i, s) in row.iter_mut().enumerate() {
                        *s = *s * factor + dt * x * at(heads * p + group * n + i);
                        y += *s * at(heads * p + (groups + group) * n + i);
                    }
                    out[(t * heads + head) * p + j] = y;
                }
            }
        }
        out
    }
}

fn relative_distance(found: &[f32], exact: &[f64]) -> f64 {
    assert_eq!(found.len(), exact.len());
    let largest = exact.iter().fold(0.0_f64, |m, v| m.max(v.abs()));
    found.iter().zip(exact).map(|(f, e)| (f64::from(*f) - e).abs()).fold(0.0, f64::max) / largest
}

fn space(heads: usize, groups: usize, head_dim: usize, state_dim: usize) -> StateSpace {
    StateSpace { heads, groups, head_dim, state_dim, steps: [0.0, f32::INFINITY] }
}

#[test]
fn steps_and_chunks_are_the_definition() {
    let clamped = StateSpace { steps: [0.3, 0.9], ..space(4, 2, 5, 3) };
    for (space, slow) in [(space(4, 2, 6, 8), true), (space(3, 1, 8, 4), false), (clamped, true)] {
        let case = Case::new(space, 200, slow);
        for lengths in [&[200][..], &[1, 15, 16, 64, 65, 39], &[130, 70]] {
            let mut begin = 0;
            let runs: Vec<Run> = lengths
                .iter()
                .map(|&length| {
                    begin += length;
                    Run { begin: begin - length, length }
                })
                .collect();
            let error = relative_distance(&case.apply(0..200, &runs, None), &case.naive(&runs));
            assert!(error < 3e-6, "{space:?} {lengths:?}: {error:e}");
        }
    }
}

#[test]
fn a_state_continues_a_sequence() {
    let case = Case::new(space(4, 2, 6, 8), 90, true);
    let exact = case.naive(&[Run { begin: 0, length: 90 }]);
    let mut state = vec![0.0; 4 * 6 * 8];
    let mut found = Vec::new();
    for part in [0..70, 70..71, 71..72, 72..90] {
        let run = Run { begin: 0, length: part.len() };
        found.extend(case.apply(part, &[run], Some(&mut state)));
    }
    let error = relative_distance(&found, &exact);
    assert!(error < 3e-6, "{error:e}");
}
