//! Statistics of a block's values over the batch, and the single pass that feeds them.
//!
//! Sums run over fixed pieces in a fixed order, so they do not depend on the number of threads.

use std::collections::BTreeMap;

use candle_core::{D, Tensor};
use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;

use super::{BatchLayout, ChannelRanges, HiddenStates, InputRows};
use crate::model::{
    AttentionShape, Block, BlockGraph, NodeId, Tap, TokenRows, causal_attention, with_values,
};
use crate::quantize::gptq::Hessian;
use crate::{CancelToken, Error, Result};

/// A statistic of one value.
pub trait Statistic {
    /// Takes some rows of the value. The rows arrive in ascending order of tokens, in pieces of any size. A value
    /// inside an expert has rows only for some tokens of the batch.
    ///
    /// # Errors
    /// Any error stops the pass.
    fn take(&mut self, rows: &InputRows<'_>) -> Result<()>;
}

/// A statistic of the queries and keys of one attention layer.
pub trait AttentionStatistic {
    /// Takes queries and keys of the same tokens, after the rotary position embedding, if there is one. Rows arrive as
    /// in [`Statistic::take`].
    ///
    /// # Errors
    /// Any error stops the pass.
    fn take(&mut self, queries: &InputRows<'_>, keys: &InputRows<'_>) -> Result<()>;
}

/// One pass of a batch through a block, and the statistics that it feeds.
///
/// A value may be the input of several linears; statistics see it once, when the first of them reads it.
pub struct StatisticsPass<'a> {
    block: &'a Block,
    layout: BatchLayout,
    cancel: &'a CancelToken,
    /// Statistics by the first linear that reads the value.
    values: BTreeMap<NodeId, Vec<&'a mut dyn Statistic>>,
    attentions: BTreeMap<NodeId, &'a mut dyn AttentionStatistic>,
    attended: BTreeMap<NodeId, Attended<'a>>,
    tokens: BTreeMap<NodeId, u64>,
}

/// Statistics of what the heads of an attention layer would return for other values.
struct Attended<'a> {
    shape: AttentionShape,
    /// The first linear that reads these values.
    reader: NodeId,
    /// The values of the current piece of the batch.
    values: Option<Tensor>,
    heads: Vec<&'a mut dyn Statistic>,
}

impl Attended<'_> {
    /// One head at a time, because its output may be as wide as all heads of the layer.
    fn take(&mut self, [q, k]: [&Tensor; 2], tokens: TokenRows<'_>, layout: &BatchLayout) -> Result<()> {
        let Some(values) = self.values.take().filter(|_| tokens.count() > 0) else { return Ok(()) };
        let AttentionShape { repeat, head_dim, .. } = self.shape;
        let width = values.dim(D::Minus1)?;
        let one = AttentionShape { kv_heads: 1, repeat: 1, value_dim: width, ..self.shape };
        let segments = layout.segments(tokens.token(0)..tokens.end());
        for (head, statistic) in self.heads.iter_mut().enumerate() {
            let of = |x: &Tensor, head: usize| x.narrow(D::Minus1, head * head_dim, head_dim);
            let (q, k) = (of(q, head)?, of(k, head / repeat)?);
            let out = causal_attention(&q, &k, &values, one, None, segments)?;
            with_values(&out, |out| statistic.take(&InputRows::new(out, width, tokens, layout)?))?;
        }
        Ok(())
    }
}

impl<'a> StatisticsPass<'a> {
    /// A pass of a batch with this layout through a block, with no statistics yet.
    pub fn new(block: &'a Block, layout: &BatchLayout, cancel: &'a CancelToken) -> Self {
        let (values, attentions, tokens) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let attended = BTreeMap::new();
        Self { block, layout: layout.clone(), cancel, values, attentions, attended, tokens }
    }

    /// Adds a statistic of a value that linears read.
    ///
    /// # Errors
    /// [`Error::Internal`] when no linear reads it, as the statistic would then receive no rows.
    pub fn gather(&mut self, value: NodeId, statistic: &'a mut dyn Statistic) -> Result<()> {
        let reader = first_reader(self.block.graph(), value)
            .ok_or_else(|| Error::Internal(format!("no linear reads node {value}")))?;
        self.values.entry(reader).or_default().push(statistic);
        Ok(())
    }

    /// Sets the statistic of an attention layer's queries and keys, and replaces any earlier one.
    pub fn gather_attention(&mut self, attention: NodeId, statistic: &'a mut dyn AttentionStatistic) {
        self.attentions.insert(attention, statistic);
    }

    /// Adds one statistic per query head of an attention layer: of what the head would return if `value`, which a linear
    /// reads before, were its values.
    ///
    /// # Errors
    /// [`Error::Internal`] when no linear reads the value, or the layer is not a plain attention with as many heads.
    pub fn gather_attended(
        &mut self,
        attention: NodeId,
        value: NodeId,
        heads: Vec<&'a mut dyn Statistic>,
    ) -> Result<()> {
        let graph = self.block.graph();
        let shape =
            graph.nodes()[attention].op.cached().filter(|shape| shape.sinks.is_none() && !shape.alibi);
        let shape =
            shape.ok_or_else(|| Error::Internal(format!("node {attention} is not a plain attention")))?;
        let reader = first_reader(graph, value).filter(|reader| *reader < attention);
        let reader = reader.filter(|_| heads.len() == shape.heads());
        let reader = reader.ok_or_else(|| Error::Internal(format!("node {value} cannot be attended to")))?;
        self.attended.insert(attention, Attended { shape, reader, values: None, heads });
        Ok(())
    }

    pub(super) fn block(&self) -> &'a Block {
        self.block
    }

    pub(super) fn cancel(&self) -> &'a CancelToken {
        self.cancel
    }

    /// Returns how many counted tokens went through each linear.
    pub(crate) fn into_tokens(self) -> BTreeMap<NodeId, u64> {
        self.tokens
    }

    /// Runs the pass, and replaces the states with the output of the block if `advance` is set. Returns how many
    /// counted tokens went through each linear.
    ///
    /// # Errors
    /// When the block or a statistic fails, or the run is cancelled. Some states may then already be replaced.
    pub fn run(mut self, states: &mut HiddenStates, advance: bool) -> Result<BTreeMap<NodeId, u64>> {
        match advance {
            true => states.advance_watched(self.block, self.cancel, &mut self)?,
            false => states.watch(self.block, self.cancel, &mut self)?,
        }
        Ok(self.tokens)
    }

    /// Runs the pass only as far as the statistics of values need it. The states do not change.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub(crate) fn run_gathered(mut self, states: &HiddenStates) -> Result<()> {
        let readers: Vec<NodeId> = self.values.keys().copied().collect();
        states.watch_nodes(self.block, &readers, self.cancel, &mut self)
    }
}

fn first_reader(graph: &BlockGraph, value: NodeId) -> Option<NodeId> {
    graph.linears().map(|(id, ..)| id).find(|&id| graph.nodes()[id].inputs[0] == value)
}

impl Tap for StatisticsPass<'_> {
    fn linear_input(&mut self, linear: NodeId, x: &Tensor, tokens: TokenRows<'_>) -> Result<()> {
        self.cancel.check()?;
        *self.tokens.entry(linear).or_default() += self.layout.count(tokens) as u64;
        for attended in self.attended.values_mut().filter(|attended| attended.reader == linear) {
            attended.values = Some(x.clone());
        }
        let Some(statistics) = self.values.get_mut(&linear).filter(|_| tokens.count() > 0) else {
            return Ok(());
        };
        let channels = x.dim(D::Minus1)?;
        with_values(x, |values| {
            let rows = InputRows::new(values, channels, tokens, &self.layout)?;
            statistics.iter_mut().try_for_each(|statistic| statistic.take(&rows))
        })
    }

    fn attention_input(
        &mut self,
        attention: NodeId,
        q: &Tensor,
        k: &Tensor,
        tokens: TokenRows<'_>,
    ) -> Result<()> {
        self.cancel.check()?;
        if let Some(attended) = self.attended.get_mut(&attention) {
            attended.take([q, k], tokens, &self.layout)?;
        }
        let Some(statistic) = self.attentions.get_mut(&attention) else { return Ok(()) };
        let (q_width, k_width) = (q.dim(D::Minus1)?, k.dim(D::Minus1)?);
        with_values(q, |q| {
            with_values(k, |k| {
                let queries = InputRows::new(q, q_width, tokens, &self.layout)?;
                statistic.take(&queries, &InputRows::new(k, k_width, tokens, &self.layout)?)
            })
        })
    }
}

impl Statistic for ChannelRanges {
    fn take(&mut self, rows: &InputRows<'_>) -> Result<()> {
        self.add(rows.counted_values());
        Ok(())
    }
}

impl Statistic for Hessian {
    fn take(&mut self, rows: &InputRows<'_>) -> Result<()> {
        self.add(rows.counted_values());
        Ok(())
    }
}

/// The mean of `|x[:, c]|` over counted tokens for every channel `c`: AWQ's activation statistic.
#[derive(Debug, Clone)]
pub struct AbsMean {
    sums: Vec<f64>,
    tokens: usize,
}

impl AbsMean {
    /// The statistic of an input with `channels` features before any token.
    pub fn new(channels: usize) -> Self {
        Self { sums: vec![0.0; channels], tokens: 0 }
    }

    /// The number of features of the input.
    pub fn channels(&self) -> usize {
        self.sums.len()
    }

    /// The means; 0 if no token was seen.
    pub fn means(&self) -> Vec<f32> {
        self.sums.iter().map(|s| (s / self.tokens.max(1) as f64) as f32).collect()
    }
}

impl Statistic for AbsMean {
    fn take(&mut self, rows: &InputRows<'_>) -> Result<()> {
        for (_, row) in rows.counted() {
            for (sum, v) in self.sums.iter_mut().zip(row) {
                *sum += f64::from(v.abs());
            }
            self.tokens += 1;
        }
        Ok(())
    }
}

/// A sample of the rows of an input: the rows of every `stride`-th counted token of the batch.
#[derive(Debug, Clone)]
pub struct SampledRows {
    channels: usize,
    stride: usize,
    values: Vec<f32>,
}

impl SampledRows {
    /// Creates a sample that keeps at least `wanted` of `tokens` counted tokens, if there are as many. Each has
    /// `channels` features.
    pub fn new(channels: usize, tokens: usize, wanted: usize) -> Self {
        Self { channels, stride: (tokens / wanted.max(1)).max(1), values: Vec::new() }
    }

    /// Divides every channel by a scale, as folding does with the input.
    pub fn divide(&mut self, scales: &[f32]) {
        for row in self.values.chunks_exact_mut(self.channels.max(1)) {
            for (v, s) in row.iter_mut().zip(scales) {
                *v /= s;
            }
        }
    }

    /// The kept rows, `[rows, channels]`.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The number of rows kept.
    pub fn rows(&self) -> usize {
        self.values.len() / self.channels.max(1)
    }
}

impl Statistic for SampledRows {
    fn take(&mut self, rows: &InputRows<'_>) -> Result<()> {
        for (_, row) in rows.counted().filter(|(rank, _)| rank.is_multiple_of(self.stride)) {
            self.values.extend_from_slice(row);
        }
        Ok(())
    }
}

/// The Gram matrix `Σ xᵀx` of an input, accumulated by [`gram`].
#[derive(Debug, Clone)]
pub struct GramSum {
    channels: usize,
    sum: Vec<f32>,
}

impl GramSum {
    /// The matrix of an input with `channels` features before any token.
    pub fn new(channels: usize) -> Self {
        Self { channels, sum: vec![0.0; channels * channels] }
    }

    /// The number of features of the input.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// The sum, `[channels, channels]` row-major. Only the lower triangle is valid; see [`gram`].
    pub fn into_lower(self) -> Vec<f32> {
        self.sum
    }
}

impl Statistic for GramSum {
    fn take(&mut self, rows: &InputRows<'_>) -> Result<()> {
        gram(rows.counted_values(), self.channels, &mut self.sum);
        Ok(())
    }
}

const GRAM_TILE: usize = 128;

/// Adds `xᵀx` of rows `x` `[tokens, channels]` to the lower triangle of `sum` `[channels, channels]`. Values above the
/// diagonal change only in the tiles on it.
///
/// # Panics
/// When the slices do not have these shapes.
pub fn gram(x: &[f32], channels: usize, sum: &mut [f32]) {
    assert_eq!(sum.len(), channels * channels, "sum is not [channels, channels]");
    let tokens = x.len().checked_div(channels).unwrap_or(0);
    let x = MatRef::from_row_major_slice(x, tokens, channels);
    sum.par_chunks_mut((GRAM_TILE * channels).max(1)).enumerate().for_each(|(i, rows)| {
        let first = i * GRAM_TILE;
        let height = rows.len() / channels;
        let tile = MatMut::from_row_major_slice_mut(rows, height, channels);
        let lower = tile.subcols_mut(0, first + height);
        let left = x.subcols(first, height).transpose();
        matmul(lower, Accum::Add, left, x.subcols(0, first + height), 1.0_f32, Par::Seq);
    });
}

#[cfg(test)]
#[path = "statistics_tests.rs"]
mod tests;
