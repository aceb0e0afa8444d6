//! `cargo study bench-eval`: times the evaluator on layers in the shape of Llama 3.2 1B with the full head: on a single
//! model, against a reference model, and against a stored reference. It is compared with transformers in float32 on the
//! same windows, in alternating runs. CPU time is measured too, because the time on a busy machine says little.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use xtask::bench_rtn::{quant_binary, synthetic_model};
use xtask::support::measure::{children_cpu_time, median};
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
    /// Do not measure transformers, which needs the environment of the interop tests
    #[arg(long)]
    without_peer: bool,
    /// Also measure an earlier program
    #[arg(long)]
    before: Option<PathBuf>,
}

const WAYS: [&str; 5] = ["before, alone", "transformers f32", "alone", "--reference", "stored reference"];

/// A run: seconds without loading, and seconds of CPU time of the whole program.
#[derive(Debug, Clone, Copy)]
struct Taken {
    seconds: f64,
    cpu: f64,
}

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
    let mut taken: Vec<Vec<Taken>> = vec![Vec::new(); WAYS.len()];
    let (mut scores, mut versions) = ([0.0; 2], String::new());
    for round in 0..args.repeat {
        if let Some(before) = &args.before {
            taken[0].push(evaluate(args, before, &model, &[])?.0);
        }
        if !args.without_peer {
            let (peer, cpu) = with_cpu_time(|| transformers(args, &model))?;
            taken[1].push(Taken { seconds: peer["seconds"].as_f64().context("seconds")?, cpu });
            scores[0] = peer["nll"].as_f64().context("nll")?;
            versions = peer["versions"].to_string();
        }
        let (alone, nll) = evaluate(args, &quant, &model, &[])?;
        taken[2].push(alone);
        scores[1] = nll;
        taken[3].push(evaluate(args, &quant, &out, &["--reference".as_ref(), model.as_ref()])?.0);
        taken[4].push(evaluate(args, &quant, &out, &["--reference".as_ref(), kept.as_ref()])?.0);
        let last: Vec<String> =
            taken.iter().filter_map(|s| s.last()).map(|t| format!("{:.2}", t.seconds)).collect();
        println!("round {}: {} s", round + 1, last.join(", "));
    }
    remove_dir(&out)?;
    let kept_bytes = kept.metadata()?.len();
    std::fs::remove_file(&kept)?;
    let tokens = (args.windows * (args.window - 1)) as f64;
    let operations = 2.0 * tokens * (args.layers as f64 * BLOCK + HEAD);
    let rows: Vec<Vec<String>> = WAYS
        .iter()
        .zip(&taken)
        .filter(|(_, taken)| !taken.is_empty())
        .map(|(way, of)| {
            let ratio = |other: usize, what: fn(&Taken) -> f64| {
                median(of.iter().zip(&taken[other]).map(|(a, b)| what(a) / what(b)))
            };
            let time = median(of.iter().map(|t| t.seconds));
            let mut row = vec![
                (*way).to_owned(),
                format!("{time:.2}"),
                format!("{:.0}", tokens / time),
                format!("{:.0}", operations / time / 1e9),
                format!("{:.2}", ratio(2, |t| t.seconds)),
                format!("{:.1}", median(of.iter().map(|t| t.cpu))),
                format!("{:.2}", ratio(2, |t| t.cpu)),
            ];
            if !args.without_peer {
                row.push(format!("{:.2}", ratio(1, |t| t.seconds)));
            }
            row
        })
        .collect();
    let mut header = vec![
        "",
        "s",
        "tokens/s",
        "GFLOP/s of one model",
        "× alone",
        "CPU s",
        "CPU × alone",
        "× transformers",
    ];
    header.truncate(rows.first().map_or(0, Vec::len));
    let table = table(&header, &rows);
    println!("\n{table}");
    let peer = match args.without_peer {
        true => "transformers was not measured.".to_owned(),
        false => {
            let distance = (scores[1] / scores[0] - 1.0).abs();
            format!("The mean NLLs of quant and transformers differ by {distance:.1e}. Peer: {versions}.")
        }
    };
    let mut csv = vec!["round,way,seconds,cpu_seconds".to_owned()];
    for (way, of) in WAYS.iter().zip(&taken) {
        let lines = of.iter().enumerate();
        csv.extend(lines.map(|(round, t)| format!("{},{way},{:.4},{:.2}", round + 1, t.seconds, t.cpu)));
    }
    let record = Record {
        benchmark: "eval",
        title: "The evaluator on a 1B-shaped model".into(),
        command: typed_command(),
        body: format!(
            "Synthetic Llama in the shape of Llama 3.2 1B with {} layers and the full vocabulary of 128,256, bf16, \
             tied; {} windows of {} tokens, {} threads. Seconds of evaluation, without loading: `seconds` of `quant \
             eval --json`, and of the forward passes and the cross entropy in `benchmarks/peers/eval_transformers.py`. \
             CPU seconds are of the whole program, with loading. `--reference` and the stored reference compare \
             `w4a16-g128-sym` by RTN with the float model; the first also measures the noise floor, on {} of the \
             windows. The programs alternate, {} rounds; medians; ratios are medians of the rounds' ratios. GFLOP/s \
             count the linears and the head of one model once, without attention.\n\n\
             {table}\nThe stored reference has {:.1} MB. {peer}\n",
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

fn evaluate(args: &Args, quant: &Path, model: &Path, more: &[&std::ffi::OsStr]) -> Result<(Taken, f64)> {
    let mut command = Command::new(quant);
    command.arg("eval").arg(model).arg("--text").arg(root().join(TEXT)).args(more);
    command.args(["--json", "--quiet", "--profile", &format!("gptq-{}", args.window)]);
    command.args(["--windows", &args.windows.to_string(), "--threads", &args.threads.to_string()]);
    let (output, cpu) = with_cpu_time(|| Ok(command.output()?))?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result: Value = serde_json::from_slice(&output.stdout).context("the result is not JSON")?;
    let number = |path: &str| result.pointer(path).and_then(Value::as_f64);
    let (seconds, nll) =
        number("/seconds").zip(number("/nll/mean")).context("the result contains no times")?;
    Ok((Taken { seconds, cpu }, nll))
}

/// Also returns the CPU time of the programs that `run` runs, in seconds.
fn with_cpu_time<T>(run: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let now = || children_cpu_time().context("this system does not count CPU time");
    let before = now()?;
    let result = run()?;
    Ok((result, (now()? - before).as_secs_f64()))
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
