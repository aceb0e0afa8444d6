//! Threads for callers that have none of their own, such as the Python package.

use core::ffi::c_void;

use rayon::prelude::*;

use crate::memory;
use crate::parallel::qz1_piece;
use crate::status::{Fault, call, qz1_message, qz1_status};

const MAX_THREADS: usize = 1024;

/// A pool of threads, which sleep while they have no work.
pub struct qz1_pool {
    pool: rayon::ThreadPool,
}

/// Creates a pool of 1 to 1024 threads, which must be freed by `qz1_pool_free`. On error, `out` is set to null. A child
/// of `fork` inherits the handle but not the threads, so it must create its own pool.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_pool_new(
    threads: usize,
    out: *mut *mut qz1_pool,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        memory::make(scope, out, || {
            if !(1..=MAX_THREADS).contains(&threads) {
                return Err(Fault::new(
                    qz1_status::Scheme,
                    "the number of threads in a pool must be from 1 to 1024",
                ));
            }
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let pool = pool.map_err(|_| Fault::new(qz1_status::Memory, "cannot start a thread"))?;
            Ok(qz1_pool { pool })
        })
    })
}

/// Ends the threads and frees a pool; null is allowed.
///
/// # Safety
/// The pool comes from `qz1_pool_new` and is freed once, and no call is running on it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_pool_free(pool: *mut qz1_pool) {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { memory::free(pool) }
}

/// The `for_each` of a `qz1_parallel` whose `ctx` is a pool.
///
/// # Safety
/// `pool` is null or comes from `qz1_pool_new`; `piece` may be called with `work` on any thread until this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_pool_for_each(
    pool: *mut c_void,
    count: usize,
    piece: qz1_piece,
    work: *mut c_void,
) {
    // SAFETY: the caller upholds the pointer contract. The pool is only read, which any number of threads may do.
    let Some(pool) = (unsafe { pool.cast_const().cast::<qz1_pool>().as_ref() }) else { return };
    let Some(piece) = piece else { return };
    let work = work.expose_provenance();
    pool.pool.install(|| {
        (0..count).into_par_iter().with_max_len(1).for_each(|index| {
            // SAFETY: the caller guarantees that `piece` may be called with `work` until this function returns.
            unsafe { piece(core::ptr::with_exposed_provenance_mut(work), index) }
        });
    });
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::parallel::qz1_parallel;

    unsafe extern "C" fn add(work: *mut c_void, index: usize) {
        // SAFETY: `pieces_run_on_the_pool_once_each` passes a pointer to an `AtomicUsize` that outlives the calls.
        unsafe { &*work.cast_const().cast::<AtomicUsize>() }.fetch_add(index, Ordering::Relaxed);
    }

    #[test]
    fn pieces_run_on_the_pool_once_each() {
        let mut pool = core::ptr::null_mut();
        // SAFETY: the handle is written by `qz1_pool_new`, used, and freed once, all here.
        unsafe {
            assert_eq!(qz1_pool_new(3, &mut pool, core::ptr::null()), qz1_status::Ok);
            let sum = AtomicUsize::new(0);
            let parallel = qz1_parallel {
                struct_size: size_of::<qz1_parallel>() as u32,
                threads: 3,
                ctx: pool.cast(),
                for_each: Some(qz1_pool_for_each),
            };
            let work = (&raw const sum).cast_mut().cast();
            parallel.for_each.unwrap()(parallel.ctx, 1000, Some(add), work);
            assert_eq!(sum.into_inner(), 999 * 1000 / 2);
            qz1_pool_free(pool);
            qz1_pool_free(core::ptr::null_mut());
        }
    }

    #[test]
    fn no_threads_and_too_many_are_refused() {
        for threads in [0, MAX_THREADS + 1] {
            let mut pool = core::ptr::dangling_mut();
            // SAFETY: `pool` is valid for writes, and there is no message.
            let status = unsafe { qz1_pool_new(threads, &mut pool, core::ptr::null()) };
            assert_eq!((status, pool.is_null()), (qz1_status::Scheme, true));
        }
    }
}
