//! Scales that rows of a weight share, for candidates of a search: computed from the weight as scaled by a candidate,
//! and from the weights that engines fuse with it.

use super::BlockTask;
use crate::Result;
use crate::model::NodeId;
use crate::quantize::{RowsError, ScaleContext, SharedExtents, SharedScales};
use crate::scheme::{Granularity, LinearScheme};

/// The scales that rows of `node`'s weight share if its columns are multiplied by `scales`.
pub(super) fn shared_scales(task: &BlockTask<'_>, node: NodeId, scales: &[f32]) -> Result<SharedScales> {
    let grid = task.grids[&node];
    let Some(extents) = extents(task, node, scales)? else { return Ok(SharedScales::None) };
    let mut amax = None;
    if grid.scheme.shares_over_tensor() {
        let others = task.grids.iter().filter(|(id, other)| **id != node && other.shares_with(&grid));
        for (&other, _) in others {
            let other = extents_of(task, other, grid.scheme, scales)?.map_or(0.0, |e| e.amax());
            amax = Some(other.max(amax.unwrap_or(0.0)));
        }
    }
    let context = ScaleContext { search: task.settings.scale_search, amax };
    extents.scales(grid.scale_dtype, context).map_err(|e| e.within(&task.module(node), None))
}

fn extents(task: &BlockTask<'_>, node: NodeId, scales: &[f32]) -> Result<Option<SharedExtents>> {
    extents_of(task, node, task.grids[&node].scheme, scales)
}

fn extents_of(
    task: &BlockTask<'_>,
    node: NodeId,
    scheme: LinearScheme,
    scales: &[f32],
) -> Result<Option<SharedExtents>> {
    let weight = task.block.linear(node).weight().read()?;
    if scheme.granularity != Granularity::Block && !scheme.shares_over_tensor() {
        return Ok(None);
    }
    let load = |at: usize, row: &mut [f32]| {
        weight.copy_rows(at..at + 1, row).map_err(|e| RowsError::Layout(e.to_string()))?;
        row.iter_mut().zip(scales).for_each(|(w, s)| *w *= s);
        Ok(())
    };
    SharedExtents::of(scheme, weight.shape(), load).map_err(|e| e.within(&task.module(node), None))
}
