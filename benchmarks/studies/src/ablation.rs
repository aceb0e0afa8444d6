//! `cargo study ablation`: measures the contribution of each step of QoQ on the real models, by `quant eval
//! --ablation`.
//!
//! A step that adds bits or only transforms the model should not raise the KL. The record marks such steps if they
//! raise it by more than twice the error of the change.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;
use xtask::bench_rtn::quant_binary;
use xtask::support::record::{Record, table, typed_command};
use xtask::support::shell::{output, shared_dir};

use crate::support::rows::texts;

/// Increases of at most this many standard errors are not marked.
const ERRORS: f64 = 2.0;
/// Rows with fewer bits than the row above, where the KL is expected to rise.
const FEWER_BITS: [&str; 2] = ["W4A8, a scale per row", "+ KV4"];

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Evaluation windows
    #[arg(long, default_value_t = 20)]
    windows: usize,
    /// Calibration windows
    #[arg(long, default_value_t = 32)]
    samples: usize,
    /// Measure this program instead of building one
    #[arg(long)]
    quant: Option<PathBuf>,
}

/// The models, each with the group size of the grouped rows. It must be smaller than the width of every linear, so that
/// groups differ from one scale per row. The third model is left out: no common group size divides the 172 columns of
/// its `down_proj`.
const GROUPS: [(&str, &str); 2] = [("books-7m", "128"), ("tinystories-656k", "64")];

/// Measures and writes the record.
pub fn run(args: &Args) -> Result<()> {
    let data = shared_dir().context("the real models and texts are not available")?.join("data");
    let quant = quant_binary(args.quant.as_deref())?;
    let mut csv =
        vec!["outliers,model,evaluation,step,scheme,perplexity,kl,kl_se,change,change_se".to_owned()];
    let mut body = String::new();
    for planted in [false, true] {
        for row in texts() {
            let Some((_, group)) = GROUPS.iter().find(|(name, _)| *name == row.name) else { continue };
            let model = row.model(&data, planted)?;
            let mut command = Command::new(&quant);
            command.arg("eval").arg(&model).args(["--ablation", "--json", "--quiet", "--group-size", group]);
            command.arg("--text").arg(data.join("text").join(row.evaluation));
            command.arg("--calibration").arg(row.calibration(&data));
            command.args(["--window", &row.window.to_string(), "--windows", &args.windows.to_string()]);
            command.args(["--samples", &args.samples.to_string(), "--seq-len", &row.window.to_string()]);
            let result: Value = serde_json::from_str(&output(&mut command)?)?;
            let kind = if planted { "planted outliers" } else { "as it is" };
            let (text, lines) = describe(&result)?;
            println!("{}, {}, {kind}\n{text}", row.name, row.evaluation);
            body += &format!(
                "## {}, {}, {kind}\n\nGroups of {group}; {} tokens; float perplexity {:.3}.\n\n{text}\n",
                row.name,
                row.evaluation,
                result["tokens_scored"],
                result["float_perplexity"]["mean"].as_f64().context("no perplexity")?
            );
            let outliers = if planted { "planted" } else { "none" };
            csv.extend(lines.into_iter().map(|l| format!("{outliers},{},{},{l}", row.name, row.evaluation)));
        }
    }
    let record = Record {
        benchmark: "ablation",
        title: "QoQ step by step on the real models".into(),
        command: typed_command(),
        body: format!(
            "`quant eval MODEL --ablation`: each row includes all steps above it. Perplexity, KL to float in nats \
             per token, and its change from the row above, paired by window; ± standard errors. {} calibration and \
             {} evaluation \
             windows of 512 tokens. **Bold**: an unintended change for the worse of more than {ERRORS:.0} standard \
             errors. stories260k is left out: no group size divides its 172 columns. Planted: 4 channels of every \
             norm multiplied by 32, the columns that read them divided by 32.\n\n{body}",
            args.samples, args.windows
        ),
        csv,
    };
    record.conclude(false, &[])
}

fn describe(result: &Value) -> Result<(String, Vec<String>)> {
    let rows = result["rows"].as_array().context("no rows")?;
    let (mut cells, mut lines) = (Vec::new(), Vec::new());
    for row in rows {
        let number = |pointer: &str| row.pointer(pointer).and_then(Value::as_f64);
        let step = row["step"].as_str().context("a row has no name")?;
        let scheme = row["scheme"].as_str().context("a row has no scheme")?;
        let perplexity = number("/perplexity/mean").context("no perplexity")?;
        let (kl, kl_error) =
            (number("/kl/mean").context("no KL")?, number("/kl/standard_error").unwrap_or(0.0));
        let change = number("/kl_change/mean").zip(number("/kl_change/standard_error"));
        let shown = change.map(|(change, error)| {
            let text = format!("{change:+.5} ± {error:.5}");
            let is_worse = change > ERRORS * error && !FEWER_BITS.contains(&step);
            if is_worse { format!("**{text}**") } else { text }
        });
        cells.push(vec![
            step.to_owned(),
            format!("`{scheme}`"),
            format!("{perplexity:.3}"),
            format!("{kl:.5} ± {kl_error:.5}"),
            shown.unwrap_or_default(),
        ]);
        let (change, error) = change.unwrap_or((0.0, 0.0));
        let step = step.replace(',', "");
        lines.push(format!("{step},{scheme},{perplexity},{kl},{kl_error},{change},{error}"));
    }
    Ok((table(&["step", "scheme", "perplexity", "KL", "change"], &cells), lines))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn changes_for_the_worse_are_bold() {
        let row = |step: &str, change: Option<[f64; 2]>| {
            let estimate = |mean: f64, error: f64| json!({ "mean": mean, "standard_error": error });
            let mut row = json!({ "step": step, "scheme": "w4a8", "perplexity": estimate(3.0, 0.1), "kl": estimate(0.1, 0.01) });
            if let Some([mean, error]) = change {
                row["kl_change"] = estimate(mean, error);
            }
            row
        };
        let result = json!({ "rows": [
            row("W8A8", None),
            row("W4A8, a scale per row", Some([0.1, 0.001])),
            row("+ rotation", Some([0.01, 0.001])),
            row("+ clipping", Some([0.0015, 0.001])),
            row("+ KV4", Some([0.2, 0.001])),
        ] });
        let (table, lines) = describe(&result).unwrap();
        let bold: Vec<&str> = table.lines().filter(|l| l.contains("**")).collect();
        assert!(bold.len() == 1 && bold[0].contains("+ rotation"), "{table}");
        assert_eq!(lines.len(), 5);
        assert!(lines.iter().all(|l| l.split(',').count() == 7), "{lines:?}");
    }
}
