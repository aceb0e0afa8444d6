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

pub mod blocks;
pub mod calibrate;
pub mod checkpoint;
pub mod digest;
pub mod engines;
mod error;
pub mod format;
pub mod generate;
pub mod gguf;
pub mod model;
pub mod pipeline;
mod progress;
pub mod quantize;
pub mod random;
pub mod recipe;
pub mod run;
pub mod scheme;
pub mod transform;
pub mod vector;
pub mod wording;
pub mod worker;

pub use checkpoint::{TensorSink, TensorSource};
pub use error::{Category, Error, Result};
pub use progress::{CancelToken, Event, Observer, Silent};
