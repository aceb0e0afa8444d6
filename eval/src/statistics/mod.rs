//! Means with their standard errors, for values that come in clusters.
//!
//! Tokens of one window depend on each other, so the error of a mean over tokens is not that of
//! independent draws: the window is the unit. With `W` windows of total `T_w` over `n_w` tokens and
//! the overall mean `m = Σ T_w / Σ n_w`, the ratio estimator's standard error is
//! `√(W / (W − 1) · Σ (T_w − m n_w)²) / Σ n_w`.

//!
//! What chance explains is told by Student's t with `W − 1` degrees of freedom ([`student`]), and for
//! quantiles by a bootstrap over windows ([`quantiles`]).

mod bootstrap;
mod histogram;
pub mod student;

use serde::{Deserialize, Serialize};

pub use self::bootstrap::{Quantile, quantiles};
pub use self::histogram::Histogram;

/// A mean over tokens with its standard error over windows.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Estimate {
    /// The mean over all tokens.
    pub mean: f64,
    /// Its standard error; absent for a single window, which says nothing of the spread.
    pub standard_error: Option<f64>,
}

impl Estimate {
    /// From each window's total and number of tokens.
    pub fn clustered(totals: &[f64], counts: &[usize]) -> Self {
        let tokens: usize = counts.iter().sum();
        let mean = totals.iter().sum::<f64>() / tokens as f64;
        let windows = totals.len() as f64;
        let squares: f64 = totals.iter().zip(counts).map(|(t, &n)| (t - mean * n as f64).powi(2)).sum();
        let standard_error =
            (totals.len() > 1).then(|| (windows / (windows - 1.0) * squares).sqrt() / tokens as f64);
        Self { mean, standard_error }
    }

    /// The smallest increase that a test at this one-sided level would find four times out of five, with
    /// `windows` windows: `(t₁₋ₗ + t₀.₈)` standard errors. Absent where there is no standard error.
    pub fn minimum_detectable(self, level: f64, windows: usize) -> Option<f64> {
        let degrees = windows.saturating_sub(1);
        let t = student::quantile(1.0 - level, degrees)? + student::quantile(0.8, degrees)?;
        Some(t * self.standard_error?)
    }

    /// The same in another unit.
    pub fn scaled(self, factor: f64) -> Self {
        Self { mean: self.mean * factor, standard_error: self.standard_error.map(|e| e * factor) }
    }

    /// The root of a mean square, with the standard error carried over to first order.
    pub fn sqrt(self) -> Self {
        let mean = self.mean.sqrt();
        let carry = |e: f64| if mean > 0.0 { e / (2.0 * mean) } else { 0.0 };
        Self { mean, standard_error: self.standard_error.map(carry) }
    }

    /// `exp` of the mean, with the standard error carried over to first order.
    pub fn exp(self) -> Self {
        let mean = self.mean.exp();
        Self { mean, standard_error: self.standard_error.map(|e| e * mean) }
    }
}

impl std::fmt::Display for Estimate {
    /// `43.31 ± 0.52`.
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
        assert_eq!(format!("{:.2}", e.exp()), "20.09 ± 18.34");
    }
}
