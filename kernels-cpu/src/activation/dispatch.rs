//! The loops of [`rows`](super::rows), compiled for each instruction set.

use super::RowLayout;
use super::element::Element;
use super::rows::{self, Grid, Place};
use crate::simd::scalar::Scalar;
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2::Avx2, avx512::Avx512Vnni};
use crate::{Isa, IsaToken};

macro_rules! dispatched {
    ($($(#[$doc:meta])* fn $name:ident [$($e:ident)?] [$($const:ident)?] ($($arg:ident: $ty:ty),*) $(-> $out:ty)?;)*) => {$(
        $(#[$doc])*
        pub(super) fn $name<$($e: Element)? $(const $const: bool)?>(token: IsaToken, $($arg: $ty),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2<$($e: Element)? $(const $const: bool)?>($($arg: $ty),*) $(-> $out)? {
                // SAFETY: compiled for the instructions that the lanes ask for.
                unsafe { rows::$name::<Avx2, $($e)? $($const)?>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
            unsafe fn avx512<$($e: Element)? $(const $const: bool)?>($($arg: $ty),*) $(-> $out)? {
                // SAFETY: compiled for the instructions that the lanes ask for.
                unsafe { rows::$name::<Avx512Vnni, $($e)? $($const)?>($($arg),*) }
            }
            // SAFETY: the token proves the instructions; `Scalar` asks for none.
            unsafe {
                match token.isa() {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 | Isa::AvxVnni => avx2::<$($e)? $($const)?>($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512Vnni | Isa::Avx512Bf16 => avx512::<$($e)? $($const)?>($($arg),*),
                    _ => rows::$name::<Scalar, $($e)? $($const)?>($($arg),*),
                }
            }
        }
    )*};
}

dispatched! {
    /// The largest magnitude; infinite or NaN where any value is.
    fn largest[][](row: &[f32]) -> f32;
    /// Values as `f32`, and their largest magnitude.
    fn widen[E][](x: &[E], out: &mut [f32]) -> f32;
    /// A row of RMSNorm, and its largest magnitude.
    fn rms_norm[E][](x: &[E], residual: Option<&mut [E]>, weight: &[f32], eps: f32, out: &mut [f32]) -> f32;
    /// A row of `silu(gate) · up`, and its largest magnitude.
    fn silu_mul[E][](gate: &[E], up: &[E], out: &mut [f32]) -> f32;
    /// Rounds a row, and adds it up by groups.
    fn quantize[][STATIC](row: &[f32], grid: Grid, to: Place<'_>);
    /// Packs a row of floats, in two halves with `SPLIT`.
    fn pack_row[][SPLIT](row: &[f32], layout: RowLayout, place: [usize; 2], words: &mut [u32], sums: &mut [f32]);
}

/// Packs a row of floats as these instructions take it.
pub(super) fn pack(
    token: IsaToken,
    row: &[f32],
    layout: RowLayout,
    place: [usize; 2],
    words: &mut [u32],
    sums: &mut [f32],
) {
    if token.isa() == Isa::Avx512Bf16 {
        pack_row::<true>(token, row, layout, place, words, sums);
    } else {
        pack_row::<false>(token, row, layout, place, words, sums);
    }
}
