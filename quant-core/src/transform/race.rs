//! The fast scale search: candidates race on growing shares of the batch.
//!
//! Errors of candidates on the same tokens differ far less than errors on different tokens, so a
//! share of the batch tells most candidates apart. All start on some thousand tokens. After each
//! round the best so far is compared with every other in pairs, unit by unit (a unit is a window of
//! the batch, or a part of one): who is worse by more than chance explains is out, and so is who
//! cannot be better by more than [`REGRET`]. Survivors go on to as many tokens again, up to
//! [`SHARE`] of the batch. A batch of few windows, or little more than a thousand tokens, is used
//! whole at once, and then the choice is that of the reference search.
//!
//! Where the watched output depends on a token's own input alone (an MLP, a single linear), rounds
//! take every 16th token, then every 8th and so on, of all windows. The first tokens of a window,
//! on which models are known to place outsized activations, are all taken and counted once, the
//! others by the inverse of their share; where documents share a window, each has such first tokens.
//! Through attention whole windows are taken, in an order that spreads over the batch. Tokens that do
//! not count (masked prompts, padding) are context for attention there, and nothing elsewhere.

use candle_core::{Device, Tensor};
use rayon::prelude::*;

use super::BlockTask;
use super::candidates::{Candidate, Choice, TriedScales, not_finite};
use super::objective::candidate_block;
use crate::calibrate::{BatchLayout, Packing, Sampling};
use crate::model::{Block, BlockGraph, CancelTap, FoldGroup, Op, Segments};
use crate::{CancelToken, Error, Result};

/// Share of the batch that a race uses at most…
const SHARE: usize = 4;
/// …unless that is less than so many tokens.
const ENOUGH_TOKENS: usize = 4096;
/// Tokens of the first round, at least.
const FIRST_TOKENS: usize = 1024;
/// Windows of the first round, at least, where whole windows are taken.
const FIRST_WINDOWS: usize = 4;
/// Windows that are used at least, where whole windows are taken; no more are used at once.
const ENOUGH_WINDOWS: usize = 8;
/// Positions at the start of a window that are always taken.
const HEAD: usize = 4;
/// Units that chance is estimated from, at least.
const UNITS: usize = 16;
/// Standard errors that a difference must exceed, for many units.
const SIGMAS: f64 = 3.0;
/// A candidate that can be better by no more than this share of the error is given up.
const REGRET: f64 = 0.002;
/// Tokens that go through the watched module at a time.
const CHUNK_TOKENS: usize = 2048;

/// Whether what is watched mixes tokens.
pub(super) fn mixes_tokens(graph: &BlockGraph, group: &FoldGroup) -> bool {
    let mut depends = vec![false; graph.nodes().len()];
    depends[group.input] = true;
    let mut mixes = vec![false; graph.nodes().len()];
    for (id, node) in graph.nodes().iter().enumerate().skip(group.input + 1) {
        depends[id] = node.inputs.iter().any(|&i| depends[i]);
        let attention = matches!(node.op, Op::Attention { .. } | Op::Rope) && depends[id];
        mixes[id] = attention || node.inputs.iter().any(|&i| mixes[i]);
    }
    mixes[group.inspected]
}

/// Which tokens race in which round.
#[derive(Debug, Clone)]
enum Share {
    /// The rank of every window, and how many windows have raced after each round.
    Windows { ranks: Vec<usize>, until: Vec<usize> },
    /// Every `stride`-th token after the head in the first round, and half that stride after each
    /// round more.
    Tokens { stride: usize, rounds: usize, units_per_window: usize },
}

/// The part of a group's input that a race may use, `[tokens, channels]`, filled in order of tokens.
#[derive(Debug)]
pub(super) struct Sample {
    layout: BatchLayout,
    channels: usize,
    share: Share,
    rows: Vec<f32>,
    places: Vec<Place>,
    /// The window of the last token that was added, and how many of it after heads were before.
    window: usize,
    tails: usize,
}

/// Where a kept token belongs.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Place {
    token: usize,
    round: usize,
    unit: usize,
    head: bool,
    /// Whether its error is measured; attention needs the others too.
    counts: bool,
}

impl Sample {
    /// A sample, empty yet, of an input with `channels` features of such a batch.
    pub(super) fn new(layout: BatchLayout, channels: usize, mixes_tokens: bool) -> Self {
        let share = if mixes_tokens { Share::windows(layout.windows()) } else { Share::tokens(&layout) };
        Self { layout, channels, share, rows: Vec::new(), places: Vec::new(), window: 0, tails: 0 }
    }

    /// Tokens that a sample takes of a batch, about, and at most where windows are cut from a stream.
    pub(super) fn most_tokens(batch: Sampling, mixes_tokens: bool) -> u64 {
        let (windows, length) = (batch.samples as u64, batch.length as u64);
        if mixes_tokens {
            return windows
                .div_ceil(SHARE as u64)
                .max(ENOUGH_WINDOWS as u64)
                .min(windows)
                .saturating_mul(length);
        }
        let tokens = windows.saturating_mul(length);
        let wanted = (tokens / SHARE as u64).max(ENOUGH_TOKENS as u64);
        let stride = 1 << (tokens / wanted).min(length).max(1).ilog2();
        let heads = match batch.packing {
            // Documents have heads of their own; they are taken to be of 32 tokens at least.
            Packing::Documents => tokens / (32 / HEAD as u64),
            Packing::Auto | Packing::Stream => 0,
        };
        let heads = heads.saturating_add(windows.saturating_mul(HEAD as u64));
        (tokens / stride).saturating_add(heads).min(tokens)
    }

    /// Takes what it wants of the rows `[tokens, channels]`, the first of which is token `first` of
    /// the batch.
    pub(super) fn add(&mut self, first: usize, x: &[f32]) {
        for (i, row) in x.chunks_exact(self.channels.max(1)).enumerate() {
            if let Some(place) = self.place(first + i) {
                self.rows.extend_from_slice(row);
                self.places.push(place);
            }
        }
    }

    /// Where the next token belongs, if it is wanted.
    fn place(&mut self, token: usize) -> Option<Place> {
        let length = self.layout.length();
        let (window, position) = (token / length, token % length);
        let counts = self.layout.counts(token);
        let place = |round, unit, head| Some(Place { token, round, unit, head, counts });
        match &self.share {
            Share::Windows { ranks, until } => {
                place(until.iter().position(|&n| ranks[window] < n)?, window, false)
            }
            Share::Tokens { stride, rounds, units_per_window } => {
                if window != self.window {
                    (self.window, self.tails) = (window, 0);
                }
                if !counts {
                    return None;
                }
                if self.layout.place(token) < HEAD {
                    return place(0, window * units_per_window, true);
                }
                let tail = self.tails;
                self.tails += 1;
                let round = (0..*rounds).find(|r| tail.is_multiple_of(stride >> r))?;
                let part = (position - HEAD) * units_per_window / (length - HEAD).max(1);
                place(round, window * units_per_window + part, false)
            }
        }
    }

    fn rounds(&self) -> usize {
        match &self.share {
            Share::Windows { until, .. } => until.len(),
            Share::Tokens { rounds, .. } => *rounds,
        }
    }

    fn units(&self) -> usize {
        match &self.share {
            Share::Windows { .. } => self.layout.windows(),
            Share::Tokens { units_per_window, .. } => self.layout.windows() * units_per_window,
        }
    }

    /// The rows of a round and their places.
    fn round(&self, round: usize) -> (Vec<f32>, Vec<Place>) {
        let rows = self.rows.chunks_exact(self.channels.max(1)).zip(&self.places);
        let mut values = Vec::new();
        let mut places = Vec::new();
        for (row, place) in rows.filter(|(_, p)| p.round == round) {
            values.extend_from_slice(row);
            places.push(*place);
        }
        (values, places)
    }
}

impl Share {
    fn windows(windows: usize) -> Self {
        // Counting with reversed bits, so that any beginning of the order spreads over the batch.
        let bits = windows.next_power_of_two().trailing_zeros();
        let reversed = |i: usize| if bits == 0 { 0 } else { i.reverse_bits() >> (usize::BITS - bits) };
        let mut ranks = vec![0; windows];
        let order = (0..windows.next_power_of_two()).map(reversed).filter(|w| *w < windows);
        for (rank, window) in order.enumerate() {
            ranks[window] = rank;
        }
        let most = windows.div_ceil(SHARE).max(ENOUGH_WINDOWS).min(windows);
        let first = if windows <= ENOUGH_WINDOWS { windows } else { FIRST_WINDOWS.max(windows / 16) };
        let mut until = vec![first.min(most)];
        while let Some(&last) = until.last().filter(|l| **l < most) {
            until.push((2 * last).min(most));
        }
        Self::Windows { ranks, until }
    }

    fn tokens(layout: &BatchLayout) -> Self {
        let (windows, length, tokens) = (layout.windows(), layout.length(), layout.counted());
        let power = |wanted: usize| (tokens / wanted.max(1)).max(1).min(length.max(1));
        let floor_power = |n: usize| 1_usize << n.ilog2();
        let last = floor_power(power((tokens / SHARE).max(ENOUGH_TOKENS)));
        let stride = floor_power(power(FIRST_TOKENS)).max(last);
        let rounds = (stride / last).ilog2() as usize + 1;
        let units_per_window = UNITS.div_ceil(windows.max(1)).min(length.saturating_sub(HEAD).max(1));
        Self::Tokens { stride, rounds, units_per_window }
    }
}

/// A candidate on its way.
struct Lane {
    index: usize,
    /// Squared errors by unit, of tokens at the start of a window and of the others.
    heads: Vec<f64>,
    tails: Vec<f64>,
    /// The estimate for the whole batch after each round: the sum of squared errors.
    totals: Vec<f64>,
}

/// What has raced so far.
struct Seen {
    units: Vec<bool>,
    heads: usize,
    tails: usize,
}

impl Seen {
    /// What a token after the head stands for.
    fn weight(&self, tokens: usize) -> f64 {
        let tails = tokens.saturating_sub(self.heads);
        if self.tails == 0 { 0.0 } else { tails as f64 / self.tails as f64 }
    }
}

/// Lets candidates race; the first of them is no scaling.
///
/// # Errors
/// When the block fails, the token pulls, or no candidate gives finite outputs
/// ([`Error::Numeric`]).
pub(super) fn choose(
    task: &BlockTask<'_>,
    group: &FoldGroup,
    sample: &Sample,
    candidates: &[Candidate],
) -> Result<Choice> {
    let tokens = sample.layout.counted();
    let width = task.block.linear(group.inspected).weight().shape()[0];
    let units = sample.units();
    let lane = |index| Lane { index, heads: vec![0.0; units], tails: vec![0.0; units], totals: Vec::new() };
    let mut running: Vec<Lane> = (0..candidates.len()).map(lane).collect();
    let mut out: Vec<Lane> = Vec::new();
    let mut seen = Seen { units: vec![false; units], heads: 0, tails: 0 };
    let mut seen_tokens = Vec::new();
    for round in 0..sample.rounds() {
        if running.len() == 1 && round > 0 {
            break;
        }
        let (rows, places) = sample.round(round);
        let batch = Batch::new(task, group, sample, rows, &places)?;
        for place in places.iter().filter(|p| p.counts) {
            seen.units[place.unit] = true;
            *(if place.head { &mut seen.heads } else { &mut seen.tails }) += 1;
        }
        seen_tokens.push((seen.heads + seen.tails) as u64);
        let weight = seen.weight(tokens);
        let mut still = Vec::with_capacity(running.len());
        for mut lane in running {
            task.cancel.check()?;
            let candidate = &candidates[lane.index];
            let errors = match batch.errors(task, group, &candidate.scales) {
                // Scaled weights may need a scale that its type cannot hold: then they are not better.
                Err(Error::Numeric { .. }) if candidate.ratio.is_some() => continue,
                other => other?,
            };
            for (place, error) in places.iter().zip(errors).filter(|(p, _)| p.counts) {
                let sums = if place.head { &mut lane.heads } else { &mut lane.tails };
                sums[place.unit] += error;
            }
            let total = lane.total(weight);
            if total.is_finite() {
                lane.totals.push(total);
                still.push(lane);
            } else if candidate.ratio.is_none() {
                return Err(not_finite());
            }
        }
        (running, out) = eliminate(still, out, &seen, weight);
    }
    let mean = |total: f64| total / (tokens as f64 * width as f64);
    let best = running.iter().reduce(|a, b| if b.last() < a.last() { b } else { a });
    let index = best.ok_or_else(not_finite)?.index;
    out.extend(running);
    out.sort_by_key(|lane| lane.index);
    let of = |index: usize| out.iter().find(|lane| lane.index == index).ok_or_else(not_finite);
    let (unscaled, best) = (of(0)?, of(index)?);
    let rounds = unscaled.totals.len().min(best.totals.len());
    Ok(Choice {
        best: index,
        error_before: mean(unscaled.totals[rounds - 1]),
        error_after: mean(best.totals[rounds - 1]),
        tokens: seen_tokens[rounds - 1],
        tried: out
            .iter()
            .map(|lane| TriedScales {
                ratio: candidates[lane.index].ratio,
                error: mean(lane.last()),
                tokens: seen_tokens[lane.totals.len() - 1],
            })
            .collect(),
    })
}

impl Lane {
    fn unit(&self, unit: usize, weight: f64) -> f64 {
        self.heads[unit] + weight * self.tails[unit]
    }

    fn total(&self, weight: f64) -> f64 {
        (0..self.heads.len()).map(|u| self.unit(u, weight)).sum()
    }

    fn last(&self) -> f64 {
        self.totals.last().copied().unwrap_or(f64::INFINITY)
    }
}

/// Divides lanes into those that may still win and those that are out.
fn eliminate(lanes: Vec<Lane>, mut out: Vec<Lane>, seen: &Seen, weight: f64) -> (Vec<Lane>, Vec<Lane>) {
    let units: Vec<usize> = (0..seen.units.len()).filter(|&u| seen.units[u]).collect();
    let n = units.len() as f64;
    let Some(best) = lanes.iter().reduce(|a, b| if b.last() < a.last() { b } else { a }) else {
        return (lanes, out);
    };
    if units.len() < FIRST_WINDOWS {
        return (lanes, out);
    }
    let least = best.last();
    let reference: Vec<f64> = units.iter().map(|&u| best.unit(u, weight)).collect();
    let index = best.index;
    let (keep, drop) = lanes.into_iter().partition(|lane| {
        let differences = units.iter().zip(&reference).map(|(&u, r)| lane.unit(u, weight) - r);
        let sum: f64 = differences.clone().sum();
        let variance = differences.map(|d| (d - sum / n).powi(2)).sum::<f64>() / (n - 1.0);
        // Few units estimate their own spread badly; the factor stands in for Student's t.
        let margin = SIGMAS * (1.0 + 2.0 / (n - 1.0)) * (n * variance).sqrt();
        let worse = sum > margin;
        let no_better = margin - sum <= REGRET * least;
        lane.index == index || !(worse || no_better)
    });
    let drop: Vec<Lane> = drop;
    out.extend(drop);
    (keep, out)
}

/// Rows of one round with the outputs of the float module.
struct Batch {
    chunks: Vec<Chunk>,
}

/// `[windows, length, channels]`, or `[1, tokens, channels]`.
struct Chunk {
    x: Tensor,
    y: Tensor,
    /// Where the segments of windows begin, if they have several.
    starts: Option<Vec<u32>>,
}

impl Chunk {
    fn segments(&self) -> Segments<'_> {
        self.starts.as_deref().map_or_else(Segments::whole, Segments::new)
    }
}

impl Batch {
    fn new(
        task: &BlockTask<'_>,
        group: &FoldGroup,
        sample: &Sample,
        rows: Vec<f32>,
        places: &[Place],
    ) -> Result<Self> {
        let k = sample.channels;
        // Whole windows, or tokens that have nothing to do with each other.
        let (windows, length) = match sample.share {
            Share::Windows { .. } => ((CHUNK_TOKENS / sample.layout.length()).max(1), sample.layout.length()),
            Share::Tokens { .. } => (1, CHUNK_TOKENS),
        };
        let size = windows * length;
        let chunks = rows.chunks((size * k).max(1)).zip(places.chunks(size)).map(|(rows, places)| {
            task.cancel.check()?;
            let length = length.min(rows.len() / k);
            let x = Tensor::from_slice(rows, (rows.len() / (length * k), length, k), &Device::Cpu)?;
            let starts = match sample.share {
                Share::Windows { .. } => places.iter().map(|p| sample.layout.start(p.token)).collect(),
                Share::Tokens { .. } => None,
            };
            let mut chunk = Chunk { y: x.clone(), x, starts };
            chunk.y = watched(task.block, group, &chunk, task.cancel)?;
            Ok(chunk)
        });
        Ok(Self { chunks: chunks.collect::<Result<_>>()? })
    }

    /// The squared error of every token's output with every quantized consumer replaced by
    /// `Q(W · s) / s`.
    fn errors(&self, task: &BlockTask<'_>, group: &FoldGroup, scales: &[f32]) -> Result<Vec<f64>> {
        let block = candidate_block(task, &group.consumers, scales)?;
        let mut errors = Vec::new();
        for chunk in &self.chunks {
            task.cancel.check()?;
            token_errors(&watched(&block, group, chunk, task.cancel)?, &chunk.y, &mut errors)?;
        }
        Ok(errors)
    }
}

fn watched(block: &Block, group: &FoldGroup, chunk: &Chunk, cancel: &CancelToken) -> Result<Tensor> {
    let known = [(group.input, chunk.x.clone())];
    let values = block.evaluate_packed(&known, &[group.inspected], chunk.segments(), &mut CancelTap(cancel));
    Ok(values?.swap_remove(0))
}

/// Appends `Σ (a − b)²` of every token.
fn token_errors(a: &Tensor, b: &Tensor, errors: &mut Vec<f64>) -> Result<()> {
    let width = a.dim(candle_core::D::Minus1)?;
    let (a, b) = (a.flatten_all()?.to_vec1::<f32>()?, b.flatten_all()?.to_vec1::<f32>()?);
    let rows = a.par_chunks(width.max(1)).zip(b.par_chunks(width.max(1)));
    let part: Vec<f64> =
        rows.map(|(a, b)| a.iter().zip(b).map(|(x, y)| f64::from(x - y) * f64::from(x - y)).sum()).collect();
    errors.extend(part);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sample of one channel, all tokens added.
    fn sample(layout: BatchLayout, mixes_tokens: bool) -> Sample {
        let tokens = layout.tokens();
        let mut sample = Sample::new(layout, 1, mixes_tokens);
        sample.add(0, &vec![1.0; tokens]);
        sample
    }

    fn rounds(sample: &Sample) -> Vec<Vec<usize>> {
        let mut rounds: Vec<Vec<usize>> = Vec::new();
        for place in &sample.places {
            rounds.resize(rounds.len().max(place.round + 1), Vec::new());
            rounds[place.round].push(place.token);
        }
        rounds
    }

    fn batch(samples: usize, length: usize, packing: Packing) -> Sampling {
        Sampling { samples, length, packing, ..Sampling::default() }
    }

    #[test]
    fn tokens_double_up_to_a_quarter() {
        let rounds = rounds(&sample(BatchLayout::plain(32, 512), false));
        let counts: Vec<usize> = rounds.iter().map(Vec::len).collect();
        // The heads come on top of the first.
        assert_eq!(counts, [1024 + 128, 1024, 2048 - 32]);
        let most = Sample::most_tokens(batch(32, 512, Packing::Stream), false) as usize;
        assert!(counts.iter().sum::<usize>().abs_diff(most) < 64);
        assert_eq!(rounds[0][..6], [0, 1, 2, 3, 4, 20]);
    }

    #[test]
    fn small_batches_are_used_whole() {
        for (windows, length) in [(1, 2), (2, 128), (8, 512), (3, 1000), (1, 1), (700, 3)] {
            let all: usize =
                rounds(&sample(BatchLayout::plain(windows, length), false)).iter().map(Vec::len).sum();
            assert_eq!(all, windows * length, "{windows} × {length}");
        }
        let whole = sample(BatchLayout::plain(5, 10), true);
        assert_eq!(rounds(&whole).iter().map(Vec::len).sum::<usize>(), 50);
    }

    #[test]
    fn windows_spread_over_the_batch() {
        let spread = sample(BatchLayout::plain(32, 1), true);
        let Share::Windows { until, .. } = &spread.share else { panic!() };
        assert_eq!(until, &[4, 8]);
        assert_eq!(rounds(&spread), [vec![0, 8, 16, 24], vec![4, 12, 20, 28]]);
        let taken = rounds(&sample(BatchLayout::plain(13, 13), true));
        assert_eq!(taken.concat().len(), 8 * 13);
    }

    /// Of a batch whose prompts are masked, and whose windows hold several documents, as many tokens
    /// are taken as count; every document has a head, and no token comes that does not count.
    #[test]
    fn masked_tokens_do_not_race() {
        use crate::calibrate::TokenUse::{Context, Counted};
        let (windows, length) = (64, 512);
        let uses: Vec<_> =
            (0..windows * length).map(|t| if t % 128 < 64 { Context } else { Counted }).collect();
        let starts: Vec<u32> = (0..windows * length).map(|t| (t % length / 96 * 96) as u32).collect();
        let layout = BatchLayout::new(windows, length, Some(&starts), Some(&uses));
        let tokens = sample(layout.clone(), false);
        assert!(tokens.places.iter().all(|p| p.counts && layout.counts(p.token)));
        let heads = (0..layout.tokens()).filter(|&t| layout.counts(t) && layout.place(t) < HEAD).count();
        assert_eq!(tokens.places.iter().filter(|p| p.head).count(), heads);
        let quarter = layout.counted() / 4;
        assert!(
            (quarter..quarter + heads + windows).contains(&tokens.places.len()),
            "{}",
            tokens.places.len()
        );
        let most = Sample::most_tokens(batch(windows, length, Packing::Documents), false);
        assert!(tokens.places.len() as u64 <= most);
        assert!(tokens.places.iter().all(|p| p.unit < tokens.units()));
        // Attention needs what stands before.
        let whole = sample(layout, true);
        assert_eq!(whole.places.iter().filter(|p| p.counts).count(), whole.places.len() / 2);
    }

    #[test]
    fn every_token_counts_by_what_it_stands_for() {
        let sample = sample(BatchLayout::plain(32, 512), false);
        let mut seen = Seen { units: vec![false; 32], heads: 0, tails: 0 };
        for place in &sample.places {
            *(if place.head { &mut seen.heads } else { &mut seen.tails }) += 1;
        }
        let total = seen.heads as f64 + seen.tails as f64 * seen.weight(32 * 512);
        assert_eq!(total, 32.0 * 512.0);
    }

    fn lane(index: usize, units: &[f64]) -> Lane {
        let total = units.iter().sum();
        Lane { index, heads: units.to_vec(), tails: vec![0.0; units.len()], totals: vec![total] }
    }

    #[test]
    fn who_is_surely_worse_or_surely_no_better_is_out() {
        let seen = Seen { units: vec![true; 8], heads: 8, tails: 0 };
        let base = [100.0, 300.0, 50.0, 80.0, 500.0, 120.0, 90.0, 60.0];
        let with = |f: fn(usize, f64) -> f64| -> Vec<f64> {
            base.iter().enumerate().map(|(i, b)| f(i, *b)).collect()
        };
        let lanes = vec![
            lane(0, &with(|_, b| b + 60.0)),
            lane(1, &base),
            // As good but for a trifle.
            lane(2, &with(|_, b| b * 1.0001)),
            // Better here, worse there.
            lane(3, &with(|i, b| if i % 2 == 0 { b * 1.25 } else { b * 0.8 })),
        ];
        let (keep, out) = eliminate(lanes, Vec::new(), &seen, 1.0);
        let indices = |lanes: &[Lane]| lanes.iter().map(|l| l.index).collect::<Vec<_>>();
        assert_eq!((indices(&keep), indices(&out)), (vec![1, 3], vec![0, 2]));
    }
}
