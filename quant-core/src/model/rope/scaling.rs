//! The rotation angle per position of each pair of channels, and its change for contexts longer than in training.
//!
//! Everything is rounded to `f32` where transformers rounds it: at large positions the rounding of a frequency is
//! visible in the angle.

use std::sync::Arc;

/// Changes of the rotary frequencies for contexts longer than in training.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// No change.
    None,
    /// Every frequency divided by `factor` (position interpolation).
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3: low frequencies are divided by `factor` and high ones kept, with a smooth transition.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Frequencies whose wavelength is above `original_positions / low` are divided.
        low: f64,
        /// Frequencies whose wavelength is below `original_positions / high` are kept.
        high: f64,
        /// The original training context, in positions.
        original_positions: f64,
    },
    /// Dynamic NTK scaling: in sequences longer than the original training context, the base grows with the length.
    Dynamic {
        /// The factor of the context. In `dim` rotated channels and a sequence of `length` tokens, the base is
        /// multiplied by `(factor · length / positions − (factor − 1))^(dim / (dim − 2))`.
        factor: f64,
        /// The longest sequence with unscaled frequencies.
        positions: usize,
    },
    /// YaRN (Peng et al., 2023).
    Yarn(Yarn),
    /// LongRoPE (Ding et al., 2024).
    LongRope(LongRope),
    /// Gemma 4: channels are paired over the whole head, but only the first pairs are rotated, with the frequencies of
    /// the whole head's width.
    Proportional {
        /// The divisor of all frequencies.
        factor: f64,
        /// Number of rotated pairs.
        pairs: usize,
    },
}

/// High frequencies are kept and low frequencies are divided, with a linear ramp over the pairs in between.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Yarn {
    /// The divisor of low frequencies.
    pub factor: f64,
    /// The pair at which the ramp begins.
    pub low: f64,
    /// The pair at which the ramp ends.
    pub high: f64,
    /// Factor of cosines and sines.
    pub attention_factor: f64,
    /// The original training context, in positions.
    pub original_positions: usize,
    /// Rotations over the original context at the two ends of the ramp (`beta_fast` and `beta_slow`).
    pub rotations: [f64; 2],
    /// Whether the ends are rounded outwards to whole pairs.
    pub truncated: bool,
}

/// Every frequency is divided by its own factor, from one list for short sequences and another for long ones.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LongRope {
    /// Divisors for sequences up to `original_positions`, one per pair.
    pub short: Arc<[f32]>,
    /// Divisors for longer sequences.
    pub long: Arc<[f32]>,
    /// The original training context, in positions.
    pub original_positions: usize,
    /// Factor of cosines and sines.
    pub attention_factor: f64,
}

impl RopeScaling {
    /// Returns the length above which frequencies change, if they depend on the length of the sequence.
    pub fn changes_above(&self) -> Option<usize> {
        match self {
            Self::Dynamic { positions, .. } => Some(*positions),
            Self::LongRope(rope) => Some(rope.original_positions),
            Self::None
            | Self::Linear { .. }
            | Self::Llama3 { .. }
            | Self::Yarn(_)
            | Self::Proportional { .. } => None,
        }
    }

    /// Returns the quotients of unscaled and scaled frequencies in the shortest sequences.
    pub(super) fn divisors(&self, theta: f64, dim: usize) -> Vec<f32> {
        let [plain, scaled] = [&Self::None, self].map(|scaling| scaling.frequencies(theta, dim, 0).0);
        plain.into_iter().zip(scaled).map(|(f, g)| f / g).collect()
    }

    /// Returns the frequencies `[dim / 2]` of `dim` channels in a sequence of `length` tokens, and the factor of
    /// cosines and sines.
    pub(super) fn frequencies(&self, theta: f64, dim: usize, length: usize) -> (Vec<f32>, f32) {
        let powers = |theta: f32| (0..dim / 2).map(move |i| theta.powf((2 * i) as f32 / dim as f32));
        let plain = || powers(theta as f32).map(|power| 1.0 / power);
        let frequencies = match self {
            Self::None => plain().collect(),
            Self::Linear { factor } => plain().map(|f| f / *factor as f32).collect(),
            Self::Llama3 { factor, low, high, original_positions } => {
                let scaled = |f| llama3(f, *factor, *low, *high, *original_positions);
                plain().map(scaled).collect()
            }
            Self::Dynamic { positions, .. } if length <= *positions => plain().collect(),
            Self::Dynamic { factor, positions } => {
                let stretch = *factor as f32 * length as f32 / *positions as f32 - (*factor - 1.0) as f32;
                let exponent = dim as f64 / (dim as f64 - 2.0);
                powers(theta as f32 * stretch.powf(exponent as f32)).map(|power| 1.0 / power).collect()
            }
            Self::Yarn(yarn) => {
                let all = powers(theta as f32).enumerate();
                return (
                    all.map(|(i, power)| yarn.frequency(i, power)).collect(),
                    yarn.attention_factor as f32,
                );
            }
            Self::LongRope(rope) => {
                let divisors = if length > rope.original_positions { &rope.long } else { &rope.short };
                let all = powers(theta as f32).zip(divisors.iter());
                return (all.map(|(power, d)| 1.0 / (d * power)).collect(), rope.attention_factor as f32);
            }
            Self::Proportional { factor, pairs } => {
                let all = plain().enumerate();
                all.map(|(i, f)| if i < *pairs { f / *factor as f32 } else { 0.0 }).collect()
            }
        };
        (frequencies, 1.0)
    }
}

fn llama3(f: f32, factor: f64, low: f64, high: f64, original_positions: f64) -> f32 {
    let wavelength = std::f64::consts::TAU / f64::from(f);
    if wavelength < original_positions / high {
        f
    } else if wavelength > original_positions / low {
        f / factor as f32
    } else {
        let smooth = (original_positions / wavelength - low) / (high - low);
        ((1.0 - smooth) * f64::from(f) / factor + smooth * f64::from(f)) as f32
    }
}

impl Yarn {
    /// The pair that makes `rotations` rotations over `positions` positions, as a real number.
    pub(super) fn pair_of(rotations: f64, theta: f64, dim: usize, positions: f64) -> f64 {
        dim as f64 * (positions / (rotations * std::f64::consts::TAU)).ln() / (2.0 * theta.ln())
    }

    /// The attention factor that the paper recommends, with the logarithm multiplied by `mscale`: `0.1 · mscale ·
    /// ln(factor) + 1`, or 1 if `factor` is at most 1.
    pub(in crate::model) fn recommended_factor(factor: f64, mscale: f64) -> f64 {
        if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
    }

    fn frequency(&self, pair: usize, power: f32) -> f32 {
        // Avoids a division by 0 in the ramp.
        let high = if self.low == self.high { self.high + 0.001 } else { self.high };
        let ramp = ((pair as f32 - self.low as f32) / (high - self.low) as f32).clamp(0.0, 1.0);
        let kept = 1.0 - ramp;
        (1.0 / (self.factor as f32 * power)) * (1.0 - kept) + (1.0 / power) * kept
    }
}
