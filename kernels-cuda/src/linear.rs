//! Linear layers: which variant of `cuda/linear.cu` multiplies these weights by so many tokens, and what it needs.
//!
//! [`LinearPlan::new`] settles everything before a launch: macros, grid, shared memory, workspace. What decides about bits is
//! the scheme and the [`Parts`] of `k`, which depend on the weights alone; the shape of a block, and whether parts go to
//! sets of warps and blocks of their own or follow each other in one, depend on `m` and the device and change no bit.
//!
//! A [`LinearCall`] is what an adapter of a framework plans with: the rounding of activations to 8 bits belongs to it.

mod call;
mod listed;
mod plan;
mod scheme;
mod variant;

pub use call::{CallArguments, CallLaunch, CallShape, LinearCall};
pub use listed::{listed, variants};
pub use plan::{LinearArguments, LinearPlan, LinearTraffic};
pub use scheme::{Activation, Output, ProductScheme};
pub use variant::{BLOCK_ROWS, BlockShape, LinearLimits, LinearVariant, Parts};

use crate::compile::Source;

/// The text of the kernels.
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
