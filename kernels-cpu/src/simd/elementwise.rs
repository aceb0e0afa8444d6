//! Operations on sixteen neighbouring values of a row, for norms, activations, rounding and transforms.
//!
//! All operations are correctly rounded, so results are bit-identical on all instruction sets.

use core::array::from_fn;

use half::{bf16, f16};

use super::Lanes;
use super::scalar::Scalar;
use crate::activation::split::{in_pairs, split_in_pairs};

/// Lanes that work along rows.
///
/// # Safety
/// See [`Lanes`].
pub(crate) trait RowLanes: Lanes {
    /// Whether one register holds all lanes, and there are 32 registers.
    const WIDE: bool;

    unsafe fn add_f32(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub_f32(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div_f32(a: Self::F, b: Self::F) -> Self::F;
    /// The minimum; `b` if either is NaN.
    unsafe fn min_f32(a: Self::F, b: Self::F) -> Self::F;
    /// Rounds to integers, half to even.
    unsafe fn round(a: Self::F) -> Self::F;
    /// `v`, or 0 where `a` is below `limit`.
    unsafe fn unless_below(a: Self::F, limit: Self::F, v: Self::F) -> Self::F;
    /// `p · 2^n`, exact: `n` is an integer from −126 to 126, and `p` and the result are normal.
    unsafe fn times_power(p: Self::F, n: Self::F) -> Self::F;
    /// Flips the sign of `a` where `signs` is negative.
    unsafe fn flip(a: Self::F, signs: Self::F) -> Self::F;
    /// Moves lane `i ^ DISTANCE` to lane `i`; the distance is 1, 2, 4 or 8.
    unsafe fn partner<const DISTANCE: usize>(a: Self::F) -> Self::F;

    /// Converts floats that are integers to `i32`.
    unsafe fn to_i32(a: Self::F) -> Self::I;
    unsafe fn max_i32(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I;
    /// Stores the first eight integers as bytes at `low`, and the others at `high`; all are within −128 to 127.
    unsafe fn store_codes(a: Self::I, low: *mut i8, high: *mut i8);
    /// Stores sixteen bf16, rounded half to even.
    unsafe fn store_bf16(at: *mut bf16, a: Self::F);
    /// Stores sixteen f16, rounded half to even.
    unsafe fn store_f16(at: *mut f16, a: Self::F);

    /// The sum of all lanes, modulo `2³²`.
    unsafe fn total(a: Self::I) -> i32;
    unsafe fn largest(a: Self::I) -> i32;

    /// Packs steps of eight floats as `PARTS` bf16 each, and adds the floats to `sum`, see
    /// [`split`](crate::activation::split). Part `p` of step `s` is written to four words at `p · part + 4 s`.
    #[inline(always)]
    unsafe fn split_steps<const PARTS: usize>(
        x: *const f32,
        steps: usize,
        to: *mut u32,
        part: usize,
        sum: &mut [f32; 8],
    ) {
        for step in 0..steps {
            // SAFETY: the caller guarantees that the pointers are valid for these steps and for the words of all parts.
            unsafe {
                let values = x.add(8 * step).cast::<[f32; 8]>().read_unaligned();
                sum.iter_mut().zip(values).for_each(|(sum, v)| *sum += v);
                for (p, words) in split_in_pairs::<PARTS>(values).into_iter().enumerate() {
                    to.add(p * part + 4 * step).cast::<[u32; 4]>().write_unaligned(words);
                }
            }
        }
    }

    /// Packs steps of eight floats as `PARTS` bf16 each, one or two, and adds the floats to `sum`. The parts of a pair
    /// of values are neighbouring words, and steps are `stride` words apart.
    #[inline(always)]
    unsafe fn pair_steps<const PARTS: usize>(
        x: *const f32,
        steps: usize,
        to: *mut u32,
        stride: usize,
        sum: &mut [f32; 8],
    ) {
        for step in 0..steps {
            // SAFETY: the caller guarantees that the pointers are valid for these steps and their words.
            unsafe {
                let values = x.add(8 * step).cast::<[f32; 8]>().read_unaligned();
                sum.iter_mut().zip(values).for_each(|(sum, v)| *sum += v);
                in_pairs::<PARTS>(values, core::slice::from_raw_parts_mut(to.add(step * stride), 4 * PARTS));
            }
        }
    }
}

impl RowLanes for Scalar {
    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn add_f32(a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub_f32(a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn div_f32(a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn min_f32(a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn round(a: Self::F) -> Self::F {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    unsafe fn unless_below(a: Self::F, limit: Self::F, v: Self::F) -> Self::F {
        from_fn(|i| if a[i] < limit[i] { 0.0 } else { v[i] })
    }
    #[inline(always)]
    unsafe fn times_power(p: Self::F, n: Self::F) -> Self::F {
        from_fn(|i| p[i] * f32::from_bits(((n[i] as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn flip(a: Self::F, signs: Self::F) -> Self::F {
        from_fn(|i| f32::from_bits(a[i].to_bits() ^ (signs[i].to_bits() & 0x8000_0000)))
    }
    #[inline(always)]
    unsafe fn partner<const DISTANCE: usize>(a: Self::F) -> Self::F {
        from_fn(|i| a[i ^ DISTANCE])
    }
    #[inline(always)]
    unsafe fn to_i32(a: Self::F) -> Self::I {
        a.map(|v| v as i32)
    }
    #[inline(always)]
    unsafe fn max_i32(a: Self::I, b: Self::I) -> Self::I {
        from_fn(|i| a[i].max(b[i]))
    }
    #[inline(always)]
    unsafe fn and(a: Self::I, b: Self::I) -> Self::I {
        from_fn(|i| a[i] & b[i])
    }
    #[inline(always)]
    unsafe fn store_codes(a: Self::I, low: *mut i8, high: *mut i8) {
        let codes = a.map(|v| v as i8);
        // SAFETY: the caller guarantees that each pointer is valid for eight bytes.
        unsafe {
            codes.as_ptr().copy_to_nonoverlapping(low, 8);
            codes.as_ptr().add(8).copy_to_nonoverlapping(high, 8);
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(at: *mut bf16, a: Self::F) {
        // SAFETY: the caller guarantees that the pointer is valid for 16 values.
        unsafe { at.cast::<[bf16; 16]>().write_unaligned(a.map(bf16::from_f32)) }
    }
    #[inline(always)]
    unsafe fn store_f16(at: *mut f16, a: Self::F) {
        // SAFETY: the caller guarantees that the pointer is valid for 16 values.
        unsafe { at.cast::<[f16; 16]>().write_unaligned(a.map(f16::from_f32)) }
    }
    #[inline(always)]
    unsafe fn total(a: Self::I) -> i32 {
        a.into_iter().fold(0, i32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn largest(a: Self::I) -> i32 {
        a.into_iter().fold(i32::MIN, i32::max)
    }
}

/// Functions of a module over [`RowLanes`], compiled for each instruction set and selected by an
/// [`IsaToken`](crate::IsaToken).
macro_rules! dispatched {
    ($rows:ident, $($(#[$doc:meta])* fn $name:ident [$($e:ident)?] [$($const:ident)?]
        ($($arg:ident: $ty:ty),* $(,)?) $(-> $out:ty)?;)*) => {$(
        $(#[$doc])*
        pub(crate) fn $name<$($e: Element)? $(const $const: bool)?>(
            token: $crate::IsaToken, $($arg: $ty),*
        ) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2<$($e: Element)? $(const $const: bool)?>($($arg: $ty),*) $(-> $out)? {
                // SAFETY: compiled with the features that the lanes require, which the caller guarantees.
                unsafe { $rows::$name::<$crate::simd::avx2::Avx2, $($e)? $($const)?>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
            unsafe fn avx512<$($e: Element)? $(const $const: bool)?>($($arg: $ty),*) $(-> $out)? {
                // SAFETY: compiled with the features that the lanes require, which the caller guarantees.
                unsafe { $rows::$name::<$crate::simd::avx512::Avx512Vnni, $($e)? $($const)?>($($arg),*) }
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon")]
            unsafe fn neon<$($e: Element)? $(const $const: bool)?>($($arg: $ty),*) $(-> $out)? {
                // SAFETY: compiled with the features that the lanes require, which the caller guarantees.
                unsafe { $rows::$name::<$crate::simd::neon::Neon, $($e)? $($const)?>($($arg),*) }
            }
            // SAFETY: the `IsaToken` proves that the processor has the instructions of the chosen function; `Scalar`
            // needs none.
            unsafe {
                match token.isa() {
                    #[cfg(target_arch = "x86_64")]
                    $crate::Isa::Avx2 | $crate::Isa::AvxVnni => avx2::<$($e)? $($const)?>($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::Isa::Avx512Vnni | $crate::Isa::Avx512Bf16 | $crate::Isa::Amx => {
                        avx512::<$($e)? $($const)?>($($arg),*)
                    }
                    #[cfg(target_arch = "aarch64")]
                    $crate::Isa::Neon | $crate::Isa::NeonDotprod | $crate::Isa::NeonI8mm => {
                        neon::<$($e)? $($const)?>($($arg),*)
                    }
                    _ => $rows::$name::<$crate::simd::scalar::Scalar, $($e)? $($const)?>($($arg),*),
                }
            }
        }
    )*};
}
pub(crate) use dispatched;
