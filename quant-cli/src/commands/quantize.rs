//! `quant quantize MODEL -o OUT`: the main job.

use std::path::{Path, PathBuf};
use std::time::Instant;

use quant_core::checkpoint::{CheckpointWriter, Published, WriteOptions, refuse_overlap};
use quant_core::pipeline::{self, Job, QuantReport};
use quant_core::recipe::{Plan, Recipe};
use quant_core::{Category, Error, Result};
use serde::Serialize;

use super::Session;
use crate::hub;
use crate::inputs::{self, Opened};
use crate::output::{self, bytes, duration};
use crate::recipe::RecipeOptions;

/// What to quantize, and where to write it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model directory, or org/name or org/name@revision on a hub
    pub model: PathBuf,
    /// Directory to write; it appears when all is done and verified
    #[arg(long, short)]
    pub output: PathBuf,
    #[command(flatten)]
    recipe: RecipeOptions,
    /// Calibration text: a file (plain text, or .jsonl with a `text` field, or with `messages`, which
    /// go through the model's chat template) or the name of a set [default: builtin]
    #[arg(long, value_name = "FILE|NAME", help_heading = "Calibration")]
    pub calibration: Option<String>,
    /// Replace OUT if it exists; the old one stays until the new one is complete
    #[arg(long)]
    pub force: bool,
    /// Go on with a run that was interrupted
    #[arg(long)]
    pub resume: bool,
    /// Print the summary as JSON
    #[arg(long)]
    pub json: bool,
}

/// The summary.
#[derive(Serialize)]
pub struct Summary {
    schema: &'static str,
    output: String,
    method: String,
    format: String,
    bytes_before: u64,
    bytes_after: u64,
    bits_per_quantized_weight: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    calibration: Option<Calibration>,
    worst_tensor: Option<Worst>,
    seconds: f64,
    peak_memory_bytes: Option<u64>,
}

#[derive(Serialize)]
struct Worst {
    tensor: String,
    relative_rms: f64,
}

/// Tokens of the calibration text, and how many of them linears were judged by; where not all were.
#[derive(Serialize)]
struct Calibration {
    tokens: u64,
    tokens_counted: u64,
    padding: u64,
}

/// Quantizes.
pub fn run(args: &Args, session: &Session) -> Result<()> {
    let started = Instant::now();
    let recipe = args.recipe.recipe()?;
    if let (Some(text), None) = (&args.calibration, recipe.method.transform) {
        return Err(args.recipe.needs_no_text(&recipe, &format!("--calibration {text}")));
    }
    // Found later for a model that is here; nothing is fetched for a run that cannot write.
    if hub::is_named(&args.model) && !args.force && args.output.exists() {
        return Err(Error::OutputExists { path: args.output.clone() });
    }
    let opened = inputs::open(&args.model, session)?;
    if opened.directory.tokenizer_path().is_none() {
        session.progress.note("warning: the model has no tokenizer.json, and so the result will have none");
    }
    refuse_overlap(opened.directory.path(), &args.output)?;
    let (published, report) = quantize(&opened, &recipe, args, session)?;
    let summary = Summary {
        schema: "quant-summary/1",
        output: published.path.display().to_string(),
        method: report.method.clone(),
        format: report.format.clone(),
        bytes_before: report.bytes_before,
        bytes_after: report.bytes_after,
        bits_per_quantized_weight: report.bits_per_quantized_weight,
        calibration: calibration(&report),
        worst_tensor: worst(&report),
        seconds: started.elapsed().as_secs_f64(),
        peak_memory_bytes: output::peak_memory(),
    };
    if args.json {
        return output::print(&output::json(&summary)?);
    }
    output::print(&text(&summary))
}

fn quantize(
    opened: &Opened,
    recipe: &Recipe,
    args: &Args,
    session: &Session,
) -> Result<(Published, QuantReport)> {
    let plan = Plan::new(&opened.model, recipe)?;
    if !args.force && args.output.exists() {
        return Err(Error::OutputExists { path: args.output.clone() });
    }
    let positions = opened.model.architecture().max_positions;
    if plan.method.transform.is_some() && plan.sampling.length > positions {
        session.progress.note(&format!(
            "warning: calibration windows of {} tokens are longer than the {positions} positions the model was \
             made for; --seq-len {positions} stays inside",
            plan.sampling.length
        ));
    }
    for warning in plan.warnings() {
        session.progress.note(&format!("note: {warning}"));
    }
    let windows = match plan.method.transform {
        Some(_) => {
            let named = args.calibration.as_deref().or(recipe.calibration.as_deref());
            let text = named.unwrap_or(inputs::BUILTIN);
            Some(inputs::calibration(opened, text, plan.sampling, session)?)
        }
        None => None,
    };
    session.cancel.check()?;
    let job = Job {
        model: &opened.model,
        plan: &plan,
        windows: windows.as_ref(),
        observer: &session.progress,
        cancel: &session.cancel,
    };
    write(&job, opened, &args.output, args.force, args.resume, session)
}

/// Runs a job into a directory that appears only when everything in it is verified.
pub fn write(
    job: &Job<'_>,
    opened: &Opened,
    output: &Path,
    force: bool,
    resume: bool,
    session: &Session,
) -> Result<(Published, QuantReport)> {
    let options = WriteOptions {
        force,
        resume,
        fingerprint: pipeline::fingerprint(job, &opened.directory),
        companion_bytes: pipeline::companion_bytes(&opened.directory, job.plan)?,
        ..WriteOptions::default()
    };
    let mut writer = CheckpointWriter::create(output, job.plan.outputs(), options)?;
    for note in writer.notes() {
        session.progress.note(&format!("note: {note}"));
    }
    let outcome = pipeline::quantize(job, &mut writer).and_then(|report| {
        pipeline::add_companions(&opened.directory, job.plan, &report, &mut writer)?;
        Ok(report)
    });
    match outcome {
        Ok(report) => Ok((writer.publish_observed(&session.progress, &session.cancel)?, report)),
        Err(error) => {
            // What was finished is worth keeping when the same job can succeed later.
            let resumable = matches!(error.category(), Category::Interrupted | Category::Environment);
            if !resumable {
                writer.abandon()?;
            }
            Err(error)
        }
    }
}

fn worst(report: &QuantReport) -> Option<Worst> {
    let errors = report.tensors.iter().filter_map(|t| Some((t, t.weight_error?.relative_rms)));
    let (tensor, relative_rms) = errors.max_by(|a, b| a.1.total_cmp(&b.1))?;
    Some(Worst { tensor: tensor.tensor.clone(), relative_rms })
}

/// What of the calibration batch counted, if it was not all.
fn calibration(report: &QuantReport) -> Option<Calibration> {
    let batch = report.calibration.as_ref()?;
    let (tokens, padding) = (batch.tokens, batch.padding);
    // What linears themselves saw; all see the same, but a run that found all done saw nothing.
    let seen = report.tensors.iter().filter_map(|t| t.calibration_tokens).min();
    let tokens_counted = seen.unwrap_or(batch.tokens_counted);
    let notable = tokens_counted < tokens || padding > 0;
    notable.then_some(Calibration { tokens, tokens_counted, padding })
}

fn text(summary: &Summary) -> String {
    let mut text = format!(
        "{} → {} ({:.2} bits a quantized weight) in {}\n",
        bytes(summary.bytes_before),
        bytes(summary.bytes_after),
        summary.bits_per_quantized_weight,
        duration(summary.seconds),
    );
    if let Some(Calibration { tokens, tokens_counted, padding }) = summary.calibration {
        let share = 100.0 * tokens_counted as f64 / tokens.max(1) as f64;
        text.push_str(&format!("calibrated on {tokens_counted} of {tokens} tokens ({share:.0} %)"));
        text.push_str(&match padding {
            0 => "\n".to_owned(),
            some => format!("; {some} positions stayed empty\n"),
        });
    }
    if let Some(worst) = &summary.worst_tensor {
        text.push_str(&format!(
            "largest weight error: {:.2} % in {}\n",
            100.0 * worst.relative_rms,
            worst.tensor
        ));
    }
    text.push_str(&format!("written to {}\n", summary.output));
    text
}
