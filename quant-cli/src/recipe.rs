//! The options that say what is quantized how, shared by `plan` and `quantize`.

use std::path::PathBuf;
use std::sync::Arc;

use quant_core::Result;
use quant_core::calibrate::{ChannelMaxima, ExpertSampling, Sampling};
use quant_core::model::Model;
use quant_core::quantize::gptq::GptqSettings;
use quant_core::recipe::{METHODS, Method, PRESETS, Pattern, Plan, Recipe, Rounding, kv, method, steps};
use quant_core::scheme::{Granularity, SchemeRequest};
use quant_core::{Error, format, gguf};

use crate::gguf::GgufOptions;

/// What to do with a model.
#[derive(Debug, Clone, clap::Args)]
pub struct RecipeOptions {
    /// Method and scheme by one name [default: awq-w4a16]
    #[arg(long, help_heading = "Recipe", long_help = preset_help())]
    pub preset: Option<String>,
    /// Recipe file (TOML); the options below override it
    #[arg(long, value_name = "FILE", conflicts_with = "preset", help_heading = "Recipe")]
    pub recipe: Option<PathBuf>,
    /// How weights are found: rtn, awq, gptq, smoothquant, qoq, or steps in order (rotate,awq,gptq) [default: the
    /// preset's]
    #[arg(long, help_heading = "Recipe", long_help = method_help())]
    pub method: Option<String>,
    /// Number format, such as w4a16, w4a16-g64-asym, w8a8, fp8 or nvfp4 [default: the preset's]
    ///
    /// Integers: w2 to w8, then a16 or a8, then optionally kv4 or kv8 (KV cache), -gSIZE or -channel, -sym or -asym,
    /// -progressive (two levels of scales), and after a8 -static or -static-asym. Floats: fp8, fp8-static, fp8-block,
    /// nvfp4, nvfp4a16, mxfp4a16, mxfp8, or whole names such as wf8af8-channel. docs/naming.md has the grammar.
    #[arg(long, help_heading = "Recipe")]
    pub scheme: Option<String>,
    /// Checkpoint format [default: compressed-tensors]; repeat the option to write several into OUT/FORMAT
    #[arg(long, help_heading = "Recipe", long_help = format_help())]
    pub format: Vec<String>,
    /// Weights of a row that share a scale, or `channel` for one scale per row
    #[arg(long, value_name = "SIZE", help_heading = "Recipe")]
    pub group_size: Option<String>,
    /// Symmetric grids [default: what the format's engines expect]
    #[arg(long, hide_short_help = true, conflicts_with = "asymmetric", help_heading = "Recipe")]
    pub symmetric: bool,
    /// Grids with a zero point
    #[arg(long, hide_short_help = true, help_heading = "Recipe")]
    pub asymmetric: bool,
    /// Linears that stay float: a name (down_proj), a glob (*.layers.0.*) or re:REGEX
    #[arg(long, value_name = "PATTERN", help_heading = "Recipe")]
    pub ignore: Vec<String>,
    /// Linears with a scheme of their own (down_proj=w8a16)
    ///
    /// The last pattern that matches wins. lm_head=SCHEME quantizes the head.
    #[arg(long = "override", value_name = "PATTERN=SCHEME", help_heading = "Recipe")]
    pub overrides: Vec<String>,
    #[command(flatten)]
    pub gguf: GgufOptions,
    /// SmoothQuant: migration strength, 0 to 1, or auto (least error per block) [default: the family's]
    #[arg(
        long,
        hide_short_help = true,
        value_name = "A|auto",
        allow_hyphen_values = true,
        help_heading = "Recipe"
    )]
    pub alpha: Option<String>,
    /// SmoothQuant: what is divided by the scales: norms, or all (also linears that feed a linear channel by channel)
    /// [default: norms]
    #[arg(long, hide_short_help = true, value_name = "norms|all", help_heading = "Recipe")]
    pub smooth_producers: Option<String>,
    /// SmoothQuant: read channel maxima from FILE (of --save-channel-maxima) instead of calibrating
    #[arg(long, hide_short_help = true, value_name = "FILE", help_heading = "Recipe")]
    pub channel_maxima: Option<PathBuf>,
    /// QoQ: leave out a step, or several separated by commas; `quant plan` lists the steps
    #[arg(long, hide_short_help = true, value_name = "STEP", value_delimiter = ',', help_heading = "Recipe")]
    pub skip: Vec<String>,
    /// QoQ: smoothing exponent of the inputs of o_proj and down_proj, 0 to 1, or auto [default: 0.3, or 0.1 with one
    /// scale per row]
    #[arg(
        long,
        hide_short_help = true,
        value_name = "A|auto",
        allow_hyphen_values = true,
        help_heading = "Recipe"
    )]
    pub output_alpha: Option<String>,
    /// QoQ: exponent of SmoothAttention, 0 to 1, or auto [default: auto]
    #[arg(
        long,
        hide_short_help = true,
        value_name = "A|auto",
        allow_hyphen_values = true,
        help_heading = "Recipe"
    )]
    pub attention_alpha: Option<String>,
    /// AWQ: compare candidate scales on growing shares of the batch (fast) or on all of it (reference) [default: fast]
    #[arg(long, hide_short_help = true, value_name = "fast|reference", help_heading = "Recipe")]
    pub search: Option<String>,
    /// GPTQ: damping added to the diagonal of the Hessian, as a share of its mean [default: 0.01]
    #[arg(long, hide_short_help = true, value_name = "SHARE", help_heading = "Recipe")]
    pub damping: Option<f64>,
    /// GPTQ: columns per block of lazy updates; changes the speed, and results by rounding only [default: 128]
    #[arg(long, hide_short_help = true, value_name = "COLUMNS", help_heading = "Recipe")]
    pub block_size: Option<usize>,
    /// GPTQ: order of columns: none, static-groups (largest inputs first, grids fixed before) or group-aware (largest
    /// inputs first among and within groups) [default: static-groups]
    #[arg(
        long,
        hide_short_help = true,
        value_name = "none|static-groups|group-aware",
        help_heading = "Recipe"
    )]
    pub act_order: Option<String>,
    /// GPTQ: inputs that a linear is judged on, from the quantized or from the float model [default: quantized; float
    /// for qoq]
    #[arg(long, hide_short_help = true, value_name = "quantized|float", help_heading = "Recipe")]
    pub layer_inputs: Option<String>,
    /// NVFP4: how group scales are chosen: amax, four-over-six (the better of two) or sweep (the best of 13) [default:
    /// sweep]
    #[arg(long, hide_short_help = true, value_name = "amax|four-over-six|sweep", help_heading = "Recipe")]
    pub scale_search: Option<String>,
    /// Quantize a model that is already quantized from its dequantized weights; accuracy is lost twice
    #[arg(long, hide_short_help = true, help_heading = "Recipe")]
    pub requantize: bool,
    /// Calibration windows [default: 64]
    #[arg(long, value_name = "N", help_heading = "Calibration")]
    pub samples: Option<usize>,
    /// Tokens per calibration window [default: 512]
    #[arg(long, value_name = "L", help_heading = "Calibration")]
    pub seq_len: Option<usize>,
    /// Seed for selecting windows [default: 0]
    #[arg(long, hide_short_help = true, value_name = "S", help_heading = "Calibration")]
    pub seed: Option<u64>,
    /// How documents become windows: stream (joined and cut), documents (whole and separate) or auto (documents for
    /// conversations, stream for text) [default: auto]
    #[arg(long, hide_short_help = true, value_name = "auto|stream|documents", help_heading = "Calibration")]
    pub packing: Option<String>,
    /// Tokens to leave out: none, or prompts (only what the assistant wrote counts) [default: none]
    #[arg(long, hide_short_help = true, value_name = "none|prompts", help_heading = "Calibration")]
    pub mask: Option<String>,
    /// Calibrate experts on the tokens routed to them, or on all [default: routed]
    #[arg(long, hide_short_help = true, value_name = "routed|all", help_heading = "Calibration")]
    pub expert_tokens: Option<String>,
    /// Calibrate an expert on all tokens if fewer than N are routed to it [default: 0]
    #[arg(long, hide_short_help = true, value_name = "N", help_heading = "Calibration")]
    pub expert_floor: Option<u64>,
}

impl RecipeOptions {
    /// The recipe that these options ask for.
    pub fn recipe(&self) -> Result<Recipe> {
        let mut recipe = match &self.recipe {
            Some(path) => Recipe::read(path)?,
            None => Recipe::preset(self.preset.as_deref().unwrap_or_else(|| self.usual_preset()))?,
        };
        if let Some(name) = &self.method {
            recipe.method = method(name)?;
            recipe.gptq = recipe.method.usual_gptq();
        }
        recipe.method = recipe.method.without(&self.skip)?;
        if !self.format.is_empty() {
            recipe.containers = format::containers(&self.format)?;
        }
        if let Some(size) = &self.group_size {
            recipe.scheme.granularity = granularity(size)?;
        }
        if self.symmetric || self.asymmetric {
            recipe.scheme.set_symmetric(self.symmetric)?;
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
        if !recipe.method.has("awq") && self.search.is_some() {
            return Err(self.has_no_effect(
                &recipe.method,
                "--search",
                "searches nothing on a calibration text",
            ));
        }
        if !recipe.method.has("smoothquant") {
            let given = self.smooth_options().into_iter().find(|(_, given)| *given);
            if let Some((option, _)) = given {
                return Err(self.has_no_effect(&recipe.method, option, "does not smooth activations"));
            }
        }
        for (option, given, step, to) in [
            ("--output-alpha", &self.output_alpha, "smooth-outputs", &mut recipe.settings.outputs),
            ("--attention-alpha", &self.attention_alpha, "smooth-attention", &mut recipe.settings.attention),
        ] {
            let Some(alpha) = given else { continue };
            if !recipe.method.has(step) {
                return Err(Error::usage(
                    format!("{option} has no effect: `{step}` is no step of what is done"),
                    format!(
                        "leave it out, or choose a method that has `{step}`, such as qoq, and do not skip it"
                    ),
                ));
            }
            *to = Some(alpha.parse()?);
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
                ("--samples", self.samples.is_some()),
                ("--seq-len", self.seq_len.is_some()),
                ("--seed", self.seed.is_some()),
                ("--packing", self.packing.is_some()),
                ("--mask", self.mask.is_some()),
                ("--expert-tokens", self.expert_tokens.is_some()),
                ("--expert-floor", self.expert_floor.is_some()),
            ];
            let given = given.into_iter().find(|(_, given)| *given);
            if let Some((option, _)) = given {
                return Err(self.needs_no_text(&recipe.method, option));
            }
        }
        if let (Some(path), false) = (&self.recipe, recipe.needs_text()) {
            // A file that rounds only has none; this one's transform was overruled.
            if recipe.calibration.is_some() || recipe.sampling != Sampling::default() {
                return Err(
                    self.needs_no_text(&recipe.method, &format!("[calibration] of {}", path.display()))
                );
            }
        }
        if let Some(search) = &self.search {
            recipe.settings.search = search.parse()?;
        }
        if let Some(search) = &self.scale_search {
            if !recipe.searches_scales() {
                return Err(Error::usage(
                    "--scale-search has no effect: only the scales of NVFP4 are searched for",
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

    /// The preset that nobody named: the default, or the first with the method that was asked for, or with what that
    /// begins with, or the first of its steps, so that its scheme is one for which the method is made.
    fn usual_preset(&self) -> &'static str {
        let named = self.method.as_deref().unwrap_or_default();
        let same = PRESETS.iter().find(|p| p.method == named);
        let begins =
            || PRESETS.iter().find(|p| named.strip_prefix(p.method).is_some_and(|r| r.starts_with('-')));
        let has = || named.split(',').find_map(|step| PRESETS.iter().find(|p| p.method == step.trim()));
        same.or_else(begins).or_else(has).unwrap_or(&PRESETS[0]).name
    }

    /// What happens to a model: as the recipe says where it is float, and as `--format` says where
    /// it is quantized already.
    pub fn plans(&self, model: &Model, recipe: &Recipe) -> Result<Vec<Plan>> {
        if model.quant_method().is_none() {
            return Plan::all(model, recipe);
        }
        let Self { preset, recipe: file, method, scheme, format, group_size, symmetric, asymmetric, .. } =
            self;
        let Self { ignore, overrides, search, samples, seq_len, seed, packing, mask, .. } = self;
        let other = [preset, method, scheme, group_size, search, packing, mask, &self.scale_search]
            .iter()
            .any(|o| o.is_some())
            || [symmetric, asymmetric].iter().any(|flag| **flag)
            || !(ignore.is_empty() && overrides.is_empty())
            || [samples, seq_len].iter().any(|o| o.is_some())
            || seed.is_some()
            || self.expert_tokens.is_some()
            || self.expert_floor.is_some()
            || !self.skip.is_empty()
            || self.output_alpha.is_some()
            || self.attention_alpha.is_some()
            || self.gptq_options().iter().chain(&self.smooth_options()).any(|(_, given)| *given)
            || file.is_some();
        if other || format.is_empty() {
            model.require_float()?;
        }
        recipe.containers.iter().map(|container| Plan::repack(model, *container)).collect()
    }

    /// The error that an option about the calibration text has nothing to act on.
    pub fn needs_no_text(&self, method: &Method, option: &str) -> Error {
        self.has_no_effect(method, option, "searches nothing on a calibration text")
    }

    fn has_no_effect(&self, method: &Method, option: &str, why: &str) -> Error {
        Error::usage(
            format!("{option} has no effect: method `{}` {why}", method.name),
            "leave it out, or choose another --method",
        )
    }

    fn smooth_options(&self) -> [(&'static str, bool); 3] {
        [
            ("--alpha", self.alpha.is_some()),
            ("--smooth-producers", self.smooth_producers.is_some()),
            ("--channel-maxima", self.channel_maxima.is_some()),
        ]
    }

    fn gptq_options(&self) -> [(&'static str, bool); 4] {
        [
            ("--damping", self.damping.is_some()),
            ("--block-size", self.block_size.is_some()),
            ("--act-order", self.act_order.is_some()),
            ("--layer-inputs", self.layer_inputs.is_some()),
        ]
    }

    /// `--scheme w4a16-g64 --group-size 128` asks for two things at once.
    fn refuse_contradiction(&self, text: &str, scheme: SchemeRequest) -> Result<SchemeRequest> {
        let group = match &self.group_size {
            Some(size) => granularity(size)? != scheme.granularity,
            None => false,
        };
        let said = (self.symmetric || self.asymmetric).then_some(self.symmetric);
        let symmetry = said.is_some() && said != scheme.symmetric();
        if group || symmetry {
            return Err(Error::usage(
                format!("--scheme {text} contradicts --group-size, --symmetric or --asymmetric"),
                "say it once",
            ));
        }
        Ok(scheme)
    }
}

fn granularity(text: &str) -> Result<Granularity> {
    match text.parse() {
        Ok(size) if size >= 1 => Ok(Granularity::Group(size)),
        _ if text == "channel" || text == "-1" => Ok(Granularity::Channel),
        _ => Err(Error::usage(
            format!("group size `{text}` is not understood"),
            "give a number such as 32, 64 or 128, or `channel`",
        )),
    }
}

fn parse_override(text: &str, base: SchemeRequest) -> Result<(Pattern, SchemeRequest)> {
    let Some((pattern, scheme)) = text.rsplit_once('=') else {
        return Err(Error::usage(
            format!("override `{text}` has no `=`"),
            "write --override PATTERN=SCHEME, for example down_proj=w8a16",
        ));
    };
    Ok((Pattern::new(pattern)?, base.refine(scheme)?))
}

fn listed<'a>(what: &str, lines: impl Iterator<Item = (&'a str, String)>) -> String {
    let lines: Vec<String> = lines.map(|(name, text)| format!("  {name}: {text}")).collect();
    format!("{what}:\n{}", lines.join("\n"))
}

fn preset_help() -> String {
    listed(
        "Method and scheme by one name [default: awq-w4a16]",
        PRESETS.iter().map(|p| (p.name, format!("{} {}", p.method, p.scheme))),
    )
}

fn method_help() -> String {
    let named = listed(
        "How weights are found [default: the preset's]",
        METHODS.iter().map(|m| (&*m.name, m.summary.to_owned())),
    );
    let steps: Vec<_> = steps().into_iter().map(|(name, what)| (name, what.to_owned())).collect();
    let own = listed(
        "Or steps in your own order, separated by commas, with gptq or rtn (the default) last",
        steps.into_iter(),
    );
    format!("{named}\n\n{own}")
}

fn format_help() -> String {
    let what = "Checkpoint format [default: compressed-tensors]; repeat the option to write several into \
                OUT/FORMAT, with one calibration pass for all";
    let containers = format::CONTAINERS.iter().map(|c| (c.name(), c.summary().to_owned()));
    listed(what, containers.chain([(gguf::FORMAT, gguf::SUMMARY.to_owned())]))
}
