//! `cargo xtask simulate-scale`: predicts how long a job takes on many machines.
//!
//! The units, their times and their bytes are those that `quant job units --json` lists for a job, on the machine that
//! listed them. `--check` first runs a small job on this machine, alone and on three nodes with the policy of
//! `fewbits.ray`, and compares the second run with a simulation that knows only the first.

mod check;
pub mod cluster;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use self::cluster::{Cluster, Outcome, Task, simulate};
use crate::support::record::{Record, table, typed_command};

const GIGA: f64 = 1e9;

/// The job and the cluster.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Units of jobs, as `quant job units STORE --json=FILE` writes them
    pub units: Vec<PathBuf>,
    /// Numbers of nodes
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 32, 80, 160, 1000])]
    pub nodes: Vec<usize>,
    /// The median speed of a node, relative to the machine that listed the units
    #[arg(long, default_value_t = 1.0)]
    pub speed: f64,
    /// The standard deviation of the logarithm of nodes' speeds
    #[arg(long, default_value_t = 0.25)]
    pub deviation: f64,
    /// Bandwidth of a node, in GB/s
    #[arg(long, default_value_t = 1.1)]
    pub node_bandwidth: f64,
    /// Bandwidth of the store, in GB/s
    #[arg(long, default_value_t = 10.0)]
    pub store_bandwidth: f64,
    /// Mean time until a node is lost, in hours; 0 if none is
    #[arg(long, default_value_t = 6.0)]
    pub lifetime: f64,
    /// Seconds until the driver notices a lost node
    #[arg(long, default_value_t = 30.0)]
    pub detection: f64,
    /// Seconds until a lost node is replaced
    #[arg(long, default_value_t = 120.0)]
    pub replacement: f64,
    /// Seconds that a process takes to start and to open the job
    #[arg(long, default_value_t = 1.0)]
    pub start: f64,
    /// Simulations per number of nodes
    #[arg(long, default_value_t = 20)]
    pub seeds: u64,
    /// Compare a simulation with a real run on this machine, and fail if they differ by more than a fifth
    #[arg(long)]
    pub check: bool,
    /// Run this program in the check instead of building one
    #[arg(long)]
    pub quant: Option<PathBuf>,
    /// Write a record
    #[arg(long)]
    pub record: bool,
}

impl Args {
    fn cluster(&self, nodes: usize) -> Cluster {
        Cluster {
            nodes,
            speed: self.speed,
            speed_deviation: self.deviation,
            node_bandwidth: self.node_bandwidth * GIGA,
            store_bandwidth: self.store_bandwidth * GIGA,
            lifetime: if self.lifetime > 0.0 { self.lifetime * 3600.0 } else { f64::INFINITY },
            detection: self.detection,
            replacement: self.replacement,
            start: self.start,
            // As `fewbits.ray.run` by default.
            duplicate_from: 0.9,
            patience: 10.0,
        }
    }
}

/// Simulates the jobs.
///
/// # Errors
/// When a file is not a list of units, or the check fails.
pub fn run(args: &Args) -> Result<()> {
    let positive = [args.speed, args.node_bandwidth, args.store_bandwidth];
    ensure!(positive.iter().all(|value| *value > 0.0), "speeds and bandwidths must be positive");
    ensure!(args.seeds > 0 && !args.nodes.contains(&0), "nothing to simulate");
    ensure!(args.check || !args.units.is_empty(), "give the units of a job, or --check");
    let checked = if args.check { Some(check::run(args.quant.as_deref())?) } else { None };
    let mut rows = Vec::new();
    for path in &args.units {
        let tasks = read(path).with_context(|| format!("{} is not a list of units", path.display()))?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        for &nodes in &args.nodes {
            let cluster = args.cluster(nodes);
            let outcomes: Vec<Outcome> =
                (0..args.seeds).map(|seed| simulate(&tasks, &cluster, seed)).collect();
            rows.push(row(&name, tasks.len(), nodes, &outcomes));
        }
    }
    let table = table(&HEADER, &rows);
    println!("{table}");
    if args.record {
        let mut body = String::new();
        if let Some(checked) = &checked {
            body.push_str(&format!("{checked}\n\n"));
        }
        body.push_str(&format!(
            "Units as `quant job units` lists them. A node has {} times the speed of the machine that listed them \
            (median; standard deviation of its logarithm {}) and {} GB/s; the store has {} GB/s in all. A node is lost \
            after {} hours in the mean, which is noticed after {} s, and replaced after {} s; a process starts in {} s. \
            Times are medians of {} simulations, with the 90th percentile; the other columns are means.\n\n{table}",
            args.speed,
            args.deviation,
            args.node_bandwidth,
            args.store_bandwidth,
            args.lifetime,
            args.detection,
            args.replacement,
            args.start,
            args.seeds
        ));
        let record = Record {
            benchmark: "simulate-scale",
            title: "Jobs on many machines, simulated".into(),
            command: typed_command(),
            body,
            csv: std::iter::once(HEADER.join(",")).chain(rows.iter().map(|row| row.join(","))).collect(),
        };
        println!("recorded in {}", record.write()?.display());
    }
    Ok(())
}

const HEADER: [&str; 8] = ["job", "units", "nodes", "hours", "90 %", "lost units", "duplicates", "busy"];

fn row(name: &str, units: usize, nodes: usize, outcomes: &[Outcome]) -> Vec<String> {
    let mut seconds: Vec<f64> = outcomes.iter().map(|outcome| outcome.seconds).collect();
    seconds.sort_by(f64::total_cmp);
    let at = |share: f64| seconds[((seconds.len() - 1) as f64 * share).round() as usize] / 3600.0;
    let mean = |of: &dyn Fn(&Outcome) -> f64| outcomes.iter().map(of).sum::<f64>() / outcomes.len() as f64;
    vec![
        name.to_owned(),
        units.to_string(),
        nodes.to_string(),
        format!("{:.2}", at(0.5)),
        format!("{:.2}", at(0.9)),
        format!("{:.1}", mean(&|o| o.lost as f64)),
        format!("{:.1}", mean(&|o| o.duplicates as f64)),
        format!("{:.0} %", 100.0 * mean(&|o| o.busy)),
    ]
}

fn read(path: &Path) -> Result<Vec<Task>> {
    let text = std::fs::read(path)?;
    tasks(&serde_json::from_slice(&text)?)
}

/// Reads the JSON of `quant job units`.
fn tasks(listed: &Value) -> Result<Vec<Task>> {
    ensure!(listed["schema"] == "quant-job-units/1", "the schema is not quant-job-units/1");
    let units = listed["units"].as_array().context("it has no units")?;
    let id = |unit: &Value| unit["id"].as_str().map(str::to_owned).context("a unit has no id");
    let ids = units.iter().map(id).collect::<Result<Vec<String>>>()?;
    let places: HashMap<&str, usize> = ids.iter().map(String::as_str).zip(0..).collect();
    units
        .iter()
        .zip(&ids)
        .map(|(unit, id)| {
            let number = |key: &str| {
                unit[key].as_f64().filter(|n| *n >= 0.0).with_context(|| format!("`{id}` has no `{key}`"))
            };
            let needs = unit["needs"].as_array().with_context(|| format!("`{id}` has no `needs`"))?;
            let place = |need: &Value| need.as_str().and_then(|need| places.get(need)).copied();
            let needs = needs.iter().map(|need| place(need).with_context(|| format!("`{id}` needs {need}")));
            Ok(Task {
                id: id.clone(),
                needs: needs.collect::<Result<Vec<usize>>>()?,
                seconds: number("seconds")?,
                input_bytes: number("input_bytes")?,
                output_bytes: number("output_bytes")?,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn units_are_read() {
        let unit = |id: &str, needs: &[&str]| {
            json!({ "id": id, "phase": "blocks", "needs": needs, "seconds": 2.5, "memory_bytes": 1,
                "smallest_budget_bytes": 1, "input_bytes": 10, "output_bytes": 20 })
        };
        let listed = |units: Value| json!({ "schema": "quant-job-units/1", "job": "x", "units": units });
        let found = tasks(&listed(json!([unit("a", &[]), unit("b", &["a"])]))).unwrap();
        assert_eq!(
            (found[1].needs.as_slice(), found[1].seconds, found[1].output_bytes),
            (&[0][..], 2.5, 20.0)
        );
        for wrong in [json!([unit("a", &["c"])]), json!([{ "id": "a" }]), json!(3)] {
            assert!(tasks(&listed(wrong)).is_err());
        }
        assert!(tasks(&json!({ "schema": "other" })).is_err());
    }
}
