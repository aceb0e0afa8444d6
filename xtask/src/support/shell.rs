//! Running other programs, and the locations of directories in the workspace.

use std::io::{BufReader, IsTerminal, PipeReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail, ensure};

use super::excerpt::Excerpt;

/// The workspace's root directory.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// Cargo's output directory, in which these commands also keep everything that can be recreated.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// The directory with real models and texts next to the checkout, if it exists.
pub fn shared_dir() -> Option<PathBuf> {
    Some(root().join("../shared")).filter(|p| p.is_dir())
}

/// A cargo command in the workspace root.
pub fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(args);
    command
}

/// The command as typed in a shell.
pub fn display(command: &Command) -> String {
    let mut words = vec![file_name(command.get_program())];
    words.extend(command.get_args().map(|a| a.to_string_lossy().into_owned()));
    words.join(" ")
}

fn file_name(program: &std::ffi::OsStr) -> String {
    let path = Path::new(program);
    path.file_name().unwrap_or(program).to_string_lossy().into_owned()
}

/// Runs a command and shows its output. Fails if the command fails. If stdout is not a terminal, the error contains an
/// excerpt of the output.
pub fn run(command: &mut Command) -> Result<()> {
    let line = display(command);
    println!("$ {line}");
    if std::io::stdout().is_terminal() {
        let status = command.status().with_context(|| format!("cannot start `{line}`"))?;
        ensure!(status.success(), "`{line}` ended with {status}");
        return Ok(());
    }
    let (mut child, reader) = start(command, &line)?;
    let excerpt = Excerpt::copy(BufReader::new(reader), std::io::stdout())?;
    let status = child.wait()?;
    ensure!(status.success(), "`{line}` ended with {status}\n{excerpt}");
    Ok(())
}

/// Starts a command whose output, including stderr, goes through the returned pipe.
fn start(command: &mut Command, line: &str) -> Result<(Child, PipeReader)> {
    let (reader, writer) = std::io::pipe()?;
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let child = command.spawn().with_context(|| format!("cannot start `{line}`"))?;
    // The output ends only when the command's writing end of the pipe is closed too.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    Ok((child, reader))
}

/// Runs two commands concurrently. The output of the second is printed after both have ended.
///
/// # Errors
/// When either fails; the other still runs to its end.
pub fn run_both(first: &mut Command, second: &mut Command) -> Result<()> {
    let second = Held::start(second)?;
    let outcome = run(first);
    second.finish()?;
    outcome
}

/// A command that runs in parallel with others. Its output is printed after they have ended.
#[derive(Debug)]
pub struct Held {
    line: String,
    child: Child,
    output: JoinHandle<std::io::Result<Vec<u8>>>,
}

impl Held {
    /// Starts a command.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(command: &mut Command) -> Result<Self> {
        let line = display(command);
        let (child, mut reader) = start(command, &line)?;
        let output = std::thread::spawn(move || {
            let mut text = Vec::new();
            std::io::Read::read_to_end(&mut reader, &mut text).map(|_| text)
        });
        Ok(Self { line, child, output })
    }

    /// Waits until the command has ended, and prints its output.
    ///
    /// # Errors
    /// When the command failed.
    pub fn finish(mut self) -> Result<()> {
        let status = self.child.wait()?;
        println!("$ {}", self.line);
        let Ok(text) = self.output.join() else { bail!("`{}`: its output was not read", self.line) };
        let text = String::from_utf8_lossy(&text?).into_owned();
        print!("{text}");
        ensure!(status.success(), "`{}` ended with {status}\n{}", self.line, Excerpt::of(&text));
        Ok(())
    }
}

/// Runs a command and returns its stdout. Fails if the command fails.
pub fn output(command: &mut Command) -> Result<String> {
    let line = display(command);
    let output = command.output().with_context(|| format!("cannot start `{line}`"))?;
    if !output.status.success() {
        bail!("`{line}` ended with {}:\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Whether a command can be started and succeeds; prints nothing.
pub fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|o| o.status.success())
}

/// A program by name if it can be run that way, otherwise the path of an own installation, which is made from the crate
/// registry if it is missing. The version applies only to that installation.
pub fn tool(name: &str, version: &str) -> Result<PathBuf> {
    if succeeds(Command::new(name).arg("--version")) {
        return Ok(PathBuf::from(name));
    }
    let own = target_dir().join("tools");
    let program = own.join("bin").join(name);
    if !program.is_file() {
        // An optimized build would take longer than the program saves.
        let mut install = cargo(&["install", name, "--version", version, "--locked", "--debug"]);
        run(install.arg("--root").arg(&own))?;
    }
    Ok(program)
}

/// The total size of the files in a directory, in bytes, without subdirectories.
pub fn directory_bytes(dir: &Path) -> Result<u64> {
    let mut total = 0;
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let metadata = entry?.metadata()?;
        if metadata.is_file() {
            total += metadata.len();
        }
    }
    Ok(total)
}

/// Removes a directory that may not exist.
pub fn remove_dir(dir: &Path) -> Result<()> {
    match std::fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("cannot remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}
