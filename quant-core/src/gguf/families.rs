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
    /// Blocks of the model whose scores are scaled otherwise, if there is one.
    pub(super) layers_of_largest: Option<u64>,
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

/// Names of tensors outside the blocks.
pub(super) const EMBEDDING: &str = "token_embd.weight";
pub(super) const FINAL_NORM: &str = "output_norm";
pub(super) const HEAD: &str = "output";
/// Divisors of the rotary frequencies.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";

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
        experts: Some((
            "mlp.experts",
            &[("gate_proj", "ffn_gate_exps"), ("up_proj", "ffn_up_exps"), ("down_proj", "ffn_down_exps")],
        )),
        biases: &[],
        pairs_neighbours: false,
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
