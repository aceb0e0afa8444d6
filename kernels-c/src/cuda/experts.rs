//! The experts of a layer, from activations and a routing to results.

use core::ffi::c_void;

use quant_kernels_cpu::KernelError;
use quant_kernels_cuda::compile::{GpuArchitecture, Variant};
use quant_kernels_cuda::device::DeviceLimits;
use quant_kernels_cuda::experts::{
    ExpertsArguments, ExpertsCall, ExpertsRegions, ExpertsShape, layer_descriptors,
};
use quant_kernels_cuda::launch::LaunchShape;
use quant_kernels_cuda::layout::SECTION;
use quant_kernels_cuda::linear::{ExpertRegions, PlanLimits};

use super::activation::float;
use super::kernels::{self, Launch, Launcher, is_family, qz1_cuda_kernels, qz1_cuda_plan};
use super::region::{qz1_cuda_region, region};
use super::weights::qz1_cuda_layout;
use crate::experts::gate;
use crate::layouts;
use crate::memory::{self, Scope, fields};
use crate::status::{Fault, call, qz1_message, qz1_status};

/// Bytes of the descriptors of an expert.
pub const QZ1_CUDA_EXPERT_BYTES: u32 = 144;

/// Device addresses of an expert. All experts of a layer have the same layouts.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_cuda_expert {
    /// `sizeof(qz1_cuda_expert)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// The packed gate projection `[inner, hidden]`, at a multiple of 256.
    pub gate: qz1_cuda_region,
    /// f32 `[inner]`, or absent.
    pub gate_bias: qz1_cuda_region,
    /// The packed up projection `[inner, hidden]`, at a multiple of 256.
    pub up: qz1_cuda_region,
    /// f32 `[inner]`, or absent.
    pub up_bias: qz1_cuda_region,
    /// The packed down projection `[hidden, inner]`, at a multiple of 256.
    pub down: qz1_cuda_region,
    /// f32 `[hidden]`, or absent.
    pub down_bias: qz1_cuda_region,
}

/// The parameters of a launch that computes `out[t] = Σ_e w[t, e] · down_e(act(gate_e(x[t]), up_e(x[t])))`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_cuda_experts_shape {
    /// `sizeof(qz1_cuda_experts_shape)`
    pub struct_size: u32,
    /// `QZ1_GATE_…`
    pub gate: u32,
    /// `alpha` of a clamped gate.
    pub alpha: f32,
    /// `limit` of a clamped gate, not negative.
    pub limit: f32,
    /// Type of activations, a `QZ1_TYPE_…`. `QZ1_TYPE_F32` requires weights of `QZ1_CUDA_ORDER_INT8`, for which
    /// activations are quantized with a scale per row.
    pub x_type: u32,
    /// Type of results, a `QZ1_TYPE_…`.
    pub out_type: u32,
    /// Layout of the gate and up projections.
    pub gate_up_layout: *const qz1_cuda_layout,
    /// Layout of the down projections.
    pub down_layout: *const qz1_cuda_layout,
    /// Number of experts.
    pub experts: usize,
    /// Number of tokens. 0 launches nothing.
    pub tokens: usize,
    /// Number of experts per token.
    pub top_k: usize,
}

/// Device addresses.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_cuda_experts_arguments {
    /// `sizeof(qz1_cuda_experts_arguments)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// The bytes that `qz1_cuda_experts_describe` writes, copied to the device at a multiple of 16.
    pub descriptors: qz1_cuda_region,
    /// `[tokens, hidden]` at a multiple of 16.
    pub x: qz1_cuda_region,
    /// u32 `[tokens, top_k]`: the numbers of experts. Others, such as `QZ1_NO_EXPERT`, mark slots without an expert.
    pub experts: qz1_cuda_region,
    /// f32 `[tokens, top_k]`: the weight of each expert's output.
    pub weights: qz1_cuda_region,
    /// `[tokens, hidden]` at a multiple of 16.
    pub out: qz1_cuda_region,
    /// At least as many bytes as `qz1_cuda_plan_workspace` returns for tickets, at a multiple of 256. They must be 0
    /// before the first launch.
    pub tickets: qz1_cuda_region,
    /// At least as many bytes as `qz1_cuda_plan_workspace` returns for the workspace, at a multiple of 256.
    pub workspace: qz1_cuda_region,
}

fields!(qz1_cuda_expert, down_bias, reserved);
fields!(qz1_cuda_experts_shape, top_k);
fields!(qz1_cuda_experts_arguments, workspace, reserved);

pub(super) struct LayerExperts {
    /// Larger than the plans of all other families.
    call: Box<ExpertsCall>,
}

impl Launch for LayerExperts {
    type Shape = qz1_cuda_experts_shape;
    type Arguments = qz1_cuda_experts_arguments;

    is_family!(LayerExperts);

    unsafe fn plan(scope: &Scope, s: Self::Shape) -> Result<(Self, Vec<(Variant, LaunchShape)>), Fault> {
        // SAFETY: the caller upholds the pointer contract.
        let (gate_up, down) =
            unsafe { (layouts::layout(scope, s.gate_up_layout)?, layouts::layout(scope, s.down_layout)?) };
        let shape = ExpertsShape {
            experts: s.experts,
            tokens: s.tokens,
            top_k: s.top_k,
            gate: gate(s.gate, [s.alpha, s.limit])?,
            element: float(s.x_type)?,
            output: float(s.out_type)?,
        };
        // Reject operands that do not match before a device is needed.
        ExpertsCall::new(&gate_up, &down, &shape, &PlanLimits::of(GpuArchitecture::Sm80))?;
        let device = DeviceLimits::current()?;
        let call = ExpertsCall::new(&gate_up, &down, &shape, &(&device).into())?;
        let wanted = call.kernels();
        Ok((Self { call: Box::new(call) }, wanted))
    }

    fn launch(&self, at: &Self::Arguments, launch: &mut Launcher<'_>) -> Result<(), Fault> {
        let at = ExpertsArguments {
            descriptors: region(at.descriptors, "the descriptors", 16)?,
            x: region(at.x, "the activations", 16)?,
            experts: region(at.experts, "the expert numbers", 4)?,
            weights: region(at.weights, "the expert weights", 4)?,
            out: region(at.out, "the output", 16)?,
            tickets: region(at.tickets, "the tickets", 256)?,
            workspace: region(at.workspace, "the workspace", 256)?,
        };
        self.call.with_arguments(&at, |arguments| launch(arguments))?
    }

    fn workspace(&self) -> (usize, usize) {
        (self.call.workspace_bytes(), self.call.ticket_bytes())
    }
}

/// Writes the descriptors of a layer's experts to `out`: `QZ1_CUDA_EXPERT_BYTES · count` bytes of host memory, which
/// the caller copies to the device for `qz1_cuda_experts_launch`. They remain valid while the weights stay at these
/// addresses. Needs no driver.
///
/// # Safety
/// Same as for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_experts_describe(
    gate_up_layout: *const qz1_cuda_layout,
    down_layout: *const qz1_cuda_layout,
    experts: *const qz1_cuda_expert,
    count: usize,
    out: *mut u8,
    out_len: usize,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract; `out` does not overlap the other arguments (`Scope`).
    call(message, |scope| unsafe {
        let (gate_up, down) = (layouts::layout(scope, gate_up_layout)?, layouts::layout(scope, down_layout)?);
        let out = scope.output(out, out_len, "the descriptors")?;
        let mut regions = memory::room(count, "the experts")?;
        scope.each(experts, count, "the experts", |_, e: qz1_cuda_expert| {
            let part = |weight, bias| -> Result<ExpertRegions, Fault> {
                Ok(ExpertRegions {
                    weight: region(weight, "the packed weights", SECTION)?,
                    bias: region(bias, "the bias", 4)?,
                })
            };
            regions.push(ExpertsRegions {
                gate: part(e.gate, e.gate_bias)?,
                up: part(e.up, e.up_bias)?,
                down: part(e.down, e.down_bias)?,
            });
            Ok(())
        })?;
        let bytes = layer_descriptors(&gate_up, &down, &regions)?;
        let out = out.slice();
        if out.len() != bytes.len() {
            let (what, expected, got) = ("the descriptors", bytes.len(), out.len());
            return Err(KernelError::Length { what, expected, got }.into());
        }
        out.copy_from_slice(&bytes);
        Ok(())
    })
}

/// Plans the experts of a layer for the device whose context is current. The choice of kernels depends on the weights
/// and, in a few steps, on the number of tokens. Each row of results is bit-identical for any number of tokens.
///
/// # Safety
/// Same as for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_experts_plan(
    kernels: *const qz1_cuda_kernels,
    shape: *const qz1_cuda_experts_shape,
    out: *mut *mut qz1_cuda_plan,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { kernels::plan::<LayerExperts>(kernels, shape, out, message) }
}

/// Launches the experts of a layer. A token's terms are rounded and added in the order of experts; tokens without
/// experts get zeros.
///
/// # Safety
/// Same as for `qz1_cuda_pack_launch`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_experts_launch(
    plan: *const qz1_cuda_plan,
    arguments: *const qz1_cuda_experts_arguments,
    stream: *mut c_void,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { kernels::launch::<LayerExperts>(plan, arguments, stream, message) }
}
