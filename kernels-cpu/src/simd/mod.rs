//! The sixteen rows of a panel as one value, independent of the width of registers.
//!
//! Kernels are written once over [`Lanes`]. Integer operations wrap, and float operations are correctly rounded, so
//! results are bit-identical on all instruction sets.

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
use crate::float_format::IQ4_LEVELS;

/// The code formats of a step, as const parameters: for integers, their width of 4, 5, 6 or 8 bits.
pub(crate) mod codes {
    /// E2M1: 4 bits.
    pub(crate) const E2M1: usize = 0x104;
    /// IQ4: 4 bits.
    pub(crate) const IQ4: usize = 0x204;
    /// E4M3: 8 bits.
    pub(crate) const E4M3: usize = 0x108;
    /// Dense bf16 instead of codes: 16 bits.
    pub(crate) const BF16: usize = 0x110;

    pub(crate) const fn bits(codes: usize) -> usize {
        codes & 0xff
    }

    pub(crate) const fn unit(codes: usize) -> usize {
        crate::layout::unit_of(bits(codes))
    }
}

/// Twice the value of each E2M1 code, plus [`E2M1_OFFSET`]: the operands of integer products, below 32.
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

/// The offset that [`Lanes::codes_e2m1`] adds to twice a value, so that it is not negative.
pub(crate) const E2M1_OFFSET: i32 = 16;

/// The values of IQ4 plus [`IQ4_OFFSET`] and minus the offset of 8-bit codes, see [`Lanes::OFFSET`].
pub(crate) const fn iq4_bytes(offset: i32) -> [u8; 16] {
    let mut bytes = [0; 16];
    let mut code = 0;
    while code < 16 {
        bytes[code] = (IQ4_LEVELS[code] as i32 + IQ4_OFFSET - offset) as u8;
        code += 1;
    }
    bytes
}

/// The offset that makes the values of IQ4 unsigned.
pub(crate) const IQ4_OFFSET: i32 = 128;

pub(crate) const IQ4_FLOATS: [f32; 16] = {
    let mut floats = [0.0; 16];
    let mut code = 0;
    while code < 16 {
        floats[code] = IQ4_LEVELS[code] as f32;
        code += 1;
    }
    floats
};

/// The exponent and mantissa of an E4M3 code, at the position that they have in an `f32`.
pub(crate) const E4M3_BITS: i32 = 0x7f << 20;
/// The difference of the exponent biases: for a normal code, `h = bits + bias` is the value. For a subnormal code, `h`
/// is `2⁻⁷ (1 + m / 8)`, and the value is `m · 2⁻⁹ = 2h − 2⁻⁶`. This is less than `h` for subnormal codes only, so the
/// smaller of the two is always the value.
pub(crate) const E4M3_BIAS: i32 = 120 << 23;
pub(crate) const E4M3_SMALLEST_NORMAL: f32 = 0.015_625;

/// Sixteen lanes of 32 bits, one per row.
///
/// # Safety
/// Methods may be called only if the processor has the instruction set of the implementation; pointers must be valid
/// for the bytes that a method reads or writes according to its description, at any alignment.
pub(crate) trait Lanes: Copy {
    type I: Copy;
    type F: Copy;
    /// Four codes for each of sixteen rows.
    type B: Copy;
    /// Four activations, broadcast to every row.
    type A: Copy;

    /// The offset that [`codes8`](Self::codes8) subtracts from every code; the tile corrects it with the sums of
    /// activations.
    const OFFSET: i32 = 0;

    unsafe fn splat(value: i32) -> Self::I;
    unsafe fn add(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn sub(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn mul(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn load_i32(at: *const u8) -> Self::I;
    /// Loads sixteen bytes, each widened.
    unsafe fn load_u8(at: *const u8) -> Self::I;
    /// Loads sixteen signed bytes, each widened.
    unsafe fn load_i8(at: *const u8) -> Self::I;
    /// Loads eight bytes, each 4-bit half widened, the low half first.
    unsafe fn load_u4(at: *const u8) -> Self::I;

    unsafe fn zero() -> Self::F;
    unsafe fn splat_f32(value: f32) -> Self::F;
    unsafe fn to_f32(a: Self::I) -> Self::F;
    unsafe fn as_f32(a: Self::I) -> Self::F;
    unsafe fn as_i32(a: Self::F) -> Self::I;
    /// `a · b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    unsafe fn mul_f32(a: Self::F, b: Self::F) -> Self::F;
    /// The maximum; `b` if either is NaN.
    unsafe fn max_f32(a: Self::F, b: Self::F) -> Self::F {
        let (mut left, mut right) = ([0.0; 16], [0.0; 16]);
        // SAFETY: the arrays hold the sixteen values that are stored and loaded; the caller guarantees that the
        // processor has the instruction set.
        unsafe {
            Self::store_f32(left.as_mut_ptr(), a);
            Self::store_f32(right.as_mut_ptr(), b);
            left.iter_mut().zip(right).for_each(|(a, b)| *a = if *a > b { *a } else { b });
            Self::load_f32(left.as_ptr().cast())
        }
    }
    unsafe fn load_f32(at: *const u8) -> Self::F;
    unsafe fn load_bf16(at: *const u8) -> Self::F;
    unsafe fn load_f16(at: *const u8) -> Self::F;
    /// Loads sixteen powers of two, E8M0.
    unsafe fn load_e8m0(at: *const u8) -> Self::F;
    /// Loads sixteen E4M3 numbers without a sign, each times `2⁻⁸`: the same bits, shifted, read as f16.
    unsafe fn load_e4m3(at: *const u8) -> Self::F;
    /// The lookup table of [`e2m1`](Self::e2m1).
    unsafe fn e2m1_table() -> Self::I;
    /// The values of E2M1 codes.
    unsafe fn e2m1(codes: Self::I, table: Self::I) -> Self::F;
    /// The lookup table of [`iq4`](Self::iq4).
    unsafe fn iq4_table() -> Self::I;
    /// The values of IQ4 codes.
    unsafe fn iq4(codes: Self::I, table: Self::I) -> Self::F;
    /// The values of E4M3 codes; NaN codes give ±480. Exact, also if the processor treats subnormals as zero.
    unsafe fn e4m3(codes: Self::I) -> Self::F;
    unsafe fn store_f32(at: *mut f32, a: Self::F);

    /// Loads the 64 bytes of a step of 4-bit codes: features 0 to 3, and 4 to 7.
    unsafe fn codes4(at: *const u8) -> [Self::B; 2];
    /// Loads the 64 bytes of a step of E2M1 codes, each replaced by twice its value plus [`E2M1_OFFSET`].
    unsafe fn codes_e2m1(at: *const u8) -> [Self::B; 2];
    /// Loads the 64 bytes of a step of IQ4 codes, each replaced by its value plus [`IQ4_OFFSET`] and minus
    /// [`OFFSET`](Self::OFFSET).
    unsafe fn codes_iq4(at: *const u8) -> [Self::B; 2];
    /// Loads step `step` of the unit at `at`, of codes of 5 or 6 bits.
    unsafe fn codes_in_unit<const CODES: usize>(at: *const u8, step: usize) -> [Self::B; 2];
    /// Loads the 128 bytes of a step of 8-bit codes, minus [`OFFSET`](Self::OFFSET).
    unsafe fn codes8(at: *const u8) -> [Self::B; 2];
    /// Loads the eight activations of a step.
    unsafe fn activations(at: *const i8) -> [Self::A; 2];
    /// Adds the eight products of a step to every row's sum; codes must be below 64.
    unsafe fn dot4(sum: Self::I, codes: [Self::B; 2], a: [Self::A; 2]) -> Self::I;
    /// Adds the eight products of a step to every row's sum, for codes loaded by `codes8` or `codes_iq4`.
    unsafe fn dot8(sum: Self::I, codes: [Self::B; 2], a: [Self::A; 2]) -> Self::I;
    /// Optionally adds the products of the first steps for all rows of a tile at once, and returns the number of these
    /// steps; the tile processes the others row by row. `at` points to the codes of the first of `NP` panels that are
    /// `panel` bytes apart, `a` to the activations of `MR` rows, in which steps are `strip` rows apart.
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
    /// Loads feature `feature` of a step of dense bf16, for every row.
    #[inline(always)]
    unsafe fn dense(at: *const u8, feature: usize) -> Self::F {
        let (pair, high) = crate::layout::dense_place(feature);
        // SAFETY: the caller guarantees that the pointer is valid for the 256 bytes of the step, and that the processor
        // has the instruction set; the array holds the sixteen values that are loaded.
        unsafe {
            let words = at.add(64 * pair).cast::<[u32; 16]>().read_unaligned();
            let values = words.map(|word| if high { word & 0xffff_0000 } else { word << 16 });
            Self::load_f32(values.as_ptr().cast())
        }
    }
    /// Loads the code of feature `part` of a step, or of a unit of steps, for every row.
    unsafe fn code<const BITS: usize>(at: *const u8, part: usize) -> Self::I;
    /// Prefetches the line at an address that need not be valid.
    unsafe fn prefetch(at: *const u8);
    /// Prefetches a line that will be written; the address need not be valid.
    #[inline(always)]
    unsafe fn prefetch_write(_at: *const u8) {}
}

/// Lanes that multiply float activations.
///
/// # Safety
/// See [`Lanes`].
pub(crate) trait FloatLanes: Lanes {
    /// The number of parts in which a step is multiplied.
    const PARTS: usize;
    /// Whether products are added one at a time, in order of features; results of all such lanes are bit-identical.
    const ORDERED: bool;
    type Table: Copy;
    /// The weights of a part, for every row.
    type W: Copy;

    /// The table of `code − centre`.
    unsafe fn centre(centre: i32) -> Self::Table;
    /// The table of the values of floating-point codes.
    unsafe fn values<const CODES: usize>() -> Self::Table;
    /// The weights of a part of the step, or of the unit of steps, that begins at `at`.
    unsafe fn weights<const CODES: usize>(at: *const u8, part: usize, table: Self::Table) -> Self::W;
    /// Adds the products of a part; `x` points to the 32 bytes of a row's step. On lanes that multiply bf16, values
    /// without `REST` are bf16 that have no remainders, so a step has 16 bytes.
    unsafe fn dot_float<const REST: bool>(sum: Self::F, w: Self::W, x: *const u8, part: usize) -> Self::F;
}

/// Lanes that multiply codes by probabilities, in the precision that is fastest on the instruction set.
///
/// # Safety
/// See [`Lanes`].
pub(crate) trait ValueLanes: FloatLanes {
    /// Whether there are enough registers for sixteen sums and their operands.
    const WIDE: bool;
    /// Bytes of the eight probabilities of a step.
    const STEP_BYTES: usize;

    /// Stores sixteen probabilities in the form in which they are read, in `2 · STEP_BYTES` bytes.
    unsafe fn store_probabilities(at: *mut u8, p: Self::F);
    /// Adds the products of a part; `p` points to a step's probabilities.
    unsafe fn dot_probabilities(sum: Self::F, w: Self::W, p: *const u8, part: usize) -> Self::F;
}

/// Implements [`FloatLanes`] and [`ValueLanes`] with one `f32` FMA per feature, in order.
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
                // SAFETY: the caller guarantees that the processor has the instruction set.
                unsafe { Self::splat(centre) }
            }
            #[inline(always)]
            unsafe fn values<const CODES: usize>() -> Self::Table {
                // SAFETY: the caller guarantees that the processor has the instruction set.
                unsafe {
                    match CODES {
                        $crate::simd::codes::E2M1 => Self::e2m1_table(),
                        $crate::simd::codes::IQ4 => Self::iq4_table(),
                        _ => Self::splat(0),
                    }
                }
            }
            #[inline(always)]
            unsafe fn weights<const CODES: usize>(at: *const u8, part: usize, table: Self::Table) -> Self::W {
                // SAFETY: the caller guarantees that the processor has the instruction set, and that the pointer is
                // valid for the bytes of the step.
                unsafe {
                    match CODES {
                        $crate::simd::codes::E2M1 => Self::e2m1(Self::code::<4>(at, part), table),
                        $crate::simd::codes::IQ4 => Self::iq4(Self::code::<4>(at, part), table),
                        $crate::simd::codes::E4M3 => Self::e4m3(Self::code::<8>(at, part)),
                        $crate::simd::codes::BF16 => Self::dense(at, part),
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
                // SAFETY: the caller guarantees that the pointer is valid for the eight floats of the step.
                let x = unsafe { x.cast::<f32>().add(part).read_unaligned() };
                // SAFETY: the caller guarantees that the processor has the instruction set.
                unsafe { Self::fma(w, Self::splat_f32(x), sum) }
            }
        }

        impl $crate::simd::ValueLanes for $lanes {
            const WIDE: bool = $wide;
            const STEP_BYTES: usize = 32;

            #[inline(always)]
            unsafe fn store_probabilities(at: *mut u8, p: Self::F) {
                // SAFETY: the caller guarantees that the pointer is valid for 64 bytes, and that the processor has the
                // instruction set.
                unsafe { Self::store_f32(at.cast(), p) }
            }
            #[inline(always)]
            unsafe fn dot_probabilities(sum: Self::F, w: Self::W, p: *const u8, part: usize) -> Self::F {
                // SAFETY: the caller guarantees that the pointer is valid for the eight probabilities of the step, and
                // that the processor has the instruction set.
                unsafe { Self::dot_float::<true>(sum, w, p, part) }
            }
        }
    };
}
pub(crate) use one_by_one;
