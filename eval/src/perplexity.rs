//! Perplexity of one model.

use quant_core::model::Decoder;
use quant_core::{CancelToken, Error, Observer, Result};
use serde::Serialize;

use crate::log_softmax::log_sum_exp;
use crate::score::{each_position, require_finite};
use crate::{Estimate, EvaluationText};

/// How well a model predicts a text.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Perplexity {
    /// The rule of scoring.
    pub profile: String,
    /// Windows.
    pub windows: usize,
    /// Tokens that were scored.
    pub tokens_scored: usize,
    /// Mean negative log-likelihood in nats a token.
    pub nll: Estimate,
    /// `exp` of it.
    pub perplexity: Estimate,
    /// Each window's mean negative log-likelihood.
    pub window_nll: Vec<f64>,
    /// SHA-256 of the text.
    pub text_sha256: String,
    /// SHA-256 of the scored windows' tokens.
    pub tokens_sha256: String,
}

impl Perplexity {
    /// From every window's negative log-likelihoods.
    ///
    /// # Errors
    /// When the perplexity is too large for a number.
    pub(crate) fn from_windows(text: &EvaluationText, nll: &[Vec<f64>]) -> Result<Self> {
        let totals: Vec<f64> = nll.iter().map(|w| w.iter().sum()).collect();
        let counts: Vec<usize> = nll.iter().map(Vec::len).collect();
        let estimate = Estimate::clustered(&totals, &counts);
        let perplexity = estimate.exp();
        if !perplexity.mean.is_finite() {
            return Err(Error::Numeric {
                tensor: "logits".into(),
                reason: format!("{:.1} nats a token are a perplexity beyond all numbers", estimate.mean),
            });
        }
        Ok(Self {
            profile: text.profile.id(),
            windows: nll.len(),
            tokens_scored: counts.iter().sum(),
            nll: estimate,
            perplexity,
            window_nll: totals.iter().zip(&counts).map(|(t, &n)| t / n as f64).collect(),
            text_sha256: text.text_sha256.clone(),
            tokens_sha256: text.tokens_sha256.clone(),
        })
    }
}

/// Scores a text: the same bits for any number of threads.
///
/// # Errors
/// When the model fails, a position's likelihood is not finite, or the token pulls.
pub fn perplexity(
    decoder: &Decoder,
    text: &EvaluationText,
    observer: &dyn Observer,
    cancel: &CancelToken,
) -> Result<Perplexity> {
    let nll = each_position(&[decoder], &text.windows, observer, cancel, |logits, next| {
        log_sum_exp(logits[0]) - f64::from(logits[0][next as usize])
    })?;
    require_finite(nll.iter().flatten().copied())?;
    Perplexity::from_windows(text, &nll)
}
