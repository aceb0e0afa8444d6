//! Settings of transforms.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

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
    /// Settings of SmoothQuant.
    pub smooth: SmoothSettings,
    /// The exponent for smoothing outputs; the default depends on the granularity.
    pub outputs: Option<Alpha>,
    /// The exponent of SmoothAttention; searched if `None`.
    pub attention: Option<Alpha>,
    /// How keys and values will be cached; `None` for floats.
    pub kv: Option<KvScheme>,
    /// How the E4M3 scales of NVFP4 are chosen.
    pub scale_search: ScaleSearch,
    /// The settings of transforms that other crates define, by the name of the transform: the values of its
    /// [`StepKey`]s.
    pub others: BTreeMap<&'static str, Map<String, Value>>,
}

impl TransformSettings {
    /// Returns the value of a key of a transform that another crate defines, if it is set.
    pub fn other(&self, transform: &str, key: &str) -> Option<&Value> {
        self.others.get(transform)?.get(key)
    }
}

/// A key that a transform accepts in a `[[transform]]` entry of a recipe file.
#[derive(Debug, Clone, PartialEq)]
pub struct StepKey {
    /// The key.
    pub name: &'static str,
    /// A JSON schema of its values, with a `description`.
    pub schema: Value,
}

/// The key `alpha`.
pub(super) fn alpha_key(description: &str) -> StepKey {
    let schema = json!({
        "description": description,
        "oneOf": [{ "type": "number", "minimum": 0, "maximum": 1 }, { "const": "auto" }],
    });
    StepKey { name: "alpha", schema }
}

/// A key whose values are the names of an enum.
pub(super) fn enum_key(name: &'static str, description: &str, values: &[&str]) -> StepKey {
    StepKey { name, schema: json!({ "description": description, "enum": values }) }
}

/// Parses the value of a key that is a string.
pub(super) fn parse_text<T: FromStr<Err = Error>>(key: &str, value: &Value) -> Result<T> {
    let text = value.as_str().ok_or_else(|| {
        Error::usage(format!("transform.{key} is {value}, which is not a string"), "write it in quotes")
    })?;
    text.parse()
}

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

/// SmoothQuant's exponent: how much of the outliers is moved from the activations into the weights.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "alpha is a number from 0 to 1, or \"auto\"")]
pub enum Alpha {
    /// The same exponent for all producers.
    Fixed(f32),
    /// For each producer, the exponent with the least error in the block's output.
    Auto(Automatic),
}

/// The value `auto` of an exponent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Automatic {
    /// Found by a search.
    Auto,
}

impl Alpha {
    /// Checks that the exponent is from 0 to 1, or `auto`.
    ///
    /// # Errors
    /// [`Error::Usage`] if it is not.
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

impl Alpha {
    /// Parses the value of a recipe's key.
    ///
    /// # Errors
    /// [`Error::Usage`] when it is neither a number from 0 to 1 nor `auto`.
    pub fn from_value(value: &Value) -> Result<Self> {
        match value {
            Value::Number(number) => number.to_string().parse(),
            Value::String(text) => text.parse(),
            other => Err(invalid_alpha(&other.to_string())),
        }
    }

    /// The value in a recipe, which [`from_value`](Self::from_value) reads back.
    pub fn to_value(self) -> Value {
        match self {
            // The shortest digits that read back as the same `f32`.
            Self::Fixed(alpha) => alpha.to_string().parse::<f64>().map_or(Value::Null, Value::from),
            Self::Auto(_) => "auto".into(),
        }
    }
}

fn invalid_alpha(text: &str) -> Error {
    Error::usage(format!("invalid alpha `{text}`"), "give a number from 0 to 1, or auto")
}

impl FromStr for Alpha {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "auto" {
            return Ok(Self::Auto(Automatic::Auto));
        }
        let alpha = text.parse().map(Self::Fixed).map_err(|_| invalid_alpha(text))?;
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
        for alpha in [Alpha::Fixed(0.85), Alpha::Fixed(0.1), Alpha::Fixed(1.0), Alpha::Auto(Automatic::Auto)]
        {
            assert_eq!(Alpha::from_value(&alpha.to_value()).unwrap(), alpha);
        }
        assert_eq!(Alpha::Fixed(0.85).to_value().to_string(), "0.85");
        for value in [json!(1.5), json!(true), json!("best"), json!([0.5])] {
            assert!(Alpha::from_value(&value).is_err(), "{value}");
        }
    }
}
