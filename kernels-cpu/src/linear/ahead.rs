//! Lines of weights that are asked for before they are needed, by tiles of integers: up to some sixteen rows wait for
//! memory, and of more rows the first to meet a panel do.
//!
//! A processor foresees lines that follow each other; it does not foresee where a tile goes when its panels end. With
//! `k` of a few thousand a panel's codes are a few pages, so what is waited for at their beginning is a tenth of the
//! time, and the scales of groups, a line here and there, are as much again. Both are asked for while the panels before
//! them are multiplied: those of the next tile, which for a thread are mostly those behind in memory.

use crate::layout::{Layout, PANEL_ROWS, ScaleType};
use crate::simd::Lanes;

/// Bytes ahead within a panel that a tile of so many rows asks for, as measured. Many rows fill the processor's window with
/// arithmetic, which then foresees little by itself; few rows run through so many panels side by side that the first cache
/// would not hold what is further ahead.
pub(super) const fn distance(rows: usize, bits: usize) -> usize {
    match rows {
        0..=4 => 2048,
        5..=8 => 4096,
        9..=12 => 1024 * bits,
        _ => 8192,
    }
}

/// How far ahead the codes of a tile's panels are asked for, all panels side by side.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    /// Bytes, within a panel.
    distance: usize,
    /// From this byte of a panel's codes on, what is that far ahead is no code of the panel.
    last: usize,
    /// Bytes to where the codes go on, in the next tile's panels.
    hop: usize,
}

impl Ahead {
    /// So many bytes ahead in panels of this layout, of which a tile takes so many.
    #[inline(always)]
    pub(super) fn new(layout: &Layout, panels: usize, distance: usize) -> Self {
        let codes = layout.scales_at();
        let hop = panels * layout.panel_bytes() - codes;
        Self { distance, last: codes.saturating_sub(distance), hop }
    }

    /// How far ahead of the code at this byte of its panel.
    #[inline(always)]
    pub(super) fn of(self, byte: usize) -> usize {
        if byte < self.last { self.distance } else { self.distance + self.hop }
    }
}

/// Asks for the scales and zeros that a group has in the panels behind these.
///
/// # Safety
/// The processor must have `L`'s instructions. Addresses need not be valid.
#[inline(always)]
pub(super) unsafe fn next_parameters<L: Lanes, const NP: usize>(
    layout: &Layout,
    weights: *const u8,
    group: usize,
) {
    let panel = layout.panel_bytes();
    let scale_bytes = match layout.scales() {
        ScaleType::Progressive | ScaleType::E4m3 | ScaleType::E8m0 => 1,
        ScaleType::F16 | ScaleType::Bf16 => 2,
        ScaleType::F32 => 4,
    };
    let scales = layout.scales_at() + group * PANEL_ROWS * scale_bytes;
    for p in NP..2 * NP {
        // SAFETY: a prefetch of any address does nothing else.
        unsafe { L::prefetch(weights.wrapping_add(p * panel + scales)) };
    }
    if layout.middle().is_none() {
        let zeros = layout.zeros_at() + group * PANEL_ROWS * layout.code_bits() / 8;
        for p in NP..2 * NP {
            // SAFETY: a prefetch of any address does nothing else.
            unsafe { L::prefetch(weights.wrapping_add(p * panel + zeros)) };
        }
    }
}
