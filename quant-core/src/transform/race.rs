//! The fast scale search: candidates race on growing fractions of the batch (after Maron and Moore, *Hoeffding Races*,
//! 1994).
//!
//! The errors of candidates on the same tokens differ far less than errors on different tokens, so a fraction of the
//! batch distinguishes most candidates. After each round, the best candidate so far is compared with every other in
//! pairs, unit by unit (a unit is a window of the batch, or part of one). A candidate is eliminated if it is worse by
//! more than chance explains, or cannot be better by more than [`REGRET`]. The others continue on as many tokens again,
//! up to a fraction of the batch. A small batch is used whole at once.
//!
//! If the watched output depends only on a token's own input (an MLP, a single linear), each round uses a subset of the
//! tokens of all windows. The first tokens of a document or window, where models are known to have outsized
//! activations, are all used with a weight of one; the others are weighted by the inverse of their fraction. If the
//! output depends on attention, whole windows are used, in an order that spreads over the batch. Tokens that do not
//! count (masked prompts, padding) are then context for attention, and are otherwise ignored.
//!
//! If the processor supports it, candidates are compared by [differences in bfloat16](super::difference).

use candle_core::{Device, Tensor};
use quant_kernels_cpu::bf16::{Bf16Token, RightBf16};
use rayon::prelude::*;

use super::candidates::{Candidate, Choice, TriedScales, not_finite};
use super::difference::{self, Differences, Prepared};
use super::objective::candidate_block;
use super::sample::{FIRST_WINDOWS, Place, RaceShape, Schedule, SearchSample};
use super::{BlockTask, by_expert};
use crate::model::{Block, CancelTap, ExpertOrder, FoldGroup, Segments};
use crate::{CancelToken, Error, Result};

/// A candidate is eliminated if it is worse by more than this many standard errors. With few units, more are required.
const SIGMAS: f64 = 3.0;
/// A candidate is eliminated if it can be better by no more than this fraction of the error.
const REGRET: f64 = 0.002;
/// Tokens that go through the watched module at a time.
const CHUNK_TOKENS: usize = 2048;
/// Tokens at a time when differences are computed. The float outputs of a round are kept, and the results for a piece
/// should be small in comparison.
const PREPARED_TOKENS: usize = 512;

struct Contender {
    index: usize,
    /// Squared errors per unit, for [heads](Place::head) and for the other tokens.
    heads: Vec<f64>,
    tails: Vec<f64>,
    /// The estimated sum of squared errors for the whole batch after each round.
    totals: Vec<f64>,
}

struct UsedTokens {
    units: Vec<bool>,
    heads: usize,
    tails: usize,
}

impl UsedTokens {
    /// The weight of a token that is not a [head](Place::head).
    fn weight(&self, tokens: usize) -> f64 {
        let tails = tokens.saturating_sub(self.heads);
        if self.tails == 0 { 0.0 } else { tails as f64 / self.tails as f64 }
    }
}

/// Runs a race of candidates, the first of which is no scaling. `order` is given if the group's consumers are in
/// several experts that must not be in memory together.
pub(super) fn choose(
    task: &BlockTask<'_>,
    group: &FoldGroup,
    sample: &SearchSample,
    candidates: &[Candidate],
    order: Option<&ExpertOrder>,
) -> Result<Choice> {
    let tokens = sample.counted();
    if tokens == 0 {
        return Ok(Choice::unsearched());
    }
    let width = task.block.graph().width(group.inspected);
    let units = sample.units();
    let contender =
        |index| Contender { index, heads: vec![0.0; units], tails: vec![0.0; units], totals: Vec::new() };
    let mut running: Vec<Contender> = (0..candidates.len()).map(contender).collect();
    let mut out: Vec<Contender> = Vec::new();
    let mut used = UsedTokens { units: vec![false; units], heads: 0, tails: 0 };
    let mut used_tokens = Vec::new();
    let kernel = difference::kernel(task, group, sample.layout.counted());
    let watched = match kernel {
        Some(_) => difference::watched_weight(task, group)?,
        None => None,
    };
    for round in 0..sample.rounds() {
        if running.len() == 1 && round > 0 {
            break;
        }
        let rows = sample.round(round);
        let counted = rows.iter().map(|&row| &sample.places[row]).filter(|p| p.counts);
        for place in counted {
            used.units[place.unit] = true;
            *(if place.head { &mut used.heads } else { &mut used.tails }) += 1;
        }
        used_tokens.push((used.heads + used.tails) as u64);
        let weight = used.weight(tokens);
        // The errors of a candidate are summed in token order, so they are bit-identical for any number of batches.
        let piece = piece_tokens(sample, kernel);
        let token_bytes = token_bytes(task, group, sample.channels, kernel.is_some(), order);
        for rows in rows.chunks(sample.tokens_at_a_time(token_bytes, piece)) {
            let (values, places) = sample.rows(rows)?;
            let batch = Batch::new(task, (group, order), sample, values, &places, kernel)?;
            let mut still = Vec::with_capacity(running.len());
            let mut waiting = running.into_iter();
            loop {
                let some: Vec<Contender> = waiting.by_ref().take(batch.at_once()).collect();
                if some.is_empty() {
                    break;
                }
                task.cancel.check()?;
                let scales: Vec<&[f32]> = some.iter().map(|c| &candidates[c.index].scales[..]).collect();
                let errors = batch.errors(task, group, &scales, watched.as_ref())?;
                for (mut contender, errors) in some.into_iter().zip(errors) {
                    let errors = match errors {
                        // A scaled weight may need a quantization scale that overflows its dtype. Such a candidate is
                        // skipped.
                        Err(Error::Numeric { .. }) if candidates[contender.index].ratio.is_some() => continue,
                        other => other?,
                    };
                    for (place, error) in places.iter().zip(errors).filter(|(p, _)| p.counts) {
                        let sums = if place.head { &mut contender.heads } else { &mut contender.tails };
                        sums[place.unit] += error;
                    }
                    still.push(contender);
                }
            }
            running = still;
        }
        let mut still = Vec::with_capacity(running.len());
        for mut contender in running {
            let candidate = &candidates[contender.index];
            let total = contender.total(weight);
            if total.is_finite() {
                contender.totals.push(total);
                still.push(contender);
            } else if candidate.ratio.is_none() {
                return Err(not_finite());
            }
        }
        (running, out) = eliminate(still, out, &used, weight);
    }
    let mean = |total: f64| total / (tokens as f64 * width as f64);
    let best = running.iter().reduce(|a, b| if b.last() < a.last() { b } else { a });
    let index = best.ok_or_else(not_finite)?.index;
    out.extend(running);
    out.sort_by_key(|contender| contender.index);
    let of = |index: usize| out.iter().find(|contender| contender.index == index).ok_or_else(not_finite);
    let (unscaled, best) = (of(0)?, of(index)?);
    let rounds = unscaled.totals.len().min(best.totals.len());
    Ok(Choice {
        best: index,
        error_before: mean(unscaled.totals[rounds - 1]),
        error_after: mean(best.totals[rounds - 1]),
        tokens: used_tokens[rounds - 1],
        tried: out
            .iter()
            .map(|contender| TriedScales {
                ratio: candidates[contender.index].ratio,
                error: mean(contender.last()),
                tokens: used_tokens[contender.totals.len() - 1],
            })
            .collect(),
    })
}

impl Contender {
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

fn eliminate(
    contenders: Vec<Contender>,
    mut out: Vec<Contender>,
    used: &UsedTokens,
    weight: f64,
) -> (Vec<Contender>, Vec<Contender>) {
    let units: Vec<usize> = (0..used.units.len()).filter(|&u| used.units[u]).collect();
    let n = units.len() as f64;
    let Some(best) = contenders.iter().reduce(|a, b| if b.last() < a.last() { b } else { a }) else {
        return (contenders, out);
    };
    if units.len() < FIRST_WINDOWS {
        return (contenders, out);
    }
    let least = best.last();
    let reference: Vec<f64> = units.iter().map(|&u| best.unit(u, weight)).collect();
    let index = best.index;
    let (keep, drop) = contenders.into_iter().partition(|contender| {
        let differences = units.iter().zip(&reference).map(|(&u, r)| contender.unit(u, weight) - r);
        let sum: f64 = differences.clone().sum();
        let variance = differences.map(|d| (d - sum / n).powi(2)).sum::<f64>() / (n - 1.0);
        // With few units, the estimate of the variance is poor; the factor approximates Student's t.
        let margin = SIGMAS * (1.0 + 2.0 / (n - 1.0)) * (n * variance).sqrt();
        let worse = sum > margin;
        let no_better = margin - sum <= REGRET * least;
        contender.index == index || !(worse || no_better)
    });
    let drop: Vec<Contender> = drop;
    out.extend(drop);
    (keep, out)
}

/// The number of tokens per piece: whole windows, or independent tokens.
fn piece_tokens(sample: &SearchSample, kernel: Option<Bf16Token>) -> usize {
    match sample.schedule {
        Schedule::Windows { .. } => piece(kernel.is_some(), sample.layout.length()),
        Schedule::Tokens { .. } => piece(kernel.is_some(), 1),
    }
}

/// The largest piece of whole windows of this length, but at least one window.
pub(super) fn piece(differences: bool, length: usize) -> usize {
    let tokens = if differences { PREPARED_TOKENS } else { CHUNK_TOKENS };
    (tokens / length.max(1)).max(1) * length.max(1)
}

/// The memory that each token takes while a round compares candidates.
fn token_bytes(
    task: &BlockTask<'_>,
    group: &FoldGroup,
    k: usize,
    differences: bool,
    order: Option<&ExpertOrder>,
) -> u64 {
    let graph = task.block.graph();
    let outputs = group.consumers.iter().map(|&c| task.block.linear(c).weight().shape()[0]).sum();
    let read = graph.nodes()[group.inspected].op.linear_shape().map_or(0, |[_, read]| read);
    let shape = RaceShape { k, outputs, read, inspected: graph.width(group.inspected) };
    let more = order.map_or(0, |order| by_expert::token_bytes(shape.inspected, order.experts.len()));
    shape.token_bytes(group.consumers.len() == 1, differences) + more
}

enum Batch<'a> {
    Whole(Vec<Chunk>),
    /// Rows for experts that run one after the other.
    ByExpert(Vec<Chunk>, &'a ExpertOrder),
    Differences(Vec<Prepared>),
}

/// The inputs and the float outputs of a piece, `[windows, length, channels]` or `[1, tokens, channels]`.
struct Chunk {
    x: Tensor,
    y: Tensor,
    /// The segment starts of windows, if they have several segments.
    starts: Option<Vec<u32>>,
}

impl Chunk {
    fn segments(&self) -> Segments<'_> {
        self.starts.as_deref().map_or_else(Segments::whole, Segments::new)
    }
}

impl<'a> Batch<'a> {
    fn new(
        task: &BlockTask<'_>,
        (group, order): (&FoldGroup, Option<&'a ExpertOrder>),
        sample: &SearchSample,
        rows: Vec<f32>,
        places: &[Place],
        kernel: Option<Bf16Token>,
    ) -> Result<Self> {
        let k = sample.channels;
        let size = piece_tokens(sample, kernel);
        let length = match sample.schedule {
            Schedule::Windows { .. } => sample.layout.length(),
            Schedule::Tokens { .. } => size,
        };
        let chunks = rows.chunks((size * k).max(1)).zip(places.chunks(size)).map(|(rows, places)| {
            task.cancel.check()?;
            let length = length.min(rows.len() / k);
            let x = Tensor::from_slice(rows, (rows.len() / (length * k), length, k), &Device::Cpu)?;
            let starts: Option<Vec<u32>> = match sample.schedule {
                Schedule::Windows { .. } => places.iter().map(|p| sample.layout.start(p.token)).collect(),
                Schedule::Tokens { .. } => None,
            };
            Ok((x, starts))
        });
        if let Some(order) = order {
            let mut chunks = chunks
                .map(|chunk: Result<_>| {
                    let (x, starts) = chunk?;
                    Ok(Chunk { y: x.clone(), x, starts })
                })
                .collect::<Result<Vec<Chunk>>>()?;
            let float =
                by_expert::watched(task, (group, order), &rows_of(&chunks), &[None])?.swap_remove(0)?;
            chunks.iter_mut().zip(float).for_each(|(chunk, y)| chunk.y = y);
            return Ok(Self::ByExpert(chunks, order));
        }
        match kernel {
            Some(token) => {
                let prepared = chunks.map(|chunk: Result<_>| {
                    let (x, starts) = chunk?;
                    Prepared::new(token, task, group, &x, starts)
                });
                Ok(Self::Differences(prepared.collect::<Result<_>>()?))
            }
            None => {
                let block = task.block.routed();
                let whole = chunks.map(|chunk: Result<_>| {
                    let (x, starts) = chunk?;
                    let mut chunk = Chunk { y: x.clone(), x, starts };
                    chunk.y = watched(&block, group, &chunk, task.cancel)?;
                    Ok(chunk)
                });
                Ok(Self::Whole(whole.collect::<Result<_>>()?))
            }
        }
    }

    /// The number of candidates that are compared at the same time.
    fn at_once(&self) -> usize {
        match self {
            Self::Whole(_) | Self::Differences(_) => 1,
            Self::ByExpert(chunks, _) => {
                let values: usize = chunks.iter().map(|chunk| chunk.y.elem_count()).sum();
                by_expert::at_once(values)
            }
        }
    }

    /// For each of the scales, the squared error of every token's output with every quantized consumer replaced by `Q(W
    /// · s) / s`. `weight` is the weight of the watched linear, if differences need it.
    fn errors(
        &self,
        task: &BlockTask<'_>,
        group: &FoldGroup,
        scales: &[&[f32]],
        weight: Option<&RightBf16>,
    ) -> Result<Vec<Result<Vec<f64>>>> {
        let Self::ByExpert(chunks, order) = self else {
            return Ok(scales.iter().map(|scales| self.errors_of(task, group, scales, weight)).collect());
        };
        let candidates: Vec<_> = scales.iter().map(|scales| Some(*scales)).collect();
        let outputs = by_expert::watched(task, (group, order), &rows_of(chunks), &candidates)?;
        let errors = outputs.into_iter().map(|outputs| {
            let mut errors = Vec::new();
            for (output, chunk) in outputs?.iter().zip(chunks) {
                token_errors(output, &chunk.y, &mut errors)?;
            }
            Ok(errors)
        });
        Ok(errors.collect())
    }

    fn errors_of(
        &self,
        task: &BlockTask<'_>,
        group: &FoldGroup,
        scales: &[f32],
        weight: Option<&RightBf16>,
    ) -> Result<Vec<f64>> {
        let mut errors = Vec::new();
        match self {
            Self::ByExpert(..) => {
                return Err(Error::Internal("experts in a batch that is processed as a whole".into()));
            }
            Self::Whole(chunks) => {
                let block = candidate_block(task, &group.consumers, scales)?;
                for chunk in chunks {
                    task.cancel.check()?;
                    token_errors(&watched(&block, group, chunk, task.cancel)?, &chunk.y, &mut errors)?;
                }
            }
            Self::Differences(prepared) => {
                let candidate = Differences::new(task, group, scales, weight)?;
                for chunk in prepared {
                    task.cancel.check()?;
                    chunk.errors(task, group, &candidate, &mut errors)?;
                }
            }
        }
        Ok(errors)
    }
}

fn rows_of(chunks: &[Chunk]) -> Vec<by_expert::Rows<'_>> {
    chunks.iter().map(|chunk| by_expert::Rows { x: &chunk.x, segments: chunk.segments() }).collect()
}

fn watched(block: &Block, group: &FoldGroup, chunk: &Chunk, cancel: &CancelToken) -> Result<Tensor> {
    let known = [(group.input, chunk.x.clone())];
    let values = block.evaluate_packed(&known, &[group.inspected], chunk.segments(), &mut CancelTap(cancel));
    Ok(values?.swap_remove(0))
}

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
    use crate::calibrate::{BatchLayout, InputRows, Statistic};
    use crate::model::TokenRows;

    #[test]
    fn tokens_are_weighted_by_what_they_represent() {
        let layout = BatchLayout::plain(32, 512);
        let mut sample = SearchSample::new(layout.clone(), 1, false, false, 1.0, None).unwrap();
        let values = vec![1.0; layout.tokens()];
        let tokens = TokenRows::range(0, layout.tokens());
        sample.take(&InputRows::new(&values, 1, tokens, &layout).unwrap()).unwrap();
        let mut used = UsedTokens { units: vec![false; 32], heads: 0, tails: 0 };
        for place in &sample.places {
            *(if place.head { &mut used.heads } else { &mut used.tails }) += 1;
        }
        let total = used.heads as f64 + used.tails as f64 * used.weight(32 * 512);
        assert_eq!(total, 32.0 * 512.0);
    }

    fn contender(index: usize, units: &[f64]) -> Contender {
        let total = units.iter().sum();
        Contender { index, heads: units.to_vec(), tails: vec![0.0; units.len()], totals: vec![total] }
    }

    #[test]
    fn who_is_surely_worse_or_surely_no_better_is_out() {
        let used = UsedTokens { units: vec![true; 8], heads: 8, tails: 0 };
        let base = [100.0, 300.0, 50.0, 80.0, 500.0, 120.0, 90.0, 60.0];
        let with = |f: fn(usize, f64) -> f64| -> Vec<f64> {
            base.iter().enumerate().map(|(i, b)| f(i, *b)).collect()
        };
        let contenders = vec![
            contender(0, &with(|_, b| b + 60.0)),
            contender(1, &base),
            // Negligibly worse than the best candidate.
            contender(2, &with(|_, b| b * 1.0001)),
            // Better in some units, worse in others.
            contender(3, &with(|i, b| if i % 2 == 0 { b * 1.25 } else { b * 0.8 })),
        ];
        let (keep, out) = eliminate(contenders, Vec::new(), &used, 1.0);
        let indices = |contenders: &[Contender]| contenders.iter().map(|l| l.index).collect::<Vec<_>>();
        assert_eq!((indices(&keep), indices(&out)), (vec![1, 3], vec![0, 2]));
    }
}
