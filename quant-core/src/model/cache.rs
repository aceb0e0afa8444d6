//! What blocks keep of past positions for incremental decoding: keys and values, and the states of recurrent operations.

use std::collections::BTreeMap;

use super::arch::NodeId;
use super::paged::Paged;
use super::recurrent::State;
use crate::{Error, Result};

/// What every block has cached of one sequence.
#[derive(Debug, Clone)]
pub struct SequenceCache {
    layers: Vec<LayerCache>,
    positions: usize,
}

impl SequenceCache {
    /// An empty cache of `layers` blocks for up to `capacity` positions.
    pub fn new(layers: usize, capacity: usize) -> Self {
        Self { layers: vec![LayerCache::new(capacity); layers], positions: 0 }
    }

    /// Positions that are filled.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Bytes that keys, values and states take in memory, with what was reserved for more.
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

/// What one block has cached of one sequence: as the block caches, see [`KvCaching`](super::KvCaching).
#[derive(Debug, Clone)]
pub struct LayerCache {
    capacity: usize,
    pub(super) held: Held,
    /// Of each recurrent operation, once it has run.
    states: BTreeMap<NodeId, State>,
}

/// The form of it, settled by the first tokens.
#[derive(Debug, Clone)]
pub(super) enum Held {
    Nothing,
    /// `[positions, kv_heads · head_dim]` and `[positions, kv_heads · value_dim]`.
    Floats {
        keys: Vec<f32>,
        values: Vec<f32>,
    },
    Pages(Paged),
}

impl LayerCache {
    /// An empty cache for up to `capacity` positions.
    pub fn new(capacity: usize) -> Self {
        Self { capacity: capacity.max(1), held: Held::Nothing, states: BTreeMap::new() }
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// The state of a recurrent operation, which has `len` numbers.
    pub(super) fn state(&mut self, node: NodeId, len: usize) -> &mut State {
        self.states.entry(node).or_insert_with(|| State::zero(len))
    }

    fn bytes(&self) -> usize {
        let states: usize = self.states.values().map(State::bytes).sum();
        let attended = match &self.held {
            Held::Nothing => 0,
            Held::Floats { keys, values } => 4 * (keys.capacity() + values.capacity()),
            Held::Pages(pages) => pages.bytes(),
        };
        attended + states
    }

    /// Appends positions whose keys and values have these widths, and returns all keys and values so far.
    pub(super) fn append(
        &mut self,
        [k, v]: [&[f32]; 2],
        [k_width, v_width]: [usize; 2],
    ) -> Result<(&[f32], &[f32])> {
        if let Held::Nothing = self.held {
            self.held = Held::Floats { keys: Vec::new(), values: Vec::new() };
        }
        let Held::Floats { keys, values } = &mut self.held else {
            return Err(Error::Internal("a cache of pages was given to a model that caches floats".into()));
        };
        if keys.len() + k.len() > self.capacity * k_width || k.len() * v_width != v.len() * k_width {
            return Err(Error::Internal("more positions than the cache was made for".into()));
        }
        keys.extend_from_slice(k);
        values.extend_from_slice(v);
        Ok((keys, values))
    }
}
