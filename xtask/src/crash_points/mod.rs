//! `cargo xtask crash-points`: makes every operation on the disk fail once, or be the last before a loss of power.
//!
//! The program itself runs, under `ptrace`, so no file that it writes is left out: checkpoints, results of units, stored
//! references, results, journals and baselines. After every fault, each output must be as before or complete, and the
//! same command must then complete it. After a run that ends with exit code 0, a loss of power must lose nothing.
//!
//! | module | contents |
//! |---|---|
//! | `tracer` | runs the program, counts its operations, and makes one fail |
//! | `disk` | what a loss of power may take: data and names that were not synced |
//! | `cases` | the commands, and what they write |

mod cases;
mod disk;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod tracer;
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
#[path = "no_tracer.rs"]
mod tracer;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use self::cases::{CASES, Case, Output};
use self::tracer::{Fault, Traced};
use crate::bench_rtn::quant_binary;
use crate::support::llama::Shape;
use crate::support::noise::Float;
use crate::support::record::{Record, table, typed_command};
use crate::support::shell::target_dir;
use crate::synth;

const ENVIRONMENT: i32 = 5;
/// A run that has more operations does not end.
const MAX_OPERATIONS: usize = 100_000;

/// Which operations fail.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Let every N-th operation fail
    #[arg(long, default_value_t = 1)]
    pub every: usize,
    /// The first operation that fails
    #[arg(long, default_value_t = 0)]
    pub first: usize,
    /// Run these cases only
    #[arg(long, value_delimiter = ',')]
    pub only: Vec<String>,
    /// Trace this program instead of building one
    #[arg(long)]
    pub quant: Option<PathBuf>,
    /// Write a record
    #[arg(long)]
    pub record: bool,
}

/// Runs all cases with all faults.
///
/// # Errors
/// When an output is incomplete or lost, or a process ends with an exit code other than 5.
pub fn run(args: &Args) -> Result<()> {
    ensure!(args.every > 0, "--every must be positive");
    let known = |name: &String| CASES.iter().any(|case| case.name == name);
    if let Some(unknown) = args.only.iter().find(|name| !known(name)) {
        bail!("there is no case `{unknown}`; the cases are {}", CASES.map(|case| case.name).join(", "));
    }
    let quant = quant_binary(args.quant.as_deref())?;
    let bench = Bench::new(quant)?;
    let mut rows = Vec::new();
    for case in CASES.iter().filter(|case| args.only.is_empty() || args.only.iter().any(|o| o == case.name)) {
        let counts = bench.case(case, args).with_context(|| format!("case `{}`", case.name))?;
        println!("{}: {} operations, {} faults", case.name, counts.operations, counts.faults);
        rows.push(vec![case.name.to_owned(), counts.operations.to_string(), counts.faults.to_string()]);
    }
    let table = table(&["command", "operations", "faults"], &rows);
    println!("\n{table}");
    if args.record {
        let record = Record {
            benchmark: "crash-points",
            title: "Operations on the disk that fail, or are the last before a loss of power".into(),
            command: typed_command(),
            body: format!(
                "Each operation was tried with a full disk, with an error, and as the last one before a loss of power \
                that takes all data and names that were not synced, or only the data. Every output was as before or \
                complete, and the same command completed it afterwards.\n\n{table}"
            ),
            csv: std::iter::once("command,operations,faults".to_owned())
                .chain(rows.iter().map(|row| row.join(",")))
                .collect(),
        };
        println!("recorded in {}", record.write()?.display());
    }
    Ok(())
}

#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    operations: usize,
    faults: usize,
}

type Files = BTreeMap<PathBuf, Vec<u8>>;

struct Bench {
    quant: PathBuf,
    directory: TempDir,
}

/// A case, its files before the command, and those that the command writes.
struct Prepared<'a> {
    case: &'a Case,
    before: PathBuf,
    after: Files,
}

impl Bench {
    fn new(quant: PathBuf) -> Result<Self> {
        // In memory if possible: thousands of small files are created and synced.
        let directory = match tempfile::tempdir_in("/dev/shm") {
            Ok(directory) => directory,
            Err(_) => {
                fs::create_dir_all(target_dir())?;
                tempfile::tempdir_in(target_dir())?
            }
        };
        let bench = Self { quant, directory };
        let [out, other] = ["model", "other"].map(|name| bench.at(name));
        for (out, seed) in [(out, 1), (other, 2)] {
            synth::write(&synth::Args {
                out,
                shape: Shape::TINY,
                dtype: Float::Bf16,
                seed,
                shard_bytes: 1 << 30,
            })?;
        }
        let text: String = (0..3000_usize).map(|i| format!("w{} ", i * i % 61)).collect();
        fs::write(bench.at("text"), text)?;
        Ok(bench)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The directory that is watched. Its name is the same in all runs.
    fn work(&self) -> PathBuf {
        self.at("work")
    }

    fn arguments(&self, command: &str) -> Vec<OsString> {
        let word = |word: &str| {
            let (option, path) = match word.split_once('=') {
                Some((option, path)) => (format!("{option}="), path),
                None => (String::new(), word),
            };
            let place = match path.strip_prefix('@') {
                Some(name) => self.at(name),
                None => return OsString::from(word),
            };
            let mut word = OsString::from(option);
            word.push(place);
            word
        };
        command.split_whitespace().map(word).chain([OsString::from("--quiet")]).collect()
    }

    fn succeeds(&self, command: &str) -> Result<()> {
        let run = Command::new(&self.quant).args(self.arguments(command)).output()?;
        let stderr = String::from_utf8_lossy(&run.stderr);
        ensure!(run.status.success(), "`quant {command}` ended with {}:\n{stderr}", run.status);
        Ok(())
    }

    fn case(&self, case: &Case, args: &Args) -> Result<Counts> {
        let before = self.at(&format!("before-{}", case.name));
        reset(&self.work())?;
        for command in case.before {
            self.succeeds(command)?;
        }
        copy(&self.work(), &before)?;
        self.succeeds(case.command)?;
        let prepared = Prepared { case, before, after: snapshot(&self.work())? };
        prepared.check(self, &self.work(), true).context("without a fault")?;

        let mut counts = Counts::default();
        let watched = self.trial(&prepared, (MAX_OPERATIONS, Fault::Nothing), true)?;
        counts.operations = watched.operations;
        ensure!(counts.operations > 2, "only {} operations were seen", counts.operations);
        let faults = [
            (Fault::DiskFull, false),
            (Fault::Fails, false),
            (Fault::PowerLoss { after: false }, true),
            (Fault::PowerLoss { after: true }, true),
            (Fault::PowerLoss { after: true }, false),
        ];
        for (fault, names) in faults {
            for at in (args.first..MAX_OPERATIONS).step_by(args.every) {
                let run = self
                    .trial(&prepared, (at, fault), names)
                    .with_context(|| format!("{fault:?} at operation {at}, names are lost: {names}"))?;
                // The number of operations may differ between runs, because threads take turns.
                if run.hit.is_none() {
                    break;
                }
                counts.faults += 1;
            }
        }
        Ok(counts)
    }

    /// Runs the command with a fault, checks what is left, and completes it. `names` says whether a loss of power takes
    /// names, too.
    fn trial(&self, prepared: &Prepared<'_>, fault: (usize, Fault), names: bool) -> Result<Traced> {
        let (work, kept, case) = (self.work(), self.at("kept"), prepared.case);
        reset(&kept)?;
        fs::remove_dir_all(&work)?;
        copy(&prepared.before, &work)?;
        let arguments = self.arguments(case.command);
        let mut run = tracer::run((&self.quant, &arguments), &work, &kept, fault)?;
        let hit = run.hit.clone().unwrap_or_else(|| "no fault".into());
        let about = || format!("{hit}, exit code {:?}\n{}", run.code, run.stderr);
        let is_loss = matches!(fault.1, Fault::PowerLoss { .. } | Fault::Nothing);
        match run.code {
            Some(0) => {}
            Some(ENVIRONMENT) if run.hit.is_some() && !is_loss => {
                ensure!(run.stderr.contains("error: "), "no message: {}", about());
            }
            None if run.hit.is_some() => {}
            _ => bail!("{}", about()),
        }
        let is_done = run.code == Some(0);
        if is_loss {
            let none = disk::Disk::new(kept.clone());
            std::mem::replace(&mut run.disk, none).lose(names).context("the loss of power")?;
        }
        prepared.check(self, &work, is_done).with_context(about)?;
        if !is_done {
            self.succeeds(case.again).with_context(about)?;
            prepared
                .check(self, &work, true)
                .with_context(|| format!("after `{}`; {}", case.again, about()))?;
        }
        // The last removals may have failed, or be undone by the loss of power. The next run makes up for them.
        if is_done && prepared.check_leftovers(&work).is_err() {
            self.succeeds(case.again).with_context(about)?;
            prepared.check(self, &work, true).with_context(about)?;
        }
        prepared.check_leftovers(&work).with_context(about)?;
        Ok(run)
    }
}

impl Prepared<'_> {
    /// Fails if an output is neither as before nor complete, or if it is not complete although it must be.
    fn check(&self, bench: &Bench, work: &Path, must_be_new: bool) -> Result<()> {
        let (found, before) = (snapshot(work)?, snapshot(&self.before)?);
        let part = |files: &Files, name: &str| -> Files {
            files
                .iter()
                .filter(|(path, _)| path.starts_with(name))
                .map(|(p, b)| (p.clone(), b.clone()))
                .collect()
        };
        for output in self.case.outputs {
            match output {
                Output::Same(name) => {
                    let found = part(&found, name);
                    let is_new = found == part(&self.after, name);
                    let is_old = !must_be_new && found == part(&before, name);
                    ensure!(is_new || is_old, "`{name}` is neither old nor complete: {:?}", sizes(&found));
                }
                Output::Each(name) => {
                    let (found, expected) = (part(&found, name), part(&self.after, name));
                    for (path, bytes) in &found {
                        let same = expected.get(path) == Some(bytes);
                        ensure!(same, "{} is incomplete or has a different name", path.display());
                    }
                    ensure!(!must_be_new || found.len() == expected.len(), "lost: {:?}", sizes(&found));
                }
                Output::Read(name, command) => {
                    let (found, before) = (part(&found, name), part(&before, name));
                    if found.is_empty() || found == before {
                        ensure!(!must_be_new, "`{name}` is missing or old");
                    } else {
                        bench.succeeds(command)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Fails if there are files that an undisturbed run does not leave.
    fn check_leftovers(&self, work: &Path) -> Result<()> {
        for name in top(&snapshot(work)?) {
            let is_known = top(&self.after).contains(&name);
            let is_allowed = self.case.leftovers.iter().any(|start| name.starts_with(start));
            ensure!(is_known || is_allowed, "`{name}` is left over");
        }
        Ok(())
    }
}

fn top(files: &Files) -> Vec<String> {
    let first =
        |path: &PathBuf| path.components().next().map(|c| c.as_os_str().to_string_lossy().into_owned());
    files.keys().filter_map(first).collect()
}

fn sizes(files: &Files) -> Vec<(&Path, usize)> {
    files.iter().map(|(path, bytes)| (path.as_path(), bytes.len())).collect()
}

fn reset(directory: &Path) -> Result<()> {
    if directory.exists() {
        fs::remove_dir_all(directory)?;
    }
    fs::create_dir(directory).with_context(|| format!("cannot create {}", directory.display()))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir(to).with_context(|| format!("cannot create {}", to.display()))?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            true => copy(&entry.path(), &target)?,
            false => drop(fs::copy(entry.path(), target)?),
        }
    }
    Ok(())
}

/// All files below a directory, by their path in it.
fn snapshot(directory: &Path) -> Result<Files> {
    let mut found = Files::new();
    let mut pending = vec![directory.to_owned()];
    while let Some(next) = pending.pop() {
        for entry in fs::read_dir(&next).with_context(|| format!("cannot list {}", next.display()))? {
            let path = entry?.path();
            if path.is_dir() {
                pending.push(path);
                continue;
            }
            let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            found.insert(path.strip_prefix(directory)?.to_owned(), bytes);
        }
    }
    Ok(found)
}
