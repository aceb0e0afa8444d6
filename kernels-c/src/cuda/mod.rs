//! The C interface of `quant-kernels-cuda`: everything behind `include/quant_kernels_cuda.h`.
//!
//! One grammar for all families, in which nothing but numbers of the caller's framework is taken for CUDA's:
//!
//! ```text
//! qz1_cuda_FAMILY_plan(kernels, shape, &plan, message)         looks at the shape; compiles and loads what it takes
//! qz1_cuda_plan_workspace(plan, &bytes, &tickets, message)     what the caller allocates
//! qz1_cuda_FAMILY_launch(plan, arguments, stream, message)     looks at addresses and lengths; puts it on the stream
//! ```
//!
//! All that may take long, wait or grow is in the first; the last can be captured into a graph. What a call is refused for
//! is what [`crate`] says. Lengths on the device are what the caller says they are, and are held to what the shape
//! needs; what stands there nobody looks at, page numbers included.
//!
//! Where the system gives no memory on the host, planning ends the process, as Rust's collections do, which the kernels'
//! host side is written with.

mod activation;
mod append;
mod attention;
mod kernels;
mod linear;
mod pack;
mod region;
mod weights;

pub use activation::*;
pub use append::*;
pub use attention::*;
pub use kernels::*;
pub use linear::*;
pub use pack::*;
pub use region::*;
pub use weights::*;
