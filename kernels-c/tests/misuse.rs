//! Every way to call the interface wrongly that it can see is a status, and writes nothing.

use core::ffi::{c_char, c_void};
use core::ptr::{null, null_mut};

use proptest::prelude::*;
use quant_kernels::*;

const N: usize = 20;
const K: usize = 64;
const GROUP: usize = 32;

/// A small matrix with everything that points to it.
struct Matrix {
    codes: Vec<u8>,
    scales: Vec<f32>,
    zeros: Vec<u8>,
}

impl Matrix {
    fn new() -> Self {
        Self {
            codes: (0..N * K).map(|i| (i * 7 % 16) as u8).collect(),
            scales: (0..N * K / GROUP).map(|i| 0.01 * (1 + i % 5) as f32).collect(),
            zeros: (0..N * K / GROUP).map(|i| (i % 16) as u8).collect(),
        }
    }

    fn weights(&self) -> qz1_weights {
        qz1_weights {
            struct_size: size_of::<qz1_weights>() as u32,
            bits: 4,
            n: N,
            k: K,
            group_size: GROUP,
            codes: self.codes.as_ptr(),
            codes_len: self.codes.len(),
            scales: self.scales.as_ptr(),
            scales_len: self.scales.len(),
            group_scales: null(),
            group_scales_len: 0,
            zeros: self.zeros.as_ptr(),
            zeros_len: self.zeros.len(),
        }
    }

    fn layout(&self) -> qz1_layout {
        let mut layout = empty();
        // SAFETY: all lives.
        assert_eq!(unsafe { qz1_layout_of(&self.weights(), 1, &mut layout, null()) }, qz1_status::Ok);
        layout
    }

    fn packed(&self) -> Vec<u8> {
        let layout = self.layout();
        let mut bytes = vec![0; layout.bytes as usize];
        let panels = layout.panels as usize;
        // SAFETY: all lives.
        let status = unsafe {
            qz1_pack(&self.weights(), &layout, 0, panels, bytes.as_mut_ptr(), bytes.len(), null(), null())
        };
        assert_eq!(status, qz1_status::Ok);
        bytes
    }
}

fn empty() -> qz1_layout {
    // SAFETY: numbers only, of which zero is one.
    let mut layout: qz1_layout = unsafe { core::mem::zeroed() };
    layout.struct_size = size_of::<qz1_layout>() as u32;
    layout
}

fn values(x: &mut [f32]) -> qz1_values {
    let (kind, data) = (QZ1_TYPE_F32, x.as_mut_ptr().cast());
    qz1_values { struct_size: size_of::<qz1_values>() as u32, kind, data, len: x.len() }
}

/// Quantized rows that are freed at the end.
struct Rows(*mut qz1_int8_rows);

impl Rows {
    fn new() -> Self {
        let mut rows = null_mut();
        // SAFETY: all lives.
        assert_eq!(unsafe { qz1_int8_rows_new(QZ1_ISA_DETECT, &mut rows, null()) }, qz1_status::Ok);
        Self(rows)
    }

    fn quantize(&self, layout: &qz1_layout, x: &qz1_values, by: Option<&qz1_static_scale>) -> qz1_status {
        let by = by.map_or(null(), |by| by as *const _);
        // SAFETY: all lives.
        unsafe { qz1_int8_rows_quantize(self.0, layout, x, by, null(), null()) }
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { qz1_int8_rows_free(self.0) }
    }
}

#[test]
fn weights_that_do_not_fit() {
    let matrix = Matrix::new();
    let status = |change: &dyn Fn(&mut qz1_weights)| {
        let (mut weights, mut layout) = (matrix.weights(), empty());
        change(&mut weights);
        // SAFETY: lengths only shrink, or are seen not to be the shape's before anything is read.
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
    // Shapes whose product is beyond all numbers.
    assert_eq!(status(&|w| w.n = usize::MAX), qz1_status::Length);
    assert_eq!(status(&|w| (w.n, w.k, w.group_size) = (1 << 62, 64, 64)), qz1_status::Length);
    assert_eq!(status(&|w| w.scales_len = usize::MAX), qz1_status::TooLarge);
    assert_eq!(status(&|w| w.codes_len = usize::MAX), qz1_status::TooLarge);
    assert_eq!(status(&|w| (w.n, w.codes_len, w.scales_len, w.zeros_len) = (0, 0, 0, 0)), qz1_status::Scheme);
    // SAFETY: null is refused.
    unsafe {
        assert_eq!(qz1_layout_of(null(), 0, &mut empty(), null()), qz1_status::Null);
        assert_eq!(qz1_layout_of(&matrix.weights(), 0, null_mut(), null()), qz1_status::Null);
        let odd = (&raw const matrix.codes).cast::<u8>().wrapping_add(1).cast::<qz1_weights>();
        assert_eq!(qz1_layout_of(odd, 0, &mut empty(), null()), qz1_status::Misaligned);
    }
}

/// A later version's structure is taken where what is new is zero.
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
    // SAFETY: as long as it says.
    let status =
        |later: &Later| unsafe { qz1_layout_of((&raw const *later).cast(), 1, &mut empty(), null()) };
    assert_eq!(status(&later), qz1_status::Ok);
    later.new[1] = 1;
    assert_eq!(status(&later), qz1_status::StructSize);
}

#[test]
fn layouts_that_are_none() {
    let matrix = Matrix::new();
    let (layout, packed) = (matrix.layout(), matrix.packed());
    let status = |change: &dyn Fn(&mut qz1_layout)| {
        let mut layout = layout;
        change(&mut layout);
        let mut out = vec![0.0; K];
        // SAFETY: all lives.
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
        // SAFETY: `out` is as long as a length that is taken.
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
    // A view of another layout.
    let symmetric = qz1_weights { zeros: null(), zeros_len: 0, ..weights };
    // SAFETY: all lives.
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
        // SAFETY: all lives.
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
        // SAFETY: `floats` is as long as a length that is taken.
        unsafe { qz1_dequantize_rows(&layout, packed.as_ptr(), packed.len(), first, rows, out, len, null()) }
    };
    assert_eq!(rows(N - 1, 1, K), qz1_status::Ok);
    assert_eq!(rows(N, 1, K), qz1_status::Mismatch);
    assert_eq!(rows(usize::MAX, 2, K), qz1_status::Mismatch);
    assert_eq!(rows(0, 1, K - 1), qz1_status::Length);
}

#[test]
fn activations_that_do_not_fit() {
    let (matrix, rows) = (Matrix::new(), Rows::new());
    let layout = matrix.layout();
    let mut x = vec![1.0_f32; 3 * K];
    let whole = values(&mut x);
    assert_eq!(rows.quantize(&layout, &whole, None), qz1_status::Ok);
    assert_eq!(rows.quantize(&layout, &qz1_values { len: 3 * K - 1, ..whole }, None), qz1_status::Length);
    assert_eq!(rows.quantize(&layout, &qz1_values { len: usize::MAX, ..whole }, None), qz1_status::TooLarge);
    assert_eq!(rows.quantize(&layout, &qz1_values { data: null_mut(), ..whole }, None), qz1_status::Null);
    assert_eq!(rows.quantize(&layout, &qz1_values { kind: 7, ..whole }, None), qz1_status::Scheme);
    let odd = qz1_values { data: whole.data.wrapping_byte_add(2), len: K, ..whole };
    assert_eq!(rows.quantize(&layout, &odd, None), qz1_status::Misaligned);
    // f16 may stand there.
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
    let residual = values(&mut residual);
    let normed = |norm: *const qz1_rms_norm, residual: *const qz1_values| {
        // SAFETY: all lives.
        unsafe {
            qz1_int8_rows_quantize_rms_norm(rows.0, &layout, &whole, norm, residual, null(), null(), null())
        }
    };
    assert_eq!(normed(&norm, null()), qz1_status::Ok);
    assert_eq!(normed(&norm, &residual), qz1_status::Ok);
    assert_eq!(normed(null(), null()), qz1_status::Null);
    assert_eq!(normed(&qz1_rms_norm { weight_len: K - 1, ..norm }, null()), qz1_status::Length);
    assert_eq!(normed(&qz1_rms_norm { eps: 0.0, ..norm }, null()), qz1_status::Scheme);
    assert_eq!(normed(&norm, &whole), qz1_status::Overlap);
    assert_eq!(normed(&norm, &qz1_values { len: K, ..residual }), qz1_status::Length);
    assert_eq!(normed(&norm, &qz1_values { kind: QZ1_TYPE_BF16, ..residual }), qz1_status::Mismatch);
    let gated = |up: *const qz1_values| {
        // SAFETY: all lives.
        unsafe { qz1_int8_rows_quantize_silu_mul(rows.0, &layout, &whole, up, null(), null(), null()) }
    };
    assert_eq!(gated(&whole), qz1_status::Ok);
    assert_eq!(gated(&qz1_values { len: 2 * K, ..whole }), qz1_status::Length);
    assert_eq!(gated(&qz1_values { kind: QZ1_TYPE_F16, ..whole }), qz1_status::Mismatch);
    // Three rows of one width are no rows of both.
    assert_eq!(gated(null()), qz1_status::Length);
    let mut none = null_mut();
    // SAFETY: null is refused, and frees nothing.
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

/// What a `for_each` may do wrong.
#[derive(Clone, Copy)]
enum Manner {
    Right,
    Nothing,
    Twice,
    Beyond,
}

unsafe extern "C" fn in_a_manner(ctx: *mut c_void, count: usize, piece: qz1_piece, work: *mut c_void) {
    // SAFETY: the test gives one.
    let manner = unsafe { *ctx.cast::<Manner>() };
    let piece = piece.unwrap();
    // SAFETY: as the interface takes it, wrong numbers too.
    unsafe {
        match manner {
            Manner::Nothing => {}
            Manner::Right => (0..count).rev().for_each(|i| piece(work, i)),
            Manner::Twice => (0..count).chain(0..1).for_each(|i| piece(work, i)),
            Manner::Beyond => (0..=count).for_each(|i| piece(work, i)),
        }
    }
}

#[test]
fn products_that_do_not_fit() {
    let (matrix, rows) = (Matrix::new(), Rows::new());
    let (layout, packed) = (matrix.layout(), matrix.packed());
    let mut x = vec![0.5_f32; 3 * K];
    let bias = [0.25_f32; N];
    let mut out = vec![0.0_f32; 3 * N];
    let to = out.as_mut_ptr();
    let run = |x: *const qz1_int8_rows,
               bytes: usize,
               bias: (*const f32, usize),
               to: (*mut f32, usize),
               isa| {
        // SAFETY: all lives, and is as long as a length that is taken.
        unsafe {
            qz1_multiply(&layout, packed.as_ptr(), bytes, x, bias.0, bias.1, to.0, to.1, isa, null(), null())
        }
    };
    let (b, l) = ((bias.as_ptr(), N), packed.len());
    // Rows that were never filled.
    assert_eq!(run(rows.0, l, b, (to, 3 * N), 0), qz1_status::Mismatch);
    assert_eq!(rows.quantize(&layout, &values(&mut x), None), qz1_status::Ok);
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
    let threads = |manner: &mut Manner, for_each: bool| {
        let parallel = qz1_parallel {
            struct_size: size_of::<qz1_parallel>() as u32,
            threads: 3,
            ctx: (&raw mut *manner).cast(),
            for_each: if for_each { Some(in_a_manner) } else { None },
        };
        // SAFETY: all lives.
        unsafe {
            qz1_multiply(&layout, packed.as_ptr(), l, rows.0, b.0, b.1, to, 3 * N, 0, &parallel, null())
        }
    };
    assert_eq!(threads(&mut Manner::Right, true), qz1_status::Ok);
    assert_eq!(threads(&mut Manner::Right, false), qz1_status::Null);
    for mut manner in [Manner::Nothing, Manner::Twice, Manner::Beyond] {
        assert_eq!(threads(&mut manner, true), qz1_status::ForEach);
    }
}

#[test]
fn transforms() {
    let mut by = null_mut();
    let mut x = vec![0.0_f32; 2 * 24];
    x[24] = 3.0;
    let (to, len) = (x.as_mut_ptr(), x.len());
    // SAFETY: all lives, and is as long as a length that is taken.
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

#[test]
fn messages_say_why() {
    let matrix = Matrix::new();
    let mut text = [0x55_u8; 12];
    let at = text.as_mut_ptr().cast::<c_char>();
    let message = |capacity| qz1_message {
        struct_size: size_of::<qz1_message>() as u32,
        reserved: 0,
        text: at,
        capacity,
    };
    let weights = qz1_weights { bits: 9, ..matrix.weights() };
    // SAFETY: all lives.
    let status = |m: &qz1_message| unsafe { qz1_layout_of(&weights, 0, &mut empty(), m) };
    assert_eq!(status(&message(11)), qz1_status::Scheme);
    assert_eq!(&text[..], b"bits must \0\x55");
    assert_eq!(status(&qz1_message { struct_size: 1, ..message(11) }), qz1_status::StructSize);
    assert_eq!(status(&qz1_message { text: null_mut(), ..message(11) }), qz1_status::Null);
    assert_eq!(status(&qz1_message { text: null_mut(), ..message(0) }), qz1_status::Scheme);
}

proptest! {
    /// Any bytes are weights of a layout: they unpack, pack again to the same codes, and multiply.
    #[test]
    fn any_packed_bytes_are_taken(seed in any::<u64>(), m in 1usize..5) {
        let (matrix, rows) = (Matrix::new(), Rows::new());
        let layout = matrix.layout();
        let mut state = seed;
        let bytes: Vec<u8> = (0..layout.bytes)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 40) as u8
            })
            .collect();
        let mut x = vec![0.5_f32; m * K];
        prop_assert_eq!(rows.quantize(&layout, &values(&mut x), None), qz1_status::Ok);
        let mut out = [vec![0.0_f32; m * N], vec![1.0_f32; m * N]];
        for (out, isa) in out.iter_mut().zip([QZ1_ISA_SCALAR, QZ1_ISA_DETECT]) {
            // SAFETY: all lives.
            let status = unsafe {
                let (at, len) = (bytes.as_ptr(), bytes.len());
                qz1_multiply(&layout, at, len, rows.0, null(), 0, out.as_mut_ptr(), m * N, isa, null(), null())
            };
            prop_assert_eq!(status, qz1_status::Ok);
        }
        let bits = |v: &[f32]| v.iter().map(|v| if v.is_nan() { 0 } else { v.to_bits() }).collect::<Vec<_>>();
        prop_assert_eq!(bits(&out[0]), bits(&out[1]));
    }

    /// Numbers that mean nothing are refused, and nothing is read behind them.
    #[test]
    fn random_fields_are_refused_or_right(words in prop::array::uniform8(any::<u64>()), which in 0usize..8) {
        let matrix = Matrix::new();
        let (mut weights, mut layout) = (matrix.weights(), matrix.layout());
        // Shapes as they come, pointers and lengths as they are.
        match which {
            0 => weights.n = words[0] as usize,
            1 => weights.k = words[0] as usize,
            2 => weights.group_size = words[0] as usize,
            3 => weights.bits = words[0] as u32,
            4 => (weights.n, weights.k) = (words[0] as usize, words[1] as usize),
            5 => (layout.n, layout.k, layout.group_size) = (words[0], words[1], words[2]),
            6 => layout.id = words[0],
            _ => (layout.code_bits, layout.scales, layout.middle) = (words[0] as u32, words[1] as u32, words[2] as u32),
        }
        let mut out = vec![0_u8; matrix.layout().bytes as usize];
        // SAFETY: lengths are those of what is there.
        let status = unsafe {
            qz1_pack(&weights, &layout, 0, 2, out.as_mut_ptr(), out.len(), null(), null())
        };
        let same = (weights.n, weights.k, weights.group_size, weights.bits) == (N, K, GROUP, 4);
        if which > 4 || !same {
            prop_assert_ne!(status, qz1_status::Ok);
        }
    }
}
