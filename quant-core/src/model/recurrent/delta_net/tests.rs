use super::*;

fn wave(count: usize, phase: f64, scale: f64) -> Vec<f32> {
    (0..count).map(|i| ((i as f64 * 0.61 + (i as f64 * 0.017).sin() + phase).sin() * scale) as f32).collect()
}

struct Case {
    net: DeltaNet,
    tokens: usize,
    x: Vec<f32>,
    b: Vec<f32>,
    a: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
}

impl Case {
    /// With `slow`, states decay slowly, so that chunks depend on each other.
    fn new(net: DeltaNet, tokens: usize, slow: bool) -> Self {
        let heads = net.value_heads();
        let rates = if slow { -6.0 } else { 0.5 };
        Self {
            net,
            tokens,
            x: wave(tokens * net.mixed_width(), 0.2, 1.5),
            b: wave(tokens * heads, 1.0, 2.0),
            a: wave(tokens * heads, 2.3, 2.0),
            a_log: wave(heads, 0.4, 0.5).into_iter().map(|v| v + rates).collect(),
            dt_bias: wave(heads, 3.1, 0.5),
        }
    }

    fn gates(&self) -> Gates {
        Gates::new(&self.a_log, &self.dt_bias, &self.b, &self.a)
    }

    /// The definition in double precision, with all intermediate values computed directly from the inputs.
    fn naive(&self, runs: &[Run]) -> Vec<f64> {
        let DeltaNet { key_heads, repeat, key_dim: dk, value_dim: dv } = self.net;
        let (heads, width) = (key_heads * repeat, 2 * key_heads * dk + key_heads * repeat * dv);
        let mut out = vec![0.0; self.tokens * heads * dv];
        for (run, head) in runs.iter().flat_map(|run| (0..heads).map(move |head| (run, head))) {
            let mut state = vec![vec![0.0_f64; dv]; dk];
            for t in run.begin..run.begin + run.length {
                let at = |start: usize, i: usize| f64::from(self.x[t * width + start + i]);
                let unit = |start: usize| -> Vec<f64> {
                    let length = (0..dk).map(|i| at(start, i).powi(2)).sum::<f64>() + 1e-6;
                    (0..dk).map(|i| at(start, i) / length.sqrt()).collect()
                };
                let q = unit(head / repeat * dk);
                let k = unit((key_heads + head / repeat) * dk);
                let gate = |values: &[f32]| f64::from(values[t * heads + head]);
                let beta = 1.0 / (1.0 + (-gate(&self.b)).exp());
                let rate = -f64::from(self.a_log[head]).exp();
                let g = rate * (1.0 + (gate(&self.a) + f64::from(self.dt_bias[head])).exp()).ln();
                state.iter_mut().flatten().for_each(|s| *s *= g.exp());
                for j in 0..dv {
                    let v = at(2 * key_heads * dk + head * dv, j);
                    let known: f64 = (0..dk).map(|i| state[i][j] * k[i]).sum();
                    (0..dk).for_each(|i| state[i][j] += k[i] * beta * (v - known));
                    let o: f64 = (0..dk).map(|i| state[i][j] * q[i]).sum();
                    out[(t * heads + head) * dv + j] = o / (dk as f64).sqrt();
                }
            }
        }
        out
    }
}

fn shapes() -> [DeltaNet; 3] {
    [(1, 1, 4, 4), (2, 2, 8, 12), (3, 1, 5, 3)].map(|(key_heads, repeat, key_dim, value_dim)| DeltaNet {
        key_heads,
        repeat,
        key_dim,
        value_dim,
    })
}

fn assert_close(found: &[f32], exact: &[f64]) {
    assert_eq!(found.len(), exact.len());
    for (found, exact) in found.iter().zip(exact) {
        approx::assert_abs_diff_eq!(f64::from(*found), *exact, epsilon = 4e-6);
    }
}

#[test]
fn documents_of_all_lengths_match_the_definition() {
    for net in shapes() {
        for slow in [false, true] {
            let case = Case::new(net, 300, slow);
            let mut runs = Vec::new();
            for length in [1, 2, 15, 16, 63, 64, 65, 74] {
                let begin = runs.last().map_or(0, |run: &Run| run.begin + run.length);
                runs.push(Run { begin, length });
            }
            let found = apply(&net, &case.x, &case.gates(), &runs, None);
            assert_close(&found, &case.naive(&runs));
        }
    }
}

#[test]
fn chunks_and_steps_give_the_same_outputs_and_states() {
    for net in shapes() {
        for slow in [false, true] {
            let case = Case::new(net, 200, slow);
            let run = Run { begin: 0, length: 200 };
            for head in 0..net.value_heads() {
                let head = Head::new(&net, head, &case.x, &case.gates(), &run);
                let len = net.key_dim * net.value_dim;
                let (mut one, mut other) = (wave(len, 0.9, 0.5), wave(len, 0.9, 0.5));
                let (steps, chunks) = (stepwise(&net, &head, &mut one), chunked(&net, &head, &mut other));
                for (a, b) in steps.iter().chain(&one).zip(chunks.iter().chain(&other)) {
                    approx::assert_abs_diff_eq!(*a, *b, epsilon = 4e-6);
                }
            }
        }
    }
}

#[test]
fn a_state_continues_where_it_ended() {
    let net = shapes()[1];
    let case = Case::new(net, 130, true);
    let whole = case.naive(&[Run { begin: 0, length: 130 }]);
    let mut state = vec![0.0; net.value_heads() * net.key_dim * net.value_dim];
    let (mut found, mut at, heads) = (Vec::new(), 0, net.value_heads());
    for piece in [70, 1, 1, 16, 42] {
        let rows = at..at + piece;
        let part = |values: &[f32], width: usize| values[rows.start * width..rows.end * width].to_vec();
        let gates = Gates::new(&case.a_log, &case.dt_bias, &part(&case.b, heads), &part(&case.a, heads));
        let run = [Run { begin: 0, length: piece }];
        found.extend(apply(&net, &part(&case.x, net.mixed_width()), &gates, &run, Some(&mut state)));
        at += piece;
    }
    assert_close(&found, &whole);
}

/// A decay that underflows erases the past and produces no NaN.
#[test]
fn strong_decays_forget() {
    let net = shapes()[1];
    let mut case = Case::new(net, 100, false);
    case.a_log.iter_mut().for_each(|a| *a = 5.0);
    case.a.iter_mut().for_each(|a| *a += 30.0);
    let runs = [Run { begin: 0, length: 100 }];
    assert_close(&apply(&net, &case.x, &case.gates(), &runs, None), &case.naive(&runs));
}

#[test]
fn what_is_not_a_number_stays_so() {
    let net = shapes()[0];
    let mut case = Case::new(net, 20, true);
    case.x[net.mixed_width() * 3] = f32::NAN;
    let out = apply(&net, &case.x, &case.gates(), &[Run { begin: 0, length: 20 }], None);
    assert!(out[..3 * net.width()].iter().all(|v| v.is_finite()) || out.iter().any(|v| v.is_nan()));
    assert!(out[3 * net.width()..4 * net.width()].iter().all(|v| v.is_nan()));
}
