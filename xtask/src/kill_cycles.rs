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

/// What is run, and its options.
#[derive(Debug, Clone, Copy)]
struct Case {
    kind: Kind,
    /// Whether the options need a calibration text.
    calibrates: bool,
    options: &'static [&'static str],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// One process.
    Quantize,
    /// A job whose units several workers compute.
    Job,
}

/// All methods and formats. Jobs do not write GGUF files or float checkpoints.
const CASES: [Case; 20] = [
    plain(Kind::Quantize, &["--method", "rtn", "--format", "compressed-tensors"]),
    calibrated(Kind::Job, &["--method", "awq", "--format", "awq"]),
    calibrated(
        Kind::Quantize,
        &["--method", "awq-gptq", "--format", "gguf", "--calibration", "builtin", "--pre", "none"],
    ),
    calibrated(Kind::Job, &["--method", "gptq", "--span-blocks", "2", "--format", "gptq"]),
    calibrated(Kind::Quantize, &["--preset", "qoq-w4a8kv4", "--format", "qserve"]),
    plain(Kind::Job, &["--method", "rtn", "--format", "gptq"]),
    calibrated(Kind::Quantize, &["--method", "gptq", "--format", "gptq"]),
    calibrated(Kind::Job, &["--preset", "smoothquant-w8a8"]),
    calibrated(Kind::Quantize, &["--method", "awq", "--format", "awq"]),
    calibrated(Kind::Job, &["--method", "gptq", "--layer-inputs", "float"]),
    plain(Kind::Quantize, &["--format", "gguf", "--scheme", "q4_k_m", "--pre", "none"]),
    plain(Kind::Job, &["--method", "rtn", "--scheme", "nvfp4a16", "--format", "modelopt"]),
    calibrated(Kind::Quantize, &["--preset", "smoothquant-w8a8"]),
    calibrated(Kind::Job, &["--preset", "qoq-w4a8kv4", "--format", "qserve"]),
    calibrated(Kind::Quantize, &["--method", "awq-gptq", "--format", "compressed-tensors"]),
    calibrated(Kind::Quantize, &["--method", "rtn", "--scheme", "nvfp4", "--format", "modelopt"]),
    calibrated(
        Kind::Quantize,
        &["--format", "gguf", "--scheme", "iq4_xs", "--calibration", "builtin", "--pre", "none"],
    ),
    plain(Kind::Quantize, &["--method", "rtn", "--scheme", "fp8", "--format", "compressed-tensors"]),
    calibrated(Kind::Job, &["--method", "awq-gptq", "--span-blocks", "2"]),
    plain(Kind::Quantize, &["--format", "safetensors", "--scheme", "f32"]),
];

const fn plain(kind: Kind, options: &'static [&'static str]) -> Case {
    Case { kind, calibrates: false, options }
}

const fn calibrated(kind: Kind, options: &'static [&'static str]) -> Case {
    Case { kind, calibrates: true, options }
}

impl Case {
    fn name(&self) -> String {
        let kind = match self.kind {
            Kind::Quantize => "quantize",
            Kind::Job => "job",
        };
        let words = [kind].into_iter().chain(self.options.iter().copied()).chain(self.batch());
        words.collect::<Vec<_>>().join(" ")
    }

    /// The size of the calibration batch. That of jobs is enough for two shards.
    fn batch(&self) -> impl Iterator<Item = &'static str> {
        let samples = if self.kind == Kind::Job { "32" } else { "8" };
        let batch = self.calibrates.then_some(["--samples", samples, "--seq-len", "128"]);
        batch.into_iter().flatten()
    }

    fn arguments(&self, subcommand: &[&str]) -> Vec<OsString> {
        let own = self.options.iter().copied().chain(self.batch());
        subcommand.iter().map(OsString::from).chain(own.map(OsString::from)).collect()
    }
}

/// How often to kill, and what.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// The number of kills
    pub kills: u64,
    /// The seed of the times at which processes are killed, and the number of the case to begin with
    #[arg(long, default_value_t = 0)]
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
    let first = (args.seed % CASES.len() as u64) as usize;
    for case in (0..CASES.len()).cycle().skip(first) {
        if kills(&counts) >= args.kills {
            break;
        }
        let reference = match references.entry(case) {
            std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::btree_map::Entry::Vacant(place) => {
                let reference = bench.reference(CASES[case]);
                place.insert(reference.with_context(|| CASES[case].name())?)
            }
        };
        let found = bench.cycle(CASES[case], reference);
        let found = found.with_context(|| CASES[case].name())?;
        counts[case].outputs += 1;
        counts[case].kills += found.kills;
        counts[case].late += found.late;
    }
    remove_dir(&bench.directory)?;
    let rows: Vec<Vec<String>> = CASES
        .iter()
        .zip(&counts)
        .map(|(case, c)| vec![case.name(), c.outputs.to_string(), (c.kills - c.late).to_string(), "0".into()])
        .collect();
    let table = table(&["command", "outputs", "kills", "differing"], &rows);
    println!("\n{table}");
    let of_jobs = counts.iter().zip(CASES).filter(|(_, case)| case.kind == Kind::Job);
    let of_jobs: u64 = of_jobs.map(|(c, _)| c.kills - c.late).sum();
    if args.record {
        let record = Record {
            benchmark: "kill-cycles",
            title: "Runs that are killed at random points".into(),
            command: typed_command(),
            body: format!(
                "{} processes were killed (SIGKILL) before they ended, {of_jobs} of them workers and merges of jobs, whose \
                units {WORKERS} workers compute at the same time. Every output was absent or complete after each kill, \
                and in the end equal to that of a run that was not killed, byte for byte.\n\n{table}",
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

    fn reference(&self, case: Case) -> Result<Reference> {
        let (model, out) = (self.at("model"), self.at("whole"));
        let arguments = case.arguments(&["quantize", &text(&model), "-o", &text(&out)]);
        let started = Instant::now();
        self.finish(&arguments)?;
        let reference = Reference { duration: started.elapsed(), files: files(&out)? };
        remove_dir(&out)?;
        Ok(reference)
    }

    fn cycle(&mut self, case: Case, reference: &Reference) -> Result<Counts> {
        let (model, out, store) = (text(&self.at("model")), self.at("out"), self.at("store"));
        let mut counts = Counts::default();
        let finish: Vec<OsString> = match case.kind {
            Kind::Quantize => case.arguments(&["quantize", &model, "-o", &text(&out)]),
            Kind::Job => {
                let mut init = case.arguments(&["job", "init", &model, "--job", &text(&store)]);
                if case.calibrates {
                    init.extend(["--forward-shards", "2"].map(OsString::from));
                }
                self.finish(&init)?;
                self.units(&store, reference, &mut counts)?;
                ["merge", &text(&store), "-o", &text(&out)].map(OsString::from).into()
            }
        };
        let duration = match case.kind {
            Kind::Quantize => reference.duration,
            Kind::Job => reference.duration.min(Duration::from_secs(1)),
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
        let arguments = ["job", "run", &text(store)].map(OsString::from);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_formats_run_and_most_in_units() {
        let formats = |kind: Kind| {
            let of_kind = CASES.iter().filter(move |case| case.kind == kind);
            let named = of_kind.flat_map(|case| case.options.windows(2).filter(|w| w[0] == "--format"));
            named.map(|window| window[1]).collect::<std::collections::BTreeSet<_>>()
        };
        let all = ["awq", "compressed-tensors", "gguf", "gptq", "modelopt", "qserve", "safetensors"];
        assert!(formats(Kind::Quantize).into_iter().eq(all));
        assert!(formats(Kind::Job).into_iter().eq(["awq", "gptq", "modelopt", "qserve"]));
    }
}
