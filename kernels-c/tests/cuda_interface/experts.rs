//! The experts of a layer on a device, compared with the CPU's interface.

use core::ptr::null_mut;

use quant_kernels::*;
use quant_kernels_cpu::experts::{Expert, ExpertGate, ExpertRows, Experts, Routing};
use quant_kernels_cpu::{IsaToken, PackedLinear, Serial, WeightView, reference};

use crate::common::*;
use crate::driver::{self, Bytes};
use crate::linear::workspace;

pub const COUNT: usize = 3;
pub const TOKENS: usize = 5;
pub const TOP_K: usize = 2;
/// Features per token, and the intermediate size.
pub const HIDDEN: usize = 1056;
pub const INNER: usize = 40;

/// Gate, up and down of each expert, with one scale per row, so that integers are summed over all of `k`.
fn experts() -> Vec<[Matrix; 3]> {
    let matrix = |shape: [usize; 2], by: usize| {
        let mut matrix = Matrix::new(shape, shape[1], true);
        matrix.codes.iter_mut().enumerate().for_each(|(i, code)| *code = (i * by % 37 % 16) as u8);
        matrix
    };
    let expert = |e: usize| {
        [matrix([INNER, HIDDEN], 7 + e), matrix([INNER, HIDDEN], 11 + e), matrix([HIDDEN, INNER], 13 + e)]
    };
    (0..COUNT).map(expert).collect()
}

pub fn layouts(order: u32) -> [qz1_cuda_layout; 2] {
    let [gate, _, down] = &experts()[0];
    [gate.layout(order, 0), down.layout(order, 0)]
}

pub fn shape(layouts: &[qz1_cuda_layout; 2]) -> qz1_cuda_experts_shape {
    qz1_cuda_experts_shape {
        gate: QZ1_GATE_CLAMPED,
        alpha: 1.702,
        limit: 0.75,
        x_type: QZ1_TYPE_F32,
        out_type: QZ1_TYPE_F32,
        gate_up_layout: &layouts[0],
        down_layout: &layouts[1],
        experts: COUNT,
        tokens: TOKENS,
        top_k: TOP_K,
        ..sized()
    }
}

#[test]
fn results_are_those_of_the_cpu() {
    if !on_gpu() {
        return;
    }
    driver::context();
    let kernels = Kernels::new();
    let experts = experts();
    let layouts = layouts(QZ1_CUDA_ORDER_INT8);
    let plan = Plan::new(&kernels, &shape(&layouts), qz1_cuda_experts_plan);
    let biases: Vec<f32> = (0..HIDDEN).map(|i| (i % 7) as f32 / 8.0 - 0.25).collect();
    let bias = Bytes::of(&biases);
    let part = |bytes: usize| qz1_cuda_region { bytes: bytes as u64, ..bias.region() };
    let packed: Vec<[Bytes; 3]> = experts
        .iter()
        .map(|[gate, up, down]| {
            [(gate, 0), (up, 0), (down, 1)].map(|(of, layout)| Bytes::of(&of.packed(&layouts[layout])))
        })
        .collect();
    let described: Vec<qz1_cuda_expert> = packed
        .iter()
        .map(|[gate, up, down]| qz1_cuda_expert {
            gate: gate.region(),
            gate_bias: part(4 * INNER),
            up: up.region(),
            down: down.region(),
            down_bias: part(4 * HIDDEN),
            ..sized()
        })
        .collect();
    let mut descriptors = vec![0_u8; QZ1_CUDA_EXPERT_BYTES as usize * COUNT];
    // SAFETY: every pointer points to live values.
    done(|m| unsafe {
        let (at, len) = (descriptors.as_mut_ptr(), descriptors.len());
        qz1_cuda_experts_describe(&layouts[0], &layouts[1], described.as_ptr(), COUNT, at, len, m)
    });
    let x: Vec<f32> = (0..TOKENS * HIDDEN).map(|i| ((i * 53 % 997) as f32 - 498.0) / 300.0).collect();
    // A token with one expert twice, one without experts, and one with an expert that does not exist.
    let numbers = [0, 2, 1, 1, QZ1_NO_EXPERT, QZ1_NO_EXPERT, 2, COUNT as u32, 1, 0];
    let weights: Vec<f32> = (0..TOKENS * TOP_K).map(|i| 0.125 * i as f32 - 0.5).collect();
    let [descriptors, x_at, numbers_at, weights_at] =
        [Bytes::of(&descriptors), Bytes::of(&x), Bytes::of(&numbers), Bytes::of(&weights)];
    let [workspace, tickets] = workspace(&plan);
    let run = || {
        let out = Bytes::filled(4 * TOKENS * HIDDEN, 0x5a);
        let arguments = qz1_cuda_experts_arguments {
            descriptors: descriptors.region(),
            x: x_at.region(),
            experts: numbers_at.region(),
            weights: weights_at.region(),
            out: out.region(),
            tickets: tickets.region(),
            workspace: workspace.region(),
            ..sized()
        };
        // SAFETY: device memory stays allocated until after the results are read.
        done(|m| unsafe { qz1_cuda_experts_launch(plan.0, &arguments, null_mut(), m) });
        out.read::<f32>()
    };
    let got = run();
    assert_eq!(run(), got, "the second launch gives different results");

    let pack = |matrix: &Matrix, bias: Option<&[f32]>| {
        let (shape, zeros) = (matrix.shape, matrix.zeros.as_deref());
        let view = WeightView::new(shape, 4, matrix.group, &matrix.codes, &matrix.scales, zeros).unwrap();
        PackedLinear::pack(&view, bias, false, &Serial).unwrap()
    };
    let on_cpu = experts.iter().map(|[gate, up, down]| {
        [pack(gate, Some(&biases[..INNER])), pack(up, None), pack(down, Some(&biases))]
    });
    let on_cpu: Vec<[PackedLinear; 3]> = on_cpu.collect();
    let all =
        on_cpu.iter().map(|[gate, up, down]| Expert { gate: gate.into(), up: up.into(), down: down.into() });
    let all: Vec<Expert<'_>> = all.collect();
    let numbers = numbers.map(|e| if e == COUNT as u32 { QZ1_NO_EXPERT } else { e });
    let routing = Routing { top_k: TOP_K, experts: &numbers, weights: &weights };
    let gate = ExpertGate::Clamped { alpha: 1.702, limit: 0.75 };
    let all = Experts::new(&all).unwrap();
    let expected =
        reference::experts(&all, IsaToken::detect(), ExpertRows::Int8, gate, &x, &routing).unwrap();
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&got), bits(&expected));
    assert!(got[2 * HIDDEN..3 * HIDDEN].iter().all(|&v| v == 0.0) && got.iter().any(|&v| v != 0.0));
}

#[test]
fn descriptors_need_valid_experts() {
    use qz1_status::{LayoutId, Length, Misaligned, Null, Overlap, StructSize};
    let layouts = layouts(QZ1_CUDA_ORDER_FLOAT);
    let at = |address, bytes: u64| qz1_cuda_region { address, bytes };
    let [gate_up, down] = layouts.each_ref().map(|layout| at(0x1000, layout.bytes));
    let good = qz1_cuda_expert { gate: gate_up, up: gate_up, down, ..sized() };
    let mut out = vec![0x55_u8; 2 * QZ1_CUDA_EXPERT_BYTES as usize];
    let mut describe = |experts: &[qz1_cuda_expert], len: usize| {
        // SAFETY: every pointer points to live values.
        refused(|m| unsafe {
            let (count, out) = (experts.len(), out.as_mut_ptr());
            qz1_cuda_experts_describe(&layouts[0], &layouts[1], experts.as_ptr(), count, out, len, m)
        })
    };
    let len = 2 * QZ1_CUDA_EXPERT_BYTES as usize;
    assert_eq!(describe(&[good, good], len), qz1_status::Ok);
    assert_eq!(describe(&[good, good], len - 1), Length);
    assert_eq!(describe(&[good], len), Length);
    let short = qz1_cuda_region { bytes: down.bytes - 1, ..down };
    assert_eq!(describe(&[good, qz1_cuda_expert { down: short, ..good }], len), Length);
    assert_eq!(describe(&[good, qz1_cuda_expert { up: NONE, ..good }], len), Length);
    assert_eq!(
        describe(&[good, qz1_cuda_expert { gate: at(0x1010, gate_up.bytes), ..good }], len),
        Misaligned
    );
    assert_eq!(describe(&[good, qz1_cuda_expert { gate_bias: at(0x1002, 160), ..good }], len), Misaligned);
    assert_eq!(describe(&[good, qz1_cuda_expert { up_bias: at(0, 160), ..good }], len), Null);
    assert_eq!(describe(&[good, qz1_cuda_expert { down_bias: at(0x1000, 4), ..good }], len), Length);
    assert_eq!(describe(&[good, qz1_cuda_expert { reserved: 1, ..good }], len), StructSize);
    assert_eq!(describe(&[good, qz1_cuda_expert { struct_size: 16, ..good }], len), StructSize);

    let (wrong, mut both) = (qz1_cuda_layout { id: 1, ..layouts[1] }, [good, good]);
    // SAFETY: every pointer is null or points to live values.
    unsafe {
        let (experts, to) = (both.as_mut_ptr(), out.as_mut_ptr());
        let of = |gate_up, down, experts: *const qz1_cuda_expert, to| {
            refused(|m| qz1_cuda_experts_describe(gate_up, down, experts, 2, to, len, m))
        };
        assert_eq!(of(&layouts[0], &wrong, experts, to), LayoutId);
        assert_eq!(of(&layouts[0], core::ptr::null(), experts, to), Null);
        assert_eq!(of(&layouts[0], &layouts[1], core::ptr::null(), to), Null);
        assert_eq!(of(&layouts[0], &layouts[1], experts, null_mut()), Null);
        assert_eq!(of(&layouts[0], &layouts[1], experts, experts.cast()), Overlap);
    }
}
