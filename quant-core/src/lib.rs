//! The quantization pipeline.
//!
//! One decoder block at a time, a checkpoint is read, observed, rewritten, rounded, packed and
//! written; the modules stand in the order of that path:
//!
//! ```text
//! checkpoint ─► model ─► calibrate ─► recipe ─► transform ─► quantize ─► format ─► checkpoint
//!  (read)      (blocks    (inputs of    (what     (AWQ scale,  (codes,     (bits)     (write)
//!               to run)    linears)      each      clip)        scales,
//!                                        gets)                  zeros)
//! ```
//!
//! [`pipeline`] drives them, and [`run`] is what programs call: directories in, directories out. It is itself driven through traits, so that the library touches no
//! terminal, clock, or global state: weights come from a [`TensorSource`], go to a
//! [`TensorSink`], progress is told to an [`Observer`], and a [`CancelToken`] stops it between
//! units of work. Parallel steps run on the rayon pool the caller installed.
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
    checkpoint, digest, format, random, scheme, vector,
};
