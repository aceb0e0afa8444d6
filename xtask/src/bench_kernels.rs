//! `cargo xtask bench-kernels`: records how close the kernels come to the limits of the machine.

use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::bench_rtn::quant_binary;
use crate::support::record::{Record, table, typed_command};
use crate::support::shell::output;

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Numbers of threads
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    pub threads: Vec<usize>,
    /// The program, if it has already been built
    #[arg(long, value_name = "PATH")]
    pub quant: Option<std::path::PathBuf>,
}

/// Measures and writes the record.
///
/// # Errors
/// When the program cannot be built or fails.
pub fn run(args: &Args) -> Result<()> {
    let quant = quant_binary(args.quant.as_deref())?;
    let (mut body, mut csv) = (String::new(), vec!["threads,kernel,n,k,tokens,seconds".to_owned()]);
    for threads in &args.threads {
        let mut command = Command::new(&quant);
        command.args(["bench", "kernels", "--quiet", "--json", "--threads", &threads.to_string()]);
        let report: Value = serde_json::from_str(&output(&mut command)?)?;
        body += &part(*threads, &report, &mut csv).context("the report has an unexpected form")?;
    }
    println!("{body}");
    let record = Record {
        benchmark: "kernels",
        title: "Kernels relative to the limits of the machine".into(),
        command: typed_command(),
        body,
        csv,
    };
    println!("recorded in {}", record.write()?.display());
    Ok(())
}

fn part(threads: usize, report: &Value, csv: &mut Vec<String>) -> Option<String> {
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut tokens = Vec::new();
    for case in report["linear"].as_array()? {
        let number = |key: &str| case[key].as_f64();
        let (kernel, m) = (case["kernel"].as_str()?, case["tokens"].as_u64()?);
        let shape = format!("{} × {}", case["n"].as_u64()?, case["k"].as_u64()?);
        for seconds in case["seconds"].as_array()? {
            csv.push(format!("{threads},{kernel},{},{},{m},{seconds}", case["n"], case["k"]));
        }
        let cell = match m {
            ..=4 => {
                format!("{:.1} GB/s, {:.0} %", number("gb_per_second")?, 100.0 * number("memory_share")?)
            }
            _ => format!("{:.2} TOPS, {:.0} %", number("tops")?, 100.0 * number("dot_share")?),
        };
        match rows.last_mut().filter(|row| row[0] == kernel && row[1] == shape) {
            Some(row) => row.push(cell),
            None => {
                rows.push(vec![kernel.to_owned(), shape, format!("{:.3}", number("bits_per_weight")?), cell]);
            }
        }
        if !tokens.contains(&m) {
            tokens.push(m);
        }
    }
    let names: Vec<String> = tokens.iter().map(|m| format!("{m} token(s)")).collect();
    let header: Vec<&str> =
        ["kernel", "n × k", "bits"].into_iter().chain(names.iter().map(String::as_str)).collect();
    Some(format!(
        "## {threads} thread(s), {}\n\nMemory {:.1} GB/s in {} streams per thread (at best {:.1}), products of integers in \
         registers {:.2} TOPS, of floats {:.2}: medians of the measurements between the cases, each the best of its \
         patterns. Figures are medians; percentages are relative to the measurements just before and after; for \
         float kernels, every product that an `f32` activation takes is counted.\n\n{}\n{}\n{}\n",
        report["isa"].as_str()?,
        report["memory"]["gb_per_second"].as_f64()?,
        report["memory"]["streams"].as_u64()?,
        report["memory"]["best_gb_per_second"].as_f64()?,
        report["dot_tops"].as_f64()?,
        report["float_tops"].as_f64()?,
        peaks(report)?,
        table(&header, &rows),
        attention(threads, report, csv)?
    ))
}

fn peaks(report: &Value) -> Option<String> {
    let rows = report["peaks"].as_array()?.iter().map(|peak| {
        let tops = |key: &str| Some(format!("{:.2}", peak[key].as_f64()?));
        let name = peak["isa"].as_str()?.to_owned();
        Some(vec![name, tops("integer_tops")?, tops("float_tops")?, tops("float_tops_of_f32")?])
    });
    let rows: Vec<_> = rows.collect::<Option<_>>()?;
    let header = ["path, in registers", "integers, TOPS", "floats, TOPS", "of `f32` activations"];
    let warnings = report["warnings"].as_array()?.iter().filter_map(Value::as_str);
    let warnings: String = warnings.map(|warning| format!("\nWarning: {warning}\n")).collect();
    Some(format!("{}{warnings}", table(&header, &rows)))
}

fn attention(threads: usize, report: &Value, csv: &mut Vec<String>) -> Option<String> {
    let mut rows: Vec<Vec<String>> = Vec::new();
    let cases = report["attention"].as_array()?;
    for case in cases {
        let number = |key: &str| case[key].as_f64();
        let (kernel, tokens) = (case["kernel"].as_str()?, case["tokens"].as_u64()?);
        for seconds in case["decode_seconds"].as_array()? {
            csv.push(format!("{threads},{kernel}-decode,,,{tokens},{seconds}"));
        }
        for seconds in case["prefill_seconds"].as_array()? {
            csv.push(format!("{threads},{kernel}-prefill,,,{},{seconds}", case["prefill_tokens"]));
        }
        rows.push(vec![
            kernel.to_owned(),
            format!("{:.0}", number("bytes_per_token")?),
            format!("{:.1} GB/s, {:.0} %", number("gb_per_second")?, 100.0 * number("memory_share")?),
            format!("{:.2}", number("over_f16")?),
            format!("{:.0} GFLOP/s", number("prefill_gflops")?),
            format!("{:.1} µs", 1e6 * number("append_seconds_per_token")?),
        ]);
    }
    let first = cases.first()?;
    let whole = |key: &str| first[key].as_u64();
    Some(format!(
        "Attention: {} query heads and {} KV heads of {} features; decode on {} tokens, {} layers in turn; prefill \
         of the last {} queries of {} tokens.\n\n{}",
        whole("query_heads")?,
        whole("kv_heads")?,
        whole("head_dim")?,
        whole("tokens")?,
        whole("layers")?,
        whole("prefill_queries")?,
        whole("prefill_tokens")?,
        table(&["cache", "bytes per token", "decode", "times f16", "prefill", "append, per token"], &rows)
    ))
}
