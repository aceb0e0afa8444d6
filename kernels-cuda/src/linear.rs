//! Linear layers: the variant of `cuda/linear.cu` that multiplies given weights by given numbers of tokens, and what it
//! needs.
//!
//! [`LinearPlan::new`] determines everything before a launch: macros, grid, shared memory, workspace. The bits of the
//! results depend on the scheme and on the [`Parts`] of `k`, which depend on the weights only. The shape of a block,
//! and whether parts are computed by separate sets of warps and blocks or one after another, depend on `m` and the
//! device, and change no bit.
//!
//! A [`LinearCall`] is for adapters of frameworks: it also includes the quantization of activations to 8 bits.

mod call;
mod listed;
mod plan;
mod scheme;
mod variant;

pub use call::{CallArguments, CallLaunch, CallShape, LinearCall};
pub use listed::{listed, variants};
pub use plan::{LinearArguments, LinearPlan, LinearTraffic};
pub use scheme::{InputType, KernelScheme, Output};
pub use variant::{BLOCK_ROWS, BlockShape, LinearVariant, Parts, PlanLimits};

use crate::compile::Source;

/// The source of the kernels.
pub static SOURCE: Source = Source {
    name: "linear.cu",
    text: include_str!("../cuda/linear.cu"),
    headers: &[
        ("ptx.cuh", include_str!("../cuda/ptx.cuh")),
        ("dequantize.cuh", include_str!("../cuda/dequantize.cuh")),
        ("linear_ring.cuh", include_str!("../cuda/linear_ring.cuh")),
        ("linear_tile.cuh", include_str!("../cuda/linear_tile.cuh")),
        ("linear_out.cuh", include_str!("../cuda/linear_out.cuh")),
    ],
};
