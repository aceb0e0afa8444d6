//! The quantization pipeline.
//!
//! A checkpoint is read, observed, rewritten, rounded, packed and written one decoder block at a time. The modules
//! follow the order of these stages:
//!
//! ```text
//! checkpoint ─► model ─► calibrate ─► recipe ─► transform ─► quantize ─► format ─► checkpoint
//!  (read)      (blocks    (inputs of    (what     (AWQ scale,  (codes,     (bits)     (write)
//!               to run)    linears)      each      clip)        scales,
//!                                        gets)                  zeros)
//! ```
//!
//! [`pipeline`] drives them, and [`run`] is what programs call: directories in, directories out. The pipeline is itself
//! driven through traits, so that the library uses no terminal, clock, or global state: weights come from a
//! [`TensorSource`] and go to a [`TensorSink`], progress is reported to an [`Observer`], and a [`CancelToken`] stops it
//! between units of work. Parallel steps run on the caller's rayon pool.
#![forbid(unsafe_code)]

pub mod calibrate;
pub mod engines;
pub mod generate;
pub mod gguf;
pub mod model;
pub mod pipeline;
pub mod quantize;
pub mod recipe;
pub mod run;
pub mod transform;
pub mod wording;
pub mod worker;

pub use quant_formats::{
    CancelToken, Category, Error, Event, Observer, Result, Silent, TensorSink, TensorSource, blocks,
    checkpoint, digest, format, random, scheme, system, vector,
};
