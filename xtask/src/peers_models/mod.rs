//! `cargo xtask peers-models`: tokens per second of a whole model, compared with llama.cpp, in alternating runs.
//!
//! The model is a synthetic one in the shape of Llama 3.2 1B. Each program quantizes it itself, including the head.
//! Each turn is a separate process on the same cores, which runs everything twice; only the second run counts.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::bench_rtn::{quant_binary, synthetic_model};
use crate::peers_kernels::cpus;
use crate::support::host::clean_commit;
use crate::support::llama_cpp::LlamaCpp;
use crate::support::measure::median;
use crate::support::record::{Record, table, typed_command};
use crate::support::shell::{self, output, remove_dir, root, target_dir};
use crate::support::venv::kernels_python;

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Numbers of threads
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    threads: Vec<usize>,
    /// quant's schemes, also for the head
    #[arg(long, value_delimiter = ',', default_value = "w4a16-g128")]
    schemes: Vec<String>,
    /// llama.cpp's types
    #[arg(long, value_delimiter = ',', default_value = "Q4_0,Q4_K_M")]
    types: Vec<String>,
    /// Tokens of the prompt, processed at once
    #[arg(long, default_value_t = 512)]
    prefill: usize,
    /// Tokens generated after it
    #[arg(long, default_value_t = 128)]
    decode: usize,
    /// Rounds, each of which runs every contestant once
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Decoder blocks; with 16, the model has 1.24 billion parameters
    #[arg(long, default_value_t = 16)]
    layers: usize,
    /// One round and few tokens, to check that everything works; writes no record
    #[arg(long)]
    quick: bool,
    /// The program, if it has already been built
    #[arg(long, value_name = "PATH")]
    quant: Option<PathBuf>,
}

/// A participant.
struct Contestant {
    name: String,
    file: PathBuf,
    /// Whether it is `quant` and not llama.cpp.
    ours: bool,
    bytes: u64,
}

/// Tokens per second.
#[derive(Debug, Clone, Copy)]
struct Rates {
    prefill: f64,
    decode: f64,
}

/// Measures and writes the record.
///
/// # Errors
/// When a model or program cannot be built, or a participant fails.
pub fn run(args: &Args) -> Result<()> {
    let mut args = args.clone();
    if args.quick {
        (args.prefill, args.decode, args.rounds) = (64, 8, 1);
    }
    ensure!(args.rounds > 0 && args.prefill > 0 && args.decode > 0, "nothing to measure");
    let quant = quant_binary(args.quant.as_deref())?;
    let llama_cpp = LlamaCpp::install()?;
    let program = llama_cpp.compile(Path::new("benchmarks/peers/models_llama.cpp"))?;
    let contestants = contestants(&args, &quant, &llama_cpp, &program)?;

    let mut csv =
        vec!["threads,round,name,bytes,prefill_tokens_per_second,decode_tokens_per_second".to_owned()];
    let (mut body, mut version) = (String::new(), String::new());
    for &threads in &args.threads {
        let mut rates = vec![Vec::new(); contestants.len()];
        for round in 0..args.rounds {
            for (contestant, rates) in contestants.iter().zip(&mut rates) {
                let report = turn(&args, &quant, &program, &llama_cpp, contestant, threads)?;
                if let Some(text) = report["version"].as_str() {
                    text.clone_into(&mut version);
                }
                let one = rates_of(&report, &args).context("the report has an unexpected form")?;
                println!(
                    "{threads} thread(s), {}: prefill {:.1}, decode {:.1} tokens/s",
                    contestant.name, one.prefill, one.decode
                );
                csv.push(format!(
                    "{threads},{round},{},{},{:.3},{:.3}",
                    contestant.name, contestant.bytes, one.prefill, one.decode
                ));
                rates.push(one);
            }
        }
        let part = part(threads, &contestants, &rates);
        println!("\n{part}");
        body += &part;
    }
    if args.quick {
        return Ok(());
    }
    if clean_commit().is_none() {
        println!("not recorded: the working tree has uncommitted changes");
        return Ok(());
    }
    let record = Record {
        benchmark: "peers-models",
        title: "Whole models: ours and llama.cpp's".into(),
        command: typed_command(),
        body: format!(
            "Synthetic 1B-shaped Llama, {} layers, random weights; quantized by each side, the head to the same \
             number of bits as the rest. llama.cpp {version}, as packaged: its library code for this processor, with \
             its default repacking of weights and its own threads. A prompt of {} tokens at once, then {} tokens \
             generated greedily one by one; each turn is a process that does both twice and counts the second time. \
             {} rounds, in each of which every program has a turn on the same cores; medians, with ratios computed \
             per round.\n\n{body}",
            args.layers, args.prefill, args.decode, args.rounds
        ),
        csv,
    };
    println!("recorded in {}", record.write()?.display());
    Ok(())
}

/// Quantizes the model for every contestant, unless that has been done.
fn contestants(args: &Args, quant: &Path, llama_cpp: &LlamaCpp, program: &Path) -> Result<Vec<Contestant>> {
    let model = synthetic_model(args.layers)?;
    let folder = target_dir().join("peers-models");
    std::fs::create_dir_all(&folder)?;
    let mut all = Vec::new();
    for scheme in &args.schemes {
        let out = folder.join(format!("{}l-{scheme}", args.layers));
        // Quantize again, because the program's output may have changed.
        remove_dir(&out)?;
        let mut command = Command::new(quant);
        command.arg("quantize").arg(&model).arg("-o").arg(&out);
        command.args(["--method", "rtn", "--quiet", "--scheme", scheme]);
        command.args(["--override", &format!("lm_head={scheme}")]);
        shell::run(&mut command)?;
        let bytes = linear_bytes(&out)?;
        all.push(Contestant { name: format!("ours {scheme}"), file: out, ours: true, bytes });
    }
    let float = folder.join(format!("{}l-bf16.gguf", args.layers));
    for kind in &args.types {
        let out = folder.join(format!("{}l-{kind}.gguf", args.layers));
        if !out.is_file() {
            if !float.is_file() {
                let part = float.with_extension("part");
                let mut command = Command::new(kernels_python()?);
                command.arg(root().join("benchmarks/peers/models_gguf.py")).arg(&model).arg(&part);
                shell::run(&mut command)?;
                std::fs::rename(&part, &float)?;
            }
            let part = out.with_extension("part");
            let mut command = Command::new(program);
            command.arg("quantize").arg(&float).arg(&part).args([kind, "2"]).arg(llama_cpp.libraries());
            shell::run(&mut command)?;
            std::fs::rename(&part, &out)?;
        }
        let bytes = out.metadata()?.len();
        all.push(Contestant { name: format!("llama.cpp {kind}"), file: out, ours: false, bytes });
    }
    let _ = std::fs::remove_file(&float);
    Ok(all)
}

fn linear_bytes(dir: &Path) -> Result<u64> {
    crate::support::measure::safetensors_of(dir)?.into_iter().map(|p| Ok(p.metadata()?.len())).sum()
}

fn turn(
    args: &Args,
    quant: &Path,
    program: &Path,
    llama_cpp: &LlamaCpp,
    contestant: &Contestant,
    threads: usize,
) -> Result<Value> {
    let (prefill, decode) = (args.prefill.to_string(), args.decode.to_string());
    let threads_text = threads.to_string();
    let mut command = Command::new("taskset");
    command.args(["--cpu-list", &cpus(threads)?]);
    if contestant.ours {
        command.arg(quant).arg("bench").arg(&contestant.file);
        command.args(["--prefill", &prefill, "--decode", &decode, "--repeat", "2", "--quiet", "--json"]);
        command.args(["--threads", &threads_text]);
    } else {
        command.arg(program).arg("bench").arg(&contestant.file);
        command.args([&prefill, &decode, "2", &threads_text]).arg(llama_cpp.libraries());
    }
    command.env("RAYON_NUM_THREADS", &threads_text).env("OMP_NUM_THREADS", &threads_text);
    Ok(serde_json::from_str(&output(&mut command)?)?)
}

/// The rates of the last repetition: `[seconds]` from llama.cpp's program, `{"seconds": [seconds]}` from `quant`.
fn rates_of(report: &Value, args: &Args) -> Option<Rates> {
    let last = |name: &str| {
        let seconds = report[name].get("seconds").unwrap_or(&report[name]);
        seconds.as_array()?.last()?.as_f64()
    };
    Some(Rates {
        prefill: args.prefill as f64 / last("prefill")?,
        decode: args.decode as f64 / last("decode")?,
    })
}

fn part(threads: usize, contestants: &[Contestant], rates: &[Vec<Rates>]) -> String {
    let ours = contestants.iter().position(|c| c.ours);
    let rows: Vec<Vec<String>> = contestants
        .iter()
        .zip(rates)
        .map(|(contestant, theirs)| {
            let mut row = vec![contestant.name.clone(), format!("{:.0}", contestant.bytes as f64 / 1e6)];
            for of in [(|r| r.prefill) as fn(&Rates) -> f64, |r| r.decode] {
                row.push(format!("{:.1}", median(theirs.iter().map(of))));
                let ratios = ours.map(|o| rates[o].iter().zip(theirs).map(|(o, t)| of(o) / of(t)));
                row.push(ratios.map_or_else(String::new, |r| format!("{:.2}", median(r))));
            }
            row
        })
        .collect();
    let header = ["", "MB", "prefill, tokens/s", "ours / theirs", "decode, tokens/s", "ours / theirs"];
    format!("### {threads} thread(s)\n\n{}\n", table(&header, &rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_ours_round_by_round() {
        let contestant =
            |name: &str, ours| Contestant { name: name.into(), file: PathBuf::new(), ours, bytes: 0 };
        let rate = |prefill| Rates { prefill, decode: 1.0 };
        let part = part(
            1,
            &[contestant("ours", true), contestant("theirs", false)],
            &[vec![rate(4.0), rate(6.0), rate(9.0)], vec![rate(2.0), rate(2.0), rate(9.0)]],
        );
        assert!(part.contains("| theirs | 0 | 2.0 | 2.00 | 1.0 | 1.00 |"), "{part}");
    }
}
