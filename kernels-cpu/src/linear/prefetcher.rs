//! Prefetching of weights, for which tiles would otherwise wait at the beginning of panels.
//!
//! The hardware prefetcher follows sequential lines, but does not predict where a tile continues when its panels end,
//! nor the scales of groups, which are scattered over single lines. Both are prefetched while the previous panels are
//! multiplied. The panels of a thread's next tile are usually the next ones in memory.

use crate::layout::{Layout, PANEL_ROWS, ScaleType};
use crate::simd::Lanes;

/// How many bytes ahead within a panel a tile of `rows` rows prefetches, as measured.
pub(super) const fn distance(rows: usize, bits: usize) -> usize {
    match rows {
        0..=4 => 2048,
        5..=8 => 4096,
        9..=12 => 1024 * bits,
        _ => 8192,
    }
}

/// How far ahead the codes of a tile's panels are prefetched.
#[derive(Clone, Copy)]
pub(super) struct Prefetcher {
    /// Bytes ahead, within a panel.
    distance: usize,
    /// From this byte of a panel's codes on, the prefetch distance leads beyond the codes of the panel.
    last: usize,
    /// Bytes to skip to the codes of the next tile's panels.
    hop: usize,
}

impl Prefetcher {
    #[inline(always)]
    pub(super) fn new(layout: &Layout, panels: usize, distance: usize) -> Self {
        let codes = layout.scales_at();
        let hop = panels * layout.panel_bytes() - codes;
        Self { distance, last: codes.saturating_sub(distance), hop }
    }

    /// How many bytes ahead to prefetch when the tile reads this byte of a panel.
    #[inline(always)]
    pub(super) fn of(self, byte: usize) -> usize {
        if byte < self.last { self.distance } else { self.distance + self.hop }
    }
}

/// Prefetches the scales, and the zero points or minima, of a group in the panels of the next tile.
///
/// # Safety
/// The processor must have the instructions of `L`. Addresses need not be valid.
#[inline(always)]
pub(super) unsafe fn next_parameters<L: Lanes, const NP: usize>(
    layout: &Layout,
    weights: *const u8,
    group: usize,
) {
    let panel = layout.panel_bytes();
    let scale_bytes = match layout.scales() {
        ScaleType::Progressive | ScaleType::E4m3 | ScaleType::E8m0 => 1,
        ScaleType::Super | ScaleType::SuperMins => 1,
        ScaleType::F16 | ScaleType::Bf16 => 2,
        ScaleType::F32 => 4,
    };
    let scales = layout.scales_at() + group * PANEL_ROWS * scale_bytes;
    for p in NP..2 * NP {
        // SAFETY: the caller guarantees that the processor has the instructions of `L`; a prefetch of any address,
        // valid or not, has no other effect.
        unsafe { L::prefetch(weights.wrapping_add(p * panel + scales)) };
    }
    if layout.zero_point().is_none() || layout.scales() == ScaleType::SuperMins {
        let bytes = if layout.is_super() { PANEL_ROWS } else { PANEL_ROWS * layout.code_bits() / 8 };
        let zeros = layout.zeros_at() + group * bytes;
        for p in NP..2 * NP {
            // SAFETY: the caller guarantees that the processor has the instructions of `L`; a prefetch of any address,
            // valid or not, has no other effect.
            unsafe { L::prefetch(weights.wrapping_add(p * panel + zeros)) };
        }
    }
}
