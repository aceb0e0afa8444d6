//! `cargo study peers-kernels`: compares quant's linear kernels with those of other engines in one run, interleaved.
//!
//! Each peer is a process that keeps its own weights, on the same cores and with the same number of threads. In each
//! round, every contestant has a short turn while all others wait, so that a disturbance of the machine affects all
//! contestants. The limits of the machine are probed in every round, and ratios are computed per round.
//!
//! Results are kept in a file for each commit, so a run may be split by threads and shapes.

pub(crate) mod install;
mod report;
pub(crate) mod worker;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use xtask::support::host::clean_commit;
use xtask::support::record::{Record, typed_command};
use xtask::support::shell::target_dir;

use self::report::{Measured, Turn};
use self::worker::Worker;
pub use self::worker::cpus;

const SHAPES: [&str; 5] = ["4096x4096", "14336x4096", "4096x14336", "2048x2048", "8192x2048"];
/// Up to this many tokens, every product reads weights that are not in any cache.
const ROTATED_TOKENS: usize = 16;
/// Default of the total bytes of the copies of a matrix, see [`bounded`].
const ROTATED: usize = 192 << 20;
/// Idle time between two turns, after which threads that spin for more work have gone to sleep.
const SETTLE_TIME: Duration = Duration::from_millis(8);
/// Maximum relative error of a product at 4 and at 8 bits: root mean square of the error over that of the product.
const ERRORS: [f64; 2] = [0.15, 0.03];

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Numbers of threads
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    threads: Vec<usize>,
    /// Peers to compare with
    #[arg(long, value_delimiter = ',', default_value = "ggml,candle,onnxruntime,openvino,torch")]
    peers: Vec<String>,
    /// Shapes of weights, output by input features
    #[arg(long, value_delimiter = ',', default_values = SHAPES)]
    shapes: Vec<String>,
    /// Numbers of tokens
    #[arg(long, value_delimiter = ',', default_value = "1,4,16,64,512")]
    tokens: Vec<usize>,
    /// Measure only kernels whose names contain one of these, in any case, such as the types of GGUF, `q4_k,q6_k,iq4`
    /// (record `peers-kernels-gguf`)
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Limit all contestants to these instructions; peers that cannot be limited are left out (record
    /// `peers-kernels-avx2`)
    #[arg(long, conflicts_with = "only")]
    level: Option<install::Level>,
    /// Turns per contestant
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Milliseconds per turn
    #[arg(long, default_value_t = 40)]
    milliseconds: usize,
    /// Measure this `kernels-worker` instead of building one
    #[arg(long)]
    program: Option<PathBuf>,
    /// One shape, few tokens and short turns, to check that everything works; writes no record
    #[arg(long)]
    quick: bool,
}

impl Args {
    fn measures(&self, name: &str) -> bool {
        let name = name.to_lowercase();
        self.only.is_empty() || self.only.iter().any(|part| name.contains(&part.to_lowercase()))
    }
}

/// Measures and writes the record. A peer that cannot be started, fails, or gives a wrong result is reported and left
/// out.
///
/// # Errors
/// When a peer cannot be built, or quant's kernels fail.
pub fn run(args: &Args) -> Result<()> {
    let mut args = args.clone();
    if args.quick {
        (args.shapes, args.tokens) = (vec!["4096x4096".into()], vec![1, 16, 512]);
        (args.rounds, args.milliseconds) = (2, 20);
    }
    ensure!(args.rounds > 0 && args.milliseconds > 0, "nothing to measure");
    let shapes = args.shapes.iter().map(|s| shape(s)).collect::<Result<Vec<_>>>()?;
    let programs = install::programs(&args.peers, args.program.as_deref(), args.level)?;
    let folder = if args.level.is_some() { "peers-kernels-avx2" } else { "peers-kernels" };
    let kept = target_dir().join(folder).join(format!("{}.csv", clean_commit().unwrap_or("trial".into())));
    let mut measured = Measured::default();
    if args.level.is_some() {
        for (peer, why) in
            install::Level::UNLIMITED.iter().filter(|(peer, _)| args.peers.iter().any(|p| p == peer))
        {
            measured.note(peer, "left out", why);
        }
    }
    for &threads in &args.threads {
        let cpus = worker::cpus(threads)?;
        let mut workers = Vec::new();
        for (i, program) in programs.iter().enumerate() {
            match Worker::start(program, threads, &cpus) {
                Ok(mut worker) => {
                    worker.contestants.retain(|name| args.measures(name));
                    workers.push(worker);
                }
                Err(error) if i > 0 => leave_out(&mut measured, threads, &program.command.join(" "), &error),
                Err(error) => return Err(error),
            }
        }
        for &shape in &shapes {
            // Restart the shape without the peer that failed.
            while let Err((i, error)) = measure(&args, threads, shape, &mut workers, &mut measured) {
                if i == 0 {
                    return Err(error);
                }
                let failed = workers.remove(i);
                leave_out(&mut measured, threads, &failed.name, &error);
                measured.turns.retain(|t| (t.threads, t.shape) != (threads, shape));
                for worker in &mut workers {
                    worker.release_all();
                }
            }
            println!("{}", measured.page_of(threads, shape));
        }
        measured.versions = workers.iter().map(|w| format!("{} {}", w.name, w.version)).collect();
    }
    println!("{}", measured.comparison());
    if args.quick {
        return Ok(());
    }
    measured.keep(&kept)?;
    if clean_commit().is_none() {
        println!("not recorded: the working tree has uncommitted changes");
        return Ok(());
    }
    let (body, csv) = (measured.page(&notes(&args, measured.rotated)), measured.csv());
    let record = Record {
        benchmark: match args.level {
            Some(install::Level::Avx2) => "peers-kernels-avx2",
            None if args.only.is_empty() => "peers-kernels",
            None => "peers-kernels-gguf",
        },
        title: match args.level {
            Some(install::Level::Avx2) => "Linear kernels with AVX2: ours and other libraries'".into(),
            None => "Linear kernels: ours and other libraries'".into(),
        },
        command: typed_command(),
        body,
        csv,
    };
    println!("recorded in {}", record.write()?.display());
    Ok(())
}

fn leave_out(measured: &mut Measured, threads: usize, peer: &str, error: &anyhow::Error) {
    eprintln!("skipped, {threads} thread(s): {peer}: {error:#}");
    measured.leave_out(threads, peer, &format!("{error:#}"));
}

fn shape(text: &str) -> Result<[usize; 2]> {
    let (n, k) =
        text.split_once('x').with_context(|| format!("`{text}` is not a shape such as 4096x4096"))?;
    let shape = [n.parse()?, k.parse()?];
    ensure!(
        shape.iter().all(|s| *s > 0 && s % 256 == 0),
        "{text}: both must be multiples of 256, because the block size of every contestant divides 256"
    );
    Ok(shape)
}

fn notes(args: &Args, rotated: usize) -> String {
    format!(
        "Each peer is a process on the first cores of the machine, one core per thread, and every environment \
         variable for the number of threads is set accordingly. Every contestant takes `f32` activations and returns \
         `f32`; its time includes quantizing the activations, for ours too, except for `ready`, which gets them \
         quantized. {} rounds; in each, every contestant has a turn of {} ms, in reverse order every second round, \
         and the limits of the machine are measured: memory as the best of five patterns of reading 256 MiB, dot \
         products from registers. A turn's figure is the median of its products; the figures here are medians over \
         rounds, percentages are relative to the limits of the same round, and ratios are computed per round. Up to \
         {ROTATED_TOKENS} tokens, weights are read in turn from copies of {} MiB in total; beyond that, they are the \
         same every time. GB/s count packed weights including their scales.\n\nEvery product is compared with that \
         of the float weights (random, normal) on 256 of its outputs for two tokens: the relative RMS error is at \
         most {} % at 4 bits and {} % at 8.\n",
        args.rounds,
        args.milliseconds,
        rotated >> 20,
        100.0 * ERRORS[0],
        100.0 * ERRORS[1],
    ) + match args.level {
        Some(install::Level::Avx2) => {
            "\nEvery contestant is limited to AVX2: quant by QUANT_ISA, ggml by loading its library for Haswell, candle \
             by its build, and PyTorch and OpenVINO by the variables of their libraries (ATEN_CPU_CAPABILITY, \
             ONEDNN_MAX_CPU_ISA, MKL_ENABLE_INSTRUCTIONS, FBGEMM_ENABLE_INSTRUCTIONS).\n"
        }
        None => "",
    }
}

/// Bytes of all copies of a matrix that each contestant keeps: more than the last-level cache holds, but at most half
/// of the free memory for all contestants together.
fn rotated(contestants: usize) -> usize {
    let size = |index: usize| {
        let path = PathBuf::from(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size"));
        let text = std::fs::read_to_string(path).ok()?;
        Some(text.trim().strip_suffix('K')?.parse::<usize>().ok()? << 10)
    };
    let free = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| free_memory(&text));
    bounded((0..5).filter_map(size).max().unwrap_or(0), free, contestants)
}

fn bounded(last_cache: usize, free: Option<usize>, contestants: usize) -> usize {
    let wanted = ROTATED.max(4 * last_cache);
    free.map_or(wanted, |free| wanted.min(free / 2 / contestants.max(1)))
}

/// Returns `MemAvailable` of `/proc/meminfo`, in bytes.
fn free_memory(meminfo: &str) -> Option<usize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1 << 10)
}

/// Measures a shape; an error carries the index of the worker that failed.
fn measure(
    args: &Args,
    threads: usize,
    [n, k]: [usize; 2],
    workers: &mut [Worker],
    measured: &mut Measured,
) -> Result<(), (usize, anyhow::Error)> {
    // Worker index, contestant, and packed bytes.
    let mut contestants = Vec::new();
    let rotated = rotated(workers.iter().map(|w| w.contestants.len()).sum());
    measured.rotated = measured.rotated.max(rotated);
    for (i, worker) in workers.iter_mut().enumerate() {
        for name in worker.contestants.clone() {
            let made = worker.prepare(&name, [n, k], rotated).map_err(|e| (i, e))?;
            measured.note(&worker.name, &name, &made.note);
            contestants.push((i, name, made.bytes));
        }
    }
    for &tokens in &args.tokens {
        for (i, name, bytes) in &contestants {
            let error = workers[*i].tokens(name, tokens, tokens <= ROTATED_TOKENS).map_err(|e| (*i, e))?;
            let max = ERRORS[usize::from(8 * bytes > 6 * n * k)];
            if error > max {
                let text =
                    format!("{name} at {n} × {k}, {tokens} token(s): the error is {error:.3} (limit {max})");
                return Err((*i, anyhow::Error::msg(text)));
            }
        }
        for round in 0..args.rounds {
            let limits = workers[0].limits().map_err(|e| (0, e))?;
            let mut order: Vec<_> = contestants.iter().collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for (i, name, bytes) in order {
                std::thread::sleep(SETTLE_TIME);
                let seconds = workers[*i].run(name, args.milliseconds).map_err(|e| (*i, e))?;
                measured.turns.push(Turn {
                    threads,
                    shape: [n, k],
                    tokens,
                    round,
                    peer: workers[*i].name.clone(),
                    contestant: name.clone(),
                    bytes: *bytes,
                    products: seconds.len(),
                    seconds: xtask::support::measure::median(seconds),
                    limits,
                });
            }
        }
    }
    for (i, name, _) in &contestants {
        workers[*i].release(name).map_err(|e| (*i, e))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotation_is_bounded_by_free_memory() {
        assert_eq!(free_memory("MemTotal: 9 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
        assert_eq!(free_memory("MemTotal: 9 kB\n"), None);
        // Small and large caches, with much, little and unknown free memory.
        assert_eq!(bounded(32 << 20, Some(64 << 30), 16), ROTATED);
        assert_eq!(bounded(480 << 20, Some(64 << 30), 16), 1920 << 20);
        assert_eq!(bounded(480 << 20, Some(16 << 30), 16), 512 << 20);
        assert_eq!(bounded(480 << 20, None, 16), 1920 << 20);
    }
}
