//! How near the kernels come to what a device can do: `quant bench kernels --device cuda`, and what `cargo xtask gpu`
//! carries to a GPU.
//!
//! The device's own ceilings are measured first ([`Ceilings`]), then launches of every kernel on shapes of models in use
//! ([`cases`]): many in a row between two events, on memory that no cache still holds. A kernel's share is the time that
//! its bytes or its products take at those ceilings, over the time that it took.

mod cases;
mod ceilings;

use std::path::Path;

pub use self::cases::{Bound, Case, cases};
pub use self::ceilings::Ceilings;

use crate::compile::{Architecture, Form, Variant};
use crate::device::Kernels;
use crate::image_cache::{Compiler, ImageCache, Nvrtc, default_directory};
use crate::launch::{Argument, LaunchShape, Stream};
use crate::standalone::{Event, Gpu, Memory};
use crate::{Error, Result, linear};
use cases::{Buffer, Fill};

/// Seconds that one measurement takes at least, and how many there are.
const LEAST: f64 = 0.05;
const REPEATS: usize = 5;
/// Launches of a measurement, at most.
const MOST_LAUNCHES: usize = 20_000;
/// Times the L2 cache that buffers used in turn are large, and how many of a kind there are at most.
const TURNS_OVER_CACHE: usize = 10;
const MOST_TURNS: usize = 64;
/// Bytes of random numbers that are repeated.
const RANDOM: usize = 8 << 20;

/// One launch.
#[derive(Debug, Clone)]
struct Work {
    shape: LaunchShape,
    arguments: Vec<Argument>,
}

/// Seconds of a launch.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Times {
    /// Of each measurement, a mean over its launches, from the shortest on.
    pub seconds: Vec<f64>,
}

impl Times {
    /// The median.
    pub fn usual(&self) -> f64 {
        self.seconds[self.seconds.len() / 2]
    }
}

/// Measures on the first device. Kernels come from the user's directory of images, and from the compiler where one is
/// missing there.
#[derive(Debug)]
pub struct Meter {
    gpu: &'static Gpu,
    kernels: Kernels,
    /// Of the L2 cache.
    cache_bytes: usize,
    random: Vec<u8>,
}

impl Meter {
    /// On the first device.
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

    /// Measures what the device can do at most.
    ///
    /// # Errors
    /// When a kernel cannot be had or launched, or fails on the device.
    pub fn ceilings(&self) -> Result<Ceilings> {
        Ceilings::measure(self)
    }

    /// Measures a case, which must have been planned for this device.
    ///
    /// # Errors
    /// As [`ceilings`](Self::ceilings), and when the device has too little memory that is free.
    pub fn time(&self, case: &Case) -> Result<Times> {
        let sum = |turns| case.buffers.iter().filter(|b| b.turns == turns).map(|b| b.bytes).sum::<usize>();
        let (kept, turning) = (sum(false), sum(true).max(1));
        // What allocations are rounded up to, and the driver itself, take the rest.
        let room = (self.gpu.memory()?.free / 10 * 9).saturating_sub(kept) / turning;
        let turns = (TURNS_OVER_CACHE * self.cache_bytes).div_ceil(turning).clamp(1, MOST_TURNS).min(room);
        if turns == 0 {
            let reason =
                format!("{} bytes are needed, and the device has fewer that are free", kept + turning);
            return Err(Error::Driver { action: "allocate memory", reason });
        }
        let mut memory: Vec<Memory> = Vec::new();
        let mut addresses = vec![0; case.buffers.len()];
        let mut work = Vec::new();
        for turn in 0..turns {
            for (address, buffer) in addresses.iter_mut().zip(&case.buffers) {
                if turn == 0 || buffer.turns {
                    let bytes = Memory::filled(buffer.bytes, 0)?;
                    self.fill(&bytes, buffer)?;
                    *address = bytes.region().address;
                    memory.push(bytes);
                }
            }
            work.push(Work { shape: case.launch, arguments: case.arguments(&addresses)? });
        }
        // SAFETY: the plan's arguments, on as much memory as it asks for, which lives until the measurement is done.
        unsafe { self.seconds(&case.variant, &work) }
    }

    /// Seconds of a launch of `work`, each of which is one on other memory, in turn.
    ///
    /// # Safety
    /// The variant must be one of ours; arguments must be its own, and point to memory that lives until this returns.
    unsafe fn seconds(&self, variant: &Variant, work: &[Work]) -> Result<Times> {
        let shared = work.iter().map(|work| work.shape.shared_bytes).max().unwrap_or(0);
        // SAFETY: the primary context is never released; images are ours.
        let kernel = unsafe { self.kernels.kernel(variant, shared) }?;
        let run = |count: usize| -> Result<f64> {
            let begin = Event::now()?;
            for work in work.iter().cycle().take(count) {
                // SAFETY: as the caller promises; the end is waited for below.
                unsafe { kernel.launch(&work.shape, &work.arguments, Stream::DEFAULT) }?;
            }
            let end = Event::now()?;
            self.gpu.wait()?;
            end.seconds_since(&begin)
        };
        // Once to load and warm, then as often as it takes.
        run(work.len())?;
        let once = run(work.len())? / work.len().max(1) as f64;
        let count = ((LEAST / once.max(1e-7)) as usize).clamp(work.len().max(3), MOST_LAUNCHES);
        let mut seconds =
            (0..REPEATS).map(|_| Ok(run(count)? / count as f64)).collect::<Result<Vec<f64>>>()?;
        seconds.sort_by(f64::total_cmp);
        Ok(Times { seconds })
    }

    fn fill(&self, to: &Memory, buffer: &Buffer) -> Result<()> {
        let words = to.len() as u32 / 4;
        match buffer.fill {
            Fill::Zeros => Ok(()),
            Fill::Counted => to.write(0, &(0..words).flat_map(u32::to_le_bytes).collect::<Vec<u8>>()),
            Fill::Words(word) => to.write(0, &word.to_le_bytes().repeat(words as usize)),
            Fill::Random => repeat(to, &self.random),
            // The exponents of numbers from a quarter to two, as halves.
            Fill::Floats => self.fill_halves(to, 0x8f, 0x34),
            Fill::SmallFloats => self.fill_halves(to, 0x9f, 0),
        }
    }

    /// Random halves, of whose upper bytes some bits stay and some are set.
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

/// Compiles all that is measured into a directory, for devices of these architectures, which need not be there; says how
/// many kernels that were.
///
/// # Errors
/// When there is no compiler, or one does not compile.
pub fn compile_ahead(directory: &Path, architectures: &[Architecture]) -> Result<usize> {
    Nvrtc.version()?;
    let cache = ImageCache::in_directory(Some(directory.to_owned()), Nvrtc);
    let mut count = 0;
    for &architecture in architectures {
        let mut variants = ceilings::variants();
        for case in cases(&linear::LinearLimits::of(architecture))? {
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
