//! Lanes in four registers of 128 bits, for AArch64: multiplied by `smull` and pairwise sums, by `sdot` (dotprod), or
//! by `usdot` and, for two rows or more, `usmmla` (i8mm).
//!
//! The first two multiply signed numbers only. Codes of 4 bits fit as they are; codes of 8 bits are made signed by
//! flipping their top bit, which subtracts [`Lanes::OFFSET`] from each, and the tile corrects this with the sums of
//! activations. Products of 8 bits are at most `128 · 128 = 2¹⁴`: one fits 16 bits, but a sum of two may not, and is
//! computed in 32. For codes below 64, a sum of four is at most `4 · 63 · 128 = 32256`.
//!
//! Some instructions are written in assembly, because their intrinsics are not stable in the oldest supported compiler.

use core::arch::aarch64::*;
use core::arch::asm;

use super::{
    E2M1_DOUBLED, E2M1_OFFSET, E4M3_BIAS, E4M3_BITS, E4M3_SMALLEST_NORMAL, FloatLanes, Lanes, codes,
    iq4_bytes,
};
use crate::float_format::IQ4_LEVELS;
use crate::layout::STEP;

#[derive(Clone, Copy)]
pub(crate) struct Neon;

#[derive(Clone, Copy)]
pub(crate) struct NeonDotprod;

#[derive(Clone, Copy)]
pub(crate) struct NeonI8mm;

pub(super) type Quad<T> = [T; 4];

#[inline(always)]
unsafe fn load(at: *const u8) -> Quad<uint8x16_t> {
    // SAFETY: the caller guarantees that the pointer is valid for 64 bytes.
    unsafe { [vld1q_u8(at), vld1q_u8(at.add(16)), vld1q_u8(at.add(32)), vld1q_u8(at.add(48))] }
}

#[inline(always)]
unsafe fn widen(bytes: uint8x16_t) -> Quad<int32x4_t> {
    // SAFETY: the caller guarantees that the processor has NEON.
    unsafe {
        let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
        [
            vmovl_u16(vget_low_u16(low)),
            vmovl_high_u16(low),
            vmovl_u16(vget_low_u16(high)),
            vmovl_high_u16(high),
        ]
        .map(|words| vreinterpretq_s32_u32(words))
    }
}

#[inline(always)]
pub(super) fn both<A: Copy, B: Copy, C>(a: Quad<A>, b: Quad<B>, f: impl Fn(A, B) -> C) -> Quad<C> {
    [f(a[0], b[0]), f(a[1], b[1]), f(a[2], b[2]), f(a[3], b[3])]
}

#[inline(always)]
unsafe fn from_f16(halves: uint16x4_t) -> float32x4_t {
    let floats: float32x4_t;
    // SAFETY: the instruction uses only registers, and is part of NEON, which the caller guarantees that the processor
    // has.
    unsafe {
        asm!("fcvtl {0:v}.4s, {1:v}.4h", lateout(vreg) floats, in(vreg) halves, options(pure, nomem, nostack, preserves_flags));
    }
    floats
}

/// A dot product of four bytes per lane, added to a sum; all lanes use lane `LANE` of `b`.
macro_rules! dot_by_lane {
    ($name:ident, $instruction:literal) => {
        #[inline(always)]
        unsafe fn $name<const LANE: usize>(sum: int32x4_t, codes: uint8x16_t, b: int8x16_t) -> int32x4_t {
            let mut sum = sum;
            // SAFETY: the instruction uses only registers; the caller guarantees that the processor has it, and is
            // compiled for it.
            unsafe {
                asm!(
                    concat!($instruction, " {0:v}.4s, {1:v}.16b, {2:v}.4b[{3}]"),
                    inout(vreg) sum, in(vreg) codes, in(vreg) b, const LANE,
                    options(pure, nomem, nostack, preserves_flags),
                );
            }
            sum
        }
    };
}

dot_by_lane!(sdot, "sdot");
dot_by_lane!(usdot, "usdot");

/// The multiplications of an instruction set.
trait Dot {
    const OFFSET: i32;

    /// The eight activations of a step.
    unsafe fn activations(at: *const i8) -> [int8x16_t; 2];
    /// `sum + Σ codes · a` over eight features of four rows; codes must be below 64.
    unsafe fn small(sum: int32x4_t, codes: [uint8x16_t; 2], a: [int8x16_t; 2]) -> int32x4_t;
    /// `sum + Σ codes · a` over eight features of four rows, for 8-bit codes minus the offset.
    unsafe fn whole(sum: int32x4_t, codes: [uint8x16_t; 2], a: [int8x16_t; 2]) -> int32x4_t;
    /// Does what [`Lanes::rows`] does, for one panel.
    #[inline(always)]
    unsafe fn rows<const CODES: usize, const MR: usize>(
        _sums: [&mut Quad<int32x4_t>; MR],
        _at: *const u8,
        _a: *const i8,
        _strip: usize,
        _steps: usize,
    ) -> usize {
        0
    }
}

/// The products of both halves of two registers, in 16 bits.
#[inline(always)]
unsafe fn products(a: uint8x16_t, b: int8x16_t) -> [int16x8_t; 2] {
    // SAFETY: the caller guarantees that the processor has NEON.
    unsafe {
        let a = vreinterpretq_s8_u8(a);
        [vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b)]
    }
}

impl Dot for Neon {
    const OFFSET: i32 = 128;

    #[inline(always)]
    unsafe fn activations(at: *const i8) -> [int8x16_t; 2] {
        let at = at.cast::<i32>();
        // SAFETY: the caller guarantees that the pointer is valid for 8 values, and that the processor has NEON.
        unsafe {
            [at.read_unaligned(), at.add(1).read_unaligned()].map(|a| vreinterpretq_s8_s32(vdupq_n_s32(a)))
        }
    }
    #[inline(always)]
    unsafe fn small(sum: int32x4_t, codes: [uint8x16_t; 2], a: [int8x16_t; 2]) -> int32x4_t {
        // SAFETY: the caller guarantees that the processor has NEON.
        unsafe {
            let [low, high] = products(codes[0], a[0]);
            let (codes, a) = (vreinterpretq_s8_u8(codes[1]), a[1]);
            let low = vmlal_s8(low, vget_low_s8(codes), vget_low_s8(a));
            let high = vmlal_high_s8(high, codes, a);
            vpadalq_s16(sum, vpaddq_s16(low, high))
        }
    }
    #[inline(always)]
    unsafe fn whole(sum: int32x4_t, codes: [uint8x16_t; 2], a: [int8x16_t; 2]) -> int32x4_t {
        // SAFETY: the caller guarantees that the processor has NEON.
        unsafe {
            let (first, second) = (products(codes[0], a[0]), products(codes[1], a[1]));
            let low = vpadalq_s16(vpaddlq_s16(first[0]), second[0]);
            let high = vpadalq_s16(vpaddlq_s16(first[1]), second[1]);
            vaddq_s32(sum, vpaddq_s32(low, high))
        }
    }
}

/// Products by lane: activations are not broadcast, and both halves of a step share one load.
macro_rules! dot_products {
    ($name:ident, $offset:literal, $dot:ident $(, $rows:item)?) => {
        impl Dot for $name {
            const OFFSET: i32 = $offset;

            #[inline(always)]
            unsafe fn activations(at: *const i8) -> [int8x16_t; 2] {
                // SAFETY: the caller guarantees that the pointer is valid for 8 values, and that the processor has
                // NEON.
                unsafe { [vcombine_s8(vld1_s8(at), vdup_n_s8(0)); 2] }
            }
            #[inline(always)]
            unsafe fn small(sum: int32x4_t, codes: [uint8x16_t; 2], a: [int8x16_t; 2]) -> int32x4_t {
                // SAFETY: the caller guarantees that the processor has the instruction.
                unsafe { $dot::<1>($dot::<0>(sum, codes[0], a[0]), codes[1], a[1]) }
            }
            #[inline(always)]
            unsafe fn whole(sum: int32x4_t, codes: [uint8x16_t; 2], a: [int8x16_t; 2]) -> int32x4_t {
                // SAFETY: the caller guarantees that the processor has the instruction.
                unsafe { Self::small(sum, codes, a) }
            }
            $(#[inline(always)] $rows)?
        }
    };
}

dot_products!(NeonDotprod, 128, sdot);
dot_products!(
    NeonI8mm,
    0,
    usdot,
    unsafe fn rows<const CODES: usize, const MR: usize>(
        sums: [&mut Quad<int32x4_t>; MR],
        at: *const u8,
        a: *const i8,
        strip: usize,
        steps: usize,
    ) -> usize {
        // Codes of 5 and 6 bits are processed step by step.
        if !(2..=4).contains(&MR) || codes::unit(CODES) > 1 {
            return 0;
        }
        // SAFETY: the caller guarantees the contract of `Lanes::rows`, and that the processor has i8mm.
        unsafe { matrices::<CODES, MR>(sums, at, a, strip, steps) }
        steps
    }
);

/// `sum[i][j] + Σ codes[i] · a[j]`, for two rows of eight features each.
#[inline(always)]
unsafe fn usmmla(sum: int32x4_t, codes: uint8x16_t, a: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: the instruction uses only registers; the caller guarantees that the processor has it, and is compiled for
    // it.
    unsafe {
        asm!(
            "usmmla {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) sum, in(vreg) codes, in(vreg) a,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// Two rows of activations times two rows of a panel: one instruction does the work of two `usdot`. A zip of the halves
/// of a step rearranges the layout's words into rows of a matrix, once for all activations.
#[inline(always)]
unsafe fn matrices<const CODES: usize, const MR: usize>(
    mut sums: [&mut Quad<int32x4_t>; MR],
    at: *const u8,
    a: *const i8,
    strip: usize,
    steps: usize,
) {
    // SAFETY: the caller guarantees that the pointers are valid for these steps and rows, and that the processor has
    // i8mm.
    unsafe {
        let zero = vdupq_n_s32(0);
        // The sums of two pairs of rows, each with the eight pairs of rows of the panel.
        let mut products = [[[zero; 2]; 4]; 2];
        for step in 0..steps {
            let at = at.add(step * 16 * codes::bits(CODES));
            let [low, high] = match CODES {
                4 => NeonI8mm::codes4(at),
                codes::E2M1 => NeonI8mm::codes_e2m1(at),
                codes::IQ4 => NeonI8mm::codes_iq4(at),
                _ => NeonI8mm::codes8(at),
            };
            let words = |bytes| vreinterpretq_u32_u8(bytes);
            let codes = both(low, high, |low, high| {
                let (low, high) = (words(low), words(high));
                [vzip1q_u32(low, high), vzip2q_u32(low, high)].map(|pair| vreinterpretq_u8_u32(pair))
            });
            for (pair, products) in products.iter_mut().enumerate().take(MR.div_ceil(2)) {
                let a = a.add((step * strip + 2 * pair) * 8);
                // A single last row is loaded twice, since the memory after it may not be accessible.
                let a = if 2 * pair + 1 < MR { vld1q_s8(a) } else { vcombine_s8(vld1_s8(a), vld1_s8(a)) };
                for quad in 0..4 {
                    for half in 0..2 {
                        products[quad][half] = usmmla(products[quad][half], codes[quad][half], a);
                    }
                }
            }
        }
        for (m, sums) in sums.iter_mut().enumerate() {
            for quad in 0..4 {
                let [first, second] = products[m / 2][quad];
                let row = if m % 2 == 0 { vuzp1q_s32(first, second) } else { vuzp2q_s32(first, second) };
                sums[quad] = vaddq_s32(sums[quad], row);
            }
        }
    }
}

macro_rules! lanes {
    ($name:ident) => {
        // SAFETY of every block below: by the contract of `Lanes`, the caller guarantees that the processor has the
        // instruction set, and that pointers are valid for the bytes that are loaded and stored.
        impl Lanes for $name {
            type I = Quad<int32x4_t>;
            type F = Quad<float32x4_t>;
            type B = Quad<uint8x16_t>;
            type A = int8x16_t;

            const OFFSET: i32 = <Self as Dot>::OFFSET;

            #[inline(always)]
            unsafe fn splat(value: i32) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                unsafe { [vdupq_n_s32(value); 4] }
            }
            #[inline(always)]
            unsafe fn add(a: Self::I, b: Self::I) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                both(a, b, |a, b| unsafe { vaddq_s32(a, b) })
            }
            #[inline(always)]
            unsafe fn sub(a: Self::I, b: Self::I) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                both(a, b, |a, b| unsafe { vsubq_s32(a, b) })
            }
            #[inline(always)]
            unsafe fn mul(a: Self::I, b: Self::I) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                both(a, b, |a, b| unsafe { vmulq_s32(a, b) })
            }
            #[inline(always)]
            unsafe fn load_i32(at: *const u8) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                unsafe { load(at).map(|bytes| vreinterpretq_s32_u8(bytes)) }
            }
            #[inline(always)]
            unsafe fn load_u8(at: *const u8) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                unsafe { widen(vld1q_u8(at)) }
            }
            #[inline(always)]
            unsafe fn load_i8(at: *const u8) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let bytes = vreinterpretq_s8_u8(vld1q_u8(at));
                    let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
                    [
                        vmovl_s16(vget_low_s16(low)),
                        vmovl_high_s16(low),
                        vmovl_s16(vget_low_s16(high)),
                        vmovl_high_s16(high),
                    ]
                }
            }
            #[inline(always)]
            unsafe fn load_u4(at: *const u8) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let halves = vld1_u8(at);
                    let (low, high) = (vand_u8(halves, vdup_n_u8(0x0f)), vshr_n_u8::<4>(halves));
                    widen(vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high)))
                }
            }
            #[inline(always)]
            unsafe fn zero() -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe { [vdupq_n_f32(0.0); 4] }
            }
            #[inline(always)]
            unsafe fn splat_f32(value: f32) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe { [vdupq_n_f32(value); 4] }
            }
            #[inline(always)]
            unsafe fn to_f32(a: Self::I) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                a.map(|a| unsafe { vcvtq_f32_s32(a) })
            }
            #[inline(always)]
            unsafe fn as_f32(a: Self::I) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                a.map(|a| unsafe { vreinterpretq_f32_s32(a) })
            }
            #[inline(always)]
            unsafe fn as_i32(a: Self::F) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                a.map(|a| unsafe { vreinterpretq_s32_f32(a) })
            }
            #[inline(always)]
            unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                both(both(a, b, |a, b| (a, b)), c, |(a, b), c| unsafe { vfmaq_f32(c, a, b) })
            }
            #[inline(always)]
            unsafe fn mul_f32(a: Self::F, b: Self::F) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                both(a, b, |a, b| unsafe { vmulq_f32(a, b) })
            }
            #[inline(always)]
            unsafe fn max_f32(a: Self::F, b: Self::F) -> Self::F {
                // `fmax` would return NaN if either operand is NaN. SAFETY: the contract of `Lanes`.
                both(a, b, |a, b| unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) })
            }
            #[inline(always)]
            unsafe fn load_f32(at: *const u8) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe { load(at).map(|bytes| vreinterpretq_f32_u8(bytes)) }
            }
            #[inline(always)]
            unsafe fn load_bf16(at: *const u8) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let words = [0, 8, 16, 24].map(|i| vreinterpret_u16_u8(vld1_u8(at.add(i))));
                    words.map(|words| vreinterpretq_f32_u32(vshll_n_u16::<16>(words)))
                }
            }
            #[inline(always)]
            unsafe fn load_f16(at: *const u8) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe { [0, 8, 16, 24].map(|i| from_f16(vreinterpret_u16_u8(vld1_u8(at.add(i))))) }
            }
            #[inline(always)]
            unsafe fn load_e8m0(at: *const u8) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let smallest = vdupq_n_u32(1 << 22);
                    Self::load_u8(at).map(|codes| {
                        // The smallest value is subnormal.
                        let exponents = vshlq_n_u32::<23>(vreinterpretq_u32_s32(codes));
                        vreinterpretq_f32_u32(vmaxq_u32(exponents, smallest))
                    })
                }
            }
            #[inline(always)]
            unsafe fn load_e4m3(at: *const u8) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let bytes = vld1q_u8(at);
                    let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
                    let (low, high) = (vshlq_n_u16::<7>(low), vshlq_n_u16::<7>(high));
                    [vget_low_u16(low), vget_high_u16(low), vget_low_u16(high), vget_high_u16(high)]
                        .map(|halves| from_f16(halves))
                }
            }
            #[inline(always)]
            unsafe fn e2m1_table() -> Self::I {
                // SAFETY: the contract of `Lanes`; the table is the 16 bytes that are loaded.
                unsafe { [vreinterpretq_s32_u8(vld1q_u8(E2M1_DOUBLED.as_ptr())); 4] }
            }
            #[inline(always)]
            unsafe fn e2m1(codes: Self::I, table: Self::I) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let (table, offset) = (vreinterpretq_u8_s32(table[0]), vdupq_n_s32(E2M1_OFFSET));
                    codes.map(|codes| {
                        // The first byte of a lane's four is the code; the other three are zero, and the results of
                        // looking them up are masked out.
                        let doubled = vqtbl1q_u8(table, vreinterpretq_u8_s32(codes));
                        let doubled = vandq_s32(vreinterpretq_s32_u8(doubled), vdupq_n_s32(0xff));
                        let values = vcvtq_n_f32_s32::<1>(vsubq_s32(doubled, offset));
                        // The sign is taken from the code, so that zeros keep theirs.
                        let sign = vshlq_n_u32::<28>(vreinterpretq_u32_s32(codes));
                        vbslq_f32(vdupq_n_u32(1 << 31), vreinterpretq_f32_u32(sign), values)
                    })
                }
            }
            #[inline(always)]
            unsafe fn iq4_table() -> Self::I {
                // SAFETY: the contract of `Lanes`; the table is the 16 bytes that are loaded.
                unsafe { [vreinterpretq_s32_s8(vld1q_s8(IQ4_LEVELS.as_ptr())); 4] }
            }
            #[inline(always)]
            unsafe fn iq4(codes: Self::I, table: Self::I) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let table = vreinterpretq_s8_s32(table[0]);
                    codes.map(|codes| {
                        // The lowest byte of a lane is the code; its value is widened with its sign.
                        let values = vqtbl1q_s8(table, vreinterpretq_u8_s32(codes));
                        vcvtq_f32_s32(vshrq_n_s32::<24>(vshlq_n_s32::<24>(vreinterpretq_s32_s8(values))))
                    })
                }
            }
            #[inline(always)]
            unsafe fn e4m3(codes: Self::I) -> Self::F {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let (mask, bias) = (vdupq_n_s32(E4M3_BITS), vdupq_n_s32(E4M3_BIAS));
                    let (two, smallest) = (vdupq_n_f32(2.0), vdupq_n_f32(-E4M3_SMALLEST_NORMAL));
                    codes.map(|codes| {
                        let bits = vandq_s32(vshlq_n_s32::<20>(codes), mask);
                        let normal = vreinterpretq_f32_s32(vaddq_s32(bits, bias));
                        let value = vminq_f32(normal, vfmaq_f32(smallest, normal, two));
                        let sign = vshlq_n_u32::<24>(vreinterpretq_u32_s32(codes));
                        vbslq_f32(vdupq_n_u32(1 << 31), vreinterpretq_f32_u32(sign), value)
                    })
                }
            }
            #[inline(always)]
            unsafe fn store_f32(at: *mut f32, a: Self::F) {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    for (i, part) in a.into_iter().enumerate() {
                        vst1q_f32(at.add(4 * i), part);
                    }
                }
            }
            #[inline(always)]
            unsafe fn codes4(at: *const u8) -> [Self::B; 2] {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let both = load(at);
                    [both.map(|b| vandq_u8(b, vdupq_n_u8(0x0f))), both.map(|b| vshrq_n_u8::<4>(b))]
                }
            }
            #[inline(always)]
            unsafe fn codes_e2m1(at: *const u8) -> [Self::B; 2] {
                // SAFETY: the contract of `Lanes`; the table is the 16 bytes that are loaded.
                unsafe {
                    let table = vld1q_u8(E2M1_DOUBLED.as_ptr());
                    Self::codes4(at).map(|half| half.map(|codes| vqtbl1q_u8(table, codes)))
                }
            }
            #[inline(always)]
            unsafe fn codes_iq4(at: *const u8) -> [Self::B; 2] {
                let bytes = const { iq4_bytes(<Self as Lanes>::OFFSET) };
                // SAFETY: the contract of `Lanes`; the table is the 16 bytes that are loaded.
                unsafe {
                    let table = vld1q_u8(bytes.as_ptr());
                    Self::codes4(at).map(|half| half.map(|codes| vqtbl1q_u8(table, codes)))
                }
            }
            #[inline(always)]
            unsafe fn codes_in_unit<const CODES: usize>(at: *const u8, step: usize) -> [Self::B; 2] {
                let (unit, width) = (codes::unit(CODES), codes::bits(CODES) - 4);
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let (low, high) = (Self::codes4(at.add(64 * step)), load(at.add(64 * unit)));
                    let mask = vdupq_n_u8(((1 << width) - 1) << 4);
                    let half = |i: usize| {
                        // A positive shift is to the left.
                        let shift = vdupq_n_s8(4 - ((2 * step + i) * width) as i8);
                        both(low[i], high, |low, high| vorrq_u8(low, vandq_u8(vshlq_u8(high, shift), mask)))
                    };
                    [half(0), half(1)]
                }
            }
            #[inline(always)]
            unsafe fn codes8(at: *const u8) -> [Self::B; 2] {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    let flip = vdupq_n_u8(<Self as Dot>::OFFSET as u8);
                    [load(at), load(at.add(64))].map(|half| half.map(|codes| veorq_u8(codes, flip)))
                }
            }
            #[inline(always)]
            unsafe fn activations(at: *const i8) -> [int8x16_t; 2] {
                // SAFETY: the contract of `Lanes`.
                unsafe { <Self as Dot>::activations(at) }
            }
            #[inline(always)]
            unsafe fn dot4(sum: Self::I, [low, high]: [Self::B; 2], a: [int8x16_t; 2]) -> Self::I {
                let codes = both(low, high, |low, high| [low, high]);
                // SAFETY: the contract of `Lanes`.
                both(sum, codes, |sum, codes| unsafe { <Self as Dot>::small(sum, codes, a) })
            }
            #[inline(always)]
            unsafe fn dot8(sum: Self::I, [low, high]: [Self::B; 2], a: [int8x16_t; 2]) -> Self::I {
                let codes = both(low, high, |low, high| [low, high]);
                // SAFETY: the contract of `Lanes`.
                both(sum, codes, |sum, codes| unsafe { <Self as Dot>::whole(sum, codes, a) })
            }
            #[inline(always)]
            unsafe fn rows<const CODES: usize, const MR: usize, const NP: usize>(
                sums: &mut [[Self::I; NP]; MR],
                at: *const u8,
                panel: usize,
                a: *const i8,
                strip: usize,
                steps: usize,
            ) -> usize {
                let mut done = 0;
                for p in 0..NP {
                    let sums = sums.each_mut().map(|row| &mut row[p]);
                    // SAFETY: the contract of `Lanes`.
                    done = unsafe { <Self as Dot>::rows::<CODES, MR>(sums, at.add(p * panel), a, strip, steps) };
                }
                done
            }
            #[inline(always)]
            unsafe fn code<const BITS: usize>(at: *const u8, part: usize) -> Self::I {
                // SAFETY: the contract of `Lanes`.
                unsafe {
                    if codes::unit(BITS) > 1 {
                        let (step, part) = (part / STEP, part % STEP);
                        let (right, mask) = (vdupq_n_s32(-8 * (part % 4) as i32), vdupq_n_u32(0xff));
                        return Self::codes_in_unit::<BITS>(at, step)[part / 4].map(|codes| {
                            let word = vandq_u32(vshlq_u32(vreinterpretq_u32_u8(codes), right), mask);
                            vreinterpretq_s32_u32(word)
                        });
                    }
                    let (words, shift, mask) = match BITS {
                        4 => (load(at), 8 * (part % 4) + 4 * (part / 4), 0x0f),
                        _ => (load(at.add(64 * (part / 4))), 8 * (part % 4), 0xff),
                    };
                    let (right, mask) = (vdupq_n_s32(-(shift as i32)), vdupq_n_u32(mask));
                    words.map(|words| {
                        let word = vandq_u32(vshlq_u32(vreinterpretq_u32_u8(words), right), mask);
                        vreinterpretq_s32_u32(word)
                    })
                }
            }
            #[inline(always)]
            unsafe fn prefetch(at: *const u8) {
                // SAFETY: the caller guarantees that the processor has the instruction set; a prefetch address need not
                // be valid.
                unsafe { asm!("prfm pldl1keep, [{0}]", in(reg) at, options(nostack, preserves_flags, readonly)) }
            }
        }

        super::one_by_one!($name);
    };
}

lanes!(Neon);
lanes!(NeonDotprod);
lanes!(NeonI8mm);
