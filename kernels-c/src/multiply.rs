//! Products of packed weights with rows.

use quant_kernels_cpu::{PackedView, Parallel};

use crate::features::token;
use crate::memory::Scope;
use crate::parallel::{Threads, qz1_parallel};
use crate::rows::{qz1_float_rows, qz1_int8_rows};
use crate::status::{Fault, call, qz1_message, qz1_status};
use crate::weights::{packed, qz1_layout};

/// Reads all arguments except the rows, and multiplies.
///
/// # Safety
/// Same as for [`Scope::read`] and [`Scope::slice`], for all pointers.
unsafe fn run(
    scope: &Scope,
    layout: *const qz1_layout,
    (bytes, bytes_len): (*const u8, usize),
    (bias, bias_len): (*const f32, usize),
    (out, out_len): (*mut f32, usize),
    parallel: *const qz1_parallel,
    multiply: impl FnOnce(&PackedView<'_>, Option<&[f32]>, &mut [f32], &dyn Parallel) -> Result<(), Fault>,
) -> Result<(), Fault> {
    // SAFETY: the caller upholds the pointer contract; `out` overlaps nothing that is read (`Scope`).
    unsafe {
        let view = packed(scope, layout, bytes, bytes_len)?;
        let bias = scope.slice_optional(bias, bias_len, "the bias")?;
        let out = scope.output(out, out_len, "the output")?;
        let threads = Threads::new(scope, parallel)?;
        multiply(&view, bias, out.slice(), &threads)?;
        threads.finish()
    }
}

/// `out = x · Wᵀ + bias` with integer rows: `out` is `[m, n]`, `bias` is `[n]` or null. `isa` is a `QZ1_ISA_…`. Results
/// are bit-identical for all instruction sets and any number of threads.
///
/// # Safety
/// Same as for `qz1_layout_of`; no thread may modify the handle during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_multiply(
    layout: *const qz1_layout,
    packed: *const u8,
    packed_len: usize,
    x: *const qz1_int8_rows,
    bias: *const f32,
    bias_len: usize,
    out: *mut f32,
    out_len: usize,
    isa: u32,
    parallel: *const qz1_parallel,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let (x, token) = (scope.shared(x, "the handle")?, token(isa)?);
        run(
            scope,
            layout,
            (packed, packed_len),
            (bias, bias_len),
            (out, out_len),
            parallel,
            |view, bias, out, by| Ok(view.multiply(token, &x.rows, bias, out, by)?),
        )
    })
}

/// `out = x · Wᵀ + bias` with float rows, with the instructions for which the handle was created.
///
/// # Safety
/// Same as for `qz1_multiply`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_multiply_float(
    layout: *const qz1_layout,
    packed: *const u8,
    packed_len: usize,
    x: *const qz1_float_rows,
    bias: *const f32,
    bias_len: usize,
    out: *mut f32,
    out_len: usize,
    parallel: *const qz1_parallel,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let x = scope.shared(x, "the handle")?;
        run(
            scope,
            layout,
            (packed, packed_len),
            (bias, bias_len),
            (out, out_len),
            parallel,
            |view, bias, out, by| Ok(view.multiply_float(&x.rows, bias, out, by)?),
        )
    })
}
