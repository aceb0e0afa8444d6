//! `eˣ` in sixteen lanes, bit-identical on all instruction sets.

use super::grid::ROUND;
use crate::simd::Lanes;

/// Inputs below this are clamped to it: `e⁻⁸⁷` is negligible, but still a normal `f32`.
const MIN_ARGUMENT: f32 = -87.0;
/// ln 2 in two parts: the upper bits, so few that products with small integers are exact, and the remainder.
const LN_2: [f32; 2] = [0.693_115_23, 3.194_618_3e-5];
/// The coefficients of `(eʳ − 1 − r) / r²` for `|r| ≤ ln 2 / 2`, interpolated at five Chebyshev nodes; the relative
/// error of `eʳ` is `1.1 · 10⁻⁸`.
const TERMS: [f32; 5] = [0.5, 0.166_665_76, 0.041_666_552, 0.008_363_353, 0.001_392_64];

/// `eˣ` for `x ≤ 0`, with a relative error of at most `2⁻²²`; `e⁻⁸⁷` for `x` below −87, including minus infinity.
///
/// # Safety
/// The processor must have the instructions of `L`.
#[inline(always)]
pub(super) unsafe fn exp<L: Lanes>(x: L::F) -> L::F {
    // SAFETY: the caller guarantees that the processor has the instructions of `L`.
    unsafe {
        let (one, minus) = (L::splat_f32(1.0), L::splat_f32(-1.0));
        let x = L::max_f32(x, L::splat_f32(MIN_ARGUMENT));
        // x = n · ln 2 + r; the lowest bits of `rounded` are n.
        let rounded = L::fma(x, L::splat_f32(core::f32::consts::LOG2_E), L::splat_f32(ROUND));
        let minus_n = L::fma(rounded, minus, L::splat_f32(ROUND));
        let r = L::fma(minus_n, L::splat_f32(LN_2[0]), x);
        let r = L::fma(minus_n, L::splat_f32(LN_2[1]), r);
        let [a, b, c, d, e] = TERMS;
        let mut sum = L::splat_f32(e);
        for term in [d, c, b, a] {
            sum = L::fma(sum, r, L::splat_f32(term));
        }
        let near = L::fma(L::fma(sum, L::mul_f32(r, r), r), one, one);
        // Multiplying by 2²³ shifts n to the exponent bits and the other bits of `rounded` out.
        let exponent = L::mul(L::as_i32(rounded), L::splat(1 << 23));
        L::as_f32(L::add(L::as_i32(near), exponent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::scalar::Scalar;

    #[test]
    fn exponentials_are_within_their_bound() {
        let steps = 2_000_000;
        let mut worst = 0.0_f64;
        for block in 0..steps / 16 {
            let x: [f32; 16] =
                core::array::from_fn(|i| -87.0 * ((16 * block + i) as f32 / steps as f32).powi(3));
            // SAFETY: portable code needs no instruction set.
            let got = unsafe { exp::<Scalar>(x) };
            for (x, got) in x.into_iter().zip(got) {
                let exact = f64::from(x).exp();
                worst = worst.max((f64::from(got) - exact).abs() / exact);
            }
        }
        assert!(worst <= 2.0_f64.powi(-22), "{worst:e}");
        // SAFETY: portable code needs no instruction set.
        let ends = unsafe { exp::<Scalar>([f32::NEG_INFINITY; 16])[0] };
        assert!(ends > 0.0 && ends < 2e-38);
        // SAFETY: portable code needs no instruction set.
        assert_eq!(unsafe { exp::<Scalar>([0.0; 16]) }, [1.0; 16]);
    }
}
