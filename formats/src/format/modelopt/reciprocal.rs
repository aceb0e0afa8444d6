//! Global scales of NVFP4: a multiplier in ModelOpt, a divisor in compressed-tensors.
//!
//! Rounded reciprocals cannot always be inverted: several numbers have the same one. But tools compute a global scale
//! from the largest magnitude `a` of a weight, as `a / 2688` or `2688 / a` (1536 if the search leaves room for a larger
//! scale). If such an `a` exists in BF16 or F16, the other form is computed from it, and both directions are exact.
//! Otherwise, the result is the rounded reciprocal, and the round trip may differ by one or two units in the last
//! place.

use half::{bf16, f16};

/// 6 · 448, the largest code value times the largest scale; and 6 · 256, so that scales can still be multiplied by 1.5.
const LARGEST: [f32; 2] = [2688.0, 1536.0];

/// Converts a multiplier to a divisor and vice versa. The scale and its inverse must be positive and finite.
pub(super) fn reciprocal(scale: f32) -> f32 {
    let narrow: [fn(f32) -> f32; 2] = [|x| bf16::from_f32(x).to_f32(), |x| f16::from_f32(x).to_f32()];
    let candidates = LARGEST.into_iter().flat_map(|largest| narrow.map(|narrow| (largest, narrow)));
    for (largest, narrow) in candidates {
        for (a, restated, other) in [
            (
                narrow(scale * largest),
                (|a, l| a / l) as fn(f32, f32) -> f32,
                (|a, l| l / a) as fn(f32, f32) -> f32,
            ),
            (narrow(largest / scale), |a, l| l / a, |a, l| a / l),
        ] {
            let found = other(a, largest);
            if restated(a, largest) == scale && found.is_normal() {
                return found;
            }
        }
    }
    1.0 / scale
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn scales_of_weights_of_16_bits_come_back(bits in 1u16..0x7f80, half in 1u16..0x7c00, numerator in 0usize..2) {
            let largest = LARGEST[numerator];
            for a in [bf16::from_bits(bits).to_f32(), f16::from_bits(half).to_f32()] {
                let (divisor, multiplier) = (largest / a, a / largest);
                if !(1e-30..1e30).contains(&divisor) {
                    continue;
                }
                prop_assert_eq!(reciprocal(divisor).to_bits(), multiplier.to_bits());
                prop_assert_eq!(reciprocal(multiplier).to_bits(), divisor.to_bits());
            }
        }

        #[test]
        fn others_are_off_by_units(scale in 1e-20_f32..1e20) {
            let other = reciprocal(scale);
            prop_assert!((f64::from(scale) * f64::from(other) - 1.0).abs() <= 2.0_f64.powi(-23));
            let back = reciprocal(other).to_bits();
            prop_assert!(back.abs_diff(scale.to_bits()) <= 2, "{} became {}", scale, f32::from_bits(back));
        }
    }
}
