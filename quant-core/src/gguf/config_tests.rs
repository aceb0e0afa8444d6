//! Small configurations of families with special parts, which several tests use.

use std::path::Path;

use serde_json::{Value as Json, json};

use super::file::Value;
use super::{families, metadata};
use crate::Result;
use crate::checkpoint::{ConfigFields, MemorySource};
use crate::model::{Architecture, describe};

pub(super) const YARN: &str =
    r#"{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}"#;

pub(super) fn config(family: &str, changes: Json) -> Json {
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
        "deepseek_v32" => merged(
            latent,
            json!({ "architectures": ["DeepseekV32ForCausalLM"], "n_group": 4, "topk_group": 2, "q_lora_rank": 24,
                    "index_n_heads": 3, "index_head_dim": 16, "index_topk": 128,
                    "rope_parameters": merged(yarn, json!({ "mscale": 1.0, "mscale_all_dim": 1.0 })) }),
        ),
        "glm_moe_dsa" => merged(
            latent,
            json!({ "architectures": ["GlmMoeDsaForCausalLM"], "q_lora_rank": 24, "index_n_heads": 3,
                    "index_head_dim": 16, "index_topk": 128, "indexer_types": ["full", "shared", "full"] }),
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
        other => new_families(other, &yarn, &latent),
    };
    let common = json!({
        "model_type": family, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 512,
    });
    merged(merged(common, own), changes)
}

/// State-space operations with 8 heads in 2 groups, as wide as the hidden size times `expand`.
fn mamba(expand: usize) -> Json {
    json!({
        "mamba_n_heads": 8, "mamba_d_head": 8 * expand, "mamba_n_groups": 2, "mamba_d_state": 16,
        "mamba_d_ssm": 64 * expand, "mamba_expand": expand, "mamba_d_conv": 4,
    })
}

fn new_families(family: &str, yarn: &Json, latent: &Json) -> Json {
    let text = |class: &str, changes: Json| merged(json!({ "architectures": [class] }), changes);
    let nemotron = json!({
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "head_dim": 16,
        "num_hidden_layers": 4,
    });
    let factors = json!({
        "mamba_rms_norm": true, "mamba_norm_before_gate": false, "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.9],
        "ssm_in_multiplier": 0.5, "ssm_out_multiplier": 1.3, "attention_in_multiplier": 1.2,
        "key_multiplier": 0.5, "embedding_multiplier": 2.5, "lm_head_multiplier": 0.4,
        "mlp_multipliers": [0.8, 1.3], "attention_out_multiplier": 0.9,
    });
    match family {
        "lfm2" => text(
            "Lfm2ForCausalLM",
            json!({ "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": false }),
        ),
        "lfm2_moe" => text(
            "Lfm2MoeForCausalLM",
            json!({ "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 4,
                    "num_experts_per_tok": 2, "moe_intermediate_size": 32 }),
        ),
        "granitemoehybrid" => merged(
            text(
                "GraniteMoeHybridForCausalLM",
                json!({ "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0,
                        "shared_intermediate_size": 96, "logits_scaling": 4.0 }),
            ),
            mamba(2),
        ),
        "nemotron_h" => text(
            "NemotronHForCausalLM",
            merged(nemotron, json!({ "layers_block_type": ["mamba", "mlp", "attention", "mamba"] })),
        ),
        "falcon_h1" => merged(text("FalconH1ForCausalLM", factors), mamba(1)),
        "exaone4" => text("Exaone4ForCausalLM", json!({ "sliding_window": null, "head_dim": 16 })),
        "hy_v3" => text(
            "HYV3ForCausalLM",
            json!({ "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16,
                    "router_scaling_factor": 1.5, "num_shared_experts": 2, "first_k_dense_replace": 1 }),
        ),
        "mistral4" => text(
            "Mistral4ForCausalLM",
            merged(
                latent.clone(),
                json!({ "rope_parameters": merged(yarn.clone(), json!({
                    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.25 })) }),
            ),
        ),
        "ministral3" => text(
            "Ministral3ForCausalLM",
            json!({ "head_dim": 16, "rope_parameters": merged(yarn.clone(), json!({
                "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.25 })) }),
        ),
        "glm" => text("GlmForCausalLM", json!({ "head_dim": 16 })),
        "internlm2" => text("InternLM2ForCausalLM", json!({ "bias": false })),
        "gpt_neox" => text("GPTNeoXForCausalLM", json!({ "num_key_value_heads": 4 })),
        "bloom" => text("BloomForCausalLM", json!({ "intermediate_size": 256 })),
        "phi" => text("PhiForCausalLM", json!({})),
        "gpt2" => text("GPT2LMHeadModel", json!({ "n_inner": 96 })),
        "llama4_text" => text(
            "Llama4ForCausalLM",
            json!({ "num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1,
                    "intermediate_size": 32, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2 }),
        ),
        other => panic!("no configuration of {other}"),
    }
}

pub(super) fn merged(mut base: Json, more: Json) -> Json {
    for (key, value) in more.as_object().unwrap() {
        base[key] = value.clone();
    }
    base
}

pub(super) type About = (Architecture, Vec<(String, Value)>, Vec<String>);

pub(super) fn about(config: &Json) -> Result<About> {
    let config = config.as_object().unwrap();
    let a = describe(&ConfigFields::new(Path::new("config.json"), config), &MemorySource::new())?;
    let family = families::of_model(&a).unwrap();
    let about = metadata::metadata(&a, family, config)?;
    Ok((a, about.entries, about.warnings))
}

pub(super) const WITH_PARTS_OF_THEIR_OWN: [&str; 30] = [
    "gpt_oss",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v2",
    "deepseek_v32",
    "glm_moe_dsa",
    "olmoe",
    "granitemoe",
    "cohere2",
    "ernie4_5",
    "gemma4_text",
    "lfm2",
    "lfm2_moe",
    "granitemoehybrid",
    "nemotron_h",
    "falcon_h1",
    "exaone4",
    "hy_v3",
    "mistral4",
    "ministral3",
    "glm",
    "internlm2",
    "gpt_neox",
    "bloom",
    "phi",
    "llama4_text",
    "gpt2",
];

/// Experts of Granite 4 and of Nemotron-H, with the changes that give them.
pub(super) const WITH_EXPERTS: [(&str, &str, &str); 2] = [
    (
        "granitemoehybrid",
        "granitehybrid",
        r#"{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}"#,
    ),
    (
        "nemotron_h",
        "nemotron_h_moe",
        r#"{"layers_block_type": ["mamba", "moe", "attention", "moe"], "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48,
            "moe_latent_size": 24}"#,
    ),
];

/// All configurations: the family and the changes.
pub(super) fn cases() -> Vec<(&'static str, Json)> {
    let plain = WITH_PARTS_OF_THEIR_OWN.map(|name| (name, json!({})));
    let experts = WITH_EXPERTS.map(|(name, _, changes)| (name, serde_json::from_str(changes).unwrap()));
    plain.into_iter().chain(experts).collect()
}
