//! Whose checkpoint is closer to the float model: both read and scored by `quant eval` on the same
//! windows, so that differences are paired.
//!
//! The claim: pooled over the rows by tokens, our mean KL to float exceeds the peer's by no more
//! than 0.5 % of it or two standard errors of the paired difference, whichever is more; on the
//! models as they are, and on those with planted outliers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::peer::{Job, Outcome, Peer, tokens_sha256};
use crate::bench_rtn::quant_binary;
use crate::support::record::{Record, table, typed_command};
use crate::support::rows::{ROWS, Row};
use crate::support::shell::{output, remove_dir, shared_dir, target_dir};

const BITS: u32 = 4;
/// The share of the peer's divergence by which ours may exceed it.
const TOLERANCE: f64 = 0.005;
/// The standard errors of the difference that it may take in any case.
const ERRORS: f64 = 2.0;
/// On matrices this small PyTorch's threads wait for each other longer than they work.
const PEER_THREADS: usize = 1;

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Evaluation windows of a row
    #[arg(long, default_value_t = 40)]
    windows: usize,
    /// Calibration windows
    #[arg(long, default_value_t = 32)]
    samples: usize,
    /// Measure this program instead of building ours
    #[arg(long)]
    quant: Option<PathBuf>,
    /// Fail when the claim does not hold
    #[arg(long)]
    check: bool,
}

/// Each window's mean KL of a checkpoint to the float model.
struct Scores {
    windows: Vec<f64>,
    mean: f64,
    error: f64,
    perplexity: f64,
    /// Tokens scored in a window.
    tokens: f64,
    /// The digest of the scored tokens.
    sha256: String,
}

/// Both checkpoints of a row.
struct Pair {
    row: &'static Row,
    ours: Scores,
    theirs: Scores,
}

/// The difference of two divergences, pooled over rows.
#[derive(Debug, Clone, Copy)]
struct Pooled {
    ours: f64,
    theirs: f64,
    difference: f64,
    /// Its standard error.
    error: f64,
    tokens: f64,
}

/// Measures and writes the record.
pub fn run(args: &Args) -> Result<()> {
    ensure!(args.windows > 1, "--windows must be at least 2: one window says nothing of the spread");
    let data = shared_dir().context("the real models and texts are not there")?.join("data");
    let peer = Peer::install()?;
    let quant = quant_binary(args.quant.as_deref())?;
    let mut csv = vec!["outliers,model,evaluation,group,window,tokens,ours_kl,theirs_kl".to_owned()];
    let (mut body, mut versions, mut broken, mut all) = (String::new(), None, Vec::new(), Vec::new());
    for (title, kind, planted) in [("as they are", "none", false), ("with planted outliers", "planted", true)]
    {
        let (mut cells, mut pairs) = (Vec::new(), Vec::new());
        for row in &ROWS {
            let (pair, outcome) = measure(args, &peer, &quant, &data, row, planted)?;
            versions.get_or_insert(outcome.versions);
            let tokens = pair.ours.tokens;
            for (i, (ours, theirs)) in pair.ours.windows.iter().zip(&pair.theirs.windows).enumerate() {
                let (name, evaluation, group) = (row.name, row.evaluation, row.group);
                csv.push(format!("{kind},{name},{evaluation},{group},{i},{tokens},{ours},{theirs}"));
            }
            let line = describe(&pair);
            println!("{}", line.join("  "));
            cells.push(line);
            pairs.push(pair);
        }
        let header = [
            "model",
            "text",
            "group",
            "ours",
            "ours KL",
            "theirs",
            "their KL",
            "KL, ours − theirs",
            "ours / theirs",
        ];
        let verdict = pooled(&pairs.iter().collect::<Vec<_>>());
        println!("{verdict}\n");
        body += &format!("## Models {title}\n\n{}\n{verdict}\n\n", table(&header, &cells));
        if !verdict.holds() {
            broken.push(format!("models {title}: {verdict}"));
        }
        all.extend(pairs);
    }
    let both = format!("Both sets: {}", pooled(&all.iter().collect::<Vec<_>>()));
    println!("{both}");
    let record = Record {
        benchmark: "peers-awq-quality",
        title: "Our AWQ and llm-compressor's, to 4 bits".into(),
        command: typed_command(),
        body: format!(
            "Peer: {}; its default recipe (AWQModifier with duo scaling and 20 ratios, then \
             QuantizationModifier) in float32. Both: symmetric grids, the same {} calibration windows of 512 \
             tokens (256 on stories260k), the tokens' digests compared; embeddings and head float. Scored by \
             `quant eval` on the same {} windows: KL to float over the full vocabulary in nats a token, ± \
             its standard error over windows; perplexity beside it. Planted: 4 channels of every norm times \
             32, the columns that read them divided by 32.\n\nA pooled difference weighs rows by tokens. A \
             window of a text is one draw, however many rows it is scored in; spread is taken within a \
             model and text.\n\n{body}{both}\n",
            versions.unwrap_or_default(),
            args.samples,
            args.windows
        ),
        csv,
    };
    record.conclude(args.check, &broken)
}

/// Quantizes a row by both and scores what they wrote.
fn measure(
    args: &Args,
    peer: &Peer,
    quant: &Path,
    data: &Path,
    row: &'static Row,
    planted: bool,
) -> Result<(Pair, Outcome)> {
    let model = row.model(data, planted)?;
    let calibration = row.calibration(data);
    let scratch = target_dir().join("peers-awq");
    remove_dir(&scratch)?;
    std::fs::create_dir_all(&scratch)?;
    let (ours, theirs) = (scratch.join("ours"), scratch.join("theirs"));

    let mut command = row.quantize(quant, &model, BITS, &ours);
    command.args(["--method", "awq", "--calibration"]).arg(&calibration);
    command.args(["--samples", &args.samples.to_string(), "--seq-len", &row.window.to_string()]);
    output(&mut command)?;
    let outcome = peer.quantize(&Job {
        model: &model,
        out: &theirs,
        calibration: &calibration,
        samples: args.samples,
        seq_len: row.window,
        group: row.group,
        per_channel: row.per_channel().collect(),
        dtype: "float32",
        threads: PEER_THREADS,
        tokens_sha256: &tokens_sha256(&ours)?,
    })?;

    let text = data.join("text").join(row.evaluation);
    let score = |checkpoint: &Path| {
        let mut command = Command::new(quant);
        command.arg("eval").arg(checkpoint).arg("--reference").arg(&model).arg("--text").arg(&text);
        command.args(["--window", &row.window.to_string(), "--windows", &args.windows.to_string()]);
        command.args(["--quiet", "--json"]);
        Scores::from_json(&serde_json::from_str(&output(&mut command)?)?)
    };
    let pair = Pair { row, ours: score(&ours)?, theirs: score(&theirs)? };
    ensure!(pair.ours.sha256 == pair.theirs.sha256, "the two were scored on different tokens");
    Ok((pair, outcome))
}

impl Scores {
    fn from_json(result: &Value) -> Result<Self> {
        let number = |path: &str| {
            let value = result.pointer(path).and_then(Value::as_f64);
            value.with_context(|| format!("`quant eval --json` gives no {path}"))
        };
        let windows =
            result["comparison"]["window_kl"].as_array().context("`quant eval --json` gives no window_kl")?;
        let windows: Vec<f64> =
            windows.iter().map(|w| w.as_f64().context("not a number")).collect::<Result<_>>()?;
        let sha256 = result.pointer("/tokens_sha256").and_then(Value::as_str);
        Ok(Self {
            mean: number("/comparison/kl/mean")?,
            error: number("/comparison/kl/standard_error")?,
            perplexity: number("/perplexity/mean")?,
            tokens: number("/tokens_scored")? / windows.len() as f64,
            sha256: sha256.context("`quant eval --json` gives no digest of the tokens")?.to_owned(),
            windows,
        })
    }
}

/// The cells of a row of the table.
fn describe(pair: &Pair) -> Vec<String> {
    let paired = pooled(&[pair]);
    let mut cells = [pair.row.name, pair.row.evaluation, pair.row.group].map(str::to_owned).to_vec();
    for scores in [&pair.ours, &pair.theirs] {
        cells.push(format!("{:.3}", scores.perplexity));
        cells.push(format!("{:.5} ± {:.5}", scores.mean, scores.error));
    }
    cells.push(format!("{:+.5} ± {:.5}", paired.difference, paired.error));
    cells.push(format!("{:.3}", paired.ours / paired.theirs));
    cells
}

/// Pools rows by tokens. Rows of one model and text are scored on the same windows, so a window's
/// differences are added over these rows before the spread over windows is taken; models and texts
/// are strata, each with its own mean.
fn pooled(pairs: &[&Pair]) -> Pooled {
    let mut strata: BTreeMap<(&str, &str), Vec<(f64, f64)>> = BTreeMap::new();
    let (mut ours, mut theirs, mut tokens) = (0.0, 0.0, 0.0);
    for pair in pairs {
        let n = pair.ours.tokens;
        let windows = strata.entry((pair.row.name, pair.row.evaluation)).or_default();
        windows.resize(pair.ours.windows.len(), (0.0, 0.0));
        for ((o, t), window) in pair.ours.windows.iter().zip(&pair.theirs.windows).zip(windows) {
            ours += n * o;
            theirs += n * t;
            tokens += n;
            *window = (window.0 + n * (o - t), window.1 + n);
        }
    }
    let squares: f64 = strata
        .values()
        .map(|windows| {
            let count = windows.len() as f64;
            let mean = windows.iter().map(|w| w.0).sum::<f64>() / windows.iter().map(|w| w.1).sum::<f64>();
            let squares: f64 = windows.iter().map(|(total, n)| (total - mean * n).powi(2)).sum();
            count / (count - 1.0) * squares
        })
        .sum();
    let [ours, theirs] = [ours, theirs].map(|total| total / tokens);
    Pooled { ours, theirs, difference: ours - theirs, error: squares.sqrt() / tokens, tokens }
}

impl Pooled {
    /// By how much ours may be worse.
    fn limit(&self) -> f64 {
        (TOLERANCE * self.theirs).max(ERRORS * self.error)
    }

    fn holds(&self) -> bool {
        self.difference <= self.limit()
    }
}

impl std::fmt::Display for Pooled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { ours, theirs, difference, error, tokens } = self;
        write!(
            f,
            "pooled over {tokens:.0} tokens: mean KL {ours:.5} (ours), {theirs:.5} (theirs), difference \
             {difference:+.5} ± {error:.5} ({:+.1} %), at most {:+.5} allowed: the claim {}.",
            100.0 * difference / theirs,
            self.limit(),
            if self.holds() { "holds" } else { "does not hold" }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(row: &'static Row, ours: &[f64], theirs: &[f64]) -> Pair {
        let scores = |windows: &[f64]| Scores {
            windows: windows.to_vec(),
            mean: 0.0,
            error: 0.0,
            perplexity: 1.0,
            tokens: 10.0,
            sha256: String::new(),
        };
        Pair { row, ours: scores(ours), theirs: scores(theirs) }
    }

    #[test]
    fn the_error_of_one_row_is_the_textbook_one() {
        let p = pooled(&[&pair(&ROWS[0], &[1.1, 2.3, 3.2], &[1.0, 2.0, 3.0])]);
        // Differences 0.1, 0.3, 0.2: mean 0.2, standard deviation 0.1.
        assert!((p.difference - 0.2).abs() < 1e-12 && (p.theirs - 2.0).abs() < 1e-12, "{p:?}");
        assert!((p.error - 0.1 / 3f64.sqrt()).abs() < 1e-12, "{p:?}");
    }

    #[test]
    fn scoring_the_same_windows_again_adds_no_knowledge() {
        let windows = ([1.1, 2.3, 3.2], [1.0, 2.0, 3.0]);
        let (a, b) = (pair(&ROWS[0], &windows.0, &windows.1), pair(&ROWS[1], &windows.0, &windows.1));
        assert_eq!((a.row.name, a.row.evaluation), (b.row.name, b.row.evaluation));
        assert!((pooled(&[&a, &b]).error - pooled(&[&a]).error).abs() < 1e-12);
        // Windows of another text are other draws.
        let other = pair(&ROWS[3], &windows.0, &windows.1);
        assert!((pooled(&[&a, &other]).error - pooled(&[&a]).error / 2f64.sqrt()).abs() < 1e-12);
    }

    #[test]
    fn the_claim_can_fail() {
        let theirs = [1.0, 2.0, 3.0];
        let shifted = |by: f64| pooled(&[&pair(&ROWS[0], &theirs.map(|t| t + by), &theirs)]);
        assert!(shifted(-1.0).holds() && shifted(0.0).holds() && shifted(0.009).holds());
        assert!(!shifted(0.011).holds(), "0.5 % of 2.0 is the limit where the difference has no spread");
        let noisy = |by: f64| pooled(&[&pair(&ROWS[0], &[1.0 + by, 2.2 + by, 2.8 + by], &theirs)]);
        assert!(noisy(0.2).holds() && !noisy(0.25).holds(), "{:?}", noisy(0.2));
    }
}
