//! Products and transforms with invalid arguments, and a `for_each` that omits a piece.

use core::ptr::{null, null_mut};

use quant_kernels::*;

use crate::common::*;

#[test]
fn products_that_do_not_fit() {
    let (matrix, rows) = (Matrix::new(), Rows::new());
    let (layout, packed) = (matrix.layout(), matrix.packed());
    let x = vec![0.5_f32; 3 * K];
    let bias = [0.25_f32; N];
    let mut out = vec![0.0_f32; 3 * N];
    let to = out.as_mut_ptr();
    let run = |x: *const qz1_int8_rows,
               bytes: usize,
               bias: (*const f32, usize),
               to: (*mut f32, usize),
               isa| {
        // SAFETY: every pointer is null or points to a live value, which is as long as any length that the call
        // accepts.
        unsafe {
            qz1_multiply(&layout, packed.as_ptr(), bytes, x, bias.0, bias.1, to.0, to.1, isa, null(), null())
        }
    };
    let (b, l) = ((bias.as_ptr(), N), packed.len());
    assert_eq!(run(rows.0, l, b, (to, 3 * N), 0), qz1_status::Mismatch);
    assert_eq!(rows.quantize(&layout, &values(&x), None), qz1_status::Ok);
    assert_eq!(run(rows.0, l, b, (to, 3 * N), 0), qz1_status::Ok);
    assert_eq!(run(rows.0, l, (null(), 0), (to, 3 * N), QZ1_ISA_SCALAR), qz1_status::Ok);
    assert_eq!(run(null(), l, b, (to, 3 * N), 0), qz1_status::Null);
    assert_eq!(run(rows.0, l - 1, b, (to, 3 * N), 0), qz1_status::Length);
    assert_eq!(run(rows.0, l, (bias.as_ptr(), N - 1), (to, 3 * N), 0), qz1_status::Length);
    assert_eq!(run(rows.0, l, (null(), N), (to, 3 * N), 0), qz1_status::Null);
    assert_eq!(run(rows.0, l, b, (to, 3 * N - 1), 0), qz1_status::Length);
    assert_eq!(run(rows.0, l, b, (null_mut(), 3 * N), 0), qz1_status::Null);
    assert_eq!(run(rows.0, l, b, (to.wrapping_byte_add(1), 3 * N - 1), 0), qz1_status::Misaligned);
    assert_eq!(run(rows.0, l, b, (to, usize::MAX / 2), 0), qz1_status::TooLarge);
    assert_eq!(run(rows.0, l, (to, N), (to, 3 * N), 0), qz1_status::Overlap);
    let inside = packed.as_ptr().wrapping_add(packed.len() - 8).cast_mut().cast();
    assert_eq!(run(rows.0, l, b, (inside, 3 * N), 0), qz1_status::Overlap);
    assert_eq!(run(rows.0, l, b, (to, 3 * N), 77), qz1_status::Isa);
    let run = |threads: &qz1_parallel| {
        // SAFETY: every pointer is null or points to a live value.
        unsafe { qz1_multiply(&layout, packed.as_ptr(), l, rows.0, b.0, b.1, to, 3 * N, 0, threads, null()) }
    };
    let right = threads(&Manner::Right);
    assert_eq!(run(&right), qz1_status::Ok);
    assert_eq!(run(&qz1_parallel { for_each: None, ..right }), qz1_status::Null);
    for manner in [&Manner::Nothing, &Manner::Twice, &Manner::Beyond, &Manner::LeaveOne] {
        assert_eq!(run(&threads(manner)), qz1_status::ForEach);
    }
}

#[test]
fn transforms() {
    let mut by = null_mut();
    let mut x = vec![0.0_f32; 2 * 24];
    x[24] = 3.0;
    let (to, len) = (x.as_mut_ptr(), x.len());
    // SAFETY: every pointer is null or points to a live value, which is as long as any length that the call accepts.
    unsafe {
        assert_eq!(qz1_hadamard_new(29 * 4, &mut by, null()), qz1_status::Order);
        assert!(by.is_null());
        assert_eq!(qz1_hadamard_new(24, null_mut(), null()), qz1_status::Null);
        assert_eq!(qz1_hadamard_new(24, &mut by, null()), qz1_status::Ok);
        let run = |x, len, isa| qz1_hadamard_transform(by, x, len, isa, null(), null());
        assert_eq!(run(to, len - 1, 0), qz1_status::Length);
        assert_eq!(run(null_mut(), len, 0), qz1_status::Null);
        assert_eq!(run(to.wrapping_byte_add(1), 24, 0), qz1_status::Misaligned);
        assert_eq!(run(to, len, 99), qz1_status::Isa);
        assert_eq!(qz1_hadamard_transform(null(), to, len, 0, null(), null()), qz1_status::Null);
        assert_eq!(run(to, len, 0), qz1_status::Ok);
        for (row, value) in x[24..].iter().enumerate() {
            assert_eq!(*value, 3.0 * qz1_hadamard_sign(by, row, 0) as f32 * (1.0 / 24.0_f64.sqrt()) as f32);
        }
        assert_eq!((qz1_hadamard_sign(by, 24, 0), qz1_hadamard_sign(null(), 0, 0)), (0, 0));
        qz1_hadamard_free(by);
        qz1_hadamard_free(null_mut());
    }
}
