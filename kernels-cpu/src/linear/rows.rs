//! Activations in the form that products read: a whole matrix, or one segment of several.

use core::marker::PhantomData;
use core::ops::Range;

use super::dispatch::{MAX_ROWS, ONE_STRIP};
use super::float_tile::{BF16_STEP, FLOAT_STEP};
use super::tiled;
use crate::activation::segments::Segment;
use crate::activation::tiles::Tiling;
use crate::activation::{RowLayout, strip, strips};
use crate::layout::STEP;
use crate::{FloatRows, Int8Rows, IsaToken, KernelError, Layout};

#[derive(Clone, Copy)]
pub(super) struct Bytes<'a> {
    pub(super) at: *const u8,
    pub(super) len: usize,
    of: PhantomData<&'a [u8]>,
}

impl<'a> Bytes<'a> {
    pub(super) fn of<T>(slice: &'a [T]) -> Self {
        Self { at: slice.as_ptr().cast(), len: size_of_val(slice), of: PhantomData }
    }
}

/// Int8 or floating-point rows.
pub(crate) struct ActivationRows<'a> {
    pub(super) m: usize,
    pub(super) layout: Option<RowLayout>,
    /// Bytes that are reserved per step of a row; strips are as far apart.
    pub(super) step_bytes: usize,
    /// Bytes per step of a row that are used: steps within a strip are as far apart.
    pub(super) row_step: usize,
    pub(super) activations: Bytes<'a>,
    /// Integers or floats, four bytes each.
    pub(super) sums: Bytes<'a>,
    pub(super) eights: Option<&'a [i32]>,
    pub(super) scales: Option<&'a [f32]>,
    pub(super) rest: bool,
    pub(super) zero: i32,
    /// The rows for the tile unit, if it multiplies them.
    pub(super) tiled: Option<TiledRows<'a>>,
}

/// Rows in the order of a tile unit, and their sums per group.
#[derive(Clone, Copy)]
pub(super) struct TiledRows<'a> {
    pub(super) tiling: Tiling,
    pub(super) tiles: Bytes<'a>,
    pub(super) sums: Bytes<'a>,
}

// SAFETY: threads only read through the pointers, and the rows outlive the call.
unsafe impl Sync for ActivationRows<'_> {}

impl<'a> ActivationRows<'a> {
    /// The integer rows of a segment, for the tiles of an instruction set; empty if there is no segment.
    pub(crate) fn int8(x: &'a Int8Rows, token: IsaToken, all: Option<&Segment>) -> Self {
        let m = all.map_or(0, |all| all.m);
        let [codes, sums] = all.map_or([0..0, 0..0], Segment::strips);
        let [tiles, tile_sums] = all.map_or([0..0, 0..0], Segment::tiles);
        let scales = all.map_or(0..0, |all| all.row..all.row + m);
        let tiling = all.and_then(|all| all.tiling).filter(|_| token.has_tiles());
        Self {
            m,
            layout: all.map(|all| all.layout),
            step_bytes: STEP,
            row_step: STEP,
            activations: Bytes::of(part(&x.codes, codes)),
            sums: Bytes::of(part(&x.sums, sums.clone())),
            eights: Some(part(&x.eights, sums)),
            scales: Some(part(&x.scales, scales)),
            rest: false,
            zero: x.zero,
            tiled: tiling.map(|tiling| TiledRows {
                tiling,
                tiles: Bytes::of(part(&x.tiles, tiles)),
                sums: Bytes::of(part(&x.tile_sums, tile_sums)),
            }),
        }
    }

    pub(crate) fn float(x: &'a FloatRows, all: Option<&Segment>) -> Self {
        let [words, sums] = all.map_or([0..0, 0..0], Segment::strips);
        let [tiles, tile_sums] = all.map_or([0..0, 0..0], Segment::tiles);
        let tiling = all.and_then(|all| all.tiling);
        // Float rows are stored either in strips or in tiles.
        let [words, sums] = if tiling.is_some() { [0..0, 0..0] } else { [words, sums] };
        Self {
            m: all.map_or(0, |all| all.m),
            layout: all.map(|all| all.layout),
            step_bytes: FLOAT_STEP,
            row_step: if x.stores_pairs() && x.exact_in_bf16 { BF16_STEP } else { FLOAT_STEP },
            activations: Bytes::of(part(&x.words, words)),
            sums: Bytes::of(part(&x.sums, sums)),
            eights: None,
            scales: None,
            rest: !x.exact_in_bf16,
            zero: 0,
            tiled: tiling.map(|tiling| TiledRows {
                tiling,
                tiles: Bytes::of(part(&x.tiles, tiles)),
                sums: Bytes::of(part(&x.sums, tile_sums)),
            }),
        }
    }

    pub(crate) fn m(&self) -> usize {
        self.m
    }

    /// The maximum number of strips or row tiles per piece of work, and the maximum number of rows in each.
    pub(crate) fn max_units(&self) -> [usize; 2] {
        match self.tiled {
            Some(rows) => [tiled::max_tiles(rows.tiling), rows.tiling.rows],
            None => [4, if self.m <= ONE_STRIP { self.m } else { MAX_ROWS }],
        }
    }

    /// The rows of a range of strips, or of row tiles if a tile unit multiplies.
    pub(crate) fn rows_of(&self, units: Range<usize>) -> Range<usize> {
        if units.is_empty() {
            return 0..0;
        }
        match self.tiled {
            Some(TiledRows { tiling, .. }) => {
                (units.start * tiling.rows).min(self.m)..(units.end * tiling.rows).min(self.m)
            }
            None => strip(self.m, units.start).start..strip(self.m, units.end - 1).end,
        }
    }

    /// The number of strips, or of row tiles if a tile unit multiplies.
    pub(crate) fn strips(&self) -> usize {
        self.tiled.map_or(strips(self.m), |tiled| tiled.tiling.tiles(self.m))
    }

    /// Checks the lengths of all parts.
    pub(super) fn check(&self, layout: &Layout) -> Result<(), KernelError> {
        if let Some(TiledRows { tiling, tiles, sums }) = self.tiled {
            let enough = |what, expected: Option<usize>, got: usize| match expected {
                Some(expected) if expected <= got => Ok(()),
                Some(expected) => Err(KernelError::Length { what, expected, got }),
                None => Err(KernelError::TooLarge(what)),
            };
            // The row layouts are equal, so the tiling has the steps and groups of the weights: only lengths remain.
            enough("activation buffer", tiling.bytes(self.m), tiles.len)?;
            enough("buffer of sums", tiling.sums(self.m).and_then(|sums| sums.checked_mul(4)), sums.len)?;
            return self.scales.map_or(Ok(()), |s| KernelError::length("scales", self.m, s.len()));
        }
        let of = |each: usize, bytes: usize| self.m.checked_mul(each)?.checked_mul(bytes);
        let length = |what, expected: Option<usize>, got| match expected {
            Some(expected) => KernelError::length(what, expected, got),
            None => Err(KernelError::TooLarge(what)),
        };
        let groups = layout.groups();
        let steps = of(layout.padded_k() / STEP, self.step_bytes);
        length("activation buffer", steps, self.activations.len)?;
        length("buffer of sums", of(groups, 4), self.sums.len)?;
        self.eights.map_or(Ok(()), |eights| length("sums", of(groups, 1), eights.len()))?;
        self.scales.map_or(Ok(()), |scales| length("scales", Some(self.m), scales.len()))
    }
}

fn part<T>(slice: &[T], range: Range<usize>) -> &[T] {
    slice.get(range).unwrap_or_default()
}
