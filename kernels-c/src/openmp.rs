//! Runs on the threads of an OpenMP runtime that the process already uses, such as torch's. After a parallel region,
//! its threads spin for a while, and a second pool would compete with them for the processors.

use core::ffi::{c_uint, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::parallel::qz1_piece;

/// The function `GOMP_parallel` of libgomp, which LLVM's runtime has too. It calls `body(data)` on `threads` threads,
/// of which the caller is one, and returns when all calls have returned.
pub type qz1_gomp_parallel = Option<
    unsafe extern "C" fn(
        body: Option<unsafe extern "C" fn(data: *mut c_void)>,
        data: *mut c_void,
        threads: c_uint,
        flags: c_uint,
    ),
>;

/// An OpenMP runtime, and the number of its threads to use.
#[repr(C)]
pub struct qz1_openmp {
    /// `GOMP_parallel`
    pub gomp_parallel: qz1_gomp_parallel,
    /// Number of threads; at least 1.
    pub threads: c_uint,
}

struct Region {
    count: usize,
    next: AtomicUsize,
    piece: unsafe extern "C" fn(work: *mut c_void, index: usize),
    work: *mut c_void,
}

/// Runs pieces until none is left.
unsafe extern "C" fn run(region: *mut c_void) {
    // SAFETY: `qz1_openmp_for_each` passes its `Region`, which outlives the parallel region and is only shared.
    let region = unsafe { &*region.cast_const().cast::<Region>() };
    loop {
        let index = region.next.fetch_add(1, Ordering::Relaxed);
        if index >= region.count {
            return;
        }
        // SAFETY: the caller of `qz1_openmp_for_each` guarantees that `piece` may be called with `work` on any thread.
        unsafe { (region.piece)(region.work, index) };
    }
}

/// The `for_each` of a `qz1_parallel` whose `ctx` is a `qz1_openmp`. Its threads take the pieces in turn.
///
/// # Safety
/// `openmp` is null or valid, and its function is `GOMP_parallel` of a runtime whose threads this process can still
/// use, which a child of `fork` cannot. `piece` may be called with `work` on any thread until this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_openmp_for_each(
    openmp: *mut c_void,
    count: usize,
    piece: qz1_piece,
    work: *mut c_void,
) {
    // SAFETY: the caller upholds the pointer contract.
    let Some(openmp) = (unsafe { openmp.cast_const().cast::<qz1_openmp>().as_ref() }) else { return };
    let (Some(parallel), Some(piece)) = (openmp.gomp_parallel, piece) else { return };
    let mut region = Region { count, next: AtomicUsize::new(0), piece, work };
    let threads = (openmp.threads as usize).clamp(1, count.max(1)) as c_uint;
    // SAFETY: `run` takes the pointer as a shared reference, and all calls return before `parallel` does.
    unsafe { parallel(Some(run), (&raw mut region).cast(), threads, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Behaves as `GOMP_parallel`, with threads that are started for each region.
    unsafe extern "C" fn started_threads(
        body: Option<unsafe extern "C" fn(*mut c_void)>,
        data: *mut c_void,
        threads: c_uint,
        flags: c_uint,
    ) {
        assert_eq!(flags, 0);
        let (body, data) = (body.unwrap(), data.expose_provenance());
        std::thread::scope(|scope| {
            for _ in 0..threads {
                // SAFETY: the body may be called on several threads until this function returns.
                scope.spawn(move || unsafe { body(core::ptr::with_exposed_provenance_mut(data)) });
            }
        });
    }

    unsafe extern "C" fn count(work: *mut c_void, index: usize) {
        // SAFETY: `pieces_run_once_each` passes a pointer to five counters that outlive the calls.
        let counts = unsafe { &*work.cast_const().cast::<[AtomicUsize; 5]>() };
        counts[index].fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn pieces_run_once_each() {
        for threads in [0, 1, 3, 9] {
            for pieces in [0, 1, 5] {
                let counts = [const { AtomicUsize::new(0) }; 5];
                let mut openmp = qz1_openmp { gomp_parallel: Some(started_threads), threads };
                let work = (&raw const counts).cast_mut().cast();
                // SAFETY: `count` takes the counters as a shared reference, and the threads have ended on return.
                unsafe { qz1_openmp_for_each((&raw mut openmp).cast(), pieces, Some(count), work) };
                let called = counts.map(AtomicUsize::into_inner);
                assert!(called.iter().enumerate().all(|(i, &n)| n == usize::from(i < pieces)), "{called:?}");
            }
        }
        // SAFETY: null is allowed.
        unsafe { qz1_openmp_for_each(core::ptr::null_mut(), 1, Some(count), core::ptr::null_mut()) };
    }
}
