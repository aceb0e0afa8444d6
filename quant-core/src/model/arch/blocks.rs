//! Which block graph each layer of a model has.

use std::ops::Range;
use std::sync::Arc;

use super::BlockGraph;
use crate::Result;
use crate::checkpoint::ConfigFields;

/// Layers that a model may have. No model has a hundredth of it; what is more is a damaged configuration.
pub(super) const MAX_LAYERS: usize = 1 << 16;

/// The distinct block graphs of a model, and the one that each layer has.
#[derive(Debug, Clone)]
pub struct Blocks {
    graphs: Vec<Arc<BlockGraph>>,
    /// The position in `graphs` of each layer's.
    kinds: Vec<usize>,
}

/// A block graph and the layers that have it.
#[derive(Debug, Clone, Copy)]
pub struct BlockKind<'a> {
    /// The graph.
    pub graph: &'a BlockGraph,
    /// The first layer that has it.
    pub first: usize,
    /// How many layers have it.
    pub layers: usize,
}

impl Blocks {
    /// The number of layers that `num_hidden_layers` gives.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) when it is missing, 0 or absurd.
    pub fn layers(config: &ConfigFields<'_>) -> Result<usize> {
        Self::layers_by(config, "num_hidden_layers")
    }

    /// The same under another key.
    ///
    /// # Errors
    /// As [`layers`](Self::layers).
    pub fn layers_by(config: &ConfigFields<'_>, key: &str) -> Result<usize> {
        match config.require_positive(key)? {
            layers if layers <= MAX_LAYERS => Ok(layers),
            layers => {
                Err(config.error(key, format!("is {layers}; at most {MAX_LAYERS} blocks are supported")))
            }
        }
    }

    /// `layers` blocks: `kind` tells what sets a layer apart from others, and `graph` makes the graph of a kind.
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

    /// `layers` blocks with one graph.
    pub fn uniform(layers: usize, graph: BlockGraph) -> Self {
        Self { graphs: vec![Arc::new(graph)], kinds: vec![0; layers] }
    }

    /// How many layers there are.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// The graph of a layer.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn graph(&self, layer: usize) -> &Arc<BlockGraph> {
        &self.graphs[self.kinds[layer]]
    }

    /// The distinct graphs, in order of their first layers.
    pub fn kinds(&self) -> impl Iterator<Item = BlockKind<'_>> {
        self.kinds_in(0..self.len())
    }

    /// The distinct graphs of some layers; `first` and `layers` of each are those among these.
    pub fn kinds_in(&self, layers: Range<usize>) -> impl Iterator<Item = BlockKind<'_>> {
        self.graphs.iter().enumerate().filter_map(move |(kind, graph)| {
            let of_kind = || layers.clone().filter(|layer| self.kinds.get(*layer) == Some(&kind));
            Some(BlockKind { graph, first: of_kind().next()?, layers: of_kind().count() })
        })
    }
}
