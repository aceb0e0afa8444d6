//! The last stage of the pipeline: measures the accuracy loss of quantization on a text, with its uncertainty.
//!
//! ```text
//! documents ─► profile ─► windows ─► sums over the vocabulary ─► scores, divergence ─► result ─► gate, report
//! ```
//!
//! A [`Profile`] defines how a text is cut into windows and which tokens are scored, so that numbers with the same
//! profile are comparable. [`perplexity()`] scores one model; [`compare`] compares a model with its reference on the
//! same positions; [`statistics`] gives the uncertainty of the numbers. [`Evaluation`] is the file that stores them,
//! [`gate`] decides from such files whether a model has become worse, and [`report`] renders them as HTML.
//!
//! A model is either a decoder of `quant-core` or implements [`LogitsModel`], so models that other engines run are
//! scored in the same way.
#![forbid(unsafe_code)]

mod anatomy;
mod closest;
mod divergence;
mod engine;
pub mod gate;
mod journal;
mod likelihood;
mod noise;
mod perplexity;
mod position;
mod profile;
pub mod report;
mod result;
mod score;
pub mod statistics;
mod stored;
mod text;
mod vocabulary;
mod wikitext;

pub use anatomy::{Anatomy, LinearInput, anatomy};
pub use closest::{Closest, closest};
pub use divergence::{
    ConfidenceBucket, Divergence, KlQuantiles, NoiseFloor, Reference, compare, compare_all,
};
pub use engine::{LogitsModel, Scored};
pub use journal::{Journal, Measured};
pub use likelihood::{Likelihood, log_likelihoods};
pub use perplexity::{Scores, disturbed_perplexity, perplexity};
pub use position::Position;
pub use profile::{Profile, ProfileRequest};
pub use result::{Evaluation, ModelIdentity, SCHEMA, SchemeShare, TextIdentity, Tool};
pub use statistics::Estimate;
pub use stored::{StoredReference, is_stored_reference, store_reference};
pub use text::{Bos, BosPolicy, EvaluationText, Tokenization, Window};
