//! Threads for callers that have none of their own: the Python package. Feature `rayon`; not in the header, since engines
//! bring their threads.

use core::ffi::c_void;

use rayon::prelude::*;

use crate::memory;
use crate::parallel::qz1_piece;
use crate::status::{Fault, call, qz1_message, qz1_status};

/// More threads are refused.
const MAX_THREADS: usize = 1024;

/// A pool of threads, which wait while there is nothing to do.
pub struct qz1_pool {
    pool: rayon::ThreadPool,
}

/// A pool of 1 to 1024 threads, freed by `qz1_pool_free`. On an error `out` is set to null. A child of `fork` has the handle
/// and not the threads: it makes a pool of its own.
///
/// # Safety
/// As for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_pool_new(
    threads: usize,
    out: *mut *mut qz1_pool,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the pointer contract.
    call(message, |scope| unsafe {
        memory::make(scope, out, || {
            if !(1..=MAX_THREADS).contains(&threads) {
                return Err(Fault::new(qz1_status::Scheme, "a pool has 1 to 1024 threads"));
            }
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let pool = pool.map_err(|_| Fault::new(qz1_status::Memory, "the system starts no thread"))?;
            Ok(qz1_pool { pool })
        })
    })
}

/// Ends the threads and frees a pool; null is allowed.
///
/// # Safety
/// It is one of `qz1_pool_new`, freed once, and no call runs on it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_pool_free(pool: *mut qz1_pool) {
    // SAFETY: the pointer contract.
    unsafe { memory::free(pool) }
}

/// The `for_each` of a `qz1_parallel` whose `ctx` is a pool.
///
/// # Safety
/// `pool` is one of `qz1_pool_new`; `piece` may be called with `work` on any thread until this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_pool_for_each(
    pool: *mut c_void,
    count: usize,
    piece: qz1_piece,
    work: *mut c_void,
) {
    // SAFETY: the pointer contract. A pool is only read, by any number of threads.
    let Some(pool) = (unsafe { pool.cast_const().cast::<qz1_pool>().as_ref() }) else { return };
    let Some(piece) = piece else { return };
    let work = work.expose_provenance();
    pool.pool.install(|| {
        (0..count).into_par_iter().with_max_len(1).for_each(|index| {
            // SAFETY: `piece` and `work` are those of the caller, who waits for this call.
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
        // SAFETY: the test gives one.
        unsafe { &*work.cast_const().cast::<AtomicUsize>() }.fetch_add(index, Ordering::Relaxed);
    }

    #[test]
    fn pieces_run_on_the_pool_once_each() {
        let mut pool = core::ptr::null_mut();
        // SAFETY: the handle is written, used and freed here.
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
            // SAFETY: the handle is written.
            let status = unsafe { qz1_pool_new(threads, &mut pool, core::ptr::null()) };
            assert_eq!((status, pool.is_null()), (qz1_status::Scheme, true));
        }
    }
}
