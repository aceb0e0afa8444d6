//! The model whose activations a rounding uses.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::keys::{Named, schema_of_names};
use crate::names::unknown;
use crate::{Error, Result};

/// The model whose activations are the inputs of linears: the quantized or the float model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum LayerInputs {
    /// All earlier layers are quantized, as they will be at inference (`true_sequential`, within blocks and from block
    /// to block): a linear compensates the errors of those before it.
    #[default]
    Quantized,
    /// All earlier layers are float: one pass of the float model serves all linears of a block.
    Float,
}

impl LayerInputs {
    const ALL: [Named<Self>; 2] = [
        (Self::Quantized, "quantized", "all earlier layers are quantized, as they will be at inference"),
        (Self::Float, "float", "all earlier layers are float"),
    ];

    /// A schema of the names with their descriptions.
    pub(crate) fn schema() -> Value {
        schema_of_names(&Self::ALL)
    }

    /// The name in options and recipes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Quantized => Self::ALL[0].1,
            Self::Float => Self::ALL[1].1,
        }
    }
}

impl FromStr for LayerInputs {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let known = Self::ALL.iter().find(|(_, name, _)| *name == text).map(|(inputs, ..)| *inputs);
        known.ok_or_else(|| unknown("layer inputs", text, "values", &Self::ALL.map(|(_, name, _)| name)))
    }
}
