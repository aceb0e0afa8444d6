//! Blocks and linears that an earlier run has written, read back to move the quantized model's states past them.

use std::collections::BTreeSet;

use candle_core::{Device, Tensor};

use super::conveyor::Conveyor;
use crate::checkpoint::{MemorySource, TensorSource};
use crate::format::{self, PackedReader, PackedWeight};
use crate::model::{Block, Linear, NodeId, Norm, WeightBody};
use crate::recipe::{Action, PlanEntry};
use crate::{Error, Result};

/// Reads what an earlier run has written of a block.
pub(super) struct Written<'a> {
    reader: Box<dyn PackedReader>,
    entries: &'a [PlanEntry],
}

impl<'a> Written<'a> {
    pub(super) fn new(conveyor: &Conveyor<'a, '_>, span: usize) -> Result<Self> {
        let plan = conveyor.job().plan;
        let settings = plan.container.quantization_config(&plan.module_schemes());
        let reader = format::reader_with(&settings, &[plan.container]).map_err(Error::Internal)?;
        Ok(Self { reader, entries: conveyor.entries(span) })
    }

    /// The whole block; `None` if the sink cannot read it back.
    pub(super) fn block(mut self, conveyor: &Conveyor<'_, '_>, block: &Block) -> Result<Option<Block>> {
        let mut stored = block.clone();
        for entry in self.entries {
            if entry.action == Action::Copy {
                continue;
            }
            let Some(source) = outputs(conveyor, entry)? else { return Ok(None) };
            match &entry.action {
                Action::Quantize { node: Some(node), .. } => {
                    let weight = self.weight(entry, &source)?;
                    let linear = stored.linear(*node).with_weight(weight);
                    stored.replace_linear(*node, linear);
                }
                Action::Rewrite { node, .. } => replace_float(&mut stored, *node, entry, &source)?,
                _ => {}
            }
        }
        Ok(Some(stored))
    }

    /// One of the [finished](finished_linears) linears of the block.
    pub(super) fn linear(&mut self, conveyor: &Conveyor<'_, '_>, node: NodeId) -> Result<WeightBody> {
        let gone = || Error::Internal("a finished linear cannot be read back".into());
        let entry = self.entries.iter().find(|entry| quantized_node(entry) == Some(node)).ok_or_else(gone)?;
        let source = outputs(conveyor, entry)?.ok_or_else(gone)?;
        self.weight(entry, &source)
    }

    fn weight(&mut self, entry: &PlanEntry, source: &MemorySource) -> Result<WeightBody> {
        let Action::Quantize { module, scheme, .. } = &entry.action else {
            return Err(Error::Internal(format!("`{}` is not quantized", entry.tensor)));
        };
        // In some formats, only the tensors show which modules are quantized.
        self.reader.survey(source)?;
        let shape = [entry.info.shape[0], entry.info.shape[1]];
        let scheme = self.reader.scheme(module).unwrap_or(*scheme);
        Ok(WeightBody::Quantized(self.reader.read(source, PackedWeight { module, shape, scheme })?))
    }
}

/// Returns the linears of a block that an earlier run has written, if the sink can read them back.
pub(super) fn finished_linears(conveyor: &Conveyor<'_, '_>, span: usize) -> Result<BTreeSet<NodeId>> {
    let written = conveyor.entries(span).iter().filter(|entry| conveyor.is_written(entry));
    let mut linears = written.filter(|entry| quantized_node(entry).is_some()).peekable();
    match linears.peek() {
        Some(first) if outputs(conveyor, first)?.is_some() => {
            Ok(linears.filter_map(quantized_node).collect())
        }
        _ => Ok(BTreeSet::new()),
    }
}

fn quantized_node(entry: &PlanEntry) -> Option<NodeId> {
    match entry.action {
        Action::Quantize { node, .. } => node,
        _ => None,
    }
}

/// The tensors that were written for an entry; `None` if the sink cannot read them back.
fn outputs(conveyor: &Conveyor<'_, '_>, entry: &PlanEntry) -> Result<Option<MemorySource>> {
    let mut source = MemorySource::new();
    for output in &entry.outputs {
        let Some(bytes) = conveyor.written(&output.name)? else { return Ok(None) };
        source.insert(output.name.clone(), output.info.dtype, output.info.shape.clone(), bytes)?;
    }
    Ok(Some(source))
}

fn replace_float(block: &mut Block, node: NodeId, entry: &PlanEntry, source: &MemorySource) -> Result<()> {
    let values = source.read_f32(&entry.tensor)?;
    let vector = |values: Vec<f32>| -> Result<Tensor> {
        let len = values.len();
        Ok(Tensor::from_vec(values, len, &Device::Cpu)?)
    };
    let graph = block.graph().clone();
    let op = &graph.nodes()[node].op;
    if op.is_norm() {
        let (weight, bias) = (block.norm(node).clone(), block.norm_bias(node).cloned());
        let norm = match entry.tensor.ends_with(".bias") {
            true => Norm { weight, bias: Some(vector(values)?) },
            false => Norm { weight: vector(values)?, bias },
        };
        block.replace_norm(node, norm);
    } else if let Some(shape) = op.linear_shape() {
        let linear = match entry.info.shape.len() {
            2 => {
                let [n, k] = shape;
                let values = match entry.by_columns {
                    true => (0..n * k).map(|at| values[at % k * n + at / k]).collect(),
                    false => values,
                };
                block.linear(node).with_weight(WeightBody::F32 { shape, values })
            }
            _ => Linear::new(block.linear(node).weight().clone(), Some(vector(values)?)),
        };
        block.replace_linear(node, linear);
    }
    Ok(())
}
