//! The Hessian of a linear's output error, accumulated over the batch.

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;

use crate::{Result, allocate};

/// Tokens per matrix product in `f32`, which is then added to the sum.
const PANEL: usize = 2048;
const TILE: usize = 256;
/// Up to this width, the sum and its factorization are in `f64`. The limit does not depend on the machine, so results
/// do not either.
const WIDEST_F64: usize = 8192;

/// `2/N · Σ x xᵀ` over the `N` tokens that went through a linear. The result is bit-identical for any number of threads
/// and for any pieces in which tokens arrive.
#[derive(Debug, Clone)]
pub struct Hessian {
    channels: usize,
    tokens: u64,
    sum: Sum,
    /// Rows that do not fill a panel yet.
    pending: Vec<f32>,
}

/// The lower triangle in tiles of rows, row-major. A tile ends at the last column of its diagonal block.
#[derive(Debug, Clone)]
enum Sum {
    F64(Vec<Vec<f64>>),
    F32(Vec<Vec<f32>>),
}

fn zeros<T: Clone + Default>(channels: usize) -> Result<Vec<Vec<T>>> {
    let tile = |first: usize| {
        let height = TILE.min(channels - first);
        allocate::zeros(height * (first + height), "the Hessian of an input")
    };
    (0..channels).step_by(TILE).map(tile).collect()
}

fn values(channels: u64) -> u64 {
    channels.saturating_mul(channels + TILE as u64) / 2
}

impl Hessian {
    /// The Hessian of an input with `channels` features before any token.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory).
    pub fn new(channels: usize) -> Result<Self> {
        let sum = match Self::is_f64(channels) {
            true => Sum::F64(zeros(channels)?),
            false => Sum::F32(zeros(channels)?),
        };
        Ok(Self { channels, tokens: 0, sum, pending: Vec::new() })
    }

    /// Whether a Hessian of this width is summed and factored in `f64`.
    pub fn is_f64(channels: usize) -> bool {
        channels <= WIDEST_F64
    }

    fn number(channels: u64) -> u64 {
        if channels <= WIDEST_F64 as u64 { 8 } else { 4 }
    }

    /// The size in bytes of the triangle of a Hessian of this width.
    pub fn triangle_bytes(channels: u64) -> u64 {
        values(channels).saturating_mul(Self::number(channels))
    }

    /// Whether this many rows are added at once, and none wait until there are enough for a panel.
    pub fn fill_panels(rows: u64) -> bool {
        rows.is_multiple_of(PANEL as u64)
    }

    /// The size in bytes of a Hessian of this width while it is accumulated.
    pub fn kept_bytes(channels: u64) -> u64 {
        Self::triangle_bytes(channels).saturating_add(4 * PANEL as u64 * channels)
    }

    /// The memory in bytes for adding rows: on each thread, a tile of the product, and its operands packed for it.
    pub fn adding_bytes(channels: u64) -> u64 {
        let tile = 4 * TILE as u64 * channels;
        (2 * tile).saturating_mul(rayon::current_num_threads() as u64)
    }

    /// The peak memory in bytes of a Hessian and its factor.
    pub fn peak_bytes(channels: u64) -> u64 {
        let triangles = Self::triangle_bytes(channels).saturating_mul(2);
        triangles.max(Self::kept_bytes(channels))
    }

    /// The number of channels of the input.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// The number of tokens added.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Adds rows `[tokens, channels]`.
    pub fn add(&mut self, mut x: &[f32]) {
        let panel = PANEL * self.channels;
        if panel == 0 {
            return;
        }
        self.tokens += (x.len() / self.channels) as u64;
        if !self.pending.is_empty() {
            let (head, rest) = x.split_at(x.len().min(panel - self.pending.len()));
            self.pending.extend_from_slice(head);
            x = rest;
            if self.pending.len() == panel {
                let full = std::mem::take(&mut self.pending);
                self.sum.add(&full, self.channels);
                self.pending = full;
                self.pending.clear();
            }
        }
        let panels = x.chunks_exact(panel);
        self.pending.extend_from_slice(panels.remainder());
        for panel in panels {
            self.sum.add(panel, self.channels);
        }
    }

    /// Adds the remaining rows. Must be called after all tokens were added.
    pub fn finish(&mut self) {
        let rest = std::mem::take(&mut self.pending);
        if !rest.is_empty() {
            self.sum.add(&rest, self.channels);
        }
    }

    /// The element in row `i` and column `j`, in either triangle. 0 if no token was added.
    #[inline(always)]
    pub fn at(&self, i: usize, j: usize) -> f64 {
        let (row, column) = (i.max(j), i.min(j));
        let (tile, first) = (row / TILE, row / TILE * TILE);
        let width = (first + TILE).min(self.channels);
        let at = (row - first) * width + column;
        let sum = match &self.sum {
            Sum::F64(tiles) => tiles[tile][at],
            Sum::F32(tiles) => f64::from(tiles[tile][at]),
        };
        sum * self.scale()
    }

    fn scale(&self) -> f64 {
        2.0 / self.tokens.max(1) as f64
    }

    /// The diagonal.
    pub fn diagonal(&self) -> Vec<f64> {
        (0..self.channels).map(|i| self.at(i, i)).collect()
    }
}

impl Sum {
    /// Adds at most one panel of rows.
    fn add(&mut self, x: &[f32], channels: usize) {
        let x = MatRef::from_row_major_slice(x, x.len() / channels, channels);
        match self {
            Self::F64(sum) => tiles(sum).for_each_init(Vec::new, |product, (first, rows)| {
                let height = TILE.min(channels - first);
                let width = first + height;
                product.resize(height * width, 0.0_f32);
                let tile = MatMut::from_row_major_slice_mut(product, height, width);
                multiply(tile, Accum::Replace, x, first);
                for (sum, p) in rows.iter_mut().zip(&*product) {
                    *sum += f64::from(*p);
                }
            }),
            Self::F32(sum) => tiles(sum).for_each(|(first, rows)| {
                let height = TILE.min(channels - first);
                let tile = MatMut::from_row_major_slice_mut(rows, height, first + height);
                multiply(tile, Accum::Add, x, first);
            }),
        }
    }
}

fn tiles<T: Send>(sum: &mut [Vec<T>]) -> impl IndexedParallelIterator<Item = (usize, &mut [T])> {
    // In reverse order, since the last tiles have the most columns.
    let tiles = sum.par_iter_mut().enumerate().map(|(i, rows)| (i * TILE, &mut rows[..]));
    tiles.rev().with_max_len(1)
}

/// `tile (+)= x[:, first..]ᵀ x`, restricted to the size of the tile.
fn multiply(tile: MatMut<'_, f32>, accum: Accum, x: MatRef<'_, f32>, first: usize) {
    let (height, width) = (tile.nrows(), tile.ncols());
    matmul(tile, accum, x.subcols(first, height).transpose(), x.subcols(0, width), 1.0_f32, Par::Seq);
}
