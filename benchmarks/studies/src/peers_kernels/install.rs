//! Builds or installs the peers on this machine from the package registries.

use std::path::Path;

use anyhow::{Result, bail};
use xtask::support::shell::{self, cargo, root, target_dir};

use super::worker::Program;
use crate::support::llama_cpp::LlamaCpp;

/// The instructions that all contestants may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Level {
    /// AVX2 and FMA
    Avx2,
}

impl Level {
    /// Peers that cannot be limited, and why.
    pub const UNLIMITED: [(&str, &str); 1] =
        [("onnxruntime", "it selects its kernels by CPUID, and no setting limits them")];

    /// What limits quant and the libraries that choose their kernels at run time: PyTorch, oneDNN (also the copy in
    /// OpenVINO) and MKL.
    const AVX2: &[(&str, &str)] = &[
        ("QUANT_ISA", "avx2"),
        ("ATEN_CPU_CAPABILITY", "avx2"),
        ("ONEDNN_MAX_CPU_ISA", "AVX2"),
        ("DNNL_MAX_CPU_ISA", "AVX2"),
        ("MKL_ENABLE_INSTRUCTIONS", "AVX2"),
        ("FBGEMM_ENABLE_INSTRUCTIONS", "AVX2"),
    ];
}

/// quant's worker first, built unless it is given, then these peers. With a level, peers that cannot be limited are
/// left out.
pub fn programs(peers: &[String], ours: Option<&Path>, level: Option<Level>) -> Result<Vec<Program>> {
    let ours = match ours {
        Some(path) => std::path::absolute(path)?,
        None => {
            shell::run(&mut cargo(&["build", "--release", "--locked", "-p", "kernels-worker"]))?;
            target_dir().join("release/kernels-worker")
        }
    };
    let mut programs = vec![program(&[&ours.display(), &"ours"])];
    let is_unlimited = |peer: &str| Level::UNLIMITED.iter().any(|(name, _)| *name == peer);
    for peer in peers.iter().filter(|peer| level.is_none() || !is_unlimited(peer)) {
        programs.push(match peer.as_str() {
            "candle" => candle(level)?,
            "ggml" => ggml(level)?,
            "onnxruntime" | "openvino" | "torch" => python(peer)?,
            _ => bail!("unknown peer `{peer}`: use ggml, candle, onnxruntime, openvino or torch"),
        });
    }
    if level.is_some() {
        programs.iter_mut().for_each(|program| program.variables = Level::AVX2);
    }
    Ok(programs)
}

/// The workers for the experts of a layer, quant's first.
pub fn experts() -> Result<Vec<Program>> {
    shell::run(&mut cargo(&["build", "--release", "--locked", "-p", "kernels-worker"]))?;
    let ours = program(&[&target_dir().join("release/kernels-worker").display(), &"experts"]);
    Ok(vec![ours, compiled("benchmarks/peers/experts_ggml.cpp")?])
}

fn program(words: &[&dyn std::fmt::Display]) -> Program {
    Program { command: words.iter().map(ToString::to_string).collect(), variables: &[] }
}

/// Builds candle's worker for exactly this processor or level, because some of candle's kernels exist only in such
/// builds.
fn candle(level: Option<Level>) -> Result<Program> {
    let (folder, processor) = match level {
        None => ("peers-native", "native"),
        Some(Level::Avx2) => ("peers-avx2", "haswell"),
    };
    let target = target_dir().join(folder);
    let mut command = cargo(&["build", "--release", "--locked", "-p", "kernels-worker"]);
    let flags = format!("-C target-cpu={processor}");
    shell::run(command.env("CARGO_TARGET_DIR", &target).env("RUSTFLAGS", flags))?;
    Ok(program(&[&target.join("release/kernels-worker").display(), &"candle"]))
}

/// Compiles the worker for ggml's published libraries. There is one for each set of processor features, of which the
/// best is loaded unless there is a level.
fn ggml(level: Option<Level>) -> Result<Program> {
    let mut program = compiled("benchmarks/peers/kernels_ggml.cpp")?;
    if let (Some(Level::Avx2), Some(libraries)) = (level, program.command.last_mut()) {
        // Haswell has AVX2, FMA, F16C and BMI2.
        *libraries = format!("{libraries}/libggml-cpu-haswell.so");
    }
    Ok(program)
}

fn compiled(source: &str) -> Result<Program> {
    let llama_cpp = LlamaCpp::install()?;
    let worker = llama_cpp.compile(Path::new(source))?;
    Ok(program(&[&worker.display(), &llama_cpp.libraries().display()]))
}

fn python(peer: &str) -> Result<Program> {
    let python = crate::support::venv::kernels_python()?;
    let script = root().join("benchmarks/peers/kernels_python.py");
    Ok(program(&[&python.display(), &script.display(), &peer]))
}
