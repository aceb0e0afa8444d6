//! The quantization pipeline.
//!
//! A checkpoint is read, observed, rewritten, rounded, packed and written one decoder block at a time. The modules
//! follow the order of these stages:
//!
//! ```text
//! checkpoint ─► model ─► calibrate ─► recipe ─► transform ─► round ─► format ─► checkpoint
//!  (read)      (blocks    (inputs of    (what     (AWQ scale,  (codes,  (bits)     (write)
//!               to run)    linears)      each      clip)        scales,
//!                                        gets)                  zeros)
//! ```
//!
//! [`round`] uses the grids of [`quantize`]. [`pipeline`] drives the stages, and [`run`] is what programs call: directories in, directories out. The pipeline is itself
//! driven through traits, so that it depends on no terminal and no file layout: weights come from a [`TensorSource`]
//! and go to a [`TensorSink`], progress is reported to an [`Observer`], and a [`CancelToken`] stops it between units of
//! work. Parallel steps run on the caller's rayon pool.
//!
//! ```
//! use quant_core::checkpoint::{MemorySink, ModelDirectory};
//! use quant_core::model::Model;
//! use quant_core::pipeline::{Job, quantize_job};
//! use quant_core::recipe::{Plan, Recipe};
//! use quant_core::{CancelToken, Silent};
//! # mod tiny { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/support/tiny.rs")); }
//! # let temporary = tempfile::tempdir().unwrap();
//! # let path = temporary.path();
//! # tiny::tiny_llama(path).unwrap();
//!
//! let model = Model::open(&ModelDirectory::open(path)?)?;
//! let recipe = Recipe::parse("[quantize]\nmethod = \"rtn\"\nscheme = \"w4a16-g32\"")?;
//! let plan = Plan::new(&model, &recipe, recipe.containers[0])?; // the action for every tensor, determined before any is read
//!
//! let (observer, cancel) = (&Silent, &CancelToken::new());
//! let job = Job { model: &model, plan: &plan, windows: None, maxima: None, searches: None, observer, cancel };
//! let mut sink = MemorySink::new(plan.outputs())?; // or a writer of files
//! let report = quantize_job(&job, &mut sink)?;
//! assert!(report.bytes_after < report.bytes_before / 2);
//! # Ok::<(), quant_core::Error>(())
//! ```
#![forbid(unsafe_code)]

pub mod calibrate;
pub mod engines;
pub mod generate;
pub mod gguf;
mod keys;
pub mod model;
pub mod pipeline;
pub mod quantize;
pub mod recipe;
pub mod round;
pub mod run;
pub mod system;
pub mod transform;
pub mod units;
pub mod worker;

pub use quant_formats::{
    CancelToken, Category, Error, Event, Observer, Result, Silent, TensorSink, TensorSource, ThreadMemory,
    allocate, blocks, checkpoint, digest, format, names, random, scheme, vector, wording,
};
