//! Student's t distribution: critical values when the standard error itself is estimated from few windows.

use statrs::distribution::{ContinuousCDF, StudentsT};

/// Below this, the tails of the distribution are too heavy.
const MIN_DEGREES: f64 = 0.5;

/// Returns the quantile of the t distribution with `degrees` degrees of freedom at this probability, or `None` if
/// `degrees` is less than 0.5.
pub fn quantile(probability: f64, degrees: f64) -> Option<f64> {
    Some(distribution(degrees)?.inverse_cdf(probability))
}

/// Returns the probability that a t variable exceeds `value`, or `None` if `degrees` is less than 0.5.
pub fn exceedance(value: f64, degrees: f64) -> Option<f64> {
    // 1 − cdf(value) would lose small probabilities.
    Some(distribution(degrees)?.cdf(-value))
}

fn distribution(degrees: f64) -> Option<StudentsT> {
    (degrees >= MIN_DEGREES).then(|| StudentsT::new(0.0, 1.0, degrees).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_tables() {
        for (p, degrees, value) in [
            (0.95, 1.0, 6.313_75),
            (0.95, 5.0, 2.015_05),
            (0.975, 10.0, 2.228_14),
            (0.95, 39.0, 1.684_88),
            (0.8, 40.0, 0.850_70),
        ] {
            approx::assert_relative_eq!(quantile(p, degrees).unwrap(), value, max_relative = 1e-5);
            approx::assert_relative_eq!(exceedance(value, degrees).unwrap(), 1.0 - p, max_relative = 1e-4);
        }
        assert_eq!(quantile(0.95, 0.0), None);
    }
}
