//! The values that the attentions of a block cache, and their scales in a checkpoint.

use std::collections::BTreeMap;

use super::arch::{BlockGraph, NodeId};
use crate::scheme::CachePart;

/// Static scales of keys and values, by attention node and part.
pub type KvScales = BTreeMap<(NodeId, CachePart), f32>;

/// The keys or values that an attention caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CachedValue {
    /// The attention.
    pub attention: NodeId,
    /// Keys or values.
    pub part: CachePart,
    /// The node whose value is cached.
    pub node: NodeId,
    /// The linear that computes the value.
    pub linear: NodeId,
}

/// Returns the cached values of a block, in evaluation order; `None` if a value does not come from a single linear. In
/// latent attention, for example, engines cache the latent vectors instead.
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

/// Returns the only linear that a value is computed from.
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
