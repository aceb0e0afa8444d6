//! The steps other than products of tiles: expanding codes, adding sums to the totals, and writing results.

use core::ops::Range;

use super::{AHEAD, Tiled};
use crate::layout::{LINE, PANEL_ROWS, ScaleType};
use crate::linear::dispatch::{FLOAT, PROGRESSIVE};
use crate::linear::prefetcher::Prefetcher;
use crate::linear::tile::{self, Tile, scales_of};
use crate::simd::tiles::{ROW, TileUnit};
use crate::simd::{Lanes, codes};

/// Expands the codes of some blocks of `count` panels, starting at `weights`.
///
/// # Safety
/// See [`multiply`](super::multiply); `to` must be valid for all blocks of `count` panels that are `to_panel` bytes
/// apart.
#[inline(always)]
pub(in crate::linear) unsafe fn expand<U: TileUnit, const CODES: usize, const KIND: usize>(
    t: &Tiled<'_>,
    weights: *const u8,
    count: usize,
    blocks: Range<usize>,
    to: *mut u8,
    to_panel: usize,
) {
    let (layout, tiling) = (t.layout, t.tiling);
    let (steps, step_bytes) = (layout.steps(), layout.step_bytes());
    let expanded = if KIND == FLOAT { 256 } else { 128 };
    // With up to two panels, `products` prefetches the next codes.
    let (panels, waits) = (count, count > 2);
    let ahead = Prefetcher::new(layout, panels, AHEAD);
    let centre = layout.zero_point().map_or(1 << (codes::bits(CODES) - 1), i32::from);
    // SAFETY: the caller guarantees the contract of `expand`; every step and every group is less than its count.
    unsafe {
        let table = U::table::<CODES>(centre);
        for (i, block) in blocks.enumerate() {
            let (g, first) = (block / tiling.blocks, block % tiling.blocks * tiling.steps);
            let count = tiling.steps.min(steps - first);
            for p in 0..panels {
                let panel = weights.add(p * layout.panel_bytes());
                let byte = (g * steps + first) * step_bytes;
                let to = to.add(p * to_panel + i * tiling.steps * expanded);
                let minus = match layout.zero_point() {
                    Some(zero_point) => U::Lanes::splat(i32::from(zero_point)),
                    None => {
                        let zeros = panel.add(layout.zeros_at() + g * PANEL_ROWS * codes::bits(CODES) / 8);
                        if codes::bits(CODES) == 4 {
                            U::Lanes::load_u4(zeros)
                        } else {
                            U::Lanes::load_u8(zeros)
                        }
                    }
                };
                // Four equal bytes.
                let minus = U::Lanes::mul(minus, U::Lanes::splat(0x0101_0101));
                for step in 0..count {
                    let (byte, to) = (byte + step * step_bytes, to.add(step * expanded));
                    let from = panel.add(byte);
                    if waits {
                        let next = from.wrapping_add(ahead.of(byte));
                        U::Lanes::prefetch(next);
                        if codes::bits(CODES) == 8 {
                            U::Lanes::prefetch(next.wrapping_add(LINE));
                        }
                    }
                    match (KIND, CODES) {
                        (FLOAT, _) => U::expand_bf16::<CODES>(from, table, to),
                        (_, codes::E2M1) => U::expand_e2m1(from, to),
                        (_, 4) => U::expand_signed(from, minus, to),
                        _ => from.copy_to_nonoverlapping(to, expanded),
                    }
                }
                to.add(count * expanded).write_bytes(0, (tiling.steps - count) * expanded);
            }
        }
    }
}

/// Adds the sums of a group to the totals of a tile.
///
/// # Safety
/// See [`multiply`](super::multiply); `sums` and `totals` must be tiles of the scratch memory, and the group one of the
/// panel's.
#[inline(always)]
pub(in crate::linear) unsafe fn join<L: Lanes, const CODES: usize, const KIND: usize>(
    t: &Tiled<'_>,
    panel: *const u8,
    tile: usize,
    g: usize,
    sums: *const u8,
    totals: *mut f32,
) {
    // SAFETY: the caller guarantees the contract of `join`.
    unsafe {
        match (KIND, g) {
            (FLOAT, 0) => join_floats::<L, CODES, true>(t, panel, tile, g, sums, totals),
            (FLOAT, _) => join_floats::<L, CODES, false>(t, panel, tile, g, sums, totals),
            _ if codes::bits(CODES) == 4 && t.zero == 0 => {
                if g == 0 {
                    join_integers::<L, CODES, KIND, true, true>(t, panel, tile, g, sums, totals);
                } else {
                    join_integers::<L, CODES, KIND, false, true>(t, panel, tile, g, sums, totals);
                }
            }
            (_, 0) => join_integers::<L, CODES, KIND, true, false>(t, panel, tile, g, sums, totals),
            _ => join_integers::<L, CODES, KIND, false, false>(t, panel, tile, g, sums, totals),
        }
    }
}

/// Adds a group's integer sums to the totals, times its scale. With `PLAIN` nothing is subtracted from the sums.
///
/// # Safety
/// See [`join`].
#[inline(always)]
unsafe fn join_integers<
    L: Lanes,
    const CODES: usize,
    const KIND: usize,
    const FIRST: bool,
    const PLAIN: bool,
>(
    t: &Tiled<'_>,
    panel: *const u8,
    tile: usize,
    g: usize,
    sums: *const u8,
    totals: *mut f32,
) {
    let layout = t.layout;
    // SAFETY: the caller guarantees the contract of `join`; rows of a slot are 64 bytes.
    unsafe {
        let scales = scales_of::<L, 1>(layout.scales(), panel.add(layout.scales_at()), 0, g * PANEL_ROWS)[0];
        // The contribution of the zero point of the activations.
        let mut shift = L::splat(0);
        if !PLAIN && t.zero != 0 {
            let sums = L::load_i32(panel.add(layout.sums_at() + 4 * g * PANEL_ROWS));
            shift = L::mul(sums, L::splat(t.zero));
        }
        let zeros = match layout.zero_point() {
            Some(zero_point) => L::splat(i32::from(zero_point)),
            None if codes::bits(CODES) == 8 => L::load_u8(panel.add(layout.zeros_at() + g * PANEL_ROWS)),
            // Codes of 4 bits were expanded with their zero points subtracted.
            None => L::splat(0),
        };
        let row_sums = t.sums.cast::<i32>().add((tile * t.tiling.groups + g) * t.tiling.rows);
        for r in 0..t.rows_of(tile) {
            let mut sum = L::load_i32(sums.add(r * ROW));
            if !PLAIN {
                sum = L::sub(sum, shift);
            }
            if codes::bits(CODES) == 8 {
                sum = L::sub(sum, L::mul(zeros, L::splat(*row_sums.add(r))));
            }
            let at = totals.add(r * PANEL_ROWS);
            let total = if FIRST { L::zero() } else { L::load_f32(at.cast()) };
            let total = if KIND == PROGRESSIVE {
                L::as_f32(L::add(L::as_i32(total), L::mul(sum, L::as_i32(scales))))
            } else {
                L::fma(L::to_f32(sum), scales, total)
            };
            L::store_f32(at, total);
        }
    }
}

/// Adds a group's float sums to the totals, times its scale. If zero points are stored, the centre minus the zero
/// point, times the sum of the activations, is added to the sums first.
///
/// # Safety
/// See [`join`].
#[inline(always)]
unsafe fn join_floats<L: Lanes, const CODES: usize, const FIRST: bool>(
    t: &Tiled<'_>,
    panel: *const u8,
    tile: usize,
    g: usize,
    sums: *const u8,
    totals: *mut f32,
) {
    let layout = t.layout;
    // SAFETY: the caller guarantees the contract of `join`; rows of a slot are 64 bytes.
    unsafe {
        let scales = scales_of::<L, 1>(layout.scales(), panel.add(layout.scales_at()), 0, g * PANEL_ROWS)[0];
        let progressive = layout.scales() == ScaleType::Progressive;
        let scales = if progressive { L::to_f32(L::as_i32(scales)) } else { scales };
        let mut zeros = L::zero();
        if layout.zero_point().is_none() {
            let at = panel.add(layout.zeros_at() + g * PANEL_ROWS * codes::bits(CODES) / 8);
            let stored = if codes::bits(CODES) == 4 { L::load_u4(at) } else { L::load_u8(at) };
            zeros = L::to_f32(L::sub(L::splat(1 << (codes::bits(CODES) - 1)), stored));
        }
        let row_sums = t.sums.cast::<f32>().add((tile * t.tiling.groups + g) * t.tiling.rows);
        for r in 0..t.rows_of(tile) {
            let mut sum = L::load_f32(sums.add(r * ROW));
            if layout.zero_point().is_none() {
                sum = L::fma(zeros, L::splat_f32(*row_sums.add(r)), sum);
            }
            let at = totals.add(r * PANEL_ROWS);
            let total = if FIRST { L::zero() } else { L::load_f32(at.cast()) };
            L::store_f32(at, L::fma(sum, scales, total));
        }
    }
}

/// Multiplies the totals of a tile by the remaining scales, adds the bias, and writes the results to the columns of
/// panel `number`.
///
/// # Safety
/// See [`multiply`](super::multiply); all groups must have been added to the totals.
#[inline(always)]
pub(in crate::linear) unsafe fn finish<L: Lanes, const KIND: usize>(
    t: &Tiled<'_>,
    panel: *const u8,
    number: usize,
    tile: usize,
    totals: *const f32,
) {
    let (n, column) = (t.layout.n(), number * PANEL_ROWS);
    for r in 0..t.rows_of(tile) {
        let row = tile * t.tiling.rows + r;
        let out = Tile {
            layout: t.layout,
            weights: panel,
            strip: 1,
            activations: core::ptr::null(),
            sums: core::ptr::null(),
            eights: core::ptr::null(),
            scales: if t.scales.is_null() { t.scales } else { t.scales.wrapping_add(row) },
            zero: t.zero,
            rest: false,
            bias: if t.bias.is_null() { t.bias } else { t.bias.wrapping_add(column) },
            out: t.out.of(row, column),
            stride: t.out.stride,
            columns: n - column,
        };
        // SAFETY: the caller guarantees the contract of `finish`; a row of totals has 16 values, and rows and columns
        // are within `out`.
        unsafe {
            let total = L::load_f32(totals.add(r * PANEL_ROWS).cast());
            let total = if KIND == PROGRESSIVE { L::to_f32(L::as_i32(total)) } else { total };
            tile::finish::<L, 1, 1>(&out, [[total]]);
        }
    }
}
