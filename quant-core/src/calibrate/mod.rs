//! Turns text into token windows and observes the inputs of linears.
//!
//! ```text
//! file or rows ──► documents ────────► tokens ─► windows ─► hidden states ─► statistics
//! conversations ─► chat template ──┘
//! ```

mod by_expert;
mod cached;
mod chat;
mod expert_tokens;
mod experts;
mod in_process;
mod layout;
#[cfg_attr(not(feature = "tokenizers"), path = "without_tokenizers.rs")]
mod local_tokenizer;
mod maxima;
mod observe;
mod packing;
mod ranges;
mod rows;
mod settings;
mod statistics;
mod text;
mod tokenizer;
mod values;
mod vocabulary;
mod windows;

pub use cached::CachedMaxima;
pub use chat::{ChatTemplate, Conversation, RenderedChat};
pub use expert_tokens::{ExpertSampling, ExpertTokens};
pub(crate) use expert_tokens::{routed_to_linears, watched};
pub use experts::ExpertStates;
pub use in_process::InProcess;
pub use layout::{BatchLayout, TokenUse};
pub use maxima::ChannelMaxima;
pub use observe::HiddenStates;
pub(crate) use observe::windows_per_piece;
pub use packing::{Mask, Packing};
pub use ranges::ChannelRanges;
pub use rows::InputRows;
pub use settings::TokenizerSettings;
pub use statistics::{AbsMean, AttentionStatistic, GramSum, SampledRows, Statistic, StatisticsPass, gram};
pub use text::{Corpus, corpus_of_rows, read_corpus, read_documents, read_json_lines};
pub use tokenizer::{PlacedTokens, TextTokenizer, guard_panics, panic_is_handled};
pub(crate) use values::SpillFile;
pub use values::{BatchValues, Residence, Spill};
pub use windows::{Sampling, TokenWindows};
