//! The positions of segments in shared buffers. A segment is the rows that are multiplied by one matrix: one call
//! prepares the rows of several experts, and each expert's rows have their own strips and tiles.

use super::RowLayout;
use super::tiles::{TILE_ROWS, Tiling};
use crate::layout::LINE;
use crate::linear::MAX_ROWS;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    pub(crate) m: usize,
    pub(crate) layout: RowLayout,
    /// The tiling for the tile unit, if it multiplies these rows.
    pub(crate) tiling: Option<Tiling>,
    /// The index of the segment's first row among all rows.
    pub(crate) row: usize,
    /// The offsets of the segment in the buffers, in elements.
    pub(crate) at: Extent,
}

impl Segment {
    /// A segment that does not share its buffers with others.
    pub(crate) fn standalone(m: usize, layout: RowLayout, tiling: Option<Tiling>) -> Self {
        Self { m, layout, tiling, row: 0, at: Extent::default() }
    }

    /// The number of row tiles, if there is a tiling and rows are stored in tiles only; otherwise the number of strips.
    pub(crate) fn units(&self, in_strips: bool) -> usize {
        match self.tiling {
            Some(tiling) if !in_strips => tiling.tiles(self.m),
            _ => super::strips(self.m),
        }
    }

    /// The ranges of the segment's codes (or words) in strips, and of their sums.
    pub(crate) fn strips(&self) -> [core::ops::Range<usize>; 2] {
        let [codes, sums] = [self.m * self.layout.padded(), self.m * self.layout.groups()];
        [self.at.codes..self.at.codes + codes, self.at.sums..self.at.sums + sums]
    }

    /// The ranges of the segment's lines of tiles, and of their sums.
    pub(crate) fn tiles(&self) -> [core::ops::Range<usize>; 2] {
        let Some(tiling) = self.tiling else { return [0..0, 0..0] };
        let lines = tiling.bytes(self.m).unwrap_or(0).div_ceil(LINE);
        let sums = tiling.sums(self.m).unwrap_or(0);
        [self.at.tiles..self.at.tiles + lines, self.at.tile_sums..self.at.tile_sums + sums]
    }
}

/// The sizes of the buffers that rows need, in elements.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) rows: usize,
    pub(crate) codes: usize,
    pub(crate) sums: usize,
    pub(crate) tiles: usize,
    pub(crate) tile_sums: usize,
    /// Values of rows that are computed before they are rounded or packed.
    pub(crate) computed: usize,
}

impl Extent {
    /// Appends a segment and returns it; `buffer_len` is the width of computed rows. `None` on overflow.
    pub(crate) fn add(
        &mut self,
        m: usize,
        layout: RowLayout,
        tiling: Option<Tiling>,
        in_strips: bool,
        buffer_len: usize,
    ) -> Option<Segment> {
        let segment = Segment { m, layout, tiling, row: self.rows, at: *self };
        self.rows = self.rows.checked_add(m)?;
        if in_strips {
            self.codes = self.codes.checked_add(m.checked_mul(layout.padded())?)?;
            self.sums = self.sums.checked_add(m.checked_mul(layout.groups())?)?;
        }
        if let Some(tiling) = tiling {
            self.tiles = self.tiles.checked_add(tiling.bytes(m)?.div_ceil(LINE))?;
            self.tile_sums = self.tile_sums.checked_add(tiling.sums(m)?)?;
        }
        self.computed = self.computed.checked_add(segment.units(in_strips).checked_mul(buffer_len)?)?;
        Some(segment)
    }

    /// An upper bound for `rows` rows, for any division into at most `segments` segments. `None` on overflow.
    pub(crate) fn bound(
        rows: usize,
        segments: usize,
        layout: RowLayout,
        tiles: Option<Tiling>,
        in_strips: bool,
        buffer_len: usize,
    ) -> Option<Self> {
        let segments = segments.min(rows);
        let strips = rows.min(segments.checked_add(rows / MAX_ROWS)?);
        // A segment's last tile may be partial.
        let row_tiles = segments.checked_add(rows / TILE_ROWS)?;
        let units = if in_strips { strips } else { row_tiles };
        let mut bound = Self { rows, computed: units.checked_mul(buffer_len)?, ..Self::default() };
        if in_strips {
            bound.codes = rows.checked_mul(layout.padded())?;
            bound.sums = rows.checked_mul(layout.groups())?;
        }
        if let Some(tiling) = tiles {
            bound.tiles = row_tiles.checked_mul(tiling.bytes(TILE_ROWS)?.div_ceil(LINE))?;
            bound.tile_sums = row_tiles.checked_mul(tiling.sums(TILE_ROWS)?)?;
        }
        Some(bound)
    }

    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            rows: self.rows.max(other.rows),
            codes: self.codes.max(other.codes),
            sums: self.sums.max(other.sums),
            tiles: self.tiles.max(other.tiles),
            tile_sums: self.tile_sums.max(other.tile_sums),
            computed: self.computed.max(other.computed),
        }
    }

    pub(crate) fn holds(&self, other: &Self) -> bool {
        self.max(*other) == *self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::STEP;

    #[test]
    fn what_is_stated_holds_every_split() {
        let layout = RowLayout { k: 96, group_size: 32, steps: 4, tiled: true };
        for (in_strips, min_rows) in [(true, 16), (false, 0)] {
            for rows in [0, 1, 7, 16, 33, 100] {
                for segments in [1, 3, 8] {
                    let all = Tiling::new(TILE_ROWS, layout, STEP, 1);
                    let bound = Extent::bound(rows, segments, layout, Some(all), in_strips, 96).unwrap();
                    for seed in 0..50_usize {
                        let mut counts = vec![0_usize; segments];
                        (0..rows).for_each(|row| counts[(row * (seed + 1) * 7 / 3 + seed) % segments] += 1);
                        let mut extent = Extent::default();
                        for &m in counts.iter().filter(|&&m| m > 0) {
                            let tiling = (m >= min_rows).then(|| Tiling::new(m, layout, STEP, 1));
                            extent.add(m, layout, tiling, in_strips, 96).unwrap();
                        }
                        assert!(extent.rows == rows && bound.holds(&extent), "{extent:?} in {bound:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn numbers_that_do_not_fit_are_none() {
        let layout = RowLayout { k: 96, group_size: 32, steps: 4, tiled: true };
        assert_eq!(Extent::bound(usize::MAX / 8, 2, layout, None, true, 0), None);
        assert!(Extent::default().add(usize::MAX / 8, layout, None, true, 0).is_none());
    }
}
