//! Causal depthwise convolutions: one kernel per channel.

use rayon::prelude::*;

use super::Run;
use crate::model::arch::Convolution;
use crate::model::attention::in_place;
use crate::vector::vectorized;

const TILE: usize = 64;

/// Convolves `x` `[tokens, channels]` with `weight` `[channels, kernel]`, each run separately.
///
/// With a `state` `[kernel − 1, channels]` there must be a single run. The state holds the inputs before the run,
/// oldest first, and is replaced by the last inputs of the run.
pub(super) fn convolve(
    shape: &Convolution,
    weight: &[f32],
    bias: Option<&[f32]>,
    x: &[f32],
    runs: &[Run],
    state: Option<&mut [f32]>,
) -> Vec<f32> {
    let Convolution { channels, kernel, activation, .. } = *shape;
    // Transposed, so that a tap is one pass over adjacent values.
    let taps: Vec<f32> =
        (0..kernel).flat_map(|j| (0..channels).map(move |c| weight[c * kernel + j])).collect();
    let mut out = vec![0.0; x.len()];
    let before = state.as_deref().unwrap_or_default();
    let mut tiles = Vec::new();
    let mut rest = &mut out[..];
    for run in runs {
        let (rows, after) = rest.split_at_mut(run.length * channels);
        rest = after;
        tiles.extend(rows.chunks_mut(TILE * channels).enumerate().map(|(i, tile)| (run, i * TILE, tile)));
    }
    tiles.into_par_iter().for_each(|(run, first, tile)| {
        vectorized(
            #[inline(always)]
            || {
                for (i, row) in tile.chunks_exact_mut(channels).enumerate() {
                    if let Some(bias) = bias {
                        row.copy_from_slice(bias);
                    }
                    for (j, tap) in taps.chunks_exact(channels).enumerate() {
                        // The input `kernel − 1 − j` tokens back: from the run, else from the state, else 0.
                        let place = first + i + j + 1;
                        let input = match place.checked_sub(kernel) {
                            Some(token) => &x[(run.begin + token) * channels..][..channels],
                            None if before.is_empty() => continue,
                            None => &before[(place - 1) * channels..][..channels],
                        };
                        row.iter_mut().zip(tap).zip(input).for_each(|((y, w), x)| *y += w * x);
                    }
                }
                if let Some(activation) = activation {
                    in_place(activation, tile);
                }
            },
        );
    });
    if let Some(state) = state {
        remember(state, x);
    }
    out
}

fn remember(state: &mut [f32], x: &[f32]) {
    match state.len().checked_sub(x.len()) {
        Some(kept) => {
            state.copy_within(x.len().., 0);
            state[kept..].copy_from_slice(x);
        }
        None => state.copy_from_slice(&x[x.len() - state.len()..]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::arch::Activation;

    fn wave(count: usize, phase: f64) -> Vec<f32> {
        (0..count).map(|i| ((i as f64 * 0.73 + phase).sin() * 1.5) as f32).collect()
    }

    /// Reference implementation in double precision.
    fn naive(shape: &Convolution, w: &[f32], bias: Option<&[f32]>, x: &[f32], runs: &[Run]) -> Vec<f64> {
        let (channels, kernel) = (shape.channels, shape.kernel);
        let mut out = vec![0.0; x.len()];
        for run in runs {
            for t in 0..run.length {
                for c in 0..channels {
                    let mut sum = bias.map_or(0.0, |bias| f64::from(bias[c]));
                    for j in (0..kernel).filter(|j| t + j + 1 >= kernel) {
                        let token = run.begin + t + j + 1 - kernel;
                        sum += f64::from(w[c * kernel + j]) * f64::from(x[token * channels + c]);
                    }
                    out[(run.begin + t) * channels + c] = match shape.activation {
                        Some(Activation::Silu) => sum / (1.0 + (-sum).exp()),
                        _ => sum,
                    };
                }
            }
        }
        out
    }

    #[test]
    fn convolutions_match_their_definition_in_whole_and_in_pieces() {
        for (channels, kernel, length, has_bias, activation) in [
            (1, 1, 5, false, None),
            (3, 4, 150, true, Some(Activation::Silu)),
            (17, 3, 2, false, None),
            (8, 4, 70, false, Some(Activation::Silu)),
        ] {
            let shape = Convolution { channels, kernel, bias: has_bias, activation };
            let (w, x) = (wave(channels * kernel, 0.3), wave(2 * length * channels, 1.1));
            let bias = has_bias.then(|| wave(channels, 2.0));
            let runs: Vec<Run> = [(0, 1), (1, length - 1), (length, length)]
                .map(|(begin, length)| Run { begin, length })
                .into();
            let found = convolve(&shape, &w, bias.as_deref(), &x, &runs, None);
            for (found, exact) in found.iter().zip(naive(&shape, &w, bias.as_deref(), &x, &runs)) {
                approx::assert_abs_diff_eq!(f64::from(*found), exact, epsilon = 2e-6);
            }
            let whole = [Run { begin: 0, length: 2 * length }];
            let whole = convolve(&shape, &w, bias.as_deref(), &x, &whole, None);
            let mut state = vec![0.0; (kernel - 1) * channels];
            let (mut at, mut pieces) = (0, Vec::new());
            for piece in [1, 2, 1, 7].into_iter().cycle() {
                let piece = piece.min(2 * length - at);
                if piece == 0 {
                    break;
                }
                let x = &x[at * channels..(at + piece) * channels];
                let run = [Run { begin: 0, length: piece }];
                pieces.extend(convolve(&shape, &w, bias.as_deref(), x, &run, Some(&mut state)));
                at += piece;
            }
            assert_eq!(pieces, whole);
        }
    }
}
