//! The peak memory of a plan, estimated without reading weights.

use std::collections::{BTreeMap, BTreeSet};

use super::{Action, PassPlan, Plan};
use crate::ThreadMemory;
use crate::calibrate::{Mask, Packing, Residence};
use crate::model::{BlockGraph, BlockKind, FloatProducts, Model, NodeId};
use crate::round::RoundingMemory;
use crate::transform::{Search, Workload};

/// Bytes for the program itself.
const PROGRAM: u64 = 56 << 20;
/// Bytes for the tokenizer.
const TEXT: u64 = 20 << 20;
/// Bytes for the stack of a thread and what the allocator keeps for it.
const THREAD: u64 = 4 << 20;
/// The same for a thread that multiplies matrices with the values of a calibration batch.
const BUSY_THREAD: u64 = 12 << 20;
/// Bytes that the header of the input takes per tensor, besides its name.
const PER_INPUT: u64 = 256;
/// Bytes of a plan per tensor, besides names.
const PER_PLANNED: u64 = 400;
/// Bytes per tensor of the report and of the record from which an interrupted run resumes, besides names.
const PER_REPORT: u64 = 1000;
/// Bytes per quantized linear, besides names.
const PER_LINEAR: u64 = 2048;
/// Bytes of the report per linear whose scales or clip bounds were searched for.
const PER_SEARCH: u64 = 1024;
/// Bytes for copying a tensor.
const COPIED: u64 = 16 << 20;
/// The largest part of a buffer that may stay unused. Fresh memory costs time, as the system clears it.
const SPARE: u64 = 64 << 20;
/// Bytes per tensor of the output, besides its name.
const PER_OUTPUT: u64 = 350;
/// The minimum memory for a round of a search.
const MIN_ROUND_BYTES: u64 = 32 << 20;
const CHUNK_TOKENS: u64 = 2048;

impl Plan {
    /// Estimates the peak memory in bytes of one run of all these plans, with hidden states in memory. What a run needs
    /// in addition to write a file of channel maxima is not counted.
    pub fn peak_memory(plans: &[Self], model: &Model) -> u64 {
        Self::peak_memory_in(plans, model, Residence::Memory)
    }

    /// Returns the storage for hidden states with which a run of all these plans stays within `budget` bytes: memory if
    /// they fit, otherwise files, with search rounds as large as the budget allows.
    ///
    /// `keeps_maxima` says whether the run writes channel maxima, for which the batch passes through the float model
    /// too.
    ///
    /// # Errors
    /// If the budget is too small, the error is the smallest sufficient budget in bytes.
    pub fn residence(
        plans: &[Self],
        model: &Model,
        budget: u64,
        keeps_maxima: bool,
    ) -> std::result::Result<Residence, u64> {
        let further = if keeps_maxima { Self::states_for_maxima(plans, model) } else { 0 };
        let memory = Self::peak_memory(plans, model).saturating_add(further);
        if memory <= budget {
            return Ok(Residence::Memory);
        }
        // Experts that are processed one at a time are read several times, so that comes last.
        let mut needed = memory;
        for experts_apart in [false, true] {
            let files = |round_bytes| Residence::Files { round_bytes, experts_apart };
            let smallest = Self::peak_memory_in(plans, model, files(MIN_ROUND_BYTES));
            if smallest <= budget {
                return Ok(files(MIN_ROUND_BYTES + (budget - smallest)));
            }
            needed = needed.min(smallest);
        }
        Err(needed)
    }

    /// The size of the hidden states that are in memory only because channel maxima are gathered.
    fn states_for_maxima(plans: &[Self], model: &Model) -> u64 {
        let of = |plan: &Self| {
            let [without, with] = [false, true].map(|keeps| PassPlan::new(plan, keeps).states_in_memory());
            let kinds = model.architecture().blocks.kinds_in(plan.blocks());
            let widest = kinds.map(|kind| kind.graph.width(kind.graph.input())).max().unwrap_or(0) as u64;
            let tokens = (plan.sampling.samples as u64).saturating_mul(plan.sampling.length as u64);
            (4 * widest * with.saturating_sub(without)).saturating_mul(tokens)
        };
        plans.iter().filter(|plan| plan.needs_text()).map(of).max().unwrap_or(0)
    }

    /// The estimated disk space in bytes for hidden states that are kept in files, and for the states that are saved so
    /// that the run can be resumed.
    pub fn scratch_bytes(plans: &[Self], model: &Model, residence: Residence) -> u64 {
        let of = |plan: &Self| {
            let states = PassPlan::new(plan, false).states_in_memory();
            let kinds = model.architecture().blocks.kinds_in(plan.blocks());
            let widest = kinds.map(|kind| kind.graph.width(kind.graph.input())).max().unwrap_or(0) as u64;
            let tokens = (plan.sampling.samples as u64).saturating_mul(plan.sampling.length as u64);
            let copies = match residence {
                // The saved states, and their next version, which is written before it replaces them.
                Residence::Memory => 2 * states.min(2),
                // A pass by expert has states of its own, and a sum of the experts.
                Residence::Files { experts_apart, .. } => {
                    2 * states.min(2) + states + 2 * u64::from(experts_apart)
                }
            };
            (4 * widest).saturating_mul(copies).saturating_mul(tokens)
        };
        plans.iter().filter(|plan| plan.needs_text()).map(of).max().unwrap_or(0)
    }

    /// The estimated peak memory in bytes of one run of all these plans, with hidden states in the given storage.
    pub fn peak_memory_in(plans: &[Self], model: &Model, residence: Residence) -> u64 {
        let searched = plans.iter().filter(|p| p.needs_blocks());
        let tensors: u64 = plans.iter().map(Self::largest_tensor).sum();
        // To rotate the columns of a tensor, the whole tensor is in memory before and after the rotation. The last
        // rotated tensor is cached.
        let rotated =
            if model.is_rotated() { 2 * plans.iter().map(Self::largest_input).max().unwrap_or(0) } else { 0 };
        let writing = tensors.saturating_add(rotated);
        let kinds = |plan: &Self| {
            let kinds = model.architecture().blocks.kinds_in(plan.blocks());
            let shared = plans.len() > 1;
            kinds.map(|kind| plan.block_memory(kind, residence, writing, shared)).max().unwrap_or(0)
        };
        let blocks = searched.map(kinds).max().unwrap_or(0);
        let step = blocks.max(writing);
        // The allocator keeps some memory of earlier steps.
        let working = step.saturating_add(Self::kept_per_tensor(plans, model));
        let text = if plans.iter().any(Self::needs_blocks) { TEXT } else { 0 };
        let threads = Self::thread_memory(plans);
        let program = PROGRAM + text + threads.bytes * threads.count as u64;
        working.saturating_add(working / 8).saturating_add(program)
    }

    /// The threads of one run of all these plans, and the memory that is estimated for each.
    pub(crate) fn thread_memory(plans: &[Self]) -> ThreadMemory {
        let bytes = if plans.iter().any(Self::needs_blocks) { BUSY_THREAD } else { THREAD };
        ThreadMemory::new(rayon::current_num_threads(), bytes)
    }

    /// The memory for what a run keeps for every tensor until its end: its places in the input and the output, its
    /// entry in the plan, and its report.
    fn kept_per_tensor(plans: &[Self], model: &Model) -> u64 {
        let text = |name: &str| (name.len() as u64).next_multiple_of(16) + 8;
        let formats = plans.len() as u64;
        // A part of a plan is made from the plan of the whole model, which stays in memory.
        let planned = |name: &str| PER_INPUT + 2 * text(name) + formats * (PER_PLANNED + 3 * text(name));
        let input: u64 = model.source().names().into_iter().map(planned).sum();
        let entry = |entry: &super::PlanEntry| {
            let outputs: u64 = entry.outputs.iter().map(|output| PER_OUTPUT + 5 * text(&output.name)).sum();
            PER_REPORT + 4 * text(&entry.tensor) + outputs
        };
        let of_plan = |plan: &Self| {
            let searched = if plan.transforms().is_empty() { 0 } else { PER_SEARCH };
            let linears = plan.entries.iter().filter(|entry| entry.quantized().is_some()).count() as u64;
            plan.entries.iter().map(entry).sum::<u64>() + linears * (PER_LINEAR + searched)
        };
        input + plans.iter().map(of_plan).sum::<u64>()
    }

    /// The largest memory for writing one tensor: the stored bytes of this tensor and the next one, the codes, the
    /// outputs of this tensor and the previous one, and an `f32` copy if the plan processes whole blocks.
    fn largest_tensor(&self) -> u64 {
        let mut peak = if self.entries.iter().any(|e| e.action == Action::Copy) { COPIED } else { 0 };
        let mut entries = self.entries.iter().filter(|e| e.action != Action::Copy).peekable();
        // Two buffers take turns: one for the current tensor, and one for the next.
        let mut buffer = entries.peek().map_or(0, |first| first.info.byte_len());
        let (mut spare, mut previous) = (0, 0);
        while let Some(entry) = entries.next() {
            let next = entries.peek().map_or(0, |next| next.info.byte_len());
            spare = if is_reused(spare, next) { next.max(spare) } else { next };
            let (elements, output) = (entry.info.elements() as u64, entry.output_bytes());
            let widened = if self.needs_blocks() { 4 * elements } else { 0 };
            peak = peak.max(buffer + spare + elements + widened + output + previous);
            previous = output;
            std::mem::swap(&mut buffer, &mut spare);
        }
        peak
    }

    fn largest_input(&self) -> u64 {
        self.entries.iter().filter(|e| e.layer.is_some()).map(|e| e.info.byte_len()).max().unwrap_or(0)
    }

    /// The peak memory while a block is processed: the block, the hidden states of the batch, and the largest of the
    /// steps, which run one after the other. Sums saturate, because they can exceed 64 bits if a huge batch is
    /// requested.
    ///
    /// If several plans share a run, the weights of a block stay in memory until all have quantized them.
    fn block_memory(&self, kind: BlockKind<'_>, residence: Residence, writing: u64, shared: bool) -> u64 {
        let graph = kind.graph;
        let tokens = match self.needs_text() {
            true => (self.sampling.samples as u64).saturating_mul(self.sampling.length as u64),
            false => 0,
        };
        let transforms = if self.is_forward() { Vec::new() } else { self.transforms() };
        let rounding = self.method.rounding;
        let staged = rounding.inputs(&self.settings).is_some() && !self.is_forward();
        // A transform has rewritten all experts, so they are all in memory.
        let passes = PassPlan::new(self, false);
        let one_expert = staged
            && rounding.takes_experts_apart(&self.settings)
            && transforms.is_empty()
            // A pass of the float block reads all experts.
            && passes.first.is_none()
            && passes.cache.is_none();
        let apart = matches!(residence, Residence::Files { experts_apart: true, .. });
        let experts_apart = apart && self.takes_experts_apart(graph);
        let one_expert = one_expert || experts_apart;
        let work = Workload { residence, experts_apart, ..self.workload(kind) };
        let outputs = if one_expert { 0 } else { self.expert_outputs(graph, tokens) };
        let pieces = self.piece_memory(graph, tokens).saturating_add(outputs);
        // A block that a transform has rewritten stays in memory in f32 for the next transform and the rounding, so the
        // first transform sees the original. If experts are processed one at a time, they are rewritten when they are
        // read.
        let weights = graph.linears().map(|(id, _, [n, k], _)| (graph.expert_of(id), (n * k) as u64));
        let is_rewritten = transforms.len() + usize::from(staged) > 1;
        let rewritten = if is_rewritten { 4 * resident(weights, experts_apart) } else { 0 };
        let block = self.block_bytes(kind, one_expert);
        let mut steps =
            vec![block.saturating_add(pieces), block.saturating_add(writing).saturating_add(rewritten)];
        for (i, transform) in transforms.iter().enumerate() {
            let step = pieces.saturating_add(transform.gathering_memory(&work)).max(transform.memory(&work));
            let before = if i == 0 { block } else { block.saturating_add(rewritten) };
            steps.push(before.saturating_add(step));
        }
        if staged {
            let mut earlier = BTreeSet::new();
            for RoundingMemory { gathering, solving, rounds } in rounding.memory(&work) {
                let weights = match rounds.filter(|_| !is_rewritten && !shared) {
                    Some(linears) => {
                        // The weights of a stage are read when its inputs have been gathered.
                        let gathering = self.staged_bytes(kind, one_expert, &linears, false, &earlier);
                        let solving = self.staged_bytes(kind, one_expert, &linears, true, &earlier);
                        earlier.extend(linears);
                        [gathering, solving]
                    }
                    None => [block.saturating_add(rewritten); 2],
                };
                steps.push(weights[0].saturating_add(pieces).saturating_add(gathering));
                steps.push(weights[1].saturating_add(solving));
            }
        }
        // Every step may multiply floats.
        let step = steps
            .into_iter()
            .max()
            .unwrap_or(0)
            .saturating_add(FloatProducts::detect().memory(graph, tokens));
        let states = self.state_bytes(graph, residence, one_expert).saturating_mul(tokens);
        states.saturating_add(step)
    }

    fn state_bytes(&self, graph: &BlockGraph, residence: Residence, one_expert: bool) -> u64 {
        // For each token, the layout stores the start of its document, its rank among counted tokens and whether it is
        // padding. While it is built, there is also a copy of the starts and the role of each token.
        let plain = self.sampling.mask == Mask::None && self.sampling.packing != Packing::Documents;
        let layout = if plain { 0 } else { 16 };
        // The sum of the experts' outputs and the tokens of each expert are kept for the whole batch.
        let (sum, routed) = if one_expert { graph.expert_sum_bytes() } else { (0, 0) };
        let states = match residence {
            Residence::Files { .. } => 0,
            Residence::Memory => {
                let copies = PassPlan::new(self, false).states_in_memory();
                // If a block changes the width, its output needs a second buffer, so old and new states are in memory
                // together.
                let [before, after] =
                    [graph.input(), graph.output()].map(|node| 4 * graph.width(node) as u64);
                let replaced = if before == after || copies == 0 { 0 } else { before.min(after) };
                copies * before.max(after) + replaced + sum as u64
            }
        };
        states + layout + routed as u64
    }

    /// The memory for the intermediate values of the tokens that go through a block at a time.
    fn piece_memory(&self, graph: &BlockGraph, tokens: u64) -> u64 {
        let length = self.sampling.length as u64;
        // In an MLP, the outputs of gate and up and their product are in memory together with the inputs of the
        // linears.
        let linears = graph.linears().filter(|(id, ..)| self.passes_through(graph, *id));
        let widest: u64 = linears.map(|(_, _, [n, k], _)| (n + k) as u64).max().unwrap_or(0);
        match self.method.search_mode(&self.settings).unwrap_or_default() {
            // Attention processes a longer window as a whole; the rest of the block processes it in pieces.
            Search::Fast if length > CHUNK_TOKENS => {
                let attended: u64 = graph
                    .linears()
                    .filter(|(id, ..)| graph.feeds_attention(*id))
                    .map(|(.., [n, _], _)| 2 * n as u64)
                    .sum::<u64>()
                    + (graph.width(graph.input()) + graph.width(graph.output())) as u64;
                (4 * attended).saturating_mul(length).saturating_add(12 * widest * CHUNK_TOKENS)
            }
            _ => (12 * widest).saturating_mul(CHUNK_TOKENS.max(length).min(tokens.max(1))),
        }
    }

    /// The memory for the outputs of all experts of a block for the tokens that go through the block at a time.
    fn expert_outputs(&self, graph: &BlockGraph, tokens: u64) -> u64 {
        let length = self.sampling.length as u64;
        let piece = match self.method.search_mode(&self.settings).unwrap_or_default() {
            // Longer windows are processed in pieces; if the last one is short, the allocator keeps some memory of the
            // piece before.
            Search::Fast if length > CHUNK_TOKENS => CHUNK_TOKENS / 2 * 3,
            _ => CHUNK_TOKENS.max(length),
        };
        let piece = piece.min(tokens);
        let bytes = graph.expert_output_bytes(|routed| self.sampling.experts.shares(routed)[1]);
        (bytes * piece as f64) as u64
    }

    pub(super) fn workload<'a>(&'a self, kind: BlockKind<'a>) -> Workload<'a> {
        let of_block = self.entries.iter().filter(|e| e.layer == Some(kind.first));
        let scheme = |entry: &super::PlanEntry| match entry.action {
            Action::Quantize { node: Some(node), scheme, .. } => Some((node, scheme)),
            _ => None,
        };
        let schemes = of_block.filter_map(scheme).collect();
        let (residence, experts_apart) = (Residence::Memory, false);
        let (sampling, settings) = (self.sampling, &self.settings);
        Workload { graph: kind.graph, sampling, settings, schemes, residence, experts_apart }
    }

    /// The bytes of a block's weights that are in memory at the same time.
    fn block_bytes(&self, kind: BlockKind<'_>, one_expert: bool) -> u64 {
        if let Some(largest) = self.forward {
            return largest;
        }
        self.weight_bytes(kind, one_expert, |entry| entry.info.byte_len())
    }

    /// The bytes of a block's weights that are in memory in the stage that rounds `linears`, with or without them: the
    /// weights of `earlier` stages are quantized, those of later stages not read yet. If the stage is inside an expert,
    /// experts count as if none were rounded.
    fn staged_bytes(
        &self,
        kind: BlockKind<'_>,
        one_expert: bool,
        linears: &[NodeId],
        are_read: bool,
        earlier: &BTreeSet<NodeId>,
    ) -> u64 {
        let in_expert = |node: &NodeId| kind.graph.expert_of(*node).is_some();
        let reaches_experts = linears.iter().chain(earlier).any(in_expert);
        self.weight_bytes(kind, one_expert, |entry| {
            let stored = entry.info.byte_len();
            let elements = entry.info.elements() as u64;
            let Action::Quantize { node: Some(node), .. } = &entry.action else { return stored };
            if in_expert(node) {
                stored * u64::from(reaches_experts)
            } else if linears.contains(node) {
                stored * u64::from(are_read)
            } else if earlier.contains(node) {
                // A byte per code, and the scales and zero points.
                stored.min(elements + elements / 4)
            } else {
                0
            }
        })
    }

    fn weight_bytes(
        &self,
        kind: BlockKind<'_>,
        one_expert: bool,
        bytes: impl Fn(&super::PlanEntry) -> u64,
    ) -> u64 {
        let of_block = self.entries.iter().filter(|e| e.layer == Some(kind.first));
        let expert = |entry: &super::PlanEntry| entry.node().and_then(|node| kind.graph.expert_of(node));
        let own = resident(of_block.map(|entry| (expert(entry), bytes(entry))), one_expert);
        own + self.experts.as_ref().map_or(0, |part| part.beside)
    }
}

/// Whether a buffer of `capacity` bytes is used again for a tensor of `needed` bytes.
pub(crate) fn is_reused(capacity: u64, needed: u64) -> bool {
    capacity <= needed.saturating_add(SPARE)
}

/// The bytes of the tensors that are in memory together: only the largest expert counts if experts are processed one at
/// a time.
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
