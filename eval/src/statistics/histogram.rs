//! Counts of values that span orders of magnitude, on a logarithmic scale.

use serde::{Deserialize, Serialize};

/// A histogram of ten decades with four bins each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Histogram {
    /// The decimal logarithm of the lower edge of the first bin, which also counts smaller values.
    pub first_decade: i32,
    /// Bins per decade.
    pub bins_per_decade: u32,
    /// Counts; the last bin also counts larger values.
    pub counts: Vec<u64>,
}

const FIRST_DECADE: i32 = -9;
const DECADES: u32 = 10;
const BINS: u32 = 4;

impl Histogram {
    /// Counts nonnegative values.
    pub fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut counts = vec![0; (DECADES * BINS) as usize];
        let last = counts.len() - 1;
        for value in values {
            let place = (value.log10() - f64::from(FIRST_DECADE)) * f64::from(BINS);
            // The logarithm of zero is −∞, which the cast maps to the first bin.
            counts[(place as usize).min(last)] += 1;
        }
        Self { first_decade: FIRST_DECADE, bins_per_decade: BINS, counts }
    }

    /// The number of counted values.
    pub fn total(&self) -> u64 {
        self.counts.iter().fold(0, |sum, n| sum.saturating_add(*n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_counted_once() {
        let found = Histogram::of([0.0, 1e-12, 1.1e-9, 2e-9, 1.0, 1e30, 0.99].into_iter());
        assert_eq!(found.total(), 7);
        assert_eq!(
            (found.counts[0], found.counts[1], found.counts[35], found.counts[36], found.counts[39]),
            (3, 1, 1, 1, 1)
        );
    }
}
