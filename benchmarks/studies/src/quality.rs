//! `cargo study quality`: the accuracy loss of each method on the real models, plain and with planted outliers.
//!
//! Each row is a model, a calibration text, an evaluation text and a group size. Float, RTN and AWQ run on the same
//! tokens, so differences are paired. The checked claims are:
//!
//! * at 3 bits, AWQ's mean KL to float, pooled over the rows by tokens, is below RTN's;
//! * on planted outliers at 4 bits, AWQ removes at least 40 % of the log-perplexity that RTN adds, pooled over the
//!   rows;
//! * on every row, no search ends with a larger error than it began with.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use xtask::bench_rtn::quant_binary;
use xtask::support::record::{Record, table, typed_command};
use xtask::support::shell::{output, remove_dir, shared_dir, target_dir};

use crate::support::rows::{ROWS, Row};

/// Share of RTN's loss on planted outliers that AWQ must remove.
const MIN_LOSS_REMOVED: f64 = 0.4;

/// The settings of a measurement of weights or activations.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Evaluation windows per row
    #[arg(long, default_value_t = 60)]
    pub windows: usize,
    /// Calibration windows
    #[arg(long, default_value_t = 32)]
    pub samples: usize,
    /// Measure this program instead of building one
    #[arg(long)]
    pub quant: Option<PathBuf>,
    /// Fail when a claim does not hold
    #[arg(long)]
    pub check: bool,
}

/// The result of a method on a row.
pub struct Outcome {
    /// Perplexity of the float model.
    pub float: f64,
    /// Perplexity of the quantized model.
    pub perplexity: f64,
    /// Mean KL to float, in nats per token.
    pub kl: f64,
    /// Standard error of the mean KL over windows.
    pub kl_error: f64,
    /// Scored tokens.
    pub tokens: f64,
}

impl Outcome {
    /// Evaluates a checkpoint that was quantized from `model`, on the row's text.
    pub fn of(
        quant: &Path,
        data: &Path,
        row: &Row,
        model: &Path,
        out: &Path,
        windows: usize,
    ) -> Result<Self> {
        let mut command = Command::new(quant);
        command.arg("eval").arg(out).arg("--reference").arg(model).args(["--quiet", "--json", "--text"]);
        command.arg(data.join("text").join(row.evaluation));
        command.args(["--window", &row.window.to_string(), "--windows", &windows.to_string()]);
        let result: Value = serde_json::from_str(&output(&mut command)?)?;
        let number = |path: &str| {
            let value = result.pointer(path).and_then(Value::as_f64);
            value.with_context(|| format!("`quant eval --json` reports no {path}"))
        };
        let outcome = Self {
            float: number("/comparison/reference/perplexity/mean")?,
            perplexity: number("/perplexity/mean")?,
            kl: number("/comparison/kl/mean")?,
            kl_error: number("/comparison/kl/standard_error")?,
            tokens: number("/tokens_scored")?,
        };
        ensure!(outcome.perplexity.is_finite() && outcome.kl.is_finite(), "{model:?}: not finite");
        Ok(outcome)
    }
}

/// Measures and writes the record.
pub fn run(args: &Args) -> Result<()> {
    let data = shared_dir().context("the real models and texts are not available")?.join("data");
    let quant = quant_binary(args.quant.as_deref())?;
    let scratch = target_dir().join("quality");
    std::fs::create_dir_all(&scratch)?;
    let mut body = String::new();
    let mut csv = vec!["outliers,bits,model,evaluation,group,method,float,perplexity,kl,kl_se".to_owned()];
    let mut broken = Vec::new();
    for (planted, bits) in [(false, 4), (false, 3), (true, 4)] {
        let mut rows = Vec::new();
        let mut kl = [0.0; 2];
        let mut lost = [0.0; 2];
        let mut tokens = 0.0;
        for row in &ROWS {
            let model = row.model(&data, planted)?;
            let mut cells = vec![row.name.to_owned(), row.evaluation.to_owned(), row.group.to_owned()];
            for (i, method) in ["rtn", "awq"].into_iter().enumerate() {
                let out = scratch.join("out");
                remove_dir(&out)?;
                let o = measure(args, &quant, &data, row, &model, method, bits, &out)?;
                if i == 0 {
                    cells.push(format!("{:.3}", o.float));
                    tokens += o.tokens;
                }
                kl[i] += o.kl * o.tokens;
                lost[i] += (o.perplexity / o.float).ln() * o.tokens;
                cells.push(format!("{:.3}", o.perplexity));
                cells.push(format!("{:.5} ± {:.5}", o.kl, o.kl_error));
                let kind = if planted { "planted" } else { "none" };
                csv.push(format!(
                    "{kind},{bits},{},{},{},{method},{},{},{},{}",
                    row.name, row.evaluation, row.group, o.float, o.perplexity, o.kl, o.kl_error
                ));
            }
            println!("{}", cells.join("  "));
            rows.push(cells);
        }
        let [rtn, awq] = kl.map(|k| k / tokens);
        let removed = 1.0 - lost[1] / lost[0];
        let title = if planted { "planted outliers" } else { "as they are" };
        let header = ["model", "text", "group", "float", "RTN", "RTN KL", "AWQ", "AWQ KL"];
        body += &format!("## {bits} bits, models {title}\n\n{}\n", table(&header, &rows));
        body += &format!(
            "Pooled over {tokens:.0} tokens: mean KL {rtn:.5} (RTN), {awq:.5} (AWQ); increase of log-perplexity \
             {:.5} (RTN), {:.5} (AWQ); AWQ removes {:.0} % of RTN's.\n\n",
            lost[0] / tokens,
            lost[1] / tokens,
            100.0 * removed
        );
        if !planted && bits == 3 && awq >= rtn {
            broken.push(format!("3 bits: AWQ's pooled KL {awq:.5} is not below RTN's {rtn:.5}"));
        }
        if planted && bits == 4 && removed < MIN_LOSS_REMOVED {
            broken.push(format!("planted outliers: AWQ removes only {:.0} % of RTN's loss", 100.0 * removed));
        }
    }
    let record = Record {
        benchmark: "quality",
        title: "RTN and AWQ on the real models".into(),
        command: typed_command(),
        body: format!(
            "Symmetric grids; {} calibration windows and {} evaluation windows of 512 tokens (256 on \
             stories260k); embeddings and head float. KL to float over the full vocabulary in nats per token, ± its \
             standard error over windows. Planted: 4 channels of every norm multiplied by 32, the columns that read \
             them divided by 32.\n\n{body}",
            args.samples, args.windows
        ),
        csv,
    };
    record.conclude(args.check, &broken)
}

#[allow(clippy::too_many_arguments)]
fn measure(
    args: &Args,
    quant: &Path,
    data: &Path,
    row: &Row,
    model: &Path,
    method: &str,
    bits: u32,
    out: &Path,
) -> Result<Outcome> {
    let mut command = row.quantize(quant, model, bits, out);
    command.args(["--method", method]);
    if method != "rtn" {
        command.arg("--calibration").arg(row.calibration(data));
        command.args(["--samples", &args.samples.to_string(), "--seq-len", &row.window.to_string()]);
    }
    output(&mut command)?;
    searches_help(out)?;

    Outcome::of(quant, data, row, model, out, args.windows)
}

/// Fails if a search in a written checkpoint ended with a larger error than it began with.
fn searches_help(checkpoint: &Path) -> Result<()> {
    let report: Value = serde_json::from_slice(&std::fs::read(checkpoint.join("quant_report.json"))?)?;
    let tensors = report["tensors"].as_array().context("the report lists no tensors")?;
    for tensor in tensors {
        for search in
            ["scale_search", "clip_search"].map(|key| &tensor[key]).into_iter().filter(|s| !s.is_null())
        {
            let error = |key: &str| search[key].as_f64().with_context(|| format!("a search has no {key}"));
            let (before, after) = (error("error_before")?, error("error_after")?);
            ensure!(
                after <= before,
                "{}: a search increased the error from {before:e} to {after:e}",
                tensor["tensor"]
            );
        }
    }
    Ok(())
}
