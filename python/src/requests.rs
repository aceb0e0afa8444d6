//! Requests from the Python part, parsed from JSON, and results as JSON.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use quant_cli::commands::Session;
use quant_cli::commands::{eval, inspect, plan, quantize};
use quant_cli::device::Device;
use quant_cli::kv::KvBits;
use quant_cli::output::JsonOption;
use quant_cli::provenance;
use quant_cli::system::peak_memory;
use quant_core::calibrate::corpus_of_rows;
use quant_core::pipeline::QuantReport;
use quant_core::recipe::{Extensions, Recipe};
use quant_core::run::{MemoryBudget, QuantizeRequest, RecipeSettings, Text, open};
use quant_core::wording::parser_message;
use quant_core::{Error, Result};
use quant_evaluator::report::quantization_page;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::wording::Keywords;

pub fn parse<T: DeserializeOwned>(request: &str) -> Result<T> {
    serde_json::from_str(request).map_err(|e| {
        Error::usage(
            format!("the request is invalid: {}", parser_message(&e.to_string(), "a dictionary")),
            "check the arguments against the signature of the function",
        )
    })
}

fn to_json(value: &impl serde::Serialize) -> Result<Value> {
    serde_json::to_value(value).map_err(|e| Error::Internal(e.to_string()))
}

/// Returns the text that a request gives by name or as rows, or `None` if it gives neither.
fn text(name: Option<String>, rows: Option<Vec<String>>, called: &str) -> Result<Option<Text>> {
    let Some(rows) = rows else { return Ok(name.map(Text::Named)) };
    let origin = Path::new(called);
    let values = rows.iter().zip(1..).map(|(row, line)| {
        serde_json::from_str(row).map_err(|e| Error::InputFile {
            path: origin.to_owned(),
            line: Some(line),
            reason: format!("cannot be represented as JSON: {e}"),
            remedy: "remove this row, or replace its invalid characters and its NaN or infinite numbers"
                .into(),
        })
    });
    let values = values.collect::<Result<Vec<Value>>>()?;
    Ok(Some(Text::Given(corpus_of_rows(values, origin)?, called.to_owned())))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Quantize {
    model: PathBuf,
    output: PathBuf,
    settings: RecipeSettings,
    calibration: Option<String>,
    save_channel_maxima: Option<PathBuf>,
    memory_budget: Option<String>,
    force: bool,
    resume: bool,
    report: Option<PathBuf>,
}

pub fn quantize(request: &str, rows: Option<Vec<String>>, session: &Session) -> Result<String> {
    let asked: Quantize = parse(request)?;
    let request = QuantizeRequest {
        model: asked.model,
        output: asked.output,
        settings: asked.settings,
        extensions: Extensions::default(),
        calibration: text(asked.calibration, rows, "calibration")?,
        save_channel_maxima: asked.save_channel_maxima,
        memory_budget: asked.memory_budget.as_deref().map_or(Ok(MemoryBudget::Auto), str::parse)?,
        force: asked.force,
        resume: asked.resume,
    };
    let (_, summary) = quantize::run_request(&request, asked.report.as_deref(), session)?;
    Ok(to_json(&summary)?.to_string())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Plan {
    model: PathBuf,
    settings: RecipeSettings,
}

pub fn plan(request: &str, session: &Session) -> Result<String> {
    let Plan { model, settings } = parse(request)?;
    let (plan, seconds) = plan::value(&model, &settings, &Keywords, session)?;
    Ok(json!({ "plan": plan, "seconds": seconds }).to_string())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Evaluate {
    model: PathBuf,
    text: Option<String>,
    reference: Option<PathBuf>,
    save_reference: Option<PathBuf>,
    profile: Option<String>,
    window: Option<usize>,
    windows: Option<u64>,
    execution: String,
    device: String,
    kv: String,
    journal: Option<PathBuf>,
    report: Option<PathBuf>,
    compare: Vec<PathBuf>,
}

pub fn evaluate(request: &str, rows: Option<Vec<String>>, session: &Session) -> Result<String> {
    let asked: Evaluate = parse(request)?;
    let Some(text) = text(asked.text, rows, "text")? else {
        return Err(Error::usage("no evaluation text was given", "give ‹text›"));
    };
    if asked.windows == Some(0) {
        return Err(Error::usage("no windows would be evaluated", "use a ‹windows› of at least 1"));
    }
    let args = eval::Args {
        model: asked.model,
        reference: asked.reference,
        save_reference: asked.save_reference,
        text: text.name().to_owned(),
        profile: asked.profile,
        window: asked.window,
        windows: asked.windows,
        execution: choice("execution", &asked.execution)?,
        device: choice::<Device>("device", &asked.device)?,
        kv: choice::<KvBits>("kv", &asked.kv)?,
        journal: asked.journal,
        shards: Default::default(),
        report: asked.report,
        compare: asked.compare,
        ablation: Default::default(),
        json: JsonOption { json: None },
    };
    let done = eval::evaluate(&args, &text, true, session)?;
    let result = to_json(&done.result)?;
    let answer =
        json!({ "result": result, "page": done.page, "peak_memory_bytes": peak_memory() }).to_string();
    done.finish()?;
    Ok(answer)
}

/// Parses a setting that accepts the same values as an option of the command line.
pub fn choice<T: ValueEnum>(setting: &str, given: &str) -> Result<T> {
    T::from_str(given, false).map_err(|_| {
        let known = T::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let known: Vec<String> = known.map(|value| format!("{:?}", value.get_name())).collect();
        Error::usage(
            format!("‹{setting}={given}› is not a valid value"),
            format!("choose one of {}", known.join(", ")),
        )
    })
}

pub fn inspect(request: &str, session: &Session) -> Result<String> {
    let model: PathBuf = parse(request)?;
    Ok(to_json(&inspect::report(&model, session)?)?.to_string())
}

/// Renders the report page of a quantized checkpoint from the report next to its weights; returns it as JSON, `null` if
/// there is no report.
pub fn page(request: &str, session: &Session) -> Result<String> {
    let path: PathBuf = parse(request)?;
    let opened = open(&path, &session.host())?;
    let report = QuantReport::find(opened.directory.path(), &opened.model)?;
    let linears = provenance::linears(&opened.model);
    let page = report.map(|report| quantization_page(&path.display().to_string(), &report, &linears));
    Ok(json!(page).to_string())
}

pub fn preset_recipe(request: &str) -> Result<String> {
    let preset: String = parse(request)?;
    Ok(json!(Recipe::preset(&preset)?.to_commented_toml()).to_string())
}
