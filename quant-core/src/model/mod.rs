//! A decoder whose blocks can be observed and taken apart.
//!
//! [`arch`] describes a family as data: a graph of producers and consumers that determines the evaluation order, the
//! valid folds and the balance lists. [`Block`] evaluates that graph on candle tensors; [`Decoder`] chains blocks.
//! [`Linear`] multiplies by float or quantized weights.

pub mod arch;
mod attention;
mod block;
mod by_columns;
mod cache;
mod decoder;
mod dequantized;
mod embeddings;
mod experts;
mod fused;
mod fused_experts;
mod gates;
mod grouped;
mod head;
mod kv;
mod kv_scales;
mod linear;
mod load;
mod math;
mod names;
mod norm;
mod paged;
mod parameters;
mod per_layer;
mod positions;
mod preparation;
mod recurrent;
mod rope;
mod segments;
mod soft_cap;
mod tap;
mod tensor_values;
mod tokens;
mod unrouted;

pub use crate::scheme::KvScheme;
pub use arch::{
    Activation, Architecture, AttentionShape, BlockGraph, BlockKind, Blocks, Computes, Convolution,
    Correction, DeltaNet, EmbeddingScale, FoldGroup, Groups, LayerNormParameters, LearnedPositions,
    LogitsTransform, Node, NodeId, Op, OrderGroup, Parameter, PerLayerInputs, PositionScale, ProducerRows,
    QueryKey, Reach, Recurrent, RecurrentKind, RouterScores, RoutingRule, StateSpace, Wrapper,
};
pub(crate) use arch::{ExpertOrder, describe};
pub(crate) use attention::causal_attention;
pub use block::Block;
pub(crate) use by_columns::transposed;
pub use cache::{LayerCache, SequenceCache};
pub use decoder::Decoder;
pub(crate) use embeddings::EmbeddingNorm;
pub(crate) use experts::add_expert;
pub use head::{HEAD_TILE, Head, HeadBuffers, HeadInputs, HeadParts};
pub use kv::{KvCaching, round_cached};
pub use kv_scales::{CachedValue, KvScales, NoCacheScales, cached_values};
pub use linear::{
    BlockWeight, CudaLinear, CudaRunner, FloatProducts, Linear, StoredWeight, WeightBody, WeightRows,
    kernels, multiply,
};
pub use load::{Carried, Model};
pub use norm::Norm;
pub use parameters::OpParameters;
pub use positions::PositionTable;
pub use preparation::Preparation;
pub(crate) use rope::restore_llama3;
pub use rope::{LongRope, Rope, RopeLayout, RopeRequest, RopeScaling, RopeTable, RopeTables, Yarn};
pub use segments::Segments;
pub use tap::{CancelTap, NoTap, Tap};
pub(crate) use tensor_values::with_values;
pub use tokens::TokenRows;
