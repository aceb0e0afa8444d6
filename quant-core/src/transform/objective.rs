//! The error of a candidate on the whole batch, in the output that the search watches: of the linear that reads the
//! scaled channels, or of the module in which several such linears meet.
//!
//! Tokens that do not count (masked prompts, padding) are only context.

use std::sync::Arc;

use candle_core::{D, Tensor};
use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, MatRef, Par};
use rayon::prelude::*;

use super::rounding::ScaledRounding;
use super::{BlockTask, by_expert};
use crate::calibrate::{BatchLayout, HiddenStates, InputRows, gram};
use crate::model::{Block, CancelTap, ExpertOrder, FoldGroup, NodeId, TokenRows, WeightBody, with_values};
use crate::{Error, Result, allocate};

const ROW_TILE: usize = 64;

/// The mean squared error of the watched output for given scales.
pub(super) enum Objective {
    /// One linear: `mean((X (Ŵ − W)ᵀ)²)`, computed from `X` or from its Gram matrix, whichever is smaller: the sum of
    /// the squares is `tr(D XᵀX Dᵀ)` with `D = Ŵ − W`.
    Linear { node: NodeId, input: Arc<Input>, tokens: usize },
    /// The output of the module is recomputed with the candidate's weights.
    Module {
        consumers: Vec<NodeId>,
        input: NodeId,
        inspected: NodeId,
        batch: Vec<Piece>,
        layout: BatchLayout,
    },
    /// The output of a module with experts is recomputed by running them one after the other.
    ByExpert { group: FoldGroup, order: ExpertOrder, batch: Vec<Piece>, layout: BatchLayout },
}

/// A piece of the batch: the module's input and its float output.
pub(super) struct Piece {
    /// The position of the piece's first token in the batch.
    first: usize,
    x: Tensor,
    y: Tensor,
}

pub(super) enum Input {
    /// Rows `[tokens, k]`.
    Rows(Vec<f32>),
    /// `xᵀx`, `[k, k]`, both triangles.
    Gram(Vec<f32>),
}

impl Input {
    /// Gathers the values of a node over the batch, in the smaller form.
    fn gather(task: &BlockTask<'_>, hidden: &HiddenStates, node: NodeId, k: usize) -> Result<Self> {
        let tokens = hidden.layout().counted();
        let mut rows = Vec::new();
        let mut sum =
            if tokens > k { allocate::zeros(k * k, "the Gram matrix of an input")? } else { Vec::new() };
        for chunk in hidden.chunks() {
            task.cancel.check()?;
            let (first, x) = chunk?;
            let segments = hidden.segments(first, &x);
            let known = [(task.block.graph().input(), x)];
            let tap = &mut CancelTap(task.cancel);
            let (values, rows_of) = task.block.evaluate_rows(&known, node, segments, tap)?;
            with_counted(&values, rows_of.as_deref(), first, hidden.layout(), |values| {
                if tokens > k {
                    gram(values, k, &mut sum)
                } else {
                    rows.extend_from_slice(values)
                }
                Ok(())
            })?;
        }
        if tokens <= k {
            return Ok(Self::Rows(rows));
        }
        Ok(Self::gram(sum, k))
    }

    /// Fills in the upper triangle.
    pub(super) fn gram(mut sum: Vec<f32>, k: usize) -> Self {
        for i in 0..k {
            for j in i + 1..k {
                sum[i * k + j] = sum[j * k + i];
            }
        }
        Self::Gram(sum)
    }

    /// `Σ (X dᵀ)²` over tokens, for each row `d` of `difference` `[rows, k]`.
    pub(super) fn squared_outputs(&self, difference: &[f32], k: usize, sums: &mut Vec<f64>) {
        let rows = difference.len() / k;
        let d = MatRef::from_row_major_slice(difference, rows, k);
        sums.clear();
        match self {
            Self::Gram(gram) => {
                let gram = MatRef::from_row_major_slice(gram.as_slice(), k, k);
                let mut product = Mat::<f32>::zeros(k, rows);
                matmul(product.as_mut(), Accum::Replace, gram, d.transpose(), 1.0, Par::Seq);
                for (r, row) in difference.chunks_exact(k).enumerate() {
                    let column = product.col_as_slice(r);
                    let sum: f64 = row.iter().zip(column).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    // Rounding can push a tiny error below zero.
                    sums.push(if sum < 0.0 { 0.0 } else { sum });
                }
            }
            Self::Rows(x) => {
                let tokens = x.len() / k;
                let x = MatRef::from_row_major_slice(x.as_slice(), tokens, k);
                let mut product = Mat::<f32>::zeros(tokens, rows);
                matmul(product.as_mut(), Accum::Replace, x, d.transpose(), 1.0, Par::Seq);
                for r in 0..rows {
                    sums.push(product.col_as_slice(r).iter().map(|v| f64::from(*v) * f64::from(*v)).sum());
                }
            }
        }
    }
}

impl Objective {
    /// Prepares the objective of a group. `tokens` is the number of counted tokens with a row in its input. `order` is
    /// given if the group's consumers are in several experts that must not be in memory together.
    pub(super) fn new(
        task: &BlockTask<'_>,
        hidden: &HiddenStates,
        group: &FoldGroup,
        tokens: usize,
        order: Option<&ExpertOrder>,
    ) -> Result<Self> {
        let graph = task.block.graph();
        if let [node] = group.consumers[..] {
            let k = task.block.linear(node).weight().shape()[1];
            let input = Arc::new(Input::gather(task, hidden, group.input, k)?);
            return Ok(Self::Linear { node, input, tokens });
        }
        let mut batch = Vec::new();
        // Candidates run on routed tokens too, so products have the same shapes.
        let block = task.block.routed();
        for chunk in hidden.chunks() {
            task.cancel.check()?;
            let (first, states) = chunk?;
            let segments = hidden.segments(first, &states);
            let evaluate = |from, value, to| -> Result<Tensor> {
                let tap = &mut CancelTap(task.cancel);
                Ok(block.evaluate_packed(&[(from, value)], &[to], segments, tap)?.swap_remove(0))
            };
            let x = evaluate(graph.input(), states, group.input)?;
            let y = match order {
                Some(_) => x.clone(),
                None => evaluate(group.input, x.clone(), group.inspected)?,
            };
            batch.push(Piece { first, x, y });
        }
        let layout = hidden.layout().clone();
        let Some(order) = order else {
            let (consumers, input, inspected) = (group.consumers.clone(), group.input, group.inspected);
            return Ok(Self::Module { consumers, input, inspected, batch, layout });
        };
        let outputs = by_expert::watched(task, (group, order), &rows_of(&batch, &layout)?, &[None])?;
        for (piece, y) in batch.iter_mut().zip(outputs.into_iter().collect::<Result<Vec<_>>>()?.concat()) {
            piece.y = y;
        }
        Ok(Self::ByExpert { group: group.clone(), order: order.clone(), batch, layout })
    }

    /// The number of candidates that are compared at the same time.
    pub(super) fn at_once(&self) -> usize {
        match self {
            Self::Linear { .. } | Self::Module { .. } => 1,
            Self::ByExpert { batch, .. } => {
                by_expert::at_once(batch.iter().map(|piece| piece.y.elem_count()).sum())
            }
        }
    }

    /// For each of the scales, the mean squared error with every quantized consumer replaced by `Q(W · s) / s`.
    pub(super) fn errors(&self, task: &BlockTask<'_>, scales: &[&[f32]]) -> Result<Vec<Result<f64>>> {
        let Self::ByExpert { group, order, batch, layout } = self else {
            return Ok(scales.iter().map(|scales| self.error(task, scales)).collect());
        };
        let candidates: Vec<_> = scales.iter().map(|scales| Some(*scales)).collect();
        let outputs = by_expert::watched(task, (group, order), &rows_of(batch, layout)?, &candidates)?;
        let error = |outputs: Result<Vec<Tensor>>| {
            let (mut sum, mut count) = (0.0, 0);
            for (output, Piece { first, y, .. }) in outputs?.iter().zip(batch) {
                sum += counted_distance([output, y], *first, layout, &mut count)?;
            }
            Ok(sum / count as f64)
        };
        Ok(outputs.into_iter().map(error).collect())
    }

    fn error(&self, task: &BlockTask<'_>, scales: &[f32]) -> Result<f64> {
        match self {
            Self::Linear { node, input, tokens } => {
                let weight = task.block.linear(*node).weight().read()?;
                let [n, k] = weight.shape();
                let Some(rounding) = ScaledRounding::new(task, *node, scales)? else { return Ok(0.0) };
                let tiles: Vec<Result<f64>> = (0..n.div_ceil(ROW_TILE))
                    .into_par_iter()
                    .map_init(
                        || (Vec::new(), Vec::new()),
                        |(scratch, sums), tile| {
                            let rows = tile * ROW_TILE..((tile + 1) * ROW_TILE).min(n);
                            let first = rows.start;
                            let exact = weight.rows(rows, scratch)?;
                            let mut difference = exact.to_vec();
                            rounding.apply(&mut difference, first)?;
                            for (d, w) in difference.iter_mut().zip(exact) {
                                *d -= w;
                            }
                            input.squared_outputs(&difference, k, sums);
                            Ok(sums.iter().sum())
                        },
                    )
                    .collect();
                let mut sum = 0.0;
                for tile in tiles {
                    sum += tile?;
                }
                Ok(sum / (*tokens as f64 * n as f64))
            }
            Self::Module { consumers, input, inspected, batch, layout } => {
                let block = candidate_block(task, consumers, scales)?;
                let (mut sum, mut count) = (0.0, 0);
                for Piece { first, x, y } in batch {
                    task.cancel.check()?;
                    let (windows, length, _) = y.dims3()?;
                    let segments = layout.segments(*first..first + windows * length);
                    let tap = &mut CancelTap(task.cancel);
                    let known = [(*input, x.clone())];
                    let rounded = block.evaluate_packed(&known, &[*inspected], segments, tap)?;
                    sum += counted_distance([&rounded[0], y], *first, layout, &mut count)?;
                }
                Ok(sum / count as f64)
            }
            Self::ByExpert { .. } => Err(Error::Internal("experts in a module that runs as a whole".into())),
        }
    }
}

fn rows_of<'a>(batch: &'a [Piece], layout: &'a BatchLayout) -> Result<Vec<by_expert::Rows<'a>>> {
    let rows = batch.iter().map(|Piece { first, x, .. }| {
        let (windows, length, _) = x.dims3()?;
        Ok(by_expert::Rows { x, segments: layout.segments(*first..first + windows * length) })
    });
    rows.collect()
}

/// `Σ (a − b)²` over the counted tokens of a piece that begins at token `first`. Adds the number of values to `count`.
fn counted_distance(
    [a, b]: [&Tensor; 2],
    first: usize,
    layout: &BatchLayout,
    count: &mut usize,
) -> Result<f64> {
    with_counted(a, None, first, layout, |a| {
        with_counted(b, None, first, layout, |b| {
            *count += b.len();
            squared_distance(a, b)
        })
    })
}

/// Passes the counted rows of a value to `work`. `tokens` are the tokens of its rows within a piece, or all if `None`.
/// `first` is the first token of the piece.
fn with_counted<T>(
    value: &Tensor,
    tokens: Option<&[u32]>,
    first: usize,
    layout: &BatchLayout,
    work: impl FnOnce(&[f32]) -> Result<T>,
) -> Result<T> {
    let channels = value.dim(D::Minus1)?;
    let tokens = match tokens {
        Some(tokens) => TokenRows::indices(tokens),
        None => TokenRows::range(0, value.elem_count().checked_div(channels).unwrap_or(0)),
    };
    let tokens = tokens.shifted(first);
    with_values(value, |values| work(InputRows::new(values, channels, tokens, layout)?.counted_values()))
}

/// The block with its quantized consumers rounded under these scales.
pub(super) fn candidate_block(task: &BlockTask<'_>, consumers: &[NodeId], scales: &[f32]) -> Result<Block> {
    let mut block = task.block.routed();
    for &node in consumers {
        let Some(rounding) = ScaledRounding::new(task, node, scales)? else { continue };
        let linear = task.block.linear(node);
        let mut values = linear.weight().to_f32()?;
        rounding.apply(&mut values, 0)?;
        block.replace_linear(
            node,
            linear.with_weight(WeightBody::F32 { shape: linear.weight().shape(), values }),
        );
    }
    Ok(block)
}

/// `Σ (a − b)²`, summed in fixed pieces and in order.
fn squared_distance(a: &[f32], b: &[f32]) -> Result<f64> {
    const CHUNK_VALUES: usize = 1 << 14;
    if a.len() != b.len() {
        return Err(Error::Internal(format!("outputs of {} and {} values", a.len(), b.len())));
    }
    let pieces: Vec<f64> = a
        .par_chunks(CHUNK_VALUES)
        .zip(b.par_chunks(CHUNK_VALUES))
        .map(|(a, b)| a.iter().zip(b).map(|(x, y)| f64::from(x - y) * f64::from(x - y)).sum())
        .collect();
    Ok(pieces.into_iter().sum())
}
