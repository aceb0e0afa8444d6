//! Products on a tile unit: 16 rows of activations times 16 output features, for as many input features as a tile holds.
//!
//! A piece of work is up to [`SLOTS`] / 2 row tiles times some panels. Its input features are walked in
//!
//! - stretches, whose activations stay in the second cache while all panels pass. Between stretches the totals are kept in
//!   `out`;
//! - chunks, of which two panels' codes (four where there is one row tile) are expanded into the first cache, once for
//!   all rows;
//! - blocks, which a tile holds. Two row tiles times two panels are four products for four loads.
//!
//! The sums of a group start from zero in a tile, and at its end join the totals as in [`tile`](super::tile) and
//! [`float_tile`](super::float_tile): one multiply-add in `f32` for each group, in order. Integers are exact, so results
//! equal those of all other paths. Codes of 4 bits are expanded less their zero, which fits a signed byte; codes of 8 bits
//! are multiplied as they are, and what their zeros count too much is taken off when the group ends.
//!
//! Of floats a group's sums are added block by block and, within a block, part by part, whatever the number of rows: a
//! row's bits depend on the row alone. Each block is summed as [`TileUnit::add_bf16`] says. A group's result is within
//! `(k + 4) · 2⁻²³ Σ |q − c| |x|` of the exact sum of the products of the parts.
#![allow(clippy::too_many_arguments, reason = "a product is what they all say")]

use core::mem::MaybeUninit;
use core::ops::Range;

use super::ahead::Ahead;
use super::dispatch::{FLOAT, PROGRESSIVE};
use super::tile::{Tile, finish, scales_of};
use crate::activation::tiles::Tiling;
use crate::layout::{Layout, PANEL_ROWS, STEP, ScaleType};
use crate::simd::Lanes;
use crate::simd::tiles::{ROW, Shape, TILE, TileUnit};

/// So many rows are multiplied by tiles if activations are integers: fewer wait for memory on any path.
pub(crate) const TILED_ROWS: usize = 16;
/// Tiles of sums that a piece of work keeps, row tiles times panels.
pub(crate) const SLOTS: usize = 16;
/// Tiles of expanded codes.
const RIGHT: usize = 16;
/// Bytes of activations of a stretch.
const STRETCH: usize = 1 << 20;
/// Bytes ahead within a panel that codes are asked for.
const AHEAD: usize = 4096;

/// What is multiplied, and where results go.
pub(super) struct Tiled<'a> {
    pub(super) layout: &'a Layout,
    /// The packed matrix.
    pub(super) weights: *const u8,
    pub(super) m: usize,
    pub(super) tiling: Tiling,
    /// Activations in the order of the tiling, and the sums over groups beside them.
    pub(super) tiles: *const u8,
    pub(super) sums: *const u8,
    /// Scales of the activations, `[m]`, or null where these are floats.
    pub(super) scales: *const f32,
    /// Zero of all activations.
    pub(super) zero: i32,
    /// `[n]` or null.
    pub(super) bias: *const f32,
    /// `[m, n]`
    pub(super) out: *mut f32,
}

/// Where intermediate results lie, on the stack: what is multiplied allocates nothing.
#[repr(C, align(64))]
struct Scratch {
    /// Expanded codes, a panel after the other.
    right: [MaybeUninit<u8>; RIGHT * TILE],
    /// Sums of a group that is not complete, `[row tiles][panels][16][16]`.
    sums: [MaybeUninit<u8>; SLOTS * TILE],
    /// Totals, the same; of progressive weights the bits of integers.
    totals: [MaybeUninit<u8>; SLOTS * TILE],
}

/// Multiplies some row tiles, at most [`SLOTS`] / 2, with some panels.
///
/// # Safety
/// The processor must have what `U` and its lanes need. All pointers must be valid for what their fields say, the ranges
/// within them, and nothing else may write to these rows and columns of `out` meanwhile.
#[inline(always)]
pub(super) unsafe fn multiply<U: TileUnit, const BITS: usize, const KIND: usize>(
    t: &Tiled<'_>,
    tiles: Range<usize>,
    panels: Range<usize>,
) {
    debug_assert!(2 * tiles.len() <= SLOTS);
    let mut scratch = MaybeUninit::<Scratch>::uninit();
    let scratch = scratch.as_mut_ptr();
    let tiling = t.tiling;
    // One row tile waits for memory, and for the last product on the same sums: four panels are four of each.
    let wide = if tiles.len() == 1 { 4 } else { 2 };
    // SAFETY: the caller vouches for everything; shapes of tilings have 1 to 16 rows of 8 to 64 bytes.
    unsafe {
        let mut unit = U::configure(Shape { rows: tiling.rows, depth: tiling.row_bytes() / 4 });
        for stretch in stretches(tiling, tiles.len()) {
            let mut panel = panels.start;
            while panel < panels.end {
                let (tiles, stretch) = (tiles.clone(), stretch.clone());
                let count = match panels.end - panel {
                    left if left >= wide => wide,
                    2 | 3 => 2,
                    _ => 1,
                };
                match count {
                    4 => stretch_of::<U, BITS, KIND, 4>(&mut unit, t, scratch, panel, tiles, stretch),
                    2 => stretch_of::<U, BITS, KIND, 2>(&mut unit, t, scratch, panel, tiles, stretch),
                    _ => stretch_of::<U, BITS, KIND, 1>(&mut unit, t, scratch, panel, tiles, stretch),
                }
                panel += count;
            }
        }
    }
}

/// The blocks of all groups, cut so that the activations of a stretch fit the second cache. Groups are cut only where
/// there is one.
fn stretches(tiling: Tiling, tiles: usize) -> impl Iterator<Item = Range<usize>> {
    let all = tiling.groups * tiling.blocks;
    let block_bytes = tiles * tiling.parts * tiling.rows * tiling.row_bytes();
    let most = (STRETCH / block_bytes.max(1)).max(1);
    let each = if tiling.groups == 1 { most } else { (most / tiling.blocks).max(1) * tiling.blocks };
    // Of like size.
    let count = all.div_ceil(each);
    let unit = if tiling.groups == 1 { 1 } else { tiling.blocks };
    let each = all.div_ceil(count).next_multiple_of(unit);
    (0..all).step_by(each).map(move |at| at..(at + each).min(all))
}

/// Sums and totals of a slot.
#[inline(always)]
unsafe fn slots(scratch: *mut Scratch, slot: usize) -> (*mut u8, *mut f32) {
    debug_assert!(slot < SLOTS);
    // SAFETY: the caller vouches for the scratch; slots are below their number.
    unsafe {
        let (sums, totals) = (&raw mut (*scratch).sums, &raw mut (*scratch).totals);
        (sums.cast::<u8>().add(slot * TILE), totals.cast::<u8>().add(slot * TILE).cast())
    }
}

/// One stretch of `NP` panels from `panel` on.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn stretch_of<U: TileUnit, const BITS: usize, const KIND: usize, const NP: usize>(
    unit: &mut U,
    t: &Tiled<'_>,
    scratch: *mut Scratch,
    panel: usize,
    tiles: Range<usize>,
    stretch: Range<usize>,
) {
    let (layout, tiling) = (t.layout, t.tiling);
    let (blocks, all) = (tiling.blocks, tiling.groups * tiling.blocks);
    // Bytes of a right operand, and of one that is as deep in the packed matrix.
    let right_bytes = ROW * tiling.row_bytes() / 4;
    let direct = KIND != FLOAT && BITS == 8 && layout.steps() == blocks * tiling.steps;
    let chunk = RIGHT / NP;
    // SAFETY: as the caller vouches: panels, tiles and blocks are below their numbers, and so are slots.
    unsafe {
        let weights = t.weights.add(panel * layout.panel_bytes());
        if stretch.start > 0 {
            exchange::<U::Lanes, NP, false>(t, scratch, panel, tiles.clone());
        }
        let mut at = stretch.start;
        while at < stretch.end {
            let end = match blocks <= chunk {
                true => at + chunk / blocks * blocks,
                false => (at + chunk).min((at / blocks + 1) * blocks),
            };
            let end = end.min(stretch.end);
            let right = match direct {
                true => Right { at: weights.add(at * right_bytes), panel: layout.panel_bytes() },
                false => {
                    let to = (&raw mut (*scratch).right).cast::<u8>();
                    let right = Right { at: to, panel: chunk * right_bytes };
                    expand::<U, BITS, KIND, NP>(t, weights, at..end, to, right.panel);
                    right
                }
            };
            let mut tile = tiles.start;
            while tile < tiles.end {
                let (slot, blocks) = ((tile - tiles.start) * NP, at..end);
                if NP <= 2 && tile + 1 < tiles.end {
                    products::<U, BITS, KIND, NP, 2>(unit, t, scratch, weights, right, tile, slot, blocks);
                    tile += 2;
                } else {
                    products::<U, BITS, KIND, NP, 1>(unit, t, scratch, weights, right, tile, slot, blocks);
                    tile += 1;
                }
            }
            at = end;
        }
        if stretch.end < all {
            return exchange::<U::Lanes, NP, true>(t, scratch, panel, tiles);
        }
        for (tile, slot) in tiles.zip((0..).step_by(NP)) {
            finish_tile::<U::Lanes, KIND, NP>(t, scratch, weights, panel, tile, slot);
        }
    }
}

/// Right operands: the blocks of a panel one after the other, panels so many bytes apart.
#[derive(Clone, Copy)]
struct Right {
    at: *const u8,
    panel: usize,
}

/// Expands the codes of some blocks of `NP` panels.
///
/// # Safety
/// As [`multiply`]; `to` must be valid for all blocks of `NP` panels that are `to_panel` bytes apart.
#[inline(always)]
unsafe fn expand<U: TileUnit, const BITS: usize, const KIND: usize, const NP: usize>(
    t: &Tiled<'_>,
    weights: *const u8,
    blocks: Range<usize>,
    to: *mut u8,
    to_panel: usize,
) {
    let (layout, tiling) = (t.layout, t.tiling);
    let (steps, step_bytes) = (layout.steps(), layout.step_bytes());
    let expanded = if KIND == FLOAT { 256 } else { 128 };
    let ahead = Ahead::new(layout, NP, AHEAD);
    let centre = layout.middle().map_or(1 << (BITS - 1), i32::from);
    // SAFETY: as the caller vouches: steps are below those of a group, and groups below their number.
    unsafe {
        let table = U::table(centre);
        for (i, block) in blocks.enumerate() {
            let (g, first) = (block / tiling.blocks, block % tiling.blocks * tiling.steps);
            let count = tiling.steps.min(steps - first);
            for p in 0..NP {
                let panel = weights.add(p * layout.panel_bytes());
                let byte = (g * steps + first) * step_bytes;
                let to = to.add(p * to_panel + i * tiling.steps * expanded);
                let minus = match layout.middle() {
                    Some(middle) => U::Lanes::splat(i32::from(middle)),
                    None => {
                        let zeros = panel.add(layout.zeros_at() + g * PANEL_ROWS * BITS / 8);
                        if BITS == 4 { U::Lanes::load_u4(zeros) } else { U::Lanes::load_u8(zeros) }
                    }
                };
                // Four equal bytes.
                let minus = U::Lanes::mul(minus, U::Lanes::splat(0x0101_0101));
                for step in 0..count {
                    let (byte, to) = (byte + step * step_bytes, to.add(step * expanded));
                    let from = panel.add(byte);
                    let next = from.wrapping_add(ahead.of(byte));
                    U::Lanes::prefetch(next);
                    if BITS == 8 {
                        U::Lanes::prefetch(next.wrapping_add(64));
                    }
                    match (KIND, BITS) {
                        (FLOAT, _) => U::expand_bf16::<BITS>(from, table, to),
                        (_, 4) => U::expand_signed(from, minus, to),
                        _ => from.copy_to_nonoverlapping(to, expanded),
                    }
                }
                to.add(count * expanded).write_bytes(0, (tiling.steps - count) * expanded);
            }
        }
    }
}

/// Does something for each of the `MT · NP` tiles of sums: row tile, panel and number.
macro_rules! each_sum {
    (|$i:ident, $p:ident, $t:ident| $body:expr) => {
        each_sum!(@ 0, 0, 0, $i, $p, $t, $body);
        if NP > 1 {
            each_sum!(@ 0, 1, 1, $i, $p, $t, $body);
        }
        if NP > 2 {
            each_sum!(@ 0, 2, 2, $i, $p, $t, $body);
            each_sum!(@ 0, 3, 3, $i, $p, $t, $body);
        }
        if MT > 1 {
            each_sum!(@ 1, 0, 2, $i, $p, $t, $body);
            if NP > 1 {
                each_sum!(@ 1, 1, 3, $i, $p, $t, $body);
            }
        }
    };
    (@ $row:literal, $panel:literal, $number:literal, $i:ident, $p:ident, $t:ident, $body:expr) => {{
        const $t: usize = $number;
        let ($i, $p): (usize, usize) = ($row, $panel);
        $body
    }};
}

/// The products of `MT` row tiles with `NP` panels over some blocks, which are whole groups or part of one.
///
/// # Safety
/// As [`multiply`]; `right` must hold these blocks.
#[inline(always)]
unsafe fn products<U: TileUnit, const BITS: usize, const KIND: usize, const NP: usize, const MT: usize>(
    unit: &mut U,
    t: &Tiled<'_>,
    scratch: *mut Scratch,
    weights: *const u8,
    right: Right,
    tile: usize,
    slot: usize,
    blocks: Range<usize>,
) {
    let tiling = t.tiling;
    let (row_bytes, parts) = (tiling.row_bytes(), tiling.parts);
    let left_bytes = tiling.rows * row_bytes;
    let across = tiling.groups * tiling.blocks * parts * left_bytes;
    // SAFETY: as the caller vouches.
    unsafe {
        let mut left = t.tiles.add(tile * across + blocks.start * parts * left_bytes);
        let mut right_at = right.at;
        let mut at = blocks.start;
        while at < blocks.end {
            let g = at / tiling.blocks;
            let end = blocks.end.min((g + 1) * tiling.blocks);
            let (begins, ends) = (at == g * tiling.blocks, end == (g + 1) * tiling.blocks);
            // The sums of whole groups are needed no longer than this, and stay in the first cache.
            let slot_of = |i: usize, p: usize| i * NP + p + if begins && ends { 0 } else { slot };
            if begins {
                each_sum!(|_i, _p, T| unit.zero::<T>());
            } else {
                each_sum!(|i, p, T| unit.load::<T>(slots(scratch, slot_of(i, p)).0, ROW));
            }
            for _ in at..end {
                block::<U, BITS, KIND, NP, MT>(unit, left, across, left_bytes, row_bytes, parts, right_at, right.panel);
                left = left.add(parts * left_bytes);
                right_at = right_at.wrapping_add(ROW * row_bytes / 4);
            }
            each_sum!(|i, p, T| unit.store::<T>(slots(scratch, slot_of(i, p)).0));
            if ends {
                for i in 0..MT {
                    for p in 0..NP {
                        let sums = slots(scratch, slot_of(i, p)).0;
                        let totals = slots(scratch, slot + i * NP + p).1;
                        let panel = weights.add(p * t.layout.panel_bytes());
                        match KIND {
                            FLOAT => join_floats::<U::Lanes, BITS>(t, panel, tile + i, g, sums, totals),
                            _ => join_integers::<U::Lanes, BITS, KIND>(t, panel, tile + i, g, sums, totals),
                        }
                    }
                }
            }
            at = end;
        }
    }
}

/// The products of one block.
///
/// # Safety
/// As [`products`].
#[inline(always)]
unsafe fn block<U: TileUnit, const BITS: usize, const KIND: usize, const NP: usize, const MT: usize>(
    unit: &mut U,
    left: *const u8,
    across: usize,
    left_bytes: usize,
    row_bytes: usize,
    parts: usize,
    right: *const u8,
    panel: usize,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        if NP > 2 {
            // Two parts share a right operand.
            let mut part = 0;
            while part < parts {
                let two = part + 1 < parts;
                unit.load::<6>(left.add(part * left_bytes), row_bytes);
                if two {
                    unit.load::<7>(left.add((part + 1) * left_bytes), row_bytes);
                }
                macro_rules! panel {
                    ($p:literal, $right:literal) => {
                        unit.load::<$right>(right.add($p * panel), ROW);
                        add::<U, BITS, KIND, $p, 6, $right>(unit);
                        if two {
                            add::<U, BITS, KIND, $p, 7, $right>(unit);
                        }
                    };
                }
                panel!(0, 4);
                panel!(1, 5);
                panel!(2, 4);
                panel!(3, 5);
                part += 2;
            }
            return;
        }
        unit.load::<4>(right, ROW);
        if NP > 1 {
            unit.load::<5>(right.add(panel), ROW);
        }
        for part in 0..parts {
            let left = left.add(part * left_bytes);
            unit.load::<6>(left, row_bytes);
            add::<U, BITS, KIND, 0, 6, 4>(unit);
            if NP > 1 {
                add::<U, BITS, KIND, 1, 6, 5>(unit);
            }
            if MT > 1 {
                unit.load::<7>(left.add(across), row_bytes);
                add::<U, BITS, KIND, 2, 7, 4>(unit);
                if NP > 1 {
                    add::<U, BITS, KIND, 3, 7, 5>(unit);
                }
            }
        }
    }
}

/// Adds a product of the kind's numbers.
///
/// # Safety
/// As [`TileUnit`].
#[inline(always)]
unsafe fn add<
    U: TileUnit,
    const BITS: usize,
    const KIND: usize,
    const SUM: usize,
    const LEFT: usize,
    const RIGHT: usize,
>(
    unit: &mut U,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        match (KIND, BITS) {
            (FLOAT, _) => unit.add_bf16::<SUM, LEFT, RIGHT>(),
            (_, 4) => unit.add_signed::<SUM, LEFT, RIGHT>(),
            _ => unit.add_unsigned::<SUM, LEFT, RIGHT>(),
        }
    }
}

/// Rows of a row tile that are there.
fn rows_of(t: &Tiled<'_>, tile: usize) -> usize {
    t.tiling.rows.min(t.m - tile * t.tiling.rows)
}

/// Adds a group's sums of integers to the totals, times its scale.
///
/// # Safety
/// As [`multiply`]; `sums` and `totals` must be slots, and the group one of the panel's.
#[inline(always)]
unsafe fn join_integers<L: Lanes, const BITS: usize, const KIND: usize>(
    t: &Tiled<'_>,
    panel: *const u8,
    tile: usize,
    g: usize,
    sums: *const u8,
    totals: *mut f32,
) {
    let layout = t.layout;
    // SAFETY: as the caller vouches: rows of a slot are 64 bytes.
    unsafe {
        let scales = scales_of::<L, 1>(layout.scales(), panel.add(layout.scales_at()), 0, g * PANEL_ROWS)[0];
        // What the zero of activations counts too much.
        let mut shift = L::splat(0);
        if t.zero != 0 {
            let sums = L::load_i32(panel.add(layout.sums_at() + 4 * g * PANEL_ROWS));
            shift = L::mul(sums, L::splat(t.zero));
        }
        let zeros = match layout.middle() {
            Some(middle) => L::splat(i32::from(middle)),
            None if BITS == 8 => L::load_u8(panel.add(layout.zeros_at() + g * PANEL_ROWS)),
            // Codes of 4 bits were expanded less theirs.
            None => L::splat(0),
        };
        let row_sums = t.sums.cast::<i32>().add((tile * t.tiling.groups + g) * t.tiling.rows);
        for r in 0..rows_of(t, tile) {
            let mut sum = L::sub(L::load_i32(sums.add(r * ROW)), shift);
            if BITS == 8 {
                sum = L::sub(sum, L::mul(zeros, L::splat(*row_sums.add(r))));
            }
            let at = totals.add(r * PANEL_ROWS);
            let total = if g == 0 { L::zero() } else { L::load_f32(at.cast()) };
            let total = if KIND == PROGRESSIVE {
                L::as_f32(L::add(L::as_i32(total), L::mul(sum, L::as_i32(scales))))
            } else {
                L::fma(L::to_f32(sum), scales, total)
            };
            L::store_f32(at, total);
        }
    }
}

/// The same of floats; what zeros differ from the centre is multiplied with the sums of activations.
///
/// # Safety
/// As [`join_integers`].
#[inline(always)]
unsafe fn join_floats<L: Lanes, const BITS: usize>(
    t: &Tiled<'_>,
    panel: *const u8,
    tile: usize,
    g: usize,
    sums: *const u8,
    totals: *mut f32,
) {
    let layout = t.layout;
    // SAFETY: as the caller vouches: rows of a slot are 64 bytes.
    unsafe {
        let scales = scales_of::<L, 1>(layout.scales(), panel.add(layout.scales_at()), 0, g * PANEL_ROWS)[0];
        let progressive = layout.scales() == ScaleType::Progressive;
        let scales = if progressive { L::to_f32(L::as_i32(scales)) } else { scales };
        let mut zeros = L::zero();
        if layout.middle().is_none() {
            let at = panel.add(layout.zeros_at() + g * PANEL_ROWS * BITS / 8);
            let stored = if BITS == 4 { L::load_u4(at) } else { L::load_u8(at) };
            zeros = L::to_f32(L::sub(L::splat(1 << (BITS - 1)), stored));
        }
        let row_sums = t.sums.cast::<f32>().add((tile * t.tiling.groups + g) * t.tiling.rows);
        for r in 0..rows_of(t, tile) {
            let mut sum = L::load_f32(sums.add(r * ROW));
            if layout.middle().is_none() {
                sum = L::fma(zeros, L::splat_f32(*row_sums.add(r)), sum);
            }
            let at = totals.add(r * PANEL_ROWS);
            let total = if g == 0 { L::zero() } else { L::load_f32(at.cast()) };
            L::store_f32(at, L::fma(sum, scales, total));
        }
    }
}

/// One row of `NP` panels as [`finish`] takes it.
fn out_of<'a>(t: &Tiled<'a>, weights: *const u8, panel: usize, row: usize) -> Tile<'a> {
    let (n, column) = (t.layout.n(), panel * PANEL_ROWS);
    Tile {
        layout: t.layout,
        weights,
        strip: 1,
        activations: core::ptr::null(),
        sums: core::ptr::null(),
        eights: core::ptr::null(),
        scales: if t.scales.is_null() { t.scales } else { t.scales.wrapping_add(row) },
        zero: t.zero,
        rest: false,
        bias: if t.bias.is_null() { t.bias } else { t.bias.wrapping_add(column) },
        out: t.out.wrapping_add(row * n + column),
        stride: n,
        columns: n - column,
    }
}

/// Multiplies the totals of a row tile with what is left to multiply with, and writes them.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn finish_tile<L: Lanes, const KIND: usize, const NP: usize>(
    t: &Tiled<'_>,
    scratch: *mut Scratch,
    weights: *const u8,
    panel: usize,
    tile: usize,
    slot: usize,
) {
    for r in 0..rows_of(t, tile) {
        // SAFETY: as the caller vouches: all groups have joined the totals of these slots.
        unsafe {
            let mut totals = [L::zero(); NP];
            for (p, total) in totals.iter_mut().enumerate() {
                *total = L::load_f32(slots(scratch, slot + p).1.add(r * PANEL_ROWS).cast());
            }
            let out = out_of(t, weights, panel, tile * t.tiling.rows + r);
            if KIND == PROGRESSIVE {
                totals = totals.map(|total| L::to_f32(L::as_i32(total)));
            }
            finish::<L, 1, NP>(&out, [totals]);
        }
    }
}

/// Keeps what a stretch leaves for the next one in `out`, or takes it from there: the sums of a group that is the only
/// one, else totals.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn exchange<L: Lanes, const NP: usize, const KEEP: bool>(
    t: &Tiled<'_>,
    scratch: *mut Scratch,
    panel: usize,
    tiles: Range<usize>,
) {
    let n = t.layout.n();
    for (tile, slot) in tiles.zip((0..).step_by(NP)) {
        // Rows that are not there are read with the others, and must hold something.
        let missing = if KEEP { 0 } else { t.tiling.rows - rows_of(t, tile) };
        if missing > 0 {
            for p in 0..NP {
                // SAFETY: as the caller vouches: a slot has 16 rows of 64 bytes.
                unsafe { slots(scratch, slot + p).0.add(rows_of(t, tile) * ROW).write_bytes(0, missing * ROW) };
            }
        }
        for (r, p) in (0..rows_of(t, tile)).flat_map(|r| (0..NP).map(move |p| (r, p))) {
            let column = (panel + p) * PANEL_ROWS;
            let count = PANEL_ROWS.min(n - column);
            // SAFETY: as the caller vouches: these are rows and columns of `out`, and a slot's row has 16 values.
            unsafe {
                let (sums, totals) = slots(scratch, slot + p);
                let kept = if t.tiling.groups == 1 { sums.cast::<f32>() } else { totals };
                let (kept, out) =
                    (kept.add(r * PANEL_ROWS), t.out.add((tile * t.tiling.rows + r) * n + column));
                match (KEEP, count) {
                    (true, PANEL_ROWS) => L::store_f32(out, L::load_f32(kept.cast())),
                    (false, PANEL_ROWS) => L::store_f32(kept, L::load_f32(out.cast())),
                    (true, _) => kept.copy_to_nonoverlapping(out, count),
                    (false, _) => out.copy_to_nonoverlapping(kept, count),
                }
            }
        }
    }
}

/// Steps are of as many features as a tile's rows are cut into.
const _: () = assert!(STEP == 8 && TILE == ROW * 16);
