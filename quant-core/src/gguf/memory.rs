//! The peak memory of a run that writes GGUF, estimated from shapes and dtypes.

use std::collections::BTreeMap;

use super::plan::GgufRequest;
use super::run::CHUNK_VALUES;
use crate::calibrate::{Residence, Sampling};
use crate::model::{BlockKind, Model, NodeId};
use crate::quantize::gptq::Hessian;

const PROGRAM: u64 = 56 << 20;
const TEXT: u64 = 32 << 20;
const CHUNK_TOKENS: u64 = 2048;

/// The use of a calibration text in a run.
#[derive(Debug, Clone, Copy)]
pub struct Gathering {
    /// The windows of the text.
    pub sampling: Sampling,
    /// Whether GPTQ needs Hessians, besides the importance matrix.
    pub hessians: bool,
}

impl Gathering {
    fn tokens(&self) -> u64 {
        (self.sampling.samples as u64).saturating_mul(self.sampling.length as u64)
    }

    /// The bytes of the batch's hidden states and of the layout of its tokens.
    fn states(&self, kind: &BlockKind<'_>, residence: Residence) -> u64 {
        let graph = kind.graph;
        // GPTQ begins again with new states, when the allocator may still keep the memory of the first ones.
        let passes = 1 + u64::from(self.hessians);
        let [before, after] = [graph.input(), graph.output()].map(|node| 4 * graph.width(node) as u64);
        let values = match residence {
            Residence::Files { .. } => 0,
            // If a block changes the width, old and new states are in memory together.
            Residence::Memory if before == after => passes * before,
            Residence::Memory => passes * (before + after),
        };
        (values + 16).saturating_mul(self.tokens())
    }

    /// The bytes of the values between linears, and of the sums of the inputs of linears.
    fn step(&self, kind: &BlockKind<'_>) -> u64 {
        let graph = kind.graph;
        let widest: u64 = graph.linears().map(|(_, _, [n, k], _)| (n + k) as u64).max().unwrap_or(0);
        let at_a_time = CHUNK_TOKENS.max(self.sampling.length as u64).min(self.tokens().max(1));
        let inputs: BTreeMap<NodeId, u64> =
            graph.linears().map(|(id, _, [_, k], _)| (graph.nodes()[id].inputs[0], k as u64)).collect();
        let sums: u64 = inputs.values().map(|k| 8 * k).sum();
        (16 * widest).saturating_mul(at_a_time).saturating_add(sums)
    }

    /// The bytes of the Hessians of a block's inputs, and what is needed in addition while their factors replace them.
    fn hessians(&self, kind: &BlockKind<'_>) -> [u64; 2] {
        if !self.hessians {
            return [0; 2];
        }
        let graph = kind.graph;
        let inputs: BTreeMap<NodeId, u64> =
            graph.linears().map(|(id, _, [_, k], _)| (graph.nodes()[id].inputs[0], k as u64)).collect();
        let factoring = |k: &u64| Hessian::peak_bytes(*k).saturating_sub(Hessian::kept_bytes(*k));
        let kept = inputs.values().map(|k| Hessian::kept_bytes(*k)).sum();
        [kept, inputs.values().map(factoring).max().unwrap_or(0)]
    }
}

/// The estimated disk space in bytes for hidden states that are kept in files.
pub fn scratch_bytes(model: &Model, gathering: &Gathering) -> u64 {
    let width = model.architecture().state_width(0) as u64;
    (4 * width).saturating_mul(gathering.tokens())
}

/// Estimates the peak memory in bytes of a run that writes GGUF.
pub fn peak_memory(
    model: &Model,
    request: &GgufRequest,
    gathering: Option<&Gathering>,
    residence: Residence,
) -> u64 {
    let a = model.architecture();
    let kinds = || a.blocks.kinds_in(0..a.layers);
    let of_linears = |of: fn([usize; 2]) -> usize| {
        let largest = |kind: BlockKind<'_>| kind.graph.linears().map(|(.., shape, _)| of(shape) as u64).max();
        kinds().filter_map(largest).max().unwrap_or(0)
    };
    // Values in `f32`, their stored bytes and their encoded bytes. The allocator may keep the buffers of an earlier
    // piece.
    let largest = of_linears(|[n, k]| n * k).max((a.vocab * a.hidden) as u64);
    let piece = largest.min((CHUNK_VALUES as u64).max(of_linears(|[_, k]| k)));
    let mut writing = piece * (4 + stored_size(model) + request.largest_value()) * 8 / 5;
    if model.quant_method().is_some() {
        writing += 3 * of_linears(|[n, k]| n * k);
    }
    let Some(gathering) = gathering else { return PROGRAM.saturating_add(writing) };
    let importance: u64 = kinds()
        .map(|kind| {
            4 * kind.layers as u64 * kind.graph.linears().map(|(.., [_, k], _)| k as u64).sum::<u64>()
        })
        .sum();
    let of_block = |kind: BlockKind<'_>| {
        let weights = block_bytes(model, &kind);
        let passing = weights.saturating_add(gathering.step(&kind));
        // The allocator keeps some memory of earlier steps.
        let passing = passing.saturating_add(passing / 8);
        let [kept, factoring] = gathering.hessians(&kind);
        // With GPTQ, tensors are written while the states and Hessians are in memory.
        let written = if gathering.hessians { writing } else { 0 };
        let largest = passing.max(weights.saturating_add(factoring)).max(written);
        gathering.states(&kind, residence).saturating_add(kept).saturating_add(largest)
    };
    let step = kinds().map(of_block).max().unwrap_or(0).max(writing);
    step.saturating_add(importance).saturating_add(PROGRAM + TEXT)
}

fn stored_size(model: &Model) -> u64 {
    model.source().require(&model.embedding_name()).map_or(4, |info| info.dtype.size() as u64)
}

fn block_bytes(model: &Model, kind: &BlockKind<'_>) -> u64 {
    let a = model.architecture();
    let of_node = |op: &crate::model::Op| -> u64 {
        let of = |parameter: crate::model::Parameter| {
            let name = format!("{}.{}", a.in_block(kind.first, op.name()), parameter.name);
            let elements: usize = parameter.shape.iter().product();
            let size = model.source().require(&name).map_or(4, |info| info.dtype.size());
            (elements * size) as u64
        };
        op.parameters().into_iter().map(of).sum()
    };
    kind.graph.nodes().iter().map(|node| of_node(&node.op)).sum()
}
