//! `cargo xtask interop`: what we write, loaded by readers that nobody here wrote.
//!
//! The check itself is `tests/interop/run.sh`, which makes the virtual environment it needs. Here
//! its output is passed on and watched: a line that starts with `SKIPPED` counts as a failure
//! wherever the shared models and texts exist.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::ci::judge_skips;
use crate::support::shell::{output, root, shared_dir};

const SCRIPT: &str = "tests/interop/run.sh";
/// What it calls first, with the places of their own.
const SETUP: [&str; 3] =
    ["tests/interop/setup_chromium.sh", "tests/interop/setup_llama_cpp.sh", "tests/interop/setup_venv.sh"];

/// Downloads and builds what the check needs beside our programs, as far as it can be had here.
pub fn fetch() {
    for script in SETUP {
        let _ = output(Command::new("bash").arg(script).current_dir(root()));
    }
}

/// Runs the check with these arguments.
///
/// # Errors
/// When the script is missing, fails, or skipped something without a reason.
pub fn run(arguments: &[&str]) -> Result<()> {
    script(SCRIPT, arguments)
}

/// Runs a script of the repository that fetches what it needs, and says so where it cannot.
///
/// # Errors
/// As [`run`].
pub fn script(script: &str, arguments: &[&str]) -> Result<()> {
    ensure!(root().join(script).is_file(), "{script} is missing");
    let (ok, skipped) = watch(Command::new("bash").arg(script).args(arguments).current_dir(root()))?;
    judge_skips(&skipped, shared_dir())?;
    ensure!(ok, "{script} failed");
    Ok(())
}

/// Runs a command, prints its output as it comes (stderr joins stdout), and collects the lines
/// that say something was skipped.
fn watch(command: &mut Command) -> Result<(bool, String)> {
    let (reader, writer) = std::io::pipe()?;
    command.stdout(writer.try_clone()?).stderr(writer).stdin(Stdio::null());
    let mut child = command.spawn().context("cannot start bash")?;
    // The command holds the pipe's other end; only without it does the output end with the child.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut skipped = String::new();
    for line in BufReader::new(reader).split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        if line.starts_with("SKIPPED") {
            skipped += &line;
            skipped.push('\n');
        }
    }
    Ok((child.wait()?.success(), skipped))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skips_are_seen_on_either_stream() {
        let script = "echo fine; echo 'SKIPPED: a'; echo 'SKIPPED: b' >&2; exit 3";
        let (ok, skipped) = watch(Command::new("bash").args(["-c", script])).unwrap();
        assert!(!ok);
        assert_eq!(skipped.lines().count(), 2);
        let (ok, skipped) = watch(Command::new("bash").args(["-c", "echo 'not SKIPPED'"])).unwrap();
        assert!(ok && skipped.is_empty());
    }
}
