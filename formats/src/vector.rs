//! Loops that the compiler vectorizes, compiled once for each width of vectors.

/// Runs a loop compiled for the widest vectors of the machine. No operation is fused or reordered
/// by it, so the result is the same on all of them.
///
/// The closure and what it calls must be `#[inline(always)]`, or they stay compiled for the
/// narrowest. Without the feature `simd` everything does: slower, and the same result.
#[inline(always)]
pub fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(feature = "simd")]
    return pulp::Arch::new().dispatch(work);
    #[cfg(not(feature = "simd"))]
    work()
}
