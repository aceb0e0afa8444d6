//! The last stage of the pipeline: measures the accuracy loss of quantization on a text, with its uncertainty.
//!
//! ```text
//! documents ─► profile ─► windows ─► sums over the vocabulary ─► scores, divergence ─► result ─► gate, report
//! ```
//!
//! A [`Profile`] defines how a text is cut into windows and which tokens are scored. [`perplexity()`] scores one model;
//! [`compare`] compares a model with its reference on the same positions; [`statistics`] gives the uncertainty. An
//! [`Evaluation`] stores the numbers, [`gate`] decides whether a model has become worse, and [`report`] renders HTML.
//!
//! A model is a decoder of `quant-core` or implements [`LogitsModel`]. Decoders, stored references and reports of
//! quantization need the feature `decoders`, which is on by default; without it, the crate depends on neither
//! `quant-core` nor candle.
#![forbid(unsafe_code)]

mod anatomy;
mod closest;
#[cfg(feature = "decoders")]
mod decoder;
mod divergence;
mod engine;
pub mod gate;
mod journal;
#[cfg(feature = "decoders")]
mod likelihood;
#[cfg(feature = "decoders")]
mod noise;
mod perplexity;
mod position;
mod profile;
pub mod report;
mod result;
mod score;
mod shards;
mod shared;
pub mod statistics;
#[cfg(feature = "decoders")]
mod stored;
mod text;
mod tokenizer;
mod vocabulary;
mod wikitext;

#[cfg(feature = "decoders")]
pub use anatomy::anatomy;
pub use anatomy::{Anatomy, LinearInput};
pub use closest::{Closest, closest};
#[cfg(feature = "decoders")]
pub use decoder::{RenderedTokenization, Tokenization};
pub use divergence::{
    ConfidenceBucket, Divergence, KlQuantiles, NoiseFloor, Reference, compare, compare_all,
};
pub use engine::{EngineError, LogitsBatch, LogitsModel, Scored, UnscoredWindow};
pub use journal::{Journal, Measured};
#[cfg(feature = "decoders")]
pub use likelihood::{Likelihood, log_likelihoods};
#[cfg(feature = "decoders")]
pub use perplexity::disturbed_perplexity;
pub use perplexity::{Scores, perplexity};
pub use position::Position;
pub use profile::{Profile, ProfileRequest};
pub use result::{Evaluation, ModelIdentity, SCHEMA, SchemeShare, TextIdentity, Tool};
pub use shards::{
    MAX_SHARDS, Shard, compare_shard, divergence_of_shards, merged_shards, perplexity_shard,
    scores_of_shards, shard_journal,
};
pub use shared::ShardFiles;
pub use statistics::Estimate;
#[cfg(feature = "decoders")]
pub use stored::{StoredReference, is_stored_reference, store_reference};
pub use text::{Bos, BosPolicy, EvaluationText, Window};
pub use tokenizer::{EncodedText, Tokenizer};

pub use quant_formats::{CancelToken, Category, Error, Observer, Result, Silent, digest, wording};
