//! The searches over one block: the transforms run in order, each on the block as the previous ones have rewritten it.

use std::collections::BTreeMap;

use quant_kernels_cpu::StaticScale;

use crate::calibrate::{ChannelRanges, HiddenStates, StatisticsPass};
use crate::checkpoint::Dtype;
use crate::model::{Block, Model, NodeId};
use crate::recipe::{Action, Plan, PlanEntry};
use crate::transform::{
    BlockGrid, BlockTask, FindingStore, Findings, LinearGrid, Rewrite, Transform, TransformSettings,
};
use crate::{CancelToken, Error, Observer, Result};
use quant_formats::timed;

/// What the tasks of all searches in a block have in common.
pub(crate) struct Context<'a> {
    pub(crate) prefix: &'a str,
    pub(crate) settings: &'a TransformSettings,
    /// The family's default exponent for SmoothQuant.
    pub(crate) smoothing: f32,
    pub(crate) norm_dtypes: &'a BTreeMap<NodeId, Dtype>,
    /// The ranges of the inputs of linears, in the block as stored in the checkpoint.
    pub(crate) ranges: &'a BTreeMap<NodeId, ChannelRanges>,
    /// The linears that become blocks of a GGUF file.
    pub(crate) block_grids: &'a BTreeMap<NodeId, BlockGrid>,
    pub(crate) experts_apart: bool,
    pub(crate) observer: &'a dyn Observer,
    pub(crate) cancel: &'a CancelToken,
}

impl Context<'_> {
    fn task<'t>(
        &'t self,
        block: &'t Block,
        grids: &'t BTreeMap<NodeId, LinearGrid>,
        findings: Option<Findings<'t>>,
    ) -> BlockTask<'t> {
        BlockTask {
            prefix: self.prefix,
            block,
            grids,
            block_grids: self.block_grids,
            norm_dtypes: self.norm_dtypes,
            settings: self.settings,
            smoothing: self.smoothing,
            ranges: self.ranges,
            experts_apart: self.experts_apart,
            findings,
            cancel: self.cancel,
        }
    }

    /// The block with everything except clipping applied.
    pub(super) fn applied(&self, rewrite: &Rewrite, block: &Block) -> Result<Block> {
        if self.experts_apart { rewrite.apply_on_read(block) } else { rewrite.apply(block) }
    }

    /// Returns the static input grids, which are the same for all tokens, of the rewritten block.
    pub(super) fn input_grids(
        &self,
        block: &Block,
        grids: &BTreeMap<NodeId, LinearGrid>,
        rewrite: &Rewrite,
    ) -> Result<BTreeMap<NodeId, StaticScale>> {
        let task = self.task(block, grids, None);
        let ranges = rewrite.ranges(block.graph(), self.ranges.clone());
        let grid = |&node: &NodeId| {
            let grid = task.input_grid(node, &ranges).transpose()?;
            Some(grid.map(|grid| (node, grid)))
        };
        grids.keys().filter_map(grid).collect()
    }
}

/// A job's part of a search: the grids of the linears, and the findings of an interrupted run.
pub(crate) struct Searched<'a> {
    pub(crate) grids: &'a BTreeMap<NodeId, LinearGrid>,
    pub(crate) findings: Option<&'a dyn FindingStore>,
}

/// Searches the rewrite of the block for every element of `searched`. `states` is the input of the block, if a
/// transform needs it. If `advance` is set, there must be only one transform, which replaces the states
/// with the output of the float block.
pub(crate) fn search_rewrites(
    transforms: &[&dyn Transform],
    context: &Context<'_>,
    block: &Block,
    searched: &[Searched<'_>],
    mut states: Option<&mut HiddenStates>,
    advance: bool,
) -> Result<Vec<Rewrite>> {
    let Some((first, rest)) = transforms.split_first() else {
        return Ok(searched.iter().map(|_| Rewrite::default()).collect());
    };
    let of_step = |step| move |store| Findings { store, step };
    let tasks = searched
        .iter()
        .map(|Searched { grids, findings }| context.task(block, grids, findings.map(of_step(0))));
    let tasks: Vec<_> = tasks.collect();
    let observer = context.observer;
    let mut rewrites = one_per_task(first, tasks.len(), || {
        timed(observer, first.name(), || first.search(&tasks, states.as_deref_mut(), advance))
    })?;
    for (Searched { grids, findings }, rewrite) in searched.iter().zip(&mut rewrites) {
        for (step, transform) in (1..).zip(rest) {
            // Tasks with different grids may have different rewritten blocks, so each is searched separately.
            let rewritten = context.applied(rewrite, block)?;
            let ranges = rewrite.ranges(block.graph(), context.ranges.clone());
            let context = Context { ranges: &ranges, ..*context };
            let task = [context.task(&rewritten, grids, findings.map(of_step(step)))];
            let next = one_per_task(transform, task.len(), || {
                timed(observer, transform.name(), || transform.search(&task, states.as_deref_mut(), false))
            })?;
            for next in next {
                *rewrite = std::mem::take(rewrite).then(next)?;
            }
        }
    }
    Ok(rewrites)
}

/// Checks the number of rewrites that a search returns, because a transform can come from the calling program.
fn one_per_task(
    transform: &&dyn Transform,
    tasks: usize,
    search: impl FnOnce() -> Result<Vec<Rewrite>>,
) -> Result<Vec<Rewrite>> {
    let rewrites = search()?;
    if rewrites.len() != tasks {
        return Err(Error::usage(
            format!("the step `{}` returned {} rewrites for {tasks} tasks", transform.name(), rewrites.len()),
            "it must return one rewrite for each task",
        ));
    }
    Ok(rewrites)
}

/// What a pass finds about the inputs of linears.
#[derive(Default)]
pub(crate) struct InputRanges {
    /// The ranges of each value that a linear reads.
    pub(crate) of: BTreeMap<NodeId, ChannelRanges>,
    /// The number of counted tokens of each linear.
    pub(crate) tokens: BTreeMap<NodeId, u64>,
}

/// Gathers the ranges of all inputs of linears in a pass that `run` runs, which returns the number of tokens of each
/// linear. If a range is not finite, the error names a linear that reads it.
pub(crate) fn input_ranges(
    prefix: &str,
    block: &Block,
    states: &mut HiddenStates,
    cancel: &CancelToken,
    run: impl FnOnce(StatisticsPass<'_>, &mut HiddenStates) -> Result<BTreeMap<NodeId, u64>>,
) -> Result<InputRanges> {
    let graph = block.graph();
    let value = |linear: NodeId| graph.nodes()[linear].inputs[0];
    let mut ranges: BTreeMap<NodeId, ChannelRanges> =
        graph.linears().map(|(id, _, [_, k], _)| (value(id), ChannelRanges::new(k))).collect();
    let mut pass = StatisticsPass::new(block, states.layout(), cancel);
    for (value, ranges) in &mut ranges {
        pass.gather(*value, ranges)?;
    }
    let tokens = run(pass, states)?;
    match ranges.iter().find(|(_, ranges)| !ranges.is_finite()) {
        None => Ok(InputRanges { of: ranges, tokens }),
        Some((bad, _)) => {
            let reader = graph.linears().find(|(id, ..)| value(*id) == *bad);
            Err(Error::Calibration {
                tensor: format!("{prefix}{}.weight", reader.map_or("", |(_, name, ..)| name)),
                what: "its input".into(),
            })
        }
    }
}

pub(super) fn grids(plan: &Plan, entries: &[PlanEntry]) -> BTreeMap<NodeId, LinearGrid> {
    let node_of = |name: &String| {
        entries.iter().find_map(|entry| match &entry.action {
            Action::Quantize { node, module, .. } if module == name => *node,
            _ => None,
        })
    };
    let of = |entry: &PlanEntry| match &entry.action {
        Action::Quantize { node, module, scheme, scale_dtype } => {
            let group = Some(module).filter(|_| scheme.shares_over_tensor());
            let group = group.and_then(|module| plan.shares_scale_with(module));
            let fused = group.and_then(|parts| parts.iter().find_map(node_of));
            Some(((*node)?, LinearGrid { scheme: *scheme, scale_dtype: *scale_dtype, fused }))
        }
        _ => None,
    };
    entries.iter().filter_map(of).collect()
}

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
