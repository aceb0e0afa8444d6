//! The last stage of the path: what quantization cost, measured on a text, with an uncertainty.
//!
//! [`profile`] fixes how a text becomes windows and which tokens are scored, so that two numbers
//! with the same profile can be compared; [`mod@perplexity`] scores one model, [`divergence`] a model
//! against its reference on the same positions; [`statistics`] says how far the numbers can be
//! trusted.
#![forbid(unsafe_code)]

pub mod divergence;
mod log_softmax;
pub mod perplexity;
pub mod profile;
mod score;
pub mod statistics;

pub use divergence::{Divergence, compare};
pub use perplexity::{Perplexity, perplexity};
pub use profile::{EvaluationText, Profile};
pub use statistics::Estimate;
