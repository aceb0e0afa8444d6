//! The tile unit of x86-64 processors (AMX), by inline assembly: its intrinsics and target features are not stable.
//!
//! No function is compiled for AMX, so the compiler itself uses no tile registers, and tiles keep their values between
//! the assembly blocks below, which are volatile and therefore not reordered.

use core::arch::asm;
use core::arch::x86_64::*;

use super::{Shape, TileUnit};
use crate::simd::avx512::{Avx512Bf16, Avx512Vnni};
use crate::simd::{E2M1_OFFSET, FloatLanes, Lanes, codes};

/// The configured unit of this thread. Requires [`Isa::Amx`](crate::Isa::Amx).
pub(crate) struct Amx(());

/// The operand of `ldtilecfg`: palette, first row, and for 16 tiles the bytes per row and the rows.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    fn of(shape: Shape) -> Self {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        for t in super::SUMS {
            (rows[t], row_bytes[t]) = (shape.rows as u8, 64);
        }
        for t in super::RIGHT {
            (rows[t], row_bytes[t]) = (shape.depth as u8, 64);
        }
        for t in super::LEFT {
            (rows[t], row_bytes[t]) = (shape.rows as u8, 4 * shape.depth as u16);
        }
        Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
    }
}

impl Drop for Amx {
    fn drop(&mut self) {
        // SAFETY: only `configure` creates a value, so the processor has AMX; the instruction changes nothing but
        // tiles.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) }
    }
}

/// `sum += left · right` by one instruction on these tiles.
macro_rules! product {
    ($instruction:literal) => {
        // SAFETY: the caller guarantees that the processor has the instruction; `self` exists, so the unit is
        // configured.
        unsafe {
            asm!(concat!($instruction, " tmm{sum}, tmm{left}, tmm{right}"), sum = const SUM, left = const LEFT,
                 right = const RIGHT, options(nomem, nostack, preserves_flags))
        }
    };
}

impl TileUnit for Amx {
    type Lanes = Avx512Vnni;
    type Table = <Avx512Bf16 as FloatLanes>::Table;

    #[inline(always)]
    unsafe fn configure(shape: Shape) -> Self {
        debug_assert!((1..=16).contains(&shape.rows) && (1..=16).contains(&shape.depth));
        let config = Config::of(shape);
        // SAFETY: the caller guarantees that the processor has the instruction; the structure has the 64 bytes that it
        // reads.
        unsafe { asm!("ldtilecfg [{0}]", in(reg) &config, options(readonly, nostack, preserves_flags)) }
        Self(())
    }
    #[inline(always)]
    unsafe fn zero<const T: usize>(&mut self) {
        // SAFETY: the caller guarantees that the processor has the instruction; `self` exists, so the unit is
        // configured.
        unsafe { asm!("tilezero tmm{t}", t = const T, options(nomem, nostack, preserves_flags)) }
    }
    #[inline(always)]
    unsafe fn load<const T: usize>(&mut self, at: *const u8, stride: usize) {
        // SAFETY: the caller guarantees that the processor has the instruction, and that the pointer is valid for the
        // rows; `self` exists, so the unit is configured.
        unsafe {
            asm!("tileloadd tmm{t}, [{at} + {stride}*1]", t = const T, at = in(reg) at, stride = in(reg) stride,
                 options(readonly, nostack, preserves_flags))
        }
    }
    #[inline(always)]
    unsafe fn store<const SUM: usize>(&mut self, at: *mut u8) {
        // SAFETY: the caller guarantees that the processor has the instruction, and that the pointer is valid for the
        // rows; `self` exists, so the unit is configured.
        unsafe {
            asm!("tilestored [{at} + {stride}*1], tmm{t}", t = const SUM, at = in(reg) at,
                 stride = in(reg) super::ROW, options(nostack, preserves_flags))
        }
    }
    #[inline(always)]
    unsafe fn add_signed<const SUM: usize, const LEFT: usize, const RIGHT: usize>(&mut self) {
        product!("tdpbssd");
    }
    #[inline(always)]
    unsafe fn add_unsigned<const SUM: usize, const LEFT: usize, const RIGHT: usize>(&mut self) {
        product!("tdpbsud");
    }
    #[inline(always)]
    unsafe fn add_bf16<const SUM: usize, const LEFT: usize, const RIGHT: usize>(&mut self) {
        product!("tdpbf16ps");
    }

    #[inline(always)]
    unsafe fn expand_signed(step: *const u8, minus: __m512i, to: *mut u8) {
        // SAFETY: the caller guarantees AVX-512 and pointers that are valid for reading 64 bytes and writing 128.
        unsafe {
            let [low, high] = Avx512Vnni::codes4(step);
            _mm512_storeu_si512(to.cast(), _mm512_sub_epi8(low, minus));
            _mm512_storeu_si512(to.add(64).cast(), _mm512_sub_epi8(high, minus));
        }
    }
    #[inline(always)]
    unsafe fn expand_e2m1(step: *const u8, to: *mut u8) {
        // SAFETY: the caller guarantees AVX-512 and pointers that are valid for reading 64 bytes and writing 128.
        unsafe {
            let offset = _mm512_set1_epi8(E2M1_OFFSET as i8);
            let [low, high] = Avx512Vnni::codes_e2m1(step);
            _mm512_storeu_si512(to.cast(), _mm512_sub_epi8(low, offset));
            _mm512_storeu_si512(to.add(64).cast(), _mm512_sub_epi8(high, offset));
        }
    }
    #[inline(always)]
    unsafe fn table<const CODES: usize>(centre: i32) -> Self::Table {
        // SAFETY: the caller guarantees that the processor has AVX-512.
        unsafe {
            match CODES {
                codes::E2M1 | codes::E4M3 => Avx512Bf16::values::<CODES>(),
                _ => Avx512Bf16::centre(centre),
            }
        }
    }
    #[inline(always)]
    unsafe fn expand_bf16<const CODES: usize>(step: *const u8, table: Self::Table, to: *mut u8) {
        // SAFETY: the caller guarantees that the processor has AVX-512 with BF16, and that the pointers are valid for
        // reading the step and writing 256 bytes.
        unsafe {
            for part in 0..Avx512Bf16::PARTS {
                let pairs = Avx512Bf16::weights::<CODES>(step, part, table);
                _mm512_storeu_si512(
                    to.add(64 * part).cast(),
                    core::mem::transmute::<__m512bh, __m512i>(pairs),
                );
            }
        }
    }
}
