//! Text models whose architecture in llama.cpp differs if they are part of a vision-language model.

use super::table::{ATTENTION, HEAD_NORMS, LLAMA, MLP, PLAIN, PRE, QWEN_EXPERTS};
use super::{GgufFamily, Sections};

pub(super) const QWEN2: GgufFamily = GgufFamily {
    family: "qwen2",
    arch: "qwen2vl",
    class: "Qwen2ForCausalLM",
    wrappers: &["Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"],
    stands_alone: false,
    biases: &["attn_q", "attn_k", "attn_v"],
    sections: Some(Sections::Consecutive),
    heads_as_wide: true,
    ignores_eps: true,
    ..PLAIN
};

pub(super) const QWEN3: GgufFamily = GgufFamily {
    family: "qwen3",
    arch: "qwen3vl",
    class: "Qwen3ForCausalLM",
    wrappers: &["Qwen3VLForConditionalGeneration"],
    stands_alone: false,
    modules: &[PRE, ATTENTION, HEAD_NORMS, MLP],
    sections: Some(Sections::Interleaved),
    has_deepstack: true,
    ..PLAIN
};

pub(super) const QWEN3_MOE: GgufFamily = GgufFamily {
    family: "qwen3_moe",
    arch: "qwen3vlmoe",
    class: "Qwen3MoeForCausalLM",
    wrappers: &["Qwen3VLMoeForConditionalGeneration"],
    modules: &[PRE, ATTENTION, HEAD_NORMS, &[("mlp.gate", "ffn_gate_inp")]],
    experts: Some(QWEN_EXPERTS),
    ..QWEN3
};

pub(super) const MISTRAL: GgufFamily = GgufFamily {
    family: "mistral",
    arch: "mistral3",
    class: "MistralForCausalLM",
    wrappers: &["Mistral3ForConditionalGeneration"],
    stands_alone: false,
    biases: &[],
    favours_values_of_80_layers: false,
    ..LLAMA
};

pub(super) const MINISTRAL3: GgufFamily = GgufFamily {
    family: "ministral3",
    class: "Ministral3ForCausalLM",
    stands_alone: true,
    scales_queries: true,
    ..MISTRAL
};
