//! The order in which a tile unit reads rows of activations.
//!
//! A tile holds up to 16 rows of up to 64 bytes. Rows are cut into tiles of 16 (fewer if there are fewer in all), and
//! each group of input features into blocks of as many steps as a tile's row holds, of equal size; fillers at the end of
//! a group's last block are zero. Tiles are contiguous, and follow each other as a kernel reads them:
//!
//! ```text
//! [row tiles][groups][blocks][parts][rows][bytes of a block]
//! ```
//!
//! Activations of 8 bits are one part, with features in order. Floats are one to three parts of bf16, with the features
//! of a step in the order of [`PAIRS`](super::float::PAIRS). Beside the tiles stand the sums over groups,
//! `[row tiles][groups][rows]`. Rows of the last tile that do not exist hold anything: nothing that is computed from them
//! is used.

use super::RowLayout;
use crate::KernelError;
use crate::layout::{LINE, Line, STEP};

/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = 16;
/// Bytes of a row of a tile.
pub(crate) const TILE_BYTES: usize = 64;

/// How rows are cut into tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tiling {
    /// Rows of every tile, the last one's fillers included: 1 to 16.
    pub(crate) rows: usize,
    /// Groups of a row.
    pub(crate) groups: usize,
    /// Blocks of a group.
    pub(crate) blocks: usize,
    /// Steps of a block.
    pub(crate) steps: usize,
    /// Bytes of a step of a row: 8 of integers, 16 of bf16.
    pub(crate) step_bytes: usize,
    /// Numbers whose sum is an activation: 1 of integers, 1 to 3 of bf16.
    pub(crate) parts: usize,
}

impl Tiling {
    /// That of `m` rows, above zero, for steps of so many bytes in so many parts.
    pub(crate) fn new(m: usize, layout: RowLayout, step_bytes: usize, parts: usize) -> Self {
        let most = TILE_BYTES / step_bytes;
        let blocks = layout.steps.div_ceil(most);
        let (rows, steps) = (m.clamp(1, TILE_ROWS), layout.steps.div_ceil(blocks));
        Self { rows, groups: layout.groups(), blocks, steps, step_bytes, parts }
    }

    /// Tiles of `m` rows, one below the other.
    pub(crate) fn tiles(self, m: usize) -> usize {
        m.div_ceil(self.rows)
    }

    /// Bytes of a row of a tile.
    pub(crate) fn row_bytes(self) -> usize {
        self.steps * self.step_bytes
    }

    /// Bytes of all tiles of the same rows, or `None` where no number holds them.
    pub(crate) fn bytes_across(self) -> Option<usize> {
        let tiles = self.groups.checked_mul(self.blocks)?.checked_mul(self.parts)?;
        tiles.checked_mul(self.rows * self.row_bytes())
    }

    /// Bytes of all tiles of `m` rows.
    pub(crate) fn bytes(self, m: usize) -> Option<usize> {
        self.bytes_across()?.checked_mul(self.tiles(m))
    }

    /// Sums over groups of `m` rows, fillers included.
    pub(crate) fn sums(self, m: usize) -> Option<usize> {
        self.groups.checked_mul(self.rows)?.checked_mul(self.tiles(m))
    }

    /// Where the steps of row `r` of a tile begin, in steps from where its first tile begins: of each group and each of
    /// the `blocks · steps` steps, fillers included, in order. The part comes on top, `rows · steps` for each.
    pub(crate) fn places(self, r: usize) -> impl Iterator<Item = usize> {
        (0..self.groups * self.blocks).flat_map(move |block| {
            let at = (block * self.parts * self.rows + r) * self.steps;
            at..at + self.steps
        })
    }
}

/// So many bytes in whole lines, of which those that were there stay.
pub(super) fn resize_lines(lines: &mut Vec<Line>, bytes: Option<usize>) -> Result<(), KernelError> {
    super::resize(lines, bytes.map(|bytes| bytes.div_ceil(LINE)))
}

/// Copies row `r` of a strip of `rows` into its tiles, which begin at `to`; the codes are in the strip's order.
///
/// # Safety
/// `to` must be valid for [`Tiling::bytes_across`], and nobody else may use these bytes of row `r` meanwhile.
#[allow(unsafe_code, reason = "rows of one tile are written by several threads")]
pub(super) unsafe fn copy_row(
    tiling: Tiling,
    layout: RowLayout,
    codes: &[i8],
    [r, rows]: [usize; 2],
    tile_row: usize,
    to: *mut i8,
) {
    let padded = tiling.blocks * tiling.steps;
    for (i, place) in tiling.places(tile_row).enumerate() {
        let (g, step) = (i / padded, i % padded);
        let values = match step < layout.steps {
            true => {
                let at = ((g * layout.steps + step) * rows + r) * STEP;
                codes[at..at + STEP].try_into().unwrap_or([0; STEP])
            }
            false => [0; STEP],
        };
        // SAFETY: places are steps of row `r` within the tiles; arrays of bytes have no alignment.
        unsafe { to.add(place * STEP).cast::<[i8; STEP]>().write(values) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_cut_into_equal_blocks() {
        for (steps, step_bytes, blocks, each) in
            [(1, 8, 1, 1), (4, 8, 1, 4), (8, 8, 1, 8), (9, 8, 2, 5), (16, 8, 2, 8), (16, 16, 4, 4), (5, 16, 2, 3)]
        {
            let layout = RowLayout { k: 3 * steps * STEP, group_size: steps * STEP, steps };
            let tiling = Tiling::new(40, layout, step_bytes, 1);
            assert_eq!((tiling.blocks, tiling.steps, tiling.rows, tiling.tiles(40)), (blocks, each, 16, 3));
            assert!(tiling.row_bytes() <= TILE_BYTES && tiling.blocks * tiling.steps >= steps);
        }
    }

    /// Every step of every row and part has a place of its own, and together they fill the tiles.
    #[test]
    fn places_fill_the_tiles_once() {
        for (m, parts) in [(1, 1), (5, 2), (16, 3), (30, 2)] {
            let layout = RowLayout { k: 2 * 72, group_size: 72, steps: 9 };
            let tiling = Tiling::new(m, layout, 16, parts);
            let all = tiling.bytes_across().unwrap() / 16;
            let mut taken = vec![false; all];
            for r in 0..tiling.rows {
                for place in tiling.places(r) {
                    for part in 0..parts {
                        let place = place + part * tiling.rows * tiling.steps;
                        assert!(!std::mem::replace(&mut taken[place], true));
                    }
                }
            }
            assert!(taken.into_iter().all(|taken| taken));
        }
    }
}
