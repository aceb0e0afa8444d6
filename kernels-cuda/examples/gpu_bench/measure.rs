//! The time of a launch: many in a row between two events, on memory that no cache still holds.

use std::path::PathBuf;

use quant_kernels_cuda::compile::{Architecture, Form, Variant};
use quant_kernels_cuda::device::Kernels;
use quant_kernels_cuda::image_cache::{Compiler, ImageCache, Nvrtc, default_directory};
use quant_kernels_cuda::launch::{Argument, LaunchShape, Stream};

use quant_kernels_cuda::standalone::{Event, Gpu};

/// Seconds that one measurement takes at least.
const LEAST: f64 = 0.05;
const REPEATS: usize = 5;

/// One launch.
#[derive(Debug, Clone)]
pub struct Work {
    pub shape: LaunchShape,
    pub arguments: Vec<Argument>,
}

/// Kernels, from the directory of images where there is no compiler.
pub struct Bench {
    pub gpu: &'static Gpu,
    kernels: Kernels,
}

impl Bench {
    pub fn new(gpu: &'static Gpu) -> Self {
        Self { gpu, kernels: Kernels::new(ImageCache::in_directory(default_directory(), Nvrtc)) }
    }

    /// Median seconds of a launch of `work`, each of which is one on other memory, in turn.
    ///
    /// # Errors
    /// When the kernel cannot be had or launched, or fails on the device.
    pub fn seconds(&self, variant: &Variant, work: &[Work]) -> Result<f64, String> {
        let shared = work.iter().map(|work| work.shape.shared_bytes).max().ok_or("nothing to launch")?;
        // SAFETY: the primary context is never released; images are ours.
        let kernel = unsafe { self.kernels.kernel(variant, shared) }.map_err(|e| e.to_string())?;
        let run = |count: usize| -> Result<f64, String> {
            let begin = Event::now().map_err(|e| e.to_string())?;
            for work in work.iter().cycle().take(count) {
                // SAFETY: the plans' arguments, with memory that lives until after the wait.
                unsafe { kernel.launch(&work.shape, &work.arguments, Stream::DEFAULT) }
                    .map_err(|e| e.to_string())?;
            }
            let end = Event::now().map_err(|e| e.to_string())?;
            self.gpu.wait().map_err(|e| e.to_string())?;
            end.seconds_since(&begin).map_err(|e| e.to_string())
        };
        // Once to load and warm, then as often as it takes.
        run(work.len())?;
        let once = run(work.len())? / work.len() as f64;
        let count = ((LEAST / once.max(1e-7)) as usize).clamp(work.len().max(3), 20_000);
        let mut times = (0..REPEATS).map(|_| run(count)).collect::<Result<Vec<f64>, String>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times[REPEATS / 2] / count as f64)
    }
}

/// Compiles variants into a directory, for devices of these architectures; says how many there are.
///
/// # Errors
/// When one does not compile.
pub fn compile_ahead(
    directory: PathBuf,
    variants: impl Fn(Architecture) -> Vec<Variant>,
    architectures: &[Architecture],
) -> Result<usize, String> {
    Nvrtc.version().map_err(|e| e.to_string())?;
    let cache = ImageCache::in_directory(Some(directory), Nvrtc);
    let mut count = 0;
    for &architecture in architectures {
        for variant in variants(architecture) {
            cache.image(&variant, architecture, Form::Cubin).map_err(|e| e.to_string())?;
            count += 1;
        }
    }
    Ok(count)
}
