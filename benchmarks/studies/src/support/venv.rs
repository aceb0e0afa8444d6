//! Virtual environments for peers that are Python packages.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;
use xtask::support::shell::{self, root, target_dir};

/// The interpreter of the environment with the kernel peers, which is created if it is missing.
///
/// # Errors
/// When the environment cannot be created.
pub fn kernels_python() -> Result<PathBuf> {
    python("benchmarks/peers/setup_venv.sh", "peers-kernels-venv", &["kernels"])
}

/// The interpreter of the environment with llm-compressor, which is created if it is missing.
///
/// # Errors
/// When the environment cannot be created.
pub fn llm_compressor_python() -> Result<PathBuf> {
    python("benchmarks/peers/setup_venv.sh", "peers-venv", &[])
}

/// The interpreter of the environment with Model Optimizer, which is created if it is missing.
///
/// # Errors
/// When the environment cannot be created.
pub fn modelopt_python() -> Result<PathBuf> {
    python("benchmarks/peers/setup_venv.sh", "peers-modelopt-venv", &["modelopt"])
}

/// The interpreter of the environment of the interop check, whose implementations include gptqmodel. The environment is
/// created if it is missing.
///
/// # Errors
/// When the environment cannot be created.
pub fn interop_python() -> Result<PathBuf> {
    python("tests/interop/setup_venv.sh", "interop-venv", &[])
}

/// The interpreter of the environment with vLLM's CPU build, which is created if it is missing.
///
/// # Errors
/// When the environment cannot be created, for example because there is no wheel for this machine.
pub fn vllm_python() -> Result<PathBuf> {
    python("tests/interop/setup_vllm.sh", "interop-vllm", &[])
}

fn python(script: &str, directory: &str, peers: &[&str]) -> Result<PathBuf> {
    let directory = target_dir().join(directory);
    shell::run(Command::new("bash").arg(root().join(script)).arg(&directory).args(peers))?;
    // The path of the link selects the environment, so symbolic links are not resolved.
    Ok(std::path::absolute(directory.join("bin/python"))?)
}
