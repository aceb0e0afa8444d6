//! Invalid arguments give an error, and nothing is written.

use quant_kernels_cpu::attention::{
    Heads, KvCache, KvLayout, KvPages, KvType, PageList, Workspace, merge, quantize_query,
};
use quant_kernels_cpu::{Isa, KernelError, Serial};

use crate::case::Case;

#[test]
fn misuse_is_an_error() {
    let case = Case::new(KvType::Kv4, 16, [2, 2], [70, 3], 1);
    let pages = KvPages::new(case.layout, case.layout.id(), &case.bytes).unwrap();
    let (heads, lists) = (case.heads, case.lists());
    let words = KvPages::workspace(&case.layout, heads, 3, 70).unwrap();
    let run = |heads, lists: &[PageList<'_>], q: &[f32], sizes: [usize; 3]| {
        let [out, lse, words] = sizes;
        let (mut out, mut lse, mut words) = (vec![0.0; out], vec![0.0; lse], vec![0; words]);
        let token = Isa::Scalar.token().unwrap();
        pages.attend(token, heads, lists, q, &mut out, &mut lse, &mut words, &Serial).map_err(|e| e.code())
    };
    let good = [3 * 64, 12, words];
    assert_eq!(run(heads, &lists, &case.q, good), Ok(()));
    assert_eq!(run(heads, &lists, &case.q[1..], good), Err(1));
    for i in 0..3 {
        let mut sizes = good;
        sizes[i] -= 1;
        assert_eq!(run(heads, &lists, &case.q, sizes), Err(1));
    }
    assert_eq!(run(heads, &lists[1..], &case.q, good), Err(1));
    let with = |list: PageList<'static>| [list, list];
    assert_eq!(run(heads, &with(PageList::all(&[0], 65)), &case.q, good), Err(4));
    assert_eq!(run(heads, &with(PageList::all(&[0, 99], 65)), &case.q, good), Err(4));
    assert_eq!(run(heads, &with(PageList::all(&[0, 99], 64)), &case.q, good), Ok(()));
    let skips = PageList { first: 65, ..PageList::all(&[0], 64) };
    assert_eq!(run(heads, &with(skips), &case.q, good), Err(4));
    assert_eq!(run(Heads { query: 3, ..heads }, &lists, &case.q, good), Err(4));
    assert_eq!(run(Heads { kv: 0, ..heads }, &[], &case.q, good), Err(4));
    assert_eq!(run(Heads { scale: f32::NAN, ..heads }, &lists, &case.q, good), Err(3));
    let code = |error: KernelError| error.code();
    assert_eq!(KvPages::new(case.layout, 1, &case.bytes).map_err(code).unwrap_err(), 5);
    let id = case.layout.id();
    assert_eq!(KvPages::new(case.layout, id, &case.bytes[1..]).map_err(code).unwrap_err(), 1);
    assert_eq!(KvPages::workspace(&case.layout, heads, usize::MAX / 2, 1).map_err(code).unwrap_err(), 2);
    assert_eq!(KvCache::new(case.layout, heads, usize::MAX).map_err(code).unwrap_err(), 2);
    assert_eq!(KvCache::new(case.layout, heads, 1 << 50).map_err(code).unwrap_err(), 2);

    let many = Heads { query: 1 << 40, kv: 1 << 40, scale: 1.0 };
    assert_eq!(KvCache::new(case.layout, many, 0).map_err(code).unwrap_err(), 2);

    let mut cache = KvCache::new(case.layout, heads, 66).unwrap();
    let x = vec![1.0; 67 * 32];
    assert_eq!(cache.append(&x, &x, &Serial).map_err(code), Err(2));
    assert_eq!(cache.append(&x[1..65], &x[..65], &Serial).map_err(code), Err(1));
    assert_eq!(cache.append(&x[..63], &x[..63], &Serial).map_err(code), Err(1));
    let mut bad = x.clone();
    bad[65] = f32::NAN;
    assert_eq!(cache.append(&x[..96], &bad[..96], &Serial).map_err(code), Err(3));
    assert_eq!(cache.tokens(), 0);
    cache.append(&x[..64], &x[..64], &Serial).unwrap();
    assert_eq!(cache.truncate(3).map_err(code), Err(4));
    let mut workspace = Workspace::default();
    let (mut out, mut lse) = (vec![0.0; 192], vec![0.0; 12]);
    assert_eq!(cache.prefill(&case.q, &mut out, &mut lse, &mut workspace, &Serial).map_err(code), Err(4));
    let q = &case.q[..128];
    assert_eq!(cache.decode(q, &mut out, &mut lse, &mut workspace, &Serial).map_err(code), Err(1));
    assert_eq!(merge(4, &mut [0.0; 8], &mut [0.0; 2], &[0.0; 8], &[0.0; 1]).map_err(code), Err(1));
    assert_eq!(merge(4, &mut [0.0; 7], &mut [0.0; 2], &[0.0; 8], &[0.0; 2]).map_err(code), Err(1));
}

#[test]
fn appending_what_does_not_fit_writes_nothing() {
    let layout = KvLayout::new(KvType::Kv8, 16).unwrap();
    let mut bytes = vec![7; 4 * layout.page_bytes()];
    let x = vec![1.0; 2 * 32];
    let mut code = |len: usize, lists: &[PageList<'_>], keys: &[f32], values: &[f32]| {
        layout.append(&mut bytes[..len], lists, keys, values, &Serial).map_err(|e| e.code())
    };
    let all = 4 * layout.page_bytes();
    let lists = |a: &'static [u32], b: &'static [u32], tokens| [a, b].map(|p| PageList::all(p, tokens));
    assert_eq!(code(all, &[], &x, &x), Err(4));
    assert_eq!(code(all, &lists(&[0], &[1], 0), &x[1..], &x[1..]), Err(1));
    assert_eq!(code(all, &lists(&[0], &[1], 0), &x, &x[32..]), Err(1));
    assert_eq!(code(all - 1, &lists(&[0], &[1], 0), &x, &x), Err(1));
    assert_eq!(code(all, &lists(&[0], &[1], 63), &x, &x), Err(4));
    assert_eq!(code(all, &lists(&[0], &[4], 0), &x, &x), Err(4));
    assert_eq!(code(all, &lists(&[2], &[2], 0), &x, &x), Err(4));
    assert_eq!(code(all, &lists(&[0, 1], &[1, 2], 63), &x, &x), Err(4));
    assert_eq!(code(all, &lists(&[0], &[1], usize::MAX), &x, &x), Err(2));
    let mut bad = x.clone();
    bad[33] = f32::INFINITY;
    assert_eq!(code(all, &lists(&[0], &[1], 0), &x, &bad), Err(3));
    // Full pages are not written, so their numbers are not checked.
    assert_eq!(code(all, &lists(&[9, 0], &[9, 1], 64), &[], &[]), Ok(()));
    assert!(bytes.iter().all(|&b| b == 7));
    assert_eq!(layout.append(&mut bytes, &lists(&[9, 0], &[9, 1], 64), &x, &x, &Serial), Ok(()));
}

#[test]
fn codes_of_a_query_are_as_many() {
    assert_eq!(quantize_query(&[1.0; 4], &mut [0; 3]).unwrap_err().code(), 1);
    assert_eq!(quantize_query(&[1.0, -0.5], &mut [0; 2]).unwrap().1, 127 - 64);
}
