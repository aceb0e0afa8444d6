//! Weights: their layout, packing and unpacking.

use quant_kernels_cpu::{
    FloatFormat, KernelError, Layout, PackedView, Parallel, ScaleType, Scales, WeightView,
};

use crate::layouts::{self, Described, checked};
use crate::memory::{self, Scope, fields};
use crate::parallel::{Threads, qz1_parallel};
use crate::status::{Fault, call, qz1_message, qz1_status};

/// Scales stored as IEEE half precision.
pub const QZ1_SCALES_F16: u32 = 1;
/// Scales stored as bfloat16.
pub const QZ1_SCALES_BF16: u32 = 2;
/// Scales stored as single precision.
pub const QZ1_SCALES_F32: u32 = 3;
/// Two levels of scales: 8-bit integers per group, and a float per row.
pub const QZ1_SCALES_PROGRESSIVE: u32 = 4;

/// E4M3 scales per group, divided by a float; only with floating-point codes.
pub const QZ1_SCALES_E4M3: u32 = 5;
/// E8M0 scales, which are powers of two; only with floating-point codes.
pub const QZ1_SCALES_E8M0: u32 = 6;

/// Codes are integers.
pub const QZ1_CODES_INTEGER: u32 = 0;
/// Codes are E4M3 (FP8) values of 8 bits.
pub const QZ1_CODES_E4M3: u32 = 1;
/// Codes are E2M1 (FP4) values of 4 bits.
pub const QZ1_CODES_E2M1: u32 = 2;

/// A quantized matrix `[n, k]` in logical order, row-major: `(code − zero) · scale`, with a scale and zero point for
/// each group of `group_size` neighbouring input features. With floating-point codes: `value(code) · scale`. E4M3 codes
/// can only be multiplied by float activations.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_weights {
    /// `sizeof(qz1_weights)`
    pub struct_size: u32,
    /// Bits per code, 2 to 8.
    pub bits: u32,
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// Input features that share a scale: a divisor of `k`; `k` itself for one scale per row.
    pub group_size: usize,
    /// `[n, k]`, one code per byte.
    pub codes: *const u8,
    /// Elements of `codes`.
    pub codes_len: usize,
    /// `[n, k / group_size]`, or `[n]` if `group_scales` is not null. With floating-point codes and `group_scales`:
    /// `[1]`, the number by which `group_scales` are divided.
    pub scales: *const f32,
    /// Elements of `scales`.
    pub scales_len: usize,
    /// `[n, k / group_size]`, the lower of two levels; null if there is only one level. With floating-point codes these
    /// are E4M3 codes without a sign, as in NVFP4.
    pub group_scales: *const u8,
    /// Elements of `group_scales`.
    pub group_scales_len: usize,
    /// `[n, k / group_size]`, or null if every zero point is `2^(bits − 1)`.
    pub zeros: *const u8,
    /// Elements of `zeros`.
    pub zeros_len: usize,
    /// `QZ1_CODES_…`. A structure that is too short to contain this field has integer codes.
    pub format: u32,
    /// 0
    pub reserved: u32,
}

/// The layout of packed bytes. Filled by `qz1_layout_of`. Its fields may be stored with the bytes, and are checked
/// against `id` on every use.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qz1_layout {
    /// `sizeof(qz1_layout)`
    pub struct_size: u32,
    /// Bits per stored code: 4 or 8.
    pub code_bits: u32,
    /// `QZ1_SCALES_…`
    pub scales: u32,
    /// 1 if every group has its own zero point.
    pub zeros: u32,
    /// The zero point of all groups if `zeros` is 0, else 0.
    pub middle: u32,
    /// 1 if the bytes include the sums that are required for activations with a zero point.
    pub sums: u32,
    /// Output features.
    pub n: u64,
    /// Input features.
    pub k: u64,
    /// Input features that share a scale.
    pub group_size: u64,
    /// Number of panels of sixteen rows.
    pub panels: u64,
    /// Bytes per panel.
    pub panel_bytes: u64,
    /// Bytes of the packed matrix. Kernels are fastest if it begins at a multiple of 64.
    pub bytes: u64,
    /// An id of the data order, computed from everything that affects it.
    pub id: u64,
    /// `QZ1_CODES_…`
    pub format: u32,
    /// 0
    pub reserved: u32,
}

/// The destinations of the parts of a packed matrix.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_parts {
    /// `sizeof(qz1_parts)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// `[n, k]`
    pub codes: *mut u8,
    /// Elements of `codes`.
    pub codes_len: usize,
    /// `[n, k / group_size]`. With two levels of scales these are the group scales: integers, or the values of E4M3
    /// codes.
    pub scales: *mut f32,
    /// Elements of `scales`.
    pub scales_len: usize,
    /// `[n, k / group_size]`, or null with `zeros_len` 0 if every group has the same zero point.
    pub zeros: *mut u8,
    /// Elements of `zeros`.
    pub zeros_len: usize,
    /// `[n]` with two levels of scales, else null with `channels_len` 0. With E4M3 group scales, every element is the
    /// number by which these are divided.
    pub channels: *mut f32,
    /// Elements of `channels`.
    pub channels_len: usize,
}

fields!(qz1_weights, zeros_len, reserved);
fields!(qz1_layout, id, reserved);
fields!(qz1_parts, channels_len, reserved);

/// Returns a view of the caller's weights.
///
/// # Safety
/// Same as for [`Scope::read`]; the memory that the structure points to must be as long as its fields state.
pub(crate) unsafe fn view(scope: &Scope, weights: *const qz1_weights) -> Result<WeightView<'_>, Fault> {
    // SAFETY: the caller upholds the pointer contract.
    unsafe {
        let w = scope.read(weights, "the weights")?;
        let codes = scope.slice(w.codes, w.codes_len, "the codes")?;
        let scales = scope.slice(w.scales, w.scales_len, "the scales")?;
        let groups = scope.slice_optional(w.group_scales, w.group_scales_len, "the group scales")?;
        let zeros = scope.slice_optional(w.zeros, w.zeros_len, "the zeros")?;
        if let Some(format) = format(w.format).ok_or_else(|| {
            Fault::new(qz1_status::Scheme, "unknown code format (expected a QZ1_CODES_ constant)")
        })? {
            let scales = match (groups, scales) {
                (Some(groups), &[global]) => Scales::E4m3 { groups, global },
                (Some(_), _) => {
                    return Err(Fault::new(qz1_status::Length, "group scales need exactly one global scale"));
                }
                (None, scales) => Scales::Float(scales),
            };
            if w.bits != u32::from(format.bits()) || zeros.is_some() {
                return Err(Fault::new(
                    qz1_status::Scheme,
                    "`bits` does not match the code format, or zero points are given for floating-point codes",
                ));
            }
            return Ok(WeightView::float_with_scales([w.n, w.k], format, w.group_size, codes, scales)?);
        }
        let scales = match groups {
            Some(groups) => Scales::Progressive { groups, channels: scales },
            None => Scales::Float(scales),
        };
        let bits = u8::try_from(w.bits).unwrap_or(u8::MAX);
        Ok(WeightView::with_scales([w.n, w.k], bits, w.group_size, codes, scales, zeros)?)
    }
}

/// Returns the floating-point format of a `QZ1_CODES_…`: `Some(None)` for integers, `None` for an unknown number.
pub(crate) fn format(format: u32) -> Option<Option<FloatFormat>> {
    match format {
        QZ1_CODES_INTEGER => Some(None),
        QZ1_CODES_E4M3 => Some(Some(FloatFormat::E4m3)),
        QZ1_CODES_E2M1 => Some(Some(FloatFormat::E2m1)),
        _ => None,
    }
}

pub(crate) fn format_number(format: Option<FloatFormat>) -> u32 {
    match format {
        Some(FloatFormat::E4m3) => QZ1_CODES_E4M3,
        Some(FloatFormat::E2m1) => QZ1_CODES_E2M1,
        _ => QZ1_CODES_INTEGER,
    }
}

/// Returns the type of scales of a `QZ1_SCALES_…`, or `None` for an unknown number.
pub(crate) fn scales(scales: u32) -> Option<ScaleType> {
    match scales {
        QZ1_SCALES_F16 => Some(ScaleType::F16),
        QZ1_SCALES_BF16 => Some(ScaleType::Bf16),
        QZ1_SCALES_F32 => Some(ScaleType::F32),
        QZ1_SCALES_PROGRESSIVE => Some(ScaleType::Progressive),
        QZ1_SCALES_E4M3 => Some(ScaleType::E4m3),
        QZ1_SCALES_E8M0 => Some(ScaleType::E8m0),
        _ => None,
    }
}

pub(crate) fn scales_number(scales: ScaleType) -> u32 {
    match scales {
        ScaleType::F16 => QZ1_SCALES_F16,
        ScaleType::Bf16 => QZ1_SCALES_BF16,
        ScaleType::F32 => QZ1_SCALES_F32,
        ScaleType::Progressive => QZ1_SCALES_PROGRESSIVE,
        ScaleType::E4m3 => QZ1_SCALES_E4M3,
        ScaleType::E8m0 => QZ1_SCALES_E8M0,
        ScaleType::Super | ScaleType::SuperMins => 0,
    }
}

impl Described for qz1_layout {
    type Layout = Layout;
    type Numbers = ([u32; 6], [u64; 7]);

    fn of(layout: &Layout) -> Self {
        Self {
            struct_size: size_of::<Self>() as u32,
            code_bits: layout.code_bits() as u32,
            scales: scales_number(layout.scales()),
            zeros: u32::from(layout.zero_point().is_none()),
            middle: layout.zero_point().map_or(0, u32::from),
            sums: u32::from(layout.has_sums()),
            n: layout.n() as u64,
            k: layout.k() as u64,
            group_size: layout.group_size() as u64,
            panels: layout.panels() as u64,
            panel_bytes: layout.panel_bytes() as u64,
            bytes: layout.bytes() as u64,
            id: layout.id(),
            format: format_number(layout.float_format()),
            reserved: 0,
        }
    }

    fn layout(&self) -> Result<Layout, Fault> {
        let unknown = || Fault::new(qz1_status::Scheme, "there is no layout with these fields");
        let size = |v: u64| usize::try_from(v).map_err(|_| unknown());
        let scales = scales(self.scales).ok_or_else(unknown)?;
        let middle = match self.zeros {
            0 => Some(u8::try_from(self.middle).map_err(|_| unknown())?),
            _ => None,
        };
        let (shape, group) = ([size(self.n)?, size(self.k)?], size(self.group_size)?);
        Ok(match format(self.format).ok_or_else(unknown)? {
            Some(format) => Layout::from_float_parts(shape, format, group, scales)?,
            None => {
                Layout::from_parts(shape, self.code_bits as usize, group, scales, middle, self.sums == 1)?
            }
        })
    }

    fn numbers(&self) -> Self::Numbers {
        (
            [self.code_bits, self.scales, self.zeros, self.middle, self.sums, self.format],
            [self.n, self.k, self.group_size, self.panels, self.panel_bytes, self.bytes, self.id],
        )
    }
}

/// Returns the layout of one of any number of structures; memory that is written must have been entered before.
///
/// # Safety
/// Same as for [`Scope::read`].
pub(crate) unsafe fn layout_of_many(scope: &Scope, at: *const qz1_layout) -> Result<Layout, Fault> {
    // SAFETY: this function has the safety contract of `read_one_of_many`.
    checked(&unsafe { scope.read_one_of_many(at, "the layout") }?)
}

/// Returns packed bytes with their layout.
///
/// # Safety
/// Same as for [`Scope::slice`] and [`Scope::read`].
pub(crate) unsafe fn packed(
    scope: &Scope,
    at: *const qz1_layout,
    bytes: *const u8,
    len: usize,
) -> Result<PackedView<'_>, Fault> {
    // SAFETY: the caller upholds the pointer contract.
    unsafe {
        let layout = layouts::layout(scope, at)?;
        let bytes = scope.slice(bytes, len, "the packed weights")?;
        Ok(PackedView::new(layout, layout.id(), bytes)?)
    }
}

/// Computes the layout of weights. If `sums` is not 0, it includes sums for activations with a zero point. Scales are
/// stored in the narrowest type that represents all of them exactly. Fills `out`, whose `struct_size` must be set by
/// the caller.
///
/// # Safety
/// The caller must uphold the pointer contract of the crate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_layout_of(
    weights: *const qz1_weights,
    sums: u32,
    out: *mut qz1_layout,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let view = view(scope, weights)?;
        let out = scope.place(out, "the layout")?;
        out.put(Described::of(&Layout::of(&view, sums != 0)?));
        Ok(())
    })
}

/// Packs `panels` panels of weights, beginning with `first_panel`, into `out`, which has `panels · panel_bytes` bytes.
/// Pass 0 and `layout.panels` to pack all of them. `parallel` is null or describes the caller's threads.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_pack(
    weights: *const qz1_weights,
    layout: *const qz1_layout,
    first_panel: usize,
    panels: usize,
    out: *mut u8,
    out_len: usize,
    parallel: *const qz1_parallel,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract; `out` does not overlap `weights` (`Scope`).
    call(message, |scope| unsafe {
        let (view, layout) = (view(scope, weights)?, layouts::layout(scope, layout)?);
        let threads = Threads::new(scope, parallel)?;
        let out = scope.output(out, out_len, "the packed weights")?;
        let end = first_panel.checked_add(panels).filter(|&end| end <= layout.panels());
        let end = end.ok_or_else(|| {
            Fault::new(qz1_status::Mismatch, "the panels extend beyond the end of the matrix")
        })?;
        pack(&view, &layout, first_panel..end, out.slice(), &threads)
    })
}

fn pack(
    view: &WeightView<'_>,
    layout: &Layout,
    panels: core::ops::Range<usize>,
    out: &mut [u8],
    threads: &Threads,
) -> Result<(), Fault> {
    use std::sync::{Mutex, PoisonError};
    let each = panels.len().div_ceil(threads.threads()).max(1);
    if out.len() != panels.len() * layout.panel_bytes() || panels.len() <= each {
        return Ok(layout.pack(view, panels, out)?);
    }
    // Each piece takes its part of the output once.
    let mut parts = memory::room(panels.len().div_ceil(each), "the work of the threads")?;
    parts.extend(out.chunks_mut(each * layout.panel_bytes()).map(|part| Mutex::new(Some(part))));
    let refused = Mutex::new(None);
    threads.for_each(parts.len(), &|i| {
        let part = parts[i].lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(part) = part else { return };
        let first = panels.start + i * each;
        if let Err(error) = layout.pack(view, first..(first + each).min(panels.end), part) {
            *refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        }
    });
    threads.finish()?;
    match refused.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error.into()),
        None => Ok(()),
    }
}

/// Checks packed bytes from an external source, such as a file, for values that `qz1_pack` never writes, such as NaN
/// codes. Scales of f16, bf16 and f32 are not checked. Kernels accept any bytes, but read NaN codes, and NaN scales of
/// E4M3 and E8M0, as other values.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_check(
    layout: *const qz1_layout,
    packed: *const u8,
    packed_len: usize,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe { Ok(self::packed(scope, layout, packed, packed_len)?.check()?) })
}

/// Writes the parts of packed weights; each has the length that `qz1_parts` documents.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_unpack(
    layout: *const qz1_layout,
    packed: *const u8,
    packed_len: usize,
    parts: *const qz1_parts,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract; outputs overlap neither each other nor `packed` (`Scope`).
    call(message, |scope| unsafe {
        let view = self::packed(scope, layout, packed, packed_len)?;
        let p = scope.read(parts, "the parts")?;
        let codes = scope.output(p.codes, p.codes_len, "the codes")?;
        let scales = scope.output(p.scales, p.scales_len, "the scales")?;
        let zeros = scope.output(p.zeros, p.zeros_len, "the zeros")?;
        let channels = scope.output(p.channels, p.channels_len, "the channels")?;
        let from = view.layout().unpack(view.bytes())?;
        let fits = |what, expected: usize, got: usize| match expected == got {
            true => Ok(()),
            false => Err(KernelError::Length { what, expected, got }),
        };
        fits("codes", from.codes.len(), p.codes_len)?;
        fits("scales", from.scales.len(), p.scales_len)?;
        fits("zeros", from.zeros.len(), p.zeros_len)?;
        fits("channels", from.channels.len(), p.channels_len)?;
        codes.slice().copy_from_slice(&from.codes);
        scales.slice().copy_from_slice(&from.scales);
        zeros.slice().copy_from_slice(&from.zeros);
        channels.slice().copy_from_slice(&from.channels);
        Ok(())
    })
}

/// Dequantizes `rows` rows of packed weights, beginning with `first_row`, to floats `[rows, k]`.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_dequantize_rows(
    layout: *const qz1_layout,
    packed: *const u8,
    packed_len: usize,
    first_row: usize,
    rows: usize,
    out: *mut f32,
    out_len: usize,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract; `out` does not overlap `packed` (`Scope`).
    call(message, |scope| unsafe {
        let view = self::packed(scope, layout, packed, packed_len)?;
        let out = scope.output(out, out_len, "the output")?;
        let end = first_row.checked_add(rows).filter(|&end| end <= view.layout().n());
        let end = end.ok_or_else(|| {
            Fault::new(qz1_status::Mismatch, "the rows extend beyond the end of the matrix")
        })?;
        Ok(view.dequantize_rows(first_row..end, out.slice())?)
    })
}
