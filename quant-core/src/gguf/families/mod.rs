//! Families in llama.cpp: its names for architectures and tensors, and what it expects of their values.

mod table;

use crate::model::Activation;

pub(super) use table::FAMILIES;

#[derive(Debug)]
pub(super) struct GgufFamily {
    /// The family's name in `model::arch`.
    pub(super) family: &'static str,
    /// `general.architecture`.
    pub(super) arch: &'static str,
    /// The class in `architectures` of `config.json`.
    pub(super) class: &'static str,
    /// Modules of a block, and their names in the file.
    pub(super) modules: &'static [&'static [(&'static str, &'static str)]],
    /// Tensors of a block whose names or rows in the file differ from those of their modules.
    pub(super) tensors: &'static [(&'static str, How)],
    /// The prefix of expert modules, and the linears of an expert.
    pub(super) experts: Option<(&'static str, &'static [(&'static str, &'static str)])>,
    /// Whether llama.cpp rotates pairs of adjacent channels while the checkpoint pairs halves, so that the rows of
    /// queries and keys are reordered.
    pub(super) pairs_neighbours: bool,
    /// Whether llama.cpp supports sliding windows for the family.
    pub(super) has_windows: bool,
    /// Whether values of models with 80 layers get more bits in some mixtures.
    pub(super) favours_values_of_80_layers: bool,
    pub(super) activation: Activation,
    /// With sliding windows, the length of the pattern in layers; one layer of each period has no window.
    pub(super) window_period: usize,
    /// The index of the layer without a window in its period.
    pub(super) full_layer: usize,
    /// Linears that may have biases, by their names in the file.
    pub(super) biases: &'static [&'static str],
    /// Whether the head is always tied to the embedding.
    pub(super) head_is_embedding: bool,
    /// Whether norms subtract the mean.
    pub(super) layer_norms: bool,
    /// Whether all linears in `biases` must have a bias.
    pub(super) expected_biases: bool,
    /// Which multipliers of embeddings, scores, residuals and logits the file has.
    pub(super) multipliers: Multipliers,
    /// The last layer of each period of this length does not rotate queries and keys.
    pub(super) unrotated: Option<usize>,
    /// Whether only a part of each head may be rotated.
    pub(super) partial_rotary: bool,
    /// Whether the weights of a token's experts are divided by their sum.
    pub(super) normalizes_experts: bool,
    /// The number of blocks of the family's largest model, if its scores are scaled differently.
    pub(super) layers_of_largest: Option<u64>,
    /// Whether the value heads of delta nets are reordered.
    pub(super) tiles_heads: bool,
    /// Whether the first blocks may have an MLP instead of experts.
    pub(super) dense_first: bool,
    /// Whether the numbers of key heads and query heads must be equal.
    pub(super) keys_as_wide: bool,
    /// Whether blocks have heads of two kinds (Gemma 4).
    pub(super) has_two_kinds: bool,
    /// Whether the output of attention is multiplied by a gate.
    pub(super) gates_attention: bool,
    /// Whether blocks with sliding windows rotate by unscaled frequencies with the base of the other blocks.
    pub(super) unscaled_windows: bool,
    /// Whether a key says that every block after the first ones has experts.
    pub(super) has_expert_step: bool,
    /// Which keys describe routing, in addition to the numbers of experts.
    pub(super) routing: RoutingKeys,
    /// Among families with the same `arch`: whether this one scores experts by softmax rather than sigmoid. A file that
    /// does not state the function is read as softmax if a family has it.
    pub(super) softmax_scores: bool,
    /// Whether files contain rotation divisors for short and for long texts.
    pub(super) has_long_rope: bool,
    /// Whether the class scales rotary frequencies by default, so that unscaled ones must be requested explicitly.
    pub(super) scales_rope_unasked: bool,
    /// Whether a vision-language model with this text model, apart from its vision part, is stored like the text model
    /// alone.
    pub(super) is_text_of_larger: bool,
    /// Whether a BPE with `▁` for spaces is stored with its merges, rather than with scores.
    pub(super) keeps_merges: bool,
    /// Tokens whose roles in the file follow from their texts unless the tokenizer's settings state others: the role,
    /// and the text.
    pub(super) roles: &'static [(&'static str, &'static str)],
}

/// How a tensor is written, with its names in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// The rows are unchanged; only the name differs.
    Named(&'static str),
    /// The rows belong to value heads of a delta net, which are reordered if [`GgufFamily::tiles_heads`] is set.
    Heads(&'static str),
    /// As [`Heads`](Self::Heads), but queries and keys come before the value heads and keep their order.
    Mixed(&'static str),
    /// As [`Heads`](Self::Heads), for columns instead of rows.
    OfHeads(&'static str),
    /// A logarithm per value head, `x`, is stored as `−eˣ`.
    Decays(&'static str),
    /// Split by key head: queries, keys and values become one tensor, and their gates another one.
    ByKeyHead([&'static str; 2]),
    /// Split for latent attention: the rows of keys, transposed, become one tensor, and the rows of values another one.
    Latent([&'static str; 2]),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RoutingKeys {
    /// No keys, because routing follows from the family.
    Implied,
    /// The function of scores, which is sigmoid.
    Sigmoid,
    /// All keys.
    Full,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Multipliers {
    None,
    Logits,
    /// Multipliers of embeddings, scores and residuals, and a divisor of logits.
    All,
}

pub(super) const INPUT_TABLE: &str = "per_layer_token_embd.weight";
pub(super) const INPUT_PROJECTION: &str = "per_layer_model_proj.weight";
pub(super) const INPUT_NORM: &str = "per_layer_proj_norm.weight";
pub(super) const EMBEDDING: &str = "token_embd.weight";
pub(super) const FINAL_NORM: &str = "output_norm";
pub(super) const HEAD: &str = "output";
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";
/// Frequency divisors for texts up to the original context length, and for longer ones.
pub(super) const ROPE_SHORT: &str = "rope_factors_short.weight";
pub(super) const ROPE_LONG: &str = "rope_factors_long.weight";

impl GgufFamily {
    pub(super) fn module(&self, name: &str) -> Option<&'static str> {
        self.modules.iter().copied().flatten().find(|(known, _)| *known == name).map(|(_, stored)| *stored)
    }

    pub(super) fn has_bias(&self, linear: &str) -> bool {
        let stored = self.module(linear).or_else(|| self.expert(linear).map(|(_, stored)| stored));
        stored.is_some_and(|stored| self.biases.contains(&stored))
    }

    pub(super) fn expert(&self, name: &str) -> Option<(usize, &'static str)> {
        let (prefix, linears) = self.experts?;
        let (expert, linear) = name.strip_prefix(prefix)?.strip_prefix('.')?.split_once('.')?;
        let stored = linears.iter().find(|(known, _)| *known == linear)?.1;
        Some((expert.parse().ok()?, stored))
    }
}

/// Whether scores are divided by the square root of `hidden / heads` instead of that of the head's width. llama.cpp
/// recognizes the largest model of a family by the number of blocks.
pub(super) fn scales_by_width(family: &GgufFamily, layers: u64) -> bool {
    family.layers_of_largest == Some(layers)
}

pub(super) fn family(name: &str) -> Option<&'static GgufFamily> {
    FAMILIES.iter().find(|f| f.family == name)
}

/// `scores` is the file's `expert_gating_func`.
pub(super) fn architecture(
    arch: &str,
    has_experts: bool,
    has_windows: bool,
    scores: Option<u64>,
) -> Option<&'static GgufFamily> {
    // OLMo 3 is OLMo 2 with sliding windows.
    let windowed = FAMILIES.iter().find(|f| f.arch == arch && f.unscaled_windows && has_windows);
    if windowed.is_some() {
        return windowed;
    }
    // Gemma 4 has one entry, with or without experts.
    let is_of = |f: &&GgufFamily| f.arch == arch && (f.experts.is_some() == has_experts || f.has_two_kinds);
    let mut known = FAMILIES.iter().filter(is_of);
    let is_softmax = matches!(scores, None | Some(1));
    known.clone().find(|family| family.softmax_scores == is_softmax).or_else(|| known.next())
}
