//! `quant demo`: quantizes the built-in model with each method.

use std::path::{Path, PathBuf};
use std::time::Instant;

use quant_calibration_data::demo_model;
use quant_core::calibrate::{Residence, TokenWindows};
use quant_core::pipeline::{Job, SharedSearches};
use quant_core::recipe::{METHODS, Method, Plan, Recipe};
use quant_core::run::{Text, write};
use quant_core::{Error, Result};
use quant_evaluator::{
    Divergence, EvaluationText, Profile, Reference, Scored, Scores, Window, closest, compare_all,
};
use serde::Serialize;

use super::{Session, eval};
use crate::inputs::{self, Opened};
use crate::output::{self, JsonOption, bytes, duration, table};

/// The window length that the built-in model was trained on.
const WINDOW: usize = 512;
/// The schemes to compare: one where the methods differ little, and one where they differ much.
const SCHEMES: [&str; 2] = ["w4a16-g128-sym", "w3a16-g64-asym"];

/// Few calibration windows, so that the demo is fast.
const SAMPLES: usize = 16;

/// The options of the demo.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Use fewer windows, to check that everything works rather than to measure
    #[arg(long)]
    pub quick: bool,
    /// Write the built-in model to DIR and stop: a checkpoint to try the other commands on
    #[arg(long, value_name = "DIR", conflicts_with_all = ["quick", "json"])]
    pub save_model: Option<PathBuf>,
    #[command(flatten)]
    json: JsonOption,
}

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    profile: String,
    tokens_scored: usize,
    float_bytes: u64,
    float_perplexity: f64,
    float_standard_error: Option<f64>,
    noise_floor_kl: f64,
    noise_floor_kl_standard_error: Option<f64>,
    rows: Vec<Row>,
    /// For each scheme, the method that is closest to the float model.
    closest: Vec<SchemeWinner>,
    seconds: f64,
}

#[derive(Serialize)]
struct SchemeWinner {
    scheme: &'static str,
    method: &'static str,
    /// The method with the next lowest divergence.
    next: &'static str,
    /// Whether the difference between these two is significant at 5 %.
    clear: bool,
}

#[derive(Default, Serialize)]
struct Row {
    method: &'static str,
    scheme: String,
    bytes: u64,
    perplexity: f64,
    perplexity_ratio: f64,
    perplexity_ratio_standard_error: Option<f64>,
    kl: f64,
    kl_standard_error: Option<f64>,
    /// The time to quantize; for a method that took over what another one had found, including the time of that one.
    seconds: f64,
}

/// Quantizes the built-in model with each method and scheme, compares the results, and prints the table or the JSON.
pub fn run(args: &Args, session: &Session) -> Result<()> {
    if let Some(directory) = &args.save_model {
        save(directory)?;
        return output::print(&format!("written to {}\n", directory.display()));
    }
    args.json.check()?;
    let started = Instant::now();
    let scratch = tempfile::tempdir().map_err(|e| Error::io("create", std::env::temp_dir(), e))?;
    let model = scratch.path().join("demo-model");
    unpack(&model)?;
    let opened = inputs::open(&model, session)?;
    let profile = Profile::gptq(WINDOW)?;
    let windows = args.quick.then_some(4);
    let text =
        eval::text(&opened, &Text::Named(inputs::HELDOUT_NAME.to_owned()), profile.into(), windows, session)?;

    // The same for all methods that need it.
    let first = recipe(&METHODS[0], SCHEMES[0], args.quick)?;
    let sampling = Plan::new(&opened.model, &first, first.containers[0])?.sampling;
    let windows = inputs::calibration(&opened, inputs::BUILTIN, sampling, session)?;
    let searches = SharedSearches::new(&opened.model, &windows);
    let (mut rows, mut quantized) = (Vec::new(), Vec::new());
    for scheme in SCHEMES {
        // The other methods need quantized activations.
        let methods = METHODS.iter().filter(|m| !m.is_for_rounded_inputs() && m.preparation.is_none());
        let mut searched: Vec<(&Method, f64)> = Vec::new();
        let mut produced = Vec::new();
        for method in methods {
            session.progress.note(&format!("{} {scheme}", method.name));
            let out = scratch.path().join(format!("{}-{scheme}", method.name));
            let (begun, taken) = (Instant::now(), searches.taken());
            let recipe = recipe(method, scheme, args.quick)?;
            let bytes = produce(&opened, &recipe, (&windows, &searches), &out, session)?;
            let mut seconds = begun.elapsed().as_secs_f64();
            if searches.taken() > taken {
                // Alone, it would have to search itself.
                let same = |(other, _): &&(&Method, f64)| other.steps() == method.steps();
                seconds += searched.iter().find(same).map_or(0.0, |(_, alone)| *alone);
            }
            searched.push((method, seconds));
            let decoder = eval::load(&inputs::open(&out, session)?, &text, "load", session)?;
            let row =
                Row { method: &method.name, scheme: scheme.to_owned(), bytes, seconds, ..Row::default() };
            produced.push((row, decoder));
        }
        for (row, decoder) in produced.into_iter().rev() {
            rows.push(row);
            quantized.push(decoder);
        }
    }
    // The float model runs only once.
    let float = eval::load(&opened, &text, "load", session)?;
    let reference = Reference::Model { decoder: &float, floor: true };
    let models: Vec<Scored<'_>> = quantized.iter().map(Scored::from).collect();
    let observer = session.progress.tokens_per_unit(Some(WINDOW as u64));
    let compared = compare_all(reference, &models, &text, &observer, &session.cancel)?;
    for (row, (scores, divergence)) in rows.iter_mut().zip(&compared) {
        row.measured(scores, divergence);
    }
    let closest = SCHEMES.iter().filter_map(|scheme| winner(scheme, &rows, &compared, &text)).collect();
    let first = compared.into_iter().next().ok_or_else(|| Error::Internal("no method was shown".into()))?.1;
    let (own, floor) = (first.reference.perplexity, first.noise_floor);
    let floor = floor.ok_or_else(|| Error::Internal("a comparison without its noise floor".into()))?.kl;
    let report = Report {
        schema: "quant-demo/1",
        profile: text.id.clone(),
        tokens_scored: text.tokens_scored(),
        float_bytes: opened.directory.source().tensor_bytes(),
        float_perplexity: own.mean,
        float_standard_error: own.standard_error,
        noise_floor_kl: floor.mean,
        noise_floor_kl_standard_error: floor.standard_error,
        rows,
        closest,
        seconds: started.elapsed().as_secs_f64(),
    };
    args.json.emit(&report, || show(&report))
}

/// Writes the built-in model; the directory appears only when it is complete.
fn save(directory: &Path) -> Result<()> {
    if directory.symlink_metadata().is_ok() {
        return Err(Error::usage(
            format!("{} exists already", directory.display()),
            "name a directory that does not exist yet",
        ));
    }
    let parent = directory.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let scratch = tempfile::tempdir_in(parent).map_err(|e| Error::io("create a directory in", parent, e))?;
    let model = scratch.path().join("model");
    unpack(&model)?;
    std::fs::rename(&model, directory).map_err(|e| Error::io("write", directory, e))
}

fn unpack(directory: &Path) -> Result<()> {
    let files = demo_model().ok_or_else(|| Error::Unavailable {
        what: "the demo model".into(),
        reason: "it is too large for a published crate".into(),
        remedy: "build quant from its source repository, or use a model of your own".into(),
    })?;
    std::fs::create_dir(directory).map_err(|e| Error::io("create", directory, e))?;
    for file in files {
        let path = directory.join(file.name);
        std::fs::write(&path, file.bytes).map_err(|e| Error::io("write", &path, e))?;
    }
    Ok(())
}

fn recipe(method: &Method, scheme: &str, quick: bool) -> Result<Recipe> {
    let mut recipe = Recipe::preset(quant_core::recipe::PRESETS[0].name)?;
    recipe.method = method.clone();
    recipe.scheme = scheme.parse()?;
    recipe.sampling.samples = if quick { 4 } else { SAMPLES };
    Ok(recipe)
}

/// Quantizes the model as the `quantize` command does; returns the size of the written tensors in bytes.
fn produce<'a>(
    opened: &'a Opened,
    recipe: &Recipe,
    (windows, searches): (&'a TokenWindows, &'a SharedSearches<'a>),
    out: &Path,
    session: &Session,
) -> Result<u64> {
    let plan = Plan::new(&opened.model, recipe, recipe.containers[0])?;
    let job = Job {
        model: &opened.model,
        plan: &plan,
        windows: plan.needs_text().then_some(windows),
        maxima: None,
        searches: Some(searches),
        observer: &session.progress,
        cancel: &session.cancel,
    };
    let written = write(
        &[job],
        &opened.directory,
        &[out.to_owned()],
        (false, false),
        Residence::Memory,
        &session.host(),
    )?;
    Ok(written.iter().map(|(_, report)| report.bytes_after).sum())
}

impl Row {
    fn measured(&mut self, scores: &Scores, divergence: &Divergence) {
        self.perplexity = scores.perplexity.mean;
        self.perplexity_ratio = divergence.perplexity_ratio.mean;
        self.perplexity_ratio_standard_error = divergence.perplexity_ratio.standard_error;
        self.kl = divergence.kl.mean;
        self.kl_standard_error = divergence.kl.standard_error;
    }
}

fn winner(
    scheme: &'static str,
    rows: &[Row],
    compared: &[(Scores, Divergence)],
    text: &EvaluationText,
) -> Option<SchemeWinner> {
    let of: Vec<_> = rows.iter().zip(compared).filter(|(row, _)| row.scheme == scheme).collect();
    let windows: Vec<&[f64]> = of.iter().map(|(_, (_, d))| d.window_kl.as_slice()).collect();
    let tokens: Vec<usize> = text.windows.iter().map(Window::scored).collect();
    let found = closest(&windows, &tokens)?;
    let method = |index: usize| of[index].0.method;
    Some(SchemeWinner { scheme, method: method(found.index), next: method(found.next), clear: found.clear })
}

fn show(report: &Report) -> String {
    let plus_minus = |value: f64, error: Option<f64>, digits: usize| match error {
        Some(error) => format!("{value:.digits$} ± {error:.digits$}"),
        None => format!("{value:.digits$} ± ?"),
    };
    let percent = |r: &Row| {
        let error = r.perplexity_ratio_standard_error.map(|e| 100.0 * e);
        "+".to_owned() + &plus_minus(100.0 * (r.perplexity_ratio - 1.0), error, 2) + " %"
    };
    let mut rows = vec![vec![
        "float (f16)".to_owned(),
        "".into(),
        bytes(report.float_bytes),
        format!("{:.3}", report.float_perplexity),
        "".into(),
        "".into(),
        "".into(),
    ]];
    rows.extend(report.rows.iter().map(|r| {
        vec![
            r.method.to_owned(),
            r.scheme.clone(),
            bytes(r.bytes),
            format!("{:.3}", r.perplexity),
            percent(r).replace("+-", "-"),
            plus_minus(r.kl, r.kl_standard_error, 4),
            duration(r.seconds),
        ]
    }));
    let header = ["method", "scheme", "size", "perplexity", "over float", "KL (nats)", "time"];
    let error = report.noise_floor_kl_standard_error.map_or("?".to_owned(), |e| format!("{e:.0e}"));
    let noise = format!("{:.1e} ± {error}", report.noise_floor_kl);
    let mut text = table(&header, &rows);
    text.push('\n');
    for SchemeWinner { scheme, method, next, clear } in &report.closest {
        let doubt = if *clear { String::new() } else { format!(", but not clearly closer than {next}") };
        text.push_str(&format!("{scheme}: {method} is closest to float (lowest KL){doubt}\n"));
    }
    text.push_str(&format!(
        "\nScored {} tokens of the built-in held-out text ({}); differences from the float model are paired \
        window by window. KL noise floor (the KL of the float model with the output of every block rounded to about bfloat16): {}. Total time: {}.\n",
        report.tokens_scored,
        report.profile,
        noise,
        output::duration(report.seconds)
    ));
    text
}
