//! The model stage against an independent decoder, candle-transformers' Llama, on random tiny checkpoints; and against
//! itself, in batches and with a cache.

use crate::common;

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Config, Llama, Llama3RopeConfig, Llama3RopeType};
use common::{Checkpoint, POSITIONS, Tiny, decoder, flat, relative_difference, windows};
use quant_core::TensorSource;
use quant_core::checkpoint::Dtype;
use serde_json::json;

/// Maximum difference of logits relative to the largest. Different summation orders cause differences near 1e-6; any
/// mistake in the computation causes far larger ones.
const ORACLE_BOUND: f64 = 5e-6;

/// No biases, and heads that add up to the hidden size.
fn oracle_cases() -> Vec<(&'static str, Tiny)> {
    let llama3 = json!({
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    });
    vec![
        ("grouped queries", Tiny::default()),
        ("tied", Tiny { tied: true, ..Tiny::default() }),
        ("every head its own", Tiny { kv_heads: 4, layers: 3, ..Tiny::default() }),
        ("one key head, odd sizes", Tiny { kv_heads: 1, intermediate: 77, vocab: 51, ..Tiny::default() }),
        ("rope of llama 3", Tiny { rope_scaling: llama3, ..Tiny::default() }),
        ("f16", Tiny { dtype: Dtype::F16, norm_dtype: Dtype::F16, ..Tiny::default() }),
        ("bf16", Tiny { dtype: Dtype::Bf16, norm_dtype: Dtype::Bf16, tied: true, ..Tiny::default() }),
    ]
}

fn oracle(checkpoint: &Checkpoint) -> (Llama, Config) {
    let tiny = &checkpoint.tiny;
    let scaling = &tiny.rope_scaling;
    let number = |key: &str| scaling[key].as_f64().unwrap() as f32;
    let config = Config {
        hidden_size: tiny.hidden,
        intermediate_size: tiny.intermediate,
        vocab_size: tiny.vocab,
        num_hidden_layers: tiny.layers,
        num_attention_heads: tiny.heads,
        num_key_value_heads: tiny.kv_heads,
        use_flash_attn: false,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: scaling.is_object().then(|| Llama3RopeConfig {
            factor: number("factor"),
            low_freq_factor: number("low_freq_factor"),
            high_freq_factor: number("high_freq_factor"),
            original_max_position_embeddings: number("original_max_position_embeddings") as usize,
            rope_type: Llama3RopeType::Llama3,
        }),
        max_position_embeddings: POSITIONS,
        tie_word_embeddings: tiny.tied,
    };
    let source = checkpoint.source();
    let tensors: HashMap<String, Tensor> = source
        .names()
        .into_iter()
        .map(|name| {
            let shape = source.info(name).unwrap().shape.clone();
            let values = source.read_f32(name).unwrap();
            (name.to_owned(), Tensor::from_vec(values, shape, &Device::Cpu).unwrap())
        })
        .collect();
    let weights = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    (Llama::load(weights, &config).unwrap(), config)
}

#[test]
fn logits_agree_with_candle_transformers() {
    const LENGTH: usize = 130;
    let mut worst = 0.0_f64;
    for (seed, (name, tiny)) in oracle_cases().into_iter().enumerate() {
        let checkpoint = tiny.random(seed as u64);
        let (llama, config) = oracle(&checkpoint);
        let windows = windows(tiny.vocab, 3, LENGTH, 100 + seed as u64);
        let ours = common::logits(&checkpoint.model(), &windows);
        for window in 0..windows.len() {
            // Candle only returns the last position's logits, so every prefix takes one run.
            for length in [1, 2, 5, 33, 64, 65, LENGTH] {
                let prefix = Tensor::new(&windows.window(window)[..length], &Device::Cpu).unwrap();
                let mut cache = Cache::new(false, DType::F32, &config, &Device::Cpu).unwrap();
                let theirs = flat(&llama.forward(&prefix.unsqueeze(0).unwrap(), 0, &mut cache).unwrap());
                let at = (window * LENGTH + length - 1) * tiny.vocab;
                let difference = relative_difference(&ours[at..at + tiny.vocab], &theirs);
                assert!(difference <= ORACLE_BOUND, "{name}, {length} tokens: {difference:e}");
                worst = worst.max(difference);
            }
        }
    }
    println!("largest difference from candle-transformers: {worst:.2e} of the largest logit");
}

fn all_cases() -> Vec<(&'static str, Tiny)> {
    let mut cases = oracle_cases();
    cases.push((
        "wide heads, biases",
        Tiny { head_dim: 24, attention_bias: true, mlp_bias: true, ..Tiny::default() },
    ));
    cases.push(("4096 wide", Tiny { intermediate: 4096, layers: 1, ..Tiny::default() }));
    cases.push((
        "narrow heads, bf16",
        Tiny { head_dim: 6, dtype: Dtype::Bf16, norm_dtype: Dtype::F32, ..Tiny::default() },
    ));
    cases
}

#[test]
fn a_batch_gives_what_each_window_gives_alone_bit_for_bit() {
    for (seed, (name, tiny)) in all_cases().into_iter().enumerate() {
        let decoder = decoder(&tiny.random(seed as u64).model());
        // A few tokens use a different code path, whose results differ in the last bits.
        for length in [5, 40, 128] {
            let windows = windows(tiny.vocab, 6, length, 7);
            let batch: Vec<&[u32]> = (0..6).map(|i| windows.window(i)).collect();
            let together = flat(&decoder.hidden(&batch).unwrap());
            let alone: Vec<f32> = batch.iter().flat_map(|w| flat(&decoder.hidden(&[*w]).unwrap())).collect();
            assert!(together == alone, "{name}, windows of {length}");
        }
    }
}

#[test]
fn decoding_with_the_cache_gives_what_prefill_gives() {
    const LENGTH: usize = 60;
    const BOUND: f64 = 5e-6;
    let mut worst = 0.0_f64;
    for (seed, (name, tiny)) in all_cases().into_iter().enumerate() {
        let model = tiny.random(seed as u64).model();
        let windows = windows(tiny.vocab, 1, LENGTH, 8);
        let prefill = common::logits(&model, &windows);
        let decoder = decoder(&model);
        for pieces in [vec![1; LENGTH], vec![7, 1, 1, 20, 2, 3, 25, 1], vec![LENGTH], vec![4, 50, 6]] {
            let mut cache = decoder.cache();
            let mut done = 0;
            for piece in pieces {
                let tokens = &windows.window(0)[done..done + piece];
                let logits = flat(&decoder.step(tokens, &mut cache).unwrap());
                done += piece;
                assert_eq!(cache.positions(), done);
                let exact = &prefill[(done - 1) * tiny.vocab..done * tiny.vocab];
                let difference = relative_difference(&logits, exact);
                assert!(difference <= BOUND, "{name}: {piece} tokens up to {done}: {difference:e}");
                worst = worst.max(difference);
            }
            assert_eq!(done, LENGTH);
        }
    }
    println!("largest difference between cache and prefill: {worst:.2e} of the largest logit");
}

#[test]
fn the_cache_refuses_more_positions_than_it_was_made_for() {
    let tiny = Tiny::default();
    let decoder = decoder(&tiny.random(1).model());
    let mut cache = decoder.cache();
    let tokens = vec![1; POSITIONS];
    decoder.step(&tokens[1..], &mut cache).unwrap();
    assert!(decoder.step(&[1, 1], &mut cache).is_err());
    assert_eq!(cache.positions(), POSITIONS - 1);
    decoder.step(&[1], &mut cache).unwrap();
    assert!(decoder.step(&[1], &mut cache).is_err());
}
