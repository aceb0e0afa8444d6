//! Elementwise functions written so that the compiler vectorizes them: same result on every
//! machine, whatever its libm.

/// `eˣ` within 2 units in the last place for `x ≤ 88`; 0 below −87.3, as softmax and sigmoid want.
///
/// Range reduction by `ln 2` in two parts and a degree-6 polynomial on `±ln 2 / 2`.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5·2²³ rounds to the nearest integer without a branch or a call.
    const ROUND: f32 = 12_582_912.0;
    let bounded = x.clamp(-87.3, 88.0);
    let shifted = bounded * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (bounded - n * LN2_HIGH) - n * LN2_LOW;
    let p = 1.987_569_1e-4_f32;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let value = p * r * r + r + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127);
    let power = f32::from_bits(exponent << 23);
    // NaN must stay NaN: clamp keeps it, the comparison below is false for it.
    if x < -87.3 { 0.0 } else { value * power }
}

/// `x · σ(x)`.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_agrees_with_double_precision() {
        let mut worst = 0.0_f64;
        for i in -870_000..880_000 {
            let x = i as f32 * 1e-4;
            let exact = f64::from(x).exp();
            worst = worst.max(((f64::from(exp(x)) - exact) / exact).abs());
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "{worst:e}");
        assert_eq!(exp(-200.0), 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(silu(-200.0).abs() < 1e-35);
        assert!(silu(f32::NAN).is_nan());
    }
}
