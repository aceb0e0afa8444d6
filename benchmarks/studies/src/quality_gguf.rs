//! `cargo study quality-gguf`: the accuracy loss of GGUF types, as written by `llama-quantize`, by quant's search, by
//! GPTQ, by the search after AWQ, and by GPTQ after AWQ. It is measured on the models whose widths fit these types: a
//! real one, as it is and with planted outliers, and two that are trained here.
//!
//! All use the same types and the same importance matrix, which quant's calibration gathered. They are evaluated on the
//! same windows, so differences are paired, and the errors are those of the differences between windows. Settings were
//! chosen on calibration texts; claims are checked on the evaluation texts: with Q4_K_M and IQ4_XS, quant's search and
//! GPTQ must lose less than `llama-quantize`, by more than two paired errors over all rows together, and must not lose
//! more in any row.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use xtask::bench_rtn::quant_binary;
use xtask::support::record::{Record, table, typed_command};
use xtask::support::shell::{output, shared_dir, target_dir};

use crate::quality_floats::{divergence, mean};
use crate::support::llama_cpp::LlamaCpp;
use crate::support::rows::{Row, TRAINED, quantize, texts};

/// The real model whose widths are multiples of 256.
const MODEL: &str = "books-7m";
/// Mixtures, and whether claims are checked on them.
const MIXTURES: [(&str, bool); 3] = [("Q4_K_M", true), ("IQ4_XS", true), ("Q4_0", false)];
/// Names, options of `quant quantize`, and whether claims are checked; the first is `llama-quantize`.
const METHODS: [(&str, &[&str], bool); 5] = [
    ("llama-quantize", &[], false),
    ("search", &[], true),
    ("AWQ", &["--method", "awq"], false),
    ("GPTQ", &["--method", "gptq"], true),
    ("AWQ+GPTQ", &["--method", "awq-gptq"], false),
];
const LLAMA: usize = 0;
const SEARCH: usize = 1;
/// The settings of the measurement.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Evaluation windows per row
    #[arg(long, default_value_t = 60)]
    windows: usize,
    /// Measure only these mixtures
    #[arg(long, value_delimiter = ',', default_values_t = MIXTURES.map(|(name, _)| name.to_owned()))]
    mixtures: Vec<String>,
    /// Measure only these methods, besides `llama-quantize`
    #[arg(long, value_delimiter = ',', default_values_t = METHODS[1..].iter().map(|(name, ..)| (*name).to_owned()))]
    methods: Vec<String>,
    /// Measure only these models
    #[arg(long, value_delimiter = ',')]
    models: Vec<String>,
    /// Measure only on these evaluation texts
    #[arg(long, value_delimiter = ',')]
    texts: Vec<String>,
    /// Measure this program instead of building one
    #[arg(long)]
    quant: Option<PathBuf>,
    /// Fail when a claim does not hold
    #[arg(long)]
    check: bool,
}

impl Args {
    /// Whether a row is measured.
    fn has(&self, row: &Row) -> bool {
        let chosen = |all: &[String], name| all.is_empty() || all.iter().any(|one| one == name);
        chosen(&self.models, row.name) && chosen(&self.texts, row.evaluation)
    }

    /// Whether a method is measured on a mixture. On the chosen mixtures, the first method always is.
    fn measures(&self, mixture: &str, method: usize) -> bool {
        let chosen = |all: &[String], name: &str| all.iter().any(|one| one == name);
        chosen(&self.mixtures, mixture) && (method == LLAMA || chosen(&self.methods, METHODS[method].0))
    }
}

const CALIBRATION: usize = 1 << 15;

struct Calibration<'a> {
    text: &'a Path,
    length: usize,
}

impl Calibration<'_> {
    fn add_to(&self, command: &mut Command) {
        command.arg("--calibration").arg(self.text).args(["--seq-len", &self.length.to_string()]);
        command.args(["--samples", &(CALIBRATION / self.length).to_string()]);
    }
}

/// Writes `out.gguf` by one of the methods. Fails if its size differs noticeably from that of `llama-quantize`, which
/// is the first method.
fn write(
    quant: &Path,
    model: &Path,
    scratch: &Path,
    calibration: &Calibration<'_>,
    mixture: &str,
    method: usize,
) -> Result<()> {
    let out = scratch.join("out.gguf");
    let (floats, imatrix) = (scratch.join("floats.gguf"), scratch.join("imatrix.gguf"));
    if method == LLAMA {
        let llama_quantize = target_dir().join("interop-llama-cpp/bin/llama-quantize");
        let mut command = Command::new(llama_quantize);
        command.arg("--imatrix").arg(imatrix).args([&floats, &out]).arg(mixture);
        output(&mut command)?;
        return Ok(());
    }
    let mut command = quantize(quant, model, &out);
    command.args(["--force", "--format", "gguf", "--scheme", mixture]);
    match METHODS[method].1 {
        [] => {
            command.arg("--imatrix").arg(imatrix);
        }
        options => calibration.add_to(command.args(options)),
    }
    let length = std::fs::metadata(&out)?.len();
    std::fs::remove_file(&out)?;
    output(&mut command)?;
    let ours = std::fs::metadata(&out)?.len();
    ensure!(ours.abs_diff(length) < 4096, "{mixture}: {ours} bytes, but {length} by llama-quantize");
    Ok(())
}

fn prepare(quant: &Path, model: &Path, scratch: &Path, calibration: &Calibration<'_>) -> Result<()> {
    std::fs::create_dir_all(scratch)?;
    let mut command = quantize(quant, model, &scratch.join("floats.gguf"));
    command.args(["--force", "--format", "gguf", "--scheme", "f32"]);
    calibration.add_to(&mut command);
    command.arg("--save-imatrix").arg(scratch.join("imatrix.gguf"));
    output(&mut command)?;
    Ok(())
}

/// Returns the mean of paired differences, its error, and a word for the result.
fn compare(less: &[f64], more: &[f64]) -> (f64, f64, &'static str) {
    let differences: Vec<f64> = less.iter().zip(more).map(|(a, b)| a - b).collect();
    let [difference, error] = mean(&differences);
    let word = match difference {
        d if d < -2.0 * error => "less",
        d if d > 2.0 * error => "more",
        _ => "a tie",
    };
    (difference, error, word)
}

/// The results of all rows so far.
struct Measured {
    csv: Vec<String>,
    /// Claims that do not hold.
    broken: Vec<String>,
    /// KL of the windows of all rows together, by mixture and method.
    pooled: Vec<Vec<Vec<f64>>>,
}

impl Measured {
    /// Measures a row; returns the lines of its table.
    fn row(
        &mut self,
        quant: &Path,
        data: &Path,
        scratch: &Path,
        (row, model, planted): (&Row, &Path, bool),
        args: &Args,
    ) -> Result<Vec<Vec<String>>> {
        let (calibration, text) = (row.calibration(data), data.join("text").join(row.evaluation));
        let calibration = Calibration { text: &calibration, length: row.window };
        let outliers = if planted { ", planted outliers" } else { "" };
        let title = format!("{}{outliers}, {}", row.name, row.evaluation);
        prepare(quant, model, scratch, &calibration)?;
        let mut lines = Vec::new();
        for (m, (mixture, held)) in MIXTURES.into_iter().enumerate() {
            let mut found: Vec<Option<Vec<f64>>> = vec![None; METHODS.len()];
            for (method, &(by, _, checked)) in METHODS.iter().enumerate() {
                if !args.measures(mixture, method) {
                    continue;
                }
                write(quant, model, scratch, &calibration, mixture, method)?;
                let out = scratch.join("out.gguf");
                let windows = divergence(quant, model, &out, &text, [row.window, args.windows])?;
                let [kl, error] = mean(&windows);
                println!("{title}  {mixture}  {by}  {kl:.6} ± {error:.6}");
                let place = format!("{},{planted},{}", row.name, row.evaluation);
                self.csv.push(format!("{place},{mixture},{by},{kl},{error}"));
                let against = [LLAMA, SEARCH].map(|other| {
                    let Some(other) = found[other].as_deref() else { return String::new() };
                    let (difference, error, word) = compare(&windows, other);
                    format!("{difference:+.6} ± {error:.6}, {word}")
                });
                if held
                    && checked
                    && found[LLAMA].as_deref().is_some_and(|f| compare(&windows, f).2 == "more")
                {
                    self.broken.push(format!("{title}: {mixture} by {by} has a higher KL"));
                }
                std::io::stdout().flush()?;
                let kl = format!("{kl:.5} ± {error:.5}");
                let [llama, search] = against;
                lines.push(vec![mixture.to_owned(), by.to_owned(), kl, llama, search]);
                self.pooled[m][method].extend(&windows);
                found[method] = Some(windows);
            }
        }
        Ok(lines)
    }
}

/// Measures and writes the record.
pub fn run(args: &Args) -> Result<()> {
    let data = shared_dir().context("the real models and texts are not available")?.join("data");
    let quant = quant_binary(args.quant.as_deref())?;
    LlamaCpp::install()?;
    let scratch = target_dir().join("quality-gguf");
    let csv = vec!["model,planted,text,mixture,method,kl,kl_se".to_owned()];
    let (mut body, broken) = (String::new(), Vec::new());
    let pooled = vec![vec![Vec::new(); METHODS.len()]; MIXTURES.len()];
    let of_real = texts().into_iter().filter(|row| row.name == MODEL && args.has(row));
    let mut rows: Vec<(&Row, PathBuf, &str)> = Vec::new();
    for row in of_real {
        rows.push((row, row.model(&data, false)?, ""));
        rows.push((row, row.model(&data, true)?, ", planted outliers"));
    }
    for row in TRAINED.iter().filter(|row| args.has(row)) {
        rows.push((row, row.trained(&data)?, ""));
    }
    let mut measured = Measured { csv, broken, pooled };
    for (row, model, outliers) in rows {
        let title = format!("{}{outliers}, {}", row.name, row.evaluation);
        let lines = measured.row(&quant, &data, &scratch, (row, &model, !outliers.is_empty()), args)?;
        let heads = ["mixture", "by", "KL", "against llama-quantize", "against search"];
        body += &format!("## {title}\n\n{}\n", table(&heads, &lines));
    }
    let Measured { csv, mut broken, pooled } = measured;
    body += "## All rows together\n\n";
    for ((mixture, held), windows) in MIXTURES.into_iter().zip(&pooled) {
        for method in (1..METHODS.len()).filter(|method| args.measures(mixture, *method)) {
            let (name, _, checked) = METHODS[method];
            for other in [LLAMA, SEARCH] {
                if other == method || !args.measures(mixture, other) {
                    continue;
                }
                let (difference, error, word) = compare(&windows[method], &windows[other]);
                let [before, _] = mean(&windows[other]);
                let percent = 100.0 * difference / before;
                body += &format!(
                    "* {mixture} by {name}, against {}: {difference:+.6} ± {error:.6} of {before:.6} ({percent:+.1} %), {word}\n",
                    METHODS[other].0
                );
                if held && checked && other == LLAMA && word != "less" {
                    broken.push(format!("{mixture} by {name} does not have a lower KL over all rows"));
                }
            }
        }
    }
    let record = Record {
        benchmark: "gguf",
        title: "GGUF types at equal bytes".into(),
        command: typed_command(),
        body: format!(
            "The same types, bytes and importance matrix ({CALIBRATION} tokens of the calibration text) \
             quantized by `llama-quantize` of llama.cpp v0.5.0, by quant's search, by GPTQ, and by both after AWQ. Activations are float. \
             {} windows of 512 tokens, of 128 for the models trained here, which have seen only the calibration text \
             (`benchmarks/peers/train_models.py`). KL to float over the full vocabulary in nats per token, ± its standard error \
             over windows; differences are paired by window, and called less or more if they exceed two standard \
             errors. Settings were chosen on calibration texts.\n\n{body}",
            args.windows
        ),
        csv,
    };
    record.conclude(args.check, &broken)
}
