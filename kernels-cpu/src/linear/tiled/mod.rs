//! Products on a tile unit: 16 rows of activations times 16 output features, for as many input features as a tile
//! holds.
//!
//! A piece of work is up to [`SLOTS`] / 2 row tiles ([`max_tiles`]) times some panels. Its input features are divided
//! into
//!
//! - stretches, whose activations stay in the L2 cache while all panels are read. Between stretches the totals are kept
//!   in `out`;
//! - chunks, for which the codes of two panels (four for a single row tile) are expanded into the L1 cache, once for
//!   all rows;
//! - blocks, which fit in a tile. Two row tiles times two panels are four products for four loads.
//!
//! At the end of a group, its sums are added to the totals as in [`tile`](super::tile) and
//! [`float_tile`](super::float_tile): one multiply-add in `f32` per group, in order. Sums of integers are exact, so
//! results equal those of all other paths. Floats are added in an order that does not depend on the number of rows, so
//! a row's result does not depend on the other rows.
#![allow(clippy::too_many_arguments, reason = "they describe one product")]

mod steps;

use core::mem::MaybeUninit;
use core::ops::Range;

pub(super) use self::steps::{expand, finish, join};
use crate::activation::tiles::Tiling;
use crate::layout::{LINE, Layout, PANEL_ROWS, STEP};
use crate::linear::tile::Out;
use crate::simd::Lanes;
use crate::simd::tiles::{ROW, Shape, TILE, TileUnit};

/// Minimum number of rows for int8 products on the tile unit.
pub(crate) const TILED_ROWS: usize = 16;
/// Int8 products with groups up to this width do not use the tile unit, because vector lanes are faster.
pub(crate) const UNTILED_GROUP: usize = 16;
/// Maximum number of tiles of sums that a piece of work keeps: row tiles times panels.
const SLOTS: usize = 32;
/// Maximum number of panels per piece of work, so that the totals in `out` between stretches stay in the L2 cache, too.
pub(super) const CHUNK: usize = 64;
const RIGHT: usize = 16;
/// Bytes of activations per stretch.
const STRETCH_BYTES: usize = 1 << 20;
const AHEAD: usize = 4096;

pub(super) struct Tiled<'a> {
    pub(super) layout: &'a Layout,
    /// The packed matrix.
    pub(super) weights: *const u8,
    pub(super) m: usize,
    pub(super) tiling: Tiling,
    /// Activations in the order of the tiling, and their sums per group.
    pub(super) tiles: *const u8,
    pub(super) sums: *const u8,
    /// Scales of the activations, `[m]`; null for float activations.
    pub(super) scales: *const f32,
    /// Zero point of all activations.
    pub(super) zero: i32,
    /// The bias `[n]`, or null.
    pub(super) bias: *const f32,
    /// The destination of the rows and columns of these tiles and panels.
    pub(super) out: Out,
    pub(super) steps: Steps,
}

impl Tiled<'_> {
    fn rows_of(&self, tile: usize) -> usize {
        self.tiling.rows.min(self.m - tile * self.tiling.rows)
    }
}

/// Types of operands.
pub(super) const SIGNED: usize = 0;
pub(super) const UNSIGNED: usize = 1;
pub(super) const BF16: usize = 2;

/// The steps other than products of tiles, as separate functions, so that they are not compiled into each of the many
/// loops over tiles.
#[derive(Clone, Copy)]
pub(super) struct Steps {
    /// [`expand`].
    pub(super) expand: unsafe fn(&Tiled<'_>, *const u8, usize, Range<usize>, *mut u8, usize),
    /// [`join`].
    pub(super) join: unsafe fn(&Tiled<'_>, *const u8, usize, usize, *const u8, *mut f32),
    /// [`finish`].
    pub(super) finish: unsafe fn(&Tiled<'_>, *const u8, usize, usize, *const f32),
}

/// Intermediate results.
#[repr(C, align(64))]
struct Scratch {
    /// Expanded codes, one panel after the other.
    right: [MaybeUninit<u8>; RIGHT * TILE],
    /// Sums of an incomplete group, `[row tiles][panels][16][16]`.
    sums: [MaybeUninit<u8>; SLOTS * TILE],
    /// Totals in the same order; for progressive weights the bits of integers.
    totals: [MaybeUninit<u8>; SLOTS * TILE],
    /// Sums of the last two groups that were completed within one chunk, `[2][4][16][16]`.
    stages: [MaybeUninit<u8>; 8 * TILE],
}

/// Multiplies a range of row tiles, at most [`max_tiles`], by a range of panels.
///
/// # Safety
/// The processor must have the instructions of `U` and its lanes. All pointers must be valid as their fields describe,
/// the ranges must be within them, and no other thread may access these rows and columns of `out` during the call.
#[inline(always)]
pub(super) unsafe fn multiply<U: TileUnit, const OF: usize>(
    t: &Tiled<'_>,
    tiles: Range<usize>,
    panels: Range<usize>,
) {
    debug_assert!(tiles.len() <= max_tiles(t.tiling));
    let mut scratch = MaybeUninit::<Scratch>::uninit();
    let scratch = scratch.as_mut_ptr();
    let tiling = t.tiling;
    // With a single row tile, products wait for memory and for the previous product on the same sums, so four panels
    // are multiplied in parallel.
    let wide = if tiles.len() == 1 { 4 } else { 2 };
    // SAFETY: the caller guarantees that all pointers are valid; shapes of tilings have 1 to 16 rows of 8 to 64 bytes.
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
                    4 => stretch_of::<U, OF, 4>(&mut unit, t, scratch, panel, tiles, stretch),
                    2 => stretch_of::<U, OF, 2>(&mut unit, t, scratch, panel, tiles, stretch),
                    _ => stretch_of::<U, OF, 1>(&mut unit, t, scratch, panel, tiles, stretch),
                }
                panel += count;
            }
        }
    }
}

/// Maximum number of row tiles per piece of work.
pub(super) fn max_tiles(tiling: Tiling) -> usize {
    if tiling.step_bytes > STEP {
        return SLOTS / 4;
    }
    let across = tiling.bytes_across().unwrap_or(usize::MAX).max(1);
    (2 * STRETCH_BYTES / across).clamp(SLOTS / 4, SLOTS / 2)
}

/// The blocks of all groups, divided so that the activations of a stretch fit in the L2 cache. A group is divided only
/// if it is the only one.
fn stretches(tiling: Tiling, tiles: usize) -> impl Iterator<Item = Range<usize>> {
    let all = tiling.groups * tiling.blocks;
    let block_bytes = tiles * tiling.parts * tiling.rows * tiling.row_bytes();
    let max = (STRETCH_BYTES / block_bytes.max(1)).max(1);
    let each = if tiling.groups == 1 { max } else { (max / tiling.blocks).max(1) * tiling.blocks };
    let count = all.div_ceil(each);
    let unit = if tiling.groups == 1 { 1 } else { tiling.blocks };
    let each = all.div_ceil(count).next_multiple_of(unit);
    (0..all).step_by(each).map(move |at| at..(at + each).min(all))
}

/// The memory for the sums and totals of a slot.
///
/// # Safety
/// `scratch` must be valid, and `slot` less than [`SLOTS`].
#[inline(always)]
unsafe fn slots(scratch: *mut Scratch, slot: usize) -> (*mut u8, *mut f32) {
    debug_assert!(slot < SLOTS);
    // SAFETY: the caller guarantees that `scratch` is valid, and that `slot` is less than `SLOTS`.
    unsafe {
        let (sums, totals) = (&raw mut (*scratch).sums, &raw mut (*scratch).totals);
        (sums.cast::<u8>().add(slot * TILE), totals.cast::<u8>().add(slot * TILE).cast())
    }
}

/// The memory for tile `t` (of four) of the sums of group `g`, if the group is completed within one chunk.
///
/// # Safety
/// `scratch` must be valid, and `t` less than 4.
#[inline(always)]
unsafe fn stage(scratch: *mut Scratch, g: usize, t: usize) -> *mut u8 {
    // SAFETY: the caller guarantees that `scratch` is valid and `t` less than 4; there are two stages of four tiles.
    unsafe { (&raw mut (*scratch).stages).cast::<u8>().add((g % 2 * 4 + t) * TILE) }
}

/// Computes one stretch of `NP` panels, starting at `panel`.
///
/// # Safety
/// See [`multiply`].
#[inline(always)]
unsafe fn stretch_of<U: TileUnit, const OF: usize, const NP: usize>(
    unit: &mut U,
    t: &Tiled<'_>,
    scratch: *mut Scratch,
    panel: usize,
    tiles: Range<usize>,
    stretch: Range<usize>,
) {
    let (layout, tiling) = (t.layout, t.tiling);
    let (blocks, all) = (tiling.blocks, tiling.groups * tiling.blocks);
    // Bytes of a right operand, which are also those of a packed block if it needs no expansion.
    let right_bytes = ROW * tiling.row_bytes() / 4;
    let direct = (OF == UNSIGNED || layout.is_bf16()) && layout.steps() == blocks * tiling.steps;
    let chunk = RIGHT / NP;
    // SAFETY: the caller guarantees the contract of `multiply`; every index of a panel, tile, block or slot is less
    // than its count.
    unsafe {
        let weights = t.weights.add(panel * layout.panel_bytes());
        if stretch.start > 0 {
            exchange::<NP, false>(t, scratch, panel, tiles.clone());
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
                    (t.steps.expand)(t, weights, NP, at..end, to, right.panel);
                    right
                }
            };
            // With up to two panels, the next codes are prefetched gradually, while row tiles are multiplied.
            let next = weights.wrapping_add(match direct {
                true => end * right_bytes,
                false => (end / blocks * layout.steps() + end % blocks * tiling.steps) * layout.step_bytes(),
            });
            let bytes = (end - at) * tiling.steps * layout.step_bytes();
            let mut next =
                Next { at: next, panel: layout.panel_bytes(), lines: bytes.div_ceil(LINE), each: 0 };
            if NP <= 2 {
                next.each = next.lines.div_ceil(tiles.len().div_ceil(2) * (end - at));
            }
            let mut tile = tiles.start;
            while tile < tiles.end {
                let (slot, blocks) = ((tile - tiles.start) * NP, at..end);
                let next = &mut next;
                if NP <= 2 && tile + 1 < tiles.end {
                    products::<U, OF, NP, 2>(unit, t, scratch, weights, right, next, tile, slot, blocks);
                    tile += 2;
                } else {
                    products::<U, OF, NP, 1>(unit, t, scratch, weights, right, next, tile, slot, blocks);
                    tile += 1;
                }
            }
            at = end;
        }
        if stretch.end < all {
            return exchange::<NP, true>(t, scratch, panel, tiles);
        }
        for (tile, slot) in tiles.zip((0..).step_by(NP)) {
            for p in 0..NP {
                (t.steps.finish)(
                    t,
                    weights.add(p * layout.panel_bytes()),
                    panel + p,
                    tile,
                    slots(scratch, slot + p).1,
                );
            }
        }
    }
}

/// Right operands: the blocks of a panel one after the other, with panels `panel` bytes apart.
#[derive(Clone, Copy)]
struct Right {
    at: *const u8,
    panel: usize,
}

/// Lines of codes that are needed next.
struct Next {
    at: *const u8,
    panel: usize,
    /// Lines per panel that are left, and lines to prefetch per block.
    lines: usize,
    each: usize,
}

impl Next {
    /// Prefetches the next lines.
    ///
    /// # Safety
    /// The processor must have the instructions of `L`. Addresses need not be valid.
    #[inline(always)]
    unsafe fn prefetch<L: Lanes, const NP: usize>(&mut self) {
        let count = self.each.min(self.lines);
        self.lines -= count;
        for _ in 0..count {
            for p in 0..NP {
                // SAFETY: the caller guarantees that the processor has the instructions of `L`; a prefetch address need
                // not be valid.
                unsafe { L::prefetch(self.at.wrapping_add(p * self.panel)) };
            }
            self.at = self.at.wrapping_add(LINE);
        }
    }
}

/// Evaluates an expression for each of the `MT · NP` tiles of sums, with its row tile, panel and number.
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

/// Computes the products of `MT` row tiles with `NP` panels over some blocks, which are whole groups or part of one.
///
/// # Safety
/// See [`multiply`]; `right` must hold these blocks.
#[inline(always)]
unsafe fn products<U: TileUnit, const OF: usize, const NP: usize, const MT: usize>(
    unit: &mut U,
    t: &Tiled<'_>,
    scratch: *mut Scratch,
    weights: *const u8,
    right: Right,
    next: &mut Next,
    tile: usize,
    slot: usize,
    blocks: Range<usize>,
) {
    let (tiling, panel_bytes) = (t.tiling, t.layout.panel_bytes());
    let (row_bytes, parts) = (tiling.row_bytes(), tiling.parts);
    let left_bytes = tiling.rows * row_bytes;
    let across = tiling.groups * tiling.blocks * parts * left_bytes;
    // SAFETY: the caller guarantees the contract of `products`.
    unsafe {
        let mut left = t.tiles.add(tile * across + blocks.start * parts * left_bytes);
        let mut right_at = right.at;
        let mut at = blocks.start;
        // A completed group is added to the totals while the products of the next one are in flight.
        let mut complete: Option<usize> = None;
        while at < blocks.end {
            let g = at / tiling.blocks;
            let end = blocks.end.min((g + 1) * tiling.blocks);
            let (begins, ends) = (at == g * tiling.blocks, end == (g + 1) * tiling.blocks);
            if begins {
                each_sum!(|_i, _p, T| unit.zero::<T>());
            } else {
                each_sum!(|i, p, T| unit.load::<T>(slots(scratch, slot + i * NP + p).0, ROW));
            }
            for _ in at..end {
                block::<U, OF, NP, MT>(
                    unit,
                    left,
                    across,
                    left_bytes,
                    row_bytes,
                    parts,
                    right_at,
                    right.panel,
                );
                left = left.add(parts * left_bytes);
                right_at = right_at.wrapping_add(ROW * row_bytes / 4);
                next.prefetch::<U::Lanes, NP>();
            }
            if let Some(g) = complete.take() {
                each_sum!(|i, p, T| {
                    let totals = slots(scratch, slot + i * NP + p).1;
                    (t.steps.join)(
                        t,
                        weights.add(p * panel_bytes),
                        tile + i,
                        g,
                        stage(scratch, g, T),
                        totals,
                    );
                });
            }
            if begins && ends {
                each_sum!(|_i, _p, T| unit.store::<T>(stage(scratch, g, T)));
                complete = Some(g);
            } else {
                each_sum!(|i, p, T| unit.store::<T>(slots(scratch, slot + i * NP + p).0));
            }
            if ends && !begins {
                each_sum!(|i, p, _T| {
                    let (sums, totals) = slots(scratch, slot + i * NP + p);
                    (t.steps.join)(t, weights.add(p * panel_bytes), tile + i, g, sums, totals);
                });
            }
            at = end;
        }
        if let Some(g) = complete {
            each_sum!(|i, p, T| {
                let totals = slots(scratch, slot + i * NP + p).1;
                (t.steps.join)(t, weights.add(p * panel_bytes), tile + i, g, stage(scratch, g, T), totals);
            });
        }
    }
}

/// Computes the products of one block.
///
/// # Safety
/// See [`products`].
#[inline(always)]
unsafe fn block<U: TileUnit, const OF: usize, const NP: usize, const MT: usize>(
    unit: &mut U,
    left: *const u8,
    across: usize,
    left_bytes: usize,
    row_bytes: usize,
    parts: usize,
    right: *const u8,
    panel: usize,
) {
    // SAFETY: the caller guarantees the contract of `products`.
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
                        add::<U, OF, $p, 6, $right>(unit);
                        if two {
                            add::<U, OF, $p, 7, $right>(unit);
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
            add::<U, OF, 0, 6, 4>(unit);
            if NP > 1 {
                add::<U, OF, 1, 6, 5>(unit);
            }
            if MT > 1 {
                unit.load::<7>(left.add(across), row_bytes);
                add::<U, OF, 2, 7, 4>(unit);
                if NP > 1 {
                    add::<U, OF, 3, 7, 5>(unit);
                }
            }
        }
    }
}

/// Adds a product of tiles of the type `OF`.
///
/// # Safety
/// See [`TileUnit`].
#[inline(always)]
unsafe fn add<U: TileUnit, const OF: usize, const SUM: usize, const LEFT: usize, const RIGHT: usize>(
    unit: &mut U,
) {
    // SAFETY: the caller guarantees the contract of `TileUnit`.
    unsafe {
        match OF {
            BF16 => unit.add_bf16::<SUM, LEFT, RIGHT>(),
            SIGNED => unit.add_signed::<SUM, LEFT, RIGHT>(),
            _ => unit.add_unsigned::<SUM, LEFT, RIGHT>(),
        }
    }
}

/// With `KEEP`, saves the state of a stretch for the next one in `out`; otherwise restores it from there. The state is
/// the sums of the group if there is only one, otherwise the totals.
///
/// # Safety
/// See [`multiply`].
#[inline(always)]
unsafe fn exchange<const NP: usize, const KEEP: bool>(
    t: &Tiled<'_>,
    scratch: *mut Scratch,
    panel: usize,
    tiles: Range<usize>,
) {
    let n = t.layout.n();
    for (tile, slot) in tiles.zip((0..).step_by(NP)) {
        // Padding rows are read with the others, so they must be initialized.
        let missing = if KEEP { 0 } else { t.tiling.rows - t.rows_of(tile) };
        if missing > 0 {
            for p in 0..NP {
                // SAFETY: the caller guarantees that the scratch memory is valid; a slot has 16 rows of 64 bytes.
                unsafe {
                    slots(scratch, slot + p).0.add(t.rows_of(tile) * ROW).write_bytes(0, missing * ROW)
                };
            }
        }
        for (r, p) in (0..t.rows_of(tile)).flat_map(|r| (0..NP).map(move |p| (r, p))) {
            let column = (panel + p) * PANEL_ROWS;
            let count = PANEL_ROWS.min(n - column);
            // SAFETY: the caller guarantees that `out` is valid for these rows and columns, and that the scratch memory
            // is valid; a row of a slot has 16 values.
            unsafe {
                let (sums, totals) = slots(scratch, slot + p);
                let kept = if t.tiling.groups == 1 { sums.cast::<f32>() } else { totals };
                let (kept, out) = (kept.add(r * PANEL_ROWS), t.out.of(tile * t.tiling.rows + r, column));
                match (KEEP, count) {
                    // A constant size, which compiles without a call.
                    (true, PANEL_ROWS) => kept.copy_to_nonoverlapping(out, PANEL_ROWS),
                    (false, PANEL_ROWS) => out.copy_to_nonoverlapping(kept, PANEL_ROWS),
                    (true, _) => kept.copy_to_nonoverlapping(out, count),
                    (false, _) => out.copy_to_nonoverlapping(kept, count),
                }
            }
        }
    }
}

/// Tilings divide rows into steps of `STEP` features, and tiles have 16 rows.
const _: () = assert!(STEP == 8 && TILE == ROW * 16);
