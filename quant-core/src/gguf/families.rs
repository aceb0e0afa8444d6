//! Families as llama.cpp has them: its name for the architecture, its names for tensors, and what it expects of their
//! values. No such name stands elsewhere.

use crate::model::Activation;

/// A family that llama.cpp computes.
#[derive(Debug)]
pub(super) struct GgufFamily {
    /// The family, as `model::arch` names it.
    pub(super) family: &'static str,
    /// `general.architecture`.
    pub(super) arch: &'static str,
    /// The class that `architectures` of a `config.json` names.
    pub(super) class: &'static str,
    /// Modules of a block, and what they are called in the file.
    pub(super) modules: &'static [&'static [(&'static str, &'static str)]],
    /// Modules of experts: what their names begin with, and the linears of one.
    pub(super) experts: Option<(&'static str, &'static [(&'static str, &'static str)])>,
    /// Whether rotation pairs neighbouring channels, where the checkpoint pairs halves: rows of queries and keys are in
    /// another order.
    pub(super) pairs_neighbours: bool,
    /// What norms have beyond the stored weight.
    pub(super) norm_shift: f32,
    /// Whether it computes sliding windows.
    pub(super) has_windows: bool,
    /// Whether values of models with 80 layers get more bits in some mixtures.
    pub(super) favours_values_of_80_layers: bool,
    /// The function between the linears of an MLP.
    pub(super) activation: Activation,
    /// Of every so many layers, all but one have windows, where it computes them.
    pub(super) window_period: usize,
    /// Which of them has none.
    pub(super) full_layer: usize,
    /// Linears that may have biases, by their names in the file.
    pub(super) biases: &'static [&'static str],
    /// Whether there is no other head than the embedding.
    pub(super) head_is_embedding: bool,
    /// Whether norms subtract the mean, and biases are not left out.
    pub(super) layer_norms: bool,
    /// Whether the file has factors of embeddings, scores, residuals and logits.
    pub(super) multipliers: Multipliers,
    /// Of every so many layers, the last turns no queries and keys.
    pub(super) unturned: Option<usize>,
    /// Whether it may turn a part of each head only.
    pub(super) turns_parts: bool,
    /// Whether the weights of a token's experts are divided by their sum.
    pub(super) normalizes_experts: bool,
    /// Blocks of the model whose scores are scaled otherwise, if there is one.
    pub(super) layers_of_largest: Option<u64>,
}

/// Which factors a file of a family may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Multipliers {
    None,
    /// Of logits: they are multiplied by it.
    Logits,
    /// Of embeddings, scores and residuals; and what logits are divided by.
    All,
}

const ATTENTION: &[(&str, &str)] = &[
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
];
const HEAD_NORMS: &[(&str, &str)] =
    &[("self_attn.q_norm", "attn_q_norm"), ("self_attn.k_norm", "attn_k_norm")];
const MLP: &[(&str, &str)] =
    &[("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down")];
const PRE: &[(&str, &str)] = &[("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")];
const SANDWICH: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// As Llama's second norm, under another name.
const PRE_ATTENTION_NORM: &[(&str, &str)] =
    &[("input_layernorm", "attn_norm"), ("post_attention_layernorm", "post_attention_norm")];
const POST: &[(&str, &str)] =
    &[("post_attention_layernorm", "post_attention_norm"), ("post_feedforward_layernorm", "post_ffw_norm")];
const GLM_SANDWICH: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("post_self_attn_layernorm", "post_attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("post_mlp_layernorm", "post_ffw_norm"),
];
const FUSED_ATTENTION: &[(&str, &str)] =
    &[("self_attn.qkv_proj", "attn_qkv"), ("self_attn.o_proj", "attn_output")];
const FUSED_MLP: &[(&str, &str)] = &[("mlp.gate_up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down")];
const QWEN_EXPERTS: (&str, &[(&str, &str)]) = (
    "mlp.experts",
    &[("gate_proj", "ffn_gate_exps"), ("up_proj", "ffn_up_exps"), ("down_proj", "ffn_down_exps")],
);

/// Names of tensors outside the blocks.
pub(super) const EMBEDDING: &str = "token_embd.weight";
pub(super) const FINAL_NORM: &str = "output_norm";
pub(super) const HEAD: &str = "output";
/// Divisors of the rotary frequencies.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";
/// Divisors for texts that are no longer than those of the first training, and for longer ones.
pub(super) const ROPE_SHORT: &str = "rope_factors_short.weight";
pub(super) const ROPE_LONG: &str = "rope_factors_long.weight";

const LLAMA: GgufFamily = GgufFamily {
    family: "llama",
    arch: "llama",
    class: "LlamaForCausalLM",
    modules: &[PRE, ATTENTION, MLP],
    experts: None,
    pairs_neighbours: true,
    norm_shift: 0.0,
    has_windows: false,
    favours_values_of_80_layers: true,
    activation: Activation::Silu,
    window_period: 1,
    full_layer: 0,
    biases: &["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"],
    head_is_embedding: false,
    layer_norms: false,
    multipliers: Multipliers::None,
    unturned: None,
    turns_parts: false,
    normalizes_experts: true,
    layers_of_largest: None,
};

/// The families that are written and read. Of several with one `arch`, the first is what a file is read as, unless it
/// has experts.
pub(super) static FAMILIES: &[GgufFamily] = &[
    LLAMA,
    GgufFamily { family: "mistral", class: "MistralForCausalLM", ..LLAMA },
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
        modules: &[
            PRE,
            ATTENTION,
            &[
                ("mlp.gate", "ffn_gate_inp"),
                ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
                ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
                ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
                ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
            ],
        ],
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
        class: "Phi3ForCausalLM",
        modules: &[PRE, FUSED_ATTENTION, FUSED_MLP],
        biases: &[],
        pairs_neighbours: false,
        turns_parts: true,
        favours_values_of_80_layers: false,
        ..LLAMA
    },
    GgufFamily {
        family: "smollm3",
        arch: "smollm3",
        class: "SmolLM3ForCausalLM",
        biases: &[],
        unturned: Some(4),
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
        modules: &[GLM_SANDWICH, ATTENTION, FUSED_MLP],
        biases: &["attn_q", "attn_k", "attn_v"],
        pairs_neighbours: false,
        turns_parts: true,
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
        norm_shift: 1.0,
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
        norm_shift: 1.0,
        has_windows: true,
        activation: Activation::GeluTanh,
        window_period: 6,
        full_layer: 5,
        layers_of_largest: Some(62),
        favours_values_of_80_layers: false,
        ..LLAMA
    },
];

impl GgufFamily {
    /// The name of a module of a block, in the file.
    pub(super) fn module(&self, name: &str) -> Option<&'static str> {
        self.modules.iter().copied().flatten().find(|(known, _)| *known == name).map(|(_, stored)| *stored)
    }

    /// Whether a linear of a block may have a bias.
    pub(super) fn has_bias(&self, linear: &str) -> bool {
        self.module(linear).is_some_and(|stored| self.biases.contains(&stored))
    }

    /// The expert that a module belongs to, and what the tensor that holds the module for all experts is called.
    pub(super) fn expert(&self, name: &str) -> Option<(usize, &'static str)> {
        let (prefix, linears) = self.experts?;
        let (expert, linear) = name.strip_prefix(prefix)?.strip_prefix('.')?.split_once('.')?;
        let stored = linears.iter().find(|(known, _)| *known == linear)?.1;
        Some((expert.parse().ok()?, stored))
    }
}

/// Whether scores are divided by the root of a head's share of the residual stream, not by that of its width: what
/// llama.cpp does for the largest model of a family, which it knows by the number of blocks.
pub(super) fn scales_by_width(family: &GgufFamily, layers: u64) -> bool {
    family.layers_of_largest == Some(layers)
}

/// The entry of one of our families.
pub(super) fn family(name: &str) -> Option<&'static GgufFamily> {
    FAMILIES.iter().find(|f| f.family == name)
}

/// The entry for an architecture of a file.
pub(super) fn architecture(arch: &str, has_experts: bool) -> Option<&'static GgufFamily> {
    FAMILIES.iter().find(|f| f.arch == arch && f.experts.is_some() == has_experts)
}
