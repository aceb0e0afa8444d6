//! Perplexity of one model.

use std::ops::Range;

#[cfg(feature = "decoders")]
use quant_core::model::Decoder;
#[cfg(feature = "decoders")]
use quant_formats::Silent;
use quant_formats::{CancelToken, Error, Observer, Result};
use serde::{Deserialize, Serialize};

use crate::score::{Panel, dropped, require_finite};
use crate::{Estimate, EvaluationText, Journal, Profile, Scored};

/// Perplexity of a model on a text, and related measures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Scores {
    /// `exp` of the mean negative log-likelihood.
    pub perplexity: Estimate,
    /// Mean negative log-likelihood in nats per token.
    pub nll: Estimate,
    /// Mean negative log-likelihood in bits per byte of the text that the scored tokens cover, comparable across
    /// tokenizers. Absent if they cover no bytes.
    pub bits_per_byte: Option<Estimate>,
    /// Perplexity per word: `exp` of the nats per word. Present if the profile reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub word_perplexity: Option<Estimate>,
    /// Perplexity per byte: `exp` of the nats per byte. Present if the profile reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub byte_perplexity: Option<Estimate>,
    /// The standard error of the perplexity as llama.cpp computes it, which assumes independent tokens. Present only
    /// for the profile `llamacpp`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_standard_error: Option<f64>,
    /// Each window's mean negative log-likelihood.
    pub window_nll: Vec<f64>,
}

impl Scores {
    /// Computes the scores from every window's mean negative log-likelihood and its number of scored tokens. Measures
    /// per byte and per word are absent.
    pub fn of_windows(window_nll: Vec<f64>, tokens: &[usize]) -> Self {
        let totals: Vec<f64> = window_nll.iter().zip(tokens).map(|(mean, &n)| mean * n as f64).collect();
        let nll = Estimate::clustered(&totals, tokens);
        Self {
            perplexity: nll.exp(),
            nll,
            bits_per_byte: None,
            word_perplexity: None,
            byte_perplexity: None,
            token_standard_error: None,
            window_nll,
        }
    }

    /// Computes the scores from the negative log-likelihoods of every window.
    ///
    /// # Errors
    /// When a value is not finite, or the perplexity overflows.
    pub(crate) fn new(text: &EvaluationText, nll: &[Vec<f64>]) -> Result<Self> {
        require_finite(nll.iter().flatten().copied())?;
        let totals: Vec<f64> = nll.iter().map(|w| w.iter().sum()).collect();
        let counts: Vec<usize> = nll.iter().map(Vec::len).collect();
        let estimate = Estimate::clustered(&totals, &counts);
        let perplexity = estimate.exp();
        if !perplexity.mean.is_finite() {
            return Err(Error::Logits {
                reason: format!(
                    "the mean loss is {:.1} nats per token, so the perplexity overflows",
                    estimate.mean
                ),
            });
        }
        let tokens = counts.iter().sum::<usize>() as f64;
        let per_byte = (text.scored_bytes > 0).then(|| estimate.scaled(tokens / text.scored_bytes as f64));
        let rolling = matches!(text.profile, Profile::LmEvalRolling { .. });
        let llama_cpp = matches!(text.profile, Profile::LlamaCpp { .. });
        Ok(Self {
            perplexity,
            nll: estimate,
            bits_per_byte: per_byte.map(|e| e.scaled(1.0 / std::f64::consts::LN_2)),
            word_perplexity: text.words.map(|words| estimate.scaled(tokens / words as f64).exp()),
            byte_perplexity: per_byte.filter(|_| rolling).map(Estimate::exp),
            token_standard_error: llama_cpp.then(|| {
                let squares: f64 = nll.iter().flatten().map(|x| (x - estimate.mean).powi(2)).sum();
                (squares / tokens / (tokens - 1.0)).sqrt() * perplexity.mean
            }),
            window_nll: totals.iter().zip(&counts).map(|(t, &n)| t / n as f64).collect(),
        })
    }
}

/// Scores a text with a relative disturbance of up to 2⁻⁹ on every block's output, from a seed. This simulates the
/// rounding of a different kernel.
///
/// # Errors
/// When the model fails, a position's likelihood is not finite, or when cancelled.
#[cfg(feature = "decoders")]
pub fn disturbed_perplexity(
    decoder: &Decoder,
    text: &EvaluationText,
    seed: u64,
    cancel: &CancelToken,
) -> Result<Scores> {
    let panel = Panel::new([Box::new(crate::decoder::Blocks(decoder, Some(seed))) as _])?;
    let nll = panel.run(
        (&text.windows, 0..text.windows.len()),
        Vec::new(),
        (&Silent, cancel),
        |models, _| models[0].nll(),
        |_| Ok(()),
        &mut dropped,
    )?;
    Scores::new(text, &nll)
}

/// Scores a text. A decoder's scores are bit-identical for any number of threads, and for resumed runs.
///
/// # Errors
/// When the model or the journal fails, a position's likelihood is not finite, or when cancelled.
///
#[cfg_attr(feature = "decoders", doc = "```")]
#[cfg_attr(not(feature = "decoders"), doc = "```ignore")]
/// use quant_core::calibrate::{TextTokenizer, TokenizerSettings};
/// use quant_core::checkpoint::ModelDirectory;
/// use quant_core::model::{Decoder, Model};
/// use quant_core::{CancelToken, Silent};
/// use quant_evaluator::{EvaluationText, Journal, Profile, Tokenization, perplexity};
/// # mod tiny { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../quant-core/examples/support/tiny.rs")); }
/// # let temporary = tempfile::tempdir().unwrap();
/// # tiny::tiny_llama(temporary.path()).unwrap();
/// # let directory = ModelDirectory::open(temporary.path())?;
///
/// let tokenizer = TextTokenizer::open(&directory.tokenizer_path().unwrap())?;
/// let settings = TokenizerSettings::open(&directory)?;
/// let tokenization = Tokenization { tokenizer: &tokenizer, settings: &settings, sha256: String::new() };
/// let document: String = (0..400).map(|i| format!("w{} ", i * i % 61)).collect();
/// let profile = Profile::gptq(64)?;
/// let text = EvaluationText::new(&tokenization, &[document], profile.into(), None, "numbers".as_ref())?;
///
/// let cancel = CancelToken::new();
/// let decoder = Decoder::load(&Model::open(&directory)?, profile.window(), &Silent, &cancel)?;
/// let scores = perplexity(&decoder, &text, &mut Journal::none(), &Silent, &cancel)?;
/// assert_eq!(scores.window_nll.len(), 6);
/// assert!(scores.perplexity.mean > 1.0 && scores.perplexity.standard_error.is_some());
/// # Ok::<(), quant_core::Error>(())
/// ```
pub fn perplexity<'a>(
    model: impl Into<Scored<'a>>,
    text: &EvaluationText,
    journal: &mut Journal<f64>,
    observer: &dyn Observer,
    cancel: &CancelToken,
) -> Result<Scores> {
    let all = 0..text.windows.len();
    Scores::new(text, &measure_likelihoods(model.into(), text, all, journal, (observer, cancel))?)
}

pub(crate) fn measure_likelihoods(
    model: Scored<'_>,
    text: &EvaluationText,
    windows: Range<usize>,
    journal: &mut Journal<f64>,
    progress: (&dyn Observer, &CancelToken),
) -> Result<Vec<Vec<f64>>> {
    Panel::new([model.origin()])?.run(
        (&text.windows, windows),
        journal.take(),
        progress,
        |models, _| models[0].nll(),
        |windows| {
            require_finite(windows.iter().flatten().copied())?;
            journal.keep(windows)
        },
        &mut dropped,
    )
}
