//! A small layer of experts with different bits, and all structures that point to it.

use core::ptr::null;

use quant_kernels::*;
use quant_kernels_cpu::{PackedLinear, Serial, WeightView};

use super::empty;

pub const HIDDEN: usize = 64;
pub const INNER: usize = 40;
pub const COUNT: usize = 3;

pub struct Part {
    pub packed: PackedLinear,
    pub layout: qz1_layout,
    pub bias: Vec<f32>,
}

pub struct Layer {
    pub parts: Vec<[Part; 3]>,
}

fn part([n, k]: [usize; 2], bits: u8, by: usize) -> Part {
    let codes: Vec<u8> = (0..n * k).map(|i| (i * by % (1 << bits)) as u8).collect();
    let group = k / 2;
    let scales: Vec<f32> = (0..n * 2).map(|i| 0.01 * (1 + i % by) as f32).collect();
    let view = WeightView::new([n, k], bits, group, &codes, &scales, None).unwrap();
    let packed = PackedLinear::pack(&view, None, false, &Serial).unwrap();
    let weights = qz1_weights {
        struct_size: size_of::<qz1_weights>() as u32,
        bits: bits.into(),
        n,
        k,
        group_size: group,
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
    let mut layout = empty();
    // SAFETY: every pointer is null or points to a live value.
    assert_eq!(unsafe { qz1_layout_of(&weights, 0, &mut layout, null()) }, qz1_status::Ok);
    Part { packed, layout, bias: super::noise(n, by) }
}

impl Layer {
    pub fn new() -> Self {
        let of = |i: usize| {
            let bits = [4, 8, 3][i % 3];
            let inner = [INNER, HIDDEN];
            [part(inner, bits, 5 + i), part(inner, 4, 7 + i), part([HIDDEN, INNER], bits, 11 + i)]
        };
        Self { parts: (0..COUNT).map(of).collect() }
    }

    /// The experts as C structures; the first one has biases.
    pub fn experts(&self) -> Vec<qz1_expert> {
        let of = |(i, [gate, up, down]): (usize, &[Part; 3])| {
            let bytes = |part: &Part| (part.packed.view().bytes().as_ptr(), part.packed.view().bytes().len());
            let bias = |part: &Part| if i == 0 { (part.bias.as_ptr(), part.bias.len()) } else { (null(), 0) };
            qz1_expert {
                struct_size: size_of::<qz1_expert>() as u32,
                reserved: 0,
                gate_layout: &gate.layout,
                gate: bytes(gate).0,
                gate_len: bytes(gate).1,
                gate_bias: bias(gate).0,
                gate_bias_len: bias(gate).1,
                up_layout: &up.layout,
                up: bytes(up).0,
                up_len: bytes(up).1,
                up_bias: bias(up).0,
                up_bias_len: bias(up).1,
                down_layout: &down.layout,
                down: bytes(down).0,
                down_len: bytes(down).1,
                down_bias: bias(down).0,
                down_bias_len: bias(down).1,
            }
        };
        self.parts.iter().enumerate().map(of).collect()
    }
}

/// The configuration of calls with at most `tokens` tokens of two experts each.
pub fn config(tokens: usize, kind: u32, rows: u32, gate: u32) -> qz1_experts_config {
    let struct_size = size_of::<qz1_experts_config>() as u32;
    let (isa, alpha, limit) = (QZ1_ISA_DETECT, 1.7, 0.8);
    qz1_experts_config { struct_size, isa, rows, gate, alpha, limit, kind, reserved: 0, tokens, top_k: 2 }
}

pub fn routing(experts: &[u32], weights: &[f32]) -> qz1_routing {
    qz1_routing {
        struct_size: size_of::<qz1_routing>() as u32,
        reserved: 0,
        top_k: 2,
        experts: experts.as_ptr(),
        experts_len: experts.len(),
        weights: weights.as_ptr(),
        weights_len: weights.len(),
    }
}
