//! Structures of older and newer versions, and checks that hold for every structure.

use core::ptr::null;

use quant_kernels::*;

use crate::common::attention::Case;
use crate::common::*;

#[test]
fn structures_may_grow() {
    #[repr(C)]
    struct Later {
        weights: qz1_weights,
        new: [u64; 2],
    }
    let matrix = Matrix::new();
    let mut later = Later { weights: matrix.weights(), new: [0; 2] };
    later.weights.struct_size = size_of::<Later>() as u32;
    let status = |later: &Later| {
        // SAFETY: the structure is as long as its size field says.
        unsafe { qz1_layout_of((&raw const *later).cast(), 1, &mut empty(), null()) }
    };
    assert_eq!(status(&later), qz1_status::Ok);
    later.new[1] = 1;
    assert_eq!(status(&later), qz1_status::StructSize);
}

/// Reserved fields may get a meaning later, so they must be 0 now.
#[test]
fn reserved_fields_are_zero() {
    let (matrix, rows) = (Matrix::new(), Rows::new());
    let (layout, packed, x) = (matrix.layout(), matrix.packed(), vec![1.0_f32; K]);
    let by = qz1_static_scale { struct_size: 16, scale: 0.1, zero: 3, reserved: 0 };
    assert_eq!(rows.quantize(&layout, &values(&x), Some(&by)), qz1_status::Ok);
    let by = qz1_static_scale { reserved: 1, ..by };
    assert_eq!(rows.quantize(&layout, &values(&x), Some(&by)), qz1_status::StructSize);
    let (mut codes, mut scales, mut zeros) =
        (matrix.codes.clone(), matrix.scales.clone(), matrix.zeros.clone());
    let mut parts = qz1_parts {
        struct_size: size_of::<qz1_parts>() as u32,
        reserved: 0,
        codes: codes.as_mut_ptr(),
        codes_len: codes.len(),
        scales: scales.as_mut_ptr(),
        scales_len: scales.len(),
        zeros: zeros.as_mut_ptr(),
        zeros_len: zeros.len(),
        channels: core::ptr::null_mut(),
        channels_len: 0,
    };
    let unpack = |parts: &qz1_parts| {
        // SAFETY: every pointer is null or points to a live value.
        unsafe { qz1_unpack(&layout, packed.as_ptr(), packed.len(), parts, null()) }
    };
    assert_eq!(unpack(&parts), qz1_status::Ok);
    parts.reserved = u32::MAX;
    assert_eq!(unpack(&parts), qz1_status::StructSize);
    let mut case = Case::new(QZ1_KV_4BIT);
    assert_eq!(case.with_lists(|lists| lists[0].reserved = 1), qz1_status::StructSize);
    assert_eq!(case.with_lists(|lists| lists[1].reserved = 1), qz1_status::StructSize);
}

#[test]
fn outputs_may_grow() {
    #[repr(C)]
    struct Later<T> {
        known: T,
        new: [u64; 2],
    }
    let matrix = Matrix::new();
    let mut later = Later { known: empty(), new: [0; 2] };
    let size = size_of::<Later<qz1_layout>>() as u32;
    later.known.struct_size = size;
    // SAFETY: the structure is as long as its size field says.
    let run = |later: &mut Later<qz1_layout>| unsafe {
        qz1_layout_of(&matrix.weights(), 1, (&raw mut *later).cast(), null())
    };
    assert_eq!(run(&mut later), qz1_status::Ok);
    assert_eq!((later.known.struct_size, later.known.id), (size, matrix.layout().id));
    assert_eq!(later.new, [0; 2]);
    // The filled structure can be passed to other functions unchanged.
    let mut out = vec![0.0_f32; K];
    let (packed, to) = (matrix.packed(), out.as_mut_ptr());
    let at = (&raw const later).cast();
    // SAFETY: every pointer is null or points to a live value.
    let status = unsafe { qz1_dequantize_rows(at, packed.as_ptr(), packed.len(), 0, 1, to, K, null()) };
    assert_eq!(status, qz1_status::Ok);
    later.new[0] = 1;
    assert_eq!(run(&mut later), qz1_status::StructSize);
}
