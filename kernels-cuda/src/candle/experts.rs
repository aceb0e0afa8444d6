//! The experts of a layer as one operation.

use std::sync::Arc;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr};
use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp3, DType, Error, Layout, MetalStorage, Result, Shape, Tensor, bail,
};
use quant_kernels_cpu::KernelError;
use quant_kernels_cpu::experts::ExpertGate;

use super::{Activations, DevicePackedLinear, Runner};
use crate::experts::{ExpertsArguments, ExpertsCall, ExpertsRegions, ExpertsShape, layer_descriptors};
use crate::float::Float;
use crate::launch::Region;
use crate::layout::Order;
use crate::linear::ExpertRegions;
use crate::tensor::types;

const NAME: &str = "quantized-experts";

/// The experts of a layer: `y[t] = Σ_e w[t, e] · down_e(act(gate_e(x[t]), up_e(x[t])))`, see
/// [`ExpertsCall`]. Clones share the weights and the runner.
///
/// All experts have the same layouts. The routing stays on the device.
#[derive(Debug, Clone)]
pub struct QuantizedExperts {
    experts: Arc<[[Arc<DevicePackedLinear>; 3]]>,
    descriptors: Arc<CudaSlice<u8>>,
    gate: ExpertGate,
    runner: Runner,
}

impl QuantizedExperts {
    /// Creates the operation from the gate, up and down projections of each expert, with the biases that they were
    /// packed with.
    ///
    /// # Errors
    /// When there are no experts, their layouts do not match, they are not on the runner's device or are packed for
    /// different activations, or the limit of the gate is negative or NaN. Static activations are not supported.
    pub fn new(
        experts: Vec<[Arc<DevicePackedLinear>; 3]>,
        activations: Activations,
        gate: ExpertGate,
        runner: &Runner,
    ) -> Result<Self> {
        let refuse = |why| Err(Error::wrap(KernelError::Scheme(why)));
        let order = match activations {
            Activations::Float => Order::Float,
            Activations::PerToken => Order::Int8,
            Activations::Static(_) => return refuse("experts do not support static activation scales"),
        };
        let Some([first, _, last]) = experts.first() else {
            return refuse("a layer must have at least one expert");
        };
        if first.layout.order() != order || last.layout.order() != order {
            return refuse("the weights are packed for different activations");
        }
        for [gate, up, down] in &experts {
            if gate.layout != first.layout || up.layout != first.layout || down.layout != last.layout {
                return refuse("all experts of a layer must have the same layouts");
            }
            if [gate, up, down].iter().any(|part| !part.device.same_device(&runner.device)) {
                return refuse("the weights must be on the device of the runner");
            }
        }
        let stream = runner.device.cuda_stream();
        let part = |of: &DevicePackedLinear| {
            let region = |address, bytes: usize| Region { address, bytes: bytes as u64 };
            let bias = of.bias.as_ref().map(|bias| region(bias.device_ptr(&stream).0, bias.num_bytes()));
            ExpertRegions {
                weight: region(of.bytes.device_ptr(&stream).0, of.bytes.num_bytes()),
                bias: bias.unwrap_or(Region::NONE),
            }
        };
        let regions = experts.iter().map(|[gate, up, down]| ExpertsRegions {
            gate: part(gate),
            up: part(up),
            down: part(down),
        });
        let regions: Vec<ExpertsRegions> = regions.collect();
        let bytes = layer_descriptors(&first.layout, &last.layout, &regions).map_err(Error::wrap)?;
        let descriptors = Arc::new(runner.device.clone_htod(&bytes)?);
        // Other threads will use the descriptors, whose copy may be on a stream of this thread only.
        runner.device.synchronize()?;
        let layer = Self { experts: experts.into(), descriptors, gate, runner: runner.clone() };
        // Reports every error that does not depend on the input.
        layer.plan(Float::F16, 0, 1).map_err(Error::wrap)?;
        Ok(layer)
    }

    /// The number of experts.
    pub fn count(&self) -> usize {
        self.experts.len()
    }

    /// Features per token.
    pub fn hidden(&self) -> usize {
        self.experts[0][0].layout.k()
    }

    /// Runs the experts on `x` `[.., hidden]` in f16 or bf16, or also in f32 if activations are quantized to integers,
    /// with `experts` `[.., top_k]` in u32 and `weights` `[.., top_k]` in f32, all on the runner's device. Slots with
    /// numbers that no expert has are not used. The result is `[.., hidden]` in the type of `x`. Gradients are not
    /// supported.
    ///
    /// # Errors
    /// When a type, device or shape is wrong.
    pub fn forward(&self, x: &Tensor, experts: &Tensor, weights: &Tensor) -> Result<Tensor> {
        x.contiguous()?.apply_op3_no_bwd(&experts.contiguous()?, &weights.contiguous()?, self)
    }

    fn plan(
        &self,
        element: Float,
        tokens: usize,
        top_k: usize,
    ) -> std::result::Result<ExpertsCall, KernelError> {
        let [first, _, last] = &self.experts[0];
        let shape = ExpertsShape {
            experts: self.experts.len(),
            tokens,
            top_k,
            gate: self.gate,
            element,
            output: element,
        };
        ExpertsCall::new(&first.layout, &last.layout, &shape, &self.runner.limits)
    }

    /// Launches a call on the device's stream, with the activations from element `start` on and routings from theirs.
    fn call<T: DeviceRepr>(
        &self,
        call: &ExpertsCall,
        (x, start): (&CudaSlice<T>, usize),
        (experts, first): (&CudaSlice<u32>, usize),
        (weights, first_weight): (&CudaSlice<f32>, usize),
    ) -> Result<CudaSlice<T>> {
        let device = &self.runner.device;
        let stream = device.cuda_stream();
        // SAFETY: the launches write every result; without results, the one allocated element is never read.
        let mut out = unsafe { device.alloc::<T>(call.results().max(1)) }?;
        if call.results() == 0 {
            return Ok(out);
        }
        // SAFETY: the workspace is written before it is read, and tickets are zeroed below.
        let (mut workspace, mut tickets) = unsafe {
            let bytes = [call.workspace_bytes(), call.ticket_bytes()].map(|bytes| bytes.max(1));
            (device.alloc::<u8>(bytes[0])?, device.alloc::<u8>(bytes[1])?)
        };
        stream.memset_zeros(&mut tickets).w()?;
        let region = |address: u64, bytes: usize, from: usize| Region {
            address: address + from as u64,
            bytes: bytes.saturating_sub(from) as u64,
        };
        let sizes = [x.num_bytes(), experts.num_bytes(), weights.num_bytes(), out.num_bytes()];
        let scratch = [workspace.num_bytes(), tickets.num_bytes()];
        // The guards are dropped after the launches, and then record events on the stream if candle tracks events.
        let parts = self.experts.iter().flatten();
        let _weights: Vec<_> = parts
            .map(|part| {
                let bias = part.bias.as_ref().map(|bias| bias.device_ptr(&stream).1);
                (part.bytes.device_ptr(&stream).1, bias)
            })
            .collect();
        let (x_at, _x) = x.device_ptr(&stream);
        let (experts_at, _experts) = experts.device_ptr(&stream);
        let (weights_at, _factors) = weights.device_ptr(&stream);
        let (descriptors_at, _descriptors) = self.descriptors.device_ptr(&stream);
        let (out_at, _out) = out.device_ptr_mut(&stream);
        let (workspace_at, _workspace) = workspace.device_ptr_mut(&stream);
        let (tickets_at, _tickets) = tickets.device_ptr_mut(&stream);
        let at = ExpertsArguments {
            descriptors: region(descriptors_at, self.descriptors.num_bytes(), 0),
            x: region(x_at, sizes[0], start.saturating_mul(size_of::<T>())),
            experts: region(experts_at, sizes[1], first.saturating_mul(4)),
            weights: region(weights_at, sizes[2], first_weight.saturating_mul(4)),
            out: region(out_at, sizes[3], 0),
            tickets: region(tickets_at, scratch[1], 0),
            workspace: region(workspace_at, scratch[0], 0),
        };
        stream.context().bind_to_thread().w()?;
        let kernels = call.kernels();
        let launched = call.with_arguments(&at, |arguments| {
            kernels.iter().zip(arguments).try_for_each(|((variant, shape), arguments)| {
                // SAFETY: the arguments are those of the call, on regions that it has checked. The regions are freed on
                // this stream, after the launch.
                unsafe { self.runner.launch(variant, shape, arguments, &stream) }
            })
        });
        launched.map_err(Error::wrap)??;
        drop((_out, _workspace, _tickets));
        Ok(out)
    }
}

impl CustomOp3 for QuantizedExperts {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        bail!("{NAME} runs on CUDA only, but its input is on the CPU: move the input to the GPU first")
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        experts: &CudaStorage,
        experts_layout: &Layout,
        weights: &CudaStorage,
        weights_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let device = &self.runner.device;
        if [x, experts, weights].iter().any(|of| !of.device().same_device(device)) {
            bail!(
                "{NAME}: the input and the weights are on different devices: move the input to the weights' device first"
            );
        }
        let (dims, slots) = (x_layout.dims(), experts_layout.dims());
        let hidden = self.hidden();
        let (Some((&width, tokens)), Some((&top_k, rows))) = (dims.split_last(), slots.split_last()) else {
            bail!("{NAME}: the activations and the expert numbers must have at least one dimension");
        };
        if width != hidden || tokens != rows || slots != weights_layout.dims() {
            let weights = weights_layout.dims();
            bail!(
                "{NAME}: expected inputs of shapes [.., {hidden}], [.., k] and [.., k], got {dims:?}, {slots:?} and {weights:?}"
            );
        }
        let order = self.experts[0][0].layout.order();
        let element = match (x.dtype(), order) {
            (DType::F16, _) => Float::F16,
            (DType::BF16, _) => Float::Bf16,
            (DType::F32, Order::Int8) => Float::F32,
            (other, _) => bail!("{NAME}: expected {}, got {}", types(order), other.as_str()),
        };
        let (CudaStorageSlice::U32(numbers), CudaStorageSlice::F32(factors)) =
            (&experts.slice, &weights.slice)
        else {
            let [experts, weights] = [experts, weights].map(|of| of.dtype().as_str());
            bail!("{NAME}: expected expert numbers in u32 and weights in f32, got {experts} and {weights}");
        };
        // Kernels read rows of activations that begin at multiples of 16 bytes.
        let start = x_layout.contiguous_offsets().map(|(start, _)| start);
        if x_layout.shape().elem_count() > 0
            && start.is_none_or(|at| !at.wrapping_mul(element.bytes()).is_multiple_of(16))
        {
            // SAFETY: every element is written before it is read.
            let mut rows = unsafe { device.alloc_uninit(x_layout.shape(), x.dtype()) }?;
            x.copy_strided_src(&mut rows, 0, x_layout)?;
            let layout = Layout::contiguous(x_layout.shape());
            return self.cuda_fwd(&rows, &layout, experts, experts_layout, weights, weights_layout);
        }
        let count = x_layout.shape().elem_count() / hidden;
        let call = self.plan(element, count, top_k).map_err(Error::wrap)?;
        let start = x_layout.start_offset();
        let numbers = (numbers, experts_layout.start_offset());
        let factors = (factors, weights_layout.start_offset());
        let slice = match &x.slice {
            CudaStorageSlice::F16(x) => {
                CudaStorageSlice::F16(self.call(&call, (x, start), numbers, factors)?)
            }
            CudaStorageSlice::BF16(x) => {
                CudaStorageSlice::BF16(self.call(&call, (x, start), numbers, factors)?)
            }
            CudaStorageSlice::F32(x) => {
                CudaStorageSlice::F32(self.call(&call, (x, start), numbers, factors)?)
            }
            _ => bail!("{NAME}: expected {}, got {}", types(order), x.dtype().as_str()),
        };
        Ok((CudaStorage { slice, device: device.clone() }, x_layout.shape().clone()))
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        bail!("{NAME} runs on CUDA only, but its input is on Metal: move the input to a CUDA device first")
    }
}
