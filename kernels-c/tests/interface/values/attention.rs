//! Attention on pages, attention on caches, and the Rust interface give bit-identical results.

use core::ptr::null;

use quant_kernels::qz1_status::*;
use quant_kernels::*;

use crate::common::attention::*;
use crate::common::*;

#[test]
fn pages_and_caches_agree() {
    assert_eq!(qz1_has(QZ1_FEATURE_ATTENTION), 1);
    for kind in [QZ1_KV_4BIT, QZ1_KV_8BIT, QZ1_KV_F16] {
        let mut case = Case::new(kind);
        let causal = (TOKENS - M + 1) as isize;
        let seen = |list: &mut qz1_page_list| list.seen = causal;
        assert_eq!(case.with_lists(|lists| lists.iter_mut().for_each(seen)), Ok);
        let cache = Cache::new(&case.layout, &case.heads, TOKENS);
        let half = 37 * KV * D;
        assert_eq!(cache.append(&case.keys[..half], &case.values[..half], null()), Ok);
        assert_eq!(cache.append(&case.keys[half..], &case.values[half..], &threads(&Manner::Right)), Ok);
        assert_eq!(cache.tokens(), TOKENS);
        let (mut out, mut lse) = (vec![0.0; case.out.len()], vec![0.0; case.lse.len()]);
        let (to, to_lse) = ((out.as_mut_ptr(), out.len()), (lse.as_mut_ptr(), lse.len()));
        let row = QUERY * D;
        // SAFETY: every pointer is null or points to a live value.
        unsafe {
            assert!(qz1_kv_cache_bytes(cache.0) == 4 * case.layout.page_bytes as usize);
            let q = case.q.as_ptr();
            let status = qz1_kv_cache_prefill(
                cache.0,
                q,
                case.q.len(),
                to.0,
                to.1,
                to_lse.0,
                to_lse.1,
                null(),
                null(),
            );
            assert_eq!(status, Ok);
            assert_eq!((&out, &lse), (&case.out, &case.lse));
            let (to, last) = (out.as_mut_ptr(), q.add(2 * row));
            let status = qz1_kv_cache_decode(
                cache.0,
                last,
                row,
                to,
                row,
                to_lse.0,
                QUERY,
                &threads(&Manner::Right),
                null(),
            );
            assert_eq!(status, Ok);
            assert_eq!((&out[..row], &lse[..QUERY]), (&case.out[2 * row..], &case.lse[2 * QUERY..]));
            assert_eq!(qz1_kv_cache_truncate(cache.0, 5, null()), Ok);
            assert_eq!(cache.tokens(), 5);
            assert_eq!(qz1_kv_cache_clear(cache.0, null()), Ok);
            assert_eq!(cache.tokens(), 0);
        }
        // Merging the results on the first page and on the rest gives the result on the whole, up to rounding.
        let whole = (case.out.clone(), case.lse.clone());
        let part = |list: &mut qz1_page_list| (list.seen, list.tokens) = (causal, 64);
        assert_eq!(case.with_lists(|lists| lists.iter_mut().for_each(part)), Ok);
        let first = (case.out.clone(), case.lse.clone());
        let part = |list: &mut qz1_page_list| (list.seen, list.first) = (causal, 64);
        assert_eq!(case.with_lists(|lists| lists.iter_mut().for_each(part)), Ok);
        let (to, to_lse) = (case.out.as_mut_ptr(), case.lse.as_mut_ptr());
        let (n, rows, other, other_lse) = (case.out.len(), M * QUERY, first.0.as_ptr(), first.1.as_ptr());
        // SAFETY: every pointer is null or points to a live value.
        let status = unsafe { qz1_attend_merge(D, to, n, to_lse, rows, other, n, other_lse, rows, null()) };
        assert_eq!(status, Ok);
        assert!(case.out.iter().zip(&whole.0).all(|(a, b)| (a - b).abs() <= 0.01));
        assert!(case.lse.iter().zip(&whole.1).all(|(a, b)| (a - b).abs() <= 1e-5));
    }
}

#[test]
fn what_is_not_finite_stays_in_its_head() {
    let mut case = Case::new(QZ1_KV_8BIT);
    let lists = case.lists(TOKENS);
    assert_eq!(case.run(&lists), Ok);
    let expected = case.out.clone();
    case.q[D + 3] = f32::NAN;
    assert_eq!(case.run(&lists), Ok);
    assert!(case.lse[1].is_nan() && case.out[D..2 * D].iter().all(|v| v.is_nan()));
    assert!(case.out[..D] == expected[..D] && case.out[2 * D..] == expected[2 * D..]);
}
