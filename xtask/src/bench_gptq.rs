//! `cargo xtask bench-gptq`: one solve and one Hessian of GPTQ beside what faer takes for the products in them.

use anyhow::{Result, ensure};

use crate::support::record::{Record, typed_command};
use crate::support::shell::{cargo, output};

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Numbers of threads
    #[arg(long, value_delimiter = ',', default_values_t = [1])]
    pub threads: Vec<usize>,
    /// Inputs and outputs of the weight
    #[arg(long, default_value_t = 4096)]
    pub side: usize,
    /// Tokens of the batch
    #[arg(long, default_value_t = 32 * 512)]
    pub tokens: usize,
}

/// Measures and writes the record.
///
/// # Errors
/// When the example cannot be built or fails.
pub fn run(args: &Args) -> Result<()> {
    let mut body = String::new();
    let header = "threads,side,tokens,product_seconds,hessian_seconds,triangle_seconds,chain_seconds,factor_seconds,solve_seconds";
    let mut csv = vec![header.to_owned()];
    for threads in &args.threads {
        let numbers = [*threads, args.side, args.tokens].map(|n| n.to_string());
        let mut command = cargo(&[
            "run",
            "--release",
            "--quiet",
            "--locked",
            "-p",
            "quant-core",
            "--example",
            "gptq_throughput",
            "--",
        ]);
        command.args(numbers);
        let text = output(&mut command)?;
        let (numbers, lines): (Vec<&str>, Vec<&str>) = text.lines().partition(|l| l.starts_with("csv: "));
        ensure!(numbers.len() == 1, "the example prints another form");
        csv.push(numbers[0].trim_start_matches("csv: ").to_owned());
        body += &format!("```text\n{}\n```\n\n", lines.join("\n").trim_end());
    }
    println!("{body}");
    let record = Record {
        benchmark: "gptq",
        title: format!("GPTQ of a weight of {0} × {0}", args.side),
        command: typed_command(),
        body,
        csv,
    };
    println!("recorded in {}", record.write()?.display());
    Ok(())
}
