//! Linears with weights on the device and activations on the host, for models that compute everything else on the CPU.
//! The packed bytes and the kernels are the same as in an engine that runs on the device.

use std::sync::{Arc, Mutex, PoisonError};

use half::f16;
use quant_kernels_cpu::{Activations, KernelError, WeightView};

use super::{Gpu, Memory};
use crate::Float;
use crate::activation::FixedScale;
use crate::device::Kernels;
use crate::error::Result;
use crate::image_cache::ImageCache;
use crate::launch::{Region, Stream};
use crate::layout::{Order, WeightLayout};
use crate::linear::{CallArguments, CallLaunch, CallShape, LinearCall, Output, PlanLimits};

const MAX_VALUES: usize = 1 << 26;
/// The exponent to which a row's largest activation is scaled in f16. Sums then stay finite, and a value 2³⁸ times
/// smaller is still nonzero.
const EXPONENT: i32 = 14;

/// The kernels and the device memory that the linears of a model share.
#[derive(Debug)]
pub struct Launcher {
    gpu: &'static Gpu,
    kernels: Kernels,
    scratch: Mutex<Scratch>,
}

/// It is kept for later calls, and only grows.
#[derive(Debug, Default)]
struct Scratch {
    x: Option<Memory>,
    between: Option<Memory>,
    out: Option<Memory>,
    /// Host memory.
    rows: Vec<u8>,
    results: Vec<u8>,
}

impl Launcher {
    /// Creates a launcher on the first device, with images in the default directory.
    ///
    /// # Errors
    /// When there is no driver or device, or the device is too old.
    pub fn new() -> Result<Self> {
        let gpu = Gpu::first()?;
        gpu.limits.target()?;
        Ok(Self { gpu, kernels: Kernels::new(ImageCache::new()), scratch: Mutex::default() })
    }

    /// The device's name, from the driver.
    pub fn device(&self) -> &str {
        &self.gpu.name
    }
}

/// `y = x Ŵᵀ` with weights `[n, k]` on the device.
#[derive(Debug)]
pub struct CudaLinear {
    layout: WeightLayout,
    weight: Memory,
    activations: Activations,
    limits: PlanLimits,
    launcher: Arc<Launcher>,
}

impl CudaLinear {
    /// Packs weights and copies them to the device.
    ///
    /// # Errors
    /// When the kernels do not support the scheme ([`WeightLayout::of`]), packing rejects a value
    /// ([`WeightLayout::pack`]), a static scale is invalid, or the device has too little memory.
    pub fn new(view: &WeightView<'_>, activations: Activations, launcher: &Arc<Launcher>) -> Result<Self> {
        let (order, sums) = match activations {
            Activations::Float => (Order::Float, false),
            Activations::PerToken => (Order::Int8, false),
            Activations::Static(by) => (Order::Int8, by.zero != 0),
        };
        let layout = WeightLayout::of(view, order, sums)?;
        let mut packed = vec![0; layout.bytes()];
        layout.pack(view, &mut packed)?;
        let weight = Memory::of(&packed)?;
        let limits = PlanLimits::from(&launcher.gpu.limits);
        let linear = Self { layout, weight, activations, limits, launcher: Arc::clone(launcher) };
        // Reports every error that does not depend on the input.
        linear.call(0)?;
        Ok(linear)
    }

    /// The number of output features.
    pub fn n(&self) -> usize {
        self.layout.n()
    }

    /// The number of input features.
    pub fn k(&self) -> usize {
        self.layout.k()
    }

    /// The size in bytes of the weights on the device.
    pub fn bytes(&self) -> usize {
        self.layout.bytes()
    }

    /// Computes `out[m, n] = x[m, k] · Ŵᵀ`, row-major, and waits for the results.
    ///
    /// # Errors
    /// When the length of `x` is not a multiple of `k`, `out` has the wrong length, or the driver or the device fails.
    pub fn multiply(&self, x: &[f32], out: &mut [f32]) -> Result<()> {
        let (n, k) = (self.n(), self.k());
        let m = x.len() / k.max(1);
        let results = m.checked_mul(n).ok_or(KernelError::TooLarge("the output"))?;
        for (what, expected, got) in [("activations", m * k, x.len()), ("output", results, out.len())] {
            if expected != got {
                return Err(KernelError::Length { what, expected, got }.into());
            }
        }
        if out.is_empty() {
            return Ok(());
        }
        let at_once = (MAX_VALUES / n.max(k)).max(1);
        for (x, out) in x.chunks(at_once * k).zip(out.chunks_mut(at_once * n)) {
            self.multiply_rows(x, out)?;
        }
        Ok(())
    }

    fn multiply_rows(&self, x: &[f32], out: &mut [f32]) -> Result<()> {
        let (n, k) = (self.n(), self.k());
        let call = self.call(x.len() / k)?;
        self.launcher.gpu.make_current()?;
        let mut scratch = self.launcher.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let scratch = &mut *scratch;
        let mut shifts = Vec::new();
        match self.activations {
            Activations::Float => shifts = halves(x, k, k.next_multiple_of(8), &mut scratch.rows),
            _ => {
                scratch.rows.clear();
                scratch.rows.extend(x.iter().flat_map(|v| v.to_le_bytes()));
            }
        }
        let rows = room(&mut scratch.x, scratch.rows.len())?;
        rows.write(0, &scratch.rows)?;
        let between = room(&mut scratch.between, call.scratch_bytes())?;
        // A call of a different plan may have left sums in place of the tickets.
        between.write(0, &vec![0; call.zero_bytes()])?;
        let results = room(&mut scratch.out, 4 * out.len())?;
        let places = CallArguments {
            weight: self.weight.region(),
            bias: Region::NONE,
            x: rows.region(),
            out: results.region(),
            scratch: between.region(),
        };
        for CallLaunch { variant, shape, arguments } in call.launches(&places)? {
            // SAFETY: the primary context is never released, and images come from this crate or from the user's own
            // directory.
            let kernel = unsafe { self.launcher.kernels.kernel(&variant, shape.shared_bytes) }?;
            // SAFETY: the arguments match the plan, on memory that lives until the results have been read.
            unsafe { kernel.launch(&shape, &arguments, Stream::DEFAULT) }?;
        }
        scratch.results.resize(4 * out.len(), 0);
        results.read(0, &mut scratch.results)?;
        for (value, bytes) in out.iter_mut().zip(scratch.results.as_chunks().0) {
            *value = f32::from_le_bytes(*bytes);
        }
        for (row, shift) in out.chunks_mut(n).zip(shifts) {
            row.iter_mut().for_each(|value| *value *= exp2(-shift));
        }
        Ok(())
    }

    fn call(&self, m: usize) -> Result<LinearCall> {
        let k = self.k();
        let (element, stride) = match self.activations {
            Activations::Float => (Float::F16, k.next_multiple_of(8)),
            _ => (Float::F32, k),
        };
        let shape =
            CallShape { stride, output: Output::F32, fixed: self.fixed(), ..CallShape::new(element, m, k) };
        Ok(LinearCall::new(&self.layout, &shape, &self.limits)?)
    }

    fn fixed(&self) -> Option<FixedScale> {
        match self.activations {
            Activations::Static(by) => Some(FixedScale { scale: by.scale, zero: by.zero }),
            _ => None,
        }
    }
}

fn room(memory: &mut Option<Memory>, bytes: usize) -> Result<&Memory> {
    match memory {
        Some(memory) if memory.len() >= bytes => {}
        _ => {
            *memory = None;
            *memory = Some(Memory::filled(bytes, 0)?);
        }
    }
    Ok(memory.get_or_insert(Memory::filled(0, 0)?))
}

/// Converts rows to f16, `stride` elements apart, each scaled by a power of two; returns the exponents.
fn halves(x: &[f32], k: usize, stride: usize, out: &mut Vec<u8>) -> Vec<i32> {
    out.clear();
    out.resize(x.len() / k * stride * 2, 0);
    let rows = x.chunks(k).zip(out.chunks_mut(2 * stride));
    rows.map(|(row, out)| {
        let max = row.iter().fold(0.0_f32, |max, v| max.max(v.abs()));
        let shift = if max > 0.0 && max.is_finite() { (EXPONENT - exponent(max)).min(126) } else { 0 };
        for (value, out) in row.iter().zip(out.as_chunks_mut().0) {
            *out = f16::from_f32(value * exp2(shift)).to_le_bytes();
        }
        shift
    })
    .collect()
}

/// `⌊log₂ x⌋` for normal positive numbers, −127 for smaller ones.
fn exponent(x: f32) -> i32 {
    (x.to_bits() >> 23) as i32 - 127
}

/// `2^exponent`, for −126 to 127.
fn exp2(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_keep_what_halves_can_hold() {
        let rows =
            [[1e6_f32, -3.0, 0.5, 1e-5], [2e-40, 1e-41, 0.0, -2e-40], [0.0; 4], [3e38, 1.0, -3e38, 2e38]];
        let mut bytes = Vec::new();
        let shifts = halves(rows.as_flattened(), 4, 8, &mut bytes);
        assert_eq!(bytes.len(), 4 * 8 * 2);
        for (row, (shift, bytes)) in rows.iter().zip(shifts.iter().zip(bytes.chunks(16))) {
            let max = row.iter().fold(0.0_f32, |max, v| max.max(v.abs()));
            for (value, pair) in row.iter().zip(bytes.as_chunks().0) {
                let back = f16::from_le_bytes(*pair).to_f32() * exp2(-shift);
                let tolerance =
                    (value.abs() / 2048.0).max(max * 2_f32.powi(-37)).max(f32::MIN_POSITIVE / 1e6);
                assert!((back - value).abs() <= tolerance, "{value} became {back}");
            }
            assert!(bytes[8..].iter().all(|&b| b == 0), "padding between rows is zero");
        }
    }

    #[test]
    fn what_is_not_finite_stays_so() {
        let mut bytes = Vec::new();
        halves(&[f32::NAN, 1.0, f32::INFINITY, 1.0], 2, 8, &mut bytes);
        let at = |i: usize| f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]);
        assert!(at(0).is_nan() && at(8).is_infinite());
    }
}
