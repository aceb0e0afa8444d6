//! Reads and writes quantized checkpoints: checks their files, unpacks weights into codes, scales and zero points, and
//! packs and writes them.
//!
//! ```text
//! checkpoint ─► format ─► quantize ─► WeightView        an engine loads a quantized linear
//!  (tensors)    (reader)  (QuantizedTensor)
//!
//! quantize ─► format ─► checkpoint                      a quantizer writes one
//!             (container)  (writer)
//! ```
//!
//! To load a model, open it as a [`format::QuantizedCheckpoint`]; the example `packed_linear` multiplies by one of its
//! linears. The functions below round weights.
//!
//! This crate works on bytes, independently of models. By default, it needs no tensor library, and never a tokenizer or
//! CUDA.
//!
//! ```
//! use quant_formats::checkpoint::Dtype;
//! use quant_formats::quantize::quantize_rtn;
//! use quant_formats::scheme::LinearScheme;
//!
//! let scheme: LinearScheme = "w4a16-g32-sym".parse()?;
//! let weight: Vec<f32> = (0..64).map(|i| (i as f32 * 0.7).sin()).collect(); // [1, 64]
//! let rounded = quantize_rtn("proj", &weight, [1, 64], scheme, Dtype::F16, None)?;
//! let back = rounded.dequantize()?;
//! assert!(weight.iter().zip(&back).all(|(a, b)| (a - b).abs() < 0.08));
//! # Ok::<(), quant_formats::Error>(())
//! ```
#![forbid(unsafe_code)]

pub mod allocate;
pub mod blocks;
pub mod checkpoint;
#[cfg(feature = "write")]
pub mod digest;
mod error;
pub mod format;
pub mod names;
mod progress;
pub mod quantize;
pub mod random;
pub mod scheme;
pub mod system;
pub mod vector;
pub mod wording;
pub mod worker;

pub use checkpoint::{TensorSink, TensorSource};
pub use error::{Category, Error, Indivisible, Result, ThreadMemory};
pub use progress::{CancelToken, Event, Observer, Silent, timed};

/// The page's example is compiled.
#[cfg(doctest)]
#[doc = include_str!("../../docs/crates.md")]
struct CratesPage;
