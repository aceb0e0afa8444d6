//! Lines of pages are asked for before they are read.

use super::kernel::Tile;
use crate::simd::Lanes;

/// Lines that are asked for while a step of sixty-four keys, of 4, 8 or 16 bits, is multiplied: fewer than it
/// has, for keys take less time than values. The rest is asked for meanwhile.
pub(super) const KEY_LINES: [usize; 3] = [2, 4, 14];
/// While sixteen scores of every row become probabilities.
pub(super) const SCORE_LINES: [usize; 3] = [8, 16, 8];
/// While a step of sixty-four features' values is multiplied.
pub(super) const VALUE_LINES: [usize; 3] = [5, 10, 18];
/// Pages of keys that were asked for before a chunk begins.
const LEAD: usize = 7;

/// Asks for lines at an even pace, which the passes do not read them at: the keys of a chunk, its values, and
/// the first keys of the next.
pub(super) struct Ahead<'a> {
    tile: &'a Tile<'a>,
    pages: &'a [u32],
    /// Which half of a page comes next.
    half: usize,
    at: *const u8,
    /// Lines left of the half that is asked for.
    left: usize,
}

impl<'a> Ahead<'a> {
    #[inline(always)]
    pub(super) fn new(tile: &'a Tile<'a>, pages: &'a [u32]) -> Self {
        let half = if tile.is_first { LEAD.min(pages.len()) } else { usize::MAX };
        let mut ahead = Self { tile, pages, half, at: core::ptr::null(), left: 0 };
        ahead.turn();
        ahead
    }

    /// Asks for so many lines.
    ///
    /// # Safety
    /// The processor must have `L`'s instructions.
    #[inline(always)]
    pub(super) unsafe fn ask<L: Lanes>(&mut self, lines: usize) {
        let now = lines.min(self.left);
        for line in 0..lines {
            if line < now {
                // SAFETY: the caller has the instructions; addresses need not be valid.
                unsafe { L::prefetch(self.at.wrapping_add(64 * line)) };
            }
        }
        self.at = self.at.wrapping_add(64 * now);
        self.left -= now;
        if self.left == 0 {
            self.turn();
        }
    }

    /// On to the next half of a page.
    fn turn(&mut self) {
        let (count, layout) = (self.pages.len(), self.tile.layout);
        let (keys, all) = (layout.values_at(), layout.page_bytes());
        let (page, part) = match self.half {
            half if half < count => (self.pages.get(half), 0..keys),
            half if half < 2 * count => (self.pages.get(half - count), keys..all),
            half if half < 2 * count + LEAD => (self.tile.next.get(half - 2 * count), 0..keys),
            // Nothing any more: asking costs two comparisons.
            _ => (None, 0..0),
        };
        let Some(&page) = page else { return };
        self.half += 1;
        self.at = self.tile.bytes.wrapping_add((page as usize).wrapping_mul(all) + part.start);
        self.left = part.len() / 64;
    }
}
