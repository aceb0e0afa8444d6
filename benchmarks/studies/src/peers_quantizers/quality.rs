//! Compares the checkpoints' divergence from the float model. `quant eval` reads and scores all of them on the same
//! windows, so differences are paired.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, anyhow, ensure};
use xtask::bench_rtn::quant_binary;
use xtask::support::record::{Record, table, typed_command};
use xtask::support::shell::{output, remove_dir, shared_dir, target_dir};

use super::contestant::{Job, Maker, Package, Peer, tokens_sha256};
use super::contests::{Metric, Quality, Set};
use super::scores::{Pair, Pooled, Scores, pooled};
use crate::support::rows::{ROWS, Row, quantize, texts};

/// Number of rows that are measured concurrently.
const PARALLEL_RUNS: usize = 2;
/// Threads of PyTorch, for which these matrices are small.
const PEER_THREADS: usize = 1;
/// Threads of `quant`, whose results do not depend on them.
const THREADS: &str = "1";

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Evaluation windows per row
    #[arg(long, default_value_t = 40)]
    windows: usize,
    /// Calibration windows
    #[arg(long, default_value_t = 32)]
    samples: usize,
    /// Selections of calibration windows to average scores over, because each selection is a random draw
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Only the sets with this many bits
    #[arg(long)]
    bits: Option<u32>,
    /// Measure this program instead of building one
    #[arg(long)]
    quant: Option<PathBuf>,
    /// Fail when a claim does not hold
    #[arg(long)]
    check: bool,
}

/// The scores of all contestants on a row, in their order; `None` for one that cannot quantize it.
struct Scored {
    row: &'static Row,
    scores: Vec<Option<Scores>>,
}

struct Session<'a> {
    args: &'a Args,
    quality: &'a Quality,
    quant: PathBuf,
    data: PathBuf,
    peers: BTreeMap<Package, Peer>,
    versions: Mutex<BTreeMap<Package, String>>,
}

/// Measures and writes the record.
pub fn run(args: &Args, quality: &Quality) -> Result<()> {
    ensure!(args.windows > 1, "--windows must be at least 2: one window gives no spread");
    let data = shared_dir().context("the real models and texts are not available")?.join("data");
    let packages = quality.contestants.iter().filter_map(|c| match c.maker {
        Maker::Peer { package, .. } => Some(package),
        Maker::Ours { .. } => None,
    });
    let peers = packages.map(|p| Ok((p, Peer::install(p)?))).collect::<Result<_>>()?;
    let quant = quant_binary(args.quant.as_deref())?;
    let session = Session { args, quality, quant, data, peers, versions: Mutex::default() };
    let mut csv = vec!["bits,outliers,model,evaluation,group,who,seed,window,tokens,kl,nll".to_owned()];
    let (mut body, mut broken, mut all) = (String::new(), Vec::new(), Vec::new());
    let is_asked = |set: &&Set| args.bits.is_none_or(|bits| bits == set.bits);
    ensure!(quality.sets.iter().any(|set| is_asked(&set)), "no set has that number of --bits");
    for set in quality.sets.iter().filter(is_asked) {
        let rows = session.measure_all(set)?;
        csv.extend(rows.iter().flat_map(|scored| quality.lines(set, scored)));
        let cells: Vec<_> = rows.iter().map(|scored| quality.describe(scored)).collect();
        body += &format!("## {}\n\n{}\n", set.title, table(&quality.header(), &cells));
        body += &quality.judge(set.title, &rows, Some(&mut broken));
        all.extend(rows);
    }
    body += "## All sets\n\n";
    body += &quality.judge("all sets", &all, None);
    let versions = session.versions.into_inner().unwrap_or_else(PoisonError::into_inner);
    let versions: Vec<String> = versions.into_values().collect();
    let record = Record {
        benchmark: quality.record,
        title: quality.title.into(),
        command: typed_command(),
        body: format!(
            "Peers: {}; in float32. {} All: symmetric grids; the same {} calibration windows of 512 tokens (256 on \
             stories260k), verified by the digests of their tokens; scores averaged over {} selection(s) of windows; \
             embeddings and head float. Scored by `quant eval` on the \
             same {} windows: perplexity, and KL to float over the full vocabulary in nats per token, ± its standard \
             error over windows. Planted: 4 channels of every norm multiplied by 32, the columns that read them \
             divided by 32.\n\nA pooled difference weights rows by tokens. A window of a text counts as one sample, \
             however many rows score it; the spread is computed within each model and text. If there are several \
             selections of calibration windows, they are further samples, whose spread is added.\n\n{body}",
            versions.join("; "),
            quality.settings,
            args.samples,
            args.seeds,
            args.windows
        ),
        csv,
    };
    record.conclude(args.check, &broken)
}

impl Session<'_> {
    /// Measures all rows of a set, [`PARALLEL_RUNS`] at a time; results are in order.
    fn measure_all(&self, set: &Set) -> Result<Vec<Scored>> {
        let rows: Vec<&Row> = if self.quality.grouped { ROWS.iter().collect() } else { texts() };
        // Copies with outliers are created on first use, so create them before rows run concurrently.
        rows.iter().try_for_each(|row| row.model(&self.data, set.planted).map(drop))?;
        let next = AtomicUsize::new(0);
        let worker = || -> Result<Vec<(usize, Scored)>> {
            let mut done = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(row) = rows.get(at) else { return Ok(done) };
                let out = target_dir().join(format!("{}-{at}", self.quality.record));
                let scored = self.measure(row, set, &out)?;
                remove_dir(&out)?;
                println!("{}", self.quality.describe(&scored).join("  "));
                done.push((at, scored));
            }
        };
        let mut scored = std::thread::scope(|scope| -> Result<Vec<_>> {
            let workers: Vec<_> = (0..PARALLEL_RUNS).map(|_| scope.spawn(worker)).collect();
            let mut all = Vec::new();
            for worker in workers {
                all.extend(worker.join().map_err(|_| anyhow!("a worker panicked"))??);
            }
            Ok(all)
        })?;
        scored.sort_by_key(|(at, _)| *at);
        Ok(scored.into_iter().map(|(_, scored)| scored).collect())
    }

    /// Quantizes a row with all contestants on each selection of calibration windows, and scores the results.
    fn measure(&self, row: &'static Row, set: &Set, out: &Path) -> Result<Scored> {
        let mut all: Vec<Vec<Scores>> = self.quality.contestants.iter().map(|_| Vec::new()).collect();
        for seed in 0..self.args.seeds {
            let scores = self.measure_seed(row, set, out, seed)?;
            all.iter_mut().zip(scores).for_each(|(all, scores)| all.extend(scores));
        }
        Ok(Scored { row, scores: all.into_iter().map(Scores::averaged).collect() })
    }

    fn measure_seed(&self, row: &Row, set: &Set, out: &Path, seed: u64) -> Result<Vec<Option<Scores>>> {
        let model = row.model(&self.data, set.planted)?;
        let calibration = row.calibration(&self.data);
        let per_channel: Vec<&str> = row.per_channel().collect();
        let (mut scores, mut tokens) = (Vec::<Option<Scores>>::new(), None);
        for contestant in self.quality.contestants {
            if !contestant.takes(row) {
                scores.push(None);
                continue;
            }
            remove_dir(out)?;
            match &contestant.maker {
                Maker::Ours { options, calibrated } => {
                    let mut command = match self.quality.grouped {
                        true => row.quantize(&self.quant, &model, set.bits, out),
                        false => quantize(&self.quant, &model, out),
                    };
                    command.args(*options).args(["--threads", THREADS]);
                    if *calibrated {
                        command.arg("--calibration").arg(&calibration);
                        command.args(["--samples", &self.args.samples.to_string()]);
                        command.args(["--seq-len", &row.window.to_string(), "--seed", &seed.to_string()]);
                    }
                    output(&mut command)?;
                    if *calibrated {
                        tokens = Some(tokens_sha256(out)?);
                    }
                }
                Maker::Peer { package, method, settings } => {
                    let peer = self.peers.get(package).context("a peer is not installed")?;
                    let outcome = peer.quantize(
                        method,
                        settings,
                        &Job {
                            model: &model,
                            out,
                            calibration: &calibration,
                            samples: self.args.samples,
                            seq_len: row.window,
                            seed,
                            bits: set.bits,
                            group: if self.quality.grouped { row.group } else { "channel" },
                            per_channel: &per_channel,
                            dtype: "float32",
                            threads: PEER_THREADS,
                            tokens_sha256: tokens
                                .as_deref()
                                .context("our program must come before its peers")?,
                        },
                    )?;
                    let mut versions = self.versions.lock().unwrap_or_else(PoisonError::into_inner);
                    versions.insert(*package, outcome.versions);
                }
            }
            let scored = self.score(row, &model, out)?;
            if let Some(other) = scores.iter().flatten().next() {
                ensure!(other.sha256 == scored.sha256, "two results were scored on different tokens");
            }
            scores.push(Some(scored));
        }
        Ok(scores)
    }

    fn score(&self, row: &Row, model: &Path, checkpoint: &Path) -> Result<Scores> {
        let mut command = Command::new(&self.quant);
        command.arg("eval").arg(checkpoint).arg("--reference").arg(model);
        command.arg("--text").arg(self.data.join("text").join(row.evaluation));
        command.args(["--window", &row.window.to_string(), "--windows", &self.args.windows.to_string()]);
        command.args(["--quiet", "--json", "--threads", THREADS]);
        Scores::from_json(&serde_json::from_str(&output(&mut command)?)?)
    }
}

impl Quality {
    fn header(&self) -> Vec<&'static str> {
        let mut header = vec!["model", "text"];
        header.extend(self.grouped.then_some("group"));
        header.extend(self.contestants.iter().flat_map(|c| [c.name, "KL"]));
        header
    }

    fn describe(&self, scored: &Scored) -> Vec<String> {
        let row = scored.row;
        let mut cells = vec![row.name.to_owned(), row.evaluation.to_owned()];
        cells.extend(self.grouped.then(|| row.group.to_owned()));
        for scores in &scored.scores {
            let dash = || "–".to_owned();
            cells.push(scores.as_ref().map_or_else(dash, |s| format!("{:.3}", s.perplexity)));
            let kl = scores.as_ref().map(|s| format!("{:.5} ± {:.5}", s.kl_mean, s.kl_error));
            cells.push(kl.unwrap_or_else(dash));
        }
        cells
    }

    fn lines(&self, set: &Set, scored: &Scored) -> Vec<String> {
        let (row, outliers) = (scored.row, if set.planted { "planted" } else { "none" });
        let group = if self.grouped { row.group } else { "" };
        let head = format!("{},{outliers},{},{},{group}", set.bits, row.name, row.evaluation);
        let of = |(name, s): (&str, &Option<Scores>)| -> Vec<String> {
            let Some(s) = s else { return Vec::new() };
            // A comma would end the column.
            let name = name.replace(',', "");
            let mut lines = Vec::new();
            for (seed, draw) in s.draws.iter().enumerate() {
                let windows = draw.kl.iter().zip(&draw.nll).enumerate();
                lines.extend(
                    windows.map(|(i, (kl, nll))| format!("{head},{name},{seed},{i},{},{kl},{nll}", s.tokens)),
                );
            }
            lines
        };
        self.contestants.iter().map(|c| c.name).zip(&scored.scores).flat_map(of).collect()
    }

    /// The verdicts of all claims over some rows, as a list; violated claims are added to `broken`.
    fn judge(&self, title: &str, rows: &[Scored], mut broken: Option<&mut Vec<String>>) -> String {
        let mut text = String::new();
        for claim in self.claims {
            for than in claim.than {
                let verdict = self.compare(claim.metric, claim.who, than, rows);
                let line = verdict.verdict(claim.how, (claim.who, than));
                println!("{line}");
                text += &format!("- {line}\n");
                if let (Some(broken), false) = (&mut broken, verdict.holds(claim.how)) {
                    broken.push(format!("{title}: {line}"));
                }
            }
        }
        println!();
        text + "\n"
    }

    fn compare<'a>(&self, metric: Metric, who: &str, than: &str, rows: &'a [Scored]) -> Pooled {
        let place = |name| self.contestants.iter().position(|c| c.name == name).unwrap_or(0);
        let (ours, theirs) = (place(who), place(than));
        let pair = |s: &'a Scored| {
            let (ours, theirs) = (s.scores[ours].as_ref()?, s.scores[theirs].as_ref()?);
            Some(Pair { row: s.row, ours, theirs })
        };
        pooled(metric, rows.iter().filter_map(pair))
    }
}
