//! `quant gate --policy FILE --baseline FILE RESULT…`: checks whether a model has become worse than the policy allows.

use std::io::Write;
use std::path::{Path, PathBuf};

use quant_core::{Error, Result};
use quant_evaluator::Evaluation;
use quant_evaluator::gate::{
    Baseline, Change, Outcome, Policy, Verdict, annotations, changes, check_given, judge, junit, suggest,
    summary,
};
use quant_evaluator::report::gate_page;

use super::Session;
use crate::output::{self, JsonOption, Written, table};
use crate::system;

/// The significance level at which an update calls a change better or worse: the default of policies.
const LEVEL: f64 = 0.05;

/// The results to check, the policy and the baseline.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Results of `quant eval --json=FILE`; each is identified by its file name without the extension
    #[arg(required = true, value_name = "RESULT")]
    results: Vec<PathBuf>,
    /// Policy (TOML)
    #[arg(long, value_name = "FILE", required_unless_present_any = ["update", "suggest"])]
    policy: Option<PathBuf>,
    /// Baseline to compare with
    #[arg(long, value_name = "FILE", required_if_eq("update", "true"))]
    baseline: Option<PathBuf>,
    /// Make these results the new baseline, and show what changes
    #[arg(long, conflicts_with_all = ["policy", "junit", "json"])]
    update: bool,
    /// Print a draft policy that these results pass with some slack
    #[arg(long, conflicts_with_all = ["policy", "baseline", "update", "junit", "json", "report"])]
    suggest: bool,
    /// Write an HTML report to FILE
    #[arg(long, value_name = "FILE", conflicts_with = "update")]
    report: Option<PathBuf>,
    /// Write JUnit XML to FILE
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    #[command(flatten)]
    json: JsonOption,
}

/// Checks the results against the policy; the exit code is the verdict.
pub fn run(args: &Args, session: &Session) -> Result<u8> {
    let inputs =
        args.results.iter().chain(&args.policy).chain(args.baseline.as_ref().filter(|_| !args.update));
    let inputs: Vec<&Path> = inputs.map(PathBuf::as_path).collect();
    let outputs = [
        ("junit", args.junit.as_deref()),
        ("json", args.json.json.as_deref()),
        ("report", args.report.as_deref()),
        ("baseline", args.baseline.as_deref().filter(|_| args.update)),
    ];
    output::distinct(&outputs, &inputs)?;
    let kinds = [Written::Junit, Written::Json, Written::Html];
    let written = outputs.iter().zip(kinds);
    let written = written.filter_map(|((option, path), kind)| Some((option, (*path)?, kind)));
    for (option, path, kind) in written.filter(|(_, path, _)| *path != Path::new("-")) {
        output::check_output(option, path, kind)?;
        // A stale report must not pass for the result of this run if this one fails.
        if path.is_file() {
            std::fs::remove_file(path).map_err(|e| Error::io("remove", path, e))?;
        }
    }
    let results = args
        .results
        .iter()
        .map(|path| Ok((Evaluation::name(path), Evaluation::read(path)?)))
        .collect::<Result<Vec<_>>>()?;
    check_given(&results.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>())?;
    if args.suggest {
        output::print_raw(&suggest(&results))?;
        return Ok(0);
    }
    match (&args.policy, &args.baseline) {
        (None, Some(baseline)) => update(baseline, &results),
        (Some(policy), baseline) => judged(args, policy, baseline.as_deref(), &results, session),
        (None, None) => Err(Error::Internal("neither --policy nor --update".into())),
    }
}

fn judged(
    args: &Args,
    policy: &Path,
    baseline: Option<&Path>,
    results: &[(String, Evaluation)],
    session: &Session,
) -> Result<u8> {
    let policy = Policy::read(policy)?;
    let read = baseline.map(|path| Ok::<_, Error>((Baseline::read(path)?, path))).transpose()?;
    let outcome = judge(&policy, read.as_ref().map(|(b, path)| (b, *path)), results)?;
    for note in &outcome.notes {
        session.progress.note(&format!("note: {note}"));
    }
    if let Some(path) = &args.junit {
        output::write_file(path, junit(&outcome)?.as_bytes())?;
    }
    if let Some(path) = &args.report {
        output::write_file(path, gate_page(&outcome, results, read.as_ref().map(|(b, _)| b)).as_bytes())?;
    }
    match args.json.emit_by(&outcome, || output::print_verdicts(&show(&outcome))) {
        Err(error) if output::is_closed_pipe(&error) => {}
        printed => printed?,
    }
    if let Err(error) = on_github(&outcome) {
        output::print_message(&format!("warning: {error}"));
    }
    Ok(match outcome.verdict {
        Verdict::Pass => 0,
        Verdict::Fail => 1,
        Verdict::Inconclusive => 3,
    })
}

/// Writes what GitHub Actions shows in addition to the log, if this runs as one of its steps.
fn on_github(outcome: &Outcome) -> Result<()> {
    if std::env::var_os("GITHUB_ACTIONS").is_some_and(|v| v == "true") {
        // The runner reads commands from either stream; stdout may be JSON.
        for line in annotations(outcome) {
            output::print_message(&line);
        }
    }
    let Some(path) = std::env::var_os("GITHUB_STEP_SUMMARY").filter(|p| !p.is_empty()).map(PathBuf::from)
    else {
        return Ok(());
    };
    let file = system::open_without_waiting().create(true).append(true).open(&path);
    file.and_then(|mut f| f.write_all(summary(outcome).as_bytes())).map_err(|e| Error::io("write", &path, e))
}

/// Returns a name with its control characters escaped, so that it cannot end a line.
fn printable(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

fn show(outcome: &Outcome) -> String {
    let rows: Vec<Vec<String>> = outcome
        .checks
        .iter()
        // The verdict comes first: no name may begin a line, because a CI system could take it for a command.
        .map(|c| vec![c.verdict.name().to_owned(), printable(&c.result), printable(&c.message)])
        .collect();
    let widths = |column: usize| rows.iter().map(|r| r[column].chars().count()).max().unwrap_or(0);
    let (first, second) = (widths(0), widths(1));
    let mut text = String::new();
    for row in &rows {
        text.push_str(&format!("{:first$}  {:second$}  {}\n", row[0], row[1], row[2]));
    }
    text.push('\n');
    text.push_str(&changed(&outcome.changes));
    text.push_str(&format!("\n{}: {}\n", printable(&outcome.policy), outcome.verdict.name()));
    text
}

fn changed(changes: &[Change]) -> String {
    let compares = changes.iter().any(|c| c.before.is_some());
    let rows: Vec<Vec<String>> = (changes.iter())
        .map(|c| {
            let before = compares.then(|| printable(c.before.as_deref().unwrap_or("–")));
            let change = compares.then(|| c.described());
            [Some(c.name.to_owned()), Some(printable(&c.result)), before, Some(printable(&c.now)), change]
                .into_iter()
                .flatten()
                .collect()
        })
        .collect();
    match compares {
        true => table(&["property", "result", "baseline", "now", "change"], &rows),
        false => table(&["property", "result", "now"], &rows),
    }
}

fn update(path: &Path, results: &[(String, Evaluation)]) -> Result<u8> {
    // A file that is not a baseline may be something else.
    let before = match path.try_exists().map_err(|e| Error::io("read", path, e))? {
        true => Baseline::read(path).map_err(|e| not_replaced(path, e))?,
        false => Baseline { results: Default::default() },
    };
    let after = Baseline::new(results);
    let compared = (!before.results.is_empty()).then_some(&before);
    let mut text = changed(&changes(compared, results, LEVEL));
    for gone in before.results.keys().filter(|name| !after.results.contains_key(*name)) {
        text.push_str(&format!("\nremoved from the baseline: {}\n", printable(gone)));
    }
    output::write_file(path, after.to_json()?.as_bytes())?;
    output::print(&format!("{text}\nwritten to {}\n", path.display()))?;
    Ok(0)
}

fn not_replaced(path: &Path, error: Error) -> Error {
    match error {
        Error::InputFile { reason, .. } => Error::InputFile {
            path: path.to_owned(),
            line: None,
            reason,
            remedy:
                "only a baseline can be replaced; remove this file, or name a different one with ‹baseline›"
                    .into(),
        },
        other => other,
    }
}
