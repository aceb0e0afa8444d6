//! The clip search: narrows ranges if that lowers the error of a linear's own output.
//!
//! For every row and group, the bounds `max |w| · (1 − i/20)`, `i = 0 … 9`, are tried. The error of a bound is that of
//! the group's own partial product over some sampled tokens, `mean((x · Q(clip(w)) − x · w)²)`, as in the reference
//! algorithm. Queries and keys are not clipped, because their error passes through a softmax.

use std::collections::{BTreeMap, BTreeSet};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::objective::Input;
use super::statistics::{InputStatistics, Wanted};
use super::{
    BlockTask, ClipRecord, LinearGrid, Needs, Rewrite, SearchWork, StepContext, Transform, TransformSettings,
    Workload, awq_by_expert,
};
use crate::calibrate::{HiddenStates, SampledRows, gram};
use crate::model::{BlockGraph, ExpertOrder, NodeId};
use crate::quantize::{fake_quantize_group, row_scales};
use crate::{Error, Result};

/// The approximate number of tokens on which errors are measured.
pub(super) const TOKENS: usize = 512;
pub(super) const CANDIDATES: usize = 10;
const STEPS: f32 = 20.0;
/// Weights that one task rounds at a time, for each candidate.
const TASK_ELEMENTS: usize = 1 << 15;

/// The clip search on its own, for all linears whose output does not pass through a softmax.
#[derive(Debug, Clone, Copy)]
pub struct Clip;

pub(super) fn work(work: &Workload<'_>) -> SearchWork {
    let mut all = SearchWork::default();
    for (id, _, [n, k], _) in work.graph.linears().filter(|(id, ..)| !work.graph.feeds_queries_or_keys(*id)) {
        let Some(scheme) = work.schemes.get(&id) else { continue };
        let group = scheme.granularity.group_size(k).min(512) as f64;
        let tried = CANDIDATES as f64 * n as f64 * k as f64;
        all.operations += 2.0 * group * tried;
        all.rounded += tried;
    }
    all
}

/// The memory for the sampled inputs of those clipped linears for which `which` returns true.
pub(super) fn sample_bytes(work: &Workload<'_>, which: impl Fn(NodeId) -> bool) -> u64 {
    let mut inputs = BTreeMap::new();
    for (id, _, [_, k], _) in clipped_linears(work).filter(|(id, ..)| which(*id)) {
        inputs.insert(work.graph.nodes()[id].inputs[0], k as u64);
    }
    // Every n-th row is kept, with n rounded down; the list of rows grows by doubling.
    inputs.values().map(|k| 4 * k * 2 * (2 * TOKENS as u64)).sum()
}

/// The memory for the sampled inputs of experts that run on all tokens, if the whole block is in memory. Experts that run
/// on their own tokens keep fewer rows.
pub(super) fn unrouted_bytes(work: &Workload<'_>) -> u64 {
    if work.experts_apart || work.sampling.experts.is_routed() {
        return 0;
    }
    let of_experts = clipped_linears(work).filter(|(id, ..)| work.graph.expert_of(*id).is_some());
    let inputs: BTreeMap<_, _> =
        of_experts.map(|(id, _, [_, k], _)| (work.graph.nodes()[id].inputs[0], k as u64)).collect();
    let tokens = work.tokens() as u64;
    let rows = tokens.div_ceil((tokens / TOKENS as u64).max(1));
    inputs.values().map(|k| 4 * k * rows).sum()
}

pub(super) fn bound_bytes(work: &Workload<'_>) -> u64 {
    4 * bounds(work)
}

/// The memory if experts are searched one at a time: the samples of one expert or of everything outside the experts,
/// and the bounds of all linears.
pub(super) fn memory_by_expert(work: &Workload<'_>) -> u64 {
    let parts: BTreeSet<_> = work.graph.linears().map(|(id, ..)| work.graph.expert_of(id)).collect();
    let samples = parts.into_iter().map(|part| sample_bytes(work, |node| work.graph.expert_of(node) == part));
    samples.max().unwrap_or(0).saturating_add(bound_bytes(work))
}

/// The memory for what is kept of the clip search for a run that resumes.
pub(super) fn found_bytes(work: &Workload<'_>) -> u64 {
    bounds(work)
}

/// The number of groups whose ranges may be narrowed.
fn bounds(work: &Workload<'_>) -> u64 {
    let bounds = clipped_linears(work).map(|(id, _, [n, k], _)| {
        let group = work.schemes[&id].granularity.group_size(k).max(1);
        (n * k.div_ceil(group)) as u64
    });
    bounds.sum()
}

fn clipped_linears<'a>(work: &'a Workload<'_>) -> impl Iterator<Item = (NodeId, &'a str, [usize; 2], bool)> {
    let is_clipped = |id: NodeId| {
        let takes = work.schemes.get(&id).is_some_and(|scheme| scheme.takes_clip_bounds());
        takes && !work.graph.feeds_queries_or_keys(id)
    };
    work.graph.linears().filter(move |(id, ..)| is_clipped(*id))
}

impl Transform for Clip {
    fn name(&self) -> &'static str {
        "clip"
    }

    fn summary(&self) -> &'static str {
        "clips the ranges of weights if this reduces the output error"
    }

    fn folded_nodes(&self, _graph: &BlockGraph, _settings: &TransformSettings) -> Vec<NodeId> {
        Vec::new()
    }

    fn needs(&self, _settings: &TransformSettings) -> Needs {
        Needs { ranges: false, states: true }
    }

    fn narrows_ranges(&self) -> bool {
        true
    }

    fn check(&self, context: &StepContext<'_>) -> Result<()> {
        if context.schemes.iter().any(|scheme| scheme.takes_clip_bounds()) {
            return Ok(());
        }
        let scheme = context.schemes.first().map(ToString::to_string).unwrap_or_default();
        Err(Error::usage(
            format!(
                "`clip` has no effect on {scheme}: its scales are shared by rows, restricted to powers of \
                two, or searched during rounding"
            ),
            "remove the step",
        ))
    }

    fn takes_experts_apart(&self, graph: &BlockGraph, _settings: &TransformSettings) -> bool {
        ExpertOrder::of(graph).is_some()
    }

    fn memory(&self, work: &Workload<'_>) -> u64 {
        match work.experts_apart {
            true => memory_by_expert(work).saturating_add(found_bytes(work)),
            false => unrouted_bytes(work),
        }
    }

    fn work(&self, work: &Workload<'_>) -> SearchWork {
        self::work(work)
    }

    fn search(
        &self,
        tasks: &[BlockTask<'_>],
        hidden: Option<&mut HiddenStates>,
        advance: bool,
    ) -> Result<Vec<Rewrite>> {
        let (Some(first), Some(hidden)) = (tasks.first(), hidden) else { return Ok(Vec::new()) };
        if let Some(order) = first.order() {
            return awq_by_expert::search(tasks, &[], hidden, advance, &order);
        }
        let wanted = Wanted { groups: &[], candidates: 0, clip_tokens: TOKENS };
        let inputs = InputStatistics::gather(first, &wanted, hidden, advance)?;
        let rewrite = || Rewrite { tokens: inputs.tokens.clone(), ..Rewrite::default() };
        tasks.iter().map(|task| clipped(task, &inputs, rewrite())).collect()
    }
}

pub(super) fn clipped(
    task: &BlockTask<'_>,
    inputs: &InputStatistics,
    mut rewrite: Rewrite,
) -> Result<Rewrite> {
    let records = clip_linears(task, inputs, &mut rewrite, |_| true)?;
    rewrite.clip_records.extend(records.into_iter().map(|(_, record)| record));
    Ok(rewrite)
}

/// Adds the clip search of the linears for which `which` returns true, and returns its records.
pub(super) fn clip_linears(
    task: &BlockTask<'_>,
    inputs: &InputStatistics,
    rewrite: &mut Rewrite,
    which: impl Fn(NodeId) -> bool,
) -> Result<Vec<(NodeId, ClipRecord)>> {
    let graph = task.block.graph().clone();
    let mut records = Vec::new();
    for (node, grid) in clipped_grids(task, which) {
        task.cancel.check()?;
        let about = about(task, node);
        let (bounds, record) = match task.recall(&about) {
            Some(Found { record, choices }) => {
                let bounds =
                    choices.map(|choices| chosen_bounds(task, node, grid, rewrite, choices.as_bytes()));
                (bounds.transpose()?, record)
            }
            None => {
                let mut input = inputs.sampled[&graph.nodes()[node].inputs[0]].clone();
                if let Some(scales) = rewrite.columns.get(&node) {
                    input.divide(scales);
                }
                let (found, bounds) = search(task, node, grid, rewrite, &input)?;
                task.remember(&about, &found)?;
                (bounds, found.record)
            }
        };
        if let Some(bounds) = bounds {
            rewrite.clips.insert(node, bounds);
        }
        records.push((node, record));
    }
    Ok(records)
}

/// The linears whose ranges may be narrowed, except those for which `which` returns false.
fn clipped_grids<'t>(
    task: &'t BlockTask<'_>,
    which: impl Fn(NodeId) -> bool + 't,
) -> impl Iterator<Item = (NodeId, LinearGrid)> + 't {
    // Bounds do not apply to scales that are shared by rows or searched for during rounding.
    let is_clipped = move |(node, grid): &(&NodeId, &LinearGrid)| {
        let reads = task.block.graph().feeds_queries_or_keys(**node);
        which(**node) && !reads && grid.scheme.takes_clip_bounds()
    };
    task.grids.iter().filter(is_clipped).map(|(&node, &grid)| (node, grid))
}

/// What a search has found, as it is kept for a resumed run.
#[derive(Serialize, Deserialize)]
struct Found {
    record: ClipRecord,
    /// The candidate of each group, `0` to `9`, `[n, groups]`; absent if no group is clipped.
    choices: Option<String>,
}

/// The key of what was found for a linear.
fn about(task: &BlockTask<'_>, node: NodeId) -> String {
    format!("bounds of {}", task.module(node))
}

/// Whether an interrupted run has searched the bounds of all linears for which `which` returns true.
pub(super) fn are_found(task: &BlockTask<'_>, which: impl Fn(NodeId) -> bool) -> bool {
    clipped_grids(task, which).all(|(node, _)| task.recall::<Found>(&about(task, node)).is_some())
}

/// The bound for a candidate, given the largest magnitude in the group. The first candidate does not clip.
fn bound(largest: f32, candidate: usize) -> f32 {
    largest * (1.0 - candidate as f32 / STEPS)
}

/// Returns the bounds `[n, groups]` for the candidates of a linear's groups.
fn chosen_bounds(
    task: &BlockTask<'_>,
    node: NodeId,
    grid: LinearGrid,
    rewrite: &Rewrite,
    choices: &[u8],
) -> Result<Vec<f32>> {
    let weight = task.block.linear(node).weight().read()?;
    let [n, k] = weight.shape();
    let group_size = grid.scheme.granularity.group_size(k);
    let groups = k / group_size;
    if choices.len() != n * groups {
        return Err(Error::Internal(format!(
            "{} clip bounds for {n} rows of {groups} groups",
            choices.len()
        )));
    }
    let tile = (TASK_ELEMENTS / group_size).max(1);
    let parts = choices.par_chunks((tile * groups).max(1)).enumerate();
    let parts = parts.map_init(Vec::new, |scratch, (index, choices)| {
        let rows = index * tile..((index + 1) * tile).min(n);
        let mut values = vec![0.0; rows.len() * k];
        rewrite.weight_rows(node, &weight, rows, scratch, &mut values)?;
        let bound = |(weights, choice): (&[f32], &u8)| match choice.wrapping_sub(b'0') {
            0 => Ok(f32::INFINITY),
            candidate if usize::from(candidate) < CANDIDATES => Ok(bound(largest(weights), candidate.into())),
            _ => Err(Error::Internal(format!("{choice} is not a candidate of a clip search"))),
        };
        values.chunks_exact(group_size).zip(choices).map(bound).collect::<Result<Vec<_>>>()
    });
    Ok(parts.collect::<Result<Vec<_>>>()?.concat())
}

fn largest(weights: &[f32]) -> f32 {
    weights.iter().fold(0.0, |m, w| m.max(w.abs()))
}

/// Finds the bounds `[n, groups]` of a linear with a rewritten weight; `input` must already be scaled. `None` if no
/// group is clipped.
fn search(
    task: &BlockTask<'_>,
    node: NodeId,
    grid: LinearGrid,
    rewrite: &Rewrite,
    input: &SampledRows,
) -> Result<(Found, Option<Vec<f32>>)> {
    let weight = task.block.linear(node).weight().read()?;
    let [n, k] = weight.shape();
    let group_size = grid.scheme.granularity.group_size(k);
    let groups = k / group_size;
    let module = task.module(node);
    let inputs: Vec<Input> = (0..groups).map(|g| group_input(input, k, g * group_size, group_size)).collect();

    let tile = (TASK_ELEMENTS / group_size).max(1);
    let parts: Vec<Result<Part>> = (0..n.div_ceil(tile))
        .into_par_iter()
        .map_init(Vec::new, |scratch, index| {
            let rows = index * tile..((index + 1) * tile).min(n);
            let mut values = vec![0.0; rows.len() * k];
            rewrite.weight_rows(node, &weight, rows.clone(), scratch, &mut values)?;
            let mut part = Part::new(rows.len() * groups);
            let scales = row_scales(&values, k, grid.scheme).map_err(|e| e.within(&module, None))?;
            for (g, input) in inputs.iter().enumerate() {
                search_group(&values, k, g, grid, input, scales.as_deref(), &module, &mut part)?;
            }
            Ok(part)
        })
        .collect();

    let mut bounds = Vec::with_capacity(n * groups);
    let mut choices = String::with_capacity(n * groups);
    let (mut before, mut after, mut clipped) = (0.0, 0.0, 0);
    for part in parts {
        let part = part?;
        clipped += part.bounds.iter().filter(|b| b.is_finite()).count() as u64;
        bounds.extend(part.bounds);
        choices.extend(part.choices.iter().map(|choice| char::from(b'0' + choice)));
        before += part.before;
        after += part.after;
    }
    tracing::debug!(module, clipped, groups = bounds.len(), "ranges chosen");
    let count = (n * groups * input.rows().max(1)) as f64;
    let record = ClipRecord {
        module,
        clipped_groups: clipped,
        groups: bounds.len() as u64,
        error_before: before / count,
        error_after: after / count,
    };
    let found = Found { record, choices: (clipped > 0).then_some(choices) };
    Ok((found, (clipped > 0).then_some(bounds)))
}

struct Part {
    bounds: Vec<f32>,
    /// The candidate for each bound.
    choices: Vec<u8>,
    before: f64,
    after: f64,
}

impl Part {
    fn new(groups: usize) -> Self {
        Self { bounds: vec![f32::INFINITY; groups], choices: vec![0; groups], before: 0.0, after: 0.0 }
    }
}

/// The columns of one group in the smaller form: rows, or their Gram matrix.
fn group_input(input: &SampledRows, k: usize, first: usize, group_size: usize) -> Input {
    let columns: Vec<f32> =
        input.values().chunks_exact(k).flat_map(|row| &row[first..first + group_size]).copied().collect();
    if input.rows() <= group_size {
        return Input::Rows(columns);
    }
    let mut sum = vec![0.0; group_size * group_size];
    gram(&columns, group_size, &mut sum);
    Input::gram(sum, group_size)
}

/// Tries all bounds for one group of some rows `[rows, k]`. `row_scales` are given if there are two levels of scales.
#[allow(clippy::too_many_arguments)]
fn search_group(
    rows: &[f32],
    k: usize,
    group: usize,
    grid: LinearGrid,
    input: &Input,
    row_scales: Option<&[f32]>,
    module: &str,
    part: &mut Part,
) -> Result<()> {
    let group_size = grid.scheme.granularity.group_size(k);
    let groups = k / group_size;
    let exact: Vec<f32> = rows
        .chunks_exact(k)
        .flat_map(|r| &r[group * group_size..(group + 1) * group_size])
        .copied()
        .collect();
    let largest: Vec<f32> = exact.chunks_exact(group_size).map(largest).collect();
    let mut best = vec![f64::INFINITY; largest.len()];
    let mut unclipped = Vec::with_capacity(largest.len());
    let mut sums = Vec::new();
    for candidate in 0..CANDIDATES {
        let bounds: Vec<f32> = largest.iter().map(|m| bound(*m, candidate)).collect();
        let mut difference = exact.clone();
        let target = (grid.scheme, grid.scale_dtype);
        fake_quantize_group(&mut difference, group_size, target, &bounds, row_scales)
            .map_err(|e| e.within(module, None))?;
        for (d, w) in difference.iter_mut().zip(&exact) {
            *d -= w;
        }
        input.squared_outputs(&difference, group_size, &mut sums);
        for (row, &error) in sums.iter().enumerate() {
            if !error.is_finite() {
                return Err(Error::Calibration { tensor: module.to_owned(), what: "its input".into() });
            }
            if candidate == 0 {
                unclipped.push(error);
            }
            if error < best[row] {
                best[row] = error;
                let at = row * groups + group;
                part.bounds[at] = if candidate == 0 { f32::INFINITY } else { bounds[row] };
                part.choices[at] = candidate as u8;
            }
        }
    }
    // Errors are added in a fixed order, so that both sums are equal if nothing is clipped.
    part.before += unclipped.iter().sum::<f64>();
    part.after += best.iter().sum::<f64>();
    Ok(())
}
