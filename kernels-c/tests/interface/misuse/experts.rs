//! Experts that do not match, and calls with invalid arguments.

use core::ptr::{null, null_mut};

use quant_kernels::*;

use crate::common::experts::*;
use crate::common::*;

#[test]
fn experts_that_do_not_fit() {
    let layer = Layer::new();
    let good = layer.experts();
    let new = |experts: &[qz1_expert], config: &qz1_experts_config| {
        let mut handle = null_mut();
        // SAFETY: every pointer is null or points to a live value.
        let status = unsafe {
            qz1_experts_new(experts.as_ptr(), experts.len(), config, null_mut(), &mut handle, null())
        };
        assert_eq!(handle.is_null(), status != qz1_status::Ok);
        // SAFETY: the handle was created above, or is null.
        unsafe { qz1_experts_free(handle) };
        status
    };
    let right = config(4, QZ1_TYPE_F32, QZ1_EXPERT_ROWS_INT8, QZ1_GATE_SILU);
    assert_eq!(new(&good, &right), qz1_status::Ok);
    assert_eq!(new(&[], &right), qz1_status::Scheme);
    for (wrong, status) in [
        (qz1_experts_config { rows: 9, ..right }, qz1_status::Scheme),
        (qz1_experts_config { gate: 0, ..right }, qz1_status::Scheme),
        (qz1_experts_config { kind: 7, ..right }, qz1_status::Scheme),
        (qz1_experts_config { isa: 77, ..right }, qz1_status::Isa),
        (qz1_experts_config { gate: QZ1_GATE_CLAMPED, limit: -1.0, ..right }, qz1_status::Scheme),
        (qz1_experts_config { tokens: usize::MAX, ..right }, qz1_status::TooLarge),
        (qz1_experts_config { reserved: 1, ..right }, qz1_status::StructSize),
        (qz1_experts_config { struct_size: 8, ..right }, qz1_status::StructSize),
    ] {
        assert_eq!(new(&good, &wrong), status);
    }
    let mut other = layer.parts[1][0].layout;
    other.id ^= 1;
    let second = |change: &dyn Fn(&mut qz1_expert)| {
        let mut experts = good.clone();
        change(&mut experts[1]);
        new(&experts, &right)
    };
    assert_eq!(second(&|e| e.up_layout = null()), qz1_status::Null);
    assert_eq!(second(&|e| e.gate_layout = &other), qz1_status::LayoutId);
    assert_eq!(second(&|e| e.down = null()), qz1_status::Null);
    assert_eq!(second(&|e| e.down_len -= 1), qz1_status::Length);
    assert_eq!(second(&|e| e.up_bias_len = 3), qz1_status::Null);
    assert_eq!(second(&|e| (e.up_bias, e.up_bias_len) = (good[0].up_bias, 3)), qz1_status::Length);
    assert_eq!(second(&|e| e.reserved = 2), qz1_status::StructSize);
    assert_eq!(second(&|e| e.struct_size -= 8), qz1_status::StructSize);
    let swapped = |e: &mut qz1_expert| (e.up_layout, e.up, e.up_len) = (e.down_layout, e.down, e.down_len);
    assert_eq!(second(&swapped), qz1_status::Mismatch);
}

#[test]
fn calls_that_do_not_fit() {
    let layer = Layer::new();
    let experts = layer.experts();
    let right = config(4, QZ1_TYPE_F32, QZ1_EXPERT_ROWS_FLOAT, QZ1_GATE_SILU);
    let mut handle = null_mut();
    // SAFETY: every pointer is null or points to a live value.
    let status = unsafe { qz1_experts_new(experts.as_ptr(), COUNT, &right, null_mut(), &mut handle, null()) };
    assert_eq!(status, qz1_status::Ok);
    let (x, numbers, weights) = (noise(4 * HIDDEN, 5), [0, 1, 2, 0, 1, 1, 2, 2], noise(8, 3));
    let mut out = vec![7.0_f32; 4 * HIDDEN];
    let to = out.as_mut_ptr();
    let run = |handle, count, x: &qz1_values, routing: &qz1_routing, to: *mut f32, len, threads| {
        // SAFETY: every pointer is null or points to a live value, which is as long as any length that the call
        // accepts.
        unsafe { qz1_experts_run(handle, experts.as_ptr(), count, x, routing, to, len, threads, null()) }
    };
    let (values, routed, all) = (values(&x), routing(&numbers, &weights), 4 * HIDDEN);
    assert_eq!(run(null_mut(), COUNT, &values, &routed, to, all, null()), qz1_status::Null);
    assert_eq!(run(handle, 2, &values, &routed, to, all, null()), qz1_status::Mismatch);
    assert_eq!(run(handle, COUNT, &values, &routed, to, all - 1, null()), qz1_status::Length);
    assert_eq!(run(handle, COUNT, &values, &routed, null_mut(), all, null()), qz1_status::Null);
    let kind = qz1_values { kind: QZ1_TYPE_F16, ..values };
    assert_eq!(run(handle, COUNT, &kind, &routed, to, all, null()), qz1_status::Scheme);
    let short = qz1_routing { weights_len: 7, ..routed };
    assert_eq!(run(handle, COUNT, &values, &short, to, all, null()), qz1_status::Length);
    let wide = qz1_routing { top_k: 3, ..routed };
    assert_eq!(run(handle, COUNT, &values, &wide, to, all, null()), qz1_status::Mismatch);
    let beyond = [0, 1, 2, 0, 1, 1, 2, 3];
    let beyond = routing(&beyond, &weights);
    assert_eq!(run(handle, COUNT, &values, &beyond, to, all, null()), qz1_status::Mismatch);
    let inside = experts[2].down.cast_mut().cast::<f32>();
    assert_eq!(run(handle, COUNT, &values, &routed, inside, all, null()), qz1_status::Overlap);
    assert_eq!(run(handle, COUNT, &values, &routed, x.as_ptr().cast_mut(), all, null()), qz1_status::Overlap);
    let layout = experts[0].gate_layout.cast_mut().cast::<f32>();
    assert_eq!(run(handle, COUNT, &values, &routed, layout, all, null()), qz1_status::Overlap);
    for manner in [&Manner::Nothing, &Manner::Twice, &Manner::Beyond, &Manner::LeaveOne] {
        assert_eq!(run(handle, COUNT, &values, &routed, to, all, &threads(manner)), qz1_status::ForEach);
    }
    assert_eq!(run(handle, COUNT, &values, &routed, to, all, null()), qz1_status::Ok);
    // SAFETY: made above and freed once.
    unsafe { qz1_experts_free(handle) };
    assert!(out.iter().all(|v| v.is_finite()));
}
