//! How files describe models of every family with special parts, and what files cannot describe.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value as Json, json};

use super::config_tests::{WITH_EXPERTS, YARN, about, cases, config, merged};
use super::families::{self, FAMILIES, Stated};
use super::file::{Array, Value};
use super::rows::Change;
use super::{layout, metadata};
use crate::Error;
use crate::checkpoint::{ConfigFields, MemorySource};
use crate::model::describe;

#[test]
fn every_tensor_has_one_place() {
    for (name, changes) in cases() {
        let (a, entries, _) = about(&config(name, changes)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let family = families::of_model(&a).unwrap();
        assert!(entries.iter().all(|(key, _)| key.starts_with(&format!("{}.", family.arch))));
        let keys: BTreeSet<&str> = entries.iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!(keys.len(), entries.len(), "{name}: a key appears twice");
        for layer in 0..a.layers {
            let placed = layout::of_block(&a, family, layer).unwrap();
            let places: BTreeSet<(&str, Option<usize>)> =
                placed.iter().map(|p| (p.stored.as_str(), p.expert)).collect();
            assert_eq!(places.len(), placed.len(), "{name}: two tensors of block {layer} in one place");
            for p in &placed {
                let elements = |shape: &[usize]| shape.iter().product::<usize>();
                let parts = placed.iter().filter(|other| other.tensor == p.tensor);
                let stored: usize = parts.map(|part| elements(&part.stored_shape)).sum();
                assert_eq!(stored, elements(&p.shape), "{name}: {}", p.tensor);
            }
        }
    }
    // The architecture named in a file leads back to the family that wrote it, or to an equivalent one.
    for family in FAMILIES {
        let stated = Stated {
            has_experts: family.experts.is_some(),
            has_windows: family.has_windows,
            scores: (family.family == "deepseek_v2").then_some(1).or(Some(2)),
            scales_queries: family.scales_queries,
        };
        let found = families::architecture(family.arch, stated).unwrap();
        assert_eq!(found.arch, family.arch);
    }
}

#[test]
fn keys_of_single_families() {
    let value = |name: &str, changes: Json, key: &str| {
        let (a, entries, _) = about(&config(name, changes)).unwrap();
        let arch = families::of_model(&a).unwrap().arch;
        entries.into_iter().find(|(known, _)| *known == format!("{arch}.{key}")).map(|(_, value)| value)
    };
    let flags = |flags: &[bool]| Some(Value::Array(Array::Bool(flags.to_vec())));
    assert_eq!(value("deepseek_v3", json!({}), "attention.head_count_kv"), Some(Value::U32(1)));
    assert_eq!(value("deepseek_v3", json!({}), "attention.key_length"), Some(Value::U32(24)));
    assert_eq!(value("deepseek_v3", json!({}), "attention.q_lora_rank"), Some(Value::U32(24)));
    assert_eq!(value("deepseek_v2", json!({}), "attention.q_lora_rank"), Some(Value::U32(0)));
    assert_eq!(value("deepseek_v3", json!({}), "expert_group_used_count"), Some(Value::U32(2)));
    let multiplier = value("deepseek_v3", json!({}), "rope.scaling.yarn_log_multiplier");
    assert!(matches!(multiplier, Some(Value::F32(m)) if (m - 0.1).abs() < 1e-6), "{multiplier:?}");
    assert_eq!(value("glm4_moe", json!({}), "leading_dense_block_count"), Some(Value::U32(1)));
    for (key, expected) in [("head_count", 3), ("key_length", 16), ("top_k", 128)] {
        for name in ["deepseek_v32", "glm_moe_dsa"] {
            let found = value(name, json!({}), &format!("attention.indexer.{key}"));
            assert_eq!(found, Some(Value::U32(expected)), "{name}: {key}");
        }
    }
    // llama.cpp also runs windows in which the indexer does not select all keys.
    assert_eq!(value("deepseek_v32", json!({}), "context_length"), Some(Value::U32(512)));
    assert_eq!(value("deepseek_v32", json!({}), "attention.indexer.types"), None);
    assert_eq!(value("glm_moe_dsa", json!({}), "attention.indexer.types"), flags(&[true, false, true]));
    let all = value("glm_moe_dsa", json!({ "indexer_types": null }), "attention.indexer.types");
    assert_eq!(all, flags(&[true; 3]));
    assert_eq!(value("glm4_moe", json!({}), "expert_gating_func"), Some(Value::U32(2)));
    let recurrent = value("qwen3_next", json!({}), "attention.recurrent_layers");
    assert_eq!(recurrent, flags(&[true, true, true, false]));
    // 16 channels, a quarter of which is rotated: two pairs, interleaved over the coordinates.
    let sections = value("qwen3_5_text", json!({}), "rope.dimension_sections");
    assert_eq!(sections, Some(Value::Array(Array::I32(vec![1, 1, 0, 0]))));
    let given = json!({ "rope_parameters": { "rope_type": "default", "mrope_section": [11, 11, 10] } });
    let sections = value("qwen3_5_text", given, "rope.dimension_sections");
    assert_eq!(sections, Some(Value::Array(Array::I32(vec![11, 11, 10, 0]))));
    let widths = value("gemma4_text", json!({}), "feed_forward_length");
    assert_eq!(widths, Some(Value::Array(Array::I32(vec![96, 96, 96, 192, 192, 192]))));
    assert_eq!(value("gemma4_text", json!({}), "attention.shared_kv_layers"), Some(Value::U32(3)));
    let windows = value("gemma4_text", json!({}), "attention.sliding_window_pattern");
    assert_eq!(windows, flags(&[true, true, false, true, true, false]));
}

fn number(entries: &[(String, Value)], key: &str) -> Option<f64> {
    entries
        .iter()
        .find(|(known, _)| known == key)
        .and_then(|(_, value)| value.as_f64().or(value.as_u64().map(|n| n as f64)))
}

#[test]
fn keys_of_families_with_state_spaces_and_convolutions() {
    let entries = |name: &str, changes: Json| about(&config(name, changes)).unwrap().1;
    let list = |entries: &[(String, Value)], key: &str| {
        entries.iter().find(|(known, _)| known == key).and_then(|(_, value)| value.as_integers())
    };
    let found = entries("lfm2", json!({}));
    assert_eq!(list(&found, "lfm2.attention.head_count_kv"), Some(vec![0, 2, 0]));
    assert_eq!(number(&found, "lfm2.shortconv.l_cache"), Some(3.0));
    let found = entries("lfm2_moe", json!({}));
    assert_eq!(number(&found, "lfm2moe.leading_dense_block_count"), Some(1.0));
    assert_eq!(number(&found, "lfm2moe.expert_gating_func"), Some(2.0));
    let found = entries("granitemoehybrid", json!({}));
    for (key, value) in [
        ("ssm.conv_kernel", 4.0),
        ("ssm.inner_size", 128.0),
        ("ssm.state_size", 16.0),
        ("ssm.time_step_rank", 8.0),
        ("ssm.group_count", 2.0),
        ("feed_forward_length", 96.0),
        ("logit_scale", 4.0),
    ] {
        assert_eq!(number(&found, &format!("granitehybrid.{key}")), Some(value), "{key}");
    }
    let rotates = |found: &[(String, Value)], rotates: bool| {
        let key = ("granitehybrid.rope.scaling.finetuned".to_owned(), Value::Bool(rotates));
        found.contains(&key)
    };
    assert!(rotates(&found, false));
    assert!(rotates(&entries("granitemoehybrid", json!({ "position_embedding_type": "rope" })), true));
    // Without state-space operations, the model is a Granite 3.
    let all = json!({ "layer_types": vec!["attention"; 3], "position_embedding_type": "rope" });
    assert_eq!(number(&entries("granitemoehybrid", all), "granite.feed_forward_length"), Some(96.0));
    for (name, arch, changes) in WITH_EXPERTS {
        let found = entries(name, serde_json::from_str(changes).unwrap());
        assert_eq!(number(&found, &format!("{arch}.expert_count")), Some(4.0));
    }
    let found = entries("nemotron_h", json!({}));
    assert_eq!(list(&found, "nemotron_h.feed_forward_length"), Some(vec![0, 96, 0, 0]));
    assert_eq!(list(&found, "nemotron_h.attention.head_count_kv"), Some(vec![0, 0, 2, 0]));
    assert_eq!(number(&found, "nemotron_h.attention.layer_norm_epsilon"), Some(f64::from(1e-5_f32)));
    let found = entries("nemotron_h", serde_json::from_str(WITH_EXPERTS[1].2).unwrap());
    assert_eq!(list(&found, "nemotron_h_moe.feed_forward_length"), Some(vec![0, 32, 0, 32]));
    assert_eq!(number(&found, "nemotron_h_moe.expert_shared_count"), Some(1.0));
    assert_eq!(number(&found, "nemotron_h_moe.expert_shared_feed_forward_length"), Some(48.0));
    assert_eq!(number(&found, "nemotron_h_moe.moe_latent_size"), Some(24.0));
}

#[test]
fn keys_of_further_families() {
    let value = |name: &str, key: &str| number(&about(&config(name, json!({}))).unwrap().1, key);
    assert_eq!(value("hy_v3", "hy_v3.expert_shared_feed_forward_length"), Some(64.0));
    assert_eq!(value("hy_v3", "hy_v3.expert_weights_scale"), Some(1.5));
    assert_eq!(value("ministral3", "mistral3.attention.temperature_scale"), Some(0.25));
    assert_eq!(value("mistral4", "mistral4.attention.temperature_length"), Some(512.0));
    assert_eq!(value("mistral4", "mistral4.expert_gating_func"), Some(1.0));
    assert_eq!(value("glm", "chatglm.rope.dimension_count"), Some(8.0));
    assert_eq!(value("gpt_neox", "gptneox.rope.dimension_count"), Some(4.0));
    assert_eq!(value("gpt2", "gpt2.feed_forward_length"), Some(96.0));
    assert_eq!(value("bloom", "bloom.feed_forward_length"), Some(256.0));
    assert_eq!(value("phi", "phi2.rope.dimension_count"), Some(8.0));
    assert_eq!(value("llama4_text", "llama4.interleave_moe_layer_step"), Some(2.0));
    assert_eq!(value("llama4_text", "llama4.feed_forward_length"), Some(96.0));
    assert_eq!(value("llama4_text", "llama4.expert_feed_forward_length"), Some(32.0));
    for (changes, expected) in [(json!({}), true), (json!({ "use_parallel_residual": false }), false)] {
        let (_, entries, warnings) = about(&config("gpt_neox", changes)).unwrap();
        let key = ("gptneox.use_parallel_residual".to_owned(), Value::Bool(expected));
        assert!(entries.contains(&key), "{entries:?}");
        assert!(warnings.iter().any(|warning| warning.contains("approximates")), "{warnings:?}");
    }
}

#[test]
fn factors_are_multiplied_into_rows() {
    let (a, ..) = about(&config("falcon_h1", json!({}))).unwrap();
    let family = families::of_model(&a).unwrap();
    let placed = layout::of_block(&a, family, 0).unwrap();
    let factor = |stored: &str, row: usize| {
        let found = placed.iter().find(|placed| placed.stored == stored).unwrap();
        match found.view.change {
            Change::Multiply(factors) => factors.of_row(row),
            Change::None => 1.0,
            other => panic!("{other:?}"),
        }
    };
    let close = |found: f32, expected: f32| assert!((found - expected).abs() < 1e-6, "{found}, {expected}");
    // The gate, x, B, C and time steps, each times the multiplier of the input.
    for (row, expected) in
        [(0, 0.35), (63, 0.35), (64, 0.6), (128, 0.4), (160, 0.55), (192, 0.45), (199, 0.45)]
    {
        close(factor("ssm_in.weight", row), expected);
    }
    close(factor("ssm_out.weight", 0), 1.3);
    close(factor("attn_q.weight", 0), 1.2);
    close(factor("attn_k.weight", 5), 0.6);
    close(factor("attn_v.weight", 5), 1.2);
    close(factor("attn_output.weight", 0), 0.9);
    close(factor("ffn_gate.weight", 0), 0.8);
    close(factor("ffn_up.weight", 0), 1.0);
    close(factor("ffn_down.weight", 0), 1.3);
    assert_eq!(metadata::folded_factors(&a, family), [2.5, 0.4]);
}

#[test]
fn text_models_of_vision_language_models_have_their_own_architectures() {
    let larger = |class: &str, kind: &str, text: Json, more: Json| {
        let text = merged(
            merged(config("ernie4_5", json!({})), json!({ "num_hidden_layers": 2, "head_dim": 16 })),
            text,
        );
        let config = json!({ "architectures": [class], "model_type": kind, "text_config": text });
        about(&merged(config, more))
    };
    let rope = |sections: Json| json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 1e4, "mrope_section": sections } });
    let sections = |entries: &[(String, Value)], arch: &str| {
        let key = format!("{arch}.rope.dimension_sections");
        entries.iter().find(|(known, _)| *known == key).and_then(|(_, value)| value.as_integers())
    };
    let text = merged(rope(json!([2, 3, 3])), json!({ "model_type": "qwen2_vl_text" }));
    let (_, entries, warnings) =
        larger("Qwen2VLForConditionalGeneration", "qwen2_vl", text, json!({})).unwrap();
    assert!(warnings.iter().any(|warning| warning.contains("ignores the epsilon")), "{warnings:?}");
    assert_eq!(sections(&entries, "qwen2vl"), Some(vec![2, 3, 3, 0]));
    let vision = json!({ "vision_config": { "deepstack_visual_indexes": [5, 11, 17] } });
    let text = merged(rope(json!([4, 2, 2])), json!({ "model_type": "qwen3_vl_text" }));
    let (_, entries, _) =
        larger("Qwen3VLForConditionalGeneration", "qwen3_vl", text, vision.clone()).unwrap();
    // The third coordinate has no channel for every turn, so the sections are made even.
    assert_eq!(sections(&entries, "qwen3vl"), Some(vec![3, 3, 2, 0]));
    assert_eq!(number(&entries, "qwen3vl.n_deepstack_layers"), Some(3.0));
    let experts = json!({ "model_type": "qwen3_vl_moe_text", "num_experts": 4, "num_experts_per_tok": 2,
                          "moe_intermediate_size": 32, "norm_topk_prob": true });
    let (a, ..) = larger("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", experts, vision).unwrap();
    assert_eq!(families::of_model(&a).unwrap().arch, "qwen3vlmoe");
    for (class, kind, text, arch) in [
        ("LlavaForConditionalGeneration", "llava", "llama", "llama"),
        ("LlavaForConditionalGeneration", "llava", "qwen2", "qwen2"),
        ("Mistral3ForConditionalGeneration", "mistral3", "mistral", "mistral3"),
    ] {
        let (a, entries, _) = larger(class, kind, json!({ "model_type": text }), json!({})).unwrap();
        assert_eq!(families::of_model(&a).unwrap().arch, arch);
        assert_eq!(number(&entries, &format!("{arch}.block_count")), Some(2.0));
    }
}

#[test]
fn families_that_cannot_be_written_are_refused_with_the_reason() {
    for (name, class, expected) in [
        ("phimoe", "PhimoeForCausalLM", "phimoe cannot be written as GGUF: llama.cpp computes other norms"),
        (
            "cohere2_moe",
            "Cohere2MoeForCausalLM",
            "cohere2_moe cannot be written as GGUF: it has not been compared",
        ),
        ("opt", "OPTForCausalLM", "opt cannot be written as GGUF: llama.cpp has no architecture"),
    ] {
        let changes = json!({
            "architectures": [class], "model_type": name, "num_experts": 4, "num_local_experts": 4,
            "num_experts_per_tok": 2, "ffn_dim": 96, "head_dim": 16,
        });
        let config = merged(config("ernie4_5", json!({})), changes);
        let config = config.as_object().unwrap();
        let a = describe(&ConfigFields::new(Path::new("config.json"), config), &MemorySource::new()).unwrap();
        match families::require(&a) {
            Err(error @ Error::Usage { .. }) => assert!(error.to_string().contains(expected), "{error}"),
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn what_llama_cpp_computes_otherwise_is_refused_or_reported() {
    let yarn =
        |changes: Json| json!({ "rope_parameters": merged(serde_json::from_str(YARN).unwrap(), changes) });
    for (name, changes, expected) in [
        ("gpt_oss", json!({ "swiglu_limit": 3.0 }), "clamp limit of 3"),
        ("gpt_oss", json!({ "attention_bias": false }), "has no bias"),
        ("gpt_oss", yarn(json!({ "beta_fast": 8.0 })), "beta_slow of YaRN are 8 and 1"),
        ("qwen3_5_text", json!({ "linear_value_head_dim": 16 }), "have 8 features and the value heads 16"),
        ("qwen3_5_text", json!({ "attention_bias": true }), "has a bias"),
        ("qwen3_5_text", json!({ "layer_types": vec!["full_attention"; 4] }), "no delta net"),
        ("qwen3_next", json!({ "norm_topk_prob": false }), "do not add up to 1"),
        ("qwen3_next", json!({ "mlp_only_layers": [1] }), "some blocks have experts"),
        ("glm4_moe", json!({ "n_shared_experts": 0 }), "no shared expert"),
        ("deepseek_v3", json!({ "rope_interleave": false }), "pairs the two halves"),
        ("deepseek_v3", yarn(json!({})), "attention factor for rotated channels"),
        (
            "deepseek_v2",
            json!({ "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2 }),
            "other than the sum",
        ),
        ("deepseek_v32", yarn(json!({})), "attention factor for rotated channels"),
        ("deepseek_v32", json!({ "index_head_dim": 6 }), "have 6 channels, but 8 channels"),
        (
            "glm_moe_dsa",
            json!({ "rope_parameters": { "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0 } }),
            "RoPE scaling is not supported",
        ),
        ("olmoe", json!({ "num_key_value_heads": 2 }), "2 key heads and 4"),
        ("olmoe", json!({ "norm_topk_prob": true }), "divided by their sum"),
        ("cohere2", json!({ "sliding_window_pattern": 2 }), "sliding window of block"),
        ("ernie4_5", json!({ "use_bias": true }), "has a bias"),
        ("lfm2", json!({ "head_dim": 32 }), "not as wide as the hidden size"),
        ("lfm2_moe", json!({ "routed_scaling_factor": 1.5 }), "multiplied by 1.5"),
        ("lfm2_moe", json!({ "use_expert_bias": false }), "are not corrected"),
        ("granitemoehybrid", json!({ "mamba_conv_bias": false }), "have no biases"),
        ("granitemoehybrid", json!({ "mamba_proj_bias": true }), "has a bias"),
        ("granitemoehybrid", json!({ "mamba_expand": 1, "mamba_d_head": 8 }), "have 64 channels"),
        ("granitemoehybrid", json!({ "time_step_limit": [0.0, 0.5] }), "time steps are limited"),
        ("nemotron_h", json!({ "use_conv_bias": false }), "have no biases"),
        ("nemotron_h", json!({ "layers_block_type": ["mlp", "mlp", "attention", "mlp"] }), "no state-space"),
        ("falcon_h1", json!({ "mamba_norm_before_gate": true }), "before their gate"),
        ("exaone4", json!({ "sliding_window": 8, "num_hidden_layers": 4 }), "supported only with 64"),
        ("exaone4", json!({ "num_hidden_layers": 64 }), "has 64 blocks but no sliding windows"),
        ("hy_v3", json!({ "num_shared_experts": 0 }), "no shared expert"),
        (
            "mistral4",
            json!({ "rope_parameters": merged(serde_json::from_str(YARN).unwrap(), json!({
                "mscale": 0.5, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.25 })) }),
            "mscale_all_dim of YaRN",
        ),
        ("ministral3", yarn(json!({ "llama_4_scaling_beta": 0.1, "beta_fast": 8.0 })), "beta_slow of YaRN"),
        (
            "ministral3",
            json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 1e4,
                                         "llama_4_scaling_beta": 0.1 } }),
            "original context length of YaRN",
        ),
        ("glm", json!({ "head_dim": 32 }), "not as wide as the hidden size"),
        ("internlm2", json!({ "bias": true }), "has a bias"),
        ("internlm2", json!({ "tie_word_embeddings": true }), "tied to the embedding"),
        ("gpt_neox", json!({ "attention_bias": false }), "has no bias"),
        ("gpt2", json!({ "scale_attn_by_inverse_layer_idx": true }), "differs in more than the window"),
        ("gpt2", json!({ "activation_function": "relu" }), "activation function Relu"),
        ("llama4_text", json!({ "attention_chunk_size": 1024 }), "chunks of block 0"),
        ("llama4_text", json!({ "attn_scale": 0.2 }), "scales queries by position"),
        ("llama4_text", json!({ "use_qk_norm": false }), "does not normalize"),
        ("llama4_text", json!({ "moe_layers": [0, 3] }), "not at equal distances"),
        (
            "gemma4_text",
            json!({ "vocab_size_per_layer_input": 100 }),
            "per-layer inputs have a vocabulary of \
            100",
        ),
        (
            "gemma4_text",
            json!({ "num_kv_shared_layers": 2, "layer_types": ["full_attention", "sliding_attention",
                "full_attention", "sliding_attention", "sliding_attention", "full_attention"] }),
            "the last two blocks that compute keys and values",
        ),
    ] {
        match about(&config(name, changes.clone())) {
            Err(error @ Error::Usage { .. }) => {
                assert!(error.to_string().contains(expected), "{name}, {changes}: {error}");
            }
            Err(other) => panic!("{name}, {changes}: {other:?}"),
            Ok(_) => panic!("{name}, {changes}: not refused"),
        }
    }
    let (.., warnings) = about(&config("gpt_oss", yarn(json!({ "truncate": false })))).unwrap();
    assert!(
        warnings.iter().any(|message| message.contains("rounds both ends of YaRN's ramp")),
        "{warnings:?}"
    );
    let (.., warnings) = about(&config("deepseek_v2", json!({ "rms_norm_eps": 1e-5 }))).unwrap();
    assert!(warnings.iter().any(|message| message.contains("in all norms")), "{warnings:?}");
}
