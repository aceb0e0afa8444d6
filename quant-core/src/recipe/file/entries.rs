//! The tables of a recipe file and their keys.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::{Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use toml::Spanned;

use super::super::{Extensions, schema};
use super::START;
use crate::calibrate::{ExpertTokens, Mask, Packing};
use crate::names::suggestion;
use crate::quantize::ScaleSearch;
use crate::round::Rounding;
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

/// How weights are rounded.
#[derive(Debug, Clone, JsonSchema)]
#[schemars(deny_unknown_fields, transform = schema::add_roundings)]
pub(super) struct QuantizeEntry {
    /// The rounding method.
    #[schemars(schema_with = "schema::rounding", default, skip_serializing_if = "Option::is_none")]
    pub(super) method: Option<String>,
    /// Weights, activations, KV cache, granularity and symmetry. Without `-sym` or `-asym`, integer weights have the
    /// format's default symmetry.
    #[schemars(schema_with = "schema::scheme")]
    pub(super) scheme: Spanned<String>,
    /// NVFP4: how the E4M3 scale of a group is chosen.
    pub(super) scale_search: Option<ScaleSearch>,
    /// Linears that stay float: names, globs, or `re:` and a regular expression.
    #[schemars(with = "Vec<String>", default, skip_serializing_if = "Vec::is_empty")]
    pub(super) ignore: Vec<Spanned<String>>,
    /// Linears with a scheme of their own; the last match wins.
    #[schemars(rename = "override", default, skip_serializing_if = "Vec::is_empty")]
    pub(super) overrides: Vec<OverrideEntry>,
    /// The tables `[quantize.NAME]` with the settings of roundings, by name. Every other key is here too, because only
    /// [`Extensions`] knows the names of all roundings.
    #[schemars(skip)]
    pub(super) roundings: BTreeMap<String, RoundingEntry>,
}

/// The keys of [`QuantizeEntry`], apart from the names of roundings.
const QUANTIZE_KEYS: [&str; 5] = ["method", "scheme", "scale_search", "ignore", "override"];

/// A key of `[quantize]`.
#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum QuantizeKey {
    Method,
    Scheme,
    ScaleSearch,
    Ignore,
    Override,
    Rounding(String),
}

impl<'de> Deserialize<'de> for QuantizeEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = QuantizeEntry;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table with the key scheme, which begins with [quantize]")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
                let (mut method, mut scheme, mut scale_search) = (None, None, None);
                let (mut ignore, mut overrides, mut roundings) = (Vec::new(), Vec::new(), BTreeMap::new());
                while let Some(key) = map.next_key()? {
                    match key {
                        QuantizeKey::Method => method = Some(map.next_value()?),
                        QuantizeKey::Scheme => scheme = Some(map.next_value()?),
                        QuantizeKey::ScaleSearch => scale_search = Some(map.next_value()?),
                        QuantizeKey::Ignore => ignore = map.next_value()?,
                        QuantizeKey::Override => overrides = map.next_value()?,
                        QuantizeKey::Rounding(name) => {
                            let entry: Spanned<RoundingTable> = map.next_value()?;
                            let at = entry.span().start;
                            roundings.insert(name, RoundingEntry { at, keys: entry.into_inner().0 });
                        }
                    }
                }
                let scheme = scheme.ok_or_else(|| A::Error::missing_field("scheme"))?;
                Ok(QuantizeEntry { method, scheme, scale_search, ignore, overrides, roundings })
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

impl Serialize for QuantizeEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if let Some(method) = &self.method {
            map.serialize_entry("method", method)?;
        }
        for (name, RoundingEntry { keys, .. }) in &self.roundings {
            let keys = keys.iter().flatten().map(|(key, value, _)| (key.clone(), value.clone()));
            map.serialize_entry(name, &keys.collect::<serde_json::Map<_, _>>())?;
        }
        map.serialize_entry("scheme", &self.scheme)?;
        if let Some(search) = &self.scale_search {
            map.serialize_entry("scale_search", search)?;
        }
        if !self.ignore.is_empty() {
            map.serialize_entry("ignore", &self.ignore)?;
        }
        if !self.overrides.is_empty() {
            map.serialize_entry("override", &self.overrides)?;
        }
        map.end()
    }
}

/// A table `[quantize.NAME]` with the settings of a rounding.
#[derive(Debug, Clone)]
pub(super) struct RoundingEntry {
    /// The byte offset in the file.
    pub(super) at: usize,
    /// `None` if the value is not a table.
    pub(super) keys: Option<KeyValues>,
}

/// The keys of a table; `None` for a value of any other type.
struct RoundingTable(Option<KeyValues>);

impl<'de> Deserialize<'de> for RoundingTable {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Table;

        impl<'de> Visitor<'de> for Table {
            type Value = RoundingTable;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> std::result::Result<Self::Value, A::Error> {
                let entries = BTreeMap::deserialize(serde::de::value::MapAccessDeserializer::new(map))?;
                Ok(RoundingTable(Some(key_values(entries))))
            }

            fn visit_bool<E>(self, _: bool) -> std::result::Result<Self::Value, E> {
                Ok(RoundingTable(None))
            }

            fn visit_i64<E>(self, _: i64) -> std::result::Result<Self::Value, E> {
                Ok(RoundingTable(None))
            }

            fn visit_f64<E>(self, _: f64) -> std::result::Result<Self::Value, E> {
                Ok(RoundingTable(None))
            }

            fn visit_str<E>(self, _: &str) -> std::result::Result<Self::Value, E> {
                Ok(RoundingTable(None))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> std::result::Result<Self::Value, A::Error> {
                while all.next_element::<IgnoredAny>()?.is_some() {}
                Ok(RoundingTable(None))
            }
        }

        deserializer.deserialize_any(Table)
    }
}

impl RoundingEntry {
    /// Applies the keys of the table `[quantize.NAME]` to `settings`.
    pub(super) fn add_to(
        &self,
        settings: &mut TransformSettings,
        (name, own): (&str, &dyn Rounding),
        extensions: &Extensions,
        line: impl Fn(usize) -> usize,
    ) -> Result<()> {
        let known = extensions.rounding(name).map(|rounding| rounding.keys()).filter(|keys| !keys.is_empty());
        let Some(known) = known else {
            let with_keys = extensions.roundings().filter(|rounding| !rounding.keys().is_empty());
            let names = QUANTIZE_KEYS.into_iter().chain(with_keys.map(|rounding| rounding.name()));
            let names: Vec<_> = names.map(|name| format!("`{name}`")).collect();
            return Err(Error::usage(
                format!(
                    "line {}: unknown field `{name}`, expected one of {}",
                    line(self.at),
                    names.join(", ")
                ),
                format!("correct the file; {START}"),
            ));
        };
        let Some(keys) = &self.keys else {
            return Err(Error::usage(
                format!("line {}: quantize.{name} is not a table", line(self.at)),
                format!("write its keys under [quantize.{name}]"),
            ));
        };
        if name != own.name() {
            return Err(Error::usage(
                format!("[quantize.{name}] has no effect, because quantize.method is not {name}"),
                format!("remove it, or set method = \"{name}\" in [quantize]"),
            ));
        }
        for (key, value, start) in keys {
            if !known.iter().any(|known| !known.is_file && known.name == key) {
                let names: Vec<_> = known.iter().map(|key| key.name).collect();
                return Err(Error::usage(
                    format!("line {}: unknown key `{key}` in [quantize.{name}]", line(*start)),
                    suggestion(key, format!("its keys are {}", names.join(", ")), &names),
                ));
            }
            own.set(key, value, settings).map_err(at_line(line(*start)))?;
        }
        Ok(())
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
