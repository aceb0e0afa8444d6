//! Pages of keys and values on the device, and appending to them.

use core::ffi::c_void;

use quant_kernels_cuda::attention::{AppendArguments, AppendPlan, AppendShape, KvPageLayout};
use quant_kernels_cuda::compile::Variant;
use quant_kernels_cuda::launch::LaunchShape;

use super::activation::float;
use super::kernels::{self, Launch, Launcher, is_family, qz1_cuda_kernels, qz1_cuda_plan};
use super::region::{address, address_optional, product, qz1_cuda_region, region, rows};
use crate::kv::{kind, kind_number};
use crate::layouts::{self, Described};
use crate::memory::{Scope, fields};
use crate::status::{Fault, call, qz1_message, qz1_status};

/// Layout of pages of keys and values of one key-value head on the device. Filled by `qz1_cuda_kv_layout_of`. Its
/// fields may be stored with the pages, and are checked against `id` on every use.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qz1_cuda_kv_layout {
    /// `sizeof(qz1_cuda_kv_layout)`
    pub struct_size: u32,
    /// `QZ1_KV_…`
    pub kind: u32,
    /// Features of a head: a multiple of 16, at most 256. Multiples of 32 need no padding.
    pub head_dim: u32,
    /// Tokens per page: 16, 32, 64, … 1024.
    pub page_tokens: u32,
    /// Bytes per page of one head, a multiple of 128.
    pub page_bytes: u64,
    /// An id of the data order; it does not depend on the tokens per page.
    pub id: u64,
}

fields!(qz1_cuda_kv_layout, id);

impl Described for qz1_cuda_kv_layout {
    type Layout = KvPageLayout;
    type Numbers = ([u32; 3], [u64; 2]);

    fn of(layout: &KvPageLayout) -> Self {
        Self {
            struct_size: size_of::<Self>() as u32,
            kind: kind_number(layout.kind()),
            head_dim: layout.head_dim() as u32,
            page_tokens: layout.page_tokens() as u32,
            page_bytes: layout.page_bytes() as u64,
            id: layout.id(),
        }
    }

    fn layout(&self) -> Result<KvPageLayout, Fault> {
        Ok(KvPageLayout::new(kind(self.kind)?, self.head_dim as usize, self.page_tokens as usize)?)
    }

    fn numbers(&self) -> Self::Numbers {
        ([self.kind, self.head_dim, self.page_tokens], [self.page_bytes, self.id])
    }
}

pub(super) fn short(of: usize, what: &'static str) -> Result<u32, Fault> {
    u32::try_from(of).map_err(|_| Fault::part(qz1_status::TooLarge, what, "exceeds 32 bits"))
}

/// The layout of pages of a `QZ1_KV_…` for heads of `head_dim` features. Fills `out`, whose `struct_size` must be set
/// by the caller.
///
/// # Safety
/// Same as for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_kv_layout_of(
    kind: u32,
    head_dim: usize,
    page_tokens: usize,
    out: *mut qz1_cuda_kv_layout,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let out = scope.place(out, "the layout")?;
        out.put(Described::of(&KvPageLayout::new(crate::kv::kind(kind)?, head_dim, page_tokens)?));
        Ok(())
    })
}

/// The parameters of a launch that quantizes tokens of any sequences and stores them in pages.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_cuda_append_shape {
    /// `sizeof(qz1_cuda_append_shape)`
    pub struct_size: u32,
    /// Type of keys and values, a `QZ1_TYPE_…`.
    pub x_type: u32,
    /// Layout of the pages.
    pub layout: *const qz1_cuda_kv_layout,
    /// Key-value heads, at most 65535.
    pub kv_heads: usize,
    /// Number of tokens. 0 launches nothing.
    pub tokens: usize,
}

/// Device addresses, at multiples of 16.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_cuda_append_arguments {
    /// `sizeof(qz1_cuda_append_arguments)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// `[tokens, kv_heads, head_dim]`, after rotary embedding.
    pub keys: qz1_cuda_region,
    /// `[tokens, kv_heads, head_dim]`
    pub values: qz1_cuda_region,
    /// u32 `[tokens]`: the table row of each token.
    pub sequence: qz1_cuda_region,
    /// u32 `[tokens]`: each token's position in its sequence; tokens with `UINT32_MAX` are skipped.
    pub position: qz1_cuda_region,
    /// u32 `[sequences, table_stride]`: page numbers in order. The kernel does not check that entries of `sequence` are
    /// below the number of rows.
    pub table: qz1_cuda_region,
    /// Pages of all heads, beginning with the first head of page 0. Tokens whose page is not entirely within this
    /// region are skipped.
    pub pages: qz1_cuda_region,
    /// A u32, aligned to its type, that is incremented for each row with a NaN or a magnitude above 65504 (which is
    /// clamped when stored); or absent.
    pub refused: qz1_cuda_region,
    /// Elements between tokens of `keys`; the distance in bytes must be a multiple of 16. 0: `kv_heads · head_dim`.
    pub key_stride: usize,
    /// Elements between tokens of `values`, with the same rules as for `keys`.
    pub value_stride: usize,
    /// Entries between rows of the table.
    pub table_stride: usize,
    /// Bytes between pages of one head, a multiple of 16; 0: `kv_heads · page_bytes`.
    pub page_stride: usize,
    /// Bytes between heads of one page, a multiple of 16; 0: `page_bytes`.
    pub head_stride: usize,
}

fields!(qz1_cuda_append_shape, tokens);
fields!(qz1_cuda_append_arguments, head_stride, reserved);

pub(super) struct Append {
    plan: AppendPlan,
    shape: AppendShape,
}

impl Launch for Append {
    type Shape = qz1_cuda_append_shape;
    type Arguments = qz1_cuda_append_arguments;

    is_family!(Append);

    unsafe fn plan(scope: &Scope, s: Self::Shape) -> Result<(Self, Vec<(Variant, LaunchShape)>), Fault> {
        // SAFETY: the caller upholds the pointer contract.
        let layout = unsafe { layouts::layout(scope, s.layout) }?;
        let (tokens, input) = (s.tokens, float(s.x_type)?);
        let shape = AppendShape { layout, kv_heads: heads(s.kv_heads)?, tokens, input };
        let plan = shape.plan()?;
        let wanted = vec![(plan.variant.clone(), plan.launch)];
        Ok((Self { plan, shape }, wanted))
    }

    fn launch(&self, at: &Self::Arguments, launch: &mut Launcher<'_>) -> Result<(), Fault> {
        let arguments = self.plan.arguments(&settle(&self.shape, at)?);
        launch(&[&arguments])
    }
}

/// Plans an append.
///
/// # Safety
/// Same as for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_append_plan(
    kernels: *const qz1_cuda_kernels,
    shape: *const qz1_cuda_append_shape,
    out: *mut *mut qz1_cuda_plan,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { kernels::plan::<Append>(kernels, shape, out, message) }
}

pub(super) fn heads(of: usize) -> Result<usize, Fault> {
    match of {
        0..=65_535 => Ok(of),
        _ => Err(Fault::new(qz1_status::TooLarge, "the number of heads exceeds 65535")),
    }
}

/// Launches an append: quantizes and stores keys and values of tokens.
///
/// # Safety
/// Same as for `qz1_cuda_pack_launch`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_append_launch(
    plan: *const qz1_cuda_plan,
    arguments: *const qz1_cuda_append_arguments,
    stream: *mut c_void,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { kernels::launch::<Append>(plan, arguments, stream, message) }
}

fn settle(shape: &AppendShape, at: &qz1_cuda_append_arguments) -> Result<AppendArguments, Fault> {
    let AppendShape { layout, kv_heads, tokens, input } = shape;
    let (width, each) = (kv_heads * layout.head_dim(), input.bytes());
    let row = |stride: usize| row_stride(stride, width, each, 16);
    let (key_stride, value_stride) = (row(at.key_stride)?, row(at.value_stride)?);
    let bytes = |stride| rows(*tokens, stride, width).and_then(|n| n.checked_mul(each));
    let each_token = product([*tokens, 4]);
    let strides = PageStrides::of(layout, *kv_heads, at.page_stride, at.head_stride)?;
    let table_stride = short(at.table_stride, "table_stride")?;
    let a_row = if *tokens == 0 { Some(0) } else { product([at.table_stride, 4]) };
    let pages = region(at.pages, "the pages", 16)?;
    Ok(AppendArguments {
        keys: address(at.keys, "the keys", bytes(key_stride), 16)?,
        key_stride: key_stride as u64,
        values: address(at.values, "the values", bytes(value_stride), 16)?,
        value_stride: value_stride as u64,
        sequence: address(at.sequence, "the sequence numbers", each_token, 16)?,
        position: address(at.position, "the token positions", each_token, 16)?,
        table: address(at.table, "the table", a_row, 16)?,
        table_stride,
        pages: pages.address,
        page_stride: strides.page as u64,
        head_stride: strides.head as u64,
        page_count: strides.pages_within(pages.bytes),
        refused: address_optional(at.refused, "the count of rejected tokens", Some(4), 4)?,
    })
}

/// Checks the number of elements between rows of floats; the distance in bytes must be a multiple of `align`. 0 means
/// the width of a row.
pub(super) fn row_stride(stride: usize, width: usize, each: usize, align: usize) -> Result<usize, Fault> {
    let stride = if stride == 0 { width } else { stride };
    if stride < width {
        return Err(Fault::new(qz1_status::Mismatch, "the row stride must be at least the row width"));
    }
    match stride.checked_mul(each) {
        Some(bytes) if bytes.is_multiple_of(align) => Ok(stride),
        Some(_) => Err(Fault::misaligned("the row stride", align)),
        None => Err(Fault::new(qz1_status::TooLarge, "the row stride is too large")),
    }
}

pub(super) struct PageStrides {
    pub(super) page: usize,
    pub(super) head: usize,
    /// The offset of the end of the last head of the first page.
    pub(super) first_end: usize,
}

impl PageStrides {
    pub(super) fn of(
        layout: &KvPageLayout,
        kv_heads: usize,
        page: usize,
        head: usize,
    ) -> Result<Self, Fault> {
        let bytes = layout.page_bytes();
        let page = if page == 0 { kv_heads * bytes } else { page };
        let head = if head == 0 { bytes } else { head };
        if page < bytes || (head < bytes && kv_heads > 1) {
            return Err(Fault::new(
                qz1_status::Mismatch,
                "page_stride or head_stride is less than the size of a page",
            ));
        }
        if !page.is_multiple_of(16) || !head.is_multiple_of(16) {
            return Err(Fault::misaligned("page_stride or head_stride", 16));
        }
        match rows(kv_heads, head, bytes) {
            Some(first_end) => Ok(Self { page, head, first_end }),
            None => Err(Fault::new(qz1_status::TooLarge, "head_stride is too large")),
        }
    }

    fn pages_within(&self, bytes: u64) -> u32 {
        match bytes.checked_sub(self.first_end as u64) {
            Some(more) => u32::try_from(more / self.page as u64 + 1).unwrap_or(u32::MAX),
            None => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use quant_kernels_cpu::attention::KvType;

    use super::*;

    #[test]
    fn pages_are_counted_within_their_memory() {
        let layout = KvPageLayout::new(KvType::Kv4, 64, 16).unwrap();
        let bytes = layout.page_bytes();
        let within = |page, head, bytes: usize| {
            PageStrides::of(&layout, 3, page, head).map(|s| s.pages_within(bytes as u64)).unwrap_or(u32::MAX)
        };
        assert_eq!([3 * bytes - 1, 3 * bytes, 6 * bytes, 7 * bytes].map(|n| within(0, 0, n)), [0, 1, 2, 2]);
        let head = 5 * bytes;
        let sizes = [11 * bytes - 1, 11 * bytes, 13 * bytes, 15 * bytes];
        assert_eq!(sizes.map(|n| within(bytes, head, n)), [0, 1, 3, 5]);
        let status = |page, head| PageStrides::of(&layout, 3, page, head).err().map(|fault| fault.status());
        assert_eq!(status(bytes - 16, 0), Some(qz1_status::Mismatch));
        assert_eq!(status(0, bytes - 16), Some(qz1_status::Mismatch));
        assert_eq!(status(0, bytes + 8), Some(qz1_status::Misaligned));
        assert_eq!(status(0, usize::MAX - 15), Some(qz1_status::TooLarge));
    }
}
