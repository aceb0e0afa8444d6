//! Rounds weights as a candidate of a search would have them rounded: to the grid of a scheme, or to a block type.

use rayon::prelude::*;

use super::shared::shared_scales;
use super::{BlockGrid, BlockTask, LinearGrid};
use crate::model::NodeId;
use crate::quantize::{SharedScales, fake_quantize_within};
use crate::{Error, Result};

const ROW_TILE: usize = 64;

/// The rounding `w ← Q(w · s) / s` of a linear's weight, with a factor `s` per column.
pub(super) struct ScaledRounding<'a> {
    scales: &'a [f32],
    target: Target<'a>,
    module: String,
}

enum Target<'a> {
    Grid(LinearGrid, SharedScales),
    /// With the importance of the inputs after division by the scales.
    Blocks(&'a BlockGrid, Option<Vec<f32>>),
}

impl<'a> ScaledRounding<'a> {
    /// `None` if the weight stays float.
    pub(super) fn new(task: &BlockTask<'a>, node: NodeId, scales: &'a [f32]) -> Result<Option<Self>> {
        let target = if let Some(&grid) = task.grids.get(&node) {
            Target::Grid(grid, shared_scales(task, node, scales)?)
        } else if let Some(grid) = task.block_grids.get(&node) {
            let divided = |importance: &Vec<f32>| {
                let pairs = importance.iter().zip(scales);
                pairs.map(|(importance, s)| (importance / (s * s)).min(f32::MAX)).collect()
            };
            Target::Blocks(grid, grid.importance.as_ref().map(divided))
        } else {
            return Ok(None);
        };
        Ok(Some(Self { scales, target, module: task.module(node) }))
    }

    /// Rounds rows `[rows, k]`, the first of which is row `first` of the weight.
    pub(super) fn apply(&self, rows: &mut [f32], first: usize) -> Result<()> {
        let k = self.scales.len();
        each(rows, self.scales, |w, s| *w *= s);
        match &self.target {
            Target::Grid(grid, shared) => {
                fake_quantize_within(rows, k, (grid.scheme, grid.scale_dtype), None, (shared, first))
                    .map_err(|e| e.within(&self.module, None))?;
            }
            Target::Blocks(grid, importance) => grid.round(rows, k, importance.as_deref(), &self.module)?,
        }
        each(rows, self.scales, |w, s| *w /= s);
        Ok(())
    }
}

/// Changes the weights of all rows by the scales of their columns.
fn each(rows: &mut [f32], scales: &[f32], change: impl Fn(&mut f32, f32) + Sync) {
    let k = scales.len();
    rows.par_chunks_mut(k * ROW_TILE).for_each(|tile| {
        for row in tile.chunks_exact_mut(k) {
            row.iter_mut().zip(scales).for_each(|(w, s)| change(w, *s));
        }
    });
}

impl BlockGrid {
    /// Replaces rows `[rows, k]` with the values that their blocks decode to.
    fn round(&self, rows: &mut [f32], k: usize, importance: Option<&[f32]>, module: &str) -> Result<()> {
        let Some(bytes) = self.kind.row_bytes(k) else {
            return Err(Error::Internal(format!(
                "a row of {} cannot have {k} columns, as in `{module}`",
                self.kind.name
            )));
        };
        rows.par_chunks_mut(k).for_each_init(
            || vec![0; bytes],
            |bytes, row| {
                self.kind.encode_by(self.search, row, importance, bytes);
                self.kind.decode(bytes, row);
            },
        );
        match rows.iter().all(|value| value.is_finite()) {
            true => Ok(()),
            false => Err(Error::Numeric {
                tensor: module.to_owned(),
                reason: format!("a row exceeds the range of {}", self.kind.name),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::{BlockSearch, Q4_0, Q4_K, Q6_K};

    #[test]
    fn rows_become_what_their_blocks_decode_to() {
        let k = 512;
        let importance: Vec<f32> = (0..k).map(|c| 1.0 + (c % 7) as f32).collect();
        for kind in [&Q4_0, &Q4_K, &Q6_K] {
            for search in [BlockSearch::Refined, BlockSearch::Reference] {
                let grid = BlockGrid { kind, search, importance: None };
                let exact: Vec<f32> = (0..3 * k).map(|i| (i as f32 * 0.37).sin() * 0.1).collect();
                let mut rows = exact.clone();
                grid.round(&mut rows, k, Some(&importance), "linear").unwrap();
                for (row, exact) in rows.chunks_exact(k).zip(exact.chunks_exact(k)) {
                    let (mut bytes, mut decoded) = (vec![0; kind.row_bytes(k).unwrap()], vec![0.0; k]);
                    kind.encode_by(search, exact, Some(&importance), &mut bytes);
                    kind.decode(&bytes, &mut decoded);
                    assert_eq!(row, decoded);
                    assert_ne!(row, exact);
                }
                let mut odd = vec![0.0; 8];
                assert!(matches!(grid.round(&mut odd, 8, None, "linear"), Err(Error::Internal(_))));
            }
            // Scales that overflow are not finite; the refined search never chooses such scales.
            let grid = BlockGrid { kind, search: BlockSearch::Reference, importance: None };
            let mut large = vec![1e9; k];
            assert!(matches!(grid.round(&mut large, k, None, "linear"), Err(Error::Numeric { .. })));
        }
    }
}
