//! Pseudo-random numbers that are the same everywhere.

use super::noise::{GOLDEN, finish};

/// Steele, Lea and Flood's SplitMix64.
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// At least 0 and below 1.
    pub fn below_one(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        finish(self.0) as f64 / 2.0_f64.powi(64)
    }

    /// A number with the standard normal distribution (Box–Muller).
    pub fn normal(&mut self) -> f64 {
        let (radius, angle) = (1.0 - self.below_one(), self.below_one());
        (-2.0 * radius.ln()).sqrt() * (2.0 * std::f64::consts::PI * angle).cos()
    }

    /// A number with the exponential distribution of this mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.below_one()).ln()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments() {
        let mut random = Random(3);
        let count = 100_000;
        let mean =
            |mut draw: Box<dyn FnMut() -> f64>| (0..count).map(|_| draw()).sum::<f64>() / f64::from(count);
        let mut own = random.clone();
        assert!((mean(Box::new(move || own.below_one())) - 0.5).abs() < 0.01);
        let mut own = random.clone();
        assert!(mean(Box::new(move || own.normal())).abs() < 0.02);
        let mut own = random.clone();
        assert!((mean(Box::new(move || own.normal().powi(2))) - 1.0).abs() < 0.03);
        assert!((mean(Box::new(move || random.exponential(4.0))) - 4.0).abs() < 0.1);
    }
}
