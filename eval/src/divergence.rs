//! A model against its reference, position by position: paired, so that what both find hard
//! cancels out.

use quant_core::model::Decoder;
use quant_core::{CancelToken, Error, Observer, Result};
use serde::Serialize;

use crate::log_softmax::{argmax, log_sum_exp};
use crate::score::{each_position, require_finite};
use crate::{Estimate, EvaluationText, Perplexity};

/// How far a model is from its reference.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Divergence {
    /// The model's own perplexity.
    pub model: Perplexity,
    /// The reference's.
    pub reference: Perplexity,
    /// Mean difference of negative log-likelihood, model minus reference, in nats a token.
    pub delta_nll: Estimate,
    /// `exp` of it: the ratio of the perplexities.
    pub perplexity_ratio: Estimate,
    /// `KL(reference ‖ model)` over the full vocabulary, in nats a token.
    pub kl: Estimate,
    /// Each window's mean of it; with another model's on the same windows, differences are paired.
    pub window_kl: Vec<f64>,
    /// Share of positions at which both find the same token most likely.
    pub top1_agreement: Estimate,
}

/// Runs both models over the same windows.
///
/// # Errors
/// When a model fails, the vocabularies differ, a number is not finite, or the token pulls.
pub fn compare(
    reference: &Decoder,
    model: &Decoder,
    text: &EvaluationText,
    observer: &dyn Observer,
    cancel: &CancelToken,
) -> Result<Divergence> {
    if reference.vocab() != model.vocab() {
        return Err(Error::usage(
            format!("the reference has {} tokens, the model {}", reference.vocab(), model.vocab()),
            "compare a model with the checkpoint it was made from",
        ));
    }
    let positions = each_position(&[reference, model], &text.windows, observer, cancel, |logits, next| {
        let (r, m) = (logits[0], logits[1]);
        let (r_norm, m_norm) = (log_sum_exp(r), log_sum_exp(m));
        let kl: f64 = r
            .iter()
            .zip(m)
            .map(|(&r, &m)| {
                let log_p = f64::from(r) - r_norm;
                log_p.exp() * (log_p - (f64::from(m) - m_norm))
            })
            .sum();
        Position {
            reference_nll: r_norm - f64::from(r[next as usize]),
            model_nll: m_norm - f64::from(m[next as usize]),
            // Rounding can push a vanishing divergence below zero.
            kl: if kl < 0.0 { 0.0 } else { kl },
            agree: argmax(r) == argmax(m),
        }
    })?;
    require_finite(positions.iter().flatten().flat_map(|p| [p.reference_nll, p.model_nll, p.kl]))?;
    let column = |of: fn(&Position) -> f64| -> Vec<Vec<f64>> {
        positions.iter().map(|w| w.iter().map(of).collect()).collect()
    };
    let counts: Vec<usize> = positions.iter().map(Vec::len).collect();
    let totals =
        |of: fn(&Position) -> f64| -> Vec<f64> { positions.iter().map(|w| w.iter().map(of).sum()).collect() };
    let estimate = |of: fn(&Position) -> f64| Estimate::clustered(&totals(of), &counts);
    let delta_nll = estimate(|p| p.model_nll - p.reference_nll);
    Ok(Divergence {
        model: Perplexity::from_windows(text, &column(|p| p.model_nll))?,
        reference: Perplexity::from_windows(text, &column(|p| p.reference_nll))?,
        delta_nll,
        perplexity_ratio: delta_nll.exp(),
        kl: estimate(|p| p.kl),
        window_kl: totals(|p| p.kl).iter().zip(&counts).map(|(t, &n)| t / n as f64).collect(),
        top1_agreement: estimate(|p| f64::from(u8::from(p.agree))),
    })
}

struct Position {
    reference_nll: f64,
    model_nll: f64,
    kl: f64,
    agree: bool,
}
