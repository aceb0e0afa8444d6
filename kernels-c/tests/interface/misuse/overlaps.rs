//! Outputs must not overlap any other part of a call, including structures, numbers and handles.

use core::ptr::null;

use quant_kernels::qz1_status::*;
use quant_kernels::*;

use crate::common::attention::{Call, Case, KV, TOKENS};
use crate::common::*;

/// Codes with the alignment of a layout.
fn aligned_codes() -> Vec<u64> {
    vec![0x0101_0101_0101_0101; N * K / 8]
}

#[test]
fn layouts_over_what_is_read() {
    let (matrix, mut codes) = (Matrix::new(), aligned_codes());
    codes[0] = size_of::<qz1_layout>() as u64;
    let at = codes.as_mut_ptr();
    // The codes also serve as a layout, whose size field is the first word.
    let weights = matrix.weights();
    let mut weights = qz1_weights { bits: 8, codes: at.cast(), zeros: null(), zeros_len: 0, ..weights };
    // SAFETY: every pointer is null or points to a live value.
    unsafe {
        assert_eq!(qz1_layout_of(&weights, 0, at.cast(), null()), Overlap);
        assert_eq!(codes[1..], aligned_codes()[1..]);
        let own = &raw mut weights;
        assert_eq!(qz1_layout_of(own, 0, own.cast(), null()), Overlap);
        assert_eq!(weights.n, N);
    }
}

#[test]
fn products_over_structures() {
    let (matrix, rows) = (Matrix::new(), Rows::new());
    let (mut layout, packed, x) = (matrix.layout(), matrix.packed(), vec![1.0_f32; K]);
    assert_eq!(rows.quantize(&layout, &values(&x), None), Ok);
    let before = layout.id;
    let layout_at = &raw mut layout;
    let mut threads = threads(&Manner::Right);
    let threads_at = &raw mut threads;
    let run = |out: *mut f32| {
        let (at, len) = (packed.as_ptr(), packed.len());
        // SAFETY: every pointer is null or points to a live value; memory that is too short for its length is refused.
        unsafe { qz1_multiply(layout_at, at, len, rows.0, null(), 0, out, N, 0, threads_at, null()) }
    };
    assert_eq!(run(layout_at.cast()), Overlap);
    assert_eq!(run(threads_at.cast()), Overlap);
    assert_eq!(run(rows.0.cast()), Overlap);
    assert_eq!(layout.id, before);
    // SAFETY: this test upholds the pointer contract of the C interface.
    unsafe {
        let (at, len, out) = (packed.as_ptr(), packed.len(), layout_at.cast::<f32>());
        assert_eq!(qz1_dequantize_rows(layout_at, at, len, 0, 1, out, K, null()), Overlap);
    }
}

#[test]
fn residuals_over_structures() {
    let (matrix, rows) = (Matrix::new(), Rows::new());
    let (layout, x, weight) = (matrix.layout(), vec![1.0_f32; K], vec![1.0_f32; K]);
    let mut norm = qz1_rms_norm { struct_size: 24, eps: 1e-5, weight: weight.as_ptr(), weight_len: K };
    let norm_at = &raw mut norm;
    let run = |data: *mut f32| {
        let residual = qz1_residual { struct_size: 24, kind: QZ1_TYPE_F32, data: data.cast(), len: K };
        let (x, by) = (values(&x), null());
        // SAFETY: every pointer is null or points to a live value; memory that is too short for its length is refused.
        unsafe {
            qz1_int8_rows_quantize_rms_norm(rows.0, &layout, &x, norm_at, &residual, by, null(), null())
        }
    };
    assert_eq!(run(norm_at.cast()), Overlap);
    assert_eq!(run(weight.as_ptr().cast_mut()), Overlap);
    assert_eq!(run(x.as_ptr().cast_mut()), Overlap);
    assert_eq!(run(rows.0.cast()), Overlap);
}

#[test]
fn attention_over_lists_and_structures() {
    let mut case = Case::new(QZ1_KV_4BIT);
    let mut lists = case.lists(TOKENS);
    let mut numbers = [[3_u32, 0], [1, 4]];
    lists[0].pages = numbers[0].as_mut_ptr();
    lists[1].pages = numbers[1].as_mut_ptr();
    let (at, heads) = (lists.as_mut_ptr(), &raw mut case.heads);
    let lists = (at.cast_const(), KV);
    let pages = numbers.as_mut_ptr().cast::<f32>();
    let with = |case: &mut Case, change: &dyn Fn(&mut Call)| {
        let mut call = Call { lists, ..case.call() };
        change(&mut call);
        call.run()
    };
    assert_eq!(with(&mut case, &|_| {}), Ok);
    assert_eq!(with(&mut case, &|c| c.out.0 = at.cast()), Overlap);
    assert_eq!(with(&mut case, &|c| c.lse.0 = heads.cast()), Overlap);
    assert_eq!(with(&mut case, &|c| c.out.0 = pages), Overlap);
    assert_eq!(with(&mut case, &|c| c.lse.0 = pages.wrapping_add(3)), Overlap);
    assert_eq!(with(&mut case, &|c| c.workspace.0 = pages.cast()), Overlap);
    assert_eq!(numbers, [[3, 0], [1, 4]]);
    // SAFETY: every pointer is null or points to a live value; memory that is too short for its length is refused.
    unsafe {
        let words = heads.cast::<usize>();
        assert_eq!(qz1_attend_workspace(&case.layout, heads, 1, 1, words, null()), Overlap);
        let (to, len) = (numbers.as_mut_ptr().cast(), case.layout.page_bytes as usize * 5);
        let (x, y) = ((case.keys.as_ptr(), case.keys.len()), (case.values.as_ptr(), case.values.len()));
        assert_eq!(case.append(&case.layout, (to, len), (lists.0, KV), x, y, null()), Overlap);
        let out = heads.cast::<*mut qz1_kv_cache>();
        assert_eq!(qz1_kv_cache_new(&case.layout, heads, 9, out, null()), Overlap);
    }
    assert_eq!((case.heads.query, case.heads.kv), (4, 2));
}

#[test]
fn texts_over_numbers_and_handles() {
    let case = Case::new(QZ1_KV_4BIT);
    let mut words = 77_usize;
    let mut text = [0x55_u8; 8];
    let message = |text: *mut u8| qz1_message {
        struct_size: size_of::<qz1_message>() as u32,
        reserved: 0,
        text: text.cast(),
        capacity: 8,
    };
    let words_at = &raw mut words;
    // SAFETY: every pointer is null or points to a live value.
    unsafe {
        let on_words = message(words_at.cast());
        assert_eq!(qz1_attend_workspace(&case.layout, &case.heads, 1, 1, words_at, &on_words), Overlap);
        assert_eq!(words, 77);
        let mut by = core::ptr::dangling_mut::<qz1_hadamard>();
        let before = by;
        let on_handle = message((&raw mut by).cast());
        assert_eq!(qz1_hadamard_new(24, on_handle.text.cast(), &on_handle), Overlap);
        assert_eq!(by, before);
        by = core::ptr::null_mut();
        assert_eq!(qz1_hadamard_new(29 * 4, &mut by, &message(text.as_mut_ptr())), Order);
        assert!(by.is_null());
    }
    assert_eq!(&text, b"Hadamar\0");
}
