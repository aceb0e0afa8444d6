//! How much memory a plan will need at its peak: an estimate from shapes alone.

use std::collections::BTreeMap;

use super::{Action, PassPlan, Plan, Rounding};
use crate::calibrate::{Mask, Packing};
use crate::model::{BlockGraph, BlockKind, FoldGroup, Model, Op};
use crate::quantize::gptq::{Hessian, LayerInputs};
use crate::transform::{Alpha, SCALE_CANDIDATES, Search, kept_bytes};

/// What the program itself, its threads and the tokenizer take.
const PROGRAM: u64 = 112 << 20;
/// Tokens that go through a block at a time, unless one window has more.
const CHUNK_TOKENS: u64 = 2048;

impl Plan {
    /// Bytes of memory at the peak, about, of one run of all these plans for a model.
    pub fn peak_memory(plans: &[Self], model: &Model) -> u64 {
        let searched = plans.iter().filter(|p| p.needs_blocks());
        // What is gathered of the batch serves all.
        let kinds = |plan: &Self| {
            let kinds = model.architecture().blocks.kinds_in(plan.blocks());
            kinds.map(|kind| plan.search_memory(kind)).max().unwrap_or(0)
        };
        let search = searched.map(kinds).max().unwrap_or(0);
        let tensors: u64 = plans.iter().map(|plan| plan.largest_tensor(model)).sum();
        // A tensor whose columns are turned stands in memory whole, as it was and as it is, and the last one is kept.
        let turned =
            if model.is_rotated() { 2 * plans.iter().map(Self::largest_input).max().unwrap_or(0) } else { 0 };
        search.saturating_add(PROGRAM + tensors + turned)
    }

    /// One linear on its way: its bytes and the next one's, codes, packed codes, and its `f32` copy
    /// where a transform rewrites it.
    fn largest_tensor(&self, model: &Model) -> u64 {
        let kinds = || model.architecture().blocks.kinds_in(self.blocks());
        // Those of blocks that are rounded in stages are counted there.
        let outside = self.is_staged() && kinds().all(|kind| has_experts(kind.graph));
        let of = |entry: &super::PlanEntry| match entry.action {
            Action::Copy => 16 << 20,
            _ => {
                let elements = entry.info.elements() as u64;
                let widened = if self.needs_blocks() { 4 * elements } else { 0 };
                2 * entry.info.byte_len() + elements + widened + entry.output_bytes()
            }
        };
        self.entries.iter().filter(|entry| !outside || entry.layer.is_none()).map(of).max().unwrap_or(0)
    }

    /// Whether GPTQ takes experts one at a time: on the inputs of the quantized model, with nothing before it that looks at
    /// all of them.
    fn is_staged(&self) -> bool {
        let gptq = self.method.rounding == Rounding::Gptq;
        let alone = self.transforms().is_empty() && !self.needs_ranges();
        gptq && self.gptq.inputs == LayerInputs::Quantized && alone
    }

    /// Bytes of the largest weight of a block.
    fn largest_input(&self) -> u64 {
        self.entries.iter().filter(|e| e.layer.is_some()).map(|e| e.info.byte_len()).max().unwrap_or(0)
    }

    /// The block, the batch's hidden states, and what the search keeps. The batch may
    /// be asked for as large as one likes; only then can the sums leave 64 bits.
    fn search_memory(&self, kind: BlockKind<'_>) -> u64 {
        let tokens = match self.needs_text() {
            true => (self.sampling.samples as u64).saturating_mul(self.sampling.length as u64),
            false => 0,
        };
        let graph = kind.graph;
        let gptq = self.method.rounding == Rounding::Gptq;
        let block = self.block_bytes(kind);
        let width =
            |id: usize| graph.nodes()[id].op.linear_shape().map_or([0, 0], |shape| shape.map(|s| s as u64));
        let groups = if self.method.has("awq") { graph.fold_groups() } else { Vec::new() };
        let rounded = |g: &FoldGroup| -> u64 {
            4 * g.consumers.iter().map(|&c| width(c).iter().product::<u64>()).sum::<u64>()
        };
        let whole = |g: &FoldGroup| {
            let [n, k] = width(g.consumers[0]);
            if g.consumers.len() == 1 {
                return 4 * k * tokens.min(k) + 4 * n * tokens.min(512);
            }
            (4 * (k + graph.width(g.inspected) as u64)).saturating_mul(tokens).saturating_add(rounded(g))
        };
        let kept = match self.settings.search {
            // One group after the other.
            Search::Reference => groups.iter().map(whole).max().unwrap_or(0),
            // All are gathered in one pass; then the rows of a round are copied.
            Search::Fast => {
                let kept = |g: &FoldGroup| {
                    kept_bytes(graph, g, self.sampling, width(g.consumers[0]), SCALE_CANDIDATES)
                };
                let all = groups.iter().map(kept).fold(0, u64::saturating_add);
                let one = groups.iter().map(|g| rounded(g).saturating_add(kept(g) / 2)).max().unwrap_or(0);
                all.saturating_add(one)
            }
        };
        let widest: u64 = graph.linears().map(|(_, _, [n, k], _)| (n + k) as u64).max().unwrap_or(0);
        // Where documents begin and which tokens count is noted of each, twice while it is made.
        let plain = self.sampling.mask == Mask::None && self.sampling.packing != Packing::Documents;
        let noted = if plain { 0 } else { 16 };
        let transforms = self.transforms();
        let copies = PassPlan::new(self, false).states_in_memory();
        // States of another width are made beside those that they replace.
        let [before, after] = [graph.input(), graph.output()].map(|node| 4 * graph.width(node) as u64);
        let replaced = if before == after || copies == 0 { 0 } else { before.min(after) };
        let states = (copies * before.max(after) + replaced + noted).saturating_mul(tokens);
        if self.is_staged() && has_experts(graph) {
            return states.saturating_add(self.stage_memory(graph, tokens));
        }
        let solved = if gptq { self.gptq_memory(graph) } else { 0 };
        let length = self.sampling.length as u64;
        let running = match self.settings.search {
            // A longer window goes through attention whole, and through the rest in pieces.
            Search::Fast if length > CHUNK_TOKENS => {
                let attended: u64 = graph
                    .linears()
                    .filter(|(id, ..)| graph.feeds_attention(*id))
                    .map(|(.., [n, _], _)| 2 * n as u64)
                    .sum::<u64>()
                    + (graph.width(graph.input()) + graph.width(graph.output())) as u64;
                (4 * attended).saturating_mul(length).saturating_add(8 * widest * CHUNK_TOKENS)
            }
            _ => (8 * widest).saturating_mul(CHUNK_TOKENS.max(length).min(tokens.max(1))),
        };
        // The block of a candidate, and the one before it of which parts are taken.
        let auto = |alpha| matches!(alpha, Some(Alpha::Auto(_)));
        let candidate = match self.method.has("smoothquant") && auto(self.settings.smooth.alpha)
            || self.method.has("smooth-outputs") && auto(self.settings.outputs)
        {
            true => graph.linears().map(|(_, _, [n, k], _)| 5 * (n * k) as u64).sum(),
            false => 0,
        };
        // What a transform has made of the block, in f32, is what the next one looks at.
        let rewritten = if transforms.len() > 1 {
            graph.linears().map(|(_, _, [n, k], _)| 4 * (n * k) as u64).sum()
        } else {
            0
        };
        let kept = kept.max(candidate).saturating_add(rewritten);
        // The search is over when GPTQ begins.
        states.saturating_add(kept.max(solved)).saturating_add(running).saturating_add(block)
    }

    /// The weights of a block.
    fn block_bytes(&self, kind: BlockKind<'_>) -> u64 {
        self.entries.iter().filter(|e| e.layer == Some(kind.first)).map(|e| e.info.byte_len()).sum()
    }

    /// Hessians, what is made of them, and the codes that are kept.
    fn gptq_memory(&self, graph: &BlockGraph) -> u64 {
        let mut widths = BTreeMap::new();
        for (id, _, [_, k], _) in graph.linears() {
            widths.insert(graph.nodes()[id].inputs[0], k as u64);
        }
        let codes: u64 = graph.linears().map(|(_, _, [n, k], _)| (n * k) as u64).sum();
        let one = widths.values().map(|k| Hessian::peak_bytes(*k)).max().unwrap_or(0);
        let others: u64 = match self.gptq.inputs {
            LayerInputs::Quantized => 0,
            LayerInputs::Float => widths.values().map(|k| Hessian::kept_bytes(*k)).sum(),
        };
        // A transform's block stands in f32.
        let widened = if !self.transforms().is_empty() { 4 * codes } else { 0 };
        // Codes stand in the block, for those that follow, and in the result.
        one.saturating_add(others).saturating_add(2 * codes + widened)
    }
}

/// Whether a block has experts.
fn has_experts(graph: &BlockGraph) -> bool {
    graph.nodes().iter().any(|node| matches!(node.op, Op::Experts { .. }))
}
