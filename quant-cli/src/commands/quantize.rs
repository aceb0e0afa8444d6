//! `quant quantize MODEL -o OUT`: the main job.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use quant_core::calibrate::ChannelMaxima;
use quant_core::checkpoint::{CheckpointWriter, Published, WriteOptions, refuse_overlap};
use quant_core::engines::{ENGINES, Outline, Verdict};
use quant_core::format::CONTAINERS;
use quant_core::pipeline::{self, Job, Program, QuantReport};
use quant_core::recipe::{Plan, Rates, Recipe};
use quant_core::{Category, Error, Result, TensorSink};
use quant_evaluator::report::quantization_page;
use serde::Serialize;

use super::Session;
use crate::hub;
use crate::inputs::{self, Opened};
use crate::model_card::{self, model_card};
use crate::output::{self, bytes, duration};
use crate::progress::StepTime;
use crate::provenance;
use crate::recipe::RecipeOptions;

/// A search on fewer tokens follows chance.
const FEW_TOKENS: usize = 256;

/// What to quantize, and where to write it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model directory, or org/name or org/name@revision on a hub
    pub model: PathBuf,
    /// Directory to write; it appears only when complete and verified
    ///
    /// With several formats it holds one directory per format.
    #[arg(long, short)]
    pub output: PathBuf,
    #[command(flatten)]
    pub recipe: RecipeOptions,
    /// Calibration text: a file (plain text, or .jsonl with `text` or `messages`) or a named set [default: builtin]
    #[arg(long, value_name = "FILE|NAME", help_heading = "Calibration")]
    pub calibration: Option<String>,
    /// Write the maxima of all input channels to FILE (safetensors), for --channel-maxima
    #[arg(long, hide_short_help = true, value_name = "FILE", help_heading = "Calibration")]
    pub save_channel_maxima: Option<PathBuf>,
    /// Replace OUT if it exists, once the new one is complete
    #[arg(long)]
    pub force: bool,
    /// Continue an interrupted run
    #[arg(long)]
    pub resume: bool,
    /// Write an HTML report to FILE
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Print the summary as JSON
    #[arg(long)]
    pub json: bool,
}

impl Args {
    /// Files that are read, the model's apart; names of sets are none.
    pub fn files_read(&self) -> Vec<&Path> {
        let recipe = &self.recipe;
        let files = [&recipe.recipe, &recipe.channel_maxima, &recipe.gguf.imatrix];
        let text = self.calibration.as_deref().map(Path::new);
        files.into_iter().filter_map(|file| file.as_deref()).chain(text).collect()
    }
}

/// The summary.
#[derive(Serialize)]
pub struct Summary {
    schema: &'static str,
    method: String,
    bytes_before: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    calibration: Option<Calibration>,
    outputs: Vec<Output>,
    /// What each step took, all blocks together; reading the calibration text is none.
    steps: Vec<StepTime>,
    seconds: f64,
    peak_memory_bytes: Option<u64>,
}

#[derive(Serialize)]
struct Output {
    path: String,
    format: String,
    bytes_after: u64,
    bits_per_quantized_weight: f64,
    worst_tensor: Option<Worst>,
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
    /// Linears of experts that few of these tokens went to.
    #[serde(skip_serializing_if = "Option::is_none")]
    few: Option<Few>,
    /// Linears of experts that were calibrated on all tokens, and not on those that are routed to them.
    #[serde(skip_serializing_if = "Option::is_none")]
    all: Option<OnAll>,
}

/// Linears of experts that were calibrated on all tokens.
#[derive(Debug, PartialEq, Serialize)]
struct OnAll {
    linears: usize,
    /// The fewest tokens that are routed to one of them.
    least_routed: u64,
}

impl OnAll {
    /// Of the tokens that are routed to each of them.
    fn of(routed: impl Iterator<Item = u64> + Clone) -> Option<Self> {
        Some(Self { least_routed: routed.clone().min()?, linears: routed.count() })
    }
}

/// Linears that saw fewer than [`FEW`] tokens.
#[derive(Debug, PartialEq, Serialize)]
struct Few {
    linears: usize,
    /// The fewest that one of them saw.
    least: u64,
}

/// An expert that sees fewer tokens is worth a word: what they say of its weights is little.
const FEW: u64 = 128;

impl Few {
    /// Of the tokens that each linear saw.
    fn of(tokens: impl Iterator<Item = u64> + Clone) -> Option<Self> {
        // Without experts all see the same.
        let enough = FEW.min(tokens.clone().max()?);
        let below = tokens.filter(|tokens| *tokens < enough);
        Some(Self { least: below.clone().min()?, linears: below.count() })
    }
}

/// Quantizes.
pub fn run(args: &Args, session: &Session) -> Result<()> {
    if args.recipe.writes_gguf()? {
        return super::gguf::run(args, session);
    }
    args.recipe.gguf.refuse()?;
    let started = Instant::now();
    let recipe = args.recipe.recipe()?;
    if let (Some(text), false) = (&args.calibration, recipe.needs_text()) {
        return Err(args.recipe.needs_no_text(&recipe.method, &format!("--calibration {text}")));
    }
    let outputs = outputs(&args.output, &recipe)?;
    let written = [
        ("--report", args.report.as_deref()),
        ("--save-channel-maxima", args.save_channel_maxima.as_deref()),
    ];
    output::distinct(&written, &args.files_read())?;
    if let Some(path) = &args.report {
        if outputs.len() > 1 {
            return Err(Error::usage(
                "one --report for several formats",
                "write one format with a report, or leave --report out: quant_report.json of each has the numbers",
            ));
        }
        output::outside(&[("--report", Some(path))], &[&args.model, &args.output])?;
        output::check_writable(path)?;
    }
    if let Some(path) = &args.save_channel_maxima {
        if !recipe.needs_text() {
            return Err(args.recipe.needs_no_text(&recipe.method, "--save-channel-maxima"));
        }
        if let Some(step) = recipe.method.preparation.map(|p| p.name()) {
            return Err(Error::usage(
                format!(
                    "--save-channel-maxima would keep maxima of the model after `{step}`, which no other method sees"
                ),
                format!("save them in a run of another method, or with --skip {step}"),
            ));
        }
        output::outside(&[("--save-channel-maxima", Some(path))], &[&args.model, &args.output])?;
        output::check_writable(path)?;
    }
    // Found later for a model that is here; nothing is fetched for a run that cannot write.
    if hub::is_named(&args.model) {
        refuse_existing(&outputs, args)?;
    }
    let opened = prepared(inputs::open(&args.model, session)?, &recipe, &args.recipe, session)?;
    if opened.directory.tokenizer_path().is_none() {
        session.progress.note("warning: the model has no tokenizer.json, and so the result will have none");
    }
    refuse_overlap(opened.directory.path(), &args.output)?;
    let written = quantize(&opened, &recipe, args, &outputs, session)?;
    if let (Some(path), Some((published, report))) = (&args.report, written.first()) {
        // The map is of what was written, read back.
        let linears = provenance::linears(&inputs::open(&published.path, session)?.model);
        let page = quantization_page(&args.output.display().to_string(), report, &linears);
        output::write_file(path, page.as_bytes())?;
    }
    let summary = Summary {
        schema: "quant-summary/2",
        method: written.first().map(|(_, report)| report.method.clone()).unwrap_or_default(),
        bytes_before: written.first().map_or(0, |(_, report)| report.bytes_before),
        calibration: written.first().and_then(|(_, report)| calibration(report)),
        outputs: written.iter().map(|(published, report)| Output::new(published, report)).collect(),
        steps: session.progress.step_times(),
        seconds: started.elapsed().as_secs_f64(),
        peak_memory_bytes: output::peak_memory(),
    };
    if args.json {
        return output::print(&output::json(&summary)?);
    }
    output::print(&text(&summary, &args.model))
}

/// What was opened, with the model that the recipe works on.
pub fn prepared(
    opened: Opened,
    recipe: &Recipe,
    options: &RecipeOptions,
    session: &Session,
) -> Result<Opened> {
    let opened = requantized(opened, options, session)?;
    Ok(Opened { model: recipe.prepared(opened.model)?, ..opened })
}

/// What was opened, as floats where it is quantized and is to be rounded again. A checkpoint whose codes may be kept stays
/// as it is unless that is asked for.
///
/// # Errors
/// [`Error::Usage`] when it is asked for in vain, and when the floats are what blocks of a GGUF file stand for and nobody
/// asked.
pub fn requantized(opened: Opened, options: &RecipeOptions, session: &Session) -> Result<Opened> {
    let rounded = opened.directory.rounded_to();
    let Some(method) = opened.model.quant_method().or(rounded).map(str::to_owned) else {
        return match options.requantize {
            true => {
                Err(Error::usage("--requantize has no effect: the model is not quantized", "leave it out"))
            }
            false => Ok(opened),
        };
    };
    if !options.requantize {
        return match rounded {
            None => Ok(opened),
            Some(types) => Err(Error::usage(
                format!(
                    "{} is quantized already: it holds blocks of {types}",
                    opened.directory.path().display()
                ),
                "quantize the original float model; --requantize rounds what the blocks stand for once more, and loses \
                 twice",
            )),
        };
    }
    session.progress.note(&format!(
        "note: the model is quantized ({method}): what its codes stand for is rounded once more, and loses twice"
    ));
    Ok(Opened { model: opened.model.dequantized()?, ..opened })
}

/// Where each container of a recipe goes: one to `OUT` itself, several to `OUT/FORMAT`.
fn outputs(out: &Path, recipe: &Recipe) -> Result<Vec<PathBuf>> {
    if recipe.containers.len() == 1 {
        return Ok(vec![out.to_owned()]);
    }
    let entries = match std::fs::read_dir(out) {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::NotFound => {
            return Ok(recipe.containers.iter().map(|c| out.join(c.name())).collect());
        }
        Err(e) => return Err(Error::io("list", out, e)),
    };
    // Checkpoints go into it, so it must not be one, nor anything else that somebody keeps.
    let ours = |name: &OsStr| {
        CONTAINERS.iter().any(|c| name == c.name() || name == OsStr::new(&format!("{}.job", c.name())))
    };
    for entry in entries {
        let name = entry.map_err(|e| Error::io("list", out, e))?.file_name();
        if !ours(&name) {
            return Err(Error::usage(
                format!(
                    "{} is to hold a directory for each format, but it holds {:?}",
                    out.display(),
                    name.to_string_lossy()
                ),
                "choose another output",
            ));
        }
    }
    Ok(recipe.containers.iter().map(|c| out.join(c.name())).collect())
}

fn refuse_existing(outputs: &[PathBuf], args: &Args) -> Result<()> {
    let Some(path) = outputs.iter().find(|path| !args.force && path.exists()) else { return Ok(()) };
    if args.resume && outputs.len() > 1 {
        // A run that dies while formats appear one after the other leaves some of them.
        return Err(Error::usage(
            format!("{} exists already, so the run cannot be resumed", path.display()),
            "add --force: the formats that are there are made again, and what is left of the others is used",
        ));
    }
    Err(Error::OutputExists { path: path.clone() })
}

fn quantize(
    opened: &Opened,
    recipe: &Recipe,
    args: &Args,
    outputs: &[PathBuf],
    session: &Session,
) -> Result<Vec<(Published, QuantReport)>> {
    let plans = args.recipe.plans(&opened.model, recipe)?;
    refuse_existing(outputs, args)?;
    let Some(plan) = plans.first() else { return Err(Error::Internal("no plan was made".into())) };
    if let (Some(text), false) = (&args.calibration, plan.needs_text()) {
        return Err(args.recipe.needs_no_text(&plan.method, &format!("--calibration {text}")));
    }
    if args.save_channel_maxima.is_some() && !plan.needs_text() {
        return Err(args.recipe.needs_no_text(&plan.method, "--save-channel-maxima"));
    }
    let positions = opened.model.architecture().max_positions;
    if plan.needs_text() && plan.sampling.length > positions {
        session.progress.note(&format!(
            "warning: calibration windows of {} tokens are longer than the {positions} positions the model was \
             made for; --seq-len {positions} stays inside",
            plan.sampling.length
        ));
    }
    let lost =
        |plan: &Plan| plan.losses().into_iter().map(|said| format!("lost: {said}")).collect::<Vec<_>>();
    let mut notes: Vec<String> =
        plans.iter().flat_map(|plan| [lost(plan), plan.warnings()].concat()).collect();
    for plan in &plans {
        let outline = Outline::new(plan, &opened.model);
        for engine in ENGINES.iter().filter(|engine| engine.is_common) {
            if let Some(Verdict::No(reason)) = engine.loads(&outline, 1) {
                let (name, version, format) = (engine.name, engine.version, outline.container);
                notes.push(format!("{name} {version} does not load this as {format}: {reason}"));
            }
        }
    }
    notes.dedup();
    for note in notes {
        session.progress.note(&if note.starts_with("lost: ") { note } else { format!("note: {note}") });
    }
    let windows = match plan.needs_text() {
        true => {
            let named = args.calibration.as_deref().or(recipe.calibration.as_deref());
            let text = named.unwrap_or(inputs::BUILTIN);
            Some(inputs::calibration(opened, text, plan.sampling, session)?)
        }
        false => None,
    };
    if let Some(counted) = windows.as_ref().map(|w| w.layout().counted()).filter(|c| *c < FEW_TOKENS) {
        session.progress.note(&format!(
            "warning: only {counted} token(s) of the calibration text count, too few to judge scales by"
        ));
    }
    session.cancel.check()?;
    if session.progress.draws_bar() && plan.needs_text() {
        session.progress.expect("quantize", Plan::seconds(&plans, &opened.model, Rates::measure()?));
    }
    let maxima = args.save_channel_maxima.as_ref().map(|path| (path, Mutex::new(ChannelMaxima::default())));
    let job = |plan| Job {
        model: &opened.model,
        plan,
        windows: windows.as_ref(),
        maxima: maxima.as_ref().map(|(_, kept)| kept),
        observer: &session.progress,
        cancel: &session.cancel,
    };
    let jobs: Vec<Job<'_>> = plans.iter().map(job).collect();
    let written = write(&jobs, opened, outputs, args.force, args.resume, session);
    if written.is_err() && outputs.len() > 1 {
        // Made for them; stays where anything is left in it.
        let _ = std::fs::remove_dir(&args.output);
    }
    let written = written?;
    if let Some((path, kept)) = maxima {
        let kept = kept.into_inner().unwrap_or_else(PoisonError::into_inner);
        output::write_file(path, &kept.to_bytes()?)?;
    }
    Ok(written)
}

/// Runs jobs on one model, each into a directory that appears only when everything in it is
/// verified; none appears before all are.
pub fn write(
    jobs: &[Job<'_>],
    opened: &Opened,
    outputs: &[PathBuf],
    force: bool,
    resume: bool,
    session: &Session,
) -> Result<Vec<(Published, QuantReport)>> {
    let program = Program::current(&session.cancel)?;
    let mut writers: Vec<CheckpointWriter> = Vec::with_capacity(jobs.len());
    for (i, (job, output)) in jobs.iter().zip(outputs).enumerate() {
        // What is going to stand beside it counts when the room on the disk is looked at.
        let others: u64 = jobs[i + 1..].iter().map(|j| j.plan.output_bytes()).sum();
        let options = WriteOptions {
            force,
            resume,
            fingerprint: pipeline::fingerprint(job, &opened.directory, &program),
            companion_bytes: pipeline::companion_bytes(&opened.directory, job.plan)?.saturating_add(others),
            ..WriteOptions::default()
        };
        let writer = match CheckpointWriter::create(output, job.plan.outputs(), options) {
            Ok(writer) => writer,
            Err(error) => return Err(given_up(writers, error)),
        };
        for note in writer.notes() {
            session.progress.note(&format!("note: {note}"));
        }
        writers.push(writer);
    }
    let sinks = writers.iter_mut().map(|w| w as &mut dyn TensorSink).collect();
    let outcome = pipeline::quantize_each(jobs, sinks).and_then(|reports| {
        for ((job, report), writer) in jobs.iter().zip(&reports).zip(&mut writers) {
            pipeline::add_companions(&opened.directory, job.plan, report, writer)?;
            writer.add_file(model_card::NAME, model_card(&opened.directory, job, report).as_bytes())?;
        }
        Ok(reports)
    });
    let reports = match outcome {
        Ok(reports) => reports,
        Err(error) => return Err(given_up(writers, error)),
    };
    let prepared = writers.into_iter().map(|w| w.prepare(&session.progress, &session.cancel));
    let prepared = prepared.collect::<Result<Vec<_>>>()?;
    prepared.into_iter().zip(reports).map(|(p, report)| Ok((p.publish()?, report))).collect()
}

/// Removes what was begun, unless what was finished is worth keeping because the same job can
/// succeed later.
pub fn given_up(writers: Vec<CheckpointWriter>, error: Error) -> Error {
    let resumable = matches!(error.category(), Category::Interrupted | Category::Environment);
    if !resumable {
        for writer in writers {
            if let Err(worse) = writer.abandon() {
                return worse;
            }
        }
    }
    error
}

impl Output {
    fn new(published: &Published, report: &QuantReport) -> Self {
        let errors = report.tensors.iter().filter_map(|t| Some((t, t.weight_error?.relative_rms)));
        let worst = errors.max_by(|a, b| a.1.total_cmp(&b.1));
        Self {
            path: published.path.display().to_string(),
            format: report.format.clone(),
            bytes_after: report.bytes_after,
            bits_per_quantized_weight: report.bits_per_quantized_weight,
            worst_tensor: worst
                .map(|(tensor, relative_rms)| Worst { tensor: tensor.tensor.clone(), relative_rms }),
        }
    }
}

/// What of the calibration batch counted, if it was not all.
fn calibration(report: &QuantReport) -> Option<Calibration> {
    let batch = report.calibration.as_ref()?;
    let (tokens, padding) = (batch.tokens, batch.padding);
    // What linears themselves saw: all the same, but for experts, which see fewer. A run that found all done saw nothing.
    let seen = report.tensors.iter().filter_map(|t| t.calibration_tokens).max();
    let tokens_counted = seen.unwrap_or(batch.tokens_counted);
    let few = Few::of(report.tensors.iter().filter_map(|t| t.calibration_tokens));
    let all = OnAll::of(report.tensors.iter().filter_map(|t| t.routed_tokens));
    let notable = tokens_counted < tokens || padding > 0 || few.is_some() || all.is_some();
    notable.then_some(Calibration { tokens, tokens_counted, padding, few, all })
}

/// Where the time went, where it is long enough to ask.
fn breakdown(summary: &Summary) -> String {
    const WORTH_SAYING: f64 = 10.0;
    let notable = summary.steps.iter().filter(|s| s.seconds >= 0.01 * summary.seconds);
    let parts: Vec<String> = notable.map(|s| format!("{} {}", s.step, duration(s.seconds))).collect();
    match summary.seconds >= WORTH_SAYING && !parts.is_empty() {
        true => format!(": {}", parts.join(", ")),
        false => String::new(),
    }
}

fn text(summary: &Summary, model: &Path) -> String {
    let mut text = String::new();
    if let Some(Calibration { tokens, tokens_counted, padding, few, all }) = &summary.calibration {
        let (tokens, tokens_counted) = (*tokens, *tokens_counted);
        let share = 100.0 * tokens_counted as f64 / tokens.max(1) as f64;
        text.push_str(&format!("calibrated on {tokens_counted} of {tokens} tokens ({share:.0} %)"));
        text.push_str(&match padding {
            0 => "\n".to_owned(),
            some => format!("; {some} positions stayed empty\n"),
        });
        if let Some(Few { linears, least }) = few {
            text.push_str(&format!(
                "{linears} linears of experts saw fewer than {FEW} tokens, one of them {least}; more text reaches more experts\n"
            ));
        }
        if let Some(OnAll { linears, least_routed }) = all {
            text.push_str(&format!(
                "{linears} linears of experts were calibrated on all tokens; {least_routed} are routed to one of them\n"
            ));
        }
    }
    for output in &summary.outputs {
        let format = match summary.outputs.len() {
            1 => String::new(),
            _ => format!("{}: ", output.format),
        };
        text.push_str(&format!(
            "{format}{} → {} ({:.2} bits per quantized weight)\n",
            bytes(summary.bytes_before),
            bytes(output.bytes_after),
            output.bits_per_quantized_weight,
        ));
        if let Some(worst) = &output.worst_tensor {
            text.push_str(&format!(
                "largest weight error: {:.2} % in {}\n",
                100.0 * worst.relative_rms,
                worst.tensor
            ));
        }
        text.push_str(&format!("written to {}\n", output.path));
    }
    text.push_str(&format!("in {}{}\n", duration(summary.seconds), breakdown(summary)));
    text.push_str(&next_step(summary, model));
    text
}

/// How what was written is compared with what it was made from.
fn next_step(summary: &Summary, model: &Path) -> String {
    let Some(output) = summary.outputs.first() else { return String::new() };
    let model = model.display().to_string();
    let words = ["quant", "eval", &output.path, "--reference", &model, "--text", inputs::HELDOUT_NAME];
    shlex::try_join(words).map(|line| format!("next, measure what it cost: {line}\n")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_with_few_tokens_are_counted() {
        let few = |tokens: &[u64]| Few::of(tokens.iter().copied());
        assert_eq!(few(&[]), None);
        // Short texts are no fault of experts.
        assert_eq!(few(&[64, 64, 64]), None);
        assert_eq!(few(&[64, 64, 8, 0]), Some(Few { linears: 2, least: 0 }));
        assert_eq!(few(&[4096, 4096, 128]), None);
        assert_eq!(few(&[4096, 4096, 127, 100, 128]), Some(Few { linears: 2, least: 100 }));
        let all = |routed: &[u64]| OnAll::of(routed.iter().copied());
        assert_eq!((all(&[]), all(&[7, 3])), (None, Some(OnAll { linears: 2, least_routed: 3 })));
    }
}
