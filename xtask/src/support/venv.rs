//! Virtual environments of peers that are Python packages.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use super::shell::{self, root, target_dir};

/// The interpreter of an environment with the peers of the kernels, which is made unless it is there.
///
/// # Errors
/// When it cannot be made.
pub fn kernels_python() -> Result<PathBuf> {
    python("benchmarks/peers/setup_venv.sh", "peers-kernels-venv", &["kernels"])
}

/// The same with llm-compressor.
///
/// # Errors
/// When it cannot be made.
pub fn llm_compressor_python() -> Result<PathBuf> {
    python("benchmarks/peers/setup_venv.sh", "peers-venv", &[])
}

/// The same with Model Optimizer.
///
/// # Errors
/// When it cannot be made.
pub fn modelopt_python() -> Result<PathBuf> {
    python("benchmarks/peers/setup_venv.sh", "peers-modelopt-venv", &["modelopt"])
}

/// The same with what the interop check reads checkpoints by, gptqmodel among it.
///
/// # Errors
/// When it cannot be made.
pub fn interop_python() -> Result<PathBuf> {
    python("tests/interop/setup_venv.sh", "interop-venv", &[])
}

fn python(script: &str, directory: &str, peers: &[&str]) -> Result<PathBuf> {
    let directory = target_dir().join(directory);
    shell::run(Command::new("bash").arg(root().join(script)).arg(&directory).args(peers))?;
    // Not resolved: the link is what makes it the environment's own.
    Ok(std::path::absolute(directory.join("bin/python"))?)
}
