//! Families as llama.cpp has them: its name for the architecture, its names for tensors, and what it expects of their
//! values. No such name stands elsewhere.

mod table;

use crate::model::Activation;

pub(super) use table::FAMILIES;

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
    /// Tensors of a block whose names or rows in the file are not those of their modules.
    pub(super) tensors: &'static [(&'static str, How)],
    /// Modules of experts: what their names begin with, and the linears of one.
    pub(super) experts: Option<(&'static str, &'static [(&'static str, &'static str)])>,
    /// Whether rotation pairs neighbouring channels, where the checkpoint pairs halves: rows of queries and keys are in
    /// another order.
    pub(super) pairs_neighbours: bool,
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
    /// Whether norms subtract the mean.
    pub(super) layer_norms: bool,
    /// Whether none of these biases may be missing.
    pub(super) biases_due: bool,
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
    /// Whether heads of values of delta nets are not in the checkpoint's order.
    pub(super) tiles_heads: bool,
    /// Whether the first blocks may have an MLP where the others have experts.
    pub(super) dense_first: bool,
    /// Whether there must be as many heads of keys as of queries.
    pub(super) keys_as_wide: bool,
    /// Whether blocks have heads of two kinds (Gemma 4).
    pub(super) has_two_kinds: bool,
    /// Whether what attention puts out is multiplied by a gate.
    pub(super) gates_attention: bool,
    /// What files say of experts beside their number.
    pub(super) routing: RoutingKeys,
    /// Whether experts are scored by softmax, where files say of experts what they are: by sigmoid otherwise.
    pub(super) softmax_scores: bool,
    /// Whether files hold divisors of rotations for short and for long texts.
    pub(super) has_long_rope: bool,
    /// Whether its class scales rotations unless a configuration says that it does not.
    pub(super) scales_rope_unasked: bool,
    /// Whether the file of a vision-language model that holds it is the same but for the vision part.
    pub(super) is_text_of_larger: bool,
}

/// How a tensor goes into the file, by its name there after that of the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// As it is.
    Named(&'static str),
    /// Its rows are those of a delta net's heads of values.
    Heads(&'static str),
    /// Such rows come after those of queries and keys.
    Mixed(&'static str),
    /// Its columns are those of such heads.
    OfHeads(&'static str),
    /// A logarithm of each such head becomes minus what it is the logarithm of.
    Decays(&'static str),
    /// By key heads: queries, keys and values become one tensor, their gates another.
    ByKeyHead([&'static str; 2]),
    /// Of latent attention: rows of keys, transposed, and rows of values.
    Latent([&'static str; 2]),
}

/// What files of a family say of how tokens are routed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RoutingKeys {
    /// Nothing: it follows from the family.
    Implied,
    /// All of it.
    Full,
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

/// The table, the projection and the norm of blocks' own inputs.
pub(super) const INPUT_TABLE: &str = "per_layer_token_embd.weight";
pub(super) const INPUT_PROJECTION: &str = "per_layer_model_proj.weight";
pub(super) const INPUT_NORM: &str = "per_layer_proj_norm.weight";
/// Names of tensors outside the blocks.
pub(super) const EMBEDDING: &str = "token_embd.weight";
pub(super) const FINAL_NORM: &str = "output_norm";
pub(super) const HEAD: &str = "output";
/// Divisors of the rotary frequencies.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";
/// Divisors for texts that are no longer than those of the first training, and for longer ones.
pub(super) const ROPE_SHORT: &str = "rope_factors_short.weight";
pub(super) const ROPE_LONG: &str = "rope_factors_long.weight";

impl GgufFamily {
    /// The name of a module of a block, in the file.
    pub(super) fn module(&self, name: &str) -> Option<&'static str> {
        self.modules.iter().copied().flatten().find(|(known, _)| *known == name).map(|(_, stored)| *stored)
    }

    /// Whether a linear of a block may have a bias.
    pub(super) fn has_bias(&self, linear: &str) -> bool {
        let stored = self.module(linear).or_else(|| self.expert(linear).map(|(_, stored)| stored));
        stored.is_some_and(|stored| self.biases.contains(&stored))
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

/// The entry for an architecture of a file; `scores` is what it says of the scores of experts.
pub(super) fn architecture(
    arch: &str,
    has_experts: bool,
    scores: Option<u64>,
) -> Option<&'static GgufFamily> {
    // Gemma 4 has experts beside its MLP, or has not.
    let is_of = |f: &&GgufFamily| f.arch == arch && (f.experts.is_some() == has_experts || f.has_two_kinds);
    let mut known = FAMILIES.iter().filter(is_of);
    let is_softmax = matches!(scores, None | Some(1));
    known.clone().find(|family| family.softmax_scores == is_softmax).or_else(|| known.next())
}
