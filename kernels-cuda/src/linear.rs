//! Linear layers: chooses the variant of `cuda/linear.cu` for given weights and numbers of tokens, and plans its
//! launch.
//!
//! Results depend on the scheme and on the [`Parts`] of `k`, which depend only on the weights. The shape of a block,
//! and how parts are distributed, depend on `m` and the device; results are bit-identical for all of them.
//!
//! [`LinearExpertsPlan`] plans the products of all experts of a layer in one launch. [`LinearCall`], for framework
//! adapters, also plans the quantization of activations to 8 bits.

mod call;
mod experts;
mod listed;
mod plan;
mod scheme;
mod variant;

pub use call::{CallArguments, CallLaunch, CallShape, LinearCall};
pub use experts::{
    EXPERT_BYTES, ExpertRegions, LinearExpertsArguments, LinearExpertsPlan, LinearExpertsShape,
    expert_descriptors,
};
pub use listed::{listed, variants};
pub use plan::{LinearArguments, LinearPlan, LinearTraffic, LinearWork};
pub use scheme::{InputType, KernelScheme, Output};
pub use variant::{BLOCK_ROWS, BlockShape, Chunks, GateFunction, LinearVariant, Parts, PlanLimits};

use crate::compile::Source;

/// The source of the kernels.
pub static SOURCE: Source = Source {
    name: "linear.cu",
    text: include_str!("../cuda/linear.cu"),
    headers: &[
        ("ptx.cuh", include_str!("../cuda/ptx.cuh")),
        ("dequantize.cuh", include_str!("../cuda/dequantize.cuh")),
        ("gates.cuh", include_str!("../cuda/gates.cuh")),
        ("linear_experts.cuh", include_str!("../cuda/linear_experts.cuh")),
        ("linear_ring.cuh", include_str!("../cuda/linear_ring.cuh")),
        ("linear_tile.cuh", include_str!("../cuda/linear_tile.cuh")),
        ("linear_out.cuh", include_str!("../cuda/linear_out.cuh")),
    ],
};
