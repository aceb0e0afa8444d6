pub mod attention;
pub mod experts;

use core::ffi::c_void;
use core::ptr::{null, null_mut};

use quant_kernels::*;

pub const N: usize = 20;
pub const K: usize = 64;
pub const GROUP: usize = 32;

/// A small matrix, and all structures that point to it.
pub struct Matrix {
    pub codes: Vec<u8>,
    pub scales: Vec<f32>,
    pub zeros: Vec<u8>,
}

impl Matrix {
    pub fn new() -> Self {
        Self {
            codes: (0..N * K).map(|i| (i * 7 % 16) as u8).collect(),
            scales: (0..N * K / GROUP).map(|i| 0.01 * (1 + i % 5) as f32).collect(),
            zeros: (0..N * K / GROUP).map(|i| (i % 16) as u8).collect(),
        }
    }

    pub fn weights(&self) -> qz1_weights {
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
            format: QZ1_CODES_INTEGER,
            reserved: 0,
        }
    }

    pub fn layout(&self) -> qz1_layout {
        let mut layout = empty();
        // SAFETY: every pointer is null or points to a live value.
        assert_eq!(unsafe { qz1_layout_of(&self.weights(), 1, &mut layout, null()) }, qz1_status::Ok);
        layout
    }

    pub fn packed(&self) -> Vec<u8> {
        let layout = self.layout();
        let mut bytes = vec![0; layout.bytes as usize];
        let panels = layout.panels as usize;
        // SAFETY: every pointer is null or points to a live value.
        let status = unsafe {
            qz1_pack(&self.weights(), &layout, 0, panels, bytes.as_mut_ptr(), bytes.len(), null(), null())
        };
        assert_eq!(status, qz1_status::Ok);
        bytes
    }
}

pub fn empty() -> qz1_layout {
    // SAFETY: all fields are numbers or pointers, for which zero is valid.
    let mut layout: qz1_layout = unsafe { core::mem::zeroed() };
    layout.struct_size = size_of::<qz1_layout>() as u32;
    layout
}

pub fn values(x: &[f32]) -> qz1_values {
    let (kind, data) = (QZ1_TYPE_F32, x.as_ptr().cast());
    qz1_values { struct_size: size_of::<qz1_values>() as u32, kind, data, len: x.len() }
}

pub fn pointer<T>(of: Option<&T>) -> *const T {
    of.map_or(null(), |of| of)
}

pub fn noise(len: usize, by: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * by) % 101) as f32 / 32.0 - 1.5).collect()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Quantized rows that are freed when dropped.
pub struct Rows(pub *mut qz1_int8_rows);

impl Rows {
    pub fn new() -> Self {
        let mut rows = null_mut();
        // SAFETY: every pointer is null or points to a live value.
        assert_eq!(unsafe { qz1_int8_rows_new(QZ1_ISA_DETECT, &mut rows, null()) }, qz1_status::Ok);
        Self(rows)
    }

    pub fn quantize(&self, layout: &qz1_layout, x: &qz1_values, by: Option<&qz1_static_scale>) -> qz1_status {
        let by = pointer(by);
        // SAFETY: every pointer is null or points to a live value.
        unsafe { qz1_int8_rows_quantize(self.0, layout, x, by, null(), null()) }
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        // SAFETY: made by `new` and freed once.
        unsafe { qz1_int8_rows_free(self.0) }
    }
}

/// How a `for_each` behaves, correctly or incorrectly.
#[derive(Clone, Copy)]
pub enum Manner {
    Right,
    Nothing,
    Twice,
    Beyond,
    LeaveOne,
}

pub unsafe extern "C" fn in_a_manner(ctx: *mut c_void, count: usize, piece: qz1_piece, work: *mut c_void) {
    // SAFETY: the test passes such a pointer.
    let manner = unsafe { *ctx.cast::<Manner>() };
    let piece = piece.unwrap();
    // SAFETY: the arguments that the library passed; the library must survive wrong numbers too.
    unsafe {
        match manner {
            Manner::Nothing => {}
            Manner::Right => (0..count).rev().for_each(|i| piece(work, i)),
            Manner::Twice => (0..count).chain(0..1).for_each(|i| piece(work, i)),
            Manner::LeaveOne => (1..count).rev().for_each(|i| piece(work, i)),
            Manner::Beyond => (0..=count).for_each(|i| piece(work, i)),
        }
    }
}

/// A `for_each` that runs pieces on the calling thread, in this manner.
pub fn threads(manner: &'static Manner) -> qz1_parallel {
    let ctx = (&raw const *manner).cast_mut().cast();
    qz1_parallel {
        struct_size: size_of::<qz1_parallel>() as u32,
        threads: 3,
        ctx,
        for_each: Some(in_a_manner),
    }
}
