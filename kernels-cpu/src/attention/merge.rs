//! Merges the results of attention on parts of a sequence into the result for the whole.

use crate::KernelError;

/// Merges the results of the same queries on other tokens into `out` and `lse`: `out` and `other` are
/// `[rows, head_dim]`, `lse` and `other_lse` are `[rows]`, as computed by [`attend`](super::KvPages::attend).
///
/// `out = (w · out + w' · other) / (w + w')` with `w = exp(lse − max)`, `lse = max + ln(w + w')`, computed in `f64`. An
/// error of `ε` in a log-sum-exp changes the result by at most `ε · |out − other| / 2`; rounding it to `f32` alone
/// causes `ε = 2⁻²⁴ |lse|`.
///
/// # Errors
/// When lengths differ, or are not whole rows.
pub fn merge(
    head_dim: usize,
    out: &mut [f32],
    lse: &mut [f32],
    other: &[f32],
    other_lse: &[f32],
) -> Result<(), KernelError> {
    let expected = lse.len().checked_mul(head_dim).ok_or(KernelError::TooLarge("the output"))?;
    KernelError::length("output", expected, out.len())?;
    KernelError::length("second output", expected, other.len())?;
    KernelError::length("second log-sum-exp", lse.len(), other_lse.len())?;
    if head_dim == 0 {
        return Ok(());
    }
    let rows = out.chunks_exact_mut(head_dim).zip(other.chunks_exact(head_dim));
    for ((out, other), (lse, &other_lse)) in rows.zip(lse.iter_mut().zip(other_lse)) {
        if other_lse == f32::NEG_INFINITY {
            continue;
        }
        if *lse == f32::NEG_INFINITY {
            out.copy_from_slice(other);
            *lse = other_lse;
            continue;
        }
        let (left, right) = (f64::from(*lse), f64::from(other_lse));
        // NaN in either log-sum-exp makes both the output and the log-sum-exp NaN.
        let max = if left > right { left } else { right } + 0.0 * (left + right);
        let (left, right) = ((left - max).exp(), (right - max).exp());
        let sum = left + right;
        let (left, right) = (left / sum, right / sum);
        out.iter_mut().zip(other).for_each(|(out, &other)| {
            *out = (left * f64::from(*out) + right * f64::from(other)) as f32;
        });
        *lse = (max + sum.ln()) as f32;
    }
    Ok(())
}
