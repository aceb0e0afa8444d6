//! `quant quantize MODEL -o OUT`: quantizes a model.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use quant_core::gguf;
use quant_core::recipe::{Extensions, REPACK};
use quant_core::run::{
    Calibration, Done, FloatsSummary, FullBatchLinears, MIN_EXPERT_TOKENS, QuantizeJob, QuantizeRequest,
    QuantizeSummary, Summary, Text, UndersampledLinears, is_gguf_name,
};
use quant_core::{Error, Result};
use quant_evaluator::report::quantization_page;

use super::Session;
use crate::inputs;
use crate::output::{self, JsonOption, Written, bytes, duration};
use crate::provenance;
use crate::recipe::RecipeOptions;

/// The model to quantize, and where to write the result.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model directory or GGUF file, or org/name or org/name@revision on a hub
    pub model: PathBuf,
    /// Output directory, or a file whose name ends in .gguf
    ///
    /// It is created only when it is complete and verified. With several formats it contains one directory per format. The name of a .gguf file implies --format gguf.
    #[arg(long, short)]
    pub output: PathBuf,
    // Not a doc comment, which would become part of the help.
    #[allow(missing_docs)]
    #[command(flatten)]
    pub recipe: RecipeOptions,
    /// Calibration text: a file or the name of a set [default: builtin]
    ///
    /// A file is plain text, or .jsonl with `text` or `messages`. There is no default for GGUF files.
    #[arg(long, value_name = "FILE|NAME", help_heading = "Calibration")]
    pub calibration: Option<String>,
    /// Write the maximum of each input channel to FILE (safetensors), for --channel-maxima
    #[arg(long, hide_short_help = true, value_name = "FILE", help_heading = "Calibration")]
    pub save_channel_maxima: Option<PathBuf>,
    /// Memory that the run may use, such as 8GiB
    ///
    /// `auto` is 80 % of the available memory. Hidden states that do not fit are kept in files next to OUT. The output
    /// does not depend on this option.
    #[arg(long, value_name = "SIZE", default_value = "auto")]
    pub memory_budget: String,
    /// Replace OUT, and discard the unfinished run of a different command
    ///
    /// An existing OUT stays until the new one is complete.
    #[arg(long)]
    pub force: bool,
    /// Fail if an interrupted run cannot be continued
    ///
    /// The same command continues an interrupted run by itself.
    #[arg(long)]
    pub resume: bool,
    /// Write an HTML report to FILE
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    #[allow(missing_docs)]
    #[command(flatten)]
    pub json: JsonOption,
}

impl Args {
    /// Whether an interrupted run has stored finished work next to the output or, with several formats, inside it.
    pub fn has_job(&self) -> bool {
        let is_job = |path: &Path| path.extension() == Some(OsStr::new("job")) && path.is_dir();
        let mut own = self.output.clone().into_os_string();
        own.push(".job");
        let within = std::fs::read_dir(&self.output).into_iter().flatten().flatten();
        is_job(Path::new(&own)) || within.into_iter().any(|entry| is_job(&entry.path()))
    }

    fn request(&self, session: &Session) -> Result<QuantizeRequest> {
        let mut settings = self.recipe.settings()?;
        let names_format =
            !settings.format.is_empty() || settings.recipe.is_some() || settings.preset.is_some();
        if !names_format && is_gguf_name(&self.output) {
            session.progress.note("note: ‹format=gguf› is implied by the name of the output");
            settings.format.push(gguf::FORMAT.to_owned());
        }
        Ok(QuantizeRequest {
            extensions: Extensions::default(),
            model: self.model.clone(),
            output: self.output.clone(),
            settings,
            calibration: self.calibration.clone().map(Text::Named),
            save_channel_maxima: self.save_channel_maxima.clone(),
            memory_budget: self.memory_budget.parse()?,
            force: self.force,
            resume: self.resume,
        })
    }
}

/// Quantizes a model and prints the summary.
pub fn run(args: &Args, session: &Session) -> Result<()> {
    let request = args.request(session)?;
    let written = [("json", args.json.json.as_deref()), ("report", args.report.as_deref())];
    output::distinct(&written, &request.files_read())?;
    output::outside(&written[..1], &[&args.model, &args.output])?;
    args.json.check()?;
    let (done, summary) = run_request(&request, args.report.as_deref(), session)?;
    let requantized = request.settings.requantize;
    args.json.emit_by(&summary, || {
        output::print(&match &summary {
            Summary::Checkpoints(summary) => {
                text(summary) + &next_step(summary, &args.model, requantized, session)
            }
            Summary::Gguf(summary) => {
                let keeps_codes = matches!(&done, Done::Gguf(done) if done.plan.keeps_codes());
                let next = match request.settings.gguf.pre.as_deref() {
                    Some("none") => String::new(),
                    _ => evaluation(&summary.path, &args.model, keeps_codes || requantized, session),
                };
                super::gguf::text(summary) + &next
            }
            Summary::Floats(summary) => floats_text(summary),
            _ => return Err(Error::Internal("a summary of the wrong kind".into())),
        })
    })
}

/// Carries out a request, and writes a report if one is requested.
///
/// # Errors
/// Same as [`quant_core::run::quantize`]; also [`Error::Usage`] for a report that these formats do not support or whose
/// path is not allowed, and [`Error::Io`] for one that cannot be written.
pub fn run_request(
    request: &QuantizeRequest,
    report: Option<&Path>,
    session: &Session,
) -> Result<(Done, Summary)> {
    let settings = &request.settings;
    if report.is_some() && (settings.writes_gguf()? || settings.writes_floats()?.is_some()) {
        let format = settings.format.concat();
        return Err(Error::usage(format!("‹report› has no effect with ‹format={format}›"), "omit it"));
    }
    let job = QuantizeJob::new(request)?;
    if let Some(path) = report {
        check_report(path, request, job.outputs().len())?;
    }
    let done = job.run(&session.host())?;
    if let (Some(path), Done::Checkpoints(written)) = (report, &done)
        && let Some((published, report)) = written.outputs.first()
    {
        // The map describes the written weights, read back.
        let linears = provenance::linears(&inputs::open(&published.path, session)?.model);
        let page = quantization_page(&request.output.display().to_string(), report, &linears);
        if let Err(error) = output::write_file(path, page.as_bytes()) {
            let complete = request.output.display();
            session
                .progress
                .note(&format!("{complete} is complete; the following error concerns a different file"));
            return Err(error);
        }
    }
    let summary = done.summary().with_peak_memory(crate::system::peak_memory());
    Ok((done, summary))
}

fn check_report(path: &Path, request: &QuantizeRequest, outputs: usize) -> Result<()> {
    let written = [("report", Some(path))];
    let maxima = ("save_channel_maxima", request.save_channel_maxima.as_deref());
    output::distinct(&[written[0], maxima], &request.files_read())?;
    if outputs > 1 {
        return Err(Error::usage(
            "‹report› cannot be combined with several formats",
            "omit ‹report›, because the quant_report.json of each format contains the same numbers; or \
            write one format at a time",
        ));
    }
    output::outside(&written, &[&request.model, &request.output])?;
    output::check_output("report", path, Written::Html)
}

/// Returns the time per step, if the run was long enough for it to matter.
fn breakdown(summary: &QuantizeSummary) -> String {
    const MIN_REPORTED: f64 = 10.0;
    let notable = summary.steps.iter().filter(|s| s.seconds >= 0.01 * summary.seconds);
    let parts: Vec<String> = notable.map(|s| format!("{} {}", s.step, duration(s.seconds))).collect();
    match summary.seconds >= MIN_REPORTED && !parts.is_empty() {
        true => format!(": {}", parts.join(", ")),
        false => String::new(),
    }
}

pub(super) fn text(summary: &QuantizeSummary) -> String {
    let mut text = String::new();
    if let Some(Calibration { tokens, tokens_counted, padding, few, all, .. }) = &summary.calibration {
        let (tokens, tokens_counted) = (*tokens, *tokens_counted);
        let share = 100.0 * tokens_counted as f64 / tokens.max(1) as f64;
        let rest = if tokens_counted < tokens { "; the rest is masked" } else { "" };
        text.push_str(&format!("calibrated on {tokens_counted} of {tokens} tokens ({share:.0} %{rest})"));
        text.push_str(&match padding {
            0 => "\n".to_owned(),
            some => format!("; {some} positions were padding\n"),
        });
        if let Some(UndersampledLinears { linears, least, .. }) = few {
            text.push_str(&format!(
                "{linears} linears of experts were calibrated on fewer than {MIN_EXPERT_TOKENS} tokens \
                (minimum: {least}); use a longer or more varied text, or --expert-floor {MIN_EXPERT_TOKENS} to \
                calibrate such experts on all tokens\n"
            ));
        }
        if let Some(FullBatchLinears { linears, least_routed, .. }) = all {
            text.push_str(&format!(
                "{linears} linears of experts were calibrated on all tokens; as few as {least_routed} tokens \
                are routed to one of these linears\n"
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
                "largest weight error: {:.2} % in {} (RMS relative to the weight; not a measure of quality)\n",
                100.0 * worst.relative_rms,
                worst.tensor
            ));
        }
        text.push_str(&format!("written to {}\n", output.path));
    }
    text.push_str(&format!("in {}{}\n", duration(summary.seconds), breakdown(summary)));
    text
}

fn floats_text(summary: &FloatsSummary) -> String {
    let from = summary.dequantized_from.as_ref();
    let types: Vec<String> = summary.types.iter().map(|(kind, n)| format!("{n} × {kind}")).collect();
    format!(
        "{} → {} as floats{}\ntensors: {}\nwritten to {}\nin {}\n",
        bytes(summary.bytes_before),
        bytes(summary.bytes_after),
        from.map_or_else(String::new, |from| format!(", dequantized from {from}")),
        types.join(", "),
        summary.path,
        duration(summary.seconds)
    )
}

/// Returns a line that says what to do next, unless notes are suppressed.
pub(super) fn next_step(
    summary: &QuantizeSummary,
    model: &Path,
    requantized: bool,
    session: &Session,
) -> String {
    let Some(output) = summary.outputs.first() else { return String::new() };
    let was_quantized = requantized || summary.method == REPACK.name;
    evaluation(&output.path, model, was_quantized, session)
}

/// Returns the command that measures the accuracy loss. A quantized model is not a reference for it.
fn evaluation(output: &str, model: &Path, was_quantized: bool, session: &Session) -> String {
    if session.progress.is_quiet() {
        return String::new();
    }
    let model = model.display().to_string();
    let (reference, why) = match was_quantized {
        true => ("ORIGINAL", format!(" against the model that {model} was quantized from")),
        false => (&*model, String::new()),
    };
    let words = ["quant", "eval", output, "--reference", reference, "--text", inputs::HELDOUT_NAME];
    shlex::try_join(words)
        .map(|line| format!("next, measure the accuracy loss{why}: {line}\n"))
        .unwrap_or_default()
}
