//! The program's allocator, which ends the program when memory runs out.
//!
//! Evaluating blocks allocates and frees many tensors of a few megabytes. The system's allocator returns their pages to
//! the system each time, which is slow.
//!
//! Rust aborts if an allocation fails in a library that cannot report it, as for a bug. Running out of memory is not a
//! bug: the program reports it and exits with its own exit code. Files are left as after a crash, and the job can be
//! resumed.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout};
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use libmimalloc_sys::{mi_option_set, mi_option_t, mi_option_use_numa_nodes};
use mimalloc::MiMalloc;
use quant_core::{Category, Error, Result};

use crate::system::{address_space, address_space_limit, write_to_stderr};

/// [`MiMalloc`], except that a failed allocation ends the program.
pub struct Allocator;

// SAFETY: every call is forwarded to MiMalloc with its arguments; a null pointer is never returned.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract of `alloc`, which is also MiMalloc's.
        there(unsafe { MiMalloc.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract of `alloc_zeroed`, which is also MiMalloc's.
        there(unsafe { MiMalloc.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`, and the pointer came from MiMalloc.
        unsafe { MiMalloc.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller upholds the contract of `realloc`, and the pointer came from MiMalloc.
        there(unsafe { MiMalloc.realloc(pointer, layout, size) }, size)
    }
}

fn there(pointer: *mut u8, size: usize) -> *mut u8 {
    if pointer.is_null() {
        end(size);
    }
    pointer
}

/// Reports once that memory ran out, and ends the program. It neither allocates nor takes a lock.
#[cold]
fn end(size: usize) -> ! {
    static REPORTED: AtomicBool = AtomicBool::new(false);
    if REPORTED.swap(true, Ordering::SeqCst) {
        std::thread::sleep(Duration::from_secs(1));
    } else {
        let mut text = Message { bytes: [0; 512], len: 0 };
        let _ = write!(
            text,
            "error: out of memory: an allocation of {size} bytes failed\n  free some memory, raise the \
            memory limit (ulimit -v, or that of the container), or use smaller settings; `quant plan` \
            predicts how much memory a run needs, and `quant quantize` continues an interrupted \
            run\n"
        );
        write_to_stderr(&text.bytes[..text.len]);
    }
    signal_hook::low_level::exit(i32::from(Category::Environment.exit_code()))
}

/// From now on, returns freed memory to the system after 30 milliseconds instead of a second. Within a second, a run may
/// free far more than it needs at a time, and how much depends on the load of the machine. An even shorter time makes
/// searches noticeably slower.
pub fn return_memory_early() {
    const PURGE_DELAY: mi_option_t = mi_option_use_numa_nodes - 1;
    // SAFETY: this call sets a number. MiMalloc has had this option at this place since its version 2.
    unsafe { mi_option_set(PURGE_DELAY, 30) };
}

/// Returns an error if the address-space limit leaves no room to start this many threads. In a new thread, the standard
/// library can only panic when memory is short.
pub fn check_room_for_threads(threads: usize) -> Result<()> {
    /// An estimate of what a thread maps before it runs.
    const PER_THREAD: u64 = 5 << 19;
    const PER_PROGRAM: u64 = 16 << 20;
    let Some(limit) = address_space_limit() else { return Ok(()) };
    let bytes = PER_PROGRAM + PER_THREAD * threads as u64;
    match address_space().map(|taken| limit.saturating_sub(taken)) {
        Some(room) if room < bytes => {
            Err(Error::Memory { what: format!("{threads} threads"), bytes: Some(bytes) })
        }
        _ => Ok(()),
    }
}

struct Message {
    bytes: [u8; 512],
    len: usize,
}

impl Write for Message {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = &mut self.bytes[self.len..];
        let taken = text.len().min(room.len());
        room[..taken].copy_from_slice(&text.as_bytes()[..taken]);
        self.len += taken;
        Ok(())
    }
}
