//! `cargo study bench-gptq`: times one solve and one Hessian of GPTQ, and compares each with faer's time for the matrix
//! products that it contains.

use anyhow::{Context, Result, ensure};
use xtask::support::record::{Record, typed_command};
use xtask::support::shell::{cargo, output};

/// Time limit of a factorization and solve, as a multiple of the time of faer's Cholesky chain and of the blocked update
/// together. The update is assumed to run at 60 % of the rate of faer's product of two square matrices.
const SOLVE_LIMIT: f64 = 2.0;
/// The share of the rate of faer's triangular product that the Hessian must reach.
const HESSIAN_LIMIT: f64 = 0.7;

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Numbers of threads
    #[arg(long, value_delimiter = ',', default_values_t = [1])]
    pub threads: Vec<usize>,
    /// Inputs and outputs of the weight
    #[arg(long, default_value_t = 4096)]
    pub side: usize,
    /// Tokens per batch
    #[arg(long, default_value_t = 32 * 512)]
    pub tokens: usize,
    /// Fail if one thread exceeds a limit
    #[arg(long)]
    pub check: bool,
}

/// Measures and writes the record.
///
/// # Errors
/// When the example cannot be built or fails, or when `--check` is given and a limit is exceeded.
pub fn run(args: &Args) -> Result<()> {
    let mut body = String::new();
    let header = "threads,side,tokens,product_seconds,hessian_seconds,triangle_seconds,chain_seconds,factor_seconds,solve_seconds";
    let mut csv = vec![header.to_owned()];
    let mut broken = Vec::new();
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
        ensure!(numbers.len() == 1, "the example's output has an unexpected form");
        let line = numbers[0].trim_start_matches("csv: ");
        // faer runs on one thread, so the limits do not apply to more threads.
        if *threads == 1 {
            broken.extend(broken_promises(line)?);
        }
        csv.push(line.to_owned());
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
    record.conclude(args.check, &broken)
}

fn broken_promises(line: &str) -> Result<Vec<String>> {
    let numbers: Vec<f64> = line.split(',').map(str::parse).collect::<Result<_, _>>()?;
    let [_, _, _, product, hessian, triangle, chain, factor, solve] =
        <[f64; 9]>::try_from(numbers).ok().context("the example's table has an unexpected form")?;
    let mut broken = Vec::new();
    // The update takes half of the operations of the square product, at 60 % of its rate.
    let update = product / 2.0 / 0.6;
    let times = (factor + solve) / (chain + update);
    if times > SOLVE_LIMIT {
        broken.push(format!(
            "a solve takes {times:.2} times as long as chain and update (limit {SOLVE_LIMIT})"
        ));
    }
    let share = triangle / hessian;
    if share < HESSIAN_LIMIT {
        broken.push(format!(
            "the Hessian reaches {:.0} % of the rate of faer's triangle ({:.0} % are required)",
            100.0 * share,
            100.0 * HESSIAN_LIMIT
        ));
    }
    Ok(broken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promises_can_be_broken() {
        // The update takes 2 s and the chain 1 s, so the factorization, which takes 1 s, and the solve may take 6 s
        // together.
        let of = |hessian: f64, solve: f64| {
            broken_promises(&format!("1,4096,16384,2.4,{hessian},7,1,1,{solve}")).unwrap().len()
        };
        assert_eq!(of(9.9, 4.9), 0);
        assert_eq!(of(10.1, 4.9), 1);
        assert_eq!(of(10.1, 5.1), 2);
        assert!(broken_promises("1,2").is_err());
    }
}
