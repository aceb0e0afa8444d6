//! Activation-aware channel reordering (QServe, §4.3.4): outlier channels share groups.
//!
//! All weights in a group have the same scale. If only one channel of a group has large activations, its weights matter
//! most, but weights of unimportant channels may determine the scale. Channels between two linears can be permuted, if
//! the rows of the producer and the columns of the consumer are permuted together. They are therefore sorted by their
//! largest magnitude on the calibration text, ascending: `order = argsort(max |X_j|)`. There is no cost at inference.
//!
//! In attention, channels stay within their heads, and query heads that share a key head have the same order. Channels
//! between norms and linears are not sorted, because the residual stream has one order for the whole model.

use super::{BlockTask, Needs, Rewrite, Transform, TransformSettings};
use crate::calibrate::HiddenStates;
use crate::model::{BlockGraph, NodeId, OrderGroup};
use crate::scheme::Granularity;
use crate::{Error, Result};

/// The transform that reorders channels.
#[derive(Debug, Clone, Copy)]
pub struct Reorder;

impl Transform for Reorder {
    fn name(&self) -> &'static str {
        "reorder"
    }

    fn summary(&self) -> &'static str {
        "sorts channels by magnitude, so that the channels of a group are similar"
    }

    fn folded_nodes(&self, graph: &BlockGraph, _settings: &TransformSettings) -> Vec<NodeId> {
        graph.order_groups().into_iter().flat_map(|g| g.producers.into_iter().chain([g.consumer])).collect()
    }

    fn needs(&self, _settings: &TransformSettings) -> Needs {
        Needs { ranges: true, states: false }
    }

    /// The order is that of the inputs' ranges, so no weight is read.
    fn takes_experts_apart(&self, _graph: &BlockGraph, _settings: &TransformSettings) -> bool {
        true
    }

    fn search(
        &self,
        tasks: &[BlockTask<'_>],
        hidden: Option<&mut HiddenStates>,
        advance: bool,
    ) -> Result<Vec<Rewrite>> {
        let rewrites = tasks.iter().map(reordered).collect();
        if let (Some(first), Some(hidden), true) = (tasks.first(), hidden, advance) {
            first.advance(hidden)?;
        }
        rewrites
    }
}

fn reordered(task: &BlockTask<'_>) -> Result<Rewrite> {
    let mut rewrite = Rewrite::default();
    for group in task.block.graph().order_groups() {
        let in_groups = |node: NodeId| {
            let k = task.block.linear(node).weight().shape()[1];
            let granularity = task.grids.get(&node).map(|grid| grid.scheme.granularity);
            matches!(granularity, Some(Granularity::Group(size)) if size < k)
        };
        if !in_groups(group.consumer) {
            continue;
        }
        let ranges = task.ranges.get(&group.input);
        let ranges = ranges.ok_or_else(|| {
            Error::Internal("channels are sorted by statistics that were not collected".into())
        })?;
        let (rows, columns) = orders(&group, &ranges.maxima());
        tracing::debug!(consumer = task.module(group.consumer), "channels sorted");
        for &producer in &group.producers {
            rewrite.row_order.insert(producer, rows.clone());
        }
        rewrite.column_order.insert(group.consumer, columns);
    }
    Ok(rewrite)
}

/// The orders of the producers' rows and of the consumer's columns, sorted by the largest magnitudes of the columns.
fn orders(group: &OrderGroup, maxima: &[f32]) -> (Vec<u32>, Vec<u32>) {
    // A stable sort keeps columns with equal maxima in their original order.
    let ascending = |keys: &[f32]| {
        let mut order: Vec<u32> = (0..keys.len() as u32).collect();
        order.sort_by(|&a, &b| keys[a as usize].total_cmp(&keys[b as usize]));
        order
    };
    let Some(width) = group.head else {
        let order = ascending(maxima);
        return (order.clone(), order);
    };
    let mut rows = Vec::with_capacity(maxima.len() / group.repeat);
    let mut columns = Vec::with_capacity(maxima.len());
    for shared in maxima.chunks_exact(width * group.repeat) {
        let mut largest = vec![0.0_f32; width];
        for head in shared.chunks_exact(width) {
            largest.iter_mut().zip(head).for_each(|(l, m)| *l = l.max(*m));
        }
        let order = ascending(&largest);
        let first = rows.len() as u32;
        rows.extend(order.iter().map(|&i| first + i));
        for _ in 0..group.repeat {
            let first = columns.len() as u32;
            columns.extend(order.iter().map(|&i| first + i));
        }
    }
    (rows, columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_are_sorted_within_heads_that_are_shared() {
        let group = |head, repeat| OrderGroup { producers: vec![0], consumer: 1, input: 2, repeat, head };
        let maxima = [3.0, 1.0, 2.0, 2.0, 0.5, 9.0, 7.0, 7.0];
        let (rows, columns) = orders(&group(None, 1), &maxima);
        assert_eq!(rows, [4, 1, 2, 3, 0, 6, 7, 5]);
        assert_eq!(columns, rows);
        // Heads of 2 channels, two query heads per key head: (3, 1) with (2, 2), then (0.5, 9) with (7, 7).
        let (rows, columns) = orders(&group(Some(2), 2), &maxima);
        assert_eq!(rows, [1, 0, 2, 3]);
        assert_eq!(columns, [1, 0, 3, 2, 4, 5, 6, 7]);
    }
}
