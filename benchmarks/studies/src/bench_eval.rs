//! `cargo study bench-eval`: times the evaluator on layers in the shape of Llama 3.2 1B with the full head: on a single
//! model, against a reference model, and against a stored reference. It is compared with transformers in float32 on the
//! same windows, in alternating runs.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use xtask::bench_rtn::{quant_binary, synthetic_model};
use xtask::support::measure::median;
use xtask::support::record::{Record, table, typed_command};
use xtask::support::shell::{remove_dir, root, target_dir};

/// Any text works: the synthetic model's tokens are bytes.
const TEXT: &str = "calibration-data/corpus/exposition.txt";
/// Multiply-adds per token in a block and in the head, in the shape of the synthetic model. A multiply-add is two
/// operations.
const BLOCK: f64 = (2048.0 * (2048.0 + 2.0 * 512.0 + 2048.0)) + 3.0 * 2048.0 * 8192.0;
const HEAD: f64 = 2048.0 * 128_256.0;

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Decoder blocks; the full model has 16
    #[arg(long, default_value_t = 2)]
    layers: usize,
    /// Tokens per window
    #[arg(long, default_value_t = 512)]
    window: usize,
    /// Windows
    #[arg(long, default_value_t = 8)]
    windows: usize,
    /// Threads of each program
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Rounds
    #[arg(long, default_value_t = 5)]
    repeat: usize,
    /// Measure this program instead of building one
    #[arg(long)]
    quant: Option<PathBuf>,
    /// Also measure an earlier program
    #[arg(long)]
    before: Option<PathBuf>,
}

const WAYS: [&str; 5] = ["before, alone", "transformers f32", "alone", "--reference", "stored reference"];

/// Measures and writes the record.
pub fn run(args: &Args) -> Result<()> {
    ensure!(args.repeat > 0 && args.windows > 0, "--repeat and --windows must be at least 1");
    let quant = quant_binary(args.quant.as_deref())?;
    let model = synthetic_model(args.layers)?;
    let (out, kept) = (target_dir().join("bench/eval-out"), target_dir().join("bench/eval-kept"));
    remove_dir(&out)?;
    std::fs::create_dir_all(target_dir().join("bench"))?;
    let quantize = ["--method", "rtn", "--force", "--quiet"];
    let made =
        Command::new(&quant).arg("quantize").arg(&model).arg("-o").arg(&out).args(quantize).status()?;
    ensure!(made.success(), "quantize ended with {made}");
    evaluate(args, &quant, &model, &["--save-reference".as_ref(), kept.as_ref()])?;
    let mut seconds: Vec<Vec<f64>> = vec![Vec::new(); WAYS.len()];
    let (mut scores, mut versions) = ([0.0; 2], String::new());
    for round in 0..args.repeat {
        if let Some(before) = &args.before {
            seconds[0].push(evaluate(args, before, &model, &[])?.0);
        }
        let peer = transformers(args, &model)?;
        seconds[1].push(peer["seconds"].as_f64().context("seconds")?);
        scores[0] = peer["nll"].as_f64().context("nll")?;
        versions = peer["versions"].to_string();
        let (alone, nll) = evaluate(args, &quant, &model, &[])?;
        seconds[2].push(alone);
        scores[1] = nll;
        seconds[3].push(evaluate(args, &quant, &out, &["--reference".as_ref(), model.as_ref()])?.0);
        seconds[4].push(evaluate(args, &quant, &out, &["--reference".as_ref(), kept.as_ref()])?.0);
        let last: Vec<String> = seconds.iter().filter_map(|s| s.last()).map(|s| format!("{s:.2}")).collect();
        println!("round {}: {} s", round + 1, last.join(", "));
    }
    remove_dir(&out)?;
    let kept_bytes = kept.metadata()?.len();
    std::fs::remove_file(&kept)?;
    let tokens = (args.windows * (args.window - 1)) as f64;
    let operations = 2.0 * tokens * (args.layers as f64 * BLOCK + HEAD);
    let rows: Vec<Vec<String>> = WAYS
        .iter()
        .zip(&seconds)
        .filter(|(_, seconds)| !seconds.is_empty())
        .map(|(way, of)| {
            let pairs = |other: usize| median(of.iter().zip(&seconds[other]).map(|(a, b)| a / b));
            let time = median(of.iter().copied());
            vec![
                (*way).to_owned(),
                format!("{time:.2}"),
                format!("{:.0}", tokens / time),
                format!("{:.0}", operations / time / 1e9),
                format!("{:.2}", pairs(2)),
                format!("{:.2}", pairs(1)),
            ]
        })
        .collect();
    let header = ["", "s", "tokens/s", "GFLOP/s of one model", "× alone", "× transformers"];
    let table = table(&header, &rows);
    println!("\n{table}");
    let distance = (scores[1] / scores[0] - 1.0).abs();
    println!("mean NLLs {:.9} and {:.9} differ by {distance:.1e}", scores[1], scores[0]);
    let mut csv = vec!["round,way,seconds".to_owned()];
    for (way, of) in WAYS.iter().zip(&seconds) {
        csv.extend(of.iter().enumerate().map(|(round, s)| format!("{},{way},{s:.4}", round + 1)));
    }
    let record = Record {
        benchmark: "eval",
        title: "The evaluator on a 1B-shaped model".into(),
        command: typed_command(),
        body: format!(
            "Synthetic Llama in the shape of Llama 3.2 1B with {} layers and the full vocabulary of 128,256, bf16, \
             tied; {} windows of {} tokens, {} threads. Seconds of evaluation, without loading: `seconds` of `quant \
             eval \
             --json`, and of the forward passes and the cross entropy in `benchmarks/peers/eval_transformers.py`. \
             `--reference` and the stored reference compare `w4a16-g128-sym` by RTN with the float model; the first \
             also measures the noise floor, on {} of the windows. The programs alternate, {} rounds; medians; ratios \
             are medians of the rounds' ratios. GFLOP/s count the linears and the head of one model once, without \
             attention.\n\n\
             {table}\nThe mean NLLs differ by {distance:.1e}. The stored reference has {:.1} MB. Peer: {versions}.\n",
            args.layers,
            args.windows,
            args.window,
            args.threads,
            args.windows.min(8),
            args.repeat,
            kept_bytes as f64 / 1e6,
        ),
        csv,
    };
    println!("recorded in {}", record.write()?.display());
    Ok(())
}

fn evaluate(args: &Args, quant: &Path, model: &Path, more: &[&std::ffi::OsStr]) -> Result<(f64, f64)> {
    let mut command = Command::new(quant);
    command.arg("eval").arg(model).arg("--text").arg(root().join(TEXT)).args(more);
    command.args(["--json", "--quiet", "--profile", &format!("gptq-{}", args.window)]);
    command.args(["--windows", &args.windows.to_string(), "--threads", &args.threads.to_string()]);
    let output = command.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result: Value = serde_json::from_slice(&output.stdout).context("the result is not JSON")?;
    let number = |path: &str| result.pointer(path).and_then(Value::as_f64);
    number("/seconds").zip(number("/nll/mean")).context("the result contains no times")
}

fn transformers(args: &Args, model: &Path) -> Result<Value> {
    let python = target_dir().join("interop-venv/bin/python");
    ensure!(python.exists(), "no {}: tests/interop/setup_venv.sh creates it", python.display());
    let mut command = Command::new(python);
    command.arg(root().join("benchmarks/peers/eval_transformers.py")).arg(model).arg(root().join(TEXT));
    command.args([args.window, args.windows, args.threads].map(|n| n.to_string()));
    let output = command.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("the peer's result is not JSON")
}
