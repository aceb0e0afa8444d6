//! Attention on pages on the device, and merging of results on parts of sequences.

use core::ffi::c_void;

use quant_kernels_cuda::attention::{
    DecodeArguments, DecodePlan, DecodeShape, MergeArguments, MergePlan, MergeShape,
};
use quant_kernels_cuda::compile::Variant;
use quant_kernels_cuda::launch::LaunchShape;

use super::activation::float;
use super::append::{PageStrides, heads, qz1_cuda_kv_layout, row_stride, short};
use super::kernels::{self, Launch, Launcher, is_family, qz1_cuda_kernels, qz1_cuda_plan};
use super::region::{address, address_optional, product, qz1_cuda_region, rows};
use crate::layouts;
use crate::memory::{Scope, fields};
use crate::status::{Fault, qz1_message, qz1_status};

/// The parameters of a launch that computes the attention of the last queries of each sequence. A plan is valid for any
/// number of tokens up to `max_tokens`, so it can be kept, or captured in a graph, while sequences grow.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_cuda_decode_shape {
    /// `sizeof(qz1_cuda_decode_shape)`
    pub struct_size: u32,
    /// Type of queries: `QZ1_TYPE_F16` or `QZ1_TYPE_BF16`.
    pub query_type: u32,
    /// Type of outputs, a `QZ1_TYPE_…`.
    pub out_type: u32,
    /// 0
    pub reserved: u32,
    /// Layout of the pages.
    pub layout: *const qz1_cuda_kv_layout,
    /// A multiple of the key-value heads, at most 65535. Query head `h` attends to key-value head `h / (query_heads /
    /// kv_heads)`.
    pub query_heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Number of sequences, at most 65535. 0 launches nothing.
    pub sequences: usize,
    /// Queries per sequence, which belong to its last tokens, in order. Each query sees no tokens after its own. 1 for
    /// decoding.
    pub queries: usize,
    /// An upper bound of the tokens per list. It determines the size of the workspace, and does not change results.
    pub max_tokens: usize,
}

/// Device addresses, at multiples of 16 unless stated otherwise. In the table and the counts, the entry of a sequence
/// and a key-value head is at the sum of each index times its stride. With a stride of 0, all share one entry.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_cuda_decode_arguments {
    /// `sizeof(qz1_cuda_decode_arguments)`
    pub struct_size: u32,
    /// Factor of the scores, typically `1 / √head_dim`; finite.
    pub scale: f32,
    /// `[sequences, queries, query_heads, head_dim]`
    pub query: qz1_cuda_region,
    /// Pages of all heads, beginning with the first head of page 0. Page numbers are not checked against this size.
    pub pages: qz1_cuda_region,
    /// u32 page numbers in order; those of one list must be contiguous.
    pub table: qz1_cuda_region,
    /// u32 number of tokens of each list, at most `max_tokens`.
    pub tokens: qz1_cuda_region,
    /// u32 number of tokens at the beginning of each list that no query sees; or absent.
    pub first: qz1_cuda_region,
    /// `[sequences, queries, query_heads, head_dim]`, aligned to its type.
    pub out: qz1_cuda_region,
    /// f32 `[sequences, queries, query_heads]`, aligned to its type: natural logarithms of the sums of exponentials,
    /// minus infinity for a query that sees no tokens; or absent.
    pub lse: qz1_cuda_region,
    /// At least as many bytes as `qz1_cuda_plan_workspace` returns for tickets, at a multiple of 256. They must be 0
    /// before the first launch.
    pub tickets: qz1_cuda_region,
    /// At least as many bytes as `qz1_cuda_plan_workspace` returns for the workspace, at a multiple of 256.
    pub workspace: qz1_cuda_region,
    /// Elements between queries, a multiple of 4; 0: `query_heads · head_dim`.
    pub query_stride: usize,
    /// Bytes between pages of one head, a multiple of 16; 0: `kv_heads · page_bytes`.
    pub page_stride: usize,
    /// Bytes between heads of one page, a multiple of 16; 0: `page_bytes`.
    pub head_stride: usize,
    /// Table entries between sequences.
    pub table_stride: usize,
    /// Table entries between key-value heads, typically 0.
    pub table_head_stride: usize,
    /// Entries of `tokens` and `first` between sequences, typically 1.
    pub count_stride: usize,
    /// Entries of `tokens` and `first` between key-value heads, typically 0.
    pub count_head_stride: usize,
}

fields!(qz1_cuda_decode_shape, max_tokens, reserved);
fields!(qz1_cuda_decode_arguments, count_head_stride);

pub(super) struct Decode {
    plan: DecodePlan,
    shape: DecodeShape,
}

impl Launch for Decode {
    type Shape = qz1_cuda_decode_shape;
    type Arguments = qz1_cuda_decode_arguments;

    is_family!(Decode);

    unsafe fn plan(scope: &Scope, s: Self::Shape) -> Result<(Self, Vec<(Variant, LaunchShape)>), Fault> {
        let shape = DecodeShape {
            // SAFETY: the caller upholds the pointer contract.
            layout: unsafe { layouts::layout(scope, s.layout) }?,
            query_heads: heads(s.query_heads)?,
            kv_heads: heads(s.kv_heads)?,
            sequences: s.sequences,
            queries: s.queries,
            max_tokens: s.max_tokens,
            query: float(s.query_type)?,
            out: float(s.out_type)?,
        };
        let plan = shape.plan()?;
        let wanted = vec![(plan.variant.clone(), plan.launch)];
        Ok((Self { plan, shape }, wanted))
    }

    fn launch(&self, at: &Self::Arguments, launch: &mut Launcher<'_>) -> Result<(), Fault> {
        let memory = [self.plan.tickets(), self.plan.workspace()];
        let arguments = self.plan.arguments(&settle(&self.shape, memory, at)?);
        launch(&[&arguments])
    }

    fn workspace(&self) -> (usize, usize) {
        (self.plan.workspace(), self.plan.tickets())
    }
}

/// Plans attention. The choice of kernel depends on the layout of pages, the types, and the number of query rows per
/// key-value head.
///
/// # Safety
/// Same as for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_decode_plan(
    kernels: *const qz1_cuda_kernels,
    shape: *const qz1_cuda_decode_shape,
    out: *mut *mut qz1_cuda_plan,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { kernels::plan::<Decode>(kernels, shape, out, message) }
}

/// Launches attention.
///
/// # Safety
/// Same as for `qz1_cuda_pack_launch`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_decode_launch(
    plan: *const qz1_cuda_plan,
    arguments: *const qz1_cuda_decode_arguments,
    stream: *mut c_void,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { kernels::launch::<Decode>(plan, arguments, stream, message) }
}

fn settle(
    shape: &DecodeShape,
    [tickets, workspace]: [usize; 2],
    at: &qz1_cuda_decode_arguments,
) -> Result<DecodeArguments, Fault> {
    if !at.scale.is_finite() {
        return Err(Fault::new(qz1_status::Scheme, "the scale of attention scores must be finite"));
    }
    let DecodeShape { layout, query_heads, kv_heads, sequences, queries, .. } = shape;
    let width = query_heads * layout.head_dim();
    let query_stride = row_stride(at.query_stride, width, shape.query.bytes(), 8)?;
    let results = product([*sequences, *queries, *query_heads]);
    let query = product([*sequences, *queries])
        .and_then(|count| rows(count, query_stride, width))
        .and_then(|n| n.checked_mul(shape.query.bytes()));
    let out = results.and_then(|n| product([n, layout.head_dim(), shape.out.bytes()]));
    let strides = PageStrides::of(layout, *kv_heads, at.page_stride, at.head_stride)?;
    let launched = results != Some(0);
    let entries = |by_sequence: usize, by_head: usize| match launched {
        true => {
            let last = (sequences - 1).checked_mul(by_sequence)?;
            last.checked_add((kv_heads - 1).checked_mul(by_head)?)?.checked_add(1)?.checked_mul(4)
        }
        false => Some(0),
    };
    let some = launched && shape.max_tokens > 0;
    let when_some = |bytes: Option<usize>| if some { bytes } else { Some(0) };
    let table = when_some(entries(at.table_stride, at.table_head_stride));
    let counts = entries(at.count_stride, at.count_head_stride);
    Ok(DecodeArguments {
        query: address(at.query, "the queries", query, 16)?,
        query_stride: query_stride as u64,
        pages: address(at.pages, "the pages", when_some(Some(strides.first_end)), 16)?,
        page_stride: strides.page as u64,
        head_stride: strides.head as u64,
        table: address(at.table, "the table", table, 16)?,
        table_stride: short(at.table_stride, "table_stride")?,
        table_head_stride: short(at.table_head_stride, "table_head_stride")?,
        tokens: address(at.tokens, "the token counts", counts, 16)?,
        first: address_optional(at.first, "the first visible tokens", counts, 16)?,
        count_stride: short(at.count_stride, "count_stride")?,
        count_head_stride: short(at.count_head_stride, "count_head_stride")?,
        scale: at.scale,
        out: address(at.out, "the outputs", out, shape.out.bytes())?,
        lse: address_optional(at.lse, "the log-sum-exps", results.and_then(|n| n.checked_mul(4)), 4)?,
        tickets: address(at.tickets, "the tickets", Some(tickets), 256)?,
        workspace: address(at.workspace, "the workspace", Some(workspace), 256)?,
    })
}

/// The parameters of a launch that merges attention results on parts of sequences, using their logarithms.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_cuda_merge_shape {
    /// `sizeof(qz1_cuda_merge_shape)`
    pub struct_size: u32,
    /// Type of merged rows, a `QZ1_TYPE_…`; parts are f32.
    pub out_type: u32,
    /// Number of parts.
    pub parts: usize,
    /// Rows of each part: sequences times queries times query heads. 0 launches nothing.
    pub rows: usize,
    /// Features per row.
    pub head_dim: usize,
}

/// Device addresses, aligned to their types.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qz1_cuda_merge_arguments {
    /// `sizeof(qz1_cuda_merge_arguments)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// f32 `[parts, rows, head_dim]`
    pub sums: qz1_cuda_region,
    /// f32 `[parts, rows]`: logarithms as computed by attention, minus infinity for a part in which a query sees no
    /// tokens.
    pub logs: qz1_cuda_region,
    /// `[rows, head_dim]`
    pub out: qz1_cuda_region,
    /// f32 `[rows]`, or absent.
    pub lse: qz1_cuda_region,
}

fields!(qz1_cuda_merge_shape, head_dim);
fields!(qz1_cuda_merge_arguments, lse, reserved);

pub(super) struct Merge {
    plan: MergePlan,
    shape: MergeShape,
}

impl Launch for Merge {
    type Shape = qz1_cuda_merge_shape;
    type Arguments = qz1_cuda_merge_arguments;

    is_family!(Merge);

    unsafe fn plan(_: &Scope, s: Self::Shape) -> Result<(Self, Vec<(Variant, LaunchShape)>), Fault> {
        for (of, what) in [(s.parts, "parts"), (s.rows, "rows"), (s.head_dim, "features")] {
            short(of, what)?;
        }
        let shape =
            MergeShape { parts: s.parts, rows: s.rows, head_dim: s.head_dim, out: float(s.out_type)? };
        let plan = shape.plan()?;
        let wanted = vec![(plan.variant.clone(), plan.launch)];
        Ok((Self { plan, shape }, wanted))
    }

    fn launch(&self, at: &Self::Arguments, launch: &mut Launcher<'_>) -> Result<(), Fault> {
        let MergeShape { parts, rows, head_dim, out } = self.shape;
        let to = MergeArguments {
            sums: address(at.sums, "the parts", product([parts, rows, head_dim, 4]), 4)?,
            logs: address(at.logs, "the log-sum-exps of the parts", product([parts, rows, 4]), 4)?,
            out: address(at.out, "the outputs", product([rows, head_dim, out.bytes()]), out.bytes())?,
            lse: address_optional(at.lse, "the log-sum-exps", product([rows, 4]), 4)?,
        };
        launch(&[&self.plan.arguments(&to)])
    }
}

/// Plans a merge.
///
/// # Safety
/// Same as for `qz1_cuda_require_device`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_merge_plan(
    kernels: *const qz1_cuda_kernels,
    shape: *const qz1_cuda_merge_shape,
    out: *mut *mut qz1_cuda_plan,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { kernels::plan::<Merge>(kernels, shape, out, message) }
}

/// Launches a merge of results of the same queries on different tokens.
///
/// # Safety
/// Same as for `qz1_cuda_pack_launch`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_cuda_merge_launch(
    plan: *const qz1_cuda_plan,
    arguments: *const qz1_cuda_merge_arguments,
    stream: *mut c_void,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { kernels::launch::<Merge>(plan, arguments, stream, message) }
}
