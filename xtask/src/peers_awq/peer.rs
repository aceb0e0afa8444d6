//! llm-compressor, run by `benchmarks/peers/llm_compressor_awq.py`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::support::shell::{self, output, root, target_dir};

const SCRIPTS: &str = "benchmarks/peers";

/// An environment that holds the peer.
pub struct Peer {
    python: PathBuf,
}

/// What the peer is to quantize, to 4 bits and symmetric.
pub struct Job<'a> {
    /// The float model.
    pub model: &'a Path,
    /// The directory to create.
    pub out: &'a Path,
    /// The calibration text.
    pub calibration: &'a Path,
    /// Calibration windows.
    pub samples: usize,
    /// Tokens of a window.
    pub seq_len: usize,
    /// The group size, or `channel`.
    pub group: &'a str,
    /// The ends of the names of linears that are quantized per channel nonetheless.
    pub per_channel: Vec<&'a str>,
    /// The element type in which it computes, as PyTorch calls it.
    pub dtype: &'a str,
    /// Threads.
    pub threads: usize,
    /// The digest of the calibration tokens that ours was made from.
    pub tokens_sha256: &'a str,
}

/// What a run of the peer took.
pub struct Outcome {
    /// Seconds of reading the model.
    pub load: f64,
    /// Seconds of the call that quantizes, in memory.
    pub oneshot: f64,
    /// Seconds of compressing and writing.
    pub save: f64,
    /// Peak memory after the imports alone.
    pub imported_bytes: u64,
    /// Peak memory.
    pub peak_bytes: u64,
    /// Name and version of the packages that matter.
    pub versions: String,
}

impl Peer {
    /// Makes the environment unless it is there.
    pub fn install() -> Result<Self> {
        let directory = target_dir().join("peers-venv");
        let script = root().join(SCRIPTS).join("setup_venv.sh");
        shell::run(Command::new("bash").arg(script).arg(&directory))?;
        Ok(Self { python: directory.join("bin/python") })
    }

    /// Quantizes.
    pub fn quantize(&self, job: &Job) -> Result<Outcome> {
        let scratch = tempfile::tempdir()?;
        let file = scratch.path().join("result.json");
        let mut command = Command::new(&self.python);
        command.arg(root().join(SCRIPTS).join("llm_compressor_awq.py"));
        command.arg(job.model).arg(job.out).arg("--calibration").arg(job.calibration);
        command.args(["--samples", &job.samples.to_string(), "--seq-len", &job.seq_len.to_string()]);
        command.args(["--group-size", job.group, "--dtype", job.dtype]);
        command.args(job.per_channel.iter().flat_map(|name| ["--channel", name]));
        command.args(["--threads", &job.threads.to_string(), "--tokens-sha256", job.tokens_sha256]);
        command.arg("--result").arg(&file);
        output(&mut command)?;
        let result: Value = serde_json::from_slice(&std::fs::read(&file)?)?;
        let seconds = |name: &str| result[name].as_f64().with_context(|| format!("no {name}"));
        let bytes = |name: &str| result[name].as_u64().with_context(|| format!("no {name}"));
        let versions = result["versions"].as_object().context("no versions")?.iter();
        let versions: Vec<String> =
            versions.map(|(name, v)| format!("{name} {}", v.as_str().unwrap_or("?"))).collect();
        Ok(Outcome {
            load: seconds("load_seconds")?,
            oneshot: seconds("oneshot_seconds")?,
            save: seconds("save_seconds")?,
            imported_bytes: bytes("imported_bytes")?,
            peak_bytes: bytes("peak_bytes")?,
            versions: versions.join(", "),
        })
    }
}

/// The digest of the calibration tokens of a checkpoint that `quant` wrote.
pub fn tokens_sha256(out: &Path) -> Result<String> {
    let report: Value = serde_json::from_slice(&std::fs::read(out.join("quant_report.json"))?)?;
    let digest = report.pointer("/calibration/tokens_sha256").and_then(Value::as_str);
    Ok(digest.context("the report holds no digest of the calibration tokens")?.to_owned())
}
