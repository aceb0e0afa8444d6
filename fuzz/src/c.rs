//! A C caller's side: structures, statuses and threads.

use core::ffi::c_void;

use quant_kernels::*;

/// A structure of zeros that knows its size.
macro_rules! empty {
    ($of:ty) => {{
        // SAFETY: numbers and pointers only, of which zero is one.
        let mut it: $of = unsafe { core::mem::zeroed() };
        it.struct_size = size_of::<$of>() as u32;
        it
    }};
}

/// A status of which the library is not to blame.
pub(crate) fn fair(status: qz1_status) -> bool {
    assert!(!matches!(status, qz1_status::Internal | qz1_status::ForEach), "{status:?}");
    status == qz1_status::Ok
}
pub(crate) use empty;

/// Calls each number once, from the last to the first, and lets nothing of it be seen.
unsafe extern "C" fn backwards(_: *mut c_void, count: usize, piece: qz1_piece, work: *mut c_void) {
    let piece = piece.expect("the library gives one");
    for i in (0..count).rev() {
        // SAFETY: as the interface asks for.
        unsafe { piece(work, i) };
    }
}

/// Threads, all of them the calling one.
pub(crate) fn threads(threads: u32) -> qz1_parallel {
    qz1_parallel { threads, for_each: Some(backwards), ..empty!(qz1_parallel) }
}
