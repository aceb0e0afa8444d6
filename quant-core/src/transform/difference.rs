//! Computes the errors of candidates from differences in bfloat16, for the race on processors with `avx512bf16`.
//!
//! A candidate changes a weight by `D = Q(W · s) / s − W`, a few percent of it. This changes a linear's output by `X
//! Dᵀ`, and the module's output by `V (h − h₀)ᵀ`, where `h₀` is the input of the module's last linear `V`, and `h` the
//! same input after `X Dᵀ` is added to the outputs of the consumers. Rounding `X`, `D`, `h − h₀` and `V` to bf16 causes
//! an error relative to the *difference*, which is too small to change the outcome of a race. Rounding `X` and `Q(W ·
//! s) / s` instead would cause errors larger than the difference.
//!
//! The outputs of the float model are computed once. They are rounded to bf16 to save memory, which shifts the point at
//! which all candidates are compared by the same small error.

use candle_core::{Device, Shape, Tensor};
use quant_kernels_cpu::bf16::{Bf16Token, LEFT_ROWS, LeftBf16, RIGHT_ROWS, RightBf16, bf16_gemm};
use rayon::prelude::*;

use super::BlockTask;
use super::rounding::ScaledRounding;
use super::rows::StoredValues;
use crate::model::{BlockGraph, CancelTap, FoldGroup, NodeId, Segments, WeightBody};
use crate::{Error, Result};

const TASK_STRIPS: usize = 8;
/// The minimum number of weights times tokens for which packing pays off.
const MIN_PRODUCTS: u64 = 1 << 28;

/// The kernel, if the processor supports it, there is enough work, and the watched node is a linear.
pub(super) fn kernel(task: &BlockTask<'_>, group: &FoldGroup, tokens: usize) -> Option<Bf16Token> {
    let weights = group.consumers.iter().map(|&c| task.block.linear(c).weight().shape());
    let weights: u64 = weights.map(|[n, k]| n as u64 * k as u64).sum();
    kernel_for(task.block.graph(), group, weights, tokens)
}

/// The kernel, for consumers with this many weights in total.
pub(super) fn kernel_for(
    graph: &BlockGraph,
    group: &FoldGroup,
    weights: u64,
    tokens: usize,
) -> Option<Bf16Token> {
    graph.nodes()[group.inspected].op.linear_shape()?;
    Bf16Token::detect().filter(|_| weights.saturating_mul(tokens as u64) >= MIN_PRODUCTS)
}

/// The float module on some tokens.
pub(super) struct Prepared {
    token: Bf16Token,
    x: LeftBf16,
    /// `None` for a single linear, whose output is the watched one.
    module: Option<Module>,
}

struct Module {
    /// The consumers' float outputs, rounded to bf16, with their shapes `[windows, length, n]`.
    outputs: Vec<(StoredValues, Shape)>,
    /// The input of the watched linear.
    read: Vec<f32>,
    starts: Option<Vec<u32>>,
}

impl Prepared {
    /// Prepares the inputs `[windows, length, k]` of a group's consumers.
    pub(super) fn new(
        token: Bf16Token,
        task: &BlockTask<'_>,
        group: &FoldGroup,
        x: &Tensor,
        starts: Option<Vec<u32>>,
    ) -> Result<Self> {
        let k = x.dim(candle_core::D::Minus1)?;
        let packed = pack_left(&x.flatten_all()?.to_vec1::<f32>()?, k);
        if group.consumers.len() == 1 {
            return Ok(Self { token, x: packed, module: None });
        }
        let segments = || starts.as_deref().map_or_else(Segments::whole, Segments::new);
        let tap = &mut CancelTap(task.cancel);
        let known = [(group.input, x.clone())];
        let mut outputs = Vec::with_capacity(group.consumers.len());
        let mut known_outputs = Vec::with_capacity(group.consumers.len());
        for (&node, output) in group.consumers.iter().zip(task.block.evaluate_packed(
            &known,
            &group.consumers,
            segments(),
            tap,
        )?) {
            let shape = output.shape().clone();
            let rounded = StoredValues::rounded(&output.flatten_all()?.to_vec1::<f32>()?)?;
            known_outputs.push((node, Tensor::from_vec(rounded.to_vec()?, &shape, &Device::Cpu)?));
            outputs.push((rounded, shape));
        }
        let target = [watched_input(task, group)];
        let read = task.block.evaluate_packed(&known_outputs, &target, segments(), tap)?.swap_remove(0);
        let read = read.flatten_all()?.to_vec1::<f32>()?;
        Ok(Self { token, x: packed, module: Some(Module { outputs, read, starts }) })
    }

    /// Appends the squared error of the watched output for every token.
    pub(super) fn errors(
        &self,
        task: &BlockTask<'_>,
        group: &FoldGroup,
        candidate: &Differences,
        errors: &mut Vec<f64>,
    ) -> Result<()> {
        let Some(Module { outputs, read, starts }) = &self.module else {
            let [Some(difference)] = &candidate.consumers[..] else {
                return Err(Error::Internal("a single linear is not quantized".into()));
            };
            row_sums(self.token, &self.x, difference, errors);
            return Ok(());
        };
        let mut known = Vec::with_capacity(outputs.len());
        for ((&node, (output, shape)), difference) in
            group.consumers.iter().zip(outputs).zip(&candidate.consumers)
        {
            let mut values = output.to_vec()?;
            if let Some(difference) = difference {
                add_product(self.token, &self.x, difference, &mut values);
            }
            known.push((node, Tensor::from_vec(values, shape, &Device::Cpu)?));
        }
        let segments = starts.as_deref().map_or_else(Segments::whole, Segments::new);
        let target = [watched_input(task, group)];
        let tap = &mut CancelTap(task.cancel);
        let changed = task.block.evaluate_packed(&known, &target, segments, tap)?.swap_remove(0);
        drop(known);
        let k = changed.dim(candle_core::D::Minus1)?;
        let mut change = changed.flatten_all()?.to_vec1::<f32>()?;
        drop(changed);
        change.par_chunks_mut(k).zip(read.par_chunks(k)).for_each(|(change, before)| {
            change.iter_mut().zip(before).for_each(|(c, b)| *c -= b);
        });
        let watched = candidate.watched.as_ref();
        let watched = watched.ok_or_else(|| Error::Internal("the watched linear is not packed".into()))?;
        row_sums(self.token, &pack_left(&change, k), watched, errors);
        Ok(())
    }
}

fn watched_input(task: &BlockTask<'_>, group: &FoldGroup) -> NodeId {
    task.block.graph().nodes()[group.inspected].inputs[0]
}

/// The changes of the consumers' weights by a candidate; `None` for a consumer that stays float.
pub(super) struct Differences<'a> {
    consumers: Vec<Option<RightBf16>>,
    /// The weight of the watched linear, unless it is the only consumer.
    watched: Option<&'a RightBf16>,
}

impl<'a> Differences<'a> {
    /// Rounds the consumers under these scales.
    pub(super) fn new(
        task: &BlockTask<'_>,
        group: &FoldGroup,
        scales: &[f32],
        watched: Option<&'a RightBf16>,
    ) -> Result<Self> {
        let difference = |&node: &NodeId| -> Result<Option<RightBf16>> {
            let Some(rounding) = ScaledRounding::new(task, node, scales)? else { return Ok(None) };
            let packed = pack_right(task.block.linear(node).weight(), |first, rows| {
                let exact = rows.to_vec();
                rounding.apply(rows, first)?;
                rows.iter_mut().zip(exact).for_each(|(d, w)| *d -= w);
                Ok(())
            })?;
            Ok(Some(packed))
        };
        Ok(Self { consumers: group.consumers.iter().map(difference).collect::<Result<_>>()?, watched })
    }
}

/// The float weight of the watched linear; `None` if it is the only consumer.
pub(super) fn watched_weight(task: &BlockTask<'_>, group: &FoldGroup) -> Result<Option<RightBf16>> {
    if group.consumers.len() == 1 {
        return Ok(None);
    }
    pack_right(task.block.linear(group.inspected).weight(), |_, _| Ok(())).map(Some)
}

fn pack_left(values: &[f32], k: usize) -> LeftBf16 {
    let mut packed = LeftBf16::zeros(values.len() / k, k);
    let strips: Vec<&mut [u32]> = packed.strips_mut().collect();
    let rows = values.par_chunks(LEFT_ROWS * k);
    strips.into_par_iter().zip(rows).for_each(|(strip, rows)| LeftBf16::pack_rows(rows, k, strip));
    packed
}

/// Packs a weight after `change` was applied to its rows. `change` gets the index of the first row and the rows.
fn pack_right(
    weight: &WeightBody,
    change: impl Fn(usize, &mut [f32]) -> Result<()> + Sync,
) -> Result<RightBf16> {
    let weight = weight.read()?;
    let [n, k] = weight.shape();
    let mut packed = RightBf16::zeros(n, k);
    let strips: Vec<&mut [u32]> = packed.strips_mut().collect();
    let results: Vec<Result<()>> = strips
        .into_par_iter()
        .enumerate()
        .map_init(Vec::new, |scratch, (i, strip)| {
            let rows = i * RIGHT_ROWS..((i + 1) * RIGHT_ROWS).min(n);
            let first = rows.start;
            let mut values = weight.rows(rows, scratch)?.to_vec();
            change(first, &mut values)?;
            RightBf16::pack_rows(&values, k, strip);
            Ok(())
        })
        .collect();
    // Returns the first error in order, regardless of threads.
    results.into_iter().collect::<Result<()>>()?;
    Ok(packed)
}

/// `out += left · rightᵀ`, `[rows, n]`.
fn add_product(token: Bf16Token, left: &LeftBf16, right: &RightBf16, out: &mut [f32]) {
    let piece = TASK_STRIPS * LEFT_ROWS * right.rows();
    out.par_chunks_mut(piece.max(1)).enumerate().for_each_init(Vec::new, |product, (i, out)| {
        product.resize(out.len(), 0.0);
        bf16_gemm(token, left, i * TASK_STRIPS, right, product);
        out.iter_mut().zip(product.iter()).for_each(|(o, p)| *o += p);
    });
}

/// Appends `Σ (left · rightᵀ)²` of every row.
fn row_sums(token: Bf16Token, left: &LeftBf16, right: &RightBf16, sums: &mut Vec<f64>) {
    let (rows, n) = (left.rows(), right.rows());
    let pieces: Vec<Vec<f64>> = (0..rows.div_ceil(TASK_STRIPS * LEFT_ROWS))
        .into_par_iter()
        .map_init(Vec::new, |product, i| {
            let height = (TASK_STRIPS * LEFT_ROWS).min(rows - i * TASK_STRIPS * LEFT_ROWS);
            product.resize(height * n, 0.0);
            bf16_gemm(token, left, i * TASK_STRIPS, right, product);
            squares(product, n)
        })
        .collect();
    sums.extend(pieces.into_iter().flatten());
}

/// `Σ v²` of every row of width `n`, each added in order. Several rows are added at the same time, because the
/// additions of one row wait for each other.
fn squares(values: &[f32], n: usize) -> Vec<f64> {
    const ROWS: usize = 8;
    let mut sums = Vec::with_capacity(values.len() / n);
    let mut pieces = values.chunks_exact(ROWS * n);
    for piece in &mut pieces {
        let rows: [&[f32]; ROWS] = std::array::from_fn(|r| &piece[r * n..(r + 1) * n]);
        let mut some = [0.0; ROWS];
        for i in 0..n {
            for (sum, row) in some.iter_mut().zip(rows) {
                *sum += f64::from(row[i]) * f64::from(row[i]);
            }
        }
        sums.extend(some);
    }
    let sum = |row: &[f32]| row.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>();
    sums.extend(pieces.remainder().chunks_exact(n).map(sum));
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_are_added_in_the_order_of_a_row() {
        let n = 37;
        let values: Vec<f32> = (0..21 * n).map(|i| (i as f32 * 0.61).sin() * 3.0).collect();
        let in_order = |row: &[f32]| {
            let mut sum = 0.0;
            for value in row {
                sum += f64::from(*value) * f64::from(*value);
            }
            sum
        };
        let expected: Vec<f64> = values.chunks_exact(n).map(in_order).collect();
        assert_eq!(squares(&values, n), expected);
    }
}
