//! Weights, layouts and packed bytes with invalid arguments.

use core::ptr::{null, null_mut};

use quant_kernels::*;

use crate::common::*;

#[test]
fn weights_that_do_not_fit() {
    let matrix = Matrix::new();
    let status = |change: &dyn Fn(&mut qz1_weights)| {
        let (mut weights, mut layout) = (matrix.weights(), empty());
        change(&mut weights);
        // SAFETY: lengths are made smaller, or are rejected before anything is read because they do not match the
        // shape.
        unsafe { qz1_layout_of(&weights, 0, &mut layout, null()) }
    };
    assert_eq!(status(&|_| {}), qz1_status::Ok);
    assert_eq!(status(&|w| w.struct_size = 0), qz1_status::StructSize);
    assert_eq!(status(&|w| w.struct_size -= 1), qz1_status::StructSize);
    assert_eq!(status(&|w| w.struct_size = u32::MAX), qz1_status::StructSize);
    for bits in [0, 1, 9, 256 + 4, u32::MAX] {
        assert_eq!(status(&|w| w.bits = bits), qz1_status::Scheme);
    }
    assert_eq!(status(&|w| w.group_size = 0), qz1_status::Mismatch);
    assert_eq!(status(&|w| w.group_size = 33), qz1_status::Mismatch);
    assert_eq!(status(&|w| w.codes = null()), qz1_status::Null);
    assert_eq!(status(&|w| w.scales = null()), qz1_status::Null);
    assert_eq!(status(&|w| w.zeros = null()), qz1_status::Null);
    assert_eq!(status(&|w| w.codes_len -= 1), qz1_status::Length);
    assert_eq!(status(&|w| w.scales_len -= 1), qz1_status::Length);
    assert_eq!(status(&|w| w.zeros_len -= 1), qz1_status::Length);
    assert_eq!(status(&|w| w.scales = w.scales.wrapping_byte_add(1)), qz1_status::Misaligned);
    assert_eq!(status(&|w| w.n = usize::MAX), qz1_status::TooLarge);
    assert_eq!(status(&|w| (w.n, w.k, w.group_size) = (1 << 62, 64, 64)), qz1_status::TooLarge);
    assert_eq!(status(&|w| w.scales_len = usize::MAX), qz1_status::TooLarge);
    assert_eq!(status(&|w| w.codes_len = usize::MAX), qz1_status::TooLarge);
    assert_eq!(status(&|w| (w.n, w.codes_len, w.scales_len, w.zeros_len) = (0, 0, 0, 0)), qz1_status::Scheme);
    // SAFETY: null pointers are rejected.
    unsafe {
        assert_eq!(qz1_layout_of(null(), 0, &mut empty(), null()), qz1_status::Null);
        assert_eq!(qz1_layout_of(&matrix.weights(), 0, null_mut(), null()), qz1_status::Null);
        let odd = (&raw const matrix.codes).cast::<u8>().wrapping_add(1).cast::<qz1_weights>();
        assert_eq!(qz1_layout_of(odd, 0, &mut empty(), null()), qz1_status::Misaligned);
    }
}

#[test]
fn layouts_that_are_none() {
    let matrix = Matrix::new();
    let (layout, packed) = (matrix.layout(), matrix.packed());
    let status = |change: &dyn Fn(&mut qz1_layout)| {
        let mut layout = layout;
        change(&mut layout);
        let mut out = vec![0.0; K];
        // SAFETY: every pointer is null or points to a live value.
        unsafe {
            qz1_dequantize_rows(&layout, packed.as_ptr(), packed.len(), 0, 1, out.as_mut_ptr(), K, null())
        }
    };
    assert_eq!(status(&|_| {}), qz1_status::Ok);
    let changes: [&dyn Fn(&mut qz1_layout); 15] = [
        &|l| l.code_bits = 8,
        &|l| l.code_bits = 5,
        &|l| l.scales ^= 1,
        &|l| l.scales = 9,
        &|l| l.zeros = 0,
        &|l| l.zeros = 2,
        &|l| l.middle = 8,
        &|l| l.sums = 0,
        &|l| l.n += 1,
        &|l| l.k = u64::MAX,
        &|l| l.group_size = 0,
        &|l| l.panels += 1,
        &|l| l.panel_bytes += 64,
        &|l| l.bytes -= 1,
        &|l| l.id ^= 1,
    ];
    for (i, change) in changes.into_iter().enumerate() {
        assert_eq!(status(change), qz1_status::LayoutId, "change {i}");
    }
    assert_eq!(status(&|l| l.struct_size = 3), qz1_status::StructSize);
}

#[test]
fn packing_and_unpacking() {
    let matrix = Matrix::new();
    let (weights, layout, packed) = (matrix.weights(), matrix.layout(), matrix.packed());
    let panel = layout.panel_bytes as usize;
    let pack = |first, panels, out: *mut u8, len| {
        // SAFETY: `out` is as long as any length that the call accepts.
        unsafe { qz1_pack(&weights, &layout, first, panels, out, len, null(), null()) }
    };
    let mut out = vec![0_u8; 2 * panel];
    assert_eq!(pack(1, 1, out.as_mut_ptr(), panel), qz1_status::Ok);
    assert_eq!(out[..panel], packed[panel..]);
    assert_eq!(pack(0, 2, out.as_mut_ptr(), 2 * panel - 1), qz1_status::Length);
    assert_eq!(pack(0, 3, out.as_mut_ptr(), 2 * panel), qz1_status::Mismatch);
    assert_eq!(pack(usize::MAX, 2, out.as_mut_ptr(), 2 * panel), qz1_status::Mismatch);
    assert_eq!(pack(0, 2, null_mut(), 2 * panel), qz1_status::Null);
    assert_eq!(pack(0, 2, weights.codes.cast_mut(), 2 * panel), qz1_status::Overlap);
    assert_eq!(pack(0, 2, weights.zeros.cast_mut(), 2 * panel), qz1_status::Overlap);
    let symmetric = qz1_weights { zeros: null(), zeros_len: 0, ..weights };
    // SAFETY: every pointer is null or points to a live value.
    let status = unsafe { qz1_pack(&symmetric, &layout, 0, 2, out.as_mut_ptr(), out.len(), null(), null()) };
    assert_eq!(status, qz1_status::Scheme);

    let groups = N * K / GROUP;
    let (mut codes, mut scales, mut zeros) = (vec![0_u8; N * K], vec![0.0_f32; groups], vec![0_u8; groups]);
    let parts = qz1_parts {
        struct_size: size_of::<qz1_parts>() as u32,
        reserved: 0,
        codes: codes.as_mut_ptr(),
        codes_len: N * K,
        scales: scales.as_mut_ptr(),
        scales_len: groups,
        zeros: zeros.as_mut_ptr(),
        zeros_len: groups,
        channels: null_mut(),
        channels_len: 0,
    };
    let unpack = |parts: &qz1_parts, len| {
        // SAFETY: every pointer is null or points to a live value.
        unsafe { qz1_unpack(&layout, packed.as_ptr(), len, parts, null()) }
    };
    assert_eq!(unpack(&parts, packed.len()), qz1_status::Ok);
    assert_eq!((&codes, &scales, &zeros), (&matrix.codes, &matrix.scales, &matrix.zeros));
    assert_eq!(unpack(&parts, packed.len() - 1), qz1_status::Length);
    for broken in [
        qz1_parts { codes_len: N * K - 1, ..parts },
        qz1_parts { scales_len: groups - 1, ..parts },
        qz1_parts { zeros: null_mut(), zeros_len: 0, ..parts },
    ] {
        assert_eq!(unpack(&broken, packed.len()), qz1_status::Length);
    }
    assert_eq!(unpack(&qz1_parts { codes: null_mut(), ..parts }, packed.len()), qz1_status::Null);
    assert_eq!(unpack(&qz1_parts { zeros: parts.codes, ..parts }, packed.len()), qz1_status::Overlap);
    let inside = packed.as_ptr().cast_mut();
    assert_eq!(unpack(&qz1_parts { codes: inside, ..parts }, packed.len()), qz1_status::Overlap);
    let mut floats = vec![0.0; K];
    let out = floats.as_mut_ptr();
    let rows = |first, rows, len| {
        // SAFETY: `floats` is as long as any length that the call accepts.
        unsafe { qz1_dequantize_rows(&layout, packed.as_ptr(), packed.len(), first, rows, out, len, null()) }
    };
    assert_eq!(rows(N - 1, 1, K), qz1_status::Ok);
    assert_eq!(rows(N, 1, K), qz1_status::Mismatch);
    assert_eq!(rows(usize::MAX, 2, K), qz1_status::Mismatch);
    assert_eq!(rows(0, 1, K - 1), qz1_status::Length);
}
