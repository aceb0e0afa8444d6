//! `cargo study bench-qoq`: QoQ on a whole model in the shape of Llama 3.2 1B: the time of each step, and the peak
//! memory compared with the prediction of `quant plan`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use xtask::bench_rtn::{quant_binary, synthetic_model};
use xtask::support::measure;
use xtask::support::record::{Record, table, typed_command};
use xtask::support::shell::{remove_dir, root, target_dir};

/// Any text works: the synthetic model's tokens are bytes.
const TEXT: &str = "calibration-data/corpus/exposition.txt";
const PRESET: &str = "qoq-w4a8kv4";

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Decoder blocks; the full model has 16. A second run has half as many
    #[arg(long, default_value_t = 16)]
    layers: usize,
    /// Calibration windows
    #[arg(long, default_value_t = 32)]
    samples: usize,
    /// Tokens per window
    #[arg(long, default_value_t = 512)]
    seq_len: usize,
    /// Threads of the program
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Measure this program instead of building one
    #[arg(long)]
    quant: Option<PathBuf>,
    /// Fail if memory grows with the number of layers, or exceeds the prediction of the plan
    #[arg(long)]
    check: bool,
}

/// Largest allowed ratio of the deeper model's peak memory to the other's.
const GROWTH_LIMIT: f64 = 1.05;

/// One run.
struct Run {
    layers: usize,
    seconds: f64,
    peak: u64,
    planned: u64,
    steps: Vec<(String, f64)>,
}

/// Measures and writes the record.
pub fn run(args: &Args) -> Result<()> {
    ensure!(args.layers > 1, "--layers must be at least 2, because a second model has half as many");
    let quant = quant_binary(args.quant.as_deref())?;
    let runs = [args.layers / 2, args.layers].map(|layers| measure(args, &quant, layers));
    let [half, whole] = runs;
    let (half, whole) = (half?, whole?);
    let of = |run: &Run, step: &str| run.steps.iter().find(|(name, _)| name == step).map_or(0.0, |s| s.1);
    let mut rows: Vec<Vec<String>> = (whole.steps.iter())
        .map(|(step, seconds)| {
            let share = 100.0 * seconds / whole.seconds;
            let a_block = seconds / whole.layers as f64;
            vec![
                step.clone(),
                format!("{:.1}", of(&half, step)),
                format!("{seconds:.1}"),
                format!("{share:.1}"),
                format!("{a_block:.2}"),
            ]
        })
        .collect();
    let all = |name: &str, of: fn(&Run) -> String| {
        vec![name.to_owned(), of(&half), of(&whole), String::new(), String::new()]
    };
    rows.push(all("whole run", |r| format!("{:.1}", r.seconds)));
    rows.push(all("peak GB", |r| format!("{:.2}", r.peak as f64 / 1e9)));
    rows.push(all("peak GB, planned", |r| format!("{:.2}", r.planned as f64 / 1e9)));
    let (first, second) = (format!("{} layers, s", half.layers), format!("{} layers, s", whole.layers));
    let table = table(&["step", &first, &second, "% of run", "s per block"], &rows);
    println!("\n{table}");
    let growth = whole.peak as f64 / half.peak as f64;
    let claims = [
        (
            growth <= GROWTH_LIMIT,
            format!("twice the layers take {growth:.3} times the memory (limit {GROWTH_LIMIT})"),
        ),
        (
            whole.peak <= whole.planned,
            format!(
                "the peak is {:.2} of the plan's prediction (limit 1)",
                whole.peak as f64 / whole.planned as f64
            ),
        ),
    ];
    let lines: Vec<String> = (claims.iter())
        .map(|(holds, claim)| format!("- {claim}: {}", if *holds { "holds" } else { "does not hold" }))
        .collect();
    let broken: Vec<String> = claims.iter().filter(|c| !c.0).map(|c| c.1.clone()).collect();
    let mut csv = vec!["layers,step,seconds".to_owned()];
    for run in [&half, &whole] {
        csv.extend(run.steps.iter().map(|(step, seconds)| format!("{},{step},{seconds:.3}", run.layers)));
        csv.push(format!("{},whole run,{:.3}", run.layers, run.seconds));
        csv.push(format!("{},peak bytes,{}", run.layers, run.peak));
    }
    let record = Record {
        benchmark: "qoq",
        title: "QoQ of a whole 1B-shaped model".into(),
        command: typed_command(),
        body: format!(
            "Synthetic Llama in the shape of Llama 3.2 1B, bf16, tied, rotated while it is read; `--preset \
             {PRESET}`, {} \
             windows of {} tokens, {} threads; time of the whole program from its start to the checkpoint on disk. \
             Steps as reported by `quant quantize --json`; the rest of the run is opening the model and splitting \
             the text.\n\n{table}\n{}\n",
            args.samples,
            args.seq_len,
            args.threads,
            lines.join("\n")
        ),
        csv,
    };
    record.conclude(args.check, &broken)
}

fn options(args: &Args) -> Vec<String> {
    let numbers = [("--samples", args.samples), ("--seq-len", args.seq_len), ("--threads", args.threads)];
    let numbers = numbers.iter().flat_map(|(name, value)| [(*name).to_owned(), value.to_string()]);
    ["--preset".to_owned(), PRESET.to_owned(), "--json".to_owned()].into_iter().chain(numbers).collect()
}

fn measure(args: &Args, quant: &Path, layers: usize) -> Result<Run> {
    let model = synthetic_model(layers)?;
    let plan = Command::new(quant).arg("plan").arg(&model).args(options(args)).output()?;
    let plan: Value = serde_json::from_slice(&plan.stdout).context("the plan is not JSON")?;
    let out = target_dir().join("bench/qoq-out");
    remove_dir(&out)?;
    std::fs::create_dir_all(target_dir().join("bench"))?;
    let mut command = Command::new(quant);
    command.arg("quantize").arg(&model).arg("-o").arg(&out).args(options(args)).arg("--quiet");
    command.arg("--calibration").arg(root().join(TEXT));
    let (usage, printed) = measure::run_with_output(&mut command)?;
    remove_dir(&out)?;
    // The JSON may be preceded by warnings.
    let json = printed.find("\n{").map_or(0, |at| at + 1);
    let summary: Value = serde_json::from_str(&printed[json..]).context("the summary is not JSON")?;
    let steps = summary["steps"].as_array().context("the summary contains no steps")?;
    let steps = steps.iter().map(|step| Some((step["step"].as_str()?.to_owned(), step["seconds"].as_f64()?)));
    println!("{layers} layers: {:.1} s, peak {:.2} GB", usage.seconds, usage.peak_bytes as f64 / 1e9);
    Ok(Run {
        layers,
        seconds: usage.seconds,
        peak: usage.peak_bytes,
        planned: plan["peak_memory_bytes"].as_u64().context("the plan contains no peak memory")?,
        steps: steps.collect::<Option<_>>().context("the steps in the summary have an unexpected form")?,
    })
}
