//! The memory of a run grows with the number of tensors, too, and `plan` predicts it.

use std::path::{Path, PathBuf};

use quant_tests::args;
use quant_tests::models::{RawTensor, TinyLlama, write_model};
use quant_tests::program::{Run, quant};
use quant_tests::refusal::check_message;
use serde_json::{Value, json};
use tempfile::TempDir;

/// The allowance for a prediction: 20 %, or 80 MB.
fn allowance(used: u64) -> u64 {
    (used / 5).max(80_000_000)
}

/// Compares the prediction of `plan` with the memory that the run reports, and returns both.
#[track_caller]
fn check_prediction(model: &Path, out: &Path, options: &[&str]) -> [u64; 2] {
    // Every thread adds some memory, of which little is used here.
    let mut arguments = args!["plan", model, "--json", "--threads", "2"];
    arguments.extend(options.iter().map(Into::into));
    let predicted = quant(arguments).json()["peak_memory_bytes"].as_u64().unwrap();
    let mut arguments = args!["quantize", model, "-o", out, "--json", "--threads", "2"];
    arguments.extend(options.iter().map(Into::into));
    let run: Run = quant(arguments).succeeded();
    let summary: Value = serde_json::from_str(&run.stdout).unwrap();
    let used = summary["peak_memory_bytes"].as_u64().unwrap();
    println!("{options:?}: {used} bytes used, {predicted} predicted");
    assert!(used <= predicted, "{options:?}: {used} bytes used, only {predicted} predicted");
    let excess = predicted - used;
    assert!(excess <= allowance(used), "{options:?}: {used} bytes used, {predicted} predicted");
    [used, predicted]
}

/// A small model with `count` further tensors of one value each.
fn with_small_tensors(scratch: &TempDir, count: usize) -> PathBuf {
    let (directory, tiny) = (scratch.path().join(format!("small-{count}")), TinyLlama::default());
    let name = |i: usize| format!("model.buffers.{i:06}.some_long_name.statistics");
    let small = (0..count).map(|i| RawTensor::f16(&name(i), &[1], std::iter::once(1.0)));
    let tensors: Vec<RawTensor> = tiny.tensors().into_iter().chain(small).collect();
    tiny.write_with(&directory, &tensors);
    directory
}

#[test]
fn many_small_tensors() {
    let scratch = tempfile::tempdir().unwrap();
    let options = ["--method", "rtn", "--scheme", "w4a16-g32"];
    let [few, many] = [10, 60_000].map(|count| {
        let model = with_small_tensors(&scratch, count);
        check_prediction(&model, &model.with_extension("out"), &options)
    });
    // The memory varies between runs.
    let [used, predicted] = [0, 1].map(|which| many[which] - few[which]);
    assert!(
        used <= predicted && predicted <= used + used / 2,
        "{used} bytes more used, {predicted} predicted"
    );
    let model = with_small_tensors(&scratch, 60_000);
    let out = scratch.path().join("refused");
    let refused = quant(
        args!["quantize", &model, "-o", &out, "--memory-budget", "200MiB"]
            .into_iter()
            .chain(options.map(Into::into)),
    );
    check_message("60,000 tensors in 200 MiB", &refused, 5, &["the budget is 200 MiB"]);
    assert!(!out.exists());
}

#[test]
fn many_small_experts() {
    let scratch = tempfile::tempdir().unwrap();
    let (layers, experts, hidden) = (4_u64, 1500_u64, 32_u64);
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": 64, "moe_intermediate_size": hidden, "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": layers, "vocab_size": 256,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "num_experts": experts, "num_experts_per_tok": 2, "norm_topk_prob": true, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "tie_word_embeddings": false, "dtype": "float16",
    });
    let mut state = 7_u64;
    let mut tensors = Vec::new();
    let mut add = |name: String, shape: &[u64], around: f32| {
        let mut value = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            around + ((state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0) * 0.2
        };
        let count: u64 = shape.iter().product();
        tensors.push(RawTensor::f16(&format!("{name}.weight"), shape, (0..count).map(|_| value())));
    };
    add("model.embed_tokens".into(), &[256, hidden], 0.0);
    add("lm_head".into(), &[256, hidden], 0.0);
    add("model.norm".into(), &[hidden], 1.0);
    for layer in 0..layers {
        let at = |part: &str| format!("model.layers.{layer}.{part}");
        for (part, rows) in [("q_proj", 32), ("k_proj", 16), ("v_proj", 16), ("o_proj", hidden)] {
            add(at(&format!("self_attn.{part}")), &[rows, hidden], 0.0);
        }
        for part in ["self_attn.q_norm", "self_attn.k_norm"] {
            add(at(part), &[16], 1.0);
        }
        for part in ["input_layernorm", "post_attention_layernorm"] {
            add(at(part), &[hidden], 1.0);
        }
        add(at("mlp.gate"), &[experts, hidden], 0.0);
        for expert in 0..experts {
            for part in ["gate_proj", "up_proj", "down_proj"] {
                add(at(&format!("mlp.experts.{expert}.{part}")), &[hidden, hidden], 0.0);
            }
        }
    }
    let model = scratch.path().join("model");
    write_model(&model, &config, &tensors);
    for format in ["compressed-tensors", "awq"] {
        let out = scratch.path().join(format);
        check_prediction(&model, &out, &["--method", "rtn", "--scheme", "w4a16-g32", "--format", format]);
    }
}
