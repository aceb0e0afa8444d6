//! The families, one entry each.

use super::{GgufFamily, How, Multipliers, RoutingKeys, Sections, hybrids, more, vision};
use crate::model::Activation;

pub(super) const ATTENTION: &[(&str, &str)] = &[
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
];
pub(super) const HEAD_NORMS: &[(&str, &str)] =
    &[("self_attn.q_norm", "attn_q_norm"), ("self_attn.k_norm", "attn_k_norm")];
pub(super) const HUNYUAN_NORMS: &[(&str, &str)] =
    &[("self_attn.query_layernorm", "attn_q_norm"), ("self_attn.key_layernorm", "attn_k_norm")];
pub(super) const MLP: &[(&str, &str)] =
    &[("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down")];
pub(super) const PRE: &[(&str, &str)] =
    &[("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")];
pub(super) const SANDWICH: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

pub(super) const PRE_ATTENTION_NORM: &[(&str, &str)] =
    &[("input_layernorm", "attn_norm"), ("post_attention_layernorm", "post_attention_norm")];
pub(super) const POST: &[(&str, &str)] =
    &[("post_attention_layernorm", "post_attention_norm"), ("post_feedforward_layernorm", "post_ffw_norm")];
pub(super) const GLM_SANDWICH: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("post_self_attn_layernorm", "post_attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("post_mlp_layernorm", "post_ffw_norm"),
];
pub(super) const FUSED_ATTENTION: &[(&str, &str)] =
    &[("self_attn.qkv_proj", "attn_qkv"), ("self_attn.o_proj", "attn_output")];
pub(super) const FUSED_MLP: &[(&str, &str)] =
    &[("mlp.gate_up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down")];
pub(super) const QWEN_EXPERTS: (&str, &[(&str, &str)]) = (
    "mlp.experts",
    &[("gate_proj", "ffn_gate_exps"), ("up_proj", "ffn_up_exps"), ("down_proj", "ffn_down_exps")],
);

pub(super) const SHARED_EXPERT: &[(&str, &str)] = &[
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
];
/// A router and one or more shared experts, stored as one.
pub(super) const SHARED_EXPERTS: &[(&str, &str)] = &[
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
];
pub(super) const DELTA_NORM: &[(&str, &str)] = &[("linear_attn.norm", "ssm_norm")];
pub(super) const CORRECTION: (&str, How) =
    ("mlp.gate.e_score_correction_bias", How::Named("exp_probs_b.bias"));

/// The class of vision-language models that takes text models of several families.
const LLAVA: &[&str] = &["LlavaForConditionalGeneration"];

/// A turn of the user ends the answer, and so does an observation.
pub(super) const GLM_ROLES: &[(&str, &str)] =
    &[("bos", "[gMASK]"), ("unknown", "<|endoftext|>"), ("eot", "<|user|>"), ("eom", "<|observation|>")];

pub(super) const LLAMA: GgufFamily = GgufFamily {
    family: "llama",
    arch: "llama",
    class: "LlamaForCausalLM",
    modules: &[PRE, ATTENTION, MLP],
    tensors: &[],
    experts: None,
    pairs_neighbours: true,
    has_windows: false,
    favours_values_of_80_layers: true,
    activation: Activation::Silu,
    window_period: 1,
    full_layer: 0,
    biases: &["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"],
    head_is_embedding: false,
    layer_norms: false,
    expected_biases: false,
    multipliers: Multipliers::None,
    unrotated: None,
    partial_rotary: false,
    normalizes_experts: true,
    layers_of_largest: None,
    tiles_heads: false,
    dense_first: false,
    keys_as_wide: false,
    has_two_kinds: false,
    gates_attention: false,
    unscaled_windows: false,
    has_expert_step: false,
    routing: RoutingKeys::Implied,
    softmax_scores: false,
    has_long_rope: false,
    scales_rope_unasked: false,
    wrappers: &[],
    stands_alone: true,
    sections: None,
    has_deepstack: false,
    mixer: None,
    has_single_operations: false,
    heads_as_wide: false,
    windows_of_blocks: None,
    head_is_separate: false,
    approximates_gelu: false,
    states_parallel: false,
    ignores_eps: false,
    has_chunks: false,
    folds_factors: false,
    may_lack_rope: false,
    scales_queries: false,
    final_norm: "output_norm",
    shares_indexers: false,
    keeps_merges: false,
    roles: &[],
};

/// Families that are not written, and why.
pub(super) const NOT_WRITTEN: [(&str, &str); 3] = [
    ("phimoe", "llama.cpp computes other norms than the model"),
    ("cohere2_moe", "it has not been compared with llama.cpp yet"),
    ("opt", "llama.cpp has no architecture for it"),
];

/// The families that can be written and read. If several have the same `arch`, a file is read as the first one that
/// agrees with its metadata.
pub(in crate::gguf) static FAMILIES: &[GgufFamily] = &[
    GgufFamily { wrappers: LLAVA, ..LLAMA },
    GgufFamily { family: "mistral", class: "MistralForCausalLM", wrappers: LLAVA, ..LLAMA },
    GgufFamily {
        family: "mixtral",
        class: "MixtralForCausalLM",
        modules: &[PRE, ATTENTION, &[("block_sparse_moe.gate", "ffn_gate_inp")]],
        experts: Some((
            "block_sparse_moe.experts",
            &[("w1", "ffn_gate_exps"), ("w3", "ffn_up_exps"), ("w2", "ffn_down_exps")],
        )),
        ..LLAMA
    },
    GgufFamily {
        family: "qwen2",
        arch: "qwen2",
        class: "Qwen2ForCausalLM",
        wrappers: LLAVA,
        biases: &["attn_q", "attn_k", "attn_v"],
        pairs_neighbours: false,
        ..LLAMA
    },
    GgufFamily {
        family: "qwen3",
        arch: "qwen3",
        class: "Qwen3ForCausalLM",
        modules: &[PRE, ATTENTION, HEAD_NORMS, MLP],
        biases: &[],
        pairs_neighbours: false,
        favours_values_of_80_layers: false,
        ..LLAMA
    },
    GgufFamily {
        family: "qwen3_moe",
        arch: "qwen3moe",
        class: "Qwen3MoeForCausalLM",
        modules: &[PRE, ATTENTION, HEAD_NORMS, &[("mlp.gate", "ffn_gate_inp")]],
        experts: Some(QWEN_EXPERTS),
        biases: &[],
        pairs_neighbours: false,
        favours_values_of_80_layers: false,
        ..LLAMA
    },
    GgufFamily {
        family: "qwen2_moe",
        arch: "qwen2moe",
        class: "Qwen2MoeForCausalLM",
        modules: &[PRE, ATTENTION, SHARED_EXPERT],
        experts: Some(QWEN_EXPERTS),
        normalizes_experts: false,
        biases: &["attn_q", "attn_k", "attn_v"],
        pairs_neighbours: false,
        favours_values_of_80_layers: false,
        ..LLAMA
    },
    GgufFamily {
        family: "phi3",
        arch: "phi3",
        has_long_rope: true,
        class: "Phi3ForCausalLM",
        modules: &[PRE, FUSED_ATTENTION, FUSED_MLP],
        biases: &[],
        pairs_neighbours: false,
        partial_rotary: true,
        favours_values_of_80_layers: false,
        ..LLAMA
    },
    GgufFamily {
        family: "smollm3",
        arch: "smollm3",
        class: "SmolLM3ForCausalLM",
        biases: &[],
        unrotated: Some(4),
        favours_values_of_80_layers: false,
        ..LLAMA
    },
    GgufFamily {
        family: "granite",
        arch: "granite",
        class: "GraniteForCausalLM",
        multipliers: Multipliers::All,
        favours_values_of_80_layers: false,
        ..LLAMA
    },
    GgufFamily {
        family: "glm4",
        arch: "glm4",
        class: "Glm4ForCausalLM",
        roles: &[
            ("bos", "<|endoftext|>"),
            ("eos", "<|endoftext|>"),
            ("unknown", "<|endoftext|>"),
            ("eot", "<|user|>"),
        ],
        modules: &[GLM_SANDWICH, ATTENTION, FUSED_MLP],
        biases: &["attn_q", "attn_k", "attn_v"],
        pairs_neighbours: false,
        partial_rotary: true,
        favours_values_of_80_layers: false,
        ..LLAMA
    },
    GgufFamily {
        family: "olmo2",
        arch: "olmo2",
        class: "Olmo2ForCausalLM",
        modules: &[POST, ATTENTION, HEAD_NORMS, MLP],
        biases: &[],
        pairs_neighbours: false,
        favours_values_of_80_layers: false,
        ..LLAMA
    },
    GgufFamily {
        family: "olmo3",
        arch: "olmo2",
        class: "Olmo3ForCausalLM",
        modules: &[POST, ATTENTION, HEAD_NORMS, MLP],
        has_windows: true,
        window_period: 4,
        full_layer: 3,
        unscaled_windows: true,
        ..PLAIN
    },
    GgufFamily {
        family: "seed_oss",
        arch: "seed_oss",
        class: "SeedOssForCausalLM",
        modules: &[PRE_ATTENTION_NORM, ATTENTION, MLP],
        biases: &["attn_q", "attn_k", "attn_v"],
        pairs_neighbours: false,
        favours_values_of_80_layers: false,
        ..LLAMA
    },
    GgufFamily {
        family: "cohere",
        arch: "command-r",
        class: "CohereForCausalLM",
        modules: &[&[("input_layernorm", "attn_norm")], ATTENTION, MLP],
        biases: &[],
        pairs_neighbours: false,
        layer_norms: true,
        expected_biases: true,
        multipliers: Multipliers::Logits,
        head_is_embedding: true,
        favours_values_of_80_layers: false,
        ..LLAMA
    },
    GgufFamily {
        family: "starcoder2",
        arch: "starcoder2",
        class: "Starcoder2ForCausalLM",
        modules: &[PRE, ATTENTION, &[("mlp.c_fc", "ffn_up"), ("mlp.c_proj", "ffn_down")]],
        biases: &["attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"],
        pairs_neighbours: false,
        layer_norms: true,
        expected_biases: true,
        activation: Activation::GeluTanh,
        favours_values_of_80_layers: false,
        ..LLAMA
    },
    GgufFamily {
        family: "gemma2",
        arch: "gemma2",
        class: "Gemma2ForCausalLM",
        modules: &[SANDWICH, ATTENTION, MLP],
        biases: &[],
        pairs_neighbours: false,
        has_windows: true,
        activation: Activation::GeluTanh,
        window_period: 2,
        full_layer: 1,
        head_is_embedding: true,
        layers_of_largest: Some(46),
        favours_values_of_80_layers: false,
        ..LLAMA
    },
    GgufFamily {
        family: "gemma3_text",
        arch: "gemma3",
        class: "Gemma3ForCausalLM",
        modules: &[SANDWICH, ATTENTION, HEAD_NORMS, MLP],
        biases: &[],
        pairs_neighbours: false,
        has_windows: true,
        activation: Activation::GeluTanh,
        window_period: 6,
        full_layer: 5,
        layers_of_largest: Some(62),
        favours_values_of_80_layers: false,
        wrappers: &["Gemma3ForConditionalGeneration"],
        ..LLAMA
    },
    GgufFamily {
        family: "gpt_oss",
        scales_rope_unasked: true,
        arch: "gpt-oss",
        class: "GptOssForCausalLM",
        modules: &[PRE_ATTENTION_NORM, ATTENTION, &[("mlp.router", "ffn_gate_inp")]],
        tensors: &[("self_attn.sinks", How::Named("attn_sinks.weight"))],
        experts: Some(QWEN_EXPERTS),
        biases: &[
            "attn_q",
            "attn_k",
            "attn_v",
            "attn_output",
            "ffn_gate_inp",
            "ffn_gate_exps",
            "ffn_up_exps",
            "ffn_down_exps",
        ],
        expected_biases: true,
        has_windows: true,
        window_period: 2,
        full_layer: 1,
        ..PLAIN
    },
    GgufFamily {
        family: "qwen3_5_text",
        arch: "qwen35",
        class: "Qwen3_5ForCausalLM",
        wrappers: &["Qwen3_5ForConditionalGeneration"],
        modules: &[PRE_ATTENTION_NORM, ATTENTION, HEAD_NORMS, MLP, DELTA_NORM],
        ..QWEN_DELTA
    },
    GgufFamily {
        family: "qwen3_5_moe_text",
        arch: "qwen35moe",
        class: "Qwen3_5MoeForCausalLM",
        wrappers: &["Qwen3_5MoeForConditionalGeneration"],
        modules: &[PRE_ATTENTION_NORM, ATTENTION, HEAD_NORMS, SHARED_EXPERT, DELTA_NORM],
        experts: Some(QWEN_EXPERTS),
        ..QWEN_DELTA
    },
    GgufFamily {
        family: "qwen3_next",
        arch: "qwen3next",
        class: "Qwen3NextForCausalLM",
        modules: &[PRE_ATTENTION_NORM, ATTENTION, HEAD_NORMS, SHARED_EXPERT, DELTA_NORM],
        tensors: &[
            ("linear_attn.in_proj_qkvz.weight", How::ByKeyHead(["attn_qkv.weight", "attn_gate.weight"])),
            ("linear_attn.in_proj_ba.weight", How::Named("ssm_ba.weight")),
            ("linear_attn.conv1d.weight", How::Named("ssm_conv1d.weight")),
            ("linear_attn.A_log", How::Decays("ssm_a")),
            ("linear_attn.dt_bias", How::Named("ssm_dt.bias")),
            ("linear_attn.out_proj.weight", How::Named("ssm_out.weight")),
        ],
        experts: Some(QWEN_EXPERTS),
        tiles_heads: false,
        sections: None,
        ..QWEN_DELTA
    },
    GgufFamily {
        family: "glm4_moe",
        arch: "glm4moe",
        class: "Glm4MoeForCausalLM",
        roles: GLM_ROLES,
        modules: &[PRE_ATTENTION_NORM, ATTENTION, HEAD_NORMS, MLP, SHARED_EXPERTS],
        tensors: &[CORRECTION],
        experts: Some(QWEN_EXPERTS),
        biases: &["attn_q", "attn_k", "attn_v"],
        partial_rotary: true,
        dense_first: true,
        routing: RoutingKeys::Full,
        ..PLAIN
    },
    GgufFamily { family: "deepseek_v3", class: "DeepseekV3ForCausalLM", ..DEEPSEEK },
    GgufFamily { family: "deepseek_v2", class: "DeepseekV2ForCausalLM", softmax_scores: true, ..DEEPSEEK },
    GgufFamily { family: "glm4_moe_lite", class: "Glm4MoeLiteForCausalLM", roles: GLM_ROLES, ..DEEPSEEK },
    GgufFamily {
        family: "olmoe",
        arch: "olmoe",
        class: "OlmoeForCausalLM",
        keys_as_wide: true,
        modules: &[PRE, ATTENTION, HEAD_NORMS, &[("mlp.gate", "ffn_gate_inp")]],
        experts: Some(QWEN_EXPERTS),
        normalizes_experts: false,
        ..PLAIN
    },
    GgufFamily {
        family: "granitemoe",
        arch: "granitemoe",
        class: "GraniteMoeForCausalLM",
        modules: &[PRE, ATTENTION, &[("block_sparse_moe.router.layer", "ffn_gate_inp")]],
        experts: Some((
            "block_sparse_moe.experts",
            &[("gate_proj", "ffn_gate_exps"), ("up_proj", "ffn_up_exps"), ("down_proj", "ffn_down_exps")],
        )),
        multipliers: Multipliers::All,
        pairs_neighbours: true,
        ..PLAIN
    },
    GgufFamily {
        family: "cohere2",
        arch: "cohere2",
        class: "Cohere2ForCausalLM",
        modules: &[&[("input_layernorm", "attn_norm")], ATTENTION, MLP],
        layer_norms: true,
        multipliers: Multipliers::Logits,
        head_is_embedding: true,
        has_windows: true,
        window_period: 4,
        full_layer: 3,
        unrotated: Some(4),
        ..PLAIN
    },
    GgufFamily {
        family: "gemma4_text",
        arch: "gemma4",
        class: "Gemma4ForCausalLM",
        modules: &[
            SANDWICH,
            ATTENTION,
            HEAD_NORMS,
            MLP,
            &[
                ("per_layer_input_gate", "inp_gate"),
                ("per_layer_projection", "proj"),
                ("post_per_layer_input_norm", "post_norm"),
                ("router.proj", "ffn_gate_inp"),
                ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
                ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
                ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
            ],
        ],
        tensors: &[
            ("layer_scalar", How::Named("layer_output_scale.weight")),
            ("router.scale", How::Named("ffn_gate_inp.scale")),
            ("router.per_expert_scale", How::Named("ffn_down_exps.scale")),
        ],
        experts: Some((
            "experts",
            &[("gate_proj", "ffn_gate_exps"), ("up_proj", "ffn_up_exps"), ("down_proj", "ffn_down_exps")],
        )),
        has_windows: true,
        activation: Activation::GeluTanh,
        has_two_kinds: true,
        wrappers: &["Gemma4ForConditionalGeneration"],
        keeps_merges: true,
        ..PLAIN
    },
    GgufFamily { family: "ernie4_5", arch: "ernie4_5", class: "Ernie4_5ForCausalLM", ..PLAIN },
    GgufFamily {
        family: "ernie4_5_moe",
        arch: "ernie4_5-moe",
        class: "Ernie4_5_MoeForCausalLM",
        modules: &[PRE, ATTENTION, MLP, SHARED_EXPERTS],
        tensors: &[("mlp.moe_statics.e_score_correction_bias", How::Named("exp_probs_b.bias"))],
        experts: Some(QWEN_EXPERTS),
        dense_first: true,
        has_expert_step: true,
        routing: RoutingKeys::Full,
        softmax_scores: true,
        ..PLAIN
    },
    GgufFamily {
        family: "minimax_m2",
        arch: "minimax-m2",
        class: "MiniMaxM2ForCausalLM",
        modules: &[PRE, ATTENTION, HEAD_NORMS, &[("block_sparse_moe.gate", "ffn_gate_inp")]],
        tensors: &[("block_sparse_moe.e_score_correction_bias", How::Named("exp_probs_b.bias"))],
        experts: Some((
            "block_sparse_moe.experts",
            &[("w1", "ffn_gate_exps"), ("w3", "ffn_up_exps"), ("w2", "ffn_down_exps")],
        )),
        partial_rotary: true,
        routing: RoutingKeys::Sigmoid,
        ..PLAIN
    },
    GgufFamily {
        family: "hunyuan_v1_dense",
        arch: "hunyuan-dense",
        class: "HunYuanDenseV1ForCausalLM",
        modules: &[PRE, ATTENTION, HUNYUAN_NORMS, MLP],
        biases: &["attn_q", "attn_k", "attn_v"],
        ..PLAIN
    },
    GgufFamily {
        family: "hunyuan_v1_moe",
        arch: "hunyuan-moe",
        class: "HunYuanMoEV1ForCausalLM",
        modules: &[
            PRE,
            ATTENTION,
            HUNYUAN_NORMS,
            &[
                ("mlp.gate.wg", "ffn_gate_inp"),
                ("mlp.shared_mlp.gate_proj", "ffn_gate_shexp"),
                ("mlp.shared_mlp.up_proj", "ffn_up_shexp"),
                ("mlp.shared_mlp.down_proj", "ffn_down_shexp"),
            ],
        ],
        experts: Some(QWEN_EXPERTS),
        biases: &["attn_q", "attn_k", "attn_v"],
        ..PLAIN
    },
    GgufFamily {
        family: "internlm3",
        class: "InternLM3ForCausalLM",
        favours_values_of_80_layers: false,
        ..LLAMA
    },
    vision::QWEN2,
    vision::QWEN3,
    vision::QWEN3_MOE,
    vision::MISTRAL,
    vision::MINISTRAL3,
    hybrids::LFM2,
    hybrids::LFM2_MOE,
    hybrids::GRANITE,
    hybrids::GRANITE_HYBRID,
    hybrids::GRANITE_HYBRID_MOE,
    hybrids::NEMOTRON_H,
    hybrids::NEMOTRON_H_MOE,
    hybrids::FALCON_H1,
    more::EXAONE4,
    more::EXAONE4_WINDOWS,
    more::HY_V3,
    more::MISTRAL4,
    more::DEEPSEEK_V32,
    more::GLM_MOE_DSA,
    more::GLM,
    more::INTERNLM2,
    more::GPT_NEOX,
    more::BLOOM,
    more::PHI,
    more::LLAMA4,
    more::GPT2,
];

pub(super) const PLAIN: GgufFamily =
    GgufFamily { biases: &[], pairs_neighbours: false, favours_values_of_80_layers: false, ..LLAMA };

pub(super) const QWEN_DELTA: GgufFamily = GgufFamily {
    tensors: &[
        ("linear_attn.in_proj_qkv.weight", How::Mixed("attn_qkv.weight")),
        ("linear_attn.in_proj_z.weight", How::Heads("attn_gate.weight")),
        ("linear_attn.in_proj_b.weight", How::Heads("ssm_beta.weight")),
        ("linear_attn.in_proj_a.weight", How::Heads("ssm_alpha.weight")),
        ("linear_attn.conv1d.weight", How::Mixed("ssm_conv1d.weight")),
        ("linear_attn.A_log", How::Decays("ssm_a")),
        ("linear_attn.dt_bias", How::Heads("ssm_dt.bias")),
        ("linear_attn.out_proj.weight", How::OfHeads("ssm_out.weight")),
    ],
    partial_rotary: true,
    tiles_heads: true,
    gates_attention: true,
    sections: Some(Sections::Interleaved),
    ..PLAIN
};

pub(super) const DEEPSEEK: GgufFamily = GgufFamily {
    arch: "deepseek2",
    modules: &[
        PRE,
        &[
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.q_a_proj", "attn_q_a"),
            ("self_attn.q_a_layernorm", "attn_q_a_norm"),
            ("self_attn.q_b_proj", "attn_q_b"),
            ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
            ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
            ("self_attn.o_proj", "attn_output"),
        ],
        MLP,
        SHARED_EXPERTS,
    ],
    tensors: &[
        CORRECTION,
        ("self_attn.kv_b_proj.weight", How::Latent(["attn_k_b.weight", "attn_v_b.weight"])),
    ],
    experts: Some(QWEN_EXPERTS),
    dense_first: true,
    routing: RoutingKeys::Full,
    ..PLAIN
};
