//! Pages, and attention on them, give bit-identical results to the Rust interface.

use core::ptr::null;

use quant_kernels::qz1_status::*;
use quant_kernels::*;
use quant_kernels_cpu::attention::{Heads, KvCache, KvLayout, KvPages, KvType, PageList, Workspace, merge};
use quant_kernels_cpu::{Isa, Serial};

use super::features::number;
use crate::common::attention::*;
use crate::common::*;

const KINDS: [(u32, KvType); 3] =
    [(QZ1_KV_4BIT, KvType::Kv4), (QZ1_KV_8BIT, KvType::Kv8), (QZ1_KV_F16, KvType::F16)];

#[test]
fn layouts_are_those_of_rust() {
    for (kind, of) in KINDS {
        let mut got = qz1_kv_layout { struct_size: 32, ..layout_of(QZ1_KV_8BIT) };
        // SAFETY: every pointer is null or points to a live value.
        assert_eq!(unsafe { qz1_kv_layout_of(kind, 48, &mut got, null()) }, Ok);
        let of = KvLayout::new(of, 48).unwrap();
        assert_eq!((got.struct_size, got.kind, got.head_dim, got.page_tokens), (32, kind, 48, 64));
        assert_eq!((got.page_bytes, got.id), (of.page_bytes() as u64, of.id()));
    }
}

#[test]
fn tokens_are_those_of_rust() {
    for (kind, of) in KINDS {
        let (layout, of) = (layout_of(kind), KvLayout::new(of, D).unwrap());
        let len = of.page_bytes();
        let (key, value) = (noise(D, 3), noise(D, 5));
        let mut pages = [vec![7_u8; len], vec![7_u8; len]];
        of.write(&mut pages[0], 9, &key, &value).unwrap();
        let (at, k, v) = (pages[1].as_mut_ptr(), key.as_ptr(), value.as_ptr());
        // SAFETY: every pointer is null or points to a live value.
        assert_eq!(unsafe { qz1_kv_write(&layout, at, len, 9, k, D, v, D, null()) }, Ok);
        assert!(pages[0] == pages[1]);
        let mut got = [(); 4].map(|()| vec![0.0_f32; D]);
        let [k, v, c_k, c_v] = &mut got;
        of.read(&pages[0], 9, k, v).unwrap();
        let (to_k, to_v) = (c_k.as_mut_ptr(), c_v.as_mut_ptr());
        // SAFETY: this test upholds the pointer contract of the C interface.
        assert_eq!(unsafe { qz1_kv_read(&layout, at, len, 9, to_k, D, to_v, D, null()) }, Ok);
        let got = got.map(|of| bits(&of));
        assert_eq!(got[..2], got[2..]);
    }
}

#[test]
fn attention_is_that_of_rust() {
    for (kind, of) in KINDS {
        let mut case = Case::new(kind);
        let of = KvLayout::new(of, D).unwrap();
        let heads = Heads { query: QUERY, kv: KV, scale: case.heads.scale };
        let mut pages = vec![0xff; case.pages.len()];
        let lists = [0, 1].map(|head| PageList::all(&case.numbers[head], 0));
        of.append(&mut pages, &lists, &case.keys, &case.values, &Serial).unwrap();
        case.pages.fill(0xff);
        let (c_lists, to, to_len) = (case.lists(0), case.pages.as_mut_ptr(), case.pages.len());
        let (x, y, len) = (case.keys.as_ptr(), case.values.as_ptr(), case.keys.len());
        let (layout, at, threads) = (&case.layout, c_lists.as_ptr(), threads(&Manner::Right));
        // SAFETY: every pointer is null or points to a live value.
        let status = unsafe { qz1_kv_append(layout, to, to_len, at, KV, x, len, y, len, &threads, null()) };
        assert_eq!(status, Ok);
        assert!(case.pages == pages);
        let words = KvPages::workspace(&of, heads, M, TOKENS).unwrap();
        let mut got = 0;
        // SAFETY: every pointer is null or points to a live value.
        unsafe {
            assert_eq!(qz1_attend_workspace(&case.layout, &case.heads, M, TOKENS, &mut got, null()), Ok);
        }
        assert_eq!(got, words);

        let numbers = case.numbers;
        let lists = [0, 1].map(|head| PageList::causal(&numbers[head], TOKENS, M));
        let c_lists = case.lists(TOKENS).map(|list| qz1_page_list { seen: lists[0].seen, ..list });
        let (mut out, mut lse) = (vec![0.0; case.out.len()], vec![0.0; case.lse.len()]);
        let mut workspace = vec![0; words];
        for isa in Isa::available() {
            let (token, view) = (isa.token().unwrap(), KvPages::new(of, of.id(), &pages).unwrap());
            let (q, ws) = (&case.q, &mut workspace);
            view.attend(token, heads, &lists, q, &mut out, &mut lse, ws, &Serial).unwrap();
            for parallel in [null(), &raw const threads] {
                let (c, isa) = (case.call(), number(isa));
                let ((at, at_len), (q, q_len), (to, to_len)) = (c.pages, c.q, c.out);
                let ((l, l_len), (ws, ws_len)) = (c.lse, c.workspace);
                let lists = c_lists.as_ptr();
                // SAFETY: every pointer is null or points to a live value.
                let status = unsafe {
                    qz1_attend(
                        c.layout,
                        at,
                        at_len,
                        c.heads,
                        lists,
                        KV,
                        q,
                        q_len,
                        to,
                        to_len,
                        l,
                        l_len,
                        ws,
                        ws_len,
                        isa,
                        parallel,
                        null(),
                    )
                };
                assert_eq!(status, Ok);
                assert_eq!([bits(&case.out), bits(&case.lse)], [bits(&out), bits(&lse)], "{isa:?}");
            }
        }

        let (other, other_lse) = (noise(out.len(), 61), noise(lse.len(), 67));
        merge(D, &mut out, &mut lse, &other, &other_lse).unwrap();
        let (n, rows, x, y) = (out.len(), lse.len(), other.as_ptr(), other_lse.as_ptr());
        let (to, to_lse) = (case.out.as_mut_ptr(), case.lse.as_mut_ptr());
        // SAFETY: every pointer is null or points to a live value.
        assert_eq!(unsafe { qz1_attend_merge(D, to, n, to_lse, rows, x, n, y, rows, null()) }, Ok);
        assert_eq!([bits(&case.out), bits(&case.lse)], [bits(&out), bits(&lse)]);
    }
}

#[test]
fn caches_are_those_of_rust() {
    for (kind, of) in KINDS {
        let case = Case::new(kind);
        let heads = Heads { query: QUERY, kv: KV, scale: case.heads.scale };
        let mut of = KvCache::new(KvLayout::new(of, D).unwrap(), heads, TOKENS).unwrap();
        let mut at = core::ptr::null_mut();
        let (x, y, len) = (case.keys.as_ptr(), case.values.as_ptr(), case.keys.len());
        let (mut out, mut lse) = (vec![0.0; case.out.len()], vec![0.0; case.lse.len()]);
        let (mut c_out, mut c_lse) = (out.clone(), lse.clone());
        let (to, to_lse, q) = (c_out.as_mut_ptr(), c_lse.as_mut_ptr(), case.q.as_ptr());
        let (n, rows, mut workspace) = (out.len(), lse.len(), Workspace::default());
        of.append(&case.keys, &case.values, &Serial).unwrap();
        // SAFETY: every pointer is null or points to a live value.
        unsafe {
            assert_eq!(qz1_kv_cache_new(&case.layout, &case.heads, TOKENS, &mut at, null()), Ok);
            assert_eq!(qz1_kv_cache_append(at, x, len, y, len, null(), null()), Ok);
            assert_eq!((qz1_kv_cache_tokens(at), qz1_kv_cache_bytes(at)), (of.tokens(), of.bytes()));
            assert_eq!(qz1_kv_cache_prefill(at, q, n, to, n, to_lse, rows, null(), null()), Ok);
        }
        of.prefill(&case.q, &mut out, &mut lse, &mut workspace, &Serial).unwrap();
        assert_eq!([bits(&c_out), bits(&c_lse)], [bits(&out), bits(&lse)]);
        of.truncate(70).unwrap();
        let row = QUERY * D;
        of.decode(&case.q[..row], &mut out[..row], &mut lse[..QUERY], &mut workspace, &Serial).unwrap();
        // SAFETY: this test upholds the pointer contract of the C interface.
        unsafe {
            assert_eq!(qz1_kv_cache_truncate(at, 70, null()), Ok);
            assert_eq!(qz1_kv_cache_decode(at, q, row, to, row, to_lse, QUERY, null(), null()), Ok);
            assert_eq!(qz1_kv_cache_tokens(at), 70);
        }
        assert_eq!([bits(&c_out), bits(&c_lse)], [bits(&out), bits(&lse)]);
        // SAFETY: this test upholds the pointer contract of the C interface; freed once.
        unsafe {
            assert_eq!(qz1_kv_cache_clear(at, null()), Ok);
            assert_eq!(qz1_kv_cache_tokens(at), 0);
            qz1_kv_cache_free(at);
        }
    }
}
