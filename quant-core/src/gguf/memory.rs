//! The peak memory of a run that writes GGUF, estimated from shapes and dtypes.

use std::collections::BTreeMap;

use super::plan::GgufRequest;
use super::run::CHUNK_VALUES;
use crate::calibrate::{Residence, Sampling};
use crate::model::{BlockKind, FloatProducts, Model, NodeId};
use crate::quantize::gptq::Hessian;
use crate::transform::Workload;

const PROGRAM: u64 = 48 << 20;
const TEXT: u64 = 32 << 20;
const CHUNK_TOKENS: u64 = 2048;

/// The passes of a calibration batch through the model.
struct Passes<'a> {
    sampling: Sampling,
    request: &'a GgufRequest,
    residence: Residence,
}

impl Passes<'_> {
    fn tokens(&self) -> u64 {
        (self.sampling.samples as u64).saturating_mul(self.sampling.length as u64)
    }

    /// The bytes of the batch's hidden states, which all passes keep in the same place, and of the layout of its
    /// tokens.
    fn states(&self, kind: &BlockKind<'_>) -> u64 {
        let graph = kind.graph;
        let [before, after] = [graph.input(), graph.output()].map(|node| 4 * graph.width(node) as u64);
        let values = match self.residence {
            Residence::Files { .. } => 0,
            // If a block changes the width, old and new states are in memory together.
            Residence::Memory if before == after => before,
            Residence::Memory => before + after,
        };
        (values + 16).saturating_mul(self.tokens())
    }

    /// The bytes of the values between linears, and of the sums of the inputs of linears.
    fn step(&self, kind: &BlockKind<'_>) -> u64 {
        let graph = kind.graph;
        // In an MLP, the outputs of gate and up and their product are in memory together with the inputs of the
        // linears. The block's input is also in memory as it was read, and its output before it is written.
        let widest: u64 = graph.linears().map(|(_, _, [n, k], _)| (n + k) as u64).max().unwrap_or(0);
        let values = widest + graph.width(graph.input()) as u64;
        let at_a_time = CHUNK_TOKENS.max(self.sampling.length as u64).min(self.tokens().max(1));
        let sums: u64 = input_widths(kind).map(|k| 8 * k).sum();
        let products = FloatProducts::detect().memory(graph, self.tokens());
        (12 * values).saturating_mul(at_a_time).saturating_add(sums).saturating_add(products)
    }

    /// Whether the rows of every piece of the batch fill whole panels of the Hessians, so that none wait for more.
    fn fills_panels(&self, kind: &BlockKind<'_>) -> bool {
        let length = self.sampling.length as u64;
        let graph = kind.graph;
        CHUNK_TOKENS.checked_rem(length) == Some(0)
            && Hessian::fill_panels(CHUNK_TOKENS)
            && Hessian::fill_panels(self.tokens())
            && graph.linears().all(|(id, ..)| graph.expert_of(id).is_none())
    }

    /// The bytes that the passes through a block need, and with compensated errors those of writing it.
    fn of_block(&self, model: &Model, kind: &BlockKind<'_>, writing: u64) -> u64 {
        let (weights, step) = (block_bytes(model, kind, None), self.step(kind));
        // The allocator keeps some memory of earlier steps.
        let passing = |weights: u64| weights.saturating_add(step).saturating_mul(9) / 8;
        let mut most = passing(weights);
        let transforms = &self.request.method.transforms;
        let work = Workload {
            graph: kind.graph,
            sampling: self.sampling,
            settings: &self.request.settings,
            schemes: BTreeMap::new(),
            residence: self.residence,
            experts_apart: false,
        };
        // A block that a transform has rewritten stays in memory for the next one.
        let rewritten = if transforms.len() > 1 { block_bytes(model, kind, Some(4)) } else { 0 };
        for transform in transforms.iter() {
            let gathering = passing(weights).saturating_add(transform.gathering_memory(&work));
            let searching = weights.saturating_add(transform.memory(&work)).saturating_add(step / 4);
            most = most.max(gathering.max(searching).saturating_add(rewritten));
        }
        if self.request.compensation().is_some() {
            // Rewritten weights are read as F32.
            let weights = if transforms.is_empty() { weights } else { block_bytes(model, kind, Some(4)) };
            let kept_bytes =
                if self.fills_panels(kind) { Hessian::triangle_bytes } else { Hessian::kept_bytes };
            let kept: u64 = input_widths(kind).map(kept_bytes).sum();
            let factoring = |k| Hessian::peak_bytes(k).saturating_sub(kept_bytes(k));
            let factoring = weights.saturating_add(input_widths(kind).map(factoring).max().unwrap_or(0));
            // Tensors are written while the states and the factors are in memory.
            let adding = input_widths(kind).map(Hessian::adding_bytes).max().unwrap_or(0);
            let gathering = passing(weights).saturating_add(adding);
            let solving = gathering.max(factoring).max(writing);
            most = most.max(kept.saturating_add(solving));
        }
        self.states(kind).saturating_add(most)
    }
}

/// The widths of the values that linears read.
fn input_widths(kind: &BlockKind<'_>) -> impl Iterator<Item = u64> {
    let graph = kind.graph;
    let inputs: BTreeMap<NodeId, u64> =
        graph.linears().map(|(id, _, [_, k], _)| (graph.nodes()[id].inputs[0], k as u64)).collect();
    inputs.into_values()
}

/// The estimated disk space in bytes for hidden states that are kept in files.
pub fn scratch_bytes(model: &Model, sampling: Sampling) -> u64 {
    let width = model.architecture().state_width(0) as u64;
    let tokens = (sampling.samples as u64).saturating_mul(sampling.length as u64);
    (4 * width).saturating_mul(tokens)
}

/// Estimates the peak memory in bytes of a run that writes GGUF, with the windows of its calibration text if it has
/// one.
pub fn peak_memory(
    model: &Model,
    request: &GgufRequest,
    sampling: Option<Sampling>,
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
    let stored = if request.method.transforms.is_empty() { stored_size(model) } else { 4 };
    let mut writing = piece * (4 + stored + request.largest_value()) * 8 / 5;
    if model.quant_method().is_some() {
        writing += 3 * of_linears(|[n, k]| n * k);
    }
    let Some(sampling) = sampling else { return PROGRAM.saturating_add(writing) };
    let inputs: u64 = kinds()
        .map(|kind| kind.layers as u64 * kind.graph.linears().map(|(.., [_, k], _)| k as u64).sum::<u64>())
        .sum();
    // The values, and their records in the journal. Steps keep factors of about as many columns and rows.
    let importance = if request.method.transforms.is_empty() { 12 * inputs } else { 2 * 12 * inputs };
    let passes = Passes { sampling, request, residence };
    let step = kinds().map(|kind| passes.of_block(model, &kind, writing)).max().unwrap_or(0).max(writing);
    step.saturating_add(importance).saturating_add(PROGRAM + TEXT)
}

fn stored_size(model: &Model) -> u64 {
    model.source().require(&model.embedding_name()).map_or(4, |info| info.dtype.size() as u64)
}

/// The bytes of a block's tensors as stored, or with this size per element.
fn block_bytes(model: &Model, kind: &BlockKind<'_>, size: Option<usize>) -> u64 {
    let a = model.architecture();
    let of_node = |op: &crate::model::Op| -> u64 {
        let of = |parameter: crate::model::Parameter| {
            let name = format!("{}.{}", a.in_block(kind.first, op.name()), parameter.name);
            let elements: usize = parameter.shape.iter().product();
            let stored = || model.source().require(&name).map_or(4, |info| info.dtype.size());
            (elements * size.unwrap_or_else(stored)) as u64
        };
        op.parameters().into_iter().map(of).sum()
    };
    kind.graph.nodes().iter().map(|node| of_node(&node.op)).sum()
}
