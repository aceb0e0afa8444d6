//! [`RowLanes`] in four registers of 128 bits.

use core::arch::aarch64::*;
use core::arch::asm;

use half::{bf16, f16};

use super::elementwise::RowLanes;
use super::neon::{Neon, both};

/// Converts four floats to f16, half to even. In assembly, since the intrinsic is not stable in the oldest supported
/// compiler.
#[inline(always)]
unsafe fn to_f16(floats: float32x4_t) -> uint16x4_t {
    let halves: uint16x4_t;
    // SAFETY: the instruction uses only registers, and is part of NEON, which the caller guarantees that the processor
    // has.
    unsafe {
        asm!("fcvtn {0:v}.4h, {1:v}.4s", lateout(vreg) halves, in(vreg) floats, options(pure, nomem, nostack, preserves_flags));
    }
    halves
}

/// The upper half of four floats, rounded half to even; NaN keeps its sign and becomes quiet.
#[inline(always)]
unsafe fn upper_halves(a: float32x4_t) -> uint16x4_t {
    // SAFETY: the caller guarantees that the processor has NEON.
    unsafe {
        let bits = vreinterpretq_u32_f32(a);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
        vshrn_n_u32::<16>(vbslq_u32(vceqq_f32(a, a), rounded, quiet))
    }
}

// SAFETY of every block below: by the contract of `RowLanes`, the caller guarantees that the processor has the
// instruction set, and that pointers are valid for the bytes that are loaded and stored.
impl RowLanes for Neon {
    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn add_f32(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the contract of `RowLanes`.
        both(a, b, |a, b| unsafe { vaddq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn sub_f32(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the contract of `RowLanes`.
        both(a, b, |a, b| unsafe { vsubq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn div_f32(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the contract of `RowLanes`.
        both(a, b, |a, b| unsafe { vdivq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn min_f32(a: Self::F, b: Self::F) -> Self::F {
        // `fmin` would return NaN if either operand is NaN. SAFETY: the contract of `RowLanes`.
        both(a, b, |a, b| unsafe { vbslq_f32(vcltq_f32(a, b), a, b) })
    }
    #[inline(always)]
    unsafe fn round(a: Self::F) -> Self::F {
        // SAFETY: the contract of `RowLanes`.
        a.map(|a| unsafe { vrndnq_f32(a) })
    }
    #[inline(always)]
    unsafe fn unless_below(a: Self::F, limit: Self::F, v: Self::F) -> Self::F {
        // SAFETY: the contract of `RowLanes`.
        let below = both(a, limit, |a, limit| unsafe { vcltq_f32(a, limit) });
        // SAFETY: the contract of `RowLanes`.
        both(below, v, |below, v| unsafe {
            vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), below))
        })
    }
    #[inline(always)]
    unsafe fn times_power(p: Self::F, n: Self::F) -> Self::F {
        // SAFETY: the contract of `RowLanes`.
        both(p, n, |p, n| unsafe {
            let exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
            vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent)))
        })
    }
    #[inline(always)]
    unsafe fn flip(a: Self::F, signs: Self::F) -> Self::F {
        // SAFETY: the contract of `RowLanes`.
        both(a, signs, |a, signs| unsafe {
            let sign = vandq_u32(vreinterpretq_u32_f32(signs), vdupq_n_u32(0x8000_0000));
            vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(a), sign))
        })
    }
    #[inline(always)]
    unsafe fn partner<const DISTANCE: usize>(a: Self::F) -> Self::F {
        match DISTANCE {
            // SAFETY: the contract of `RowLanes`.
            1 => a.map(|a| unsafe { vrev64q_f32(a) }),
            // SAFETY: the contract of `RowLanes`.
            2 => a.map(|a| unsafe { vextq_f32::<2>(a, a) }),
            4 => [a[1], a[0], a[3], a[2]],
            _ => [a[2], a[3], a[0], a[1]],
        }
    }
    #[inline(always)]
    unsafe fn to_i32(a: Self::F) -> Self::I {
        // SAFETY: the contract of `RowLanes`.
        a.map(|a| unsafe { vcvtq_s32_f32(a) })
    }
    #[inline(always)]
    unsafe fn max_i32(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: the contract of `RowLanes`.
        both(a, b, |a, b| unsafe { vmaxq_s32(a, b) })
    }
    #[inline(always)]
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: the contract of `RowLanes`.
        both(a, b, |a, b| unsafe { vandq_s32(a, b) })
    }
    #[inline(always)]
    unsafe fn store_codes(a: Self::I, low: *mut i8, high: *mut i8) {
        // SAFETY: the contract of `RowLanes`.
        unsafe {
            let eight = |a, b| vmovn_s16(vcombine_s16(vmovn_s32(a), vmovn_s32(b)));
            vst1_s8(low, eight(a[0], a[1]));
            vst1_s8(high, eight(a[2], a[3]));
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(at: *mut bf16, a: Self::F) {
        // SAFETY: the contract of `RowLanes`.
        unsafe {
            for (i, part) in a.into_iter().enumerate() {
                vst1_u16(at.add(4 * i).cast(), upper_halves(part));
            }
        }
    }
    #[inline(always)]
    unsafe fn store_f16(at: *mut f16, a: Self::F) {
        // SAFETY: the contract of `RowLanes`.
        unsafe {
            for (i, part) in a.into_iter().enumerate() {
                vst1_u16(at.add(4 * i).cast(), to_f16(part));
            }
        }
    }
    #[inline(always)]
    unsafe fn total(a: Self::I) -> i32 {
        // SAFETY: the contract of `RowLanes`.
        unsafe { vaddvq_s32(vaddq_s32(vaddq_s32(a[0], a[1]), vaddq_s32(a[2], a[3]))) }
    }
    #[inline(always)]
    unsafe fn largest(a: Self::I) -> i32 {
        // SAFETY: the contract of `RowLanes`.
        unsafe { vmaxvq_s32(vmaxq_s32(vmaxq_s32(a[0], a[1]), vmaxq_s32(a[2], a[3]))) }
    }
}
