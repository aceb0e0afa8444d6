//! What the search needs of a block's inputs, gathered in one pass of the float block.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::Tensor;

use super::awq::GRID;
use super::objective::Input;
use super::sample::{Sample, mixes_tokens};
use super::{BlockTask, Search, clip, difference};
use crate::Result;
use crate::calibrate::{AbsMean, BatchLayout, BatchTap, Mask, Packing, SampledRows, Sampling, gram};
use crate::model::{BlockGraph, FoldGroup, NodeId, Tap};

/// Statistics of linears' inputs.
pub(super) struct Watch<'a> {
    task: &'a BlockTask<'a>,
    first: usize,
    means: BTreeMap<NodeId, AbsMean>,
    sampled: BTreeMap<NodeId, SampledRows>,
    kept: BTreeMap<NodeId, Kept>,
    tokens: BTreeMap<NodeId, u64>,
    layout: BatchLayout,
    /// The values seen in the current piece: linears share inputs, which count once.
    seen: Vec<NodeId>,
}

/// What a pass has told.
pub(super) struct Watched {
    /// By the node whose value the consumers read.
    pub(super) means: BTreeMap<NodeId, AbsMean>,
    /// For the clip search.
    pub(super) sampled: BTreeMap<NodeId, SampledRows>,
    /// For races.
    pub(super) samples: BTreeMap<NodeId, Sample>,
    /// For what is judged by its input's Gram matrix.
    pub(super) grams: BTreeMap<NodeId, Arc<Input>>,
    /// How many tokens that count went through each linear.
    pub(super) tokens: BTreeMap<NodeId, u64>,
}

/// What the fast search keeps of a group's input.
enum Kept {
    /// The lower triangle of the Gram matrix of all tokens.
    Gram(Vec<f32>),
    /// Tokens for a race.
    Sample(Sample),
}

impl<'a> Watch<'a> {
    pub(super) fn new(task: &'a BlockTask<'a>, groups: &[FoldGroup], layout: BatchLayout) -> Self {
        let tokens = layout.counted();
        let graph = task.block.graph();
        let width = |node: NodeId| task.block.linear(node).weight().shape()[1];
        let means = groups.iter().map(|g| (g.input, AbsMean::new(width(g.consumers[0])))).collect();
        let sampled = task
            .grids
            .keys()
            .filter(|&&node| !graph.feeds_queries_or_keys(node))
            .map(|&node| {
                let rows = SampledRows::new(width(node), tokens, clip::TOKENS);
                (graph.nodes()[node].inputs[0], rows)
            })
            .collect();
        let keep = |group: &FoldGroup| {
            let k = width(group.consumers[0]);
            let n = task.block.linear(group.inspected).weight().shape()[0];
            let kept = if group.consumers.len() == 1 && gram_is_cheaper(tokens as f64, n as f64, k as f64) {
                Kept::Gram(vec![0.0; k * k])
            } else {
                let rounded = difference::kernel(task, group, tokens).is_some();
                Kept::Sample(Sample::new(layout.clone(), k, mixes_tokens(graph, group), rounded))
            };
            (group.input, kept)
        };
        let kept = match task.settings.search {
            Search::Fast => groups.iter().map(keep).collect(),
            Search::Reference => BTreeMap::new(),
        };
        Self { task, first: 0, means, sampled, kept, tokens: BTreeMap::new(), layout, seen: Vec::new() }
    }

    /// Ends the pass.
    pub(super) fn finish(self) -> Watched {
        let (mut samples, mut grams) = (BTreeMap::new(), BTreeMap::new());
        for (node, kept) in self.kept {
            match kept {
                Kept::Sample(sample) => {
                    samples.insert(node, sample);
                }
                Kept::Gram(sum) => {
                    grams.insert(node, Arc::new(Input::gram(sum, self.means[&node].channels())));
                }
            }
        }
        Watched { means: self.means, sampled: self.sampled, samples, grams, tokens: self.tokens }
    }
}

/// Bytes that the fast search keeps of a group's input on such a batch. `[n, k]` is the shape of the
/// group's first linear.
pub(crate) fn kept_bytes(graph: &BlockGraph, group: &FoldGroup, batch: Sampling, [n, k]: [u64; 2]) -> u64 {
    let tokens = (batch.samples as u64).saturating_mul(batch.length as u64);
    let rows = Sample::most_tokens(batch, mixes_tokens(graph, group)).saturating_mul(4 * k);
    let single = group.consumers.len() == 1;
    if single && gram_is_cheaper(tokens as f64, n as f64, k as f64) {
        // How many tokens count is not known yet, and with few of them it is a race after all.
        let all_count = batch.mask == Mask::None && batch.packing != Packing::Documents;
        return if all_count { 4 * k * k } else { (4 * k * k).max(rows) };
    }
    rows
}

/// Whether a single linear `[n, k]` is judged with fewer operations by its input's Gram matrix than
/// by a race. Both are estimates: the matrix costs `t k²`, a candidate then `2 n k²`; a race runs
/// every candidate on an eighth of the tokens, about, at `2 n k` each.
fn gram_is_cheaper(t: f64, n: f64, k: f64) -> bool {
    let candidates = GRID as f64 + 1.0;
    t * k * k + candidates * 2.0 * n * k * k <= candidates * t / 8.0 * 2.0 * n * k
}

impl BatchTap for Watch<'_> {
    fn piece(&mut self, first: usize) {
        self.first = first;
        self.seen.clear();
    }

    fn as_tap(&mut self) -> &mut dyn Tap {
        self
    }
}

impl Tap for Watch<'_> {
    fn linear_input(&mut self, linear: NodeId, x: &Tensor) -> Result<()> {
        self.task.cancel.check()?;
        let k = x.dim(candle_core::D::Minus1)?;
        let rows = x.elem_count().checked_div(k).unwrap_or(0);
        let before = self.layout.counted_before(self.first);
        let counted = self.layout.counted_before(self.first + rows) - before;
        *self.tokens.entry(linear).or_default() += counted as u64;
        let value = self.task.block.graph().nodes()[linear].inputs[0];
        if self.seen.contains(&value) {
            return Ok(());
        }
        self.seen.push(value);
        let (means, sampled) = (self.means.get_mut(&value), self.sampled.get_mut(&value));
        if means.is_none() && sampled.is_none() {
            return Ok(());
        }
        let x = x.flatten_all()?.to_vec1::<f32>()?;
        let counted = self.layout.counted_rows(self.first, k, &x);
        if let Some(means) = means {
            means.add(&counted);
        }
        if let Some(sampled) = sampled {
            sampled.add(before, &counted);
        }
        match self.kept.get_mut(&value) {
            Some(Kept::Gram(sum)) => gram(&counted, k, sum),
            Some(Kept::Sample(sample)) => sample.add(self.first, &x),
            _ => {}
        }
        Ok(())
    }
}
