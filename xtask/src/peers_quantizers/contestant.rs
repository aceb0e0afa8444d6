//! Who makes a checkpoint: `quant`, or a peer by its script in `benchmarks/peers/`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::support::rows::Row;
use crate::support::shell::{output, root};
use crate::support::venv;

const SCRIPTS: &str = "benchmarks/peers";

/// One of those that are compared.
#[derive(Debug)]
pub struct Contestant {
    /// As tables call it.
    pub name: &'static str,
    pub maker: Maker,
}

impl Contestant {
    /// Whether it can quantize a row. gptqmodel's order by groups refuses rows without groups
    /// (`act_group_aware=True requires group_size > 0`), also where they are an exception.
    pub fn takes(&self, row: &Row) -> bool {
        let groupless = row.group == "channel" || row.per_channel().next().is_some();
        !(groupless && matches!(self.maker, Maker::Peer { package: Package::GptqModel, .. }))
    }
}

/// Who quantizes, and how.
#[derive(Debug)]
pub enum Maker {
    Ours {
        /// Of `quant quantize`.
        options: &'static [&'static str],
        /// Whether it takes a calibration text.
        calibrated: bool,
    },
    Peer {
        package: Package,
        /// As the script calls it.
        method: &'static str,
        /// `OPTION=VALUE` of what it does not leave at its default.
        settings: &'static [&'static str],
    },
}

/// A published quantizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Package {
    LlmCompressor,
    GptqModel,
    ModelOpt,
}

/// An environment that holds a package.
pub struct Peer {
    python: PathBuf,
    script: PathBuf,
}

/// What is to be quantized, to symmetric grids.
#[derive(Clone, Copy)]
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
    /// Seed of the windows' selection.
    pub seed: u64,
    /// Bits of a weight.
    pub bits: u32,
    /// The group size, or `channel`.
    pub group: &'a str,
    /// The ends of the names of linears that are quantized per channel nonetheless.
    pub per_channel: &'a [&'a str],
    /// The element type in which it computes, as PyTorch calls it.
    pub dtype: &'a str,
    /// Threads.
    pub threads: usize,
    /// The digest of the calibration tokens that ours was made from.
    pub tokens_sha256: &'a str,
}

/// What a run of a peer took.
pub struct Outcome {
    /// Seconds of reading the model.
    pub load: f64,
    /// Seconds of the call that quantizes, in memory.
    pub quantize: f64,
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
    pub fn install(package: Package) -> Result<Self> {
        let (python, script) = match package {
            Package::LlmCompressor => (venv::llm_compressor_python()?, "llm_compressor.py"),
            Package::GptqModel => (venv::interop_python()?, "gptqmodel_gptq.py"),
            Package::ModelOpt => (venv::modelopt_python()?, "model_optimizer.py"),
        };
        Ok(Self { python, script: root().join(SCRIPTS).join(script) })
    }

    /// Quantizes.
    pub fn quantize(&self, method: &str, settings: &[&str], job: &Job) -> Result<Outcome> {
        let scratch = tempfile::tempdir()?;
        let file = scratch.path().join("result.json");
        let mut command = Command::new(&self.python);
        // Some leave logs where they are started.
        command.current_dir(scratch.path());
        command.arg(&self.script).arg(job.model).arg(job.out).args(["--method", method]);
        command.arg("--calibration").arg(job.calibration);
        command.args(["--samples", &job.samples.to_string(), "--seq-len", &job.seq_len.to_string()]);
        command.args(["--seed", &job.seed.to_string()]);
        command.args(["--bits", &job.bits.to_string(), "--group-size", job.group, "--dtype", job.dtype]);
        command.args(job.per_channel.iter().flat_map(|name| ["--channel", name]));
        command.args(settings.iter().flat_map(|setting| ["--set", setting]));
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
            quantize: seconds("quantize_seconds")?,
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
