//! `cargo study bench-gguf`: the time of `quant` and of `llama-quantize` to write the same GGUF file.
//!
//! Both programs get one thread and the same importance matrix, and run alternately. With the reference search, every
//! tensor must have the same bytes. The time is that of the whole program, including reading the model.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};
use xtask::bench_rtn::quant_binary;
use xtask::support::llama::Shape;
use xtask::support::measure::{self, Usage, median};
use xtask::support::noise::Float;
use xtask::support::record::{Record, table, typed_command};
use xtask::support::shell::{output, target_dir};
use xtask::synth;

use crate::support::gguf::tensors;
use crate::support::llama_cpp::LlamaCpp;
use crate::support::rows;

/// The mixture, its default type, and the minimum speedup over `llama-quantize` with the reference search.
const TYPES: [(&str, &str, f64); 2] = [("q4_k_s", "q4_k", 3.0), ("iq4_xs", "iq4_xs", 3.0)];
const SEARCHES: [(&str, &[&str]); 2] = [("reference search", &["--reference-search"]), ("own search", &[])];

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Decoder blocks of the synthetic model, in the shape of a 1B Llama with a small vocabulary
    #[arg(long, default_value_t = 1)]
    pub layers: usize,
    /// Rounds in which all programs run once
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Measure only the reference search
    #[arg(long)]
    pub reference_only: bool,
    /// Measure this program instead of building one
    #[arg(long)]
    pub quant: Option<PathBuf>,
    /// Fail if a limit is exceeded (3 × the speed of `llama-quantize`)
    #[arg(long)]
    pub check: bool,
}

/// Measures and writes the record.
pub fn run(args: &Args) -> Result<()> {
    let quant = quant_binary(args.quant.as_deref())?;
    let scratch = target_dir().join("bench-gguf");
    std::fs::create_dir_all(&scratch)?;
    speed(args, &quant, &scratch)
}

/// The synthetic tokenizer has none of llama.cpp's pre-tokenizers.
fn quantize(quant: &Path, model: &Path, out: &Path) -> Command {
    let mut command = rows::quantize(quant, model, out);
    command.args(["--force", "--format", "gguf", "--pre", "none"]);
    command
}

fn speed(args: &Args, quant: &Path, scratch: &Path) -> Result<()> {
    ensure!(args.layers > 0 && args.rounds > 0, "nothing to measure");
    LlamaCpp::install()?;
    let shape = Shape {
        layers: args.layers,
        hidden: 2048,
        intermediate: 8192,
        heads: 32,
        kv_heads: 8,
        head_dim: 64,
        vocab: 4096,
        tied: true,
    };
    let weights: usize = shape
        .tensors(Float::Bf16)
        .iter()
        .filter(|t| t.shape.len() > 1)
        .map(|t| t.shape.iter().product::<usize>())
        .sum();
    let model = scratch.join(format!("model-{}l", args.layers));
    if !model.is_dir() {
        let (dtype, shard_bytes) = (Float::Bf16, 5_000_000_000);
        synth::run(&synth::Args { out: model.clone(), shape, dtype, seed: 0, shard_bytes })?;
    }
    let (floats, imatrix) = (scratch.join("floats.gguf"), scratch.join("imatrix.gguf"));
    let mut command = quantize(quant, &model, &floats);
    command.args(["--scheme", "f32", "--calibration", "builtin", "--samples", "8", "--seq-len", "128"]);
    output(command.arg("--save-imatrix").arg(&imatrix))?;
    let llama_quantize = target_dir().join("interop-llama-cpp/bin/llama-quantize");
    let searches = &SEARCHES[..if args.reference_only { 1 } else { SEARCHES.len() }];
    let mut csv = vec!["round,type,program,seconds,cpu_seconds,peak_bytes".to_owned()];
    // By type, then by program: `llama-quantize` and the searches.
    let mut runs = vec![vec![Vec::<Usage>::new(); 1 + searches.len()]; TYPES.len()];
    let mut compared = 0;
    for round in 0..args.rounds {
        for (t, (mixture, kind, _)) in TYPES.into_iter().enumerate() {
            let theirs = scratch.join("theirs.gguf");
            let mut command = Command::new(&llama_quantize);
            command
                .arg("--imatrix")
                .arg(&imatrix)
                .arg("--pure")
                .args([&floats, &theirs])
                .args([mixture, "1"]);
            let usage = measure::run(&mut command)?;
            let mut line = format!("{kind}: llama-quantize {:.2} s", usage.seconds);
            csv.push(line_of(round, kind, "llama-quantize", &usage));
            runs[t][0].push(usage);
            for (s, (name, options)) in searches.iter().enumerate() {
                let ours = scratch.join("ours.gguf");
                let mut command = quantize(quant, &model, &ours);
                command.args(["--threads", "1", "--scheme", mixture, "--imatrix"]).arg(&imatrix);
                command.args(["--override", &format!("*={kind}")]).args(*options);
                let usage = measure::run(&mut command)?;
                line += &format!(", {name} {:.2} s", usage.seconds);
                csv.push(line_of(round, kind, name, &usage));
                runs[t][1 + s].push(usage);
                if !options.is_empty() && round == 0 {
                    let (ours, theirs) = (tensors(&ours)?, tensors(&theirs)?);
                    for (name, tensor) in &theirs {
                        ensure!(
                            ours.get(name) == Some(tensor),
                            "{kind}: `{name}` differs from llama-quantize's"
                        );
                    }
                    ensure!(ours.len() == theirs.len(), "{kind}: not the same tensors");
                    compared += ours.len();
                }
            }
            println!("{line}");
        }
    }
    let (mut lines, mut broken) = (Vec::new(), Vec::new());
    for ((_, kind, least), runs) in TYPES.into_iter().zip(&runs) {
        let rate = |runs: &[Usage]| median(runs.iter().map(|run| weights as f64 / 1e6 / run.seconds));
        lines.push(vec![
            kind.to_owned(),
            "llama-quantize".to_owned(),
            format!("{:.1}", rate(&runs[0])),
            "1".to_owned(),
        ]);
        for ((name, options), ours) in searches.iter().zip(&runs[1..]) {
            let ratio = median(runs[0].iter().zip(ours).map(|(theirs, ours)| theirs.seconds / ours.seconds));
            lines.push(vec![
                kind.to_owned(),
                (*name).to_owned(),
                format!("{:.1}", rate(ours)),
                format!("{ratio:.2}"),
            ]);
            if !options.is_empty() && ratio < least {
                broken.push(format!("{kind}, {name}: {ratio:.2} × llama-quantize (at least {least})"));
            }
        }
    }
    let table = table(&["type", "by", "million weights/s", "ratio"], &lines);
    println!("\n{table}");
    let record = Record {
        benchmark: "gguf-speed",
        title: "Writing GGUF, compared with llama-quantize".into(),
        command: typed_command(),
        body: format!(
            "All matrices in one type, with the same importance matrix, on one thread each. {} layer(s) in the shape \
             of a 1B Llama, random weights, {:.1} million in matrices. `llama-quantize` of llama.cpp v0.5.0 (`--pure`) \
             reads f32, `quant` bf16; `quant` also syncs and reads back what it wrote. The programs alternate, \
             {} rounds; medians, and the median of the rounds' ratios. With the reference search, all {compared} \
             tensors have the bytes of `llama-quantize`.\n\n{table}",
            args.layers,
            weights as f64 / 1e6,
            args.rounds
        ),
        csv,
    };
    record.conclude(args.check, &broken)
}

fn line_of(round: usize, kind: &str, program: &str, usage: &Usage) -> String {
    let Usage { seconds, cpu_seconds, peak_bytes } = usage;
    format!("{round},{kind},{program},{seconds:.3},{cpu_seconds:.2},{peak_bytes}")
}
