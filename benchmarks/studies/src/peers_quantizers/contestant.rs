//! The programs that write checkpoints: `quant`, or a peer run by its script in `benchmarks/peers/`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;
use xtask::support::shell::{output, root};

use crate::support::rows::Row;
use crate::support::venv;

const SCRIPTS: &str = "benchmarks/peers";

/// A participant in a comparison.
#[derive(Debug)]
pub struct Contestant {
    /// Name in tables.
    pub name: &'static str,
    pub maker: Maker,
}

impl Contestant {
    /// Whether the contestant can quantize a row. gptqmodel's group-aware order rejects models with ungrouped linears
    /// (`act_group_aware=True requires group_size > 0`), even if only some are ungrouped.
    pub fn takes(&self, row: &Row) -> bool {
        let groupless = row.group == "channel" || row.per_channel().next().is_some();
        !(groupless && matches!(self.maker, Maker::Peer { package: Package::GptqModel, .. }))
    }
}

/// The quantizer and its settings.
#[derive(Debug)]
pub enum Maker {
    Ours {
        /// Options of `quant quantize`.
        options: &'static [&'static str],
        /// Whether the method takes a calibration text.
        calibrated: bool,
    },
    Peer {
        package: Package,
        /// Name in the script.
        method: &'static str,
        /// `OPTION=VALUE` for settings that differ from the peer's defaults.
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

/// An environment with a package installed.
pub struct Peer {
    python: PathBuf,
    script: PathBuf,
}

/// A quantization to run, with symmetric grids.
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
    /// Tokens per window.
    pub seq_len: usize,
    /// Seed for selecting windows.
    pub seed: u64,
    /// Bits per weight.
    pub bits: u32,
    /// The group size, or `channel`.
    pub group: &'a str,
    /// Name suffixes of linears that are quantized per channel because the group size does not fit.
    pub per_channel: &'a [&'a str],
    /// The element type in which the quantizer computes, by its PyTorch name.
    pub dtype: &'a str,
    /// Threads.
    pub threads: usize,
    /// The digest of the calibration tokens of quant's checkpoint.
    pub tokens_sha256: &'a str,
}

/// Time and memory of a peer's run.
pub struct Outcome {
    /// Seconds to load the model.
    pub load: f64,
    /// Seconds of the quantizing call, in memory.
    pub quantize: f64,
    /// Seconds to compress and write.
    pub save: f64,
    /// Peak memory right after the imports.
    pub imported_bytes: u64,
    /// Peak memory.
    pub peak_bytes: u64,
    /// Names and versions of the relevant packages.
    pub versions: String,
}

impl Peer {
    /// Creates the environment if it is missing.
    pub fn install(package: Package) -> Result<Self> {
        let (python, script) = match package {
            Package::LlmCompressor => (venv::llm_compressor_python()?, "llm_compressor.py"),
            Package::GptqModel => (venv::interop_python()?, "gptqmodel_gptq.py"),
            Package::ModelOpt => (venv::modelopt_python()?, "model_optimizer.py"),
        };
        Ok(Self { python, script: root().join(SCRIPTS).join(script) })
    }

    /// Runs the peer's script on a job.
    pub fn quantize(&self, method: &str, settings: &[&str], job: &Job) -> Result<Outcome> {
        let scratch = tempfile::tempdir()?;
        let file = scratch.path().join("result.json");
        let mut command = Command::new(&self.python);
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
    Ok(digest.context("the report contains no digest of the calibration tokens")?.to_owned())
}
