//! Virtual environments of peers that are Python packages: `benchmarks/peers/setup_venv.sh`.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use super::shell::{self, root, target_dir};

/// The interpreter of an environment with the peers of the kernels, which is made unless it is there.
///
/// # Errors
/// When it cannot be made.
pub fn kernels_python() -> Result<PathBuf> {
    let directory = target_dir().join("peers-kernels-venv");
    let script = root().join("benchmarks/peers/setup_venv.sh");
    shell::run(Command::new("bash").arg(script).arg(&directory).arg("kernels"))?;
    // Not resolved: the link is what makes it the environment's own.
    Ok(std::path::absolute(directory.join("bin/python"))?)
}
