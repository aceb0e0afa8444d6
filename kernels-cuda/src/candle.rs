//! Linears on packed weights as operations on candle's tensors on `Device::Cuda`, for engines that use candle.
//!
//! Names and structure follow [`quant_kernels_cpu::candle`]. A [`QuantizedLinear`] is a [`Module`] like
//! `candle_nn::Linear`, and a [`CustomOp1`]. A [`Runner`] holds the device and the kernels that the linears of a model
//! share. [`Activations`] determines how inputs are quantized. candle allocates the memory, and launches go to the
//! device's stream. [`QuantizedExperts`] runs the experts of a layer.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use candle_core::{DType, Device, Module, Tensor};
//! use quant_kernels_cpu::WeightView;
//! use quant_kernels_cuda::candle::{Activations, DevicePackedLinear, QuantizedLinear, Runner};
//! use quant_kernels_cuda::layout::Order;
//!
//! // Two output features, 32 input features: 4-bit codes with zero point 8, one scale per row.
//! let (codes, scales) = ([9; 64], [0.5, 0.25]);
//! let view = WeightView::new([2, 32], 4, 32, &codes, &scales, None)?;
//!
//! let device = Device::new_cuda(0)?;
//! let weight = Arc::new(DevicePackedLinear::pack(&view, None, Order::Int8, false, &device)?);
//! let runner = Runner::new(&device)?; // one for all linears
//! let linear = QuantizedLinear::new(weight, Activations::PerToken, &runner)?;
//!
//! let x = Tensor::ones((1, 3, 32), DType::BF16, &device)?; // [batch, positions, k]
//! let y = linear.forward(&x)?; // [batch, positions, n]
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod experts;

use std::fmt;
use std::sync::Arc;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr};
use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, CustomOp1, DType, Device, Error, Layout, MetalStorage, Module,
    Result, Shape, Tensor, bail,
};
pub use quant_kernels_cpu::Activations;
use quant_kernels_cpu::{KernelError, WeightView};

pub use self::experts::QuantizedExperts;
use crate::activation::FixedScale;
use crate::compile::Variant;
use crate::device::{self, Kernels};
use crate::float::Float;
use crate::launch::{Argument, LaunchShape, Region, Stream};
use crate::layout::{Order, WeightLayout};
use crate::linear::{CallArguments, CallShape, LinearCall, PlanLimits};
use crate::tensor::{input, types};

/// Packed weights `[n, k]` on a device.
#[derive(Debug)]
pub struct DevicePackedLinear {
    layout: WeightLayout,
    bytes: CudaSlice<u8>,
    bias: Option<CudaSlice<f32>>,
    device: CudaDevice,
}

impl DevicePackedLinear {
    /// Packs a view on the CPU and copies it to the device. Pass [`Order::Float`] for [`Activations::Float`], which FP4
    /// and FP8 weights require, and [`Order::Int8`] for the others. Set `sums` if activations may have a zero point.
    ///
    /// # Errors
    /// See [`WeightLayout::of`] and [`WeightLayout::pack`]; also when the bias is not `[n]`, the device is not CUDA, or
    /// it has too little memory.
    pub fn pack(
        view: &WeightView<'_>,
        bias: Option<&[f32]>,
        order: Order,
        sums: bool,
        device: &Device,
    ) -> Result<Self> {
        let layout = WeightLayout::of(view, order, sums).map_err(Error::wrap)?;
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(layout.bytes())
            .map_err(|_| Error::wrap(KernelError::Memory("the packed matrix")))?;
        bytes.resize(layout.bytes(), 0);
        layout.pack(view, &mut bytes).map_err(Error::wrap)?;
        Self::from_packed(layout, &bytes, bias, device)
    }

    /// Copies weights that are already packed to the device.
    ///
    /// # Errors
    /// When the layout needs a different number of bytes; otherwise as [`pack`](Self::pack).
    pub fn from_packed(
        layout: WeightLayout,
        bytes: &[u8],
        bias: Option<&[f32]>,
        device: &Device,
    ) -> Result<Self> {
        let length = |what, expected, got| match got == expected {
            true => Ok(()),
            false => Err(Error::wrap(KernelError::Length { what, expected, got })),
        };
        length("packed weights", layout.bytes(), bytes.len())?;
        if let Some(bias) = bias {
            length("bias", layout.n(), bias.len())?;
        }
        let device = device.as_cuda_device()?.clone();
        let bytes = device.clone_htod(bytes)?;
        let bias = bias.map(|bias| device.clone_htod(bias)).transpose()?;
        // The copy may be on a stream of this thread only, and other threads will use the weights.
        device.synchronize()?;
        Ok(Self { layout, bytes, bias, device })
    }

    /// The layout.
    pub fn layout(&self) -> &WeightLayout {
        &self.layout
    }

    /// The bias that was passed with the weights.
    pub fn bias(&self) -> Option<&CudaSlice<f32>> {
        self.bias.as_ref()
    }
}

/// The device and the kernels that the linears of a model share.
///
/// A kernel is compiled and loaded when it is first needed. To avoid this in time-critical code or in a graph capture,
/// make one call in advance with the same number of tokens. Images are cached in the user's cache directory, or in the
/// directory named by `QUANT_CUDA_CACHE`. The origin of images in this directory is not verified, so only trusted users
/// may write to it. Clones share the device and the kernels.
#[derive(Clone)]
pub struct Runner {
    // Declared first, so that kernels are dropped before the device, into whose context they are loaded.
    kernels: Arc<Kernels>,
    limits: PlanLimits,
    device: CudaDevice,
}

impl Runner {
    /// Creates a runner on this device. Weights and inputs must be on the same device.
    ///
    /// # Errors
    /// When the device is not a CUDA device, or is older than every supported architecture.
    pub fn new(device: &Device) -> Result<Self> {
        let device = device.as_cuda_device()?.clone();
        device.cuda_stream().context().bind_to_thread().w()?;
        let limits = device::DeviceLimits::current().map_err(Error::wrap)?;
        limits.target().map_err(Error::wrap)?;
        Ok(Self { kernels: Arc::default(), limits: (&limits).into(), device })
    }

    /// Launches a call on the device's stream, with the weights and the activations of `x` from element `start` on.
    fn call<T: DeviceRepr>(
        &self,
        call: &LinearCall,
        weight: &DevicePackedLinear,
        x: &CudaSlice<T>,
        start: usize,
    ) -> Result<CudaSlice<T>> {
        let stream = self.device.cuda_stream();
        // SAFETY: the launches write every result; without results, the one allocated element is never read.
        let mut out = unsafe { self.device.alloc::<T>(call.results().max(1)) }?;
        if call.results() == 0 {
            return Ok(out);
        }
        // SAFETY: the part that must be zero is zeroed below; the rest is written before it is read.
        let mut scratch = unsafe { self.device.alloc::<u8>(call.scratch_bytes().max(1)) }?;
        if call.zero_bytes() > 0 {
            stream.memset_zeros(&mut scratch.slice_mut(..call.zero_bytes())).w()?;
        }
        let (x_bytes, x_start) = (x.num_bytes(), start.saturating_mul(size_of::<T>()));
        let (out_bytes, scratch_bytes) = (out.num_bytes(), scratch.num_bytes());
        let region = |address, bytes: usize| Region { address, bytes: bytes as u64 };
        // The guards are dropped after the launches, and then record events on the stream if candle tracks events.
        let (x_at, _x) = x.device_ptr(&stream);
        let (weight_at, _weight) = weight.bytes.device_ptr(&stream);
        let bias = weight.bias.as_ref().map(|bias| bias.device_ptr(&stream));
        let (out_at, _out) = out.device_ptr_mut(&stream);
        let (scratch_at, _scratch) = scratch.device_ptr_mut(&stream);
        let at = CallArguments {
            weight: region(weight_at, weight.bytes.num_bytes()),
            bias: bias.as_ref().map_or(Region::NONE, |(at, _)| region(*at, 4 * weight.layout.n())),
            x: region(x_at + x_start as u64, x_bytes.saturating_sub(x_start)),
            out: region(out_at, out_bytes),
            scratch: region(scratch_at, scratch_bytes),
        };
        let launches = call.launches(&at).map_err(Error::wrap)?;
        stream.context().bind_to_thread().w()?;
        for launch in &launches {
            // SAFETY: the arguments are those of the call, on regions that it has checked. The regions are freed on
            // this stream, after the launch.
            unsafe { self.launch(&launch.variant, &launch.shape, &launch.arguments, &stream) }?;
        }
        drop((_out, _scratch));
        Ok(out)
    }

    /// Launches a kernel on a stream of the device, whose context is current.
    ///
    /// # Safety
    /// See [`Kernel::launch`](crate::device::Kernel::launch).
    unsafe fn launch(
        &self,
        variant: &Variant,
        shape: &LaunchShape,
        arguments: &[Argument],
        stream: &CudaStream,
    ) -> Result<()> {
        // SAFETY: the kernels are dropped before the device, which keeps the context alive. Images come from the user's
        // own directory, which must be trusted according to the documentation of [`Runner`].
        let kernel = unsafe { self.kernels.kernel(variant, shape.shared_bytes) }.map_err(Error::wrap)?;
        // SAFETY: the caller guarantees the arguments; the stream belongs to the context.
        unsafe { kernel.launch(shape, arguments, Stream(stream.cu_stream().cast())) }.map_err(Error::wrap)
    }
}

impl fmt::Debug for Runner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runner").field("device", &self.device).finish_non_exhaustive()
    }
}

/// `y = x Ŵᵀ + b` with packed weights `[n, k]`.
///
/// The input is `[.., k]` in f16 or bf16, or also in `f32` if activations are quantized to integers, on the runner's
/// device, with any strides. It may be copied first. The result is `[.., n]` in the type of the input; it is
/// accumulated in `f32` and rounded once, half to even. Gradients are not supported: the result of
/// [`forward`](Module::forward) is detached, and `backward` fails on the result of `apply_op1`. Clones share the
/// weights and the runner.
#[derive(Debug, Clone)]
pub struct QuantizedLinear {
    weight: Arc<DevicePackedLinear>,
    activations: Activations,
    runner: Runner,
}

impl QuantizedLinear {
    /// Creates a linear with these weights, and the bias that they were packed with.
    ///
    /// # Errors
    /// - The weights are not on the runner's device, or are packed for different activations.
    /// - A static scale or its reciprocal is not positive and finite, or its zero point requires sums and the weights
    ///   were packed without them.
    /// - With [`Activations::Float`], `k` is not a multiple of 8.
    pub fn new(
        weight: Arc<DevicePackedLinear>,
        activations: Activations,
        runner: &Runner,
    ) -> std::result::Result<Self, KernelError> {
        if !weight.device.same_device(&runner.device) {
            return Err(KernelError::Scheme("the weights must be on the device of the runner"));
        }
        let linear = Self { weight, activations, runner: runner.clone() };
        // Reports every error that does not depend on the input.
        linear.plan(Float::F16, 0)?;
        Ok(linear)
    }

    /// The weights.
    pub fn weight(&self) -> &Arc<DevicePackedLinear> {
        &self.weight
    }

    /// How activations are quantized.
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// Runs several linears on the same input, one [`forward`](Module::forward) after another.
    /// [`quant_kernels_cpu::candle`] has the same function, for engines that run on both devices.
    ///
    /// # Errors
    /// See [`forward`](Module::forward).
    pub fn forward_each(linears: &[&Self], x: &Tensor) -> Result<Vec<Tensor>> {
        linears.iter().map(|linear| linear.forward(x)).collect()
    }

    fn plan(&self, element: Float, m: usize) -> std::result::Result<LinearCall, KernelError> {
        let layout = &self.weight.layout;
        let (order, fixed) = match self.activations {
            Activations::Float => (Order::Float, None),
            Activations::PerToken => (Order::Int8, None),
            Activations::Static(by) => (Order::Int8, Some(FixedScale { scale: by.scale, zero: by.zero })),
        };
        if order != layout.order() {
            return Err(KernelError::Scheme("the weights are packed for different activations"));
        }
        let shape = CallShape { fixed, ..CallShape::new(element, m, layout.k()) };
        LinearCall::new(layout, &shape, &self.runner.limits)
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

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!(
            "{} runs on CUDA only, but its input is on the CPU: move the input to the GPU first",
            self.name()
        )
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (name, device, dtype) = (self.name(), &self.runner.device, storage.dtype());
        if !storage.device().same_device(device) {
            bail!(
                "{name}: the input and the weights are on different devices: move the input to the weights' device first"
            );
        }
        let order = self.weight.layout.order();
        let element = match (dtype, order) {
            (DType::F16, _) => Float::F16,
            (DType::BF16, _) => Float::Bf16,
            (DType::F32, Order::Int8) => Float::F32,
            _ => bail!("{name}: expected {}, got {}", types(order), dtype.as_str()),
        };
        let start = layout.contiguous_offsets().map(|(start, _)| start);
        let input = input(name, &self.weight.layout, layout.dims(), start, element).map_err(Error::msg)?;
        if input.copied {
            // SAFETY: every element is written before it is read.
            let mut rows = unsafe { device.alloc_uninit(layout.shape(), dtype) }?;
            storage.copy_strided_src(&mut rows, 0, layout)?;
            return self.cuda_fwd(&rows, &Layout::contiguous(layout.shape()));
        }
        let (call, start) = (self.plan(element, input.m).map_err(Error::wrap)?, layout.start_offset());
        let slice = match &storage.slice {
            CudaStorageSlice::F16(x) => {
                CudaStorageSlice::F16(self.runner.call(&call, &self.weight, x, start)?)
            }
            CudaStorageSlice::BF16(x) => {
                CudaStorageSlice::BF16(self.runner.call(&call, &self.weight, x, start)?)
            }
            CudaStorageSlice::F32(x) => {
                CudaStorageSlice::F32(self.runner.call(&call, &self.weight, x, start)?)
            }
            _ => bail!("{name}: expected {}, got {}", types(order), dtype.as_str()),
        };
        Ok((CudaStorage { slice, device: device.clone() }, Shape::from(input.results)))
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        bail!(
            "{} runs on CUDA only, but its input is on Metal: move the input to a CUDA device first",
            self.name()
        )
    }
}
