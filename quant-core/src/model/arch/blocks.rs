//! The block graph of each layer of a model.

use std::ops::Range;
use std::sync::Arc;

use super::BlockGraph;
use crate::Result;
use crate::checkpoint::ConfigFields;

/// Maximum number of layers. Real models have far fewer; a larger number means that the configuration is damaged.
pub(super) const MAX_LAYERS: usize = 1 << 16;

/// The distinct block graphs of a model and the graph of each layer.
#[derive(Debug, Clone)]
pub struct Blocks {
    graphs: Vec<Arc<BlockGraph>>,
    kinds: Vec<usize>,
}

/// A block graph and the layers that use it.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct BlockKind<'a> {
    /// The graph.
    pub graph: &'a BlockGraph,
    /// The first layer that uses it.
    pub first: usize,
    /// Number of layers that use it.
    pub layers: usize,
}

impl Blocks {
    /// Reads the number of layers from `num_hidden_layers`.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) if it is missing, not a positive integer, or too large.
    pub fn layers(config: &ConfigFields<'_>) -> Result<usize> {
        Self::layers_by(config, "num_hidden_layers")
    }

    /// Reads the number of layers from the field `key`.
    ///
    /// # Errors
    /// As [`layers`](Self::layers).
    pub fn layers_by(config: &ConfigFields<'_>, key: &str) -> Result<usize> {
        match config.require_positive(key)? {
            layers if layers <= MAX_LAYERS => Ok(layers),
            layers => Err(config.error(key, format!("is {layers}; at most {MAX_LAYERS} are supported"))),
        }
    }

    /// Creates `layers` blocks: `kind` returns the kind of a layer, and `graph` builds the graph of a kind.
    pub fn new<K: PartialEq>(
        layers: usize,
        kind: impl Fn(usize) -> K,
        graph: impl Fn(&K) -> BlockGraph,
    ) -> Self {
        let mut known: Vec<K> = Vec::new();
        let kinds = (0..layers).map(|layer| {
            let kind = kind(layer);
            known.iter().position(|k| *k == kind).unwrap_or_else(|| {
                known.push(kind);
                known.len() - 1
            })
        });
        let kinds = kinds.collect();
        Self { graphs: known.iter().map(|kind| Arc::new(graph(kind))).collect(), kinds }
    }

    /// Creates `layers` blocks that all have the same graph.
    pub fn uniform(layers: usize, graph: BlockGraph) -> Self {
        Self { graphs: vec![Arc::new(graph)], kinds: vec![0; layers] }
    }

    /// Returns the number of layers.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Returns whether there are no layers.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// Returns the graph of a layer.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn graph(&self, layer: usize) -> &Arc<BlockGraph> {
        &self.graphs[self.kinds[layer]]
    }

    /// Returns the first layer with the same graph as `layer`; `layer` itself if there is no such layer.
    pub(super) fn first_like(&self, layer: usize) -> usize {
        let kind = self.kinds.get(layer);
        self.kinds.iter().position(|other| Some(other) == kind).unwrap_or(layer)
    }

    /// Returns the distinct graphs, in order of their first layers.
    pub fn kinds(&self) -> impl Iterator<Item = BlockKind<'_>> {
        self.kinds_in(0..self.len())
    }

    /// Returns the distinct graphs of a range of layers. `first` is the first layer within the range that uses the
    /// graph, and `layers` counts only layers within the range.
    pub fn kinds_in(&self, layers: Range<usize>) -> impl Iterator<Item = BlockKind<'_>> {
        self.graphs.iter().enumerate().filter_map(move |(kind, graph)| {
            let of_kind = || layers.clone().filter(|layer| self.kinds.get(*layer) == Some(&kind));
            Some(BlockKind { graph, first: of_kind().next()?, layers: of_kind().count() })
        })
    }
}
