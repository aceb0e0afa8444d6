//! Settings of GPTQ.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::keys::{Named, StepKey, no_such_key, parse_count, parse_number, parse_text, schema_of_names};
use crate::names::unknown;
use crate::quantize::layer_inputs::LayerInputs;
use crate::{Error, Result};

/// The order in which columns are rounded, and when the grids of groups are computed.
///
/// Groups always consist of adjacent columns, whatever the order, so no format needs an index of groups.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ActOrder {
    /// Ascending order. A group's grid is computed when its first column is reached, from weights that include the
    /// updates of earlier columns.
    None,
    /// Columns in descending order of their activations (`desc_act` with `static_groups`; llm-compressor's `static`).
    /// Grids are computed beforehand, from the float weights.
    #[default]
    StaticGroups,
    /// Groups in descending order of their largest activation, and within a group, columns in descending order of their
    /// activation (GPTQModel's `act_group_aware`). Grids are computed as for `none`.
    GroupAware,
}

impl ActOrder {
    const ALL: [Named<Self>; 3] = [
        (Self::None, "none", "ascending, with grids computed from updated weights"),
        (Self::StaticGroups, "static-groups", "largest inputs first, with grids computed beforehand"),
        (
            Self::GroupAware,
            "group-aware",
            "groups with the largest inputs first, and within them columns with the largest inputs",
        ),
    ];

    /// The name in options and recipes.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => Self::ALL[0].1,
            Self::StaticGroups => Self::ALL[1].1,
            Self::GroupAware => Self::ALL[2].1,
        }
    }
}

impl FromStr for ActOrder {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let known = Self::ALL.iter().find(|(_, name, _)| *name == text).map(|(order, ..)| *order);
        known.ok_or_else(|| unknown("act order", text, "values", &Self::ALL.map(|(_, name, _)| name)))
    }
}

/// Settings of GPTQ.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct GptqSettings {
    /// The value added to the diagonal of the Hessian, as a fraction of the diagonal's mean.
    pub damping: f64,
    /// The number of columns whose updates to later columns are one matrix product.
    pub block_size: usize,
    /// The order of columns.
    pub act_order: ActOrder,
    /// The model whose activations are the inputs of linears.
    pub inputs: LayerInputs,
    /// With inputs of the quantized model: the number of blocks in a span. The first block of a span gets the hidden
    /// states of the float model, so spans do not depend on each other. `None` means that all blocks are one span.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub span_blocks: Option<usize>,
}

impl GptqSettings {
    /// The keys that apply to the blocks of GGUF files: columns stay in file order in runs of a fixed size, and inputs
    /// come from the float model.
    pub(crate) const KEYS_OF_BLOCKS: &[&str] = &["damping"];

    /// The maximum block size: larger blocks would only take more time.
    const MAX_BLOCK_SIZE: usize = 4096;

    /// The keys of these settings, for recipe files, requests and the command line.
    pub fn keys() -> Vec<StepKey> {
        let (orders, inputs) = (schema_of_names(&ActOrder::ALL), LayerInputs::schema());
        let count = |maximum: Option<usize>| match maximum {
            Some(maximum) => json!({ "type": "integer", "minimum": 1, "maximum": maximum }),
            None => json!({ "type": "integer", "minimum": 1 }),
        };
        vec![
            StepKey::new(
                "damping",
                "The value added to the diagonal of the Hessian, as a fraction of the diagonal's mean.",
                json!({ "type": "number", "exclusiveMinimum": 0, "maximum": 100 }),
            )
            .with_setting(
                "damping",
                "GPTQ: damping added to the diagonal of the Hessian, as a fraction of the diagonal's mean [default: \
                 0.01]",
            ),
            StepKey::new(
                "block_size",
                "The number of columns whose updates to later columns are one matrix product.",
                count(Some(Self::MAX_BLOCK_SIZE)),
            )
            .with_setting(
                "block_size",
                "GPTQ: columns per block of lazy updates; affects speed, and results only by rounding [default: 128]",
            ),
            StepKey::new("act_order", "The order in which columns are rounded.", orders).with_setting(
                "act_order",
                "GPTQ: order of columns: none, static-groups (largest inputs first, grids fixed before) or group-aware \
                 (largest inputs first among and within groups) [default: static-groups]",
            ),
            StepKey::new(
                "inputs",
                "The model whose activations are the inputs of linears: the quantized or the float model.",
                inputs,
            )
            .with_setting(
                "layer_inputs",
                "GPTQ: inputs on which a linear's error is measured, from the quantized or the float model [default: \
                 quantized; float for qoq]",
            ),
            StepKey::new(
                "span_blocks",
                "With inputs of the quantized model: blocks in a span, whose first block gets the hidden states of the \
                 float model. Without it, all blocks are one span.",
                count(None),
            )
            .with_setting(
                "span_blocks",
                "GPTQ: blocks in a span; the first block of a span gets its inputs from the float model, so that spans \
                 can be quantized at the same time [default: all blocks]",
            ),
        ]
    }

    /// Applies the value of one of the [`keys`](Self::keys). [`check`](Self::check) checks the values together.
    ///
    /// # Errors
    /// [`Error::Usage`] when the value has a different type, is not one of the names, or is out of range.
    pub fn set(&mut self, key: &str, value: &Value) -> Result<()> {
        match key {
            "damping" => self.damping = parse_number(key, value)?,
            "block_size" => self.block_size = parse_count(key, value)?,
            "act_order" => self.act_order = parse_text(key, value)?,
            "inputs" => self.inputs = parse_text(key, value)?,
            "span_blocks" => self.span_blocks = Some(parse_count(key, value)?),
            _ => return Err(no_such_key("gptq", key)),
        }
        self.check_ranges()
    }

    /// The keys and values that result in these settings.
    pub fn described(&self) -> Vec<(&'static str, Value)> {
        let Self { damping, block_size, act_order, inputs, span_blocks } = *self;
        let mut all = vec![
            ("damping", json!(damping)),
            ("block_size", json!(block_size)),
            ("act_order", json!(act_order)),
            ("inputs", json!(inputs)),
        ];
        all.extend(span_blocks.map(|blocks| ("span_blocks", json!(blocks))));
        all
    }

    /// Checks the settings, each by itself and together.
    ///
    /// # Errors
    /// [`Error::Usage`] that names the setting.
    pub fn check(&self) -> Result<()> {
        self.check_ranges()?;
        match self.span_blocks {
            Some(_) if self.inputs == LayerInputs::Float => Err(Error::usage(
                "`span_blocks` of `gptq` (‹span_blocks›) has no effect: all inputs come from the float model",
                "leave it out, or set `inputs` of `gptq` to quantized (‹layer_inputs=quantized›)",
            )),
            _ => Ok(()),
        }
    }

    fn check_ranges(&self) -> Result<()> {
        if !(self.damping > 0.0 && self.damping <= 100.0) {
            return Err(Error::usage(
                format!("the damping is {}; it must be greater than 0 and at most 100", self.damping),
                "choose a value in this range; 0.01 (1 % of the mean diagonal of the Hessian) is common",
            ));
        }
        if !(1..=Self::MAX_BLOCK_SIZE).contains(&self.block_size) {
            return Err(Error::usage(
                format!(
                    "the block size is {}; it must be from 1 to {}",
                    self.block_size,
                    Self::MAX_BLOCK_SIZE
                ),
                "choose a value in this range; it affects speed, and the result only by rounding (128 is \
                common)",
            ));
        }
        match self.span_blocks {
            Some(0) => Err(Error::usage("a span has 0 blocks", "choose a positive number of blocks")),
            _ => Ok(()),
        }
    }
}

impl Default for GptqSettings {
    fn default() -> Self {
        Self {
            damping: 0.01,
            block_size: 128,
            act_order: ActOrder::default(),
            inputs: LayerInputs::default(),
            span_blocks: None,
        }
    }
}
