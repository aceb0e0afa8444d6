//! What a user may say about transforms.

use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Search;
use crate::calibrate::ChannelMaxima;
use crate::model::KvScheme;
use crate::quantize::ScaleSearch;
use crate::{Error, Result};

/// How transforms are run; each looks at its own part.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TransformSettings {
    /// AWQ: how candidates are compared.
    pub search: Search,
    /// SmoothQuant.
    pub smooth: SmoothSettings,
    /// The exponent of the smoothing of outputs; what is usual for the granularity where nothing is said.
    pub outputs: Option<Alpha>,
    /// The exponent of SmoothAttention; searched where nothing is said.
    pub attention: Option<Alpha>,
    /// How keys and values are going to be cached, where not as floats.
    pub kv: Option<KvScheme>,
    /// How the E4M3 scales of NVFP4 are chosen.
    pub scale_search: ScaleSearch,
}

/// What a recipe file may say of a step.
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
    /// Keys, and whether they are there.
    pub fn keys(&self) -> [(&'static str, bool); 3] {
        [
            ("search", self.search.is_some()),
            ("alpha", self.alpha.is_some()),
            ("producers", self.producers.is_some()),
        ]
    }
}

/// How SmoothQuant is run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SmoothSettings {
    /// The exponent of the activations; the family's where nothing is said.
    pub alpha: Option<Alpha>,
    /// Which producers are divided.
    pub producers: Producers,
    /// Maxima that were gathered before; from the calibration batch without.
    pub maxima: Option<Arc<ChannelMaxima>>,
}

/// SmoothQuant's exponent: how much of the outliers moves from the activations into the weights.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "alpha is a number from 0 to 1, or \"auto\"")]
pub enum Alpha {
    /// The same for all.
    Fixed(f32),
    /// For every producer the one that leaves the least error in its block's output.
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
    /// Fails when it is outside 0 to 1.
    ///
    /// # Errors
    /// [`Error::Usage`].
    pub fn check(self) -> Result<()> {
        match self {
            Self::Fixed(alpha) if !(0.0..=1.0).contains(&alpha) => Err(Error::usage(
                format!("alpha {alpha} is outside 0 to 1"),
                "give a share: 0 leaves all outliers to the activations, 1 moves all into the weights",
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
            Error::usage(format!("alpha `{text}` is not understood"), "give a number from 0 to 1, or auto")
        })?;
        alpha.check()?;
        Ok(alpha)
    }
}

/// What SmoothQuant divides by its scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Producers {
    /// Norms, as the paper does.
    #[default]
    Norms,
    /// Linears too, whose outputs reach the next linear channel by channel: up_proj before down_proj, v_proj before
    /// o_proj.
    All,
}

impl FromStr for Producers {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "norms" => Ok(Self::Norms),
            "all" => Ok(Self::All),
            _ => Err(Error::usage(format!("producers `{text}` are not known"), "known: norms, all")),
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
