//! `cargo xtask kill-cycles N`: kills runs, workers of jobs and merges at random points, N times in all, and compares
//! what is finally written with the files of a run that was not killed.
//!
//! After every kill, the output must be absent, or complete and equal to that of the other run.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::bench_rtn::quant_binary;
use crate::support::random::Random;
use crate::support::record::{Record, table, typed_command};
use crate::support::shell::{remove_dir, target_dir};

/// A run is killed at most this often before it may finish.
const KILLS_PER_CYCLE: u64 = 3;
/// Processes that compute the units of a job at the same time.
const WORKERS: usize = 2;

/// Methods and formats; `job` cases run in units.
const CASES: [(&str, &[&str]); 9] = [
    ("quantize", &["--method", "rtn", "--format", "compressed-tensors"]),
    ("quantize", &["--method", "awq", "--format", "awq", "--samples", "8", "--seq-len", "128"]),
    ("quantize", &["--method", "gptq", "--format", "gptq", "--samples", "8", "--seq-len", "128"]),
    ("quantize", &["--preset", "smoothquant-w8a8", "--samples", "8", "--seq-len", "128"]),
    ("quantize", &["--method", "awq-gptq", "--samples", "8", "--seq-len", "128"]),
    ("quantize", &["--format", "gguf", "--scheme", "q4_k_m", "--pre", "none"]),
    ("job", &["--method", "rtn", "--format", "gptq"]),
    ("job", &["--method", "awq", "--samples", "8", "--seq-len", "128"]),
    ("job", &["--method", "gptq", "--span-blocks", "2", "--samples", "8", "--seq-len", "128"]),
];

/// How often to kill, and what.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The number of kills
    pub kills: u64,
    /// The seed of the times at which processes are killed
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Kill this program instead of building one
    #[arg(long)]
    pub quant: Option<PathBuf>,
    /// Write a record
    #[arg(long)]
    pub record: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    outputs: u64,
    kills: u64,
    /// Kills of processes that had already ended.
    late: u64,
}

/// Runs all cases in turn until there were enough kills.
///
/// # Errors
/// When an output is incomplete or differs, or a process fails.
pub fn run(args: &Args) -> Result<()> {
    let quant = std::path::absolute(quant_binary(args.quant.as_deref())?)?;
    let directory = target_dir().join("kill-cycles");
    remove_dir(&directory)?;
    std::fs::create_dir_all(&directory)?;
    let mut bench = Bench { quant, directory, random: Random(args.seed) };
    bench.finish(&["demo".into(), "--save-model".into(), bench.at("model").into()])?;
    let mut counts = [Counts::default(); CASES.len()];
    let mut references = BTreeMap::new();
    let kills = |counts: &[Counts]| counts.iter().map(|c| c.kills - c.late).sum::<u64>();
    for case in (0..CASES.len()).cycle() {
        if kills(&counts) >= args.kills {
            break;
        }
        let reference = match references.entry(case) {
            std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::btree_map::Entry::Vacant(place) => {
                place.insert(bench.reference(CASES[case].1)?)
            }
        };
        let found = bench.cycle(CASES[case], reference);
        let found = found.with_context(|| format!("{} {}", CASES[case].0, CASES[case].1.join(" ")))?;
        counts[case].outputs += 1;
        counts[case].kills += found.kills;
        counts[case].late += found.late;
    }
    remove_dir(&bench.directory)?;
    let rows: Vec<Vec<String>> = CASES
        .iter()
        .zip(&counts)
        .map(|((command, options), c)| {
            let name = format!("{command} {}", options.join(" "));
            vec![name, c.outputs.to_string(), (c.kills - c.late).to_string(), "0".into()]
        })
        .collect();
    let table = table(&["command", "outputs", "kills", "differing"], &rows);
    println!("\n{table}");
    if args.record {
        let record = Record {
            benchmark: "kill-cycles",
            title: "Runs that are killed at random points".into(),
            command: typed_command(),
            body: format!(
                "{} processes were killed (SIGKILL) before they ended. Every output was absent or complete after each \
                kill, and in the end equal to that of a run that was not killed, byte for byte.\n\n{table}",
                kills(&counts)
            ),
            csv: std::iter::once("command,outputs,kills,differing".to_owned())
                .chain(rows.iter().map(|row| row.join(",")))
                .collect(),
        };
        println!("recorded in {}", record.write()?.display());
    }
    Ok(())
}

struct Reference {
    files: BTreeMap<PathBuf, Vec<u8>>,
    duration: Duration,
}

struct Bench {
    quant: PathBuf,
    directory: PathBuf,
    random: Random,
}

impl Bench {
    fn at(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn start(&self, arguments: &[OsString]) -> Result<Child> {
        let mut command = Command::new(&self.quant);
        command.args(arguments).arg("--quiet");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().context("the program cannot be started")
    }

    fn finish(&self, arguments: &[OsString]) -> Result<()> {
        ended(self.start(arguments)?, arguments)
    }

    fn arguments(&self, subcommand: &[&str], options: &[&str]) -> Vec<OsString> {
        subcommand.iter().chain(options).map(OsString::from).collect()
    }

    fn reference(&self, options: &[&str]) -> Result<Reference> {
        let (model, out) = (self.at("model"), self.at("whole"));
        let arguments = self.arguments(&["quantize", &text(&model), "-o", &text(&out)], options);
        let started = Instant::now();
        self.finish(&arguments)?;
        let reference = Reference { duration: started.elapsed(), files: files(&out)? };
        remove_dir(&out)?;
        Ok(reference)
    }

    fn cycle(&mut self, (kind, options): (&str, &[&str]), reference: &Reference) -> Result<Counts> {
        let (model, out, store) = (text(&self.at("model")), self.at("out"), self.at("store"));
        let mut counts = Counts::default();
        let finish: Vec<OsString> = match kind {
            "quantize" => self.arguments(&["quantize", &model, "-o", &text(&out)], options),
            _ => {
                let init = ["job", "init", &model, "--job", &text(&store)];
                self.finish(&self.arguments(&init, options))?;
                self.units(&store, reference, &mut counts)?;
                self.arguments(&["merge", &text(&store), "-o", &text(&out)], &[])
            }
        };
        let duration = if kind == "quantize" {
            reference.duration
        } else {
            reference.duration.min(Duration::from_secs(1))
        };
        for attempt in 0..KILLS_PER_CYCLE {
            let mut arguments = finish.clone();
            if attempt > 0 {
                arguments.push("--resume".into());
            }
            let child = self.start(&arguments)?;
            self.kill(child, &arguments, duration, &mut counts)?;
            if out.exists() {
                break;
            }
        }
        if !out.exists() {
            let mut arguments = finish;
            arguments.push("--resume".into());
            self.finish(&arguments)?;
        }
        compare(&files(&out)?, &reference.files)?;
        let mut job = out.clone().into_os_string();
        job.push(".job");
        for left in [out, PathBuf::from(job), store] {
            remove_dir(&left)?;
        }
        Ok(counts)
    }

    /// Computes the units of a job with several workers, of which some are killed.
    fn units(&mut self, store: &Path, reference: &Reference, counts: &mut Counts) -> Result<()> {
        let arguments = self.arguments(&["job", "run", &text(store)], &[]);
        for _ in 0..KILLS_PER_CYCLE {
            let others = (1..WORKERS).map(|_| self.start(&arguments)).collect::<Result<Vec<_>>>()?;
            let child = self.start(&arguments)?;
            self.kill(child, &arguments, reference.duration, counts)?;
            for other in others {
                self.kill(other, &arguments, reference.duration / 4, counts)?;
            }
        }
        let workers = (0..WORKERS).map(|_| self.start(&arguments)).collect::<Result<Vec<_>>>()?;
        workers.into_iter().try_for_each(|worker| ended(worker, &arguments))
    }

    /// Kills a process after a random time. If it has ended by then, it must have succeeded.
    fn kill(
        &mut self,
        mut child: Child,
        arguments: &[OsString],
        within: Duration,
        counts: &mut Counts,
    ) -> Result<()> {
        std::thread::sleep(within.mul_f64(self.random.below_one() * 1.1));
        counts.kills += 1;
        if child.try_wait()?.is_some() {
            counts.late += 1;
            return ended(child, arguments);
        }
        child.kill()?;
        child.wait()?;
        Ok(())
    }
}

fn ended(child: Child, arguments: &[OsString]) -> Result<()> {
    let output = child.wait_with_output()?;
    if !output.status.success() {
        let words: Vec<_> = arguments.iter().map(|word| word.to_string_lossy()).collect();
        bail!(
            "`quant {}` ended with {}:\n{}",
            words.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn files(path: &Path) -> Result<BTreeMap<PathBuf, Vec<u8>>> {
    let read = |file: &Path| std::fs::read(file).with_context(|| format!("cannot read {}", file.display()));
    if path.is_file() {
        return Ok([(PathBuf::new(), read(path)?)].into());
    }
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(path).with_context(|| format!("cannot list {}", path.display()))? {
        let entry = entry?;
        found.insert(PathBuf::from(entry.file_name()), read(&entry.path())?);
    }
    Ok(found)
}

fn compare(found: &BTreeMap<PathBuf, Vec<u8>>, expected: &BTreeMap<PathBuf, Vec<u8>>) -> Result<()> {
    ensure!(found.keys().eq(expected.keys()), "there are other files: {:?}", found.keys());
    for (name, bytes) in found {
        ensure!(*bytes == expected[name], "{} differs", name.display());
    }
    Ok(())
}
