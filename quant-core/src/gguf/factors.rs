//! Constant factors of a block's graph that are multiplied into the rows of its weights, because llama.cpp's graph does
//! not have them.

use crate::model::{BlockGraph, NodeId, Op};

/// A factor for each row of a weight; at most five groups of consecutive rows have different factors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RowFactors {
    /// The end of each group of rows, in ascending order. Unused entries are `usize::MAX`.
    ends: [usize; Self::GROUPS],
    by: [f32; Self::GROUPS],
}

impl RowFactors {
    /// Mamba 2 has one linear for five values.
    const GROUPS: usize = 5;

    /// The same factor for all rows.
    pub(super) fn all(by: f32) -> Self {
        Self { ends: [usize::MAX; Self::GROUPS], by: [by; Self::GROUPS] }
    }

    /// The factors that follow a linear, directly or after its output is split into parts. `None` if there are none.
    pub(super) fn of(graph: &BlockGraph, linear: &Op) -> Option<Self> {
        let node = graph.nodes().iter().position(|node| node.op == *linear)?;
        let mut parts: Vec<(usize, f32)> = Vec::new();
        for (user, _) in graph.users(node) {
            if let Op::Slice { start, width, .. } = graph.nodes()[user].op {
                parts.push((start + width, factor_after(graph, user)));
            }
        }
        if parts.is_empty() {
            parts.push((usize::MAX, factor_after(graph, node)));
        }
        parts.sort_by_key(|(end, _)| *end);
        let is_plain = parts.iter().all(|(_, by)| *by == 1.0);
        if is_plain || parts.len() > Self::GROUPS {
            return None;
        }
        let mut factors = Self::all(1.0);
        for (group, (end, by)) in parts.into_iter().enumerate() {
            (factors.ends[group], factors.by[group]) = (end, by);
        }
        Some(factors)
    }

    pub(super) fn of_row(&self, row: usize) -> f32 {
        let group = self.ends.iter().position(|end| row < *end);
        group.map_or(1.0, |group| self.by[group])
    }
}

/// The factor that a value is multiplied by, if that is its only use; else 1.
fn factor_after(graph: &BlockGraph, value: NodeId) -> f32 {
    let mut users = graph.users(value);
    match (users.next(), users.next()) {
        (Some((user, _)), None) => match graph.nodes()[user].op {
            Op::Scale(factor) => factor,
            _ => 1.0,
        },
        _ => 1.0,
    }
}
