//! What candidates cost, from differences in bfloat16: the race where the processor has
//! `avx512bf16`.
//!
//! A candidate changes a weight by `D = Q(W · s) / s − W`, some percent of it. What it changes in a
//! linear's output is `X Dᵀ`, and in the module's output `V (h − h₀)ᵀ`: `h₀` is what its last linear
//! `V` reads, `h` the same with `X Dᵀ` added to the outputs of the consumers. Rounding `X`, `D`,
//! `h − h₀` and `V` to bf16 is off by a part of the *difference*, 2⁻⁸ of each term, so errors of
//! candidates keep their order as far as a race tells it; rounding `X` and `Q(W · s) / s` instead
//! would bury the difference. What the float model puts out is computed in `f32`, once, from inputs
//! and outputs of consumers that were rounded to bf16 before: candidates are compared at a point that
//! lies 2⁻⁹ beside the model's own, the same for all, and what is kept of a batch takes half the room.

use candle_core::{Device, Shape, Tensor};
use quant_kernels_cpu::bf16::{Avx512Bf16, LEFT_ROWS, LeftBf16, RIGHT_ROWS, RightBf16, bf16_gemm};
use rayon::prelude::*;

use super::BlockTask;
use super::objective::round_scaled;
use super::rows::Rows;
use super::shared::shared_scales;
use crate::model::{CancelTap, FoldGroup, NodeId, Segments, WeightBody};
use crate::{Error, Result};

/// Strips of the left operand that one task multiplies.
const TASK_STRIPS: usize = 8;
/// Multiplications of weights and tokens from which on packing pays.
const ENOUGH_WORK: u64 = 1 << 28;

/// The kernel, where the processor has it, there is work enough for it, and a linear is watched.
pub(super) fn kernel(task: &BlockTask<'_>, group: &FoldGroup, tokens: usize) -> Option<Avx512Bf16> {
    task.block.graph().nodes()[group.inspected].op.linear_shape()?;
    let weights = group.consumers.iter().map(|&c| task.block.linear(c).weight().shape());
    let weights: u64 = weights.map(|[n, k]| n as u64 * k as u64).sum();
    Avx512Bf16::detect().filter(|_| weights.saturating_mul(tokens as u64) >= ENOUGH_WORK)
}

/// The float module on some tokens, made ready for candidates.
pub(super) struct Prepared {
    token: Avx512Bf16,
    /// What the consumers read.
    x: LeftBf16,
    /// `None` for a single linear, whose output is what is watched.
    module: Option<Module>,
}

struct Module {
    /// The consumers' float outputs, rounded, with their shapes `[windows, length, n]`.
    outputs: Vec<(Rows, Shape)>,
    /// What the watched linear reads when the consumers put out just that.
    read: Vec<f32>,
    starts: Option<Vec<u32>>,
}

impl Prepared {
    /// Prepares the inputs `[windows, length, k]` of a group's consumers.
    pub(super) fn new(
        token: Avx512Bf16,
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
            let rounded = Rows::rounded(&output.flatten_all()?.to_vec1::<f32>()?);
            known_outputs.push((node, Tensor::from_vec(rounded.to_vec()?, &shape, &Device::Cpu)?));
            outputs.push((rounded, shape));
        }
        let target = [watched_input(task, group)];
        let read = task.block.evaluate_packed(&known_outputs, &target, segments(), tap)?.swap_remove(0);
        let read = read.flatten_all()?.to_vec1::<f32>()?;
        Ok(Self { token, x: packed, module: Some(Module { outputs, read, starts }) })
    }

    /// Appends the squared error of every token's watched output.
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

/// The node whose value the watched linear reads.
fn watched_input(task: &BlockTask<'_>, group: &FoldGroup) -> NodeId {
    task.block.graph().nodes()[group.inspected].inputs[0]
}

/// What a candidate changes in the consumers' weights; `None` where one stays float.
pub(super) struct Differences<'a> {
    consumers: Vec<Option<RightBf16>>,
    /// The watched linear, where it is not the only consumer.
    watched: Option<&'a RightBf16>,
}

impl<'a> Differences<'a> {
    /// Rounds the consumers under these scales.
    ///
    /// # Errors
    /// [`Error::Numeric`] when a scaled weight needs a scale that its type cannot hold.
    pub(super) fn new(
        task: &BlockTask<'_>,
        group: &FoldGroup,
        scales: &[f32],
        watched: Option<&'a RightBf16>,
    ) -> Result<Self> {
        let difference = |&node: &NodeId| -> Result<Option<RightBf16>> {
            let Some(&grid) = task.grids.get(&node) else { return Ok(None) };
            let module = task.module(node);
            let shared = shared_scales(task, node, scales)?;
            let packed = pack_right(task.block.linear(node).weight(), |first, rows| {
                let exact = rows.to_vec();
                round_scaled(rows, scales, grid, (&shared, first), &module)?;
                rows.iter_mut().zip(exact).for_each(|(d, w)| *d -= w);
                Ok(())
            })?;
            Ok(Some(packed))
        };
        Ok(Self { consumers: group.consumers.iter().map(difference).collect::<Result<_>>()?, watched })
    }
}

/// The watched linear's float weight, where it is not the only consumer.
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

/// Packs a weight whose rows `change` has turned into what is wanted of them, given the place of the first.
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
    // The first in order, whatever thread was first.
    results.into_iter().collect::<Result<()>>()?;
    Ok(packed)
}

/// `out += left · rightᵀ`, `[rows, n]`.
fn add_product(token: Avx512Bf16, left: &LeftBf16, right: &RightBf16, out: &mut [f32]) {
    let piece = TASK_STRIPS * LEFT_ROWS * right.rows();
    out.par_chunks_mut(piece.max(1)).enumerate().for_each_init(Vec::new, |product, (i, out)| {
        product.resize(out.len(), 0.0);
        bf16_gemm(token, left, i * TASK_STRIPS, right, product);
        out.iter_mut().zip(product.iter()).for_each(|(o, p)| *o += p);
    });
}

/// Appends `Σ (left · rightᵀ)²` of every row.
fn row_sums(token: Avx512Bf16, left: &LeftBf16, right: &RightBf16, sums: &mut Vec<f64>) {
    let (rows, n) = (left.rows(), right.rows());
    let pieces: Vec<Vec<f64>> = (0..rows.div_ceil(TASK_STRIPS * LEFT_ROWS))
        .into_par_iter()
        .map_init(Vec::new, |product, i| {
            let height = (TASK_STRIPS * LEFT_ROWS).min(rows - i * TASK_STRIPS * LEFT_ROWS);
            product.resize(height * n, 0.0);
            bf16_gemm(token, left, i * TASK_STRIPS, right, product);
            let sum = |row: &[f32]| row.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
            product.chunks_exact(n).map(sum).collect()
        })
        .collect();
    sums.extend(pieces.into_iter().flatten());
}
