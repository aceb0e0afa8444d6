//! The state that blocks keep for incremental decoding: keys and values, and the states of recurrent operations.

use std::collections::BTreeMap;

use super::arch::NodeId;
use super::paged::Paged;
use super::recurrent::State;
use crate::{Error, Result};

/// The caches of all blocks for one sequence.
#[derive(Debug, Clone)]
pub struct SequenceCache {
    layers: Vec<LayerCache>,
    positions: usize,
}

impl SequenceCache {
    /// Creates an empty cache of `layers` blocks for up to `capacity` positions.
    pub fn new(layers: usize, capacity: usize) -> Self {
        Self { layers: vec![LayerCache::new(capacity); layers], positions: 0 }
    }

    /// Returns the number of cached positions.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Returns the bytes of memory that keys, values and states occupy, including reserved capacity.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(LayerCache::bytes).sum()
    }

    pub(crate) fn layer(&mut self, index: usize) -> &mut LayerCache {
        &mut self.layers[index]
    }

    pub(crate) fn advance(&mut self, positions: usize) {
        self.positions += positions;
    }
}

/// The cache of one block for one sequence; see [`KvCaching`](super::KvCaching).
#[derive(Debug, Clone)]
pub struct LayerCache {
    capacity: usize,
    pub(super) held: CacheContents,
    states: BTreeMap<NodeId, State>,
}

/// The cached keys and values. Their format is chosen when the first tokens are appended.
#[derive(Debug, Clone)]
pub(super) enum CacheContents {
    Nothing,
    /// `[positions, kv_heads · head_dim]` and `[positions, kv_heads · value_dim]`.
    Floats {
        keys: Vec<f32>,
        values: Vec<f32>,
    },
    Pages(Paged),
}

impl LayerCache {
    /// Creates an empty cache for up to `capacity` positions.
    pub fn new(capacity: usize) -> Self {
        Self { capacity: capacity.max(1), held: CacheContents::Nothing, states: BTreeMap::new() }
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the state of a recurrent operation, of `len` values.
    pub(super) fn state(&mut self, node: NodeId, len: usize) -> &mut State {
        self.states.entry(node).or_insert_with(|| State::zero(len))
    }

    fn bytes(&self) -> usize {
        let states: usize = self.states.values().map(State::bytes).sum();
        let attended = match &self.held {
            CacheContents::Nothing => 0,
            CacheContents::Floats { keys, values } => 4 * (keys.capacity() + values.capacity()),
            CacheContents::Pages(pages) => pages.bytes(),
        };
        attended + states
    }

    pub(super) fn append(
        &mut self,
        [k, v]: [&[f32]; 2],
        [k_width, v_width]: [usize; 2],
    ) -> Result<(&[f32], &[f32])> {
        if let CacheContents::Nothing = self.held {
            self.held = CacheContents::Floats { keys: Vec::new(), values: Vec::new() };
        }
        let CacheContents::Floats { keys, values } = &mut self.held else {
            return Err(Error::Internal("the model caches floats, but got a paged cache".into()));
        };
        if keys.len() + k.len() > self.capacity * k_width || k.len() * v_width != v.len() * k_width {
            return Err(Error::Internal("more positions than the capacity of the cache".into()));
        }
        keys.extend_from_slice(k);
        values.extend_from_slice(v);
        Ok((keys, values))
    }
}
