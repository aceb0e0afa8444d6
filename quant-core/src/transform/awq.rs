//! AWQ: activation-aware weight quantization (Lin et al., MLSys 2024).
//!
//! A few input channels of a linear carry large activations, and the rounding errors of their weights matter most.
//! Multiplying a column by `s > 1` before rounding and dividing after shrinks its error; the division is folded into
//! the producer of the channel. For every fold group of the block, the scales come from a one-parameter family,
//!
//! ```text
//! s_c = a_c^r / (w_c^(1 − r) + 1e-4),   then s / √(max s · min s)
//! ```
//!
//! with `a_c` the mean magnitude of the activations and `w_c` the mean over rows of the weights' magnitude relative to
//! their group's largest ("duo scaling"). The exponent `r` is chosen from a grid of 20, `0, 1/20 … 19/20`, by the error
//! of the module's output (§3.2 of the paper; duo scaling as in AutoAWQ). No scaling is a candidate too. [`Search`]
//! determines how candidates are compared. Then each group's range is narrowed if that lowers the linear's own output
//! error ([`clip`](super::clip)), except for block types, which search for their scales.
//!
//! Groups whose channels are repeated (values under grouped-query attention) are not scaled, as in the reference
//! implementation.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::candidates::{Candidate, Choice, choose_exactly};
use super::findings::{from_text, to_text};
use super::objective::Objective;
use super::sample::{PLACE_BYTES, RaceShape, mixes_tokens};
use super::statistics::{InputStatistics, Kept, Wanted};
use super::{
    BlockTask, ChannelOutlier, FoldRecord, Needs, Rewrite, SCALE_CANDIDATES, Search, SearchWork, StepKey,
    Transform, TransformSettings, Workload, awq_by_expert, by_expert, clip, difference, fold, race,
};
use crate::calibrate::{HiddenStates, Residence};
use crate::keys::{no_such_key, parse_text};
use crate::model::{BlockGraph, ExpertOrder, FoldGroup, NodeId};
use crate::{Error, Result};

pub(super) const GRID: usize = 20;

/// The transform of AWQ.
#[derive(Debug, Clone, Copy)]
pub struct Awq;

/// Settings of AWQ.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AwqSettings {
    /// How candidates are compared.
    pub search: Search,
}

pub(super) fn search_of(settings: &TransformSettings) -> Search {
    settings.steps.get::<AwqSettings>().search
}

pub(super) fn groups(graph: &BlockGraph) -> Vec<FoldGroup> {
    graph.fold_groups().into_iter().filter(|g| g.repeat == 1).collect()
}

/// The largest memory of a candidate that the allocator keeps while the next one is computed.
const FREED_BYTES: u64 = 64 << 20;
/// The bytes of the record of a search, besides scales.
const FOUND_BYTES: u64 = 4096;

/// The approximate fraction of the batch on which a candidate of the fast search runs; most are eliminated early.
const RACE_FRACTION: f64 = 1.0 / 8.0;

/// The memory of the scale search, and the part of it that is kept from the batch before the search starts. Both
/// contain what is kept of a block's findings for a run that resumes.
fn memory(work: &Workload<'_>) -> [u64; 2] {
    let groups = groups(work.graph);
    let kept = groups.iter().map(|group| FOUND_BYTES + (8 * work.shape(group.consumers[0])[1]) as u64);
    let kept = kept.sum::<u64>().saturating_add(clip::found_bytes(work));
    search_memory(work, &groups).map(|bytes| bytes.saturating_add(kept))
}

fn search_memory(work: &Workload<'_>, groups: &[FoldGroup]) -> [u64; 2] {
    let sampled = clip::unrouted_bytes(work);
    search_memory_of(work, groups).map(|bytes| bytes.saturating_add(sampled))
}

fn search_memory_of(work: &Workload<'_>, groups: &[FoldGroup]) -> [u64; 2] {
    if search_of(work.settings) == Search::Reference {
        let largest = groups.iter().map(|g| whole_batch_memory(work, g)).max().unwrap_or(0);
        let clips = if work.experts_apart { clip::memory_by_expert(work) } else { 0 };
        return [largest.saturating_add(clips); 2];
    }
    if work.experts_apart {
        return memory_by_expert(work, groups);
    }
    gathered_memory(work, &groups.iter().collect::<Vec<_>>())
}

/// The memory if experts are searched one at a time: first everything outside the experts, then each expert. The clip
/// bounds of all linears are kept until the block is written.
fn memory_by_expert(work: &Workload<'_>, groups: &[FoldGroup]) -> [u64; 2] {
    let mut parts: BTreeMap<Option<NodeId>, Vec<&FoldGroup>> = BTreeMap::new();
    for group in groups {
        parts.entry(awq_by_expert::part_of(work.graph, group)).or_default().push(group);
    }
    let part = |(part, groups): (&Option<NodeId>, &Vec<&FoldGroup>)| {
        let clipped = clip::sample_bytes(work, |node| work.graph.expert_of(node) == *part);
        gathered_memory(work, groups).map(|bytes| bytes.saturating_add(clipped))
    };
    let largest = parts.iter().map(part).fold([0; 2], |a, b| [a[0].max(b[0]), a[1].max(b[1])]);
    largest.map(|bytes| bytes.saturating_add(clip::bound_bytes(work)))
}

/// The memory for groups whose inputs are gathered in one pass, and which then race one after the other.
fn gathered_memory(work: &Workload<'_>, groups: &[&FoldGroup]) -> [u64; 2] {
    let kept: Vec<Kept> = groups.iter().map(|g| kept(work, g)).collect();
    let bytes = groups.iter().zip(&kept).map(|(g, kept)| {
        let row = match work.residence {
            Residence::Memory => sample_value_bytes(work, g) * work.shape(g.consumers[0])[1] as u64,
            Residence::Files { .. } => 0,
        };
        kept.gram_bytes.max(kept.tokens.saturating_mul(row + PLACE_BYTES))
    });
    let all = bytes.fold(0, u64::saturating_add);
    let one = groups.iter().zip(&kept).map(|(g, kept)| race_memory(work, g, *kept)).max().unwrap_or(0);
    [all.saturating_add(one), all]
}

fn kept(work: &Workload<'_>, group: &FoldGroup) -> Kept {
    let shape = work.shape(group.consumers[0]).map(|s| s as u64);
    Kept::of(work.graph, group, work.sampling, shape, SCALE_CANDIDATES)
}

/// Whether candidates of a group are compared by differences in bfloat16 on this machine.
fn compares_differences(work: &Workload<'_>, group: &FoldGroup) -> bool {
    let weights: u64 = group.consumers.iter().map(|&c| work.weights(c) as u64).sum();
    difference::kernel_for(work.graph, group, weights, work.tokens() as usize).is_some()
}

fn sample_value_bytes(work: &Workload<'_>, group: &FoldGroup) -> u64 {
    if compares_differences(work, group) { 2 } else { 4 }
}

/// The memory of the largest round of a race, including the weights of a candidate.
fn race_memory(work: &Workload<'_>, group: &FoldGroup, kept: Kept) -> u64 {
    let differences = compares_differences(work, group);
    if work.experts_apart && awq_by_expert::reads_experts_apart(work.graph, group) {
        return race_by_expert_memory(work, group, kept);
    }
    let weights: u64 = group.consumers.iter().map(|&c| work.weights(c) as u64).sum();
    let candidate = match (differences, group.consumers.len()) {
        (true, 1) => 2 * weights,
        (true, _) => 2 * weights + 2 * work.weights(group.inspected) as u64,
        (false, _) => 4 * weights,
    };
    let shape = RaceShape {
        k: work.shape(group.consumers[0])[1],
        outputs: outputs_per_token(work, group),
        read: work.shape(group.inspected)[1],
        inspected: work.graph.width(group.inspected),
    };
    // The last round takes as many tokens as all rounds before it.
    let token = shape.token_bytes(group.consumers.len() == 1, differences);
    let round = kept.tokens.div_ceil(2).saturating_mul(token);
    // If no token depends on another, a piece need not hold whole windows.
    let length = if mixes_tokens(work.graph, group) { work.sampling.length } else { 1 };
    let piece = race::piece(differences, length) as u64;
    let round = match work.residence {
        Residence::Memory => round,
        // A round processes at least one piece at a time.
        Residence::Files { round_bytes, .. } => round.min(round_bytes.max(piece.saturating_mul(token))),
    };
    let values = 4 * (shape.outputs + 2 * shape.read + shape.inspected) as u64;
    // Rounds are short if the batch is in files, and the allocator may still keep most of the previous candidate. It
    // takes longer to compute a large candidate than the allocator keeps the memory of the one before.
    let freed = match work.residence {
        Residence::Memory => 0,
        Residence::Files { .. } => (candidate / 4 * 3).min(FREED_BYTES),
    };
    candidate.saturating_add(freed).saturating_add(round).saturating_add(piece.saturating_mul(values))
}

/// The number of values that the consumers compute for a token, on average if experts are among several consumers: an
/// expert has values only for the tokens that are routed to it, and also copies of their inputs and its own output.
fn outputs_per_token(work: &Workload<'_>, group: &FoldGroup) -> usize {
    let apart = awq_by_expert::reads_experts_apart(work.graph, group);
    let values = |&consumer: &NodeId| {
        let [n, k] = work.shape(consumer);
        match work.graph.expert_of(consumer).filter(|_| apart) {
            Some(_) => {
                work.graph.share_of_tokens(consumer) * (n + k + work.graph.width(group.inspected)) as f64
            }
            None => n as f64,
        }
    };
    group.consumers.iter().map(values).sum::<f64>().ceil() as usize
}

/// The memory of the largest round of a race in which experts run one after the other.
fn race_by_expert_memory(work: &Workload<'_>, group: &FoldGroup, kept: Kept) -> u64 {
    let mut weights: BTreeMap<Option<NodeId>, [u64; 2]> = BTreeMap::new();
    for &consumer in &group.consumers {
        let [own, outputs] = weights.entry(work.graph.expert_of(consumer)).or_default();
        *own += work.weights(consumer) as u64;
        *outputs += work.shape(consumer)[0] as u64;
    }
    let [own, outputs] = weights.into_values().fold([0; 2], |a, b| [a[0].max(b[0]), a[1].max(b[1])]);
    let width = work.graph.width(group.inspected);
    let k = work.shape(group.consumers[0])[1];
    let shape = RaceShape { k, outputs: 0, read: 0, inspected: width };
    let experts = awq_by_expert::order(work.graph).map_or(0, |order| order.experts.len());
    let token = shape.token_bytes(false, false) + by_expert::token_bytes(width, experts);
    let piece = race::piece(false, work.sampling.length) as u64;
    let tokens = kept.tokens.div_ceil(2);
    let tokens = match work.residence {
        Residence::Memory => tokens,
        Residence::Files { round_bytes, .. } => tokens.min(piece.max(round_bytes / token.max(1))),
    };
    let sums = by_expert::SUM_BYTES.min((4 * width * (SCALE_CANDIDATES - 1)) as u64 * tokens);
    let values = 4 * (outputs + 2 * k as u64 + 2 * width as u64);
    tokens
        .saturating_mul(token)
        .saturating_add(4 * own)
        .saturating_add(sums)
        .saturating_add(piece.saturating_mul(values))
}

/// The memory of the reference search for a group, which uses the whole batch.
fn whole_batch_memory(work: &Workload<'_>, group: &FoldGroup) -> u64 {
    let tokens = (work.sampling.samples as u64).saturating_mul(work.sampling.length as u64);
    let [n, k] = work.shape(group.consumers[0]).map(|s| s as u64);
    if group.consumers.len() == 1 {
        return 4 * k * tokens.min(k) + 4 * n * tokens.min(512);
    }
    let width = work.graph.width(group.inspected) as u64;
    let values = (4 * (k + width)).saturating_mul(tokens);
    if work.experts_apart && awq_by_expert::reads_experts_apart(work.graph, group) {
        let experts = awq_by_expert::order(work.graph).map_or(0, |order| order.experts.len());
        let weights = group.consumers.iter().map(|&c| (work.graph.expert_of(c), work.weights(c) as u64));
        // The rows of an expert, a sum that becomes an output, and sums of further candidates.
        let rows =
            (8.0 * k as f64 * tokens as f64 * work.share_of_tokens(group.consumers[0]).min(0.5)) as u64;
        let sums = by_expert::SUM_BYTES.min((4 * width * SCALE_CANDIDATES as u64).saturating_mul(tokens));
        let token = by_expert::token_bytes(width as usize, experts) + 4 * width;
        let more = token.saturating_mul(tokens).saturating_add(rows).saturating_add(sums);
        return values.saturating_add(more).saturating_add(4 * largest_part(weights));
    }
    let rounded: u64 = group.consumers.iter().map(|&c| 4 * work.weights(c) as u64).sum();
    values.saturating_add(rounded)
}

/// The largest total of an expert, or of everything outside the experts.
fn largest_part(sizes: impl Iterator<Item = (Option<NodeId>, u64)>) -> u64 {
    let mut parts: BTreeMap<Option<NodeId>, u64> = BTreeMap::new();
    for (expert, size) in sizes {
        *parts.entry(expert).or_default() += size;
    }
    parts.into_values().max().unwrap_or(0)
}

fn scale_work(work: &Workload<'_>) -> SearchWork {
    let candidates = SCALE_CANDIDATES as f64;
    let mut all = SearchWork::default();
    for group in groups(work.graph) {
        let own: f64 = group.consumers.iter().map(|&c| work.weights(c)).sum();
        all.rounded += candidates * own;
        let [n, k] = work.shape(group.consumers[0]).map(|s| s as f64);
        let tokens = work.tokens() * work.share_of_tokens(group.input);
        if group.consumers.len() == 1 && is_gram(work, &group) {
            all.operations += tokens * k * k + candidates * 2.0 * n * k * k;
            continue;
        }
        let share = match search_of(work.settings) {
            Search::Fast => RACE_FRACTION,
            Search::Reference => 1.0,
        };
        let watched = if group.consumers.len() == 1 { 0.0 } else { work.weights(group.inspected) };
        let attention = if mixes_tokens(work.graph, &group) { work.mixing_operations() } else { 0.0 };
        let own: f64 = group.consumers.iter().map(|&c| work.weights(c) * work.graph.share_of_tokens(c)).sum();
        all.operations += candidates * share * (2.0 * work.tokens() * (own + watched) + attention);
    }
    all
}

/// Whether candidates for a group are judged by its input's Gram matrix.
fn is_gram(work: &Workload<'_>, group: &FoldGroup) -> bool {
    match search_of(work.settings) {
        Search::Fast => kept(work, group).is_gram(),
        Search::Reference => work.tokens() > work.shape(group.consumers[0])[1] as f64,
    }
}

impl Transform for Awq {
    fn name(&self) -> &'static str {
        "awq"
    }

    fn summary(&self) -> &'static str {
        "activation-aware scales and clipping, searched on a calibration text"
    }

    fn folded_nodes(&self, graph: &BlockGraph, _settings: &TransformSettings) -> Vec<NodeId> {
        groups(graph).into_iter().flat_map(|g| std::iter::once(g.producer).chain(g.consumers)).collect()
    }

    fn needs(&self, _settings: &TransformSettings) -> Needs {
        Needs { ranges: false, states: true }
    }

    fn keys(&self) -> Vec<StepKey> {
        let search =
            "How candidates are compared: on growing fractions of the batch, or each on the whole batch.";
        let help = "AWQ: compare candidate scales on increasing parts of the batch (fast) or on all of it (reference) \
                    [default: fast]";
        vec![StepKey::of_names("search", search, &["fast", "reference"]).with_setting("search", help)]
    }

    fn set(&self, key: &str, value: &Value, settings: &mut TransformSettings) -> Result<()> {
        if key != "search" {
            return Err(no_such_key(self.name(), key));
        }
        settings.steps.set(AwqSettings { search: parse_text(key, value)? });
        Ok(())
    }

    fn described(&self, settings: &TransformSettings) -> Map<String, Value> {
        [("search".to_owned(), json!(search_of(settings)))].into_iter().collect()
    }

    /// The kind of search is part of the batch's description.
    fn fingerprint(&self, _settings: &TransformSettings) -> Value {
        Value::Null
    }

    fn search_mode(&self, settings: &TransformSettings) -> Option<Search> {
        Some(search_of(settings))
    }

    fn narrows_ranges(&self) -> bool {
        true
    }

    /// Block types search for their scales, so ranges are not clipped.
    fn supports_blocks(&self) -> bool {
        true
    }

    fn takes_experts_apart(&self, graph: &BlockGraph, _settings: &TransformSettings) -> bool {
        awq_by_expert::order(graph).is_some()
    }

    fn memory(&self, work: &Workload<'_>) -> u64 {
        memory(work)[0]
    }

    fn gathering_memory(&self, work: &Workload<'_>) -> u64 {
        memory(work)[1]
    }

    fn work(&self, work: &Workload<'_>) -> SearchWork {
        let mut all = scale_work(work);
        let clips = clip::work(work);
        all.operations += clips.operations;
        all.rounded += clips.rounded;
        all
    }

    fn search(
        &self,
        tasks: &[BlockTask<'_>],
        hidden: Option<&mut HiddenStates>,
        advance: bool,
    ) -> Result<Vec<Rewrite>> {
        let (Some(first), Some(hidden)) = (tasks.first(), hidden) else { return Ok(Vec::new()) };
        let groups: Vec<FoldGroup> = groups(first.block.graph())
            .into_iter()
            .filter(|g| g.consumers.iter().any(|c| first.is_rounded(*c)))
            .collect();
        let wanted = Wanted { groups: &groups, candidates: SCALE_CANDIDATES, clip_tokens: clip::TOKENS };
        // The reference search uses the whole batch again.
        let searches_all = search_of(first.settings) == Search::Reference;
        let order = Some(first.block).filter(|_| first.experts_apart);
        if let Some(order) = order.and_then(|block| awq_by_expert::order(block.graph())) {
            return awq_by_expert::search(tasks, &groups, hidden, advance, &order);
        }
        let inputs = InputStatistics::gather(first, &wanted, hidden, advance && !searches_all)?;
        let searched = tasks.iter().map(|task| scaled(task, &groups, &inputs, hidden));
        let chosen = searched.collect::<Result<Vec<_>>>()?;
        if searches_all && advance {
            hidden.advance(first.block, first.cancel)?;
        }
        let tasks = tasks.iter().zip(chosen);
        tasks.map(|(task, rewrite)| clip::clipped(task, &inputs, rewrite)).collect()
    }
}

#[derive(Clone, Copy)]
pub(super) enum Searched<'a> {
    /// A block in memory, and the states that enter it, for the reference search.
    Whole(&'a HiddenStates),
    /// A block whose experts are read one at a time, and the states that enter it, for the reference search.
    ByExpert(&'a ExpertOrder, Option<&'a HiddenStates>),
}

/// Searches the scales of all groups and folds them. `hidden` are the states that enter the block, for the reference
/// search.
fn scaled(
    task: &BlockTask<'_>,
    groups: &[FoldGroup],
    inputs: &InputStatistics,
    hidden: &HiddenStates,
) -> Result<Rewrite> {
    // Every group is searched on the unscaled block, then all scales are folded.
    let mut rewrite = Rewrite { tokens: inputs.tokens.clone(), ..Rewrite::default() };
    let mut chosen = Vec::with_capacity(groups.len());
    for group in groups {
        let (record, scales) = choose(task, group, inputs, Searched::Whole(hidden))?;
        chosen.push(scales);
        rewrite.folds.push(record);
    }
    for (group, scales) in groups.iter().zip(chosen) {
        if let Some(scales) = scales {
            fold(&mut rewrite, task, group, &scales)?;
        }
    }
    Ok(rewrite)
}

/// What a search has found, as it is kept for a resumed run.
#[derive(Serialize, Deserialize)]
struct Found {
    record: FoldRecord,
    scales: Option<String>,
}

/// The key of what was found for a group.
fn about(task: &BlockTask<'_>, group: &FoldGroup) -> String {
    format!("scales of {} for {}", task.module(group.producer), task.module(group.consumers[0]))
}

/// What an interrupted run has found for a group.
pub(super) fn found(task: &BlockTask<'_>, group: &FoldGroup) -> Option<(FoldRecord, Option<Vec<f32>>)> {
    let Found { record, scales } = task.recall(&about(task, group))?;
    let Some(scales) = scales else { return Some((record, None)) };
    let k = task.block.linear(group.consumers[0]).weight().shape()[1];
    let valid = |scales: &Vec<f32>| scales.len() == k && scales.iter().all(|s| s.is_finite() && *s > 0.0);
    from_text(&scales).filter(valid).map(|scales| (record, Some(scales)))
}

/// The scales are `None` if no scaling is best.
pub(super) fn choose(
    task: &BlockTask<'_>,
    group: &FoldGroup,
    inputs: &InputStatistics,
    searched: Searched<'_>,
) -> Result<(FoldRecord, Option<Vec<f32>>)> {
    if let Some(found) = found(task, group) {
        return Ok(found);
    }
    let (record, scales) = search(task, group, inputs, searched)?;
    let found = Found { record, scales: scales.as_deref().map(to_text) };
    task.remember(&about(task, group), &found)?;
    Ok((found.record, scales))
}

fn search(
    task: &BlockTask<'_>,
    group: &FoldGroup,
    inputs: &InputStatistics,
    searched: Searched<'_>,
) -> Result<(FoldRecord, Option<Vec<f32>>)> {
    // The number of all tokens, or of those routed to the consumers' expert.
    let tokens = inputs.tokens.get(&group.consumers[0]).map_or(0, |&tokens| tokens as usize);
    let means = inputs.means[&group.input].means();
    let candidates = candidates(task, group, &means)?;
    let order = match searched {
        Searched::ByExpert(order, _) if awq_by_expert::reads_experts_apart(task.block.graph(), group) => {
            Some(order)
        }
        _ => None,
    };
    let choice = if tokens == 0 {
        Ok(Choice::unsearched())
    } else if let Some(sample) = inputs.samples.get(&group.input) {
        race::choose(task, group, sample, &candidates, order)
    } else {
        let objective = match (inputs.grams.get(&group.input), searched) {
            (Some(gram), _) => {
                let (node, input) = (group.inspected, gram.clone());
                Objective::Linear { node, input, tokens }
            }
            (None, Searched::Whole(hidden) | Searched::ByExpert(_, Some(hidden))) => {
                Objective::new(task, hidden, group, tokens, order)?
            }
            (None, Searched::ByExpert(_, None)) => {
                return Err(Error::Internal("the reference search has no batch".into()));
            }
        };
        choose_exactly(&candidates, tokens, objective.at_once(), |scales| objective.errors(task, scales))
    };
    chosen_scales(task, group, &means, candidates, choice)
}

/// The candidates; the first is no scaling.
fn candidates(task: &BlockTask<'_>, group: &FoldGroup, means: &[f32]) -> Result<Vec<Candidate>> {
    if let Some(channel) = means.iter().position(|m| !m.is_finite()) {
        return Err(Error::Calibration {
            tensor: task.module(group.producer),
            what: format!("the mean magnitude of output channel {channel}"),
        });
    }
    let relative = relative_weights(task, group)?;
    let points = (0..GRID).map(|point| {
        let ratio = point as f32 / GRID as f32;
        Candidate { ratio: Some(ratio), scales: scales(means, &relative, ratio) }
    });
    Ok(std::iter::once(Candidate { ratio: None, scales: vec![1.0; means.len()] }).chain(points).collect())
}

/// `None` if no scaling is best.
fn chosen_scales(
    task: &BlockTask<'_>,
    group: &FoldGroup,
    means: &[f32],
    mut candidates: Vec<Candidate>,
    choice: Result<Choice>,
) -> Result<(FoldRecord, Option<Vec<f32>>)> {
    let producer = task.module(group.producer);
    let choice = choice.map_err(|e| match e {
        Error::Numeric { tensor, reason } if tensor.is_empty() => {
            Error::Numeric { tensor: producer.clone(), reason }
        }
        other => other,
    })?;
    let Candidate { ratio, scales } = candidates.swap_remove(choice.best);
    let Choice { error_before, error_after, tokens, tried, .. } = choice;
    tracing::debug!(producer, ratio, error_before, error_after, tokens, "scales chosen");
    let scales = ratio.map(|_| scales);
    let record = FoldRecord {
        outlier: ChannelOutlier::new(means, scales.as_deref()),
        producer,
        consumers: group.consumers.iter().map(|&c| task.module(c)).collect(),
        unlisted_consumers: 0,
        // If attention and MLP read the same norm, the search inspects the output of the whole block, whose prefix ends
        // with a dot.
        inspected: task.module(group.inspected).trim_end_matches('.').to_owned(),
        ratio,
        error_before,
        error_after,
        tokens,
        tried,
    };
    Ok((record, scales))
}

/// The scales for exponent `ratio`, centered geometrically.
fn scales(means: &[f32], relative: &[f32], ratio: f32) -> Vec<f32> {
    let mut scales: Vec<f32> = means
        .iter()
        .zip(relative)
        .map(|(&a, &w)| (a.powf(ratio) / (w.powf(1.0 - ratio) + 1e-4)).max(1e-4))
        .collect();
    let max = scales.iter().copied().fold(f32::MIN_POSITIVE, f32::max);
    let min = scales.iter().copied().fold(f32::MAX, f32::min);
    let centre = (max * min).sqrt();
    for s in &mut scales {
        *s /= centre;
        if !s.is_normal() {
            *s = 1.0;
        }
    }
    scales
}

/// For every column, the mean of `|w| / max |w| in its group` over the rows of all quantized consumers.
fn relative_weights(task: &BlockTask<'_>, group: &FoldGroup) -> Result<Vec<f32>> {
    const ROWS: usize = 256;
    let mut sums: Vec<f64> = Vec::new();
    let mut rows = 0;
    for &node in &group.consumers {
        let weight = task.block.linear(node).weight();
        let Some(group_size) = task.group_size(node, weight.shape()[1]) else { continue };
        let weight = weight.read()?;
        let [n, k] = weight.shape();
        sums.resize(k, 0.0);
        rows += n;
        let mut scratch = Vec::new();
        for first in (0..n).step_by(ROWS) {
            let part = weight.rows(first..(first + ROWS).min(n), &mut scratch)?;
            for (i, values) in part.chunks_exact(group_size).enumerate() {
                let max = values.iter().fold(0.0_f32, |m, w| m.max(w.abs())) + 1e-6;
                let at = i % (k / group_size) * group_size;
                for (sum, w) in sums[at..].iter_mut().zip(values) {
                    *sum += f64::from(w.abs() / max);
                }
            }
        }
        drop(weight);
        if awq_by_expert::reads_experts_apart(task.block.graph(), group) {
            task.done_with(node);
        }
    }
    Ok(sums.into_iter().map(|s| (s / rows.max(1) as f64) as f32).collect())
}
