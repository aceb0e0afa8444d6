//! Families whose blocks are described by few entries of the table's fields, and older ones.

use super::table::{
    ATTENTION, DEEPSEEK, FUSED_MLP, GLM_ROLES, HEAD_NORMS, MLP, PLAIN, POST, PRE, QWEN_EXPERTS,
    SHARED_EXPERTS,
};
use super::{GgufFamily, How, INDEXER_KEY, INDEXER_WEIGHTS, RoutingKeys};
use crate::model::Activation;

pub(super) const EXAONE4: GgufFamily = GgufFamily {
    family: "exaone4",
    arch: "exaone4",
    class: "Exaone4ForCausalLM",
    modules: &[POST, ATTENTION, HEAD_NORMS, MLP],
    heads_as_wide: true,
    windows_of_blocks: Some(64),
    ..PLAIN
};

/// Blocks without a window do not rotate.
pub(super) const EXAONE4_WINDOWS: GgufFamily =
    GgufFamily { has_windows: true, window_period: 4, full_layer: 3, unrotated: Some(4), ..EXAONE4 };

pub(super) const HY_V3: GgufFamily = GgufFamily {
    family: "hy_v3",
    arch: "hy_v3",
    class: "HYV3ForCausalLM",
    modules: &[
        PRE,
        ATTENTION,
        HEAD_NORMS,
        MLP,
        &[
            ("mlp.router.gate", "ffn_gate_inp"),
            ("mlp.shared_mlp.gate_proj", "ffn_gate_shexp"),
            ("mlp.shared_mlp.up_proj", "ffn_up_shexp"),
            ("mlp.shared_mlp.down_proj", "ffn_down_shexp"),
        ],
    ],
    // Unlike in other architectures, the name has no suffix.
    tensors: &[("mlp.expert_bias", How::Named("exp_probs_b"))],
    experts: Some(QWEN_EXPERTS),
    dense_first: true,
    routing: RoutingKeys::Full,
    ..PLAIN
};

pub(super) const MISTRAL4: GgufFamily = GgufFamily {
    family: "mistral4",
    arch: "mistral4",
    class: "Mistral4ForCausalLM",
    wrappers: &["Mistral3ForConditionalGeneration"],
    tensors: &[DEEPSEEK.tensors[1]],
    softmax_scores: true,
    scales_queries: true,
    ..DEEPSEEK
};

/// An indexer rotates as the model does: llama.cpp expects its rows in the order of the checkpoint.
pub(super) const DEEPSEEK_V32: GgufFamily = GgufFamily {
    family: "deepseek_v32",
    arch: "deepseek32",
    class: "DeepseekV32ForCausalLM",
    modules: &[
        PRE,
        DEEPSEEK.modules[1],
        MLP,
        SHARED_EXPERTS,
        &[
            ("self_attn.indexer.wq_b", "indexer.attn_q_b"),
            (INDEXER_KEY, "indexer.attn_k"),
            ("self_attn.indexer.k_norm", "indexer.k_norm"),
            (INDEXER_WEIGHTS, "indexer.proj"),
        ],
    ],
    ..DEEPSEEK
};

pub(super) const GLM_MOE_DSA: GgufFamily = GgufFamily {
    family: "glm_moe_dsa",
    arch: "glm-dsa",
    class: "GlmMoeDsaForCausalLM",
    roles: GLM_ROLES,
    shares_indexers: true,
    ..DEEPSEEK_V32
};

pub(super) const GLM: GgufFamily = GgufFamily {
    family: "glm",
    arch: "chatglm",
    class: "GlmForCausalLM",
    modules: &[PRE, ATTENTION, FUSED_MLP],
    biases: &["attn_q", "attn_k", "attn_v"],
    partial_rotary: true,
    heads_as_wide: true,
    roles: &[("eos", "<|endoftext|>"), ("unknown", "<|endoftext|>"), ("eot", "<|user|>")],
    ..PLAIN
};

pub(super) const INTERNLM2: GgufFamily = GgufFamily {
    family: "internlm2",
    arch: "internlm2",
    class: "InternLM2ForCausalLM",
    modules: &[&[
        ("attention_norm", "attn_norm"),
        ("attention.wo", "attn_output"),
        ("ffn_norm", "ffn_norm"),
        ("feed_forward.w1", "ffn_gate"),
        ("feed_forward.w3", "ffn_up"),
        ("feed_forward.w2", "ffn_down"),
    ]],
    tensors: &[(
        "attention.wqkv.weight",
        How::SplitByKeyHead(["attn_q.weight", "attn_k.weight", "attn_v.weight"]),
    )],
    pairs_neighbours: true,
    heads_as_wide: true,
    head_is_separate: true,
    ..PLAIN
};

const FOUR_TIMES: &[(&str, &str)] = &[("mlp.dense_h_to_4h", "ffn_up"), ("mlp.dense_4h_to_h", "ffn_down")];

pub(super) const GPT_NEOX: GgufFamily = GgufFamily {
    family: "gpt_neox",
    arch: "gptneox",
    class: "GPTNeoXForCausalLM",
    modules: &[
        PRE,
        &[("attention.query_key_value", "attn_qkv"), ("attention.dense", "attn_output")],
        FOUR_TIMES,
    ],
    tensors: &[
        ("attention.query_key_value.weight", How::JoinedHeads("attn_qkv.weight")),
        ("attention.query_key_value.bias", How::JoinedHeads("attn_qkv.bias")),
    ],
    biases: &["attn_qkv", "attn_output", "ffn_up", "ffn_down"],
    layer_norms: true,
    expected_biases: true,
    activation: Activation::GeluTanh,
    approximates_gelu: true,
    partial_rotary: true,
    head_is_separate: true,
    states_parallel: true,
    ..PLAIN
};

pub(super) const BLOOM: GgufFamily = GgufFamily {
    family: "bloom",
    arch: "bloom",
    class: "BloomForCausalLM",
    modules: &[
        PRE,
        &[("self_attention.query_key_value", "attn_qkv"), ("self_attention.dense", "attn_output")],
        FOUR_TIMES,
    ],
    tensors: &[
        ("self_attention.query_key_value.weight", How::JoinedHeads("attn_qkv.weight")),
        ("self_attention.query_key_value.bias", How::JoinedHeads("attn_qkv.bias")),
    ],
    biases: &["attn_qkv", "attn_output", "ffn_up", "ffn_down"],
    layer_norms: true,
    expected_biases: true,
    activation: Activation::GeluTanh,
    unrotated: Some(1),
    ..PLAIN
};

pub(super) const PHI: GgufFamily = GgufFamily {
    family: "phi",
    arch: "phi2",
    class: "PhiForCausalLM",
    modules: &[
        &[
            ("input_layernorm", "attn_norm"),
            ("self_attn.dense", "attn_output"),
            ("mlp.fc1", "ffn_up"),
            ("mlp.fc2", "ffn_down"),
        ],
        ATTENTION,
    ],
    biases: &["attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"],
    layer_norms: true,
    expected_biases: true,
    activation: Activation::GeluTanh,
    partial_rotary: true,
    heads_as_wide: true,
    head_is_separate: true,
    ..PLAIN
};

pub(super) const LLAMA4: GgufFamily = GgufFamily {
    family: "llama4_text",
    arch: "llama4",
    class: "Llama4ForCausalLM",
    wrappers: &["Llama4ForConditionalGeneration"],
    modules: &[
        PRE,
        ATTENTION,
        &[
            ("feed_forward.gate_proj", "ffn_gate"),
            ("feed_forward.up_proj", "ffn_up"),
            ("feed_forward.down_proj", "ffn_down"),
            ("feed_forward.router", "ffn_gate_inp"),
            ("feed_forward.shared_expert.gate_proj", "ffn_gate_shexp"),
            ("feed_forward.shared_expert.up_proj", "ffn_up_shexp"),
            ("feed_forward.shared_expert.down_proj", "ffn_down_shexp"),
        ],
    ],
    experts: Some(("feed_forward.experts", QWEN_EXPERTS.1)),
    normalizes_experts: false,
    unrotated: Some(4),
    has_chunks: true,
    ..PLAIN
};

pub(super) const GPT2: GgufFamily = GgufFamily {
    family: "gpt2",
    arch: "gpt2",
    class: "GPT2LMHeadModel",
    modules: &[&[
        ("ln_1", "attn_norm"),
        ("attn.c_attn", "attn_qkv"),
        ("attn.c_proj", "attn_output"),
        ("ln_2", "ffn_norm"),
        ("mlp.c_fc", "ffn_up"),
        ("mlp.c_proj", "ffn_down"),
    ]],
    tensors: &[],
    ..BLOOM
};
