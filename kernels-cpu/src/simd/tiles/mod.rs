//! A tile unit: eight registers of up to 16 rows of 64 bytes, and products of two of them added to a third.
//!
//! Kernels are written once over [`TileUnit`]. [`amx::Amx`] is the hardware; [`emulated::Emulated`] is a bit-exact
//! emulation in portable code, for tests.
//!
//! Weights are the right operand of a product. A row of its tile belongs to four bytes of a row of the left operand: it
//! holds, for each of 16 output features, four neighbouring codes or two neighbouring bf16. This is the order of a
//! panel's steps ([`layout`](crate::layout)), so codes of 8 bits can be multiplied in place. Others are expanded step
//! by step.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
pub(crate) mod emulated;

use super::Lanes;

pub(crate) const ROW: usize = 64;
pub(crate) const TILE: usize = 16 * ROW;

/// Sums, `[rows, 16]` of 32 bits each.
pub(crate) const SUMS: core::ops::Range<usize> = 0..4;
/// Right operands, `[depth, 64 bytes]`.
pub(crate) const RIGHT: core::ops::Range<usize> = 4..6;
/// Left operands, `[rows, 4 · depth bytes]`.
pub(crate) const LEFT: core::ops::Range<usize> = 6..8;

/// The sizes of all tiles during a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Rows of left operands and sums: 1 to 16.
    pub(crate) rows: usize,
    /// Rows of right operands, a quarter of the bytes per row of left operands: 1 to 16.
    pub(crate) depth: usize,
}

/// A unit that multiplies tiles. A value represents the configured unit of one thread; dropping it releases the unit.
///
/// # Safety
/// Methods may be called only if the processor has the instructions of the implementation. `SUM`, `LEFT` and `RIGHT`
/// must be tiles of the ranges of these names; pointers must be valid for the rows of a tile of the configured shape,
/// `stride` bytes apart, at any alignment.
pub(crate) trait TileUnit: Sized {
    type Lanes: Lanes;
    /// The table that converts codes to pairs of bf16.
    type Table: Copy;

    /// Configures the unit, with all tiles zero. Its previous state is lost.
    unsafe fn configure(shape: Shape) -> Self;

    unsafe fn zero<const T: usize>(&mut self);
    unsafe fn load<const T: usize>(&mut self, at: *const u8, stride: usize);
    /// Stores sums, [`ROW`] bytes per row.
    unsafe fn store<const SUM: usize>(&mut self, at: *mut u8);
    /// Adds the products of signed bytes with signed bytes; sums are modulo `2³²`.
    unsafe fn add_signed<const SUM: usize, const LEFT: usize, const RIGHT: usize>(&mut self);
    /// Adds the products of signed bytes on the left with unsigned bytes on the right; sums are modulo `2³²`.
    unsafe fn add_unsigned<const SUM: usize, const LEFT: usize, const RIGHT: usize>(&mut self);
    /// Adds the products of bf16 in `f32`. For each output, even and odd positions are summed from zero in order, each
    /// product added with one rounding; then the two sums are added, and the result to the output. Subnormal operands
    /// and results count as zero.
    unsafe fn add_bf16<const SUM: usize, const LEFT: usize, const RIGHT: usize>(&mut self);

    /// Expands a step of 64 bytes of 4-bit codes to 128 bytes at `to`, with `minus`, four equal bytes per row,
    /// subtracted.
    unsafe fn expand_signed(step: *const u8, minus: <Self::Lanes as Lanes>::I, to: *mut u8);
    /// Expands a step of 64 bytes of E2M1 codes to 128 bytes at `to`, each twice its value.
    unsafe fn expand_e2m1(step: *const u8, to: *mut u8);
    /// The table for [`expand_bf16`](Self::expand_bf16), which subtracts `centre` from integer codes.
    unsafe fn table<const CODES: usize>(centre: i32) -> Self::Table;
    /// Expands a step of codes to 256 bytes of pairs of bf16 at `to`: the values of floating-point codes, or integer
    /// codes minus the centre.
    unsafe fn expand_bf16<const CODES: usize>(step: *const u8, table: Self::Table, to: *mut u8);
}

#[cfg(test)]
mod tests;
