//! The inner loop of whole numbers: some rows of activations times some panels of weights.
//!
//! Registers hold the integer sums of one group, `MR × NP` of them; when the group ends they become floats
//! and join the totals. A code is unpacked once for all rows of the tile, an activation broadcast once for
//! all panels.
#![allow(clippy::needless_range_loop, reason = "rows and panels index several arrays at once")]

use crate::layout::{Layout, PANEL_ROWS, STEP, ScaleType};
use crate::simd::Lanes;

/// What a tile multiplies, and where it writes.
pub(crate) struct Tile<'a> {
    pub(crate) layout: &'a Layout,
    /// The first panel; the others follow.
    pub(crate) weights: *const u8,
    /// Rows of the strip that the tile's first `MR` rows belong to.
    pub(crate) strip: usize,
    /// Activations, `[padded_k / STEP][strip]` of the bytes that a step of a row takes.
    pub(crate) activations: *const u8,
    /// Sums of activations, `[groups][strip]`, as whole numbers or floats.
    pub(crate) sums: *const u8,
    /// Scales of the activations, `[MR]`, or null where these are floats.
    pub(crate) scales: *const f32,
    /// Zero of all activations.
    pub(crate) zero: i32,
    /// `[NP · 16]` or null; read where `columns` says.
    pub(crate) bias: *const f32,
    /// `[MR]` rows that are `stride` apart.
    pub(crate) out: *mut f32,
    pub(crate) stride: usize,
    /// Columns to write, at most `NP · 16`.
    pub(crate) columns: usize,
}

/// Multiplies.
///
/// # Safety
/// The processor must have `L`'s instructions. All pointers must be valid for what their fields say,
/// `weights` for `NP` panels of `layout`, and nothing else may write to these parts of `out` meanwhile.
#[inline(always)]
pub(crate) unsafe fn multiply<L: Lanes, const BITS: usize, const MR: usize, const NP: usize>(t: &Tile<'_>) {
    let layout = t.layout;
    let (groups, steps, panel) = (layout.groups(), layout.steps(), layout.panel_bytes());
    let step_bytes = PANEL_ROWS * STEP * BITS / 8;
    let (scales_at, zeros_at, sums_at) = (layout.scales_at(), layout.zeros_at(), layout.sums_at());
    // A tile of few rows waits for memory: the lines of the steps to come are asked for in time.
    let ahead = if MR <= 8 { 2048 } else { 0 };
    // What is missing of every code is part of its zero.
    let offset = if BITS == 4 { 0 } else { L::OFFSET };
    // SAFETY: all reads are within what the caller vouches for: step, group and row stay below their
    // counts, and the offsets are those of the layout.
    unsafe {
        let mut totals = [[L::zero(); NP]; MR];
        let mut at = t.weights;
        let mut a = t.activations.cast::<i8>();
        for g in 0..groups {
            let row_sums = t.sums.cast::<i32>().add(g * t.strip);
            let mut acc = [[L::splat(0); NP]; MR];
            match layout.middle() {
                Some(middle) => {
                    let zero = i32::from(middle) - offset;
                    for m in 0..MR {
                        let start = L::splat(zero.wrapping_mul(*row_sums.add(m)).wrapping_neg());
                        acc[m] = [start; NP];
                    }
                }
                None => {
                    for p in 0..NP {
                        let zeros = t.weights.add(p * panel + zeros_at + g * PANEL_ROWS * BITS / 8);
                        let zeros = if BITS == 4 { L::load_u4(zeros) } else { L::load_u8(zeros) };
                        let zeros = if offset == 0 { zeros } else { L::sub(zeros, L::splat(offset)) };
                        for m in 0..MR {
                            acc[m][p] = L::mul(zeros, L::splat((*row_sums.add(m)).wrapping_neg()));
                        }
                    }
                }
            }
            if t.zero != 0 {
                for p in 0..NP {
                    let sums = L::load_i32(t.weights.add(p * panel + sums_at + 4 * g * PANEL_ROWS));
                    let part = L::mul(sums, L::splat(t.zero));
                    for m in 0..MR {
                        acc[m][p] = L::sub(acc[m][p], part);
                    }
                }
            }
            let done = L::rows::<BITS, MR, NP>(&mut acc, at, panel, a, t.strip, steps);
            at = at.wrapping_add(done * step_bytes);
            a = a.wrapping_add(done * t.strip * STEP);
            for _ in done..steps {
                let mut codes = [L::codes4(at); NP];
                for p in 0..NP {
                    let from = at.add(p * panel);
                    codes[p] = if BITS == 4 { L::codes4(from) } else { L::codes8(from) };
                    if ahead > 0 {
                        L::prefetch(from.wrapping_add(ahead));
                        if BITS == 8 {
                            L::prefetch(from.wrapping_add(ahead + 64));
                        }
                    }
                }
                for m in 0..MR {
                    let x = L::activations(a.add(m * STEP));
                    for p in 0..NP {
                        acc[m][p] = match BITS {
                            4 => L::dot4(acc[m][p], codes[p], x),
                            _ => L::dot8(acc[m][p], codes[p], x),
                        };
                    }
                }
                // After the last step these point behind what is there, and are not followed.
                at = at.wrapping_add(step_bytes);
                a = a.wrapping_add(t.strip * STEP);
            }
            for p in 0..NP {
                let scales = t.weights.add(p * panel + scales_at);
                let first = g * PANEL_ROWS;
                if layout.scales() == ScaleType::Progressive {
                    let scale = L::load_u8(scales.add(first));
                    for m in 0..MR {
                        let part = L::mul(acc[m][p], scale);
                        totals[m][p] = L::as_f32(L::add(L::as_i32(totals[m][p]), part));
                    }
                    continue;
                }
                let scale = scales_of::<L>(layout.scales(), scales, first);
                for m in 0..MR {
                    totals[m][p] = L::fma(L::to_f32(acc[m][p]), scale, totals[m][p]);
                }
            }
        }
        if layout.scales() == ScaleType::Progressive {
            for row in &mut totals {
                *row = row.map(|total| L::to_f32(L::as_i32(total)));
            }
        }
        finish::<L, MR, NP>(t, totals);
    }
}

/// The scales of a group from those of its panel.
///
/// # Safety
/// As [`multiply`]; the group must be one of the panel's.
#[inline(always)]
pub(crate) unsafe fn scales_of<L: Lanes>(kind: ScaleType, scales: *const u8, first: usize) -> L::F {
    // SAFETY: the caller vouches for sixteen scales from `first` on.
    unsafe {
        match kind {
            ScaleType::F16 => L::load_f16(scales.add(2 * first)),
            ScaleType::Bf16 => L::load_bf16(scales.add(2 * first)),
            ScaleType::F32 => L::load_f32(scales.add(4 * first)),
            ScaleType::Progressive => L::to_f32(L::load_u8(scales.add(first))),
        }
    }
}

/// Multiplies totals with the scales of rows, those of progressive weights and of activations, adds the
/// bias, and writes.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
pub(crate) unsafe fn finish<L: Lanes, const MR: usize, const NP: usize>(
    t: &Tile<'_>,
    totals: [[L::F; NP]; MR],
) {
    let panel = t.layout.panel_bytes();
    // SAFETY: columns are those that the caller says may be written.
    unsafe {
        for p in 0..NP {
            let columns = t.columns.saturating_sub(p * PANEL_ROWS).min(PANEL_ROWS);
            if columns == 0 {
                break;
            }
            let mut bias = [0.0_f32; PANEL_ROWS];
            if !t.bias.is_null() {
                t.bias.add(p * PANEL_ROWS).copy_to_nonoverlapping(bias.as_mut_ptr(), columns);
            }
            let bias = L::load_f32(bias.as_ptr().cast());
            for m in 0..MR {
                let mut total = totals[m][p];
                if t.layout.scales() == ScaleType::Progressive {
                    let channels = L::load_f32(t.weights.add(p * panel + t.layout.channels_at()));
                    total = L::mul_f32(total, channels);
                }
                let scale = if t.scales.is_null() { 1.0 } else { *t.scales.add(m) };
                let scale = L::splat_f32(scale);
                let value =
                    if t.bias.is_null() { L::mul_f32(total, scale) } else { L::fma(total, scale, bias) };
                let to = t.out.add(m * t.stride + p * PANEL_ROWS);
                if columns == PANEL_ROWS {
                    L::store_f32(to, value);
                } else {
                    let mut part = [0.0_f32; PANEL_ROWS];
                    L::store_f32(part.as_mut_ptr(), value);
                    part.as_ptr().copy_to_nonoverlapping(to, columns);
                }
            }
        }
    }
}
