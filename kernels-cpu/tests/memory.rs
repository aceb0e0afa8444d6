//! If memory allocation fails, calls return an error instead of aborting the process.

use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::cell::Cell;

use half::f16;
use quant_kernels_cpu::attention::{Heads, KvCache, KvLayout, KvType, Workspace};
use quant_kernels_cpu::experts::{
    Expert, ExpertGate, ExpertRows, Experts, ExpertsPlan, ExpertsWorkspace, Routing,
};
use quant_kernels_cpu::{
    Bf16Parts, FloatRows, Int8Rows, Isa, KernelError, PackedLinear, RowLayout, Serial, WeightView,
};

thread_local! {
    /// The number of allocations that this thread may still make; `None` for any number.
    static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
    /// Bytes that this thread requested by `alloc`.
    static ASKED: Cell<usize> = const { Cell::new(0) };
}

struct Short;

impl Short {
    fn has_some() -> bool {
        let left = LEFT.get();
        LEFT.set(left.map(|left| left.saturating_sub(1)));
        left != Some(0)
    }
}

// SAFETY: memory comes from the system allocator, or the result is null.
unsafe impl GlobalAlloc for Short {
    unsafe fn alloc(&self, memory: Memory) -> *mut u8 {
        ASKED.set(ASKED.get() + memory.size());
        // SAFETY: the caller guarantees the contract of `GlobalAlloc`, which is passed on to `System`.
        if Self::has_some() { unsafe { System.alloc(memory) } } else { std::ptr::null_mut() }
    }

    unsafe fn alloc_zeroed(&self, memory: Memory) -> *mut u8 {
        // SAFETY: the caller guarantees the contract of `GlobalAlloc`, which is passed on to `System`.
        if Self::has_some() { unsafe { System.alloc_zeroed(memory) } } else { std::ptr::null_mut() }
    }

    unsafe fn realloc(&self, at: *mut u8, memory: Memory, size: usize) -> *mut u8 {
        // SAFETY: the caller guarantees the contract of `GlobalAlloc`, which is passed on to `System`.
        if Self::has_some() { unsafe { System.realloc(at, memory, size) } } else { std::ptr::null_mut() }
    }

    unsafe fn dealloc(&self, at: *mut u8, memory: Memory) {
        // SAFETY: the caller guarantees the contract of `GlobalAlloc`, which is passed on to `System`.
        unsafe { System.dealloc(at, memory) }
    }
}

#[global_allocator]
static SHORT: Short = Short;

/// Repeats a call with no allocation allowed, then one, then two, until it succeeds; returns the number it needed.
fn short<T>(mut call: impl FnMut() -> Result<T, KernelError>) -> usize {
    for count in 0..100 {
        LEFT.set(Some(count));
        let result = call();
        LEFT.set(None);
        match result {
            Ok(_) => return count,
            Err(error) => assert_eq!((error.code(), matches!(error, KernelError::Memory(_))), (8, true)),
        }
    }
    panic!("the call never got enough memory");
}

#[test]
fn weights_and_rows_need_memory() {
    let (n, k) = (32, 64);
    let (codes, scales, zeros) = (vec![3; n * k], vec![0.5; n * 2], vec![7; n * 2]);
    let view = WeightView::new([n, k], 4, 32, &codes, &scales, Some(&zeros)).unwrap();
    assert_eq!(short(|| PackedLinear::pack(&view, Some(&[1.0; 32]), false, &Serial)), 2);
    let packed = PackedLinear::pack(&view, None, false, &Serial).unwrap();
    assert_eq!(short(|| packed.layout().unpack(packed.view().bytes())), 3);
    for isa in [Isa::Scalar, Isa::detect(), Isa::AmxEmulated] {
        rows_need_memory(&packed, isa);
    }
}

/// Quantizing and packing rows allocate only if there are more rows than before; products never allocate.
fn rows_need_memory(packed: &PackedLinear, isa: Isa) {
    let (n, k, m) = (packed.layout().n(), packed.layout().k(), 30);
    let (layout, token) = (RowLayout::of(packed.layout()), isa.token().unwrap());
    // The tile unit needs two more buffers: codes and sums.
    let tiled = 2 * usize::from(matches!(isa, Isa::Amx | Isa::AmxEmulated));
    let (x, more) = (vec![f16::ONE; m * k], vec![f16::ONE; 2 * m * k]);
    let mut out = vec![0.0; m * n];
    let (mut whole, mut float) = (Int8Rows::new(token), FloatRows::new(token));
    assert_eq!(short(|| Int8Rows::new(token).quantize(&x, layout, &Serial)), 5 + tiled);
    assert_eq!(short(|| FloatRows::new(token).pack(&x, layout, &Serial)), 3);
    // The same number of rows reuses the memory. If an allocation for more rows fails, no rows are left.
    for count in 0..5 + tiled {
        whole.quantize(&x, layout, &Serial).unwrap();
        float.pack(&x, layout, &Serial).unwrap();
        LEFT.set(Some(0));
        whole.quantize(&x, layout, &Serial).unwrap();
        float.pack(&x, layout, &Serial).unwrap();
        packed.view().multiply(token, &whole, None, &mut out, &Serial).unwrap();
        packed.multiply_float(&float, &mut out, &Serial).unwrap();
        let mut whole = Int8Rows::new(token);
        LEFT.set(Some(count));
        let result = whole.quantize(&more, layout, &Serial);
        LEFT.set(None);
        assert_eq!((result.unwrap_err().code(), whole.m()), (8, 0));
        assert_eq!(packed.multiply(&whole, &mut out, &Serial).unwrap_err().code(), 4);
    }
}

#[test]
fn caches_need_memory() {
    let heads = Heads { query: 4, kv: 2, scale: 0.25 };
    let layout = KvLayout::new(KvType::Kv4, 16).unwrap();
    assert_eq!(short(|| KvCache::new(layout, heads, 200)), 1);
    let mut cache = KvCache::new(layout, heads, 200).unwrap();
    let x = vec![1.0; 130 * 32];
    // A failed call keeps the memory that it could allocate, so each attempt gets further.
    assert!(short(|| cache.append(&x, &x, &Serial)) > 0);
    assert_eq!(cache.tokens(), 130);
    let (mut workspace, mut out, mut lse) = (Workspace::default(), [0.0; 64], [0.0; 4]);
    assert_eq!(short(|| cache.decode(&[1.0; 64], &mut out, &mut lse, &mut workspace, &Serial)), 1);
}

#[test]
fn experts_need_the_memory_of_their_plan() {
    let (hidden, inner, tokens) = (64, 32, 40);
    let pack = |[n, k]: [usize; 2], group: usize| {
        let (codes, scales) = (vec![3; n * k], vec![0.5; n * k / group]);
        let view = WeightView::new([n, k], 4, group, &codes, &scales, None).unwrap();
        PackedLinear::pack(&view, None, false, &Serial).unwrap()
    };
    let (wide, narrow, down) =
        (pack([inner, hidden], 64), pack([inner, hidden], 20 + 12), pack([hidden, inner], 8));
    let expert = |up| Expert { gate: up, up, down: (&down).into() };
    let experts = [expert((&wide).into()), expert((&narrow).into()), expert((&wide).into())];
    let experts = Experts::new(&experts).unwrap();
    let x = vec![f16::ONE; tokens * hidden];
    let weights = vec![0.5; 2 * tokens];
    let mut out = vec![0.0; x.len()];
    for isa in [Isa::Scalar, Isa::detect(), Isa::AmxEmulated] {
        for rows in [ExpertRows::Int8, ExpertRows::Float(Bf16Parts::Three)] {
            let token = isa.token().unwrap();
            let plan = ExpertsPlan::new::<f16>(&experts, token, rows, ExpertGate::Silu, tokens, 2).unwrap();
            assert!(short(|| ExpertsWorkspace::default().reserve(&plan)) > 7);
            let mut workspace = ExpertsWorkspace::default();
            ASKED.set(0);
            workspace.reserve(&plan).unwrap();
            assert_eq!(ASKED.get(), plan.workspace_bytes(), "{isa:?}, {rows:?}");
            for spread in 1..=3 {
                let routed: Vec<u32> = (0..2 * tokens as u32).map(|i| i * i % spread).collect();
                let routing = Routing { top_k: 2, experts: &routed, weights: &weights };
                LEFT.set(Some(0));
                let result = experts.run(&plan, &x, &routing, &mut workspace, &mut out, &Serial);
                LEFT.set(None);
                result.unwrap();
            }
        }
    }
}
