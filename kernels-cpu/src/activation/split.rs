//! Splits floats into sums of bf16, for paths that multiply bf16.

use crate::layout::STEP;

/// The first feature of each pair of bf16, in the order in which the pairs of a step are multiplied: (0, 2), (4, 6),
/// (1, 3), (5, 7).
pub(crate) const PAIRS: [usize; 4] = [0, 4, 1, 5];

/// Converts the values of a step to parts, each as pairs of bf16.
#[inline(always)]
pub(crate) fn split_in_pairs<const PARTS: usize>(values: [f32; STEP]) -> [[u32; STEP / 2]; PARTS] {
    split::<PARTS>(values).map(|part| PAIRS.map(|i| part[i] >> 16 | part[i + 2]))
}

/// Splits values into sums of `PARTS` bf16: the rounded value, then repeatedly the rounded remainder. Each part is in
/// the upper half of its word; the lower half is zero.
#[inline(always)]
fn split<const PARTS: usize>(values: [f32; STEP]) -> [[u32; STEP]; PARTS] {
    let mut parts = [[0; STEP]; PARTS];
    parts[0] = values.map(round_within);
    let mut left = values;
    for p in 1..PARTS {
        for i in 0..STEP {
            // The subtraction is exact. An infinite value has no remainder (∞ − ∞ would be NaN).
            left[i] -= f32::from_bits(parts[p - 1][i]);
            parts[p][i] = if values[i].is_infinite() { 0 } else { round(left[i]) };
        }
    }
    parts
}

/// Writes each pair of first parts, followed by the pair of their remainders.
#[inline(always)]
pub(crate) fn in_pairs<const PARTS: usize>(values: [f32; STEP], words: &mut [u32]) {
    let parts = split_in_pairs::<PARTS>(values);
    for (i, words) in words.chunks_exact_mut(PARTS).enumerate() {
        words.iter_mut().zip(parts).for_each(|(word, part)| *word = part[i]);
    }
}

/// Rounds a value to bf16, ties to even. The result is in the upper half of the word; the lower half is zero.
#[inline(always)]
fn round(value: f32) -> u32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    if value.is_nan() { 0x7fc0_0000 } else { rounded }
}

/// Rounds a value to bf16, but truncates the largest finite values, which would round to infinity.
#[inline(always)]
fn round_within(value: f32) -> u32 {
    let rounded = round(value);
    let overflows = rounded & 0x7fff_ffff == 0x7f80_0000 && value.is_finite();
    if overflows { value.to_bits() & 0xffff_0000 } else { rounded }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn halves(value: f32) -> [f64; 2] {
        let mut words = [0; STEP];
        in_pairs::<2>([0.0, value, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], &mut words);
        [words[4], words[5]].map(|w| f64::from(f32::from_bits(w << 16)))
    }

    #[test]
    fn two_halves_are_within_their_bound() {
        let mut bits = 1_u32;
        for _ in 0..20_000 {
            bits = bits.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            let value = f32::from_bits(bits);
            if !value.is_finite() || value.abs() < 1e-30 {
                continue;
            }
            let [high, low] = halves(value);
            let off = (high + low - f64::from(value)).abs();
            assert!(off <= f64::from(value).abs() * 2.0_f64.powi(-16), "{value}");
        }
        let [high, low] = halves(f32::MAX);
        assert!(high.is_finite() && (high + low) / f64::from(f32::MAX) > 0.999_98);
        assert_eq!(halves(f32::INFINITY)[0], f64::INFINITY);
        assert!(halves(f32::NAN)[0].is_nan());
        for (value, bits) in
            [(1.0_f32, 0x3f80), (f32::from_bits(0x3f80_8000), 0x3f80), (f32::from_bits(0x3f81_8000), 0x3f82)]
        {
            assert_eq!(round(value) >> 16, bits);
        }
    }

    #[test]
    fn three_parts_are_exact() {
        let mut bits = 1_u32;
        for _ in 0..20_000 {
            bits = bits.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            let value = f32::from_bits(bits);
            if !value.is_finite() || value.abs() < 1e-30 {
                continue;
            }
            let sum =
                |parts: &[[u32; STEP]]| parts.iter().map(|p| f64::from(f32::from_bits(p[3]))).sum::<f64>();
            let [one, two, three] = [1, 2, 3].map(|parts| {
                (sum(&split::<3>([value; STEP])[..parts]) - f64::from(value)).abs() / f64::from(value.abs())
            });
            assert!(
                one <= 2.0_f64.powi(-8) && two <= 2.0_f64.powi(-16) && three <= 2.0_f64.powi(-24),
                "{value}"
            );
        }
        let parts = split::<3>([f32::NEG_INFINITY; STEP]).map(|part| part[0]);
        assert_eq!(parts, [0xff80_0000, 0, 0]);
    }

    #[test]
    fn pairs_lie_in_their_order() {
        let mut words = [0; STEP];
        in_pairs::<2>([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], &mut words);
        let pair = |w: u32| [f32::from_bits(w << 16), f32::from_bits(w & 0xffff_0000)];
        let order = [words[0], words[2], words[4], words[6]].map(pair);
        assert_eq!(order, [[0.0, 2.0], [4.0, 6.0], [1.0, 3.0], [5.0, 7.0]]);
        assert_eq!([words[1], words[3], words[5], words[7]], [0; 4]);
    }
}
