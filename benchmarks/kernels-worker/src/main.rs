//! Runs the kernels of quant or of candle as a worker of `cargo study peers-kernels`: `kernels-worker ours|candle
//! THREADS`; and the experts of a layer as a worker of `cargo study peers-experts`: `kernels-worker experts THREADS`.
//!
//! It reads requests from standard input, one per line, and answers each with a line of JSON. The workers of other
//! peers (`benchmarks/peers/kernels_*`) use the same protocol:
//!
//! ```text
//! at the start              {"name", "version", "contestants": [name…]}
//! prepare NAME N K BYTES    weights [n, k], in copies of BYTES bytes together      {"bytes", "copies", "note"}
//! tokens NAME M 0|1         activations [m, k]; 1: every copy is read in turn      {"error"}
//! run NAME MILLISECONDS     passes over the copies, for this long                  {"seconds": [per product…]}
//! drop NAME                 frees the weights                                      {}
//! limits                    this program only: memory and dot products             {"memory", "streams", "tops"}
//! ```
//!
//! For experts, `prepare NAME INNER HIDDEN COUNT` creates the experts of a layer. Instead of `tokens` there is `route
//! NAME M CALLS TOP_K`, followed by a line with the experts of all tokens of all calls. A pass makes all calls,
//! `seconds` are per call, and `bytes` is the size of one expert.
//!
//! A failure is answered with `{"failed": reason}`. `bytes` is the size of one packed copy. `error` compares some
//! outputs with the product of the unquantized weights: the root mean square of the difference divided by that of the
//! product. `memory` is in GB/s and `tops` in 10¹² integer operations per second. The times of all peers include the
//! processing of activations inside a kernel.
#![forbid(unsafe_code)]

mod candle;
mod data;
mod experts;
mod ours;

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::data::{activations, error};

/// Weights of one contestant, ready for products.
trait Case {
    /// Bytes of one copy.
    fn bytes(&self) -> usize;

    /// The number of copies.
    fn copies(&self) -> usize;

    /// A note to be shown with the figures.
    fn note(&self) -> String;

    /// Sets the input rows `[m, k]`.
    fn tokens(&mut self, x: &[f32], m: usize) -> Result<()>;

    /// Multiplies the input rows by each of the first `copies` copies.
    fn pass(&mut self, copies: usize) -> Result<()>;

    /// The output of the last product, `[m, n]`.
    fn out(&self) -> Result<Vec<f32>>;
}

/// A case, and the number of copies that a pass reads.
struct Running {
    case: Box<dyn Case>,
    n: usize,
    k: usize,
    copies: usize,
}

fn main() -> Result<()> {
    let usage = "kernels-worker ours|candle|experts THREADS";
    let mut args = std::env::args().skip(1);
    let (who, threads) = args.next().zip(args.next()).context(usage)?;
    let threads: usize = threads.parse().context(usage)?;
    // Call products from within the thread pool, as a program that computes several in a row does.
    rayon::ThreadPoolBuilder::new().num_threads(threads).build()?.install(|| serve(&who))
}

fn serve(who: &str) -> Result<()> {
    let (version, contestants) = match who {
        "ours" => (ours::version(), ours::CONTESTANTS.map(|c| c.name).to_vec()),
        "candle" => (candle::version(), candle::CONTESTANTS.map(|c| c.0).to_vec()),
        "experts" => (ours::version(), experts::CONTESTANTS.map(|c| c.name).to_vec()),
        _ => bail!("unknown worker `{who}`"),
    };
    answer(&json!({"name": who, "version": version, "contestants": contestants}))?;
    let (mut cases, mut layers) = (BTreeMap::new(), BTreeMap::new());
    let mut limits = None;
    let mut lines = std::io::stdin().lock().lines();
    while let Some(line) = lines.next() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let reply = match words[..] {
            ["limits"] => Ok(limits.get_or_insert_with(ours::Limits::new).probe()),
            [request, name, ref numbers @ ..] => {
                let numbers: Vec<usize> = numbers.iter().filter_map(|n| n.parse().ok()).collect();
                if who == "experts" {
                    let routed = if request == "route" { lines.next().transpose()? } else { None };
                    let reply = experts::serve(&mut layers, request, name, &numbers, routed.as_deref());
                    answer(&reply.unwrap_or_else(|failure| json!({"failed": format!("{failure:#}")})))?;
                    continue;
                }
                serve_case(&mut cases, who, request, name, &numbers)
            }
            _ => bail!("an empty request"),
        };
        answer(&reply.unwrap_or_else(|failure| json!({"failed": format!("{failure:#}")})))?;
    }
    Ok(())
}

fn serve_case(
    cases: &mut BTreeMap<String, Running>,
    who: &str,
    request: &str,
    name: &str,
    numbers: &[usize],
) -> Result<Value> {
    if let ("prepare", &[n, k, rotate]) = (request, numbers) {
        let case: Box<dyn Case> = match who {
            "ours" => Box::new(ours::Linear::new(name, [n, k], rotate)?),
            _ => Box::new(candle::Linear::new(name, [n, k], rotate)?),
        };
        let reply = json!({"bytes": case.bytes(), "copies": case.copies(), "note": case.note()});
        cases.insert(name.to_owned(), Running { case, n, k, copies: 1 });
        return Ok(reply);
    }
    let running = cases.get_mut(name).with_context(|| format!("{name} was not prepared"))?;
    match (request, numbers) {
        ("tokens", &[m, rotate]) => {
            ensure!(m > 0, "no tokens");
            running.copies = if rotate == 1 { running.case.copies() } else { 1 };
            let x = activations(m, running.k);
            running.case.tokens(&x, m)?;
            // Use all copies once, because some peers reorder weights on first use.
            running.case.pass(running.copies)?;
            Ok(json!({"error": error(&running.case.out()?, &x, [running.n, running.k])}))
        }
        ("run", &[milliseconds]) => {
            let copies = running.copies;
            let seconds = passes(milliseconds, copies, &mut || running.case.pass(copies))?;
            Ok(json!({"seconds": seconds}))
        }
        ("drop", []) => {
            cases.remove(name);
            Ok(json!({}))
        }
        _ => bail!("unknown request or wrong number of arguments: {request}"),
    }
}

/// Runs passes until the time is over, and returns the seconds per item of each. The first pass is a warm-up and is
/// dropped, unless it is the only one.
fn passes(milliseconds: usize, things: usize, pass: &mut dyn FnMut() -> Result<()>) -> Result<Vec<f64>> {
    let (started, mut taken) = (Instant::now(), Vec::new());
    while started.elapsed().as_millis() < milliseconds as u128 {
        let before = Instant::now();
        pass()?;
        taken.push(before.elapsed().as_secs_f64() / things as f64);
    }
    if taken.len() > 1 {
        taken.remove(0);
    }
    Ok(taken)
}

fn answer(reply: &Value) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{reply}")?;
    Ok(out.flush()?)
}
