//! Numbers of any kind through the C interface, with lengths that are true: a status, and no memory but the caller's.
#![no_main]

use core::ptr::{null, null_mut};

use libfuzzer_sys::fuzz_target;
use quant_kernels::*;

#[derive(arbitrary::Arbitrary, Debug)]
struct Input {
    bits: u32,
    shape: [u16; 3],
    /// Larger than any memory, sometimes.
    huge: Option<[u64; 3]>,
    sums: u32,
    fitting: bool,
    codes: Vec<u8>,
    scales: Vec<f32>,
    zeros: Option<Vec<u8>>,
    fields: Option<[u64; 12]>,
    panels: [u64; 2],
    kind: u32,
    x: Vec<u32>,
    by: Option<(f32, i32)>,
    isa: u32,
    bias: Option<Vec<f32>>,
    out: u16,
}

fuzz_target!(|input: Input| {
    let Input { bits, shape, huge, sums, fitting, mut codes, mut scales, mut zeros, fields, .. } = input;
    let mut shape = shape.map(|s| usize::from(s % 150));
    if fitting {
        shape[1] = shape[1].next_multiple_of(shape[2].max(1));
        let groups = shape[0] * shape[1] / shape[2].max(1);
        codes.resize(shape[0] * shape[1], 5);
        scales.resize(groups, 0.5);
        if let Some(zeros) = &mut zeros {
            zeros.resize(groups, 1);
        }
    }
    let [n, k, group_size] = huge.map_or(shape, |h| h.map(|v| v as usize));
    let weights = qz1_weights {
        struct_size: size_of::<qz1_weights>() as u32,
        bits: if fitting { 2 + bits % 7 } else { bits },
        n,
        k,
        group_size,
        codes: codes.as_ptr(),
        codes_len: codes.len(),
        scales: scales.as_ptr(),
        scales_len: scales.len(),
        group_scales: null(),
        group_scales_len: 0,
        zeros: zeros.as_ref().map_or(null(), |z| z.as_ptr()),
        zeros_len: zeros.as_ref().map_or(0, Vec::len),
    };
    // SAFETY: numbers only.
    let mut layout: qz1_layout = unsafe { core::mem::zeroed() };
    layout.struct_size = size_of::<qz1_layout>() as u32;
    let mut text = [0_u8; 64];
    let message = qz1_message {
        struct_size: size_of::<qz1_message>() as u32,
        reserved: 0,
        text: text.as_mut_ptr().cast(),
        capacity: text.len(),
    };
    // SAFETY: lengths are those of what is there.
    unsafe {
        let made = qz1_layout_of(&weights, sums, &mut layout, &message) == qz1_status::Ok;
        if let Some(f) = fields {
            layout.code_bits = f[0] as u32;
            layout.scales = f[1] as u32;
            layout.zeros = f[2] as u32;
            layout.middle = f[3] as u32;
            layout.sums = f[4] as u32;
            (layout.n, layout.k, layout.group_size) = (f[5], f[6], f[7]);
            (layout.panels, layout.panel_bytes, layout.bytes, layout.id) = (f[8], f[9], f[10], f[11]);
        }
        let len = if made && fields.is_none() { layout.bytes as usize } else { 4096 };
        let mut packed = vec![0_u8; len];
        let (first, panels) = match made && fitting {
            true => (0, layout.panels as usize),
            false => (input.panels[0] as usize, input.panels[1] as usize),
        };
        qz1_pack(&weights, &layout, first, panels, packed.as_mut_ptr(), len, null(), &message);
        let mut rows = null_mut();
        assert_eq!(qz1_int8_rows_new(QZ1_ISA_DETECT, &mut rows, null()), qz1_status::Ok);
        let mut x = input.x;
        if fitting && k > 0 && k < 1000 {
            x.resize(x.len().clamp(1, 4 * k).next_multiple_of(k), 0x3f80_0000);
        }
        let kind = if fitting { QZ1_TYPE_F32 } else { input.kind };
        let values =
            qz1_values { struct_size: size_of::<qz1_values>() as u32, kind, data: x.as_mut_ptr().cast(), len: x.len() };
        let by = input.by.map(|(scale, zero)| qz1_static_scale { struct_size: 16, scale, zero, reserved: 0 });
        let by = by.as_ref().map_or(null(), |by| by as *const _);
        qz1_int8_rows_quantize(rows, &layout, &values, by, null(), &message);
        let m = x.len().checked_div(k).unwrap_or(0);
        let out_len = if fitting && huge.is_none() { m * n } else { usize::from(input.out) };
        let mut out = vec![0.0_f32; out_len];
        let mut bias = input.bias;
        if let Some(bias) = bias.as_mut().filter(|_| fitting && n < 1000) {
            bias.resize(n, 1.0);
        }
        let (bias_at, bias_len) = bias.as_ref().map_or((null(), 0), |b| (b.as_ptr(), b.len()));
        let isa = input.isa % 8;
        let to = out.as_mut_ptr();
        qz1_multiply(&layout, packed.as_ptr(), len, rows, bias_at, bias_len, to, out_len, isa, null(), &message);
        qz1_dequantize_rows(&layout, packed.as_ptr(), len, first, panels, to, out_len, &message);
        qz1_int8_rows_free(rows);
    }
});
