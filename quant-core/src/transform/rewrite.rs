//! The result of a transform for one block, and its application to weights as they are read.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{AttentionRecord, SmoothRecord, TriedScales};
use crate::calibrate::ChannelRanges;
use crate::model::{Block, BlockGraph, Linear, NodeId, Norm, WeightBody, WeightRows};
use crate::{Error, Result, allocate};

/// The result of a scale search for one fold group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FoldRecord {
    /// The norm or linear that is divided.
    pub producer: String,
    /// The linears that are multiplied; in the report of a tensor, only the [first few](MAX_LISTED_CONSUMERS).
    pub consumers: Vec<String>,
    /// The number of consumers not listed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unlisted_consumers: usize,
    /// The module whose output the search watched.
    pub inspected: String,
    /// The best exponent of the activations, or `None` if no scaling was best.
    pub ratio: Option<f32>,
    /// The mean squared error of the watched output with every consumer rounded and no scaling.
    pub error_before: f64,
    /// The mean squared error with the best scales.
    pub error_after: f64,
    /// The number of tokens on which both errors were measured.
    pub tokens: u64,
    /// All candidates, no scaling first.
    pub tried: Vec<TriedScales>,
    /// The outlier ratio of the consumers' input channels; absent if at least half of the channels are dead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outlier: Option<ChannelOutlier>,
}

/// The maximum number of consumers listed in the report of one tensor. Each consumer carries the record, so full lists
/// would make the report grow with the square of the number of experts.
pub const MAX_LISTED_CONSUMERS: usize = 8;

/// Shortens a list of consumers for a report; returns the number of those left out.
pub(super) fn shorten(consumers: &mut Vec<String>) -> usize {
    let unlisted = consumers.len().saturating_sub(MAX_LISTED_CONSUMERS);
    consumers.truncate(MAX_LISTED_CONSUMERS);
    unlisted
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
pub(super) fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl FoldRecord {
    /// The record as it appears in the report of one tensor.
    pub fn shortened(mut self) -> Self {
        self.unlisted_consumers += shorten(&mut self.consumers);
        self
    }
}

/// The magnitude of the largest channel divided by that of the median channel: mean magnitudes for AWQ, maxima for
/// SmoothQuant.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ChannelOutlier {
    /// With no scaling.
    pub before: f64,
    /// With the best scales.
    pub after: f64,
}

impl ChannelOutlier {
    /// The ratio for channels with these magnitudes, which are divided by `scales` if given.
    pub(super) fn new(means: &[f32], scales: Option<&[f32]>) -> Option<Self> {
        let before = outlier_ratio(means.to_vec())?;
        let after = match scales {
            Some(scales) => outlier_ratio(means.iter().zip(scales).map(|(m, s)| m / s).collect())?,
            None => before,
        };
        Some(Self { before, after })
    }
}

/// Reorders values: new entry `i` is old entry `order[i]`.
pub(super) fn ordered<T: Copy>(values: &[T], order: &[u32]) -> Vec<T> {
    order.iter().map(|&from| values[from as usize]).collect()
}

fn outlier_ratio(mut means: Vec<f32>) -> Option<f64> {
    means.sort_unstable_by(f32::total_cmp);
    let (largest, median) = (f64::from(*means.last()?), f64::from(means[means.len() / 2]));
    (median > 0.0 && largest.is_finite()).then(|| largest / median)
}

/// The result of a clip search for one linear.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ClipRecord {
    /// The linear.
    pub module: String,
    /// The number of groups whose range was narrowed.
    pub clipped_groups: u64,
    /// The number of all groups.
    pub groups: u64,
    /// The mean squared error of the groups' partial outputs without clipping.
    pub error_before: f64,
    /// The mean squared error with the best bounds.
    pub error_after: f64,
}

/// The changes to one block's float weights before they are rounded.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Rewrite {
    /// The number of counted tokens that went through each linear in the search.
    pub tokens: BTreeMap<NodeId, u64>,
    /// New weights of norms, exact in the dtype in which they are stored.
    pub norms: BTreeMap<NodeId, Vec<f32>>,
    /// New biases of norms. Like those of linears, they are rounded to their dtype when they are written.
    pub norm_biases: BTreeMap<NodeId, Vec<f32>>,
    /// The order of the rows and biases of linears: new row `i` is old row `order[i]`. Divisors are in the new order.
    pub row_order: BTreeMap<NodeId, Vec<u32>>,
    /// The order of the columns of linears: new column `i` is old column `order[i]`. Factors are in the new order.
    pub column_order: BTreeMap<NodeId, Vec<u32>>,
    /// Factors for the columns of linears.
    pub columns: BTreeMap<NodeId, Vec<f32>>,
    /// Divisors for the rows and biases of linears.
    pub rows: BTreeMap<NodeId, Vec<f32>>,
    /// Bounds `[rows, groups]` to which weights are clamped, after factors and divisors.
    pub clips: BTreeMap<NodeId, Vec<f32>>,
    /// How the scales were chosen.
    pub folds: Vec<FoldRecord>,
    /// How the bounds were chosen.
    pub clip_records: Vec<ClipRecord>,
    /// The records of SmoothQuant and output smoothing.
    pub smooth: Vec<SmoothRecord>,
    /// The records of SmoothAttention.
    pub attention: Vec<AttentionRecord>,
    /// The records of other steps.
    pub records: Vec<StepRecord>,
}

/// What a step reports about a linear. The report of its weight has it under the name of the step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepRecord {
    /// The linear's [module](super::BlockTask::module).
    pub module: String,
    /// The name of the step; the last record of a step about a linear counts.
    pub step: &'static str,
    /// The result.
    pub value: Value,
}

impl Rewrite {
    /// Whether no weight is clipped and none has its rows or columns reordered.
    pub fn only_rescales(&self) -> bool {
        self.clips.is_empty() && self.row_order.is_empty() && self.column_order.is_empty()
    }

    /// Computes some rows of a linear's rewritten weight, before clipping; `out` is `[rows.len(), k]`.
    ///
    /// # Errors
    /// When the parts of a quantized weight are inconsistent.
    ///
    /// # Panics
    /// When `out` has the wrong length.
    pub fn weight_rows(
        &self,
        node: NodeId,
        weight: &WeightRows<'_>,
        rows: Range<usize>,
        scratch: &mut Vec<f32>,
        out: &mut [f32],
    ) -> Result<()> {
        let k = weight.shape()[1];
        match self.row_order.get(&node) {
            None => weight.copy_rows(rows.clone(), out)?,
            Some(order) => {
                for (row, &from) in out.chunks_exact_mut(k.max(1)).zip(&order[rows.clone()]) {
                    weight.copy_rows(from as usize..from as usize + 1, row)?;
                }
            }
        }
        if let Some(order) = self.column_order.get(&node) {
            for row in out.chunks_exact_mut(k.max(1)) {
                scratch.clear();
                scratch.extend_from_slice(row);
                row.iter_mut().zip(order).for_each(|(w, &from)| *w = scratch[from as usize]);
            }
        }
        if let Some(factors) = self.columns.get(&node) {
            for row in out.chunks_exact_mut(k.max(1)) {
                for (w, f) in row.iter_mut().zip(factors) {
                    *w *= f;
                }
            }
        }
        if let Some(divisors) = self.rows.get(&node) {
            for (row, d) in out.chunks_exact_mut(k.max(1)).zip(&divisors[rows]) {
                for w in row {
                    *w /= d;
                }
            }
        }
        Ok(())
    }

    /// Combines this rewrite with a later one, which was found on the rewritten block.
    ///
    /// # Errors
    /// [`Error::Internal`] when this one clips, because the later one would change the weights to which the bounds
    /// apply.
    pub fn then(mut self, next: Self) -> Result<Self> {
        let Self { tokens, norms, norm_biases, row_order, column_order, columns, rows, .. } = next;
        let Self { clips, folds, clip_records, smooth, attention, records, .. } = next;
        if !self.clips.is_empty() {
            return Err(Error::Internal("weights are rewritten after their ranges were narrowed".into()));
        }
        self.tokens.extend(tokens);
        self.norms.extend(norms);
        self.norm_biases.extend(norm_biases);
        let orders = [
            (&mut self.rows, &mut self.row_order, row_order),
            (&mut self.columns, &mut self.column_order, column_order),
        ];
        for (factors, before, orders) in orders {
            for (node, order) in orders {
                if let Some(factors) = factors.get_mut(&node) {
                    *factors = ordered(factors, &order);
                }
                let order = match before.get(&node) {
                    Some(before) => ordered(before, &order),
                    None => order,
                };
                before.insert(node, order);
            }
        }
        for (factors, next) in [(&mut self.columns, columns), (&mut self.rows, rows)] {
            for (node, by) in next {
                match factors.entry(node) {
                    Entry::Vacant(free) => drop(free.insert(by)),
                    Entry::Occupied(mut old) => old.get_mut().iter_mut().zip(by).for_each(|(f, b)| *f *= b),
                }
            }
        }
        self.clips = clips;
        self.folds.extend(folds);
        self.clip_records.extend(clip_records);
        self.smooth.extend(smooth);
        self.attention.extend(attention);
        self.records.extend(records);
        Ok(self)
    }

    /// Whether a linear's weight changes, apart from clipping.
    pub fn changes(&self, node: NodeId) -> bool {
        self.columns.contains_key(&node) || self.rows.contains_key(&node) || self.reorders(node)
    }

    /// Whether a linear's rows or columns are reordered.
    pub fn reorders(&self, node: NodeId) -> bool {
        self.row_order.contains_key(&node) || self.column_order.contains_key(&node)
    }

    /// Returns the ranges of linears' inputs after the rewrite, given the ranges before it.
    pub fn ranges(
        &self,
        graph: &BlockGraph,
        mut ranges: BTreeMap<NodeId, ChannelRanges>,
    ) -> BTreeMap<NodeId, ChannelRanges> {
        for (&value, range) in &mut ranges {
            // All linears that read a value are rewritten in the same way, so any of them can be used.
            let Some((reader, ..)) = graph.linears().find(|(id, ..)| graph.nodes()[*id].inputs[0] == value)
            else {
                continue;
            };
            if let Some(order) = self.column_order.get(&reader) {
                range.reorder(order);
            }
            if let Some(scales) = self.columns.get(&reader) {
                range.divide(scales);
            }
        }
        ranges
    }

    /// A linear's whole rewritten weight, before clipping, `[n, k]`.
    ///
    /// # Errors
    /// As [`weight_rows`](Self::weight_rows).
    pub fn weight(&self, node: NodeId, weight: &WeightRows<'_>) -> Result<Vec<f32>> {
        let [n, k] = weight.shape();
        let mut out = allocate::zeros(n * k, "a rewritten weight")?;
        self.weight_rows(node, weight, 0..n, &mut Vec::new(), &mut out)?;
        Ok(out)
    }

    /// A linear's rewritten bias.
    pub fn bias(&self, node: NodeId, mut bias: Vec<f32>) -> Vec<f32> {
        if let Some(order) = self.row_order.get(&node) {
            bias = ordered(&bias, order);
        }
        if let Some(divisors) = self.rows.get(&node) {
            for (b, d) in bias.iter_mut().zip(divisors) {
                *b /= d;
            }
        }
        bias
    }

    /// The block with everything except clipping applied, in `f32`: equal to the original in real arithmetic.
    ///
    /// # Errors
    /// When a weight cannot be read.
    pub fn apply(&self, block: &Block) -> Result<Block> {
        self.applied(block, |_| true)
    }

    /// Applies the rewrite to all norms, and to those linears for which `which` returns true.
    pub(super) fn applied(&self, block: &Block, which: impl Fn(NodeId) -> bool) -> Result<Block> {
        let mut rewritten = block.clone();
        let tensor = |values: &[f32]| Tensor::from_slice(values, values.len(), &Device::Cpu);
        for (node, weight) in &self.norms {
            let bias = match self.norm_biases.get(node) {
                Some(bias) => Some(tensor(bias)?),
                None => block.norm_bias(*node).cloned(),
            };
            rewritten.replace_norm(*node, Norm { weight: tensor(weight)?, bias });
        }
        let graph = block.graph().clone();
        for (node, _, shape, _) in graph.linears() {
            if !(self.changes(node) && which(node)) {
                continue;
            }
            let linear = block.linear(node);
            let values = self.weight(node, &linear.weight().read()?)?;
            let bias = self.rewritten_bias(node, linear)?;
            rewritten.replace_linear(node, Linear::new(Arc::new(WeightBody::F32 { shape, values }), bias));
        }
        Ok(rewritten)
    }

    pub(super) fn rewritten_bias(&self, node: NodeId, linear: &Linear) -> Result<Option<Tensor>> {
        let Some(bias) = linear.bias() else { return Ok(None) };
        let values = self.bias(node, bias.to_vec1()?);
        let rows = values.len();
        Ok(Some(Tensor::from_vec(values, rows, &Device::Cpu)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_bring_an_outlier_down() {
        let outlier = ChannelOutlier::new(&[1.0, 8.0, 1.0, 0.5], Some(&[1.0, 4.0, 1.0, 1.0])).unwrap();
        assert_eq!(outlier, ChannelOutlier { before: 8.0, after: 2.0 });
        let same = ChannelOutlier::new(&[1.0, 3.0], None).unwrap();
        assert_eq!((same.before, same.after), (1.0, 1.0));
        assert_eq!(ChannelOutlier::new(&[0.0, 0.0, 3.0], None), None);
        assert_eq!(ChannelOutlier::new(&[], None), None);
    }
    #[test]
    fn the_report_of_a_tensor_lists_few_consumers() {
        let record = |consumers: usize| FoldRecord {
            producer: "norm".into(),
            consumers: (0..consumers).map(|expert| format!("experts.{expert}.gate_proj")).collect(),
            unlisted_consumers: 0,
            inspected: "experts".into(),
            ratio: None,
            error_before: 1.0,
            error_after: 1.0,
            tokens: 1,
            tried: Vec::new(),
            outlier: None,
        };
        let long = record(513).shortened();
        assert_eq!((long.consumers.len(), long.unlisted_consumers), (MAX_LISTED_CONSUMERS, 505));
        assert_eq!(long.clone().shortened(), long);
        let json = serde_json::to_value(record(3).shortened()).unwrap();
        assert_eq!(json["consumers"].as_array().map(Vec::len), Some(3));
        assert!(json.get("unlisted_consumers").is_none());
    }
}
