//! The inner loop for float activations: codes are converted to floats in registers, exactly.
//!
//! Integer codes are multiplied as `code − c`, a small integer that is exact in bf16 and `f32`. `c` is the zero point
//! that all groups share, if there is one, otherwise the middle of the codes' range. A group's own zero point then
//! costs one term `(c − z) Σ x`, and the scale one multiply-add.
//!
//! Floating-point codes are multiplied as their value, which is also exact in both.
//!
//! Products are added in an order that does not depend on the number of rows, so a row's result is bit-identical
//! whether it is computed alone or in a batch. With one or two rows there are too few independent sums to hide the
//! latency of a product. Some paths therefore compute two parts of the sum in parallel.
#![allow(clippy::needless_range_loop, reason = "rows and panels index several arrays at once")]

use crate::layout::{Layout, PANEL_ROWS, STEP, SUPER_BLOCK, ScaleType};
use crate::simd::{FloatLanes, codes};

use super::prefetcher::{Prefetcher, next_parameters};
use super::tile::{Tile, finish, scales_of};

pub(super) const BLOCK: usize = 256 / STEP;

/// Multiplies a tile.
///
/// # Safety
/// See [`multiply`](super::tile::multiply); activations must be in the form of [`FloatLanes`].
#[inline(always)]
pub(crate) unsafe fn multiply<
    L: FloatLanes,
    const CODES: usize,
    const REST: bool,
    const MR: usize,
    const NP: usize,
>(
    t: &Tile<'_>,
) {
    let layout = t.layout;
    let (groups, steps) = (layout.groups(), layout.steps());
    // SAFETY: all reads are within the memory that the caller guarantees to be valid: step, group and row stay below
    // their counts, and the offsets are those of the layout.
    unsafe {
        let table = table_of::<L, CODES>(layout);
        let mut totals = [[L::zero(); NP]; MR];
        let mut g = 0;
        if L::ORDERED || steps <= BLOCK {
            if !L::ORDERED && REST && MR <= 2 {
                while g + 2 <= groups {
                    let both = add_steps::<L, CODES, REST, MR, NP, 2>(
                        t,
                        table_of::<L, CODES>(layout),
                        g * steps,
                        steps,
                    );
                    // One round trip through memory; without it, the compiler keeps the sums in memory throughout the
                    // inner loop.
                    let [first, second] = core::hint::black_box(both);
                    join::<L, CODES, MR, NP>(t, first, g, &mut totals);
                    join::<L, CODES, MR, NP>(t, second, g + 1, &mut totals);
                    g += 2;
                }
            }
            while g < groups {
                let [sums] = add_steps::<L, CODES, REST, MR, NP, 1>(t, table, g * steps, steps);
                join::<L, CODES, MR, NP>(t, sums, g, &mut totals);
                g += 1;
            }
        }
        // Wide groups, block after block.
        while g < groups {
            let (mut sums, mut at) = ([[L::zero(); NP]; MR], 0);
            if !L::ORDERED && REST && MR <= 2 {
                while at + 2 * BLOCK <= steps {
                    let both = add_steps::<L, CODES, REST, MR, NP, 2>(
                        t,
                        table_of::<L, CODES>(layout),
                        g * steps + at,
                        BLOCK,
                    );
                    let [first, second] = core::hint::black_box(both);
                    plus::<L, MR, NP>(&mut sums, first);
                    plus::<L, MR, NP>(&mut sums, second);
                    at += 2 * BLOCK;
                }
            }
            while at < steps {
                let count = BLOCK.min(steps - at);
                let [block] = add_steps::<L, CODES, REST, MR, NP, 1>(t, table, g * steps + at, count);
                plus::<L, MR, NP>(&mut sums, block);
                at += count;
            }
            join::<L, CODES, MR, NP>(t, sums, g, &mut totals);
            g += 1;
        }
        debug_assert!(t.zero == 0 && t.scales.is_null() || layout.scales() == ScaleType::Progressive);
        finish::<L, MR, NP>(t, totals);
    }
}

/// The table that converts codes to floats.
///
/// # Safety
/// The processor must have the instructions of `L`.
#[inline(always)]
pub(super) unsafe fn table_of<L: FloatLanes, const CODES: usize>(layout: &Layout) -> L::Table {
    // SAFETY: the caller guarantees that the processor has the instructions of `L`.
    unsafe {
        match CODES {
            codes::E2M1 | codes::IQ4 | codes::E4M3 => L::values::<CODES>(),
            _ => L::centre(centre::<CODES>(layout)),
        }
    }
}

fn centre<const CODES: usize>(layout: &Layout) -> i32 {
    layout.zero_point().map_or(1 << (codes::bits(CODES) - 1), i32::from)
}

/// Adds a block to the sums: `sums += block`.
///
/// # Safety
/// See [`multiply`].
#[inline(always)]
pub(super) unsafe fn plus<L: FloatLanes, const MR: usize, const NP: usize>(
    sums: &mut [[L::F; NP]; MR],
    block: [[L::F; NP]; MR],
) {
    for m in 0..MR {
        for p in 0..NP {
            // SAFETY: the caller guarantees that the processor has the instructions of `L`.
            sums[m][p] = unsafe { L::fma(block[m][p], L::splat_f32(1.0), sums[m][p]) };
        }
    }
}

/// Returns the sums over `count` steps starting at `first` and, with `NG = 2`, those over the following `count` steps,
/// computed in parallel.
///
/// # Safety
/// See [`multiply`]; the steps must exist.
#[inline(always)]
unsafe fn add_steps<
    L: FloatLanes,
    const CODES: usize,
    const REST: bool,
    const MR: usize,
    const NP: usize,
    const NG: usize,
>(
    t: &Tile<'_>,
    table: L::Table,
    first: usize,
    count: usize,
) -> [[[L::F; NP]; MR]; NG] {
    let panel = t.layout.panel_bytes();
    let (step_bytes, unit) = (PANEL_ROWS * STEP * codes::bits(CODES) / 8, const { codes::unit(CODES) });
    let waits = MR <= 4;
    let ahead = Prefetcher::new(t.layout, NP, (NG * count * step_bytes).clamp(2048, 8192));
    let ahead_of = |at: *const u8| if waits { ahead.of(at.addr() - t.weights.addr()) } else { 0 };
    // SAFETY: the caller guarantees the contract of `multiply`; steps and rows stay below their counts. Blocks and
    // groups are whole units.
    unsafe {
        let mut at = t.weights.wrapping_add(first * step_bytes);
        let row = const { step_of::<L, REST>() };
        let mut x = t.activations.wrapping_add(first * t.strip * row);
        let mut sums = [[[L::zero(); NP]; MR]; NG];
        let mut step = 0;
        for _ in 0..count {
            // Unrolled, so that all sums stay in registers.
            add_step::<L, CODES, REST, MR, NP>(&mut sums[0], (at, x), step, table, panel, ahead_of(at));
            if NG > 1 {
                let behind = (at.wrapping_add(count * step_bytes), x.wrapping_add(count * t.strip * row));
                let ahead = ahead_of(behind.0);
                add_step::<L, CODES, REST, MR, NP>(&mut sums[1], behind, step, table, panel, ahead);
            }
            // After the last step, these pointers are past the end, but are not dereferenced.
            x = x.wrapping_add(t.strip * row);
            step += 1;
            if step == unit {
                at = at.wrapping_add(unit * step_bytes);
                step = 0;
            }
        }
        sums
    }
}

/// Adds the sums of a group to the totals, times its scale.
///
/// # Safety
/// See [`multiply`]; the group must exist.
#[inline(always)]
unsafe fn join<L: FloatLanes, const CODES: usize, const MR: usize, const NP: usize>(
    t: &Tile<'_>,
    mut sums: [[L::F; NP]; MR],
    g: usize,
    totals: &mut [[L::F; NP]; MR],
) {
    let layout = t.layout;
    let panel = layout.panel_bytes();
    // SAFETY: the caller guarantees the contract of `multiply`.
    unsafe {
        if MR <= 4 {
            next_parameters::<L, NP>(layout, t.weights, g);
        }
        let scales = t.weights.add(layout.scales_at());
        let scales = scales_of::<L, NP>(layout.scales(), scales, panel, g * PANEL_ROWS);
        for p in 0..NP {
            if layout.zero_point().is_none() {
                let zeros = zeros_of::<L, CODES>(layout, t.weights.add(p * panel), g);
                for m in 0..MR {
                    let sum = *t.sums.cast::<f32>().add(g * t.strip + m);
                    sums[m][p] = L::fma(zeros, L::splat_f32(sum), sums[m][p]);
                }
            }
            // One `match`, since values that several branches share are kept in memory.
            let scale = match layout.scales() {
                ScaleType::Progressive | ScaleType::Super | ScaleType::SuperMins => {
                    let at = t.weights.add(p * panel);
                    if layout.scales() == ScaleType::SuperMins {
                        let mins = mins_of::<L>(layout, at, g);
                        for m in 0..MR {
                            let sum = *t.sums.cast::<f32>().add(g * t.strip + m);
                            totals[m][p] = L::fma(mins, L::splat_f32(sum), totals[m][p]);
                        }
                    }
                    factor_of::<L>(layout, at, g, scales[p])
                }
                _ => scales[p],
            };
            for m in 0..MR {
                totals[m][p] = L::fma(sums[m][p], scale, totals[m][p]);
            }
        }
    }
}

/// The factor of a group's sums, from what [`scales_of`] returned for the group.
///
/// # Safety
/// `panel` must be a panel of the layout, and `g` one of its groups.
#[inline(always)]
pub(super) unsafe fn factor_of<L: FloatLanes>(
    layout: &Layout,
    panel: *const u8,
    g: usize,
    scale: L::F,
) -> L::F {
    // SAFETY: the caller guarantees that the panel has the group.
    unsafe {
        match layout.scales() {
            ScaleType::Progressive => L::to_f32(L::as_i32(scale)),
            // This product is exact, as is that of the minima.
            ScaleType::Super | ScaleType::SuperMins => {
                L::mul_f32(L::to_f32(L::as_i32(scale)), L::load_f16(panel.add(block_of(layout, g))))
            }
            _ => scale,
        }
    }
}

/// The centre minus the stored zero points of a group.
///
/// # Safety
/// See [`factor_of`]; the layout must store zero points.
#[inline(always)]
pub(super) unsafe fn zeros_of<L: FloatLanes, const CODES: usize>(
    layout: &Layout,
    panel: *const u8,
    g: usize,
) -> L::F {
    // SAFETY: the caller guarantees that the panel has the group's zero points.
    unsafe {
        let zeros = panel.add(layout.zeros_at() + g * PANEL_ROWS * codes::bits(CODES) / 8);
        let zeros = if codes::bits(CODES) == 4 { L::load_u4(zeros) } else { L::load_u8(zeros) };
        L::to_f32(L::sub(L::splat(centre::<CODES>(layout)), zeros))
    }
}

/// The negated minima of a group.
///
/// # Safety
/// See [`factor_of`]; the layout must have minima.
#[inline(always)]
pub(super) unsafe fn mins_of<L: FloatLanes>(layout: &Layout, panel: *const u8, g: usize) -> L::F {
    // SAFETY: the caller guarantees that the panel has the group's minima.
    unsafe {
        let mins = panel.add(layout.zeros_at() + g * PANEL_ROWS);
        let by = panel.add(block_of(layout, g) + 2 * layout.blocks() * PANEL_ROWS);
        L::mul_f32(L::to_f32(L::sub(L::splat(0), L::load_u8(mins))), L::load_f16(by))
    }
}

/// The offset in a panel of the float scales of the super-block that contains a group.
fn block_of(layout: &Layout, g: usize) -> usize {
    layout.channels_at() + 2 * (g * layout.group_size() / SUPER_BLOCK) * PANEL_ROWS
}

/// Adds the products of a step to the sums of its group. `at` points to the codes of the step's unit, `step` is its
/// number within the unit, and `x` points to the activations.
///
/// # Safety
/// See [`multiply`]; `at` must be a step of `NP` panels that are `panel` bytes apart, `x` the same step of `MR` rows.
#[inline(always)]
unsafe fn add_step<L: FloatLanes, const CODES: usize, const REST: bool, const MR: usize, const NP: usize>(
    sums: &mut [[L::F; NP]; MR],
    (at, x): (*const u8, *const u8),
    step: usize,
    table: L::Table,
    panel: usize,
    ahead: usize,
) {
    // SAFETY: the caller guarantees the contract of `multiply`; prefetched addresses need not be mapped.
    unsafe {
        if ahead > 0 {
            for p in 0..NP {
                L::prefetch(at.wrapping_add(p * panel + ahead + 64 * step));
                if CODES == codes::BF16 {
                    L::prefetch(at.wrapping_add(p * panel + ahead + 2 * 64));
                    L::prefetch(at.wrapping_add(p * panel + ahead + 3 * 64));
                }
                if codes::bits(CODES) >= 8 || codes::unit(CODES) > 1 && step == 0 {
                    L::prefetch(at.wrapping_add(p * panel + ahead + 64 * codes::unit(CODES)));
                }
            }
        }
        for part in 0..L::PARTS {
            let of_unit = step * L::PARTS + part;
            let mut w = [L::weights::<CODES>(at, of_unit, table); NP];
            for p in 1..NP {
                w[p] = L::weights::<CODES>(at.add(p * panel), of_unit, table);
            }
            for m in 0..MR {
                let row = x.add(m * const { step_of::<L, REST>() });
                for p in 0..NP {
                    sums[m][p] = L::dot_float::<REST>(sums[m][p], w[p], row, part);
                }
            }
        }
    }
}

/// Bytes that are reserved per step of a row: eight floats, or eight values of two bf16 each.
pub(crate) const FLOAT_STEP: usize = 32;
/// Bytes per step of a row that are used if the values are bf16, and multiplied as such.
pub(crate) const BF16_STEP: usize = 16;

pub(super) const fn step_of<L: FloatLanes, const REST: bool>() -> usize {
    if L::ORDERED || REST { FLOAT_STEP } else { BF16_STEP }
}
