//! How long both take on the same model, calibration tokens and threads.
//!
//! Ours is timed as a whole, from the start of the process to the checkpoint on disk. The peer's time
//! is that of its call alone: neither its imports, nor loading the model, nor compressing and writing it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use anyhow::{Context, Result, ensure};

use super::peer::{Job, Outcome, Peer, tokens_sha256};
use crate::bench_rtn::{quant_binary, synthetic_model};
use crate::support::measure::{self, Usage, median};
use crate::support::record::{Record, table, typed_command};
use crate::support::shell::{remove_dir, root, target_dir};

/// How many times faster than the peer in float32 we promise to be.
const OVER_FLOAT32: f64 = 5.0;
/// And in the element type that suits it best.
const OVER_BEST: f64 = 2.0;
const GROUP: &str = "128";
/// Any text will do: the synthetic model's tokens are bytes.
const TEXT: &str = "calibration-data/corpus/exposition.txt";
const FLOAT32: &str = "float32";
const DAY: f64 = 86_400.0;

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Decoder blocks, in the shape of a 1B Llama
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Calibration windows
    #[arg(long, default_value_t = 32)]
    samples: usize,
    /// Tokens of a window
    #[arg(long, default_value_t = 512)]
    seq_len: usize,
    /// Threads of either
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Rounds, each of which runs ours and the peer in every element type
    #[arg(long, default_value_t = 3)]
    repeat: usize,
    /// Element types of the peer beside float32
    #[arg(long, value_delimiter = ',', default_values = ["bfloat16"])]
    dtypes: Vec<String>,
    /// Measure this program instead of building ours
    #[arg(long)]
    quant: Option<PathBuf>,
    /// Fail when we are not as much faster as promised
    #[arg(long)]
    check: bool,
}

/// Measures and writes the record.
pub fn run(args: &Args) -> Result<()> {
    ensure!(args.repeat > 0, "--repeat must be positive");
    let peer = Peer::install()?;
    let quant = quant_binary(args.quant.as_deref())?;
    let model = synthetic_model(args.layers)?;
    let out = target_dir().join("bench/peers-awq-out");
    std::fs::create_dir_all(target_dir().join("bench"))?;
    let dtypes: Vec<&str> = std::iter::once(FLOAT32)
        .chain(args.dtypes.iter().map(String::as_str).filter(|d| *d != FLOAT32))
        .collect();

    let mut csv = vec!["round,who,seconds,load_seconds,save_seconds,peak_bytes".to_owned()];
    let mut ours: Vec<Usage> = Vec::new();
    let mut theirs: BTreeMap<&str, Vec<Outcome>> = BTreeMap::new();
    let mut steps: BTreeMap<String, f64> = BTreeMap::new();
    for round in 1..=args.repeat {
        remove_dir(&out)?;
        let start = time_of_day();
        let (usage, log) = measure::run_with_output(&mut command(args, &quant, &model, &out))?;
        let end = time_of_day();
        println!("ours: {:.1} s, peak {:.0} MB", usage.seconds, mb(usage.peak_bytes));
        csv.push(format!("{round},ours,{:.3},,,{}", usage.seconds, usage.peak_bytes));
        for (step, seconds) in time_until_steps(&log, start, end)? {
            *steps.entry(step).or_default() += seconds / args.repeat as f64;
        }
        ours.push(usage);
        let tokens = tokens_sha256(&out)?;
        for dtype in &dtypes {
            remove_dir(&out)?;
            let o = peer.quantize(&Job {
                model: &model,
                out: &out,
                calibration: &root().join(TEXT),
                samples: args.samples,
                seq_len: args.seq_len,
                group: GROUP,
                per_channel: Vec::new(),
                dtype,
                threads: args.threads,
                tokens_sha256: &tokens,
            })?;
            println!("theirs, {dtype}: {:.1} s, peak {:.0} MB", o.oneshot, mb(o.peak_bytes));
            csv.push(format!(
                "{round},{dtype},{:.3},{:.3},{:.3},{}",
                o.oneshot, o.load, o.save, o.peak_bytes
            ));
            theirs.entry(*dtype).or_default().push(o);
        }
    }
    remove_dir(&out)?;

    let mut rows = vec![vec![
        "ours".to_owned(),
        format!("{:.1}", median(ours.iter().map(|u| u.seconds))),
        "1".to_owned(),
        "within".to_owned(),
        "within".to_owned(),
        format!("{:.0}", median(ours.iter().map(|u| mb(u.peak_bytes)))),
    ]];
    let mut times = BTreeMap::new();
    for dtype in &dtypes {
        let runs = &theirs[dtype];
        let ratio = median(runs.iter().zip(&ours).map(|(t, o)| t.oneshot / o.seconds));
        times.insert(*dtype, ratio);
        let column = |of: fn(&Outcome) -> f64| format!("{:.1}", median(runs.iter().map(of)));
        rows.push(vec![
            format!("theirs, {dtype}"),
            column(|o| o.oneshot),
            format!("{ratio:.2}"),
            column(|o| o.load),
            column(|o| o.save),
            format!("{:.0}", median(runs.iter().map(|o| mb(o.peak_bytes)))),
        ]);
    }
    let header = ["", "seconds", "times ours", "load s", "save s", "peak MB (VmHWM)"];
    let table_of_times = table(&header, &rows);
    let best = times.values().copied().fold(f64::INFINITY, f64::min);
    let summary = format!(
        "Ours is {:.2} times as fast as the peer in float32 (promised: {OVER_FLOAT32}), {best:.2} times as fast \
         as in its best element type (promised: {OVER_BEST}).",
        times[FLOAT32]
    );
    println!("\n{table_of_times}\n{summary}");
    let first = &theirs[FLOAT32][0];
    let record = Record {
        benchmark: "peers-awq-speed",
        title: "Time and memory of our AWQ and llm-compressor's".into(),
        command: typed_command(),
        body: format!(
            "Synthetic Llama in 1B shape, {} layers, bf16, tied; 4 bits, symmetric, groups of {GROUP}; the same \
             {} calibration windows of {} tokens; {} thread(s); the two alternate, medians of {} round(s), ratios \
             taken round by round. Peer: {}, its default recipe; its imports alone take {:.0} MB. Seconds: ours \
             the whole process, reading and writing within; the peer's its call to `oneshot` alone, in \
             memory.\n\n{table_of_times}\n{summary}\n\nWhere our time goes, by the log: seconds until each \
             step was done since the one before, summed over the blocks. The first step of a block, the scales of \
             its input_layernorm, includes reading it, its forward pass and packing the block before.\n\n{}",
            args.layers,
            args.samples,
            args.seq_len,
            args.threads,
            args.repeat,
            first.versions,
            mb(first.imported_bytes),
            table_of_steps(&steps)
        ),
        csv,
    };
    println!("recorded in {}", record.write()?.display());
    ensure!(!args.check || (times[FLOAT32] >= OVER_FLOAT32 && best >= OVER_BEST), "{summary}");
    Ok(())
}

fn mb(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

fn command(args: &Args, quant: &Path, model: &Path, out: &Path) -> Command {
    let mut command = Command::new(quant);
    command.arg("quantize").arg(model).arg("-o").arg(out);
    command.args(["--method", "awq", "--scheme", "w4a16", "--group-size", GROUP, "--symmetric", "--quiet"]);
    command.arg("--calibration").arg(root().join(TEXT));
    command.args(["--samples", &args.samples.to_string(), "--seq-len", &args.seq_len.to_string()]);
    command.args(["--threads", &args.threads.to_string()]);
    command.env("QUANT_LOG", "quant_core=debug").env("NO_COLOR", "1");
    command
}

/// Seconds of the day in UTC, by which the program's log tells the time.
fn time_of_day() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    since.as_secs_f64().rem_euclid(DAY)
}

/// Seconds from line to line of the program's log, by what the later one tells of, summed over
/// blocks; `start` and `end` are those of the process.
fn time_until_steps(log: &str, start: f64, end: f64) -> Result<BTreeMap<String, f64>> {
    let mut steps = BTreeMap::new();
    let mut before = start;
    for line in log.lines() {
        let Some((what, name)) =
            [("scales of", "scales chosen producer="), ("clipping of", "ranges chosen module=")]
                .iter()
                .find_map(|(what, text)| Some((what, line.split_once(text)?.1)))
        else {
            continue;
        };
        let name =
            name.split(['"', ' ']).find(|n| !n.is_empty()).context("a line of the log names nothing")?;
        let name = name.rsplit('.').next().unwrap_or(name);
        let now = seconds_of_day(line).with_context(|| format!("no time in `{line}`"))?;
        *steps.entry(format!("{what} {name}")).or_default() += (now - before).rem_euclid(DAY);
        before = now;
    }
    ensure!(!steps.is_empty(), "the program logged no steps");
    steps.insert("end".to_owned(), (end - before).rem_euclid(DAY));
    Ok(steps)
}

/// Of a line that starts with `2026-01-31T01:02:03.456Z`.
fn seconds_of_day(line: &str) -> Option<f64> {
    let time = line.split_once('T')?.1.split_once('Z')?.0;
    let mut parts = time.split(':').map(str::parse::<f64>);
    let (h, m, s) = (parts.next()?.ok()?, parts.next()?.ok()?, parts.next()?.ok()?);
    Some(h * 3600.0 + m * 60.0 + s)
}

fn table_of_steps(steps: &BTreeMap<String, f64>) -> String {
    let total: f64 = steps.values().sum();
    let mut sorted: Vec<_> = steps.iter().collect();
    sorted.sort_by(|a, b| b.1.total_cmp(a.1));
    let rows: Vec<Vec<String>> = sorted
        .into_iter()
        .map(|(step, s)| vec![step.clone(), format!("{s:.1}"), format!("{:.0} %", 100.0 * s / total)])
        .collect();
    table(&["until", "seconds", "share"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_timed_by_the_log() {
        let log = r#"note
2026-01-31T23:59:58.500000Z DEBUG quant_core::transform::awq: scales chosen producer="model.layers.0.input_layernorm" ratio=0.3
2026-01-31T23:59:59.000000Z DEBUG quant_core::transform::clip: ranges chosen module="model.layers.0.self_attn.v_proj" clipped=25
2026-02-01T00:00:01.000000Z DEBUG quant_core::transform::awq: scales chosen producer="model.layers.1.input_layernorm" ratio=0.3
2026-02-01T00:00:01.250000Z DEBUG quant_core::transform::clip: ranges chosen module="model.layers.1.self_attn.v_proj" clipped=25
"#;
        let steps: Vec<_> = time_until_steps(log, DAY - 2.5, 2.0).unwrap().into_iter().collect();
        let expected = [("clipping of v_proj", 0.75), ("end", 0.75), ("scales of input_layernorm", 3.0)];
        assert_eq!(steps, expected.map(|(step, seconds)| (step.to_owned(), seconds)));
        assert!(time_until_steps("nothing", 0.0, 1.0).is_err());
    }
}
