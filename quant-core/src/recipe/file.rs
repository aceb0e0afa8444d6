//! Recipe files: a [`Recipe`] as TOML.
//!
//! ```toml
//! format = "compressed-tensors"
//!
//! [[transform]]
//! kind = "smoothquant"
//! alpha = 0.85                # or "auto"; the default depends on the family
//! producers = "norms"
//!
//! [[transform]]
//! kind = "awq"
//! search = "fast"
//!
//! [quantize]
//! method = "gptq"
//! scheme = "w4a8-g128-sym"
//! ignore = ["*.layers.0.*"]
//!
//! [[quantize.override]]
//! pattern = "down_proj"
//! scheme = "w8a16-g128-sym"
//!
//! [quantize.gptq]
//! damping = 0.01
//! block_size = 128
//! act_order = "static-groups"
//! inputs = "quantized"
//!
//! [calibration]
//! text = "builtin"
//! samples = 64
//! length = 512
//! seed = 0
//! packing = "auto"
//! mask = "none"
//! expert_tokens = "routed"
//! expert_floor = 0
//! ```
//!
//! Transforms run in the order in which they are listed, then weights are rounded. Unknown keys and keys without effect
//! are errors.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::Error as _;
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use toml::Spanned;

use super::{Extensions, Method, Pattern, Recipe, Rounding, kv, schema};
use crate::calibrate::{ExpertSampling, ExpertTokens, Mask, Packing, Sampling};
use crate::checkpoint::read_capped;
use crate::quantize::ScaleSearch;
use crate::quantize::gptq::{ActOrder, GptqSettings, LayerInputs};
use crate::scheme::SchemeRequest;
use crate::transform::{Transform, TransformSettings};
use crate::{Error, Result, format};

/// The maximum size of a recipe file in bytes.
const MAX_BYTES: u64 = 1 << 20;
/// How to get a first recipe.
const START: &str = "‹plan(print_recipe=awq-w4a16)› prints an example";

/// How a model is quantized.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "quant recipe")]
pub(super) struct RecipeFile {
    /// The format to write, or several, each in a directory of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    format: Option<Formats>,
    /// Rewrites of the float weights before they are rounded, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    transform: Vec<TransformEntry>,
    /// How weights are rounded.
    quantize: QuantizeEntry,
    /// The calibration text and its windows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    calibration: Option<CalibrationEntry>,
}

/// One format, or several.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "format is the name of a checkpoint format, or an array of names")]
enum Formats {
    /// One format.
    One(#[schemars(schema_with = "schema::container")] String),
    /// Several formats, each once.
    Several(#[schemars(schema_with = "schema::containers")] Vec<String>),
}

/// The transform's name under `kind`, and the values of its keys.
#[derive(Debug, Clone, Default)]
struct TransformEntry {
    kind: String,
    /// The values, with the byte of the file at which each starts.
    keys: Vec<(String, Value, usize)>,
}

impl<'de> Deserialize<'de> for TransformEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let mut entries = BTreeMap::<String, Spanned<Value>>::deserialize(deserializer)?;
        let kind = entries.remove("kind").ok_or_else(|| D::Error::missing_field("kind"))?.into_inner();
        let kind = kind.as_str().ok_or_else(|| D::Error::custom("kind is the name of a step"))?.to_owned();
        let keys = entries.into_iter().map(|(key, value)| {
            let start = value.span().start;
            (key, value.into_inner(), start)
        });
        Ok(Self { kind, keys: keys.collect() })
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
    /// Applies the keys that are set to the settings of the method's transform.
    fn add_to(
        &self,
        settings: &mut TransformSettings,
        extensions: &Extensions,
        line: impl Fn(usize) -> usize,
    ) -> Result<()> {
        let kind = &self.kind;
        let transform = extensions.transform(kind);
        for (key, value, start) in &self.keys {
            let takes = |t: &&dyn Transform| t.keys().iter().any(|known| known.name == key);
            let Some(transform) = transform.filter(takes) else {
                let others: Vec<_> = extensions.transforms().filter(takes).map(|t| t.name()).collect();
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
            transform.set(key, value, settings).map_err(|e| match e {
                Error::Usage { message, remedy } => {
                    Error::usage(format!("line {}: {message}", line(*start)), remedy)
                }
                other => other,
            })?;
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a table with the key scheme, which begins with [quantize]")]
struct QuantizeEntry {
    /// The rounding method.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::rounding")]
    method: Option<String>,
    /// Settings of GPTQ, if it is the method.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gptq: Option<GptqEntry>,
    /// Bits, granularity and symmetry. Without `-sym` or `-asym`, symmetry is that of the format.
    #[schemars(schema_with = "schema::scheme")]
    scheme: Spanned<String>,
    /// NVFP4: how the E4M3 scale of a group is chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scale_search: Option<ScaleSearch>,
    /// Linears that stay float: names, globs, or `re:` and a regular expression.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<String>")]
    ignore: Vec<Spanned<String>>,
    /// Linears with a scheme of their own; the last match wins.
    #[serde(default, rename = "override", skip_serializing_if = "Vec::is_empty")]
    overrides: Vec<OverrideEntry>,
}

#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a table, which begins with [quantize.gptq]")]
struct GptqEntry {
    /// The value added to the diagonal of the Hessian, as a fraction of the diagonal's mean.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    damping: Option<f64>,
    /// The number of columns whose updates to later columns are one matrix product.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4096))]
    block_size: Option<usize>,
    /// The order in which columns are rounded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    act_order: Option<ActOrder>,
    /// The model whose activations are the inputs of linears: the quantized or the float model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    inputs: Option<LayerInputs>,
    /// With inputs of the quantized model: blocks in a span, whose first block gets the hidden states of the float model.
    /// Without it, all blocks are one span.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    span_blocks: Option<usize>,
}

impl From<GptqSettings> for GptqEntry {
    fn from(settings: GptqSettings) -> Self {
        let GptqSettings { damping, block_size, act_order, inputs, span_blocks } = settings;
        Self {
            damping: Some(damping),
            block_size: Some(block_size),
            act_order: Some(act_order),
            inputs: Some(inputs),
            span_blocks,
        }
    }
}

impl GptqEntry {
    fn settings(&self, defaults: GptqSettings) -> GptqSettings {
        GptqSettings {
            damping: self.damping.unwrap_or(defaults.damping),
            block_size: self.block_size.unwrap_or(defaults.block_size),
            act_order: self.act_order.unwrap_or(defaults.act_order),
            inputs: self.inputs.unwrap_or(defaults.inputs),
            span_blocks: self.span_blocks.or(defaults.span_blocks),
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(
    deny_unknown_fields,
    expecting = "a table with the keys pattern and scheme, which begins with [[quantize.override]]"
)]
struct OverrideEntry {
    /// A name, a glob, or `re:` and a regular expression.
    #[schemars(with = "String")]
    pattern: Spanned<String>,
    /// The scheme of its linears. Missing parts come from `quantize.scheme`.
    #[schemars(schema_with = "schema::scheme")]
    scheme: Spanned<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, expecting = "a table, which begins with [calibration]")]
struct CalibrationEntry {
    /// A file next to the recipe, the path of a file, or the name of a set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    /// The number of windows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    samples: Option<usize>,
    /// Tokens per window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    length: Option<usize>,
    /// Seed for the selection of windows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    /// How documents are packed into windows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    packing: Option<Packing>,
    /// Which tokens of conversations count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mask: Option<Mask>,
    /// The tokens on which an expert is calibrated: those routed to it, or all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expert_tokens: Option<ExpertTokens>,
    /// An expert with fewer routed tokens than this is calibrated on all tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expert_floor: Option<u64>,
}

impl Recipe {
    /// Reads a recipe file. If it names a calibration text in its own directory, the recipe has the text's path.
    ///
    /// # Errors
    /// [`Error::Recipe`] that names the file and, for faults of the text itself, the line; [`Error::Io`] when it cannot
    /// be read.
    pub fn read(path: &Path) -> Result<Self> {
        Self::read_with(path, &Extensions::default())
    }

    /// [`read`](Self::read) with the steps and formats of the calling program.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_with(path: &Path, extensions: &Extensions) -> Result<Self> {
        let wrong = |reason, remedy| Error::Recipe { path: path.to_owned(), reason, remedy };
        let broken = |reason: String| wrong(reason, format!("give a recipe file; {START}").into());
        let refused = |e: std::io::Error| match e.kind() {
            ErrorKind::NotFound => broken("does not exist".into()),
            _ => Error::io("read", path, e),
        };
        // Checked before opening, because opening a pipe blocks until its other end is opened.
        let real = path.canonicalize().map_err(refused)?;
        if !std::fs::metadata(&real).map_err(refused)?.is_file() {
            return Err(broken("is not a regular file".into()));
        }
        let bytes = read_capped(&real, path, MAX_BYTES)?.map_err(broken)?;
        let text = String::from_utf8(bytes).map_err(|_| broken("is not UTF-8".into()))?;
        let mut recipe = Self::parse_with(&text, extensions).map_err(|e| match e {
            Error::Usage { message, remedy } => wrong(message, remedy),
            other => other,
        })?;
        if let (Some(text), Some(folder)) = (&mut recipe.calibration, path.parent()) {
            let in_folder = folder.join(&*text);
            if in_folder.is_file() {
                *text = in_folder.to_string_lossy().into_owned();
            }
        }
        let file: Arc<Path> = path.into();
        let patterns =
            recipe.ignore.iter_mut().chain(recipe.overrides.iter_mut().map(|(pattern, _)| pattern));
        patterns.for_each(|pattern| pattern.set_file(&file));
        Ok(recipe)
    }

    /// Parses a recipe from TOML.
    ///
    /// # Errors
    /// [`Error::Usage`] with the line or the key.
    pub fn parse(text: &str) -> Result<Self> {
        Self::parse_with(text, &Extensions::default())
    }

    /// [`parse`](Self::parse) with the steps and formats of the calling program.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn parse_with(text: &str, extensions: &Extensions) -> Result<Self> {
        let line = |start: usize| text[..start].matches('\n').count() + 1;
        let file: RecipeFile = toml::from_str(text).map_err(|e| {
            let line = e.span().map(|span| line(span.start));
            let place = line.map(|line| format!("line {line}: ")).unwrap_or_default();
            Error::usage(format!("{place}{}", e.message()), format!("correct the file; {START}"))
        })?;
        let mut settings = TransformSettings::default();
        let method = file.method(extensions)?;
        let containers = match &file.format {
            Some(Formats::One(name)) => vec![extensions.container(name)?],
            Some(Formats::Several(names)) => extensions.containers_of(names)?,
            None => vec![format::CONTAINERS[0]],
        };
        // Names the line of the part that is invalid.
        let at = |span: Range<usize>| {
            let line = line(span.start);
            move |error| match error {
                Error::Usage { message, remedy } => Error::usage(format!("line {line}: {message}"), remedy),
                other => other,
            }
        };
        let parsed_scheme = |text: &Spanned<String>| {
            let (scheme, kv) = kv::split(text.get_ref())?;
            Ok((scheme.parse::<SchemeRequest>()?, kv))
        };
        let (scheme, kv) = parsed_scheme(&file.quantize.scheme).map_err(at(file.quantize.scheme.span()))?;
        settings.kv = kv;
        settings.scale_search = file.quantize.scale_search.unwrap_or_default();
        let pattern = |text: &Spanned<String>| {
            let pattern = Pattern::new(text.get_ref()).map_err(at(text.span()))?;
            Ok(pattern.at_line(line(text.span().start)))
        };
        let overrides = file.quantize.overrides.iter();
        let defaults = Sampling::default();
        let calibration = file.calibration.as_ref();
        let (gptq, default_gptq) = (file.quantize.gptq.as_ref(), method.default_gptq());
        if gptq.is_some() && method.rounding != Rounding::Gptq {
            return Err(Error::usage(
                "[quantize.gptq] has no effect, because quantize.method is not gptq",
                "remove it, or set method = \"gptq\" in [quantize]",
            ));
        }
        file.transform.iter().try_for_each(|entry| entry.add_to(&mut settings, extensions, line))?;
        let recipe = Self {
            method,
            scheme,
            containers,
            ignore: file.quantize.ignore.iter().map(pattern).collect::<Result<_>>()?,
            overrides: overrides
                .map(|o| {
                    let refined = scheme.refine(o.scheme.get_ref()).map_err(at(o.scheme.span()))?;
                    Ok((pattern(&o.pattern)?, refined))
                })
                .collect::<Result<_>>()?,
            sampling: Sampling {
                samples: calibration.and_then(|c| c.samples).unwrap_or(defaults.samples),
                length: calibration.and_then(|c| c.length).unwrap_or(defaults.length),
                seed: calibration.and_then(|c| c.seed).unwrap_or(defaults.seed),
                packing: calibration.and_then(|c| c.packing).unwrap_or(defaults.packing),
                mask: calibration.and_then(|c| c.mask).unwrap_or(defaults.mask),
                experts: ExpertSampling {
                    tokens: calibration.and_then(|c| c.expert_tokens).unwrap_or(defaults.experts.tokens),
                    floor: calibration.and_then(|c| c.expert_floor).unwrap_or(defaults.experts.floor),
                },
            },
            settings,
            gptq: gptq.map_or(default_gptq, |entry| entry.settings(default_gptq)),
            calibration: calibration.and_then(|c| c.text.clone()),
        };
        if calibration.is_some() && !recipe.needs_text() {
            return Err(Error::usage(
                "[calibration] has no effect, because no step uses a text",
                "remove it, or add a [[transform]] that uses one",
            ));
        }
        Ok(recipe)
    }

    /// The recipe as a file with all defaults written out; [`parse`](Self::parse) reads it back.
    pub fn to_toml(&self) -> String {
        let file = RecipeFile {
            format: Some(match &self.containers[..] {
                [one] => Formats::One(one.name().into()),
                several => Formats::Several(several.iter().map(|c| c.name().into()).collect()),
            }),
            transform: self.method.steps().into_iter().map(|step| self.transform_entry(step)).collect(),
            quantize: QuantizeEntry {
                method: Some(self.method.rounding.name().into()),
                gptq: (self.method.rounding == Rounding::Gptq).then(|| self.gptq.into()),
                scheme: written(kv::joined(&self.scheme.to_string(), self.settings.kv)),
                scale_search: self.searches_scales().then_some(self.settings.scale_search),
                ignore: self.ignore.iter().map(|p| written(p.text().to_owned())).collect(),
                overrides: (self.overrides.iter())
                    .map(|(p, s)| OverrideEntry {
                        pattern: written(p.text().to_owned()),
                        scheme: written(s.to_string()),
                    })
                    .collect(),
            },
            calibration: self.needs_text().then(|| CalibrationEntry {
                text: self.calibration.clone(),
                samples: Some(self.sampling.samples),
                length: Some(self.sampling.length),
                seed: Some(self.sampling.seed),
                packing: Some(self.sampling.packing),
                mask: Some(self.sampling.mask),
                expert_tokens: Some(self.sampling.experts.tokens),
                expert_floor: Some(self.sampling.experts.floor),
            }),
        };
        // All values have types that TOML supports.
        toml::to_string(&file).unwrap_or_default()
    }

    fn transform_entry(&self, kind: &str) -> TransformEntry {
        let transform = self.method.transforms.iter().find(|t| t.name() == kind);
        let described = transform.map(|transform| transform.described(&self.settings)).unwrap_or_default();
        let keys = described.into_iter().map(|(key, value)| (key, value, 0)).collect();
        TransformEntry { kind: kind.to_owned(), keys }
    }
}

/// A value that is to be written, and so has no place yet.
fn written(text: String) -> Spanned<String> {
    Spanned::new(0..0, text)
}

impl RecipeFile {
    /// The method that consists of the transforms and the rounding.
    fn method(&self, extensions: &Extensions) -> Result<Method> {
        let rounding = match self.quantize.method.as_deref() {
            None => Rounding::Nearest,
            Some(name) => Rounding::ALL.into_iter().find(|r| r.name() == name).ok_or_else(|| {
                let names: Vec<_> = Rounding::ALL.iter().map(|r| r.name()).collect();
                Error::usage(
                    format!("unknown quantize.method `{name}`"),
                    format!(
                        "quantize.method must be {}; steps before rounding are [[transform]] entries",
                        names.join(" or ")
                    ),
                )
            })?,
        };
        let kinds: Vec<&str> = self.transform.iter().map(|t| t.kind.as_str()).collect();
        extensions.method_of(&kinds, rounding)
    }
}

#[cfg(test)]
mod tests {
    use super::super::PRESETS;
    use super::*;
    use crate::transform::{Alpha, Producers, Search};

    #[test]
    fn presets_come_back() {
        for preset in PRESETS {
            let recipe = Recipe::preset(preset.name).unwrap();
            let text = recipe.to_toml();
            let back = Recipe::parse(&text).unwrap();
            assert_eq!(back.to_toml(), text, "{}", preset.name);
            assert_eq!((back.method.name, back.scheme), (recipe.method.name, recipe.scheme));
            assert_eq!((back.sampling, back.settings), (recipe.sampling, recipe.settings));
        }
    }

    #[test]
    fn every_setting_of_a_recipe() {
        let recipe = Recipe::parse(
            r#"
            format = "awq"
            [[transform]]
            kind = "awq"
            search = "reference"
            [quantize]
            method = "rtn"
            scheme = "w4a16-g64"
            ignore = ["*.layers.0.*", "v_proj"]
            [[quantize.override]]
            pattern = "down_proj"
            scheme = "w4a16-channel"
            [calibration]
            text = "pile-val"
            samples = 3
            length = 100
            seed = 7
            packing = "documents"
            mask = "prompts"
            expert_floor = 200
            "#,
        )
        .unwrap();
        assert_eq!(recipe.containers.iter().map(|c| c.name()).collect::<Vec<_>>(), ["awq"]);
        assert_eq!(recipe.scheme.to_string(), "w4a16-g64", "the format decides the symmetry");
        assert_eq!((&*recipe.method.name, recipe.settings.search), ("awq", Search::Reference));
        assert_eq!(recipe.ignore.len(), 2);
        assert_eq!(recipe.overrides[0].1.to_string(), "w4a16-channel");
        let (packing, mask) = (Packing::Documents, Mask::Prompts);
        let experts = ExpertSampling { tokens: ExpertTokens::Routed, floor: 200 };
        assert_eq!(recipe.sampling, Sampling { samples: 3, length: 100, seed: 7, packing, mask, experts });
        assert_eq!(recipe.calibration.as_deref(), Some("pile-val"));
        assert_eq!(Recipe::parse(&recipe.to_toml()).unwrap().to_toml(), recipe.to_toml());
    }

    #[test]
    fn several_containers() {
        let text = "format = [\"awq\", \"compressed-tensors\"]\n[quantize]\nscheme = \"w4a16-g64-asym\"";
        let recipe = Recipe::parse(text).unwrap();
        let names: Vec<_> = recipe.containers.iter().map(|c| c.name()).collect();
        assert_eq!(names, ["awq", "compressed-tensors"]);
        assert_eq!(Recipe::parse(&recipe.to_toml()).unwrap().to_toml(), recipe.to_toml());
    }

    #[test]
    fn transforms_follow_on_each_other() {
        let recipe = Recipe::parse(
            r#"
            [[transform]]
            kind = "smoothquant"
            alpha = "auto"
            producers = "all"
            [[transform]]
            kind = "awq"
            [quantize]
            method = "gptq"
            scheme = "w4a8-g64-sym"
            "#,
        )
        .unwrap();
        assert_eq!(recipe.method.name, "smoothquant-awq-gptq");
        assert!(matches!(recipe.settings.smooth.alpha, Some(Alpha::Auto(_))));
        assert_eq!(recipe.settings.smooth.producers, Producers::All);
        assert_eq!(Recipe::parse(&recipe.to_toml()).unwrap().to_toml(), recipe.to_toml());
        let text = |scheme| format!("[quantize]\nscheme = \"{scheme}\"\n[calibration]\nsamples = 4");
        assert!(Recipe::parse(&text("w8a8-static")).unwrap().needs_text());
        assert!(Recipe::parse(&text("w8a8")).is_err());
    }

    #[test]
    fn what_is_wrong_is_said_with_its_place() {
        for (text, expected) in [
            ("", "quantize"),
            ("[quantize]\nscheme = 4", "line 2: invalid type"),
            ("[quantize]\nscheme = \"w4a16\"\nscehme = 1", "line 3: unknown field `scehme`"),
            ("[quantize]\nscheme = \"w9a16\"", "line 2: scheme `w9a16`"),
            (
                "[quantize]\nscheme = \"w4a16\"\nignore = [\n  \"o_proj\",\n  \"re:(\",\n]",
                "line 5: pattern `re:(`",
            ),
            (
                "[quantize]\nscheme = \"w4a16\"\n[[quantize.override]]\npattern = \"o_proj\"\nscheme = \"w9\"",
                "line 5: scheme `w9`",
            ),
            (
                "[quantize]\nscheme = \"w4a16\"\noverride = [\"o_proj=w8a16\"]",
                "line 3: invalid type: string \"o_proj=w8a16\", expected a table with the keys pattern and scheme",
            ),
            ("[quantize]\nscheme = \"w4a16\"\nmethod = \"magic\"", "quantize.method `magic`"),
            (
                "[quantize]\nscheme = \"w4a16\"\n[quantize.gptq]\ndamping = 0.1",
                "[quantize.gptq] has no effect",
            ),
            (
                "[quantize]\nscheme = \"w4a16\"\nmethod = \"gptq\"\n[quantize.gptq]\nact_order = \"desc\"",
                "line 5: unknown variant `desc`",
            ),
            ("[[transform]]\nkind = \"magic\"\n[quantize]\nscheme = \"w4a16\"", "unknown step `magic`"),
            ("[[transform]]\nkind = \"awq\"\nsearch = \"deep\"\n[quantize]\nscheme = \"w4a16\"", "line 3"),
            ("[quantize]\nscheme = \"w4a16\"\n[calibration]\nsamples = 4", "[calibration] has no effect"),
            ("format = []\n[quantize]\nscheme = \"w4a16\"", "no format"),
            ("format = [\"awq\", \"awq\"]\n[quantize]\nscheme = \"w4a16\"", "`awq` is listed twice"),
            ("format = 4\n[quantize]\nscheme = \"w4a16\"", "or an array of names"),
            (
                "[[transform]]\nkind = \"awq\"\n[quantize]\nscheme = \"w4a16\"\n[calibration]\nmask = \"users\"",
                "line 6: unknown variant `users`",
            ),
            (
                "[[transform]]\nkind = \"awq\"\n[quantize]\nscheme = \"w4a16\"\n[calibration]\nexpert_tokens = \"some\"",
                "line 6: unknown variant `some`",
            ),
            ("format = \"gguf9\"\n[quantize]\nscheme = \"w4a16\"", "unknown format `gguf9`"),
            (
                "[[transform]]\nkind = \"awq\"\n[[transform]]\nkind = \"awq\"\n[quantize]\nscheme = \"w4a16\"",
                "`awq` is listed twice",
            ),
            (
                "[[transform]]\nkind = \"awq\"\n[[transform]]\nkind = \"smoothquant\"\n[quantize]\nscheme = \"w8a8\"",
                "`awq` clips the ranges",
            ),
            (
                "[[transform]]\nkind = \"awq\"\nalpha = 0.5\n[quantize]\nscheme = \"w8a8\"",
                "transform.alpha has no effect",
            ),
            (
                "[[transform]]\nkind = \"smoothquant\"\nalpha = 1.5\n[quantize]\nscheme = \"w8a8\"",
                "alpha is 1.5; it must be from 0 to 1",
            ),
            (
                "[[transform]]\nkind = \"smoothquant\"\nalpha = \"best\"\n[quantize]\nscheme = \"w8a8\"",
                "line 3: invalid alpha `best`",
            ),
            (
                "[[transform]]\nkind = \"smoothquant\"\nproducers = 3\n[quantize]\nscheme = \"w8a8\"",
                "line 3: transform.producers is 3, which is not a string",
            ),
            (
                "[[transform]]\nkind = \"awq\"\nsaerch = \"fast\"\n[quantize]\nscheme = \"w4a16\"",
                "line 3: unknown key `saerch`",
            ),
            ("[[transform]]\nsearch = \"fast\"\n[quantize]\nscheme = \"w4a16\"", "missing field `kind`"),
        ] {
            let error = Recipe::parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
