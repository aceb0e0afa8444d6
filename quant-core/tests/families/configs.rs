//! A configuration of every family with all its distinguishing features, and random checkpoints for it.

use std::path::Path;
use std::sync::Arc;

use quant_core::checkpoint::{ConfigFields, Dtype, MemorySource};
use quant_core::model::{Architecture, Model, Op, arch};
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::{Map, Value, json};

use crate::common::{model, normal};

/// A family, the expected properties of its graph, and the reason if it cannot be rotated.
pub struct Case {
    pub name: &'static str,
    pub config: Map<String, Value>,
    /// Names of the producers that can be rescaled in each block, in order.
    pub producers: Vec<&'static str>,
    /// Names of the producers that can be rescaled in each of the other distinct blocks, if these differ from the
    /// first.
    pub other_producers: Vec<Vec<&'static str>>,
    /// Whether queries and keys can be scaled against each other.
    pub has_pairs: bool,
    /// Bound on the change of logits by 4-bit rounding, relative to the largest logit.
    pub rounding: f64,
    /// Whether its attention has a feature that the kernels' attention lacks.
    pub unlike_kernels: bool,
    /// Whether rotary frequencies depend on the length of the sequence.
    pub grows: bool,
    /// The longest sequence that a cache rotates as whole windows do, if frequencies depend on the length.
    pub positions: usize,
    /// A part of the message that says why the family cannot be rotated.
    pub not_rotated_for: Option<&'static str>,
}

const LLAMA: [&str; 4] = ["input_layernorm", "self_attn.v_proj", "post_attention_layernorm", "mlp.up_proj"];
const NORMED: &str = "norms with weights, which do not commute";
const UNNORMED: &str = "without a norm";
const EXPERTS: &str = "other than linears read the normalized hidden states";
const MEAN: &str = "subtract the mean";

impl Case {
    fn new(name: &'static str, architecture: &str, changes: Value) -> Self {
        let mut config = json!({
            "architectures": [architecture],
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 80, "max_position_embeddings": 256,
            "tie_word_embeddings": false,
        });
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        Self {
            name,
            config: config.as_object().unwrap().clone(),
            producers: LLAMA.to_vec(),
            other_producers: Vec::new(),
            has_pairs: true,
            rounding: 0.6,
            unlike_kernels: false,
            grows: false,
            positions: usize::MAX,
            not_rotated_for: None,
        }
    }

    pub fn family(&self) -> &'static str {
        self.architecture().family
    }

    /// Names of the producers that can be rescaled in blocks of kind `kind`, an index into the model's distinct block
    /// graphs.
    pub fn producers_of(&self, kind: usize) -> &[&'static str] {
        match kind.checked_sub(1).filter(|_| !self.other_producers.is_empty()) {
            Some(other) => &self.other_producers[other],
            None => &self.producers,
        }
    }

    pub fn has_experts(&self) -> bool {
        let architecture = self.architecture();
        architecture
            .blocks
            .kinds()
            .any(|kind| (0..kind.graph.nodes().len()).any(|node| kind.graph.rows_selected_by(node).is_some()))
    }

    fn architecture(&self) -> Architecture {
        arch::describe(&ConfigFields::new(Path::new("config.json"), &self.config), &MemorySource::new())
            .expect("a supported configuration")
    }

    pub fn vocab(&self) -> usize {
        self.config["vocab_size"].as_u64().unwrap() as usize
    }

    /// Random weights, with norms stored as `norms`.
    pub fn random(&self, norms: Dtype, seed: u64) -> Model {
        let architecture = self.architecture();
        let mut rng = StdRng::seed_from_u64(seed);
        let mut source = MemorySource::new();
        let mut add = |name: String, shape: &[usize], dtype: Dtype, mean: f32, deviation: f32| {
            let values: Vec<f32> =
                (0..shape.iter().product()).map(|_| mean + deviation * normal(&mut rng)).collect();
            let mut shape = shape.to_vec();
            if architecture.is_stored_by_columns(&name) {
                shape.reverse();
            }
            source.insert_f32(&name, dtype, shape, &values).expect("valid names and shapes");
        };
        let mut of_op = |module: String, op: &Op| {
            for parameter in op.parameters() {
                let name = match module.strip_suffix('.').unwrap_or(&module) {
                    within if op.name().is_empty() => format!("{within}.{}", parameter.name),
                    module => format!("{module}.{}", parameter.name),
                };
                let (dtype, mean, deviation) = match (op.is_norm(), parameter.name) {
                    (true, "weight") => (norms, 1.0 - op.weight_offset(), 0.3),
                    (true, _) => (norms, 0.0, 0.3),
                    (false, "weight") => {
                        let width = parameter.shape.last().copied().unwrap_or(1);
                        (Dtype::F32, 0.0, 1.0 / (width as f32).sqrt())
                    }
                    (false, "layer_scalar") => (Dtype::F32, 0.8, 0.1),
                    (false, _) if matches!(op, Op::ScaleBy { .. }) => (Dtype::F32, 1.0, 0.3),
                    // Router corrections are small enough that every expert has tokens.
                    (false, _) if matches!(op, Op::Route(_) | Op::Attention(_)) => (Dtype::F32, 0.0, 0.05),
                    // Decays are slow enough that a state depends on many tokens.
                    (false, "A_log") => (Dtype::F32, -2.5, 0.5),
                    (false, _) => (Dtype::F32, 0.0, 0.3),
                };
                add(name, &parameter.shape, dtype, mean, deviation);
            }
        };
        for layer in 0..architecture.layers {
            for node in architecture.graph(layer).nodes() {
                of_op(architecture.in_block(layer, node.op.name()), &node.op);
            }
        }
        if let Some(norm) = &architecture.final_norm {
            of_op(norm.name().to_owned(), norm);
        }
        if let Some(norm) = &architecture.embedding_norm {
            of_op(norm.name().to_owned(), norm);
        }
        if let Some(inputs) = &architecture.per_layer_inputs {
            of_op(inputs.norm.name().to_owned(), &inputs.norm);
            let features = architecture.layers * inputs.width;
            let deviation = 1.0 / (architecture.hidden as f32).sqrt();
            let shape = [features, architecture.hidden];
            add(format!("{}.weight", inputs.projection), &shape, Dtype::F32, 0.0, deviation);
            add(format!("{}.weight", inputs.table), &[inputs.vocab, features], Dtype::F32, 0.0, 0.3);
        }
        if let Some(positions) = &architecture.learned_positions {
            let shape = [architecture.max_positions + positions.offset, architecture.hidden];
            add(positions.table.clone(), &shape, Dtype::F32, 0.0, 0.5);
        }
        let outer = [architecture.vocab, architecture.hidden];
        add(architecture.embedding.clone(), &outer, Dtype::F32, 0.0, 1.0);
        if !architecture.tied {
            add(format!("{}.weight", architecture.head), &outer, Dtype::F32, 0.0, 0.25);
        }
        if architecture.head_bias {
            add(format!("{}.bias", architecture.head), &outer[..1], Dtype::F32, 0.0, 0.3);
        }
        model(Arc::new(source), &self.config)
    }
}

pub fn cases() -> Vec<Case> {
    let post = || vec!["self_attn.v_proj", "mlp.up_proj"];
    let gemma = || vec!["input_layernorm", "self_attn.v_proj", "pre_feedforward_layernorm", "mlp.up_proj"];
    let shared = || vec!["input_layernorm", "self_attn.v_proj", "mlp.up_proj"];
    let half_fused =
        || vec!["input_layernorm", "self_attn.v_proj", "post_attention_layernorm", "mlp.gate_up_proj"];
    let plain = || vec!["input_layernorm", "self_attn.v_proj", "post_attention_layernorm"];
    // Producers of a block with these many experts, and optionally a shared one.
    const UPS: [&str; 4] =
        ["mlp.experts.0.up_proj", "mlp.experts.1.up_proj", "mlp.experts.2.up_proj", "mlp.experts.3.up_proj"];
    let experts = |count: usize, shared: Option<&'static str>| {
        let block = ["input_layernorm", "self_attn.v_proj", "post_attention_layernorm"];
        block.into_iter().chain(UPS.into_iter().take(count)).chain(shared).collect::<Vec<_>>()
    };
    let llama4 = || {
        let ups = [
            "feed_forward.experts.0.up_proj",
            "feed_forward.experts.1.up_proj",
            "feed_forward.experts.2.up_proj",
        ];
        plain().into_iter().chain(ups).chain(["feed_forward.shared_expert.up_proj"]).collect::<Vec<_>>()
    };
    // Attention and experts read the same norm.
    let averaged = || {
        let block = ["input_layernorm", "self_attn.v_proj"].into_iter().chain(UPS.into_iter().take(3));
        block.chain(["mlp.shared_experts.up_proj"]).collect::<Vec<_>>()
    };
    let in_granite = || {
        let ups = ["block_sparse_moe.experts.0.up_proj", "block_sparse_moe.experts.1.up_proj"];
        plain().into_iter().chain(ups).collect::<Vec<_>>()
    };
    let in_mixtral = || {
        let ups = ["block_sparse_moe.experts.0.w3", "block_sparse_moe.experts.1.w3"];
        plain().into_iter().chain(ups).collect::<Vec<_>>()
    };
    // Producers of a block with latent attention. Values are only some of the rows of each head of `kv_b_proj`, which
    // is not rescaled.
    let latent = |has_query: bool| {
        let attention = if has_query {
            vec!["input_layernorm", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"]
        } else {
            vec!["input_layernorm", "self_attn.kv_a_layernorm"]
        };
        let mlp = ["post_attention_layernorm"].into_iter().chain(UPS).chain(["mlp.shared_experts.up_proj"]);
        attention.into_iter().chain(mlp).collect::<Vec<_>>()
    };
    let deepseek = |more: Value| {
        let mut config = json!({
            "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 8,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2,
            "first_k_dense_replace": 0,
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    // A family with latent attention, compressed queries, and experts in every block.
    let latent_experts = |name, architecture, changes| Case {
        producers: latent(true),
        unlike_kernels: true,
        has_pairs: false,
        not_rotated_for: Some(EXPERTS),
        ..Case::new(name, architecture, changes)
    };
    let yarn = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16 });
    let longrope = json!({
        "rope_type": "longrope", "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    });
    let by_type = json!({
        "full_attention": { "rope_type": "linear", "factor": 2.0, "rope_theta": 5e4 },
        "sliding_attention": { "rope_type": "default", "rope_theta": 5e3 },
    });
    let around =
        |mixer: &'static str| vec!["input_layernorm", mixer, "post_attention_layernorm", "mlp.up_proj"];
    let hybrid_experts = |mixer: &'static str| {
        let block = ["input_layernorm", mixer, "post_attention_layernorm"];
        block
            .into_iter()
            .chain(UPS.into_iter().take(3))
            .chain(["mlp.shared_expert.up_proj"])
            .collect::<Vec<_>>()
    };
    let hybrid = json!({
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.5,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_only_layers": [0, 1, 2],
    });
    let with_experts = |more: Value| {
        let mut config = hybrid.clone();
        let experts = json!({ "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                              "shared_expert_intermediate_size": 64, "mlp_only_layers": [] });
        for changes in [experts, more] {
            config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        }
        config
    };
    let granite = |more: Value| {
        let mut config = json!({
            "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12,
            "mamba_proj_bias": true, "shared_intermediate_size": 64, "attention_multiplier": 0.4,
            "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 2.5,
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    let nemotron = |more: Value| {
        let mut config = json!({
            "layers_block_type": ["linear_attention", "moe", "full_attention"], "mamba_num_heads": 4,
            "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 12, "n_routed_experts": 3,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64,
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    vec![
        Case::new("llama, yarn", "LlamaForCausalLM", json!({ "rope_scaling": yarn })),
        Case {
            grows: true,
            positions: 24,
            ..Case::new(
                "llama, dynamic",
                "LlamaForCausalLM",
                json!({
                    "rope_scaling": { "rope_type": "dynamic", "factor": 2.0 }, "max_position_embeddings": 24,
                }),
            )
        },
        Case::new(
            "smollm3",
            "SmolLM3ForCausalLM",
            json!({ "attention_bias": true, "use_sliding_window": true, "sliding_window": 7,
                    "no_rope_layer_interval": 2 }),
        ),
        Case::new(
            "granite",
            "GraniteForCausalLM",
            json!({ "attention_multiplier": 0.4, "embedding_multiplier": 3.0, "residual_multiplier": 0.6,
                    "logits_scaling": 2.5, "mlp_bias": true }),
        ),
        Case::new(
            "ministral3",
            "Ministral3ForCausalLM",
            json!({ "rope_parameters": { "rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.7,
                                         "original_max_position_embeddings": 8 } }),
        ),
        Case::new("seed_oss", "SeedOssForCausalLM", json!({ "attention_out_bias": true })),
        Case::new("ernie4_5", "Ernie4_5ForCausalLM", json!({ "use_bias": true })),
        Case::new(
            "hunyuan_v1_dense",
            "HunYuanDenseV1ForCausalLM",
            json!({ "rope_scaling": { "type": "dynamic", "factor": 1.0, "alpha": 50.0 } }),
        ),
        Case {
            producers: gemma(),
            unlike_kernels: true,
            not_rotated_for: Some(NORMED),
            ..Case::new(
                "gemma2",
                "Gemma2ForCausalLM",
                json!({ "sliding_window": 7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
                        "query_pre_attn_scalar": 10 }),
            )
        },
        Case {
            producers: gemma(),
            // Head norms with zero-centered weights are not scaled.
            has_pairs: false,
            not_rotated_for: Some(NORMED),
            ..Case::new(
                "gemma3_text",
                "Gemma3ForCausalLM",
                json!({ "sliding_window": 7, "sliding_window_pattern": 2, "rope_parameters": by_type }),
            )
        },
        Case {
            producers: post(),
            not_rotated_for: Some(UNNORMED),
            ..Case::new("olmo2", "Olmo2ForCausalLM", json!({}))
        },
        Case {
            producers: post(),
            not_rotated_for: Some(UNNORMED),
            ..Case::new(
                "olmo3",
                "Olmo3ForCausalLM",
                json!({ "sliding_window": 7, "num_hidden_layers": 4, "rope_parameters": by_type }),
            )
        },
        Case {
            producers: post(),
            not_rotated_for: Some(UNNORMED),
            ..Case::new(
                "exaone4",
                "Exaone4ForCausalLM",
                json!({ "sliding_window": 7, "sliding_window_pattern": 2 }),
            )
        },
        Case { producers: half_fused(), ..Case::new("glm", "GlmForCausalLM", json!({})) },
        Case {
            producers: half_fused(),
            not_rotated_for: Some(NORMED),
            ..Case::new("glm4", "Glm4ForCausalLM", json!({ "partial_rotary_factor": 0.25 }))
        },
        Case {
            producers: vec![
                "input_layernorm",
                "self_attn.qkv_proj",
                "post_attention_layernorm",
                "mlp.gate_up_proj",
            ],
            grows: true,
            positions: 16,
            ..Case::new(
                "phi3",
                "Phi3ForCausalLM",
                json!({ "rope_scaling": longrope, "partial_rotary_factor": 0.75, "sliding_window": 11,
                        "original_max_position_embeddings": 16 }),
            )
        },
        Case {
            producers: vec!["input_layernorm", "self_attn.v_proj"],
            not_rotated_for: Some(MEAN),
            ..Case::new("phi", "PhiForCausalLM", json!({ "qk_layernorm": true }))
        },
        Case {
            producers: shared(),
            not_rotated_for: Some(MEAN),
            ..Case::new("cohere", "CohereForCausalLM", json!({ "attention_bias": true, "logit_scale": 0.3 }))
        },
        Case {
            producers: shared(),
            not_rotated_for: Some(MEAN),
            ..Case::new(
                "cohere2",
                "Cohere2ForCausalLM",
                json!({ "sliding_window": 7, "sliding_window_pattern": 2 }),
            )
        },
        Case {
            producers: vec!["input_layernorm", "post_attention_layernorm"],
            not_rotated_for: Some(MEAN),
            ..Case::new("gpt_neox", "GPTNeoXForCausalLM", json!({ "num_key_value_heads": 4 }))
        },
        Case {
            producers: experts(3, Some("mlp.shared_expert.up_proj")),
            not_rotated_for: Some(EXPERTS),
            ..Case::new(
                "qwen2_moe",
                "Qwen2MoeForCausalLM",
                json!({ "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                        "shared_expert_intermediate_size": 64, "use_sliding_window": true, "sliding_window": 7,
                        "max_window_layers": 2 }),
            )
        },
        Case {
            producers: experts(3, None),
            not_rotated_for: Some(EXPERTS),
            ..Case::new(
                "olmoe",
                "OlmoeForCausalLM",
                json!({ "num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": true }),
            )
        },
        Case {
            producers: experts(4, Some("mlp.shared_experts.up_proj")),
            not_rotated_for: Some(EXPERTS),
            ..Case::new(
                "glm4_moe",
                "Glm4MoeForCausalLM",
                deepseek(
                    json!({ "num_key_value_heads": 2, "use_qk_norm": true, "attention_bias": true, "n_group": 2,
                                 "topk_group": 1, "routed_scaling_factor": 1.5 }),
                ),
            )
        },
        latent_experts(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            deepseek(json!({ "q_lora_rank": 32, "n_group": 2, "topk_group": 1, "attention_bias": true,
                             "rope_scaling": { "type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7,
                                               "original_max_position_embeddings": 16 } })),
        ),
        latent_experts(
            "deepseek_v32",
            "DeepseekV32ForCausalLM",
            deepseek(json!({ "q_lora_rank": 32, "n_group": 2, "topk_group": 2, "attention_bias": true,
                        "index_n_heads": 3, "index_head_dim": 16,
                        "rope_scaling": { "type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7,
                                          "original_max_position_embeddings": 16 } })),
        ),
        latent_experts(
            "glm_moe_dsa",
            "GlmMoeDsaForCausalLM",
            deepseek(json!({ "q_lora_rank": 32, "mlp_layer_types": ["sparse", "sparse", "sparse"],
                             "indexer_types": ["full", "shared", "full"], "index_n_heads": 5, "index_head_dim": 12 })),
        ),
        latent_experts(
            "mistral4",
            "Mistral4ForCausalLM",
            deepseek(json!({ "q_lora_rank": 32, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5,
                             "rope_parameters": { "rope_type": "yarn", "factor": 4.0, "mscale": 1.0,
                                                  "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.3,
                                                  "partial_rotary_factor": 8.0 / 24.0,
                                                  "original_max_position_embeddings": 16 } })),
        ),
        Case {
            producers: llama4(),
            unlike_kernels: true,
            has_pairs: false,
            not_rotated_for: Some(EXPERTS),
            ..Case::new(
                "llama4_text",
                "Llama4ForCausalLM",
                json!({ "num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 32,
                        "attention_chunk_size": 7, "no_rope_layers": [1, 1, 1] }),
            )
        },
        Case {
            producers: llama4(),
            other_producers: vec![
                vec![
                    "input_layernorm",
                    "self_attn.v_proj",
                    "post_attention_layernorm",
                    "feed_forward.up_proj",
                ],
                llama4(),
            ],
            not_rotated_for: Some(EXPERTS),
            ..Case::new(
                "llama4_text, not rotated",
                "Llama4ForCausalLM",
                json!({ "num_local_experts": 3, "num_experts_per_tok": 1, "intermediate_size": 32,
                        "intermediate_size_mlp": 96, "moe_layers": [0, 2], "use_qk_norm": false,
                        "layer_types": ["full_attention", "full_attention", "full_attention"],
                        "no_rope_layers": [1, 1, 0], "floor_scale": 4, "attn_scale": 0.3 }),
            )
        },
        Case {
            producers: in_mixtral(),
            not_rotated_for: Some(MEAN),
            ..Case::new(
                "phimoe",
                "PhimoeForCausalLM",
                json!({ "num_local_experts": 2, "num_experts_per_tok": 2, "intermediate_size": 32,
                        "router_jitter_noise": 0.4, "attention_bias": true, "lm_head_bias": true }),
            )
        },
        Case {
            producers: vec!["input_layernorm", "self_attn.v_proj", "mlp.up_proj"],
            other_producers: vec![averaged(), averaged()],
            not_rotated_for: Some(MEAN),
            ..Case::new(
                "cohere2_moe",
                "Cohere2MoeForCausalLM",
                json!({ "num_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 32, "num_shared_experts": 2,
                        "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 96, "sliding_window": 7,
                        "sliding_window_pattern": 2, "logit_scale": 0.5 }),
            )
        },
        Case {
            producers: vec!["input_layernorm", "self_attn.v_proj", "post_attention_layernorm"],
            unlike_kernels: true,
            not_rotated_for: Some(EXPERTS),
            ..Case::new(
                "gpt_oss",
                "GptOssForCausalLM",
                json!({ "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 7,
                        "swiglu_limit": 1.5 }),
            )
        },
        Case {
            producers: in_mixtral(),
            not_rotated_for: Some(EXPERTS),
            ..Case::new(
                "minimax_m2",
                "MiniMaxM2ForCausalLM",
                json!({ "num_local_experts": 2, "num_experts_per_tok": 1, "rotary_dim": 8 }),
            )
        },
        Case {
            producers: in_granite(),
            not_rotated_for: Some(EXPERTS),
            ..Case::new(
                "granitemoe",
                "GraniteMoeForCausalLM",
                json!({ "num_local_experts": 2, "num_experts_per_tok": 2, "attention_multiplier": 0.3,
                        "residual_multiplier": 0.6 }),
            )
        },
        Case {
            producers: experts(4, Some("mlp.shared_experts.up_proj")),
            not_rotated_for: Some(EXPERTS),
            ..Case::new(
                "ernie4_5_moe",
                "Ernie4_5_MoeForCausalLM",
                json!({ "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2,
                        "moe_layer_start_index": 0 }),
            )
        },
        Case {
            producers: experts(3, Some("mlp.shared_mlp.up_proj")),
            not_rotated_for: Some(EXPERTS),
            ..Case::new(
                "hunyuan_v1_moe",
                "HunYuanMoEV1ForCausalLM",
                json!({ "num_experts": 3, "moe_topk": 2 }),
            )
        },
        Case {
            producers: latent(false),
            unlike_kernels: true,
            has_pairs: false,
            not_rotated_for: Some(EXPERTS),
            ..Case::new(
                "deepseek_v2",
                "DeepseekV2ForCausalLM",
                deepseek(json!({ "q_lora_rank": null, "topk_method": "group_limited_greedy", "n_group": 2,
                                 "topk_group": 1, "routed_scaling_factor": 1.5 })),
            )
        },
        latent_experts(
            "glm4_moe_lite",
            "Glm4MoeLiteForCausalLM",
            deepseek(json!({ "q_lora_rank": 32, "mlp_layer_types": ["sparse", "sparse", "sparse"] })),
        ),
        Case {
            producers: plain(),
            not_rotated_for: Some(MEAN),
            ..Case::new("starcoder2", "Starcoder2ForCausalLM", json!({ "sliding_window": 7 }))
        },
        Case {
            producers: around("linear_attn.norm"),
            other_producers: vec![around("self_attn.v_proj")],
            has_pairs: false,
            rounding: 1.0,
            ..Case::new("qwen3_5_text", "Qwen3_5ForCausalLM", hybrid.clone())
        },
        Case {
            producers: around("linear_attn.norm"),
            other_producers: vec![around("self_attn.v_proj")],
            has_pairs: false,
            // The bound is large because queries and keys are divided by their norms, and errors accumulate in the
            // state.
            rounding: 1.0,
            ..Case::new("qwen3_next", "Qwen3NextForCausalLM", hybrid.clone())
        },
        Case {
            producers: hybrid_experts("linear_attn.norm"),
            // The second block has an MLP.
            other_producers: vec![around("self_attn.v_proj")],
            has_pairs: false,
            rounding: 1.0,
            not_rotated_for: Some(EXPERTS),
            ..Case::new(
                "qwen3_next, experts",
                "Qwen3NextForCausalLM",
                with_experts(json!({ "mlp_only_layers": [1] })),
            )
        },
        Case {
            producers: hybrid_experts("linear_attn.norm"),
            other_producers: vec![hybrid_experts("self_attn.v_proj")],
            has_pairs: false,
            rounding: 1.0,
            not_rotated_for: Some(EXPERTS),
            ..Case::new("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", with_experts(json!({})))
        },
        Case {
            producers: vec!["input_layernorm", "pre_feedforward_layernorm", "mlp.up_proj"],
            not_rotated_for: Some(NORMED),
            ..Case::new(
                "gemma4_text",
                "Gemma4ForCausalLM",
                json!({ "sliding_window": 7, "hidden_size_per_layer_input": 0, "attention_k_eq_v": true,
                        "global_head_dim": 32, "num_global_key_value_heads": 1,
                        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                        "rope_parameters": {
                            "full_attention": { "rope_type": "proportional", "partial_rotary_factor": 0.25 },
                            "sliding_attention": { "rope_type": "default", "rope_theta": 5e3 } } }),
            )
        },
        Case {
            producers: vec!["input_layernorm", "pre_feedforward_layernorm", "mlp.up_proj"],
            not_rotated_for: Some(UNNORMED),
            has_pairs: false,
            ..Case::new(
                "gemma4-small",
                "Gemma4ForCausalLM",
                json!({ "num_hidden_layers": 4, "sliding_window": 7, "hidden_size_per_layer_input": 32,
                        "vocab_size_per_layer_input": 80, "num_kv_shared_layers": 2, "use_double_wide_mlp": true,
                        "global_head_dim": 32,
                        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
                        "rope_parameters": {
                            "full_attention": { "rope_type": "proportional", "partial_rotary_factor": 0.25 },
                            "sliding_attention": { "rope_type": "default", "rope_theta": 5e3 } } }),
            )
        },
        Case {
            producers: ["input_layernorm", "pre_feedforward_layernorm", "mlp.up_proj"]
                .into_iter()
                .chain(UPS.map(|up| up.strip_prefix("mlp.").unwrap_or(up)))
                .collect(),
            not_rotated_for: Some(NORMED),
            ..Case::new(
                "gemma4-experts",
                "Gemma4ForCausalLM",
                json!({ "sliding_window": 7, "hidden_size_per_layer_input": 0, "attention_k_eq_v": true,
                        "global_head_dim": 32, "num_global_key_value_heads": 1, "enable_moe_block": true,
                        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
                        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                        "rope_parameters": {
                            "full_attention": { "rope_type": "proportional", "partial_rotary_factor": 0.25 },
                            "sliding_attention": { "rope_type": "default", "rope_theta": 5e3 } } }),
            )
        },
        Case {
            producers: vec!["input_layernorm", "self_attn.v_proj", "mlp.up_proj"],
            has_pairs: false,
            not_rotated_for: Some(MEAN),
            ..Case::new("cohere, norms", "CohereForCausalLM", json!({ "use_qk_norm": true }))
        },
        Case {
            producers: vec!["attention_norm", "ffn_norm", "feed_forward.w3"],
            ..Case::new("internlm2", "InternLM2ForCausalLM", json!({ "bias": true }))
        },
        Case::new("internlm3", "InternLM3ForCausalLM", json!({ "qkv_bias": true, "bias": false })),
        Case {
            producers: vec!["ln_1", "attn.c_attn", "ln_2"],
            not_rotated_for: Some("learned positions"),
            ..Case::new(
                "gpt2",
                "GPT2LMHeadModel",
                json!({ "scale_attn_by_inverse_layer_idx": true, "n_positions": 512 }),
            )
        },
        Case {
            producers: vec!["input_layernorm", "post_attention_layernorm"],
            unlike_kernels: true,
            not_rotated_for: Some("normalizes the embeddings"),
            ..Case::new("bloom", "BloomForCausalLM", json!({ "num_attention_heads": 8 }))
        },
        Case {
            producers: vec!["input_layernorm", "post_attention_layernorm", "shared_mlp.input_linear"],
            other_producers: vec![vec![
                "input_layernorm",
                "self_attn.v_proj",
                "post_attention_layernorm",
                "shared_mlp.input_linear",
            ]],
            rounding: 1.0,
            ..Case::new(
                "granitemoehybrid",
                "GraniteMoeHybridForCausalLM",
                granite(json!({ "num_local_experts": 0 })),
            )
        },
        Case {
            producers: vec![
                "input_layernorm",
                "post_attention_layernorm",
                "block_sparse_moe.experts.0.up_proj",
                "block_sparse_moe.experts.1.up_proj",
                "shared_mlp.input_linear",
            ],
            other_producers: vec![vec![
                "input_layernorm",
                "self_attn.v_proj",
                "post_attention_layernorm",
                "block_sparse_moe.experts.0.up_proj",
                "block_sparse_moe.experts.1.up_proj",
                "shared_mlp.input_linear",
            ]],
            rounding: 1.0,
            not_rotated_for: Some(EXPERTS),
            ..Case::new(
                "granitemoehybrid, experts",
                "GraniteMoeHybridForCausalLM",
                granite(
                    json!({ "num_local_experts": 2, "num_experts_per_tok": 1, "position_embedding_type": "rope" }),
                ),
            )
        },
        Case {
            producers: experts(3, Some("mlp.shared_mlp.up_proj")),
            not_rotated_for: Some(EXPERTS),
            ..Case::new(
                "hy_v3",
                "HYV3ForCausalLM",
                json!({ "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                        "router_scaling_factor": 1.5, "first_k_dense_replace": 0 }),
            )
        },
        Case {
            producers: vec!["norm"],
            other_producers: vec![
                vec![
                    "norm",
                    "mixer.experts.0.up_proj",
                    "mixer.experts.1.up_proj",
                    "mixer.experts.2.up_proj",
                    "mixer.experts.3.up_proj",
                    "mixer.shared_experts.up_proj",
                ],
                vec!["norm", "mixer.v_proj"],
            ],
            rounding: 1.0,
            not_rotated_for: Some("that are not outputs of linears"),
            ..Case::new(
                "nemotron_h, latent experts",
                "NemotronHForCausalLM",
                nemotron(json!({ "moe_latent_size": 32, "mlp_bias": true, "n_group": 2, "topk_group": 1,
                                 "n_routed_experts": 4, "routed_scaling_factor": 1.5 })),
            )
        },
        Case {
            producers: vec!["norm"],
            other_producers: vec![
                vec![
                    "norm",
                    "mixer.experts.0.up_proj",
                    "mixer.experts.1.up_proj",
                    "mixer.experts.2.up_proj",
                    "mixer.shared_experts.up_proj",
                ],
                vec!["norm", "mixer.v_proj"],
            ],
            rounding: 1.0,
            not_rotated_for: Some(EXPERTS),
            ..Case::new("nemotron_h, experts", "NemotronHForCausalLM", nemotron(json!({})))
        },
        Case {
            producers: vec!["norm"],
            other_producers: vec![vec!["norm", "mixer.up_proj"], vec!["norm", "mixer.v_proj"]],
            rounding: 1.0,
            ..Case::new(
                "nemotron_h",
                "NemotronHForCausalLM",
                json!({ "layers_block_type": ["linear_attention", "mlp", "full_attention"], "mamba_num_heads": 4,
                        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 12, "mlp_bias": true,
                        "time_step_limit": [0.05, { "__float__": "Infinity" }] }),
            )
        },
        Case {
            producers: vec![
                "input_layernorm",
                "self_attn.v_proj",
                "pre_ff_layernorm",
                "feed_forward.up_proj",
            ],
            rounding: 1.0,
            not_rotated_for: Some("that are not outputs of linears"),
            ..Case::new(
                "falcon_h1",
                "FalconH1ForCausalLM",
                json!({ "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2,
                        "mamba_d_state": 12, "mamba_rms_norm": true, "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.9],
                        "ssm_in_multiplier": 0.8, "ssm_out_multiplier": 0.9, "attention_in_multiplier": 1.1,
                        "attention_out_multiplier": 0.8, "key_multiplier": 0.6, "mlp_multipliers": [0.8, 1.3],
                        "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5 }),
            )
        },
        Case {
            producers: vec!["operator_norm", "conv.in_proj", "ffn_norm", "feed_forward.w3"],
            other_producers: vec![
                vec![
                    "operator_norm",
                    "self_attn.v_proj",
                    "ffn_norm",
                    "feed_forward.experts.0.w3",
                    "feed_forward.experts.1.w3",
                ],
                vec![
                    "operator_norm",
                    "conv.in_proj",
                    "ffn_norm",
                    "feed_forward.experts.0.w3",
                    "feed_forward.experts.1.w3",
                ],
            ],
            not_rotated_for: Some(EXPERTS),
            ..Case::new(
                "lfm2_moe",
                "Lfm2MoeForCausalLM",
                json!({ "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 2,
                        "num_experts_per_tok": 1, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5 }),
            )
        },
        Case {
            producers: vec!["operator_norm", "conv.in_proj", "ffn_norm", "feed_forward.w3"],
            other_producers: vec![vec!["operator_norm", "self_attn.v_proj", "ffn_norm", "feed_forward.w3"]],
            ..Case::new(
                "lfm2",
                "Lfm2ForCausalLM",
                json!({ "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32,
                        "intermediate_size": 130 }),
            )
        },
    ]
}
