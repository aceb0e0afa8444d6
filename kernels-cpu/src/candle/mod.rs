//! Linear layers on packed weights as operations on candle tensors, for engines that use candle.
//!
//! A [`QuantizedLinear`] is a [`Module`] like `candle_nn::Linear`, and also a [`CustomOp1`]. A [`Runner`] holds the
//! threads and memory that the layers of a model share; [`Activations`] is the form that their input is converted to.
//! Results are bit-identical to those of [`PackedLinear::multiply`] and
//! [`multiply_float`](PackedLinear::multiply_float).
//!
//! ```
//! use std::sync::Arc;
//!
//! use candle_core::{DType, Device, Module, Tensor};
//! use quant_kernels_cpu::candle::{Activations, QuantizedLinear, Runner};
//! use quant_kernels_cpu::{PackedLinear, Serial, WeightView};
//!
//! // Two output features, eight input features: 4-bit codes with the zero point 8, one scale per row.
//! let (codes, scales) = ([9, 9, 9, 9, 9, 9, 9, 9, 7, 7, 7, 7, 7, 7, 7, 7], [0.5, 0.25]);
//! let view = WeightView::new([2, 8], 4, 8, &codes, &scales, None)?;
//! let weight = Arc::new(PackedLinear::pack(&view, None, false, &Serial)?);
//!
//! let runner = Runner::new(Serial); // one for all layers; `Rayon` with the feature `rayon`
//! let linear = QuantizedLinear::new(weight, Activations::PerToken, &runner)?;
//!
//! let x = Tensor::ones((1, 3, 8), DType::BF16, &Device::Cpu)?; // [batch, positions, k]
//! let y = linear.forward(&x)?; // [batch, positions, n]
//! assert_eq!((y.dims(), y.dtype()), (&[1, 3, 2][..], DType::BF16));
//! assert_eq!(y.get(0)?.get(2)?.to_dtype(DType::F32)?.to_vec1::<f32>()?, [4.0, -2.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Attention on a [`KvCache`](crate::attention::KvCache) is not available as an operation, because appending a token
//! modifies the cache.

mod experts;
mod fused;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Error, Layout, MetalStorage, Module, Result, Shape, Tensor,
    bail,
};
use half::{bf16, f16};

pub use self::experts::{ExpertLinear, QuantizedExperts};
pub use self::fused::Fused;
use self::fused::Values;
pub use crate::Activations;
use crate::activation::resize;
use crate::experts::ExpertsWorkspace;
use crate::{
    Element, FloatRows, Int8Rows, IsaToken, KernelError, PackedLinear, Parallel, Product, RowLayout, narrow,
};

/// The threads and memory that the linear layers of a model share.
///
/// Memory is kept and reused by later calls; [`release`](Self::release) frees it. Clones share the same threads and
/// memory.
#[derive(Clone)]
pub struct Runner {
    parallel: Arc<dyn Parallel + Send>,
    idle: Arc<Mutex<Vec<CallMemory>>>,
}

impl Runner {
    /// Creates a runner on these threads.
    pub fn new(parallel: impl Parallel + Send + 'static) -> Self {
        Self { parallel: Arc::new(parallel), idle: Arc::default() }
    }

    /// The threads.
    pub fn parallel(&self) -> &dyn Parallel {
        &*self.parallel
    }

    /// Frees the memory that is kept for later calls, for example after a long prompt.
    pub fn release(&self) {
        // Release the lock before the memory is freed.
        let idle = std::mem::take(&mut *self.idle.lock().unwrap_or_else(PoisonError::into_inner));
        drop(idle);
    }

    /// The memory is kept for later calls.
    fn with_memory<T>(&self, call: impl FnOnce(&mut CallMemory, &dyn Parallel) -> T) -> T {
        let left = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut rows = left.unwrap_or_else(CallMemory::new);
        let result = call(&mut rows, &*self.parallel);
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(rows);
        result
    }
}

impl fmt::Debug for Runner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runner").field("threads", &self.parallel.threads()).finish_non_exhaustive()
    }
}

struct CallMemory {
    float: FloatRows,
    whole: Int8Rows,
    /// Results before they are rounded to f16 or bf16.
    out: Vec<f32>,
    experts: ExpertsWorkspace,
}

impl CallMemory {
    fn new() -> Self {
        Self {
            float: FloatRows::new(IsaToken::detect()),
            whole: Int8Rows::default(),
            out: Vec::new(),
            experts: ExpertsWorkspace::default(),
        }
    }
}

/// `y = x Ŵᵀ + b` with packed weights `[n, k]`.
///
/// The input is `[.., k]` in `f32`, f16 or bf16, on the CPU; non-contiguous input is copied first. The result is
/// `[.., n]` in the type of the input. Gradients are not supported: the result of [`forward`](Module::forward) is
/// detached, and `backward` fails on the result of `apply_op1`. Clones share the weights and the runner.
#[derive(Debug, Clone)]
pub struct QuantizedLinear {
    weight: Arc<PackedLinear>,
    activations: Activations,
    runner: Runner,
}

impl QuantizedLinear {
    /// Creates a linear layer with these weights, and the bias that they were packed with.
    ///
    /// # Errors
    /// When the weights are FP8 (E4M3) or bf16 and the activations int8, a static scale is not positive and finite, or
    /// its zero point requires sums and the weights were packed without them.
    pub fn new(
        weight: Arc<PackedLinear>,
        activations: Activations,
        runner: &Runner,
    ) -> std::result::Result<Self, KernelError> {
        let linear = Self { weight, activations, runner: runner.clone() };
        // Quantizing zero rows reports errors that do not depend on the input.
        linear.multiply::<f32>(&[], &mut [])?;
        Ok(linear)
    }

    /// The weights.
    pub fn weight(&self) -> &Arc<PackedLinear> {
        &self.weight
    }

    /// The runner of this layer.
    pub fn runner(&self) -> &Runner {
        &self.runner
    }

    /// The form of the activations.
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// Runs the layer on slices: `x` is `[m, k]`, `out` is `[m, n]`, row-major and overwritten.
    ///
    /// # Errors
    /// When the length of `x` is not a multiple of `k`, `out` has the wrong length, or memory allocation fails.
    pub fn multiply<E: Element>(&self, x: &[E], out: &mut [f32]) -> std::result::Result<(), KernelError> {
        self.runner.with_memory(|rows, parallel| {
            self.multiply_in(&mut rows.float, &mut rows.whole, x, out, parallel)
        })
    }

    fn multiply_in<E: Element>(
        &self,
        float: &mut FloatRows,
        whole: &mut Int8Rows,
        x: &[E],
        out: &mut [f32],
        parallel: &dyn Parallel,
    ) -> std::result::Result<(), KernelError> {
        let (weight, bias) = (self.weight.view(), self.weight.bias());
        self.multiply_products(float, whole, Values::Plain(x), &mut [Product { weight, bias, out }], parallel)
    }

    /// Whether [`forward_each`](Self::forward_each) accepts both: their input is quantized or packed in the same way.
    pub fn shares_input_with(&self, other: &Self) -> bool {
        self.activations == other.activations
            && RowLayout::of(self.weight.layout()) == RowLayout::of(other.weight.layout())
    }

    /// Runs several linear layers on the same input, such as those of queries, keys and values. An `f32` input is
    /// quantized or packed once for all layers; other types are processed layer by layer. Results are bit-identical to
    /// separate calls of [`forward`](Module::forward).
    ///
    /// # Errors
    /// When two layers cannot [share their input](Self::shares_input_with), or for any reason for which
    /// [`forward`](Module::forward) fails.
    pub fn forward_each(linears: &[&Self], x: &Tensor) -> Result<Vec<Tensor>> {
        let Some(first) = Self::first_of(linears)? else { return Ok(Vec::new()) };
        if x.dtype() != DType::F32 || !x.device().is_cpu() {
            return linears.iter().map(|linear| linear.forward(x)).collect();
        }
        first.with_rows(x, |x| Self::products_of(linears, x, Values::Plain))
    }

    /// Runs the layer as [`multiply`](Self::multiply) does, and rounds the results to the type of `x`.
    fn multiply_narrow<E: Element>(&self, x: &[E], out: &mut [E]) -> std::result::Result<(), KernelError> {
        self.runner.with_memory(|rows, parallel| {
            // The buffer never shrinks. Otherwise it would have to be zeroed again when a call with few rows is
            // followed by one with many.
            let room = rows.out.len().max(out.len());
            resize(&mut rows.out, Some(room))?;
            let sums = &mut rows.out[..out.len()];
            self.multiply_in(&mut rows.float, &mut rows.whole, x, sums, parallel)?;
            narrow(IsaToken::detect(), sums, out, parallel)
        })
    }
}

impl Module for QuantizedLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.apply_op1_no_bwd(self)
    }
}

impl CustomOp1 for QuantizedLinear {
    fn name(&self) -> &'static str {
        "quantized-linear"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (name, dtype) = (self.name(), storage.dtype());
        let [n, k] = [self.weight.layout().n(), self.weight.layout().k()];
        let mut dims = layout.dims().to_vec();
        match dims.last_mut() {
            Some(last) if *last == k => *last = n,
            _ => bail!("{name}: expected an input of shape [.., {k}], got {:?}", layout.dims()),
        }
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            bail!("{name}: expected f32, f16 or bf16, got {}", dtype.as_str());
        }
        let count = layout.shape().elem_count();
        let Some((start, _)) = layout.contiguous_offsets() else {
            let mut rows = storage.device().zeros_impl(layout.shape(), dtype)?;
            storage.copy_strided_src(&mut rows, 0, layout)?;
            return self.cpu_fwd(&rows, &Layout::contiguous(layout.shape()));
        };
        let results = (count / k).checked_mul(n).filter(|&r| r <= isize::MAX as usize / size_of::<f32>());
        let results = results.ok_or_else(|| Error::wrap(KernelError::TooLarge("the output")))?;
        let out = match storage {
            CpuStorage::F32(x) => {
                let mut out = vec![0.0; results];
                self.multiply(part(x, start, count)?, &mut out).map_err(Error::wrap)?;
                CpuStorage::F32(out)
            }
            CpuStorage::F16(x) => {
                let mut out = vec![f16::ZERO; results];
                self.multiply_narrow(part(x, start, count)?, &mut out).map_err(Error::wrap)?;
                CpuStorage::F16(out)
            }
            CpuStorage::BF16(x) => {
                let mut out = vec![bf16::ZERO; results];
                self.multiply_narrow(part(x, start, count)?, &mut out).map_err(Error::wrap)?;
                CpuStorage::BF16(out)
            }
            _ => bail!("{name}: expected f32, f16 or bf16, got {}", dtype.as_str()),
        };
        Ok((out, Shape::from(dims)))
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        bail!(
            "{} runs on the CPU only, but its input is on CUDA: move the input to the CPU first",
            self.name()
        )
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        bail!(
            "{} runs on the CPU only, but its input is on Metal: move the input to the CPU first",
            self.name()
        )
    }
}

fn part<E>(x: &[E], start: usize, count: usize) -> Result<&[E]> {
    let left = x.get(start..).and_then(|left| left.get(..count));
    left.ok_or_else(|| {
        Error::wrap(KernelError::Length { what: "activations", expected: count, got: x.len() })
    })
}
