//! `cargo study gate-trials`: measures the error rates of the accuracy gate on a real model.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use xtask::support::record::{Record, table, typed_command};
use xtask::support::shell::{output, root, shared_dir};

/// The gate must fail at least this share of the trials with a planted regression.
const POWER: f64 = 0.8;
/// The gate may fail at most this share of the trials without a regression.
const FALSE_FAILURES: f64 = 0.05;

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Model, one of those next to the checkout
    #[arg(long, default_value = "books-7m")]
    model: String,
    /// Text, one of those next to the checkout
    #[arg(long, default_value = "books_valid.txt")]
    text: String,
    /// Fail if an error rate exceeds its limit
    #[arg(long)]
    check: bool,
}

/// Measures and writes the record.
pub fn run(args: &Args) -> Result<()> {
    let data = shared_dir().context("the real models and texts are not available")?.join("data");
    let mut command = Command::new("cargo");
    command.current_dir(root()).args(["run", "--release", "--quiet", "--locked", "-p", "quant-evaluator"]);
    command.args(["--example", "gate_trials", "--"]);
    command.arg(data.join("models").join(&args.model)).arg(data.join("text").join(&args.text));
    let result: Value = serde_json::from_str(output(&mut command)?.trim())?;
    let number = |path: &str| {
        result.pointer(path).and_then(Value::as_u64).with_context(|| format!("the trials report no {path}"))
    };
    let mut rows = Vec::new();
    let mut csv = vec!["kind,trials,pass,fail,inconclusive".to_owned()];
    for (kind, what) in [("equal", "none, noise of 2⁻⁹"), ("regressed", "+1 % in perplexity")] {
        let of = |column: &str| number(&format!("/{kind}/{column}"));
        let (trials, pass, fail, open) = (of("trials")?, of("pass")?, of("fail")?, of("inconclusive")?);
        let share = |n: u64| format!("{:.1} %", 100.0 * n as f64 / trials as f64);
        rows.push(vec![what.to_owned(), trials.to_string(), share(pass), share(fail), share(open)]);
        csv.push(format!("{kind},{trials},{pass},{fail},{open}"));
    }
    let table = table(&["planted regression", "trials", "pass", "fail", "inconclusive"], &rows);
    println!("{table}");
    let record = Record {
        benchmark: "gate-trials",
        title: "Error rates of the accuracy gate".into(),
        command: typed_command(),
        body: format!(
            "{} on {}: margin 0.5 % in perplexity, one-sided level 5 %; every trial draws {} of the text's {} \
             windows of {} tokens; trials without a regression share {} perturbed runs; a regression is noise added \
             to one weight.\n\n{table}",
            args.model,
            args.text,
            number("/trial_windows")?,
            number("/text_windows")?,
            number("/window")?,
            number("/disturbed_runs")?,
        ),
        csv,
    };
    println!("recorded in {}", record.write()?.display());
    if args.check {
        let share = |kind: &str| -> Result<f64> {
            Ok(number(&format!("/{kind}/fail"))? as f64 / number(&format!("/{kind}/trials"))? as f64)
        };
        ensure!(share("regressed")? >= POWER, "the gate detects too few regressions");
        ensure!(share("equal")? <= FALSE_FAILURES, "the gate fails too many equal models");
    }
    Ok(())
}
