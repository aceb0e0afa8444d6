//! Elementwise functions that the compiler vectorizes. Results do not depend on the machine's libm.

/// `eˣ` within 2 ulp for `x` from −87.3 to 88; 0 below, and `e⁸⁸` above, which is enough for softmax and sigmoid.
///
/// Range reduction by `ln 2` in two parts and a degree-6 polynomial.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5·2²³ rounds to the nearest integer.
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
    // NaN stays NaN: `clamp` keeps it, and the comparison is false for it.
    if x < -87.3 { 0.0 } else { value * power }
}

/// `x · σ(x)`.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `1 / (1 + e⁻ˣ)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `tanh x` within 2 ulp. Near 0, where the quotient of exponentials would lose precision, it is a polynomial.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let magnitude = x.abs();
    let square = x * x;
    let p = -5.704_988_7e-3_f32;
    let p = p * square + 0.020_639_088;
    let p = p * square - 5.373_971_6e-2;
    let p = p * square + 1.333_144_2e-1;
    let p = p * square - 0.333_332_8;
    let near = x + x * square * p;
    // For larger values the quotient is 1 in `f32`; NaN stays NaN.
    let bounded = if magnitude > 10.0 { 10.0 } else { magnitude };
    let far = (1.0 - 2.0 / (exp(2.0 * bounded) + 1.0)).copysign(x);
    if magnitude < 0.625 { near } else { far }
}

/// `x · (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2`.
#[inline(always)]
pub(crate) fn gelu_tanh(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    0.5 * x * (1.0 + tanh(SQRT_2_OVER_PI * (x + 0.044_715 * (x * x * x))))
}

/// `x · (1 + erf(x / √2)) / 2`.
#[inline(always)]
pub(crate) fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + candle_core::cpu::erf::erf_f32(x * std::f32::consts::FRAC_1_SQRT_2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tanh_agrees_with_double_precision() {
        let mut worst = 0.0_f64;
        for i in -1_200_000..1_200_000 {
            let x = i as f32 * 1e-5;
            let exact = f64::from(x).tanh();
            if exact != 0.0 {
                worst = worst.max(((f64::from(tanh(x)) - exact) / exact).abs());
            }
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "{worst:e}");
        assert_eq!((tanh(0.0), tanh(1e30), tanh(f32::NEG_INFINITY)), (0.0, 1.0, -1.0));
        assert!(tanh(f32::NAN).is_nan());
    }

    #[test]
    fn gelu_tanh_agrees_with_double_precision() {
        for i in -1000..1000 {
            let x = f64::from(i) * 0.01;
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            let exact = 0.5 * x * (1.0 + inner.tanh());
            approx::assert_abs_diff_eq!(f64::from(gelu_tanh(x as f32)), exact, epsilon = 4e-7 * x.abs());
        }
        assert!(gelu_tanh(f32::NAN).is_nan());
    }

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
