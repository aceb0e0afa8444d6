//! Settings of transforms.

use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Search;
use crate::calibrate::ChannelMaxima;
use crate::model::KvScheme;
use crate::quantize::ScaleSearch;
use crate::{Error, Result};

/// Settings of all transforms; each uses its own part.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TransformSettings {
    /// AWQ: how candidates are compared.
    pub search: Search,
    /// SmoothQuant.
    pub smooth: SmoothSettings,
    /// The exponent for smoothing outputs; the default depends on the granularity.
    pub outputs: Option<Alpha>,
    /// The exponent of SmoothAttention; searched if `None`.
    pub attention: Option<Alpha>,
    /// How keys and values will be cached; `None` for floats.
    pub kv: Option<KvScheme>,
    /// How the E4M3 scales of NVFP4 are chosen.
    pub scale_search: ScaleSearch,
}

/// The keys that a recipe file may set for a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepSettings {
    /// `search`
    pub search: Option<Search>,
    /// `alpha`
    pub alpha: Option<Alpha>,
    /// `producers`
    pub producers: Option<Producers>,
}

impl StepSettings {
    /// The keys, and whether they are set.
    pub fn keys(&self) -> [(&'static str, bool); 3] {
        [
            ("search", self.search.is_some()),
            ("alpha", self.alpha.is_some()),
            ("producers", self.producers.is_some()),
        ]
    }
}

/// Settings of SmoothQuant.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SmoothSettings {
    /// The exponent of the activations; the family's default if `None`.
    pub alpha: Option<Alpha>,
    /// Which producers are divided.
    pub producers: Producers,
    /// Channel maxima from a file; if `None`, they are gathered from the calibration batch.
    pub maxima: Option<Arc<ChannelMaxima>>,
}

/// SmoothQuant's exponent: how much of the outliers is moved from the activations into the weights.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "alpha is a number from 0 to 1, or \"auto\"")]
pub enum Alpha {
    /// The same exponent for all producers.
    Fixed(f32),
    /// For each producer, the exponent with the least error in the block's output.
    Auto(Automatic),
}

/// `auto`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Automatic {
    /// Found by a search.
    Auto,
}

impl Alpha {
    /// Checks that the exponent is between 0 and 1.
    ///
    /// # Errors
    /// [`Error::Usage`].
    pub fn check(self) -> Result<()> {
        match self {
            Self::Fixed(alpha) if !(0.0..=1.0).contains(&alpha) => Err(Error::usage(
                format!("alpha is {alpha}; it must be from 0 to 1, or auto"),
                "choose a value in this range: 0 leaves all outliers in the activations, and 1 moves all of \
                them into the weights",
            )),
            _ => Ok(()),
        }
    }
}

impl FromStr for Alpha {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "auto" {
            return Ok(Self::Auto(Automatic::Auto));
        }
        let alpha = text.parse().map(Self::Fixed).map_err(|_| {
            Error::usage(format!("invalid alpha `{text}`"), "give a number from 0 to 1, or auto")
        })?;
        alpha.check()?;
        Ok(alpha)
    }
}

/// The producers that SmoothQuant divides by its scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
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
            _ => Err(Error::usage(format!("unknown producers `{text}`"), "known producers: norms, all")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponents() {
        assert_eq!("0.5".parse::<Alpha>().unwrap(), Alpha::Fixed(0.5));
        assert_eq!("auto".parse::<Alpha>().unwrap(), Alpha::Auto(Automatic::Auto));
        for text in ["1.1", "-0.1", "NaN", "inf", "a", ""] {
            assert!(text.parse::<Alpha>().is_err(), "{text}");
        }
    }
}
