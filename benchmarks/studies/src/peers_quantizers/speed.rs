//! Times all quantizers on the same model, calibration tokens and threads.
//!
//! The time of `quant` is that of the whole process, from its start to the checkpoint on disk. A peer's time covers
//! only its quantizing call, without the imports, loading the model, and compressing and writing it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail, ensure};
use xtask::bench_rtn::{quant_binary, synthetic_model};
use xtask::support::measure::{self, Usage, median};
use xtask::support::record::{Record, table, typed_command};
use xtask::support::shell::{remove_dir, root, target_dir};

use super::contestant::{Job, Maker, Outcome, Package, Peer, tokens_sha256};
use super::contests::{Entry, OVER_BEST, Speed};
use super::log::{table_of_steps, time_of_day, time_until_steps};

const BITS: u32 = 4;
const GROUP: &str = "128";
/// Any text works: the synthetic model's tokens are bytes.
const TEXT: &str = "calibration-data/corpus/exposition.txt";

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Decoder blocks, in the shape of a 1B Llama
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Calibration windows
    #[arg(long, default_value_t = 32)]
    samples: usize,
    /// Tokens per window
    #[arg(long, default_value_t = 512)]
    seq_len: usize,
    /// Threads per quantizer
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Rounds, each of which runs quant and the peers in every element type
    #[arg(long, default_value_t = 3)]
    repeat: usize,
    /// Element types of the peers
    #[arg(long, value_delimiter = ',', default_values = ["float32", "bfloat16"])]
    dtypes: Vec<String>,
    /// Measure this program instead of building one
    #[arg(long)]
    quant: Option<PathBuf>,
    /// Fail if a minimum speedup is not reached
    #[arg(long)]
    check: bool,
}

impl Entry {
    /// Name in tables.
    pub(super) fn name(&self) -> String {
        format!("{}, {}", self.peer.name, self.dtype)
    }
}

/// Measures and writes the record.
pub fn run(args: &Args, speed: &Speed) -> Result<()> {
    ensure!(args.repeat > 0, "--repeat must be positive");
    let entries: Vec<&Entry> =
        speed.peers.iter().filter(|e| args.dtypes.iter().any(|d| d == e.dtype)).collect();
    ensure!(!entries.is_empty(), "no peer runs with {}", args.dtypes.join(" or "));
    let peers: BTreeMap<Package, Peer> = entries
        .iter()
        .map(|e| {
            let package = peer_of(e)?.0;
            Ok((package, Peer::install(package)?))
        })
        .collect::<Result<_>>()?;
    let quant = quant_binary(args.quant.as_deref())?;
    let model = synthetic_model(args.layers)?;
    let out = target_dir().join("bench").join(speed.record);
    std::fs::create_dir_all(target_dir().join("bench"))?;

    let mut csv = vec!["round,who,dtype,seconds,load_seconds,save_seconds,peak_bytes".to_owned()];
    let mut ours: Vec<Usage> = Vec::new();
    let mut theirs: Vec<Vec<Outcome>> = entries.iter().map(|_| Vec::new()).collect();
    let mut steps: BTreeMap<String, f64> = BTreeMap::new();
    for round in 1..=args.repeat {
        remove_dir(&out)?;
        let start = time_of_day();
        let (usage, log) = measure::run_with_output(&mut command(args, speed, &quant, &model, &out)?)?;
        let end = time_of_day();
        println!("ours: {:.1} s, peak {:.0} MB", usage.seconds, mb(usage.peak_bytes));
        csv.push(format!("{round},ours,,{:.3},,,{}", usage.seconds, usage.peak_bytes));
        for (step, seconds) in time_until_steps(&log, start, end)? {
            *steps.entry(step).or_default() += seconds / args.repeat as f64;
        }
        ours.push(usage);
        let tokens = tokens_sha256(&out)?;
        for (entry, outcomes) in entries.iter().zip(&mut theirs) {
            remove_dir(&out)?;
            let (package, method, settings) = peer_of(entry)?;
            let job = Job {
                model: &model,
                out: &out,
                calibration: &root().join(TEXT),
                samples: args.samples,
                seq_len: args.seq_len,
                seed: 0,
                bits: BITS,
                group: GROUP,
                per_channel: &[],
                dtype: entry.dtype,
                threads: args.threads,
                tokens_sha256: &tokens,
            };
            let o = peers[&package].quantize(method, settings, &job)?;
            println!("{}: {:.1} s, peak {:.0} MB", entry.name(), o.quantize, mb(o.peak_bytes));
            csv.push(format!(
                "{round},{},{},{:.3},{:.3},{:.3},{}",
                entry.peer.name, entry.dtype, o.quantize, o.load, o.save, o.peak_bytes
            ));
            outcomes.push(o);
        }
    }
    remove_dir(&out)?;

    let mut rows = vec![vec![
        "ours".to_owned(),
        format!("{:.1}", median(ours.iter().map(|u| u.seconds))),
        "1".to_owned(),
        "within".to_owned(),
        "within".to_owned(),
        "0".to_owned(),
        format!("{:.0}", median(ours.iter().map(|u| mb(u.peak_bytes)))),
    ]];
    let (mut summary, mut broken, mut best) = (String::new(), Vec::new(), f64::INFINITY);
    for (entry, runs) in entries.iter().zip(&theirs) {
        let ratio = median(runs.iter().zip(&ours).map(|(t, o)| t.quantize / o.seconds));
        best = best.min(ratio);
        if let Some((_, promised)) = speed.promised.iter().find(|(name, _)| *name == entry.name()) {
            summary +=
                &format!("Ours is {ratio:.2} times as fast as {} (required: {promised}). ", entry.name());
            if ratio < *promised {
                broken.push(format!("{ratio:.2} times as fast as {}", entry.name()));
            }
        }
        let column = |of: fn(&Outcome) -> f64| median(runs.iter().map(of));
        rows.push(vec![
            entry.name(),
            format!("{:.1}", column(|o| o.quantize)),
            format!("{ratio:.2}"),
            format!("{:.1}", column(|o| o.load)),
            format!("{:.1}", column(|o| o.save)),
            format!("{:.0}", column(|o| mb(o.imported_bytes))),
            format!("{:.0}", column(|o| mb(o.peak_bytes))),
        ]);
    }
    summary += &format!("Ours is {best:.2} times as fast as the fastest of them (required: {OVER_BEST}).");
    if best < OVER_BEST {
        broken.push(format!("{best:.2} times as fast as the fastest"));
    }
    let header = ["", "seconds", "times ours", "load s", "save s", "imports MB", "peak MB (VmHWM)"];
    let table_of_times = table(&header, &rows);
    println!("\n{table_of_times}\n{summary}");
    let versions: BTreeMap<&str, &str> = entries
        .iter()
        .zip(&theirs)
        .filter_map(|(e, runs)| Some((e.peer.name, runs.first()?.versions.as_str())))
        .collect();
    let record = Record {
        benchmark: speed.record,
        title: speed.title.into(),
        command: typed_command(),
        body: format!(
            "Synthetic 1B-shaped Llama, {} layers, bf16, tied; {BITS} bits, symmetric, groups of {GROUP}; the same \
             {} calibration windows of {} tokens; {} thread(s); the programs alternate; medians of {} round(s), with \
             ratios computed per round. Peers: {}; their defaults. Seconds: for ours the whole process, including \
             reading and writing; for a peer only its quantization call, in memory.\n\n{table_of_times}\n{summary}\n\n\
             Our time by step, from the log: seconds from the end of the previous step to the end of each step, \
             summed over the blocks. The first step of a block includes reading it, its forward pass and packing the \
             block \
             before.\n\n{}",
            args.layers,
            args.samples,
            args.seq_len,
            args.threads,
            args.repeat,
            versions.into_values().collect::<Vec<_>>().join("; "),
            table_of_steps(&steps)
        ),
        csv,
    };
    record.conclude(args.check, &broken)
}

fn mb(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

fn peer_of(entry: &Entry) -> Result<(Package, &'static str, &'static [&'static str])> {
    match entry.peer.maker {
        Maker::Peer { package, method, settings } => Ok((package, method, settings)),
        Maker::Ours { .. } => bail!("{} is not a peer", entry.peer.name),
    }
}

fn command(args: &Args, speed: &Speed, quant: &Path, model: &Path, out: &Path) -> Result<Command> {
    let Maker::Ours { options, .. } = speed.ours.maker else { bail!("{} is not ours", speed.ours.name) };
    let mut command = crate::support::rows::quantize(quant, model, out);
    command.args(options).args(["--scheme", &format!("w{BITS}a16"), "--group-size", GROUP, "--symmetric"]);
    command.arg("--calibration").arg(root().join(TEXT));
    command.args(["--samples", &args.samples.to_string(), "--seq-len", &args.seq_len.to_string()]);
    command.args(["--threads", &args.threads.to_string()]);
    command.env("QUANT_LOG", "quant_core=debug").env("NO_COLOR", "1");
    Ok(command)
}
