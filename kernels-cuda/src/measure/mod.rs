//! Measures how close the kernels come to the limits of a device, for `quant bench kernels --device cuda` and `cargo
//! xtask gpu`.
//!
//! First the limits of the device are measured ([`Ceilings`]), then launches of the kernels on shapes of common models
//! ([`cases`]), many in a row, if possible on memory that is not in the L2 cache. The efficiency of a kernel is the
//! time that its bytes or products take at those limits, divided by its measured time.

mod cases;
mod ceilings;
mod experts;

use std::path::Path;

pub use self::cases::{Bound, Case, cases};
pub use self::ceilings::Ceilings;

use crate::compile::{Form, GpuArchitecture, Variant};
use crate::device::Kernels;
use crate::image_cache::{Compiler, ImageCache, Nvrtc, default_directory};
use crate::launch::{Argument, LaunchShape, Stream};
use crate::standalone::{Event, Gpu, Memory};
use crate::{Error, Result, linear};
use cases::{Buffer, Fill};

const MIN_SECONDS: f64 = 0.05;
/// The number of measurements.
const REPEATS: usize = 5;
const MAX_LAUNCHES: usize = 20_000;
/// The total size of the copies of a launch's buffers that are used in turn, in multiples of the L2 cache.
const TURNS_OVER_CACHE: usize = 10;
const MAX_TURNS: usize = 64;
const RANDOM: usize = 8 << 20;

/// A launch that is timed.
#[derive(Debug, Clone)]
struct TimedLaunch {
    shape: LaunchShape,
    arguments: Vec<Argument>,
}

/// Times of a launch in seconds.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Times {
    /// The mean seconds per launch of each measurement, in ascending order.
    pub seconds: Vec<f64>,
}

impl Times {
    /// The median.
    pub fn median(&self) -> f64 {
        self.seconds[self.seconds.len() / 2]
    }
}

/// Measures on the first device. Kernels come from the user's cache directory.
#[derive(Debug)]
pub struct Meter {
    gpu: &'static Gpu,
    kernels: Kernels,
    /// Size of the L2 cache.
    cache_bytes: usize,
    random: Vec<u8>,
}

impl Meter {
    /// Opens the first device.
    ///
    /// # Errors
    /// When there is no driver or device.
    pub fn new() -> Result<Self> {
        let gpu = Gpu::first()?;
        let kernels = Kernels::new(ImageCache::in_directory(default_directory(), Nvrtc));
        Ok(Self { gpu, kernels, cache_bytes: gpu.cache_bytes()?, random: random_bytes() })
    }

    /// The device.
    pub fn gpu(&self) -> &'static Gpu {
        self.gpu
    }

    /// Measures the maximum rates of the device.
    ///
    /// # Errors
    /// When a kernel cannot be compiled or launched, or fails on the device.
    pub fn ceilings(&self) -> Result<Ceilings> {
        Ceilings::measure(self)
    }

    /// Measures a case that was planned for this device.
    ///
    /// # Errors
    /// See [`ceilings`](Self::ceilings); also when the device has too little free memory.
    pub fn time(&self, case: &Case) -> Result<Times> {
        let sum = |turns| case.buffers.iter().filter(|b| b.turns == turns).map(|b| b.bytes).sum::<usize>();
        let (kept, turning) = (sum(false), sum(true).max(1));
        // Leaves a tenth of the free memory for the driver and for the rounding of allocations.
        let room = (self.gpu.memory()?.free / 10 * 9).saturating_sub(kept) / turning;
        let turns = (TURNS_OVER_CACHE * self.cache_bytes).div_ceil(turning).clamp(1, MAX_TURNS).min(room);
        if turns == 0 {
            let reason = format!(
                "the measurement needs {} bytes, but the device has less free memory",
                kept + turning
            );
            return Err(Error::Driver { action: "allocate memory", reason });
        }
        let mut memory: Vec<Memory> = Vec::new();
        let mut addresses = vec![0; case.buffers.len()];
        let mut work = Vec::new();
        for turn in 0..turns {
            for (i, buffer) in case.buffers.iter().enumerate() {
                if turn == 0 || buffer.turns {
                    let bytes = Memory::filled(buffer.bytes, 0)?;
                    self.fill(&bytes, buffer, &addresses)?;
                    addresses[i] = bytes.region().address;
                    memory.push(bytes);
                }
            }
            work.push(TimedLaunch { shape: case.launch, arguments: case.arguments(&addresses)? });
        }
        // SAFETY: the arguments are the plan's, with as much memory as it needs, which lives until the measurement has
        // finished.
        unsafe { self.seconds(&case.variant, &work) }
    }

    /// Measures the seconds per launch. The launches of `work` are used in turn.
    ///
    /// # Safety
    /// The variant must be one of this crate's; the arguments must match it, and point to memory that lives until this
    /// function returns.
    unsafe fn seconds(&self, variant: &Variant, work: &[TimedLaunch]) -> Result<Times> {
        let shared = work.iter().map(|work| work.shape.shared_bytes).max().unwrap_or(0);
        // SAFETY: the primary context is never released; images are compiled from this crate's sources, or come from
        // the user's own cache directory.
        let kernel = unsafe { self.kernels.kernel(variant, shared) }?;
        let run = |count: usize| -> Result<f64> {
            let begin = Event::now()?;
            for work in work.iter().cycle().take(count) {
                // SAFETY: the caller guarantees that the arguments match the variant; the memory outlives the launches,
                // since they are waited for below.
                unsafe { kernel.launch(&work.shape, &work.arguments, Stream::DEFAULT) }?;
            }
            let end = Event::now()?;
            self.gpu.wait()?;
            end.seconds_since(&begin)
        };
        // The first run warms up; the second determines how many launches to measure.
        run(work.len())?;
        let once = run(work.len())? / work.len().max(1) as f64;
        let count = ((MIN_SECONDS / once.max(1e-7)) as usize).clamp(work.len().max(3), MAX_LAUNCHES);
        let mut seconds =
            (0..REPEATS).map(|_| Ok(run(count)? / count as f64)).collect::<Result<Vec<f64>>>()?;
        seconds.sort_by(f64::total_cmp);
        Ok(Times { seconds })
    }

    /// Fills a buffer. `addresses` has the addresses of the buffers before it.
    fn fill(&self, to: &Memory, buffer: &Buffer, addresses: &[u64]) -> Result<()> {
        let words = to.len() as u32 / 4;
        match buffer.fill {
            Fill::Numbers(ref numbers) => to.write(0, &bytes_of(numbers)),
            Fill::Descriptors(ref layout) => {
                let experts = to.len() / linear::EXPERT_BYTES;
                let bytes = experts::descriptors(layout, experts, addresses[0]).map_err(Error::Operands)?;
                to.write(0, &bytes)
            }
            Fill::Zeros => Ok(()),
            Fill::Counted => to.write(0, &bytes_of(&(0..words).collect::<Vec<u32>>())),
            Fill::Words(word) => to.write(0, &word.to_le_bytes().repeat(words as usize)),
            Fill::Random => repeat(to, &self.random),
            Fill::Floats => self.fill_halves(to, 0x8f, 0x34),
            Fill::SmallFloats => self.fill_halves(to, 0x9f, 0),
        }
    }

    /// Fills memory with f16 values, in whose upper bytes the bits of `kept` are random and the bits of `set` are set.
    fn fill_halves(&self, to: &Memory, kept: u8, set: u8) -> Result<()> {
        let needed = &self.random[..to.len().next_multiple_of(2).min(RANDOM)];
        let halves = needed.chunks_exact(2).flat_map(|pair| [pair[0], pair[1] & kept | set]);
        repeat(to, &halves.collect::<Vec<u8>>())
    }
}

fn repeat(to: &Memory, block: &[u8]) -> Result<()> {
    (0..to.len())
        .step_by(block.len().max(1))
        .try_for_each(|at| to.write(at, &block[..block.len().min(to.len() - at)]))
}

fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn random_bytes() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(RANDOM);
    while bytes.len() < RANDOM {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes
}

/// Compiles all kernels that are measured into a directory, for these architectures. Returns the number of kernels.
///
/// # Errors
/// When there is no compiler, or a kernel does not compile.
pub fn compile_ahead(directory: &Path, architectures: &[GpuArchitecture]) -> Result<usize> {
    Nvrtc.version()?;
    let cache = ImageCache::in_directory(Some(directory.to_owned()), Nvrtc);
    let mut count = 0;
    for &architecture in architectures {
        let mut variants = ceilings::variants();
        for case in cases(&linear::PlanLimits::of(architecture))? {
            if !variants.contains(&case.variant) {
                variants.push(case.variant);
            }
        }
        for variant in &variants {
            cache.image(variant, architecture, Form::Cubin)?;
        }
        count += variants.len();
    }
    Ok(count)
}
