//! Means with their standard errors, for values that come in clusters.
//!
//! Tokens of one window depend on each other, so windows are the independent samples. Let there be `W` windows; window
//! `w` has `n_w` tokens and the total `T_w`, `N = Σ n_w`, and the overall mean is `m = Σ T_w / N`. The standard error
//! is the jackknife's:
//!
//! ```text
//! √((W − 1) / W · Σ (r_w / (1 − n_w / N))²) / N   with r_w = T_w − m n_w
//! √(W / (W − 1) · Σ r_w²) / N                     for windows of one size
//! ```
//!
//! A window that holds much of the text pulls the mean towards itself, so that its residual is too small. Dividing by
//! `1 − n_w / N` compensates for this.
//!
//! Significance follows from Student's t with `N² / Σ n_w² − 1` degrees of freedom ([`student`]), which are `W − 1` for
//! windows of one size. For quantiles, it follows from a bootstrap over windows ([`quantiles`]).

mod bootstrap;
mod histogram;
pub mod student;

use serde::{Deserialize, Serialize};

pub use self::bootstrap::{Quantile, quantiles};
pub use self::histogram::Histogram;

/// A mean over tokens with its standard error over windows.
///
/// ```
/// use quant_evaluator::Estimate;
///
/// // Two windows of four tokens each.
/// let estimate = Estimate::clustered(&[8.0, 12.0], &[4, 4]);
/// assert_eq!((estimate.mean, estimate.standard_error), (2.5, Some(0.5)));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Estimate {
    /// The mean over all tokens.
    pub mean: f64,
    /// Standard error of the mean; absent for a single window, from which it cannot be estimated.
    pub standard_error: Option<f64>,
}

impl Estimate {
    /// Computes the mean from each window's total and number of tokens.
    pub fn clustered(totals: &[f64], counts: &[usize]) -> Self {
        let tokens: usize = counts.iter().sum();
        let mean = totals.iter().sum::<f64>() / tokens as f64;
        let windows = totals.len() as f64;
        let residual = |t: f64, n: f64| (t - mean * n) / (1.0 - n / tokens as f64);
        let squares: f64 = totals.iter().zip(counts).map(|(t, &n)| residual(*t, n as f64).powi(2)).sum();
        let standard_error =
            (totals.len() > 1).then(|| ((windows - 1.0) / windows * squares).sqrt() / tokens as f64);
        Self { mean, standard_error }
    }

    /// The smallest increase that a test at this one-sided level would find with 80 % power, with windows of these
    /// sizes: `(t₁₋ₗ + t₀.₈)` standard errors. Absent if there are too few windows.
    pub fn minimum_detectable(self, level: f64, counts: &[usize]) -> Option<f64> {
        let degrees = degrees_of_freedom(counts);
        let t = student::quantile(1.0 - level, degrees)? + student::quantile(0.8, degrees)?;
        Some(t * self.standard_error?)
    }

    /// Multiplies the mean and its standard error by a factor.
    pub fn scaled(self, factor: f64) -> Self {
        Self { mean: self.mean * factor, standard_error: self.standard_error.map(|e| e * factor) }
    }

    /// Returns the root of a mean square, with first-order propagation of the standard error.
    pub fn sqrt(self) -> Self {
        let mean = self.mean.sqrt();
        let carry = |e: f64| if mean > 0.0 { e / (2.0 * mean) } else { 0.0 };
        Self { mean, standard_error: self.standard_error.map(carry) }
    }

    /// Returns `exp` of the mean, with first-order propagation of the standard error.
    pub fn exp(self) -> Self {
        let mean = self.mean.exp();
        Self { mean, standard_error: self.standard_error.map(|e| e * mean) }
    }
}

/// The degrees of freedom of a mean over windows of these sizes: one less than the effective number of equal windows.
pub fn degrees_of_freedom(counts: &[usize]) -> f64 {
    let total: f64 = counts.iter().map(|&n| n as f64).sum();
    let squares: f64 = counts.iter().map(|&n| (n as f64).powi(2)).sum();
    if squares > 0.0 { total * total / squares - 1.0 } else { 0.0 }
}

impl std::fmt::Display for Estimate {
    /// Formats it as `43.312 ± 0.521`, with the digits of the precision, or three; an absent error is `?`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let digits = f.precision().unwrap_or(3);
        write!(f, "{:.digits$}", self.mean)?;
        match self.standard_error {
            Some(error) => write!(f, " ± {error:.digits$}"),
            None => write!(f, " ± ?"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_windows_give_the_textbook_error() {
        let means = [1.0, 2.0, 4.0, 5.0];
        let totals: Vec<f64> = means.iter().map(|m| m * 10.0).collect();
        let e = Estimate::clustered(&totals, &[10; 4]);
        let variance = means.iter().map(|m| (m - 3.0_f64).powi(2)).sum::<f64>() / 3.0;
        approx::assert_relative_eq!(e.mean, 3.0);
        approx::assert_relative_eq!(e.standard_error.unwrap(), (variance / 4.0).sqrt());
        assert_eq!(Estimate::clustered(&[3.0], &[2]).standard_error, None);
        assert_eq!(degrees_of_freedom(&[10; 4]), 3.0);
        assert!(degrees_of_freedom(&[1000, 10, 10, 10]) < 0.1);
        let uneven = Estimate::clustered(&[4000.0, 10.0, 50.0], &[1000, 10, 10]);
        assert!(uneven.standard_error.unwrap() > 0.5, "{uneven}");
        assert_eq!(format!("{:.2}", e.exp()), "20.09 ± 18.34");
    }
}
