//! Loops that the compiler vectorizes, compiled once for each vector width.

/// Runs a loop compiled for the widest vectors of the machine. This does not fuse or reorder operations, so the result
/// is the same on all machines.
///
/// The closure and everything it calls must be `#[inline(always)]`; otherwise they stay compiled for the baseline
/// target. Without the feature `simd` all code is compiled for the baseline: slower, with the same result.
#[inline(always)]
pub fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(feature = "simd")]
    return pulp::Arch::new().dispatch(work);
    #[cfg(not(feature = "simd"))]
    work()
}
