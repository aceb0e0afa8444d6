//! `cargo xtask charts`: draws the documentation's charts from records.
//!
//! A test draws them again and compares them with the files.

mod svg;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use self::svg::{Bars, Point, Scatter, Series};
use crate::support::shell::root;

/// The directory of the charts.
const IMAGES: &str = "docs/images";
const QUALITY: &str = "benchmarks/record/quality/2026-11-22-amd-epyc-2cpu.csv";
const FLOATS: &str = "benchmarks/record/floats/2026-11-25-amd-epyc-2cpu.csv";
const GPTQ: &str = "benchmarks/record/peers-gptq-quality/2026-11-23-amd-epyc-2cpu.csv";
const LAYERS: &str = "benchmarks/record/kl-by-layer/2026-11-28-amd-epyc-2cpu.csv";
const MODELS: &str = "benchmarks/record/peers-models/2026-11-23-amd-epyc-2cpu.csv";
const AWQ_SPEED: &str = "benchmarks/record/peers-awq-speed/2026-11-22-amd-epyc-2cpu.csv";
const GPTQ_SPEED: &str = "benchmarks/record/peers-gptq-speed/2026-11-23-amd-epyc-2cpu.csv";

/// Draws all charts.
///
/// # Errors
/// When a record lacks a value, or a chart cannot be written.
pub fn run() -> Result<()> {
    let images = root().join(IMAGES);
    std::fs::create_dir_all(&images).with_context(|| format!("cannot create {}", images.display()))?;
    for (name, text) in pictures()? {
        let path = images.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        println!("{}", path.display());
    }
    Ok(())
}

fn pictures() -> Result<Vec<(&'static str, String)>> {
    Ok(vec![
        ("kl-by-size.svg", kl_by_size()?),
        ("kl-by-layer.svg", kl_by_layer()?),
        ("tokens-per-second.svg", tokens_per_second()?),
        ("time-to-quantize.svg", time_to_quantize()?),
    ])
}

/// The rows of a record that pass `keep`, each as a map from column names.
fn rows(record: &str, keep: &[(&str, &str)]) -> Result<Vec<BTreeMap<String, String>>> {
    let path = root().join(record);
    read(&path, keep).with_context(|| format!("{} does not have the expected form", path.display()))
}

fn read(path: &Path, keep: &[(&str, &str)]) -> Result<Vec<BTreeMap<String, String>>> {
    let text = std::fs::read_to_string(path)?;
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().context("it is empty")?.split(',').collect();
    let mut kept = Vec::new();
    for line in lines {
        let values: Vec<&str> = line.split(',').collect();
        ensure!(values.len() == names.len(), "a line has {} columns: {line}", values.len());
        let row: BTreeMap<_, _> =
            names.iter().zip(&values).map(|(n, v)| ((*n).into(), (*v).into())).collect();
        if keep.iter().all(|(name, value)| row.get(*name).is_some_and(|found: &String| found == value)) {
            kept.push(row);
        }
    }
    ensure!(!kept.is_empty(), "no line has {keep:?}");
    Ok(kept)
}

fn number(row: &BTreeMap<String, String>, column: &str) -> Result<f64> {
    let text = row.get(column).with_context(|| format!("column {column} is missing"))?;
    text.parse().with_context(|| format!("{column} is `{text}`"))
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Mean KL of books-7m against bits per weight, which include the scales.
fn kl_by_size() -> Result<String> {
    let mut series = Vec::new();
    for (label, method) in [("round to nearest", "rtn"), ("AWQ", "awq")] {
        for bits in [3, 4] {
            let bits = f64::from(bits);
            let text = bits.to_string();
            let keep = [("outliers", "none"), ("bits", text.as_str()), ("method", method)];
            let keep = [&keep[..], &[("model", "books-7m"), ("evaluation", "books_valid.txt")]].concat();
            let found = rows(QUALITY, &keep)?;
            let points = found.iter().map(|row| {
                Ok(Point {
                    x: bits + 16.0 / number(row, "group")?,
                    y: number(row, "kl")?,
                    label: String::new(),
                })
            });
            let points = points.collect::<Result<Vec<_>>>()?;
            let label = if bits == 3.0 { label } else { "" };
            series.push(Series { label: label.into(), color: usize::from(method == "awq"), points });
        }
    }
    let keep = [("outliers", "none"), ("bits", "4"), ("who", "ours")];
    let keep = [&keep[..], &[("model", "books-7m"), ("evaluation", "books_valid.txt")]].concat();
    let mut by_group: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for row in rows(GPTQ, &keep)? {
        by_group.entry(number(&row, "group")? as u32).or_default().push(number(&row, "kl")?);
    }
    let points = by_group.iter().map(|(group, kl)| Point {
        x: 4.0 + 16.0 / f64::from(*group),
        y: mean(kl),
        label: String::new(),
    });
    series.push(Series { label: "GPTQ".into(), color: 2, points: points.collect() });
    let floats = [
        ("wf4a16-g32-mx", 4.25, "MXFP4", ""),
        ("wf4a16-g16-nv", 4.5, "NVFP4", "sweep"),
        ("wf8a16-channel", 8.0, "FP8", ""),
        ("w8a16-channel", 8.0, "INT8", ""),
    ];
    let mut points = Vec::new();
    for (scheme, x, label, options) in floats {
        let keep = [("text_of", "evaluation"), ("model", "books-7m"), ("scheme", scheme)];
        let found = rows(FLOATS, &keep)?;
        let row = found.iter().find(|row| options.is_empty() || row["options"].contains(options));
        let row = row.with_context(|| format!("{FLOATS} has no {scheme} with {options}"))?;
        points.push(Point { x, y: number(row, "kl")?, label: label.into() });
    }
    series.push(Series { label: "formats, rounded to nearest".into(), color: 3, points });
    Ok(Scatter {
        title: "How far predictions move, by size".into(),
        subtitle: "books-7m: mean KL divergence from the original, lower is better; groups of 128, 64 and 32"
            .into(),
        x: "bits per weight, with scales".into(),
        y: "mean KL (nats), logarithmic".into(),
        series,
    }
    .draw())
}

/// The KL if only one block, or one linear of every block, is quantized, relative to that of the whole model.
fn kl_by_layer() -> Result<String> {
    let of = |kind: &str| rows(LAYERS, &[("kind", kind)]);
    let all = of("all")?;
    let total = number(all.first().context("no row of the whole model")?, "kl")?;
    let mut panels = Vec::new();
    for (kind, title) in [("block", "only one block"), ("linear", "only one linear of every block")] {
        let mut bars = Vec::new();
        for row in of(kind)? {
            let label = if kind == "block" { format!("block {}", row["name"]) } else { row["name"].clone() };
            bars.push((label, 100.0 * number(&row, "kl")? / total, false));
        }
        let most = bars.iter().map(|(_, share, _)| *share).fold(0.0, f64::max);
        bars.iter_mut().for_each(|(_, share, stands_out)| *stands_out = *share == most);
        panels.push((title.to_owned(), bars));
    }
    Ok(Bars {
        title: "Which layers the loss comes from".into(),
        subtitle: "books-7m, 4 bits in groups of 128: KL relative to that of the whole model quantized"
            .into(),
        unit: "%".into(),
        panels,
    }
    .draw())
}

fn tokens_per_second() -> Result<String> {
    let names = ["ours w4a8-g128", "ours w4a16-g128", "llama.cpp Q4_0", "llama.cpp Q4_K_M"];
    let mut panels = Vec::new();
    for (title, column) in [("prefill", "prefill_tokens_per_second"), ("decode", "decode_tokens_per_second")]
    {
        let mut bars = Vec::new();
        for name in names {
            let rows = rows(MODELS, &[("threads", "2"), ("name", name)])?;
            let rates = rows.iter().map(|row| number(row, column)).collect::<Result<Vec<_>>>()?;
            bars.push((name.replacen("ours", "quant", 1), median(rates), name.starts_with("ours")));
        }
        panels.push((title.to_owned(), bars));
    }
    Ok(Bars {
        title: "Tokens per second on two cores".into(),
        subtitle: "Llama in 1B shape, random weights; medians, higher is better".into(),
        unit: "tokens/s".into(),
        panels,
    }
    .draw())
}

fn time_to_quantize() -> Result<String> {
    let mut awq = Vec::new();
    for (who, label) in
        [("ours", "quant"), ("bfloat16", "llm-compressor, bfloat16"), ("float32", "llm-compressor, float32")]
    {
        let rows = rows(AWQ_SPEED, &[("who", who)])?;
        let seconds = rows.iter().map(|row| number(row, "seconds")).collect::<Result<Vec<_>>>()?;
        awq.push((label.to_owned(), median(seconds), who == "ours"));
    }
    let mut gptq = Vec::new();
    for (who, dtype) in [
        ("ours", ""),
        ("llm-compressor", "bfloat16"),
        ("gptqmodel", "bfloat16"),
        ("llm-compressor", "float32"),
        ("gptqmodel", "float32"),
    ] {
        let rows = rows(GPTQ_SPEED, &[("who", who), ("dtype", dtype)])?;
        let seconds = rows.iter().map(|row| number(row, "seconds")).collect::<Result<Vec<_>>>()?;
        let label = if dtype.is_empty() { "quant".to_owned() } else { format!("{who}, {dtype}") };
        gptq.push((label, median(seconds), who == "ours"));
    }
    Ok(Bars {
        title: "Seconds to quantize on two cores".into(),
        subtitle: "layers in 1B shape, 4 bits, the same 32 windows of 512 tokens; lower is better".into(),
        unit: "s".into(),
        panels: vec![("AWQ, 4 layers".into(), awq), ("GPTQ, 2 layers".into(), gptq)],
    }
    .draw())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_are_those_of_the_records() {
        for (name, text) in pictures().unwrap() {
            let committed = std::fs::read_to_string(root().join(IMAGES).join(name)).unwrap_or_default();
            assert!(committed == text, "{name} does not match the records: run `cargo xtask charts`");
        }
    }
}
