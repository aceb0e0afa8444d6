//! The last stage of the path: what quantization cost, measured on a text, with an uncertainty.
//!
//! ```text
//! documents ─► profile ─► windows ─► sums over the vocabulary ─► scores, divergence ─► result ─► gate, report
//! ```
//!
//! A [`Profile`] fixes how a text becomes windows and which tokens are scored, so that two numbers
//! with the same profile can be compared; [`perplexity()`] scores one model, [`compare`] a model
//! against its reference on the same positions; [`statistics`] says how far the numbers can be
//! trusted; [`Evaluation`] is the file they are kept in, and [`gate`] decides on such files whether a
//! model has become worse, and [`report`] shows them to people.
//!
//! Models are decoders of `quant-core`, or any that implement [`LogitsModel`]: an engine's own, scored the same way.
#![forbid(unsafe_code)]

mod anatomy;
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
