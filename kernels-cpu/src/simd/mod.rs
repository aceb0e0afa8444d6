//! The sixteen rows of a panel as one value, whatever registers it takes.
//!
//! Kernels are written once over [`Lanes`]; an instruction set says how wide its registers are and how
//! it multiplies. Integer operations wrap and are exact everywhere, and float operations are single
//! correctly rounded ones, so that all instruction sets give the same bits.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod elementwise;
#[cfg(target_arch = "aarch64")]
mod elementwise_neon;
#[cfg(target_arch = "x86_64")]
mod elementwise_x86;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod scalar;
pub(crate) mod tiles;

use crate::FloatFormat;

/// What a code of a step is, as a const parameter: integers of 4 or 8 bits are their width.
pub(crate) mod codes {
    /// E2M1: 4 bits.
    pub(crate) const E2M1: usize = 0x104;
    /// E4M3: 8 bits.
    pub(crate) const E4M3: usize = 0x108;

    /// Bits that a code takes.
    pub(crate) const fn bits(codes: usize) -> usize {
        codes & 0xff
    }
}

/// Twice the value of an E2M1 code, plus [`E2M1_OFFSET`]: what integer products take, below 32.
pub(crate) const E2M1_DOUBLED: [u8; 16] = {
    let mut doubled = [0; 16];
    let mut code = 0;
    while code < 16 {
        let twice = 2.0 * FloatFormat::e2m1_values()[code];
        doubled[code] = (twice as i32 + E2M1_OFFSET) as u8;
        code += 1;
    }
    doubled
};

/// What [`Lanes::codes_e2m1`] adds to twice a value, so that there is no sign.
pub(crate) const E2M1_OFFSET: i32 = 16;

/// The exponent and mantissa of an E4M3 code where an `f32` has them.
pub(crate) const E4M3_BITS: i32 = 0x7f << 20;
/// What is missing of its exponent: `h = bits + bias` is the value of a normal code. Of a code without an exponent it
/// is `2⁻⁷ (1 + m / 8)` in place of `m · 2⁻⁹ = 2h − 2⁻⁶`, which is less for these codes and no other: the smaller of the
/// two is the value.
pub(crate) const E4M3_BIAS: i32 = 120 << 23;
pub(crate) const E4M3_SMALLEST_NORMAL: f32 = 0.015_625;

/// Sixteen lanes of 32 bits, one a row.
///
/// # Safety
/// Every method may be called only where the processor has the instruction set of the implementation;
/// pointers must be valid for the bytes that a method says it reads or writes, at any alignment.
pub(crate) trait Lanes: Copy {
    /// Sixteen `i32`.
    type I: Copy;
    /// Sixteen `f32`.
    type F: Copy;
    /// Sixteen rows of four codes.
    type B: Copy;
    /// Four activations, for every row.
    type A: Copy;

    /// What [`codes8`](Self::codes8) takes off every code; the tile adds it again, by the sums of activations.
    const OFFSET: i32 = 0;

    unsafe fn splat(value: i32) -> Self::I;
    unsafe fn add(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn sub(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn mul(a: Self::I, b: Self::I) -> Self::I;
    /// Reads sixteen `i32`.
    unsafe fn load_i32(at: *const u8) -> Self::I;
    /// Reads sixteen bytes, each widened.
    unsafe fn load_u8(at: *const u8) -> Self::I;
    /// Reads eight bytes, each half widened, low ones first.
    unsafe fn load_u4(at: *const u8) -> Self::I;

    unsafe fn zero() -> Self::F;
    unsafe fn splat_f32(value: f32) -> Self::F;
    unsafe fn to_f32(a: Self::I) -> Self::F;
    /// The same bits as floats, and back.
    unsafe fn as_f32(a: Self::I) -> Self::F;
    unsafe fn as_i32(a: Self::F) -> Self::I;
    /// `a · b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    unsafe fn mul_f32(a: Self::F, b: Self::F) -> Self::F;
    /// The larger; `b` where either is NaN.
    unsafe fn max_f32(a: Self::F, b: Self::F) -> Self::F {
        let (mut left, mut right) = ([0.0; 16], [0.0; 16]);
        // SAFETY: the arrays hold sixteen; the caller has the instruction set.
        unsafe {
            Self::store_f32(left.as_mut_ptr(), a);
            Self::store_f32(right.as_mut_ptr(), b);
            left.iter_mut().zip(right).for_each(|(a, b)| *a = if *a > b { *a } else { b });
            Self::load_f32(left.as_ptr().cast())
        }
    }
    /// Reads sixteen `f32`, bf16 or f16.
    unsafe fn load_f32(at: *const u8) -> Self::F;
    unsafe fn load_bf16(at: *const u8) -> Self::F;
    unsafe fn load_f16(at: *const u8) -> Self::F;
    /// Reads sixteen powers of two, E8M0.
    unsafe fn load_e8m0(at: *const u8) -> Self::F;
    /// Reads sixteen E4M3 numbers without a sign, each times `2⁻⁸`: as halves they are the same bits, moved.
    unsafe fn load_e4m3(at: *const u8) -> Self::F;
    /// What [`e2m1`](Self::e2m1) looks values up in.
    unsafe fn e2m1_table() -> Self::I;
    /// The values of E2M1 codes.
    unsafe fn e2m1(codes: Self::I, table: Self::I) -> Self::F;
    /// The values of E4M3 codes, NaN apart; exact under any treatment of subnormal operands.
    unsafe fn e4m3(codes: Self::I) -> Self::F;
    /// Writes sixteen `f32`.
    unsafe fn store_f32(at: *mut f32, a: Self::F);

    /// Reads the 64 bytes of a step of codes of 4 bits: features 0 to 3, and 4 to 7.
    unsafe fn codes4(at: *const u8) -> [Self::B; 2];
    /// The same of E2M1 codes, each replaced by twice its value plus [`E2M1_OFFSET`].
    unsafe fn codes_e2m1(at: *const u8) -> [Self::B; 2];
    /// Reads the 128 bytes of a step of codes of 8 bits, less [`OFFSET`](Self::OFFSET).
    unsafe fn codes8(at: *const u8) -> [Self::B; 2];
    /// Reads the eight activations of a step.
    unsafe fn activations(at: *const i8) -> [Self::A; 2];
    /// Adds the eight products of a step to every row's sum; codes are below 32.
    unsafe fn dot4(sum: Self::I, codes: [Self::B; 2], a: [Self::A; 2]) -> Self::I;
    /// The same for what `codes8` read.
    unsafe fn dot8(sum: Self::I, codes: [Self::B; 2], a: [Self::A; 2]) -> Self::I;
    /// Adds the products of steps from the first on, all rows of a tile in one go, and says of how many; a tile
    /// takes the others row by row. `at` is where the codes of the first of panels begin that are `panel` bytes
    /// apart, `a` that of activations of `MR` rows, steps `strip` rows apart.
    #[inline(always)]
    unsafe fn rows<const CODES: usize, const MR: usize, const NP: usize>(
        _sums: &mut [[Self::I; NP]; MR],
        _at: *const u8,
        _panel: usize,
        _a: *const i8,
        _strip: usize,
        _steps: usize,
    ) -> usize {
        0
    }
    /// Reads feature `part` of a step, of every row.
    unsafe fn code<const BITS: usize>(at: *const u8, part: usize) -> Self::I;
    /// Fetches the line at an address that need not be valid.
    unsafe fn prefetch(at: *const u8);
    /// The same for a line that will be written.
    #[inline(always)]
    unsafe fn prefetch_write(_at: *const u8) {}
}

/// Lanes that multiply float activations.
///
/// # Safety
/// As [`Lanes`].
pub(crate) trait FloatLanes: Lanes {
    /// Parts that a step is multiplied in.
    const PARTS: usize;
    /// Whether products are added one by one, in order of features: then all such lanes give the same bits.
    const ORDERED: bool;
    /// What turns codes into floats.
    type Table: Copy;
    /// Weights of a part, for every row.
    type W: Copy;

    /// The table of `code − centre`.
    unsafe fn centre(centre: i32) -> Self::Table;
    /// The table of the values of floating-point codes.
    unsafe fn values<const CODES: usize>() -> Self::Table;
    /// The weights of a part of the step that begins at `at`.
    unsafe fn weights<const CODES: usize>(at: *const u8, part: usize, table: Self::Table) -> Self::W;
    /// Adds the products of a part; `x` is where a row's step begins, 32 bytes. Without `REST` what rounding to
    /// bf16 leaves over is known to be zero, where there is such a thing.
    unsafe fn dot_float<const REST: bool>(sum: Self::F, w: Self::W, x: *const u8, part: usize) -> Self::F;
}

/// Lanes that multiply codes with probabilities, which need no more bits than the instruction set likes best.
///
/// # Safety
/// As [`Lanes`].
pub(crate) trait ValueLanes: FloatLanes {
    /// Whether there are registers for sixteen sums and what they are made of.
    const WIDE: bool;
    /// Bytes of the eight probabilities of a step.
    const STEP_BYTES: usize;

    /// Writes sixteen probabilities as they are read, `2 · STEP_BYTES`.
    unsafe fn store_probabilities(at: *mut u8, p: Self::F);
    /// Adds the products of a part; `p` is where a step's probabilities begin.
    unsafe fn dot_probabilities(sum: Self::F, w: Self::W, p: *const u8, part: usize) -> Self::F;
}

/// Feature `part` of a step as `f32`, times a float: the order of all paths but that of bf16.
macro_rules! one_by_one {
    ($lanes:ty) => {
        $crate::simd::one_by_one!($lanes, wide: false);
    };
    ($lanes:ty, wide: $wide:literal) => {
        impl FloatLanes for $lanes {
            const PARTS: usize = $crate::layout::STEP;
            const ORDERED: bool = true;
            type Table = <$lanes as Lanes>::I;
            type W = <$lanes as Lanes>::F;

            #[inline(always)]
            unsafe fn centre(centre: i32) -> Self::Table {
                // SAFETY: the caller has the instruction set.
                unsafe { Self::splat(centre) }
            }
            #[inline(always)]
            unsafe fn values<const CODES: usize>() -> Self::Table {
                // SAFETY: the caller has the instruction set.
                unsafe { if CODES == $crate::simd::codes::E2M1 { Self::e2m1_table() } else { Self::splat(0) } }
            }
            #[inline(always)]
            unsafe fn weights<const CODES: usize>(at: *const u8, part: usize, table: Self::Table) -> Self::W {
                // SAFETY: the caller guarantees the step.
                unsafe {
                    match CODES {
                        $crate::simd::codes::E2M1 => Self::e2m1(Self::code::<4>(at, part), table),
                        $crate::simd::codes::E4M3 => Self::e4m3(Self::code::<8>(at, part)),
                        _ => Self::to_f32(Self::sub(Self::code::<CODES>(at, part), table)),
                    }
                }
            }
            #[inline(always)]
            unsafe fn dot_float<const REST: bool>(
                sum: Self::F,
                w: Self::W,
                x: *const u8,
                part: usize,
            ) -> Self::F {
                // SAFETY: the caller guarantees the eight floats of the step.
                let x = unsafe { x.cast::<f32>().add(part).read_unaligned() };
                // SAFETY: the caller has the instruction set.
                unsafe { Self::fma(w, Self::splat_f32(x), sum) }
            }
        }

        impl $crate::simd::ValueLanes for $lanes {
            const WIDE: bool = $wide;
            const STEP_BYTES: usize = 32;

            #[inline(always)]
            unsafe fn store_probabilities(at: *mut u8, p: Self::F) {
                // SAFETY: the caller guarantees 64 bytes, and has the instruction set.
                unsafe { Self::store_f32(at.cast(), p) }
            }
            #[inline(always)]
            unsafe fn dot_probabilities(sum: Self::F, w: Self::W, p: *const u8, part: usize) -> Self::F {
                // SAFETY: as that.
                unsafe { Self::dot_float::<true>(sum, w, p, part) }
            }
        }
    };
}
pub(crate) use one_by_one;
