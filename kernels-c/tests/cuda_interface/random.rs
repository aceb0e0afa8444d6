//! Random shapes and arguments are accepted or rejected; none gives an internal error.

use core::ptr::null_mut;

use quant_kernels::*;

use crate::common::*;
use crate::driver;
use crate::experts;

/// Common sizes, and numbers at which overflow is likely.
const NUMBERS: [u64; 24] = [
    0,
    1,
    2,
    3,
    4,
    8,
    16,
    32,
    64,
    128,
    192,
    1024,
    65_535,
    65_536,
    360_448,
    (1 << 30) - 1024,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 61,
    1 << 63,
    u64::MAX - 15,
    u64::MAX,
];

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }

    /// A structure with its size, small 32-bit numbers in the rest of its first 16 bytes, and after them 64-bit
    /// numbers from the list above.
    fn fields<T: Copy>(&mut self) -> T {
        let mut of = sized::<T>();
        let words = (&raw mut of).cast::<u32>();
        let len = size_of::<T>() / 4;
        for i in (1..len.min(4)).chain((4..len).step_by(2)) {
            let number = if i < 4 { self.below(5) as u64 } else { NUMBERS[self.below(NUMBERS.len())] };
            // SAFETY: writes within a structure of numbers, and of pointers that are set before they are used.
            unsafe {
                words.add(i).write(number as u32);
                if i >= 4 {
                    words.add(i + 1).write((number >> 32) as u32);
                }
            }
        }
        of
    }
}

/// Without a context, no plan can be made.
fn plans<S: Copy>(
    kernels: &Kernels,
    make: unsafe extern "C" fn(
        *const qz1_cuda_kernels,
        *const S,
        *mut *mut qz1_cuda_plan,
        *const qz1_message,
    ) -> qz1_status,
    settle: impl Fn(&mut S),
) {
    let mut random = Random(7);
    let mut shapes = 0;
    for _ in 0..20_000 {
        let mut shape = random.fields::<S>();
        settle(&mut shape);
        let mut plan = null_mut();
        // SAFETY: every pointer is null or points to a live value.
        let (status, text) = with_message(|m| unsafe { make(kernels.0, &shape, &mut plan, m) });
        assert!(status != qz1_status::Ok && status != qz1_status::Internal, "{text}");
        shapes += u32::from(status as u32 >= qz1_status::CudaMissing as u32);
    }
    assert!(shapes > 0, "no shape was valid");
}

#[test]
fn any_shapes() {
    let without_a_context = std::thread::spawn(|| {
        let layout = Matrix::new([20, 192], 64, true).layout(QZ1_CUDA_ORDER_INT8, 0);
        let (mut pages, kernels): (qz1_cuda_kv_layout, _) = (sized(), Kernels::new());
        // SAFETY: every pointer is null or points to a live value.
        done(|m| unsafe { qz1_cuda_kv_layout_of(QZ1_KV_4BIT, 64, 16, &mut pages, m) });
        plans(&kernels, qz1_cuda_pack_plan, |s| s.layout = &layout);
        plans(&kernels, qz1_cuda_linear_plan, |s| (s.layout, s.reserved) = (&layout, 0));
        plans(&kernels, qz1_cuda_activation_plan, |s| {
            (s.fixed, s.unaligned) = (s.fixed % 2, s.unaligned % 2);
        });
        plans(&kernels, qz1_cuda_append_plan, |s| s.layout = &pages);
        plans(&kernels, qz1_cuda_decode_plan, |s| (s.layout, s.reserved) = (&pages, 0));
        plans(&kernels, qz1_cuda_merge_plan, |_| {});
        let layouts = experts::layouts(QZ1_CUDA_ORDER_INT8);
        plans(&kernels, qz1_cuda_experts_plan, |s| {
            (s.gate_up_layout, s.down_layout) = (&layouts[0], &layouts[1]);
            (s.x_type, s.out_type) = (s.x_type % 4, s.out_type % 4);
        });
    });
    without_a_context.join().unwrap();
}

#[test]
fn any_layouts() {
    let mut random = Random(11);
    let mut layouts = 0;
    for _ in 0..20_000 {
        let mut parts = random.fields::<qz1_cuda_layout>();
        (parts.zeros, parts.sums, parts.format) = (parts.zeros % 2, parts.sums % 2, random.below(4) as u32);
        (parts.middle, parts.code_bits) = (8 * (1 - parts.zeros), 4 * (1 + random.below(2) as u32));
        if parts.format > 0 {
            (parts.middle, parts.zeros) = (0, 0);
        }
        let mut layout: qz1_cuda_layout = sized();
        // SAFETY: every pointer is null or points to a live value.
        let (status, text) = with_message(|m| unsafe { qz1_cuda_layout_from(&parts, &mut layout, m) });
        assert_ne!(status, qz1_status::Internal, "{text}");
        layouts += u32::from(status == qz1_status::Ok);
    }
    assert!(layouts > 0, "no layout was valid");
}

fn launches<A: Copy>(
    plan: &Plan,
    launch: unsafe extern "C" fn(
        *const qz1_cuda_plan,
        *const A,
        *mut core::ffi::c_void,
        *const qz1_message,
    ) -> qz1_status,
    lacking: impl Fn(&mut A),
) {
    let mut random = Random(13);
    for _ in 0..20_000 {
        let mut arguments = random.fields::<A>();
        lacking(&mut arguments);
        // SAFETY: a launch that is refused accesses no memory.
        let (status, text) = with_message(|m| unsafe { launch(plan.0, &arguments, null_mut(), m) });
        assert!(status != qz1_status::Ok && status != qz1_status::Internal, "{text}");
    }
}

#[test]
fn any_arguments() {
    if !on_gpu() {
        return;
    }
    driver::context();
    let kernels = Kernels::new();
    let layout = Matrix::new([40, 2048], 128, true).layout(QZ1_CUDA_ORDER_INT8, 0);
    let shape = |m| qz1_cuda_linear_shape {
        x_type: QZ1_CUDA_TYPE_INT8,
        out_type: QZ1_TYPE_F32,
        layout: &layout,
        m,
        ..sized()
    };
    let plan = Plan::new(&kernels, &shape(5), qz1_cuda_linear_plan);
    launches(&plan, qz1_cuda_linear_launch, |a| a.workspace = NONE);
    for m in NUMBERS.into_iter().filter(|&m| m >= (1 << 30) - 1024) {
        let mut none = null_mut();
        // SAFETY: every pointer is null or points to a live value.
        let status = refused(|message| unsafe {
            qz1_cuda_linear_plan(kernels.0, &shape(m as usize), &mut none, message)
        });
        assert_eq!(status, qz1_status::TooLarge, "{m}");
    }
    let shape = qz1_cuda_pack_shape { bits: 4, layout: &layout, ..sized() };
    launches(&Plan::new(&kernels, &shape, qz1_cuda_pack_plan), qz1_cuda_pack_launch, |a| a.out = NONE);
    let (rows, x_type) = (QZ1_CUDA_ROWS_RESIDUAL_RMS_NORM, QZ1_TYPE_F16);
    let shape = qz1_cuda_activation_shape { rows, x_type, m: 3, k: 64, ..sized() };
    let plan = Plan::new(&kernels, &shape, qz1_cuda_activation_plan);
    launches(&plan, qz1_cuda_activation_launch, |a| a.residual = NONE);

    let mut layout: qz1_cuda_kv_layout = sized();
    // SAFETY: every pointer is null or points to a live value.
    done(|m| unsafe { qz1_cuda_kv_layout_of(QZ1_KV_8BIT, 64, 16, &mut layout, m) });
    let shape = qz1_cuda_append_shape { x_type, layout: &layout, kv_heads: 2, tokens: 3, ..sized() };
    let plan = Plan::new(&kernels, &shape, qz1_cuda_append_plan);
    launches(&plan, qz1_cuda_append_launch, |a| (a.reserved, a.position) = (0, NONE));
    let shape = qz1_cuda_decode_shape {
        query_type: QZ1_TYPE_F16,
        out_type: QZ1_TYPE_F32,
        layout: &layout,
        query_heads: 4,
        kv_heads: 2,
        sequences: 2,
        queries: 1,
        max_tokens: 2000,
        ..sized()
    };
    let plan = Plan::new(&kernels, &shape, qz1_cuda_decode_plan);
    launches(&plan, qz1_cuda_decode_launch, |a| (a.scale, a.workspace) = (1.0, NONE));
    let shape = qz1_cuda_merge_shape { out_type: x_type, parts: 2, rows: 4, head_dim: 64, ..sized() };
    let plan = Plan::new(&kernels, &shape, qz1_cuda_merge_plan);
    launches(&plan, qz1_cuda_merge_launch, |a| (a.reserved, a.out) = (0, NONE));
    let layouts = experts::layouts(QZ1_CUDA_ORDER_INT8);
    let plan = Plan::new(&kernels, &experts::shape(&layouts), qz1_cuda_experts_plan);
    launches(&plan, qz1_cuda_experts_launch, |a| (a.reserved, a.out) = (0, NONE));
}
