//! `cargo xtask bench-cpu-time`: CPU time of RTN, AWQ and GPTQ, compared with an earlier revision.
//!
//! The two programs quantize the same synthetic model on one thread, alternately. Each pair of runs gives a ratio, and
//! the record holds the median ratio with a distribution-free 95 % interval.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::support::base::Pair;
use crate::support::llama::Shape;
use crate::support::measure::{self, median, median_interval};
use crate::support::noise::Float;
use crate::support::record::{Record, table, typed_command};
use crate::support::shell::{remove_dir, target_dir};
use crate::synth;

/// Limit for the upper end of the median ratio's interval.
const RATIO_LIMIT: f64 = 1.05;
/// The minimum number of pairs for a verdict.
const MIN_PAIRS: usize = 15;

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    /// The two programs
    pub programs: Pair,
    /// Pairs of runs per method
    #[arg(long, default_value_t = MIN_PAIRS)]
    pub pairs: usize,
    /// Methods to measure
    #[arg(long, value_delimiter = ',', default_values_t = METHODS.map(|method| method.name.to_owned()))]
    pub only: Vec<String>,
    /// Fail if the interval of a method does not end below 1.05, or if there are fewer than 15 pairs
    #[arg(long)]
    pub check: bool,
}

/// A method, and the size of a model on which it takes a few seconds.
#[derive(Debug, Clone, Copy)]
struct Method {
    name: &'static str,
    layers: usize,
    hidden: usize,
    intermediate: usize,
    options: &'static [&'static str],
}

const METHODS: [Method; 3] = [
    Method { name: "rtn", layers: 12, hidden: 2048, intermediate: 8192, options: &["--method", "rtn"] },
    Method {
        name: "awq",
        layers: 1,
        hidden: 768,
        intermediate: 2048,
        options: &["--method", "awq", "--samples", "8", "--seq-len", "256"],
    },
    Method {
        name: "gptq",
        layers: 1,
        hidden: 1024,
        intermediate: 2816,
        options: &["--method", "gptq", "--samples", "8", "--seq-len", "256"],
    },
];

#[derive(Debug, Clone, Copy)]
struct Times {
    base: f64,
    ours: f64,
}

impl Times {
    fn ratio(self) -> f64 {
        self.ours / self.base
    }
}

/// Measures and writes the record.
///
/// # Errors
/// When a program cannot be built or fails, or when `--check` is given and a limit is exceeded.
pub fn run(args: &Args) -> Result<()> {
    let chosen: Vec<Method> =
        METHODS.into_iter().filter(|m| args.only.iter().any(|name| name == m.name)).collect();
    ensure!(chosen.len() == args.only.len(), "--only accepts rtn, awq and gptq");
    ensure!((1..=1000).contains(&args.pairs), "--pairs must be 1 to 1000");
    let programs = args.programs.programs()?;
    let mut measured = Vec::new();
    for method in &chosen {
        let model = method.model()?;
        let run = |program: &Path| method.cpu_seconds(program, &model);
        // A warm-up run of each program fills the page cache.
        run(&programs.base)?;
        run(&programs.ours)?;
        let mut pairs = Vec::new();
        for pair in 0..args.pairs {
            let times = if pair % 2 == 0 {
                let base = run(&programs.base)?;
                Times { base, ours: run(&programs.ours)? }
            } else {
                let ours = run(&programs.ours)?;
                Times { base: run(&programs.base)?, ours }
            };
            println!(
                "{} {}: base {:.2} s, ours {:.2} s, ratio {:.3}",
                method.name,
                pair + 1,
                times.base,
                times.ours,
                times.ratio()
            );
            pairs.push(times);
        }
        measured.push((*method, pairs));
    }
    report(args, &measured)
}

impl Method {
    fn model(&self) -> Result<PathBuf> {
        synthetic_model(self.layers, self.hidden, self.intermediate)
    }

    fn cpu_seconds(&self, program: &Path, model: &Path) -> Result<f64> {
        let out = target_dir().join("bench/cpu-time-out");
        remove_dir(&out)?;
        let mut command = Command::new(program);
        command.arg("quantize").arg(model).arg("-o").arg(&out).args(self.options);
        let usage = measure::run(command.args(["--threads", "1", "--quiet"]))?;
        remove_dir(&out)?;
        Ok(usage.cpu_seconds)
    }
}

/// A synthetic model of these sizes, created now or earlier.
pub(crate) fn synthetic_model(layers: usize, hidden: usize, intermediate: usize) -> Result<PathBuf> {
    let directory = target_dir().join("synth");
    let out = directory.join(format!("llama-{layers}l-{hidden}-{intermediate}-bf16"));
    if !out.is_dir() {
        std::fs::create_dir_all(&directory)?;
        let shape = Shape {
            layers,
            hidden,
            intermediate,
            heads: hidden / 64,
            kv_heads: hidden / 256,
            head_dim: 64,
            vocab: 8192,
            tied: true,
        };
        let (dtype, shard_bytes) = (Float::Bf16, 5_000_000_000);
        synth::run(&synth::Args { out: out.clone(), shape, dtype, seed: 0, shard_bytes })?;
    }
    Ok(out)
}

fn report(args: &Args, measured: &[(Method, Vec<Times>)]) -> Result<()> {
    let mut rows = Vec::new();
    let mut broken = Vec::new();
    let mut csv = vec!["method,pair,first,base_cpu_seconds,our_cpu_seconds,ratio".to_owned()];
    for (method, pairs) in measured {
        let ratios = || pairs.iter().map(|times| times.ratio());
        let interval = median_interval(ratios());
        rows.push(vec![
            method.name.to_owned(),
            pairs.len().to_string(),
            format!("{:.2}", median(pairs.iter().map(|times| times.base))),
            format!("{:.2}", median(pairs.iter().map(|times| times.ours))),
            format!("{:.4}", median(ratios())),
            interval.map_or("too few pairs".into(), |[low, high]| format!("{low:.4} to {high:.4}")),
        ]);
        broken.extend(broken_promise(method.name, pairs.len(), interval));
        csv.extend(pairs.iter().enumerate().map(|(i, times)| {
            let first = if i % 2 == 0 { "base" } else { "ours" };
            format!("{},{},{first},{},{},{:.5}", method.name, i + 1, times.base, times.ours, times.ratio())
        }));
    }
    let header = ["method", "pairs", "base s", "ours s", "ratio", "95 % interval"];
    let table = table(&header, &rows);
    println!("\n{table}");
    let record = Record {
        benchmark: "cpu-time",
        title: "CPU time of quantization against an earlier revision".into(),
        command: typed_command(),
        body: body(args, measured, &table),
        csv,
    };
    record.conclude(args.check, &broken)
}

fn body(args: &Args, measured: &[(Method, Vec<Times>)], table: &str) -> String {
    let describe = |method: &Method| {
        let Method { name, layers, hidden, intermediate, options } = method;
        let options = options.join(" ");
        format!(
            "- {name}: `quant quantize MODEL -o OUT {options} --threads 1`; {layers} layer(s), hidden {hidden}, MLP {intermediate}\n"
        )
    };
    let methods: String = measured.iter().map(|(method, _)| describe(method)).collect();
    format!(
        "Base: {}. CPU time, user and system, of a whole run on a synthetic Llama in bf16, warm page cache. Base and \
         our program run in pairs; every other pair starts with ours. The ratio is the median over the pairs of \
         our time divided by the base's; its interval is exact, from order statistics. The upper end must be below \
         {RATIO_LIMIT}.\n\n{methods}\n{table}",
        args.programs.base_name()
    )
}

fn broken_promise(method: &str, pairs: usize, interval: Option<[f64; 2]>) -> Option<String> {
    match interval {
        _ if pairs < MIN_PAIRS => Some(format!("{method}: {pairs} pairs, {MIN_PAIRS} are required")),
        Some([_, high]) if high < RATIO_LIMIT => None,
        Some([_, high]) => Some(format!("{method}: the interval ends at {high:.4}, not below {RATIO_LIMIT}")),
        None => Some(format!("{method}: no interval")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promises_can_be_broken() {
        let broken = |pairs, interval| broken_promise("rtn", pairs, interval).is_some();
        assert!(!broken(15, Some([0.98, 1.049])));
        assert!(broken(15, Some([0.98, 1.05])));
        assert!(broken(14, Some([0.98, 1.0])));
        assert!(broken(15, Some([0.98, f64::NAN])));
        assert!(broken(15, None));
    }

    #[test]
    fn models_are_possible() {
        for method in METHODS {
            assert!(method.hidden % 256 == 0 && method.intermediate % 128 == 0, "{}", method.name);
        }
    }
}
