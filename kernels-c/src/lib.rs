//! The C interface of `quant-kernels-cpu`: everything behind `include/quant_kernels.h`.
//!
//! Nothing here computes; it makes slices of pointers, after looking at each, and calls the kernels. What
//! all functions keep:
//!
//! - They return a [`qz1_status`], write results through pointers, and on request say what is wrong in memory that the
//!   caller lends ([`qz1_message`]). A panic is caught and is a status.
//! - A structure begins with its size, so that later versions may add fields at its end: a larger one than this
//!   library knows is taken where the rest is zero, a smaller one down to its first version as if the rest were.
//!   Names begin with `qz1_`, and what stands behind a name stays.
//! - A null or misaligned pointer, a length that is not the shape's, an output that overlaps another part of the call,
//!   an invalid layout: each is a status, before anything is written. That memory is as long as it is said to be,
//!   nobody can check.
//! - Where the system gives no memory, that is a status too: a reason holds none, and all that grows asks before.
//! - No state, no threads, no initialization: instructions are found once, and each call may name others.
//! - Handles may be used by one thread at a time; everything else by any number.
//!
//! # The pointer contract
//!
//! What no function can check. The caller guarantees it for every pointer that is not null, and the `SAFETY` comments of
//! this crate cite it by this name:
//!
//! 1. The pointer leads to as many bytes as the size field of its structure says, or the length beside it; a text ends
//!    with a zero byte; a handle comes from the function that makes such handles, and was not freed.
//! 2. Until the call returns these bytes stay allocated, nobody else writes them, and nobody else reads those that the
//!    function writes.
//! 3. `for_each` of a [`qz1_parallel`] does what the header says.
//!
//! `Scope`, in `memory.rs`, checks the rest: null, alignment, sizes that overflow, and outputs that overlap.
//!
//! With the feature `rayon` it has threads for callers without any: module `pool`.
//!
//! With the feature `cuda` the library also has what is behind `include/quant_kernels_cuda.h`: module `cuda`, by
//! `quant-kernels-cuda`.
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
mod memory;
mod multiply;
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
pub use parallel::*;
#[cfg(feature = "rayon")]
pub use pool::*;
pub use rows::*;
pub use status::*;
pub use weights::*;
