//! The dense product of all weights that are neither packed nor on a GPU, in tiles.
//!
//! The tiles depend only on the shapes, and every output element is computed inside one tile, so the result does not
//! depend on the number of threads. A weight that is not `f32` is widened or dequantized one tile at a time.

use std::ops::Range;

use candle_core::{CpuStorage, CustomOp1, Layout, Shape};
use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};
use quant_kernels_cpu::{IsaToken, Rayon};
use rayon::prelude::*;

use super::body::kernel_error;
use super::cuda::failed;
use super::parts::{FloatProducts, Left, Scratch};
use super::{WeightBody, WeightRows};
use crate::vector::vectorized;
use crate::{Error, Result};

pub(super) const TILE_N: usize = 256;
/// Tokens per tile: enough that widening the weight's tile is a small part of the work.
const TILE_M: usize = 2048;
/// Tokens that are multiplied at a time if they are packed in parts: enough that packing the weight's tile is a small
/// part of the work.
pub(super) const PARTS_M: usize = 1024;
/// For up to this many tokens, plain dot products are faster than packing for a matrix product.
const FEW_TOKENS: usize = 4;
/// Rows of a float weight that are widened at a time for few tokens, so that they are still in a cache when they are
/// multiplied.
const FEW_ROWS: usize = 4;

/// `out[m, n] = x[m, k] · weight[n, k]ᵀ`, all row-major. `x` is rounded only if the kernels do it;
/// [`Linear`](super::Linear) rounds it for all other weights.
///
/// # Errors
/// When the weight cannot be read, a quantized weight's parts do not match, or a GPU fails.
///
/// # Panics
/// When `x` or `out` do not have `m · k` and `m · n` elements.
pub fn multiply(x: &[f32], weight: &WeightBody, m: usize, out: &mut [f32]) -> Result<()> {
    let [n, k] = weight.shape();
    assert_eq!(x.len(), m * k, "x is not [m, k]");
    assert_eq!(out.len(), m * n, "out is not [m, n]");
    match weight {
        _ if out.is_empty() => Ok(()),
        _ if k == 0 => {
            out.fill(0.0);
            Ok(())
        }
        WeightBody::Packed { linear, .. } => linear.multiply(x, out).map_err(kernel_error),
        WeightBody::Cuda { linear, .. } => linear.multiply(x, out).map_err(|e| failed(&e)),
        _ => multiply_rows(x, &weight.read()?, m, out),
    }
}

/// [`multiply`] with rows that are in memory.
fn multiply_rows(x: &[f32], weight: &WeightRows<'_>, m: usize, out: &mut [f32]) -> Result<()> {
    match FloatProducts::detect() {
        FloatProducts::Bf16Parts if m > FEW_TOKENS => multiply_in_parts(IsaToken::detect(), x, weight, out),
        _ => multiply_in_f32(x, weight, m, out),
    }
}

fn multiply_in_parts(token: IsaToken, x: &[f32], weight: &WeightRows<'_>, out: &mut [f32]) -> Result<()> {
    let [n, k] = weight.shape();
    if out.is_empty() || k == 0 {
        out.fill(0.0);
        return Ok(());
    }
    for (x, out) in x.chunks(PARTS_M * k).zip(out.chunks_mut(PARTS_M * n)) {
        let left = Left::new(token, x, k, weight.is_bf16(), &Rayon)?;
        let m = left.m();
        tiles_of(MatMut::from_row_major_slice_mut(out, m, n)).into_par_iter().try_for_each_init(
            || (Vec::new(), Vec::new(), Scratch::default()),
            |(widened, product, scratch), (column, mut tile)| {
                let width = tile.ncols();
                product.resize(m * width, 0.0);
                left.multiply(weight.rows(column..column + width, widened)?, product, scratch)?;
                tile.copy_from(MatRef::from_row_major_slice(product, m, width));
                Ok::<(), Error>(())
            },
        )?;
    }
    Ok(())
}

/// Divides an output into tiles of columns, each with the number of its first column. Narrow outputs get narrower tiles,
/// so that up to eight threads have work.
fn tiles_of(band: MatMut<'_, f32>) -> Vec<(usize, MatMut<'_, f32>)> {
    let n = band.ncols();
    let tile_n = TILE_N.min(n.div_ceil(8).next_multiple_of(16));
    let (mut tiles, mut rest) = (Vec::new(), band);
    while rest.ncols() > 0 {
        let width = tile_n.min(rest.ncols());
        let column = n - rest.ncols();
        let (tile, right) = rest.split_at_col_mut(width);
        tiles.push((column, tile));
        rest = right;
    }
    tiles
}

fn multiply_in_f32(x: &[f32], weight: &WeightRows<'_>, m: usize, out: &mut [f32]) -> Result<()> {
    let [n, k] = weight.shape();
    if out.is_empty() {
        return Ok(());
    }
    if k == 0 {
        out.fill(0.0);
        return Ok(());
    }
    let mut tiles = Vec::new();
    let mut rest = MatMut::from_row_major_slice_mut(out, m, n);
    let mut row = 0;
    while rest.nrows() > 0 {
        let height = TILE_M.min(rest.nrows());
        let (band, below) = rest.split_at_row_mut(height);
        tiles.extend(tiles_of(band).into_iter().map(|(column, tile)| (row, column, tile)));
        rest = below;
        row += height;
    }
    tiles.into_par_iter().try_for_each_init(Vec::new, |scratch, (row, column, tile)| {
        let x = &x[row * k..(row + tile.nrows()) * k];
        // Rows of quantized weights are cheaper to dequantize many at a time.
        if tile.nrows() > FEW_TOKENS || weight.as_float().is_none() {
            multiply_into(x, weight.rows(column..column + tile.ncols(), scratch)?, k, tile);
            return Ok(());
        }
        let (mut column, mut rest) = (column, tile);
        while rest.ncols() > 0 {
            let width = FEW_ROWS.min(rest.ncols());
            let (part, right) = rest.split_at_col_mut(width);
            multiply_into(x, weight.rows(column..column + width, scratch)?, k, part);
            column += width;
            rest = right;
        }
        Ok(())
    })
}

/// The left operand `[m, k]` of products with many tiles of a weight, on any threads.
#[derive(Debug)]
pub(in crate::model) struct ProductTiles<'x> {
    x: &'x [f32],
    k: usize,
    /// The operand in parts, if it is multiplied so.
    left: Option<Left>,
}

/// Buffers of a thread for tiles of a weight.
#[derive(Debug, Default)]
pub struct TileBuffers {
    widened: Vec<f32>,
    scratch: Scratch,
}

impl<'x> ProductTiles<'x> {
    /// Prepares `x` for products with tiles of `weight`.
    pub(in crate::model) fn new(x: &'x [f32], weight: &WeightRows<'_>) -> Result<Self> {
        let k = weight.shape()[1];
        let m = x.len().checked_div(k).unwrap_or(0);
        let left = match FloatProducts::detect() {
            FloatProducts::Bf16Parts if m > FEW_TOKENS => {
                Some(Left::new(IsaToken::detect(), x, k, weight.is_bf16(), &Rayon)?)
            }
            _ => None,
        };
        Ok(Self { x, k, left })
    }

    /// The product with these rows of the weight, `[m, rows]`, on this thread.
    pub(in crate::model) fn multiply(
        &self,
        weight: &WeightRows<'_>,
        rows: Range<usize>,
        buffers: &mut TileBuffers,
        out: &mut Vec<f32>,
    ) -> Result<()> {
        let m = self.x.len().checked_div(self.k).unwrap_or(0);
        out.resize(m * rows.len(), 0.0);
        let width = rows.len();
        let weight = weight.rows(rows, &mut buffers.widened)?;
        match &self.left {
            Some(left) => left.multiply(weight, out, &mut buffers.scratch),
            None => {
                multiply_tile(self.x, weight, self.k, [m, width], out);
                Ok(())
            }
        }
    }
}

/// `out[m, n] = x[m, k] · weight[n, k]ᵀ` on this thread, as one tile.
///
/// # Panics
/// When lengths do not match.
fn multiply_tile(x: &[f32], weight: &[f32], k: usize, [m, n]: [usize; 2], out: &mut [f32]) {
    multiply_into(x, weight, k, MatMut::from_row_major_slice_mut(out, m, n));
}

fn multiply_into(x: &[f32], weight: &[f32], k: usize, mut tile: MatMut<'_, f32>) {
    let (m, n) = (tile.nrows(), tile.ncols());
    if m <= FEW_TOKENS {
        return vectorized(|| {
            for i in 0..m {
                for j in 0..n {
                    tile[(i, j)] = dot(&x[i * k..(i + 1) * k], &weight[j * k..(j + 1) * k]);
                }
            }
        });
    }
    let x = MatRef::from_row_major_slice(x, m, k);
    let weight = MatRef::from_row_major_slice(weight, n, k);
    matmul(tile, Accum::Replace, x, weight.transpose(), 1.0_f32, Par::Seq);
}

/// A dot product in 16 partial sums, which the compiler keeps in vector registers.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0_f32; LANES];
    let (a_head, a_tail) = a.split_at(a.len() - a.len() % LANES);
    let (b_head, b_tail) = b.split_at(a_head.len());
    for (x, y) in a_head.chunks_exact(LANES).zip(b_head.chunks_exact(LANES)) {
        for l in 0..LANES {
            sums[l] += x[l] * y[l];
        }
    }
    let tail: f32 = a_tail.iter().zip(b_tail).map(|(x, y)| x * y).sum();
    sums.iter().sum::<f32>() + tail
}

/// [`multiply`] as an operation on candle tensors.
#[derive(Debug)]
pub(super) struct Product<'a>(pub(super) WeightRows<'a>);

impl CustomOp1 for Product<'_> {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let [n, k] = self.0.shape();
        let mut dims = layout.dims().to_vec();
        match dims.last_mut() {
            Some(last) if *last == k => *last = n,
            _ => candle_core::bail!("linear of width {k} got an input of shape {:?}", layout.dims()),
        }
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("linear needs a contiguous input")
        };
        let x = &storage.as_slice::<f32>()?[start..end];
        let m = x.len().checked_div(k).unwrap_or(0);
        let mut out = vec![0.0; m * n];
        multiply_rows(x, &self.0, m, &mut out).map_err(|e: Error| candle_core::Error::Msg(e.to_string()))?;
        Ok((CpuStorage::F32(out), Shape::from(dims)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng, rngs::StdRng};

    use quant_kernels_cpu::Isa;

    use crate::checkpoint::Dtype;
    use crate::quantize::SourceRows;

    fn random(len: usize, seed: u64) -> Vec<f32> {
        let mut rng = StdRng::seed_from_u64(seed);
        (0..len).map(|_| rng.random_range(-1.0..1.0)).collect()
    }

    #[test]
    fn agrees_with_the_definition_on_ragged_shapes() {
        for (m, n, k) in [(1, 1, 1), (3, 17, 5), (5, 300, 33), (70, 257, 129), (2100, 20, 40)] {
            let (x, w) = (random(m * k, 1), random(n * k, 2));
            let mut out = vec![f32::NAN; m * n];
            let body = WeightBody::F32 { shape: [n, k], values: w.clone() };
            multiply(&x, &body, m, &mut out).unwrap();
            let double = |rows, v: &[f32]| {
                ndarray::Array2::from_shape_vec((rows, k), v.iter().map(|&v| f64::from(v)).collect()).unwrap()
            };
            let exact = double(m, &x).dot(&double(n, &w).t());
            for (got, exact) in out.iter().zip(&exact) {
                approx::assert_abs_diff_eq!(f64::from(*got), *exact, epsilon = 1e-6 * k as f64);
            }
        }
    }

    #[test]
    fn widened_weights_give_the_result_of_the_same_values_in_f32() {
        for dtype in [Dtype::F16, Dtype::Bf16] {
            for (m, n, k) in [(1, 5, 7), (4, 301, 64), (5, 301, 64)] {
                let (x, bytes) = (random(m * k, 1), dtype.narrow(&random(n * k, 2)));
                let mut values = vec![0.0; n * k];
                dtype.widen(&bytes, &mut values);
                let run = |rows: &WeightRows<'_>| {
                    let mut out = vec![f32::NAN; m * n];
                    multiply_in_f32(&x, rows, m, &mut out).unwrap();
                    out
                };
                let narrow = WeightRows::float([n, k], SourceRows::Bytes(&bytes, dtype)).unwrap();
                let wide = WeightRows::float([n, k], SourceRows::Floats(&values)).unwrap();
                assert_eq!(run(&narrow), run(&wide), "{dtype}, {m} tokens");
            }
        }
    }

    /// Weights in `f32`, f16 and bf16, which take six, five and three products per weight.
    #[test]
    fn products_in_parts_are_within_their_bound() {
        let token = Isa::AmxEmulated.token().unwrap();
        for (m, n, k) in [(5, 1, 1), (5, 17, 5), (7, 300, 33), (70, 40, 129), (1030, 16, 24)] {
            for (dtype, extreme) in
                [Dtype::F32, Dtype::F16, Dtype::Bf16].map(|d| [(d, 1.0), (d, 1e-3), (d, 1e-7)]).concat()
            {
                let (mut x, bytes) = (random(m * k, 1), dtype.narrow(&random(n * k, 2)));
                // Rows of very different magnitude.
                x.chunks_mut(k).enumerate().for_each(|(i, row)| {
                    let scale = f32::powi(extreme, i as i32 % 5);
                    row.iter_mut().for_each(|x| *x *= scale);
                });
                let mut values = vec![0.0; n * k];
                dtype.widen(&bytes, &mut values);
                let rows = WeightRows::float([n, k], SourceRows::Bytes(&bytes, dtype)).unwrap();
                let mut out = vec![f32::NAN; m * n];
                multiply_in_parts(token, &x, &rows, &mut out).unwrap();
                for (i, out) in out.iter().enumerate() {
                    let terms = x[i / n * k..][..k].iter().zip(&values[i % n * k..]);
                    let terms = terms.map(|(x, w)| f64::from(*x) * f64::from(*w));
                    let (exact, magnitude) = terms.fold((0.0, 0.0), |(sum, all), t| (sum + t, all + t.abs()));
                    let bound =
                        (k as f64 + 9.0) * 2.0_f64.powi(-22) * magnitude + k as f64 * 2.0_f64.powi(-123);
                    let off = (f64::from(*out) - exact).abs();
                    assert!(off <= bound, "{dtype}, {m} x {n} x {k}: {out}, not {exact}");
                }
            }
        }
    }

    /// With few terms, sums hardly round, and the bound shows that every part is needed.
    #[test]
    fn parts_are_as_precise_as_f32() {
        let token = Isa::AmxEmulated.token().unwrap();
        let (x, w) = (random(5 * 600, 7), random(600, 8));
        for k in [1, 2] {
            let rows = WeightRows::float([600 / k, k], SourceRows::Floats(&w)).unwrap();
            let m = x.len() / k;
            let mut out = vec![f32::NAN; m * 600 / k];
            multiply_in_parts(token, &x, &rows, &mut out).unwrap();
            for (i, out) in out.iter().enumerate() {
                let terms = x[i / (600 / k) * k..][..k].iter().zip(&w[i % (600 / k) * k..]);
                let terms = terms.map(|(x, w)| f64::from(*x) * f64::from(*w));
                let (exact, magnitude) = terms.fold((0.0, 0.0), |(sum, all), t| (sum + t, all + t.abs()));
                let off = (f64::from(*out) - exact).abs();
                assert!(off <= 2.0_f64.powi(-21) * magnitude, "{out}, not {exact}");
            }
        }
    }

    #[test]
    fn parts_keep_numbers_that_are_not_finite() {
        let token = Isa::AmxEmulated.token().unwrap();
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX] {
            let mut w = vec![1.0; 2 * 3];
            w[4] = bad;
            let rows = WeightRows::float([2, 3], SourceRows::Floats(&w)).unwrap();
            let mut out = vec![0.0; 5 * 2];
            multiply_in_parts(token, &[1.0; 5 * 3], &rows, &mut out).unwrap();
            for row in out.chunks(2) {
                assert_eq!(row[0], 3.0);
                assert!(!row[1].is_finite(), "{row:?}");
            }
        }
    }

    #[test]
    fn products_in_parts_do_not_depend_on_threads_or_on_other_rows() {
        let token = Isa::AmxEmulated.token().unwrap();
        let (m, n, k) = (40, 70, 48);
        let (x, w) = (random(m * k, 3), random(n * k, 4));
        let rows = WeightRows::float([n, k], SourceRows::Floats(&w)).unwrap();
        let run = |threads: usize, m: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut out = vec![0.0; m * n];
            pool.install(|| multiply_in_parts(token, &x[..m * k], &rows, &mut out)).unwrap();
            out
        };
        let one = run(1, m);
        assert_eq!(one, run(2, m));
        assert_eq!(one[..21 * n], run(2, 21));
    }

    #[test]
    fn does_not_depend_on_threads_or_on_other_rows() {
        let (m, n, k) = (300, 4096, 512);
        let x = random(m * k, 3);
        let body = WeightBody::F32 { shape: [n, k], values: random(n * k, 4) };
        let run = |threads: usize, m: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut out = vec![0.0; m * n];
            pool.install(|| multiply(&x[..m * k], &body, m, &mut out)).unwrap();
            out
        };
        let one = run(1, m);
        assert_eq!(one, run(2, m));
        assert_eq!(one, run(5, m));
        assert_eq!(one[..64 * n], run(2, 64));
    }
}
