//! `cargo study quality-floats`: the accuracy loss of floating-point weights on the real models, compared with integers
//! of the same width.
//!
//! All schemes are evaluated on the same windows of the same text, so differences are paired, and the errors are those
//! of the differences between windows. Settings are chosen on the calibration texts, which have their own table; claims
//! are checked on the evaluation texts:
//!
//! * of NVFP4's scale searches, `sweep` loses no more than `four-over-six`, which loses no more than `amax`, up to two
//!   paired errors;
//! * NVFP4 with `sweep` loses no more than INT4 in groups of 32, which takes as many bits, up to two paired errors;
//! * FP8 per channel loses at most 0.0004 nats per token on books-7m.

pub mod peers;

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use xtask::bench_rtn::quant_binary;
use xtask::support::record::{Record, table, typed_command};
use xtask::support::shell::{output, remove_dir, shared_dir, target_dir};

use crate::quality::Args;
use crate::support::rows::{ROWS, Row, quantize, texts};

/// Names, schemes and options of `quant quantize`.
const CASES: [(&str, &str, &[&str]); 10] = [
    ("FP8, channel", "wf8a16-channel", &[]),
    ("FP8, 128 x 128", "wf8a16-b128", &[]),
    ("MXFP8", "wf8a16-g32-mx", &[]),
    ("INT8, channel", "w8a16-channel", &[]),
    ("NVFP4, amax", "wf4a16-g16-nv", &["--scale-search", "amax"]),
    ("NVFP4, four-over-six", "wf4a16-g16-nv", &["--scale-search", "four-over-six"]),
    ("NVFP4, sweep", "wf4a16-g16-nv", &["--scale-search", "sweep"]),
    ("INT4, g32", "w4a16-g32-sym", &[]),
    ("MXFP4", "wf4a16-g32-mx", &[]),
    ("INT4, g128", "w4a16-g128-sym", &[]),
];
const FP8: usize = 0;
/// Pairs of cases: the first must not lose more than the second, by more than two paired errors.
const PAIRS: [(usize, usize); 3] = [(6, 5), (5, 4), (6, 7)];
/// Nats per token that FP8 per channel may lose on the model of this name.
const FP8_MAX: (&str, f64) = ("books-7m", 0.0004);

/// The divergence of every window, in nats per token.
pub fn divergence(
    quant: &Path,
    model: &Path,
    out: &Path,
    text: &Path,
    [window, windows]: [usize; 2],
) -> Result<Vec<f64>> {
    let mut command = Command::new(quant);
    command.arg("eval").arg(out).arg("--reference").arg(model).arg("--text").arg(text);
    command.args(["--window", &window.to_string(), "--windows", &windows.to_string(), "--quiet", "--json"]);
    let result: Value = serde_json::from_str(&output(&mut command)?)?;
    let windows = result.pointer("/comparison/window_kl").and_then(Value::as_array);
    let windows = windows.context("`quant eval --json` reports no /comparison/window_kl")?;
    let windows: Vec<f64> = windows.iter().filter_map(Value::as_f64).collect();
    ensure!(windows.len() > 1 && windows.iter().all(|kl| kl.is_finite()), "{model:?}: not finite");
    Ok(windows)
}

/// The mean and its standard error.
pub fn mean(values: &[f64]) -> [f64; 2] {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>();
    [mean, (squares / (count - 1.0) / count).sqrt()]
}

/// The cases for a row's model. stories260k skips the last one, whose groups are wider than its rows.
fn cases(row: &Row) -> &'static [(&'static str, &'static str, &'static [&'static str])] {
    if row.name == "stories260k" { &CASES[..CASES.len() - 1] } else { &CASES }
}

/// Options that leave linears float whose width no group size divides.
fn ignored(row: &Row) -> Vec<String> {
    let ends = ROWS.iter().filter(|other| other.name == row.name).flat_map(Row::per_channel);
    ends.flat_map(|end| ["--ignore".to_owned(), end.to_owned()]).collect()
}

/// Measures and writes the record.
pub fn run(args: &Args) -> Result<()> {
    let data = shared_dir().context("the real models and texts are not available")?.join("data");
    let quant = quant_binary(args.quant.as_deref())?;
    let out = target_dir().join("quality-floats");
    let mut csv = vec!["text_of,model,text,scheme,options,kl,kl_se".to_owned()];
    let (mut body, mut broken) = (String::new(), Vec::new());
    let mut measured: Vec<&str> = Vec::new();
    for row in texts() {
        // One evaluation text per model, because scales are found without text.
        if measured.contains(&row.name) {
            continue;
        }
        measured.push(row.name);
        let model = row.model(&data, false)?;
        let calibration = row.calibration(&data);
        let evaluation = data.join("text").join(row.evaluation);
        // Conversations are not running text and are not scored.
        let texts = [("calibration", calibration), ("evaluation", evaluation)];
        let texts: Vec<_> =
            texts.into_iter().filter(|(_, t)| t.extension().is_some_and(|e| e != "jsonl")).collect();
        let mut found: Vec<Vec<Vec<f64>>> = vec![Vec::new(); texts.len()];
        for &(name, scheme, options) in cases(row) {
            remove_dir(&out)?;
            let mut command = quantize(&quant, &model, &out);
            command.args(["--scheme", scheme, "--method", "rtn"]).args(options).args(ignored(row));
            output(&mut command)?;
            for ((of, text), found) in texts.iter().zip(&mut found) {
                let windows = divergence(&quant, &model, &out, text, [row.window, args.windows])?;
                let [kl, error] = mean(&windows);
                let text = text.file_name().unwrap_or_default().to_string_lossy();
                println!("{}  {text}  {name}  {kl:.6} ± {error:.6}", row.name);
                csv.push(format!("{of},{},{text},{scheme},{},{kl},{error}", row.name, options.join(" ")));
                found.push(windows);
            }
        }
        for ((of, text), found) in texts.iter().zip(&found) {
            let text = text.file_name().unwrap_or_default().to_string_lossy();
            let held = *of == "evaluation";
            let rows: Vec<Vec<String>> = CASES
                .iter()
                .zip(found)
                .map(|((name, scheme, _), windows)| {
                    let [kl, error] = mean(windows);
                    vec![(*name).to_owned(), format!("`{scheme}`"), format!("{kl:.5} ± {error:.5}")]
                })
                .collect();
            body += &format!(
                "## {}, {of} text {text}\n\n{}\n",
                row.name,
                table(&["weights", "scheme", "KL"], &rows)
            );
            for (less, more) in PAIRS {
                let differences: Vec<f64> =
                    found[less].iter().zip(&found[more]).map(|(a, b)| a - b).collect();
                let [difference, error] = mean(&differences);
                let verdict = match difference {
                    d if d < -2.0 * error => "less",
                    d if d > 2.0 * error => "more",
                    _ => "a tie",
                };
                let (a, b) = (CASES[less].0, CASES[more].0);
                body += &format!("* {a} against {b}: {difference:+.6} ± {error:.6}, {verdict}\n");
                if held && verdict == "more" {
                    broken.push(format!("{}, {text}: {a} costs more than {b}", row.name));
                }
            }
            body += "\n";
            let [fp8, _] = mean(&found[FP8]);
            if held && row.name == FP8_MAX.0 && fp8 > FP8_MAX.1 {
                broken.push(format!("{}, {text}: FP8 per channel costs {fp8:.5}", row.name));
            }
        }
    }
    let record = Record {
        benchmark: "floats",
        title: "Floating-point weights on the real models".into(),
        command: typed_command(),
        body: format!(
            "Weights rounded to nearest without calibration; activations, embeddings and head float; on stories260k \
             `down_proj` is float too, because no group size divides its width. {} windows of 512 tokens (256 on \
             stories260k), or as many as the text has. KL to float over the full vocabulary in nats per token, ± its \
             standard error over \
             windows; differences are paired by window, and called less or more if they exceed two standard errors. \
             The default of `--scale-search` was chosen on calibration texts.\n\n{body}",
            args.windows
        ),
        csv,
    };
    record.conclude(args.check, &broken)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `texts` selects the per-channel row of stories260k, so `ignored` must also search its other rows.
    #[test]
    fn widths_that_no_group_divides_stay_float() {
        let of =
            |name: &str| texts().into_iter().find(|row| row.name == name).map(ignored).unwrap_or_default();
        assert_eq!(of("stories260k"), ["--ignore", "down_proj"]);
        assert!(of("books-7m").is_empty() && of("tinystories-656k").is_empty());
        let schemes =
            |name: &str| texts().into_iter().find(|row| row.name == name).map_or(0, |row| cases(row).len());
        assert_eq!((schemes("stories260k"), schemes("books-7m")), (CASES.len() - 1, CASES.len()));
    }
}
