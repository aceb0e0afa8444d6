//! Caches with invalid arguments.

use core::ptr::{null, null_mut};

use quant_kernels::qz1_status::*;
use quant_kernels::*;

use crate::common::attention::*;
use crate::common::*;

#[test]
fn caches() {
    let case = Case::new(QZ1_KV_4BIT);
    let (layout, heads) = (case.layout, case.heads);
    let mut at = null_mut();
    let mut made = |layout: *const qz1_kv_layout, heads: *const qz1_heads, tokens| {
        // SAFETY: every pointer is null or points to a live value.
        let status = unsafe { qz1_kv_cache_new(layout, heads, tokens, &mut at, null()) };
        assert!(at.is_null());
        status
    };
    assert_eq!(made(null(), &heads, 9), Null);
    assert_eq!(made(&layout, null(), 9), Null);
    assert_eq!(made(&qz1_kv_layout { id: 1, ..layout }, &heads, 9), LayoutId);
    assert_eq!(made(&layout, &qz1_heads { kv: 3, ..heads }, 9), Mismatch);
    assert_eq!(made(&layout, &heads, usize::MAX), TooLarge);
    assert_eq!(made(&layout, &qz1_heads { query: 1 << 50, kv: 1 << 50, ..heads }, 0), TooLarge);
    let cache = Cache::new(&layout, &heads, 60);
    let (keys, values) = (&case.keys[..50 * KV * D], &case.values[..50 * KV * D]);
    assert_eq!(cache.append(&keys[1..], &values[1..], null()), Length);
    assert_eq!(cache.append(keys, &values[KV * D..], null()), Length);
    assert_eq!(cache.append(&case.keys, &case.values, null()), TooLarge);
    let mut bad = keys.to_vec();
    bad[70] = f32::NAN;
    assert_eq!(cache.append(keys, &bad, null()), Scheme);
    assert_eq!(cache.append(keys, values, &threads(&Manner::LeaveOne)), ForEach);
    assert_eq!(cache.tokens(), 0);
    assert_eq!(cache.append(keys, values, null()), Ok);
    assert_eq!(cache.append(keys, values, null()), TooLarge);
    assert_eq!(cache.tokens(), 50);
    let (row, mut out, mut lse) = (QUERY * D, vec![0.0_f32; M * QUERY * D], vec![0.0_f32; M * QUERY]);
    let (q, to, to_lse) = (case.q.as_ptr(), out.as_mut_ptr(), lse.as_mut_ptr());
    type Run = unsafe extern "C" fn(
        *mut qz1_kv_cache,
        *const f32,
        usize,
        *mut f32,
        usize,
        *mut f32,
        usize,
        *const qz1_parallel,
        *const qz1_message,
    ) -> qz1_status;
    for run in [qz1_kv_cache_decode as Run, qz1_kv_cache_prefill as Run] {
        let run = |cache, q, q_len, out, out_len, lse, lse_len| {
            // SAFETY: every pointer is null or points to a live value, which is as long as any length that the call
            // accepts.
            unsafe { run(cache, q, q_len, out, out_len, lse, lse_len, null(), null()) }
        };
        assert_eq!(run(cache.0, q, row, to, row, to_lse, QUERY), Ok);
        assert_eq!(run(null_mut(), q, row, to, row, to_lse, QUERY), Null);
        assert_eq!(run(cache.0, null(), row, to, row, to_lse, QUERY), Null);
        assert_eq!(run(cache.0, q, row - 1, to, row, to_lse, QUERY), Length);
        assert_eq!(run(cache.0, q, row, null_mut(), row, to_lse, QUERY), Null);
        assert_eq!(run(cache.0, q, row, to, row + 1, to_lse, QUERY), Length);
        assert_eq!(run(cache.0, q, row, q.cast_mut(), row, to_lse, QUERY), Overlap);
        assert_eq!(run(cache.0, q, row, to, row, to, QUERY), Overlap);
        assert_eq!(run(cache.0, q, row, to, row, null_mut(), QUERY), Null);
        assert_eq!(run(cache.0, q, row, to, row, to_lse, QUERY - 1), Length);
        assert_eq!(run(cache.0, q, row, to.wrapping_byte_add(1), row, to_lse, QUERY), Misaligned);
    }
    // SAFETY: every pointer is null or points to a live value.
    unsafe {
        let (n, rows) = (case.q.len(), M * QUERY);
        assert_eq!(qz1_kv_cache_decode(cache.0, q, n, to, n, to_lse, rows, null(), null()), Length);
        let forgetful = threads(&Manner::LeaveOne);
        let status = qz1_kv_cache_decode(cache.0, q, row, to, row, to_lse, QUERY, &forgetful, null());
        assert_eq!(status, ForEach);
        assert_eq!(qz1_kv_cache_truncate(cache.0, 51, null()), Mismatch);
        assert_eq!(qz1_kv_cache_truncate(null_mut(), 0, null()), Null);
        assert_eq!(qz1_kv_cache_truncate(cache.0, 2, null()), Ok);
        assert_eq!(qz1_kv_cache_prefill(cache.0, q, n, to, n, to_lse, rows, null(), null()), Mismatch);
        assert_eq!(qz1_kv_cache_clear(null_mut(), null()), Null);
        let (x, len) = (keys.as_ptr(), keys.len());
        assert_eq!(qz1_kv_cache_append(null_mut(), x, len, x, len, null(), null()), Null);
        assert_eq!(qz1_kv_cache_append(cache.0, null(), len, x, len, null(), null()), Null);
        assert_eq!((qz1_kv_cache_tokens(null()), qz1_kv_cache_bytes(null())), (0, 0));
        assert_eq!(qz1_kv_cache_new(&layout, &heads, 9, null_mut(), null()), Null);
        qz1_kv_cache_free(null_mut());
    }
}
