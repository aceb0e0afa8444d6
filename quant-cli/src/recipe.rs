//! The options that select what is quantized and how, shared by `plan` and `quantize`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use quant_core::Result;
use quant_core::recipe::{Extensions, FLOATS, METHODS, PRESETS, step_of, steps};
use quant_core::run::RecipeSettings;
use quant_core::wording::{CommandLine, Wording, worded};
use quant_core::{format, gguf};

use crate::gguf::GgufOptions;

/// The options of a recipe.
#[derive(Debug, Clone, clap::Args)]
pub struct RecipeOptions {
    /// Method and scheme by one name [default: awq-w4a16]
    #[arg(long, help_heading = "Recipe", long_help = preset_help())]
    pub preset: Option<String>,
    /// Recipe file (TOML); the options below override it
    #[arg(long, value_name = "FILE", conflicts_with = "preset", help_heading = "Recipe")]
    pub recipe: Option<PathBuf>,
    /// Quantization method: rtn, awq, gptq, smoothquant, qoq, or steps in order (rotate,awq,gptq) [default: the
    /// preset's; without a preset, rtn for FP8 weights]
    #[arg(long, help_heading = "Recipe", long_help = method_help())]
    pub method: Option<String>,
    /// Number format, such as w4a16-g64, w8a8, fp8, nvfp4 or, for GGUF, Q8_0 [default: the preset's]
    ///
    /// For GGUF, a type or a mixture of types [default: Q4_K_M].
    ///
    /// Integers: w2 to w8, then a16 or a8, then optionally kv4 or kv8 (KV cache), -gSIZE or -channel, -sym or -asym,
    /// -progressive (two levels of scales), and after a8 -static or -static-asym. Floats: fp8, fp8-static, fp8-block,
    /// nvfp4, nvfp4a16, mxfp4a16, mxfp8, or whole names such as wf8af8-channel. docs/naming.md has the grammar.
    #[arg(long, help_heading = "Recipe")]
    pub scheme: Option<String>,
    /// Checkpoint format [default: compressed-tensors]; repeat the option to write several into OUT/FORMAT
    #[arg(long, help_heading = "Recipe", long_help = format_help())]
    pub format: Vec<String>,
    /// Weights of a row that share a scale; `channel` or -1 for one scale per row
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, help_heading = "Recipe")]
    pub group_size: Option<String>,
    /// Symmetric grids [default: what the format's engines expect]
    #[arg(long, hide_short_help = true, conflicts_with = "asymmetric", help_heading = "Recipe")]
    pub symmetric: bool,
    /// Asymmetric grids, with a zero point
    #[arg(long, hide_short_help = true, help_heading = "Recipe")]
    pub asymmetric: bool,
    /// Linears that stay float: a name (down_proj), a glob (*.layers.0.*) or re:REGEX
    #[arg(long, value_name = "PATTERN", help_heading = "Recipe")]
    pub ignore: Vec<String>,
    /// Linears with a different scheme (down_proj=w8a16)
    ///
    /// The last pattern that matches wins. lm_head=SCHEME quantizes the head.
    #[arg(long = "override", value_name = "PATTERN=SCHEME", help_heading = "Recipe")]
    pub overrides: Vec<String>,
    #[command(flatten)]
    pub gguf: GgufOptions,
    /// `alpha` of [`RecipeSettings`]
    #[arg(long, hide_short_help = true, help = key_help("alpha"), value_name = "A|auto", allow_hyphen_values = true, help_heading = "Recipe")]
    pub alpha: Option<String>,
    /// `smooth_producers` of [`RecipeSettings`]
    #[arg(long, hide_short_help = true, help = key_help("smooth_producers"), value_name = "norms|all", help_heading = "Recipe")]
    pub smooth_producers: Option<String>,
    /// `channel_maxima` of [`RecipeSettings`]
    #[arg(long, hide_short_help = true, help = key_help("channel_maxima"), value_name = "FILE", help_heading = "Recipe")]
    pub channel_maxima: Option<PathBuf>,
    /// QoQ: skip a step, or several separated by commas: rotate, reorder, smooth-attention, smooth-outputs, clip
    #[arg(long, hide_short_help = true, value_name = "STEP", value_delimiter = ',', help_heading = "Recipe")]
    pub skip: Vec<String>,
    /// `output_alpha` of [`RecipeSettings`]
    #[arg(long, hide_short_help = true, help = key_help("output_alpha"), value_name = "A|auto", allow_hyphen_values = true, help_heading = "Recipe")]
    pub output_alpha: Option<String>,
    /// `attention_alpha` of [`RecipeSettings`]
    #[arg(long, hide_short_help = true, help = key_help("attention_alpha"), value_name = "A|auto", allow_hyphen_values = true, help_heading = "Recipe")]
    pub attention_alpha: Option<String>,
    /// `search` of [`RecipeSettings`]
    #[arg(long, hide_short_help = true, help = key_help("search"), value_name = "fast|reference", help_heading = "Recipe")]
    pub search: Option<String>,
    /// `damping` of [`RecipeSettings`]
    #[arg(long, hide_short_help = true, help = key_help("damping"), value_name = "SHARE", help_heading = "Recipe")]
    pub damping: Option<f64>,
    /// `block_size` of [`RecipeSettings`]
    #[arg(long, hide_short_help = true, help = key_help("block_size"), value_name = "COLUMNS", help_heading = "Recipe")]
    pub block_size: Option<usize>,
    /// `act_order` of [`RecipeSettings`]
    #[arg(long, hide_short_help = true, help = key_help("act_order"), value_name = "none|static-groups|group-aware", help_heading = "Recipe")]
    pub act_order: Option<String>,
    /// `layer_inputs` of [`RecipeSettings`]
    #[arg(long, hide_short_help = true, help = key_help("layer_inputs"), value_name = "quantized|float", help_heading = "Recipe")]
    pub layer_inputs: Option<String>,
    /// `span_blocks` of [`RecipeSettings`]
    #[arg(long, hide_short_help = true, help = key_help("span_blocks"), value_name = "N", help_heading = "Recipe")]
    pub span_blocks: Option<usize>,
    /// Set KEY of STEP: every setting of a step or of gptq, as in a recipe file (smoothquant.alpha=0.5); may be repeated
    #[arg(
        long = "step",
        hide_short_help = true,
        value_name = "STEP.KEY=VALUE",
        help_heading = "Recipe",
        long_help = steps_help()
    )]
    pub steps: Vec<String>,
    /// NVFP4: how group scales are chosen: amax, four-over-six (the better of two) or sweep (the best of 13) [default:
    /// sweep]
    #[arg(long, hide_short_help = true, value_name = "amax|four-over-six|sweep", help_heading = "Recipe")]
    pub scale_search: Option<String>,
    /// Quantize a model again that is already quantized, from its dequantized weights; this loses more accuracy
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
    /// How windows are made from documents: stream (joined, then cut), documents (whole, one or more per window) or
    /// auto (documents for conversations, stream for text) [default: auto]
    #[arg(long, hide_short_help = true, value_name = "auto|stream|documents", help_heading = "Calibration")]
    pub packing: Option<String>,
    /// Tokens to leave out: none, or prompts (only the assistant's answers count) [default: none]
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
    /// Converts these options to the library's settings.
    ///
    /// # Errors
    /// When a `--step` is not `STEP.KEY=VALUE`, or repeats a key.
    pub fn settings(&self) -> Result<RecipeSettings> {
        let options = self.clone();
        let mut settings = RecipeSettings {
            symmetric: options.symmetric.then_some(true).or(options.asymmetric.then_some(false)),
            preset: options.preset,
            recipe: options.recipe,
            method: options.method,
            scheme: options.scheme,
            format: options.format,
            group_size: options.group_size,
            ignore: options.ignore,
            overrides: options.overrides,
            gguf: options.gguf.settings(),
            alpha: options.alpha,
            smooth_producers: options.smooth_producers,
            channel_maxima: options.channel_maxima,
            skip: options.skip,
            output_alpha: options.output_alpha,
            attention_alpha: options.attention_alpha,
            steps: BTreeMap::new(),
            search: options.search,
            damping: options.damping,
            block_size: options.block_size,
            act_order: options.act_order,
            layer_inputs: options.layer_inputs,
            span_blocks: options.span_blocks,
            scale_search: options.scale_search,
            requantize: options.requantize,
            samples: options.samples,
            seq_len: options.seq_len,
            seed: options.seed,
            packing: options.packing,
            mask: options.mask,
            expert_tokens: options.expert_tokens,
            expert_floor: options.expert_floor,
        };
        options.steps.iter().try_for_each(|step| settings.add_step(step))?;
        Ok(settings)
    }
}

/// The help of a setting that is a key of a step, which the step brings.
fn key_help(setting: &str) -> String {
    let help = step_of(setting).map(|(_, key)| key.help).unwrap_or_default();
    worded(help, &CommandLine).into_owned()
}

fn steps_help() -> String {
    // What most of them do is said once, by the option that sets them too.
    let known = Extensions::default();
    let (mut also, mut lines) = (Vec::new(), String::new());
    for (step, key) in known.keys() {
        match key.setting {
            Some(setting) => {
                also.push(format!("{step}.{} ({})", key.name, CommandLine.setting(setting, None)))
            }
            None => {
                let description = key.schema["description"].as_str().unwrap_or_default();
                lines.push_str(&format!("\n  {step}.{}: {description}", key.name));
            }
        }
    }
    format!(
        "Set KEY of STEP: every setting of a step or of gptq, as in a recipe file; may be repeated\n\nKeys, with the \
         options that set them too: {}{lines}",
        also.join(", ")
    )
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
        "Quantization method [default: the preset's; without a preset, rtn for FP8 weights]",
        METHODS.iter().map(|m| (&*m.name, m.summary.to_owned())),
    );
    // Steps that are methods too have been described.
    let is_method = |name: &str| METHODS.iter().any(|m| m.name == name);
    let (again, steps): (Vec<_>, Vec<_>) = steps().into_iter().partition(|(name, _)| is_method(name));
    let again: Vec<&str> = again.into_iter().map(|(name, _)| name).collect();
    let own = listed(
        &format!(
            "Or your own steps, separated by commas; the last is gptq or rtn (default: rtn). Steps besides {}",
            again.join(" and ")
        ),
        steps.into_iter().map(|(name, what)| (name, what.to_owned())),
    );
    format!("{named}\n\n{own}")
}

fn format_help() -> String {
    let what = "Checkpoint format [default: compressed-tensors]; repeat the option to write several into \
                OUT/FORMAT, with one calibration pass for all";
    let containers = format::CONTAINERS.iter().map(|c| (c.name(), c.summary().to_owned()));
    let others = [
        (gguf::FORMAT, gguf::SUMMARY),
        (FLOATS, "floats, for GGUF files and quantized checkpoints; ‹scheme› is bf16, f16 or f32"),
    ];
    listed(what, containers.chain(others.map(|(name, what)| (name, worded(what, &CommandLine).into_owned()))))
}
