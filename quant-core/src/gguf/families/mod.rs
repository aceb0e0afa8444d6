//! Families in llama.cpp: its names for architectures and tensors, and what it expects of their values.

mod hybrids;
mod more;
mod table;
mod vision;

use std::collections::BTreeSet;

use crate::model::{Activation, Architecture, Op};
use crate::{Error, Result};

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
    /// The classes of vision-language models whose text model is stored like this.
    pub(super) wrappers: &'static [&'static str],
    /// Whether models of the family that are not in a vision-language model are stored like this.
    pub(super) stands_alone: bool,
    /// How rotated channels are divided among the coordinates of an image, if a key says so.
    pub(super) sections: Option<Sections>,
    /// Whether a key has the number of blocks that add features of an image.
    pub(super) has_deepstack: bool,
    /// The operation that replaces attention in some blocks, or is next to it in all.
    pub(super) mixer: Option<Mixer>,
    /// Whether every block is a single operation after a norm, so that only some blocks have an MLP or experts.
    pub(super) has_single_operations: bool,
    /// Whether all heads together must be as wide as the hidden states.
    pub(super) heads_as_wide: bool,
    /// The number of blocks of the only models that llama.cpp gives sliding windows.
    pub(super) windows_of_blocks: Option<usize>,
    /// Whether the output head must not be tied to the embedding.
    pub(super) head_is_separate: bool,
    /// Whether llama.cpp approximates the GELU of the family's models.
    pub(super) approximates_gelu: bool,
    /// Whether llama.cpp does not read the epsilon of norms.
    pub(super) ignores_eps: bool,
    /// Whether a key says that attention and MLP have the same input.
    pub(super) states_parallel: bool,
    /// Whether blocks attend to chunks of a fixed length, and the weights of experts are factors of their inputs.
    pub(super) has_chunks: bool,
    /// Whether constant factors of the graph are multiplied into the weights.
    pub(super) folds_factors: bool,
    /// Whether a key marks models without RoPE.
    pub(super) may_lack_rope: bool,
    /// Whether queries may be multiplied by a factor that grows with the position.
    pub(super) scales_queries: bool,
    /// The module of the final norm in the file.
    pub(super) final_norm: &'static str,
    /// Whether a key says which blocks have an indexer; the others use the keys that the previous one selected.
    pub(super) shares_indexers: bool,
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
    /// The first half of the rows becomes one tensor, and the second half another one.
    Halves([&'static str; 2]),
    /// Split by key head: queries, keys and values become one tensor each.
    SplitByKeyHead([&'static str; 3]),
    /// Rows of queries, keys and values of each head, which become the rows of all queries, keys and values.
    JoinedHeads(&'static str),
    /// A vector that becomes a matrix with one column.
    Column(&'static str),
    /// As [`Column`](Self::Column), for the logarithms that [`Decays`](Self::Decays) describes.
    DecayColumn(&'static str),
    /// A vector that becomes a matrix with one row per group of a state-space operation.
    Groups(&'static str),
}

/// How rotated channels are divided among the coordinates of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sections {
    /// Each coordinate has consecutive channels.
    Consecutive,
    /// Coordinates take channels in turn.
    Interleaved,
}

/// An operation that carries a state from token to token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mixer {
    /// Mamba 2.
    StateSpace {
        /// The ratio of its width to the hidden size, if llama.cpp supports only one.
        expand: Option<usize>,
        /// Whether llama.cpp requires the norm of its output.
        norm: bool,
    },
    /// A short convolution between two gates.
    ShortConvolution,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RoutingKeys {
    /// No keys, because routing follows from the family.
    Implied,
    /// The function of scores, which is sigmoid.
    Sigmoid,
    /// All keys.
    Full,
    /// All keys. The shared expert counts as one, whatever its width.
    OneShared,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Multipliers {
    None,
    Logits,
    /// Multipliers of embeddings, scores and residuals, and a divisor of logits.
    All,
}

/// The linears of an indexer that compute its keys and the weights of its heads.
pub(super) const INDEXER_KEY: &str = "self_attn.indexer.wk";
pub(super) const INDEXER_WEIGHTS: &str = "self_attn.indexer.weights_proj";
pub(super) const INPUT_TABLE: &str = "per_layer_token_embd.weight";
pub(super) const INPUT_PROJECTION: &str = "per_layer_model_proj.weight";
pub(super) const INPUT_NORM: &str = "per_layer_proj_norm.weight";
pub(super) const EMBEDDING: &str = "token_embd.weight";
pub(super) const POSITIONS: &str = "position_embd.weight";
pub(super) const EMBEDDING_NORM: &str = "token_embd_norm";
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

    /// Whether the file states the factor of routing weights and whether they are divided by their sum.
    pub(super) fn states_routing(&self) -> bool {
        matches!(self.routing, RoutingKeys::Full | RoutingKeys::OneShared)
    }

    /// Whether no block rotates queries and keys.
    pub(super) fn never_rotates(&self) -> bool {
        self.unrotated == Some(1)
    }

    /// Whether an indexer selects the keys of each query.
    pub(super) fn has_indexer(&self) -> bool {
        self.module(INDEXER_KEY).is_some()
    }

    fn holds(&self, a: &Architecture) -> bool {
        let is_held = a.wrapper.as_ref().map(|wrapper| self.wrappers.contains(&wrapper.class));
        self.family == a.family && is_held.unwrap_or(self.stands_alone)
    }

    /// Whether the parts that differ between entries of the same family are those of the model.
    fn has_parts_of(&self, a: &Architecture) -> bool {
        let nodes = || (0..a.layers).flat_map(|layer| a.graph(layer).nodes());
        let has_experts = nodes().any(|node| node.op.routing().is_some());
        let is_mixed = nodes().any(|node| matches!(node.op, Op::Recurrent(_)));
        let has_windows = a.attentions().iter().any(|shape| shape.window.is_some());
        self.experts.is_some() == has_experts
            && self.mixer.is_some() == is_mixed
            && self.has_windows == has_windows
    }
}

/// Whether scores are divided by the square root of `hidden / heads` instead of that of the head's width. llama.cpp
/// recognizes the largest model of a family by the number of blocks.
pub(super) fn scales_by_width(family: &GgufFamily, layers: u64) -> bool {
    family.layers_of_largest == Some(layers)
}

/// The entry for a model, if it can be stored.
pub(super) fn of_model(a: &Architecture) -> Option<&'static GgufFamily> {
    let held = || FAMILIES.iter().filter(|family| family.holds(a));
    held().find(|family| family.has_parts_of(a)).or_else(|| held().next())
}

/// The entry for a model.
///
/// # Errors
/// [`Error::Usage`] if the model cannot be stored.
pub(super) fn require(a: &Architecture) -> Result<&'static GgufFamily> {
    of_model(a).ok_or_else(|| {
        let known: BTreeSet<&str> = FAMILIES.iter().map(|f| f.family).collect();
        let known: Vec<&str> = known.into_iter().collect();
        let reason = table::NOT_WRITTEN.iter().find(|(family, _)| *family == a.family);
        let reason = reason.map_or(String::new(), |(_, reason)| format!(": {reason}"));
        Error::usage(
            format!("this model of the family {} cannot be written as GGUF{reason}", a.family),
            format!(
                "write a different format; supported families, some of them only outside of vision-language \
                models: {}",
                known.join(", ")
            ),
        )
    })
}

/// What a file states about its model, apart from the architecture.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Stated {
    pub(super) has_experts: bool,
    pub(super) has_windows: bool,
    /// `expert_gating_func`.
    pub(super) scores: Option<u64>,
    /// Whether queries are scaled by position.
    pub(super) scales_queries: bool,
}

pub(super) fn architecture(arch: &str, stated: Stated) -> Option<&'static GgufFamily> {
    let Stated { has_experts, has_windows, scores, scales_queries } = stated;
    // Gemma 4 has one entry, with or without experts.
    let is_of = |f: &&GgufFamily| {
        f.arch == arch
            && (f.experts.is_some() == has_experts || f.has_two_kinds)
            && (!scales_queries || f.scales_queries)
    };
    let known: Vec<&GgufFamily> = FAMILIES.iter().filter(is_of).collect();
    let is_softmax = matches!(scores, None | Some(1));
    let agreement = |family: &&GgufFamily| {
        usize::from(family.softmax_scores == is_softmax) + usize::from(family.has_windows == has_windows)
    };
    // The first of several.
    known.into_iter().rev().max_by_key(agreement)
}
