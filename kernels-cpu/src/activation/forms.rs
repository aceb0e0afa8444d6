//! Norms, gates and rounding whose results are floats, for layers that are not quantized.

use super::element::Element;
use super::source::{GateUp, Gated, Norm, RmsNorm, Source};
use super::{dispatch, strip, strips};
use crate::parallel::Disjoint;
use crate::{IsaToken, KernelError, Parallel};

/// Computes the RMSNorm of rows `[m, k]` into `out` of the same shape, where `k` is the length of the norm's weight. A
/// residual is handled as in [`Int8Rows::quantize_rms_norm`](crate::Int8Rows::quantize_rms_norm).
///
/// # Errors
/// When a length is wrong, or the norm's ε is not positive and finite.
pub fn rms_norm<E: Element>(
    token: IsaToken,
    x: &[E],
    norm: RmsNorm<'_>,
    residual: Option<&mut [E]>,
    out: &mut [f32],
    parallel: &dyn Parallel,
) -> Result<(), KernelError> {
    let k = norm.weight.len();
    if k == 0 {
        return Err(KernelError::Scheme("the norm weight must not be empty"));
    }
    KernelError::length("output", x.len(), out.len())?;
    write(&Norm::new(token, x, residual, norm, k)?, k, out, parallel);
    Ok(())
}

/// Computes `silu(gate) · up` of rows `[m, k]` into `out` of the same shape, with [`silu`](crate::reference::silu) as
/// defined in the reference.
///
/// # Errors
/// When a length is wrong, or `k` is 0.
pub fn silu_mul<E: Element>(
    token: IsaToken,
    x: GateUp<'_, E>,
    k: usize,
    out: &mut [f32],
    parallel: &dyn Parallel,
) -> Result<(), KernelError> {
    if k == 0 {
        return Err(KernelError::Scheme("the row width must be at least 1, got 0"));
    }
    let source = Gated::new(token, x, k)?;
    KernelError::length("output", source.m() * k, out.len())?;
    write(&source, k, out, parallel);
    Ok(())
}

const TASK_VALUES: usize = 1 << 14;

/// Rounds `f32` values to the type of `out`, ties to even; values out of range become infinite, and NaN stays NaN.
///
/// # Errors
/// When `out` has the wrong length.
pub fn narrow<E: Element>(
    token: IsaToken,
    x: &[f32],
    out: &mut [E],
    parallel: &dyn Parallel,
) -> Result<(), KernelError> {
    KernelError::length("output", x.len(), out.len())?;
    let out = Disjoint::new(out);
    parallel.for_each(x.len().div_ceil(TASK_VALUES), &|i| {
        let piece = i * TASK_VALUES..x.len().min((i + 1) * TASK_VALUES);
        // SAFETY: pieces are disjoint, and `Parallel` calls each at most once.
        dispatch::narrow(token, &x[piece.clone()], unsafe { out.part(piece) });
    });
    Ok(())
}

fn write(source: &dyn Source, k: usize, out: &mut [f32], parallel: &dyn Parallel) {
    let (m, out) = (source.m(), Disjoint::new(out));
    if m == 0 {
        return;
    }
    parallel.for_each(strips(m), &|i| {
        for row in strip(m, i) {
            // SAFETY: strips are disjoint, `Parallel` calls each at most once, and each row of a strip is computed
            // once.
            unsafe { source.row(row, out.part(row * k..(row + 1) * k)) };
        }
    });
}
