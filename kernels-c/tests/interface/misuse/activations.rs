//! Activations with invalid types, lengths or addresses.

use core::ptr::{null, null_mut};

use quant_kernels::*;

use crate::common::*;

#[test]
fn activations_that_do_not_fit() {
    let (matrix, rows) = (Matrix::new(), Rows::new());
    let layout = matrix.layout();
    let x = vec![1.0_f32; 3 * K];
    let whole = values(&x);
    assert_eq!(rows.quantize(&layout, &whole, None), qz1_status::Ok);
    assert_eq!(rows.quantize(&layout, &qz1_values { len: 3 * K - 1, ..whole }, None), qz1_status::Length);
    assert_eq!(rows.quantize(&layout, &qz1_values { len: usize::MAX, ..whole }, None), qz1_status::TooLarge);
    assert_eq!(rows.quantize(&layout, &qz1_values { data: null(), ..whole }, None), qz1_status::Null);
    assert_eq!(rows.quantize(&layout, &qz1_values { kind: 7, ..whole }, None), qz1_status::Scheme);
    let odd = qz1_values { data: whole.data.wrapping_byte_add(2), len: K, ..whole };
    assert_eq!(rows.quantize(&layout, &odd, None), qz1_status::Misaligned);
    assert_eq!(rows.quantize(&layout, &qz1_values { kind: QZ1_TYPE_F16, ..odd }, None), qz1_status::Ok);
    let by = qz1_static_scale { struct_size: 16, scale: 0.1, zero: 3, reserved: 0 };
    assert_eq!(rows.quantize(&layout, &whole, Some(&by)), qz1_status::Ok);
    for broken in [(0.0, 0), (-1.0, 0), (f32::NAN, 0), (0.1, 128), (0.1, i32::MIN)] {
        let by = qz1_static_scale { scale: broken.0, zero: broken.1, ..by };
        assert_eq!(rows.quantize(&layout, &whole, Some(&by)), qz1_status::Scheme);
    }
    let weight = vec![1.0_f32; K];
    let norm = qz1_rms_norm { struct_size: 24, eps: 1e-5, weight: weight.as_ptr(), weight_len: K };
    let mut residual = vec![1.0_f32; 3 * K];
    let residual = qz1_residual {
        struct_size: size_of::<qz1_residual>() as u32,
        kind: QZ1_TYPE_F32,
        data: residual.as_mut_ptr().cast(),
        len: 3 * K,
    };
    let normed = |norm: *const qz1_rms_norm, residual: *const qz1_residual| {
        // SAFETY: every pointer is null or points to a live value.
        unsafe {
            qz1_int8_rows_quantize_rms_norm(rows.0, &layout, &whole, norm, residual, null(), null(), null())
        }
    };
    assert_eq!(normed(&norm, null()), qz1_status::Ok);
    assert_eq!(normed(&norm, &residual), qz1_status::Ok);
    assert_eq!(normed(null(), null()), qz1_status::Null);
    assert_eq!(normed(&qz1_rms_norm { weight_len: K - 1, ..norm }, null()), qz1_status::Length);
    assert_eq!(normed(&qz1_rms_norm { eps: 0.0, ..norm }, null()), qz1_status::Scheme);
    assert_eq!(normed(&norm, &qz1_residual { data: whole.data.cast_mut(), ..residual }), qz1_status::Overlap);
    assert_eq!(normed(&norm, &qz1_residual { len: K, ..residual }), qz1_status::Length);
    assert_eq!(normed(&norm, &qz1_residual { kind: QZ1_TYPE_BF16, ..residual }), qz1_status::Mismatch);
    let gated = |up: *const qz1_values| {
        // SAFETY: every pointer is null or points to a live value.
        unsafe { qz1_int8_rows_quantize_silu_mul(rows.0, &layout, &whole, up, null(), null(), null()) }
    };
    assert_eq!(gated(&whole), qz1_status::Ok);
    assert_eq!(gated(&qz1_values { len: 2 * K, ..whole }), qz1_status::Length);
    assert_eq!(gated(&qz1_values { kind: QZ1_TYPE_F16, ..whole }), qz1_status::Mismatch);
    // Without `up`, rows are twice as wide, and three single rows are not whole rows.
    assert_eq!(gated(null()), qz1_status::Length);
    let mut none = null_mut();
    // SAFETY: the functions allow null, and nothing is freed.
    unsafe {
        assert_eq!(qz1_int8_rows_new(99, &mut none, null()), qz1_status::Isa);
        assert!(none.is_null());
        assert_eq!(qz1_int8_rows_new(0, null_mut(), null()), qz1_status::Null);
        let status = qz1_int8_rows_quantize(null_mut(), &layout, &whole, null(), null(), null());
        assert_eq!(status, qz1_status::Null);
        assert_eq!(qz1_float_rows_pack(null_mut(), &layout, &whole, null(), null()), qz1_status::Null);
        qz1_int8_rows_free(null_mut());
        qz1_float_rows_free(null_mut());
    }
}
