//! Quantization of activation rows to 8-bit integers.

use core::ffi::c_void;

use quant_kernels_cuda::Float;
use quant_kernels_cuda::activation::{
    ActivationArguments, ActivationPlan, ActivationShape, FixedScale, RowSource,
};
use quant_kernels_cuda::compile::Variant;
use quant_kernels_cuda::launch::{LaunchShape, Region};

use super::kernels::{self, Launch, Launcher, is_family, qz1_cuda_kernels, qz1_cuda_plan};
use super::region::{qz1_cuda_region, region};
use crate::memory::{Scope, fields};
use crate::rows::{QZ1_TYPE_BF16, QZ1_TYPE_F16, QZ1_TYPE_F32};
use crate::status::{Fault, qz1_message, qz1_status};

/// The rows, unmodified.
pub const QZ1_CUDA_ROWS_PLAIN: u32 = 1;
/// RMSNorm of the rows: `x / √(mean x² + eps) · weight`.
pub const QZ1_CUDA_ROWS_RMS_NORM: u32 = 2;
/// RMSNorm of `residual + x`; the sum is rounded to the type of the rows and stored in the residual.
pub const QZ1_CUDA_ROWS_RESIDUAL_RMS_NORM: u32 = 3;
/// `silu(x) · up`.
pub const QZ1_CUDA_ROWS_SILU_MUL: u32 = 4;

/// Quantizes `m` rows of `k` floats to codes, with a scale per row and sums of codes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_cuda_activation_shape {
    /// `sizeof(qz1_cuda_activation_shape)`
    pub struct_size: u32,
    /// `QZ1_CUDA_ROWS_…`
    pub rows: u32,
    /// Type of the rows `x`, `up` and `residual`, `QZ1_TYPE_…`.
    pub x_type: u32,
    /// Type of the norm's weight, `QZ1_TYPE_…`; 0: the type of the rows.
    pub weight_type: u32,
    /// 1: all rows have the scale and zero point of the launch's arguments. 0: each row has its own scale, and no zero
    /// point.
    pub fixed: u32,
    /// 0: float rows and weights begin at multiples of 16 bytes. 1: they may begin at any element, which is slower.
    pub unaligned: u32,
    /// Number of rows (tokens). 0 launches nothing.
    pub m: usize,
    /// Values per row, at most 360,448.
    pub k: usize,
    /// Number of features per group whose codes are summed, a multiple of 32; the last group may be shorter. 0: no sums
    /// per group.
    pub group: usize,
    /// Elements between rows of `x`; 0: `k`.
    pub x_stride: usize,
    /// Elements between rows of `up`; 0: `k`.
    pub up_stride: usize,
    /// Elements between rows of the residual; 0: `k`.
    pub residual_stride: usize,
    /// Bytes between rows of codes, a multiple of 16; 0: `k` rounded up to a multiple of 16.
    pub code_stride: usize,
}

/// Device addresses and numbers. Regions that the shape does not use are absent.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_cuda_activation_arguments {
    /// `sizeof(qz1_cuda_activation_arguments)`
    pub struct_size: u32,
    /// For norms: positive and finite.
    pub eps: f32,
    /// With `fixed`: positive and finite, with a finite inverse. `x ≈ scale · (code − zero)`.
    pub scale: f32,
    /// With `fixed`: −128 to 127.
    pub zero: i32,
    /// `[m, k]`: the rows, or the gate.
    pub x: qz1_cuda_region,
    /// `[m, k]`, for `silu(x) · up`.
    pub up: qz1_cuda_region,
    /// `[m, k]`, read and written.
    pub residual: qz1_cuda_region,
    /// `[k]`, for norms.
    pub weight: qz1_cuda_region,
    /// i8 `[m, k]` at a multiple of 16. Bytes between rows are left unchanged.
    pub codes: qz1_cuda_region,
    /// f32 `[m]`
    pub scales: qz1_cuda_region,
    /// i32 `[m]`: the sum of each row's codes; or absent.
    pub row_sums: qz1_cuda_region,
    /// i32 `[m, ⌈k / group⌉]`, if there are groups.
    pub group_sums: qz1_cuda_region,
}

fields!(qz1_cuda_activation_shape, code_stride);
fields!(qz1_cuda_activation_arguments, group_sums);

pub(super) fn float(kind: u32) -> Result<Float, Fault> {
    match kind {
        QZ1_TYPE_F32 => Ok(Float::F32),
        QZ1_TYPE_F16 => Ok(Float::F16),
        QZ1_TYPE_BF16 => Ok(Float::Bf16),
        _ => {
            Err(Fault::new(qz1_status::Scheme, "unknown floating-point type (expected a QZ1_TYPE_ constant)"))
        }
    }
}

fn flag(field: u32) -> Result<bool, Fault> {
    match field {
        0 | 1 => Ok(field == 1),
        _ => Err(Fault::new(qz1_status::Scheme, "`fixed` and `unaligned` must be 0 or 1")),
    }
}

fn settle(s: &qz1_cuda_activation_shape) -> Result<ActivationShape, Fault> {
    let element = float(s.x_type)?;
    let weight = if s.weight_type == 0 { element } else { float(s.weight_type)? };
    let rows = match s.rows {
        QZ1_CUDA_ROWS_PLAIN => RowSource::Plain,
        QZ1_CUDA_ROWS_RMS_NORM => RowSource::RmsNorm { weight, residual: false },
        QZ1_CUDA_ROWS_RESIDUAL_RMS_NORM => RowSource::RmsNorm { weight, residual: true },
        QZ1_CUDA_ROWS_SILU_MUL => RowSource::SiluMul,
        _ => {
            return Err(Fault::new(
                qz1_status::Scheme,
                "unknown kind of rows (expected a QZ1_CUDA_ROWS_ constant)",
            ));
        }
    };
    let dense = ActivationShape::new(rows, element, s.m, s.k);
    let stride = |given: usize, dense: usize| if given == 0 { dense } else { given };
    Ok(ActivationShape {
        fixed: flag(s.fixed)?,
        group: (s.group > 0).then_some(s.group),
        x_stride: stride(s.x_stride, dense.x_stride),
        up_stride: stride(s.up_stride, dense.up_stride),
        residual_stride: stride(s.residual_stride, dense.residual_stride),
        code_stride: stride(s.code_stride, dense.code_stride),
        aligned: !flag(s.unaligned)?,
        ..dense
    })
}

pub(super) struct Activation {
    plan: ActivationPlan,
    shape: ActivationShape,
}

impl Launch for Activation {
    type Shape = qz1_cuda_activation_shape;
    type Arguments = qz1_cuda_activation_arguments;

    is_family!(Activation);

    unsafe fn plan(_: &Scope, s: Self::Shape) -> Result<(Self, Vec<(Variant, LaunchShape)>), Fault> {
        let shape = settle(&s)?;
        let plan = shape.plan()?;
        let wanted = vec![(plan.variant.clone(), plan.launch)];
        Ok((Self { plan, shape }, wanted))
    }

    fn launch(&self, at: &Self::Arguments, launch: &mut Launcher<'_>) -> Result<(), Fault> {
        let shape = &self.shape;
        let of = |element: Float| if shape.aligned { 16 } else { element.bytes() };
        let floats = of(shape.element);
        let weight = match shape.rows {
            RowSource::RmsNorm { weight, .. } => of(weight),
            _ => floats,
        };
        let zero = i8::try_from(at.zero);
        let zero = zero.map_err(|_| {
            Fault::new(qz1_status::Scheme, "the activation zero point must be from -128 to 127")
        })?;
        let arguments = self.plan.arguments(&ActivationArguments {
            x: region(at.x, "the rows", floats)?,
            up: region(at.up, "the rows of `up`", floats)?,
            residual: region(at.residual, "the residual", floats)?,
            weight: region(at.weight, "the norm weight", weight)?,
            eps: at.eps,
            fixed: shape.fixed.then_some(FixedScale { scale: at.scale, zero }),
            codes: region(at.codes, "the codes", 16)?,
            scales: region(at.scales, "the scales", 4)?,
            row_sums: region(at.row_sums, "the row sums", 4)?,
            group_sums: region(at.group_sums, "the group sums", 4)?,
            count: Region::NONE,
        })?;
        launch(&[&arguments])
    }
}

/// Plans a quantization.
///
/// # Safety
/// Same as for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_activation_plan(
    kernels: *const qz1_cuda_kernels,
    shape: *const qz1_cuda_activation_shape,
    out: *mut *mut qz1_cuda_plan,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { kernels::plan::<Activation>(kernels, shape, out, message) }
}

/// Launches a quantization.
///
/// # Safety
/// Same as for `qz1_cuda_pack_launch`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_activation_launch(
    plan: *const qz1_cuda_plan,
    arguments: *const qz1_cuda_activation_arguments,
    stream: *mut c_void,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { kernels::launch::<Activation>(plan, arguments, stream, message) }
}
