//! [`RowLanes`] in two registers of 256 bits, and in one of 512.

use core::arch::x86_64::*;

use half::{bf16, f16};

use super::avx2::Avx2;
use super::avx512::Avx512Vnni;
use super::elementwise::RowLanes;

/// The upper half of eight floats, rounded half to even; NaN keeps its sign and becomes quiet.
#[inline(always)]
unsafe fn upper_halves(a: __m256) -> __m256i {
    // SAFETY: the caller guarantees that the processor has AVX2.
    unsafe {
        let bits = _mm256_castps_si256(a);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(a, a));
        _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan))
    }
}

// SAFETY of every block below: by the contract of `RowLanes`, the caller guarantees that the processor has the
// instruction set, and that pointers are valid for the bytes that are loaded and stored.
impl RowLanes for Avx2 {
    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn add_f32(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the contract of `RowLanes`.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn sub_f32(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the contract of `RowLanes`.
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn div_f32(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the contract of `RowLanes`.
        unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn min_f32(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the contract of `RowLanes`.
        unsafe { [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn round(a: Self::F) -> Self::F {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        // SAFETY: the contract of `RowLanes`.
        unsafe { [_mm256_round_ps::<NEAREST>(a[0]), _mm256_round_ps::<NEAREST>(a[1])] }
    }
    #[inline(always)]
    unsafe fn unless_below(a: Self::F, limit: Self::F, v: Self::F) -> Self::F {
        // SAFETY: the contract of `RowLanes`.
        unsafe {
            let keep = |i: usize| _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(a[i], limit[i]), v[i]);
            [keep(0), keep(1)]
        }
    }
    #[inline(always)]
    unsafe fn times_power(p: Self::F, n: Self::F) -> Self::F {
        // SAFETY: the contract of `RowLanes`.
        unsafe {
            let times = |p, n| {
                let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
            };
            [times(p[0], n[0]), times(p[1], n[1])]
        }
    }
    #[inline(always)]
    unsafe fn flip(a: Self::F, signs: Self::F) -> Self::F {
        // SAFETY: the contract of `RowLanes`.
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            let flip = |i: usize| _mm256_xor_ps(a[i], _mm256_and_ps(signs[i], sign));
            [flip(0), flip(1)]
        }
    }
    #[inline(always)]
    unsafe fn partner<const DISTANCE: usize>(a: Self::F) -> Self::F {
        // SAFETY: the contract of `RowLanes`.
        unsafe {
            match DISTANCE {
                1 => a.map(|a| _mm256_permute_ps::<0b10_11_00_01>(a)),
                2 => a.map(|a| _mm256_permute_ps::<0b01_00_11_10>(a)),
                4 => a.map(|a| _mm256_permute2f128_ps::<1>(a, a)),
                _ => [a[1], a[0]],
            }
        }
    }
    #[inline(always)]
    unsafe fn to_i32(a: Self::F) -> Self::I {
        // SAFETY: the contract of `RowLanes`.
        unsafe { [_mm256_cvtps_epi32(a[0]), _mm256_cvtps_epi32(a[1])] }
    }
    #[inline(always)]
    unsafe fn max_i32(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: the contract of `RowLanes`.
        unsafe { [_mm256_max_epi32(a[0], b[0]), _mm256_max_epi32(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: the contract of `RowLanes`.
        unsafe { [_mm256_and_si256(a[0], b[0]), _mm256_and_si256(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn store_codes(a: Self::I, low: *mut i8, high: *mut i8) {
        // SAFETY: the contract of `RowLanes`.
        unsafe {
            // The pack instruction works within halves of registers, so the permutation restores the order of the
            // values.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(a[0], a[1]));
            let bytes = _mm256_packs_epi16(words, words);
            _mm_storel_epi64(low.cast(), _mm256_castsi256_si128(bytes));
            _mm_storel_epi64(high.cast(), _mm256_extracti128_si256::<1>(bytes));
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(at: *mut bf16, a: Self::F) {
        // SAFETY: the contract of `RowLanes`.
        unsafe {
            let words = _mm256_packus_epi32(upper_halves(a[0]), upper_halves(a[1]));
            _mm256_storeu_si256(at.cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(words));
        }
    }
    #[inline(always)]
    unsafe fn store_f16(at: *mut f16, a: Self::F) {
        // SAFETY: the contract of `RowLanes`.
        unsafe {
            _mm_storeu_si128(at.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a[0]));
            _mm_storeu_si128(at.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a[1]));
        }
    }
    #[inline(always)]
    unsafe fn total(a: Self::I) -> i32 {
        // SAFETY: the contract of `RowLanes`.
        unsafe {
            let eight = _mm256_add_epi32(a[0], a[1]);
            let four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
            let two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
            _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<1>(two)))
        }
    }
    #[inline(always)]
    unsafe fn largest(a: Self::I) -> i32 {
        // SAFETY: the contract of `RowLanes`.
        unsafe {
            let eight = _mm256_max_epi32(a[0], a[1]);
            let four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
            let two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
            _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32::<1>(two)))
        }
    }
}

// SAFETY of every block below: by the contract of `RowLanes`, the caller guarantees that the processor has the
// instruction set, and that pointers are valid for the bytes that are loaded and stored.
impl RowLanes for Avx512Vnni {
    const WIDE: bool = true;

    #[inline(always)]
    unsafe fn add_f32(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the contract of `RowLanes`.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub_f32(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the contract of `RowLanes`.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div_f32(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the contract of `RowLanes`.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min_f32(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the contract of `RowLanes`.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        // SAFETY: the contract of `RowLanes`.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    unsafe fn unless_below(a: __m512, limit: __m512, v: __m512) -> __m512 {
        // SAFETY: the contract of `RowLanes`.
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(a, limit), v) }
    }
    #[inline(always)]
    unsafe fn times_power(p: __m512, n: __m512) -> __m512 {
        // SAFETY: the contract of `RowLanes`.
        unsafe { _mm512_scalef_ps(p, n) }
    }
    #[inline(always)]
    unsafe fn flip(a: __m512, signs: __m512) -> __m512 {
        // SAFETY: the contract of `RowLanes`.
        unsafe {
            let sign = _mm512_and_si512(_mm512_castps_si512(signs), _mm512_set1_epi32(i32::MIN));
            _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), sign))
        }
    }
    #[inline(always)]
    unsafe fn partner<const DISTANCE: usize>(a: __m512) -> __m512 {
        // SAFETY: the contract of `RowLanes`.
        unsafe {
            match DISTANCE {
                1 => _mm512_permute_ps::<0b10_11_00_01>(a),
                2 => _mm512_permute_ps::<0b01_00_11_10>(a),
                4 => _mm512_shuffle_f32x4::<0b10_11_00_01>(a, a),
                _ => _mm512_shuffle_f32x4::<0b01_00_11_10>(a, a),
            }
        }
    }
    #[inline(always)]
    unsafe fn to_i32(a: __m512) -> __m512i {
        // SAFETY: the contract of `RowLanes`.
        unsafe { _mm512_cvtps_epi32(a) }
    }
    #[inline(always)]
    unsafe fn max_i32(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: the contract of `RowLanes`.
        unsafe { _mm512_max_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn and(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: the contract of `RowLanes`.
        unsafe { _mm512_and_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn store_codes(a: __m512i, low: *mut i8, high: *mut i8) {
        // SAFETY: the contract of `RowLanes`.
        unsafe {
            let bytes = _mm512_cvtsepi32_epi8(a);
            _mm_storel_epi64(low.cast(), bytes);
            _mm_storel_epi64(high.cast(), _mm_unpackhi_epi64(bytes, bytes));
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(at: *mut bf16, a: __m512) {
        // SAFETY: the contract of `RowLanes`.
        unsafe {
            let bits = _mm512_castps_si512(a);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a);
            let upper = _mm512_srli_epi32::<16>(_mm512_mask_mov_epi32(rounded, nan, quiet));
            _mm256_storeu_si256(at.cast(), _mm512_cvtepi32_epi16(upper));
        }
    }
    #[inline(always)]
    unsafe fn store_f16(at: *mut f16, a: __m512) {
        // SAFETY: the contract of `RowLanes`.
        unsafe { _mm256_storeu_si256(at.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a)) }
    }
    #[inline(always)]
    unsafe fn total(a: __m512i) -> i32 {
        // SAFETY: the contract of `RowLanes`.
        unsafe { _mm512_reduce_add_epi32(a) }
    }
    #[inline(always)]
    unsafe fn largest(a: __m512i) -> i32 {
        // SAFETY: the contract of `RowLanes`.
        unsafe { _mm512_reduce_max_epi32(a) }
    }
    #[inline(always)]
    unsafe fn split_steps<const PARTS: usize>(
        x: *const f32,
        steps: usize,
        to: *mut u32,
        part: usize,
        sum: &mut [f32; 8],
    ) {
        // SAFETY: the contract of `RowLanes`.
        unsafe {
            let mut total = _mm256_loadu_ps(sum.as_ptr());
            for step in 0..steps {
                let values = _mm256_loadu_ps(x.add(8 * step));
                total = _mm256_add_ps(total, values);
                for (p, words) in parts_in_pairs::<PARTS>(values).into_iter().enumerate() {
                    _mm_storeu_si128(to.add(p * part + 4 * step).cast(), words);
                }
            }
            _mm256_storeu_ps(sum.as_mut_ptr(), total);
        }
    }
    #[inline(always)]
    unsafe fn pair_steps<const PARTS: usize>(
        x: *const f32,
        steps: usize,
        to: *mut u32,
        stride: usize,
        sum: &mut [f32; 8],
    ) {
        // SAFETY: the contract of `RowLanes`.
        unsafe {
            let mut total = _mm256_loadu_ps(sum.as_ptr());
            for step in 0..steps {
                let values = _mm256_loadu_ps(x.add(8 * step));
                total = _mm256_add_ps(total, values);
                let (parts, to) = (parts_in_pairs::<PARTS>(values), to.add(step * stride));
                if PARTS == 1 {
                    _mm_storeu_si128(to.cast(), parts[0]);
                } else {
                    _mm_storeu_si128(to.cast(), _mm_unpacklo_epi32(parts[0], parts[1]));
                    _mm_storeu_si128(to.add(4).cast(), _mm_unpackhi_epi32(parts[0], parts[1]));
                }
            }
            _mm256_storeu_ps(sum.as_mut_ptr(), total);
        }
    }
}

/// Splits eight values into bf16 parts, see [`split`](crate::activation::split); the words of a part are its pairs.
///
/// # Safety
/// The processor must have AVX-512 F, BW and VL.
#[inline(always)]
unsafe fn parts_in_pairs<const PARTS: usize>(values: __m256) -> [__m128i; PARTS] {
    // SAFETY: the caller guarantees that the processor has these instructions.
    unsafe {
        let one = |word: i32| _mm256_set1_epi32(word);
        let magnitude = |bits| _mm256_and_si256(bits, one(0x7fff_ffff));
        // 16-bit words in the order of `PAIRS`.
        let pairs = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
        let infinity = one(0x7f80_0000);
        let infinite = _mm256_cmpeq_epi32_mask(magnitude(_mm256_castps_si256(values)), infinity);
        let (mut left, mut parts) = (values, [_mm_setzero_si128(); PARTS]);
        for (p, part) in parts.iter_mut().enumerate() {
            let bits = _mm256_castps_si256(left);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), one(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, one(0x7fff)));
            let rounded = _mm256_and_si256(rounded, one(-0x1_0000));
            let nan = _mm256_cmp_ps_mask::<_CMP_UNORD_Q>(left, left);
            let mut rounded = _mm256_mask_mov_epi32(rounded, nan, one(0x7fc0_0000));
            if p == 0 {
                let beyond = _mm256_cmpeq_epi32_mask(magnitude(rounded), infinity) & !infinite;
                rounded = _mm256_mask_and_epi32(rounded, beyond, bits, one(-0x1_0000));
            } else {
                rounded = _mm256_maskz_mov_epi32(!infinite, rounded);
            }
            left = _mm256_sub_ps(left, _mm256_castsi256_ps(rounded));
            let words = _mm256_cvtepi32_epi16(_mm256_srli_epi32::<16>(rounded));
            *part = _mm_shuffle_epi8(words, pairs);
        }
        parts
    }
}
