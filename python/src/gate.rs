//! The gate: checks results against a policy, and writes baselines.

use std::path::{Path, PathBuf};

use quant_cli::commands::Session;
use quant_cli::output::{check_writable, distinct, write_file};
use quant_core::Result;
use quant_evaluator::Evaluation;
use quant_evaluator::gate::{Baseline, Policy, check_given, judge, junit, suggest, summary};
use quant_evaluator::report::gate_page;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::requests::parse;

/// A result: the path of its file, or the output of an evaluation.
#[derive(Deserialize)]
#[serde(untagged)]
enum Given {
    File { path: PathBuf },
    Result { name: String, result: Box<Value> },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Gate {
    results: Vec<Given>,
    policy: Option<PathBuf>,
    policy_text: Option<String>,
    baseline: Option<PathBuf>,
    report: Option<PathBuf>,
    junit: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Suggest {
    results: Vec<Given>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Update {
    results: Vec<Given>,
    baseline: PathBuf,
}

fn results(given: Vec<Given>) -> Result<Vec<(String, Evaluation)>> {
    let read = |given| match given {
        Given::File { path } => Ok((Evaluation::name(&path), Evaluation::read(&path)?)),
        Given::Result { name, result } => {
            let evaluation = Evaluation::from_value(*result, Path::new(&name))?;
            Ok((name, evaluation))
        }
    };
    let results = given.into_iter().map(read).collect::<Result<Vec<_>>>()?;
    check_given(&results.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>())?;
    Ok(results)
}

/// Checks results against a policy; returns the verdict, the report page and a summary as JSON.
pub fn gate(request: &str, session: &Session) -> Result<String> {
    let asked: Gate = parse(request)?;
    let files = asked.results.iter().filter_map(|given| match given {
        Given::File { path } => Some(path.as_path()),
        Given::Result { .. } => None,
    });
    let read: Vec<&Path> = files.chain(asked.policy.as_deref()).chain(asked.baseline.as_deref()).collect();
    let written = [("junit", asked.junit.as_deref()), ("report", asked.report.as_deref())];
    distinct(&written, &read)?;
    for path in written.iter().filter_map(|(_, path)| *path) {
        check_writable(path)?;
    }
    let policy = match (&asked.policy, &asked.policy_text) {
        (Some(path), _) => Policy::read(path)?,
        (None, text) => Policy::parse(text.as_deref().unwrap_or_default(), Path::new("policy"))?,
    };
    let results = results(asked.results)?;
    let baseline =
        asked.baseline.as_deref().map(|path| Ok::<_, quant_core::Error>((Baseline::read(path)?, path)));
    let baseline = baseline.transpose()?;
    let outcome = judge(&policy, baseline.as_ref().map(|(read, path)| (read, *path)), &results)?;
    for note in &outcome.notes {
        session.progress.note(&format!("note: {note}"));
    }
    let page = gate_page(&outcome, &results, baseline.as_ref().map(|(read, _)| read));
    if let Some(path) = &asked.junit {
        write_file(path, junit(&outcome)?.as_bytes())?;
    }
    if let Some(path) = &asked.report {
        write_file(path, page.as_bytes())?;
    }
    Ok(json!({ "outcome": outcome, "page": page, "summary": summary(&outcome) }).to_string())
}

/// Returns a policy that these results pass, as JSON.
pub fn suggested(request: &str) -> Result<String> {
    let Suggest { results: given } = parse(request)?;
    Ok(json!(suggest(&results(given)?)).to_string())
}

pub fn update_baseline(request: &str) -> Result<String> {
    let Update { results: given, baseline } = parse(request)?;
    let results = results(given)?;
    // A file that is not a baseline may be something else.
    if baseline.exists() {
        Baseline::read(&baseline)?;
    }
    write_file(&baseline, Baseline::new(&results).to_json()?.as_bytes())?;
    Ok(json!(baseline).to_string())
}
