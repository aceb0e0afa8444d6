//! The inner loop for int8 activations: some rows of activations times some panels of weights.
//!
//! Registers hold the `MR × NP` integer sums of one group; when the group ends, they are converted to float and added
//! to the totals.
#![allow(clippy::needless_range_loop, reason = "rows and panels index several arrays at once")]

use super::prefetcher::{self, Prefetcher, next_parameters};
use crate::FloatFormat;
use crate::layout::{Layout, PANEL_ROWS, STEP, ScaleType};
use crate::simd::{IQ4_OFFSET, Lanes, codes};

/// The operands of a tile, and where it writes.
pub(crate) struct Tile<'a> {
    pub(crate) layout: &'a Layout,
    /// The first panel; the others follow in memory.
    pub(crate) weights: *const u8,
    /// Rows of the strip that contains the tile's `MR` rows.
    pub(crate) strip: usize,
    /// Activations, `[padded_k / STEP][strip]`, each element a step of a row.
    pub(crate) activations: *const u8,
    /// Sums of activations, `[groups][strip]`, as integers or floats.
    pub(crate) sums: *const u8,
    /// `−8` times these sums if they are integers; null for float activations.
    pub(crate) eights: *const i32,
    /// Scales of the activations, `[MR]`; null for float activations.
    pub(crate) scales: *const f32,
    /// Zero point of all activations.
    pub(crate) zero: i32,
    /// Whether rounding float activations to bf16 leaves a remainder.
    pub(crate) rest: bool,
    /// `[NP · 16]`, of which the first `columns` are read; or null.
    pub(crate) bias: *const f32,
    /// `MR` rows, `stride` elements apart.
    pub(crate) out: *mut f32,
    pub(crate) stride: usize,
    /// Columns from the first to the end of the matrix, of which at most `NP · 16` are written.
    pub(crate) columns: usize,
}

#[derive(Clone, Copy)]
pub(crate) struct Out {
    /// The address of row `row` and column `column` of the product.
    pub(crate) at: *mut f32,
    pub(crate) row: usize,
    pub(crate) column: usize,
    /// Elements from one row to the next.
    pub(crate) stride: usize,
}

impl Out {
    pub(crate) fn whole(at: *mut f32, stride: usize) -> Self {
        Self { at, row: 0, column: 0, stride }
    }

    /// The address of a row and column of the product, neither of which may precede the first.
    #[inline(always)]
    pub(crate) fn of(&self, row: usize, column: usize) -> *mut f32 {
        self.at.wrapping_add((row - self.row) * self.stride + (column - self.column))
    }
}

/// The zero point of a symmetric 4-bit grid.
pub(super) const CENTRE: u8 = 8;

/// Multiplies a tile.
///
/// # Safety
/// The processor must have the instructions of `L`. All pointers must be valid as their fields describe, `weights` for
/// `NP` panels of `layout`, and no other thread may access these parts of `out` during the call.
#[inline(always)]
pub(crate) unsafe fn multiply<
    L: Lanes,
    const CODES: usize,
    const CENTRED: bool,
    const PROGRESSIVE: bool,
    const MR: usize,
    const NP: usize,
>(
    t: &Tile<'_>,
) {
    let layout = t.layout;
    let (groups, panel) = (layout.groups(), layout.panel_bytes());
    let bits = const { codes::bits(CODES) };
    let (scales_at, zeros_at, sums_at) = (layout.scales_at(), layout.zeros_at(), layout.sums_at());
    let ahead = Prefetcher::new(layout, NP, prefetcher::distance(MR, bits));
    // `codes8` subtracts this offset from every code.
    let offset = if bits == 4 && CODES != codes::IQ4 { 0 } else { L::OFFSET };
    // SAFETY: all reads are within the memory that the caller guarantees to be valid: step, group and row stay below
    // their counts, and the offsets are those of the layout.
    unsafe {
        let mut totals = [[L::zero(); NP]; MR];
        let mut at = (t.weights, t.activations.cast::<i8>());
        prefetch_out::<L, MR, NP>(t);
        for g in 0..groups {
            let row_sums = t.sums.cast::<i32>().add(g * t.strip);
            let eights = t.eights.add(g * t.strip);
            let acc = group_sums::<L, CODES, MR, NP>(t, &mut at, ahead);
            // All branches come before the sums are used: the compiler keeps values that branches share in memory.
            let scales = t.weights.add(scales_at);
            next_parameters::<L, NP>(layout, t.weights, g);
            let scales = scales_of::<L, NP>(layout.scales(), scales, panel, g * PANEL_ROWS);
            if CENTRED {
                for m in 0..MR {
                    let mut eight = L::splat(*eights.add(m));
                    if CODES == codes::E2M1 {
                        // The codes are twice the values, plus an offset of 16 that makes them unsigned.
                        eight = L::add(eight, eight);
                    }
                    for p in 0..NP {
                        let sum = L::to_f32(L::add(acc[m][p], eight));
                        totals[m][p] = L::fma(sum, scales[p], totals[m][p]);
                    }
                }
                continue;
            }
            let (mut zeros, mut shift) = ([L::splat(0); NP], [L::splat(0); NP]);
            for p in 0..NP {
                zeros[p] = match layout.zero_point() {
                    _ if CODES == codes::IQ4 => L::splat(IQ4_OFFSET - offset),
                    Some(zero_point) => L::splat(i32::from(zero_point) - offset),
                    None => {
                        let zeros = t.weights.add(p * panel + zeros_at + g * PANEL_ROWS * bits / 8);
                        let zeros = if bits == 4 { L::load_u4(zeros) } else { L::load_u8(zeros) };
                        if offset == 0 { zeros } else { L::sub(zeros, L::splat(offset)) }
                    }
                };
                if t.zero != 0 {
                    let sums = L::load_i32(t.weights.add(p * panel + sums_at + 4 * g * PANEL_ROWS));
                    shift[p] = L::mul(sums, L::splat(t.zero));
                }
            }
            for m in 0..MR {
                let sum = L::splat(*row_sums.add(m));
                for p in 0..NP {
                    let off = L::add(L::mul(zeros[p], sum), shift[p]);
                    let sum = L::sub(acc[m][p], off);
                    totals[m][p] = if PROGRESSIVE {
                        L::as_f32(L::add(L::as_i32(totals[m][p]), L::mul(sum, L::as_i32(scales[p]))))
                    } else {
                        L::fma(L::to_f32(sum), scales[p], totals[m][p])
                    };
                }
            }
        }
        if PROGRESSIVE {
            for row in &mut totals {
                *row = row.map(|total| L::to_f32(L::as_i32(total)));
            }
        }
        finish::<L, MR, NP>(t, totals);
    }
}

/// Prefetches the output of a tile with more than four rows.
///
/// # Safety
/// The processor must have the instructions of `L`. Addresses need not be valid.
#[inline(always)]
pub(super) unsafe fn prefetch_out<L: Lanes, const MR: usize, const NP: usize>(t: &Tile<'_>) {
    if MR > 4 {
        for m in 0..MR {
            for p in 0..NP {
                let at = t.out.wrapping_add(m * t.stride + p * PANEL_ROWS);
                // SAFETY: the caller guarantees that the processor has the instructions of `L`; a prefetch address need
                // not be valid.
                unsafe { L::prefetch_write(at.cast()) };
            }
        }
    }
}

/// Returns the integer sums of the group whose codes and activations `at` points to, and advances `at` to the next
/// group.
///
/// # Safety
/// See [`multiply`]; the group must exist.
#[inline(always)]
pub(super) unsafe fn group_sums<L: Lanes, const CODES: usize, const MR: usize, const NP: usize>(
    t: &Tile<'_>,
    at: &mut (*const u8, *const i8),
    ahead: Prefetcher,
) -> [[L::I; NP]; MR] {
    let (steps, panel) = (t.layout.steps(), t.layout.panel_bytes());
    let (bits, unit) = const { (codes::bits(CODES), codes::unit(CODES)) };
    let step_bytes = PANEL_ROWS * STEP * bits / 8;
    // SAFETY: the caller guarantees the contract of `multiply`; groups are whole units.
    unsafe {
        // Start from zero, since other initial values would delay the first products; zero points are subtracted
        // afterwards.
        let mut acc = [[L::splat(0); NP]; MR];
        let done = L::rows::<CODES, MR, NP>(&mut acc, at.0, panel, at.1, t.strip, steps);
        let advance = |at: &mut (*const u8, *const i8), steps: usize| {
            // After the last step, these pointers are past the end, but are not dereferenced.
            at.0 = at.0.wrapping_add(steps * step_bytes);
            at.1 = at.1.wrapping_add(steps * t.strip * STEP);
        };
        advance(at, done);
        let mut left = (steps - done) / unit;
        while left > 0 {
            let ahead = ahead.of(at.0.addr() - t.weights.addr());
            // Unrolled, so that shifts are constants.
            add_step::<L, CODES, 0, MR, NP>(&mut acc, *at, panel, t.strip, ahead);
            if unit > 1 {
                add_step::<L, CODES, 1, MR, NP>(&mut acc, *at, panel, t.strip, ahead);
            }
            if unit > 2 {
                add_step::<L, CODES, 2, MR, NP>(&mut acc, *at, panel, t.strip, ahead);
                add_step::<L, CODES, 3, MR, NP>(&mut acc, *at, panel, t.strip, ahead);
            }
            advance(at, unit);
            left -= 1;
        }
        acc
    }
}

/// Adds the products of step `S` of a unit.
///
/// # Safety
/// See [`group_sums`].
#[inline(always)]
unsafe fn add_step<L: Lanes, const CODES: usize, const S: usize, const MR: usize, const NP: usize>(
    acc: &mut [[L::I; NP]; MR],
    (at, a): (*const u8, *const i8),
    panel: usize,
    strip: usize,
    ahead: usize,
) {
    let (bits, unit) = const { (codes::bits(CODES), codes::unit(CODES)) };
    // SAFETY: the caller guarantees the contract of `group_sums`; prefetched addresses need not be mapped.
    unsafe {
        let mut step = [L::codes4(at); NP];
        for p in 0..NP {
            let from = at.add(p * panel);
            step[p] = match CODES {
                4 => L::codes4(from),
                5 | 6 => L::codes_in_unit::<CODES>(from, S),
                codes::E2M1 => L::codes_e2m1(from),
                codes::IQ4 => L::codes_iq4(from),
                _ => L::codes8(from),
            };
            L::prefetch(from.wrapping_add(ahead + 64 * S));
            if bits == 8 || unit > 1 && S == 0 {
                // The second half of a step, or the high bits of a unit.
                L::prefetch(from.wrapping_add(ahead + 64 * unit));
            }
        }
        for m in 0..MR {
            let x = L::activations(a.add((S * strip + m) * STEP));
            for p in 0..NP {
                acc[m][p] = match CODES {
                    4..=6 | codes::E2M1 => L::dot4(acc[m][p], step[p], x),
                    _ => L::dot8(acc[m][p], step[p], x),
                };
            }
        }
    }
}

/// Loads the scales of a group in `NP` panels that are `panel` bytes apart; `first` is the index of its first scale in
/// a panel. The result is the bits of integers for progressive weights and super-blocks, and `2⁻⁸` times the scale for
/// E4M3 scales.
///
/// # Safety
/// See [`multiply`]; `first` must be sixteen times the number of a group of the panels.
#[inline(always)]
pub(crate) unsafe fn scales_of<L: Lanes, const NP: usize>(
    kind: ScaleType,
    scales: *const u8,
    panel: usize,
    first: usize,
) -> [L::F; NP] {
    // SAFETY: the caller guarantees that each panel has sixteen scales starting at `first`.
    unsafe {
        let mut out = [L::zero(); NP];
        match kind {
            ScaleType::F16 => {
                for p in 0..NP {
                    out[p] = L::load_f16(scales.add(p * panel + 2 * first));
                }
            }
            ScaleType::Bf16 => {
                for p in 0..NP {
                    out[p] = L::load_bf16(scales.add(p * panel + 2 * first));
                }
            }
            ScaleType::F32 => {
                for p in 0..NP {
                    out[p] = L::load_f32(scales.add(p * panel + 4 * first));
                }
            }
            ScaleType::Progressive => {
                for p in 0..NP {
                    out[p] = L::as_f32(L::load_u8(scales.add(p * panel + first)));
                }
            }
            ScaleType::Super | ScaleType::SuperMins => {
                for p in 0..NP {
                    out[p] = L::as_f32(L::load_i8(scales.add(p * panel + first)));
                }
            }
            ScaleType::E4m3 => {
                for p in 0..NP {
                    out[p] = L::load_e4m3(scales.add(p * panel + first));
                }
            }
            ScaleType::E8m0 => {
                for p in 0..NP {
                    out[p] = L::load_e8m0(scales.add(p * panel + first));
                }
            }
        }
        out
    }
}

/// Multiplies totals by the scales of rows (for progressive or E4M3 scales) and of activations, adds the bias, and
/// writes the results.
///
/// # Safety
/// See [`multiply`].
#[inline(always)]
pub(crate) unsafe fn finish<L: Lanes, const MR: usize, const NP: usize>(
    t: &Tile<'_>,
    mut totals: [[L::F; NP]; MR],
) {
    // SAFETY: the caller guarantees that `columns` columns may be written, and that the bias has as many.
    unsafe {
        if let ScaleType::Progressive | ScaleType::E4m3 = t.layout.scales() {
            let (panel, channels_at) = (t.layout.panel_bytes(), t.layout.channels_at());
            for p in 0..NP {
                let channels = L::load_f32(t.weights.add(p * panel + channels_at));
                for m in 0..MR {
                    totals[m][p] = L::mul_f32(totals[m][p], channels);
                }
            }
        }
        let whole = t.columns >= NP * PANEL_ROWS;
        let mut bias = [L::zero(); NP];
        if !t.bias.is_null() {
            for p in 0..NP {
                let from = t.bias.wrapping_add(p * PANEL_ROWS);
                bias[p] = if whole { L::load_f32(from.cast()) } else { load_part::<L>(from, t.columns, p) };
            }
        }
        for m in 0..MR {
            let scale = match (t.scales.is_null(), t.layout.float_format()) {
                (true, _) => 1.0,
                // E2M1 codes were multiplied as twice their values.
                (false, Some(FloatFormat::E2m1)) => 0.5 * *t.scales.add(m),
                (false, _) => *t.scales.add(m),
            };
            let scale = L::splat_f32(scale);
            for p in 0..NP {
                totals[m][p] = if t.bias.is_null() {
                    L::mul_f32(totals[m][p], scale)
                } else {
                    L::fma(totals[m][p], scale, bias[p])
                };
            }
        }
        for m in 0..MR {
            for p in 0..NP {
                let to = t.out.wrapping_add(m * t.stride + p * PANEL_ROWS);
                if whole {
                    L::store_f32(to, totals[m][p]);
                } else {
                    store_part::<L>(to, totals[m][p], t.columns, p);
                }
            }
        }
    }
}

fn columns_of(columns: usize, p: usize) -> usize {
    columns.saturating_sub(p * PANEL_ROWS).min(PANEL_ROWS)
}

/// Loads the columns of panel `p`, padded with zeros.
///
/// # Safety
/// `from` must be valid for [`columns_of`] values.
#[inline(always)]
unsafe fn load_part<L: Lanes>(from: *const f32, columns: usize, p: usize) -> L::F {
    let mut part = [0.0_f32; PANEL_ROWS];
    // SAFETY: the caller guarantees that `from` is valid for these columns; the array holds all sixteen values that are
    // loaded.
    unsafe {
        from.copy_to_nonoverlapping(part.as_mut_ptr(), columns_of(columns, p));
        L::load_f32(part.as_ptr().cast())
    }
}

/// Stores the columns of panel `p`.
///
/// # Safety
/// `to` must be valid for [`columns_of`] values.
#[inline(always)]
unsafe fn store_part<L: Lanes>(to: *mut f32, value: L::F, columns: usize, p: usize) {
    let mut part = [0.0_f32; PANEL_ROWS];
    // SAFETY: the array has room for the sixteen values that are stored; the caller guarantees that `to` is valid for
    // these columns.
    unsafe {
        L::store_f32(part.as_mut_ptr(), value);
        part.as_ptr().copy_to_nonoverlapping(to, columns_of(columns, p));
    }
}
