//! The peak memory of a run that writes GGUF, estimated from shapes and dtypes.

use std::collections::BTreeMap;

use super::run::CHUNK_VALUES;
use crate::calibrate::{Residence, Sampling};
use crate::model::{BlockKind, Model, NodeId};
use crate::quantize::gptq::Hessian;

/// Memory in bytes for the program itself, its threads and the tokenizer.
const PROGRAM: u64 = 128 << 20;
/// Tokens that go through a block at a time, unless a window is longer.
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
        let [before, after] = [graph.input(), graph.output()].map(|node| 4 * graph.width(node) as u64);
        let values = match residence {
            Residence::Files { .. } => 0,
            // If a block changes the width, old and new states are in memory together.
            Residence::Memory if before == after => before,
            Residence::Memory => before + after,
        };
        (values + 16).saturating_mul(self.tokens())
    }

    /// The bytes of the values between linears, for the tokens that go through a block at a time, and of the sums and
    /// Hessians of the inputs of linears.
    fn step(&self, kind: &BlockKind<'_>) -> u64 {
        let graph = kind.graph;
        let widest: u64 = graph.linears().map(|(_, _, [n, k], _)| (n + k) as u64).max().unwrap_or(0);
        let at_a_time = CHUNK_TOKENS.max(self.sampling.length as u64).min(self.tokens().max(1));
        let inputs: BTreeMap<NodeId, u64> =
            graph.linears().map(|(id, _, [_, k], _)| (graph.nodes()[id].inputs[0], k as u64)).collect();
        let sums: u64 = inputs.values().map(|k| 8 * k).sum();
        let hessians: u64 = match self.hessians {
            // The Hessians, and their factors, which take as much.
            true => inputs.values().map(|k| 2 * Hessian::kept_bytes(*k)).sum(),
            false => 0,
        };
        (12 * widest).saturating_mul(at_a_time).saturating_add(sums + hessians)
    }
}

/// Estimates the peak memory in bytes of a run that writes GGUF.
pub fn peak_memory(model: &Model, gathering: Option<&Gathering>, residence: Residence) -> u64 {
    let a = model.architecture();
    let kinds = || a.blocks.kinds_in(0..a.layers);
    let of_linears = |of: fn([usize; 2]) -> usize| {
        let largest = |kind: BlockKind<'_>| kind.graph.linears().map(|(.., shape, _)| of(shape) as u64).max();
        kinds().filter_map(largest).max().unwrap_or(0)
    };
    // Values in `f32`, their stored bytes, their encoded bytes, and what these decode to.
    let mut writing = 16 * (CHUNK_VALUES as u64).max(of_linears(|[_, k]| k));
    if model.quant_method().is_some() {
        // Codes of a whole linear, and its packed bytes.
        writing += 3 * of_linears(|[n, k]| n * k);
    }
    let Some(gathering) = gathering else { return with_program(writing) };
    // The importance matrix of all blocks.
    let importance: u64 = kinds()
        .map(|kind| {
            4 * kind.layers as u64 * kind.graph.linears().map(|(.., [_, k], _)| k as u64).sum::<u64>()
        })
        .sum();
    let of_block = |kind: BlockKind<'_>| {
        let weights = block_bytes(model, &kind);
        gathering.states(&kind, residence).saturating_add(weights).saturating_add(gathering.step(&kind))
    };
    let step = kinds().map(of_block).max().unwrap_or(0);
    // With GPTQ, the text goes through a block while its tensors are written.
    let step = if gathering.hessians { step.saturating_add(writing) } else { step.max(writing) };
    with_program(step.saturating_add(importance))
}

/// Adds the memory of the program, and an eighth of the step's, because the allocator keeps some memory of earlier
/// steps.
fn with_program(step: u64) -> u64 {
    step.saturating_add(step / 8).saturating_add(PROGRAM)
}

/// The bytes of a block's tensors in memory: as stored, or in `f32` if they are computed from others.
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
