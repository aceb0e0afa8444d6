//! `cargo study search-agreement`: how often AWQ's fast search makes the same choice as the reference search, and the
//! accuracy and time of the fast search relative to the reference.
//!
//! Both run on the same calibration batch. The reference measures every candidate on the whole batch, so its report
//! contains the whole-batch error of each choice of the fast search. The regret is that error divided by the minimum,
//! minus 1.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use xtask::bench_rtn::quant_binary;
use xtask::support::measure;
use xtask::support::record::{Record, table, typed_command};
use xtask::support::shell::{remove_dir, shared_dir, target_dir};

use crate::support::rows::ROWS;

/// Maximum mean regret.
const REGRET_LIMIT: f64 = 0.01;

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Calibration windows
    #[arg(long, default_value_t = 64)]
    pub samples: usize,
    /// Tokens per window
    #[arg(long, default_value_t = 512)]
    pub seq_len: usize,
    /// The sets of rows: 4 or 3 bits, or 4 bits with planted outliers
    #[arg(long, value_delimiter = ',', default_values = ["4", "3", "4-planted"])]
    pub sets: Vec<String>,
    /// Measure this program instead of building one
    #[arg(long)]
    pub quant: Option<PathBuf>,
    /// Fail if the mean regret exceeds 1 %
    #[arg(long)]
    pub check: bool,
}

struct Group {
    ratio: Option<f64>,
    error_before: f64,
    /// Ratio, error and number of tokens of every measurement.
    tried: Vec<(Option<f64>, f64, u64)>,
}

/// Measures and writes the record.
pub fn run(args: &Args) -> Result<()> {
    let data = shared_dir().context("the real models and texts are not available")?.join("data");
    let quant = quant_binary(args.quant.as_deref())?;
    let out = target_dir().join("search-agreement");
    let mut rows = Vec::new();
    let mut csv =
        vec!["outliers,bits,model,group_size,producer,fast_ratio,reference_ratio,regret,gain".to_owned()];
    let mut regrets = Vec::new();
    let (mut same, mut seconds) = (0, [0.0; 2]);
    for (name, planted, bits) in [("4", false, 4), ("3", false, 3), ("4-planted", true, 4)] {
        if !args.sets.iter().any(|s| s == name) {
            continue;
        }
        for row in &ROWS {
            let model = row.model(&data, planted)?;
            let mut found = Vec::new();
            let mut took = [0.0; 2];
            for (search, took) in ["fast", "reference"].into_iter().zip(&mut took) {
                remove_dir(&out)?;
                let mut command = row.quantize(&quant, &model, bits, &out);
                command.args(["--method", "awq", "--search", search]);
                command.arg("--calibration").arg(row.calibration(&data));
                command.args([
                    "--samples",
                    &args.samples.to_string(),
                    "--seq-len",
                    &args.seq_len.to_string(),
                ]);
                *took = measure::run(&mut command)?.seconds;
                found.push(groups(&out)?);
            }
            let [fast, reference] = &found[..] else { unreachable!("exactly two searches were run") };
            ensure!(fast.keys().eq(reference.keys()), "the two searches report different groups");
            let kind = if planted { "planted" } else { "none" };
            let (mut row_regrets, mut row_same, mut work) = (Vec::new(), 0, 0);
            for ((producer, fast), reference) in fast.iter().zip(reference.values()) {
                let whole = |ratio| {
                    let tried = reference.tried.iter().find(|(r, ..)| *r == ratio);
                    tried
                        .map(|t| t.1)
                        .context("the fast search chose a ratio that the reference did not measure")
                };
                let (chosen, best) = (whole(fast.ratio)?, whole(reference.ratio)?);
                let regret = if best > 0.0 { chosen / best - 1.0 } else { 0.0 };
                row_regrets.push(regret);
                row_same += usize::from(fast.ratio == reference.ratio);
                work += fast.tried.iter().map(|t| t.2).sum::<u64>();
                let text = |r: Option<f64>| r.map_or("none".to_owned(), |r| format!("{r:.2}"));
                csv.push(format!(
                    "{kind},{bits},{},{},{producer},{},{},{regret:.6},{:.6}",
                    row.name,
                    row.group,
                    text(fast.ratio),
                    text(reference.ratio),
                    1.0 - best / reference.error_before
                ));
            }
            let n = row_regrets.len();
            let tokens = (args.samples * args.seq_len * 21 * n) as f64;
            let cells = vec![
                row.name.to_owned(),
                format!("{bits}{}", if planted { " planted" } else { "" }),
                row.group.to_owned(),
                format!("{row_same}/{n}"),
                percent(mean(&row_regrets)),
                percent(row_regrets.iter().copied().fold(0.0, f64::max)),
                format!("{:.0} %", 100.0 * work as f64 / tokens),
                format!("{:.1}", took[0]),
                format!("{:.1}", took[1]),
            ];
            println!("{}", cells.join("  "));
            rows.push(cells);
            regrets.extend(row_regrets);
            same += row_same;
            seconds = [seconds[0] + took[0], seconds[1] + took[1]];
        }
    }
    let header =
        ["model", "bits", "group", "same ratio", "mean regret", "largest", "tokens", "fast s", "reference s"];
    let average = mean(&regrets);
    let summary = format!(
        "Over all {} fold groups: the same ratio in {:.0} %, mean regret {}, {} s compared with {} s.",
        regrets.len(),
        100.0 * same as f64 / regrets.len() as f64,
        percent(average),
        seconds[0].round(),
        seconds[1].round()
    );
    println!("\n{summary}");
    let record = Record {
        benchmark: "search",
        title: "AWQ's fast scale search compared with the reference".into(),
        command: typed_command(),
        body: format!(
            "Regret: the whole-batch error of the fast search's choice divided by the smallest error of all \
             candidates, minus 1. Tokens: the share evaluated by the fast search, relative to the reference (groups \
             judged by their Gram matrix count fully). Calibration: {} windows of {}.\n\n{}\n{summary}\n",
            args.samples,
            args.seq_len,
            table(&header, &rows)
        ),
        csv,
    };
    println!("recorded in {}", record.write()?.display());
    ensure!(!args.check || average <= REGRET_LIMIT, "the mean regret is {}", percent(average));
    Ok(())
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

fn percent(share: f64) -> String {
    format!("{:.2} %", 100.0 * share)
}

/// The scale searches of a report, by producer.
fn groups(out: &Path) -> Result<BTreeMap<String, Group>> {
    let report: Value = serde_json::from_slice(&std::fs::read(out.join("quant_report.json"))?)?;
    let mut groups = BTreeMap::new();
    for tensor in report["tensors"].as_array().context("no tensors")? {
        let search = &tensor["scale_search"];
        let Some(producer) = search["producer"].as_str() else { continue };
        let tried = search["tried"].as_array().context("no candidates")?;
        let tried = tried.iter().map(|t| {
            let error = t["error"].as_f64().context("no error")?;
            Ok((t["ratio"].as_f64(), error, t["tokens"].as_u64().context("no tokens")?))
        });
        let group = Group {
            ratio: search["ratio"].as_f64(),
            error_before: search["error_before"].as_f64().context("no error")?,
            tried: tried.collect::<Result<_>>()?,
        };
        groups.insert(producer.to_owned(), group);
    }
    Ok(groups)
}
