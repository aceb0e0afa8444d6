//! A block rounded with GPTQ: the order in which linears are rounded, and the inputs they are calibrated on.
//!
//! Linears that read the same value form a *stage* and share a Hessian. On inputs of the quantized model, the stages
//! run one after another, and each sees the outputs of the previous stages as the quantized model computes them. On
//! inputs of the float model, all Hessians are gathered in one pass.
//!
//! A resumed run needs no Hessians for stages that are finished. On inputs of the quantized model, it only runs their
//! linears, with the weights that were written.

use std::collections::{BTreeMap, btree_map};
use std::iter::Peekable;
use std::sync::Arc;

use serde_json::json;

use super::super::{Rounded, RoundingTask, StageRounded, StagedRounding, States};
use super::{GptqRecord, settings};
use crate::calibrate::{ExpertStates, HiddenStates, StatisticsPass, watched};
use crate::model::{Block, BlockGraph, Linear, NodeId, WeightBody};
use crate::quantize::gptq::{Factor, FactorError, GptqSettings, Hessian, Solved, solve_within};
use crate::quantize::{RowsError, ScaleContext, SharedExtents};
use crate::transform::LinearGrid;
use crate::{Error, Result};

/// A GPTQ run through a block. The results of a stage may be written before the next stage begins.
pub(super) struct GptqRun<'a> {
    task: RoundingTask<'a>,
    settings: GptqSettings,
    states: &'a mut HiddenStates,
    /// The remaining stages: the value that is read, and the linears that read it.
    stages: Peekable<btree_map::IntoIter<NodeId, Vec<NodeId>>>,
    inputs: StageInputs,
    /// The block before rounding, whose linears replace rounded ones that are no longer needed.
    before: Block,
}

enum StageInputs {
    /// Computed stage by stage from the states, which are the values of node `from` in the block as rounded so far. If
    /// `advance` is set, the states are moved past the block at the end.
    Rounded { from: NodeId, experts: Option<Box<ExpertStates>>, advance: bool },
    /// Gathered in one pass through the unrounded block, in the order of the stages, except those that are finished.
    Gathered(std::vec::IntoIter<Hessian>),
}

impl<'a> GptqRun<'a> {
    /// Prepares to round a block on the states before it. If `advance` is set, states of the quantized model become the
    /// outputs of the rounded block, and states of the float model those of the float block.
    pub(super) fn new(
        task: RoundingTask<'a>,
        which: States,
        states: &'a mut HiddenStates,
        advance: bool,
    ) -> Result<Self> {
        let stages = stages(task.block.graph(), task.grids);
        let inputs = match which {
            States::Quantized => {
                StageInputs::Rounded { from: task.block.graph().input(), experts: None, advance }
            }
            States::Float => StageInputs::Gathered(task.gather(&stages, states, advance)?.into_iter()),
            States::Copy => StageInputs::Gathered(task.gather(&stages, states, false)?.into_iter()),
        };
        let (before, settings) = (task.block.clone(), settings(task.settings));
        Ok(Self { task, settings, states, stages: stages.into_iter().peekable(), inputs, before })
    }
}

impl GptqRun<'_> {
    /// Moves the states as close as possible to the value that a stage reads, and starts the experts if it is inside
    /// one. Returns the node that selects the rows of that expert, if experts run one at a time.
    fn approach(&mut self, value: NodeId) -> Result<Option<NodeId>> {
        let Self { task, states, inputs, before, .. } = self;
        let StageInputs::Rounded { from, experts, advance } = inputs else { return Ok(None) };
        let graph = task.block.graph().clone();
        if let Some(cut) = (*from + 1..=value).rev().find(|&c| graph.is_cut(c)) {
            states.advance_between(&task.block, [*from, cut], task.cancel)?;
            *from = cut;
            task.release(before, |node| node <= cut);
        }
        // Experts run one at a time only if tokens are independent of each other from here to the end of the block.
        let selects = graph.rows_selected_by(value).filter(|_| !graph.mixes_tokens(*from, graph.output()));
        if let (Some(selects), None) = (selects, &experts) {
            let started = ExpertStates::new(states, &task.block, *from, selects, task.cancel)?;
            *experts = Some(Box::new(started));
        }
        let (Some(selects), Some(experts)) = (selects, experts) else { return Ok(None) };
        if !experts.have(&graph, selects) {
            return Ok(None);
        }
        task.pass_experts((experts, states), Some(selects), *advance, before)?;
        Ok(Some(selects))
    }

    /// Replaces a linear in the block, if later stages see its outputs.
    fn replace(&mut self, node: NodeId, weight: Arc<WeightBody>) {
        if let StageInputs::Rounded { .. } = self.inputs {
            let bias = self.task.block.linear(node).bias().cloned();
            self.task.block.replace_linear(node, Linear::new(weight, bias));
        }
    }
}

impl StagedRounding for GptqRun<'_> {
    fn next_stage(&mut self) -> Result<Option<StageRounded>> {
        let Some((value, linears)) = self.stages.next() else { return Ok(None) };
        let selects = self.approach(value)?;
        let task = &self.task;
        let mut routed = None;
        let mut hessian = match &mut self.inputs {
            StageInputs::Rounded { from, experts, .. } => {
                let mut hessian = task.hessian(&linears)?;
                match (selects, experts) {
                    (Some(selects), Some(experts)) => {
                        let (nodes, how) = ([selects, value], (task.experts, task.cancel));
                        routed = experts.gather(self.states, &task.block, nodes, how, &mut hessian)?;
                    }
                    _ => {
                        // Experts beside an operation that mixes tokens, as in a parallel block, run in the block.
                        let selects = task.block.graph().rows_selected_by(value);
                        let few = selects.filter(|_| !task.experts.is_routed());
                        let mut unrouted = BTreeMap::new();
                        if let Some(selects) = few {
                            unrouted = task.experts.unrouted(self.states, &task.block, *from, task.cancel)?;
                            routed = unrouted.get(&selects).copied();
                        }
                        let (block, nodes) = (watched(&task.block, &unrouted), [*from, value]);
                        self.states.gather_between(&block, nodes, task.cancel, &mut hessian)?;
                    }
                }
                hessian
            }
            StageInputs::Gathered(hessians) => {
                let selects = task.block.graph().rows_selected_by(value);
                routed = selects.and_then(|selects| task.unrouted.get(&selects)).copied();
                hessians.next().ok_or_else(|| Error::Internal("fewer Hessians than stages".into()))?
            }
        };
        hessian.finish();
        let mut rounded = task.solve_stage(hessian, &linears, self.settings)?;
        rounded.values_mut().for_each(|rounded| rounded.routed = routed);
        for (&node, rounded) in &rounded {
            self.replace(node, rounded.weight.clone());
        }
        Ok(Some(rounded))
    }

    fn finished_stage(&mut self) -> Option<Vec<NodeId>> {
        let (_, linears) = self.stages.peek()?;
        self.task.is_finished(linears).then(|| linears.clone())
    }

    fn skip_stage(&mut self, read: &mut dyn FnMut(NodeId) -> Result<WeightBody>) -> Result<()> {
        let Some((value, linears)) = self.stages.next() else {
            return Err(Error::Internal("no stage is left to be skipped".into()));
        };
        if let StageInputs::Rounded { .. } = self.inputs {
            self.approach(value)?;
            for node in linears {
                self.replace(node, Arc::new(read(node)?));
            }
        }
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let Self { mut task, states, inputs, before, .. } = *self;
        match inputs {
            StageInputs::Rounded { from, experts: Some(mut experts), advance: true } => {
                task.pass_experts((&mut experts, states), None, true, &before)?;
                let (node, sum) = experts.into_sum();
                states.advance_with(&task.block, from, (node, &sum), task.cancel)
            }
            StageInputs::Rounded { from, experts: None, advance: true } => {
                let nodes = [from, task.block.graph().output()];
                states.advance_between(&task.block, nodes, task.cancel)
            }
            _ => Ok(()),
        }
    }
}

impl RoundingTask<'_> {
    /// Adds the outputs of the experts before the one whose rows `selects` picks, or of all remaining experts, and
    /// drops their weights.
    fn pass_experts(
        &mut self,
        (experts, states): (&mut ExpertStates, &HiddenStates),
        selects: Option<NodeId>,
        wanted: bool,
        before: &Block,
    ) -> Result<()> {
        let graph = self.block.graph().clone();
        for _ in experts.left_before(&graph, selects) {
            let passed = experts.add_next(states, &self.block, wanted, self.cancel)?;
            self.release(before, |node| graph.expert_of(node) == Some(passed));
        }
        Ok(())
    }

    fn release(&mut self, before: &Block, which: impl Fn(NodeId) -> bool) {
        for node in self.block.graph().clone().linears().map(|(id, ..)| id).filter(|id| which(*id)) {
            let linear = before.linear(node);
            // A weight that is rewritten on reading belongs to this block alone, so nothing else takes its bytes.
            if self.rewrite.changes(node)
                && let Some(weight) = linear.weight().as_stored()
            {
                drop(weight.release());
            }
            self.block.replace_linear(node, linear.clone());
        }
    }

    /// Whether an interrupted run has rounded all linears of a stage.
    fn is_finished(&self, linears: &[NodeId]) -> bool {
        linears.iter().all(|node| self.finished.contains(node))
    }

    fn gather(
        &self,
        stages: &BTreeMap<NodeId, Vec<NodeId>>,
        states: &mut HiddenStates,
        advance: bool,
    ) -> Result<Vec<Hessian>> {
        let stages: BTreeMap<_, _> =
            stages.iter().filter(|(_, linears)| !self.is_finished(linears)).collect();
        let mut hessians: Vec<_> =
            stages.values().map(|linears| self.hessian(linears)).collect::<Result<_>>()?;
        let watched = watched(&self.block, self.unrouted);
        let mut pass = StatisticsPass::new(&watched, states.layout(), self.cancel);
        for (value, hessian) in stages.into_keys().zip(&mut hessians) {
            pass.gather(*value, hessian)?;
        }
        if !advance {
            pass.run_gathered(states)?;
            return Ok(hessians);
        }
        // If some experts run on all tokens here, the states are advanced separately through the original block, so
        // that they stay bit-identical.
        pass.run(states, self.unrouted.is_empty())?;
        if !self.unrouted.is_empty() {
            states.advance(&self.block, self.cancel)?;
        }
        Ok(hessians)
    }

    fn hessian(&self, linears: &[NodeId]) -> Result<Hessian> {
        Hessian::new(self.block.linear(linears[0]).weight().shape()[1])
    }

    /// Factors the Hessian of the input of `tensor`.
    fn factor(hessian: &Hessian, columns: Vec<usize>, damping: f64, tensor: &str) -> Result<Factor> {
        let factor = Factor::new(hessian, columns, damping).map_err(|e| match e {
            FactorError::NonFinite { channel } => Error::Calibration {
                tensor: tensor.to_owned(),
                what: format!("the sum of squares of input channel {channel}"),
            },
            FactorError::Indefinite { .. } => {
                Error::Numeric { tensor: tensor.to_owned(), reason: e.to_string() }
            }
            FactorError::Memory { bytes } => {
                Error::Memory { what: format!("the Hessian of `{tensor}`"), bytes: Some(bytes) }
            }
        })?;
        if factor.escalations() > 0 {
            tracing::warn!(
                "`{tensor}`: the Hessian is not positive definite; damping raised to {:e} of the mean diagonal, from \
                 {:e}",
                factor.damping(),
                damping
            );
        }
        Ok(factor)
    }

    /// How the scales of a weight are chosen: the kind of search, and the largest magnitude of linears that engines
    /// fuse with it, if there are any.
    fn context(&self, node: NodeId) -> Result<ScaleContext> {
        let grid = self.grids[&node];
        let mut context = ScaleContext { search: self.settings.scale_search, amax: None };
        for (&other, _) in self.grids.iter().filter(|(id, other)| **id != node && other.shares_with(&grid)) {
            // The fused linears read the same value, so none of this stage has been rounded yet.
            let weight = self.block.linear(other).weight().read()?;
            let load = |at: usize, row: &mut [f32]| {
                weight.copy_rows(at..at + 1, row).map_err(|e| RowsError::Layout(e.to_string()))
            };
            let extents = SharedExtents::of(grid.scheme, weight.shape(), load)
                .map_err(|e| e.within(&format!("{}{}", self.prefix, self.block.graph().name(other)), None))?;
            let amax = extents.map_or(0.0, |extents| extents.amax());
            context.amax = Some(amax.max(context.amax.unwrap_or(0.0)));
        }
        Ok(context)
    }

    /// Rounds linears that read the same value.
    fn solve_stage(
        &self,
        hessian: Hessian,
        linears: &[NodeId],
        settings: GptqSettings,
    ) -> Result<StageRounded> {
        let mut rounded = StageRounded::new();
        let (diagonal, tokens) = (hessian.diagonal(), hessian.tokens());
        let columns_of = |node: &NodeId| {
            let group_size = self.grids[node].scheme.granularity.group_size(diagonal.len());
            settings.act_order.columns(&diagonal, group_size)
        };
        let mut hessian = Some(hessian);
        let mut latest: Option<Factor> = None;
        for (i, &node) in linears.iter().enumerate() {
            self.cancel.check()?;
            let tensor = self.tensor(node);
            let LinearGrid { scheme, scale_dtype, .. } = self.grids[&node];
            let context = self.context(node)?;
            let weight = self.block.linear(node).weight().read()?;
            let shape = weight.shape();
            let columns = columns_of(&node);
            let factor = match latest.take().filter(|f| f.columns() == columns) {
                Some(factor) => factor,
                None => {
                    let gone = || Error::Internal(format!("the Hessian of `{tensor}` was dropped too early"));
                    let hessian_of_stage = hessian.as_ref().ok_or_else(gone)?;
                    let factor = Self::factor(hessian_of_stage, columns, settings.damping, &tensor)?;
                    // The Hessian is the largest allocation: it is dropped as soon as no other linear needs a different
                    // factor of it.
                    if linears[i + 1..].iter().all(|other| columns_of(other) == factor.columns()) {
                        hessian = None;
                    }
                    factor
                }
            };
            let rows = weight.as_float();
            let rows = rows.ok_or_else(|| Error::Internal(format!("`{tensor}` is quantized already")))?;
            let clip = self.rewrite.clips.get(&node).map(Vec::as_slice);
            let Solved { tensor: quantized, loss } =
                solve_within(rows, shape, (scheme, scale_dtype), (clip, context), &factor, settings)
                    .map_err(|e| e.within(&tensor, None))?;
            let quantized = self.stored(node, quantized)?;
            let record = GptqRecord {
                loss,
                damping: factor.damping(),
                dead_channels: factor.dead(),
                act_order: settings.act_order,
            };
            tracing::debug!(tensor, loss, damping = record.damping, dead = record.dead_channels, "rounded");
            let weight = Arc::new(WeightBody::Quantized(quantized));
            rounded.insert(node, Rounded { weight, record: json!(record), tokens, routed: None });
            latest = Some(factor);
        }
        Ok(rounded)
    }
}

fn stages(graph: &BlockGraph, grids: &BTreeMap<NodeId, LinearGrid>) -> BTreeMap<NodeId, Vec<NodeId>> {
    let mut stages: BTreeMap<NodeId, Vec<NodeId>> = BTreeMap::new();
    for &node in grids.keys() {
        stages.entry(graph.nodes()[node].inputs[0]).or_default().push(node);
    }
    stages
}
