//! Quantized checkpoints as files: reads and checks them, unpacks them into codes, scales and zero points, and packs
//! and writes them again.
//!
//! ```text
//! checkpoint ─► format ─► quantize ─► WeightView        an engine loads a quantized linear
//!  (tensors)    (reader)  (QuantizedTensor)
//!
//! quantize ─► format ─► checkpoint                      a quantizer writes one
//!             (container)  (writer)
//! ```
//!
//! This is the part of the pipeline that works on bytes, independently of models: it builds without a tensor library, a
//! tokenizer or CUDA.
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
pub mod system;
pub mod vector;
pub mod worker;

pub use checkpoint::{TensorSink, TensorSource};
pub use error::{Category, Error, Indivisible, Result};
pub use progress::{CancelToken, Event, Observer, Silent, timed};
