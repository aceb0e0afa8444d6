//! Launches with invalid arguments fail.

use core::ptr::{null, null_mut};

use quant_kernels::*;

use crate::common::*;
use crate::driver;

/// A region that is never accessed: launches with it either fail, or have no tokens.
fn at(address: u64, bytes: usize) -> qz1_cuda_region {
    qz1_cuda_region { address, bytes: bytes as u64 }
}

type Launch<A> = unsafe extern "C" fn(
    *const qz1_cuda_plan,
    *const A,
    *mut core::ffi::c_void,
    *const qz1_message,
) -> qz1_status;

/// Launches with one change of the arguments, which must fail; returns the status.
#[track_caller]
fn launched<A: Copy>(plan: &Plan, good: &A, launch: Launch<A>, change: impl Fn(&mut A)) -> qz1_status {
    let mut arguments = *good;
    change(&mut arguments);
    // SAFETY: the plan is live; a launch that is refused accesses no memory.
    let status = refused(|m| unsafe { launch(plan.0, &arguments, null_mut(), m) });
    assert_ne!(status, qz1_status::Ok, "launched on invalid memory");
    status
}

type Field<A> = fn(&mut A) -> &mut qz1_cuda_region;

/// A launch fails if any region is too short, null, misaligned or beyond the address space, or a required one is absent.
fn regions<A: Copy>(plan: &Plan, good: &A, launch: Launch<A>, fields: &[(Field<A>, u64, bool)]) {
    use qz1_status::{Length, Misaligned, Null, TooLarge};
    for (i, (field, align, optional)) in fields.iter().enumerate() {
        let with = |change: &dyn Fn(&mut qz1_cuda_region)| {
            launched(plan, good, launch, |arguments| change(field(arguments)))
        };
        assert_eq!(with(&|r| r.bytes -= 1), Length, "{i}");
        assert_eq!(with(&|r| r.address = 0), Null, "{i}");
        assert_eq!(with(&|r| r.bytes = u64::MAX), TooLarge, "{i}");
        if !optional {
            assert_eq!(with(&|r| *r = NONE), Length, "{i}");
        }
        if *align > 1 {
            assert_eq!(with(&|r| r.address += align / 2), Misaligned, "{i}");
        }
    }
}

fn family<A: Copy>(plan: &Plan, other: &Plan, good: &A, launch: Launch<A>) {
    use qz1_status::{Misaligned, Mismatch, Null, StructSize};
    // SAFETY: this test upholds the pointer contract of the C interface.
    unsafe {
        assert_eq!(refused(|m| launch(null(), good, null_mut(), m)), Null);
        assert_eq!(refused(|m| launch(plan.0, null(), null_mut(), m)), Null);
        let odd = (&raw const *good).wrapping_byte_add(1);
        assert_eq!(refused(|m| launch(plan.0, odd, null_mut(), m)), Misaligned);
        assert_eq!(refused(|m| launch(other.0, good, null_mut(), m)), Mismatch);
    }
    let resized = launched(plan, good, launch, |arguments| {
        // SAFETY: the first field is the size.
        unsafe { (&raw mut *arguments).cast::<u32>().write(8) };
    });
    assert_eq!(resized, StructSize);
}

#[test]
fn launches_of_linears() {
    if !on_gpu() {
        return;
    }
    driver::context();
    let kernels = Kernels::new();
    let [n, k, m] = [40, 2048, 5];
    let layout = Matrix::new([n, k], 128, true).layout(QZ1_CUDA_ORDER_INT8, 0);
    let shape = |m| qz1_cuda_linear_shape {
        x_type: QZ1_CUDA_TYPE_INT8,
        out_type: QZ1_TYPE_F32,
        layout: &layout,
        m,
        ..sized()
    };
    let plan = Plan::new(&kernels, &shape(m), qz1_cuda_linear_plan);
    let empty = Plan::new(&kernels, &shape(0), qz1_cuda_linear_plan);
    let packing = qz1_cuda_pack_shape { bits: 4, layout: &layout, ..sized() };
    let packing = Plan::new(&kernels, &packing, qz1_cuda_pack_plan);
    let good = qz1_cuda_linear_arguments {
        weight: at(0x1000, layout.bytes as usize),
        x: at(0x1000, m * k),
        x_scales: at(0x1000, 4 * m),
        bias: at(0x1000, 4 * n),
        out: at(0x1000, 4 * m * n),
        tickets: at(0x1000, plan.workspace().1),
        workspace: at(0x1000, plan.workspace().0),
        ..sized()
    };
    let launch = qz1_cuda_linear_launch;
    family(&plan, &packing, &good, launch);
    regions(
        &plan,
        &good,
        launch,
        &[
            (|a| &mut a.weight, 256, false),
            (|a| &mut a.x, 16, false),
            (|a| &mut a.x_scales, 4, false),
            (|a| &mut a.bias, 4, true),
            (|a| &mut a.out, 4, false),
            (|a| &mut a.tickets, 256, false),
            (|a| &mut a.workspace, 256, false),
        ],
    );
    let with = |change: fn(&mut qz1_cuda_linear_arguments)| launched(&plan, &good, launch, change);
    assert_eq!(with(|a| a.x_zero = 1), qz1_status::Scheme);
    assert_eq!(with(|a| a.x_stride = 2047), qz1_status::Mismatch);
    assert_eq!(with(|a| a.x_stride = 2049), qz1_status::Scheme);
    assert_eq!(with(|a| a.x_stride = 2064), qz1_status::Length);
    assert_eq!(with(|a| a.out_stride = 39), qz1_status::Mismatch);
    assert_eq!(with(|a| a.out_stride = usize::MAX), qz1_status::Mismatch);
    // Without tokens nothing is launched, and all regions except the weights may be absent.
    assert_eq!(empty.workspace().0, 0);
    let arguments = qz1_cuda_linear_arguments { weight: good.weight, ..sized() };
    // SAFETY: nothing is launched.
    done(|m| unsafe { launch(empty.0, &arguments, null_mut(), m) });

    let elsewhere = std::thread::scope(|scope| {
        let (plan, good) = (plan.0 as usize, &raw const good as usize);
        let run = move || {
            driver::no_context();
            // SAFETY: the plan and its arguments are live; without a context nothing is launched.
            unsafe { refused(|m| qz1_cuda_linear_launch(plan as *const _, good as *const _, null_mut(), m)) }
        };
        scope.spawn(run).join().unwrap()
    });
    assert_eq!(elsewhere, qz1_status::CudaFailed);
    let mut device: qz1_cuda_device = sized();
    // SAFETY: every pointer is null or points to a live value.
    done(|m| unsafe { qz1_cuda_current_device(&mut device, m) });
    assert!(device.capability_major >= 8 && device.multiprocessors > 0 && device.shared_of_block > 49_152);

    let (codes, groups) = (n * k, n * k / 128);
    let good = qz1_cuda_pack_arguments {
        codes: at(0x1001, codes),
        scales: at(0x1004, 4 * groups),
        zeros: at(0x1001, groups),
        fault: at(0x1004, 4),
        out: at(0x1000, layout.bytes as usize),
        ..sized()
    };
    family(&packing, &plan, &good, qz1_cuda_pack_launch);
    regions(
        &packing,
        &good,
        qz1_cuda_pack_launch,
        &[
            (|a| &mut a.codes, 1, false),
            (|a| &mut a.scales, 4, false),
            (|a| &mut a.zeros, 1, false),
            (|a| &mut a.fault, 4, false),
            (|a| &mut a.out, 256, false),
        ],
    );
}

#[test]
fn launches_of_activations() {
    if !on_gpu() {
        return;
    }
    driver::context();
    let kernels = Kernels::new();
    let [m, k] = [3, 64];
    let shape = |rows, fixed, group| qz1_cuda_activation_shape {
        rows,
        x_type: QZ1_TYPE_F16,
        fixed,
        m,
        k,
        group,
        ..sized()
    };
    let make = |shape| Plan::new(&kernels, &shape, qz1_cuda_activation_plan);
    let norm = make(shape(QZ1_CUDA_ROWS_RESIDUAL_RMS_NORM, 0, 32));
    let silu = make(shape(QZ1_CUDA_ROWS_SILU_MUL, 1, 0));
    let merge = qz1_cuda_merge_shape { out_type: QZ1_TYPE_F16, parts: 2, rows: 4, head_dim: 64, ..sized() };
    let merge = Plan::new(&kernels, &merge, qz1_cuda_merge_plan);
    let good = qz1_cuda_activation_arguments {
        eps: 1e-5,
        scale: 0.1,
        x: at(0x1000, 2 * m * k),
        up: at(0x1000, 2 * m * k),
        residual: at(0x1000, 2 * m * k),
        weight: at(0x1000, 2 * k),
        codes: at(0x1000, m * k),
        scales: at(0x1000, 4 * m),
        row_sums: at(0x1000, 4 * m),
        group_sums: at(0x1000, 4 * m * 2),
        ..sized()
    };
    let launch = qz1_cuda_activation_launch;
    family(&norm, &merge, &good, launch);
    regions(
        &norm,
        &good,
        launch,
        &[
            (|a| &mut a.x, 16, false),
            (|a| &mut a.residual, 16, false),
            (|a| &mut a.weight, 16, false),
            (|a| &mut a.codes, 16, false),
            (|a| &mut a.scales, 4, false),
            (|a| &mut a.row_sums, 4, true),
            (|a| &mut a.group_sums, 4, false),
        ],
    );
    regions(&silu, &good, launch, &[(|a| &mut a.x, 16, false), (|a| &mut a.up, 16, false)]);
    for eps in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert_eq!(launched(&norm, &good, launch, |a| a.eps = eps), qz1_status::Scheme);
    }
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-45] {
        assert_eq!(launched(&silu, &good, launch, |a| a.scale = scale), qz1_status::Scheme);
    }
    assert_eq!(launched(&silu, &good, launch, |a| a.zero = 128), qz1_status::Scheme);

    let good = qz1_cuda_merge_arguments {
        sums: at(0x1004, 2 * 4 * 64 * 4),
        logs: at(0x1004, 2 * 4 * 4),
        out: at(0x1002, 4 * 64 * 2),
        lse: at(0x1004, 4 * 4),
        ..sized()
    };
    family(&merge, &norm, &good, qz1_cuda_merge_launch);
    regions(
        &merge,
        &good,
        qz1_cuda_merge_launch,
        &[
            (|a| &mut a.sums, 4, false),
            (|a| &mut a.logs, 4, false),
            (|a| &mut a.out, 2, false),
            (|a| &mut a.lse, 4, true),
        ],
    );
}

#[test]
fn launches_of_experts() {
    if !on_gpu() {
        return;
    }
    use crate::experts::{COUNT, HIDDEN, TOKENS, TOP_K, layouts, shape};
    driver::context();
    let kernels = Kernels::new();
    let layouts = layouts(QZ1_CUDA_ORDER_INT8);
    let shape = shape(&layouts);
    let plan = Plan::new(&kernels, &shape, qz1_cuda_experts_plan);
    let empty = qz1_cuda_experts_shape { tokens: 0, ..shape };
    let empty = Plan::new(&kernels, &empty, qz1_cuda_experts_plan);
    let merge = qz1_cuda_merge_shape { out_type: QZ1_TYPE_F16, parts: 2, rows: 4, head_dim: 64, ..sized() };
    let merge = Plan::new(&kernels, &merge, qz1_cuda_merge_plan);
    let good = qz1_cuda_experts_arguments {
        descriptors: at(0x1000, QZ1_CUDA_EXPERT_BYTES as usize * COUNT),
        x: at(0x1000, 4 * TOKENS * HIDDEN),
        experts: at(0x1000, 4 * TOKENS * TOP_K),
        weights: at(0x1000, 4 * TOKENS * TOP_K),
        out: at(0x1000, 4 * TOKENS * HIDDEN),
        tickets: at(0x1000, plan.workspace().1),
        workspace: at(0x1000, plan.workspace().0),
        ..sized()
    };
    let launch = qz1_cuda_experts_launch;
    family(&plan, &merge, &good, launch);
    regions(
        &plan,
        &good,
        launch,
        &[
            (|a| &mut a.descriptors, 16, false),
            (|a| &mut a.x, 16, false),
            (|a| &mut a.experts, 4, false),
            (|a| &mut a.weights, 4, false),
            (|a| &mut a.out, 16, false),
            (|a| &mut a.tickets, 256, false),
            (|a| &mut a.workspace, 256, false),
        ],
    );
    assert_eq!(launched(&plan, &good, launch, |a| a.reserved = 1), qz1_status::StructSize);
    let arguments: qz1_cuda_experts_arguments = sized();
    // SAFETY: without tokens nothing is launched.
    done(|m| unsafe { launch(empty.0, &arguments, null_mut(), m) });
}

#[test]
fn launches_on_pages() {
    if !on_gpu() {
        return;
    }
    driver::context();
    let kernels = Kernels::new();
    let mut layout: qz1_cuda_kv_layout = sized();
    // SAFETY: every pointer is null or points to a live value.
    done(|m| unsafe { qz1_cuda_kv_layout_of(QZ1_KV_8BIT, 64, 16, &mut layout, m) });
    let [kv_heads, tokens, width] = [2, 3, 128];
    let shape = qz1_cuda_append_shape { x_type: QZ1_TYPE_F16, layout: &layout, kv_heads, tokens, ..sized() };
    let append = Plan::new(&kernels, &shape, qz1_cuda_append_plan);
    let shape = qz1_cuda_decode_shape {
        query_type: QZ1_TYPE_F16,
        out_type: QZ1_TYPE_F32,
        layout: &layout,
        query_heads: 4,
        kv_heads,
        sequences: 2,
        queries: 1,
        max_tokens: 2000,
        ..sized()
    };
    let decode = Plan::new(&kernels, &shape, qz1_cuda_decode_plan);

    let page = layout.page_bytes as usize;
    let good = qz1_cuda_append_arguments {
        keys: at(0x1000, 2 * tokens * width),
        values: at(0x1000, 2 * tokens * width),
        sequence: at(0x1000, 4 * tokens),
        position: at(0x1000, 4 * tokens),
        table: at(0x1000, 4 * 5),
        pages: at(0x1000, 4 * kv_heads * page),
        refused: at(0x1004, 4),
        table_stride: 5,
        ..sized()
    };
    let launch = qz1_cuda_append_launch;
    family(&append, &decode, &good, launch);
    regions(
        &append,
        &good,
        launch,
        &[
            (|a| &mut a.keys, 16, false),
            (|a| &mut a.values, 16, false),
            (|a| &mut a.sequence, 16, false),
            (|a| &mut a.position, 16, false),
            (|a| &mut a.table, 16, false),
            (|a| &mut a.refused, 4, true),
        ],
    );
    let with = |change: fn(&mut qz1_cuda_append_arguments)| launched(&append, &good, launch, change);
    assert_eq!(with(|a| a.pages.address = 0x1008), qz1_status::Misaligned);
    assert_eq!(with(|a| a.pages.address = 0), qz1_status::Null);
    assert_eq!(with(|a| a.key_stride = 127), qz1_status::Mismatch);
    assert_eq!(with(|a| a.value_stride = 132), qz1_status::Misaligned);
    assert_eq!(with(|a| a.key_stride = usize::MAX), qz1_status::TooLarge);
    assert_eq!(with(|a| a.page_stride = 16), qz1_status::Mismatch);
    assert_eq!(with(|a| a.head_stride = usize::MAX - 15), qz1_status::TooLarge);
    assert_eq!(with(|a| a.table_stride = 1 << 32), qz1_status::TooLarge);

    let good = qz1_cuda_decode_arguments {
        scale: 0.125,
        query: at(0x1000, 2 * 2 * 4 * 64),
        pages: at(0x1000, kv_heads * page),
        table: at(0x1000, 4 * (5 + 1)),
        tokens: at(0x1000, 4 * 2),
        first: at(0x1000, 4 * 2),
        out: at(0x1004, 4 * 2 * 4 * 64),
        lse: at(0x1004, 4 * 2 * 4),
        tickets: at(0x1000, decode.workspace().1),
        workspace: at(0x1000, decode.workspace().0),
        table_stride: 5,
        count_stride: 1,
        ..sized()
    };
    let launch = qz1_cuda_decode_launch;
    family(&decode, &append, &good, launch);
    regions(
        &decode,
        &good,
        launch,
        &[
            (|a| &mut a.query, 16, false),
            (|a| &mut a.pages, 16, false),
            (|a| &mut a.table, 16, false),
            (|a| &mut a.tokens, 16, false),
            (|a| &mut a.first, 16, true),
            (|a| &mut a.out, 4, false),
            (|a| &mut a.lse, 4, true),
            (|a| &mut a.tickets, 256, false),
            (|a| &mut a.workspace, 256, false),
        ],
    );
    let with = |change: fn(&mut qz1_cuda_decode_arguments)| launched(&decode, &good, launch, change);
    assert_eq!(with(|a| a.scale = f32::NAN), qz1_status::Scheme);
    assert_eq!(with(|a| a.query_stride = 255), qz1_status::Mismatch);
    assert_eq!(with(|a| a.query_stride = 258), qz1_status::Misaligned);
    assert_eq!(with(|a| a.table_head_stride = 1), qz1_status::Length);
    assert_eq!(with(|a| a.count_stride = 1 << 32), qz1_status::Length);
    assert_eq!(with(|a| a.table_stride = usize::MAX), qz1_status::TooLarge);
}
