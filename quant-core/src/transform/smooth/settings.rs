//! Settings of SmoothQuant and of the smoothing of outputs.

use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::calibrate::ChannelMaxima;
use crate::keys::{StepKey, no_such_key, parse_text};
use crate::names::unknown;
use crate::transform::settings::alpha_key;
use crate::transform::{Alpha, TransformSettings};
use crate::{Error, Result};

/// Settings of SmoothQuant.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SmoothSettings {
    /// The exponent of the activations; the family's default if `None`.
    pub alpha: Option<Alpha>,
    /// The producers that are divided.
    pub producers: Producers,
    /// Channel maxima from a file; if `None`, they are gathered from the calibration batch.
    pub maxima: Option<Arc<ChannelMaxima>>,
}

impl SmoothSettings {
    pub(super) fn of(settings: &TransformSettings) -> Self {
        settings.steps.get()
    }

    pub(super) fn keys() -> Vec<StepKey> {
        let producers = "What is divided by the scales: norms, or also linears whose outputs reach the next linear \
                         channel by channel.";
        vec![
            alpha_key(
                "The exponent of the activations, from 0 to 1, or `auto`. The default is the family's.",
                "alpha",
                "SmoothQuant: migration strength, 0 to 1, or auto (least error per block) [default: the family's]",
            ),
            StepKey::of_names("producers", producers, &["norms", "all"]).with_setting(
                "smooth_producers",
                "SmoothQuant: where the scales are folded in: norms, or all (also linears that feed a linear channel \
                 by channel) [default: norms]",
            ),
            StepKey::of_file(
                "maxima",
                "channel_maxima",
                "SmoothQuant: read channel maxima from FILE (written by ‹save_channel_maxima›) instead of calibrating",
            ),
        ]
    }

    pub(super) fn set(&mut self, key: &str, value: &Value) -> Result<()> {
        match key {
            "producers" => self.producers = parse_text(key, value)?,
            "alpha" => self.alpha = Some(Alpha::from_value(value)?),
            _ => return Err(no_such_key("smoothquant", key)),
        }
        Ok(())
    }

    pub(super) fn described(&self) -> Map<String, Value> {
        let alpha = self.alpha.map(|alpha| ("alpha".to_owned(), alpha.to_value()));
        alpha.into_iter().chain([("producers".to_owned(), json!(self.producers))]).collect()
    }

    pub(super) fn fingerprint(&self) -> Value {
        let maxima = self.maxima.as_ref().map(|maxima| maxima.sha256());
        json!({ "alpha": self.alpha, "producers": self.producers, "maxima": maxima })
    }
}

/// The producers that SmoothQuant divides by its scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Producers {
    /// Norms, as in the paper.
    #[default]
    Norms,
    /// Also linears whose outputs reach the next linear channel by channel: up_proj before down_proj, v_proj before
    /// o_proj.
    All,
}

impl FromStr for Producers {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "norms" => Ok(Self::Norms),
            "all" => Ok(Self::All),
            _ => Err(unknown("producers", text, "producers", &["norms", "all"])),
        }
    }
}

/// Settings of the smoothing of outputs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct OutputSettings {
    /// The exponent; the default depends on the granularity.
    pub alpha: Option<Alpha>,
}

impl OutputSettings {
    pub(super) fn keys() -> Vec<StepKey> {
        vec![alpha_key(
            "The exponent of the activations, from 0 to 1, or `auto`. The default is 0.3 for groups, 0.1 for rows.",
            "output_alpha",
            "QoQ: smoothing exponent of the inputs of o_proj and down_proj, 0 to 1, or auto [default: 0.3, or 0.1 with \
             one scale per row]",
        )]
    }

    pub(super) fn described(&self) -> Map<String, Value> {
        self.alpha.map(|alpha| ("alpha".to_owned(), alpha.to_value())).into_iter().collect()
    }

    pub(super) fn fingerprint(&self) -> Value {
        json!(self.alpha)
    }
}
