//! The text of messages, and when no text is written.

use core::ffi::c_char;
use core::ptr::{null, null_mut};

use quant_kernels::*;

use crate::common::*;

fn message(text: *mut c_char, capacity: usize) -> qz1_message {
    qz1_message { struct_size: size_of::<qz1_message>() as u32, reserved: 0, text, capacity }
}

#[test]
fn messages_say_why() {
    let matrix = Matrix::new();
    let mut text = [0x55_u8; 12];
    let at = text.as_mut_ptr().cast::<c_char>();
    let weights = qz1_weights { bits: 9, ..matrix.weights() };
    // SAFETY: every pointer is null or points to a live value.
    let status = |m: &qz1_message| unsafe { qz1_layout_of(&weights, 0, &mut empty(), m) };
    assert_eq!(status(&qz1_message { struct_size: 1, ..message(at, 11) }), qz1_status::StructSize);
    assert_eq!(status(&qz1_message { reserved: 1, ..message(at, 11) }), qz1_status::StructSize);
    assert_eq!(status(&message(null_mut(), 11)), qz1_status::Null);
    assert_eq!(status(&message(null_mut(), 0)), qz1_status::Scheme);
    assert_eq!(status(&message(at, usize::MAX)), qz1_status::TooLarge);
    assert_eq!(text, [0x55; 12]);
    assert_eq!(status(&message(at, 11)), qz1_status::Scheme);
    assert_eq!(&text[..], b"bits must \0\x55");
    assert_eq!(status(&message(at, 1)), qz1_status::Scheme);
    assert_eq!(&text[..], b"\0its must \0\x55");
}

/// Callers may print the text after any call, even if they never initialized it.
#[test]
fn successful_calls_write_a_text() {
    let matrix = Matrix::new();
    let mut text = [0x55_u8; 12];
    let message = message(text.as_mut_ptr().cast(), text.len());
    // SAFETY: every pointer is null or points to a live value.
    let status = unsafe { qz1_layout_of(&matrix.weights(), 0, &mut empty(), &message) };
    assert_eq!((status, &text[..2]), (qz1_status::Ok, &b"\0\x55"[..]));
    // The tests of `status` cover panics, which cannot be raised here. Here `for_each` omits a piece.
    let mut out = vec![0_u8; matrix.layout().bytes as usize];
    let threads = threads(&Manner::LeaveOne);
    let (at, len) = (out.as_mut_ptr(), out.len());
    // SAFETY: every pointer is null or points to a live value.
    let status = unsafe { qz1_pack(&matrix.weights(), &matrix.layout(), 0, 2, at, len, &threads, &message) };
    assert_eq!((status, &text[..]), (qz1_status::ForEach, &b"for_each di\0"[..]));
}

#[test]
fn texts_overlap_nothing() {
    let matrix = Matrix::new();
    let (mut layout, weights) = (matrix.layout(), matrix.weights());
    let before = layout;
    let packed = matrix.packed();
    let layout_at = (&raw mut layout).cast::<c_char>();
    let parts = [
        (weights.codes.cast_mut().cast::<c_char>(), "codes"),
        (weights.scales.cast_mut().cast(), "scales"),
        (weights.zeros.cast_mut().cast(), "zeros"),
        ((&raw const weights).cast_mut().cast(), "weights"),
        (layout_at.wrapping_add(8), "the layout"),
    ];
    for (at, what) in parts {
        // SAFETY: every pointer is null or points to a live value.
        let status = unsafe { qz1_layout_of(&weights, 1, &mut layout, &message(at, 4)) };
        assert_eq!(status, qz1_status::Overlap, "{what}");
    }
    let mut out = packed.clone();
    let (at, len) = (out.as_mut_ptr(), out.len());
    // SAFETY: every pointer is null or points to a live value.
    let pack = |text| unsafe { qz1_pack(&weights, &layout, 0, 2, at, len, null(), &message(text, 4)) };
    assert_eq!(pack(at.wrapping_add(len - 1).cast()), qz1_status::Overlap);
    assert_eq!(pack((&raw const layout).cast_mut().cast()), qz1_status::Overlap);
    assert!(out == packed && layout.id == before.id && layout.bytes == before.bytes);
    assert_eq!((&matrix.codes, &matrix.scales), (&Matrix::new().codes, &Matrix::new().scales));
    // The text overlaps the message structure itself.
    let mut own = message(null_mut(), 8);
    own.text = (&raw mut own).cast();
    let own = &raw const own;
    // SAFETY: every pointer is null or points to a live value.
    assert_eq!(unsafe { qz1_layout_of(&weights, 1, &mut layout, own) }, qz1_status::Overlap);
}
