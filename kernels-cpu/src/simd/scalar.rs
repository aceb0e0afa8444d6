//! The portable lanes, which every other implementation must match.

use core::array::from_fn;

use half::{bf16, f16};

use super::{E2M1_DOUBLED, FloatLanes, IQ4_FLOATS, Lanes, codes, iq4_bytes};
use crate::FloatFormat;
use crate::float_format::{e4m3_packed, e4m3_scale_packed, e8m0_packed};
use crate::layout::STEP;

/// Plain Rust.
#[derive(Clone, Copy)]
pub(crate) struct Scalar;

unsafe fn bytes<const N: usize>(at: *const u8) -> [u8; N] {
    // SAFETY: the caller guarantees that the pointer is valid for these bytes; byte arrays have an alignment of 1.
    unsafe { at.cast::<[u8; N]>().read() }
}

fn dot(sum: [i32; 16], codes: [[u8; 64]; 2], a: [[i8; 4]; 2]) -> [i32; 16] {
    from_fn(|r| {
        let products = (0..8).map(|i| i32::from(codes[i / 4][4 * r + i % 4]) * i32::from(a[i / 4][i % 4]));
        products.fold(sum[r], i32::wrapping_add)
    })
}

#[allow(unsafe_code, reason = "reads and writes through pointers that the caller guarantees to be valid")]
impl Lanes for Scalar {
    type I = [i32; 16];
    type F = [f32; 16];
    type B = [u8; 64];
    type A = [i8; 4];

    #[inline(always)]
    unsafe fn splat(value: i32) -> Self::I {
        [value; 16]
    }
    #[inline(always)]
    unsafe fn add(a: Self::I, b: Self::I) -> Self::I {
        from_fn(|i| a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    unsafe fn sub(a: Self::I, b: Self::I) -> Self::I {
        from_fn(|i| a[i].wrapping_sub(b[i]))
    }
    #[inline(always)]
    unsafe fn mul(a: Self::I, b: Self::I) -> Self::I {
        from_fn(|i| a[i].wrapping_mul(b[i]))
    }
    #[inline(always)]
    unsafe fn load_i32(at: *const u8) -> Self::I {
        // SAFETY: the caller guarantees that the pointer is valid for 64 bytes.
        from_fn(|i| i32::from_le_bytes(unsafe { bytes(at.add(4 * i)) }))
    }
    #[inline(always)]
    unsafe fn load_u8(at: *const u8) -> Self::I {
        // SAFETY: the caller guarantees that the pointer is valid for 16 bytes.
        unsafe { bytes::<16>(at) }.map(i32::from)
    }
    #[inline(always)]
    unsafe fn load_i8(at: *const u8) -> Self::I {
        // SAFETY: the caller guarantees that the pointer is valid for 16 bytes.
        unsafe { bytes::<16>(at) }.map(|byte| i32::from(byte as i8))
    }
    #[inline(always)]
    unsafe fn load_u4(at: *const u8) -> Self::I {
        // SAFETY: the caller guarantees that the pointer is valid for 8 bytes.
        let halves = unsafe { bytes::<8>(at) };
        from_fn(|i| i32::from(halves[i / 2] >> (4 * (i % 2)) & 0x0f))
    }
    #[inline(always)]
    unsafe fn zero() -> Self::F {
        [0.0; 16]
    }
    #[inline(always)]
    unsafe fn splat_f32(value: f32) -> Self::F {
        [value; 16]
    }
    #[inline(always)]
    unsafe fn to_f32(a: Self::I) -> Self::F {
        a.map(|v| v as f32)
    }
    #[inline(always)]
    unsafe fn as_f32(a: Self::I) -> Self::F {
        a.map(|v| f32::from_bits(v as u32))
    }
    #[inline(always)]
    unsafe fn as_i32(a: Self::F) -> Self::I {
        a.map(|v| v.to_bits() as i32)
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn mul_f32(a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn load_f32(at: *const u8) -> Self::F {
        // SAFETY: the caller guarantees that the pointer is valid for 64 bytes.
        from_fn(|i| f32::from_le_bytes(unsafe { bytes(at.add(4 * i)) }))
    }
    #[inline(always)]
    unsafe fn load_bf16(at: *const u8) -> Self::F {
        // SAFETY: the caller guarantees that the pointer is valid for 32 bytes.
        from_fn(|i| bf16::from_le_bytes(unsafe { bytes(at.add(2 * i)) }).to_f32())
    }
    #[inline(always)]
    unsafe fn load_f16(at: *const u8) -> Self::F {
        // SAFETY: the caller guarantees that the pointer is valid for 32 bytes.
        from_fn(|i| f16::from_le_bytes(unsafe { bytes(at.add(2 * i)) }).to_f32())
    }
    #[inline(always)]
    unsafe fn load_e8m0(at: *const u8) -> Self::F {
        // SAFETY: the caller guarantees that the pointer is valid for 16 bytes.
        unsafe { bytes::<16>(at) }.map(e8m0_packed)
    }
    #[inline(always)]
    unsafe fn load_e4m3(at: *const u8) -> Self::F {
        // SAFETY: the caller guarantees that the pointer is valid for 16 bytes.
        unsafe { bytes::<16>(at) }.map(e4m3_scale_packed)
    }
    #[inline(always)]
    unsafe fn e2m1_table() -> Self::I {
        FloatFormat::e2m1_values().map(|value| value.to_bits() as i32)
    }
    #[inline(always)]
    unsafe fn e2m1(codes: Self::I, table: Self::I) -> Self::F {
        codes.map(|code| f32::from_bits(table[code as usize & 15] as u32))
    }
    #[inline(always)]
    unsafe fn iq4_table() -> Self::I {
        IQ4_FLOATS.map(|value| value.to_bits() as i32)
    }
    #[inline(always)]
    unsafe fn iq4(codes: Self::I, table: Self::I) -> Self::F {
        codes.map(|code| f32::from_bits(table[code as usize & 15] as u32))
    }
    #[inline(always)]
    unsafe fn e4m3(codes: Self::I) -> Self::F {
        codes.map(|code| e4m3_packed(code as u8))
    }
    #[inline(always)]
    unsafe fn store_f32(at: *mut f32, a: Self::F) {
        // SAFETY: the caller guarantees that the pointer is valid for 16 values.
        unsafe { at.cast::<[f32; 16]>().write_unaligned(a) }
    }
    #[inline(always)]
    unsafe fn codes4(at: *const u8) -> [Self::B; 2] {
        // SAFETY: the caller guarantees that the pointer is valid for 64 bytes.
        let both = unsafe { bytes::<64>(at) };
        [both.map(|b| b & 0x0f), both.map(|b| b >> 4)]
    }
    #[inline(always)]
    unsafe fn codes_e2m1(at: *const u8) -> [Self::B; 2] {
        // SAFETY: the caller guarantees that the pointer is valid for 64 bytes.
        unsafe { Self::codes4(at) }.map(|codes| codes.map(|code| E2M1_DOUBLED[usize::from(code)]))
    }
    #[inline(always)]
    unsafe fn codes_iq4(at: *const u8) -> [Self::B; 2] {
        let table = const { iq4_bytes(<Self as Lanes>::OFFSET) };
        // SAFETY: the caller guarantees that the pointer is valid for 64 bytes.
        unsafe { Self::codes4(at) }.map(|codes| codes.map(|code| table[usize::from(code)]))
    }
    #[inline(always)]
    unsafe fn codes_in_unit<const CODES: usize>(at: *const u8, step: usize) -> [Self::B; 2] {
        let (unit, width) = (codes::unit(CODES), codes::bits(CODES) - 4);
        // SAFETY: the caller guarantees that the pointer is valid for the lines of the unit.
        let (low, high) = unsafe { (Self::codes4(at.add(64 * step)), bytes::<64>(at.add(64 * unit))) };
        from_fn(|half| {
            let of = |i: usize| high[i] >> ((2 * step + half) * width) & ((1 << width) - 1);
            from_fn(|i| low[half][i] | of(i) << 4)
        })
    }
    #[inline(always)]
    unsafe fn codes8(at: *const u8) -> [Self::B; 2] {
        // SAFETY: the caller guarantees that the pointer is valid for 128 bytes.
        unsafe { [bytes(at), bytes(at.add(64))] }
    }
    #[inline(always)]
    unsafe fn activations(at: *const i8) -> [Self::A; 2] {
        // SAFETY: the caller guarantees that the pointer is valid for 8 values.
        unsafe { at.cast::<[[i8; 4]; 2]>().read() }
    }
    #[inline(always)]
    unsafe fn dot4(sum: Self::I, codes: [Self::B; 2], a: [Self::A; 2]) -> Self::I {
        dot(sum, codes, a)
    }
    #[inline(always)]
    unsafe fn dot8(sum: Self::I, codes: [Self::B; 2], a: [Self::A; 2]) -> Self::I {
        dot(sum, codes, a)
    }
    #[inline(always)]
    unsafe fn code<const BITS: usize>(at: *const u8, part: usize) -> Self::I {
        // SAFETY: the caller guarantees that the pointer is valid for the bytes of the step.
        let codes = unsafe {
            match BITS {
                4 => Self::codes4(at),
                5 | 6 => Self::codes_in_unit::<BITS>(at, part / STEP),
                _ => Self::codes8(at),
            }
        };
        let part = part % STEP;
        from_fn(|r| i32::from(codes[part / 4][4 * r + part % 4]))
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
}

super::one_by_one!(Scalar);
