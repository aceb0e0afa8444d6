//! Helpers for calls of the C interface: structures, statuses and threads.

use core::ffi::c_void;

use quant_kernels::*;

/// A zeroed structure with `struct_size` set.
macro_rules! empty {
    ($of:ty) => {{
        // SAFETY: C structures hold only numbers and nullable pointers, for which zero bits are valid.
        let mut it: $of = unsafe { core::mem::zeroed() };
        it.struct_size = size_of::<$of>() as u32;
        it
    }};
}

/// Whether a call succeeded. Panics on a status that indicates a bug in the library.
pub(crate) fn is_valid_status(status: qz1_status) -> bool {
    assert!(!matches!(status, qz1_status::Internal | qz1_status::ForEach), "{status:?}");
    status == qz1_status::Ok
}
pub(crate) use empty;

/// Calls `piece` once per index, from the last to the first.
unsafe extern "C" fn backwards(_: *mut c_void, count: usize, piece: qz1_piece, work: *mut c_void) {
    let piece = piece.expect("a callback");
    for i in (0..count).rev() {
        // SAFETY: `work` and `count` are passed on unchanged, and each index is used once, as the C interface requires.
        unsafe { piece(work, i) };
    }
}

/// Describes this many threads, with a `for_each` that runs everything on the calling thread.
pub(crate) fn threads(threads: u32) -> qz1_parallel {
    qz1_parallel { threads, for_each: Some(backwards), ..empty!(qz1_parallel) }
}
