//! `quant eval MODEL --ablation`: QServe's table of the contribution of each step of QoQ, for the user's model and
//! text.
//!
//! Each row quantizes the whole model in memory with one step more than the row above. All rows are compared with the
//! float model on the same windows, so differences between rows are paired.

use std::sync::Arc;
use std::time::Instant;

use quant_core::calibrate::Sampling;
use quant_core::checkpoint::{MemorySink, TensorSource};
use quant_core::model::{Decoder, KvScheme, Model};
use quant_core::pipeline::{self, Job};
use quant_core::recipe::{Plan, Recipe, kv, method};
use quant_core::transform::TransformSettings;
use quant_core::{Error, Result};
use quant_evaluator::{Divergence, Estimate, EvaluationText, Journal, Reference, Scores, compare};
use serde::Serialize;

use super::Session;
use crate::inputs::{self, Opened};
use crate::output::{JsonOption, duration, table};

struct Step {
    name: &'static str,
    /// The step of QoQ that this row adds to the row above, if `--skip` can leave it out.
    adds: Option<&'static str>,
    method: &'static str,
    /// The scheme; `GROUP` stands for the group size, `SYM` for the requested symmetry.
    scheme: &'static str,
    steps: &'static [&'static str],
}

const ROW: &str = "w4a8-channelSYM";
const ROW_KV4: &str = "w4a8kv4-channelSYM";
const GROUPS_KV4: &str = "w4a8kv4-GROUPSYM-progressive";

const fn step(
    name: &'static str,
    adds: Option<&'static str>,
    method: &'static str,
    scheme: &'static str,
    steps: &'static [&'static str],
) -> Step {
    Step { name, adds, method, scheme, steps }
}

/// Rows with fewer bits than the one above.
const FEWER_BITS: [&str; 2] = ["W4A8, a scale per row", "+ KV4"];
/// The steps before reordering.
const SMOOTHED: &[&str] = &["rotate", "smooth-attention", "smooth-outputs", "clip"];
const ALL: &[&str] = &["rotate", "reorder", "smooth-attention", "smooth-outputs", "clip"];

/// Some rows reduce the bits of the weights or of the cache; each of the others adds a step that reduces the loss.
const STEPS: &[Step] = &[
    step("W8A8", None, "rtn", "w8a8-channel-sym", &[]),
    step("W4A8, a scale per row", None, "rtn", ROW, &[]),
    step("+ rotation", Some("rotate"), "qoq-rtn", ROW, &["rotate"]),
    step("+ smooth outputs", Some("smooth-outputs"), "qoq-rtn", ROW, &["rotate", "smooth-outputs"]),
    step("+ clipping", Some("clip"), "qoq-rtn", ROW, &["rotate", "smooth-outputs", "clip"]),
    step("+ KV4", None, "qoq-rtn", ROW_KV4, &["rotate", "smooth-outputs", "clip"]),
    step("+ SmoothAttention", Some("smooth-attention"), "qoq-rtn", ROW_KV4, SMOOTHED),
    step("+ progressive groups", None, "qoq-rtn", GROUPS_KV4, SMOOTHED),
    step("+ reordering", Some("reorder"), "qoq-rtn", GROUPS_KV4, ALL),
    step("+ GPTQ", None, "qoq", GROUPS_KV4, ALL),
];

/// How the rows are computed.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct AblationOptions {
    /// Quantize the float model MODEL in memory, adding one step of QServe's QoQ at a time, and show the effect of each step
    #[arg(long, conflicts_with_all = ["reference", "save_reference", "journal", "report", "compare", "kv", "execution"])]
    pub ablation: bool,
    /// Calibration text of --ablation: a file or the name of a set [default: builtin]
    #[arg(long, value_name = "FILE|NAME", requires = "ablation")]
    pub calibration: Option<String>,
    /// Calibration windows of --ablation [default: 64]
    #[arg(long, value_name = "N", requires = "ablation")]
    pub samples: Option<usize>,
    /// Tokens per calibration window of --ablation [default: 512]
    #[arg(long, value_name = "L", requires = "ablation")]
    pub seq_len: Option<usize>,
    /// Group size, for the rows of --ablation that use groups [default: 128]
    #[arg(long, value_name = "SIZE", requires = "ablation")]
    pub group_size: Option<usize>,
    /// Step of QoQ that --ablation skips, such as rotate if the family does not support it; separate several with
    /// commas
    #[arg(long, value_name = "STEP", value_delimiter = ',', requires = "ablation")]
    pub skip: Vec<String>,
    /// Use grids with a zero point in --ablation, as in QServe's own format, instead of those of the preset
    #[arg(long, requires = "ablation")]
    pub asymmetric: bool,
}

#[derive(Serialize)]
struct Ablation {
    schema: &'static str,
    profile: String,
    tokens_scored: usize,
    tokens_sha256: String,
    float_perplexity: Estimate,
    rows: Vec<Row>,
    seconds: f64,
}

#[derive(Serialize)]
struct Row {
    step: &'static str,
    method: &'static str,
    scheme: String,
    kv_cache: Option<KvScheme>,
    perplexity: Estimate,
    kl: Estimate,
    /// Paired difference between this row's KL and that of the row above.
    #[serde(skip_serializing_if = "Option::is_none")]
    kl_change: Option<Estimate>,
    /// Whether this row has fewer bits than the row above, so that its KL is expected to rise.
    takes_away: bool,
    seconds: f64,
}

pub fn run(
    options: &AblationOptions,
    opened: &Opened,
    text: &EvaluationText,
    json: &JsonOption,
    session: &Session,
) -> Result<()> {
    let started = Instant::now();
    if opened.model.quant_method().is_some() || opened.directory.rounded_to().is_some() {
        let path = opened.directory.path().display();
        return Err(Error::usage(
            format!("{path} is already quantized, but --ablation needs a float model"),
            "give the float checkpoint that it was quantized from",
        ));
    }
    // Report errors of all rows before the first one is computed.
    let steps = steps(options)?;
    for step in &steps {
        let recipe = step.recipe(options)?;
        let model = recipe.prepared(Model::open(&opened.directory)?)?;
        Plan::new(&model, &recipe, recipe.containers[0]).map_err(|e| step.refused(e))?;
    }
    let source = options.calibration.as_deref().unwrap_or(inputs::BUILTIN);
    let windows = inputs::calibration(opened, source, sampling(options), session)?;
    let length = text.longest_input();
    let float = Decoder::load(&opened.model, length, &session.progress, &session.cancel)?.with_kv(None);
    let counts: Vec<usize> = text.windows.iter().map(|w| w.scored()).collect();
    let (mut rows, mut above, mut reference) = (Vec::with_capacity(steps.len()), None::<Vec<f64>>, None);
    for step in steps {
        let begun = Instant::now();
        let recipe = step.recipe(options)?;
        let model = recipe.prepared(Model::open(&opened.directory)?)?;
        let plan = Plan::new(&model, &recipe, recipe.containers[0])?;
        let mut sink = MemorySink::new(plan.outputs())?;
        let job = Job {
            model: &model,
            plan: &plan,
            windows: plan.needs_text().then_some(&windows),
            maxima: None,
            searches: None,
            observer: &session.progress,
            cancel: &session.cancel,
        };
        pipeline::quantize_job(&job, &mut sink)?;
        let config = pipeline::quantized_config(&opened.directory, &plan)?;
        let config = serde_json::from_str(&config).map_err(|e| Error::Internal(e.to_string()))?;
        let source: Arc<dyn TensorSource> = Arc::new(sink.into_source()?);
        let written = Model::new(source, opened.directory.config_path(), &config)?;
        let kv = recipe.settings.kv;
        let decoder = Decoder::load(&written, length, &session.progress, &session.cancel)?.with_kv(kv);
        let observer = session.progress.tokens_per_unit(Some(length as u64));
        let compared_with = Reference::Model { decoder: &float, floor: false };
        let (scores, divergence): (Scores, Divergence) =
            compare(compared_with, &decoder, text, &mut Journal::none(), &observer, &session.cancel)?;
        let change = above.replace(divergence.window_kl.clone()).map(|above| {
            let paired = divergence.window_kl.iter().zip(&above).zip(&counts);
            let totals: Vec<f64> = paired.map(|((now, before), &n)| (now - before) * n as f64).collect();
            Estimate::clustered(&totals, &counts)
        });
        rows.push(Row {
            step: step.name,
            method: step.method,
            scheme: step.scheme(options),
            kv_cache: kv,
            perplexity: scores.perplexity,
            kl: divergence.kl,
            kl_change: change,
            takes_away: FEWER_BITS.contains(&step.name),
            seconds: begun.elapsed().as_secs_f64(),
        });
        reference.get_or_insert(divergence.reference.perplexity);
    }
    let result = Ablation {
        schema: "quant-ablation/1",
        profile: text.id.clone(),
        tokens_scored: text.tokens_scored(),
        tokens_sha256: text.tokens_sha256.clone(),
        float_perplexity: reference.ok_or_else(|| Error::Internal("a table without rows".into()))?,
        rows,
        seconds: started.elapsed().as_secs_f64(),
    };
    json.emit(&result, || show(&result))
}

fn sampling(options: &AblationOptions) -> Sampling {
    let defaults = Sampling::default();
    Sampling {
        samples: options.samples.unwrap_or(defaults.samples),
        length: options.seq_len.unwrap_or(defaults.length),
        ..defaults
    }
}

fn steps(options: &AblationOptions) -> Result<Vec<&'static Step>> {
    // Rejects unknown steps.
    method("qoq")?.without(&options.skip)?;
    let left_out = |step: &&Step| step.adds.is_some_and(|adds| options.skip.iter().any(|s| s == adds));
    Ok(STEPS.iter().filter(|step| !left_out(step)).collect())
}

impl Step {
    /// Gives the error of a row a remedy that fits `quant eval`.
    fn refused(&self, error: Error) -> Error {
        match error {
            Error::GroupSizeDoesNotDivide(_) => Error::usage(
                format!("row `{}`: {error}", self.name),
                "choose a --group-size that divides the input width of every linear",
            ),
            other => other,
        }
    }

    fn scheme(&self, options: &AblationOptions) -> String {
        let symmetry = if options.asymmetric { "-asym" } else { "-sym" };
        let group = format!("g{}", options.group_size.unwrap_or(128));
        self.scheme.replace("GROUP", &group).replace("SYM", symmetry)
    }

    fn recipe(&self, options: &AblationOptions) -> Result<Recipe> {
        let (scheme, kv) = kv::split(&self.scheme(options))?;
        let whole = method(self.method)?;
        let kept = |step: &str| self.steps.contains(&step) && !options.skip.iter().any(|s| s == step);
        let left_out = whole.steps().into_iter().filter(|step| !kept(step));
        let mut settings = TransformSettings { kv, ..TransformSettings::default() };
        whole.set_defaults(&mut settings)?;
        Ok(Recipe {
            method: whole.without(&left_out.map(str::to_owned).collect::<Vec<_>>())?,
            scheme: scheme.parse()?,
            settings,
            sampling: sampling(options),
            ..Recipe::preset("rtn-w4a16")?
        })
    }
}

fn show(result: &Ablation) -> String {
    let estimate = |e: &Estimate, digits: usize| match e.standard_error {
        Some(error) => format!("{:.digits$} ± {error:.digits$}", e.mean),
        None => format!("{:.digits$} ± ?", e.mean),
    };
    let float = vec!["float".into(), format!("{:.3}", result.float_perplexity.mean), "".into(), "".into()];
    let rows = result.rows.iter().map(|row| {
        let change = row.kl_change.as_ref().map(|change| {
            let sign = if change.mean > 0.0 { "+" } else { "" };
            let error = change.standard_error.unwrap_or(f64::INFINITY);
            let is_worse = change.mean > 2.0 * error && !row.takes_away;
            format!("{sign}{}{}", estimate(change, 5), if is_worse { " !" } else { "" })
        });
        vec![
            row.step.to_owned(),
            format!("{:.3}", row.perplexity.mean),
            estimate(&row.kl, 5),
            change.unwrap_or_default(),
            duration(row.seconds),
        ]
    });
    let rows: Vec<Vec<String>> = std::iter::once(float).chain(rows).collect();
    let mut text = table(&["step", "perplexity", "KL (nats)", "change of KL", "time"], &rows);
    text.push_str(&format!(
        "\n{} tokens ({}). Each row includes the steps of all rows above it; changes are paired window by \
        window. `!` marks a row that is worse than the one above it by more than two standard errors, \
        although it uses no fewer bits\n",
        result.tokens_scored, result.profile
    ));
    text
}
