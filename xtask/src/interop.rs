//! `cargo xtask interop`: loads quant's output with independent implementations.
//!
//! The check itself is `tests/interop/run.sh`, which creates the virtual environment it needs. A line of its output
//! that starts with `SKIPPED` counts as a failure if the shared models and texts exist.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::ci::judge_skips;
use crate::support::shell::{output, root, shared_dir};

const SCRIPT: &str = "tests/interop/run.sh";
/// The setup scripts that `run.sh` calls first.
const SETUP: [&str; 3] =
    ["tests/interop/setup_chromium.sh", "tests/interop/setup_llama_cpp.sh", "tests/interop/setup_venv.sh"];

/// Downloads and builds the requirements of the check, as far as this machine allows.
pub fn fetch() {
    for script in SETUP {
        let _ = output(Command::new("bash").arg(script).current_dir(root()));
    }
}

/// Runs the check with these arguments.
///
/// # Errors
/// When the script is missing or fails, or skipped something although the shared models and texts are available.
pub fn run(arguments: &[&str]) -> Result<()> {
    script(SCRIPT, arguments)
}

/// Runs a script of the repository that downloads what it needs and reports when it cannot.
///
/// # Errors
/// Same as [`run`].
pub fn script(script: &str, arguments: &[&str]) -> Result<()> {
    ensure!(root().join(script).is_file(), "{script} is missing");
    let (ok, skipped) = watch(Command::new("bash").arg(script).args(arguments).current_dir(root()))?;
    judge_skips(&skipped, shared_dir())?;
    ensure!(ok, "{script} failed");
    Ok(())
}

/// Runs a command, prints its output as it arrives, and collects the lines that report something skipped.
fn watch(command: &mut Command) -> Result<(bool, String)> {
    let (reader, writer) = std::io::pipe()?;
    command.stdout(writer.try_clone()?).stderr(writer).stdin(Stdio::null());
    let mut child = command.spawn().context("cannot start bash")?;
    // The command holds the writing end of the pipe, which must be dropped so that the output ends when the child does.
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
