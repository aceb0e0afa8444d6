//! Threads of a C caller.

use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::panic::{AssertUnwindSafe, catch_unwind};

use quant_kernels_cpu::{Parallel, Serial};

use crate::memory::{self, Fields};
use crate::status::{Fault, qz1_status};

/// A piece of work: `piece(work, i)` does number `i`.
pub type qz1_piece = Option<unsafe extern "C" fn(work: *mut c_void, index: usize)>;

/// Threads of the caller.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_parallel {
    /// `sizeof(qz1_parallel)`
    pub struct_size: u32,
    /// How many pieces may run at once; at least 1.
    pub threads: u32,
    /// The caller's, for `for_each`.
    pub ctx: *mut c_void,
    /// Calls `piece(work, i)` once for every `i` below `count`, in any order, on any threads at once, and returns
    /// when all have returned. No call may come later, and nothing may be thrown or jumped through it. Pieces do not
    /// fail and do not block.
    pub for_each:
        Option<unsafe extern "C" fn(ctx: *mut c_void, count: usize, piece: qz1_piece, work: *mut c_void)>,
}

impl Fields for qz1_parallel {}

/// Threads of the caller, or the calling one alone.
pub(crate) struct Threads {
    of: Option<qz1_parallel>,
    broken: AtomicBool,
    panicked: AtomicBool,
}

// SAFETY: the caller says that `for_each` may be called with `ctx`; it is called from one thread.
unsafe impl Sync for Threads {}

impl Threads {
    /// # Safety
    /// As [`memory::read`], and `for_each` must do what it says.
    pub(crate) unsafe fn new(of: *const qz1_parallel) -> Result<Self, Fault> {
        // SAFETY: as the caller vouches.
        let of = unsafe { memory::read_optional(of, "the threads") }?;
        if of.is_some_and(|of| of.for_each.is_none()) {
            return Err(Fault::new(qz1_status::Null, "for_each is null"));
        }
        Ok(Self { of, broken: AtomicBool::new(false), panicked: AtomicBool::new(false) })
    }

    /// What became of the pieces that ran.
    pub(crate) fn finish(&self) -> Result<(), Fault> {
        if self.panicked.load(Ordering::Relaxed) {
            return Err(Fault::new(qz1_status::Internal, "a piece of work failed"));
        }
        if self.broken.load(Ordering::Relaxed) {
            return Err(Fault::new(qz1_status::ForEach, "for_each did not call each number once"));
        }
        Ok(())
    }
}

/// Pieces under way: which were called, and how many are done.
struct Work<'a> {
    piece: &'a (dyn Fn(usize) + Sync),
    count: usize,
    called: &'a [AtomicU64],
    begun: AtomicUsize,
    done: AtomicUsize,
    threads: &'a Threads,
}

/// Numbers that are kept track of without allocating.
const FEW: usize = 1024;

// SAFETY: a number that was called, or that is none, is not called again; and it waits for those that run, should
// `for_each` return before.
unsafe impl Parallel for Threads {
    fn threads(&self) -> usize {
        self.of.map_or(1, |of| of.threads.max(1) as usize)
    }

    fn for_each(&self, count: usize, piece: &(dyn Fn(usize) + Sync)) {
        let Some((of, for_each)) = self.of.and_then(|of| Some((of, of.for_each?))) else {
            return Serial.for_each(count, piece);
        };
        let few = [const { AtomicU64::new(0) }; FEW / 64];
        let many: Vec<AtomicU64>;
        let called = if count <= FEW {
            &few[..]
        } else {
            many = (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
            &many[..]
        };
        let (begun, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = Work { piece, count, called, begun, done, threads: self };
        let at = (&raw const work).cast_mut().cast::<c_void>();
        // SAFETY: the caller vouches for `for_each`; `work` lives until all calls are done.
        unsafe { for_each(of.ctx, count, Some(run), at) };
        while work.done.load(Ordering::Acquire) != work.begun.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        if work.done.load(Ordering::Acquire) != count {
            self.broken.store(true, Ordering::Relaxed);
        }
    }
}

/// One piece, on a thread of the caller.
unsafe extern "C" fn run(work: *mut c_void, index: usize) {
    // SAFETY: it is the pointer that `for_each` gave to the caller, which outlives all calls.
    let work = unsafe { &*work.cast_const().cast::<Work<'_>>() };
    let bit = 1 << (index % 64);
    // A number that is none, or was called before, would write where another thread does.
    if index >= work.count || work.called[index / 64].fetch_or(bit, Ordering::Relaxed) & bit != 0 {
        work.threads.broken.store(true, Ordering::Relaxed);
        return;
    }
    work.begun.fetch_add(1, Ordering::AcqRel);
    if catch_unwind(AssertUnwindSafe(|| (work.piece)(index))).is_err() {
        work.threads.panicked.store(true, Ordering::Relaxed);
    }
    work.done.fetch_add(1, Ordering::AcqRel);
}
