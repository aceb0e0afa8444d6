//! The measured maxima of a device.

use super::{Meter, TimedLaunch};
use crate::Result;
use crate::compile::{Source, Variant};
use crate::launch::{Argument, LaunchShape};
use crate::standalone::Memory;

static SOURCE: Source =
    Source { name: "ceilings.cu", text: include_str!("../../cuda/ceilings.cu"), headers: &[] };

/// As in `cuda/ceilings.cu`.
const THREADS: u32 = 512;
const FLIGHT: usize = 8;
const CHAINS: u32 = 8;
/// In multiples of the L2 cache, so that cached bytes are negligible.
const CACHES: usize = 32;
/// The initial and the maximum number of rounds of products. It grows until a launch takes at least [`MIN_SECONDS`].
const ROUNDS: [u32; 2] = [4, 1 << 20];
const MIN_SECONDS: f64 = 1e-3;

/// The rates that measurements are compared with.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Ceilings {
    /// Bytes read per second.
    pub read: f64,
    /// Bytes per second of a copy, counting both reads and writes.
    pub copy: f64,
    /// f16 operations per second on tensor cores; a multiplication and an addition count as two.
    pub f16: f64,
    /// bf16 operations per second on tensor cores.
    pub bf16: f64,
    /// 8-bit integer operations per second on tensor cores.
    pub int8: f64,
    /// Seconds per empty launch, in a series of launches.
    pub launch: f64,
}

fn variant(kernel: &'static str, product: u32) -> Variant {
    Variant { source: &SOURCE, kernel, defines: vec![("PRODUCT", product.to_string())] }
}

pub(super) fn variants() -> Vec<Variant> {
    let streams = ["stream_read", "stream_copy", "nothing"].map(|kernel| variant(kernel, 0));
    streams.into_iter().chain([0, 1, 2].map(|product| variant("products", product))).collect()
}

impl Ceilings {
    pub(super) fn measure(meter: &Meter) -> Result<Self> {
        let gpu = meter.gpu;
        let blocks = gpu.limits.multiprocessors * 4;
        let shape = LaunchShape { grid: [blocks, 1, 1], block: THREADS, shared_bytes: 0 };
        // A multiple of what a block loads at once.
        let step = THREADS as usize * FLIGHT * 16;
        let bytes = (meter.cache_bytes * CACHES).min(gpu.memory()?.free / 4);
        let bytes = (bytes / step).max(1) * step;
        let (from, to) = (Memory::filled(bytes, 0x35)?, Memory::filled(bytes, 0)?);
        let vectors = Argument::U64((bytes / 16) as u64);
        let one = |kernel, product, shape, arguments| -> Result<f64> {
            // SAFETY: the arguments match these kernels, with memory that lives until they have finished.
            unsafe { meter.seconds(&variant(kernel, product), &[TimedLaunch { shape, arguments }]) }
                .map(|times| times.median())
        };
        let stream = |kernel| {
            let to = Argument::U64(to.region().address);
            one(kernel, 0, shape, vec![Argument::U64(from.region().address), vectors, to])
        };
        let read = bytes as f64 / stream("stream_read")?;
        let copy = 2.0 * bytes as f64 / stream("stream_copy")?;
        let rate = |product: u32| -> Result<f64> {
            let to = Argument::U64(to.region().address);
            let [mut rounds, max] = ROUNDS;
            let seconds = loop {
                let arguments = vec![Argument::U32(rounds), Argument::U32(1), to];
                let seconds = one("products", product, shape, arguments)?;
                if seconds >= MIN_SECONDS || rounds >= max {
                    break seconds;
                }
                rounds *= 8;
            };
            let k = if product == 2 { 32.0 } else { 16.0 };
            let warps = f64::from(blocks * THREADS / 32);
            Ok(warps * f64::from(rounds) * f64::from(CHAINS) * 2.0 * 16.0 * 8.0 * k / seconds)
        };
        let idle = LaunchShape { grid: [1, 1, 1], block: 32, shared_bytes: 0 };
        let launch = one("nothing", 0, idle, Vec::new())?;
        Ok(Self { read, copy, f16: rate(0)?, bf16: rate(1)?, int8: rate(2)?, launch })
    }
}
