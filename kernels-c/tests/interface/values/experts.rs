//! Experts through the C interface give bit-identical results to the Rust interface.

use core::ptr::{null, null_mut};

use half::bf16;
use quant_kernels::*;
use quant_kernels_cpu::experts::{
    Expert, ExpertGate, ExpertRows, ExpertWeight, Experts, ExpertsPlan, ExpertsWorkspace, Routing,
};
use quant_kernels_cpu::{Bf16Parts, Element, IsaToken, Serial};

use crate::common::experts::*;
use crate::common::*;

const TOKENS: usize = 30;

fn check<E: Element>(kind: u32, of: fn(f32) -> E) {
    let layer = Layer::new();
    let experts = layer.experts();
    let x: Vec<E> = noise(TOKENS * HIDDEN, 37).into_iter().map(of).collect();
    let numbers: Vec<u32> =
        (0..2 * TOKENS as u32).map(|i| if i % 7 == 3 { QZ1_NO_EXPERT } else { i % 3 }).collect();
    let weights = noise(2 * TOKENS, 13);
    let own: Vec<Expert<'_>> = (layer.parts.iter().enumerate())
        .map(|(i, parts)| {
            let [gate, up, down] = [0, 1, 2].map(|p| {
                let bias = (i == 0).then_some(&parts[p].bias[..]);
                ExpertWeight { weight: parts[p].packed.view(), bias }
            });
            Expert { gate, up, down }
        })
        .collect();
    let own = Experts::new(&own).unwrap();
    let rows = [
        (QZ1_EXPERT_ROWS_INT8, ExpertRows::Int8),
        (QZ1_EXPERT_ROWS_FLOAT, ExpertRows::Float(Bf16Parts::default())),
    ];
    let gates = [
        (QZ1_GATE_SILU, ExpertGate::Silu),
        (QZ1_GATE_GELU_TANH, ExpertGate::GeluTanh),
        (QZ1_GATE_CLAMPED, ExpertGate::Clamped { alpha: 1.7, limit: 0.8 }),
    ];
    for ((c_rows, rows), (c_gate, gate)) in rows.into_iter().flat_map(|rows| gates.map(|gate| (rows, gate))) {
        let plan = ExpertsPlan::new::<E>(&own, IsaToken::detect(), rows, gate, TOKENS, 2).unwrap();
        let mut workspace = ExpertsWorkspace::default();
        workspace.reserve(&plan).unwrap();
        let mut expected = vec![0.0; x.len()];
        let routed = Routing { top_k: 2, experts: &numbers, weights: &weights };
        own.run(&plan, &x, &routed, &mut workspace, &mut expected, &Serial).unwrap();

        let config = config(TOKENS, kind, c_rows, c_gate);
        let (mut handle, mut bytes) = (null_mut(), 0);
        let values = qz1_values {
            struct_size: size_of::<qz1_values>() as u32,
            kind,
            data: x.as_ptr().cast(),
            len: x.len(),
        };
        let routed = routing(&numbers, &weights);
        // SAFETY: every pointer is null or points to a live value of the length passed with it.
        unsafe {
            let new = qz1_experts_new(experts.as_ptr(), COUNT, &config, &mut bytes, &mut handle, null());
            assert_eq!((new, bytes), (qz1_status::Ok, plan.workspace_bytes()));
            for parallel in [None, Some(threads(&Manner::Right))] {
                let mut out = vec![f32::NAN; x.len()];
                let status = qz1_experts_run(
                    handle,
                    experts.as_ptr(),
                    COUNT,
                    &values,
                    &routed,
                    out.as_mut_ptr(),
                    out.len(),
                    pointer(parallel.as_ref()),
                    null(),
                );
                assert_eq!((status, bits(&out)), (qz1_status::Ok, bits(&expected)));
            }
            qz1_experts_free(handle);
        }
    }
}

#[test]
fn experts() {
    assert_eq!(qz1_has(QZ1_FEATURE_EXPERTS), 1);
    check(QZ1_TYPE_F32, |v| v);
    check(QZ1_TYPE_BF16, bf16::from_f32);
    // SAFETY: `qz1_experts_free` allows null.
    unsafe { qz1_experts_free(null_mut()) };
}
