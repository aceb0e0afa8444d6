//! The threads of a C caller.

use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::panic::{AssertUnwindSafe, catch_unwind};

use quant_kernels_cpu::{Parallel, Serial};

use crate::memory::{Scope, fields};
use crate::status::{Fault, qz1_status};

/// A piece of work: `piece(work, i)` runs piece number `i`.
pub type qz1_piece = Option<unsafe extern "C" fn(work: *mut c_void, index: usize)>;

/// The threads of the caller.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_parallel {
    /// `sizeof(qz1_parallel)`
    pub struct_size: u32,
    /// Maximum number of pieces that run concurrently; at least 1.
    pub threads: u32,
    /// The caller's context, passed to `for_each`.
    pub ctx: *mut c_void,
    /// Calls `piece(work, i)` once for every `i` below `count`, in any order and on any threads, and returns when all
    /// calls have returned. `piece` must not be called after that, and no exception or `longjmp` may pass through it.
    /// Pieces do not fail and do not block.
    pub for_each:
        Option<unsafe extern "C" fn(ctx: *mut c_void, count: usize, piece: qz1_piece, work: *mut c_void)>,
}

fields!(qz1_parallel, for_each);

pub(crate) struct Threads {
    of: Option<qz1_parallel>,
    broken: AtomicBool,
    panicked: AtomicBool,
}

// SAFETY: by the pointer contract `for_each` may be called with `ctx`; it is called from one thread only.
unsafe impl Sync for Threads {}

impl Threads {
    /// # Safety
    /// Same as for [`Scope::read`]; `for_each` must behave as the header requires.
    pub(crate) unsafe fn new(scope: &Scope, of: *const qz1_parallel) -> Result<Self, Fault> {
        // SAFETY: the caller upholds the pointer contract.
        let of = unsafe { scope.read_optional(of, "the threads") }?;
        if of.is_some_and(|of| of.for_each.is_none()) {
            return Err(Fault::new(qz1_status::Null, "for_each is null"));
        }
        Ok(Self { of, broken: AtomicBool::new(false), panicked: AtomicBool::new(false) })
    }

    /// Fails if a piece panicked, or if any `for_each` did not call each number exactly once.
    pub(crate) fn finish(&self) -> Result<(), Fault> {
        if self.panicked.load(Ordering::Relaxed) {
            return Err(Fault::new(qz1_status::Internal, "a piece of work panicked"));
        }
        if self.broken.load(Ordering::Relaxed) {
            return Err(Fault::new(qz1_status::ForEach, "for_each did not call every index exactly once"));
        }
        Ok(())
    }
}

/// The state of a `for_each`: which numbers were called, how many calls have begun, and how many have finished.
struct Work<'a> {
    piece: &'a (dyn Fn(usize) + Sync),
    count: usize,
    called: &'a [AtomicU64],
    begun: AtomicUsize,
    done: AtomicUsize,
    threads: &'a Threads,
}

const FEW: usize = 1024;

// SAFETY: a number that was already called, or that is out of range, is not executed. If `for_each` returns before its
// calls have returned, this waits for the calls that began: a call counts itself in `begun` before it reads anything
// else of `work`, and in `done` as its last access, even for wrong numbers. `done` is read before `begun`, so that both
// are equal only if no call that began was in progress. It is impossible to wait for a call that begins after that; the
// interface forbids calls after `for_each` has returned.
unsafe impl Parallel for Threads {
    fn threads(&self) -> usize {
        self.of.map_or(1, |of| of.threads.max(1) as usize)
    }

    fn for_each(&self, count: usize, piece: &(dyn Fn(usize) + Sync)) {
        let Some((of, for_each)) = self.of.and_then(|of| Some((of, of.for_each?))) else {
            return Serial.for_each(count, piece);
        };
        let few = [const { AtomicU64::new(0) }; FEW / 64];
        let mut many = Vec::new();
        let called = if count <= FEW {
            &few[..]
        } else {
            let words = count.div_ceil(64);
            if many.try_reserve_exact(words).is_err() {
                // On a single thread, pieces need no tracking.
                return Serial.for_each(count, piece);
            }
            many.resize_with(words, || AtomicU64::new(0));
            &many[..]
        };
        let (begun, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = Work { piece, count, called, begun, done, threads: self };
        let at = (&raw const work).cast_mut().cast::<c_void>();
        // SAFETY: the pointer contract covers `for_each`; `work` lives until all calls that began have returned.
        unsafe { for_each(of.ctx, count, Some(run), at) };
        while work.done.load(Ordering::SeqCst) != work.begun.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        // Wrong numbers are counted in `done` too, but they have already set `broken`.
        if work.done.load(Ordering::SeqCst) != count {
            self.broken.store(true, Ordering::Relaxed);
        }
    }
}

/// Runs one piece, on a thread of the caller.
unsafe extern "C" fn run(work: *mut c_void, index: usize) {
    // SAFETY: `work` is the pointer that was passed to `for_each`, which has not returned when this is called. After
    // the next line, the call is waited for even if `for_each` returns.
    let work = unsafe { &*work.cast_const().cast::<Work<'_>>() };
    work.begun.fetch_add(1, Ordering::SeqCst);
    let bit = 1 << (index % 64);
    // A number that is out of range or was already called would write to memory that another thread writes.
    if index >= work.count || work.called[index / 64].fetch_or(bit, Ordering::Relaxed) & bit != 0 {
        work.threads.broken.store(true, Ordering::Relaxed);
    } else if catch_unwind(AssertUnwindSafe(|| (work.piece)(index))).is_err() {
        work.threads.panicked.store(true, Ordering::Relaxed);
    }
    // From now on the waiting thread may continue, so `work` must not be accessed.
    work.done.fetch_add(1, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use super::*;
    use crate::status::call;

    type ForEach = unsafe extern "C" fn(*mut c_void, usize, qz1_piece, *mut c_void);

    fn threads(ctx: *mut c_void, for_each: ForEach) -> Threads {
        let struct_size = size_of::<qz1_parallel>() as u32;
        let of = qz1_parallel { struct_size, threads: 4, ctx, for_each: Some(for_each) };
        let mut made = None;
        let status = call(core::ptr::null(), |scope| {
            // SAFETY: `of` outlives the call, and each `for_each` of these tests makes only calls that the contract
            // allows.
            made = Some(unsafe { Threads::new(scope, &of) }?);
            Ok(())
        });
        assert_eq!(status, qz1_status::Ok);
        made.unwrap()
    }

    unsafe extern "C" fn on_nothing(_: *mut c_void, _: usize, _: qz1_piece, _: *mut c_void) {}

    /// Calls with wrong numbers are counted from beginning to end too; otherwise nothing would wait for them.
    #[test]
    fn every_call_counts() {
        let of = threads(core::ptr::null_mut(), on_nothing);
        let (called, ran) = ([AtomicU64::new(0)], AtomicUsize::new(0));
        let piece = |_| {
            ran.fetch_add(1, Ordering::Relaxed);
        };
        let (begun, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = Work { piece: &piece, count: 3, called: &called, begun, done, threads: &of };
        let at = (&raw const work).cast_mut().cast();
        for (i, index) in [2, 2, 3, usize::MAX, 0].into_iter().enumerate() {
            // SAFETY: `work` outlives the call.
            unsafe { run(at, index) };
            assert_eq!([&work.begun, &work.done].map(|n| n.load(Ordering::SeqCst)), [i + 1; 2]);
        }
        assert_eq!(ran.load(Ordering::Relaxed), 2);
        assert!(of.finish().is_err());
    }

    /// Starts a thread per piece, and returns when all pieces have begun and none has finished.
    unsafe extern "C" fn too_early(ctx: *mut c_void, count: usize, piece: qz1_piece, work: *mut c_void) {
        // SAFETY: the test passes such a pointer.
        let begun = unsafe { &*ctx.cast::<Mutex<Receiver<()>>>() }.lock().unwrap();
        let work = work.expose_provenance();
        for i in 0..count {
            std::thread::spawn(move || {
                // SAFETY: this is the pointer that `for_each` was called with; `for_each` returns only after this call
                // has begun.
                unsafe { piece.unwrap()(core::ptr::with_exposed_provenance_mut(work), i) }
            });
        }
        (0..count).for_each(|_| begun.recv().unwrap());
    }

    #[test]
    fn pieces_under_way_are_waited_for() {
        let (begin, begun) = channel();
        let begun = Mutex::new(begun);
        let of = threads((&raw const begun).cast_mut().cast(), too_early);
        let ran = AtomicUsize::new(0);
        of.for_each(9, &|_| {
            begin.send(()).unwrap();
            std::thread::sleep(Duration::from_millis(30));
            ran.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(ran.into_inner(), 9);
        assert!(of.finish().is_ok());
    }
}
