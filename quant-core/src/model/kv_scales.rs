//! Which values of a block an attention caches, and the scales that a checkpoint has for them.

use std::collections::BTreeMap;

use super::arch::{BlockGraph, NodeId};
use crate::scheme::CachePart;

/// Static scales of keys and values, by their attention.
pub type KvScales = BTreeMap<(NodeId, CachePart), f32>;

/// Keys or values that an attention caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CachedValue {
    /// The attention.
    pub attention: NodeId,
    /// Keys or values.
    pub part: CachePart,
    /// The node whose value is cached.
    pub node: NodeId,
    /// The linear that the value comes from.
    pub linear: NodeId,
}

/// What the attentions of a block cache, in order of evaluation; none where a value does not come from one linear, as
/// those of latent attention, of which engines cache something else.
pub fn cached_values(graph: &BlockGraph) -> Option<Vec<CachedValue>> {
    let attentions = graph.nodes().iter().enumerate().filter(|(_, node)| node.op.cached().is_some());
    let values = attentions.flat_map(|(attention, node)| {
        [(CachePart::Keys, node.inputs[1]), (CachePart::Values, node.inputs[2])].map(|(part, node)| {
            let linear = source(graph, node)?;
            Some(CachedValue { attention, part, node, linear })
        })
    });
    values.collect()
}

/// The linear that alone makes a value.
fn source(graph: &BlockGraph, mut node: NodeId) -> Option<NodeId> {
    loop {
        let at = &graph.nodes()[node];
        match (&at.op, &at.inputs[..]) {
            (op, _) if op.linear_shape().is_some() => return Some(node),
            (op, &[input]) if op.keeps_heads() => node = input,
            _ => return None,
        }
    }
}
