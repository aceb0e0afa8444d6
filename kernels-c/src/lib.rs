//! The C interface of `quant-kernels-cpu`, which `include/quant_kernels.h` declares.
//!
//! ```c
#![doc = include_str!("../examples/hello.c")]
//! ```
//!
//! Functions check pointers, make slices of them, and call the kernels. All follow these rules:
//!
//! - Functions return a [`qz1_status`], write results through pointers, and on request write an error message to the
//!   caller's memory ([`qz1_message`]). A panic is caught and becomes a status.
//! - A structure begins with its size, so that later versions may add fields at its end. A structure that is larger
//!   than this library knows is accepted if the additional bytes are zero. A smaller one, down to the size of its first
//!   version, is read as if its missing fields were zero. The meaning of a name never changes.
//! - A null or misaligned pointer, a length that does not match the shape, an output that overlaps another part of the
//!   call, or an invalid layout gives an error status before anything is written. No function can check that memory is
//!   as long as the caller states.
//! - If allocation fails, a status is returned too.
//! - There is no global state to initialize, and no function starts threads, except those of the feature `rayon`.
//! - Only one thread at a time may use a handle, unless its documentation states otherwise. Calls on different handles
//!   may run concurrently.
//!
//! # The pointer contract
//!
//! Functions cannot check the following requirements. The caller upholds them for every pointer that is not null, and
//! the `SAFETY` comments of this crate refer to them as the pointer contract:
//!
//! 1. The pointer is valid for as many bytes as the size field of its structure or the accompanying length states. A
//!    string ends with a zero byte. A handle was returned by the function that creates such handles, and has not been
//!    freed.
//! 2. Until the call returns, these bytes stay allocated, no other code writes them, and no other code reads those that
//!    the function writes.
//! 3. The `for_each` of a [`qz1_parallel`] behaves as the header requires.
//!
//! `Scope`, in `memory.rs`, checks the rest: null, alignment, sizes that overflow, and outputs that overlap.
//!
//! The feature `rayon` adds a thread pool for callers that have no threads: module `pool`. The feature `openmp` runs
//! pieces of work on the threads of an OpenMP runtime: module `openmp`. The feature `cuda` adds everything that
//! `include/quant_kernels_cuda.h` declares: module `cuda`.
#![allow(unsafe_code, reason = "pointers of a C caller")]
#![allow(non_camel_case_types, reason = "names as C has them")]

#[cfg(feature = "checkpoints")]
mod checkpoint;
#[cfg(feature = "cuda")]
mod cuda;
mod experts;
mod features;
mod hadamard;
mod kv;
mod kv_cache;
mod layouts;
mod memory;
mod multiply;
#[cfg(feature = "openmp")]
mod openmp;
mod parallel;
#[cfg(feature = "rayon")]
mod pool;
mod rows;
mod status;
mod weights;

#[cfg(feature = "checkpoints")]
pub use checkpoint::*;
#[cfg(feature = "cuda")]
pub use cuda::*;
pub use experts::*;
pub use features::*;
pub use hadamard::*;
pub use kv::*;
pub use kv_cache::*;
pub use multiply::*;
#[cfg(feature = "openmp")]
pub use openmp::*;
pub use parallel::*;
#[cfg(feature = "rayon")]
pub use pool::*;
pub use rows::*;
pub use status::*;
pub use weights::*;
