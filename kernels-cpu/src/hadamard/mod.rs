//! Rotations of activations: the orthonormal Hadamard transform of rows.
//!
//! `y = H x / √n` with `H` a matrix of ±1 and `H Hᵀ = n I`: it spreads outlier channels over all channels (QuaRot, §4).
//! The rows of a weight that is multiplied by rotated activations are rotated once beforehand by the same transform,
//! which leaves the product unchanged: `(W Hᵀ / √n)(H x / √n) = W x`.
//!
//! Orders are `2^p · m`, `m` odd: `H = H₁ ⊗ H₂ ⊗ … ⊗ S`, with factors `Hᵢ` of orders `4 mᵢ ≤ 256`, `m = Π mᵢ`, and
//! Sylvester's matrix `S`, `S[r, c] = (−1)^(number of bits that are 1 in both r and c)`. Factorizations of `m` that
//! leave `S` an order of at least 16 are preferred; among these, the one with the smallest sum of orders is used, with
//! the smaller factors first. [`Hadamard::sign`] returns the entries of `H`, which is not symmetric unless `n` is a
//! power of two.
//!
//! Factors can be [constructed](Construction) for every order `4 t`, `t` odd, from 12 to 252, except 100, 116, 188, 236
//! and 244 (`t` = 25, 29, 47, 59 and 61). The factors for the widths of common models, each times Sylvester's matrix:
//!
//! | width | factors |
//! |---|---|
//! | 2048, 4096, 8192 | Sylvester only |
//! | 3072, 6144 (`m` = 3) | 12 |
//! | 2560, 5120 (5) | 20 |
//! | 3584, 7168, 14336, 28672 (7) | 28 |
//! | 2816 (11) | 44 |
//! | 13824 (27) | 12 ⊗ 36 |
//! | 27648 (27) | 12 ⊗ 12 ⊗ 12 |
//! | 18944 (37) | 148 |
//! | 11008 (43) | 172 |
//!
//! A width is not supported if `m` is not a product of odd numbers `mᵢ` whose orders `4mᵢ` can be constructed, or if
//! every such product has more than `p / 2` factors.
//!
//! A row costs `n (p − 2f + Σ 4mᵢ)` additions, where `f` is the number of factors. The Sylvester part comes first, with
//! additions at distances 1, 2, 4 and so on; then the factors are applied from the last to the first, each sum in order
//! of columns; finally the row is multiplied by `1 / √n`, rounded. This order is part of the definition
//! ([`reference::hadamard`](crate::reference::hadamard)), so results are bit-identical for all instruction sets and
//! numbers of threads. The error of a value is at most `(p + Σ 4mᵢ + 2) · 2⁻²⁴ · Σ |x| / √n`.

mod construct;
mod rows;

pub use self::construct::Construction;
use crate::parallel::Disjoint;
use crate::simd::elementwise::dispatched;
use crate::{IsaToken, KernelError, Parallel};

#[derive(Debug, Clone)]
pub(crate) struct Factor {
    pub(crate) order: usize,
    construction: Construction,
    /// `[order, order]`, entries ±1.
    pub(crate) signs: Vec<f32>,
}

/// The Hadamard transform of an order, created once and used for many rows.
///
/// ```
/// use quant_kernels_cpu::{Hadamard, IsaToken, Serial};
///
/// let by = Hadamard::new(4)?;
/// let mut rows = [1.0, 0.0, 0.0, 0.0];
/// by.transform(IsaToken::detect(), &mut rows, &Serial)?;
/// assert_eq!(rows, [0.5; 4]);
/// # Ok::<(), quant_kernels_cpu::KernelError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Hadamard {
    n: usize,
    power: u32,
    factors: Vec<Factor>,
    scale: f32,
}

const ROWS: usize = 8;

impl Hadamard {
    /// Creates the transform for rows of width `n`.
    ///
    /// # Errors
    /// [`KernelError::Order`] when this crate constructs no matrix of that order.
    pub fn new(n: usize) -> Result<Self, KernelError> {
        if n == 0 {
            return Err(KernelError::Order(n));
        }
        let power = n.trailing_zeros();
        let odd = n >> power;
        let divisors = (3..=construct::MAX_ORDER / 4).step_by(2).filter(|m| odd.is_multiple_of(*m));
        let mut there: Vec<Factor> = divisors
            .filter_map(|m| {
                let (construction, signs) = construct::matrix(4 * m)?;
                Some(Factor { order: 4 * m, construction, signs })
            })
            .collect();
        let mut best = None;
        search(odd, &there, power, &mut Vec::new(), &mut best);
        let (_, orders) = best.ok_or(KernelError::Order(n))?;
        there.retain(|factor| orders.contains(&factor.order));
        let factors: Vec<Factor> =
            orders.iter().filter_map(|order| there.iter().find(|f| f.order == *order).cloned()).collect();
        let power = power - 2 * factors.len() as u32;
        Ok(Self { n, power, factors, scale: (1.0 / (n as f64).sqrt()) as f32 })
    }

    /// The order of the matrix, which is the width of rows.
    pub fn n(&self) -> usize {
        self.n
    }

    /// The order of the Sylvester part, the last factor; a power of two.
    pub fn sylvester(&self) -> usize {
        1 << self.power
    }

    /// The orders of the other factors, and how each was constructed.
    pub fn factors(&self) -> impl Iterator<Item = (usize, Construction)> + '_ {
        self.factors.iter().map(|f| (f.order, f.construction))
    }

    /// The number by which the sums are multiplied at the end: `1 / √n`, rounded.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// An entry of `H`, 1 or −1; `None` if the row or column is out of range.
    pub fn sign(&self, row: usize, column: usize) -> Option<i8> {
        if row >= self.n || column >= self.n {
            return None;
        }
        let (mut r, mut c) = (row >> self.power, column >> self.power);
        let shared = row & column & (self.sylvester() - 1);
        let mut negative = shared.count_ones() % 2 == 1;
        for factor in self.factors.iter().rev() {
            negative ^= factor.signs[r % factor.order * factor.order + c % factor.order] < 0.0;
            (r, c) = (r / factor.order, c / factor.order);
        }
        Some(if negative { -1 } else { 1 })
    }

    /// Transforms rows `[m, n]`, row-major, in place.
    ///
    /// # Errors
    /// When the length of `x` is not a multiple of `n`.
    pub fn transform(
        &self,
        token: IsaToken,
        x: &mut [f32],
        parallel: &dyn Parallel,
    ) -> Result<(), KernelError> {
        let n = self.n;
        let m = KernelError::parts("rows", n, x.len())?;
        let x = Disjoint::new(x);
        if m > 0 {
            parallel.for_each(m.div_ceil(ROWS), &|piece| {
                let rows = piece * ROWS..m.min((piece + 1) * ROWS);
                // SAFETY: pieces are disjoint, and `Parallel` calls each at most once.
                let part = unsafe { x.part(rows.start * n..rows.end * n) };
                for row in part.chunks_exact_mut(n) {
                    transform(token, row, self.power, &self.factors, self.scale);
                }
            });
        }
        Ok(())
    }

    pub(crate) fn parts(&self) -> &[Factor] {
        &self.factors
    }
}

type Best = ((bool, usize), Vec<usize>);

/// Searches the products of available factors, in ascending order, that equal `left`; each factor uses two of `power`.
/// Keeps the first product with the smallest sum of orders, but prefers those that leave the Sylvester part an order of
/// at least 16, the width of a register.
fn search(left: usize, there: &[Factor], power: u32, taken: &mut Vec<usize>, best: &mut Option<Best>) {
    if left == 1 {
        let cost = (power < 4, taken.iter().sum::<usize>());
        if best.as_ref().is_none_or(|(least, _)| cost < *least) {
            *best = Some((cost, taken.clone()));
        }
        return;
    }
    if power < 2 {
        return;
    }
    for (i, factor) in there.iter().enumerate().filter(|(_, f)| left.is_multiple_of(f.order / 4)) {
        taken.push(factor.order);
        search(left / (factor.order / 4), &there[i..], power - 2, taken, best);
        taken.pop();
    }
}

dispatched! { rows,
    /// Transforms a row.
    fn transform[][](x: &mut [f32], power: u32, factors: &[Factor], scale: f32);
}
