//! The numbers of a result that a policy may name.

use serde::{Deserialize, Serialize};

use super::Against;
use crate::{Divergence, Estimate, Evaluation};

/// A number of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Metric {
    /// The model's perplexity.
    Perplexity,
    /// Bits a byte of text.
    BitsPerByte,
    /// The perplexity over the reference's.
    PerplexityRatio,
    /// The mean divergence from the reference, nats per token.
    Kl,
    /// Its median over positions.
    KlMedian,
    /// Its 90th percentile.
    KlP90,
    /// Its 99th percentile.
    KlP99,
    /// Its 99.9th percentile.
    KlP999,
    /// Its largest value.
    KlMax,
    /// Share of positions at which the reference's most likely token is the model's.
    Top1Agreement,
    /// Share of the reference's five most likely tokens that are among the model's.
    Top5Overlap,
    /// Root of the mean square change of the next token's probability.
    RmsDeltaP,
    /// Bytes of the model's weight files.
    SizeBytes,
}

/// A number with what is known of its error.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Value {
    pub(super) value: f64,
    pub(super) standard_error: Option<f64>,
}

impl From<Estimate> for Value {
    fn from(e: Estimate) -> Self {
        Self { value: e.mean, standard_error: e.standard_error }
    }
}

impl Metric {
    /// The name that policies and tables have for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Perplexity => "perplexity",
            Self::BitsPerByte => "bits_per_byte",
            Self::PerplexityRatio => "perplexity_ratio",
            Self::Kl => "kl",
            Self::KlMedian => "kl_median",
            Self::KlP90 => "kl_p90",
            Self::KlP99 => "kl_p99",
            Self::KlP999 => "kl_p999",
            Self::KlMax => "kl_max",
            Self::Top1Agreement => "top1_agreement",
            Self::Top5Overlap => "top5_overlap",
            Self::RmsDeltaP => "rms_delta_p",
            Self::SizeBytes => "size_bytes",
        }
    }

    /// Whether windows can be paired to test this number.
    pub(super) fn check_paired(self, against: Against) -> Result<(), String> {
        match (self, against) {
            (Self::Perplexity, _) | (Self::Kl, Against::Baseline) => Ok(()),
            (Self::Kl, Against::Reference) => {
                Err("has a test of `kl` against the reference, from which it is a distance itself: cap it"
                    .into())
            }
            (other, _) => Err(format!(
                "has a test of `{}`; windows are paired for `perplexity` and `kl`, cap the others",
                other.name()
            )),
        }
    }

    /// The same with its error.
    pub(super) fn of(self, result: &Evaluation) -> Option<Value> {
        let compared = |of: fn(&Divergence) -> Value| result.comparison.as_ref().map(of);
        let exact = |value| Value { value, standard_error: None };
        match self {
            Self::Perplexity => Some(result.scores.perplexity.into()),
            Self::BitsPerByte => result.scores.bits_per_byte.map(Value::from),
            Self::PerplexityRatio => compared(|c| c.perplexity_ratio.into()),
            Self::Kl => compared(|c| c.kl.into()),
            Self::KlMedian => compared(|c| c.kl_quantiles.median.into()),
            Self::KlP90 => compared(|c| c.kl_quantiles.p90.into()),
            Self::KlP99 => compared(|c| c.kl_quantiles.p99.into()),
            Self::KlP999 => compared(|c| c.kl_quantiles.p999.into()),
            Self::KlMax => compared(|c| c.kl_quantiles.max.into()),
            Self::Top1Agreement => compared(|c| c.top1_agreement.into()),
            Self::Top5Overlap => compared(|c| c.top5_overlap.into()),
            Self::RmsDeltaP => compared(|c| c.rms_delta_p.into()),
            Self::SizeBytes => Some(exact(result.model.size_bytes as f64)),
        }
    }

    /// The number in a result; `None` where the result was measured without what it needs.
    pub fn value(self, result: &Evaluation) -> Option<f64> {
        self.of(result).map(|v| v.value)
    }

    /// Whether it says how far a model is from its reference.
    pub(super) fn is_comparison(self) -> bool {
        !matches!(self, Self::Perplexity | Self::BitsPerByte | Self::SizeBytes)
    }

    /// Every window's value of what is tested: nats per token.
    pub(super) fn windows(self, result: &Evaluation) -> Option<&[f64]> {
        match self {
            Self::Kl => result.comparison.as_ref().map(|c| c.window_kl.as_slice()),
            _ => Some(&result.scores.window_nll),
        }
    }
}

impl From<crate::statistics::Quantile> for Value {
    /// Half the interval's width over 1.96 stands for a standard error.
    fn from(q: crate::statistics::Quantile) -> Self {
        let error = q.low.zip(q.high).map(|(low, high)| (high - low).max(0.0) / (2.0 * 1.96));
        Self { value: q.value, standard_error: error }
    }
}
