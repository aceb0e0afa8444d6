//! A model against its reference, position by position: paired, so that what both find hard
//! cancels out.

use quant_core::model::Decoder;
use quant_core::{CancelToken, Error, Observer, Result};
use serde::{Deserialize, Serialize};

use crate::journal::Measured;
use crate::log_softmax::{argmax, log_sum_exp, top};
use crate::score::{Logits, all_windows, require_finite, some_windows};
use crate::statistics::{Histogram, Quantile, quantiles};
use crate::{Estimate, EvaluationText, Journal, Scores};

/// Positions of the largest logits that are compared beside the first.
const TOP: usize = 5;
/// Where the reference's confidence is divided.
const CONFIDENCE: [f64; 6] = [0.0, 0.25, 0.5, 0.75, 0.9, 1.0];
/// Windows on which the noise floor is measured, at most.
const NOISE_WINDOWS: usize = 8;
/// A mean below so many times the noise floor says nothing of the model.
pub(crate) const AT_FLOOR: f64 = 3.0;
/// The one-sided level that the smallest detectable difference is given for.
const LEVEL: f64 = 0.05;

/// How far a model is from its reference.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Divergence {
    /// The reference's own scores.
    pub reference: Scores,
    /// Mean difference of negative log-likelihood, model minus reference, in nats a token.
    pub delta_nll: Estimate,
    /// `exp` of it: the ratio of the perplexities.
    pub perplexity_ratio: Estimate,
    /// The smallest increase of the perplexity, as a share of the reference's, that this many windows
    /// would show: at a one-sided level of 5 %, four times out of five.
    pub minimum_detectable_increase: Option<f64>,
    /// `KL(reference ‖ model)` over the full vocabulary, in nats a token.
    pub kl: Estimate,
    /// How it is spread over positions.
    pub kl_quantiles: KlQuantiles,
    /// The same as counts by size.
    pub kl_histogram: Histogram,
    /// The same where the reference is sure and where it is not.
    pub kl_by_confidence: Vec<ConfidenceBucket>,
    /// Each window's mean of it; with another model's on the same windows, differences are paired.
    pub window_kl: Vec<f64>,
    /// Share of positions at which both find the same token most likely.
    pub top1_agreement: Estimate,
    /// Share of the reference's five most likely tokens that are among the model's, averaged.
    pub top5_overlap: Estimate,
    /// Root of the mean square change of the probability of the token that follows.
    pub rms_delta_p: Estimate,
    /// What a model of no difference would show, where it was measured.
    pub noise_floor: Option<NoiseFloor>,
    /// Whether the mean divergence is below three times that: then it says nothing of the model.
    pub at_noise_floor: Option<bool>,
}

/// Quantiles of a divergence over positions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KlQuantiles {
    /// Half of all positions are below.
    pub median: Quantile,
    /// Nine of ten.
    pub p90: Quantile,
    /// 99 of 100.
    pub p99: Quantile,
    /// 999 of 1000.
    pub p999: Quantile,
    /// All.
    pub max: Quantile,
}

/// Positions at which the reference is about as sure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfidenceBucket {
    /// The reference's largest probability is at least this,
    pub from: f64,
    /// and below this, or 1.
    pub to: f64,
    /// Positions.
    pub positions: usize,
    /// Their mean divergence; absent where there is none.
    pub kl: Option<Estimate>,
}

/// How far the reference is from itself when every block's output is off by what bfloat16 rounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoiseFloor {
    /// `KL(reference ‖ disturbed reference)`, in nats a token.
    pub kl: Estimate,
    /// How it is spread over positions, as counts by size.
    pub kl_histogram: Histogram,
    /// Windows that it was measured on, spread over the text.
    pub windows: usize,
}

/// What one position shows of two models.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Position {
    reference_nll: f64,
    model_nll: f64,
    kl: f64,
    /// The reference's largest probability.
    confidence: f64,
    top1: bool,
    top5: f64,
}

impl Position {
    fn new(r: &[f32], m: &[f32], next: u32) -> Self {
        let (r_norm, m_norm) = (log_sum_exp(r), log_sum_exp(m));
        let best = argmax(r);
        let (r_top, m_top) = (top::<TOP>(r), top::<TOP>(m));
        let shared = r_top.iter().filter(|t| m_top.contains(t)).count();
        Self {
            reference_nll: r_norm - f64::from(r[next as usize]),
            model_nll: m_norm - f64::from(m[next as usize]),
            kl: divergence((r, r_norm), (m, m_norm)),
            confidence: (f64::from(r[best]) - r_norm).exp(),
            top1: best == argmax(m),
            top5: shared as f64 / r_top.len().max(1) as f64,
        }
    }

    fn delta_p(&self) -> f64 {
        (-self.model_nll).exp() - (-self.reference_nll).exp()
    }
}

impl Measured for Position {
    fn is_sound(&self) -> bool {
        let share = 0.0..=1.0 + 1e-6;
        self.reference_nll.is_sound()
            && self.model_nll.is_sound()
            && self.kl.is_sound()
            && share.contains(&self.confidence)
            && share.contains(&self.top5)
    }
}

/// `KL(r ‖ m)` of two rows of logits with the logarithms of their sums.
fn divergence((r, r_norm): (&[f32], f64), (m, m_norm): (&[f32], f64)) -> f64 {
    let term = |(&r, &m): (&f32, &f32)| {
        let log_p = f64::from(r) - r_norm;
        log_p.exp() * (log_p - (f64::from(m) - m_norm))
    };
    let kl: f64 = r.iter().zip(m).map(term).sum();
    // Rounding can push a vanishing divergence below zero; NaN stays.
    if kl < 0.0 { 0.0 } else { kl }
}

/// Runs both models over the same windows. The scores are the model's own.
///
/// # Errors
/// When a model or the journal fails, the vocabularies differ, a number is not finite, or the token
/// pulls.
pub fn compare(
    reference: &Decoder,
    model: &Decoder,
    text: &EvaluationText,
    journal: &mut Journal<Position>,
    observer: &dyn Observer,
    cancel: &CancelToken,
) -> Result<(Scores, Divergence)> {
    if reference.vocab() != model.vocab() {
        return Err(Error::usage(
            format!("the reference has {} tokens, the model {}", reference.vocab(), model.vocab()),
            "compare a model with the checkpoint it was made from",
        ));
    }
    let positions = all_windows(
        &[Logits::Model(reference), Logits::Model(model)],
        &text.windows,
        journal.take(),
        observer,
        cancel,
        |logits, next| Position::new(logits[0], logits[1], next),
        |windows| {
            let numbers = windows.iter().flatten().flat_map(|p| [p.reference_nll, p.model_nll, p.kl]);
            require_finite(numbers)?;
            journal.keep(windows)
        },
    )?;
    summarize(text, &positions)
}

/// Measures the noise floor of a reference on some of the windows.
///
/// # Errors
/// When the model fails or is not finite, or the token pulls.
pub fn noise_floor(reference: &Decoder, text: &EvaluationText, cancel: &CancelToken) -> Result<NoiseFloor> {
    let all = text.windows.len();
    let some = all.min(NOISE_WINDOWS);
    let numbers: Vec<usize> = (0..some).map(|i| i * all / some).collect();
    let sources = [Logits::Model(reference), Logits::Noisy(reference, 0)];
    let kl = some_windows(&sources, &text.windows, &numbers, cancel, |logits, _| {
        divergence((logits[0], log_sum_exp(logits[0])), (logits[1], log_sum_exp(logits[1])))
    })?;
    require_finite(kl.iter().flatten().copied())?;
    let totals: Vec<f64> = kl.iter().map(|w| w.iter().sum()).collect();
    let counts: Vec<usize> = kl.iter().map(Vec::len).collect();
    let kl_histogram = Histogram::of(kl.into_iter().flatten());
    Ok(NoiseFloor { kl: Estimate::clustered(&totals, &counts), kl_histogram, windows: some })
}

impl Divergence {
    /// Puts the noise floor beside the divergence.
    pub fn set_noise_floor(&mut self, floor: NoiseFloor) {
        self.at_noise_floor = Some(self.kl.mean < AT_FLOOR * floor.kl.mean);
        self.noise_floor = Some(floor);
    }
}

fn summarize(text: &EvaluationText, positions: &[Vec<Position>]) -> Result<(Scores, Divergence)> {
    let column = |of: fn(&Position) -> f64| -> Vec<Vec<f64>> {
        positions.iter().map(|w| w.iter().map(of).collect()).collect()
    };
    let estimate = |of: &dyn Fn(&Position) -> f64| {
        let totals: Vec<f64> = positions.iter().map(|w| w.iter().map(of).sum()).collect();
        let counts: Vec<usize> = positions.iter().map(Vec::len).collect();
        Estimate::clustered(&totals, &counts)
    };
    let model = Scores::new(text, &column(|p| p.model_nll))?;
    let reference = Scores::new(text, &column(|p| p.reference_nll))?;
    let kl = column(|p| p.kl);
    let delta_nll = estimate(&|p| p.model_nll - p.reference_nll);
    let squares = estimate(&|p| p.delta_p().powi(2));
    let [median, p90, p99, p999, max] = quantiles(&kl, &[0.5, 0.9, 0.99, 0.999, 1.0])[..] else {
        return Err(Error::Internal("quantiles were lost".into()));
    };
    let detectable = delta_nll.minimum_detectable(LEVEL, &positions.iter().map(Vec::len).collect::<Vec<_>>());
    let divergence = Divergence {
        reference,
        delta_nll,
        perplexity_ratio: delta_nll.exp(),
        minimum_detectable_increase: detectable.map(f64::exp_m1),
        kl: estimate(&|p| p.kl),
        kl_quantiles: KlQuantiles { median, p90, p99, p999, max },
        kl_histogram: Histogram::of(kl.iter().flatten().copied()),
        kl_by_confidence: by_confidence(positions),
        window_kl: kl.iter().map(|w| w.iter().sum::<f64>() / w.len() as f64).collect(),
        top1_agreement: estimate(&|p| f64::from(u8::from(p.top1))),
        top5_overlap: estimate(&|p| p.top5),
        rms_delta_p: squares.sqrt(),
        noise_floor: None,
        at_noise_floor: None,
    };
    Ok((model, divergence))
}

fn by_confidence(positions: &[Vec<Position>]) -> Vec<ConfidenceBucket> {
    let bucket = |edges: &[f64]| {
        let (from, to) = (edges[0], edges[1]);
        let inside = |p: &&Position| p.confidence >= from && (p.confidence < to || to == 1.0);
        let (totals, counts): (Vec<f64>, Vec<usize>) = positions
            .iter()
            .map(|w| w.iter().filter(inside).fold((0.0, 0), |(sum, n), p| (sum + p.kl, n + 1)))
            .filter(|(_, n)| *n > 0)
            .unzip();
        let count = counts.iter().sum();
        ConfidenceBucket {
            from,
            to,
            positions: count,
            kl: (count > 0).then(|| Estimate::clustered(&totals, &counts)),
        }
    };
    CONFIDENCE.windows(2).map(bucket).collect()
}
