//! No kernel accesses memory beyond its buffers, on any instruction set.
//!
//! While a case runs, every allocation has its own pages, and ends at the start of an inaccessible page (or begins at
//! the end of one), so reading or writing a byte beyond it terminates the process. Freed memory stays inaccessible.
//! Sanitizers find such errors in instrumented code only; this test also covers intrinsics and assembly.
#![cfg(all(target_os = "linux", target_pointer_width = "64"))]

use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::cell::Cell;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};
use proptest::prelude::*;
use quant_kernels_cpu::attention::{
    Heads, KvCache, KvLayout, KvPages, KvType, PAGE_TOKENS, PageList, Workspace,
};
use quant_kernels_cpu::bf16::{Bf16Token, LeftBf16, RightBf16, bf16_gemm};
use quant_kernels_cpu::experts::{
    Expert, ExpertGate, ExpertRows, Experts, ExpertsPlan, ExpertsWorkspace, Routing,
};
use quant_kernels_cpu::{
    Bf16Parts, FloatRows, Int8Rows, Isa, Layout, PackedLinear, PackedView, RowLayout, SUPER_BLOCK, Scales,
    Serial, StaticScale, SuperMins, SuperScales, WeightView,
};
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect};

/// The side on which a buffer touches the inaccessible page.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Side {
    Off,
    Before,
    After,
}

/// An allocator that takes memory from a reserved range and never returns the same address twice.
struct Fence;

/// The size of the reserved address space; memory is committed only as pages are allocated.
const RANGE: usize = 1 << 40;
/// A multiple of every common page size.
const PAGE: usize = 1 << 16;
static TAKEN: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static SIDE: Cell<Side> = const { Cell::new(Side::Off) };
}

fn range() -> usize {
    static RESERVED: OnceLock<usize> = OnceLock::new();
    *RESERVED.get_or_init(|| {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the system chooses.
        let at = unsafe { mmap_anonymous(null_mut(), RANGE, ProtFlags::empty(), flags) };
        // Abort, since nothing would be tested without the range, and an allocator must not unwind.
        at.unwrap_or_else(|_| std::process::abort()).addr().next_multiple_of(PAGE)
    })
}

// SAFETY: each page of the range is handed out once, and is accessible until it is freed; all other memory comes from
// the system allocator.
unsafe impl GlobalAlloc for Fence {
    unsafe fn alloc(&self, memory: Memory) -> *mut u8 {
        let side = SIDE.get();
        if side == Side::Off || memory.align() > PAGE {
            // SAFETY: the caller guarantees the contract of `GlobalAlloc`, which is passed on to `System`.
            return unsafe { System.alloc(memory) };
        }
        let pages = memory.size().next_multiple_of(PAGE);
        // Leave an inaccessible page on either side.
        let first = TAKEN.fetch_add(pages + PAGE, Ordering::Relaxed) + PAGE;
        if first + pages + 2 * PAGE > RANGE {
            std::process::abort();
        }
        let start = range() + first;
        let flags = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: these pages are within the range, and no other allocation has them.
        if unsafe { mprotect(start as *mut _, pages, flags) }.is_err() {
            return null_mut();
        }
        let gap = if side == Side::Before { 0 } else { (pages - memory.size()) & !(memory.align() - 1) };
        (start + gap) as *mut u8
    }

    unsafe fn dealloc(&self, at: *mut u8, memory: Memory) {
        let start = at.addr() & !(PAGE - 1);
        if !(range()..range() + RANGE).contains(&at.addr()) {
            // SAFETY: it was allocated by `System`; the caller guarantees the contract of `GlobalAlloc`.
            return unsafe { System.dealloc(at, memory) };
        }
        let pages = memory.size().next_multiple_of(PAGE);
        // SAFETY: these are the pages that `alloc` returned; the caller guarantees that they are no longer used.
        unsafe {
            let _ = madvise(start as *mut _, pages, Advice::LinuxDontNeed);
            let _ = mprotect(start as *mut _, pages, MprotectFlags::empty());
        }
    }
}

#[global_allocator]
static FENCE: Fence = Fence;

/// Calls `run` with every allocation next to an inaccessible page.
fn fenced<T>(side: Side, run: impl FnOnce() -> T) -> T {
    struct Reset;
    impl Drop for Reset {
        fn drop(&mut self) {
            SIDE.set(Side::Off);
        }
    }
    let _reset = Reset;
    SIDE.set(side);
    run()
}

#[derive(Debug, Clone)]
struct Case {
    shape: [usize; 3],
    group_size: usize,
    bits: u8,
    wide: bool,
    progressive: bool,
    asymmetric: bool,
    bias: bool,
    fixed: bool,
}

fn cases() -> impl Strategy<Value = Case> {
    let group = prop_oneof![1usize..40, Just(32), Just(64), Just(128)];
    let shape = (1usize..28, prop_oneof![1usize..100, Just(16), Just(64)], 1usize..5);
    (shape, group, 2u8..=8, any::<[bool; 6]>()).prop_map(
        |((m, n, groups), group_size, bits, [wide, progressive, asymmetric, bias, fixed, narrow])| Case {
            shape: [m, n, groups * group_size],
            group_size,
            bits: if progressive || narrow { bits.min(4) } else { bits },
            wide,
            progressive,
            asymmetric,
            bias,
            fixed,
        },
    )
}

impl Case {
    fn run(&self) {
        let [m, n, k] = self.shape;
        let groups = n * (k / self.group_size);
        let codes: Vec<u8> = (0..n * k).map(|i| (i % (1 << self.bits)) as u8).collect();
        // One value needs to be stored as `f32`.
        let scale = if self.wide { 1.000_000_1_f32 } else { 0.5 };
        let scales = vec![scale; if self.progressive { n } else { groups }];
        let whole = vec![3_u8; groups];
        let zeros = self.asymmetric.then(|| vec![1_u8; groups]);
        let bias = self.bias.then(|| vec![0.25_f32; n]);
        let x: Vec<f32> = (0..m * k).map(|i| (i % 17) as f32 - 8.0).collect();
        let kind = if self.progressive {
            Scales::Progressive { groups: &whole, channels: &scales }
        } else {
            Scales::Float(&scales)
        };
        let shape = [n, k];
        let view = WeightView::with_scales(shape, self.bits, self.group_size, &codes, kind, zeros.as_deref())
            .unwrap();
        let layout = Layout::of(&view, self.fixed).unwrap();
        let mut bytes = vec![0; layout.bytes()];
        layout.pack(&view, 0..layout.panels(), &mut bytes).unwrap();
        assert_eq!(layout.unpack(&bytes).unwrap().codes, codes);
        let owned = PackedLinear::pack(&view, None, self.fixed, &Serial).unwrap();
        assert_eq!(owned.view().bytes(), bytes);

        let packed = PackedView::new(layout, layout.id(), &bytes).unwrap();
        let (first, last) = (n / 3, n - n / 4);
        let mut floats = vec![0.0; (last - first) * k];
        packed.dequantize_rows(first..last, &mut floats).unwrap();
        quant_kernels_cpu::dequantize_rows(&view, first..last, &mut floats).unwrap();

        let mut expected: Option<Vec<f32>> = None;
        for isa in Isa::runnable() {
            let token = isa.token().unwrap();
            let mut rows = Int8Rows::new(token);
            match self.fixed {
                true => {
                    let by = StaticScale { scale: 0.07, zero: 3 };
                    rows.quantize_static(&x, RowLayout::of(&layout), by, &Serial).unwrap();
                }
                false => rows.quantize(&x, RowLayout::of(&layout), &Serial).unwrap(),
            }
            let mut out = vec![f32::NAN; m * n];
            packed.multiply(token, &rows, bias.as_deref(), &mut out, &Serial).unwrap();
            assert_eq!(expected.get_or_insert_with(|| out.clone()), &out, "{isa:?}");
            let mut rows = FloatRows::new(token);
            rows.pack(&x, RowLayout::of(&layout), &Serial).unwrap();
            packed.multiply_float(&rows, bias.as_deref(), &mut out, &Serial).unwrap();
            assert!(out.iter().all(|v| v.is_finite()), "{isa:?}");
        }
        if let Some(token) = Bf16Token::available() {
            let (left, right) = (LeftBf16::pack(&x, k), RightBf16::pack(&vec![1.0; shape[0] * k], k));
            bf16_gemm(token, &left, 0, &right, &mut vec![0.0; m * n]);
        }
        self.dense(&x, bias.as_deref());
    }

    fn dense(&self, x: &[f32], bias: Option<&[f32]>) {
        let [m, n, k] = self.shape;
        let weight: Vec<bf16> = (0..n * k).map(|i| bf16::from_f32((i % 19) as f32 - 9.0)).collect();
        let layout = Layout::bf16([n, k]).unwrap();
        let mut bytes = vec![0; layout.bytes()];
        layout.pack_bf16(&weight, 0..layout.panels(), &mut bytes).unwrap();
        let packed = PackedView::new(layout, layout.id(), &bytes).unwrap();
        packed.dequantize_rows(n / 3..n, &mut vec![0.0; (n - n / 3) * k]).unwrap();
        let exact: Vec<bf16> = x.iter().copied().map(bf16::from_f32).collect();
        for isa in Isa::runnable() {
            let mut rows = FloatRows::new(isa.token().unwrap());
            let mut out = vec![f32::NAN; m * n];
            rows.pack(x, RowLayout::of(&layout), &Serial).unwrap();
            packed.multiply_float(&rows, bias, &mut out, &Serial).unwrap();
            assert!(out.iter().all(|v| v.is_finite()), "{isa:?}");
            rows = FloatRows::new(isa.token().unwrap());
            rows.pack(&exact, RowLayout::of(&layout), &Serial).unwrap();
            packed.multiply_float(&rows, bias, &mut out, &Serial).unwrap();
            assert!(out.iter().all(|v| v.is_finite()), "{isa:?}");
        }
    }
}

proptest! {
    #[test]
    fn no_kernel_leaves_its_buffers(case in cases(), before: bool) {
        fenced(if before { Side::Before } else { Side::After }, || case.run());
    }
}

fn super_blocks([m, n, blocks]: [usize; 3], (bits, size): (u8, usize)) {
    let k = blocks * SUPER_BLOCK;
    let codes: Vec<u8> = (0..n * k).map(|i| (i % (1 << bits)) as u8).collect();
    let (groups, halves) = (vec![-3_i8; n * k / size], vec![f16::from_f32(0.5); n * blocks]);
    let of_groups = vec![7_u8; groups.len()];
    let mins = (bits != 6).then_some(SuperMins { groups: &of_groups, blocks: &halves });
    let scales = Scales::Super(SuperScales { groups: &groups, blocks: &halves, mins });
    let view = WeightView::with_scales([n, k], bits, size, &codes, scales, None).unwrap();
    let layout = Layout::of(&view, false).unwrap();
    let mut bytes = vec![0; layout.bytes()];
    layout.pack(&view, 0..layout.panels(), &mut bytes).unwrap();
    assert_eq!(layout.unpack(&bytes).unwrap().codes, codes);
    let packed = PackedView::new(layout, layout.id(), &bytes).unwrap();
    packed.check().unwrap();
    packed.dequantize_rows(n / 3..n, &mut vec![0.0; (n - n / 3) * k]).unwrap();
    quant_kernels_cpu::dequantize_rows(&view, n / 3..n, &mut vec![0.0; (n - n / 3) * k]).unwrap();
    let x: Vec<f32> = (0..m * k).map(|i| (i % 17) as f32 - 8.0).collect();
    let mut expected: Option<Vec<f32>> = None;
    for isa in Isa::runnable() {
        let token = isa.token().unwrap();
        let (mut rows, mut floats) = (Int8Rows::new(token), FloatRows::new(token));
        rows.quantize(&x, RowLayout::of(&layout), &Serial).unwrap();
        floats.pack(&x, RowLayout::of(&layout), &Serial).unwrap();
        let mut out = vec![f32::NAN; m * n];
        packed.multiply(token, &rows, None, &mut out, &Serial).unwrap();
        assert_eq!(expected.get_or_insert_with(|| out.clone()), &out, "{isa:?}");
        packed.multiply_float(&floats, None, &mut out, &Serial).unwrap();
        assert!(out.iter().all(|v| v.is_finite()), "{isa:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn super_blocks_stay_within_their_buffers(
        shape in [1usize..28, 1usize..70, 1usize..3],
        widths in prop_oneof![Just((4, 32)), Just((5, 32)), Just((6, 16)), Just((2, 16))],
        before: bool,
    ) {
        fenced(if before { Side::Before } else { Side::After }, || super_blocks(shape, widths));
    }
}

fn attend(kind: KvType, d: usize, [kv, group]: [usize; 2], [tokens, m]: [usize; 2]) {
    let layout = KvLayout::new(kind, d).unwrap();
    let heads = Heads { query: kv * group, kv, scale: 0.25 };
    let blocks = tokens.div_ceil(PAGE_TOKENS);
    let mut bytes = vec![0; kv * blocks * layout.page_bytes()];
    let x: Vec<f32> = (0..tokens * kv * d).map(|i| (i % 23) as f32 - 11.0).collect();
    let numbers: Vec<u32> = (0..(kv * blocks) as u32).rev().collect();
    let lists = |tokens| -> Vec<_> {
        numbers.chunks_exact(blocks).map(|pages| PageList::causal(pages, tokens, m)).collect()
    };
    layout.append(&mut bytes, &lists(0), &x, &x, &Serial).unwrap();
    let pages = KvPages::new(layout, layout.id(), &bytes).unwrap();
    let q: Vec<f32> = (0..m * heads.query * d).map(|i| (i % 13) as f32 - 6.0).collect();
    let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; m * heads.query]);
    let mut words = vec![0; KvPages::workspace(&layout, heads, m, tokens).unwrap()];
    for isa in Isa::available() {
        let token = isa.token().unwrap();
        pages.attend(token, heads, &lists(tokens), &q, &mut out, &mut lse, &mut words, &Serial).unwrap();
        assert!(out.iter().chain(&lse).all(|v| v.is_finite()), "{isa:?}");
    }
    let mut cache = KvCache::new(layout, heads, tokens).unwrap();
    cache.append(&x, &x, &Serial).unwrap();
    cache.prefill(&q, &mut out, &mut lse, &mut Workspace::default(), &Serial).unwrap();
    let (mut key, mut value) = (vec![0.0; d], vec![0.0; d]);
    let page = bytes[..layout.page_bytes()].to_vec();
    layout.read(&page, PAGE_TOKENS - 1, &mut key, &mut value).unwrap();
}

proptest! {
    #[test]
    fn attention_stays_within_its_buffers(
        kind in prop_oneof![Just(KvType::Kv4), Just(KvType::Kv8), Just(KvType::F16)],
        panels in 1usize..9,
        heads in [1usize..3, 1usize..6],
        tokens in prop_oneof![1usize..200, 1000usize..1100],
        m in 1usize..9,
        before: bool,
    ) {
        let side = if before { Side::Before } else { Side::After };
        fenced(side, || attend(kind, 16 * panels, heads, [tokens, m.min(tokens)]));
    }
}

fn experts([hidden, inner]: [usize; 2], count: usize, tokens: usize, bits: u8) {
    let part = |[n, k]: [usize; 2]| {
        let codes: Vec<u8> = (0..n * k).map(|i| (i % (1 << bits)) as u8).collect();
        let (scales, bias) = (vec![0.01; n], vec![0.5; n]);
        let view = WeightView::new([n, k], bits, k, &codes, &scales, None).unwrap();
        PackedLinear::pack(&view, Some(&bias), false, &Serial).unwrap()
    };
    let (reads, down) = (part([inner, hidden]), part([hidden, inner]));
    let expert = Expert { gate: (&reads).into(), up: (&reads).into(), down: (&down).into() };
    let experts = vec![expert; count];
    let experts = Experts::new(&experts).unwrap();
    let x: Vec<f32> = (0..tokens * hidden).map(|i| (i % 17) as f32 - 8.0).collect();
    let numbers: Vec<u32> =
        (0..2 * tokens).map(|i| if i % 2 == 0 { 0 } else { (i * i) as u32 % count as u32 }).collect();
    let weights = vec![0.5; 2 * tokens];
    let routing = Routing { top_k: 2, experts: &numbers, weights: &weights };
    for isa in Isa::runnable() {
        for rows in [ExpertRows::Int8, ExpertRows::Float(Bf16Parts::Two)] {
            let (token, gate) = (isa.token().unwrap(), ExpertGate::Silu);
            let plan = ExpertsPlan::new::<f32>(&experts, token, rows, gate, tokens, 2).unwrap();
            let mut workspace = ExpertsWorkspace::default();
            workspace.reserve(&plan).unwrap();
            let mut out = vec![f32::NAN; x.len()];
            experts.run(&plan, &x, &routing, &mut workspace, &mut out, &Serial).unwrap();
            assert!(out.iter().all(|v| v.is_finite()), "{isa:?}, {rows:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn experts_stay_within_their_buffers(
        shape in [1usize..90, 1usize..70],
        count in 1usize..5,
        tokens in prop_oneof![1usize..6, 1usize..60],
        bits in 3u8..=8,
        before: bool,
    ) {
        fenced(if before { Side::Before } else { Side::After }, || experts(shape, count, tokens, bits));
    }
}

const SIGBUS: i32 = 7;
const SIGSEGV: i32 = 11;

/// The faults, each of which runs in its own child process.
const FAULTS: [&str; 4] = ["weights", "out", "bias", "freed"];
const FAULT: &str = "QUANT_PLANTED_FAULT";

#[test]
#[ignore = "ends the process: `the_fence_holds` runs it"]
fn planted_fault() {
    let planted = std::env::var(FAULT).unwrap();
    let [fault, isa, side] = planted.split(' ').collect::<Vec<_>>()[..] else { panic!("{planted}") };
    let side = if side == "fence" { Side::After } else { Side::Off };
    let isa = Isa::runnable().find(|i| i.name() == isa).unwrap();
    let (n, k) = (32, 64);
    let (codes, scales) = (vec![7; n * k], vec![1.000_000_1; n]);
    let view = WeightView::new([n, k], 4, k, &codes, &scales, None).unwrap();
    let layout = Layout::of(&view, false).unwrap();
    let mut bytes = vec![0; layout.bytes()];
    layout.pack(&view, 0..layout.panels(), &mut bytes).unwrap();
    let m = 16;
    let mut rows = Int8Rows::new(isa.token().unwrap());
    rows.quantize(&vec![1.0; m * k], RowLayout::of(&layout), &Serial).unwrap();
    fenced(side, || {
        let short = |by: usize, what: &str| if fault == what { by } else { 0 };
        let mut weights = bytes[..bytes.len() - short(1, "weights")].to_vec();
        let bias = vec![0.0_f32; n - short(1, "bias")];
        let mut out = vec![0.0_f32; m * n - short(1, "out")];
        let (at, len) = (weights.as_ptr(), bytes.len());
        if fault == "freed" {
            drop(std::mem::take(&mut weights));
        }
        // SAFETY: deliberately violated: the slices are too long or freed, and this test must not survive it.
        let (weights, bias, out) = unsafe {
            (
                std::slice::from_raw_parts(at, len),
                std::slice::from_raw_parts(bias.as_ptr(), n),
                std::slice::from_raw_parts_mut(out.as_mut_ptr(), m * n),
            )
        };
        let packed = PackedView::new(layout, layout.id(), weights).unwrap();
        packed.multiply(isa.token().unwrap(), &rows, Some(bias), out, &Serial).unwrap();
    });
}

/// The command that runs this test program, under the same emulator if there is one.
fn this_program() -> Command {
    let this = std::env::current_exe().unwrap();
    let Some(emulator) = std::env::var_os("QUANT_EMULATOR") else { return Command::new(this) };
    let mut command = Command::new(emulator);
    command.arg(this);
    command
}

fn plant(fault: &str, isa: Isa, side: &str) -> (ExitStatus, String) {
    let mut child = this_program();
    child.args(["--ignored", "--exact", "planted_fault"]);
    let ended = child.env(FAULT, format!("{fault} {} {side}", isa.name())).output().unwrap();
    (ended.status, String::from_utf8_lossy(&ended.stderr).into_owned())
}

#[test]
fn the_fence_holds() {
    for isa in Isa::runnable() {
        let (status, output) = plant("none", isa, "fence");
        assert!(status.success(), "{isa:?}: {output}");
        for fault in FAULTS {
            let (status, output) = plant(fault, isa, "fence");
            let killed = matches!(status.signal(), Some(SIGBUS | SIGSEGV));
            // A sanitizer catches the signal and reports the fault.
            assert!(killed || output.contains("AddressSanitizer: SEGV"), "{isa:?} {fault}: {status}");
        }
    }
}

/// On the heap, only a sanitizer detects the same faults. Runs if `QUANT_SANITIZER` names one.
#[test]
fn the_sanitizer_sees() {
    if std::env::var("QUANT_SANITIZER").as_deref() != Ok("address") {
        return;
    }
    for isa in Isa::runnable() {
        let (status, output) = plant("none", isa, "heap");
        assert!(status.success(), "{isa:?}: {output}");
        for fault in FAULTS {
            let (status, output) = plant(fault, isa, "heap");
            let what = if fault == "freed" { "heap-use-after-free" } else { "heap-buffer-overflow" };
            assert!(!status.success() && output.contains(what), "{isa:?} {fault}: {status} {output}");
        }
    }
}
