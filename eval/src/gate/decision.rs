//! Pass, fail or inconclusive: the test of one degradation.
//!
//! The degradation of window `w` is its mean now minus its mean in the baseline. Let `d` be the mean over tokens, `e`
//! its standard error over `W` windows, and `t` the quantile of Student's t distribution at the one-sided level, with
//! the [degrees of freedom](crate::statistics) of the windows. The confidence bounds are `L = d − t e` and `U = d + t
//! e`. If `U` is within the margin, the test passes. If `L` is beyond the margin, it fails. Otherwise more windows are
//! needed. (This is a one-sided test of non-inferiority and its mirror image; bit-identical results pass whatever the
//! number of windows.)
//!
//! With several tests, one of them would fail by chance more often than the level allows. Failures therefore use the
//! step-down procedure of Holm (1979), which keeps the level for all tests together. To pass, each test must pass,
//! which needs no correction.

use serde::Serialize;

use crate::Estimate;
use crate::statistics::{degrees_of_freedom, student};

/// The power for which the required number of windows is reported.
const POWER: f64 = 0.8;

/// The outcome of a check.
///
/// No outcomes will be added, so a `match` needs no default case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The condition holds.
    Pass,
    /// The condition does not hold.
    Fail,
    /// There are too few windows to decide.
    Inconclusive,
}

impl Verdict {
    /// Returns the verdict's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::Inconclusive => "inconclusive",
        }
    }
}

/// The outcome of a test of a degradation, in nats per token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Test {
    pub(super) degradation: Estimate,
    /// `L` and `U`; absent for a single window.
    pub(super) bounds: Option<(f64, f64)>,
    pub(super) verdict: Verdict,
    /// The p-value: the probability of at least this degradation if the true one equals the margin.
    pub(super) p_fail: f64,
    /// The approximate number of windows that would decide with 80 % power, if the true degradation is the observed
    /// one.
    pub(super) windows_needed: Option<u64>,
}

/// Tests whether the windows' differences, weighted by `tokens`, stay within `margin`.
pub(super) fn test(differences: &[f64], tokens: &[usize], margin: f64, level: f64) -> Test {
    let totals: Vec<f64> = differences.iter().zip(tokens).map(|(d, &n)| d * n as f64).collect();
    let degradation = Estimate::clustered(&totals, tokens);
    let mean = degradation.mean;
    let identical = differences.iter().all(|d| *d == 0.0);
    let degrees = degrees_of_freedom(tokens);
    let known = degradation.standard_error.zip(student::quantile(1.0 - level, degrees));
    let bounds = known.map(|(e, t)| (mean - t * e, mean + t * e));
    let (verdict, p_fail) = match (identical, degradation.standard_error) {
        (true, _) => (Verdict::Pass, 1.0),
        (false, None) => (Verdict::Inconclusive, 1.0),
        (false, Some(e)) if e > 0.0 => {
            let p_fail = student::exceedance((mean - margin) / e, degrees).unwrap_or(1.0);
            match bounds {
                Some((_, upper)) if upper <= margin => (Verdict::Pass, p_fail),
                Some((lower, _)) if lower > margin => (Verdict::Fail, p_fail),
                _ => (Verdict::Inconclusive, p_fail),
            }
        }
        (false, Some(_)) if mean <= margin => (Verdict::Pass, 1.0),
        (false, Some(_)) => (Verdict::Fail, 0.0),
    };
    let power = student::quantile(POWER, degrees).unwrap_or_default();
    let windows_needed = known
        .filter(|_| verdict == Verdict::Inconclusive && mean != margin)
        .map(|(e, t)| (differences.len() as f64 * ((t + power) * e / (mean - margin)).powi(2)).ceil())
        .filter(|n| *n < 1e9)
        .map(|n| n as u64);
    Test { degradation, bounds, verdict, p_fail, windows_needed }
}

/// Holm's step-down procedure: which tests with these p-values fail at this level.
pub(super) fn holm(probabilities: &[f64], level: f64) -> Vec<bool> {
    let mut order: Vec<usize> = (0..probabilities.len()).collect();
    order.sort_by(|&a, &b| probabilities[a].total_cmp(&probabilities[b]));
    let mut fails = vec![false; probabilities.len()];
    for (rank, &i) in order.iter().enumerate() {
        if probabilities[i] > level / (probabilities.len() - rank) as f64 {
            break;
        }
        fails[i] = true;
    }
    fails
}

#[cfg(test)]
mod tests {
    use quant_formats::random::mix;

    use super::*;

    fn sample(seed: u64, windows: u64, mean: f64, spread: f64) -> Vec<f64> {
        let uniform = |i: u64| mix(mix(seed) ^ i) as f64 / u64::MAX as f64;
        (0..windows)
            .map(|w| mean + spread * ((0..12).map(|i| uniform(12 * w + i)).sum::<f64>() - 6.0))
            .collect()
    }

    fn rates(mean: f64, spread: f64, margin: f64) -> (f64, f64) {
        let verdicts: Vec<Verdict> = (0..2000)
            .map(|seed| test(&sample(seed, 20, mean, spread), &[100; 20], margin, 0.05).verdict)
            .collect();
        let share = |v| verdicts.iter().filter(|&&x| x == v).count() as f64 / verdicts.len() as f64;
        (share(Verdict::Pass), share(Verdict::Fail))
    }

    #[test]
    fn at_the_margin_the_error_rate_is_the_level() {
        let (pass, fail) = rates(0.005, 0.01, 0.005);
        assert!((0.035..0.065).contains(&pass) && (0.035..0.065).contains(&fail), "{pass} {fail}");
        assert_eq!(rates(0.02, 0.01, 0.005), (0.0, 1.0));
        assert_eq!(rates(-0.01, 0.01, 0.005), (1.0, 0.0));
    }

    #[test]
    fn no_difference_passes_and_one_window_is_inconclusive() {
        assert_eq!(test(&[0.0], &[5], 0.0, 0.05).verdict, Verdict::Pass);
        assert_eq!(test(&[1.0], &[5], 0.1, 0.05).verdict, Verdict::Inconclusive);
        assert_eq!(test(&[0.25; 3], &[5; 3], 0.1, 0.05).verdict, Verdict::Fail);
        assert_eq!(test(&[0.25; 3], &[5; 3], 0.5, 0.05).verdict, Verdict::Pass);
    }

    #[test]
    fn so_many_windows_would_have_decided() {
        let alternating =
            |n: usize| -> Vec<f64> { (0..n).map(|i| if i % 2 == 0 { 0.01 } else { -0.01 }).collect() };
        let open = test(&alternating(20), &[100; 20], 0.002, 0.05);
        assert_eq!(open.verdict, Verdict::Inconclusive);
        let needed = open.windows_needed.unwrap() as usize;
        assert!((170..190).contains(&needed), "{needed}");
        let even = needed.next_multiple_of(2);
        let decided = test(&alternating(even), &vec![100; even], 0.002, 0.05);
        assert_eq!(decided.verdict, Verdict::Pass);
    }

    #[test]
    fn holm_keeps_the_level_of_all() {
        assert_eq!(holm(&[0.01, 0.04, 0.03, 0.005], 0.05), [true, false, false, true]);
        assert_eq!(holm(&[0.04], 0.05), [true]);
        assert_eq!(holm(&[], 0.05), Vec::<bool>::new());
    }
}
