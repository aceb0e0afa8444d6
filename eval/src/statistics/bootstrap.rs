//! Confidence intervals of quantiles, by a bootstrap over windows.
//!
//! Quantiles over positions have no closed-form standard error when positions depend on each other. The bootstrap
//! repeatedly draws as many windows as there are, with replacement, and takes the quantile of all their positions
//! (Efron 1979; by clusters: Davison and Hinkley 1997, §3.8). The interval is between the 2.5th and 97.5th percentiles
//! of the replicates.

use quant_formats::random::{below, mix};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

const REPLICATES: u64 = 10_000;
const SEED: u64 = 0x0071_7561_6e74;

/// A quantile over positions with its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Quantile {
    /// The quantile over all positions.
    pub value: f64,
    /// The lower bound of the interval; absent for a single window.
    pub low: Option<f64>,
    /// The upper bound of the interval; absent for a single window.
    pub high: Option<f64>,
}

/// Returns the quantiles of these probabilities over the positions of all windows, with their intervals. A quantile is
/// the smallest value such that the values of at least this fraction of positions do not exceed it.
///
/// There must be at least one value, and all must be finite.
pub fn quantiles(windows: &[Vec<f64>], probabilities: &[f64]) -> Vec<Quantile> {
    let mut sorted: Vec<(f64, u32)> =
        (0_u32..).zip(windows).flat_map(|(w, v)| v.iter().map(move |&v| (v, w))).collect();
    sorted.par_sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let once = vec![1; windows.len()];
    let values = weighted(&sorted, &once, sorted.len() as u64, probabilities);
    if windows.len() < 2 {
        return values.into_iter().map(|value| Quantile { value, low: None, high: None }).collect();
    }
    let replicates: Vec<Vec<f64>> = (0..REPLICATES)
        .into_par_iter()
        .map_init(
            || vec![0_u32; windows.len()],
            |weights, replicate| {
                let positions = draw(replicate, windows, weights);
                weighted(&sorted, weights, positions, probabilities)
            },
        )
        .collect();
    let interval = |i: usize| {
        let mut draws: Vec<f64> = replicates.iter().map(|r| r[i]).collect();
        draws.sort_unstable_by(f64::total_cmp);
        let at = |p: f64| draws[((draws.len() - 1) as f64 * p).round() as usize];
        (at(0.025), at(0.975))
    };
    values
        .into_iter()
        .enumerate()
        .map(|(i, value)| {
            let (low, high) = interval(i);
            Quantile { value, low: Some(low), high: Some(high) }
        })
        .collect()
}

/// Draws windows with replacement, counts in `weights` how often each was drawn, and returns their number of positions.
fn draw(replicate: u64, windows: &[Vec<f64>], weights: &mut [u32]) -> u64 {
    weights.fill(0);
    let stream = mix(SEED ^ mix(replicate));
    let mut positions = 0;
    for i in 0..windows.len() as u64 {
        let window = below(mix(stream ^ i), windows.len());
        weights[window] += 1;
        positions += windows[window].len() as u64;
    }
    positions
}

fn weighted(sorted: &[(f64, u32)], weights: &[u32], positions: u64, probabilities: &[f64]) -> Vec<f64> {
    let ranks =
        probabilities.iter().map(|p| ((positions as f64 * p).ceil() as u64).clamp(1, positions.max(1)));
    // Most quantiles are near the upper end, so search from there.
    let mut wanted: Vec<(usize, u64)> = ranks.enumerate().collect();
    wanted.sort_unstable_by_key(|(_, rank)| std::cmp::Reverse(*rank));
    let mut values = vec![0.0; probabilities.len()];
    let mut wanted = wanted.into_iter().peekable();
    let mut not_above = positions;
    for &(value, window) in sorted.iter().rev() {
        let weight = u64::from(weights[window as usize]);
        let Some(&(_, rank)) = wanted.peek() else { break };
        if rank > not_above.saturating_sub(weight) {
            while let Some((i, _)) = wanted.next_if(|(_, rank)| *rank > not_above.saturating_sub(weight)) {
                values[i] = value;
            }
        }
        not_above = not_above.saturating_sub(weight);
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_definition() {
        let windows = vec![vec![5.0, 1.0, 3.0], vec![2.0, 4.0], vec![9.0, 7.0, 8.0, 6.0, 10.0]];
        let found: Vec<f64> =
            quantiles(&windows, &[0.5, 0.9, 0.0, 1.0, 0.91]).iter().map(|q| q.value).collect();
        assert_eq!(found, [5.0, 9.0, 1.0, 10.0, 10.0]);
        let sorted = [(1.0, 0), (2.0, 1), (3.0, 0)];
        assert_eq!(weighted(&sorted, &[2, 0], 4, &[0.5, 0.51, 1.0]), [1.0, 3.0, 3.0]);
    }

    #[test]
    fn intervals_have_their_stated_coverage() {
        // 200 samples of 40 windows with one value each, so the median is that of 40 independent values.
        let mut covered = 0;
        for sample in 0..200_u64 {
            let value = |w: u64| mix(mix(sample) ^ w) as f64 / u64::MAX as f64;
            let windows: Vec<Vec<f64>> = (0..40).map(|w| vec![value(w); 3]).collect();
            let q = quantiles(&windows, &[0.5])[0];
            covered += u32::from(q.low.unwrap() <= 0.5 && 0.5 <= q.high.unwrap());
        }
        assert!((180..=199).contains(&covered), "{covered} of 200");
    }

    #[test]
    fn one_window_has_no_variance() {
        let q = quantiles(&[vec![1.0, 2.0]], &[0.5])[0];
        assert_eq!(q, Quantile { value: 1.0, low: None, high: None });
    }
}
