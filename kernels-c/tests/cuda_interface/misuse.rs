//! Invalid calls fail on every machine, with or without a driver.

use core::ptr::{null, null_mut};

use quant_kernels::*;
use quant_kernels_cpu::{Scales, WeightView};
use quant_kernels_cuda::layout::{Order, WeightLayout};

use crate::common::*;
use crate::experts;

/// Whether this is the status of a missing driver or, if there is a driver, of a missing context.
fn without_a_context(status: qz1_status) -> bool {
    use qz1_status as S;
    match quant_kernels_cuda::driver_available() {
        true => matches!(status, S::CudaContext | S::CudaFailed),
        false => status == S::CudaMissing,
    }
}

#[test]
fn missing_libraries_are_reported() {
    // SAFETY: every pointer is null or points to a live value.
    unsafe {
        let (status, text) = with_message(|m| qz1_cuda_require_device(m));
        match quant_kernels_cuda::device_count() {
            Ok(1..) => assert_eq!(status, qz1_status::Ok),
            Ok(0) => assert_eq!(status, qz1_status::CudaMissing),
            Err(e) => {
                assert!(matches!(status, qz1_status::CudaMissing | qz1_status::CudaFailed));
                assert_eq!(text, e.to_string());
            }
        }
        let (status, text) = with_message(|m| qz1_cuda_require_compiler(m));
        match quant_kernels_cuda::require_nvrtc() {
            Ok(()) => assert_eq!(status, qz1_status::Ok),
            Err(e) => assert_eq!((status, text), (qz1_status::CudaMissing, e.to_string())),
        }
        let elsewhere = std::thread::spawn(|| {
            let mut device: qz1_cuda_device = sized();
            let status = refused(|m| qz1_cuda_current_device(&mut device, m));
            (status, device.multiprocessors)
        });
        let (status, written) = elsewhere.join().unwrap();
        assert!(without_a_context(status), "{status:?}");
        assert_eq!(written, 0);
        assert_eq!(refused(|m| qz1_cuda_current_device(null_mut(), m)), qz1_status::Null);
    }
}

#[test]
fn handles_are_made_anywhere() {
    assert_eq!(qz1_has(QZ1_FEATURE_CUDA), 1);
    drop((Kernels::new(), Kernels::with(Some("")), Kernels::with(Some("/nowhere"))));
    // SAFETY: this test upholds the pointer contract of the C interface.
    unsafe {
        assert_eq!(refused(|m| qz1_cuda_kernels_new(null(), null_mut(), m)), qz1_status::Null);
        qz1_cuda_kernels_free(null_mut());
        qz1_cuda_plan_free(null_mut());
        let (mut bytes, mut tickets) = (7, 7);
        let status = refused(|m| qz1_cuda_plan_workspace(null(), &mut bytes, &mut tickets, m));
        assert_eq!((status, bytes, tickets), (qz1_status::Null, 7, 7));
    }
}

#[test]
fn layouts_are_those_of_the_library() {
    let matrix = Matrix::new([20, 192], 64, true);
    for (order, rust, sums) in [
        (QZ1_CUDA_ORDER_FLOAT, Order::Float, 0),
        (QZ1_CUDA_ORDER_INT8, Order::Int8, 0),
        (QZ1_CUDA_ORDER_INT8, Order::Int8, 1),
    ] {
        let layout = matrix.layout(order, sums);
        let (scales, zeros) = (Scales::Float(&matrix.scales), matrix.zeros.as_deref());
        let view = WeightView::with_scales(matrix.shape, 4, 64, &matrix.codes, scales, zeros).unwrap();
        let expected = WeightLayout::of(&view, rust, sums == 1).unwrap();
        assert_eq!((layout.bytes, layout.id), (expected.bytes() as u64, expected.id()));
        let mut bytes = vec![0; expected.bytes()];
        expected.pack(&view, &mut bytes).unwrap();
        assert!(matrix.packed(&layout) == bytes);
        let parts = qz1_cuda_layout { bytes: 0, id: 0, ..layout };
        let mut from: qz1_cuda_layout = sized();
        // SAFETY: every pointer is null or points to a live value.
        done(|m| unsafe { qz1_cuda_layout_from(&parts, &mut from, m) });
        assert_eq!(format!("{from:?}"), format!("{layout:?}"));
    }
}

#[test]
fn layouts_that_are_none() {
    let matrix = Matrix::new([20, 192], 64, true);
    let good = matrix.layout(QZ1_CUDA_ORDER_INT8, 1);
    let mut out = vec![0x55_u8; good.bytes as usize];
    let mut pack = |layout: &qz1_cuda_layout| {
        // SAFETY: every pointer is null or points to a live value.
        let status =
            refused(|m| unsafe { qz1_cuda_pack(&matrix.weights(), layout, out.as_mut_ptr(), out.len(), m) });
        assert!(status == qz1_status::Ok || out.iter().all(|b| *b == 0x55));
        status
    };
    let changes: [fn(&mut qz1_cuda_layout); 15] = [
        |l| l.format = 1,
        |l| l.format = 2,
        |l| l.format = 3,
        |l| l.order = QZ1_CUDA_ORDER_FLOAT,
        |l| l.order = 3,
        |l| l.code_bits = 8,
        |l| l.scales = QZ1_SCALES_F32,
        |l| l.scales = 0,
        |l| l.zeros = 0,
        |l| l.middle = 8,
        |l| l.sums = 0,
        |l| l.n = u64::MAX,
        |l| l.group_size = 32,
        |l| l.bytes += 256,
        |l| l.id ^= 1,
    ];
    for (i, change) in changes.iter().enumerate() {
        let mut layout = good;
        change(&mut layout);
        assert_eq!(pack(&layout), qz1_status::LayoutId, "{i}");
    }
    assert_eq!(pack(&qz1_cuda_layout { struct_size: 24, ..good }), qz1_status::StructSize);
    assert_eq!(pack(&good), qz1_status::Ok);

    let mut layout: qz1_cuda_layout = sized();
    // SAFETY: every pointer is null or points to a live value.
    unsafe {
        let weights = matrix.weights();
        let mut of = |order, sums| refused(|m| qz1_cuda_layout_of(&weights, order, sums, &mut layout, m));
        assert_eq!(of(0, 0), qz1_status::Scheme);
        assert_eq!(of(QZ1_CUDA_ORDER_FLOAT, 1), qz1_status::Scheme);
        let weights = Matrix::new([20, 192], 48, false);
        let status =
            refused(|m| qz1_cuda_layout_of(&weights.weights(), QZ1_CUDA_ORDER_INT8, 0, &mut layout, m));
        assert_eq!(status, qz1_status::Scheme);
        assert_eq!(refused(|m| qz1_cuda_layout_from(&good, null_mut(), m)), qz1_status::Null);
        let both = &raw mut layout;
        assert_eq!(refused(|m| qz1_cuda_layout_from(both, both, m)), qz1_status::Overlap);
        let (at, len) = (out.as_mut_ptr(), out.len());
        let short = refused(|m| qz1_cuda_pack(&matrix.weights(), &good, at, len - 1, m));
        assert_eq!(short, qz1_status::Length);
        let mut wrong = Matrix::new([20, 192], 64, true);
        wrong.codes[100] = 16;
        let wrong = wrong.weights();
        assert_eq!(refused(|m| qz1_cuda_pack(&wrong, &good, at, len, m)), qz1_status::Scheme);
        let mut pages: qz1_cuda_kv_layout = sized();
        for (kind, dim, tokens) in
            [(0, 64, 16), (QZ1_KV_4BIT, 40, 16), (QZ1_KV_8BIT, 512, 16), (QZ1_KV_F16, 64, 48)]
        {
            let status = refused(|m| qz1_cuda_kv_layout_of(kind, dim, tokens, &mut pages, m));
            assert_eq!(status, qz1_status::Scheme, "{kind} {dim} {tokens}");
        }
    }
}

struct Shapes {
    kernels: Kernels,
    layout: qz1_cuda_layout,
    pages: qz1_cuda_kv_layout,
    experts: [qz1_cuda_layout; 2],
}

impl Shapes {
    fn new() -> Self {
        let layout = Matrix::new([20, 192], 64, true).layout(QZ1_CUDA_ORDER_INT8, 0);
        let mut pages = sized();
        // SAFETY: every pointer is null or points to a live value.
        done(|m| unsafe { qz1_cuda_kv_layout_of(QZ1_KV_4BIT, 64, 16, &mut pages, m) });
        Self { kernels: Kernels::new(), layout, pages, experts: experts::layouts(QZ1_CUDA_ORDER_INT8) }
    }

    fn pack(&self) -> qz1_cuda_pack_shape {
        qz1_cuda_pack_shape { bits: 4, layout: &self.layout, ..sized() }
    }

    fn linear(&self) -> qz1_cuda_linear_shape {
        let (x_type, out_type) = (QZ1_CUDA_TYPE_INT8, QZ1_TYPE_F32);
        qz1_cuda_linear_shape { x_type, out_type, layout: &self.layout, m: 3, ..sized() }
    }

    fn experts(&self) -> qz1_cuda_experts_shape {
        experts::shape(&self.experts)
    }

    fn activation(&self) -> qz1_cuda_activation_shape {
        let (rows, x_type) = (QZ1_CUDA_ROWS_RMS_NORM, QZ1_TYPE_F16);
        qz1_cuda_activation_shape { rows, x_type, m: 3, k: 64, ..sized() }
    }

    fn append(&self) -> qz1_cuda_append_shape {
        let (x_type, layout) = (QZ1_TYPE_F16, &raw const self.pages);
        qz1_cuda_append_shape { x_type, layout, kv_heads: 2, tokens: 3, ..sized() }
    }

    fn decode(&self) -> qz1_cuda_decode_shape {
        qz1_cuda_decode_shape {
            query_type: QZ1_TYPE_F16,
            out_type: QZ1_TYPE_F32,
            layout: &self.pages,
            query_heads: 4,
            kv_heads: 2,
            sequences: 1,
            queries: 1,
            max_tokens: 100,
            ..sized()
        }
    }

    fn merge(&self) -> qz1_cuda_merge_shape {
        qz1_cuda_merge_shape { out_type: QZ1_TYPE_F16, parts: 2, rows: 4, head_dim: 64, ..sized() }
    }
}

type Make<S> = unsafe extern "C" fn(
    *const qz1_cuda_kernels,
    *const S,
    *mut *mut qz1_cuda_plan,
    *const qz1_message,
) -> qz1_status;

/// Returns the status of planning. On an error the handle must be null.
fn planned<S: Copy>(kernels: *const qz1_cuda_kernels, shape: *const S, make: Make<S>) -> qz1_status {
    let mut plan = core::ptr::dangling_mut();
    // SAFETY: every pointer is null or points to a live value.
    let status = refused(|m| unsafe { make(kernels, shape, &mut plan, m) });
    assert_eq!(plan.is_null(), status != qz1_status::Ok);
    // SAFETY: the handle was created above, or is null.
    unsafe { qz1_cuda_plan_free(plan) };
    status
}

/// Checks that hold for all families: a valid shape fails only because there is no context.
fn family<S: Copy>(shapes: &Shapes, good: S, make: Make<S>) {
    let kernels = shapes.kernels.0.cast_const();
    std::thread::scope(|scope| {
        // A new thread has no context.
        let (kernels, at) = (kernels as usize, (&raw const good) as usize);
        let elsewhere = scope.spawn(move || planned(kernels as *const _, at as *const S, make));
        let status = elsewhere.join().unwrap();
        assert!(without_a_context(status), "{status:?}");
    });
    assert_eq!(planned(null(), &good, make), qz1_status::Null);
    assert_eq!(planned(kernels, null(), make), qz1_status::Null);
    let odd = (&raw const good).wrapping_byte_add(1);
    assert_eq!(planned(kernels, odd, make), qz1_status::Misaligned);
    let mut sized = good;
    for size in [0, 4, size_of::<S>() as u32 - 8, size_of::<S>() as u32 + 4, u32::MAX] {
        // SAFETY: the first field is the size.
        unsafe { (&raw mut sized).cast::<u32>().write(size) };
        assert_eq!(planned(kernels, &sized, make), qz1_status::StructSize, "{size}");
    }
    let mut shape = good;
    // SAFETY: every pointer points to a live value; the plan's pointer is that of the shape.
    let overlaps = refused(|m| unsafe { make(kernels, &raw const shape, (&raw mut shape).cast(), m) });
    assert_eq!(overlaps, qz1_status::Overlap);
    // SAFETY: this test upholds the pointer contract of the C interface.
    assert_eq!(refused(|m| unsafe { make(kernels, &good, null_mut(), m) }), qz1_status::Null);
}

#[test]
fn plans_of_all_families_look_at_the_call() {
    let shapes = Shapes::new();
    family(&shapes, shapes.pack(), qz1_cuda_pack_plan);
    family(&shapes, shapes.linear(), qz1_cuda_linear_plan);
    family(&shapes, shapes.activation(), qz1_cuda_activation_plan);
    family(&shapes, shapes.append(), qz1_cuda_append_plan);
    family(&shapes, shapes.decode(), qz1_cuda_decode_plan);
    family(&shapes, shapes.merge(), qz1_cuda_merge_plan);
    family(&shapes, shapes.experts(), qz1_cuda_experts_plan);
}

#[test]
fn shapes_that_are_none() {
    use qz1_status::{LayoutId, Mismatch, Null, Scheme, StructSize, TooLarge};
    let shapes = Shapes::new();
    let kernels = shapes.kernels.0.cast_const();

    let pack = |change: fn(&mut qz1_cuda_pack_shape)| {
        let mut shape = shapes.pack();
        change(&mut shape);
        planned(kernels, &shape, qz1_cuda_pack_plan)
    };
    assert_eq!(pack(|s| s.bits = 1), Scheme);
    assert_eq!(pack(|s| s.bits = 8), Scheme);
    assert_eq!(pack(|s| s.layout = null()), Null);

    let other = qz1_cuda_layout { id: 1, ..shapes.layout };
    let linear = |change: &dyn Fn(&mut qz1_cuda_linear_shape)| {
        let mut shape = shapes.linear();
        change(&mut shape);
        planned(kernels, &shape, qz1_cuda_linear_plan)
    };
    assert_eq!(linear(&|s| s.x_type = QZ1_TYPE_F16), Scheme);
    assert_eq!(linear(&|s| s.x_type = QZ1_TYPE_F32), Scheme);
    assert_eq!(linear(&|s| s.out_type = QZ1_CUDA_TYPE_INT8), Scheme);
    assert_eq!(linear(&|s| s.layout = &other), LayoutId);
    assert_eq!(linear(&|s| s.layout = null()), Null);
    assert_eq!(linear(&|s| s.reserved = 1), StructSize);

    let float = experts::layouts(QZ1_CUDA_ORDER_FLOAT);
    let wrong = qz1_cuda_layout { id: 1, ..float[0] };
    let experts = |change: &dyn Fn(&mut qz1_cuda_experts_shape)| {
        let mut shape = shapes.experts();
        change(&mut shape);
        planned(kernels, &shape, qz1_cuda_experts_plan)
    };
    assert_eq!(experts(&|s| s.gate = 0), Scheme);
    assert_eq!(experts(&|s| s.limit = -1.0), Scheme);
    assert_eq!(experts(&|s| s.limit = f32::NAN), Scheme);
    assert_eq!(experts(&|s| s.x_type = QZ1_CUDA_TYPE_INT8), Scheme);
    assert_eq!(experts(&|s| s.out_type = 0), Scheme);
    // Floats are multiplied in the type of the activations, which cannot be f32.
    assert_eq!(experts(&|s| s.gate_up_layout = &float[0]), Scheme);
    assert_eq!(experts(&|s| s.gate_up_layout = &wrong), LayoutId);
    assert_eq!(experts(&|s| s.down_layout = null()), Null);
    assert_eq!(experts(&|s| s.down_layout = s.gate_up_layout), Mismatch);
    assert_eq!(experts(&|s| s.experts = 0), Scheme);
    assert_eq!(experts(&|s| s.experts = usize::MAX), TooLarge);
    assert_eq!(experts(&|s| s.tokens = usize::MAX), TooLarge);
    assert_eq!(experts(&|s| s.top_k = 1 << 31), TooLarge);

    let activation = |change: fn(&mut qz1_cuda_activation_shape)| {
        let mut shape = shapes.activation();
        change(&mut shape);
        planned(kernels, &shape, qz1_cuda_activation_plan)
    };
    assert_eq!(activation(|s| s.k = 0), Scheme);
    assert_eq!(activation(|s| s.k = 360_449), TooLarge);
    assert_eq!(activation(|s| s.k = usize::MAX), TooLarge);
    assert_eq!(activation(|s| s.m = 1 << 31), TooLarge);
    assert_eq!(activation(|s| s.rows = 0), Scheme);
    assert_eq!(activation(|s| s.x_type = 0), Scheme);
    assert_eq!(activation(|s| s.weight_type = 9), Scheme);
    assert_eq!(activation(|s| s.fixed = 2), Scheme);
    assert_eq!(activation(|s| s.unaligned = 2), Scheme);
    assert_eq!(activation(|s| s.group = 31), Scheme);
    assert_eq!(activation(|s| s.x_stride = 63), Scheme);
    assert_eq!(activation(|s| s.x_stride = 65), Scheme);
    assert_eq!(activation(|s| s.code_stride = 65), Scheme);

    let other = qz1_cuda_kv_layout { page_tokens: 32, ..shapes.pages };
    let append = |change: &dyn Fn(&mut qz1_cuda_append_shape)| {
        let mut shape = shapes.append();
        change(&mut shape);
        planned(kernels, &shape, qz1_cuda_append_plan)
    };
    assert_eq!(append(&|s| s.layout = &other), LayoutId);
    assert_eq!(append(&|s| s.x_type = QZ1_CUDA_TYPE_INT8), Scheme);
    assert_eq!(append(&|s| s.kv_heads = 0), Scheme);
    assert_eq!(append(&|s| s.kv_heads = usize::MAX), TooLarge);
    assert_eq!(append(&|s| s.tokens = usize::MAX), TooLarge);

    let decode = |change: &dyn Fn(&mut qz1_cuda_decode_shape)| {
        let mut shape = shapes.decode();
        change(&mut shape);
        planned(kernels, &shape, qz1_cuda_decode_plan)
    };
    assert_eq!(decode(&|s| s.layout = &other), LayoutId);
    assert_eq!(decode(&|s| s.query_type = QZ1_TYPE_F32), Scheme);
    assert_eq!(decode(&|s| s.out_type = 0), Scheme);
    assert_eq!(decode(&|s| s.query_heads = 3), Mismatch);
    assert_eq!(decode(&|s| s.kv_heads = 0), Mismatch);
    assert_eq!(decode(&|s| s.query_heads = usize::MAX), TooLarge);
    assert_eq!(decode(&|s| s.queries = usize::MAX), TooLarge);
    assert_eq!(decode(&|s| s.sequences = 65_536), TooLarge);
    assert_eq!(decode(&|s| s.max_tokens = usize::MAX), TooLarge);
    assert_eq!(decode(&|s| s.reserved = 1), StructSize);

    let merge = |change: fn(&mut qz1_cuda_merge_shape)| {
        let mut shape = shapes.merge();
        change(&mut shape);
        planned(kernels, &shape, qz1_cuda_merge_plan)
    };
    assert_eq!(merge(|s| s.out_type = 0), Scheme);
    assert_eq!(merge(|s| s.parts = 1 << 32), TooLarge);
    assert_eq!(merge(|s| s.rows = 1 << 32), TooLarge);
    assert_eq!(merge(|s| (s.rows, s.head_dim) = (u32::MAX as usize, u32::MAX as usize)), TooLarge);
}
