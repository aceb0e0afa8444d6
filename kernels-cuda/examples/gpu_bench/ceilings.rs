//! What the device can do at most, measured: bytes a second, products a second, seconds of a launch.

use quant_kernels_cuda::compile::{Source, Variant};
use quant_kernels_cuda::launch::{Argument, LaunchShape};

use crate::measure::{Bench, Work};
use quant_kernels_cuda::standalone::Memory;

static SOURCE: Source = Source { name: "ceilings.cu", text: include_str!("ceilings.cu"), headers: &[] };

const THREADS: u32 = 512;
/// Bytes that are read: many times the second cache.
const STREAM: usize = 4 << 30;
const ROUNDS: u32 = 20_000;
const CHAINS: u32 = 8;

/// What is measured against.
#[derive(Debug, Clone, Copy)]
pub struct Ceilings {
    /// Bytes read a second.
    pub read: f64,
    /// Bytes a second of a copy, read and written.
    pub copy: f64,
    /// Multiplications and additions a second: two for each product.
    pub f16: f64,
    /// The same of bf16.
    pub bf16: f64,
    /// The same of whole numbers of 8 bits.
    pub int8: f64,
    /// Seconds of a launch that does nothing, among others.
    pub launch: f64,
}

fn variant(kernel: &'static str, product: u32) -> Variant {
    Variant { source: &SOURCE, kernel, defines: vec![("PRODUCT", product.to_string())] }
}

/// The kernels, to compile them ahead.
pub fn variants() -> Vec<Variant> {
    let streams = ["stream_read", "stream_copy", "nothing"].map(|kernel| variant(kernel, 0));
    streams.into_iter().chain([0, 1, 2].map(|product| variant("products", product))).collect()
}

impl Ceilings {
    /// Measures them.
    pub fn measure(bench: &Bench) -> Result<Self, String> {
        let blocks = bench.gpu.limits.multiprocessors * 4;
        let shape = LaunchShape { grid: [blocks, 1, 1], block: THREADS, shared_bytes: 0 };
        let [from, to] = [0x35, 0].map(|fill| Memory::filled(STREAM, fill).map_err(|e| e.to_string()));
        let (from, to) = (from?, to?);
        let vectors = Argument::U64((STREAM / 16) as u64);
        let stream = |kernel| -> Result<f64, String> {
            let arguments =
                vec![Argument::U64(from.region().address), vectors, Argument::U64(to.region().address)];
            bench.seconds(&variant(kernel, 0), &[Work { shape, arguments }])
        };
        let read = STREAM as f64 / stream("stream_read")?;
        let copy = 2.0 * STREAM as f64 / stream("stream_copy")?;
        let rate = |product: u32| -> Result<f64, String> {
            let arguments = vec![Argument::U32(ROUNDS), Argument::U32(1), Argument::U64(to.region().address)];
            let seconds = bench.seconds(&variant("products", product), &[Work { shape, arguments }])?;
            let k = if product == 2 { 32.0 } else { 16.0 };
            let warps = f64::from(blocks * THREADS / 32);
            Ok(warps * f64::from(ROUNDS) * f64::from(CHAINS) * 2.0 * 16.0 * 8.0 * k / seconds)
        };
        let idle = LaunchShape { grid: [1, 1, 1], block: 32, shared_bytes: 0 };
        let launch = bench.seconds(&variant("nothing", 0), &[Work { shape: idle, arguments: Vec::new() }])?;
        Ok(Self { read, copy, f16: rate(0)?, bf16: rate(1)?, int8: rate(2)?, launch })
    }
}
