//! Statistics of a block's inputs for the searches of scales and clip bounds, gathered in one pass of the float block.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::objective::Input;
use super::sample::{SearchSample, mixes_tokens};
use super::{BlockTask, Search, difference};
use crate::Result;
use crate::calibrate::{
    AbsMean, BatchLayout, GramSum, HiddenStates, Mask, Packing, SampledRows, Sampling, Spill, StatisticsPass,
};
use crate::model::{BlockGraph, FoldGroup, NodeId};

pub(super) struct Wanted<'a> {
    /// The groups whose scales are searched.
    pub(super) groups: &'a [FoldGroup],
    /// The number of scales tried for each group.
    pub(super) candidates: usize,
    /// The approximate number of tokens for the inputs of clipped linears.
    pub(super) clip_tokens: usize,
}

#[derive(Default)]
pub(super) struct InputStatistics {
    /// Mean absolute values of the inputs of groups, by the node that the consumers read.
    pub(super) means: BTreeMap<NodeId, AbsMean>,
    /// Samples of rows for the clip search, by the node that linears read.
    pub(super) sampled: BTreeMap<NodeId, SampledRows>,
    /// Samples for races, by the node that the consumers read.
    pub(super) samples: BTreeMap<NodeId, SearchSample>,
    pub(super) grams: BTreeMap<NodeId, Arc<Input>>,
    /// The number of counted tokens that went through each linear.
    pub(super) tokens: BTreeMap<NodeId, u64>,
}

impl InputStatistics {
    /// Gathers the statistics, and replaces the states with the output of the block if `advance` is set.
    pub(super) fn gather(
        task: &BlockTask<'_>,
        wanted: &Wanted<'_>,
        states: &mut HiddenStates,
        advance: bool,
    ) -> Result<Self> {
        let layout = states.layout().clone();
        let mut gathering = Gathering::new(task, wanted, states, &|_| true)?;
        let mut pass = StatisticsPass::new(task.block, &layout, task.cancel);
        gathering.add_to(&mut pass)?;
        let tokens = pass.run(states, advance)?;
        Ok(gathering.finish(tokens))
    }
}

pub(super) struct Gathering {
    means: BTreeMap<NodeId, AbsMean>,
    sampled: BTreeMap<NodeId, SampledRows>,
    samples: BTreeMap<NodeId, SearchSample>,
    grams: BTreeMap<NodeId, GramSum>,
}

impl Gathering {
    /// Prepares the wanted statistics of groups, and of the inputs of those linears for which `is_part` returns true.
    pub(super) fn new(
        task: &BlockTask<'_>,
        wanted: &Wanted<'_>,
        states: &HiddenStates,
        is_part: &dyn Fn(NodeId) -> bool,
    ) -> Result<Self> {
        let layout = states.layout();
        let (means, sampled) = (means(task, wanted), sampled(task, wanted, layout, is_part));
        let (samples, grams) = match super::awq::search_of(task.settings) {
            Search::Fast => kept(task, wanted, layout, states.spill())?,
            Search::Reference => (BTreeMap::new(), BTreeMap::new()),
        };
        Ok(Self { means, sampled, samples, grams })
    }

    pub(super) fn add_to<'a>(&'a mut self, pass: &mut StatisticsPass<'a>) -> Result<()> {
        self.means.iter_mut().try_for_each(|(value, mean)| pass.gather(*value, mean))?;
        self.sampled.iter_mut().try_for_each(|(value, rows)| pass.gather(*value, rows))?;
        self.samples.iter_mut().try_for_each(|(value, sample)| pass.gather(*value, sample))?;
        self.grams.iter_mut().try_for_each(|(value, sum)| pass.gather(*value, sum))
    }

    /// Returns the statistics after the pass, which counted these tokens.
    pub(super) fn finish(self, tokens: BTreeMap<NodeId, u64>) -> InputStatistics {
        let Self { means, sampled, samples, grams } = self;
        let whole = |(value, sum): (NodeId, GramSum)| {
            let channels = sum.channels();
            (value, Arc::new(Input::gram(sum.into_lower(), channels)))
        };
        let grams = grams.into_iter().map(whole).collect();
        InputStatistics { means, sampled, samples, grams, tokens }
    }
}

/// `[n, k]` of a linear.
fn shape(task: &BlockTask<'_>, node: NodeId) -> [usize; 2] {
    task.block.linear(node).weight().shape()
}

fn means(task: &BlockTask<'_>, wanted: &Wanted<'_>) -> BTreeMap<NodeId, AbsMean> {
    wanted.groups.iter().map(|g| (g.input, AbsMean::new(shape(task, g.consumers[0])[1]))).collect()
}

fn sampled(
    task: &BlockTask<'_>,
    wanted: &Wanted<'_>,
    layout: &BatchLayout,
    is_part: &dyn Fn(NodeId) -> bool,
) -> BTreeMap<NodeId, SampledRows> {
    let graph = task.block.graph();
    let clipped = task.grids.keys().filter(|&&node| is_part(node) && !graph.feeds_queries_or_keys(node));
    let rows = |&node: &NodeId| {
        let input = graph.nodes()[node].inputs[0];
        // If a value has rows for only a fraction of the tokens, a larger part of its rows is kept.
        let tokens = (wanted.clip_tokens as f64 / task.block.share_of_tokens(input)) as usize;
        (input, SampledRows::new(shape(task, node)[1], layout.counted(), tokens))
    };
    clipped.map(rows).collect()
}

fn kept(
    task: &BlockTask<'_>,
    wanted: &Wanted<'_>,
    layout: &BatchLayout,
    spill: Option<&Spill>,
) -> Result<(BTreeMap<NodeId, SearchSample>, BTreeMap<NodeId, GramSum>)> {
    let graph = task.block.graph();
    let tokens = layout.counted();
    let (mut samples, mut grams) = (BTreeMap::new(), BTreeMap::new());
    for group in wanted.groups {
        let k = shape(task, group.consumers[0])[1];
        let share = task.block.share_of_tokens(group.input);
        let work =
            SearchSize { tokens: tokens as f64 * share, n: graph.width(group.inspected) as f64, k: k as f64 };
        if group.consumers.len() == 1 && work.gram_is_cheaper(wanted.candidates) {
            grams.insert(group.input, GramSum::new(k));
        } else {
            let rounded = difference::kernel(task, group, tokens).is_some();
            let mixes = mixes_tokens(graph, group);
            let sample = SearchSample::new(layout.clone(), k, mixes, rounded, share, spill)?;
            samples.insert(group.input, sample);
        }
    }
    Ok((samples, grams))
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Kept {
    /// The size in bytes of the Gram matrix, if candidates are judged by it.
    pub(super) gram_bytes: u64,
    /// The tokens of the sample, if candidates race.
    pub(super) tokens: u64,
}

impl Kept {
    /// The data kept for a group whose first linear has shape `[n, k]`, and for which `candidates` scales are tried. If
    /// the amount depends on how many tokens are routed to an expert, each field is the maximum.
    pub(super) fn of(
        graph: &BlockGraph,
        group: &FoldGroup,
        batch: Sampling,
        [n, k]: [u64; 2],
        candidates: usize,
    ) -> Self {
        let shares = batch.experts.shares(graph.share_of_tokens(group.input));
        let of_share = |share| Self::of_share(graph, group, batch, [n, k], (candidates, share));
        shares.map(of_share).into_iter().fold(Self::default(), |a, b| Self {
            gram_bytes: a.gram_bytes.max(b.gram_bytes),
            tokens: a.tokens.max(b.tokens),
        })
    }

    /// The data kept if this fraction of all tokens has a row in the input.
    fn of_share(
        graph: &BlockGraph,
        group: &FoldGroup,
        batch: Sampling,
        [n, k]: [u64; 2],
        (candidates, share): (usize, f64),
    ) -> Self {
        let all = (batch.samples as u64).saturating_mul(batch.length as u64);
        let max = SearchSample::max_tokens(batch, mixes_tokens(graph, group));
        let tokens = max.min((2.0 * all as f64 * share) as u64);
        let work = SearchSize { tokens: all as f64 * share, n: n as f64, k: k as f64 };
        if group.consumers.len() > 1 || !work.gram_is_cheaper(candidates) {
            return Self { gram_bytes: 0, tokens };
        }
        // The number of counted tokens is not known yet. If it turns out to be small, candidates will race after all.
        let all_count = batch.mask == Mask::None && batch.packing != Packing::Documents;
        Self { gram_bytes: 4 * k * k, tokens: if all_count { 0 } else { tokens } }
    }

    /// Whether candidates are certain to be judged by a Gram matrix.
    pub(super) fn is_gram(self) -> bool {
        self.gram_bytes > 0 && self.tokens == 0
    }
}

struct SearchSize {
    tokens: f64,
    n: f64,
    k: f64,
}

impl SearchSize {
    /// Whether judging candidates by the input's Gram matrix takes fewer operations than a race. Both are estimates:
    /// the matrix costs `t k²`, and then each candidate `2 n k²`; a race runs candidates on a fraction of the tokens,
    /// at `2 n k` each.
    fn gram_is_cheaper(&self, candidates: usize) -> bool {
        let Self { tokens: t, n, k } = *self;
        let candidates = candidates as f64;
        t * k * k + candidates * 2.0 * n * k * k <= candidates * t / 8.0 * 2.0 * n * k
    }
}
