//! The settings for quantizing a model: a preset or a recipe file, and settings that override it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::gguf_settings::GgufSettings;
use crate::calibrate::{ChannelMaxima, ExpertSampling, Sampling};
use crate::model::Model;
use crate::quantize::gptq::GptqSettings;
use crate::recipe::{Extensions, METHODS, Method, PRESETS, Pattern, Plan, Recipe, Rounding, kv, step_of};
use crate::scheme::{Granularity, SchemeRequest};
use crate::transform::TransformSettings;
use crate::{Error, Result};

const SEARCHES_NO_TEXT: &str = "does not use a calibration text";
const ANOTHER_METHOD: &str = "leave it out, or choose a different ‹method›";

/// The settings of `plan` and `quantize`. Fields that are `None` or empty are taken from the preset or the recipe.
///
/// Messages refer to a setting by its field name, between `‹` and `›` ([`wording`](crate::wording)).
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecipeSettings {
    /// A preset, which names a method and a scheme; `awq-w4a16` if no preset, recipe or method is given.
    pub preset: Option<String>,
    /// A recipe file (TOML).
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
    /// The settings of steps, by the name of the step: keys and values as in a `[[transform]]` entry of a recipe file.
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
        let mut recipe = match &self.recipe {
            Some(path) => Recipe::read_with(path, extensions)?,
            None => Recipe::preset(self.preset.as_deref().unwrap_or_else(|| self.preset_by_method()))?,
        };
        if let Some(name) = &self.method {
            recipe.method = extensions.method(name)?;
            recipe.gptq = recipe.method.default_gptq();
        }
        recipe.method = recipe.method.without(&self.skip)?;
        if !self.format.is_empty() {
            recipe.containers = extensions.containers_of(&self.format)?;
        }
        if let Some(size) = &self.group_size {
            recipe.scheme.granularity = granularity(size)?;
        }
        if let Some(symmetric) = self.symmetric {
            recipe.scheme.set_symmetric(symmetric)?;
        }
        if let Some(scheme) = &self.scheme {
            let (scheme, kv) = kv::split(scheme)?;
            recipe.settings.kv = kv;
            let scheme = &scheme;
            recipe.scheme = self.refuse_contradiction(scheme, recipe.scheme.refine(scheme)?)?;
        }
        for pattern in &self.ignore {
            recipe.ignore.push(Pattern::new(pattern)?);
        }
        for option in &self.overrides {
            recipe.overrides.push(parse_override(option, recipe.scheme)?);
        }
        let given = self.transform_options().into_iter().filter(|(_, given)| *given);
        for (option, _) in given {
            self.check_effect(&recipe.method, option)?;
        }
        for (step, keys) in &self.steps {
            set_keys(&recipe.method, step, keys, &mut recipe.settings)?;
        }
        if let Some(alpha) = &self.output_alpha {
            recipe.settings.outputs = Some(alpha.parse()?);
        }
        if let Some(alpha) = &self.attention_alpha {
            recipe.settings.attention = Some(alpha.parse()?);
        }
        let smooth = &mut recipe.settings.smooth;
        if let Some(alpha) = &self.alpha {
            smooth.alpha = Some(alpha.parse()?);
        }
        if let Some(producers) = &self.smooth_producers {
            smooth.producers = producers.parse()?;
        }
        if let Some(path) = &self.channel_maxima {
            smooth.maxima = Some(Arc::new(ChannelMaxima::read(path)?));
        }
        if recipe.method.rounding != Rounding::Gptq {
            let given = self.gptq_options().into_iter().find(|(_, given)| *given);
            if let Some((option, _)) = given {
                return Err(self.has_no_effect(&recipe.method, option, "does not round with GPTQ"));
            }
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
                return Err(Error::usage(
                    format!(
                        "[calibration] of {} has no effect: method `{}` {SEARCHES_NO_TEXT}",
                        path.display(),
                        recipe.method.name
                    ),
                    ANOTHER_METHOD,
                ));
            }
        }
        if let Some(search) = &self.search {
            recipe.settings.search = search.parse()?;
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
        let gptq = &mut recipe.gptq;
        *gptq = GptqSettings {
            damping: self.damping.unwrap_or(gptq.damping),
            block_size: self.block_size.unwrap_or(gptq.block_size),
            act_order: self.act_order.as_deref().map_or(Ok(gptq.act_order), str::parse)?,
            inputs: self.layer_inputs.as_deref().map_or(Ok(gptq.inputs), str::parse)?,
            span_blocks: self.span_blocks.or(gptq.span_blocks),
        };
        gptq.check()?;
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

    /// Returns the preset to use if none is named: the first whose method is the requested one, a prefix of it, or one
    /// of its steps, so that the scheme suits the method; otherwise the default preset.
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
        let Self { ignore, overrides, search, samples, seq_len, seed, packing, mask, .. } = self;
        let other = [preset, method, scheme, group_size, search, packing, mask, &self.scale_search]
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
            || self.gptq_options().iter().chain(&self.transform_options()).any(|(_, given)| *given)
            || file.is_some();
        if other || format.is_empty() {
            model.require_float()?;
        }
        recipe.containers.iter().map(|container| Plan::repack(model, *container)).collect()
    }

    /// Returns the error for a setting of the calibration text that has no effect.
    pub(crate) fn needs_no_text(&self, method: &Method, option: &str) -> Error {
        self.has_no_effect(method, option, SEARCHES_NO_TEXT)
    }

    fn has_no_effect(&self, method: &Method, option: &str, why: &str) -> Error {
        Error::usage(format!("‹{option}› has no effect: method `{}` {why}", method.name), ANOTHER_METHOD)
    }

    /// The settings that apply to one step of a method, each with whether it is given.
    fn transform_options(&self) -> [(&'static str, bool); 6] {
        [
            ("search", self.search.is_some()),
            ("alpha", self.alpha.is_some()),
            ("smooth_producers", self.smooth_producers.is_some()),
            ("channel_maxima", self.channel_maxima.is_some()),
            ("output_alpha", self.output_alpha.is_some()),
            ("attention_alpha", self.attention_alpha.is_some()),
        ]
    }

    /// Fails if a setting applies to a step that the method does not have.
    fn check_effect(&self, method: &Method, option: &str) -> Result<()> {
        let Some(step) = step_of(option).filter(|_| !method.takes(option)) else { return Ok(()) };
        let skipped = if self.skip.iter().any(|name| name == step) { ", and do not skip it" } else { "" };
        let other = match METHODS.iter().find(|method| method.steps().contains(&step)) {
            Some(method) if method.name == step => format!("choose ‹method={step}›"),
            Some(method) => format!("choose a method with `{step}`, such as {}", method.name),
            None => format!("add `{step}` to the steps"),
        };
        Err(Error::usage(
            format!(
                "‹{option}› has no effect: it applies to the step `{step}`, which is not part of method `{}`",
                method.name
            ),
            format!("leave it out, or {other}{skipped}"),
        ))
    }

    fn gptq_options(&self) -> [(&'static str, bool); 5] {
        [
            ("damping", self.damping.is_some()),
            ("block_size", self.block_size.is_some()),
            ("act_order", self.act_order.is_some()),
            ("layer_inputs", self.layer_inputs.is_some()),
            ("span_blocks", self.span_blocks.is_some()),
        ]
    }

    /// Fails if `group_size` or `symmetric` contradicts the scheme: for example, `w4a16-g64` with groups of 128.
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

/// Applies the settings of a step of the method.
fn set_keys(
    method: &Method,
    step: &str,
    keys: &Map<String, Value>,
    settings: &mut TransformSettings,
) -> Result<()> {
    let transform = method.transforms.iter().find(|t| t.name() == step).ok_or_else(|| {
        let steps = method.steps().join(", ");
        Error::usage(
            format!("‹steps› has settings of `{step}`, which is not a step of method `{}`", method.name),
            if steps.is_empty() { "leave them out".to_owned() } else { format!("its steps are {steps}") },
        )
    })?;
    for (key, value) in keys {
        let known = transform.keys();
        if !known.iter().any(|k| k.name == key) {
            let known: Vec<_> = known.iter().map(|k| k.name).collect();
            return Err(Error::usage(
                format!("‹steps› has the key `{key}`, which `{step}` does not know"),
                if known.is_empty() {
                    "it has no keys".to_owned()
                } else {
                    format!("its keys are {}", known.join(", "))
                },
            ));
        }
        transform.set(key, value, settings)?;
    }
    Ok(())
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
