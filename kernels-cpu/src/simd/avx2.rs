//! Lanes in two registers of 256 bits, multiplied by `vpmaddubsw`, or by `vpdpbusd` if the processor has it for such
//! registers (AVX-VNNI).
//!
//! `vpmaddubsw` adds two products in 16 bits and saturates. For codes below 64, the sum of two products is at most
//! `2 · 63 · 128 = 16128`, so two such sums can be added. 8-bit codes would saturate, so they are split into halves of 4
//! bits: the sums of the high halves are multiplied by sixteen when they are widened.

use core::arch::x86_64::*;

use super::{E2M1_DOUBLED, E4M3_BIAS, E4M3_BITS, E4M3_SMALLEST_NORMAL, FloatLanes, Lanes, codes, iq4_bytes};
use crate::FloatFormat;
use crate::float_format::IQ4_LEVELS;
use crate::layout::{STEP, dense_place};

#[derive(Clone, Copy)]
pub(crate) struct Avx2;

#[derive(Clone, Copy)]
pub(crate) struct AvxVnni;

/// Sixteen 4-bit halves of eight bytes, the low half of each first.
#[inline(always)]
pub(super) unsafe fn halves(at: *const u8) -> __m128i {
    // SAFETY: the caller guarantees that the pointer is valid for 8 bytes; every x86-64 processor has SSE2.
    unsafe {
        let (both, low) = (_mm_loadl_epi64(at.cast()), _mm_set1_epi8(0x0f));
        let high = _mm_and_si128(_mm_srli_epi16::<4>(both), low);
        _mm_unpacklo_epi8(_mm_and_si128(both, low), high)
    }
}

#[inline(always)]
unsafe fn load(at: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller guarantees that the pointer is valid for 64 bytes.
    unsafe { [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(32).cast())] }
}

/// `sum + Σ codes · a` over four bytes per lane, for codes below 64.
#[inline(always)]
unsafe fn dot_small(sum: __m256i, codes: [__m256i; 2], a: [__m256i; 2]) -> __m256i {
    // SAFETY: the caller guarantees that the processor has AVX2.
    unsafe {
        let pairs =
            _mm256_add_epi16(_mm256_maddubs_epi16(codes[0], a[0]), _mm256_maddubs_epi16(codes[1], a[1]));
        _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    }
}

/// `sum + Σ codes · a` over four bytes per lane, for 8-bit codes.
#[inline(always)]
unsafe fn dot_halves(sum: __m256i, codes: [__m256i; 2], a: [__m256i; 2]) -> __m256i {
    // SAFETY: the caller guarantees that the processor has AVX2.
    unsafe {
        let mask = _mm256_set1_epi8(0x0f);
        let low = codes.map(|c| _mm256_and_si256(c, mask));
        let high = codes.map(|c| _mm256_and_si256(_mm256_srli_epi16::<4>(c), mask));
        let pairs =
            _mm256_add_epi16(_mm256_maddubs_epi16(high[0], a[0]), _mm256_maddubs_epi16(high[1], a[1]));
        let sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(16)));
        dot_small(sum, low, a)
    }
}

#[inline(always)]
unsafe fn dot_vnni(sum: __m256i, codes: [__m256i; 2], a: [__m256i; 2]) -> __m256i {
    // SAFETY: the caller guarantees that the processor has AVX-VNNI.
    unsafe { _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(sum, codes[0], a[0]), codes[1], a[1]) }
}

macro_rules! lanes {
    ($name:ident, $dot4:ident, $dot8:ident) => {
        // SAFETY of every block below: by the contract of `Lanes`, the caller guarantees that the processor has the
        // instruction set, and that pointers are valid for the bytes that are loaded and stored.
        impl Lanes for $name {
            type I = [__m256i; 2];
            type F = [__m256; 2];
            type B = [__m256i; 2];
            type A = __m256i;

            #[inline(always)]
            unsafe fn splat(value: i32) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                unsafe { [_mm256_set1_epi32(value); 2] }
            }
            #[inline(always)]
            unsafe fn add(a: Self::I, b: Self::I) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                unsafe { [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])] }
            }
            #[inline(always)]
            unsafe fn sub(a: Self::I, b: Self::I) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                unsafe { [_mm256_sub_epi32(a[0], b[0]), _mm256_sub_epi32(a[1], b[1])] }
            }
            #[inline(always)]
            unsafe fn mul(a: Self::I, b: Self::I) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                unsafe { [_mm256_mullo_epi32(a[0], b[0]), _mm256_mullo_epi32(a[1], b[1])] }
            }
            #[inline(always)]
            unsafe fn load_i32(at: *const u8) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                unsafe { load(at) }
            }
            #[inline(always)]
            unsafe fn load_u8(at: *const u8) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let bytes = _mm_loadu_si128(at.cast());
                    [_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(bytes))]
                }
            }
            #[inline(always)]
            unsafe fn load_i8(at: *const u8) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let bytes = _mm_loadu_si128(at.cast());
                    [_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(bytes))]
                }
            }
            #[inline(always)]
            unsafe fn load_u4(at: *const u8) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let bytes = halves(at);
                    [_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(bytes))]
                }
            }
            #[inline(always)]
            unsafe fn zero() -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe { [_mm256_setzero_ps(); 2] }
            }
            #[inline(always)]
            unsafe fn splat_f32(value: f32) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe { [_mm256_set1_ps(value); 2] }
            }
            #[inline(always)]
            unsafe fn to_f32(a: Self::I) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe { [_mm256_cvtepi32_ps(a[0]), _mm256_cvtepi32_ps(a[1])] }
            }
            #[inline(always)]
            unsafe fn as_f32(a: Self::I) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe { [_mm256_castsi256_ps(a[0]), _mm256_castsi256_ps(a[1])] }
            }
            #[inline(always)]
            unsafe fn as_i32(a: Self::F) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                unsafe { [_mm256_castps_si256(a[0]), _mm256_castps_si256(a[1])] }
            }
            #[inline(always)]
            unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
            }
            #[inline(always)]
            unsafe fn mul_f32(a: Self::F, b: Self::F) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
            }
            #[inline(always)]
            unsafe fn max_f32(a: Self::F, b: Self::F) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
            }
            #[inline(always)]
            unsafe fn load_f32(at: *const u8) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe { [_mm256_loadu_ps(at.cast()), _mm256_loadu_ps(at.add(32).cast())] }
            }
            #[inline(always)]
            unsafe fn load_bf16(at: *const u8) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let widen = |at: *const u8| {
                        let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
                        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
                    };
                    [widen(at), widen(at.add(16))]
                }
            }
            #[inline(always)]
            unsafe fn load_f16(at: *const u8) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let widen = |at: *const u8| _mm256_cvtph_ps(_mm_loadu_si128(at.cast()));
                    [widen(at), widen(at.add(16))]
                }
            }
            #[inline(always)]
            unsafe fn load_e8m0(at: *const u8) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let smallest = _mm256_set1_epi32(1 << 22);
                    Self::load_u8(at).map(|codes| {
                        // The smallest value is subnormal.
                        _mm256_castsi256_ps(_mm256_max_epu32(_mm256_slli_epi32::<23>(codes), smallest))
                    })
                }
            }
            #[inline(always)]
            unsafe fn load_e4m3(at: *const u8) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let words = _mm256_slli_epi16::<7>(_mm256_cvtepu8_epi16(_mm_loadu_si128(at.cast())));
                    [_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words)]
                        .map(|halves| _mm256_cvtph_ps(halves))
                }
            }
            #[inline(always)]
            unsafe fn e2m1_table() -> Self::I {
                let values = FloatFormat::e2m1_values();
                // SAFETY: the contract of `Lanes`; the table is the sixteen floats that are loaded.
                unsafe { load(values.as_ptr().cast()) }
            }
            #[inline(always)]
            unsafe fn e2m1(codes: Self::I, table: Self::I) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let (values, sign) = (_mm256_castsi256_ps(table[0]), _mm256_set1_ps(-0.0));
                    codes.map(|codes| {
                        // The permutation uses three bits of each code; the fourth is the sign.
                        let magnitude = _mm256_permutevar8x32_ps(values, codes);
                        let signs = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes));
                        _mm256_or_ps(magnitude, _mm256_and_ps(signs, sign))
                    })
                }
            }
            #[inline(always)]
            unsafe fn iq4_table() -> Self::I {
                // SAFETY: the contract of `Lanes`; the table is the 16 bytes that are loaded.
                unsafe { [_mm256_broadcastsi128_si256(_mm_loadu_si128(IQ4_LEVELS.as_ptr().cast())); 2] }
            }
            #[inline(always)]
            unsafe fn iq4(codes: Self::I, table: Self::I) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    codes.map(|codes| {
                        // The lowest byte of a lane is the code; its value is widened with its sign.
                        let values = _mm256_slli_epi32::<24>(_mm256_shuffle_epi8(table[0], codes));
                        _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(values))
                    })
                }
            }
            #[inline(always)]
            unsafe fn e4m3(codes: Self::I) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let (mask, bias) = (_mm256_set1_epi32(E4M3_BITS), _mm256_set1_epi32(E4M3_BIAS));
                    let [two, smallest] = [2.0, -E4M3_SMALLEST_NORMAL].map(|v| _mm256_set1_ps(v));
                    codes.map(|codes| {
                        let bits = _mm256_and_si256(_mm256_slli_epi32::<20>(codes), mask);
                        let normal = _mm256_castsi256_ps(_mm256_add_epi32(bits, bias));
                        let value = _mm256_min_ps(normal, _mm256_fmadd_ps(normal, two, smallest));
                        let signs = _mm256_castsi256_ps(_mm256_slli_epi32::<24>(codes));
                        _mm256_or_ps(value, _mm256_and_ps(signs, _mm256_set1_ps(-0.0)))
                    })
                }
            }
            #[inline(always)]
            unsafe fn store_f32(at: *mut f32, a: Self::F) {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    _mm256_storeu_ps(at, a[0]);
                    _mm256_storeu_ps(at.add(8), a[1]);
                }
            }
            #[inline(always)]
            unsafe fn codes4(at: *const u8) -> [Self::B; 2] {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let (both, low) = (load(at), _mm256_set1_epi8(0x0f));
                    [
                        both.map(|b| _mm256_and_si256(b, low)),
                        both.map(|b| _mm256_and_si256(_mm256_srli_epi16::<4>(b), low)),
                    ]
                }
            }
            #[inline(always)]
            unsafe fn codes_e2m1(at: *const u8) -> [Self::B; 2] {
                // SAFETY: the contract of `Lanes`; the table is the 16 bytes that are loaded.
                unsafe {
                    let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(E2M1_DOUBLED.as_ptr().cast()));
                    Self::codes4(at).map(|half| half.map(|codes| _mm256_shuffle_epi8(table, codes)))
                }
            }
            #[inline(always)]
            unsafe fn codes_iq4(at: *const u8) -> [Self::B; 2] {
                let bytes = const { iq4_bytes(<Self as Lanes>::OFFSET) };
                // SAFETY: the contract of `Lanes`; the table is the 16 bytes that are loaded.
                unsafe {
                    let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.as_ptr().cast()));
                    Self::codes4(at).map(|half| half.map(|codes| _mm256_shuffle_epi8(table, codes)))
                }
            }
            #[inline(always)]
            unsafe fn codes_in_unit<const CODES: usize>(at: *const u8, step: usize) -> [Self::B; 2] {
                let (unit, width) = (codes::unit(CODES), codes::bits(CODES) - 4);
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let (mut both, high) = (Self::codes4(at.add(64 * step)), load(at.add(64 * unit)));
                    let mask = _mm256_set1_epi8((((1 << width) - 1) << 4) as i8);
                    // Not closures: those that are called twice might not be inlined, and would lack the instructions.
                    for (half, codes) in both.iter_mut().enumerate() {
                        for (codes, high) in codes.iter_mut().zip(high) {
                            let high = match (2 * step + half) * width {
                                shift @ 0..4 => _mm256_sll_epi16(high, _mm_cvtsi32_si128(4 - shift as i32)),
                                4 => high,
                                shift => _mm256_srl_epi16(high, _mm_cvtsi32_si128(shift as i32 - 4)),
                            };
                            *codes = _mm256_or_si256(*codes, _mm256_and_si256(high, mask));
                        }
                    }
                    both
                }
            }
            #[inline(always)]
            unsafe fn codes8(at: *const u8) -> [Self::B; 2] {
                // SAFETY: the contract of `Lanes`.
                unsafe { [load(at), load(at.add(64))] }
            }
            #[inline(always)]
            unsafe fn activations(at: *const i8) -> [__m256i; 2] {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let at = at.cast::<i32>();
                    let (low, high) = (at.read_unaligned(), at.add(1).read_unaligned());
                    [_mm256_set1_epi32(low), _mm256_set1_epi32(high)]
                }
            }
            #[inline(always)]
            unsafe fn dot4(sum: Self::I, codes: [Self::B; 2], a: [__m256i; 2]) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    [
                        $dot4(sum[0], [codes[0][0], codes[1][0]], a),
                        $dot4(sum[1], [codes[0][1], codes[1][1]], a),
                    ]
                }
            }
            #[inline(always)]
            unsafe fn dot8(sum: Self::I, codes: [Self::B; 2], a: [__m256i; 2]) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    [
                        $dot8(sum[0], [codes[0][0], codes[1][0]], a),
                        $dot8(sum[1], [codes[0][1], codes[1][1]], a),
                    ]
                }
            }
            #[inline(always)]
            unsafe fn code<const BITS: usize>(at: *const u8, part: usize) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    if codes::unit(BITS) > 1 {
                        let (step, part) = (part / STEP, part % STEP);
                        let shift = _mm_cvtsi32_si128(8 * (part % 4) as i32);
                        let words = Self::codes_in_unit::<BITS>(at, step)[part / 4];
                        let mask = _mm256_set1_epi32(0xff);
                        return words.map(|w| _mm256_and_si256(_mm256_srl_epi32(w, shift), mask));
                    }
                    let (words, shift, mask) = match BITS {
                        4 => (load(at), 8 * (part % 4) + 4 * (part / 4), 0x0f),
                        _ => (load(at.add(64 * (part / 4))), 8 * (part % 4), 0xff),
                    };
                    let (shift, mask) = (_mm_cvtsi32_si128(shift as i32), _mm256_set1_epi32(mask));
                    words.map(|w| _mm256_and_si256(_mm256_srl_epi32(w, shift), mask))
                }
            }
            #[inline(always)]
            unsafe fn dense(at: *const u8, feature: usize) -> Self::F {
                let (pair, high) = dense_place(feature);
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    load(at.add(64 * pair)).map(|words| {
                        _mm256_castsi256_ps(match high {
                            true => _mm256_and_si256(words, _mm256_set1_epi32(-0x1_0000)),
                            false => _mm256_slli_epi32::<16>(words),
                        })
                    })
                }
            }
            #[inline(always)]
            unsafe fn prefetch(at: *const u8) {
                // SAFETY: the caller guarantees that the processor has the instruction set; a prefetch address need not
                // be valid.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
            }
            #[inline(always)]
            unsafe fn prefetch_write(at: *const u8) {
                // SAFETY: the caller guarantees that the processor has the instruction set; a prefetch address need not
                // be valid.
                unsafe { _mm_prefetch::<_MM_HINT_ET0>(at.cast()) }
            }
        }

        super::one_by_one!($name);
    };
}

lanes!(Avx2, dot_small, dot_halves);
lanes!(AvxVnni, dot_vnni, dot_vnni);
