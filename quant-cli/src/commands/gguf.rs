//! `quant quantize --format gguf` and `quant plan --format gguf`.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use quant_core::calibrate::{Packing, Sampling, TokenWindows};
use quant_core::checkpoint::{CheckpointWriter, Published, WriteOptions, refuse_overlap};
use quant_core::gguf::{Curvature, GgufPlan, GgufReport, Importance, write_tensors};
use quant_core::pipeline::{Program, REPORT};
use quant_core::{Error, Result};
use serde::Serialize;

use super::{Session, quantize};
use crate::inputs::{self, Opened};
use crate::output::{self, JsonOption, bytes, duration, table};
use crate::recipe::RecipeOptions;

/// The file's name in a directory.
const FILE: &str = "model.gguf";

#[derive(Serialize)]
struct Summary {
    schema: &'static str,
    path: String,
    mixture: &'static str,
    bytes_before: u64,
    bytes_after: u64,
    bits_per_weight: f64,
    /// Tensors by type.
    types: BTreeMap<String, usize>,
    /// Tensors whose rows did not fit their type.
    replaced: Vec<Replaced>,
    /// Whether errors were weighed by an importance matrix.
    weighted: bool,
    worst_tensor: Option<Worst>,
    seconds: f64,
    peak_memory_bytes: Option<u64>,
}

#[derive(Serialize)]
struct Replaced {
    tensor: String,
    wanted: String,
    got: String,
}

#[derive(Serialize)]
struct Worst {
    tensor: String,
    relative_rms: f64,
}

/// Writes a GGUF file.
pub fn run(args: &quantize::Args, session: &Session) -> Result<()> {
    let started = Instant::now();
    let options = &args.recipe;
    for (option, given) in
        [("--report", args.report.is_some()), ("--save-channel-maxima", args.save_channel_maxima.is_some())]
    {
        if given {
            return Err(Error::usage(format!("{option} has no effect with --format gguf"), "leave it out"));
        }
    }
    if options.gguf.split_max_size.is_some() && is_single(args) {
        return Err(Error::usage(
            format!("--split-max-size writes several files, and {} is one", args.output.display()),
            "give a directory for OUT, or leave it out",
        ));
    }
    let gathers = args.calibration.is_some() || options.gguf.save_imatrix.is_some();
    check_importance(options, gathers)?;
    // Found here rather than after calibration.
    let gptq = options.gguf_request(true)?.gptq.is_some();
    if gptq && !gathers {
        return Err(Error::usage(
            "GPTQ needs a text: --calibration is missing",
            "add --calibration, for example builtin",
        ));
    }
    if !args.force && args.output.exists() {
        return Err(Error::OutputExists { path: args.output.clone() });
    }
    if let Some(path) = &options.gguf.save_imatrix {
        output::distinct(&[("--save-imatrix", Some(path))], &args.files_read())?;
        output::outside(&[("--save-imatrix", Some(path))], &[&args.model, &args.output])?;
        output::check_writable(path)?;
    }
    let opened = open(&args.model, options, session)?;
    refuse_overlap(opened.directory.path(), &args.output)?;
    if gptq {
        Curvature::check(&opened.model)?;
    }
    let windows = if gathers { Some(windows(args, &opened, session)?) } else { None };
    let importance = importance(args, &opened, windows.as_ref(), session)?;
    let (importance, origin) = match importance {
        Some((importance, origin)) => (Some(importance), origin),
        None => (None, String::new()),
    };
    let plan = GgufPlan::new(&opened.model, &opened.directory, options.gguf_request(importance.is_some())?)?;
    let importance = importance.map(|mut im| {
        im.fit(&plan.tensors);
        im
    });
    for note in &plan.notes {
        session.progress.note(&format!("note: {note}"));
    }
    if let Some(missing) = importance.as_ref().map(|im| im.missing(&plan.tensors)).filter(|m| !m.is_empty()) {
        return Err(Error::usage(
            format!(
                "the importance matrix has nothing for {} tensor(s), such as {}",
                missing.len(),
                missing[0]
            ),
            "give one of the same model",
        ));
    }
    let mut curvature = match (plan.request.gptq, &windows) {
        (Some(settings), Some(windows)) => {
            Some(Curvature::new(&opened.model, windows, settings, &session.cancel)?)
        }
        _ => None,
    };
    let weighing = (importance.as_ref(), curvature.as_mut());
    let (published, report) = write(&plan, &opened, weighing, &origin, args, session)?;
    let summary = summary(&plan, &opened, &published, &report, started);
    if args.json {
        return output::print(&output::json(&summary)?);
    }
    output::print(&text(&summary))
}

/// The model, as floats where that is asked for. What blocks of a GGUF file stand for may be written as floats unasked.
fn open(model: &Path, options: &RecipeOptions, session: &Session) -> Result<Opened> {
    let opened = inputs::open(model, session)?;
    let keeps_floats = opened.directory.rounded_to().is_some() && options.gguf_request(true)?.is_float();
    if keeps_floats { Ok(opened) } else { quantize::requantized(opened, options, session) }
}

fn check_importance(options: &RecipeOptions, gathers: bool) -> Result<()> {
    if gathers && options.gguf.imatrix.is_some() {
        return Err(Error::usage(
            "--imatrix gives an importance matrix, and --calibration or --save-imatrix ask for another",
            "leave one of them out",
        ));
    }
    let sampling = [
        ("--samples", options.samples.is_some()),
        ("--seq-len", options.seq_len.is_some()),
        ("--seed", options.seed.is_some()),
        ("--packing", options.packing.is_some()),
        ("--mask", options.mask.is_some()),
    ];
    let of_experts = [
        ("--expert-tokens", options.expert_tokens.is_some()),
        ("--expert-floor", options.expert_floor.is_some()),
    ];
    if let Some((option, _)) = of_experts.into_iter().find(|(_, given)| *given) {
        return Err(Error::usage(
            format!(
                "{option} has no effect: importance is that of the tokens that are routed to each expert"
            ),
            "leave it out",
        ));
    }
    match sampling.into_iter().find(|(_, given)| *given && !gathers) {
        Some((option, _)) => Err(Error::usage(
            format!("{option} has no effect: no calibration text is looked at"),
            "add --calibration, or leave it out",
        )),
        None => Ok(()),
    }
}

/// The importance matrix, and where it comes from.
fn importance(
    args: &quantize::Args,
    opened: &Opened,
    windows: Option<&TokenWindows>,
    session: &Session,
) -> Result<Option<(Importance, String)>> {
    let options = &args.recipe;
    if (windows.is_some() || options.gguf.imatrix.is_some()) && opened.model.quant_method().is_some() {
        return Err(Error::usage(
            "an importance matrix has no effect: the model is quantized, and its codes are kept",
            "leave it out, or add --requantize",
        ));
    }
    if let Some(path) = &options.gguf.imatrix {
        return Ok(Some((Importance::read(path)?, path.display().to_string())));
    }
    let Some(windows) = windows else { return Ok(None) };
    let text = args.calibration.as_deref().unwrap_or(inputs::BUILTIN);
    let found = Importance::gather(&opened.model, windows, text, &session.progress, &session.cancel)?;
    if let Some(path) = &options.gguf.save_imatrix {
        let bytes = match path.extension() == Some(OsStr::new("dat")) {
            true => found.to_dat(),
            false => found.to_gguf()?,
        };
        output::write_file(path, &bytes)?;
    }
    let origin =
        options.gguf.save_imatrix.as_ref().map_or_else(String::new, |path| path.display().to_string());
    Ok(Some((found, origin)))
}

/// The calibration text as windows.
fn windows(args: &quantize::Args, opened: &Opened, session: &Session) -> Result<TokenWindows> {
    let options = &args.recipe;
    let defaults = Sampling::default();
    let sampling = Sampling {
        samples: options.samples.unwrap_or(defaults.samples),
        length: options.seq_len.unwrap_or(defaults.length),
        seed: options.seed.unwrap_or(defaults.seed),
        packing: options.packing.as_deref().map_or(Ok(Packing::Auto), str::parse)?,
        mask: options.mask.as_deref().map_or(Ok(defaults.mask), str::parse)?,
        ..defaults
    };
    sampling.check()?;
    let text = args.calibration.as_deref().unwrap_or(inputs::BUILTIN);
    inputs::calibration(opened, text, sampling, session)
}

/// Whether OUT is the file itself.
fn is_single(args: &quantize::Args) -> bool {
    args.output.extension() == Some(OsStr::new("gguf"))
}

/// Writes the file at OUT where that ends in `.gguf`, else into a directory of that name.
fn write(
    plan: &GgufPlan,
    opened: &Opened,
    (importance, curvature): (Option<&Importance>, Option<&mut Curvature<'_>>),
    origin: &str,
    args: &quantize::Args,
    session: &Session,
) -> Result<(Published, GgufReport)> {
    let single_file = is_single(args);
    let split = args.recipe.gguf.split_max_size;
    let file_name = match args.output.file_name() {
        Some(name) if single_file => name.to_string_lossy().into_owned(),
        _ => FILE.to_owned(),
    };
    let program = Program::current(&session.cancel)?;
    let options = WriteOptions {
        force: args.force,
        resume: args.resume,
        fingerprint: plan.fingerprint(&opened.directory, importance, &program),
        archive: Arc::new(plan.archive(&file_name, split.is_some(), importance, origin)),
        single_file,
        max_shard_bytes: split.unwrap_or(WriteOptions::default().max_shard_bytes),
        ..WriteOptions::default()
    };
    let mut writer = CheckpointWriter::create(&args.output, plan.outputs()?, options)?;
    for note in writer.notes() {
        session.progress.note(&format!("note: {note}"));
    }
    let (observer, cancel) = (&session.progress, &session.cancel);
    let outcome = write_tensors(plan, &opened.model, importance, curvature, &mut writer, observer, cancel)
        .and_then(|report| {
            if !single_file {
                writer.add_file(REPORT, report.to_json()?.as_bytes())?;
            }
            Ok(report)
        });
    let report = match outcome {
        Ok(report) => report,
        Err(error) => return Err(quantize::given_up(vec![writer], error)),
    };
    let published = writer.prepare(observer, cancel)?.publish()?;
    Ok((published, report))
}

fn summary(
    plan: &GgufPlan,
    opened: &Opened,
    published: &Published,
    report: &GgufReport,
    started: Instant,
) -> Summary {
    let mut types: BTreeMap<String, usize> = BTreeMap::new();
    for tensor in &report.tensors {
        *types.entry(tensor.kind.clone()).or_default() += 1;
    }
    let replaced = report.replaced().map(|t| Replaced {
        tensor: t.tensor.clone(),
        wanted: t.replaces.clone().unwrap_or_default(),
        got: t.kind.clone(),
    });
    let errors = report.tensors.iter().filter_map(|t| Some((t, t.relative_rms?)));
    let worst = errors.max_by(|a, b| a.1.total_cmp(&b.1));
    Summary {
        schema: "quant-gguf-summary/1",
        path: published.path.display().to_string(),
        mixture: plan.request.mixture.name,
        bytes_before: opened.directory.source().file_bytes(),
        bytes_after: published.bytes,
        bits_per_weight: bits_per_weight(plan),
        types,
        replaced: replaced.collect(),
        weighted: report.tensors.iter().any(|t| t.weighted),
        worst_tensor: worst.map(|(t, relative_rms)| Worst { tensor: t.tensor.clone(), relative_rms }),
        seconds: started.elapsed().as_secs_f64(),
        peak_memory_bytes: output::peak_memory(),
    }
}

fn bits_per_weight(plan: &GgufPlan) -> f64 {
    let elements: usize = plan.tensors.iter().map(|t| t.shape.iter().product::<usize>()).sum();
    plan.output_bytes() as f64 * 8.0 / elements.max(1) as f64
}

fn text(summary: &Summary) -> String {
    let mut text = format!(
        "{}: {} as {}, {:.2} bits per weight; it was {}\n",
        summary.path,
        bytes(summary.bytes_after),
        summary.mixture,
        summary.bits_per_weight,
        bytes(summary.bytes_before),
    );
    let types: Vec<String> = summary.types.iter().map(|(kind, n)| format!("{n} × {kind}")).collect();
    text.push_str(&format!("tensors: {}\n", types.join(", ")));
    for Replaced { tensor, wanted, got } in &summary.replaced {
        text.push_str(&format!("replaced: {tensor} is {got}, its rows do not fit {wanted}\n"));
    }
    if let Some(Worst { tensor, relative_rms }) = &summary.worst_tensor {
        text.push_str(&format!("largest relative error: {relative_rms:.4} of {tensor}\n"));
    }
    text.push_str(&format!("took {}\n", duration(summary.seconds)));
    text
}

#[derive(Serialize)]
struct PlanJson<'a> {
    schema: &'static str,
    format: &'static str,
    mixture: &'static str,
    input_bytes: u64,
    output_bytes: u64,
    bits_per_weight: f64,
    notes: &'a [String],
    tensors: Vec<TensorJson<'a>>,
}

#[derive(Serialize)]
struct TensorJson<'a> {
    tensor: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    replaces: Option<&'static str>,
    shape: &'a [usize],
    bytes: u64,
    keeps_codes: bool,
    sources: Vec<&'a str>,
}

/// Shows what a GGUF file would hold.
pub fn plan(
    model: &Path,
    options: &RecipeOptions,
    all: bool,
    json: &JsonOption,
    session: &Session,
) -> Result<()> {
    if options.gguf.save_imatrix.is_some() {
        return Err(Error::usage("--save-imatrix has no effect: a plan gathers none", "leave it out"));
    }
    let opened = open(model, options, session)?;
    // A plan is of what a run with an importance matrix does where one is named.
    let importance = options.gguf.imatrix.as_ref().map(|path| Importance::read(path)).transpose()?;
    let plan = GgufPlan::new(&opened.model, &opened.directory, options.gguf_request(importance.is_some())?)?;
    let tensors = plan.tensors.iter().map(|t| TensorJson {
        tensor: &t.name,
        kind: t.kind.name,
        replaces: t.replaces.map(|kind| kind.name),
        shape: &t.shape,
        bytes: t.bytes(),
        keeps_codes: t.keeps_codes(),
        sources: t.sources(),
    });
    let value = PlanJson {
        schema: "quant-gguf-plan/1",
        format: quant_core::gguf::FORMAT,
        mixture: plan.request.mixture.name,
        input_bytes: opened.directory.source().file_bytes(),
        output_bytes: plan.output_bytes(),
        bits_per_weight: bits_per_weight(&plan),
        notes: &plan.notes,
        tensors: tensors.collect(),
    };
    json.emit(&value, || plan_text(&plan, all))
}

fn plan_text(plan: &GgufPlan, all: bool) -> String {
    let mut text = format!(
        "GGUF, {}: {}, {:.2} bits per weight\n\n",
        plan.request.mixture.name,
        bytes(plan.output_bytes()),
        bits_per_weight(plan)
    );
    let rows: Vec<Vec<String>> = if all {
        let row = |t: &quant_core::gguf::PlannedTensor| {
            let shape: Vec<String> = t.shape.iter().map(usize::to_string).collect();
            vec![t.name.clone(), shape.join("×"), t.kind.name.to_owned(), bytes(t.bytes())]
        };
        plan.tensors.iter().map(row).collect()
    } else {
        // One line for a kind of tensor, whatever its block.
        let mut kinds: Vec<(String, &str, usize, u64)> = Vec::new();
        for t in &plan.tensors {
            let name: Vec<&str> = t.name.split('.').filter(|part| part.parse::<usize>().is_err()).collect();
            let name = name.join(".");
            match kinds.iter_mut().find(|k| k.0 == name && k.1 == t.kind.name) {
                Some(known) => {
                    known.2 += 1;
                    known.3 += t.bytes();
                }
                None => kinds.push((name, t.kind.name, 1, t.bytes())),
            }
        }
        let row = |(name, kind, n, size): (String, &str, usize, u64)| {
            vec![name, n.to_string(), kind.to_owned(), bytes(size)]
        };
        kinds.into_iter().map(row).collect()
    };
    let head = if all { ["tensor", "shape", "type", "size"] } else { ["tensor", "tensors", "type", "size"] };
    text.push_str(&table(&head, &rows));
    for t in plan.replaced() {
        let wanted = t.replaces.map_or("", |kind| kind.name);
        text.push_str(&format!("\nreplaced: {} is {}, its rows do not fit {wanted}", t.name, t.kind.name));
    }
    for note in &plan.notes {
        text.push_str(&format!("\nnote: {note}"));
    }
    text.push('\n');
    text
}
