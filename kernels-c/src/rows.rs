//! Activations, quantized or packed as floats.

use core::ffi::c_void;

use half::{bf16, f16};
use quant_kernels_cpu::{
    Element, FloatRows, GateUp, Int8Rows, KernelError, Layout, Parallel, RmsNorm, RowLayout, StaticScale,
};

use crate::features::token;
use crate::layouts;
use crate::memory::{self, Scope, fields};
use crate::parallel::{Threads, qz1_parallel};
use crate::status::{Fault, call, qz1_message, qz1_status};
use crate::weights::qz1_layout;

/// Single precision.
pub const QZ1_TYPE_F32: u32 = 1;
/// IEEE half precision.
pub const QZ1_TYPE_F16: u32 = 2;
/// bfloat16.
pub const QZ1_TYPE_BF16: u32 = 3;

/// Activations quantized to 8-bit integers.
pub struct qz1_int8_rows {
    pub(crate) rows: Int8Rows,
}

/// Float activations in the order in which the kernels read them.
pub struct qz1_float_rows {
    pub(crate) rows: FloatRows,
}

/// Input rows, row-major.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_values {
    /// `sizeof(qz1_values)`
    pub struct_size: u32,
    /// `QZ1_TYPE_…`
    pub kind: u32,
    /// The values, aligned to their type.
    pub data: *const c_void,
    /// Number of values, not bytes.
    pub len: usize,
}

/// Rows to which the activations are added, row-major.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_residual {
    /// `sizeof(qz1_residual)`
    pub struct_size: u32,
    /// `QZ1_TYPE_…`
    pub kind: u32,
    /// The values, aligned to their type.
    pub data: *mut c_void,
    /// Number of values, not bytes.
    pub len: usize,
}

/// One scale and zero point for all tokens: `x ≈ scale · (a − zero)`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_static_scale {
    /// `sizeof(qz1_static_scale)`
    pub struct_size: u32,
    /// Positive and finite, with a finite inverse.
    pub scale: f32,
    /// −128 to 127; values other than 0 require a layout with sums.
    pub zero: i32,
    /// 0
    pub reserved: u32,
}

/// RMSNorm: `y = x / √(mean x² + eps) · weight`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_rms_norm {
    /// `sizeof(qz1_rms_norm)`
    pub struct_size: u32,
    /// Positive and finite.
    pub eps: f32,
    /// `[k]`
    pub weight: *const f32,
    /// Elements of `weight`.
    pub weight_len: usize,
}

fields!(qz1_values, len);
fields!(qz1_residual, len);
fields!(qz1_static_scale, reserved, reserved);
fields!(qz1_rms_norm, weight_len);

enum Source<'a, E: Element> {
    Plain(&'a [E]),
    Norm(&'a [E], RmsNorm<'a>, Option<&'a mut [E]>),
    Gate(GateUp<'a, E>),
}

trait Sink {
    fn fill<E: Element>(
        &mut self,
        from: Source<'_, E>,
        layout: RowLayout,
        threads: &dyn Parallel,
    ) -> Result<(), KernelError>;
}

/// 8-bit integers, with scales per token or one static scale.
struct Int8<'a>(&'a mut Int8Rows, Option<StaticScale>);

impl Sink for Int8<'_> {
    fn fill<E: Element>(
        &mut self,
        from: Source<'_, E>,
        layout: RowLayout,
        threads: &dyn Parallel,
    ) -> Result<(), KernelError> {
        let Self(rows, by) = self;
        match (from, *by) {
            (Source::Plain(x), Some(by)) => rows.quantize_static(x, layout, by, threads),
            (Source::Plain(x), None) => rows.quantize(x, layout, threads),
            (Source::Norm(x, norm, residual), by) => {
                rows.quantize_rms_norm(x, norm, residual, layout, by, threads)
            }
            (Source::Gate(x), by) => rows.quantize_silu_mul(x, layout, by, threads),
        }
    }
}

impl Sink for &mut FloatRows {
    fn fill<E: Element>(
        &mut self,
        from: Source<'_, E>,
        layout: RowLayout,
        threads: &dyn Parallel,
    ) -> Result<(), KernelError> {
        match from {
            Source::Plain(x) => self.pack(x, layout, threads),
            Source::Norm(x, norm, residual) => self.pack_rms_norm(x, norm, residual, layout, threads),
            Source::Gate(x) => self.pack_silu_mul(x, layout, threads),
        }
    }
}

/// The operation that computes rows, with the caller's structures as its operands.
enum Made {
    Plain,
    Norm(*const qz1_rms_norm, *const qz1_residual),
    Gate(*const qz1_values),
}

macro_rules! by_kind {
    ($kind:expr, $body:ident($($arg:expr),*)) => {
        match $kind {
            QZ1_TYPE_F32 => $body::<f32>($($arg),*),
            QZ1_TYPE_F16 => $body::<f16>($($arg),*),
            QZ1_TYPE_BF16 => $body::<bf16>($($arg),*),
            _ => Err(Fault::new(
                qz1_status::Scheme,
                "unknown type of activations (expected QZ1_TYPE_F32, QZ1_TYPE_F16 or QZ1_TYPE_BF16)",
            )),
        }
    };
}
pub(crate) use by_kind;

/// Quantizes or packs rows into `sink`.
///
/// # Safety
/// Same as for [`Scope::read`] and [`Scope::slice`], for all memory that the structures point to.
unsafe fn make(
    scope: &Scope,
    x: *const qz1_values,
    made: Made,
    layout: *const qz1_layout,
    parallel: *const qz1_parallel,
    sink: impl Sink,
) -> Result<(), Fault> {
    // SAFETY: the caller upholds the pointer contract.
    unsafe {
        let (x, layout) = (scope.read(x, "the activations")?, layouts::layout(scope, layout)?);
        let threads = Threads::new(scope, parallel)?;
        by_kind!(x.kind, make_of(scope, x, made, &layout, &threads, sink))?;
        threads.finish()
    }
}

/// # Safety
/// Same as for [`make`]; the values are of type `E`.
unsafe fn make_of<E: Element>(
    scope: &Scope,
    x: qz1_values,
    made: Made,
    layout: &Layout,
    threads: &Threads,
    mut sink: impl Sink,
) -> Result<(), Fault> {
    let layout = RowLayout::of(layout);
    let same = |kind: u32| match kind == x.kind {
        true => Ok(()),
        false => Err(Fault::new(qz1_status::Mismatch, "the activations of one call must have the same type")),
    };
    // SAFETY: the caller upholds the pointer contract.
    let from = unsafe {
        let data = scope.slice(x.data.cast::<E>(), x.len, "the activations")?;
        match made {
            Made::Plain => Source::Plain(data),
            Made::Norm(norm, residual) => {
                let norm = scope.read(norm, "the norm")?;
                let weight = scope.slice(norm.weight, norm.weight_len, "the norm weight")?;
                let residual = match scope.read_optional(residual, "the residual")? {
                    Some(r) => {
                        same(r.kind)?;
                        // SAFETY: the residual overlaps nothing that is read (`Scope`), and is the last part of the
                        // call.
                        Some(scope.output(r.data.cast::<E>(), r.len, "the residual")?.slice())
                    }
                    None => None,
                };
                Source::Norm(data, RmsNorm { weight, eps: norm.eps }, residual)
            }
            Made::Gate(up) => match scope.read_optional(up, "up")? {
                Some(up) => {
                    same(up.kind)?;
                    let up = scope.slice(up.data.cast::<E>(), up.len, "up")?;
                    Source::Gate(GateUp::Apart { gate: data, up })
                }
                None => Source::Gate(GateUp::Joined(data)),
            },
        }
    };
    Ok(sink.fill(from, layout, threads)?)
}

/// Returns a handle's rows, and the static scale with which they are quantized, if there is one.
///
/// # Safety
/// Same as for [`Scope::read`]. The handle must come from `qz1_int8_rows_new`, and no other thread may use it.
unsafe fn int8(
    scope: &Scope,
    rows: *mut qz1_int8_rows,
    by: *const qz1_static_scale,
) -> Result<Int8<'_>, Fault> {
    // SAFETY: the caller upholds the pointer contract.
    unsafe {
        let rows = scope.handle(rows, "the handle")?;
        let by = scope.read_optional(by, "the static scale")?.map(|by| {
            let zero = i8::try_from(by.zero);
            let zero = zero.map_err(|_| {
                Fault::new(qz1_status::Scheme, "the activation zero point must be from -128 to 127")
            })?;
            Ok::<_, Fault>(StaticScale { scale: by.scale, zero })
        });
        Ok(Int8(&mut rows.rows, by.transpose()?))
    }
}

/// Creates a handle for quantized rows, which are computed with the instructions `isa`. It must be freed by
/// `qz1_int8_rows_free`. On error, `out` is set to null.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_int8_rows_new(
    isa: u32,
    out: *mut *mut qz1_int8_rows,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        memory::make(scope, out, || Ok(qz1_int8_rows { rows: Int8Rows::new(token(isa)?) }))
    })
}

/// Frees a handle; null is allowed.
///
/// # Safety
/// The handle must come from `qz1_int8_rows_new` and be freed only once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_int8_rows_free(rows: *mut qz1_int8_rows) {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { memory::free(rows) }
}

/// Quantizes rows `[m, k]`, where `m` is the length divided by the layout's `k`: with one scale per token, or with the
/// static scale `by` if it is not null.
///
/// # Safety
/// Same as for `qz1_layout_of`; no other thread may use the handle during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_int8_rows_quantize(
    rows: *mut qz1_int8_rows,
    layout: *const qz1_layout,
    x: *const qz1_values,
    by: *const qz1_static_scale,
    parallel: *const qz1_parallel,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe { make(scope, x, Made::Plain, layout, parallel, int8(scope, rows, by)?) })
}

/// Quantizes the RMSNorm of rows. If `residual` is not null, `x` is first added to its rows `[m, k]`, which have the
/// same type, and the norm is computed from the sum.
///
/// # Safety
/// Same as for `qz1_int8_rows_quantize`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_int8_rows_quantize_rms_norm(
    rows: *mut qz1_int8_rows,
    layout: *const qz1_layout,
    x: *const qz1_values,
    norm: *const qz1_rms_norm,
    residual: *const qz1_residual,
    by: *const qz1_static_scale,
    parallel: *const qz1_parallel,
    message: *const qz1_message,
) -> qz1_status {
    let made = Made::Norm(norm, residual);
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe { make(scope, x, made, layout, parallel, int8(scope, rows, by)?) })
}

/// Quantizes `silu(gate) · up`. If `up` is null, `gate` holds both: rows `[m, 2k]`, each a row of the gate followed by
/// a row of `up`.
///
/// # Safety
/// Same as for `qz1_int8_rows_quantize`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_int8_rows_quantize_silu_mul(
    rows: *mut qz1_int8_rows,
    layout: *const qz1_layout,
    gate: *const qz1_values,
    up: *const qz1_values,
    by: *const qz1_static_scale,
    parallel: *const qz1_parallel,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        make(scope, gate, Made::Gate(up), layout, parallel, int8(scope, rows, by)?)
    })
}

/// Creates a handle for float rows, packed for the instructions `isa`. It must be freed by `qz1_float_rows_free`. On
/// error, `out` is set to null.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_float_rows_new(
    isa: u32,
    out: *mut *mut qz1_float_rows,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        memory::make(scope, out, || Ok(qz1_float_rows { rows: FloatRows::new(token(isa)?) }))
    })
}

/// Frees a handle; null is allowed.
///
/// # Safety
/// The handle must come from `qz1_float_rows_new` and be freed only once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_float_rows_free(rows: *mut qz1_float_rows) {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { memory::free(rows) }
}

/// Packs float rows `[m, k]`.
///
/// # Safety
/// Same as for `qz1_layout_of`; no other thread may use the handle during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_float_rows_pack(
    rows: *mut qz1_float_rows,
    layout: *const qz1_layout,
    x: *const qz1_values,
    parallel: *const qz1_parallel,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        make(scope, x, Made::Plain, layout, parallel, &mut scope.handle(rows, "the handle")?.rows)
    })
}

/// Packs the RMSNorm of rows, with the arguments of `qz1_int8_rows_quantize_rms_norm` other than the static scale.
///
/// # Safety
/// Same as for `qz1_float_rows_pack`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_float_rows_pack_rms_norm(
    rows: *mut qz1_float_rows,
    layout: *const qz1_layout,
    x: *const qz1_values,
    norm: *const qz1_rms_norm,
    residual: *const qz1_residual,
    parallel: *const qz1_parallel,
    message: *const qz1_message,
) -> qz1_status {
    let made = Made::Norm(norm, residual);
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        make(scope, x, made, layout, parallel, &mut scope.handle(rows, "the handle")?.rows)
    })
}

/// Packs `silu(gate) · up`, with the arguments of `qz1_int8_rows_quantize_silu_mul` other than the static scale.
///
/// # Safety
/// Same as for `qz1_float_rows_pack`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_float_rows_pack_silu_mul(
    rows: *mut qz1_float_rows,
    layout: *const qz1_layout,
    gate: *const qz1_values,
    up: *const qz1_values,
    parallel: *const qz1_parallel,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        make(scope, gate, Made::Gate(up), layout, parallel, &mut scope.handle(rows, "the handle")?.rows)
    })
}
