//! Tests of [`super`](super): errors for unknown families.

use super::*;
use crate::checkpoint::{Dtype, MemorySource};
use serde_json::json;

fn of(config: &Value) -> (Option<&'static str>, String) {
    with_tensors(config, &[])
}

/// The error for a model that also has these tensors.
fn with_tensors(config: &Value, names: &[String]) -> (Option<&'static str>, String) {
    let config = config.as_object().unwrap();
    let found = config["architectures"][0].as_str().unwrap();
    let mut tensors = MemorySource::new();
    for name in names {
        tensors.insert(name, Dtype::F32, vec![1], vec![0; 4]).unwrap();
    }
    let error = refuse(&ConfigFields::new(std::path::Path::new("config.json"), config), found, &tensors);
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
            &["; differences:\n  none in its configuration, but its class may"],
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
    assert_eq!(nearest, Some("Qwen3_5ForConditionalGeneration"), "{message}");
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
    assert_eq!(nearest, Some("Llama4ForConditionalGeneration"), "{message}");
    for part in ["normalized without a weight", "attention is gated", "counted from the last block"] {
        assert!(message.contains(part), "{message}");
    }
}

/// The fields of published configurations, without those of the whole model.
fn published(model: &str) -> Value {
    let sizes = json!({
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 96, "hidden_act": "silu", "max_position_embeddings": 4096,
        "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": true, "attention_dropout": 0.0,
    });
    let own = match model {
        "llama" => json!({
            "attention_bias": false, "mlp_bias": false, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
            "rope_scaling": {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024, "rope_type": "llama3"
            },
            "tie_word_embeddings": false,
        }),
        "mistral" => json!({
            "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": null, "tie_word_embeddings": false,
        }),
        "qwen2" => json!({
            "max_window_layers": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 4096,
            "tie_word_embeddings": false, "use_sliding_window": false,
        }),
        "qwen3" => json!({
            "attention_bias": false, "head_dim": 16, "max_window_layers": 2, "rms_norm_eps": 1e-6, "rope_scaling": null,
            "rope_theta": 1e6, "sliding_window": null, "tie_word_embeddings": false, "use_sliding_window": false,
        }),
        "qwen3_moe" => json!({
            "attention_bias": false, "decoder_sparse_step": 1, "head_dim": 16, "max_window_layers": 2, "mlp_only_layers": [],
            "moe_intermediate_size": 32, "norm_topk_prob": true, "num_experts": 8, "num_experts_per_tok": 2,
            "output_router_logits": false, "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": 1e6,
            "router_aux_loss_coef": 0.001, "sliding_window": null, "tie_word_embeddings": false,
            "use_sliding_window": false,
        }),
        "cohere" => json!({
            "attention_bias": false, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "pretraining_tp": 1,
            "rope_theta": 8e6, "use_qk_norm": false,
        }),
        other => panic!("{other}"),
    };
    let mut all = sizes.as_object().unwrap().clone();
    all.extend(own.as_object().unwrap().clone());
    Value::Object(all)
}

/// The configuration of a known family under an unknown name.
fn renamed(model: &str) -> Value {
    let mut config = published(model);
    config["architectures"] = json!(["NovaForCausalLM"]);
    config["model_type"] = json!("nova");
    config
}

#[test]
fn a_configuration_of_llama_is_recognized_by_its_fields() {
    let (nearest, message) = of(&renamed("llama"));
    assert_eq!(nearest, Some("LlamaForCausalLM"), "{message}");
}

/// A key under an older name is no difference if a newer one hides it.
#[test]
fn hidden_older_keys_are_no_difference() {
    let mut both = renamed("llama");
    both["rope_parameters"] = json!({ "rope_theta": 500_000.0, "rope_type": "default" });
    let (nearest, message) = of(&both);
    assert_eq!(nearest, Some("LlamaForCausalLM"), "{message}");
    assert!(!message.contains("rope_theta"), "{message}");
}

/// The names of two blocks with these modules, and of a vision tower.
fn blocks(prefix: &str, modules: &[&str]) -> Vec<String> {
    let of_layer = |layer: usize| {
        modules.iter().map(move |module| match module.ends_with(".bias") {
            true => format!("{prefix}layers.{layer}.{module}"),
            false => format!("{prefix}layers.{layer}.{module}.weight"),
        })
    };
    let tower = (0..4).map(|layer| format!("vision_tower.layers.{layer}.attn.qkv.weight"));
    (0..2).flat_map(of_layer).chain(tower).chain([format!("{prefix}embed_tokens.weight")]).collect()
}

const ATTENTION: [&str; 4] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
const MLP: [&str; 3] = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];
const NORMS: [&str; 2] = ["input_layernorm", "post_attention_layernorm"];

#[test]
fn names_of_tensors_are_listed_as_differences() {
    let plain = renamed("llama");
    let known = [&ATTENTION[..], &MLP, &NORMS].concat();
    let names = |parts: &[&str]| blocks("model.", parts);
    let (nearest, message) = with_tensors(&plain, &names(&known));
    assert_eq!(nearest, Some("LlamaForCausalLM"), "{message}");
    assert!(message.contains("none in its configuration or in the names of its tensors"), "{message}");
    let mut others = known.clone();
    others.retain(|name| *name != "input_layernorm");
    others.push("self_attn.gate");
    let constant = "model.layers.0.self_attn.rotary_emb.inv_freq".to_owned();
    let (nearest, message) = with_tensors(&plain, &[names(&others), vec![constant]].concat());
    assert_eq!(nearest, Some("LlamaForCausalLM"), "{message}");
    for part in [
        "its blocks have `self_attn.gate`, which LlamaForCausalLM does not",
        "its blocks lack `input_layernorm`, which LlamaForCausalLM has",
    ] {
        assert!(message.contains(part), "{message}");
    }
    assert!(!message.contains("rotary_emb"), "{message}");
    // Experts that are stored together are no difference from single ones.
    let single: Vec<String> = ["gate_proj", "up_proj", "down_proj"]
        .iter()
        .flat_map(|linear| (0..2).map(move |e| format!("model.layers.0.mlp.experts.{e}.{linear}.weight")))
        .collect();
    let joined = ["gate_up_proj", "down_proj"].map(|linear| format!("model.layers.0.mlp.experts.{linear}"));
    let of = |names: &[String]| {
        let mut source = MemorySource::new();
        for name in names {
            source.insert(name, Dtype::F32, vec![1], vec![0; 4]).unwrap();
        }
        CheckpointNames::of(&source)
    };
    let family: BlockNames =
        ["gate_proj", "up_proj", "down_proj"].map(|linear| format!("mlp.experts.#.{linear}")).into();
    assert_eq!(of(&single).differences(&family), (vec![], vec![]));
    assert_eq!(of(&joined).differences(&family), (vec![], vec![]));
}

/// Fields that most families have say nothing, but the names of tensors do.
#[test]
fn names_of_tensors_tell_families_apart() {
    let head_norms = ["self_attn.q_norm", "self_attn.k_norm"];
    let biases = ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"];
    let fused = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"];
    let after = ["post_attention_layernorm", "post_feedforward_layernorm"];
    let mut plain = renamed("mistral");
    plain.as_object_mut().unwrap().remove("head_dim");
    for (parts, near) in [
        (vec![&ATTENTION[..], &MLP, &NORMS, &head_norms], "Qwen3ForCausalLM"),
        (vec![&ATTENTION[..], &MLP, &NORMS, &biases], "Qwen2ForCausalLM"),
        (vec![&fused[..], &NORMS], "Phi3ForCausalLM"),
        (vec![&ATTENTION[..], &MLP, &after, &head_norms], "Olmo2ForCausalLM"),
    ] {
        let (nearest, message) = with_tensors(&plain, &blocks("model.", &parts.concat()));
        assert_eq!(nearest, Some(near), "{message}");
    }
    // Parts of a packed weight count as the weight.
    let packed = |module: &str| {
        ["weight_packed", "weight_scale"].map(|part| format!("model.layers.0.{module}.{part}"))
    };
    let mut names: Vec<String> = ATTENTION.iter().chain(&MLP).flat_map(|module| packed(module)).collect();
    names.extend(NORMS.iter().chain(&head_norms).map(|norm| format!("model.layers.0.{norm}.weight")));
    assert_eq!(with_tensors(&plain, &names).0, Some("Qwen3ForCausalLM"));
    // Names from a different kind of model are evidence against all families.
    let foreign = blocks("encoder.", &["attention.self.query", "attention.self.key", "intermediate.dense"]);
    let bare = json!({
        "architectures": ["NovaModel"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 96, "layer_norm_eps": 1e-12, "type_vocab_size": 2,
    });
    assert_eq!(with_tensors(&bare, &foreign).0, None);
}

#[test]
fn text_models_of_containers_are_compared() {
    let around = |found: &str, text: Value, tensors: &[String]| {
        let config = json!({
            "architectures": [found], "model_type": "nova_vl", "image_token_id": 5, "vision_config": { "depth": 4 },
            "text_config": text,
        });
        with_tensors(&config, tensors)
    };
    let mut typed = published("llama");
    typed["model_type"] = json!("llama");
    let qwen = blocks(
        "model.language_model.",
        &[&ATTENTION[..], &MLP, &NORMS, &["self_attn.q_norm", "self_attn.k_norm"]].concat(),
    );
    for (found, text, tensors, near) in [
        ("LlavaNextForConditionalGeneration", typed, &[][..], "LlavaForConditionalGeneration"),
        (
            "LlavaOnevisionForConditionalGeneration",
            published("qwen2"),
            &blocks(
                "language_model.model.",
                &[&ATTENTION[..], &MLP, &NORMS, &["self_attn.q_proj.bias"]].concat(),
            ),
            "LlavaForConditionalGeneration",
        ),
        ("NovaVLForConditionalGeneration", published("qwen3"), &qwen, "Qwen3VLForConditionalGeneration"),
        ("NovaVLForConditionalGeneration", published("qwen3_moe"), &[], "Qwen3VLMoeForConditionalGeneration"),
        // No class with vision has this text model.
        ("NovaVLForConditionalGeneration", published("cohere"), &[], "CohereForCausalLM"),
    ] {
        let (nearest, message) = around(found, text, tensors);
        assert_eq!(nearest, Some(near), "{message}");
        assert!(message.contains("it contains a text model and other parts"), "{message}");
    }
    let next = json!({
        "architectures": ["LlavaNextForConditionalGeneration"], "model_type": "llava_next",
        "image_grid_pinpoints": [[336, 672]], "text_config": published("llama"),
    });
    let (_, message) = of(&next);
    for part in
        ["`image_grid_pinpoints` is set: images are split", "`image_newline`", "as `LlamaForCausalLM`"]
    {
        assert!(message.contains(part), "{message}");
    }
    // Older configurations have the fields of the text model at the top level.
    let mut flat = renamed("qwen2");
    flat["vision_config"] = json!({ "depth": 4 });
    flat["architectures"] = json!(["Qwen2AudioVLForConditionalGeneration"]);
    assert_eq!(of(&flat).0, Some("Qwen2VLForConditionalGeneration"));
}

#[test]
fn what_resembles_nothing_has_no_nearest() {
    let (nearest, message) = of(&json!({ "architectures": ["BertModel"], "num_experts": 0 }));
    assert_eq!(nearest, None, "{message}");
    let sentence = "`BertModel` is not supported:\n  no supported family is similar; the closest is `";
    assert!(message.contains(sentence) && message.contains("`, which requires `"), "{message}");
    // MPT has its own name for every field and tensor.
    let mpt = json!({
        "architectures": ["MPTForCausalLM"], "model_type": "mpt", "attn_config": { "alibi": true }, "d_model": 64,
        "expansion_ratio": 4, "max_seq_len": 2048, "n_heads": 4, "n_layers": 2, "no_bias": true, "vocab_size": 96,
    });
    let names = ["norm_1", "attn.Wqkv", "attn.out_proj", "norm_2", "ffn.up_proj", "ffn.down_proj"];
    let names = names.map(|name| format!("transformer.blocks.0.{name}.weight"));
    let (nearest, message) = with_tensors(&mpt, &names);
    assert_eq!(nearest, None, "{message}");
    for part in
        ["no supported family is similar", "no supported family has `attn_config`, `d_model`", "`attn.Wqkv`"]
    {
        assert!(message.contains(part), "{message}");
    }
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
