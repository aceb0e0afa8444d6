//! How much memory a plan will need at its peak: an estimate from shapes alone.

use std::collections::BTreeMap;

use super::{Action, PassPlan, Plan, Rounding};
use crate::calibrate::{Mask, Packing, Residence};
use crate::model::{BlockGraph, BlockKind, Model, NodeId};
use crate::quantize::gptq::{Hessian, LayerInputs};
use crate::transform::{Search, Workload};

/// What the program itself, its threads and the tokenizer take.
const PROGRAM: u64 = 112 << 20;
/// The memory in bytes that a round of a search gets at least.
const MIN_ROUND_BYTES: u64 = 256 << 20;
/// Tokens that go through a block at a time, unless one window has more.
const CHUNK_TOKENS: u64 = 2048;

impl Plan {
    /// The estimated peak memory in bytes of one run of all these plans, with hidden states in memory. The file of channel
    /// maxima that a run may write is not counted.
    pub fn peak_memory(plans: &[Self], model: &Model) -> u64 {
        Self::peak_memory_in(plans, model, Residence::Memory)
    }

    /// Where a run of all these plans should keep hidden states to stay within `budget` bytes: in memory if they fit, otherwise
    /// in files, with rounds of searches as large as the budget allows.
    ///
    /// # Errors
    /// The smallest budget in bytes that suffices, if this one does not.
    pub fn residence(plans: &[Self], model: &Model, budget: u64) -> std::result::Result<Residence, u64> {
        let memory = Self::peak_memory(plans, model);
        if memory <= budget {
            return Ok(Residence::Memory);
        }
        let peak = |round_bytes| Self::peak_memory_in(plans, model, Residence::Files { round_bytes });
        let smallest = peak(MIN_ROUND_BYTES);
        if smallest > budget {
            return Err(smallest.min(memory));
        }
        Ok(Residence::Files { round_bytes: MIN_ROUND_BYTES + (budget - smallest) })
    }

    /// The estimated disk space in bytes for hidden states and samples that are kept in files, and for the states saved for a
    /// resumed run. The files of the output are not counted.
    pub fn scratch_bytes(plans: &[Self], model: &Model, residence: Residence) -> u64 {
        let of = |plan: &Self| {
            let states = PassPlan::new(plan, false).states_in_memory();
            let kinds = model.architecture().blocks.kinds_in(plan.blocks());
            let widest = kinds.map(|kind| kind.graph.width(kind.graph.input())).max().unwrap_or(0) as u64;
            let tokens = (plan.sampling.samples as u64).saturating_mul(plan.sampling.length as u64);
            let copies = match residence {
                // The saved states, and their next version before it replaces them.
                Residence::Memory => 2 * states.min(2),
                Residence::Files { .. } => 2 * states.min(2) + states,
            };
            (4 * widest).saturating_mul(copies).saturating_mul(tokens)
        };
        plans.iter().filter(|plan| plan.needs_text()).map(of).max().unwrap_or(0)
    }

    /// The estimated peak memory in bytes of one run of all these plans with hidden states in a given place.
    pub fn peak_memory_in(plans: &[Self], model: &Model, residence: Residence) -> u64 {
        let searched = plans.iter().filter(|p| p.needs_blocks());
        // What is gathered of the batch serves all.
        let kinds = |plan: &Self| {
            let kinds = model.architecture().blocks.kinds_in(plan.blocks());
            kinds.map(|kind| plan.search_memory(kind, residence)).max().unwrap_or(0)
        };
        let search = searched.map(kinds).max().unwrap_or(0);
        let tensors: u64 = plans.iter().map(Self::largest_tensor).sum();
        // A tensor whose columns are turned stands in memory whole, as it was and as it is, and the last one is kept.
        let turned =
            if model.is_rotated() { 2 * plans.iter().map(Self::largest_input).max().unwrap_or(0) } else { 0 };
        search.saturating_add(PROGRAM + tensors + turned)
    }

    /// One linear on its way: its bytes and the next one's, codes, packed codes, and its `f32` copy
    /// where a transform rewrites it.
    fn largest_tensor(&self) -> u64 {
        let of = |entry: &super::PlanEntry| match entry.action {
            Action::Copy => 16 << 20,
            _ => {
                let elements = entry.info.elements() as u64;
                let widened = if self.needs_blocks() { 4 * elements } else { 0 };
                2 * entry.info.byte_len() + elements + widened + entry.output_bytes()
            }
        };
        self.entries.iter().map(of).max().unwrap_or(0)
    }

    /// Bytes of the largest weight of a block.
    fn largest_input(&self) -> u64 {
        self.entries.iter().filter(|e| e.layer.is_some()).map(|e| e.info.byte_len()).max().unwrap_or(0)
    }

    /// The block, the batch's hidden states, and what the search keeps. The batch may
    /// be asked for as large as one likes; only then can the sums leave 64 bits.
    fn search_memory(&self, kind: BlockKind<'_>, residence: Residence) -> u64 {
        let tokens = match self.needs_text() {
            true => (self.sampling.samples as u64).saturating_mul(self.sampling.length as u64),
            false => 0,
        };
        let graph = kind.graph;
        let gptq = self.method.rounding == Rounding::Gptq;
        // GPTQ on the inputs of the quantized model takes experts one at a time, unless a transform has made all of
        // them anew.
        let one_expert = gptq && self.gptq.inputs == LayerInputs::Quantized && self.transforms().is_empty();
        let block = self.block_bytes(kind, one_expert);
        let work = Workload { residence, ..self.workload(kind) };
        let kept = self.transforms().iter().map(|t| t.memory(&work)).max().unwrap_or(0);
        let widest: u64 = graph.linears().map(|(_, _, [n, k], _)| (n + k) as u64).max().unwrap_or(0);
        // Where documents begin and which tokens count is noted of each, twice while it is made.
        let plain = self.sampling.mask == Mask::None && self.sampling.packing != Packing::Documents;
        let noted = if plain { 0 } else { 16 };
        let transforms = self.transforms();
        let copies = PassPlan::new(self, false).states_in_memory();
        // States of another width are made beside those that they replace.
        let [before, after] = [graph.input(), graph.output()].map(|node| 4 * graph.width(node) as u64);
        let replaced = if before == after || copies == 0 { 0 } else { before.min(after) };
        let states = match residence {
            Residence::Memory => copies * before.max(after) + replaced,
            Residence::Files { .. } => 0,
        };
        let states = (states + noted).saturating_mul(tokens);
        let solved = if gptq { self.gptq_memory(graph, one_expert) } else { 0 };
        // The sum of the experts' outputs, and which tokens each expert gets, are kept for the whole batch.
        let (sum, routed) = if one_expert { graph.expert_sum_bytes() } else { (0, 0) };
        let expert_states = match residence {
            Residence::Memory => (sum + routed) as u64,
            Residence::Files { .. } => routed as u64,
        };
        let states = states.saturating_add(expert_states.saturating_mul(tokens));
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
        // What a transform has made of the block, in f32, is what the next one looks at.
        let rewritten = if transforms.len() > 1 { 4 * work.all_weights() } else { 0 };
        let kept = kept.saturating_add(rewritten);
        // The search is over when GPTQ begins.
        states.saturating_add(kept.max(solved)).saturating_add(running).saturating_add(block)
    }

    /// A block as transforms look at it.
    pub(super) fn workload<'a>(&'a self, kind: BlockKind<'a>) -> Workload<'a> {
        let of_block = self.entries.iter().filter(|e| e.layer == Some(kind.first));
        let scheme = |entry: &super::PlanEntry| match entry.action {
            Action::Quantize { node: Some(node), scheme, .. } => Some((node, scheme)),
            _ => None,
        };
        let schemes = of_block.filter_map(scheme).collect();
        let residence = Residence::Memory;
        Workload { graph: kind.graph, sampling: self.sampling, settings: &self.settings, schemes, residence }
    }

    /// The weights of a block that are in memory at a time.
    fn block_bytes(&self, kind: BlockKind<'_>, one_expert: bool) -> u64 {
        let of_block = self.entries.iter().filter(|e| e.layer == Some(kind.first));
        let node = |entry: &super::PlanEntry| match entry.action {
            Action::Quantize { node, .. } => node,
            Action::Rewrite { node, .. } => Some(node),
            Action::Copy | Action::Repack { .. } => None,
        };
        let expert = |entry: &super::PlanEntry| node(entry).and_then(|node| kind.graph.expert_of(node));
        resident(of_block.map(|entry| (expert(entry), entry.info.byte_len())), one_expert)
    }

    /// Hessians, what is made of them, and the codes that are kept.
    fn gptq_memory(&self, graph: &BlockGraph, one_expert: bool) -> u64 {
        let mut widths = BTreeMap::new();
        for (id, _, [_, k], _) in graph.linears() {
            widths.insert(graph.nodes()[id].inputs[0], k as u64);
        }
        let codes = resident(
            graph.linears().map(|(id, _, [n, k], _)| (graph.expert_of(id), (n * k) as u64)),
            one_expert,
        );
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

/// Bytes of what belongs to no expert, and of all experts, or of the largest where they come one at a time.
fn resident(parts: impl Iterator<Item = (Option<NodeId>, u64)>, one_expert: bool) -> u64 {
    let mut experts: BTreeMap<NodeId, u64> = BTreeMap::new();
    let mut shared = 0;
    for (expert, bytes) in parts {
        match expert {
            Some(expert) => *experts.entry(expert).or_default() += bytes,
            None => shared += bytes,
        }
    }
    let experts: u64 = match one_expert {
        true => experts.into_values().max().unwrap_or(0),
        false => experts.into_values().sum(),
    };
    shared + experts
}
