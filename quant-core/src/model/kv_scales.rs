//! The values that the attentions of a block cache, and their scales in a checkpoint.

use std::collections::BTreeMap;

use super::arch::{BlockGraph, NodeId};
use crate::scheme::CachePart;

/// Static scales of keys and values, by attention node and part.
pub type KvScales = BTreeMap<(NodeId, CachePart), f32>;

/// The keys or values that an attention caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
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

/// Why the keys and values of a block cannot have static scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoCacheScales {
    /// Engines cache a latent vector from which keys and values are computed.
    Latent,
    /// The block uses the keys and values of an earlier block, but engines would apply the scales of this one.
    OfAnotherBlock,
}

impl std::fmt::Display for NoCacheScales {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Latent => "engines cache a latent vector instead",
            Self::OfAnotherBlock => "it reads those that an earlier block cached",
        })
    }
}

/// Returns the cached values of a block, in evaluation order.
///
/// # Errors
/// The reason why a value does not come from a single linear of the block.
pub fn cached_values(graph: &BlockGraph) -> Result<Vec<CachedValue>, NoCacheScales> {
    let attentions = graph.nodes().iter().enumerate().filter(|(_, node)| node.op.cached().is_some());
    let values = attentions.flat_map(|(attention, node)| {
        [(CachePart::Keys, node.inputs[1]), (CachePart::Values, node.inputs[2])].map(|(part, node)| {
            let linear = source(graph, node)?;
            Ok(CachedValue { attention, part, node, linear })
        })
    });
    values.collect()
}

fn source(graph: &BlockGraph, mut node: NodeId) -> Result<NodeId, NoCacheScales> {
    loop {
        let at = &graph.nodes()[node];
        match (&at.op, &at.inputs[..]) {
            (op, _) if op.linear_shape().is_some() => return Ok(node),
            (op, &[input]) if op.keeps_heads() => node = input,
            _ if node == graph.input() => return Err(NoCacheScales::OfAnotherBlock),
            _ => return Err(NoCacheScales::Latent),
        }
    }
}
