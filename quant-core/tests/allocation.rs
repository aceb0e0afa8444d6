//! A program that uses the library gets an error if there is too little memory for a large buffer. Rust would otherwise
//! end the process, and this test with it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use quant_core::checkpoint::{
    CheckpointWriter, Dtype, MemorySource, ShardedCheckpoint, TensorSink, TensorSource, TensorSpec,
    WriteOptions,
};
use quant_core::quantize::gptq::{Factor, FactorError, GptqSettings, Hessian, solve};
use quant_core::quantize::{SourceRows, quantize_rtn};
use quant_core::{Category, Error, Result};

/// Larger allocations fail.
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);

struct Short;

impl Short {
    fn allows(size: usize) -> bool {
        size < LIMIT.load(Ordering::SeqCst)
    }
}

// SAFETY: memory comes from the system allocator, or the result is null.
unsafe impl GlobalAlloc for Short {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller guarantees the contract of `GlobalAlloc`, which is passed on to `System`.
        if Self::allows(layout.size()) { unsafe { System.alloc(layout) } } else { std::ptr::null_mut() }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !Self::allows(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller guarantees the contract of `GlobalAlloc`, which is passed on to `System`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller guarantees the contract of `GlobalAlloc`, which is passed on to `System`.
        if Self::allows(size) { unsafe { System.realloc(at, layout, size) } } else { std::ptr::null_mut() }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: every pointer came from `System`, with the same layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Short = Short;

/// Allocations of `bytes` and more fail, which `work` must report.
#[track_caller]
fn refused<T>(what: &str, bytes: usize, work: impl FnOnce() -> Result<T>) {
    LIMIT.store(bytes, Ordering::SeqCst);
    let outcome = work();
    LIMIT.store(usize::MAX, Ordering::SeqCst);
    match outcome {
        Err(error @ Error::Memory { .. }) => {
            assert_eq!(error.category(), Category::Environment, "{what}");
            assert!(error.to_string().starts_with("not enough memory for "), "{what}: {error}");
        }
        Err(error) => panic!("{what}: {error}"),
        Ok(_) => panic!("{what}: nothing of {bytes} bytes was allocated"),
    }
}

const MIB: usize = 1 << 20;

fn weights(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * 0.37).sin() * 0.1).collect()
}

#[test]
fn too_little_memory_is_an_error() {
    let scratch = tempfile::tempdir().unwrap();
    let [n, k] = [1024, 1024];
    let values = weights(n * k);
    let mut source = MemorySource::new();
    source.insert_f32("w", Dtype::Bf16, [n, k], &values).unwrap();
    refused("the bytes of a tensor", 2 * MIB, || source.read("w"));
    refused("a tensor in f32", 4 * MIB, || source.read_f32("w"));

    let entry = |i: usize| format!(r#""{i:050}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#);
    let header = format!("{{{}}}", (0..20_000).map(entry).collect::<Vec<_>>().join(","));
    let path = scratch.path().join("long.safetensors");
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    std::fs::write(&path, file).unwrap();
    refused("a header", header.len(), || ShardedCheckpoint::open_file(&path));
    drop(header);

    let scheme = "w4a16-g128-asym".parse().unwrap();
    refused("codes", MIB, || quantize_rtn("w", &values, [n, k], scheme, Dtype::F16, None));
    let tensor = quantize_rtn("w", &values, [n, k], scheme, Dtype::F16, None).unwrap();
    refused("a dequantized weight", 4 * MIB, || tensor.dequantize());

    refused("a Hessian", MIB, || Hessian::new(2048));
    let mut hessian = Hessian::new(k).unwrap();
    hessian.add(&values);
    hessian.finish();
    let columns: Vec<usize> = (0..k).collect();
    // The triangle of 1024 columns in f64.
    LIMIT.store(4 * MIB, Ordering::SeqCst);
    let factor = Factor::new(&hessian, columns.clone(), 0.01);
    LIMIT.store(usize::MAX, Ordering::SeqCst);
    assert!(matches!(factor, Err(FactorError::Memory { bytes }) if bytes > 4 << 20));
    let factor = Factor::new(&hessian, columns, 0.01).unwrap();
    refused("codes of GPTQ", MIB, || {
        solve(SourceRows::Floats(&values), [n, k], scheme, Dtype::F16, None, &factor, GptqSettings::default())
            .map_err(|e| e.within("w", None))
    });

    let target = scratch.path().join("out");
    let specs = vec![TensorSpec::new("w", Dtype::U8, [2 * MIB])];
    let mut writer = CheckpointWriter::create(&target, specs, WriteOptions::default()).unwrap();
    writer.write("w", 0, &vec![1; 2 * MIB]).unwrap();
    refused("a tensor that is read back", 2 * MIB, || writer.read_back("w"));
    writer.abandon().unwrap();
}
