//! The tables of a recipe file and their keys.

use std::borrow::Cow;
use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::Error as _;
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use toml::Spanned;

use super::super::{Extensions, schema};
use crate::calibrate::{ExpertTokens, Mask, Packing};
use crate::names::suggestion;
use crate::quantize::ScaleSearch;
use crate::quantize::gptq::GptqSettings;
use crate::transform::{Transform, TransformSettings};
use crate::{Error, Result};

/// How a model is quantized.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "quant recipe")]
pub(in crate::recipe) struct RecipeFile {
    /// The format to write, or several, each in a directory of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) format: Option<Formats>,
    /// Rewrites of the float weights before they are rounded, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) transform: Vec<TransformEntry>,
    /// How weights are rounded.
    pub(super) quantize: QuantizeEntry,
    /// The calibration text and its windows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) calibration: Option<CalibrationEntry>,
}

/// One format, or several.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "format must be the name of a checkpoint format, or an array of names")]
pub(super) enum Formats {
    /// One format.
    One(#[schemars(schema_with = "schema::container")] String),
    /// Several formats, each once.
    Several(#[schemars(schema_with = "schema::containers")] Vec<String>),
}

/// Each key of a step with its value and the byte offset of the value in the file.
pub(super) type KeyValues = Vec<(String, Value, usize)>;

fn key_values(entries: BTreeMap<String, Spanned<Value>>) -> KeyValues {
    let keys = entries.into_iter().map(|(key, value)| {
        let start = value.span().start;
        (key, value.into_inner(), start)
    });
    keys.collect()
}

/// Adds the line to an error in the value of a key.
fn at_line(line: usize) -> impl Fn(Error) -> Error {
    move |error| match error {
        Error::Usage { message, remedy } => Error::usage(format!("line {line}: {message}"), remedy),
        other => other,
    }
}

/// The transform's name under `kind`, and the values of its keys.
#[derive(Debug, Clone, Default)]
pub(super) struct TransformEntry {
    pub(super) kind: String,
    pub(super) keys: KeyValues,
}

impl<'de> Deserialize<'de> for TransformEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let mut entries = BTreeMap::<String, Spanned<Value>>::deserialize(deserializer)?;
        let kind = entries.remove("kind").ok_or_else(|| D::Error::missing_field("kind"))?.into_inner();
        let kind =
            kind.as_str().ok_or_else(|| D::Error::custom("kind must be the name of a step"))?.to_owned();
        Ok(Self { kind, keys: key_values(entries) })
    }
}

impl Serialize for TransformEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(1 + self.keys.len()))?;
        map.serialize_entry("kind", &self.kind)?;
        self.keys.iter().try_for_each(|(key, value, _)| map.serialize_entry(key, value))?;
        map.end()
    }
}

impl JsonSchema for TransformEntry {
    fn schema_name() -> Cow<'static, str> {
        "TransformEntry".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        schema::transform()
    }
}

impl TransformEntry {
    /// Applies the keys of this entry to `settings`.
    pub(super) fn add_to(
        &self,
        settings: &mut TransformSettings,
        extensions: &Extensions,
        line: impl Fn(usize) -> usize,
    ) -> Result<()> {
        let kind = &self.kind;
        let transform = extensions.transform(kind);
        for (key, value, start) in &self.keys {
            let takes = |t: &&dyn Transform| t.keys().iter().any(|known| !known.is_file && known.name == key);
            let Some(transform) = transform.filter(takes) else {
                let mut others: Vec<_> = extensions.transforms().filter(takes).map(|t| t.name()).collect();
                others.sort_unstable();
                return Err(Error::usage(
                    match others[..] {
                        [] => format!("line {}: unknown key `{key}` in [[transform]]", line(*start)),
                        _ => format!(
                            "transform.{key} has no effect on kind `{kind}`: it applies to `{}`",
                            others.join("`, `"),
                        ),
                    },
                    "remove it",
                ));
            };
            transform.set(key, value, settings).map_err(at_line(line(*start)))?;
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a table with the key scheme, which begins with [quantize]")]
pub(super) struct QuantizeEntry {
    /// The rounding method.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::rounding")]
    pub(super) method: Option<String>,
    /// Settings of GPTQ, if it is the method.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) gptq: Option<GptqEntry>,
    /// Weights, activations, KV cache, granularity and symmetry. Without `-sym` or `-asym`, integer weights have the
    /// format's default symmetry.
    #[schemars(schema_with = "schema::scheme")]
    pub(super) scheme: Spanned<String>,
    /// NVFP4: how the E4M3 scale of a group is chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) scale_search: Option<ScaleSearch>,
    /// Linears that stay float: names, globs, or `re:` and a regular expression.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<String>")]
    pub(super) ignore: Vec<Spanned<String>>,
    /// Linears with a scheme of their own; the last match wins.
    #[serde(default, rename = "override", skip_serializing_if = "Vec::is_empty")]
    pub(super) overrides: Vec<OverrideEntry>,
}

/// The settings of GPTQ, in `[quantize.gptq]`.
#[derive(Debug, Clone)]
pub(super) struct GptqEntry(KeyValues);

impl From<GptqSettings> for GptqEntry {
    fn from(settings: GptqSettings) -> Self {
        Self(settings.described().into_iter().map(|(key, value)| (key.to_owned(), value, 0)).collect())
    }
}

impl<'de> Deserialize<'de> for GptqEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        Ok(Self(key_values(BTreeMap::deserialize(deserializer)?)))
    }
}

impl Serialize for GptqEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value, _)| (key, value)))
    }
}

impl JsonSchema for GptqEntry {
    fn schema_name() -> Cow<'static, str> {
        "GptqEntry".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        schema::gptq()
    }
}

impl GptqEntry {
    /// Applies the keys to the default settings.
    pub(super) fn settings(
        &self,
        defaults: GptqSettings,
        line: impl Fn(usize) -> usize,
    ) -> Result<GptqSettings> {
        let (known, mut settings) = (GptqSettings::keys(), defaults);
        for (key, value, start) in &self.0 {
            if !known.iter().any(|known| known.name == key) {
                let names: Vec<_> = known.iter().map(|key| key.name).collect();
                return Err(Error::usage(
                    format!("line {}: unknown key `{key}` in [quantize.gptq]", line(*start)),
                    suggestion(key, format!("its keys are {}", names.join(", ")), &names),
                ));
            }
            settings.set(key, value).map_err(at_line(line(*start)))?;
        }
        Ok(settings)
    }
}

#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a table with the keys pattern and scheme, which begins with [[quantize.override]]"
)]
pub(super) struct OverrideEntry {
    /// A name, a glob, or `re:` and a regular expression.
    #[schemars(with = "String")]
    pub(super) pattern: Spanned<String>,
    /// The scheme of its linears. Missing parts come from `quantize.scheme`.
    #[schemars(schema_with = "schema::scheme")]
    pub(super) scheme: Spanned<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a table, which begins with [calibration]")]
pub(super) struct CalibrationEntry {
    /// A file next to the recipe, the path of a file, or the name of a text, such as `builtin`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) text: Option<String>,
    /// The number of windows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub(super) samples: Option<usize>,
    /// Tokens per window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub(super) length: Option<usize>,
    /// Seed for the selection of windows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) seed: Option<u64>,
    /// How documents are packed into windows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) packing: Option<Packing>,
    /// Which tokens of conversations count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) mask: Option<Mask>,
    /// The tokens on which an expert is calibrated: those routed to it, or all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) expert_tokens: Option<ExpertTokens>,
    /// An expert with fewer routed tokens than this is calibrated on all tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) expert_floor: Option<u64>,
}
