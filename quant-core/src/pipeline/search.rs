//! The searches over one block: transforms one after the other, each on what those before it have made of the block.

use std::collections::BTreeMap;

use quant_kernels_cpu::StaticScale;

use super::Job;
use crate::Result;
use crate::calibrate::{ChannelRanges, HiddenStates};
use crate::checkpoint::Dtype;
use crate::model::{Block, Model, NodeId};
use crate::recipe::{Action, Plan, PlanEntry};
use crate::transform::{BlockTask, LinearGrid, Rewrite, Transform};
use quant_formats::timed;

/// What the tasks of a block have in common.
pub(super) struct Context<'a, 'j> {
    pub(super) job: &'a Job<'j>,
    /// Prefix of the block's modules.
    pub(super) prefix: &'a str,
    /// The types that norms are stored in.
    pub(super) norm_dtypes: &'a BTreeMap<NodeId, Dtype>,
    /// The ranges of the values that linears read, in the block as the checkpoint has it.
    pub(super) ranges: &'a BTreeMap<NodeId, ChannelRanges>,
}

impl Context<'_, '_> {
    fn task<'t>(&'t self, block: &'t Block, grids: &'t BTreeMap<NodeId, LinearGrid>) -> BlockTask<'t> {
        BlockTask {
            prefix: self.prefix,
            block,
            grids,
            norm_dtypes: self.norm_dtypes,
            settings: &self.job.plan.settings,
            smoothing: self.job.model.architecture().smoothing,
            ranges: self.ranges,
            cancel: self.job.cancel,
        }
    }

    /// The grids of inputs that are the same for all tokens, once the block is rewritten.
    pub(super) fn input_grids(
        &self,
        block: &Block,
        grids: &BTreeMap<NodeId, LinearGrid>,
        rewrite: &Rewrite,
    ) -> Result<BTreeMap<NodeId, StaticScale>> {
        let task = self.task(block, grids);
        let ranges = rewrite.ranges(block.graph(), self.ranges.clone());
        let grid = |&node: &NodeId| {
            let grid = task.input_grid(node, &ranges).transpose()?;
            Some(grid.map(|grid| (node, grid)))
        };
        grids.keys().filter_map(grid).collect()
    }
}

/// The rewrite of the block for every task, a task for each of `grids`. `states` is what enters the block, where
/// some transform looks at it; with `advance` the only one moves it on.
pub(super) fn search_rewrites(
    transforms: &[&dyn Transform],
    context: &Context<'_, '_>,
    block: &Block,
    grids: &[BTreeMap<NodeId, LinearGrid>],
    mut states: Option<&mut HiddenStates>,
    advance: bool,
) -> Result<Vec<Rewrite>> {
    let Some((first, rest)) = transforms.split_first() else {
        return Ok(grids.iter().map(|_| Rewrite::default()).collect());
    };
    let tasks: Vec<_> = grids.iter().map(|grids| context.task(block, grids)).collect();
    let observer = context.job.observer;
    let mut rewrites =
        timed(observer, first.name(), || first.search(&tasks, states.as_deref_mut(), advance))?;
    for (grids, rewrite) in grids.iter().zip(&mut rewrites) {
        for transform in rest {
            // What each has made of the block may differ by its grids: they are searched one by one.
            let rewritten = rewrite.apply(block)?;
            let ranges = rewrite.ranges(block.graph(), context.ranges.clone());
            let context = Context { ranges: &ranges, ..*context };
            let task = [context.task(&rewritten, grids)];
            let next =
                timed(observer, transform.name(), || transform.search(&task, states.as_deref_mut(), false))?;
            for next in next {
                *rewrite = std::mem::take(rewrite).then(next)?;
            }
        }
    }
    Ok(rewrites)
}

/// The grids of a block's linears that will be quantized.
pub(super) fn grids(plan: &Plan, entries: &[PlanEntry]) -> BTreeMap<NodeId, LinearGrid> {
    let node_of = |name: &String| {
        entries.iter().find_map(|entry| match &entry.action {
            Action::Quantize { node, module, .. } if module == name => *node,
            _ => None,
        })
    };
    let of = |entry: &PlanEntry| match &entry.action {
        Action::Quantize { node, module, scheme, scale_dtype } => {
            let fused = Some(module).filter(|_| scheme.shares_over_tensor()).and_then(|m| plan.fused_with(m));
            let fused = fused.and_then(|parts| parts.iter().find_map(node_of));
            Some(((*node)?, LinearGrid { scheme: *scheme, scale_dtype: *scale_dtype, fused }))
        }
        _ => None,
    };
    entries.iter().filter_map(of).collect()
}

/// The types that a block's norms are stored in.
pub(super) fn norm_dtypes(model: &Model, layer: usize) -> Result<BTreeMap<NodeId, Dtype>> {
    let architecture = model.architecture();
    architecture
        .graph(layer)
        .norms()
        .map(|(node, name, _)| {
            let tensor = format!("{}.weight", architecture.in_block(layer, name));
            Ok((node, model.source().require(&tensor)?.dtype))
        })
        .collect()
}
