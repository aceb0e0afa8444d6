//! `cargo study quality-w8a8`: the accuracy loss of 8-bit activations on the real models, with and without SmoothQuant,
//! plain and with planted outliers.
//!
//! All models are evaluated on the same tokens, so differences are paired. The checked claims, pooled over the rows by
//! tokens, are:
//!
//! * with activation scales per token, SmoothQuant's perplexity exceeds the float models' by at most 0.5 %, on the
//!   models as they are;
//! * on planted outliers with one symmetric static scale per linear, SmoothQuant recovers at least 90 % of the
//!   log-perplexity that W8A8 adds without it.

use anyhow::{Context, Result};
use xtask::bench_rtn::quant_binary;
use xtask::support::record::{Record, table, typed_command};
use xtask::support::shell::{output, remove_dir, shared_dir, target_dir};

use crate::quality::{Args, Outcome};
use crate::support::rows::{quantize, texts};

/// Maximum increase of log-perplexity by SmoothQuant on the models as they are.
const LOST: f64 = 0.005;
/// Share of W8A8's loss on planted outliers that SmoothQuant must recover.
const RECOVERED: f64 = 0.9;

const SCHEMES: [&str; 3] = ["w8a8", "w8a8-static", "w8a8-static-asym"];
/// Names, and options of `quant quantize`; the first has no smoothing.
const METHODS: [(&str, &[&str]); 4] = [
    ("none", &["--method", "rtn"]),
    ("family's α", &["--method", "smoothquant"]),
    ("searched α", &["--method", "smoothquant", "--alpha", "auto"]),
    (
        "searched α, all producers",
        &["--method", "smoothquant", "--alpha", "auto", "--smooth-producers", "all"],
    ),
];

/// Measures and writes the record.
pub fn run(args: &Args) -> Result<()> {
    let data = shared_dir().context("the real models and texts are not available")?.join("data");
    let quant = quant_binary(args.quant.as_deref())?;
    let out = target_dir().join("quality-w8a8");
    let rows = texts();
    let mut csv = vec!["outliers,scheme,model,evaluation,smoothing,float,perplexity,kl,kl_se".to_owned()];
    let (mut body, mut broken) = (String::new(), Vec::new());
    for planted in [false, true] {
        let title = if planted { "planted outliers" } else { "as they are" };
        for scheme in SCHEMES {
            let (mut lost, mut tokens, mut cells) = ([0.0; METHODS.len()], 0.0, Vec::new());
            for row in &rows {
                let model = row.model(&data, planted)?;
                let mut line = vec![row.name.to_owned(), row.evaluation.to_owned()];
                for (i, (name, options)) in METHODS.into_iter().enumerate() {
                    remove_dir(&out)?;
                    let mut command = quantize(&quant, &model, &out);
                    command.args(["--scheme", scheme]).args(options);
                    if i > 0 || scheme != "w8a8" {
                        command.arg("--calibration").arg(row.calibration(&data));
                        command.args(["--samples", &args.samples.to_string()]);
                        command.args(["--seq-len", &row.window.to_string()]);
                    }
                    output(&mut command)?;
                    let o = Outcome::of(&quant, &data, row, &model, &out, args.windows)?;
                    if i == 0 {
                        line.push(format!("{:.3}", o.float));
                        tokens += o.tokens;
                    }
                    lost[i] += (o.perplexity / o.float).ln() * o.tokens;
                    line.push(format!("{:.3}", o.perplexity));
                    line.push(format!("{:.5} ± {:.5}", o.kl, o.kl_error));
                    let kind = if planted { "planted" } else { "none" };
                    csv.push(format!(
                        "{kind},{scheme},{},{},{name},{},{},{},{}",
                        row.name, row.evaluation, o.float, o.perplexity, o.kl, o.kl_error
                    ));
                }
                println!("{title}  {scheme}  {}", line.join("  "));
                cells.push(line);
            }
            let lost = lost.map(|l| l / tokens);
            let mut header = vec!["model", "text", "float"];
            header.extend(METHODS.iter().flat_map(|(name, _)| [*name, "KL"]));
            body += &format!("## `{scheme}`, models {title}\n\n{}\n", table(&header, &cells));
            let text = METHODS.iter().zip(&lost).map(|((name, _), l)| format!("{l:.5} ({name})"));
            body += &format!(
                "Increase of log-perplexity, pooled over {tokens:.0} tokens: {}.",
                text.collect::<Vec<_>>().join(", ")
            );
            if planted {
                let shares = METHODS.iter().zip(&lost).skip(1);
                let shares =
                    shares.map(|((name, _), l)| format!("{:.1} % ({name})", 100.0 * (1.0 - l / lost[0])));
                body += &format!(" Recovered: {}.", shares.collect::<Vec<_>>().join(", "));
            }
            body += "\n\n";
            if !planted && scheme == "w8a8" && lost[1] > LOST {
                broken.push(format!(
                    "with per-token activations, SmoothQuant increases perplexity by {:.2} %",
                    100.0 * lost[1]
                ));
            }
            let recovered = 1.0 - lost[1] / lost[0];
            if planted && scheme == "w8a8-static" && recovered < RECOVERED {
                broken.push(format!(
                    "SmoothQuant recovers only {:.1} % of the loss from planted outliers",
                    100.0 * recovered
                ));
            }
        }
    }
    let record = Record {
        benchmark: "quality-w8a8",
        title: "W8A8 and SmoothQuant on the real models".into(),
        command: typed_command(),
        body: format!(
            "8-bit weights, symmetric, with a scale per row; 8-bit activations per token, or with one static scale \
             per linear, symmetric or not. {} calibration windows and {} evaluation windows of 512 tokens (256 on \
             stories260k); embeddings and head float. Perplexity, and KL to float over the full vocabulary in nats \
             per token, ± its standard error over windows, with activations rounded and multiplied as floats. \
             Planted: 4 channels of every norm multiplied by 32, the columns that read them divided by 32.\n\n{body}",
            args.samples, args.windows
        ),
        csv,
    };
    record.conclude(args.check, &broken)
}
