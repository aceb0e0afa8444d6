//! If the caller's threads unwind, incomplete rows are not used in products.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use common::Panics;
use quant_kernels_cpu::attention::{Heads, KvCache, KvLayout, KvType, Workspace};
use quant_kernels_cpu::{
    FloatRows, Int8Rows, Isa, PackedLinear, Parallel, RowLayout, Serial, StaticScale, WeightView,
};

const K: usize = 64;
const N: usize = 32;
const M: usize = 40;

fn unwinds(call: impl FnOnce(&dyn Parallel), pieces: usize) {
    assert!(catch_unwind(AssertUnwindSafe(|| call(&Panics(pieces)))).is_err());
}

fn weights() -> PackedLinear {
    let (codes, scales) = (vec![3; N * K], vec![0.5; N * 2]);
    let view = WeightView::new([N, K], 4, 32, &codes, &scales, None).unwrap();
    PackedLinear::pack(&view, None, true, &Serial).unwrap()
}

#[test]
fn integers_are_none_until_complete() {
    let packed = weights();
    let layout = RowLayout::of(packed.layout());
    let x: Vec<f32> = (0..M * K).map(|i| i as f32).collect();
    let by = StaticScale { scale: 1.0, zero: 3 };
    for isa in Isa::runnable() {
        let token = isa.token().unwrap();
        for pieces in 0..3 {
            // The buffer held no rows before, fewer rows, or more.
            for before in [0, 1, M + 13] {
                let mut rows = Int8Rows::new(token);
                rows.quantize(&vec![1.0; before * K], layout, &Serial).unwrap();
                unwinds(|p| rows.quantize_static(&x, layout, by, p).unwrap(), pieces);
                let mut out = vec![0.0; M * N];
                let view = packed.view();
                let result = view.multiply(token, &rows, None, &mut out, &Serial);
                assert_eq!((result.unwrap_err().code(), rows.m()), (4, 0));
                assert!(rows.row(0).is_empty() && rows.sums(0).is_empty() && rows.scales().is_empty());
                assert_eq!(view.multiply(token, &rows, None, &mut [], &Serial).unwrap_err().code(), 4);
                rows.quantize(&x, layout, &Serial).unwrap();
                view.multiply(token, &rows, None, &mut out, &Serial).unwrap();
                assert_eq!(rows.m(), M);
            }
        }
    }
}

#[test]
fn floats_are_none_until_complete() {
    let packed = weights();
    let layout = RowLayout::of(packed.layout());
    let x: Vec<f32> = (0..M * K).map(|i| i as f32).collect();
    for isa in Isa::runnable() {
        for pieces in 0..3 {
            let mut rows = FloatRows::new(isa.token().unwrap());
            rows.pack(&[1.0; K], layout, &Serial).unwrap();
            unwinds(|p| rows.pack(&x, layout, p).unwrap(), pieces);
            let mut out = vec![0.0; M * N];
            let result = packed.view().multiply_float(&rows, None, &mut out, &Serial);
            assert_eq!((result.unwrap_err().code(), rows.m()), (4, 0));
            rows.pack(&x, layout, &Serial).unwrap();
            packed.view().multiply_float(&rows, None, &mut out, &Serial).unwrap();
        }
    }
}

#[test]
fn tokens_are_in_the_cache_when_all_are_written() {
    let heads = Heads { query: 4, kv: 2, scale: 0.25 };
    let mut cache = KvCache::new(KvLayout::new(KvType::Kv4, 16).unwrap(), heads, 200).unwrap();
    let (some, all) = (vec![1.0; 3 * 32], vec![2.0; 130 * 32]);
    cache.append(&some, &some, &Serial).unwrap();
    let mut workspace = Workspace::default();
    let mut decode = |cache: &KvCache, p: &dyn Parallel| {
        let (mut out, mut lse) = (vec![f32::NAN; 64], vec![f32::NAN; 4]);
        cache.decode(&[0.5; 64], &mut out, &mut lse, &mut workspace, p).unwrap();
        (out, lse)
    };
    let before = decode(&cache, &Serial);
    for pieces in 0..3 {
        unwinds(|p| cache.append(&all, &all, p).unwrap(), pieces);
        assert_eq!(cache.tokens(), 3);
        unwinds(|p| drop(decode(&cache, p)), pieces);
        assert_eq!(decode(&cache, &Serial), before);
    }
    cache.append(&all, &all, &Serial).unwrap();
    assert_eq!(cache.tokens(), 133);
}
