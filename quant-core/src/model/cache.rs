//! Keys and values of past positions, for incremental decoding.

use candle_core::Tensor;
use candle_nn::kv_cache::KvCache as LayerCache;

use crate::Result;

/// One pair of growing tensors `[batch, positions, kv_heads · head_dim]` for every block.
#[derive(Debug, Clone)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    positions: usize,
}

impl KvCache {
    /// An empty cache of `layers` blocks for up to `capacity` positions.
    pub fn new(layers: usize, capacity: usize) -> Self {
        Self { layers: vec![LayerCache::new(1, capacity.max(1)); layers], positions: 0 }
    }

    /// Positions that are filled.
    pub fn positions(&self) -> usize {
        self.positions
    }

    pub(crate) fn layer(&mut self, index: usize) -> &mut LayerCache {
        &mut self.layers[index]
    }

    pub(crate) fn advance(&mut self, positions: usize) {
        self.positions += positions;
    }
}

/// Appends to a layer and returns all keys and values so far.
pub(crate) fn append(cache: &mut LayerCache, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
    Ok(cache.append(&k.contiguous()?, &v.contiguous()?)?)
}
