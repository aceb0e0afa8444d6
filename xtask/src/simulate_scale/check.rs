//! A real job on three nodes of this machine, compared with its simulation.
//!
//! Runs on one node, from which the simulation knows the units, and runs on three nodes alternate. The nodes share the
//! processor with each other, and perhaps with other programs. So the time of a unit is the CPU time that it takes, and
//! the speed of a node is the share of the processor that the units of the real run got. What is compared is the rest:
//! the order of the units, their dependencies, the time that nodes are idle, and the cost of starting processes.

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::cluster::{Cluster, Task, simulate};
use super::tasks;
use crate::bench_rtn::quant_binary;
use crate::support::measure::{self, Usage, median};
use crate::support::shell::{remove_dir, target_dir};

const NODES: usize = 3;
/// The largest error of the simulation.
const MAX_ERROR: f64 = 0.2;
const METHOD: [&str; 6] = ["--samples", "32", "--seq-len", "256", "--forward-shards", "3"];
const ROUNDS: usize = 3;

/// A job that was computed on some nodes.
struct Run {
    seconds: f64,
    /// By unit.
    usages: Vec<Usage>,
}

impl Run {
    fn cpu_seconds(&self) -> f64 {
        self.usages.iter().map(|usage| usage.cpu_seconds).sum()
    }
}

/// Returns what was compared, in a sentence.
pub(super) fn run(quant: Option<&Path>) -> Result<String> {
    let directory = target_dir().join("simulate-scale");
    remove_dir(&directory)?;
    std::fs::create_dir_all(&directory)?;
    let bench = Bench { quant: quant_binary(quant)?, directory };
    bench.quant(&["demo".into(), "--save-model".into(), bench.at("model").into()])?;
    let planned = bench.init("planned")?;
    let mut runs = Vec::new();
    for round in 0..ROUNDS {
        let alone = bench.drive(&format!("alone-{round}"), 1, &planned)?;
        let together = bench.drive(&format!("together-{round}"), NODES, &planned)?;
        println!(
            "round {}: one node {:.1} s, {NODES} nodes {:.1} s; CPU time {:.1} and {:.1} s",
            round + 1,
            alone.seconds,
            together.seconds,
            alone.cpu_seconds(),
            together.cpu_seconds()
        );
        runs.push([alone, together]);
    }
    remove_dir(&bench.directory)?;
    let compared = Compared::new(&planned, &runs);
    let text = compared.described(&planned);
    println!("{text}");
    ensure!(compared.error() <= MAX_ERROR, "the simulation is wrong by more than a fifth");
    Ok(text)
}

/// The real runs and their simulation. Seconds are medians over the rounds.
#[derive(Debug)]
struct Compared {
    /// The CPU time of all units, one after the other.
    alone: f64,
    /// What a process takes besides CPU time.
    start: f64,
    /// The share of a processor that a node got.
    speed: f64,
    real: f64,
    simulated: f64,
}

impl Compared {
    fn new(planned: &[Task], runs: &[[Run; 2]]) -> Self {
        let alone = || runs.iter().map(|[alone, _]| alone);
        let measured = |index: usize, task: &Task| {
            let seconds = median(alone().map(|run| run.usages[index].cpu_seconds));
            // Reading and writing are a part of the CPU time, or of `start`.
            Task { seconds, input_bytes: 0.0, output_bytes: 0.0, ..task.clone() }
        };
        let measured: Vec<Task> = planned.iter().enumerate().map(|(i, task)| measured(i, task)).collect();
        // Waiting for the disk is in every round, and waiting for the processor rarely in all of them.
        let waits = (0..planned.len()).map(|index| {
            let waits = alone().map(|run| run.usages[index].seconds - run.usages[index].cpu_seconds);
            waits.fold(f64::INFINITY, f64::min).max(0.0)
        });
        let start = median(waits);
        let speed = median(runs.iter().map(|[_, together]| {
            let wall: f64 = together.usages.iter().map(|usage| (usage.seconds - start).max(0.0)).sum();
            (together.cpu_seconds() / wall.max(f64::MIN_POSITIVE)).min(1.0)
        }));
        let cluster = Cluster {
            nodes: NODES,
            speed,
            speed_deviation: 0.0,
            node_bandwidth: 1e12,
            store_bandwidth: 1e12,
            lifetime: f64::INFINITY,
            detection: 0.0,
            replacement: 0.0,
            start,
            duplicate_from: 2.0,
            patience: 0.0,
        };
        Self {
            alone: measured.iter().map(|task| task.seconds).sum(),
            start,
            speed,
            real: median(runs.iter().map(|[_, together]| together.seconds)),
            simulated: simulate(&measured, &cluster, 0).seconds,
        }
    }

    fn error(&self) -> f64 {
        (self.simulated / self.real - 1.0).abs()
    }

    fn described(&self, planned: &[Task]) -> String {
        format!(
            "Check: {} units of the demo model take {:.1} s of CPU time on one thread, and a process waits {:.3} s for \
             other things. Three nodes of one thread, which get {:.2} of a processor each, take {:.1} s; the simulation \
             says {:.1} s (medians of {ROUNDS} rounds).",
            planned.len(),
            self.alone,
            self.start,
            self.speed,
            self.real,
            self.simulated
        )
    }
}

struct Bench {
    quant: PathBuf,
    directory: PathBuf,
}

impl Bench {
    fn at(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn command(&self, arguments: &[OsString]) -> Command {
        let mut command = Command::new(&self.quant);
        command.args(arguments).arg("--quiet").stdin(Stdio::null());
        command
    }

    fn quant(&self, arguments: &[OsString]) -> Result<Vec<u8>> {
        let done = self.command(arguments).output()?;
        let stderr = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "{arguments:?} ended with {}:\n{stderr}", done.status);
        Ok(done.stdout)
    }

    fn init(&self, store: &str) -> Result<Vec<Task>> {
        let mut arguments: Vec<OsString> =
            vec!["job".into(), "init".into(), self.at("model").into(), "--job".into(), self.at(store).into()];
        arguments.extend(METHOD.map(OsString::from));
        self.quant(&arguments)?;
        let listed = self.quant(&["job".into(), "units".into(), self.at(store).into(), "--json".into()])?;
        tasks(&serde_json::from_slice(&listed)?)
    }

    /// Computes a new job on some nodes, the longest ready unit first. Each unit is a process with one thread.
    fn drive(&self, store: &str, nodes: usize, tasks: &[Task]) -> Result<Run> {
        self.init(store)?;
        let (sender, ended) = mpsc::channel();
        let mut usages: Vec<Option<Usage>> = vec![None; tasks.len()];
        let began = Instant::now();
        std::thread::scope(|scope| {
            let mut waiting: HashSet<usize> = (0..tasks.len()).collect();
            let mut running = 0;
            while usages.iter().any(Option::is_none) {
                while running < nodes {
                    let is_ready =
                        |task: &&usize| tasks[**task].needs.iter().all(|need| usages[*need].is_some());
                    let longest = |a: &&usize, b: &&usize| tasks[**a].seconds.total_cmp(&tasks[**b].seconds);
                    let Some(next) = waiting.iter().filter(is_ready).max_by(longest).copied() else { break };
                    waiting.remove(&next);
                    running += 1;
                    let (sender, unit) = (sender.clone(), &tasks[next].id);
                    let arguments: Vec<OsString> = vec![
                        "job".into(),
                        "run".into(),
                        self.at(store).into(),
                        "--unit".into(),
                        unit.into(),
                        "--threads".into(),
                        "1".into(),
                    ];
                    scope.spawn(move || sender.send((next, measure::run(&mut self.command(&arguments)))));
                }
                let (unit, usage) = ended.recv()?;
                running -= 1;
                usages[unit] = Some(usage?);
            }
            Ok::<_, anyhow::Error>(())
        })?;
        let seconds = began.elapsed().as_secs_f64();
        let usages = usages.into_iter().collect::<Option<Vec<_>>>().context("a unit was not computed")?;
        remove_dir(&self.at(store))?;
        Ok(Run { seconds, usages })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(seconds: f64, units: &[[f64; 2]]) -> Run {
        let usage = |[seconds, cpu_seconds]: [f64; 2]| Usage { seconds, cpu_seconds, peak_bytes: 0 };
        Run { seconds, usages: units.iter().copied().map(usage).collect() }
    }

    /// Other programs make runs slower, but neither CPU times nor the comparison change.
    #[test]
    fn load_does_not_matter() {
        // Three units, then three that need them all; 0.1 s of each are not CPU time.
        let task = |needs: &[usize]| Task { needs: needs.to_vec(), ..Task::default() };
        let planned: Vec<Task> = (0..6).map(|i| task(if i < 3 { &[] } else { &[0, 1, 2] })).collect();
        let alone = |load: f64| run(12.6 * load, &[[2.0 * load + 0.1, 2.0]; 6]);
        for (speed, load) in [(1.0, 1.0), (0.5, 1.0), (0.25, 3.0)] {
            let together = || run(2.0 * (2.0 / speed + 0.1), &[[2.0 / speed + 0.1, 2.0]; 6]);
            let runs = [[alone(load), together()], [alone(1.0), together()]];
            let compared = Compared::new(&planned, &runs);
            assert!(
                (compared.start - 0.1).abs() < 1e-9 && (compared.speed - speed).abs() < 1e-9,
                "{compared:?}"
            );
            assert!(compared.error() < 1e-6, "{compared:?}");
        }
        // Nodes that were idle for half of the time.
        let runs = [[alone(1.0), run(8.4, &[[2.1, 2.0]; 6])]];
        assert!(Compared::new(&planned, &runs).error() > 0.4);
    }
}
