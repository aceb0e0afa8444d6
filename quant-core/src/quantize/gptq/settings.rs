//! What may be chosen.

use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// In which order columns are rounded, and when the grids of groups are found.
///
/// Whatever the order, groups are runs of neighbouring columns, so no container needs an index of groups.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ActOrder {
    /// From the first to the last. A group's grid is found when its first column is reached, from what its weights
    /// have become by then.
    None,
    /// The columns with the largest activations first (`desc_act` with `static_groups`; llm-compressor's `static`).
    /// Grids are found before, from the float weights.
    #[default]
    StaticGroups,
    /// The groups with the largest activation first, and in each its columns by theirs (GPTQModel's
    /// `act_group_aware`). Grids are found as without an order.
    GroupAware,
}

impl ActOrder {
    /// The name that options and recipes take.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::StaticGroups => "static-groups",
            Self::GroupAware => "group-aware",
        }
    }
}

impl FromStr for ActOrder {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [Self::None, Self::StaticGroups, Self::GroupAware].into_iter().find(|o| o.name() == text).ok_or_else(
            || {
                Error::usage(
                    format!("act-order `{text}` is not known"),
                    "choose none, static-groups or group-aware",
                )
            },
        )
    }
}

/// Whose outputs are the inputs that a linear is judged on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LayerInputs {
    /// Everything before the linear is quantized already, as it will be when the model runs (`true_sequential`, in
    /// blocks and from block to block): a linear makes up for what those before it lost.
    #[default]
    Quantized,
    /// Everything before it is float: one pass of the float model serves all linears of a block.
    Float,
}

impl LayerInputs {
    /// The name that options and recipes take.
    pub fn name(self) -> &'static str {
        match self {
            Self::Quantized => "quantized",
            Self::Float => "float",
        }
    }
}

impl FromStr for LayerInputs {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [Self::Quantized, Self::Float].into_iter().find(|i| i.name() == text).ok_or_else(|| {
            Error::usage(format!("layer inputs `{text}` are not known"), "choose quantized or float")
        })
    }
}

/// How GPTQ is run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct GptqSettings {
    /// What is added to the diagonal of the Hessian, as a share of its mean.
    pub damping: f64,
    /// Columns whose updates of later ones are one matrix product.
    pub block_size: usize,
    /// The order of columns.
    pub act_order: ActOrder,
    /// What linears are judged on.
    pub inputs: LayerInputs,
}

impl GptqSettings {
    /// Larger blocks only cost time.
    const LARGEST_BLOCK: usize = 4096;

    /// Whether these can be used.
    ///
    /// # Errors
    /// [`Error::Usage`] naming what cannot.
    pub fn check(&self) -> Result<()> {
        if !(self.damping > 0.0 && self.damping <= 100.0) {
            return Err(Error::usage(
                format!("a damping of {} is not between 0 and 100", self.damping),
                "0.01 is usual: one hundredth of the mean of the Hessian's diagonal",
            ));
        }
        if !(1..=Self::LARGEST_BLOCK).contains(&self.block_size) {
            return Err(Error::usage(
                format!(
                    "a block of {} columns is not between 1 and {}",
                    self.block_size,
                    Self::LARGEST_BLOCK
                ),
                "128 is usual; it changes the speed, and the result by rounding only",
            ));
        }
        Ok(())
    }
}

impl Default for GptqSettings {
    /// A damping of 0.01, blocks of 128, largest activations first on static groups, inputs of the quantized model.
    fn default() -> Self {
        Self {
            damping: 0.01,
            block_size: 128,
            act_order: ActOrder::default(),
            inputs: LayerInputs::default(),
        }
    }
}
