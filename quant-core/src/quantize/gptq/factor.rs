//! `H⁻¹ = Uᵀ U`: the factor of a Hessian that the solver needs.
//!
//! The textbook chain factors `H`, inverts it, and factors the inverse. With rows and columns in reverse order, one
//! factorization and the inverse of a triangle are enough: `J H J = L Lᵀ` (`J` the reversal) makes `R = J L J` upper
//! triangular with `H = R Rᵀ`, so `U = R⁻¹ = J L⁻¹ J`.
//!
//! Both steps run on blocks of fixed size, each product as one sequential call of faer, so results do not depend on the
//! number of threads.

use std::ops::Range;

use faer::dyn_stack::{MemBuffer, MemStack};
use faer::linalg::cholesky::llt::factor::{cholesky_in_place, cholesky_in_place_scratch};
use faer::linalg::matmul::matmul;
use faer::linalg::triangular_solve::solve_lower_triangular_in_place;
use faer::traits::RealField;
use faer::{Accum, Mat, MatRef, Par};
use rayon::prelude::*;

use super::Hessian;
use crate::allocate;

const BLOCK: usize = 256;
/// The factor by which damping grows after a failure.
const STEP: f64 = 10.0;
/// The maximum number of attempts, including the first.
const ATTEMPTS: u32 = 8;

/// The reason why a Hessian has no factor.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FactorError {
    /// Inputs were NaN or infinite, or the sum of their squares overflows.
    #[error("the sum of squares of input channel {channel} is NaN or infinite")]
    NonFinite {
        /// The first such channel.
        channel: usize,
    },
    /// There is too little memory.
    #[error("not enough memory to factor a Hessian: {bytes} bytes")]
    Memory {
        /// What the factorization needs.
        bytes: u64,
    },
    /// The Hessian was not positive definite even with the maximum damping.
    #[error(
        "the Hessian is not positive definite, even with a damping of {damping:e} times the mean of its \
        diagonal: increase the damping, or use more calibration text"
    )]
    Indefinite {
        /// The last damping tried.
        damping: f64,
    },
}

/// The factor `U` of a damped Hessian's inverse, for columns in some order.
#[derive(Debug)]
pub struct Factor {
    columns: Vec<usize>,
    ratios: Ratios,
    /// `1 / U_cc²`: twice the loss of a unit of error in a column.
    weights: Vec<f64>,
    damping: f64,
    escalations: u32,
    dead: usize,
}

impl Factor {
    /// Factors a Hessian for columns that are rounded in this order.
    ///
    /// `damping` times the mean of the diagonal is added to the diagonal. If the matrix is still not positive definite,
    /// the damping grows, for a limited number of attempts. A wide Hessian, which is factored in `f32`, has a minimum
    /// damping. A *dead* channel, whose input was always 0, is excluded from the mean, which replaces its 0 on the
    /// diagonal.
    ///
    /// # Errors
    /// [`FactorError::NonFinite`] when a channel's sum of squares is not finite; [`FactorError::Indefinite`] when no
    /// damping helps; [`FactorError::Memory`].
    pub fn new(hessian: &Hessian, columns: Vec<usize>, damping: f64) -> Result<Self, FactorError> {
        let k = hessian.channels();
        let diagonal = hessian.diagonal();
        if let Some(channel) = diagonal.iter().position(|d| !d.is_finite()) {
            return Err(FactorError::NonFinite { channel });
        }
        let live: Vec<f64> = diagonal.iter().copied().filter(|d| *d > 0.0).collect();
        let mean = match live.is_empty() {
            true => 1.0,
            false => live.iter().sum::<f64>() / live.len() as f64,
        };
        let dead = k - live.len();
        // The matrix is allocated in many small blocks, so the room for it is checked beforehand.
        let bytes = Hessian::triangle_bytes(k as u64);
        let room = allocate::room::<u8>(usize::try_from(bytes).unwrap_or(usize::MAX), "");
        room.map_err(|_| FactorError::Memory { bytes })?;
        // The rounding errors of a factorization in f32 are a fraction of the trace that grows with the width.
        let floor = if Hessian::is_f64(k) { 0.0 } else { 8.0 * k as f64 * f64::from(f32::EPSILON) };
        let mut damping = damping.max(floor);
        for escalations in 0..ATTEMPTS {
            // In units of the mean, so that elements stay in range for any scale of the inputs.
            let element = |i: usize, j: usize| {
                let (a, b) = (columns[k - 1 - i], columns[k - 1 - j]);
                match a == b {
                    true if diagonal[a] > 0.0 => diagonal[a] / mean + damping,
                    true => 1.0 + damping,
                    false => hessian.at(a, b) / mean,
                }
            };
            let inverse = match Hessian::is_f64(k) {
                true => Triangle::<f64>::new(k, element).inverse_factor().map(|t| t.upper(k)),
                false => {
                    Triangle::<f32>::new(k, |i, j| element(i, j) as f32).inverse_factor().map(|t| t.upper(k))
                }
            };
            if let Some((ratios, diagonal)) = inverse {
                // The matrix was divided by the mean before it was factored, which also divided `1 / U_cc²` by the
                // mean.
                let weights = diagonal.into_iter().map(|u| mean / (u * u)).collect();
                return Ok(Self { columns, ratios, weights, damping, escalations, dead });
            }
            damping *= STEP;
        }
        Err(FactorError::Indefinite { damping: damping / STEP })
    }

    /// The columns in the order in which they are rounded.
    pub fn columns(&self) -> &[usize] {
        &self.columns
    }

    pub(super) fn ratios(&self) -> &Ratios {
        &self.ratios
    }

    pub(super) fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// The damping used, as a fraction of the mean of the diagonal.
    pub fn damping(&self) -> f64 {
        self.damping
    }

    /// How often the Hessian was not positive definite and the damping was [increased](Self::new).
    pub fn escalations(&self) -> u32 {
        self.escalations
    }

    /// The number of channels whose input was always 0.
    pub fn dead(&self) -> usize {
        self.dead
    }
}

trait Real: RealField + Copy + Into<f64> {
    const ZERO: Self;
    const MINUS_ONE: Self;
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const MINUS_ONE: Self = -1.0;
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const MINUS_ONE: Self = -1.0;
}

/// A lower triangle in blocks: `blocks[i][j]` for `j ≤ i`. The upper halves of diagonal blocks are unused.
struct Triangle<T> {
    blocks: Vec<Vec<Mat<T>>>,
}

fn height(k: usize, i: usize) -> usize {
    BLOCK.min(k - i * BLOCK)
}

impl<T: Real> Triangle<T> {
    fn new(k: usize, element: impl Fn(usize, usize) -> T + Sync) -> Self {
        let row = |i: usize| -> Vec<Mat<T>> {
            let block = |j: usize| {
                let at = |r, c| (i * BLOCK + r, j * BLOCK + c);
                Mat::from_fn(height(k, i), height(k, j), |r, c| match at(r, c) {
                    (row, column) if column <= row => element(row, column),
                    _ => T::ZERO,
                })
            };
            (0..=i).map(block).collect()
        };
        Self { blocks: (0..k.div_ceil(BLOCK)).into_par_iter().map(row).collect() }
    }

    /// `L⁻¹` of the factor `L Lᵀ`; `None` if the matrix is not positive definite.
    fn inverse_factor(mut self) -> Option<Self> {
        self.factor()?;
        let inverse = self.inverted();
        // If a pivot is tiny relative to its column, the inverse is not finite.
        let regular = inverse.diagonal().map(Into::into).all(|d: f64| d.is_finite() && d > 0.0);
        regular.then_some(inverse)
    }

    fn diagonal(&self) -> impl Iterator<Item = T> {
        self.blocks.iter().filter_map(|row| row.last()).flat_map(|d| (0..d.nrows()).map(|i| d[(i, i)]))
    }

    fn factor(&mut self) -> Option<()> {
        for b in 0..self.blocks.len() {
            let (above, below) = self.blocks.split_at_mut(b + 1);
            let pivot = &mut above[b][b];
            let mut scratch =
                MemBuffer::new(cholesky_in_place_scratch::<T>(pivot.nrows(), Par::Seq, Default::default()));
            let stack = MemStack::new(&mut scratch);
            cholesky_in_place(pivot.as_mut(), Default::default(), Par::Seq, stack, Default::default())
                .ok()?;
            let pivot = &*pivot;
            // Solves `X Lᵀ = A` as `L Xᵀ = Aᵀ`.
            let mut panel: Vec<Mat<T>> = below
                .par_iter_mut()
                .map(|row| {
                    let mut block = std::mem::replace(&mut row[b], Mat::new());
                    solve_lower_triangular_in_place(pivot.as_ref(), block.as_mut().transpose_mut(), Par::Seq);
                    block
                })
                .collect();
            let rest = below.iter_mut().enumerate().flat_map(|(i, row)| {
                row[b + 1..].iter_mut().enumerate().map(move |(j, block)| (i, j, block))
            });
            let rest: Vec<_> = rest.collect();
            rest.into_par_iter().for_each(|(i, j, block)| {
                let (left, right) = (panel[i].as_ref(), panel[j].transpose());
                matmul(block.as_mut(), Accum::Add, left, right, T::MINUS_ONE, Par::Seq);
            });
            for (row, block) in below.iter_mut().zip(panel.drain(..)) {
                row[b] = block;
            }
        }
        Some(())
    }

    fn inverted(self) -> Self {
        let mut inverse: Vec<Vec<Mat<T>>> = Vec::with_capacity(self.blocks.len());
        for (i, row) in self.blocks.into_iter().enumerate() {
            let pivot = row[i].as_ref();
            let block = |j: usize| {
                let mut sum = if j == i {
                    Mat::identity(pivot.nrows(), pivot.nrows())
                } else {
                    Mat::zeros(pivot.nrows(), row[j].ncols())
                };
                for m in j..i {
                    let (left, right) = (row[m].as_ref(), inverse[m][j].as_ref());
                    matmul(sum.as_mut(), Accum::Add, left, right, T::MINUS_ONE, Par::Seq);
                }
                solve_lower_triangular_in_place(pivot, sum.as_mut(), Par::Seq);
                sum
            };
            let row = (0..=i).into_par_iter().map(block).collect();
            inverse.push(row);
        }
        Self { blocks: inverse }
    }

    /// Returns the matrix with rows and columns in reverse order, which is upper triangular, with each row divided by
    /// its diagonal element, and the diagonal. Blocks are freed as their rows are converted, so memory never holds both
    /// matrices in full.
    fn upper(mut self, k: usize) -> (Ratios, Vec<f64>) {
        let (mut bands, mut diagonal) = (Vec::with_capacity(k.div_ceil(BLOCK)), Vec::with_capacity(k));
        for first in (0..k).step_by(BLOCK) {
            let (end, width) = ((first + BLOCK).min(k), k - first);
            let at = |i: usize, j: usize| -> f64 {
                self.blocks[i / BLOCK][j / BLOCK][(i % BLOCK, j % BLOCK)].into()
            };
            let mut band = vec![0.0_f32; (end - first) * width];
            let rows = band.par_chunks_mut(width).enumerate().map(|(r, row)| {
                let c = first + r;
                let diagonal = at(k - 1 - c, k - 1 - c);
                for (j, ratio) in (c..k).zip(&mut row[r..]) {
                    *ratio = (at(k - 1 - c, k - 1 - j) / diagonal) as f32;
                }
                diagonal
            });
            let of_band: Vec<f64> = rows.collect();
            diagonal.extend(of_band);
            bands.push(band);
            self.blocks.truncate((k - end).div_ceil(BLOCK));
        }
        (Ratios { k, bands }, diagonal)
    }
}

/// The elements on and above the diagonal of an upper triangular matrix, in bands of [`BLOCK`] rows: a band starts at
/// the column of its first row, row-major.
#[derive(Debug)]
pub(super) struct Ratios {
    k: usize,
    bands: Vec<Vec<f32>>,
}

impl Ratios {
    /// Part of row `c`; the columns must not begin before `c`.
    pub(super) fn row(&self, c: usize, columns: Range<usize>) -> &[f32] {
        let first = c / BLOCK * BLOCK;
        let row = (c - first) * (self.k - first);
        &self.bands[c / BLOCK][row + columns.start - first..row + columns.end - first]
    }

    /// Passes rows and columns of the matrix to `work`. The first column must not be before the last row.
    pub(super) fn with_panel<R>(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        work: impl FnOnce(MatRef<'_, f32>) -> R,
    ) -> R {
        let (height, width) = (rows.len(), columns.len());
        let band = rows.start / BLOCK;
        if height == 0 || rows.end <= (band + 1) * BLOCK {
            let (first, stride) = (band * BLOCK, self.k - band * BLOCK);
            let at = |c: usize, j: usize| (c - first) * stride + j - first;
            let end = at(rows.end.max(1) - 1, columns.end);
            let values = &self.bands[band][at(rows.start, columns.start)..end];
            return work(MatRef::from_row_major_slice_with_stride(values, height, width, stride));
        }
        let panel: Vec<f32> = rows.flat_map(|c| self.row(c, columns.clone()).iter().copied()).collect();
        work(MatRef::from_row_major_slice(&panel, height, width))
    }
}
