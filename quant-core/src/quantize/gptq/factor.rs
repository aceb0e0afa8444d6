//! `H⁻¹ = Uᵀ U`: what the solver needs of a Hessian.
//!
//! The textbook chain factors `H`, inverts it, and factors the inverse. With rows and columns in reverse order one
//! factorization and the inverse of a triangle do: `J H J = L Lᵀ` (`J` the reversal) makes `R = J L J` upper
//! triangular with `H = R Rᵀ`, so `U = R⁻¹ = J L⁻¹ J`. It is half the work, and nothing is squared on the way.
//!
//! Both steps run on blocks of fixed size, each product by one sequential call of faer, so the bits do not depend
//! on the number of threads.

use faer::dyn_stack::{MemBuffer, MemStack};
use faer::linalg::cholesky::llt::factor::{cholesky_in_place, cholesky_in_place_scratch};
use faer::linalg::matmul::matmul;
use faer::linalg::triangular_solve::solve_lower_triangular_in_place;
use faer::traits::RealField;
use faer::{Accum, Mat, Par};
use rayon::prelude::*;

use super::Hessian;

/// Rows and columns of a block.
const BLOCK: usize = 256;
/// What damping is multiplied by after a failure.
const STEP: f64 = 10.0;
/// Failures after which there is no factor.
const ATTEMPTS: u32 = 8;

/// Why a Hessian has no factor.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FactorError {
    /// Inputs were NaN or infinite, or their squares overflow.
    #[error("the calibration text drives channel {channel} of its input to NaN or infinity")]
    NonFinite {
        /// The first such channel.
        channel: usize,
    },
    /// No damping made it positive definite.
    #[error(
        "its Hessian is not positive definite, not even with a damping of {damping:e} of its mean: use \
         more damping or more calibration text"
    )]
    Indefinite {
        /// The last damping that was tried.
        damping: f64,
    },
}

/// The factor `U` of a damped Hessian's inverse, for columns in some order.
#[derive(Debug)]
pub struct Factor {
    columns: Vec<usize>,
    /// `[k, k]` row-major: `U_cj / U_cc` above the diagonal, in the order of `columns`.
    ratios: Vec<f32>,
    /// `1 / U_cc²`: twice the loss of a unit of error in a column.
    weights: Vec<f64>,
    damping: f64,
    escalations: u32,
    dead: usize,
}

impl Factor {
    /// Factors a Hessian for columns that are rounded in this order.
    ///
    /// `damping` times the mean of the diagonal is added to it; where that does not make the matrix positive
    /// definite, ten times more, and so on. A *dead* channel, whose input was always 0, counts in no mean and gets
    /// it in place of its 0: its column is rounded to nearest, for nothing can make up for it, nor needs to.
    ///
    /// # Errors
    /// When inputs were not finite, or no damping helps.
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
        // The rounding errors of a factorization in f32 are a share of the trace that grows with the width.
        let floor = if Hessian::is_f64(k) { 0.0 } else { 8.0 * k as f64 * f64::from(f32::EPSILON) };
        let mut damping = damping.max(floor);
        for escalations in 0..ATTEMPTS {
            // In units of the mean, so that no scale of the inputs leaves the range of the numbers.
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
                // Back from units of the mean: the inverse is so much smaller.
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

    /// `U_cj / U_cc` for `j > c`, `[k, k]` row-major, in the order of [`columns`](Self::columns).
    pub(super) fn ratios(&self) -> &[f32] {
        &self.ratios
    }

    /// `1 / U_cc²` in that order.
    pub(super) fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// The damping that was used, as a share of the mean of the diagonal.
    pub fn damping(&self) -> f64 {
        self.damping
    }

    /// How often the Hessian was not positive definite, and got [ten times](Self::new) more damping.
    pub fn escalations(&self) -> u32 {
        self.escalations
    }

    /// Channels whose input was always 0.
    pub fn dead(&self) -> usize {
        self.dead
    }
}

/// The numbers that a factorization runs in.
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

/// A lower triangle in blocks: `blocks[i][j]` for `j ≤ i`. On the diagonal the upper half means nothing.
struct Triangle<T> {
    blocks: Vec<Vec<Mat<T>>>,
}

/// Rows of block `i` of a matrix of width `k`.
fn height(k: usize, i: usize) -> usize {
    BLOCK.min(k - i * BLOCK)
}

impl<T: Real> Triangle<T> {
    /// From its elements, `element(i, j)` for `j ≤ i`.
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

    /// `L⁻¹` of the factor `L Lᵀ`; `None` where the matrix is not positive definite.
    fn inverse_factor(mut self) -> Option<Self> {
        self.factor()?;
        let inverse = self.inverted();
        // A pivot that is tiny beside its column leaves no finite inverse.
        let regular = inverse.diagonal().map(Into::into).all(|d: f64| d.is_finite() && d > 0.0);
        regular.then_some(inverse)
    }

    fn diagonal(&self) -> impl Iterator<Item = T> {
        self.blocks.iter().filter_map(|row| row.last()).flat_map(|d| (0..d.nrows()).map(|i| d[(i, i)]))
    }

    /// Replaces the matrix by its Cholesky factor, block column after block column.
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
            // X Lᵀ = A, as L Xᵀ = Aᵀ.
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

    /// The inverse of a lower triangular matrix, row of blocks after row of blocks.
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

    /// The matrix with rows and columns in reverse order, which is upper triangular, each row divided by its
    /// diagonal element, `[k, k]` row-major; and the diagonal.
    fn upper(&self, k: usize) -> (Vec<f32>, Vec<f64>) {
        let at =
            |i: usize, j: usize| -> f64 { self.blocks[i / BLOCK][j / BLOCK][(i % BLOCK, j % BLOCK)].into() };
        let mut rows = vec![0.0_f32; k * k];
        let diagonal = rows
            .par_chunks_mut(k.max(1))
            .enumerate()
            .map(|(c, row)| {
                let diagonal = at(k - 1 - c, k - 1 - c);
                for (j, ratio) in row.iter_mut().enumerate().skip(c) {
                    *ratio = (at(k - 1 - c, k - 1 - j) / diagonal) as f32;
                }
                diagonal
            })
            .collect();
        (rows, diagonal)
    }
}
