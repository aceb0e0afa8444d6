//! Small configurations of every family with special parts: how files describe them, and what files cannot describe.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value as Json, json};

use super::families::{self, FAMILIES};
use super::file::{Array, Value};
use super::{layout, metadata};
use crate::checkpoint::{ConfigFields, MemorySource};
use crate::model::{Architecture, describe};
use crate::{Error, Result};

const YARN: &str =
    r#"{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}"#;

fn config(family: &str, changes: Json) -> Json {
    let experts = |class: &str, more: Json| {
        merged(json!({ "architectures": [class], "num_experts": 4, "num_experts_per_tok": 2 }), more)
    };
    let linear = json!({
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "head_dim": 16, "num_hidden_layers": 4,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
    });
    let yarn: Json = serde_json::from_str(YARN).unwrap();
    let latent = json!({
        "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": null,
    });
    let own = match family {
        "gpt_oss" => experts("GptOssForCausalLM", json!({ "sliding_window": 8, "rope_parameters": yarn })),
        "qwen3_5_text" => merged(json!({ "architectures": ["Qwen3_5ForCausalLM"] }), linear),
        "qwen3_5_moe_text" => experts("Qwen3_5MoeForCausalLM", linear),
        "qwen3_next" => experts("Qwen3NextForCausalLM", linear),
        "glm4_moe" => merged(latent, json!({ "architectures": ["Glm4MoeForCausalLM"], "head_dim": 16 })),
        "deepseek_v3" => merged(
            latent,
            json!({ "architectures": ["DeepseekV3ForCausalLM"], "n_group": 4, "topk_group": 2,
                    "q_lora_rank": 24,
                    "rope_parameters": merged(yarn, json!({ "mscale": 1.0, "mscale_all_dim": 1.0 })) }),
        ),
        "deepseek_v2" => merged(latent, json!({ "architectures": ["DeepseekV2ForCausalLM"] })),
        "olmoe" => experts("OlmoeForCausalLM", json!({ "num_key_value_heads": 4 })),
        "granitemoe" => experts("GraniteMoeForCausalLM", json!({ "logits_scaling": 4.0 })),
        "cohere2" => json!({ "architectures": ["Cohere2ForCausalLM"], "num_hidden_layers": 4 }),
        "ernie4_5" => json!({ "architectures": ["Ernie4_5ForCausalLM"], "head_dim": 16 }),
        "gemma4_text" => json!({
            "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 6, "head_dim": 16,
            "global_head_dim": 32, "sliding_window": 8, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 3, "use_double_wide_mlp": true,
            "enable_moe_block": true, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention",
                            "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": { "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6 },
                "sliding_attention": { "rope_type": "default", "rope_theta": 1e4 },
            },
        }),
        other => panic!("no configuration of {other}"),
    };
    let common = json!({
        "model_type": family, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 512,
    });
    merged(merged(common, own), changes)
}

fn merged(mut base: Json, more: Json) -> Json {
    for (key, value) in more.as_object().unwrap() {
        base[key] = value.clone();
    }
    base
}

type About = (Architecture, Vec<(String, Value)>, Vec<String>);

fn about(config: &Json) -> Result<About> {
    let config = config.as_object().unwrap();
    let a = describe(&ConfigFields::new(Path::new("config.json"), config), &MemorySource::new())?;
    let family = families::family(a.family).unwrap();
    let about = metadata::metadata(&a, family, config)?;
    Ok((a, about.entries, about.warnings))
}

const WITH_PARTS_OF_THEIR_OWN: [&str; 12] = [
    "gpt_oss",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v2",
    "olmoe",
    "granitemoe",
    "cohere2",
    "ernie4_5",
    "gemma4_text",
];

#[test]
fn every_tensor_has_one_place() {
    for name in WITH_PARTS_OF_THEIR_OWN {
        let (a, entries, _) = about(&config(name, json!({}))).unwrap_or_else(|e| panic!("{name}: {e}"));
        let family = families::family(name).unwrap();
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
        let scores = (family.family == "deepseek_v2").then_some(1).or(Some(2));
        let found = families::architecture(family.arch, family.experts.is_some(), family.has_windows, scores)
            .unwrap();
        assert_eq!(found.arch, family.arch);
    }
}

#[test]
fn keys_of_single_families() {
    let value = |name: &str, changes: Json, key: &str| {
        let (_, entries, _) = about(&config(name, changes)).unwrap();
        let arch = families::family(name).unwrap().arch;
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
        ("olmoe", json!({ "num_key_value_heads": 2 }), "2 key heads and 4"),
        ("olmoe", json!({ "norm_topk_prob": true }), "divided by their sum"),
        ("cohere2", json!({ "sliding_window_pattern": 2 }), "sliding window of block"),
        ("ernie4_5", json!({ "use_bias": true }), "has a bias"),
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
