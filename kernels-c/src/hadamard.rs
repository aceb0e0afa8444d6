//! The Hadamard transform of rows.

use quant_kernels_cpu::Hadamard;

use crate::features::token;
use crate::memory;
use crate::parallel::{Threads, qz1_parallel};
use crate::status::{call, qz1_message, qz1_status};

/// The orthonormal Hadamard transform of rows of one width.
pub struct qz1_hadamard {
    by: Hadamard,
}

/// Creates a handle for rows of width `n`, which must be freed by `qz1_hadamard_free`. On error, `out` is set to null.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_hadamard_new(
    n: usize,
    out: *mut *mut qz1_hadamard,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe { memory::make(scope, out, || Ok(qz1_hadamard { by: Hadamard::new(n)? })) })
}

/// Frees a handle; null is allowed.
///
/// # Safety
/// The handle must come from `qz1_hadamard_new` and be freed only once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_hadamard_free(by: *mut qz1_hadamard) {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { memory::free(by) }
}

/// An entry of the matrix, 1 or −1; 0 if there is no such row or column, or the handle is null.
///
/// # Safety
/// The handle must be null or come from `qz1_hadamard_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_hadamard_sign(by: *const qz1_hadamard, row: usize, column: usize) -> i32 {
    // SAFETY: the caller upholds the pointer contract.
    let by = unsafe { by.as_ref() };
    by.and_then(|by| by.by.sign(row, column)).map_or(0, i32::from)
}

/// Transforms rows `[m, n]` in place; `m` is the length divided by the width `n`. Any number of threads may use a
/// handle at once.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_hadamard_transform(
    by: *const qz1_hadamard,
    x: *mut f32,
    len: usize,
    isa: u32,
    parallel: *const qz1_parallel,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract; nothing else is written.
    call(message, |scope| unsafe {
        let (by, token) = (scope.shared(by, "the handle")?, token(isa)?);
        let (x, threads) = (scope.output(x, len, "the rows")?, Threads::new(scope, parallel)?);
        by.by.transform(token, x.slice(), &threads)?;
        threads.finish()
    })
}
