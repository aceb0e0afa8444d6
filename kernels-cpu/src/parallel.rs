//! The interface through which this crate uses the caller's threads.

/// Runs independent pieces of work.
///
/// # Safety
/// Pieces write to parts of one output without synchronization: an implementation must call `piece` at most once with
/// each number below `count` and with no other number, and must neither return nor unwind while a call is running.
/// Results are complete only if every number was called.
///
/// ```
/// use quant_kernels_cpu::Parallel;
///
/// /// Threads that are started for each call.
/// struct Scoped(usize);
///
/// // SAFETY: each number is called by one thread, and all threads are joined before it returns.
/// unsafe impl Parallel for Scoped {
///     fn threads(&self) -> usize {
///         self.0
///     }
///
///     fn for_each(&self, count: usize, piece: &(dyn Fn(usize) + Sync)) {
///         std::thread::scope(|scope| {
///             for first in 0..self.0 {
///                 scope.spawn(move || (first..count).step_by(self.0).for_each(piece));
///             }
///         });
///     }
/// }
///
/// let sum = std::sync::atomic::AtomicUsize::new(0);
/// Scoped(2).for_each(5, &|number| _ = sum.fetch_add(number, std::sync::atomic::Ordering::Relaxed));
/// assert_eq!(sum.into_inner(), 10);
/// ```
#[allow(unsafe_code, reason = "kernels rely on implementations to uphold the contract")]
pub unsafe trait Parallel: Sync {
    /// The number of pieces that may run concurrently; at least 1.
    fn threads(&self) -> usize;

    /// Calls `piece` once with every number below `count`, in any order, and returns when all calls have returned.
    fn for_each(&self, count: usize, piece: &(dyn Fn(usize) + Sync));
}

/// Runs pieces one after another on the calling thread.
#[derive(Debug, Clone, Copy, Default)]
pub struct Serial;

// SAFETY: the loop calls each number of the range once, and one call ends before the next begins.
#[allow(unsafe_code, reason = "the implementation upholds the contract of the trait")]
unsafe impl Parallel for Serial {
    fn threads(&self) -> usize {
        1
    }

    fn for_each(&self, count: usize, piece: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(piece);
    }
}

/// The rayon pool of the calling thread.
#[cfg(feature = "rayon")]
#[derive(Debug, Clone, Copy, Default)]
pub struct Rayon;

#[cfg(feature = "rayon")]
// SAFETY: `for_each` calls each number of the range once, and returns or unwinds only when rayon has finished all
// calls.
#[allow(unsafe_code, reason = "the implementation upholds the contract of the trait")]
unsafe impl Parallel for Rayon {
    fn threads(&self) -> usize {
        rayon::current_num_threads()
    }

    fn for_each(&self, count: usize, piece: &(dyn Fn(usize) + Sync)) {
        use rayon::prelude::*;
        if count == 1 {
            return piece(0);
        }
        (0..count).into_par_iter().with_max_len(1).for_each(piece);
    }
}

#[allow(unsafe_code, reason = "threads write to disjoint parts of a slice")]
mod disjoint {
    use core::marker::PhantomData;
    use core::ops::Range;

    /// A mutable slice that is handed out in disjoint parts.
    pub(crate) struct Disjoint<'a, T> {
        at: *mut T,
        len: usize,
        of: PhantomData<&'a mut [T]>,
    }

    // SAFETY: references are handed out only by `part`, whose callers guarantee that they do not overlap.
    unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

    impl<'a, T> Disjoint<'a, T> {
        pub(crate) fn new(slice: &'a mut [T]) -> Self {
            Self { at: slice.as_mut_ptr(), len: slice.len(), of: PhantomData }
        }

        pub(crate) fn pointer(&self) -> *mut T {
            self.at
        }

        /// The elements in `range`.
        ///
        /// # Safety
        /// No other overlapping part may be alive.
        #[allow(clippy::mut_from_ref, reason = "the caller guarantees that it is the only one")]
        pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
            assert!(range.start <= range.end && range.end <= self.len);
            // SAFETY: the range is within the slice, as asserted above, and the caller guarantees that no other
            // reference overlaps it.
            unsafe { core::slice::from_raw_parts_mut(self.at.add(range.start), range.len()) }
        }
    }
}
pub(crate) use disjoint::Disjoint;
