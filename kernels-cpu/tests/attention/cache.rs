//! Caches and pages to which tokens are appended in several calls.

use quant_kernels_cpu::attention::{Heads, KvCache, KvLayout, PageList, Workspace};
use quant_kernels_cpu::{Isa, Serial};

use crate::case::{Case, KINDS, bits};
use crate::common::{Backwards, Threads};

#[test]
fn a_cache_is_filled_in_any_portions() {
    let (kv, query, d, tokens) = (2, 6, 32, 1300);
    for kind in KINDS {
        let case = Case::new(kind, d, [kv, query / kv], [tokens, 3], 21);
        let mut cache = KvCache::new(case.layout, case.heads, 1300).unwrap();
        let width = kv * d;
        let mut at = 0;
        for portion in [1, 62, 1, 3, 500, 64, 669] {
            let part = at * width..(at + portion) * width;
            cache.append(&case.keys[part.clone()], &case.values[part], &Backwards).unwrap();
            at += portion;
        }
        assert_eq!((cache.tokens(), cache.bytes()), (tokens, cache.max_bytes()));
        let mut workspace = Workspace::default();
        let (mut out, mut lse) = (vec![0.0; 3 * query * d], vec![0.0; 3 * query]);
        cache.prefill(&case.q, &mut out, &mut lse, &mut workspace, &Threads(2)).unwrap();
        let causal: Vec<_> = case.pages.iter().map(|pages| PageList::causal(pages, tokens, 3)).collect();
        let expected = case.run(Isa::detect(), &causal, &Serial);
        assert_eq!([bits(&out), bits(&lse)], [bits(&expected.0), bits(&expected.1)]);
        // Discarding tokens and appending them again gives the same results.
        cache.truncate(100).unwrap();
        cache.append(&case.values[..77 * width], &case.keys[..77 * width], &Serial).unwrap();
        cache.truncate(100).unwrap();
        cache.append(&case.keys[100 * width..], &case.values[100 * width..], &Serial).unwrap();
        let last = &case.q[2 * query * d..];
        let (mut one, mut one_lse) = (vec![0.0; query * d], vec![0.0; query]);
        cache.decode(last, &mut one, &mut one_lse, &mut workspace, &Serial).unwrap();
        assert_eq!(bits(&one), bits(&out[2 * query * d..]));
        assert_eq!(bits(&one_lse), bits(&lse[2 * query..]));
        cache.clear();
        cache.decode(last, &mut one, &mut one_lse, &mut workspace, &Serial).unwrap();
        assert!(one.iter().all(|v| *v == 0.0) && one_lse.iter().all(|v| *v == f32::NEG_INFINITY));
    }
}

#[test]
fn pages_are_appended_to_by_lists() {
    for kind in KINDS {
        // The last calls write more pages than are checked for duplicates without allocating.
        let case = Case::new(kind, 16, [3, 1], [1500, 1], 5);
        let mut bytes = vec![0xff; case.bytes.len()];
        let mut at = 0;
        for portion in [1, 63, 1, 0, 200, 64, 1171] {
            let lists: Vec<_> = case.pages.iter().map(|pages| PageList::all(pages, at)).collect();
            let part = at * 48..(at + portion) * 48;
            let (keys, values) = (&case.keys[part.clone()], &case.values[part]);
            case.layout.append(&mut bytes, &lists, keys, values, &Backwards).unwrap();
            at += portion;
        }
        assert!(at == 1500 && bytes == case.bytes, "{kind:?}");
    }
}

/// With 128 features per head, values take 4.25, 8.25 and 16 bits.
#[test]
fn caches_are_small() {
    let heads = Heads { query: 32, kv: 8, scale: 1.0 };
    let bytes = KINDS.map(|kind| {
        KvCache::new(KvLayout::new(kind, 128).unwrap(), heads, 32 << 10).unwrap().max_bytes() / (32 << 10) / 8
    });
    assert_eq!(bytes, [136, 264, 512]);
}
