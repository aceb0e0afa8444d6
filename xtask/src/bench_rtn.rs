//! `cargo xtask bench-rtn`: compares the speed of RTN on a synthetic checkpoint with that of the disk.
//!
//! Baseline and program alternate within one run. The baseline reads, hashes and writes the same number of bytes with
//! fsync on one thread; the program is `quant quantize --method rtn`. The record also contains the time of rounding and
//! packing in memory, measured by the example `rtn_throughput`. With `--scheme`, the baseline also reads back its
//! output, as the program does, and the example is not run.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::support::llama::Shape;
use crate::support::measure::{self, Usage, median, read_hash_write, safetensors_of};
use crate::support::noise::Float;
use crate::support::record::{Record, table, typed_command};
use crate::support::shell::{self, cargo, directory_bytes, output, remove_dir, target_dir};
use crate::synth;

/// Maximum ratio of the program's wall time to the baseline's.
const RATIO_LIMIT: f64 = 1.5;
/// Maximum ratio with `--scheme`, where the baseline also reads back its output.
const FLOAT_RATIO_LIMIT: f64 = 1.3;
/// Maximum peak resident memory, in bytes.
pub const PEAK_LIMIT: u64 = 1_200_000_000;

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Decoder blocks of the synthetic model; with 16, it has 1.24 billion parameters
    #[arg(long, default_value_t = 16)]
    pub layers: usize,
    /// Repetitions of baseline and program, alternating
    #[arg(long, default_value_t = 3)]
    pub repeat: usize,
    /// Thread counts to measure
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2])]
    pub threads: Vec<usize>,
    /// Write this scheme instead of 4 bits; the baseline then reads back its output (record `rtn-floats`)
    #[arg(long)]
    pub scheme: Option<String>,
    /// Measure this program instead of building one
    #[arg(long)]
    pub quant: Option<PathBuf>,
    /// Fail if a limit is exceeded (time ratio 1.5, with `--scheme` 1.3; memory 1.2 GB)
    #[arg(long)]
    pub check: bool,
}

struct Run {
    threads: usize,
    baseline: f64,
    quant: Usage,
}

/// Measures and writes the record.
pub fn run(args: &Args) -> Result<()> {
    ensure!(args.repeat > 0 && !args.threads.is_empty(), "nothing to measure");
    let model = synthetic_model(args.layers)?;
    let quant = quant_binary(args.quant.as_deref())?;
    let scratch = target_dir().join("bench");
    std::fs::create_dir_all(&scratch)?;
    let out = scratch.join("rtn-out");

    let input_bytes = weight_bytes(&model)?;
    // One run to learn the output's size; it also warms the page cache for both programs.
    let scheme = args.scheme.as_deref();
    quantize(&quant, &model, &out, args.threads[0], scheme)?;
    let output_bytes = directory_bytes(&out)?;

    let mut runs = Vec::new();
    for _ in 0..args.repeat {
        for &threads in &args.threads {
            remove_dir(&out)?;
            let baseline = read_hash_write(&model, &scratch, output_bytes, scheme.is_some())?;
            let quant = quantize(&quant, &model, &out, threads, scheme)?;
            println!(
                "{threads} thread(s): baseline {baseline:.2} s, quant {:.2} s, peak {:.0} MB",
                quant.seconds,
                quant.peak_bytes as f64 / 1e6
            );
            runs.push(Run { threads, baseline, quant });
        }
    }
    remove_dir(&out)?;
    let max = args.threads.iter().max().copied().unwrap_or(1).to_string();
    if scheme.is_some() {
        return report(args, input_bytes, output_bytes, &runs, "");
    }
    let arithmetic = output(&mut cargo(&[
        "run",
        "--release",
        "--quiet",
        "--locked",
        "-p",
        "quant-core",
        "--example",
        "rtn_throughput",
        "--",
        &max,
    ]))?;
    println!("\n{arithmetic}");
    report(args, input_bytes, output_bytes, &runs, &arithmetic)
}

fn quantize(quant: &Path, model: &Path, out: &Path, threads: usize, scheme: Option<&str>) -> Result<Usage> {
    let mut command = Command::new(quant);
    command.arg("quantize").arg(model).arg("-o").arg(out);
    command.args(["--method", "rtn", "--force", "--quiet", "--threads", &threads.to_string()]);
    command.args(scheme.into_iter().flat_map(|scheme| ["--scheme", scheme]));
    measure::run(&mut command)
}

fn report(args: &Args, input_bytes: u64, output_bytes: u64, runs: &[Run], arithmetic: &str) -> Result<()> {
    let mut rows = Vec::new();
    let mut broken = Vec::new();
    for &threads in &args.threads {
        let of: Vec<&Run> = runs.iter().filter(|r| r.threads == threads).collect();
        let baseline = median(of.iter().map(|r| r.baseline));
        let quant = median(of.iter().map(|r| r.quant.seconds));
        let ratio = median(of.iter().map(|r| r.quant.seconds / r.baseline));
        let peak = of.iter().map(|r| r.quant.peak_bytes).max().unwrap_or(0);
        rows.push(vec![
            threads.to_string(),
            format!("{baseline:.2}"),
            format!("{quant:.2}"),
            format!("{ratio:.2}"),
            format!("{:.2}", input_bytes as f64 / 1e9 / quant),
            format!("{:.0}", peak as f64 / 1e6),
        ]);
        let limit = if args.scheme.is_some() { FLOAT_RATIO_LIMIT } else { RATIO_LIMIT };
        if ratio > limit {
            broken.push(format!("{threads} thread(s): {ratio:.2} × the baseline (limit {limit})"));
        }
        if peak > PEAK_LIMIT {
            broken.push(format!("{threads} thread(s): peak memory {peak} bytes (limit {PEAK_LIMIT})"));
        }
    }
    let header = ["threads", "baseline s", "quant s", "ratio", "input GB/s", "peak MB (VmHWM)"];
    let table = table(&header, &rows);
    println!("\n{table}");
    let (benchmark, option, back) = match &args.scheme {
        Some(scheme) => {
            ("rtn-floats", format!(" --scheme {scheme}"), ", read the output back and compute its SHA-256")
        }
        None => ("rtn", String::new(), ""),
    };
    let alone = match arithmetic.trim_end() {
        "" => String::new(),
        text => format!(
            "\nThe arithmetic alone, from the bytes of a weight to packed words and rounding \
             errors:\n\n```text\n{text}\n```\n"
        ),
    };
    let record = Record {
        benchmark,
        title: format!("RTN of a synthetic Llama with {} layers, bf16", args.layers),
        command: typed_command(),
        body: format!(
            "Input {:.3} GB of safetensors, output {:.3} GB. Baseline: read the input, compute its SHA-256, write as \
             many bytes as the output has, fsync{back}; one thread, warm page cache. Program: `quant quantize MODEL \
             -o OUT --method rtn --force --quiet --threads T{option}`, with the same cache. Baseline and program \
             alternate, \
             {} repetitions; medians; the ratio is the median of the pairs' ratios, memory the largest \
             peak.\n\n{table}{alone}",
            input_bytes as f64 / 1e9,
            output_bytes as f64 / 1e9,
            args.repeat,
        ),
        csv: csv(args.layers, runs),
    };
    println!("recorded in {}", record.write()?.display());
    for line in &broken {
        println!("over the limit: {line}");
    }
    ensure!(!args.check || broken.is_empty(), "{} limit(s) exceeded", broken.len());
    Ok(())
}

fn csv(layers: usize, runs: &[Run]) -> Vec<String> {
    let mut lines = vec!["layers,threads,baseline_seconds,quant_seconds,peak_bytes".to_owned()];
    lines.extend(runs.iter().map(|r| {
        format!("{layers},{},{:.4},{:.4},{}", r.threads, r.baseline, r.quant.seconds, r.quant.peak_bytes)
    }));
    lines
}

/// The synthetic model with this many layers in the shape of a 1B Llama, created now or earlier.
pub fn synthetic_model(layers: usize) -> Result<PathBuf> {
    let out = target_dir().join("synth").join(format!("llama-{layers}l-bf16"));
    if !out.is_dir() {
        let shape = Shape {
            layers,
            hidden: 2048,
            intermediate: 8192,
            heads: 32,
            kv_heads: 8,
            head_dim: 64,
            vocab: 128_256,
            tied: true,
        };
        let args =
            synth::Args { out: out.clone(), shape, dtype: Float::Bf16, seed: 0, shard_bytes: 5_000_000_000 };
        synth::run(&args)?;
    }
    Ok(out)
}

/// The program to measure: the given one, or the release build.
pub fn quant_binary(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = given {
        return Ok(std::path::absolute(path)?);
    }
    shell::run(&mut cargo(&["build", "--release", "--locked", "-p", "quant-cli"]))?;
    Ok(target_dir().join("release/quant"))
}

fn weight_bytes(model: &Path) -> Result<u64> {
    let sizes = safetensors_of(model)?.into_iter().map(|p| Ok(p.metadata()?.len()));
    sizes.sum()
}
