//! A real job on three nodes of this machine, compared with its simulation.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::cluster::{Cluster, Task, simulate};
use super::tasks;
use crate::bench_rtn::quant_binary;
use crate::support::shell::{remove_dir, target_dir};

const NODES: usize = 3;
/// The largest error of the simulation.
const MAX_ERROR: f64 = 0.2;
const METHOD: [&str; 6] = ["--samples", "32", "--seq-len", "256", "--forward-shards", "3"];
const REPEATS: usize = 5;

/// Returns what was compared, in a sentence.
pub(super) fn run(quant: Option<&Path>) -> Result<String> {
    let directory = target_dir().join("simulate-scale");
    remove_dir(&directory)?;
    std::fs::create_dir_all(&directory)?;
    let bench = Bench { quant: quant_binary(quant)?, directory };
    bench.quant(&["demo".into(), "--save-model".into(), bench.at("model").into()])?;

    let units = bench.init("alone")?;
    bench.quant(&bench.work("alone", &["--threads", "1"]))?;
    let seconds = logged(&bench.at("alone").join("log"))?;
    let measured: Vec<Task> = units
        .iter()
        .map(|task| {
            let seconds =
                seconds.get(&task.id).with_context(|| format!("`{}` is not in the log", task.id))?;
            // The measured time includes reading and writing.
            Ok(Task { seconds: *seconds, input_bytes: 0.0, output_bytes: 0.0, ..task.clone() })
        })
        .collect::<Result<_>>()?;
    let start = bench.start("alone", &units)?;

    bench.init("together")?;
    let began = Instant::now();
    bench.drive("together", &measured)?;
    let real = began.elapsed().as_secs_f64();

    let cores = std::thread::available_parallelism()?.get();
    let cluster = Cluster {
        nodes: NODES,
        // Processes that have to share the processor are slower.
        speed: (cores as f64 / NODES as f64).min(1.0),
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
    let simulated = simulate(&measured, &cluster, 0).seconds;
    let sum: f64 = measured.iter().map(|task| task.seconds).sum();
    remove_dir(&bench.directory)?;
    let text = format!(
        "Check: {} units of the demo model take {sum:.1} s one after the other on one thread, and a process starts in \
        {start:.2} s. Three nodes of one thread on {cores} CPUs take {real:.1} s; the simulation says {simulated:.1} s.",
        units.len()
    );
    println!("{text}");
    ensure!((simulated / real - 1.0).abs() <= MAX_ERROR, "the simulation is wrong by more than a fifth");
    Ok(text)
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

    fn work(&self, store: &str, options: &[&str]) -> Vec<OsString> {
        let mut arguments = vec!["job".into(), "run".into(), self.at(store).into()];
        arguments.extend(options.iter().map(OsString::from));
        arguments
    }

    fn init(&self, store: &str) -> Result<Vec<Task>> {
        let mut arguments: Vec<OsString> =
            vec!["job".into(), "init".into(), self.at("model").into(), "--job".into(), self.at(store).into()];
        arguments.extend(METHOD.map(OsString::from));
        self.quant(&arguments)?;
        let listed = self.quant(&["job".into(), "units".into(), self.at(store).into(), "--json".into()])?;
        tasks(&serde_json::from_slice(&listed)?)
    }

    /// The time of a process that finds its unit finished, without the time to check the result.
    fn start(&self, store: &str, units: &[Task]) -> Result<f64> {
        let smallest = units.iter().min_by(|a, b| a.output_bytes.total_cmp(&b.output_bytes));
        let smallest = smallest.context("the job has no units")?;
        let arguments = self.work(store, &["--unit", &smallest.id]);
        let mut times = Vec::new();
        for _ in 0..REPEATS {
            let began = Instant::now();
            self.quant(&arguments)?;
            times.push(began.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        Ok(times[REPEATS / 2])
    }

    /// Computes a job on the nodes, the longest ready unit first.
    fn drive(&self, store: &str, tasks: &[Task]) -> Result<()> {
        let mut waiting: HashSet<usize> = (0..tasks.len()).collect();
        let mut done = HashSet::new();
        let mut running: Vec<(usize, Child)> = Vec::new();
        while done.len() < tasks.len() {
            while running.len() < NODES {
                let is_ready = |task: &&usize| tasks[**task].needs.iter().all(|need| done.contains(need));
                let longest = |a: &&usize, b: &&usize| tasks[**a].seconds.total_cmp(&tasks[**b].seconds);
                let Some(next) = waiting.iter().filter(is_ready).max_by(longest).copied() else { break };
                waiting.remove(&next);
                let mut command =
                    self.command(&self.work(store, &["--unit", &tasks[next].id, "--threads", "1"]));
                running.push((next, command.stdout(Stdio::null()).spawn()?));
            }
            let mut still = Vec::new();
            for (task, mut child) in running {
                match child.try_wait()? {
                    Some(status) => {
                        ensure!(status.success(), "`{}` ended with {status}", tasks[task].id);
                        done.insert(task);
                    }
                    None => still.push((task, child)),
                }
            }
            running = still;
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

/// The seconds of each unit, from a job's log.
fn logged(log: &Path) -> Result<BTreeMap<String, f64>> {
    let mut seconds = BTreeMap::new();
    for entry in std::fs::read_dir(log).with_context(|| format!("cannot list {}", log.display()))? {
        let entry: Value = serde_json::from_slice(&std::fs::read(entry?.path())?)?;
        let unit = entry["unit"].as_str().context("an entry of the log names no unit")?;
        seconds
            .insert(unit.to_owned(), entry["seconds"].as_f64().context("an entry of the log has no time")?);
    }
    Ok(seconds)
}
