//! `cargo study peers-experts`: the experts of a layer in the shape of Qwen3-30B-A3B. quant's experts in one call,
//! quant's single products, and llama.cpp's experts are measured in one run, interleaved.
//!
//! Workers, turns and limits work as in [`peers_kernels`](crate::peers_kernels). All workers get the same routing.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use xtask::support::host::clean_commit;
use xtask::support::measure::median;
use xtask::support::record::{Record, table, typed_command};

use crate::peers_kernels::install;
use crate::peers_kernels::worker::{self, Limits, Worker};

const EXPERTS: usize = 128;
/// Experts that each token is sent to.
const TOP_K: usize = 8;
/// Width inside an expert.
const INNER: usize = 768;
/// Width of a token.
const HIDDEN: usize = 2048;
/// Under skewed routing, this number of experts, a tenth of all, take half of the slots.
const HOT: usize = EXPERTS / 10;
/// Maximum relative error of an output after three products at 4 bits: root mean square of the error over that of the
/// output.
const ERROR: f64 = 0.35;
const SETTLE_TIME: Duration = Duration::from_millis(8);
/// quant's contestants that are compared with peers.
const OURS: [&str; 3] = ["w4a8-g128", "w4a8-g32", "w4a16-g128"];

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Numbers of threads
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    threads: Vec<usize>,
    /// Numbers of tokens
    #[arg(long, value_delimiter = ',', default_value = "1,16,512")]
    tokens: Vec<usize>,
    /// Turns per contestant
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Milliseconds per turn
    #[arg(long, default_value_t = 80)]
    milliseconds: usize,
    /// Few rounds and short turns, to check that everything works; writes no record
    #[arg(long)]
    quick: bool,
}

/// The distribution of tokens over experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Spread {
    Uniform,
    Skewed,
}

impl Spread {
    fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Skewed => "skewed",
        }
    }
}

#[derive(Debug, Clone)]
struct Turn {
    threads: usize,
    spread: Spread,
    tokens: usize,
    round: usize,
    who: String,
    /// Seconds per call, and bytes of the experts that a call reads.
    seconds: f64,
    bytes: f64,
    limits: Limits,
}

impl Turn {
    fn shares(&self) -> [f64; 2] {
        let operations = (self.tokens * TOP_K * 3 * 2 * INNER * HIDDEN) as f64;
        [
            self.bytes / self.seconds / 1e9 / self.limits.memory,
            operations / self.seconds / 1e12 / self.limits.tops,
        ]
    }

    fn is_ours(&self) -> bool {
        self.who.starts_with("experts ")
    }
}

/// Measures and writes the record.
///
/// # Errors
/// When a worker cannot be built or fails.
pub fn run(args: &Args) -> Result<()> {
    let mut args = args.clone();
    if args.quick {
        (args.rounds, args.milliseconds) = (2, 20);
    }
    ensure!(args.rounds > 0 && args.milliseconds > 0, "nothing to measure");
    let programs = install::experts()?;
    let (mut turns, mut notes, mut versions) = (Vec::new(), BTreeMap::new(), Vec::new());
    for &threads in &args.threads {
        let cpus = worker::cpus(threads)?;
        let mut workers = programs
            .iter()
            .map(|program| Worker::start(program, threads, &cpus))
            .collect::<Result<Vec<_>>>()?;
        measure(&args, threads, &mut workers, &mut turns, &mut notes)?;
        versions = workers.iter().map(|w| format!("{} {}", w.name, w.version)).collect();
    }
    let page = page(&turns);
    println!("{page}");
    if args.quick {
        return Ok(());
    }
    if clean_commit().is_none() {
        println!("not recorded: the working tree has uncommitted changes");
        return Ok(());
    }
    let notes: String = notes.iter().map(|(who, note)| format!("- {who}: {note}\n")).collect();
    let record = Record {
        benchmark: "peers-experts",
        title: "Experts of a layer: ours and llama.cpp's".into(),
        command: typed_command(),
        body: format!("Versions: {}.\n\n{}\n{notes}\n{page}", versions.join("; "), described(&args)),
        csv: csv(&turns),
    };
    println!("recorded in {}", record.write()?.display());
    Ok(())
}

fn described(args: &Args) -> String {
    format!(
        "A layer of {EXPERTS} experts of {INNER} × {HIDDEN}, {TOP_K} per token, from `f32` activations to their \
         `f32` sum: products with gate and up, SiLU, product with down, routing weights, the sum. llama.cpp's is a \
         graph of its own operations (`mul_mat_id`, `swiglu_split`, `mul`, `add`). `loop` is ours with separate \
         products for each expert that has rows; `dense` is the same products with equal numbers of rows per expert \
         and without gathering or summing. Uniform: all experts are equally likely; skewed: {HOT} of the {EXPERTS} \
         experts take half of the slots. With one token, 16 calls are made, which read different experts if routing is \
         uniform. {} rounds, in each of \
         which every contestant has a turn of {} ms, in reverse order every second round. Percentages are relative \
         to memory bandwidth (each expert used counts once) and to dot products of 8-bit integers in registers, \
         measured in the same round; ratios are computed per round, and figures are medians. The machine is shared \
         with other work.\n",
        args.rounds, args.milliseconds
    )
}

/// Returns the experts of `calls` calls with `tokens` tokens each, and the mean number of distinct experts per call.
fn routed(spread: Spread, tokens: usize, calls: usize) -> (Vec<u32>, f64) {
    let mut state = (tokens + calls) as u64;
    let mut below = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as usize * n) >> 31
    };
    let mut all: Vec<u32> = (0..EXPERTS as u32).collect();
    let (mut experts, mut different) = (Vec::new(), 0);
    for _ in 0..calls {
        let mut seen = [false; EXPERTS];
        for _ in 0..tokens {
            let mut chosen = Vec::new();
            while chosen.len() < TOP_K {
                let hot = spread == Spread::Skewed && chosen.len() % 2 == 0;
                let expert = match (spread, hot) {
                    // Calls with one token use all experts, in descending order, before any is used again.
                    (Spread::Uniform, _) if tokens == 1 => match all.pop() {
                        Some(expert) => expert,
                        None => {
                            all = (0..EXPERTS as u32).collect();
                            continue;
                        }
                    },
                    (_, true) => below(HOT) as u32,
                    (Spread::Skewed, _) => (HOT + below(EXPERTS - HOT)) as u32,
                    _ => below(EXPERTS) as u32,
                };
                if !chosen.contains(&expert) {
                    chosen.push(expert);
                }
            }
            chosen.iter().for_each(|&expert| seen[expert as usize] = true);
            experts.extend(chosen);
        }
        different += seen.iter().filter(|seen| **seen).count();
    }
    (experts, different as f64 / calls as f64)
}

fn measure(
    args: &Args,
    threads: usize,
    workers: &mut [Worker],
    turns: &mut Vec<Turn>,
    notes: &mut BTreeMap<String, String>,
) -> Result<()> {
    let mut contestants = Vec::new();
    for (i, worker) in workers.iter_mut().enumerate() {
        for name in worker.contestants.clone() {
            let made = worker.prepare(&name, [INNER, HIDDEN], EXPERTS)?;
            let who = format!("{} {name}", worker.name);
            notes.insert(who.clone(), made.note);
            contestants.push((i, name, who, made.bytes));
        }
    }
    for (spread, &tokens) in
        [Spread::Uniform, Spread::Skewed].iter().flat_map(|s| args.tokens.iter().map(move |t| (*s, t)))
    {
        let calls = (16 / tokens).max(1);
        let (experts, different) = routed(spread, tokens, calls);
        for (i, name, who, _) in &contestants {
            let error = workers[*i].route(name, [tokens, calls, TOP_K], &experts)?;
            // The output of the dense layers does not correspond to a token, so it is not checked.
            ensure!(name.ends_with("dense") || error <= ERROR, "{who} is off by {error:.3}, at most {ERROR}");
        }
        for round in 0..args.rounds {
            let limits = workers[0].limits()?;
            let mut order: Vec<_> = contestants.iter().collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for (i, name, who, bytes) in order {
                std::thread::sleep(SETTLE_TIME);
                let seconds = median(workers[*i].run(name, args.milliseconds)?);
                let touched = if name.ends_with("dense") { EXPERTS as f64 } else { different };
                let (who, bytes) = (who.clone(), touched * *bytes as f64);
                turns.push(Turn { threads, spread, tokens, round, who, seconds, bytes, limits });
            }
        }
    }
    Ok(())
}

fn csv(turns: &[Turn]) -> Vec<String> {
    let head = "threads,routing,tokens,round,contestant,bytes,seconds,memory_gb_per_second,dot_tops";
    let line = |t: &Turn| {
        let Limits { memory, tops } = t.limits;
        let (routing, seconds) = (t.spread.name(), t.seconds);
        format!(
            "{},{routing},{},{},{},{:.0},{seconds:.9},{memory:.2},{tops:.3}",
            t.threads, t.tokens, t.round, t.who, t.bytes
        )
    };
    std::iter::once(head.to_owned()).chain(turns.iter().map(line)).collect()
}

fn page(turns: &[Turn]) -> String {
    let mut cases: Vec<(usize, Spread)> = turns.iter().map(|t| (t.threads, t.spread)).collect();
    cases.dedup();
    let mut page = String::new();
    for (threads, spread) in cases {
        let of: Vec<&Turn> = turns.iter().filter(|t| (t.threads, t.spread) == (threads, spread)).collect();
        let mut tokens: Vec<usize> = of.iter().map(|t| t.tokens).collect();
        tokens.dedup();
        let mut names: Vec<&str> = Vec::new();
        for turn in &of {
            if !names.contains(&turn.who.as_str()) {
                names.push(&turn.who);
            }
        }
        names.sort_by_key(|name| !name.starts_with("experts "));
        let mut rows = Vec::new();
        for name in names {
            let mut row = vec![name.to_owned()];
            for &tokens in &tokens {
                let own: Vec<&Turn> =
                    of.iter().filter(|t| t.tokens == tokens && t.who == name).copied().collect();
                let share = median(own.iter().map(|t| t.shares()[usize::from(tokens > 1)]));
                let milliseconds = 1e3 * median(own.iter().map(|t| t.seconds));
                let against = ratios(&of, tokens, name);
                row.push(format!("{milliseconds:.3} ms, {:.0} %{against}", 100.0 * share));
            }
            rows.push(row);
        }
        let mut header = vec!["contestant".to_owned()];
        header.extend(tokens.iter().map(|m| match m {
            1 => "1 token: % of memory bandwidth".to_owned(),
            m => format!("{m} tokens: % of dot products"),
        }));
        let header: Vec<&str> = header.iter().map(String::as_str).collect();
        page += &format!("### {threads} thread(s), {} routing\n\n{}\n", spread.name(), table(&header, &rows));
    }
    page
}

fn ratios(of: &[&Turn], tokens: usize, name: &str) -> String {
    let Some(ours) = name.strip_prefix("experts ").filter(|ours| OURS.contains(ours)) else {
        return String::new();
    };
    let mine: Vec<&&Turn> = of.iter().filter(|t| t.tokens == tokens && t.who == name).collect();
    let against = |who: &str| {
        let pairs = mine.iter().filter_map(|t| {
            let other = of.iter().find(|o| o.tokens == tokens && o.round == t.round && o.who == who)?;
            // Dense layers multiply the same number of rows, rounded up to an equal number per expert.
            Some(other.seconds / t.seconds)
        });
        let pairs: Vec<f64> = pairs.collect();
        (!pairs.is_empty()).then(|| median(pairs))
    };
    let peers = of.iter().filter(|t| !t.is_ours()).map(|t| t.who.clone());
    let peers: std::collections::BTreeSet<String> = peers.collect();
    let slowest = peers.iter().filter_map(|who| Some((against(who)?, who)));
    let mut text = String::new();
    if let Some((ratio, who)) = slowest.min_by(|a, b| a.0.total_cmp(&b.0)) {
        text += &format!("; {ratio:.2} × {who}");
    }
    if let Some(ratio) = against(&format!("experts {ours}-loop")) {
        text += &format!("; {ratio:.2} × loop");
    }
    if let Some(ratio) = against(&format!("experts {ours}-dense")).filter(|_| tokens > 1) {
        let rows = (tokens * TOP_K).div_ceil(EXPERTS) * EXPERTS;
        text += &format!("; {:.2} × dense", ratio * (tokens * TOP_K) as f64 / rows as f64);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routings_are_what_they_are_called() {
        let (experts, different) = routed(Spread::Uniform, 1, 16);
        let mut sorted = experts.clone();
        sorted.sort_unstable();
        assert!(different == 8.0 && sorted == (0..128).collect::<Vec<u32>>());
        let (experts, different) = routed(Spread::Skewed, 512, 1);
        let hot = experts.iter().filter(|e| (**e as usize) < HOT).count();
        assert!(hot * 2 == experts.len() && experts.len() == 4096 && different == 128.0);
        for token in experts.chunks(TOP_K) {
            assert!((1..TOP_K).all(|i| !token[..i].contains(&token[i])));
        }
        let (_, different) = routed(Spread::Uniform, 16, 1);
        assert!((60.0..110.0).contains(&different));
    }

    #[test]
    fn ratios_are_of_the_fastest_peer_round_by_round() {
        let limits = Limits { memory: 40.0, tops: 1.0 };
        let turn = |who: &str, round, seconds| Turn {
            threads: 1,
            spread: Spread::Uniform,
            tokens: 512,
            round,
            who: who.into(),
            seconds,
            bytes: 4e9,
            limits,
        };
        let turns = [
            turn("experts w4a16-g128", 0, 1.0),
            turn("experts w4a16-g128", 1, 2.0),
            turn("experts w4a16-g128-dense", 0, 0.9),
            turn("experts w4a16-g128-dense", 1, 1.8),
            turn("ggml Q4_0", 0, 2.0),
            turn("ggml Q4_0", 1, 4.0),
            turn("ggml Q4_K", 0, 3.0),
            turn("ggml Q4_K", 1, 6.0),
        ];
        let all: Vec<&Turn> = turns.iter().collect();
        assert_eq!(ratios(&all, 512, "experts w4a16-g128"), "; 2.00 × ggml Q4_0; 0.90 × dense");
        assert_eq!(ratios(&all, 512, "ggml Q4_0"), "");
        assert!(page(&turns).contains("| ggml Q4_K |"), "{}", page(&turns));
    }
}
