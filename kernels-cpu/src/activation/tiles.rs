//! The order in which a tile unit reads rows of activations.
//!
//! A tile holds up to 16 rows of up to 64 bytes. Each group of input features is divided into blocks of equal size that
//! fit in a tile row; the last block of a group is padded with zeros. Tiles are contiguous, in the order in which a
//! kernel reads them:
//!
//! ```text
//! [row tiles][groups][blocks][parts][rows][bytes of a block]
//! ```
//!
//! Int8 activations have one part, with features in order. Floats have one to three parts of bf16, with the features of
//! a step in the order of [`PAIRS`](super::split::PAIRS). The sums per group are stored separately,
//! `[row tiles][groups][rows]`. Padding rows of the last tile may hold anything: no result that is computed from them
//! is used.

use super::RowLayout;
use crate::layout::STEP;

pub(crate) const TILE_ROWS: usize = 16;
pub(crate) const TILE_BYTES: usize = 64;

/// How rows are divided into tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tiling {
    /// Rows of every tile, including padding rows of the last: 1 to 16.
    pub(crate) rows: usize,
    /// Groups per row.
    pub(crate) groups: usize,
    /// Blocks per group.
    pub(crate) blocks: usize,
    /// Steps per block.
    pub(crate) steps: usize,
    /// Bytes per step of a row: 8 for integers, 16 for bf16.
    pub(crate) step_bytes: usize,
    /// Parts whose sum is an activation: 1 for integers, 1 to 3 for bf16.
    pub(crate) parts: usize,
}

impl Tiling {
    /// The tiling of `m` rows, `m > 0`, with `step_bytes` bytes per step and `parts` parts.
    pub(crate) fn new(m: usize, layout: RowLayout, step_bytes: usize, parts: usize) -> Self {
        let max = TILE_BYTES / step_bytes;
        let blocks = layout.steps.div_ceil(max);
        let (rows, steps) = (m.clamp(1, TILE_ROWS), layout.steps.div_ceil(blocks));
        Self { rows, groups: layout.groups(), blocks, steps, step_bytes, parts }
    }

    /// The number of row tiles of `m` rows.
    pub(crate) fn tiles(self, m: usize) -> usize {
        m.div_ceil(self.rows)
    }

    pub(crate) fn row_bytes(self) -> usize {
        self.steps * self.step_bytes
    }

    /// The size in bytes of all tiles that hold the same rows; `None` on overflow.
    pub(crate) fn bytes_across(self) -> Option<usize> {
        let tiles = self.groups.checked_mul(self.blocks)?.checked_mul(self.parts)?;
        tiles.checked_mul(self.rows * self.row_bytes())
    }

    /// Bytes of all tiles of `m` rows; `None` on overflow.
    pub(crate) fn bytes(self, m: usize) -> Option<usize> {
        self.bytes_across()?.checked_mul(self.tiles(m))
    }

    /// The number of sums of `m` rows: one per row and group, including padding rows; `None` on overflow.
    pub(crate) fn sums(self, m: usize) -> Option<usize> {
        self.groups.checked_mul(self.rows)?.checked_mul(self.tiles(m))
    }
}

/// Copies row `r` of a strip of `rows` rows into row `tile_row` of its tiles, which begin at `to`. The codes are in
/// strip order.
///
/// # Safety
/// `to` must be valid for [`Tiling::bytes_across`], and no other thread may access the bytes of row `tile_row` during
/// the call.
#[allow(unsafe_code, reason = "rows of one tile are written by several threads")]
pub(super) unsafe fn copy_row(
    tiling: Tiling,
    layout: RowLayout,
    codes: &[i8],
    [r, rows]: [usize; 2],
    tile_row: usize,
    to: *mut i8,
) {
    let Tiling { blocks, steps, .. } = tiling;
    let row_bytes = tiling.row_bytes();
    assert!(tile_row < tiling.rows && r < rows && codes.len() == rows * layout.padded());
    for (g, block) in (0..tiling.groups).flat_map(|g| (0..blocks).map(move |block| (g, block))) {
        // SAFETY: the offset is that of this row in the tile of this block, within the tiles for which the caller
        // guarantees that `to` is valid.
        let mut to = unsafe { to.add(((g * blocks + block) * tiling.rows + tile_row) * row_bytes) };
        let first = block * steps;
        let whole = steps.min(layout.steps - first);
        let mut from = ((g * layout.steps + first) * rows + r) * STEP;
        for _ in 0..whole {
            // SAFETY: the source is a step of the row within the strip, which has the same number of steps; the
            // destination is within the row's bytes.
            unsafe {
                codes.as_ptr().add(from).copy_to_nonoverlapping(to, STEP);
                to = to.add(STEP);
            }
            from += rows * STEP;
        }
        // SAFETY: `to` now points to the remaining bytes of this row in the tile, enough for `steps − whole` steps.
        unsafe { to.write_bytes(0, (steps - whole) * STEP) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_cut_into_equal_blocks() {
        for (steps, step_bytes, blocks, each) in [
            (1, 8, 1, 1),
            (4, 8, 1, 4),
            (8, 8, 1, 8),
            (9, 8, 2, 5),
            (16, 8, 2, 8),
            (16, 16, 4, 4),
            (5, 16, 2, 3),
        ] {
            let layout = RowLayout { k: 3 * steps * STEP, group_size: steps * STEP, steps, tiled: true };
            let tiling = Tiling::new(40, layout, step_bytes, 1);
            assert_eq!((tiling.blocks, tiling.steps, tiling.rows, tiling.tiles(40)), (blocks, each, 16, 3));
            assert!(tiling.row_bytes() <= TILE_BYTES && tiling.blocks * tiling.steps >= steps);
        }
    }

    #[test]
    #[allow(unsafe_code, reason = "the tiles have the size that the tiling requires")]
    fn rows_are_copied_to_their_places() {
        for (m, size) in [(16, 72), (16, 36), (17, 128)] {
            let steps = size_of_steps(size);
            let layout = RowLayout { k: 2 * size, group_size: size, steps, tiled: true };
            let tiling = Tiling::new(m, layout, STEP, 1);
            let codes: Vec<i8> = (0..m * layout.padded()).map(|i| (i % 127) as i8 + 1).collect();
            let mut tiles = vec![-1_i8; tiling.bytes(16).unwrap()];
            for r in 0..16 {
                // SAFETY: `tiles` and the strip have the sizes of this tiling, and only this thread accesses them.
                unsafe { copy_row(tiling, layout, &codes, [r, m], r, tiles.as_mut_ptr()) };
            }
            let padded = tiling.blocks * tiling.steps;
            for (i, step) in tiles.chunks_exact(STEP).enumerate() {
                let (within, r) = (i % tiling.steps, i / tiling.steps % 16);
                let block = i / tiling.steps / 16;
                let (g, s) = (block / tiling.blocks, block % tiling.blocks * tiling.steps + within);
                let from = ((g * steps + s) * m + r) * STEP;
                let expected = if s < steps { &codes[from..from + STEP] } else { &[0; STEP] };
                assert!(s < padded && step == expected, "{m} {size} {i}");
            }
        }
    }

    fn size_of_steps(size: usize) -> usize {
        size.div_ceil(STEP)
    }

    /// Groups of 16 use vector lanes for any number of rows; wider groups use tiles for 16 rows or more. The products of
    /// both are compared with the reference in `tests/linear.rs`: a product here would compile every kernel once more.
    #[test]
    fn narrow_groups_are_not_tiled() {
        use crate::{FloatFormat, Int8Rows, Isa, Layout, RowLayout, Scales, Serial, WeightView};

        let (n, k) = (40, 96);
        let codes = vec![3; n * k];
        for (size, m, tiled) in
            [(16, 16, false), (16, 60, false), (32, 16, true), (48, 60, true), (32, 15, false)]
        {
            let groups = vec![0x38; n * k / size];
            let scales = Scales::E4m3 { groups: &groups, global: 1.0 };
            let view =
                WeightView::float_with_scales([n, k], FloatFormat::E2m1, size, &codes, scales).unwrap();
            let layout = Layout::of(&view, false).unwrap();
            let mut rows = Int8Rows::new(Isa::AmxEmulated.token().unwrap());
            rows.quantize(&vec![1.0_f32; m * k], RowLayout::of(&layout), &Serial).unwrap();
            assert_eq!(rows.tiling.is_some(), tiled, "groups of {size}, {m} rows");
        }
    }
}
