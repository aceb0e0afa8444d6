//! `cargo xtask sanitize`: runs the integration tests of the CPU kernels and their C interface, which are unsafe code,
//! under AddressSanitizer and with assertions; the nightly run also includes their unit tests and the tests of the fuzz
//! targets.
//!
//! The compiler flag requires a nightly feature, but the sanitizer's runtime comes with the stable toolchain. For every
//! instruction set, tests plant accesses beyond heap buffers and to freed memory, and fail if the sanitizer does not
//! report them.

use std::process::Command;

use anyhow::{Context, Result};

use crate::ci::judge_skips;
use crate::cuda::test_names;
use crate::support::shell::{cargo, output, root, run as execute, shared_dir, target_dir};

/// The packages with unsafe code for the CPU.
const UNSAFE: [&str; 2] = ["quant-kernels-cpu", "quant-kernels-c"];
/// Tests of these packages that need a feature.
const FEATURE_TESTS: [&str; 2] = ["candle", "cuda_interface"];
/// The package whose tests pass hostile files to safe code, and so to its dependencies.
const FUZZ: &str = "quant-fuzz";

/// The parts that [`some`] runs by turns.
const PARTS: usize = 3;

/// Runs the integration tests of unsafe code for the CPU.
///
/// # Errors
/// When a test fails, or when the toolchain has no AddressSanitizer although the shared models and texts are available.
pub fn run() -> Result<()> {
    integration(&names()?)
}

/// Runs a third of the integration tests, each third in its turn: all of them take too long to run for every change.
///
/// # Errors
/// Same as [`run`].
pub fn some(turn: u64) -> Result<()> {
    let part = turn as usize % PARTS;
    let names: Vec<String> = names()?.into_iter().skip(part).step_by(PARTS).collect();
    println!("today: {}", names.join(", "));
    integration(&names)
}

/// The names of the integration tests that need no feature.
fn names() -> Result<Vec<String>> {
    let mut names = test_names(&root().join("kernels-cpu/tests"))?;
    names.extend(test_names(&root().join("kernels-c/tests"))?);
    names.retain(|name| !FEATURE_TESTS.contains(&name.as_str()));
    Ok(names)
}

fn integration(names: &[String]) -> Result<()> {
    let targets: Vec<&str> = names.iter().flat_map(|name| ["--test", name]).collect();
    tests(&UNSAFE, &targets)
}

/// Also runs the unit tests, and the tests of the fuzz targets, for which all dependencies are compiled again.
///
/// # Errors
/// Same as [`run`].
pub fn all() -> Result<()> {
    tests(&[&UNSAFE[..], &[FUZZ]].concat(), &["--lib", "--tests"])
}

fn tests(packages: &[&str], targets: &[&str]) -> Result<()> {
    let libraries = output(Command::new("rustc").args(["--print", "target-libdir"]))?;
    let has_runtime = std::fs::read_dir(&libraries)
        .with_context(|| format!("cannot list {libraries}"))?
        .filter_map(Result::ok)
        .any(|file| file.file_name().to_string_lossy().contains("_rt.asan"));
    if !has_runtime {
        return judge_skips("SKIPPED: the toolchain has no AddressSanitizer\n", shared_dir());
    }
    let host = output(Command::new("rustc").args(["--print", "host-tuple"]))?;
    let mut command = cargo(&["test", "--locked", "--target", &host]);
    // With optimization for speed, the kernels take minutes to compile. Other tests omit the assertions.
    for setting in ["opt-level=1", "debug-assertions=true", "overflow-checks=true"] {
        command.arg("--config").arg(format!("profile.dev.package.quant-kernels-cpu.{setting}"));
    }
    command.args(targets);
    for package in packages {
        command.args(["--package", package]);
    }
    command.args(["--features", "quant-kernels-cpu/rayon"]);
    command.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address");
    command.env("CARGO_TARGET_DIR", target_dir().join("sanitize")).env("QUANT_SANITIZER", "address");
    execute(&mut command)
}

#[cfg(test)]
mod parts {
    use super::*;

    #[test]
    fn every_test_has_its_turn() {
        let all = names().unwrap();
        assert!(all.len() > PARTS && all.contains(&"guard_pages".to_owned()));
        let turn = |part: usize| all.iter().skip(part).step_by(PARTS);
        assert_eq!((0..PARTS).flat_map(turn).count(), all.len());
    }
}
