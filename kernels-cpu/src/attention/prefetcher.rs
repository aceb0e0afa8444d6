//! Prefetches cache lines of pages before they are read.

use super::kernel::Tile;
use crate::simd::Lanes;

/// Cache lines to prefetch per step of sixty-four keys, for keys of 4, 8 and 16 bits.
pub(super) const KEY_LINES: [usize; 3] = [2, 4, 14];
/// Cache lines to prefetch per sixteen scores of every row, while they are converted to probabilities.
pub(super) const SCORE_LINES: [usize; 3] = [8, 16, 8];
/// Cache lines to prefetch per step of the values of sixty-four features.
pub(super) const VALUE_LINES: [usize; 3] = [5, 10, 18];
/// The number of pages whose keys were already prefetched when a chunk begins.
const PREFETCHED_PAGES: usize = 7;

/// Prefetches cache lines at an even pace, although the passes read them at an uneven one: first the keys of a chunk,
/// then its values, then the first keys of the next chunk.
pub(super) struct Prefetcher<'a> {
    tile: &'a Tile<'a>,
    pages: &'a [u32],
    /// The index of the next half page.
    half: usize,
    at: *const u8,
    /// Remaining lines of the current half.
    left: usize,
}

impl<'a> Prefetcher<'a> {
    #[inline(always)]
    pub(super) fn new(tile: &'a Tile<'a>, pages: &'a [u32]) -> Self {
        let half = if tile.is_first { PREFETCHED_PAGES.min(pages.len()) } else { usize::MAX };
        let mut ahead = Self { tile, pages, half, at: core::ptr::null(), left: 0 };
        ahead.turn();
        ahead
    }

    /// Prefetches the next `lines` lines.
    ///
    /// # Safety
    /// The processor must have the instructions of `L`.
    #[inline(always)]
    pub(super) unsafe fn prefetch<L: Lanes>(&mut self, lines: usize) {
        let now = lines.min(self.left);
        for line in 0..lines {
            if line < now {
                // SAFETY: the caller guarantees that the processor has the instructions of `L`; a prefetch address need
                // not be valid.
                unsafe { L::prefetch(self.at.wrapping_add(64 * line)) };
            }
        }
        self.at = self.at.wrapping_add(64 * now);
        self.left -= now;
        if self.left == 0 {
            self.turn();
        }
    }

    fn turn(&mut self) {
        let (count, layout) = (self.pages.len(), self.tile.layout);
        let (keys, all) = (layout.values_at(), layout.page_bytes());
        let (page, part) = match self.half {
            half if half < count => (self.pages.get(half), 0..keys),
            half if half < 2 * count => (self.pages.get(half - count), keys..all),
            half if half < 2 * count + PREFETCHED_PAGES => (self.tile.next.get(half - 2 * count), 0..keys),
            // Everything is prefetched; further calls cost two comparisons each.
            _ => (None, 0..0),
        };
        let Some(&page) = page else { return };
        self.half += 1;
        self.at = self.tile.bytes.wrapping_add((page as usize).wrapping_mul(all) + part.start);
        self.left = part.len() / 64;
    }
}
