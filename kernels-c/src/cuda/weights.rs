//! Weights in the order of the GPU kernels: their layout, and packing on the CPU.

use quant_kernels_cuda::layout::{Order, WeightLayout};

use crate::layouts::{self, Described};
use crate::memory::fields;
use crate::status::{Fault, call, qz1_message, qz1_status};
use crate::weights::{format, format_number, qz1_weights, scales, scales_number, view};

/// Weights that are multiplied by f16 or bf16.
pub const QZ1_CUDA_ORDER_FLOAT: u32 = 1;
/// Weights that are multiplied by 8-bit integers.
pub const QZ1_CUDA_ORDER_INT8: u32 = 2;

/// The layout of packed bytes. The order is the same on all architectures. Filled by `qz1_cuda_layout_of` or
/// `qz1_cuda_layout_from`. Its fields may be stored with the bytes, and are checked against `id` on every use.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qz1_cuda_layout {
    /// `sizeof(qz1_cuda_layout)`
    pub struct_size: u32,
    /// `QZ1_CUDA_ORDER_…`
    pub order: u32,
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
    /// `QZ1_CODES_…`; floating-point codes require `QZ1_CUDA_ORDER_FLOAT` and a `middle` of 0.
    pub format: u32,
    /// Output features.
    pub n: u64,
    /// Input features.
    pub k: u64,
    /// Input features that share a scale: 32, 64, 128 or `k`. With float activations or with two levels of scales also
    /// any multiple of 128; with floating-point codes also 16.
    pub group_size: u64,
    /// Bytes of the packed matrix, a multiple of 256. On the device, it must begin at a multiple of 256.
    pub bytes: u64,
    /// An id of the data order, computed from everything that affects it.
    pub id: u64,
}

fields!(qz1_cuda_layout, id);

fn order(order: u32) -> Result<Order, Fault> {
    match order {
        QZ1_CUDA_ORDER_FLOAT => Ok(Order::Float),
        QZ1_CUDA_ORDER_INT8 => Ok(Order::Int8),
        _ => Err(Fault::new(
            qz1_status::Scheme,
            "unknown order of weights (expected a QZ1_CUDA_ORDER_ constant)",
        )),
    }
}

impl Described for qz1_cuda_layout {
    type Layout = WeightLayout;
    type Numbers = ([u32; 7], [u64; 5]);

    fn of(layout: &WeightLayout) -> Self {
        Self {
            struct_size: size_of::<Self>() as u32,
            order: match layout.order() {
                Order::Float => QZ1_CUDA_ORDER_FLOAT,
                Order::Int8 => QZ1_CUDA_ORDER_INT8,
            },
            code_bits: layout.code_bits() as u32,
            scales: scales_number(layout.scales()),
            zeros: u32::from(layout.zero_point().is_none()),
            middle: layout.zero_point().map_or(0, u32::from),
            sums: u32::from(layout.has_sums()),
            format: format_number(layout.float_format()),
            n: layout.n() as u64,
            k: layout.k() as u64,
            group_size: layout.group_size() as u64,
            bytes: layout.bytes() as u64,
            id: layout.id(),
        }
    }

    fn layout(&self) -> Result<WeightLayout, Fault> {
        let unknown = |what| Fault::new(qz1_status::Scheme, what);
        let size = |v: u64| {
            usize::try_from(v)
                .map_err(|_| Fault::new(qz1_status::TooLarge, "the matrix exceeds the address space"))
        };
        let scales = scales(self.scales)
            .ok_or_else(|| unknown("unknown type of scales (expected a QZ1_SCALES_ constant)"))?;
        let middle = match (self.zeros, self.middle) {
            (1, 0) => None,
            (0, middle) => Some(u8::try_from(middle).map_err(|_| unknown("`middle` exceeds 8 bits"))?),
            _ => return Err(unknown("`zeros` must be 0 or 1, and `middle` must be 0 if it is 1")),
        };
        if self.sums > 1 {
            return Err(unknown("`sums` must be 0 or 1"));
        }
        let (shape, group, bits) =
            ([size(self.n)?, size(self.k)?], size(self.group_size)?, self.code_bits as usize);
        if let Some(format) = format(self.format)
            .ok_or_else(|| unknown("unknown code format (expected a QZ1_CODES_ constant)"))?
        {
            let fits = (bits, middle, self.sums) == (usize::from(format.bits()), Some(0), 0);
            if !fits || order(self.order)? != Order::Float {
                return Err(unknown(
                    "`code_bits`, `middle`, `sums` or `order` does not match the floating-point code format",
                ));
            }
            return Ok(WeightLayout::from_float_parts(shape, format, group, scales)?);
        }
        Ok(WeightLayout::from_parts(shape, bits, group, scales, middle, order(self.order)?, self.sums == 1)?)
    }

    fn numbers(&self) -> Self::Numbers {
        (
            [self.order, self.code_bits, self.scales, self.zeros, self.middle, self.sums, self.format],
            [self.n, self.k, self.group_size, self.bytes, self.id],
        )
    }
}

/// The layout of weights that are multiplied by the activations of `order`, a `QZ1_CUDA_ORDER_…`. If `sums` is not 0,
/// it includes the sums that are required for 8-bit activations with a zero point. Scales are stored in the narrowest
/// type that represents all of them exactly. Fills `out`, whose `struct_size` must be set by the caller.
///
/// # Safety
/// Same as for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_layout_of(
    weights: *const qz1_weights,
    order: u32,
    sums: u32,
    out: *mut qz1_cuda_layout,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let view = view(scope, weights)?;
        let out = scope.place(out, "the layout")?;
        out.put(Described::of(&WeightLayout::of(&view, self::order(order)?, sums != 0)?));
        Ok(())
    })
}

/// Computes a layout from its parameters: `bytes` and `id` follow from the other fields of `parts`. Use it for weights
/// that are packed on the device, or to determine their size. Fills `out`, whose `struct_size` must be set by the
/// caller; `parts` and `out` must not overlap.
///
/// # Safety
/// Same as for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_layout_from(
    parts: *const qz1_cuda_layout,
    out: *mut qz1_cuda_layout,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let parts = scope.read(parts, "the parts")?;
        let out = scope.place(out, "the layout")?;
        out.put(Described::of(&parts.layout()?));
        Ok(())
    })
}

/// Packs weights on the CPU into `out`, which has `layout.bytes` bytes. Writes the same bytes as
/// `qz1_cuda_pack_launch`, and 0 between sections.
///
/// # Safety
/// Same as for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_pack(
    weights: *const qz1_weights,
    layout: *const qz1_cuda_layout,
    out: *mut u8,
    out_len: usize,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract; `out` does not overlap `weights` (`Scope`).
    call(message, |scope| unsafe {
        let (view, layout) = (view(scope, weights)?, layouts::layout(scope, layout)?);
        let out = scope.output(out, out_len, "the packed weights")?;
        Ok(layout.pack(&view, out.slice())?)
    })
}
