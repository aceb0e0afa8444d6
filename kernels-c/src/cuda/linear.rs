//! Linear layers: activations times packed weights.

use core::ffi::c_void;

use quant_kernels_cuda::compile::Variant;
use quant_kernels_cuda::device::DeviceLimits;
use quant_kernels_cuda::launch::LaunchShape;
use quant_kernels_cuda::layout::{SECTION, WeightLayout};
use quant_kernels_cuda::linear::{InputType, KernelScheme, LinearArguments, LinearPlan, Output};

use super::kernels::{self, Launch, Launcher, is_family, qz1_cuda_kernels, qz1_cuda_plan};
use super::region::{qz1_cuda_region, region};
use super::weights::qz1_cuda_layout;
use crate::layouts;
use crate::memory::{Scope, fields};
use crate::rows::{QZ1_TYPE_BF16, QZ1_TYPE_F16, QZ1_TYPE_F32};
use crate::status::{Fault, qz1_message, qz1_status};

/// 8-bit integers with a scale per token, in addition to the float types `QZ1_TYPE_…`.
pub const QZ1_CUDA_TYPE_INT8: u32 = 4;

/// The parameters of a launch that computes `out = x · Wᵀ + bias` for `m` tokens.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_cuda_linear_shape {
    /// `sizeof(qz1_cuda_linear_shape)`
    pub struct_size: u32,
    /// Type of activations: `QZ1_TYPE_F16` or `QZ1_TYPE_BF16` with weights of `QZ1_CUDA_ORDER_FLOAT`,
    /// `QZ1_CUDA_TYPE_INT8` with weights of `QZ1_CUDA_ORDER_INT8`.
    pub x_type: u32,
    /// Type of results, a `QZ1_TYPE_…`.
    pub out_type: u32,
    /// 0
    pub reserved: u32,
    /// Layout of the weights.
    pub layout: *const qz1_cuda_layout,
    /// Number of tokens. 0 launches nothing.
    pub m: usize,
}

/// Device addresses.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_cuda_linear_arguments {
    /// `sizeof(qz1_cuda_linear_arguments)`
    pub struct_size: u32,
    /// The zero point of 8-bit activations, −128 to 127, the same for all tokens. Values other than 0 require a layout
    /// with sums.
    pub x_zero: i32,
    /// The packed matrix: `layout.bytes` bytes at a multiple of 256.
    pub weight: qz1_cuda_region,
    /// `[m, k]` at a multiple of 16.
    pub x: qz1_cuda_region,
    /// f32 `[m]`: the scales of 8-bit activations, else absent.
    pub x_scales: qz1_cuda_region,
    /// f32 `[n]`, or absent.
    pub bias: qz1_cuda_region,
    /// `[m, n]`, aligned to its type.
    pub out: qz1_cuda_region,
    /// At least as many bytes as `qz1_cuda_plan_workspace` returns for tickets, at a multiple of 256. They must be 0
    /// before the first launch.
    pub tickets: qz1_cuda_region,
    /// At least as many bytes as `qz1_cuda_plan_workspace` returns for the workspace, at a multiple of 256.
    pub workspace: qz1_cuda_region,
    /// Elements between rows of activations; the distance in bytes must be a multiple of 16. 0: `k`, rounded up
    /// accordingly.
    pub x_stride: usize,
    /// Elements between rows of results; 0: `n`.
    pub out_stride: usize,
}

fields!(qz1_cuda_linear_shape, m, reserved);
fields!(qz1_cuda_linear_arguments, out_stride);

pub(super) struct Linear {
    plan: LinearPlan,
    layout: WeightLayout,
}

impl Launch for Linear {
    type Shape = qz1_cuda_linear_shape;
    type Arguments = qz1_cuda_linear_arguments;

    is_family!(Linear);

    unsafe fn plan(scope: &Scope, s: Self::Shape) -> Result<(Self, Vec<(Variant, LaunchShape)>), Fault> {
        // SAFETY: the caller upholds the pointer contract.
        let layout = unsafe { layouts::layout(scope, s.layout) }?;
        let activation = match s.x_type {
            QZ1_TYPE_F16 => InputType::F16,
            QZ1_TYPE_BF16 => InputType::Bf16,
            QZ1_CUDA_TYPE_INT8 => InputType::Int8 { zero: layout.has_sums() },
            _ => {
                return Err(Fault::new(
                    qz1_status::Scheme,
                    "unknown type of activations (expected QZ1_TYPE_F16, QZ1_TYPE_BF16 or QZ1_CUDA_TYPE_INT8)",
                ));
            }
        };
        let output = match s.out_type {
            QZ1_TYPE_F16 => Output::F16,
            QZ1_TYPE_BF16 => Output::Bf16,
            QZ1_TYPE_F32 => Output::F32,
            _ => {
                return Err(Fault::new(
                    qz1_status::Scheme,
                    "unknown type of outputs (expected QZ1_TYPE_F32, QZ1_TYPE_F16 or QZ1_TYPE_BF16)",
                ));
            }
        };
        // Reject operands that do not match before a device is needed.
        KernelScheme::new(&layout, activation, output)?;
        let device = DeviceLimits::current()?;
        let plan = LinearPlan::new(&layout, activation, output, s.m, &(&device).into())?;
        let wanted = vec![(plan.work.variant.compiled(), plan.work.launch)];
        Ok((Self { plan, layout }, wanted))
    }

    fn launch(&self, at: &Self::Arguments, launch: &mut Launcher<'_>) -> Result<(), Fault> {
        let (layout, scheme) = (&self.layout, &self.plan.work.variant.scheme);
        let natural = |stride: usize, width: usize, each: usize| match stride {
            0 => width.next_multiple_of(each),
            stride => stride,
        };
        let arguments = self.plan.arguments(&LinearArguments {
            weight: region(at.weight, "the packed weights", SECTION)?,
            x: region(at.x, "the activations", 16)?,
            x_stride: natural(at.x_stride, layout.k(), 16 / scheme.activation_bytes()),
            x_scales: region(at.x_scales, "the activation scales", 4)?,
            x_zero: at.x_zero,
            bias: region(at.bias, "the bias", 4)?,
            out: region(at.out, "the output", scheme.output_bytes())?,
            out_stride: natural(at.out_stride, layout.n(), 1),
            tickets: region(at.tickets, "the tickets", 256)?,
            workspace: region(at.workspace, "the workspace", 256)?,
        })?;
        launch(&[&arguments])
    }

    fn workspace(&self) -> (usize, usize) {
        (self.plan.work.workspace_bytes, self.plan.work.ticket_bytes)
    }
}

/// Plans a product for the device whose context is current. The choice of kernel depends on the weights and, in a few
/// steps, on `m`. Plans made in advance for 1, 16, 32, 64, 128 and the maximum number of tokens load all or nearly all
/// kernels that other numbers need. Each row of results is bit-identical for every `m`.
///
/// # Safety
/// Same as for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_linear_plan(
    kernels: *const qz1_cuda_kernels,
    shape: *const qz1_cuda_linear_shape,
    out: *mut *mut qz1_cuda_plan,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { kernels::plan::<Linear>(kernels, shape, out, message) }
}

/// Launches a product.
///
/// # Safety
/// Same as for `qz1_cuda_pack_launch`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_linear_launch(
    plan: *const qz1_cuda_plan,
    arguments: *const qz1_cuda_linear_arguments,
    stream: *mut c_void,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { kernels::launch::<Linear>(plan, arguments, stream, message) }
}
