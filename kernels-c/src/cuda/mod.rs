//! The C interface of `quant-kernels-cuda`, which `include/quant_kernels_cuda.h` declares.
//!
//! All families follow one pattern:
//!
//! ```text
//! qz1_cuda_FAMILY_plan(kernels, shape, &plan, message)         checks the shape; compiles and loads the kernels
//! qz1_cuda_plan_workspace(plan, &bytes, &tickets, message)     returns how much memory the caller must allocate
//! qz1_cuda_FAMILY_launch(plan, arguments, stream, message)     checks addresses and lengths; launches on the stream
//! ```
//!
//! Everything that may take long, block or allocate is in the first function; the last one can be captured into a
//! graph. Calls fail for the reasons that [`crate`] lists. The caller passes the lengths of device memory, and these
//! are checked against the shape; the contents, including page numbers, are not checked.
//!
//! If host memory cannot be allocated while planning, the process aborts, because the host side of the kernels uses
//! Rust's standard collections.

mod activation;
mod append;
mod attention;
mod experts;
mod kernels;
mod linear;
mod pack;
mod region;
mod weights;

pub use activation::*;
pub use append::*;
pub use attention::*;
pub use experts::*;
pub use kernels::*;
pub use linear::*;
pub use pack::*;
pub use region::*;
pub use weights::*;
