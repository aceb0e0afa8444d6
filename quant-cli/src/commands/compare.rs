//! `quant compare RESULT…`: shows results of `quant eval` next to each other.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use quant_core::{Error, Result};
use quant_evaluator::report::{bits, closest_of, nats_of, schemes};
use quant_evaluator::{Evaluation, ModelIdentity};
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
    method: Option<String>,
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
    let mut results = read(&args.results)?;
    // The closest to the reference first; without a reference, the one with the lowest perplexity.
    let score = |e: &Evaluation| e.comparison.as_ref().map_or(e.scores.perplexity.mean, |c| c.kl.mean);
    results.sort_by(|(_, a), (_, b)| score(a).total_cmp(&score(b)));
    if let Some((first, others)) = results.split_first() {
        check(&first.1, others)?;
    }
    let compared: Vec<(&str, &Evaluation)> = results.iter().map(|(name, e)| (name.as_str(), e)).collect();
    args.json.emit(&comparison(&compared), || text(&compared))
}

/// Reads results, and names each after its file, with as many parts of the path as distinguish the names.
///
/// # Errors
/// [`Error::Usage`] if a file is given twice; any error of [`Evaluation::read`].
pub fn read(paths: &[PathBuf]) -> Result<Vec<(String, Evaluation)>> {
    let mut seen = BTreeSet::new();
    for path in paths {
        let real = path.canonicalize().unwrap_or_else(|_| path.clone());
        if !seen.insert(real) {
            return Err(Error::usage(
                format!("the result {} was given twice", path.display()),
                "give every result once",
            ));
        }
    }
    let results: Vec<Evaluation> = paths.iter().map(|path| Evaluation::read(path)).collect::<Result<_>>()?;
    Ok(names(paths).into_iter().zip(results).collect())
}

/// Returns the names of files without the extension, with as many directories as make them distinct.
fn names(paths: &[PathBuf]) -> Vec<String> {
    let parts = |path: &Path, number: usize| {
        let parents = path.parent().into_iter().flat_map(Path::components);
        let mut parts: Vec<_> = parents.map(|part| part.as_os_str().to_string_lossy().into_owned()).collect();
        parts.push(Evaluation::name(path));
        let first = parts.len().saturating_sub(number);
        parts[first..].join("/")
    };
    let longest = paths.iter().map(|path| path.components().count()).max().unwrap_or(1);
    let all = |number: usize| paths.iter().map(move |path| parts(path, number)).collect::<Vec<_>>();
    let differ = |names: &Vec<String>| names.iter().collect::<BTreeSet<_>>().len() == names.len();
    (1..longest).map(all).find(differ).unwrap_or_else(|| all(longest))
}

/// Checks that all results were measured on the same tokens, against the same reference.
///
/// # Errors
/// [`Error::Usage`], which names the first result that differs.
pub fn check(first: &Evaluation, others: &[(String, Evaluation)]) -> Result<()> {
    check_measured(&first.tokens_sha256, first.reference.as_ref(), others)?;
    let in_parts = first.tool.multiplies_bf16_parts();
    match others.iter().find(|(_, other)| other.tool.multiplies_bf16_parts() != in_parts) {
        None => Ok(()),
        Some((name, _)) => Err(Error::usage(
            format!(
                "`{}` was measured with different products of floats, so the results cannot be shown next to each \
                 other",
                name.escape_default()
            ),
            "measure all with QUANT_FLOAT_PRODUCTS=f32, or all on the path `amx`",
        )),
    }
}

/// Like [`check`], before the first model is measured on these tokens.
///
/// # Errors
/// As [`check`].
pub fn check_measured(
    tokens_sha256: &str,
    reference: Option<&ModelIdentity>,
    others: &[(String, Evaluation)],
) -> Result<()> {
    for (name, other) in others {
        let differs = match (&other.reference, reference) {
            _ if other.tokens_sha256 != tokens_sha256 => "on different tokens",
            (None, None) => continue,
            (None, Some(_)) => "without a reference, others with one",
            (Some(_), None) => "with a reference, others without one",
            (Some(its), Some(first)) if its.sha256 != first.sha256 => "against a different reference",
            (Some(_), Some(_)) => continue,
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
                e.model.method.clone().unwrap_or_else(|| "–".into()),
                bits(&e.model),
                bytes(e.model.size_bytes),
                plus_minus(
                    format!("{:.3}", perplexity.mean),
                    perplexity.standard_error.map(|error| format!("{error:.3}")),
                ),
            ];
            if let Some(c) = &e.comparison {
                row.push(nats_of(c.kl));
                row.push(format!("{:.2} %", 100.0 * c.top1_agreement.mean));
            }
            row
        })
        .collect();
    let header =
        ["result", "scheme", "method", "code bits", "size", "perplexity", "mean KL (nats)", "same top token"];
    let columns = rows.iter().map(Vec::len).min().unwrap_or_default();
    let mut text = table(&header[..columns], &rows);
    match closest_of(results) {
        Some(sentence) => text.push_str(&format!("\n{sentence}\n")),
        None => text.push_str("\nWithout a reference, results are compared only by their perplexity.\n"),
    }
    text.push_str("(code bits: bits per quantized weight without scales and zero points)\n");
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
                    method: e.model.method.clone(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_as_many_parts_as_distinguish_them() {
        let of = |paths: &[&str]| names(&paths.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(of(&["a/awq.json", "b/gptq.json"]), ["awq", "gptq"]);
        assert_eq!(of(&["a/result.json", "b/result.json"]), ["a/result", "b/result"]);
        assert_eq!(
            of(&["x/a/result.json", "y/a/result.json", "result.json"]),
            ["x/a/result", "y/a/result", "result"]
        );
    }
}
