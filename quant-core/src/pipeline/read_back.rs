//! Blocks that an earlier run has written, read back to move the quantized model's states past them.

use candle_core::{Device, Tensor};

use super::conveyor::Conveyor;
use crate::checkpoint::{MemorySource, TensorSource};
use crate::format::{self, PackedWeight};
use crate::model::{Block, Linear, NodeId, Norm, WeightBody};
use crate::recipe::{Action, PlanEntry};
use crate::{Error, Result};

/// `None` if the sink cannot read the block back.
pub(super) fn written_block(
    conveyor: &Conveyor<'_, '_>,
    span: usize,
    block: &Block,
) -> Result<Option<Block>> {
    let plan = conveyor.job().plan;
    let settings = plan.container.quantization_config(&plan.module_schemes());
    let mut reader = format::reader_with(&settings, &[plan.container]).map_err(Error::Internal)?;
    let mut stored = block.clone();
    for entry in conveyor.entries(span) {
        let mut source = MemorySource::new();
        if entry.action == Action::Copy {
            continue;
        }
        for output in &entry.outputs {
            let Some(bytes) = conveyor.written(&output.name)? else { return Ok(None) };
            source.insert(output.name.clone(), output.info.dtype, output.info.shape.clone(), bytes)?;
        }
        match &entry.action {
            Action::Quantize { node: Some(node), module, scheme, .. } => {
                // In some formats, only the tensors show which modules are quantized.
                reader.survey(&source)?;
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
