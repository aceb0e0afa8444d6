//! The same inputs give the same bytes, for any number of threads and on every run.

use crate::common;

use common::{Quantized, Tiny, recipe, run};
use quant_core::calibrate::TokenWindows;
use quant_core::checkpoint::Dtype;

fn same_on_any_number_of_threads(tiny: &Tiny, method: &str, scheme: &str, windows: Option<&TokenWindows>) {
    let model = tiny.random(1).model();
    let on = |threads: usize| -> Quantized {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| run(&model, &tiny.config(), &recipe(method, scheme), windows))
    };
    let one = on(1);
    let report = one.report.to_json().unwrap();
    for threads in [2, 3, 2] {
        let other = on(threads);
        // `assert_eq!` would print megabytes.
        assert!(one.source == other.source, "{method} {scheme}: different tensors on {threads} threads");
        assert_eq!(report, other.report.to_json().unwrap(), "{method} {scheme} on {threads} threads");
    }
}

#[test]
fn rounding_a_4096_wide_layer() {
    let tiny = Tiny {
        hidden: 4096,
        intermediate: 256,
        layers: 1,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        vocab: 32,
        ..Tiny::default()
    };
    same_on_any_number_of_threads(&Tiny { dtype: Dtype::Bf16, ..tiny.clone() }, "rtn", "w4a16", None);
    same_on_any_number_of_threads(&Tiny { dtype: Dtype::F16, ..tiny }, "rtn", "w3a16-g64-asym", None);
}

#[test]
fn awq_on_layers_that_are_split() {
    // Weights, outputs and clip searches are each split into several tasks.
    let tiny = Tiny {
        hidden: 512,
        intermediate: 1024,
        layers: 1,
        heads: 8,
        kv_heads: 8,
        head_dim: 64,
        dtype: Dtype::Bf16,
        norm_dtype: Dtype::Bf16,
        ..Tiny::default()
    };
    let windows = common::windows(tiny.vocab, 3, 64, 2);
    same_on_any_number_of_threads(&tiny, "awq", "w4a16", Some(&windows));
}

#[test]
fn awq_on_a_4096_wide_layer() {
    let tiny = Tiny { intermediate: 4096, layers: 1, ..Tiny::default() };
    let windows = common::windows(tiny.vocab, 2, 48, 3);
    same_on_any_number_of_threads(&tiny, "awq", "w4a16-g64-asym", Some(&windows));
}

#[test]
fn awq_on_a_batch_that_comes_in_pieces() {
    // The batch forms several chunks. The search uses the Gram matrix of the output projection's input.
    let tiny = Tiny { hidden: 128, intermediate: 256, kv_heads: 4, layers: 2, ..Tiny::default() };
    let windows = common::windows(tiny.vocab, 36, 60, 4);
    same_on_any_number_of_threads(&tiny, "awq", "w3a16-g32", Some(&windows));
    // The same holds for masked prompts and packed documents.
    let windows = common::masked_windows(tiny.vocab, 36, 100, 4);
    same_on_any_number_of_threads(&tiny, "awq", "w3a16-g32", Some(&windows));
}

#[test]
fn the_report_counts_the_tokens_of_every_linear() {
    let tiny = Tiny::default();
    let model = tiny.random(1).model();
    let of = |windows: &TokenWindows| {
        run(&model, &tiny.config(), &recipe("awq", "w4a16-g32"), Some(windows)).report
    };
    let masked = common::masked_windows(tiny.vocab, 5, 60, 4);
    let [counted, context, padding] = masked.uses().map(|n| n as u64);
    assert!(counted > 0 && context > 0 && padding > 0);
    let report = of(&masked);
    let quantized: Vec<_> = report.tensors.iter().filter(|t| t.action == "quantized").collect();
    assert_eq!(quantized.len(), 2 * 7);
    assert!(quantized.iter().all(|t| t.calibration_tokens == Some(counted)));
    let others = report.tensors.iter().filter(|t| t.action != "quantized");
    assert!(others.into_iter().all(|t| t.calibration_tokens.is_none()));
    let batch = report.calibration.unwrap();
    assert_eq!((batch.tokens, batch.tokens_counted, batch.padding), (counted + context, counted, padding));
    assert!(batch.layout_sha256.is_some());
    let plain = of(&common::windows(tiny.vocab, 5, 60, 4)).calibration.unwrap();
    assert_eq!(plain.tokens_sha256, batch.tokens_sha256);
    assert_eq!((plain.tokens_counted, plain.layout_sha256), (300, None));
}

#[test]
fn another_seed_gives_other_bytes() {
    // Shows that the comparison above can fail.
    let tiny = Tiny::default();
    let of = |seed: u64| {
        let windows = common::windows(tiny.vocab, 4, 32, 5);
        let model = tiny.random(seed).model();
        run(&model, &tiny.config(), &recipe("awq", "w4a16-g32"), Some(&windows))
    };
    let (one, two) = (of(1), of(2));
    assert!(one.source != two.source);
    assert_ne!(one.report.to_json().unwrap(), two.report.to_json().unwrap());
    assert!(one.source == of(1).source);
}

#[test]
fn gptq_on_a_batch_that_comes_in_pieces() {
    // Several chunks; an MLP wider than a block of the factorization and a tile of the Hessian.
    let tiny = Tiny { hidden: 128, intermediate: 640, kv_heads: 4, layers: 2, ..Tiny::default() };
    let windows = common::windows(tiny.vocab, 36, 60, 4);
    same_on_any_number_of_threads(&tiny, "gptq", "w3a16-g32-asym", Some(&windows));
    // The same holds for masked prompts and packed documents, after a search.
    let windows = common::masked_windows(tiny.vocab, 36, 100, 4);
    same_on_any_number_of_threads(&tiny, "awq-gptq", "w4a16-g32", Some(&windows));
}
