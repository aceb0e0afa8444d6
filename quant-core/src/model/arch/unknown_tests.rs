//! Tests of [`super`](super): errors for unknown families.

use super::*;
use serde_json::json;

fn of(config: &Value) -> (Option<&'static str>, String) {
    let config = config.as_object().unwrap();
    let found = config["architectures"][0].as_str().unwrap();
    let error = refuse(&ConfigFields::new(std::path::Path::new("config.json"), config), found);
    let message = error.to_string();
    match error {
        Error::UnknownArchitecture { nearest, .. } => (nearest, message),
        other => panic!("{other}"),
    }
}

fn dense(architecture: &str, more: &Value) -> Value {
    let mut config = json!({
        "architectures": [architecture], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

#[test]
fn names_and_fields_find_the_nearest_family() {
    let deepseek = json!({
        "model_type": "deepseek_v321", "n_routed_experts": 256, "n_shared_experts": 1, "kv_lora_rank": 512,
        "topk_method": "noaux_tc", "index_topk": 2048, "hc_mult": 4, "quantization_config": { "quant_method": "fp8" },
    });
    let next = json!({
        "model_type": "qwen3_other", "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": [1],
        "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25, "index_topk": 64,
    });
    let granite = json!({
        "embedding_multiplier": 3.0, "attention_sinks": 4, "use_qk_norm": true, "torch_dtype": "bfloat16",
        "initializer_range": 0.02, "mlp_bias": false,
    });
    for (config, near, expected) in [
        (
            dense("DeepseekV321ForCausalLM", &deepseek),
            "DeepseekV32ForCausalLM",
            &["no supported family has `hc_mult`"][..],
        ),
        (dense("Qwen3OtherForCausalLM", &next), "Qwen3NextForCausalLM", &["`index_topk` is 64"]),
        (
            dense("GraniteNewForCausalLM", &granite),
            "GraniteForCausalLM",
            &[
                "no supported family has `attention_sinks`",
                "`use_qk_norm` is true, which",
                "GraniteForCausalLM does not",
            ],
        ),
        (
            dense("LlamaBitForCausalLM", &json!({})),
            "LlamaForCausalLM",
            &["its configuration shows no difference"],
        ),
        (
            dense("Qwen3BitForCausalLM", &json!({ "hidden_act": "gelu" })),
            "Qwen3ForCausalLM",
            &["`hidden_act` is `gelu`"],
        ),
    ] {
        let (nearest, message) = of(&config);
        assert_eq!(nearest, Some(near), "{message}");
        assert!(message.contains(near) && expected.iter().all(|part| message.contains(part)), "{message}");
    }
}

#[test]
fn nested_text_models_are_examined() {
    let text = dense(
        "-",
        &json!({
            "model_type": "qwen3_9_text", "linear_num_value_heads": 32, "partial_rotary_factor": 0.25, "clip_qkv": 8,
        }),
    );
    let qwen = json!({
        "architectures": ["Qwen3_9ForConditionalGeneration"], "model_type": "qwen3_9", "text_config": text,
    });
    let (nearest, message) = of(&qwen);
    assert_eq!(nearest, Some("Qwen3_5ForCausalLM"), "{message}");
    for part in ["`text_config.clip_qkv` is 8", "Qwen3VLForConditionalGeneration"] {
        assert!(message.contains(part), "{message}");
    }
    assert!(!message.contains("initializer") && !message.contains("gated delta nets"), "{message}");
    let text = dense(
        "-",
        &json!({
            "model_type": "muse_glimmer_text", "attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0],
        }),
    );
    let muse = json!({
        "architectures": ["MuseGlimmerForConditionalGeneration"], "model_type": "muse_glimmer", "text_config": text,
    });
    let (nearest, message) = of(&muse);
    assert_eq!(nearest, Some("Llama4ForCausalLM"), "{message}");
    for part in ["normalized without a weight", "attention is gated", "counted from the last block"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn what_resembles_nothing_has_no_nearest() {
    let (nearest, message) = of(&json!({ "architectures": ["BertModel"], "num_experts": 0 }));
    assert_eq!(nearest, None, "{message}");
    // Strings from the file are escaped, and malformed values are tolerated.
    let hostile = json!({
        "architectures": ["Evil\u{1b}[2J"], "text_config": 7, "num_experts": "many", "kv_lora_rank": [],
        "quantization_config": { "quant_method": "\u{202e}x" },
    });
    let (_, message) = of(&hostile);
    assert!(!message.contains('\u{1b}') && !message.contains('\u{202e}'), "{message}");
}

/// The table in `docs/families.md` says yes for exactly the supported families.
#[test]
fn the_table_of_families_is_right() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/families.md");
    let text = std::fs::read_to_string(path).unwrap();
    let table = text.split("## Other families").nth(1).unwrap().split("\n## ").next().unwrap();
    let rows =
        table.lines().filter(|line| line.starts_with("| `")).filter(|line| !line.contains("| supported |"));
    let rows: Vec<Vec<&str>> = rows.map(|line| line.split('|').map(str::trim).collect()).collect();
    let listed = |supported: bool| -> Vec<&str> {
        let rows = rows.iter().filter(|row| (row[2] != "no") == supported);
        rows.flat_map(|row| row[1].split('`').skip(1).step_by(2)).collect()
    };
    let (yes, no) = (listed(true), listed(false));
    assert!(no.len() > 10, "{no:?}");
    for name in known() {
        assert!(yes.contains(&name) && !no.contains(&name), "{name}");
    }
    assert!(yes.iter().all(|name| known().contains(name)), "{yes:?}");
}

#[test]
fn supported_families_are_not_among_the_unsupported() {
    for (family, _) in FACTS {
        assert!(FAMILIES.iter().all(|known| known.name() != *family), "{family}");
    }
}
