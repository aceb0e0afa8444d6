//! Loops that the compiler vectorizes, compiled once for each width of vectors.

/// Runs a loop compiled for the widest vectors of the machine. No operation is fused or reordered
/// by it, so the result is the same on all of them.
///
/// The closure and what it calls must be `#[inline(always)]`, or they stay compiled for the
/// narrowest.
#[inline(always)]
pub fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}
