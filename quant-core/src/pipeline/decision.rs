//! The decisions about a block that are made before its tensors are written.

use std::collections::BTreeMap;

use quant_kernels_cpu::StaticScale;

use crate::calibrate::CachedMaxima;
use crate::model::NodeId;
use crate::transform::Rewrite;

#[derive(Default)]
pub(super) struct Decision {
    pub(super) rewrite: Rewrite,
    pub(super) inputs: BTreeMap<NodeId, StaticScale>,
    /// The number of tokens of each linear in the pass that found the ranges of its input, if there was one.
    pub(super) seen: BTreeMap<NodeId, u64>,
    /// The number of tokens routed to the expert, for each linear of an expert that was calibrated on all tokens.
    pub(super) routed: BTreeMap<NodeId, u64>,
    pub(super) cached: CachedMaxima,
}
