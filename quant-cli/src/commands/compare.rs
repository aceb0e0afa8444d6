//! `quant compare RESULT…`: shows results of `quant eval` next to each other.

use std::path::{Path, PathBuf};

use quant_core::{Error, Result};
use quant_evaluator::Evaluation;
use quant_evaluator::report::{bits, closest_of, nats, schemes};
use serde::Serialize;

use crate::output::{self, JsonOption, bytes, table};

/// The results to compare.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Results of `quant eval --json=FILE` on the same text, with the same profile and reference
    #[arg(required = true, num_args = 2.., value_name = "RESULT")]
    results: Vec<PathBuf>,
    #[command(flatten)]
    json: JsonOption,
}

/// The comparison, as JSON.
#[derive(Serialize)]
struct Comparison {
    schema: &'static str,
    profile: String,
    tokens_scored: usize,
    reference: Option<String>,
    rows: Vec<Row>,
    /// The sentence below the table; null without a reference.
    closest: Option<String>,
}

#[derive(Serialize)]
struct Row {
    result: String,
    model: String,
    scheme: String,
    size_bytes: u64,
    perplexity: f64,
    perplexity_standard_error: Option<f64>,
    kl: Option<f64>,
    kl_standard_error: Option<f64>,
    top1_agreement: Option<f64>,
}

/// Compares the results, and prints the table or the JSON.
pub fn run(args: &Args) -> Result<()> {
    let inputs: Vec<&Path> = args.results.iter().map(PathBuf::as_path).collect();
    output::distinct(&[("json", args.json.json.as_deref())], &inputs)?;
    args.json.check()?;
    let results = (args.results.iter())
        .map(|path| Ok((Evaluation::name(path), Evaluation::read(path)?)))
        .collect::<Result<Vec<_>>>()?;
    if let Some((first, others)) = results.split_first() {
        check(&first.1, others)?;
    }
    let compared: Vec<(&str, &Evaluation)> = results.iter().map(|(name, e)| (name.as_str(), e)).collect();
    args.json.emit(&comparison(&compared), || text(&compared))
}

/// Checks that all results were measured on the same tokens, against the same reference.
///
/// # Errors
/// [`Error::Usage`], which names the first result that differs.
pub fn check(first: &Evaluation, others: &[(String, Evaluation)]) -> Result<()> {
    let reference = |e: &Evaluation| e.reference.as_ref().map(|r| r.sha256.clone());
    for (name, other) in others {
        let differs = match other {
            e if e.tokens_sha256 != first.tokens_sha256 => "on different tokens",
            e if reference(e) != reference(first) => "against a different reference, or without one",
            _ => continue,
        };
        return Err(Error::usage(
            format!(
                "`{}` was measured {differs}, so the results cannot be shown next to each other",
                name.escape_default()
            ),
            "give only results that were measured on the same text with the same profile and reference",
        ));
    }
    Ok(())
}

/// Returns the table of results, and a sentence that names the result closest to the reference.
pub fn text(results: &[(&str, &Evaluation)]) -> String {
    let plus_minus =
        |value: String, error: Option<String>| format!("{value} ± {}", error.unwrap_or("?".into()));
    let rows: Vec<Vec<String>> = (results.iter())
        .map(|(name, e)| {
            let perplexity = e.scores.perplexity;
            let mut row = vec![
                (*name).to_owned(),
                schemes(&e.model),
                bits(&e.model),
                bytes(e.model.size_bytes),
                plus_minus(
                    format!("{:.3}", perplexity.mean),
                    perplexity.standard_error.map(|error| format!("{error:.3}")),
                ),
            ];
            if let Some(c) = &e.comparison {
                row.push(plus_minus(
                    nats(c.kl.mean),
                    c.kl.standard_error.map(|error| format!("{error:.0e}")),
                ));
                row.push(format!("{:.2} %", 100.0 * c.top1_agreement.mean));
            }
            row
        })
        .collect();
    let header = ["result", "scheme", "bits", "size", "perplexity", "mean KL (nats)", "same top token"];
    let columns = rows.iter().map(Vec::len).min().unwrap_or_default();
    let mut text = table(&header[..columns], &rows);
    match closest_of(results) {
        Some(sentence) => text.push_str(&format!("\n{sentence}\n")),
        None => text.push_str("\nWithout a reference, results are compared only by their perplexity.\n"),
    }
    text
}

fn comparison(results: &[(&str, &Evaluation)]) -> Comparison {
    let first = results.first().map(|(_, e)| *e);
    Comparison {
        schema: "quant-compare/1",
        profile: first.map(|e| e.profile.clone()).unwrap_or_default(),
        tokens_scored: first.map(|e| e.tokens_scored).unwrap_or_default(),
        reference: first.and_then(|e| e.reference.as_ref()).map(|r| r.path.clone()),
        rows: (results.iter())
            .map(|(name, e)| {
                let c = e.comparison.as_ref();
                Row {
                    result: (*name).to_owned(),
                    model: e.model.path.clone(),
                    scheme: schemes(&e.model),
                    size_bytes: e.model.size_bytes,
                    perplexity: e.scores.perplexity.mean,
                    perplexity_standard_error: e.scores.perplexity.standard_error,
                    kl: c.map(|c| c.kl.mean),
                    kl_standard_error: c.and_then(|c| c.kl.standard_error),
                    top1_agreement: c.map(|c| c.top1_agreement.mean),
                }
            })
            .collect(),
        closest: closest_of(results),
    }
}
