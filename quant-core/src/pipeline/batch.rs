//! The calibration batch on its way through the blocks, and what it decides about each.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use candle_core::{Device, Tensor};
use quant_kernels_cpu::StaticScale;

use super::Job;
use super::conveyor::Conveyor;
use super::gptq::{BlockRounded, GptqTask};
use crate::calibrate::{ChannelRanges, HiddenStates, StatisticsPass};
use crate::checkpoint::{Dtype, MemorySource};
use crate::format::{self, PackedWeight};
use crate::model::{Block, Linear, Model, NodeId, Norm, Op, Preparation, RopeTables, WeightBody};
use crate::progress::timed;
use crate::quantize::gptq::LayerInputs;
use crate::recipe::{Action, PlanEntry, Rounding};
use crate::transform::{BlockTask, Grid, Rewrite, Transform};
use crate::{Error, Result};

/// What was decided about a block.
#[derive(Default)]
pub(super) struct Decision {
    pub(super) rewrite: Rewrite,
    /// The grids of inputs that are the same for all tokens.
    pub(super) inputs: BTreeMap<NodeId, StaticScale>,
    /// Linears that are rounded already.
    pub(super) rounded: BlockRounded,
}

/// The calibration batch before some block; no states where blocks are looked at without a text.
pub(super) struct Batch {
    transforms: Vec<&'static dyn Transform>,
    /// In the float model: what transforms and static grids are found from, and GPTQ if it is asked to.
    float: Option<HiddenStates>,
    /// In the model that is being written: what GPTQ looks at where it is not asked otherwise.
    quantized: Option<HiddenStates>,
    ropes: RopeTables,
}

impl Batch {
    /// The batch before the first block, for a plan that looks at blocks.
    pub(super) fn new(job: &Job<'_>) -> Result<Self> {
        let Job { model, plan, windows, .. } = *job;
        let transforms = plan.transforms();
        let Some(windows) = windows else {
            return Ok(Self { transforms, float: None, quantized: None, ropes: model.rope(1)? });
        };
        let follows = plan.method.rounding == Rounding::Gptq && plan.gptq.inputs == LayerInputs::Quantized;
        let looks = plan.needs_ranges()
            || job.maxima.is_some()
            || transforms.iter().any(|t| t.needs(&plan.settings).states);
        let states = HiddenStates::embed(model, windows)?;
        let ropes = model.rope(windows.length())?;
        let (float, quantized) = match (looks || !follows, follows) {
            (true, true) => (Some(states.clone()), Some(states)),
            (true, false) => (Some(states), None),
            (false, _) => (None, Some(states)),
        };
        Ok(Self { transforms, float, quantized, ropes })
    }

    /// Decides about block `layer` for the jobs at the positions `open`, those whose result is not there already,
    /// and moves on to the next block where it is asked to.
    pub(super) fn block(
        &mut self,
        conveyors: &[Conveyor<'_, '_>],
        span: usize,
        layer: usize,
        open: &[usize],
        advance: bool,
    ) -> Result<BTreeMap<usize, Decision>> {
        let job = conveyors[0].job();
        if open.is_empty() && !advance && job.maxima.is_none() {
            return Ok(BTreeMap::new());
        }
        let read = match job.model.preparation() {
            Some(Preparation::Rotate) => "read and rotate",
            Some(Preparation::FoldNorms) => "read and fold",
            None => "read",
        };
        let block = timed(job.observer, read, || job.model.block(layer, &self.ropes))?;
        let prefix = job.model.architecture().in_block(layer, "");
        if open.is_empty() {
            let stored = match &self.quantized {
                Some(_) => conveyors[0].stored_block(span, &block)?,
                None => None,
            };
            if self.quantized.is_none() || stored.is_some() {
                self.watch_ranges(job, &prefix, &block, advance, false)?;
                if let (Some(quantized), Some(stored)) = (&mut self.quantized, stored) {
                    timed(job.observer, "forward", || quantized.advance(&stored, job.cancel))?;
                }
                return Ok(BTreeMap::new());
            }
        }
        // A sink that does not give back what it holds: what was decided is decided again.
        let all = [0];
        let open = if open.is_empty() { &all[..] } else { open };
        let plan = job.plan;
        let gptq = plan.method.rounding == Rounding::Gptq;
        let gptq_on_float = gptq && self.quantized.is_none();
        let searched = self.transforms.iter().any(|t| t.needs(&plan.settings).states);
        // Float states move on by the float block itself, never by one that is rewritten: the two differ by
        // rounding, and a run that is gone on with has only the first. A search alone does so in its own pass.
        let searches_alone =
            searched && self.transforms.len() == 1 && !plan.needs_ranges() && job.maxima.is_none();
        let looks_later = gptq_on_float && !self.transforms.is_empty() || searched && !searches_alone;
        let mut before = if looks_later { self.float.clone() } else { None };
        let moves_first = !searches_alone && (looks_later || !gptq_on_float);
        let ranges = self.watch_ranges(job, &prefix, &block, moves_first, plan.needs_ranges())?;

        let norm_dtypes = norm_dtypes(job.model, layer)?;
        let grids: Vec<_> = open.iter().map(|&i| grids(conveyors[i].entries(span))).collect();
        let context = Context { job, prefix: &prefix, norm_dtypes: &norm_dtypes, ranges: &ranges };
        let states = if searches_alone { self.float.as_mut() } else { before.as_mut() };
        let rewrites = transformed(&self.transforms, &context, &block, &grids, states, searches_alone)?;
        let mut decisions = BTreeMap::new();
        for ((&i, grids), rewrite) in open.iter().zip(&grids).zip(rewrites) {
            let task = context.task(&block, grids);
            let after = rewrite.ranges(block.graph(), ranges.clone());
            let inputs = grids.keys().filter_map(|&node| match task.input_grid(node, &after) {
                Ok(grid) => grid.map(|grid| Ok((node, grid))),
                Err(error) => Some(Err(error)),
            });
            let inputs: BTreeMap<_, _> = inputs.collect::<Result<_>>()?;
            let mut decision = Decision { rewrite, inputs, rounded: BTreeMap::new() };
            if gptq {
                let task = GptqTask {
                    prefix: &prefix,
                    block: decision.rewrite.apply(&block)?,
                    grids,
                    rewrite: &decision.rewrite,
                    inputs: &decision.inputs,
                    settings: plan.gptq,
                    container: conveyors[i].job().plan.container,
                    cancel: job.cancel,
                };
                let states = (&mut self.quantized, &mut before, &mut self.float);
                decision.rounded = timed(job.observer, Rounding::Gptq.name(), || match states {
                    (Some(states), ..) => task.run(states, advance),
                    (None, Some(states), _) => task.run_beside(states),
                    (None, None, Some(states)) => task.run(states, advance),
                    (None, None, None) => Err(Error::Internal("GPTQ without a batch".into())),
                })?;
            }
            decisions.insert(i, decision);
        }
        Ok(decisions)
    }

    /// The ranges of what the block's linears read, where they are wanted; moves the float states on if nothing
    /// after this looks at them.
    fn watch_ranges(
        &mut self,
        job: &Job<'_>,
        prefix: &str,
        block: &Block,
        advance: bool,
        wanted: bool,
    ) -> Result<BTreeMap<NodeId, ChannelRanges>> {
        let Some(float) = &mut self.float else { return Ok(BTreeMap::new()) };
        if !wanted && job.maxima.is_none() {
            if advance {
                timed(job.observer, "forward", || float.advance(block, job.cancel))?;
            }
            return Ok(BTreeMap::new());
        }
        let ranges = timed(job.observer, "ranges", || input_ranges(job, prefix, block, float, advance))?;
        if let Some(kept) = job.maxima {
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            for (node, name, ..) in block.graph().linears() {
                let ranges = &ranges[&block.graph().nodes()[node].inputs[0]];
                kept.insert(format!("{prefix}{name}"), ranges.maxima());
            }
        }
        Ok(ranges)
    }
}

/// The rewrite of every task: one transform after the other, each on what those before it have made of the block.
/// With `moves_on`, the only one moves the states on.
fn transformed(
    transforms: &[&dyn Transform],
    context: &Context<'_, '_>,
    block: &Block,
    grids: &[BTreeMap<NodeId, Grid>],
    mut states: Option<&mut HiddenStates>,
    moves_on: bool,
) -> Result<Vec<Rewrite>> {
    let Some((first, rest)) = transforms.split_first() else {
        return Ok(grids.iter().map(|_| Rewrite::default()).collect());
    };
    let tasks: Vec<_> = grids.iter().map(|grids| context.task(block, grids)).collect();
    let observer = context.job.observer;
    let mut rewrites =
        timed(observer, first.name(), || first.search(&tasks, states.as_deref_mut(), moves_on))?;
    for (grids, rewrite) in grids.iter().zip(&mut rewrites) {
        for transform in rest {
            // What each has made of the block may differ by its grids: they are looked at one by one.
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

/// What the tasks of a block have in common.
struct Context<'a, 'j> {
    job: &'a Job<'j>,
    prefix: &'a str,
    norm_dtypes: &'a BTreeMap<NodeId, Dtype>,
    ranges: &'a BTreeMap<NodeId, ChannelRanges>,
}

impl Context<'_, '_> {
    fn task<'t>(&'t self, block: &'t Block, grids: &'t BTreeMap<NodeId, Grid>) -> BlockTask<'t> {
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
}

/// The ranges of all values that linears read, from one pass; moves the states on if `advance` is set. An error that
/// names a linear where a range is not finite.
fn input_ranges(
    job: &Job<'_>,
    prefix: &str,
    block: &Block,
    states: &mut HiddenStates,
    advance: bool,
) -> Result<BTreeMap<NodeId, ChannelRanges>> {
    let graph = block.graph();
    let value = |linear: NodeId| graph.nodes()[linear].inputs[0];
    let mut ranges: BTreeMap<NodeId, ChannelRanges> =
        graph.linears().map(|(id, _, [_, k], _)| (value(id), ChannelRanges::new(k))).collect();
    let mut pass = StatisticsPass::new(block, states.layout(), job.cancel);
    for (value, ranges) in &mut ranges {
        pass.gather(*value, ranges)?;
    }
    pass.run(states, advance)?;
    match ranges.iter().find(|(_, ranges)| !ranges.is_finite()) {
        None => Ok(ranges),
        Some((bad, _)) => {
            let reader = graph.linears().find(|(id, ..)| value(*id) == *bad);
            Err(Error::Calibration {
                tensor: format!("{prefix}{}.weight", reader.map_or("", |(_, name, ..)| name)),
                what: "its input".into(),
            })
        }
    }
}

impl Conveyor<'_, '_> {
    /// A block as it was written, all of it; `None` where the sink does not give it back.
    fn stored_block(&self, span: usize, block: &Block) -> Result<Option<Block>> {
        let plan = self.job().plan;
        let settings = plan.container.quantization_config(&plan.module_schemes());
        let reader = format::reader(&settings).map_err(Error::Internal)?;
        let mut stored = block.clone();
        for entry in self.entries(span) {
            let mut source = MemorySource::new();
            if entry.action == Action::Copy {
                continue;
            }
            for output in &entry.outputs {
                let Some(bytes) = self.written(&output.name)? else { return Ok(None) };
                source.insert(output.name.clone(), output.info.dtype, output.info.shape.clone(), bytes)?;
            }
            match &entry.action {
                Action::Quantize { node: Some(node), module, scheme, .. } => {
                    let shape = [entry.info.shape[0], entry.info.shape[1]];
                    let scheme = reader.scheme(module).unwrap_or(*scheme);
                    let tensor = reader.read(&source, PackedWeight { module, shape, scheme })?;
                    let linear = stored.linear(*node).with_weight(WeightBody::Quantized(tensor));
                    stored.replace_linear(*node, linear);
                }
                Action::Rewrite { node, .. } => replace_float(&mut stored, *node, entry, &source)?,
                _ => {}
            }
        }
        Ok(Some(stored))
    }
}

/// Puts a norm, a bias or a float weight as it was written into a block.
fn replace_float(block: &mut Block, node: NodeId, entry: &PlanEntry, source: &MemorySource) -> Result<()> {
    use crate::checkpoint::TensorSource;
    let values = source.read_f32(&entry.tensor)?;
    let vector = |values: Vec<f32>| -> Result<Tensor> {
        let len = values.len();
        Ok(Tensor::from_vec(values, len, &Device::Cpu)?)
    };
    match &block.graph().clone().nodes()[node].op {
        op if op.is_norm() => {
            let (weight, bias) = (block.norm(node).clone(), block.norm_bias(node).cloned());
            let norm = match entry.tensor.ends_with(".bias") {
                true => Norm { weight, bias: Some(vector(values)?) },
                false => Norm { weight: vector(values)?, bias },
            };
            block.replace_norm(node, norm);
        }
        Op::Linear { shape, .. } if entry.info.shape.len() == 2 => {
            let linear = block.linear(node).with_weight(WeightBody::F32 { shape: *shape, values });
            block.replace_linear(node, linear);
        }
        Op::Linear { .. } => {
            let linear = Linear::new(block.linear(node).weight().clone(), Some(vector(values)?));
            block.replace_linear(node, linear);
        }
        _ => {}
    }
    Ok(())
}

fn grids(entries: &[PlanEntry]) -> BTreeMap<NodeId, Grid> {
    let of = |entry: &PlanEntry| match entry.action {
        Action::Quantize { node, scheme, scale_dtype, .. } => Some((node?, Grid { scheme, scale_dtype })),
        _ => None,
    };
    entries.iter().filter_map(of).collect()
}

fn norm_dtypes(model: &Model, layer: usize) -> Result<BTreeMap<NodeId, Dtype>> {
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
