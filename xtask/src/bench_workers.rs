//! `cargo xtask bench-workers`: the time of a job that two workers with one thread each compute, compared with that of one
//! process with one thread.
//!
//! Both write the same checkpoint, alternately. The time of the job includes `job init` and `merge`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};

use crate::bench_cpu_time::synthetic_model;
use crate::bench_rtn::quant_binary;
use crate::support::measure::{self, Usage, median};
use crate::support::record::{Record, table, typed_command};
use crate::support::shell::{remove_dir, target_dir};

/// The minimum ratio of the two times.
const MIN_SPEEDUP: f64 = 1.7;
const WORKERS: usize = 2;
const MIN_ROUNDS: usize = 5;

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Rounds per method
    #[arg(long, default_value_t = MIN_ROUNDS)]
    pub rounds: usize,
    /// Methods to measure
    #[arg(long, value_delimiter = ',', default_values_t = METHODS.map(|method| method.name.to_owned()))]
    pub only: Vec<String>,
    /// Measure this program instead of building one
    #[arg(long)]
    pub quant: Option<PathBuf>,
    /// Fail if the median speed-up of a method is below 1.7, or if there are fewer than 5 rounds
    #[arg(long)]
    pub check: bool,
}

/// A method, and the size of a model on which one thread takes some ten seconds.
#[derive(Debug, Clone, Copy)]
struct Method {
    name: &'static str,
    layers: usize,
    hidden: usize,
    intermediate: usize,
    options: &'static [&'static str],
    /// Whether units pass the windows through the float model first.
    calibrates: bool,
}

const METHODS: [Method; 3] = [
    Method {
        name: "rtn",
        layers: 24,
        hidden: 2048,
        intermediate: 8192,
        options: &["--method", "rtn"],
        calibrates: false,
    },
    Method {
        name: "awq",
        layers: 8,
        hidden: 768,
        intermediate: 2048,
        options: &["--method", "awq", "--samples", "16", "--seq-len", "256"],
        calibrates: true,
    },
    Method {
        name: "gptq",
        layers: 8,
        hidden: 1024,
        intermediate: 2816,
        options: &["--method", "gptq", "--span-blocks", "2", "--samples", "16", "--seq-len", "256"],
        calibrates: true,
    },
];

/// The times of one round in seconds.
#[derive(Debug, Clone, Default)]
struct Round {
    single: f64,
    single_cpu: f64,
    /// `init`, the phases and `merge`, in order.
    parts: Vec<f64>,
    /// The CPU time of all processes of the job.
    job_cpu: f64,
    /// The time that the job would take if each process got all the CPU time it used at once.
    job_by_cpu: f64,
}

impl Round {
    fn job(&self) -> f64 {
        self.parts.iter().sum()
    }

    fn speedup(&self) -> f64 {
        self.single / self.job()
    }

    /// The speed-up by CPU time, which other processes of the machine hardly affect.
    fn speedup_by_cpu(&self) -> f64 {
        self.single_cpu / self.job_by_cpu
    }
}

/// Measures and writes the record.
///
/// # Errors
/// When a process fails, the checkpoints differ, or `--check` is given and a speed-up is too small.
pub fn run(args: &Args) -> Result<()> {
    let chosen: Vec<Method> =
        METHODS.into_iter().filter(|m| args.only.iter().any(|name| name == m.name)).collect();
    ensure!(chosen.len() == args.only.len(), "--only accepts rtn, awq and gptq");
    ensure!(args.rounds > 0, "nothing to measure");
    let directory = target_dir().join("bench/workers");
    let bench = Bench { quant: quant_binary(args.quant.as_deref())?, directory };
    let mut measured = Vec::new();
    for method in chosen {
        let model = synthetic_model(method.layers, method.hidden, method.intermediate)?;
        // A warm-up run fills the page cache.
        bench.clear()?;
        bench.single(&method, &model)?;
        let mut rounds = Vec::new();
        for number in 0..args.rounds {
            bench.clear()?;
            let mut round = Round::default();
            for job in [number % 2 == 0, number % 2 != 0] {
                if job {
                    bench.job(&method, &model, &mut round)?;
                } else {
                    let usage = bench.single(&method, &model)?;
                    (round.single, round.single_cpu) = (usage.seconds, usage.cpu_seconds);
                }
            }
            bench.compare()?;
            println!(
                "{} {}: one process {:.2} s, job {:.2} s ({}), speed-up {:.2}, by CPU time {:.2}",
                method.name,
                number + 1,
                round.single,
                round.job(),
                round.parts.iter().map(|part| format!("{part:.2}")).collect::<Vec<_>>().join(" + "),
                round.speedup(),
                round.speedup_by_cpu()
            );
            rounds.push(round);
        }
        measured.push((method, rounds));
    }
    remove_dir(&bench.directory)?;
    report(args, &measured)
}

struct Bench {
    quant: PathBuf,
    directory: PathBuf,
}

impl Bench {
    fn at(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn clear(&self) -> Result<()> {
        remove_dir(&self.directory)?;
        Ok(std::fs::create_dir_all(&self.directory)?)
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.quant);
        command.args(words).args(["--threads", "1", "--quiet"]);
        command
    }

    fn single(&self, method: &Method, model: &Path) -> Result<Usage> {
        let mut command = self.command(&["quantize"]);
        command.arg(model).arg("-o").arg(self.at("whole")).args(method.options);
        measure::run(&mut command)
    }

    fn job(&self, method: &Method, model: &Path, round: &mut Round) -> Result<()> {
        let store = self.at("store");
        let mut init = self.command(&["job", "init"]);
        init.arg(model).arg("--job").arg(&store).args(method.options);
        if method.calibrates {
            init.args(["--forward-shards", &WORKERS.to_string()]);
        }
        let mut merge = self.command(&["merge"]);
        merge.arg(&store).arg("-o").arg(self.at("merged"));
        let phases: &[&str] = if method.calibrates { &["forward", "blocks"] } else { &["blocks"] };
        let workers = |phase: &&str| {
            let worker = |index: usize| {
                let mut run = self.command(&["job", "run", "--phase", phase]);
                run.arg(&store).args(["--shard", &format!("{index}/{WORKERS}")]);
                run
            };
            (0..WORKERS).map(worker).collect()
        };
        let steps = [vec![init]].into_iter().chain(phases.iter().map(workers)).chain([vec![merge]]);
        for mut processes in steps {
            let started = Instant::now();
            let usages = together(&mut processes)?;
            round.parts.push(started.elapsed().as_secs_f64());
            round.job_cpu += usages.iter().map(|usage| usage.cpu_seconds).sum::<f64>();
            round.job_by_cpu += usages.iter().map(|usage| usage.cpu_seconds).fold(0.0, f64::max);
        }
        Ok(())
    }

    /// Fails unless the checkpoints have the same bytes.
    fn compare(&self) -> Result<()> {
        let [whole, merged] = [self.at("whole"), self.at("merged")];
        for entry in std::fs::read_dir(&whole)? {
            let name = entry?.file_name();
            let same = std::fs::read(whole.join(&name))? == std::fs::read(merged.join(&name))?;
            ensure!(same, "{} differs", name.display());
        }
        Ok(())
    }
}

/// Runs processes at the same time.
fn together(processes: &mut [Command]) -> Result<Vec<Usage>> {
    std::thread::scope(|scope| {
        let running: Vec<_> =
            processes.iter_mut().map(|process| scope.spawn(|| measure::run(process))).collect();
        let joined =
            running.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?);
        joined.collect()
    })
}

fn report(args: &Args, measured: &[(Method, Vec<Round>)]) -> Result<()> {
    let mut rows = Vec::new();
    let mut broken = Vec::new();
    let mut csv = vec![
        "method,round,first,single_seconds,single_cpu_seconds,init_seconds,forward_seconds,blocks_seconds,\
         merge_seconds,job_cpu_seconds,speedup,speedup_by_cpu"
            .to_owned(),
    ];
    for (method, rounds) in measured {
        let of = |value: &dyn Fn(&Round) -> f64| median(rounds.iter().map(value));
        let speedup = of(&Round::speedup);
        let range =
            |best: fn(f64, f64) -> f64| rounds.iter().map(Round::speedup).reduce(best).unwrap_or(f64::NAN);
        rows.push(vec![
            method.name.to_owned(),
            format!("{:.2}", of(&|round| round.single)),
            format!("{:.2}", of(&Round::job)),
            format!("{speedup:.2}"),
            format!("{:.2} to {:.2}", range(f64::min), range(f64::max)),
            format!("{:.2}", of(&Round::speedup_by_cpu)),
            format!("{:.2}", of(&|round| round.job_cpu / round.single_cpu)),
        ]);
        broken.extend(broken_promise(method.name, rounds.len(), speedup));
        csv.extend(rounds.iter().enumerate().map(|(i, round)| {
            let first = if i % 2 == 0 { "job" } else { "single" };
            let mut parts: Vec<String> = round.parts.iter().map(|part| format!("{part:.4}")).collect();
            if !method.calibrates {
                parts.insert(1, String::new());
            }
            format!(
                "{},{},{first},{:.4},{:.2},{},{:.2},{:.4},{:.4}",
                method.name,
                i + 1,
                round.single,
                round.single_cpu,
                parts.join(","),
                round.job_cpu,
                round.speedup(),
                round.speedup_by_cpu()
            )
        }));
    }
    let header =
        ["method", "one process s", "job s", "speed-up", "range", "by CPU time", "CPU time, relative"];
    let table = table(&header, &rows);
    println!("\n{table}");
    let describe = |(method, _): &(Method, Vec<Round>)| {
        let Method { name, layers, hidden, intermediate, options, .. } = method;
        format!("- {name}: `{}`; {layers} layers, hidden {hidden}, MLP {intermediate}\n", options.join(" "))
    };
    let methods: String = measured.iter().map(describe).collect();
    let record = Record {
        benchmark: "workers",
        title: "Two workers with one thread each, and one process with one thread".into(),
        command: typed_command(),
        body: format!(
            "`quant quantize` with `--threads 1`, and `job init`, `job run --shard 0/2` and `1/2` at the same time for \
             each phase, and `merge`, all with `--threads 1`, on a synthetic Llama in bf16, warm page cache. Both write \
             the same bytes, alternately, {} rounds; medians. The speed-up is the time of the one process divided by the \
             time of the whole job; it must be at least {MIN_SPEEDUP}. By CPU time, each process takes as long as the \
             CPU time it used. The last column is the CPU time of the whole job, relative to that of the one process.\
             \n\n{methods}\n{table}",
            args.rounds
        ),
        csv,
    };
    record.conclude(args.check, &broken)
}

fn broken_promise(method: &str, rounds: usize, speedup: f64) -> Option<String> {
    if rounds < MIN_ROUNDS {
        return Some(format!("{method}: {rounds} rounds, {MIN_ROUNDS} are required"));
    }
    let is_kept = speedup >= MIN_SPEEDUP;
    (!is_kept).then(|| format!("{method}: the speed-up is {speedup:.2}, not {MIN_SPEEDUP}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promises_can_be_broken() {
        let broken = |rounds, speedup| broken_promise("awq", rounds, speedup).is_some();
        assert!(!broken(5, 1.7));
        assert!(broken(5, 1.699) && broken(4, 2.0) && broken(5, f64::NAN));
    }

    #[test]
    fn phases_add_up() {
        let round = Round {
            single: 20.0,
            single_cpu: 18.0,
            parts: vec![0.5, 3.0, 6.0, 0.5],
            job_cpu: 19.0,
            job_by_cpu: 9.0,
        };
        assert_eq!((round.job(), round.speedup(), round.speedup_by_cpu()), (10.0, 2.0, 2.0));
    }

    #[test]
    fn workers_have_units_of_equal_size() {
        for method in METHODS {
            assert_eq!(method.layers % (2 * WORKERS), 0, "{}", method.name);
        }
    }
}
