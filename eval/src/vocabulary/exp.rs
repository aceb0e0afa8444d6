//! `eˣ` in double precision, written so that the compiler vectorizes it.

/// Upper bound of the relative error of [`exp`].
#[cfg(test)]
pub(super) const EXP_BOUND: f64 = 2e-14;

/// Below this, `eˣ` is negligible next to the largest term of a sum, 1.
const MIN_ARGUMENT: f64 = -707.0;

/// Returns `eˣ` for `x` up to 1, with a relative error within 2·10⁻¹⁴; 0 below −707, NaN for NaN.
///
/// Range reduction by `ln 2` in two parts, and a Taylor polynomial of degree 11 on `±ln 2 / 2`. Products and sums are
/// fused, so that results are the same on every machine.
#[inline(always)]
pub(super) fn exp(x: f64) -> f64 {
    const LN2_HIGH: f64 = 0.693_147_180_369_123_8;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    // Adding and subtracting 1.5·2⁵² rounds to the nearest integer without a branch or a call.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    // The comparison vectorizes, and lets NaN pass.
    let bounded = if x < MIN_ARGUMENT { MIN_ARGUMENT } else { x };
    let shifted = bounded.mul_add(std::f64::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, bounded));
    let p = (1.0_f64 / 39_916_800.0).mul_add(r, 1.0 / 3_628_800.0);
    let p = p.mul_add(r, 1.0 / 362_880.0);
    let p = p.mul_add(r, 1.0 / 40_320.0);
    let p = p.mul_add(r, 1.0 / 5_040.0);
    let p = p.mul_add(r, 1.0 / 720.0);
    let p = p.mul_add(r, 1.0 / 120.0);
    let p = p.mul_add(r, 1.0 / 24.0);
    let p = p.mul_add(r, 1.0 / 6.0);
    let p = p.mul_add(r, 0.5);
    let p = p.mul_add(r, 1.0);
    let p = p.mul_add(r, 1.0);
    // The lowest bits of `shifted` are the integer.
    let power = f64::from_bits((shifted.to_bits() << 52).wrapping_add(1023 << 52));
    if x < MIN_ARGUMENT { 0.0 } else { p * power }
}
