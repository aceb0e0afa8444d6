//! Finds which of several models is closest to the reference.

use crate::Estimate;
use crate::statistics::{degrees_of_freedom, student};

/// The two-sided level at which a difference counts as clear.
const LEVEL: f64 = 0.05;

/// The model with the lowest divergence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Closest {
    /// The model's index.
    pub index: usize,
    /// The index of the model with the next lowest divergence.
    pub next: usize,
    /// Whether the difference between these two is significant at 5 %, by a paired test over windows.
    pub clear: bool,
}

/// Returns which of several models is closest to their common reference: the one with the lowest mean KL divergence.
/// `window_kl` holds each model's means per window in nats per token, and `tokens` the windows' numbers of tokens.
///
/// Returns `None` for fewer than two models, without windows, and if a model does not have one mean per window.
///
/// ```
/// use quant_evaluator::closest;
///
/// let found = closest(&[&[0.020, 0.031, 0.021, 0.030], &[0.010, 0.020, 0.010, 0.020]], &[10; 4]).unwrap();
/// assert_eq!((found.index, found.next, found.clear), (1, 0, true));
/// ```
pub fn closest(window_kl: &[&[f64]], tokens: &[usize]) -> Option<Closest> {
    if tokens.is_empty() || window_kl.iter().any(|windows| windows.len() != tokens.len()) {
        return None;
    }
    let estimate = |windows: &mut dyn Iterator<Item = f64>| {
        let totals: Vec<f64> = windows.zip(tokens).map(|(kl, &n)| kl * n as f64).collect();
        Estimate::clustered(&totals, tokens)
    };
    let mut order: Vec<(f64, usize)> = (window_kl.iter().enumerate())
        .map(|(index, windows)| (estimate(&mut windows.iter().copied()).mean, index))
        .collect();
    order.sort_by(|a, b| a.0.total_cmp(&b.0));
    let [(_, index), (_, next), ..] = order[..] else { return None };
    let mut differences = window_kl[next].iter().zip(window_kl[index]).map(|(n, b)| n - b);
    let difference = estimate(&mut differences);
    let t = student::quantile(1.0 - LEVEL / 2.0, degrees_of_freedom(tokens));
    let clear = difference.standard_error.zip(t).is_some_and(|(error, t)| difference.mean > t * error);
    Some(Closest { index, next, clear })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_within_its_error_is_not_clear() {
        let (a, b): (&[f64], &[f64]) = (&[0.01, 0.05, 0.02, 0.03], &[0.02, 0.01, 0.06, 0.03]);
        let found = closest(&[a, b], &[10; 4]).unwrap();
        assert_eq!((found.index, found.next, found.clear), (0, 1, false));
        let found = closest(&[a, a], &[10; 4]).unwrap();
        assert_eq!((found.index, found.clear), (0, false));
        assert!(!closest(&[&[0.1], &[0.2]], &[10]).unwrap().clear);
    }

    #[test]
    fn nothing_is_compared_with_one_model_or_other_windows() {
        assert_eq!(closest(&[&[0.1, 0.2]], &[1, 1]), None);
        assert_eq!(closest(&[&[0.1, 0.2], &[0.1]], &[1, 1]), None);
        assert_eq!(closest(&[&[], &[]], &[]), None);
    }
}
