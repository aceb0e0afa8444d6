//! Products with float activations of more than a few rows: the weights of some groups are converted to operands once,
//! into memory that stays in the caches, and then multiplied by all rows of a piece of work.
//!
//! In [`float_tile`](super::float_tile), each tile converts the weights again. With few rows this happens while the
//! tile waits for memory; with many rows it competes with the products.
//!
//! The products are added in the order of `float_tile`, so the result of a row is bit-identical in every batch.
#![allow(clippy::needless_range_loop, reason = "rows and panels index several arrays at once")]

use core::mem::MaybeUninit;
use core::ops::Range;

use super::dispatch::{EXPANDED_STRIPS as MAX_STRIPS, MAX_ROWS, Path};
use super::float_tile::{BLOCK, factor_of, mins_of, plus, step_of, table_of, zeros_of};
use super::tile::{self, Out, Tile, scales_of};
use crate::activation::strip;
use crate::layout::{LINE, Layout, PANEL_ROWS, STEP, ScaleType, unit_of};
use crate::simd::{FloatLanes, codes};

/// Products of at most this many rows are computed by [`float_tile`](super::float_tile).
pub(super) const FEW_ROWS: usize = 4;
/// Bytes of converted weights: few enough for the L1 cache.
const OPERANDS: usize = 32 << 10;
/// The size of a step of one panel is at least this many bytes on every path, see [`Functions::step_bytes`].
const MIN_STEP: usize = 256;
const MAX_PANELS: usize = 2;
/// How many bytes ahead weights that are operands already are prefetched.
const AHEAD: usize = 4096;
/// Floats per group and panel: scales, then zero points or minima.
const PARAMETERS: usize = 2 * PANEL_ROWS;
const _: () = assert!(STEP == 8);

pub(super) struct Expanded<'a> {
    pub(super) layout: &'a Layout,
    /// The packed matrix.
    pub(super) weights: *const u8,
    pub(super) m: usize,
    /// Activations in strips, with `strip_step` bytes reserved per step of a row, of which `row_step` are used.
    pub(super) activations: *const u8,
    pub(super) strip_step: usize,
    pub(super) row_step: usize,
    /// Sums of activations per group, in strips.
    pub(super) sums: *const f32,
    /// Whether rounding the activations to bf16 leaves a remainder.
    pub(super) rest: bool,
    /// The bias `[n]`, or null.
    pub(super) bias: *const f32,
    /// The destination of the rows and columns of these strips and panels.
    pub(super) out: Out,
}

pub(super) type ExpandFn = unsafe fn(&Layout, *const u8, Operands);
pub(super) type FinishFn = unsafe fn(&Tile<'_>, *const f32);

/// The functions of an instruction set and a type of codes.
#[derive(Clone, Copy)]
pub(super) struct Functions {
    /// [`expand`].
    pub(super) expand: ExpandFn,
    /// [`finish`], for one and two panels.
    pub(super) finish: [FinishFn; MAX_PANELS],
    /// Bytes of the operands of a step of one panel.
    pub(super) step_bytes: usize,
    /// Panels per tile.
    pub(super) panels: usize,
    /// Whether the packed weights are operands already.
    pub(super) direct: bool,
}

/// Where the operands of some steps are written.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    panels: usize,
    /// The first step, and the step after the last.
    first: usize,
    end: usize,
    /// `[panels]`, `stride` bytes apart.
    to: *mut u8,
    stride: usize,
    /// `[groups][panels][2][16]`, beginning with the group of the first step.
    parameters: *mut f32,
}

/// The operands of one tile: `MR` rows times `NP` panels over some steps.
pub(super) struct Product<'a> {
    layout: &'a Layout,
    /// `[NP]`, `stride` bytes apart.
    right: *const u8,
    stride: usize,
    /// `[groups][NP][2][16]`, beginning with the group of the first step.
    parameters: *const f32,
    /// The first step of the first row, and the rows of its strip.
    x: *const u8,
    strip: usize,
    /// The sum of the activations of the first row in the group of the first step.
    sums: *const f32,
    /// The number of the first step within its group, and the number of steps.
    within: usize,
    count: usize,
    /// `[MR][NP][16]`, of which incomplete groups use the second.
    totals: *mut f32,
    incomplete: *mut f32,
    next: Next,
}

/// Codes that are needed next, to prefetch.
#[derive(Clone, Copy)]
struct Next {
    at: *const u8,
    /// Bytes from one panel to the next, and bytes per step.
    panel: usize,
    step: usize,
    /// Lines per step; 0 if nothing is prefetched.
    lines: usize,
}

/// Intermediate results.
#[repr(C, align(64))]
struct Scratch {
    operands: [MaybeUninit<u8>; OPERANDS],
    /// A group has at least one step.
    parameters: [MaybeUninit<f32>; OPERANDS / MIN_STEP * PARAMETERS],
    /// `[rows][panels][16]`.
    totals: [MaybeUninit<f32>; MAX_STRIPS * MAX_ROWS * MAX_PANELS * PANEL_ROWS],
    /// Sums of incomplete groups, in the same order.
    incomplete: [MaybeUninit<f32>; MAX_STRIPS * MAX_ROWS * MAX_PANELS * PANEL_ROWS],
}

/// Multiplies a range of strips by a range of panels.
///
/// # Safety
/// The processor must have the instructions of the path. All pointers must be valid as their fields describe, the
/// ranges must be within them, and no other thread may access these rows and columns of `out` during the call.
pub(super) unsafe fn multiply(
    t: &Expanded<'_>,
    path: Path,
    of: Functions,
    strips: Range<usize>,
    panels: Range<usize>,
) {
    let mut scratch = MaybeUninit::<Scratch>::uninit();
    for first in strips.clone().step_by(MAX_STRIPS) {
        let strips = first..(first + MAX_STRIPS).min(strips.end);
        let mut panel = panels.start;
        while panel < panels.end {
            let count = of.panels.min(panels.end - panel);
            // SAFETY: the caller guarantees the contract of `multiply`.
            unsafe { columns(t, path, of, scratch.as_mut_ptr(), strips.clone(), panel, count) };
            panel += count;
        }
    }
}

/// Multiplies at most [`MAX_STRIPS`] strips by `count` panels, beginning with `panel`.
///
/// # Safety
/// See [`multiply`]; `scratch` must be valid for writes.
unsafe fn columns(
    t: &Expanded<'_>,
    path: Path,
    of: Functions,
    scratch: *mut Scratch,
    strips: Range<usize>,
    panel: usize,
    count: usize,
) {
    let layout = t.layout;
    let (group, all) = (layout.steps(), layout.padded_k() / STEP);
    let first_row = strip(t.m, strips.start).start;
    let rows = strip(t.m, strips.end - 1).end - first_row;
    let width = count * PANEL_ROWS;
    // SAFETY: the caller guarantees that the scratch memory and all pointers are valid. A block of strips has at most
    // `MAX_STRIPS · MAX_ROWS` rows: if there is a single strip, it has at most 16.
    unsafe {
        let weights = t.weights.add(panel * layout.panel_bytes());
        let operands = (&raw mut (*scratch).operands).cast::<u8>();
        let parameters = (&raw mut (*scratch).parameters).cast::<f32>();
        let totals = (&raw mut (*scratch).totals).cast::<f32>();
        let incomplete = (&raw mut (*scratch).incomplete).cast::<f32>();
        totals.write_bytes(0, rows * width);
        // Whole groups, or a part of one group that is whole blocks.
        let most = OPERANDS / (count * of.step_bytes);
        let mut at = 0;
        while at < all {
            let end = match group <= most {
                true => at + most / group * group,
                false => (at + most).min((at / group + 1) * group),
            };
            let end = end.min(all);
            let stride = most * of.step_bytes;
            (of.expand)(
                layout,
                weights,
                Operands { panels: count, first: at, end, to: operands, stride, parameters },
            );
            // The first tile prefetches the next codes.
            let mut next = Next {
                at: weights.wrapping_add(match end == all {
                    true => count * layout.panel_bytes(),
                    false => end * layout.step_bytes(),
                }),
                panel: layout.panel_bytes(),
                step: layout.step_bytes(),
                lines: layout.step_bytes().div_ceil(LINE),
            };
            let (mut right, mut stride) = (operands.cast_const(), stride);
            if of.direct {
                (right, stride) = (weights.add(at * of.step_bytes), layout.panel_bytes());
                next.at = right.wrapping_add(AHEAD);
            }
            for s in strips.clone() {
                let rows = strip(t.m, s);
                let mut row = rows.start;
                while row < rows.end {
                    let tile = path.rows(rows.end - row);
                    let (r, of_group) = (row - rows.start, at / group);
                    let slot = (row - first_row) * width;
                    let product = Product {
                        layout,
                        right,
                        stride,
                        parameters,
                        x: t.activations
                            .add(rows.start * all * t.strip_step + (at * rows.len() + r) * t.row_step),
                        strip: rows.len(),
                        sums: t.sums.add(rows.start * layout.groups() + of_group * rows.len() + r),
                        within: at % group,
                        count: end - at,
                        totals: totals.add(slot),
                        incomplete: incomplete.add(slot),
                        next,
                    };
                    path.product(tile, count, t.rest)(&product);
                    next.lines = 0;
                    row += tile;
                }
            }
            at = end;
        }
        let column = panel * PANEL_ROWS;
        for row in 0..rows {
            let of_row = Tile {
                layout,
                weights,
                strip: 1,
                activations: core::ptr::null(),
                sums: core::ptr::null(),
                eights: core::ptr::null(),
                scales: core::ptr::null(),
                zero: 0,
                rest: t.rest,
                bias: if t.bias.is_null() { t.bias } else { t.bias.wrapping_add(column) },
                out: t.out.of(first_row + row, column),
                stride: t.out.stride,
                columns: layout.n() - column,
            };
            (of.finish[count - 1])(&of_row, totals.add(row * width));
        }
    }
}

/// Converts the codes of some steps, and the parameters of their groups. `weights` points to the first panel.
///
/// # Safety
/// See [`multiply`]; the steps must exist and begin a group or a block, and all pointers must be valid for them.
#[inline(always)]
pub(super) unsafe fn expand<L: FloatLanes, const CODES: usize>(
    layout: &Layout,
    weights: *const u8,
    to: Operands,
) {
    let (panel_bytes, step_bytes) = (layout.panel_bytes(), layout.step_bytes());
    let (unit, operand) = (unit_of(codes::bits(CODES)), size_of::<L::W>());
    // SAFETY: the caller guarantees the contract of `expand`; groups and blocks are whole units.
    unsafe {
        let table = table_of::<L, CODES>(layout);
        // Dense weights are pairs of bf16 already.
        let direct = const { !L::ORDERED && CODES == codes::BF16 };
        for p in 0..if direct { 0 } else { to.panels } {
            let panel = weights.add(p * panel_bytes);
            let mut out = to.to.add(p * to.stride);
            let (mut at, mut step) = (panel.add(to.first * step_bytes), 0);
            for _ in to.first..to.end {
                for part in 0..L::PARTS {
                    let operands = L::weights::<CODES>(at, step * L::PARTS + part, table);
                    out.add(part * operand).cast::<L::W>().write(operands);
                }
                out = out.add(L::PARTS * operand);
                step += 1;
                if step == unit {
                    (at, step) = (at.wrapping_add(unit * step_bytes), 0);
                }
            }
        }
        let group = layout.steps();
        for (i, g) in (to.first / group..to.end.div_ceil(group)).enumerate() {
            for p in 0..to.panels {
                let panel = weights.add(p * panel_bytes);
                let out = to.parameters.add((i * to.panels + p) * PARAMETERS);
                let scales = panel.add(layout.scales_at());
                let [scale] = scales_of::<L, 1>(layout.scales(), scales, panel_bytes, g * PANEL_ROWS);
                L::store_f32(out, factor_of::<L>(layout, panel, g, scale));
                let out = out.add(PANEL_ROWS);
                if layout.zero_point().is_none() {
                    L::store_f32(out, zeros_of::<L, CODES>(layout, panel, g));
                } else if layout.scales() == ScaleType::SuperMins {
                    L::store_f32(out, mins_of::<L>(layout, panel, g));
                }
            }
        }
    }
}

/// Multiplies a tile: adds complete groups to the totals, and keeps the sums of an incomplete group.
///
/// # Safety
/// See [`multiply`]; the operands must be those of `MR` rows and `NP` panels.
#[inline(always)]
pub(super) unsafe fn product<L: FloatLanes, const REST: bool, const MR: usize, const NP: usize>(
    t: &Product<'_>,
) {
    let group = t.layout.steps();
    let zeros = t.layout.zero_point().is_none();
    let mins = t.layout.scales() == ScaleType::SuperMins;
    let (operands, row_bytes) = (L::PARTS * size_of::<L::W>(), step_of::<L, REST>() * t.strip);
    let (mut right, mut x, mut next) = (t.right, t.x, t.next);
    let (mut within, mut left, mut parameters, mut row_sums) = (t.within, t.count, t.parameters, t.sums);
    // SAFETY: the caller guarantees the contract of `product`.
    unsafe {
        while left > 0 {
            let steps = left.min(group - within);
            let ends = within + steps == group;
            if mins && ends {
                for m in 0..MR {
                    let sum = L::splat_f32(*row_sums.add(m));
                    for p in 0..NP {
                        let min = L::load_f32(parameters.add(p * PARAMETERS + PANEL_ROWS).cast());
                        let at = t.totals.add((m * NP + p) * PANEL_ROWS);
                        L::store_f32(at, L::fma(min, sum, L::load_f32(at.cast())));
                    }
                }
            }
            let mut sums = [[L::zero(); NP]; MR];
            if within > 0 {
                for m in 0..MR {
                    for p in 0..NP {
                        sums[m][p] = L::load_f32(t.incomplete.add((m * NP + p) * PANEL_ROWS).cast());
                    }
                }
            }
            if L::ORDERED || group <= BLOCK {
                sums = add_steps::<L, REST, MR, NP>(sums, right, t.stride, x, t.strip, steps, &mut next);
                right = right.wrapping_add(steps * operands);
                x = x.wrapping_add(steps * row_bytes);
            } else {
                let mut done = 0;
                while done < steps {
                    let count = BLOCK.min(steps - done);
                    let zero = [[L::zero(); NP]; MR];
                    let block =
                        add_steps::<L, REST, MR, NP>(zero, right, t.stride, x, t.strip, count, &mut next);
                    plus::<L, MR, NP>(&mut sums, block);
                    right = right.wrapping_add(count * operands);
                    x = x.wrapping_add(count * row_bytes);
                    done += count;
                }
            }
            if ends {
                if zeros {
                    for p in 0..NP {
                        let zero = L::load_f32(parameters.add(p * PARAMETERS + PANEL_ROWS).cast());
                        for m in 0..MR {
                            sums[m][p] = L::fma(zero, L::splat_f32(*row_sums.add(m)), sums[m][p]);
                        }
                    }
                }
                for p in 0..NP {
                    let scale = L::load_f32(parameters.add(p * PARAMETERS).cast());
                    for m in 0..MR {
                        let at = t.totals.add((m * NP + p) * PANEL_ROWS);
                        L::store_f32(at, L::fma(sums[m][p], scale, L::load_f32(at.cast())));
                    }
                }
                parameters = parameters.wrapping_add(NP * PARAMETERS);
                row_sums = row_sums.wrapping_add(t.strip);
            } else {
                for m in 0..MR {
                    for p in 0..NP {
                        L::store_f32(t.incomplete.add((m * NP + p) * PANEL_ROWS), sums[m][p]);
                    }
                }
            }
            (within, left) = (0, left - steps);
        }
    }
}

/// Adds the products of `count` steps to the sums.
///
/// # Safety
/// See [`product`]; the steps must exist.
#[inline(always)]
unsafe fn add_steps<L: FloatLanes, const REST: bool, const MR: usize, const NP: usize>(
    mut sums: [[L::F; NP]; MR],
    mut right: *const u8,
    stride: usize,
    mut x: *const u8,
    strip: usize,
    count: usize,
    next: &mut Next,
) -> [[L::F; NP]; MR] {
    let (operand, row) = (size_of::<L::W>(), step_of::<L, REST>());
    // SAFETY: the caller guarantees the contract of `add_steps`; prefetched addresses need not be mapped.
    unsafe {
        for _ in 0..count {
            if next.lines > 0 {
                for p in 0..NP {
                    let at = next.at.wrapping_add(p * next.panel);
                    L::prefetch(at);
                    if next.lines > 1 {
                        L::prefetch(at.wrapping_add(LINE));
                    }
                    if next.lines > 2 {
                        L::prefetch(at.wrapping_add(2 * LINE));
                        L::prefetch(at.wrapping_add(3 * LINE));
                    }
                }
                next.at = next.at.wrapping_add(next.step);
            }
            // Unrolled instead of a loop, so that all sums stay in registers.
            macro_rules! parts {
                ($($part:literal)*) => {$(
                    let mut w = [right.add($part * operand).cast::<L::W>().read_unaligned(); NP];
                    for p in 1..NP {
                        w[p] = right.add($part * operand + p * stride).cast::<L::W>().read_unaligned();
                    }
                    for m in 0..MR {
                        for p in 0..NP {
                            sums[m][p] = L::dot_float::<REST>(sums[m][p], w[p], x.add(m * row), $part);
                        }
                    }
                )*};
            }
            parts!(0 1 2 3);
            if L::PARTS > 4 {
                parts!(4 5 6 7);
            }
            // After the last step, these pointers are past the end, but are not dereferenced.
            right = right.wrapping_add(L::PARTS * operand);
            x = x.wrapping_add(strip * row);
        }
    }
    sums
}

/// Writes the results of one row, see [`tile::finish`].
///
/// # Safety
/// See [`multiply`]; `totals` are those of the row in `NP` panels.
#[inline(always)]
pub(super) unsafe fn finish<L: FloatLanes, const NP: usize>(t: &Tile<'_>, totals: *const f32) {
    // SAFETY: the caller guarantees the contract of `finish`.
    unsafe {
        let mut row = [L::zero(); NP];
        for p in 0..NP {
            row[p] = L::load_f32(totals.add(p * PANEL_ROWS).cast());
        }
        tile::finish::<L, 1, NP>(t, [row]);
    }
}
