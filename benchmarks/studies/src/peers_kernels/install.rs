//! Builds or installs the peers on this machine from the package registries.

use std::path::Path;

use anyhow::{Result, bail};
use xtask::support::shell::{self, cargo, root, target_dir};

use super::worker::Program;
use crate::support::llama_cpp::LlamaCpp;

/// quant's worker first, built unless it is given, then these peers.
pub fn programs(peers: &[String], ours: Option<&Path>) -> Result<Vec<Program>> {
    let ours = match ours {
        Some(path) => std::path::absolute(path)?,
        None => {
            shell::run(&mut cargo(&["build", "--release", "--locked", "-p", "kernels-worker"]))?;
            target_dir().join("release/kernels-worker")
        }
    };
    let mut programs = vec![program(&[&ours.display(), &"ours"])];
    for peer in peers {
        programs.push(match peer.as_str() {
            "candle" => candle()?,
            "ggml" => ggml()?,
            "onnxruntime" | "openvino" | "torch" => python(peer)?,
            _ => bail!("unknown peer `{peer}`: use ggml, candle, onnxruntime, openvino or torch"),
        });
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
    Program { command: words.iter().map(ToString::to_string).collect() }
}

/// Builds candle's worker for exactly this processor, because some of candle's kernels exist only in such builds.
fn candle() -> Result<Program> {
    let target = target_dir().join("peers-native");
    let mut command = cargo(&["build", "--release", "--locked", "-p", "kernels-worker"]);
    shell::run(command.env("CARGO_TARGET_DIR", &target).env("RUSTFLAGS", "-C target-cpu=native"))?;
    Ok(program(&[&target.join("release/kernels-worker").display(), &"candle"]))
}

/// Compiles the worker for ggml's published libraries, which contain code for several processors and select at run
/// time.
fn ggml() -> Result<Program> {
    compiled("benchmarks/peers/kernels_ggml.cpp")
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
