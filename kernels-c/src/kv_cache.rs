//! A cache that owns its pages, behind a handle.

use quant_kernels_cpu::Parallel;
use quant_kernels_cpu::attention::{KvCache, Workspace};

use crate::kv::{heads, qz1_heads, qz1_kv_layout};
use crate::layouts;
use crate::memory::{self, Scope};
use crate::parallel::{Threads, qz1_parallel};
use crate::status::{Fault, call, qz1_message, qz1_status};

/// The keys and values of one sequence in one layer, and the workspace for attention.
pub struct qz1_kv_cache {
    cache: KvCache,
    workspace: Workspace,
}

/// Creates a cache for at most `max_tokens` tokens, whose memory grows with the number of tokens. It must be freed by
/// `qz1_kv_cache_free`. On error, `out` is set to null.
///
/// # Safety
/// Same as for `qz1_layout_of`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_kv_cache_new(
    layout: *const qz1_kv_layout,
    heads: *const qz1_heads,
    max_tokens: usize,
    out: *mut *mut qz1_kv_cache,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        // Read these before the handle is written, because `out` might overlap them.
        let (layout, heads) = (layouts::layout(scope, layout), self::heads(scope, heads));
        memory::make(scope, out, || {
            let cache = KvCache::new(layout?, heads?, max_tokens)?;
            Ok(qz1_kv_cache { cache, workspace: Workspace::default() })
        })
    })
}

/// Frees a handle; null is allowed.
///
/// # Safety
/// The handle must come from `qz1_kv_cache_new` and be freed only once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_kv_cache_free(cache: *mut qz1_kv_cache) {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { memory::free(cache) }
}

/// The number of tokens in the cache; 0 for null.
///
/// # Safety
/// The handle must be null or come from `qz1_kv_cache_new`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_kv_cache_tokens(cache: *const qz1_kv_cache) -> usize {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { cache.as_ref() }.map_or(0, |cache| cache.cache.tokens())
}

/// The size of the cache's pages in bytes; 0 for null.
///
/// # Safety
/// Same as for `qz1_kv_cache_tokens`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_kv_cache_bytes(cache: *const qz1_kv_cache) -> usize {
    // SAFETY: the caller upholds the pointer contract.
    unsafe { cache.as_ref() }.map_or(0, |cache| cache.cache.bytes())
}

/// Quantizes and appends `m` tokens: `keys`, after rotary embedding, and `values` are `[m, heads.kv, head_dim]`. On
/// error, the cache holds the same tokens as before.
///
/// # Safety
/// Same as for `qz1_layout_of`; no other thread may use the handle during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_kv_cache_append(
    cache: *mut qz1_kv_cache,
    keys: *const f32,
    keys_len: usize,
    values: *const f32,
    values_len: usize,
    parallel: *const qz1_parallel,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        let cache = &mut scope.handle(cache, "the handle")?.cache;
        let keys = scope.slice(keys, keys_len, "the keys")?;
        let values = scope.slice(values, values_len, "the values")?;
        let threads = Threads::new(scope, parallel)?;
        let before = cache.tokens();
        cache.append(keys, values, &threads)?;
        threads.finish().or_else(|fault| {
            // Some heads may already have the new tokens and others not, so remove them.
            cache.truncate(before)?;
            Err(fault)
        })
    })
}

type Answer =
    fn(&KvCache, &[f32], &mut [f32], &mut [f32], &mut Workspace, &dyn Parallel) -> Result<(), Fault>;

/// # Safety
/// Same as for [`Scope::slice`], for all pointers.
unsafe fn answer(
    scope: &Scope,
    cache: *mut qz1_kv_cache,
    (q, q_len): (*const f32, usize),
    (out, out_len): (*mut f32, usize),
    (lse, lse_len): (*mut f32, usize),
    parallel: *const qz1_parallel,
    by: Answer,
) -> Result<(), Fault> {
    // SAFETY: the caller upholds the pointer contract; what is written overlaps neither itself nor `q` (`Scope`).
    unsafe {
        let of = scope.handle(cache, "the handle")?;
        let q = scope.slice(q, q_len, "the queries")?;
        let out = scope.output(out, out_len, "the output")?;
        let lse = scope.output(lse, lse_len, "the log-sum-exps")?;
        let threads = Threads::new(scope, parallel)?;
        by(&of.cache, q, out.slice(), lse.slice(), &mut of.workspace, &threads)?;
        threads.finish()
    }
}

/// Computes the attention of the last token's queries, with the instructions of `QZ1_ISA_DETECT`: `q` and `out` are
/// `[heads.query, head_dim]`, `lse` is `[heads.query]`. If the cache is empty, `out` is set to zeros and `lse` to minus
/// infinity.
///
/// # Safety
/// Same as for `qz1_kv_cache_append`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_kv_cache_decode(
    cache: *mut qz1_kv_cache,
    q: *const f32,
    q_len: usize,
    out: *mut f32,
    out_len: usize,
    lse: *mut f32,
    lse_len: usize,
    parallel: *const qz1_parallel,
    message: *const qz1_message,
) -> qz1_status {
    let by: Answer =
        |cache, q, out, lse, workspace, threads| Ok(cache.decode(q, out, lse, workspace, threads)?);
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        answer(scope, cache, (q, q_len), (out, out_len), (lse, lse_len), parallel, by)
    })
}

/// Computes the attention of the queries of the last `m` tokens, which must have been appended: `q` and `out` are `[m,
/// heads.query, head_dim]`, `lse` is `[m, heads.query]`. No query sees tokens after its own.
///
/// # Safety
/// Same as for `qz1_kv_cache_append`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_kv_cache_prefill(
    cache: *mut qz1_kv_cache,
    q: *const f32,
    q_len: usize,
    out: *mut f32,
    out_len: usize,
    lse: *mut f32,
    lse_len: usize,
    parallel: *const qz1_parallel,
    message: *const qz1_message,
) -> qz1_status {
    let by: Answer =
        |cache, q, out, lse, workspace, threads| Ok(cache.prefill(q, out, lse, workspace, threads)?);
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        answer(scope, cache, (q, q_len), (out, out_len), (lse, lse_len), parallel, by)
    })
}

/// Removes all but the first `tokens` tokens; the cache must hold at least that many. Keeps the memory for later
/// tokens.
///
/// # Safety
/// Same as for `qz1_kv_cache_append`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_kv_cache_truncate(
    cache: *mut qz1_kv_cache,
    tokens: usize,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe { Ok(scope.handle(cache, "the handle")?.cache.truncate(tokens)?) })
}

/// Removes all tokens; keeps the memory for later tokens.
///
/// # Safety
/// Same as for `qz1_kv_cache_append`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qz1_kv_cache_clear(
    cache: *mut qz1_kv_cache,
    message: *const qz1_message,
) -> qz1_status {
    // SAFETY: the caller upholds the pointer contract.
    call(message, |scope| unsafe {
        scope.handle(cache, "the handle")?.cache.clear();
        Ok(())
    })
}
