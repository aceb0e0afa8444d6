//! `cargo xtask bench-awq-memory`: peak memory of AWQ must not grow with the number of layers.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::bench_rtn::{PEAK_LIMIT, quant_binary, synthetic_model};
use crate::support::measure::{self, Usage};
use crate::support::record::{Record, table, typed_command};
use crate::support::shell::{remove_dir, target_dir};

/// Largest allowed ratio of the deeper model's peak memory to the other's.
const GROWTH_LIMIT: f64 = 1.05;

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Decoder blocks of the smaller model; the other has twice as many
    #[arg(long, default_value_t = 2)]
    pub layers: usize,
    /// Calibration windows
    #[arg(long, default_value_t = 32)]
    pub samples: usize,
    /// Tokens per window
    #[arg(long, default_value_t = 512)]
    pub seq_len: usize,
    /// Threads of the program
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Measure this program instead of building one
    #[arg(long)]
    pub quant: Option<PathBuf>,
    /// Fail if a limit is exceeded (1.2 GB, constant in the number of layers)
    #[arg(long)]
    pub check: bool,
}

/// Measures and writes the record.
pub fn run(args: &Args) -> Result<()> {
    ensure!(args.layers > 0, "--layers must be positive");
    let quant = quant_binary(args.quant.as_deref())?;
    let out = target_dir().join("bench/awq-out");
    let mut rows = Vec::new();
    let mut csv = vec!["layers,samples,seq_len,threads,seconds,peak_bytes".to_owned()];
    let mut peaks = Vec::new();
    for layers in [args.layers, 2 * args.layers] {
        let model = synthetic_model(layers)?;
        remove_dir(&out)?;
        let usage = quantize(args, &quant, &model, &out)?;
        println!("{layers} layers: {:.1} s, peak {:.0} MB", usage.seconds, usage.peak_bytes as f64 / 1e6);
        rows.push(vec![
            layers.to_string(),
            format!("{:.1}", usage.seconds),
            format!("{:.0}", usage.peak_bytes as f64 / 1e6),
        ]);
        csv.push(format!(
            "{layers},{},{},{},{:.3},{}",
            args.samples, args.seq_len, args.threads, usage.seconds, usage.peak_bytes
        ));
        peaks.push(usage.peak_bytes);
    }
    remove_dir(&out)?;

    let growth = peaks[1] as f64 / peaks[0] as f64;
    let table = table(&["layers", "seconds", "peak MB (VmHWM)"], &rows);
    println!("\n{table}\ngrowth {growth:.3}");
    let record = Record {
        benchmark: "awq-memory",
        title: "Peak memory of AWQ as the model gets deeper".into(),
        command: typed_command(),
        body: format!(
            "Synthetic Llama in 1B shape, bf16, tied; {} windows of {} tokens, {} thread(s). The deeper model's \
             peak is {growth:.3} × the other's.\n\n{table}",
            args.samples, args.seq_len, args.threads
        ),
        csv,
    };
    println!("recorded in {}", record.write()?.display());
    if args.check {
        ensure!(
            growth <= GROWTH_LIMIT,
            "memory grows {growth:.3} times with the layers (limit {GROWTH_LIMIT})"
        );
        ensure!(peaks.iter().all(|p| *p <= PEAK_LIMIT), "peak memory {peaks:?} bytes (limit {PEAK_LIMIT})");
    }
    Ok(())
}

fn quantize(args: &Args, quant: &Path, model: &Path, out: &Path) -> Result<Usage> {
    let mut command = Command::new(quant);
    command.arg("quantize").arg(model).arg("-o").arg(out);
    command.args(["--method", "awq", "--force", "--quiet"]);
    command.args(["--samples", &args.samples.to_string(), "--seq-len", &args.seq_len.to_string()]);
    command.args(["--threads", &args.threads.to_string()]);
    measure::run(&mut command)
}
