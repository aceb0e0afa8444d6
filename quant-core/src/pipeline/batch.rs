//! The calibration batch on its way through the blocks, and what it decides about each.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::Job;
use super::conveyor::Conveyor;
use super::gptq::{BlockRounded, GptqTask};
use crate::calibrate::{HiddenStates, TokenWindows};
use crate::checkpoint::{Dtype, MemorySource};
use crate::format::{self, PackedWeight};
use crate::model::{Block, Linear, Model, NodeId, Norm, Op, RopeTable, WeightBody};
use crate::quantize::gptq::LayerInputs;
use crate::recipe::{Action, Plan, PlanEntry, Rounding};
use crate::transform::{BlockTask, Grid, Rewrite, Transform};
use crate::{Error, Result};

/// What was decided about a block.
#[derive(Default)]
pub(super) struct Decision {
    pub(super) rewrite: Rewrite,
    /// Linears that are rounded already.
    pub(super) rounded: BlockRounded,
}

/// The calibration batch before some block.
pub(super) struct Batch {
    transform: Option<&'static dyn Transform>,
    /// In the float model: what a transform looks at, and GPTQ if it is asked to.
    float: Option<HiddenStates>,
    /// In the model that is being written: what GPTQ looks at where it is not asked otherwise.
    quantized: Option<HiddenStates>,
    rope: Arc<RopeTable>,
}

impl Batch {
    /// The batch before the first block, for a method that needs one.
    pub(super) fn new(model: &Model, plan: &Plan, windows: &TokenWindows) -> Result<Self> {
        let transform = plan.method.transform;
        let follows = plan.method.rounding == Rounding::Gptq && plan.gptq.inputs == LayerInputs::Quantized;
        let states = HiddenStates::embed(model, windows)?;
        let rope = model.rope(windows.length())?;
        let (float, quantized) = match (transform.is_some() || !follows, follows) {
            (true, true) => (Some(states.clone()), Some(states)),
            (true, false) => (Some(states), None),
            (false, _) => (None, Some(states)),
        };
        Ok(Self { transform, float, quantized, rope })
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
        let block = job.model.block(layer, &self.rope)?;
        if open.is_empty() && !advance {
            return Ok(BTreeMap::new());
        }
        if open.is_empty() && self.quantized.is_none() {
            if let Some(float) = &mut self.float {
                float.advance(&block, job.cancel)?;
            }
            return Ok(BTreeMap::new());
        }
        if open.is_empty()
            && let Some(stored) = conveyors[0].stored_block(span, &block)?
        {
            if let Some(float) = &mut self.float {
                float.advance(&block, job.cancel)?;
            }
            if let Some(quantized) = &mut self.quantized {
                quantized.advance(&stored, job.cancel)?;
            }
            return Ok(BTreeMap::new());
        }
        // A sink that does not give back what it holds: what was decided is decided again.
        let all = [0];
        let open = if open.is_empty() { &all[..] } else { open };
        let prefix = job.model.architecture().in_block(layer, "");
        let norm_dtypes = norm_dtypes(job.model, layer)?;
        let grids: Vec<_> = open.iter().map(|&i| grids(conveyors[i].entries(span))).collect();
        let task = |grids| BlockTask {
            prefix: &prefix,
            block: &block,
            grids,
            norm_dtypes: &norm_dtypes,
            search: job.plan.search,
            cancel: job.cancel,
        };
        let gptq = job.plan.method.rounding == Rounding::Gptq;
        let mut before = None;
        let rewrites = match (self.transform, &mut self.float) {
            (Some(transform), Some(float)) => {
                // The search moves on; GPTQ may have to look at what it looked at.
                before = (gptq && self.quantized.is_none()).then(|| float.clone());
                let tasks: Vec<_> = grids.iter().map(task).collect();
                transform.search(&tasks, float)?
            }
            _ => open.iter().map(|_| Rewrite::default()).collect(),
        };
        let mut decisions = BTreeMap::new();
        for ((&i, grids), rewrite) in open.iter().zip(&grids).zip(rewrites) {
            let mut decision = Decision { rewrite, rounded: BTreeMap::new() };
            if gptq {
                let task = GptqTask {
                    prefix: &prefix,
                    block: decision.rewrite.apply(&block)?,
                    grids,
                    rewrite: &decision.rewrite,
                    settings: job.plan.gptq,
                    cancel: job.cancel,
                };
                decision.rounded = match (&mut self.quantized, &before, &mut self.float) {
                    (Some(states), ..) => task.run(states, advance)?,
                    (None, Some(states), _) => task.run_beside(states)?,
                    (None, None, Some(states)) => task.run(states, advance)?,
                    (None, None, None) => return Err(Error::Internal("GPTQ without a batch".into())),
                };
            }
            decisions.insert(i, decision);
        }
        Ok(decisions)
    }
}

impl Conveyor<'_, '_> {
    /// A block as it was written, all of it; `None` where the sink does not give it back.
    fn stored_block(&self, span: usize, block: &Block) -> Result<Option<Block>> {
        let Job { plan, model, .. } = self.job();
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
                Action::Rewrite { node, .. } => replace_float(&mut stored, model, *node, entry, &source)?,
                _ => {}
            }
        }
        Ok(Some(stored))
    }
}

/// Puts a norm, a bias or a float weight as it was written into a block.
fn replace_float(
    block: &mut Block,
    model: &Model,
    node: NodeId,
    entry: &PlanEntry,
    source: &MemorySource,
) -> Result<()> {
    use crate::checkpoint::TensorSource;
    let values = source.read_f32(&entry.tensor)?;
    let vector = |values: Vec<f32>| -> Result<Tensor> {
        let len = values.len();
        Ok(Tensor::from_vec(values, len, &Device::Cpu)?)
    };
    match &model.architecture().block.nodes()[node].op {
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
        .block
        .norms()
        .map(|(node, name, _)| {
            let tensor = format!("{}.weight", architecture.in_block(layer, name));
            Ok((node, model.source().require(&tensor)?.dtype))
        })
        .collect()
}
