//! Loops that the compiler vectorizes, compiled once for each vector width.

/// Runs a loop compiled for the widest vectors of the machine. The result is the same on all machines, because
/// operations are neither fused nor reordered.
///
/// The closure and everything it calls must be `#[inline(always)]`; otherwise they are compiled for the baseline
/// target. Without the feature `simd`, all code is.
#[inline(always)]
pub fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(feature = "simd")]
    return pulp::Arch::new().dispatch(work);
    #[cfg(not(feature = "simd"))]
    work()
}
