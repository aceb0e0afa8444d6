//! `cargo xtask fuzz`: runs the targets of `fuzz/` under libFuzzer and AddressSanitizer.
//!
//! Findings are written to `target/fuzz/artifacts`. Inputs worth keeping go to `fuzz/corpus/TARGET`, where the tests on
//! stable Rust read them. `target/fuzz` also has what later runs start from, so keep the directory between nights.

use std::collections::BTreeMap;
use std::path::Path;

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
    /// Seconds in total: the targets that ran least run first, and the others not at all
    #[arg(long)]
    pub total: Option<u32>,
}

/// Runs the targets in sequence.
///
/// # Errors
/// When a target finds something, or cannot be built.
pub fn run(args: &Args) -> Result<()> {
    let program = tool("cargo-fuzz", CARGO_FUZZ)?;
    let made = target_dir().join("fuzz");
    let times = made.join("seconds.json");
    let mut seconds = past(&times);
    for target in &chosen(targets()?, &seconds, args) {
        let (grown, artifacts) = (made.join("corpus").join(target), made.join("artifacts"));
        for dir in [&grown, &artifacts] {
            std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        }
        let mut command = std::process::Command::new(&program);
        command.current_dir(root()).args(["fuzz", "run", "--fuzz-dir", "fuzz/libfuzzer", target]).arg(grown);
        let kept = root().join("fuzz/corpus").join(target);
        command.args(Some(kept).filter(|dir| dir.is_dir()));
        command.args(["--", "-max_len=1024", "-timeout=20", "-print_final_stats=1"]);
        command.arg(format!("-max_total_time={}", args.seconds));
        command.arg(format!("-artifact_prefix={}/", artifacts.display()));
        // The sanitizer and the coverage counters need nightly flags.
        command.env("RUSTC_BOOTSTRAP", "1").env("CARGO_TARGET_DIR", &made);
        execute(&mut command)?;
        *seconds.entry(target.clone()).or_default() += u64::from(args.seconds);
        std::fs::write(&times, serde_json::to_string_pretty(&seconds)?)
            .with_context(|| format!("cannot write {}", times.display()))?;
    }
    Ok(())
}

fn past(path: &Path) -> BTreeMap<String, u64> {
    std::fs::read(path).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

/// The targets to run: all that were asked for or, if the time is limited, those that ran least.
fn chosen(mut targets: Vec<String>, past: &BTreeMap<String, u64>, args: &Args) -> Vec<String> {
    targets.retain(|target| args.only.is_empty() || args.only.contains(target));
    if let Some(total) = args.total {
        targets.sort_by_key(|target| past.get(target).copied().unwrap_or_default());
        targets.truncate((total / args.seconds.max(1)).max(1) as usize);
    }
    targets
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_that_ran_least_run_first() {
        let targets = || ["a", "b", "c", "d"].map(str::to_owned).to_vec();
        let past = [("a".to_owned(), 600), ("b".to_owned(), 300), ("d".to_owned(), 900)].into();
        let args = |only: &[&str], total| Args {
            only: only.iter().map(|name| (*name).to_owned()).collect(),
            seconds: 300,
            total,
        };
        assert_eq!(chosen(targets(), &past, &args(&[], Some(900))), ["c", "b", "a"]);
        assert_eq!(chosen(targets(), &past, &args(&[], Some(1))), ["c"]);
        assert_eq!(chosen(targets(), &past, &args(&["d", "a"], Some(900))), ["a", "d"]);
        assert_eq!(chosen(targets(), &past, &args(&[], None)), targets());
        assert_eq!(chosen(targets(), &BTreeMap::new(), &args(&[], Some(600))), ["a", "b"]);
    }
}
