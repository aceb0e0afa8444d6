//! The metrics of a result that a policy may name.

use serde::{Deserialize, Serialize};

use super::Against;
use crate::{Divergence, Estimate, Evaluation};

/// A metric of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Metric {
    /// The model's perplexity.
    Perplexity,
    /// Bits per byte of text.
    BitsPerByte,
    /// The ratio of the perplexity to the reference's.
    PerplexityRatio,
    /// Mean divergence from the reference, in nats per token.
    Kl,
    /// Median divergence over positions.
    KlMedian,
    /// 90th percentile of the divergence over positions.
    KlP90,
    /// 99th percentile of the divergence over positions.
    KlP99,
    /// 99.9th percentile of the divergence over positions.
    KlP999,
    /// Largest divergence over positions.
    KlMax,
    /// Fraction of positions at which the model and the reference have the same most likely token.
    Top1Agreement,
    /// Fraction of the reference's five most likely tokens that are among the model's five.
    Top5Overlap,
    /// Root mean square change of the next token's probability.
    RmsDeltaP,
    /// Bytes of the model's weight files.
    SizeBytes,
}

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
    /// Returns the metric's name in policies and tables.
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

    pub(super) fn check_paired(self, against: Against) -> Result<(), String> {
        match (self, against) {
            (Self::Perplexity, _) | (Self::Kl, Against::Baseline) => Ok(()),
            (Self::Kl, Against::Reference) => Err(
                "tests `kl` against the reference, but `kl` already measures the divergence from it: use a \
                [[cap]]"
                    .into(),
            ),
            (other, _) => Err(format!(
                "tests `{}`, but only `perplexity` and `kl` can be tested with paired windows: use a [[cap]]",
                other.name()
            )),
        }
    }

    /// See [`value`](Self::value).
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

    /// Returns the metric's value in a result; `None` if the result lacks the measurements that the metric needs.
    pub fn value(self, result: &Evaluation) -> Option<f64> {
        self.of(result).map(|v| v.value)
    }

    /// Whether the metric measures the distance from a reference.
    pub(super) fn is_comparison(self) -> bool {
        !matches!(self, Self::Perplexity | Self::BitsPerByte | Self::SizeBytes)
    }

    /// Each window's value, in nats per token.
    pub(super) fn windows(self, result: &Evaluation) -> Option<&[f64]> {
        match self {
            Self::Kl => result.comparison.as_ref().map(|c| c.window_kl.as_slice()),
            _ => Some(&result.scores.window_nll),
        }
    }
}

impl From<crate::statistics::Quantile> for Value {
    /// Half the interval's width, divided by 1.96.
    fn from(q: crate::statistics::Quantile) -> Self {
        let error = q.low.zip(q.high).map(|(low, high)| (high - low).max(0.0) / (2.0 * 1.96));
        Self { value: q.value, standard_error: error }
    }
}
