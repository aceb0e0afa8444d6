//! The decisions about a block that are made before its tensors are written.

use std::collections::BTreeMap;

use quant_kernels_cpu::StaticScale;

use crate::calibrate::CachedMaxima;
use crate::model::NodeId;
use crate::transform::Rewrite;

/// The decisions about a block.
#[derive(Default)]
pub(super) struct Decision {
    pub(super) rewrite: Rewrite,
    /// The static input grids, which are the same for all tokens.
    pub(super) inputs: BTreeMap<NodeId, StaticScale>,
    /// The number of tokens routed to the expert, for each linear of an expert that was calibrated on all tokens.
    pub(super) routed: BTreeMap<NodeId, u64>,
    /// The largest magnitudes of the keys and values that its attentions cache, if the cache is FP8.
    pub(super) cached: CachedMaxima,
}
