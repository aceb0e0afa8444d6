//! `cargo xtask ci`: everything that must pass before a change is merged, with the time of each step.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::support::shell::{cargo, run as execute, shared_dir, target_dir, tool};
use crate::support::steps::{self, Steps};
use crate::{crash_points, cuda, interop, kill_cycles, outside, publish, python, sanitize};

/// The second command of the README, word for word.
pub const TEST_COMMAND: [&str; 2] = ["test", "--workspace"];
/// The environment variable that names the file in which tests record what they skip.
const SKIP_LOG: &str = "QUANT_SKIP_LOG";
/// The feature that fetches models and texts from a hub.
const HUB: &str = "quant-cli/hub";
/// The feature that keeps jobs in object stores.
const STORE: &str = "quant-cli/store";
const CARGO_DENY: &str = "0.20.2";
/// The number of steps that take turns by the day.
const TURNS: u64 = 4;

/// The steps to run.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Run these steps only: test, kill-cycles, crash-points, fmt, clippy, doc, deny, publish, python, interop, outside, sanitize, cuda
    #[arg(long, value_delimiter = ',')]
    pub only: Vec<String>,
}

/// Runs the steps in order and prints the time of each.
///
/// # Errors
/// When a step failed; the other steps still ran.
pub fn run(args: &Args) -> Result<()> {
    let mut steps = Steps::new(&args.only);
    let fetched = args.only.is_empty().then(|| std::thread::spawn(fetch));
    steps.step("test", || test(&[]));
    let quant = Some(target_dir().join("debug/quant"));
    steps.step("kill-cycles", || {
        // A few cases a day.
        let seed = 5 * steps::day();
        kill_cycles::run(&kill_cycles::Args { kills: 10, seed, quant: quant.clone(), record: false })
    });
    steps.step("crash-points", || {
        crash_points::run(&crash_points::Args {
            every: 41,
            first: 3,
            only: Vec::new(),
            quant: quant.clone(),
            record: false,
        })
    });
    steps.step("fmt", || execute(&mut cargo(&["fmt", "--all", "--check"])));
    steps.step("clippy", || {
        clippy(&["--features", HUB, "--features", STORE, "--features", cuda::C_FEATURE])?;
        // The workspace enables features that engines leave out.
        execute(&mut cargo(&["check", "--package", "quant-formats", "--no-default-features"]))
    });
    steps.step("doc", || {
        execute(cargo(&["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings"))
    });
    steps.step("publish", publish::dry_run);
    if let Some(fetched) = fetched {
        let _ = fetched.join();
    }
    steps.step("python", || python::run(&python::Args::default()));
    let mut interop = Command::new(std::env::current_exe()?);
    steps.alongside("interop", interop.arg("interop"), |steps| {
        // There is no time for all of them on every change; they all run every night.
        steps.by_turns(&[
            ("outside", outside::run),
            ("sanitize", some_sanitized),
            ("cuda", cuda::run),
            // cargo-deny takes minutes to compile.
            ("deny", dependencies),
        ]);
    });
    steps.finish()
}

/// Checks the licences and sources of dependencies.
fn dependencies() -> Result<()> {
    deny(&["licenses", "bans", "sources"])
}

/// Runs the tests of `sanitize` whose turn it is.
fn some_sanitized() -> Result<()> {
    sanitize::some(steps::day() / TURNS)
}

/// Downloads what later steps need while the first step compiles. Errors are reported by those steps.
fn fetch() {
    interop::fetch();
    let _ = cuda::fetch();
    python::fetch();
}

/// Tests the program with the feature `hub` against a local hub. The hub client takes minutes to compile, so ordinary
/// changes are only linted with it.
///
/// The command names the whole workspace so that the artifacts of the earlier tests are reused.
pub fn hub() -> Result<()> {
    execute(&mut cargo(&["test", "--workspace", "--features", HUB, "--test", "hub"]))
}

/// Tests jobs in object stores: in memory, and with the program on a local S3 store.
pub fn store() -> Result<()> {
    let features = ["--workspace", "--locked", "--features", STORE];
    execute(cargo(&["test"]).args(features).args(["--lib", "--test", "pipeline", "unit"]))?;
    execute(cargo(&["build"]).args(features))?;
    interop::script("tests/store/check.sh", &[])
}

/// Lints everything with these options.
///
/// # Errors
/// When there is a warning.
pub fn clippy(options: &[&str]) -> Result<()> {
    let mut command = cargo(&["clippy", "--workspace", "--all-targets"]);
    execute(command.args(options).args(["--", "-D", "warnings"]))
}

/// Runs the workspace's tests. Also fails if a test was skipped although its requirements are available.
pub fn test(environment: &[(&str, &str)]) -> Result<()> {
    let log = target_dir().join("xtask/skipped-tests.log");
    std::fs::create_dir_all(log.parent().context("the log has a parent directory")?)?;
    std::fs::write(&log, "").with_context(|| format!("cannot write {}", log.display()))?;
    let mut command = cargo(&TEST_COMMAND);
    command.arg("--no-fail-fast");
    command.env(SKIP_LOG, &log).envs(environment.iter().copied());
    let outcome = execute(&mut command);
    let skipped = std::fs::read_to_string(&log)?;
    judge_skips(&skipped, shared_dir())?;
    outcome
}

/// Prints the skipped tests.
///
/// # Errors
/// When a test was skipped although the shared models and texts are available.
pub fn judge_skips(skipped: &str, shared: Option<PathBuf>) -> Result<()> {
    let lines: Vec<&str> = skipped.lines().filter(|l| l.starts_with("SKIPPED")).collect();
    for line in &lines {
        println!("{line}");
    }
    match shared {
        Some(dir) => ensure!(
            lines.is_empty(),
            "{} check(s) were skipped although {} exists",
            lines.len(),
            dir.display()
        ),
        None if !lines.is_empty() => {
            println!("{} check(s) were skipped: no shared models and texts are available", lines.len());
        }
        None => {}
    }
    Ok(())
}

/// Runs cargo-deny on the whole tree.
pub fn deny(checks: &[&str]) -> Result<()> {
    let mut command = Command::new(tool("cargo-deny", CARGO_DENY)?);
    command.current_dir(crate::support::shell::root());
    command.args(["--locked", "check", "--hide-inclusion-graph"]).args(checks);
    execute(&mut command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readme_shows_the_command_that_runs_here() {
        let readme = include_str!("../../README.md");
        let first_screen: String = readme.lines().take(20).collect::<Vec<_>>().join("\n");
        assert!(first_screen.contains(&format!("cargo {}", TEST_COMMAND.join(" "))));
        assert!(first_screen.contains("cargo run --release -- demo"));
    }

    #[test]
    fn a_skip_fails_only_where_nothing_was_missing() {
        let skipped = "SKIPPED: no models (tests/a.rs:3)\n";
        assert!(judge_skips(skipped, None).is_ok());
        assert!(judge_skips(skipped, Some("shared".into())).is_err());
        assert!(judge_skips("", Some("shared".into())).is_ok());
    }
}
