//! `cargo xtask fuzz`: runs the targets of `fuzz/` under libFuzzer and AddressSanitizer.
//!
//! Findings are written to `target/fuzz/artifacts`. Inputs worth keeping go to `fuzz/corpus/TARGET`, where the tests on
//! stable Rust read them.

use anyhow::{Context, Result};

use crate::support::shell::{root, run as execute, target_dir, tool};

const CARGO_FUZZ: &str = "0.13.2";

/// The targets, and how long to run them.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Run these targets only
    #[arg(long, value_delimiter = ',')]
    pub only: Vec<String>,
    /// Seconds per target
    #[arg(long, default_value_t = 60)]
    pub seconds: u32,
}

/// Runs the targets in sequence.
///
/// # Errors
/// When a target finds something, or cannot be built.
pub fn run(args: &Args) -> Result<()> {
    let program = tool("cargo-fuzz", CARGO_FUZZ)?;
    let made = target_dir().join("fuzz");
    for target in targets()?.iter().filter(|t| args.only.is_empty() || args.only.contains(t)) {
        let (grown, artifacts) = (made.join("corpus").join(target), made.join("artifacts"));
        for dir in [&grown, &artifacts] {
            std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        }
        let mut command = std::process::Command::new(&program);
        command.current_dir(root()).args(["fuzz", "run", "--fuzz-dir", "fuzz/libfuzzer", target]).arg(grown);
        // Inputs kept in the repository, if any.
        let kept = root().join("fuzz/corpus").join(target);
        command.args(Some(kept).filter(|dir| dir.is_dir()));
        command.args(["--", "-max_len=1024", "-timeout=20", "-print_final_stats=1"]);
        command.arg(format!("-max_total_time={}", args.seconds));
        command.arg(format!("-artifact_prefix={}/", artifacts.display()));
        // The sanitizer and the coverage counters need nightly flags.
        command.env("RUSTC_BOOTSTRAP", "1").env("CARGO_TARGET_DIR", &made);
        execute(&mut command)?;
    }
    Ok(())
}

/// The names of the targets, each of which is a file.
fn targets() -> Result<Vec<String>> {
    let folder = root().join("fuzz/libfuzzer/fuzz_targets");
    let files = std::fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut names = Vec::new();
    for file in files {
        names.extend(file?.path().file_stem().map(|stem| stem.to_string_lossy().into_owned()));
    }
    names.sort();
    Ok(names)
}
