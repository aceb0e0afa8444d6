//! Sources of rows: the input itself, a norm, or a gate.

use super::dispatch;
use super::element::Element;
use crate::parallel::Disjoint;
use crate::{IsaToken, KernelError};

/// RMSNorm: `y = x / √(mean x² + ε) · γ`, computed as `x · (1 / √(mean x² + ε)) · γ`.
#[derive(Debug, Clone, Copy)]
pub struct RmsNorm<'a> {
    /// γ, `[k]`.
    pub weight: &'a [f32],
    /// ε, positive and finite.
    pub eps: f32,
}

/// The two inputs of `silu(gate) · up`.
#[derive(Debug, Clone, Copy)]
pub enum GateUp<'a, E> {
    /// Two separate matrices.
    Apart {
        /// `[m, k]`
        gate: &'a [E],
        /// `[m, k]`
        up: &'a [E],
    },
    /// The output of one linear layer that computes both, `[m, 2k]`: each row holds the gate's `k` values, then those
    /// of up.
    Joined(&'a [E]),
}

pub(crate) trait Source: Sync {
    fn m(&self) -> usize;

    /// Whether `row` computes rows into the caller's buffer. Otherwise it returns references to the input.
    fn is_computed(&self) -> bool;

    /// Returns a row and its largest magnitude. If [`is_computed`](Self::is_computed), `buffer` must have the width of
    /// a row.
    ///
    /// # Safety
    /// Each row may be requested only once.
    unsafe fn row<'s>(&'s self, row: usize, buffer: &'s mut [f32]) -> (&'s [f32], f32);
}

pub(crate) struct Plain<'a, E> {
    token: IsaToken,
    x: &'a [E],
    k: usize,
    m: usize,
}

impl<'a, E: Element> Plain<'a, E> {
    pub(crate) fn new(token: IsaToken, x: &'a [E], k: usize) -> Result<Self, KernelError> {
        Ok(Self { token, x, k, m: KernelError::parts("activations", k, x.len())? })
    }
}

impl<E: Element> Source for Plain<'_, E> {
    fn m(&self) -> usize {
        self.m
    }

    fn is_computed(&self) -> bool {
        E::as_f32(self.x).is_none()
    }

    unsafe fn row<'s>(&'s self, row: usize, buffer: &'s mut [f32]) -> (&'s [f32], f32) {
        plain(self.token, &self.x[row * self.k..][..self.k], buffer)
    }
}

/// Selected rows of a matrix in any order, possibly repeated.
pub(crate) struct Gathered<'a, E> {
    token: IsaToken,
    x: &'a [E],
    k: usize,
    rows: &'a [u32],
}

impl<'a, E: Element> Gathered<'a, E> {
    /// The rows with these indices of `x` `[m, k]`; all must be below `m`.
    pub(crate) fn new(token: IsaToken, x: &'a [E], k: usize, rows: &'a [u32]) -> Self {
        Self { token, x, k, rows }
    }
}

impl<E: Element> Source for Gathered<'_, E> {
    fn m(&self) -> usize {
        self.rows.len()
    }

    fn is_computed(&self) -> bool {
        E::as_f32(self.x).is_none()
    }

    unsafe fn row<'s>(&'s self, row: usize, buffer: &'s mut [f32]) -> (&'s [f32], f32) {
        plain(self.token, &self.x[self.rows[row] as usize * self.k..][..self.k], buffer)
    }
}

/// Returns a row as is, or converted to `f32` in `buffer`, and its largest magnitude.
fn plain<'s, E: Element>(token: IsaToken, x: &'s [E], buffer: &'s mut [f32]) -> (&'s [f32], f32) {
    match E::as_f32(x) {
        Some(x) => (x, dispatch::largest(token, x)),
        None => {
            let largest = dispatch::widen(token, x, buffer);
            (buffer, largest)
        }
    }
}

pub(super) struct Norm<'a, E> {
    token: IsaToken,
    x: &'a [E],
    residual: Option<Disjoint<'a, E>>,
    by: RmsNorm<'a>,
    m: usize,
}

impl<'a, E: Element> Norm<'a, E> {
    pub(super) fn new(
        token: IsaToken,
        x: &'a [E],
        residual: Option<&'a mut [E]>,
        by: RmsNorm<'a>,
        k: usize,
    ) -> Result<Self, KernelError> {
        let m = KernelError::parts("activations", k, x.len())?;
        KernelError::length("norm weight", k, by.weight.len())?;
        if let Some(residual) = &residual {
            KernelError::length("residual", x.len(), residual.len())?;
        }
        if !(by.eps > 0.0 && by.eps.is_finite()) {
            return Err(KernelError::Scheme("the epsilon of the norm must be positive and finite"));
        }
        Ok(Self { token, x, residual: residual.map(Disjoint::new), by, m })
    }
}

impl<E: Element> Source for Norm<'_, E> {
    fn m(&self) -> usize {
        self.m
    }

    fn is_computed(&self) -> bool {
        true
    }

    unsafe fn row<'s>(&'s self, row: usize, buffer: &'s mut [f32]) -> (&'s [f32], f32) {
        let (weight, eps) = (self.by.weight, self.by.eps);
        let range = row * weight.len()..(row + 1) * weight.len();
        // SAFETY: rows are disjoint, and the caller guarantees that each is requested once.
        let residual = self.residual.as_ref().map(|r| unsafe { r.part(range.clone()) });
        let largest = dispatch::rms_norm(self.token, &self.x[range], residual, weight, eps, buffer);
        (buffer, largest)
    }
}

pub(super) struct Gated<'a, E> {
    token: IsaToken,
    x: GateUp<'a, E>,
    k: usize,
    m: usize,
}

impl<'a, E: Element> Gated<'a, E> {
    pub(super) fn new(token: IsaToken, x: GateUp<'a, E>, k: usize) -> Result<Self, KernelError> {
        let m = match x {
            GateUp::Apart { gate, up } => {
                KernelError::length("up", gate.len(), up.len())?;
                KernelError::parts("gate", k, gate.len())?
            }
            GateUp::Joined(both) => {
                let width = k.checked_mul(2).ok_or(KernelError::TooLarge("a row of gate and up"))?;
                KernelError::parts("gate and up", width, both.len())?
            }
        };
        Ok(Self { token, x, k, m })
    }
}

impl<E: Element> Source for Gated<'_, E> {
    fn m(&self) -> usize {
        self.m
    }

    fn is_computed(&self) -> bool {
        true
    }

    unsafe fn row<'s>(&'s self, row: usize, buffer: &'s mut [f32]) -> (&'s [f32], f32) {
        let k = self.k;
        let (gate, up) = match self.x {
            GateUp::Apart { gate, up } => (&gate[row * k..][..k], &up[row * k..][..k]),
            GateUp::Joined(both) => both[2 * row * k..][..2 * k].split_at(k),
        };
        let largest = dispatch::silu_mul(self.token, gate, up, buffer);
        (buffer, largest)
    }
}
