//! The settings for quantizing a model: a preset or a recipe file, and settings that override it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Number, Value};

use super::gguf_settings::GgufSettings;
use super::misplaced::explained;
use crate::calibrate::{ExpertSampling, Sampling};
use crate::model::Model;
use crate::recipe::{Extensions, Method, PRESETS, Pattern, Plan, Recipe, kv, method_with, step_of};
use crate::round::{self, ROUNDINGS};
use crate::scheme::{FloatFormat, Granularity, SchemeRequest, WeightRequest};
use crate::{Error, Result};

const SEARCHES_NO_TEXT: &str = "does not use a calibration text";
const ANOTHER_METHOD: &str = "leave it out, or choose a different ‹method›";

/// The settings of `plan` and `quantize`. Fields that are `None` or empty are taken from the preset or the recipe.
///
/// Messages refer to a setting by its field name, between `‹` and `›` ([`wording`](crate::wording)).
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecipeSettings {
    /// A preset, which names a method and a scheme; `awq-w4a16` if no preset, recipe or method is given. A `scheme` of FP8
    /// weights changes that method to `rtn`.
    pub preset: Option<String>,
    /// A recipe file (TOML), or the text of one, which has a line break.
    pub recipe: Option<PathBuf>,
    /// The method that quantizes the weights: its name, or steps in order, separated by commas.
    pub method: Option<String>,
    /// The number format, such as `w4a16-g64-asym`; for GGUF files the name of a mixture.
    pub scheme: Option<String>,
    /// The checkpoint formats. If empty: those of the recipe file, or `compressed-tensors`.
    pub format: Vec<String>,
    /// The number of weights in a row that share a scale, or `channel`.
    pub group_size: Option<String>,
    /// Whether grids are symmetric.
    pub symmetric: Option<bool>,
    /// Patterns of linears that stay float.
    pub ignore: Vec<String>,
    /// Linears with their own scheme, as `PATTERN=SCHEME`. The last match wins.
    #[serde(rename = "override")]
    pub overrides: Vec<String>,
    /// Settings that apply only to GGUF files.
    pub gguf: GgufSettings,
    /// SmoothQuant: the exponent of the activations, 0 to 1, or `auto`.
    pub alpha: Option<String>,
    /// SmoothQuant: what is divided by the scales, `norms` or `all`.
    pub smooth_producers: Option<String>,
    /// SmoothQuant: a file of channel maxima.
    pub channel_maxima: Option<PathBuf>,
    /// Steps to leave out of the method.
    pub skip: Vec<String>,
    /// QoQ: the exponent for smoothing the inputs of `o_proj` and `down_proj`, 0 to 1, or `auto`.
    pub output_alpha: Option<String>,
    /// QoQ: the exponent of SmoothAttention, 0 to 1, or `auto`.
    pub attention_alpha: Option<String>,
    /// The settings of steps, by the name of the step: keys and values as in a `[[transform]]` entry of a recipe file;
    /// those of GPTQ under `gptq`, as in `[quantize.gptq]`.
    pub steps: BTreeMap<String, Map<String, Value>>,
    /// AWQ: `fast` or `reference`.
    pub search: Option<String>,
    /// GPTQ: damping, as a fraction of the mean of the Hessian's diagonal.
    pub damping: Option<f64>,
    /// GPTQ: columns per block of lazy updates.
    pub block_size: Option<usize>,
    /// GPTQ: `none`, `static-groups` or `group-aware`.
    pub act_order: Option<String>,
    /// GPTQ: whether inputs come from the `quantized` or the `float` model.
    pub layer_inputs: Option<String>,
    /// GPTQ: blocks in a span, whose first block gets the hidden states of the float model.
    pub span_blocks: Option<usize>,
    /// NVFP4: `amax`, `four-over-six` or `sweep`.
    pub scale_search: Option<String>,
    /// Whether a quantized model is dequantized and quantized again.
    pub requantize: bool,
    /// The number of calibration windows.
    pub samples: Option<usize>,
    /// Tokens per calibration window.
    pub seq_len: Option<usize>,
    /// Seed for selecting windows.
    pub seed: Option<u64>,
    /// How documents become windows: `auto`, `stream` or `documents`.
    pub packing: Option<String>,
    /// Tokens to leave out: `none` or `prompts`.
    pub mask: Option<String>,
    /// Whether experts are calibrated on the tokens `routed` to them or on `all`.
    pub expert_tokens: Option<String>,
    /// Experts with fewer tokens than this are calibrated on all.
    pub expert_floor: Option<u64>,
}

impl RecipeSettings {
    /// Returns the recipe that these settings describe.
    ///
    /// # Errors
    /// [`Error::Usage`] for unknown or contradictory settings and for settings without effect; errors of the files that
    /// are read.
    pub fn recipe(&self) -> Result<Recipe> {
        self.recipe_with(&Extensions::default())
    }

    /// [`recipe`](Self::recipe) with the steps, methods and formats of the calling program.
    ///
    /// # Errors
    /// As [`recipe`](Self::recipe); for [names](Extensions::check) that are taken.
    pub fn recipe_with(&self, extensions: &Extensions) -> Result<Recipe> {
        extensions.check()?;
        if self.preset.is_some() && self.recipe.is_some() {
            return Err(Error::usage("‹preset› and ‹recipe› cannot be combined", "omit one of them"));
        }
        let mut recipe = match (&self.recipe, self.recipe_text()) {
            (_, Some(text)) => Recipe::parse_with(text, extensions)?,
            (Some(path), None) => Recipe::read_with(path, extensions)?,
            (None, None) => {
                let name = self.preset.as_deref().unwrap_or_else(|| self.preset_by_method());
                explained(Recipe::preset(name), "preset", name, extensions)?
            }
        };
        if let Some(name) = &self.method {
            recipe.set_method(explained(extensions.method(name), "method", name, extensions)?)?;
        }
        recipe.method = recipe.method.without(&self.skip)?;
        if !self.format.is_empty() {
            self.check_formats(extensions)?;
            recipe.containers = extensions.containers_of(&self.format)?;
        }
        if let Some(size) = &self.group_size {
            recipe.scheme.granularity = granularity(size)?;
        }
        if let Some(symmetric) = self.symmetric {
            recipe.scheme.set_symmetric(symmetric)?;
        }
        if let Some(name) = &self.scheme {
            let (scheme, kv) = kv::split(name)?;
            recipe.settings.kv = kv;
            let scheme = &scheme;
            let refined = explained(recipe.scheme.refine(scheme), "scheme", name, extensions)?;
            recipe.scheme = self.refuse_contradiction(scheme, refined)?;
        }
        if self.names_no_method() && recipe.scheme.weight == WeightRequest::Float(FloatFormat::E4m3) {
            recipe.set_method(extensions.method(round::DEFAULT.name())?)?;
        }
        for pattern in &self.ignore {
            recipe.ignore.push(Pattern::new(pattern)?);
        }
        for option in &self.overrides {
            recipe.overrides.push(parse_override(option, recipe.scheme)?);
        }
        let named = self.keys_by_name();
        named.iter().try_for_each(|(setting, _)| self.check_effect(&recipe.method, setting))?;
        for (step, keys) in &self.steps {
            for (key, value) in keys {
                recipe.set(step, key, value)?;
            }
            if keys.is_empty() {
                // Only the name is checked.
                recipe.check_step(step)?;
            }
        }
        for (setting, given) in named {
            self.apply(setting, given, &mut recipe)?;
        }
        if !recipe.needs_text() {
            let given = [
                ("samples", self.samples.is_some()),
                ("seq_len", self.seq_len.is_some()),
                ("seed", self.seed.is_some()),
                ("packing", self.packing.is_some()),
                ("mask", self.mask.is_some()),
                ("expert_tokens", self.expert_tokens.is_some()),
                ("expert_floor", self.expert_floor.is_some()),
            ];
            let given = given.into_iter().find(|(_, given)| *given);
            if let Some((option, _)) = given {
                return Err(self.needs_no_text(&recipe.method, option));
            }
        }
        if let (Some(path), false) = (&self.recipe, recipe.needs_text()) {
            // A recipe file may have `[calibration]` only if its method uses a text. Here, a setting has overridden
            // that method.
            if recipe.calibration.is_some() || recipe.sampling != Sampling::default() {
                let file =
                    self.recipe_text().map_or_else(|| path.display().to_string(), |_| "the recipe".into());
                return Err(Error::usage(
                    format!(
                        "[calibration] of {file} has no effect: method `{}` {SEARCHES_NO_TEXT}",
                        recipe.method.name
                    ),
                    ANOTHER_METHOD,
                ));
            }
        }
        if let Some(search) = &self.scale_search {
            if !recipe.searches_scales() {
                return Err(Error::usage(
                    "‹scale_search› has no effect: it applies only to NVFP4 scales",
                    "leave it out, or choose a scheme such as wf4a16-g16-nv",
                ));
            }
            recipe.settings.scale_search = search.parse()?;
        }
        recipe.method.rounding.check(&recipe.settings)?;
        let sampling = &mut recipe.sampling;
        *sampling = Sampling {
            samples: self.samples.unwrap_or(sampling.samples),
            length: self.seq_len.unwrap_or(sampling.length),
            seed: self.seed.unwrap_or(sampling.seed),
            packing: self.packing.as_deref().map_or(Ok(sampling.packing), str::parse)?,
            mask: self.mask.as_deref().map_or(Ok(sampling.mask), str::parse)?,
            experts: ExpertSampling {
                tokens: self.expert_tokens.as_deref().map_or(Ok(sampling.experts.tokens), str::parse)?,
                floor: self.expert_floor.unwrap_or(sampling.experts.floor),
            },
        };
        Ok(recipe)
    }

    fn recipe_text(&self) -> Option<&str> {
        self.recipe.as_deref().and_then(recipe_text)
    }

    /// Fails if a format is unknown, or is one that no recipe can name.
    pub(crate) fn check_formats(&self, extensions: &Extensions) -> Result<()> {
        self.format
            .iter()
            .try_for_each(|name| explained(extensions.container(name), "format", name, extensions).map(drop))
    }

    /// Adds a setting of a step that is written as `STEP.KEY=VALUE`. The value is a JSON number, boolean, string, array or
    /// object; any other text is a string.
    ///
    /// ```
    /// use quant_core::run::RecipeSettings;
    ///
    /// let mut settings = RecipeSettings { method: Some("smoothquant".into()), ..RecipeSettings::default() };
    /// settings.add_step("smoothquant.alpha=0.75")?;
    /// settings.add_step("smoothquant.producers=all")?;
    /// assert!(settings.recipe()?.to_toml().contains("alpha = 0.75"));
    /// # Ok::<(), quant_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Usage`] for text of a different form, and for a key that is set already.
    pub fn add_step(&mut self, text: &str) -> Result<()> {
        let parts = text.split_once('=').and_then(|(name, value)| {
            let (step, key) = name.split_once('.')?;
            Some((step.trim(), key.trim(), value.trim()))
        });
        let Some((step, key, value)) = parts.filter(|(step, key, _)| !step.is_empty() && !key.is_empty())
        else {
            return Err(Error::usage(
                format!("`{text}` is not a setting of a step"),
                "write ‹steps=STEP.KEY=VALUE›, for example smoothquant.alpha=0.5",
            ));
        };
        let parsed = serde_json::from_str(value).ok().filter(|value: &Value| !value.is_null());
        let value = parsed.unwrap_or_else(|| value.into());
        if self.steps.entry(step.to_owned()).or_default().insert(key.to_owned(), value).is_some() {
            return Err(Error::usage(
                format!("‹steps› sets `{key}` of `{step}` twice"),
                "leave one of them out",
            ));
        }
        Ok(())
    }

    /// Whether the method is the default. For FP8 weights that is rounding to nearest, because AWQ does not make them more
    /// accurate.
    fn names_no_method(&self) -> bool {
        self.preset.is_none() && self.recipe.is_none() && self.method.is_none()
    }

    /// Returns the preset to use if none is named. Its method suits the requested one, so that the scheme does too; if
    /// there is no such preset, it is the default.
    fn preset_by_method(&self) -> &'static str {
        let named = self.method.as_deref().unwrap_or_default();
        let same = PRESETS.iter().find(|p| p.method == named);
        let begins =
            || PRESETS.iter().find(|p| named.strip_prefix(p.method).is_some_and(|r| r.starts_with('-')));
        let has = || named.split(',').find_map(|step| PRESETS.iter().find(|p| p.method == step.trim()));
        same.or_else(begins).or_else(has).unwrap_or(&PRESETS[0]).name
    }

    /// Plans what happens to a model: quantization by the recipe if the model is float, or conversion to `format` if it
    /// is already quantized.
    ///
    /// # Errors
    /// When the plan cannot be made ([`Plan::all`], [`Plan::repack`]), and when a quantized model would have to be
    /// changed.
    pub fn plans(&self, model: &Model, recipe: &Recipe) -> Result<Vec<Plan>> {
        if model.quant_method().is_none() {
            return Plan::all(model, recipe);
        }
        let Self { preset, recipe: file, method, scheme, format, group_size, symmetric, .. } = self;
        let Self { ignore, overrides, samples, seq_len, seed, packing, mask, .. } = self;
        let other = [preset, method, scheme, group_size, packing, mask, &self.scale_search]
            .iter()
            .any(|o| o.is_some())
            || symmetric.is_some()
            || !(ignore.is_empty() && overrides.is_empty())
            || [samples, seq_len].iter().any(|o| o.is_some())
            || seed.is_some()
            || self.expert_tokens.is_some()
            || self.expert_floor.is_some()
            || !self.skip.is_empty()
            || !self.steps.is_empty()
            || !self.keys_by_name().is_empty()
            || file.is_some();
        if other || format.is_empty() {
            model.require_float()?;
        }
        recipe.containers.iter().map(|container| Plan::repack(model, *container)).collect()
    }

    pub(crate) fn needs_no_text(&self, method: &Method, option: &str) -> Error {
        self.has_no_effect(method, option, SEARCHES_NO_TEXT)
    }

    fn has_no_effect(&self, method: &Method, option: &str, why: &str) -> Error {
        Error::usage(format!("‹{option}› has no effect: method `{}` {why}", method.name), ANOTHER_METHOD)
    }

    /// The settings that name files: the recipe, and keys of steps that are files.
    pub(crate) fn files_mut(&mut self) -> [SettingFile<'_>; 2] {
        [
            SettingFile { setting: "recipe", path: &mut self.recipe, extension: "toml" },
            SettingFile {
                setting: "channel_maxima",
                path: &mut self.channel_maxima,
                extension: "safetensors",
            },
        ]
    }

    /// The files that these settings name.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let of_steps = self.keys_by_name().into_iter().filter_map(|(_, given)| match given {
            Given::File(path) => Some(path),
            Given::Value(_) => None,
        });
        let recipe = self.recipe.as_deref().filter(|_| self.recipe_text().is_none());
        recipe.into_iter().chain(of_steps)
    }

    /// The given settings that are keys of steps: [`step_of`] returns which.
    pub(super) fn keys_by_name(&self) -> Vec<(&'static str, Given<'_>)> {
        let text = |text: &Option<String>| text.as_deref().map(|text| Given::Value(text.into()));
        let count = |count: Option<usize>| count.map(|count| Given::Value(count.into()));
        let all = [
            ("search", text(&self.search)),
            ("alpha", text(&self.alpha)),
            ("smooth_producers", text(&self.smooth_producers)),
            ("channel_maxima", self.channel_maxima.as_deref().map(Given::File)),
            ("output_alpha", text(&self.output_alpha)),
            ("attention_alpha", text(&self.attention_alpha)),
            ("damping", self.damping.map(|damping| Given::Value(number(damping)))),
            ("block_size", count(self.block_size)),
            ("act_order", text(&self.act_order)),
            ("layer_inputs", text(&self.layer_inputs)),
            ("span_blocks", count(self.span_blocks)),
        ];
        all.into_iter().filter_map(|(setting, given)| Some((setting, given?))).collect()
    }

    /// Sets the key of a step that one of the fields of this structure stands for.
    fn apply(&self, setting: &str, given: Given<'_>, recipe: &mut Recipe) -> Result<()> {
        let Some((step, key)) = step_of(setting) else {
            return Err(Error::Internal(format!("`{setting}` is a setting of no step")));
        };
        if self.steps.get(step).is_some_and(|keys| keys.contains_key(key.name)) {
            return Err(set_twice(setting, step, key.name));
        }
        match given {
            Given::Value(value) => recipe.set(step, key.name, &value),
            Given::File(path) => recipe.set_file(step, key.name, path),
        }
    }

    /// Fails if a setting is a key of a step that the method does not have.
    fn check_effect(&self, method: &Method, option: &str) -> Result<()> {
        let Some((step, _)) = step_of(option).filter(|(step, _)| method.keys_of(step).is_none()) else {
            return Ok(());
        };
        if ROUNDINGS.iter().any(|rounding| rounding.name() == step) {
            return Err(self.has_no_effect(method, option, &format!("does not round with `{step}`")));
        }
        let other = method_with(step);
        let skipped = if self.skip.iter().any(|name| name == step) { ", and do not skip it" } else { "" };
        Err(Error::usage(
            format!(
                "‹{option}› has no effect: it applies to the step `{step}`, which is not part of method `{}`",
                method.name
            ),
            format!("leave it out, or {other}{skipped}"),
        ))
    }

    /// Fails if `group_size` or `symmetric` contradicts the scheme: `w4a16-g64` with groups of 128.
    fn refuse_contradiction(&self, text: &str, scheme: SchemeRequest) -> Result<SchemeRequest> {
        let group = match &self.group_size {
            Some(size) => granularity(size)? != scheme.granularity,
            None => false,
        };
        let symmetry = self.symmetric.is_some() && self.symmetric != scheme.symmetric();
        if group || symmetry {
            return Err(Error::usage(
                format!("‹scheme={text}› contradicts ‹group_size›, ‹symmetric› or ‹asymmetric›"),
                "specify group size and symmetry only once",
            ));
        }
        Ok(scheme)
    }
}

/// The error for a key that is set by a setting of its own and in `steps`.
pub(super) fn set_twice(setting: &str, step: &str, key: &str) -> Error {
    Error::usage(format!("‹{setting}› and ‹steps› both set `{key}` of `{step}`"), "leave one of them out")
}

/// Returns the recipe, if [`RecipeSettings::recipe`] is not the path of a file but a text.
pub(crate) fn recipe_text(given: &Path) -> Option<&str> {
    given.to_str().filter(|text| text.contains('\n'))
}

/// A setting that names a file.
pub(crate) struct SettingFile<'a> {
    pub(crate) setting: &'static str,
    pub(crate) path: &'a mut Option<PathBuf>,
    /// The extension of a copy.
    pub(crate) extension: &'static str,
}

/// The value of a setting that is a key of a step.
#[derive(Debug)]
pub(super) enum Given<'a> {
    Value(Value),
    File(&'a Path),
}

/// A number as JSON; NaN and infinity, which JSON does not have, as text.
fn number(number: f64) -> Value {
    Number::from_f64(number).map_or_else(|| number.to_string().into(), Value::Number)
}

fn granularity(text: &str) -> Result<Granularity> {
    match text.parse() {
        Ok(size) if size >= 1 => Ok(Granularity::Group(size)),
        _ if text == "channel" || text == "-1" => Ok(Granularity::Channel),
        _ => Err(Error::usage(
            format!("invalid group size `{text}`"),
            "use a positive integer, such as 32, 64 or 128, or `channel`",
        )),
    }
}

fn parse_override(text: &str, base: SchemeRequest) -> Result<(Pattern, SchemeRequest)> {
    let Some((pattern, scheme)) = text.rsplit_once('=') else {
        return Err(Error::usage(
            format!("override `{text}` has no `=`"),
            "write ‹override=PATTERN=SCHEME›, for example down_proj=w8a16",
        ));
    };
    Ok((Pattern::new(pattern)?, base.refine(scheme)?))
}
