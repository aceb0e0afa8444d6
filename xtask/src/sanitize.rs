//! `cargo xtask sanitize`: the tests of all code that is unsafe, and the fuzz targets' own, under AddressSanitizer.
//!
//! The compiler's flag is one of nightly's, but the runtime comes with the stable toolchain; standard library and
//! dependencies' build scripts stay as they are. Tests that plant a fault for every instruction set, on the
//! heap and past its end, fail where the sanitizer does not tell of it. The C examples are linked with the same runtime.

use std::process::Command;

use anyhow::{Context, Result};

use crate::ci::judge_skips;
use crate::support::shell::{cargo, output, run as execute, shared_dir, target_dir};

/// Runs them.
///
/// # Errors
/// When a test fails, or was skipped without a reason.
pub fn run() -> Result<()> {
    let libraries = output(Command::new("rustc").args(["--print", "target-libdir"]))?;
    let has_runtime = std::fs::read_dir(&libraries)
        .with_context(|| format!("cannot list {libraries}"))?
        .filter_map(Result::ok)
        .any(|file| file.file_name().to_string_lossy().contains("_rt.asan"));
    if !has_runtime {
        return judge_skips("SKIPPED: the toolchain has no AddressSanitizer\n", shared_dir());
    }
    let host = output(Command::new("rustc").args(["--print", "host-tuple"]))?;
    // Optimized for speed the kernels take minutes to compile with what is added to them.
    let quick = "profile.dev.package.quant-kernels-cpu.opt-level=1";
    let mut command = cargo(&["test", "--locked", "--target", &host, "--config", quick, "--lib", "--tests"]);
    for package in ["quant-kernels-cpu", "quant-kernels-c", "quant-fuzz"] {
        command.args(["--package", package]);
    }
    command.args(["--features", "quant-kernels-cpu/rayon"]);
    command.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address");
    command.env("CARGO_TARGET_DIR", target_dir().join("sanitize")).env("QUANT_SANITIZER", "address");
    execute(&mut command)
}
