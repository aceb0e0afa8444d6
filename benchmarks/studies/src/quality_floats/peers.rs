//! `cargo study peers-floats`: compares quant's floating-point formats with the same formats as written by the tools of
//! their publishers: llm-compressor and, if a CPU suffices, NVIDIA's Model Optimizer.
//!
//! Peers get quant's calibration tokens. Each runs its own default recipe, and llm-compressor also its search for NVFP4
//! scales. quant may lose more than the best of these by at most 0.5 % of that one's divergence, or by two standard
//! errors of the paired difference, whichever is larger.

use std::path::Path;

use anyhow::{Context, Result};
use xtask::bench_rtn::quant_binary;
use xtask::support::record::{Record, table, typed_command};
use xtask::support::shell::{output, remove_dir, shared_dir, target_dir};

use super::{divergence, mean};
use crate::peers_quantizers::contestant::{Job, Package, Peer, tokens_sha256};
use crate::quality::Args;
use crate::support::rows::{Row, quantize, texts};

/// The models to compare on.
const MODELS: [&str; 2] = ["books-7m", "tinystories-656k"];
/// Maximum excess of quant, as a share of the peer's divergence.
const TOLERANCE: f64 = 0.005;
/// Maximum excess of quant, in standard errors of the difference.
const ERRORS: f64 = 2.0;
const THREADS: usize = 2;

struct Contest {
    name: &'static str,
    scheme: &'static str,
    method: &'static str,
    /// Names, packages, methods and settings.
    peers: &'static [(&'static str, Package, &'static str, &'static [&'static str])],
}

const COMPRESSOR: Package = Package::LlmCompressor;

const CONTESTS: [Contest; 5] = [
    Contest {
        name: "FP8, channel, rounded",
        scheme: "wf8a16-channel",
        method: "rtn",
        peers: &[("llm-compressor", COMPRESSOR, "rtn", &["scheme=FP8_DYNAMIC"])],
    },
    Contest {
        name: "MXFP4, rounded",
        scheme: "wf4a16-g32-mx",
        method: "rtn",
        peers: &[("llm-compressor", COMPRESSOR, "rtn", &["scheme=MXFP4A16"])],
    },
    Contest {
        name: "NVFP4, rounded",
        scheme: "wf4a16-g16-nv",
        method: "rtn",
        peers: &[
            ("llm-compressor", COMPRESSOR, "rtn", &["scheme=NVFP4A16"]),
            (
                "llm-compressor, `nvfp4_expanded_mse`",
                COMPRESSOR,
                "rtn",
                &["scheme=NVFP4A16", "observer=nvfp4_expanded_mse"],
            ),
            ("Model Optimizer", Package::ModelOpt, "max", &[]),
        ],
    },
    Contest {
        name: "NVFP4, GPTQ",
        scheme: "wf4a16-g16-nv",
        method: "gptq",
        peers: &[
            ("llm-compressor", COMPRESSOR, "gptq", &["scheme=NVFP4A16"]),
            (
                "llm-compressor, `nvfp4_expanded_mse`",
                COMPRESSOR,
                "gptq",
                &["scheme=NVFP4A16", "observer=nvfp4_expanded_mse"],
            ),
        ],
    },
    Contest {
        name: "NVFP4, AWQ",
        scheme: "wf4a16-g16-nv",
        method: "awq",
        peers: &[("llm-compressor", COMPRESSOR, "awq", &["scheme=NVFP4A16"])],
    },
];

struct Found {
    /// The results as Markdown.
    body: String,
    csv: Vec<String>,
    /// Claims that do not hold.
    broken: Vec<String>,
}

/// Compares and writes the record.
///
/// # Errors
/// When a peer cannot be installed, a run fails, or `--check` is given and a claim does not hold.
pub fn run(args: &Args) -> Result<()> {
    let data = shared_dir().context("the real models and texts are not available")?.join("data");
    let quant = quant_binary(args.quant.as_deref())?;
    let out = target_dir().join("peers-floats");
    let mut csv = vec!["model,text,format,who,kl,kl_se".to_owned()];
    let (mut body, mut broken, mut versions) = (String::new(), Vec::new(), Vec::new());
    for name in MODELS {
        let row = texts().into_iter().find(|row| row.name == name).context("a model has no text")?;
        let found = compare(args, &quant, &data, row, &out, &mut versions)?;
        body += &format!("## {name}, {}\n\n{}\n", row.evaluation, found.body);
        csv.extend(found.csv);
        broken.extend(found.broken);
    }
    let record = Record {
        benchmark: "peers-floats",
        title: "Floating-point weights: ours and others'".into(),
        command: typed_command(),
        body: format!(
            "Only weights are quantized; activations, embeddings and head stay float. {} calibration windows, with \
             the same tokens for all; {} evaluation windows of 512 tokens. The others run with their default methods \
             and observers except where one is named, in float32. KL to float over the full vocabulary in nats per \
             token, ± its standard error over windows; differences \
             are paired by window. Less: by more than two standard errors. No worse: more by at most 0.5 % of the \
             other's divergence, or by two standard errors. Of Model Optimizer, only what runs on a CPU: its scale \
             searches need triton, and therefore a GPU. {}.\n\n{body}",
            args.samples,
            args.windows,
            versions.join("; ")
        ),
        csv,
    };
    record.conclude(args.check, &broken)
}

/// Compares on the evaluation text of a row.
fn compare(
    args: &Args,
    quant: &Path,
    data: &Path,
    row: &Row,
    out: &Path,
    versions: &mut Vec<String>,
) -> Result<Found> {
    let (model, calibration) = (row.model(data, false)?, row.calibration(data));
    let text = data.join("text").join(row.evaluation);
    let score = || divergence(quant, &model, out, &text, [row.window, args.windows]);
    let mut found = Found { body: String::new(), csv: Vec::new(), broken: Vec::new() };
    let note = |contest: &str, who: &str, windows: &[f64]| {
        let [kl, error] = mean(windows);
        println!("{}  {}  {contest}  {who}  {kl:.6} ± {error:.6}", row.name, row.evaluation);
        let who = who.replace(", ", " ").replace('`', "");
        format!("{},{},{},{who},{kl},{error}", row.name, row.evaluation, contest.replace(", ", " "))
    };
    // Peers get the tokens of quant's first calibrated checkpoint.
    let samples = [args.samples, row.window, 0].map(|n| n.to_string());
    let calibrated = |method: &str, scheme: &str| {
        let mut command = quantize(quant, &model, out);
        command.args(["--scheme", scheme, "--method", method]);
        if method != "rtn" {
            command.arg("--calibration").arg(&calibration);
            command.args(["--samples", &samples[0], "--seq-len", &samples[1], "--seed", &samples[2]]);
        }
        remove_dir(out)?;
        output(&mut command)
    };
    calibrated("awq", "wf4a16-g16-nv")?;
    let tokens = tokens_sha256(out)?;
    let mut rows = Vec::new();
    for contest in &CONTESTS {
        calibrated(contest.method, contest.scheme)?;
        let ours = score()?;
        found.csv.push(note(contest.name, "ours", &ours));
        let mut best: Option<(&str, Vec<f64>)> = None;
        for (who, package, method, settings) in contest.peers {
            remove_dir(out)?;
            let job = Job {
                model: &model,
                out,
                calibration: &calibration,
                samples: args.samples,
                seq_len: row.window,
                seed: 0,
                bits: 4,
                group: "channel",
                per_channel: &[],
                dtype: "float32",
                threads: THREADS,
                tokens_sha256: &tokens,
            };
            let outcome = Peer::install(*package)?.quantize(method, settings, &job)?;
            if !versions.contains(&outcome.versions) {
                versions.push(outcome.versions);
            }
            let theirs = score()?;
            found.csv.push(note(contest.name, who, &theirs));
            let cells = [contest.name.to_owned(), (*who).to_owned()].into_iter();
            rows.push(cells.chain(figures(&ours, &theirs)).collect());
            if best.as_ref().is_none_or(|(_, best)| mean(&theirs)[0] < mean(best)[0]) {
                best = Some((who, theirs));
            }
        }
        if let Some((who, theirs)) = best
            && !is_no_worse(&ours, &theirs)
        {
            found
                .broken
                .push(format!("{}, {}: {} costs more than {who}'s", row.name, row.evaluation, contest.name));
        }
    }
    remove_dir(out)?;
    found.body = table(&["format", "peer", "KL, ours", "KL, peer's", "difference", ""], &rows);
    Ok(found)
}

fn difference(ours: &[f64], theirs: &[f64]) -> [f64; 2] {
    mean(&ours.iter().zip(theirs).map(|(a, b)| a - b).collect::<Vec<_>>())
}

fn is_no_worse(ours: &[f64], theirs: &[f64]) -> bool {
    let [difference, error] = difference(ours, theirs);
    difference <= (TOLERANCE * mean(theirs)[0]).max(ERRORS * error)
}

fn figures(ours: &[f64], theirs: &[f64]) -> [String; 4] {
    let figure = |[value, error]: [f64; 2]| format!("{value:.5} ± {error:.5}");
    let [value, error] = difference(ours, theirs);
    let verdict = match value {
        v if v < -ERRORS * error => "less",
        _ if is_no_worse(ours, theirs) => "no worse",
        _ => "worse",
    };
    let shown = format!("{value:+.6} ± {error:.6}");
    [figure(mean(ours)), figure(mean(theirs)), shown, verdict.to_owned()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_compared() {
        let theirs = [1.0, 2.0, 3.0];
        let by = |off: f64| theirs.map(|v| v + off);
        assert!(is_no_worse(&by(-0.1), &theirs) && is_no_worse(&by(0.009), &theirs));
        assert!(!is_no_worse(&by(0.011), &theirs));
        let noisy = |off: f64| [1.0 + off, 2.2 + off, 2.8 + off];
        assert!(is_no_worse(&noisy(0.2), &theirs) && !is_no_worse(&noisy(0.25), &theirs));
        assert_eq!(figures(&by(-0.1), &theirs)[3], "less");
        assert_eq!(figures(&by(0.0), &theirs)[3], "no worse");
        assert_eq!(figures(&by(0.1), &theirs)[3], "worse");
    }
}
