//! Pages of keys and values in the caller's memory, and attention on lists of pages.

use quant_kernels_cpu::attention::{
    Heads, KvLayout, KvPages, KvType, MAX_HEADS, PAGE_TOKENS, PageList, merge,
};

use crate::features::token;
use crate::layouts::{self, Described};
use crate::memory::{self, Scope, fields};
use crate::parallel::{Threads, qz1_parallel};
use crate::status::{Fault, call, qz1_message, qz1_status};

/// 4-bit codes, with a scale and a zero point per token and head.
pub const QZ1_KV_4BIT: u32 = 1;
/// 8-bit codes, with a scale and a zero point per token and head.
pub const QZ1_KV_8BIT: u32 = 2;
/// IEEE half precision.
pub const QZ1_KV_F16: u32 = 3;

/// Layout of pages of keys and values; each page holds the same number of tokens of one key-value head. Filled by
/// `qz1_kv_layout_of`. Its fields may be stored with the pages, and are checked against `id` on every use.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qz1_kv_layout {
    /// `sizeof(qz1_kv_layout)`
    pub struct_size: u32,
    /// `QZ1_KV_…`
    pub kind: u32,
    /// Features of a head: a multiple of 16, at most 512.
    pub head_dim: u32,
    /// Tokens per page: 64.
    pub page_tokens: u32,
    /// Bytes per page, a multiple of 64. Kernels are fastest if pages begin at a multiple of 64.
    pub page_bytes: u64,
    /// An id of the data order, computed from everything that affects it.
    pub id: u64,
}

/// The numbers of attention heads, and the factor of the scores.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qz1_heads {
    /// `sizeof(qz1_heads)`
    pub struct_size: u32,
    /// Factor of the scores, typically `1 / √head_dim`; finite.
    pub scale: f32,
    /// Query heads: a multiple of the key-value heads, at most 65536. Query head `h` attends to key-value head `h /
    /// (query / kv)`.
    pub query: usize,
    /// Key-value heads.
    pub kv: usize,
}

/// The pages of one key-value head, and the tokens that are seen. Tokens are counted along the list, regardless of the
/// page numbers, so a list can select pages, or contain only a window. In an array of lists, all have the same
/// `struct_size`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct qz1_page_list {
    /// `sizeof(qz1_page_list)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// Page numbers, in order; page `i` begins at byte `i · page_bytes`.
    pub pages: *const u32,
    /// Elements of `pages`; entries after the page of the last token are not read.
    pub pages_len: usize,
    /// Tokens in the list.
    pub tokens: usize,
    /// Number of tokens at the beginning that no query sees.
    pub first: usize,
    /// Number of tokens up to and including the last one that the first query sees. Each later query sees one more, but
    /// never more than `tokens`. With `PTRDIFF_MAX`, every query sees all tokens. For causal attention, use `tokens −
    /// queries + 1`, which may be negative.
    pub seen: isize,
}

fields!(qz1_kv_layout, id);
fields!(qz1_heads, kv);
fields!(qz1_page_list, seen, reserved);

impl Described for qz1_kv_layout {
    type Layout = KvLayout;
    type Numbers = ([u32; 3], [u64; 2]);

    fn of(layout: &KvLayout) -> Self {
        Self {
            struct_size: size_of::<Self>() as u32,
            kind: kind_number(layout.kind()),
            head_dim: layout.head_dim() as u32,
            page_tokens: PAGE_TOKENS as u32,
            page_bytes: layout.page_bytes() as u64,
            id: layout.id(),
        }
    }

    fn layout(&self) -> Result<KvLayout, Fault> {
        Ok(KvLayout::new(kind(self.kind)?, self.head_dim as usize)?)
    }

    fn numbers(&self) -> Self::Numbers {
        ([self.kind, self.head_dim, self.page_tokens], [self.page_bytes, self.id])
    }
}

pub(crate) fn kind_number(kind: KvType) -> u32 {
    match kind {
        KvType::Kv4 => QZ1_KV_4BIT,
        KvType::Kv8 => QZ1_KV_8BIT,
        KvType::F16 => QZ1_KV_F16,
    }
}

pub(crate) fn kind(kind: u32) -> Result<KvType, Fault> {
    match kind {
        QZ1_KV_4BIT => Ok(KvType::Kv4),
        QZ1_KV_8BIT => Ok(KvType::Kv8),
        QZ1_KV_F16 => Ok(KvType::F16),
        _ => Err(Fault::new(qz1_status::Scheme, "unknown type of cache (expected a QZ1_KV_ constant)")),
    }
}

/// # Safety
/// Same as for [`Scope::read`].
pub(crate) unsafe fn heads(scope: &Scope, at: *const qz1_heads) -> Result<Heads, Fault> {
    // SAFETY: the caller upholds the pointer contract.
    let h = unsafe { scope.read(at, "the heads") }?;
    Ok(Heads { query: h.query, kv: h.kv, scale: h.scale })
}

const FEW: usize = 32;

/// Calls `body` with the lists of the caller; memory that is written must have been entered before.
///
/// # Safety
/// Same as for [`Scope::each`] and [`Scope::slice`], for the memory that the lists point to.
unsafe fn with_lists<R>(
    scope: &Scope,
    at: *const qz1_page_list,
    count: usize,
    body: impl FnOnce(&[PageList<'_>]) -> Result<R, Fault>,
) -> Result<R, Fault> {
    if count > MAX_HEADS {
        return Err(Fault::new(qz1_status::TooLarge, "the number of page lists is too large"));
    }
    let mut few = [PageList::all(&[], 0); FEW];
    let mut many;
    let lists = match few.get_mut(..count) {
        Some(few) => few,
        None => {
            many = memory::room(count, "the page lists")?;
            many.resize(count, PageList::all(&[], 0));
            &mut many[..]
        }
    };
    // SAFETY: the caller upholds the pointer contract.
    unsafe {
        scope.each(at, count, "a page list", |i, list: qz1_page_list| {
            let pages = scope.one_of_many(list.pages, list.pages_len, "the pages of a list")?;
            lists[i] = PageList { pages, tokens: list.tokens, first: list.first, seen: list.seen };
            Ok(())
        })?;
    }
    body(lists)
}

/// The layout of pages of a `QZ1_KV_…` for heads of `head_dim` features. Fills `out`, whose `struct_size` must be set
/// by the caller.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_kv_layout_of(
    kind: u32,
    head_dim: usize,
    out: *mut qz1_kv_layout,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let out = scope.place(out, "the layout")?;
        let layout = Described::of(&KvLayout::new(self::kind(kind)?, head_dim)?);
        out.put(layout);
        Ok(())
    })
}

/// Quantizes one token of one head into `slot` of a page, 0 to 63. `key` and `value` are `[head_dim]`, the key after
/// rotary embedding. Other slots keep their contents. If a number is NaN or its magnitude exceeds 65504, the call fails
/// and nothing is written.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_kv_write(
    layout: *const qz1_kv_layout,
    page: *mut u8,
    page_len: usize,
    slot: usize,
    key: *const f32,
    key_len: usize,
    value: *const f32,
    value_len: usize,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract; the page overlaps nothing that is read (`Scope`).
    call(message, |scope| unsafe {
        let layout = layouts::layout(scope, layout)?;
        let key = scope.slice(key, key_len, "the key")?;
        let value = scope.slice(value, value_len, "the value")?;
        let page = scope.output(page, page_len, "the page")?;
        Ok(layout.write(page.slice(), slot, key, value)?)
    })
}

/// Reads one token of one head as floats (dequantized, or the stored f16 values), `[head_dim]` each for key and value.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_kv_read(
    layout: *const qz1_kv_layout,
    page: *const u8,
    page_len: usize,
    slot: usize,
    key: *mut f32,
    key_len: usize,
    value: *mut f32,
    value_len: usize,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract; outputs do not overlap (`Scope`).
    call(message, |scope| unsafe {
        let layout = layouts::layout(scope, layout)?;
        let page = scope.slice(page, page_len, "the page")?;
        let key = scope.output(key, key_len, "the key")?;
        let value = scope.output(value, value_len, "the value")?;
        Ok(layout.read(page, slot, key.slice(), value.slice())?)
    })
}

/// Quantizes `m` tokens and appends them after the `tokens` of each list, with one list per key-value head. `keys` and
/// `values` are `[m, lists_len, head_dim]`; `pages_len` is a multiple of `page_bytes`. Lists must already contain the
/// pages for the new tokens, and each of these pages only once. If a number is NaN or its magnitude exceeds 65504, the
/// call fails and nothing is written. The caller must increase `tokens` afterwards.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_kv_append(
    layout: *const qz1_kv_layout,
    pages: *mut u8,
    pages_len: usize,
    lists: *const qz1_page_list,
    lists_len: usize,
    keys: *const f32,
    keys_len: usize,
    values: *const f32,
    values_len: usize,
    parallel: *const qz1_parallel,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract; the pages overlap nothing that is read (`Scope`).
    call(message, |scope| unsafe {
        let layout = layouts::layout(scope, layout)?;
        let keys = scope.slice(keys, keys_len, "the keys")?;
        let values = scope.slice(values, values_len, "the values")?;
        let pages = scope.output(pages, pages_len, "the pages")?;
        let threads = Threads::new(scope, parallel)?;
        with_lists(scope, lists, lists_len, |lists| {
            // SAFETY: the pages overlap nothing that is read (`Scope`).
            Ok(layout.append(pages.slice(), lists, keys, values, &threads)?)
        })?;
        threads.finish()
    })
}

/// Writes to `words` the number of 32-bit words that `qz1_attend` needs as its workspace, for the given number of
/// queries on lists of at most the given number of tokens.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_attend_workspace(
    layout: *const qz1_kv_layout,
    heads: *const qz1_heads,
    queries: usize,
    tokens: usize,
    words: *mut usize,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let (layout, heads) = (layouts::layout(scope, layout)?, self::heads(scope, heads)?);
        let words = scope.value(words, "the number of words")?;
        words.put(KvPages::workspace(&layout, heads, queries, tokens)?);
        Ok(())
    })
}

/// Computes the attention of queries `q` `[m, heads.query, head_dim]`, with one list per key-value head. `out` has the
/// shape of `q`; `lse` `[m, heads.query]` receives the logarithm of the sum of `exp(score)`, with which
/// `qz1_attend_merge` merges results on parts of a sequence.
///
/// A query that sees no tokens gets zeros in `out` and minus infinity in `lse`. A head gets NaN in both if its query is
/// not finite, or so large that scores might overflow.
///
/// `isa` is a `QZ1_ISA_…`. Results are bit-identical for all instruction sets and any number of threads, except for
/// `out` with `QZ1_ISA_AVX512BF16`. The caller allocates the workspace. Its contents do not matter between calls, and
/// concurrent calls need separate ones.
///
/// # Safety
/// Same as for `qz1_layout_of`; no thread may write to the pages during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_attend(
    layout: *const qz1_kv_layout,
    pages: *const u8,
    pages_len: usize,
    heads: *const qz1_heads,
    lists: *const qz1_page_list,
    lists_len: usize,
    q: *const f32,
    q_len: usize,
    out: *mut f32,
    out_len: usize,
    lse: *mut f32,
    lse_len: usize,
    workspace: *mut u32,
    workspace_len: usize,
    isa: u32,
    parallel: *const qz1_parallel,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract; what is written overlaps neither itself nor what is read
    // (`Scope`).
    call(message, |scope| unsafe {
        let (layout, heads, token) =
            (layouts::layout(scope, layout)?, self::heads(scope, heads)?, token(isa)?);
        let pages = scope.slice(pages, pages_len, "the pages")?;
        let q = scope.slice(q, q_len, "the queries")?;
        let out = scope.output(out, out_len, "the output")?;
        let lse = scope.output(lse, lse_len, "the log-sum-exps")?;
        let words = scope.output(workspace, workspace_len, "the workspace")?;
        let threads = Threads::new(scope, parallel)?;
        let pages = KvPages::new(layout, layout.id(), pages)?;
        with_lists(scope, lists, lists_len, |lists| {
            // SAFETY: the outputs overlap neither each other nor anything that is read (`Scope`).
            let (out, lse, words) = (out.slice(), lse.slice(), words.slice());
            Ok(pages.attend(token, heads, lists, q, out, lse, words, &threads)?)
        })?;
        threads.finish()
    })
}

/// Merges attention on further tokens into the results so far: `out` and `other` are `[rows, head_dim]`, `lse` and
/// `other_lse` are `[rows]`, as computed by `qz1_attend`.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_attend_merge(
    head_dim: usize,
    out: *mut f32,
    out_len: usize,
    lse: *mut f32,
    lse_len: usize,
    other: *const f32,
    other_len: usize,
    other_lse: *const f32,
    other_lse_len: usize,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract; what is written overlaps neither itself nor what is read
    // (`Scope`).
    call(message, |scope| unsafe {
        let other = scope.slice(other, other_len, "the second output")?;
        let other_lse = scope.slice(other_lse, other_lse_len, "the second log-sum-exps")?;
        let out = scope.output(out, out_len, "the output")?;
        let lse = scope.output(lse, lse_len, "the log-sum-exps")?;
        Ok(merge(head_dim, out.slice(), lse.slice(), other, other_lse)?)
    })
}
