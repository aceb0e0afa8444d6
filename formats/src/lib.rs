//! Quantized checkpoints as files: read and checked, unpacked into codes, scales and zeros, packed again and written.
//!
//! ```text
//! checkpoint ─► format ─► quantize ─► WeightView        an engine loads a quantized linear
//!  (tensors)    (reader)  (QuantizedTensor)
//!
//! quantize ─► format ─► checkpoint                      a quantizer writes one
//!             (container)  (writer)
//! ```
//!
//! This is the part of the pipeline that knows bytes and no model: it builds without a tensor library, a tokenizer or
//! CUDA.
#![forbid(unsafe_code)]

pub mod blocks;
pub mod checkpoint;
#[cfg(feature = "write")]
pub mod digest;
mod error;
pub mod format;
mod progress;
pub mod quantize;
pub mod random;
pub mod scheme;
pub mod vector;
pub mod worker;

pub use checkpoint::{TensorSink, TensorSource};
pub use error::{Category, Error, Indivisible, Result};
pub use progress::{CancelToken, Event, Observer, Silent, timed};
