//! AWQ: activation-aware weight quantization (Lin et al., MLSys 2024).
//!
//! A few input channels of a linear carry large activations, and the rounding error of their
//! weights counts most. Multiplying a column by `s > 1` before rounding and dividing after shrinks
//! its error; the division is folded into whatever produces the channel. For every fold group of
//! the block the scales come from a one-parameter family,
//!
//! ```text
//! s_c = a_c^r / (w_c^(1 − r) + 1e-4),   then s / √(max s · min s)
//! ```
//!
//! with `a_c` the mean magnitude of the activations and `w_c` the mean over rows of the weights'
//! magnitude relative to their group's largest ("duo scaling"), and the exponent `r` from a grid of
//! 20, `0, 1/20 … 19/20`, by the error of the module's output (§3.2 of the paper; duo scaling as in
//! AutoAWQ). No scaling at all is a candidate too, so the search never ends worse than it began.
//! Then each group's range is narrowed where that lowers the linear's own output error
//! ([`clip`](super::clip)).
//!
//! Groups whose channels are repeated (values under grouped-query attention) are left alone, as in
//! the reference.

use std::collections::BTreeMap;

use candle_core::Tensor;

use super::objective::Objective;
use super::{BlockTask, FoldRecord, Rewrite, Transform, clip, fold};
use crate::calibrate::{AbsMean, SampledRows};
use crate::model::{BlockGraph, FoldGroup, NodeId, Tap, WeightBody};
use crate::{Error, Result};

/// Points of the exponent's grid.
const GRID: usize = 20;

/// The AWQ search.
#[derive(Debug, Clone, Copy)]
pub struct Awq;

/// The groups that AWQ may scale.
fn groups(graph: &BlockGraph) -> Vec<FoldGroup> {
    graph.fold_groups().into_iter().filter(|g| g.repeat == 1).collect()
}

impl Transform for Awq {
    fn folded_nodes(&self, graph: &BlockGraph) -> Vec<NodeId> {
        groups(graph).into_iter().flat_map(|g| std::iter::once(g.producer).chain(g.consumers)).collect()
    }

    fn search(&self, task: &BlockTask<'_>) -> Result<Rewrite> {
        let groups: Vec<FoldGroup> = groups(task.block.graph())
            .into_iter()
            .filter(|g| g.consumers.iter().any(|c| task.grids.contains_key(c)))
            .collect();
        let mut watch = Watch::new(task, &groups);
        watch.run()?;

        // Every group is searched on the unscaled block, then all scales are folded.
        let mut rewrite = Rewrite::default();
        let mut chosen = Vec::with_capacity(groups.len());
        for group in &groups {
            let means = watch.means[&group.input].means();
            let (record, scales) = search_scales(task, group, &means)?;
            chosen.push(scales);
            rewrite.folds.push(record);
        }
        for (group, scales) in groups.iter().zip(chosen) {
            if let Some(scales) = scales {
                fold(&mut rewrite, task, group, &scales)?;
            }
        }

        let graph = task.block.graph().clone();
        for (&node, &grid) in task.grids {
            if graph.feeds_queries_or_keys(node) {
                continue;
            }
            task.cancel.check()?;
            let mut input = watch.sampled[&graph.nodes()[node].inputs[0]].clone();
            if let Some(scales) = rewrite.columns.get(&node) {
                input.divide(scales);
            }
            let (bounds, record) = clip::search(task, node, grid, &rewrite, &input)?;
            if let Some(bounds) = bounds {
                rewrite.clips.insert(node, bounds);
            }
            rewrite.clip_records.push(record);
        }
        Ok(rewrite)
    }
}

/// Finds a group's scales; `None` where no scaling is best.
fn search_scales(
    task: &BlockTask<'_>,
    group: &FoldGroup,
    means: &[f32],
) -> Result<(FoldRecord, Option<Vec<f32>>)> {
    let producer = task.module(group.producer);
    if let Some(channel) = means.iter().position(|m| !m.is_finite()) {
        return Err(Error::Numeric {
            tensor: producer,
            reason: format!("the calibration text drives channel {channel} of its output to NaN or infinity"),
        });
    }
    let relative = relative_weights(task, group)?;
    let objective = Objective::new(task, group)?;
    let error_before = objective.error(task, &vec![1.0; means.len()])?;
    let mut best = (error_before, None, None);
    for point in 0..GRID {
        task.cancel.check()?;
        let ratio = point as f32 / GRID as f32;
        let scales = scales(means, &relative, ratio);
        let error = match objective.error(task, &scales) {
            // Scaled weights may need a scale that its type cannot hold: then they are not better.
            Err(Error::Numeric { .. }) => continue,
            other => other?,
        };
        // A NaN is never below; the earlier candidate wins ties.
        if error < best.0 {
            best = (error, Some(ratio), Some(scales));
        }
    }
    if !best.0.is_finite() {
        return Err(Error::Numeric {
            tensor: producer,
            reason: "no candidate scale gives a finite output".into(),
        });
    }
    tracing::debug!(producer, ratio = best.1, error_before, error_after = best.0, "scales chosen");
    let record = FoldRecord {
        producer,
        consumers: group.consumers.iter().map(|&c| task.module(c)).collect(),
        inspected: task.module(group.inspected),
        ratio: best.1,
        error_before,
        error_after: best.0,
    };
    Ok((record, best.2))
}

/// The family of scales at exponent `ratio`, centred geometrically.
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

/// For every column, the mean over the rows of all consumers of `|w| / max |w| in its group`.
fn relative_weights(task: &BlockTask<'_>, group: &FoldGroup) -> Result<Vec<f32>> {
    const ROWS: usize = 256;
    let quantized = || group.consumers.iter().filter_map(|c| task.grids.get(c).map(|g| (*c, g)));
    let mut sums: Vec<f64> = Vec::new();
    let mut rows = 0;
    for (node, grid) in quantized() {
        let weight: &WeightBody = task.block.linear(node).weight();
        let [n, k] = weight.shape();
        let group_size = grid.scheme.granularity.group_size(k);
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
    }
    Ok(sums.into_iter().map(|s| (s / rows.max(1) as f64) as f32).collect())
}

/// Statistics of the inputs that the search needs, gathered in one pass of the float block.
struct Watch<'a> {
    task: &'a BlockTask<'a>,
    first: usize,
    /// By the node whose value the consumers read.
    means: BTreeMap<NodeId, AbsMean>,
    sampled: BTreeMap<NodeId, SampledRows>,
    /// The values seen in the current chunk: linears share inputs, which count once.
    seen: Vec<NodeId>,
}

impl<'a> Watch<'a> {
    fn new(task: &'a BlockTask<'a>, groups: &[FoldGroup]) -> Self {
        let graph = task.block.graph();
        let width = |node: NodeId| task.block.linear(node).weight().shape()[1];
        let means = groups.iter().map(|g| (g.input, AbsMean::new(width(g.consumers[0])))).collect();
        let sampled = task
            .grids
            .keys()
            .filter(|&&node| !graph.feeds_queries_or_keys(node))
            .map(|&node| {
                let rows = SampledRows::new(width(node), task.hidden.tokens(), clip::TOKENS);
                (graph.nodes()[node].inputs[0], rows)
            })
            .collect();
        Self { task, first: 0, means, sampled, seen: Vec::new() }
    }

    fn run(&mut self) -> Result<()> {
        let task = self.task;
        for chunk in task.hidden.chunks() {
            task.cancel.check()?;
            let (first, hidden) = chunk?;
            self.first = first;
            self.seen.clear();
            task.block.forward(&hidden, 0, None, self)?;
        }
        Ok(())
    }
}

impl Tap for Watch<'_> {
    fn linear_input(&mut self, linear: NodeId, x: &Tensor) -> Result<()> {
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
        if let Some(means) = means {
            means.add(&x);
        }
        if let Some(sampled) = sampled {
            sampled.add(self.first, &x);
        }
        Ok(())
    }
}
