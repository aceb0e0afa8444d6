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
use crate::layout::STEP;

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
    let Tiling { blocks, steps, .. } = tiling;
    let row_bytes = tiling.row_bytes();
    assert!(tile_row < tiling.rows && r < rows && codes.len() == rows * layout.padded());
    for (g, block) in (0..tiling.groups).flat_map(|g| (0..blocks).map(move |block| (g, block))) {
        // SAFETY: the row's place in the tile of this block; that tile is within the tiles.
        let mut to = unsafe { to.add(((g * blocks + block) * tiling.rows + tile_row) * row_bytes) };
        let first = block * steps;
        let whole = steps.min(layout.steps - first);
        let mut from = ((g * layout.steps + first) * rows + r) * STEP;
        for _ in 0..whole {
            // SAFETY: a step of the row, within the strip, for both are of as many steps; and within the row's place.
            unsafe {
                codes.as_ptr().add(from).copy_to_nonoverlapping(to, STEP);
                to = to.add(STEP);
            }
            from += rows * STEP;
        }
        // SAFETY: what is left of the row's place.
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
            let layout = RowLayout { k: 3 * steps * STEP, group_size: steps * STEP, steps };
            let tiling = Tiling::new(40, layout, step_bytes, 1);
            assert_eq!((tiling.blocks, tiling.steps, tiling.rows, tiling.tiles(40)), (blocks, each, 16, 3));
            assert!(tiling.row_bytes() <= TILE_BYTES && tiling.blocks * tiling.steps >= steps);
        }
    }

    /// Rows of a strip come to lie in their tiles, step by step, with zeros at the end of a group.
    #[test]
    #[allow(unsafe_code, reason = "the tiles are as large as the tiling says")]
    fn rows_are_copied_to_their_places() {
        for (m, size) in [(16, 72), (16, 36), (17, 128)] {
            let steps = size_of_steps(size);
            let layout = RowLayout { k: 2 * size, group_size: size, steps };
            let tiling = Tiling::new(m, layout, STEP, 1);
            let codes: Vec<i8> = (0..m * layout.padded()).map(|i| (i % 127) as i8 + 1).collect();
            let mut tiles = vec![-1_i8; tiling.bytes(16).unwrap()];
            for r in 0..16 {
                // SAFETY: tiles of 16 rows, and a strip of `m`.
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

    /// Groups of 16 are left to lanes, in as many rows as one likes; wider ones go through tiles from 16 rows on. Both
    /// equal the definition.
    #[test]
    fn narrow_groups_are_not_tiled() {
        use crate::{
            FloatFormat, Int8Rows, Isa, PackedLinear, RowLayout, Scales, Serial, WeightView, reference,
        };

        let (n, k) = (40, 96);
        let codes: Vec<u8> = (0..n * k).map(|i| (i * 7 % 16) as u8).collect();
        for (size, m, tiled) in
            [(16, 16, false), (16, 60, false), (32, 16, true), (48, 60, true), (32, 15, false)]
        {
            let groups: Vec<u8> = (0..n * k / size).map(|i| 0x30 + (i % 9) as u8).collect();
            let scales = Scales::E4m3 { groups: &groups, global: 7.5 };
            let view =
                WeightView::float_with_scales([n, k], FloatFormat::E2m1, size, &codes, scales).unwrap();
            let packed = PackedLinear::pack(&view, None, false, &Serial).unwrap();
            let x: Vec<f32> = (0..m * k).map(|i| ((i * i) as f32 * 0.013).sin()).collect();
            let token = Isa::AmxEmulated.token().unwrap();
            let mut rows = Int8Rows::new(token);
            rows.quantize(&x, RowLayout::of(packed.layout()), &Serial).unwrap();
            assert_eq!(rows.tiling.is_some(), tiled, "groups of {size}, {m} rows");
            let mut out = vec![f32::NAN; m * n];
            packed.view().multiply(token, &rows, None, &mut out, &Serial).unwrap();
            assert_eq!(out, reference::int8_linear(&view, &rows, None), "groups of {size}, {m} rows");
        }
    }
}
