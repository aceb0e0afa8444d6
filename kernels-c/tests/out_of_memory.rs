//! If memory cannot be allocated, the interface's own allocations fail with a status.

use core::cell::Cell;
use core::ffi::c_void;
use core::ptr::{null, null_mut};
use std::alloc::{GlobalAlloc, Layout, System};

use quant_kernels::*;

/// The system allocator, which a test can make fail on its own thread.
struct Shut;

thread_local! {
    static IS_SHUT: Cell<bool> = const { Cell::new(false) };
}

// SAFETY: memory comes from the system allocator, or allocation returns null.
unsafe impl GlobalAlloc for Shut {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if IS_SHUT.get() {
            return null_mut();
        }
        // SAFETY: the caller guarantees the contract of `GlobalAlloc`, which is passed on to `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller guarantees the contract of `GlobalAlloc`, which is passed on to `System`.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Shut = Shut;

fn with_message(call: impl FnOnce(*const qz1_message) -> qz1_status) -> (qz1_status, String) {
    let mut text = [0x55_u8; 80];
    let (struct_size, capacity) = (size_of::<qz1_message>() as u32, text.len());
    let message = qz1_message { struct_size, reserved: 0, text: text.as_mut_ptr().cast(), capacity };
    IS_SHUT.set(true);
    let status = call(&message);
    IS_SHUT.set(false);
    let end = text.iter().position(|b| *b == 0).unwrap();
    (status, String::from_utf8(text[..end].to_vec()).unwrap())
}

fn refused(what: &str) -> (qz1_status, String) {
    (qz1_status::Memory, what.to_owned())
}

#[test]
fn handles() {
    // Instruction sets are detected once, so do this before allocation fails.
    qz1_isa_detect();
    let (mut int8, mut float) = (core::ptr::dangling_mut(), core::ptr::dangling_mut());
    let expected = refused("not enough memory for the handle");
    // SAFETY: every pointer is null or points to a live value.
    unsafe {
        assert_eq!(with_message(|m| qz1_int8_rows_new(0, &mut int8, m)), expected);
        assert_eq!(with_message(|m| qz1_float_rows_new(0, &mut float, m)), expected);
    }
    assert!(int8.is_null() && float.is_null());
}

#[test]
fn texts_need_none() {
    let mut layout = qz1_kv_layout {
        struct_size: size_of::<qz1_kv_layout>() as u32,
        kind: 0,
        head_dim: 0,
        page_tokens: 0,
        page_bytes: 0,
        id: 0,
    };
    // SAFETY: this test upholds the pointer contract of the C interface.
    unsafe {
        let (status, text) = with_message(|m| qz1_kv_layout_of(QZ1_KV_4BIT, 33, &mut layout, m));
        assert_eq!(status, qz1_status::Scheme);
        assert!(text.starts_with("head_dim must be a multiple of 16"), "{text}");
        let odd = (&raw mut layout).wrapping_byte_add(1);
        let (status, text) = with_message(|m| qz1_kv_layout_of(QZ1_KV_4BIT, 32, odd, m));
        assert_eq!((status, &text[..]), (qz1_status::Misaligned, "the layout: not aligned to 8 bytes"));
        let (status, text) = with_message(|m| qz1_int8_rows_new(99, &mut null_mut(), m));
        assert_eq!((status, &text[..]), (qz1_status::Isa, "unknown instruction set 99"));
    }
}

unsafe extern "C" fn in_order(_: *mut c_void, count: usize, piece: qz1_piece, work: *mut c_void) {
    // SAFETY: each piece is called once, as the interface requires.
    (0..count).for_each(|i| unsafe { piece.unwrap()(work, i) });
}

/// These calls allocate page lists, parts of packed weights, and the tracking of many pieces.
#[test]
fn what_grows_with_the_call() {
    let struct_size = size_of::<qz1_kv_layout>() as u32;
    let mut layout =
        qz1_kv_layout { struct_size, kind: 0, head_dim: 0, page_tokens: 0, page_bytes: 0, id: 0 };
    // SAFETY: this test upholds the pointer contract of the C interface.
    assert_eq!(unsafe { qz1_kv_layout_of(QZ1_KV_4BIT, 16, &mut layout, null()) }, qz1_status::Ok);
    const HEADS: usize = 40;
    let number = 0_u32;
    let list = qz1_page_list {
        struct_size: size_of::<qz1_page_list>() as u32,
        reserved: 0,
        pages: &number,
        pages_len: 1,
        tokens: 0,
        first: 0,
        seen: 0,
    };
    let (lists, x) = (vec![list; HEADS], vec![1.0_f32; HEADS * 16]);
    let mut pages = vec![0_u8; layout.page_bytes as usize];
    let (to, to_len, at) = (pages.as_mut_ptr(), pages.len(), x.as_ptr());
    let got = with_message(|m| {
        let (lists, len) = (lists.as_ptr(), x.len());
        // SAFETY: this test upholds the pointer contract of the C interface.
        unsafe { qz1_kv_append(&layout, to, to_len, lists, HEADS, at, len, at, len, null(), m) }
    });
    assert_eq!(got, refused("the page lists: not enough memory"));

    const N: usize = 64;
    let (codes, scales) = (vec![1_u8; N * 16], vec![1.0_f32; N]);
    let weights = qz1_weights {
        struct_size: size_of::<qz1_weights>() as u32,
        bits: 4,
        n: N,
        k: 16,
        group_size: 16,
        codes: codes.as_ptr(),
        codes_len: codes.len(),
        scales: scales.as_ptr(),
        scales_len: scales.len(),
        group_scales: null(),
        group_scales_len: 0,
        zeros: null(),
        zeros_len: 0,
        format: QZ1_CODES_INTEGER,
        reserved: 0,
    };
    // SAFETY: all fields are numbers or pointers, for which zero is valid.
    let mut layout: qz1_layout = unsafe { core::mem::zeroed() };
    layout.struct_size = size_of::<qz1_layout>() as u32;
    // SAFETY: this test upholds the pointer contract of the C interface.
    assert_eq!(unsafe { qz1_layout_of(&weights, 0, &mut layout, null()) }, qz1_status::Ok);
    let mut packed = vec![0x55_u8; layout.bytes as usize];
    let (to, len, panels) = (packed.as_mut_ptr(), packed.len(), layout.panels as usize);
    let parallel = qz1_parallel {
        struct_size: size_of::<qz1_parallel>() as u32,
        threads: 4,
        ctx: null_mut(),
        for_each: Some(in_order),
    };
    // SAFETY: this test upholds the pointer contract of the C interface.
    let got = with_message(|m| unsafe { qz1_pack(&weights, &layout, 0, panels, to, len, &parallel, m) });
    assert_eq!(got, refused("the work of the threads: not enough memory"));
    assert!(packed.iter().all(|b| *b == 0x55));

    // If there are more pieces than can be tracked without allocation, they run on one thread.
    let (mut by, mut x) = (null_mut(), vec![0.0_f32; 1 << 17]);
    x.iter_mut().step_by(2).for_each(|x| *x = 1.0);
    // SAFETY: this test upholds the pointer contract of the C interface; freed once.
    unsafe {
        assert_eq!(qz1_hadamard_new(2, &mut by, null()), qz1_status::Ok);
        let (at, len) = (x.as_mut_ptr(), x.len());
        let (status, text) = with_message(|m| qz1_hadamard_transform(by, at, len, 0, &parallel, m));
        assert_eq!((status, &text[..]), (qz1_status::Ok, ""));
        qz1_hadamard_free(by);
    }
    assert!(x.iter().all(|x| *x == 0.5_f32.sqrt()));
}
