//! Lanes in one 512-bit register. Integers are multiplied with `vpdpbusd`.

use core::arch::x86_64::*;

use super::{
    E2M1_DOUBLED, E4M3_BIAS, E4M3_BITS, E4M3_SMALLEST_NORMAL, FloatLanes, IQ4_FLOATS, Lanes, ValueLanes,
    codes, iq4_bytes,
};
use crate::FloatFormat;
use crate::layout::{STEP, dense_place};

#[derive(Clone, Copy)]
pub(crate) struct Avx512Vnni;

#[derive(Clone, Copy)]
pub(crate) struct Avx512Bf16;

macro_rules! lanes {
    ($name:ident) => {
        // SAFETY of every block below: by the contract of `Lanes`, the caller guarantees that the processor has the
        // instruction set, and that pointers are valid for the bytes that are loaded and stored.
        impl Lanes for $name {
            type I = __m512i;
            type F = __m512;
            type B = __m512i;
            type A = __m512i;

            #[inline(always)]
            unsafe fn splat(value: i32) -> __m512i {
                // SAFETY: the contract of `Lanes`.
                unsafe { _mm512_set1_epi32(value) }
            }
            #[inline(always)]
            unsafe fn add(a: __m512i, b: __m512i) -> __m512i {
                // SAFETY: the contract of `Lanes`.
                unsafe { _mm512_add_epi32(a, b) }
            }
            #[inline(always)]
            unsafe fn sub(a: __m512i, b: __m512i) -> __m512i {
                // SAFETY: the contract of `Lanes`.
                unsafe { _mm512_sub_epi32(a, b) }
            }
            #[inline(always)]
            unsafe fn mul(a: __m512i, b: __m512i) -> __m512i {
                // SAFETY: the contract of `Lanes`.
                unsafe { _mm512_mullo_epi32(a, b) }
            }
            #[inline(always)]
            unsafe fn load_i32(at: *const u8) -> __m512i {
                // SAFETY: the caller guarantees that the pointer is valid for 64 bytes.
                unsafe { _mm512_loadu_si512(at.cast()) }
            }
            #[inline(always)]
            unsafe fn load_u8(at: *const u8) -> __m512i {
                // SAFETY: the caller guarantees that the pointer is valid for 16 bytes.
                unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast())) }
            }
            #[inline(always)]
            unsafe fn load_i8(at: *const u8) -> __m512i {
                // SAFETY: the caller guarantees that the pointer is valid for 16 bytes.
                unsafe { _mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast())) }
            }
            #[inline(always)]
            unsafe fn load_u4(at: *const u8) -> __m512i {
                // SAFETY: the caller guarantees that the pointer is valid for 8 bytes.
                unsafe { _mm512_cvtepu8_epi32(super::avx2::halves(at)) }
            }
            #[inline(always)]
            unsafe fn zero() -> __m512 {
                // SAFETY: the contract of `Lanes`.
                unsafe { _mm512_setzero_ps() }
            }
            #[inline(always)]
            unsafe fn splat_f32(value: f32) -> __m512 {
                // SAFETY: the contract of `Lanes`.
                unsafe { _mm512_set1_ps(value) }
            }
            #[inline(always)]
            unsafe fn to_f32(a: __m512i) -> __m512 {
                // SAFETY: the contract of `Lanes`.
                unsafe { _mm512_cvtepi32_ps(a) }
            }
            #[inline(always)]
            unsafe fn as_f32(a: __m512i) -> __m512 {
                // SAFETY: the contract of `Lanes`.
                unsafe { _mm512_castsi512_ps(a) }
            }
            #[inline(always)]
            unsafe fn as_i32(a: __m512) -> __m512i {
                // SAFETY: the contract of `Lanes`.
                unsafe { _mm512_castps_si512(a) }
            }
            #[inline(always)]
            unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
                // SAFETY: the contract of `Lanes`.
                unsafe { _mm512_fmadd_ps(a, b, c) }
            }
            #[inline(always)]
            unsafe fn mul_f32(a: __m512, b: __m512) -> __m512 {
                // SAFETY: the contract of `Lanes`.
                unsafe { _mm512_mul_ps(a, b) }
            }
            #[inline(always)]
            unsafe fn max_f32(a: __m512, b: __m512) -> __m512 {
                // SAFETY: the contract of `Lanes`.
                unsafe { _mm512_max_ps(a, b) }
            }
            #[inline(always)]
            unsafe fn load_f32(at: *const u8) -> __m512 {
                // SAFETY: the caller guarantees that the pointer is valid for 64 bytes.
                unsafe { _mm512_loadu_ps(at.cast()) }
            }
            #[inline(always)]
            unsafe fn load_bf16(at: *const u8) -> __m512 {
                // SAFETY: the caller guarantees that the pointer is valid for 32 bytes.
                unsafe {
                    let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
                }
            }
            #[inline(always)]
            unsafe fn load_f16(at: *const u8) -> __m512 {
                // SAFETY: the caller guarantees that the pointer is valid for 32 bytes.
                unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
            }
            #[inline(always)]
            unsafe fn load_e8m0(at: *const u8) -> __m512 {
                // SAFETY: the caller guarantees that the pointer is valid for 16 bytes.
                unsafe {
                    let exponents = _mm512_slli_epi32::<23>(Self::load_u8(at));
                    // The smallest value is subnormal.
                    _mm512_castsi512_ps(_mm512_max_epu32(exponents, _mm512_set1_epi32(1 << 22)))
                }
            }
            #[inline(always)]
            unsafe fn load_e4m3(at: *const u8) -> __m512 {
                // SAFETY: the caller guarantees that the pointer is valid for 16 bytes.
                unsafe {
                    let words = _mm256_cvtepu8_epi16(_mm_loadu_si128(at.cast()));
                    _mm512_cvtph_ps(_mm256_slli_epi16::<7>(words))
                }
            }
            #[inline(always)]
            unsafe fn e2m1_table() -> __m512i {
                let values = FloatFormat::e2m1_values();
                // SAFETY: the contract of `Lanes`; the table is the sixteen floats that are loaded.
                unsafe { _mm512_loadu_si512(values.as_ptr().cast()) }
            }
            #[inline(always)]
            unsafe fn e2m1(codes: __m512i, table: __m512i) -> __m512 {
                // SAFETY: the contract of `Lanes`.
                unsafe { _mm512_permutexvar_ps(codes, _mm512_castsi512_ps(table)) }
            }
            #[inline(always)]
            unsafe fn iq4_table() -> __m512i {
                // SAFETY: the contract of `Lanes`; the table is the sixteen floats that are loaded.
                unsafe { _mm512_loadu_si512(IQ4_FLOATS.as_ptr().cast()) }
            }
            #[inline(always)]
            unsafe fn iq4(codes: __m512i, table: __m512i) -> __m512 {
                // SAFETY: the contract of `Lanes`.
                unsafe { _mm512_permutexvar_ps(codes, _mm512_castsi512_ps(table)) }
            }
            #[inline(always)]
            unsafe fn e4m3(codes: __m512i) -> __m512 {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let bits = _mm512_and_si512(_mm512_slli_epi32::<20>(codes), _mm512_set1_epi32(E4M3_BITS));
                    let normal = _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(E4M3_BIAS)));
                    let [two, smallest] = [2.0, -E4M3_SMALLEST_NORMAL].map(|v| _mm512_set1_ps(v));
                    let value = _mm512_min_ps(normal, _mm512_fmadd_ps(normal, two, smallest));
                    let sign = _mm512_slli_epi32::<24>(codes);
                    // The sign bit from the sign, all other bits from the value.
                    let mask = _mm512_set1_epi32(i32::MIN);
                    let signed = _mm512_ternarylogic_epi32::<0xd8>(_mm512_castps_si512(value), sign, mask);
                    _mm512_castsi512_ps(signed)
                }
            }
            #[inline(always)]
            unsafe fn store_f32(at: *mut f32, a: __m512) {
                // SAFETY: the caller guarantees that the pointer is valid for 16 values.
                unsafe { _mm512_storeu_ps(at, a) }
            }
            #[inline(always)]
            unsafe fn codes4(at: *const u8) -> [__m512i; 2] {
                // SAFETY: the caller guarantees that the pointer is valid for 64 bytes.
                unsafe {
                    let (both, low) = (_mm512_loadu_si512(at.cast()), _mm512_set1_epi8(0x0f));
                    [_mm512_and_si512(both, low), _mm512_and_si512(_mm512_srli_epi16::<4>(both), low)]
                }
            }
            #[inline(always)]
            unsafe fn codes_e2m1(at: *const u8) -> [__m512i; 2] {
                // SAFETY: the caller guarantees that the pointer is valid for 64 bytes; the table is the 16 bytes that
                // are loaded.
                unsafe {
                    let table = _mm512_broadcast_i32x4(_mm_loadu_si128(E2M1_DOUBLED.as_ptr().cast()));
                    Self::codes4(at).map(|codes| _mm512_shuffle_epi8(table, codes))
                }
            }
            #[inline(always)]
            unsafe fn codes_iq4(at: *const u8) -> [__m512i; 2] {
                let bytes = const { iq4_bytes(<Self as Lanes>::OFFSET) };
                // SAFETY: the caller guarantees that the pointer is valid for 64 bytes; the table is the 16 bytes that
                // are loaded.
                unsafe {
                    let table = _mm512_broadcast_i32x4(_mm_loadu_si128(bytes.as_ptr().cast()));
                    Self::codes4(at).map(|codes| _mm512_shuffle_epi8(table, codes))
                }
            }
            #[inline(always)]
            unsafe fn codes_in_unit<const CODES: usize>(at: *const u8, step: usize) -> [__m512i; 2] {
                let (unit, width) = (codes::unit(CODES), codes::bits(CODES) - 4);
                // SAFETY: the caller guarantees that the pointer is valid for the lines of the unit.
                unsafe {
                    let low = Self::codes4(at.add(64 * step));
                    let high = _mm512_loadu_si512(at.add(64 * unit).cast());
                    let mask = _mm512_set1_epi8((((1 << width) - 1) << 4) as i8);
                    // Not a closure: one that is called twice might not be inlined, and would lack the instructions.
                    let mut both = low;
                    for (half, codes) in both.iter_mut().enumerate() {
                        let high = match (2 * step + half) * width {
                            shift @ 0..4 => _mm512_sll_epi16(high, _mm_cvtsi32_si128(4 - shift as i32)),
                            4 => high,
                            shift => _mm512_srl_epi16(high, _mm_cvtsi32_si128(shift as i32 - 4)),
                        };
                        // codes | high & mask
                        *codes = _mm512_ternarylogic_epi32::<0xf8>(*codes, high, mask);
                    }
                    both
                }
            }
            #[inline(always)]
            unsafe fn codes8(at: *const u8) -> [__m512i; 2] {
                // SAFETY: the caller guarantees that the pointer is valid for 128 bytes.
                unsafe { [_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(64).cast())] }
            }
            #[inline(always)]
            unsafe fn activations(at: *const i8) -> [__m512i; 2] {
                // SAFETY: the caller guarantees that the pointer is valid for 8 values.
                unsafe {
                    // Two loads: a single one would be split in general registers, and not broadcast on loading.
                    let at = at.cast::<i32>();
                    let (low, high) = (at.read_unaligned(), at.add(1).read_unaligned());
                    [_mm512_set1_epi32(low), _mm512_set1_epi32(high)]
                }
            }
            #[inline(always)]
            unsafe fn dot4(sum: __m512i, codes: [__m512i; 2], a: [__m512i; 2]) -> __m512i {
                // SAFETY: the contract of `Lanes`.
                unsafe { _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum, codes[0], a[0]), codes[1], a[1]) }
            }
            #[inline(always)]
            unsafe fn dot8(sum: __m512i, codes: [__m512i; 2], a: [__m512i; 2]) -> __m512i {
                // SAFETY: the contract of `Lanes`.
                unsafe { Self::dot4(sum, codes, a) }
            }
            #[inline(always)]
            unsafe fn code<const BITS: usize>(at: *const u8, part: usize) -> __m512i {
                // SAFETY: the caller guarantees that the processor has AVX-512, and that the pointer is valid for the
                // bytes of the step.
                unsafe {
                    if codes::unit(BITS) > 1 {
                        let (step, part) = (part / STEP, part % STEP);
                        let codes = Self::codes_in_unit::<BITS>(at, step)[part / 4];
                        let words = _mm512_srl_epi32(codes, _mm_cvtsi32_si128(8 * (part % 4) as i32));
                        return _mm512_and_si512(words, _mm512_set1_epi32(0xff));
                    }
                    let (words, shift, mask) = match BITS {
                        4 => (_mm512_loadu_si512(at.cast()), 8 * (part % 4) + 4 * (part / 4), 0x0f),
                        _ => (_mm512_loadu_si512(at.add(64 * (part / 4)).cast()), 8 * (part % 4), 0xff),
                    };
                    let words = _mm512_srl_epi32(words, _mm_cvtsi32_si128(shift as i32));
                    _mm512_and_si512(words, _mm512_set1_epi32(mask))
                }
            }
            #[inline(always)]
            unsafe fn dense(at: *const u8, feature: usize) -> __m512 {
                let (pair, high) = dense_place(feature);
                // SAFETY: the caller guarantees that the pointer is valid for the 256 bytes of the step.
                unsafe {
                    let words = _mm512_loadu_si512(at.add(64 * pair).cast());
                    _mm512_castsi512_ps(match high {
                        true => _mm512_and_si512(words, _mm512_set1_epi32(-0x1_0000)),
                        false => _mm512_slli_epi32::<16>(words),
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
    };
}

lanes!(Avx512Vnni);
lanes!(Avx512Bf16);

super::one_by_one!(Avx512Vnni, wide: true);

/// Pairs of bf16. The words of a step hold, at shifts of 0, 4, 8 and 12, the codes of features (0, 2), (4, 6), (1, 3)
/// and (5, 7); activations are stored in these pairs, each rounded to bf16 and followed by its remainder, if any.
impl FloatLanes for Avx512Bf16 {
    const PARTS: usize = 4;
    const ORDERED: bool = false;
    /// First the values of 16 codes as bf16, twice: for 4-bit codes all values; for E4M3 those of the smallest codes,
    /// of which the subnormal ones are used. Then the centre, for wider integer codes.
    type Table = (__m512i, __m512i);
    type W = __m512bh;

    #[inline(always)]
    unsafe fn centre(centre: i32) -> Self::Table {
        let mut words = [0_u16; 32];
        for (i, word) in words.iter_mut().enumerate() {
            // Integers of eight bits are exact in bf16.
            *word = (((i % 16) as i32 - centre) as f32).to_bits().wrapping_shr(16) as u16;
        }
        // SAFETY: the array has as many words as the register; the caller guarantees that the processor has the
        // instruction set.
        unsafe { (_mm512_loadu_si512(words.as_ptr().cast()), _mm512_set1_epi32(centre)) }
    }
    #[inline(always)]
    unsafe fn values<const CODES: usize>() -> Self::Table {
        let format = match CODES {
            codes::E2M1 => FloatFormat::E2m1,
            codes::IQ4 => FloatFormat::Iq4,
            _ => FloatFormat::E4m3,
        };
        let mut words = [0_u16; 32];
        for (i, word) in words.iter_mut().enumerate() {
            // All values are exact in bf16.
            *word = format.value(i as u8 % 16).to_bits().wrapping_shr(16) as u16;
        }
        // SAFETY: the array has as many words as the register; the caller guarantees that the processor has the
        // instruction set.
        unsafe { (_mm512_loadu_si512(words.as_ptr().cast()), _mm512_setzero_si512()) }
    }
    #[inline(always)]
    unsafe fn weights<const CODES: usize>(at: *const u8, part: usize, table: Self::Table) -> __m512bh {
        // SAFETY: the caller guarantees that the pointer is valid for the bytes of the step, and that the processor has
        // the instruction set.
        unsafe {
            if CODES == codes::BF16 {
                return bf16(_mm512_loadu_si512(at.add(64 * part).cast()));
            }
            if CODES == codes::E4M3 {
                let words = _mm512_loadu_si512(at.add(64 * (part % 2)).cast());
                // Words of two features each: first use the low byte, then the high one.
                let words = if part < 2 { words } else { _mm512_srli_epi16::<8>(words) };
                let bits = _mm512_and_si512(_mm512_slli_epi16::<4>(words), _mm512_set1_epi16(0x07f0));
                let value = _mm512_add_epi16(bits, _mm512_set1_epi16(120 << 7));
                let subnormal = _mm512_cmplt_epu16_mask(bits, _mm512_set1_epi16(0x0080));
                // The permutation uses five bits, of which only three can be set in a subnormal code.
                let value = _mm512_mask_permutexvar_epi16(value, subnormal, words, table.0);
                let (sign, mask) = (_mm512_slli_epi16::<8>(words), _mm512_set1_epi16(i16::MIN));
                return bf16(_mm512_ternarylogic_epi32::<0xd8>(value, sign, mask));
            }
            if codes::bits(CODES) == 4 {
                let words = _mm512_loadu_si512(at.cast());
                let codes = match part {
                    0 => words,
                    1 => _mm512_srli_epi16::<4>(words),
                    2 => _mm512_srli_epi16::<8>(words),
                    _ => _mm512_srli_epi16::<12>(words),
                };
                // The permutation uses a fifth bit, which belongs to another code; so the table holds all values twice.
                return bf16(_mm512_permutexvar_epi16(codes, table.0));
            }
            // With units of steps, parts count through all of their steps.
            let (step, part) = (part / Self::PARTS, part % Self::PARTS);
            let first = STEP * step + 4 * (part % 2) + part / 2;
            // Not a closure: one that is called twice might not be inlined, and would lack the instructions.
            let mut pair = [Self::code::<CODES>(at, first), Self::code::<CODES>(at, first + 2)];
            for code in &mut pair {
                *code = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_sub_epi32(*code, table.1)));
            }
            let [even, odd] = pair;
            bf16(_mm512_or_si512(_mm512_srli_epi32::<16>(even), odd))
        }
    }
    #[inline(always)]
    unsafe fn dot_float<const REST: bool>(sum: __m512, w: __m512bh, x: *const u8, part: usize) -> __m512 {
        // SAFETY: the caller guarantees that the pointer is valid for the 32 bytes of the step, and that the processor
        // has the instruction set.
        unsafe {
            let pair = |at: *const u8| bf16(_mm512_set1_epi32(at.cast::<i32>().read_unaligned()));
            if !REST {
                return _mm512_dpbf16_ps(sum, w, pair(x.add(4 * part)));
            }
            let x = x.add(8 * part);
            _mm512_dpbf16_ps(_mm512_dpbf16_ps(sum, w, pair(x)), w, pair(x.add(4)))
        }
    }
}

/// Probabilities are rounded once, half to even, and stored in the pairs of a step's parts.
impl ValueLanes for Avx512Bf16 {
    const WIDE: bool = true;
    const STEP_BYTES: usize = 16;

    #[inline(always)]
    unsafe fn store_probabilities(at: *mut u8, p: __m512) {
        // SAFETY: the caller guarantees that the pointer is valid for 32 bytes, and that the processor has the
        // instruction set.
        unsafe {
            let order = _mm256_setr_epi16(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
            let rounded = core::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(p));
            _mm256_storeu_si256(at.cast(), _mm256_permutexvar_epi16(order, rounded));
        }
    }
    #[inline(always)]
    unsafe fn dot_probabilities(sum: __m512, w: __m512bh, p: *const u8, part: usize) -> __m512 {
        // SAFETY: the caller guarantees that the pointer is valid for the 16 bytes of the step, and that the processor
        // has the instruction set.
        unsafe {
            let pair = p.add(4 * part).cast::<i32>().read_unaligned();
            _mm512_dpbf16_ps(sum, w, bf16(_mm512_set1_epi32(pair)))
        }
    }
}

#[inline(always)]
fn bf16(register: __m512i) -> __m512bh {
    // SAFETY: both types are the same 512 bits, and every bit pattern is valid for either.
    unsafe { core::mem::transmute::<__m512i, __m512bh>(register) }
}
