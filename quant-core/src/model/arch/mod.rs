//! Model families as data. All tensor names of the architectures are in this folder.

mod attention_shape;
mod blocks;
mod bloom;
mod cohere;
mod decoder;
mod deepseek;
mod expert_order;
mod experts;
mod experts_variants;
mod falcon_h1;
mod fused_experts;
mod gemma;
mod gemma4;
mod gemma4_experts;
mod glm;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite_hybrid;
mod graph;
mod internlm;
mod latent;
mod lfm2;
mod llama;
mod llama4;
mod llama_variants;
mod mamba;
mod mistral4;
mod mixers;
mod mixtral;
mod multimodal;
mod nemotron_h;
mod olmo;
mod op;
mod opt;
mod parts;
mod phi;
mod phimoe;
mod query_keys;
mod qwen3_next;
mod recurrent;
mod routing;
mod scale_groups;
mod side_values;
mod starcoder2;
mod uncomputed;
mod unknown;
mod unknown_names;
mod windows;

pub use attention_shape::AttentionShape;
pub use blocks::{BlockKind, Blocks};
pub(crate) use expert_order::ExpertOrder;
pub use fused_experts::FusedExperts;
pub use graph::{BlockGraph, FoldGroup, GraphBuilder, Node, NodeId, OrderGroup};
pub(crate) use multimodal::TEXT as TEXT_CONFIG;
pub use multimodal::Wrapper;
pub use op::*;
pub use query_keys::{ProducerRows, QueryKey};
pub use recurrent::{Convolution, DeltaNet, Recurrent, RecurrentKind, StateSpace};
pub use routing::{Correction, Groups, RouterScores, RoutingRule};

use crate::Result;
use crate::checkpoint::{ConfigFields, TensorSource};
use crate::format::FusedLinears;
use crate::model::rope::Rope;

/// Everything the pipeline needs to know about a model's family and sizes.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Architecture {
    /// The family's name: in most families, the `model_type` of the decoder's configuration.
    pub family: &'static str,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Vocabulary size: the rows of the embedding.
    pub vocab: usize,
    /// Number of decoder blocks.
    pub layers: usize,
    /// Maximum number of positions.
    pub max_positions: usize,
    /// The number of keys that an indexer selects for each query, if the family has one. Longer windows are rejected.
    pub selected_keys: Option<usize>,
    /// SmoothQuant's default exponent α for the family; for sources, see `docs/smoothquant.md`.
    pub smoothing: f32,
    /// The learned position embeddings, if the family has them.
    pub learned_positions: Option<LearnedPositions>,
    /// The norm of the embeddings before the first block, with its full name, if there is one.
    pub embedding_norm: Option<Op>,
    /// The factor that embeddings are multiplied by before the first block, if there is one.
    pub embedding_scale: Option<EmbeddingScale>,
    /// The transform from the head's output to logits.
    pub logits: LogitsTransform,
    /// Whether the output head is tied to the embedding.
    pub tied: bool,
    /// Name of the embedding tensor.
    pub embedding: String,
    /// The norm before the head, with its full name, if there is one.
    pub final_norm: Option<Op>,
    /// Module name of the head.
    pub head: String,
    /// An alternative module name that loaders may use for the head. If the head stays float, both names are listed.
    pub head_alias: Option<&'static str>,
    /// The router's name inside a block, and an alternative name that loaders may use for it. If a router stays float,
    /// both names are listed.
    pub router_alias: Option<[&'static str; 2]>,
    /// Whether the head has a bias.
    pub head_bias: bool,
    /// Prefix of a block's tensors, with `{}` for its index.
    pub block_prefix: &'static str,
    /// Prefix of all names except the head's, if checkpoints saved without the head may omit it; else empty.
    pub base: &'static str,
    /// Linears inside a block whose float weights are stored as `[in, out]`.
    pub stored_by_columns: &'static [&'static str],
    /// Linears inside a block that engines fuse into one matrix: the fused name and the parts, in order.
    pub fused: &'static [(&'static str, &'static [&'static str])],
    /// Linears inside a block whose inputs engines multiply by a constant factor; here, the factor follows the linear.
    /// A static scale of such an input would be off by the factor.
    pub multiplied_inputs: Vec<&'static str>,
    /// The model that contains the decoder, if the decoder is only a part.
    pub wrapper: Option<Wrapper>,
    /// The per-layer inputs that are computed from every token before the first block, if the family has them.
    pub per_layer_inputs: Option<PerLayerInputs>,
    /// Tensors that checkpoints may contain but the model does not use, if the family has them.
    pub unread: Option<Unread>,
    /// Number of extra blocks that may follow the last one and predict further tokens. They are copied, not run.
    pub further_blocks: usize,
    /// Name prefix of these extra blocks, if they are not named like the others.
    pub further_module: Option<&'static str>,
    /// The tensors that may hold all experts of a block together, if blocks have experts.
    pub fused_experts: Option<FusedExperts>,
    /// The graph of each block.
    pub blocks: Blocks,
}

/// A factor of the embeddings.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum EmbeddingScale {
    /// Exactly as the configuration gives it.
    Exact(f64),
    /// Rounded to the dtype of the stored embedding: for a width of 3072, Gemma's `√hidden` is 55.5 in bf16.
    Rounded(f64),
}

/// The transform from the head's output to logits: multiplication by `scale`, then `x → c · tanh(x / c)` if there is a
/// soft cap `c`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitsTransform {
    /// The factor.
    pub scale: f32,
    /// The soft cap, if there is one.
    pub softcap: Option<f32>,
}

impl LogitsTransform {
    /// Leaves the head's output unchanged.
    pub const IDENTITY: Self = Self { scale: 1.0, softcap: None };
}

/// A table of position embeddings. The number of its rows limits the number of positions.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LearnedPositions {
    /// Name of the tensor `[offset + positions, hidden]`.
    pub table: String,
    /// The row of position 0.
    pub offset: usize,
}

/// Per-layer inputs, which depend on the token and its embedding `x`. The input of block `i` is part `i` of
/// `(table[token] · √width + norm(projection(x) / √hidden)) / √2`. All terms have `width` features per block, and each
/// block's features are normalized separately.
///
/// In the input of the first block, the per-layer inputs follow the embedding.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct PerLayerInputs {
    /// Features of one block's input.
    pub width: usize,
    /// Rows of the table.
    pub vocab: usize,
    /// Module name of the table `[vocab, layers · width]`; its factor is rounded to the table's dtype.
    pub table: String,
    /// Module name of the projection `[layers · width, hidden]`.
    pub projection: String,
    /// The norm, with its full name.
    pub norm: Op,
}

/// Modules that some blocks do not use, though checkpoints may contain them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unread {
    /// The first of the blocks that do not use them; all later blocks do not use them either.
    pub first: usize,
    /// The names inside the block.
    pub modules: &'static [&'static str],
}

impl Architecture {
    /// Returns the number of features of the input of block `layer`: the hidden states, and in some families further
    /// values. For [`layers`](Self::layers), it is the width of the last block's output.
    pub fn state_width(&self, layer: usize) -> usize {
        match layer < self.layers {
            true => self.graph(layer).width(self.graph(layer).input()),
            false => self.hidden,
        }
    }

    /// Returns whether a tensor is a float weight stored as `[in, out]`, by its name.
    pub fn is_stored_by_columns(&self, tensor: &str) -> bool {
        let Some(layer) = self.layer_of(tensor).filter(|_| !self.stored_by_columns.is_empty()) else {
            return false;
        };
        let prefix = self.in_block(layer, "");
        let module = tensor.strip_prefix(&prefix).and_then(|name| name.strip_suffix(".weight"));
        module.is_some_and(|module| self.stored_by_columns.contains(&module))
    }

    /// Returns whether the model does not use a tensor, by its name.
    pub fn is_unread(&self, tensor: &str) -> bool {
        let Some(unread) = self.unread else { return false };
        let within = |layer: usize| tensor.strip_prefix(&self.in_block(layer, "")).map(str::to_owned);
        let name = self.layer_of(tensor).filter(|layer| *layer >= unread.first).and_then(within);
        let of = |module: &&str| {
            name.as_ref().is_some_and(|n| n.strip_prefix(*module).is_some_and(|n| n.starts_with('.')))
        };
        unread.modules.iter().any(of)
    }

    /// Returns the graph of block `layer`.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn graph(&self, layer: usize) -> &BlockGraph {
        self.blocks.graph(layer)
    }

    /// Returns the distinct attention shapes of all blocks, in order of their first layers.
    pub fn attentions(&self) -> Vec<AttentionShape> {
        let mut shapes: Vec<AttentionShape> = Vec::new();
        for shape in self.blocks.kinds().flat_map(|kind| kind.graph.attentions()) {
            if !shapes.contains(&shape) {
                shapes.push(shape);
            }
        }
        shapes
    }

    /// Returns the rotary embeddings of all blocks.
    pub fn ropes(&self) -> impl Iterator<Item = &Rope> {
        self.blocks.kinds().flat_map(|kind| kind.graph.nodes()).filter_map(|node| match node.op.computes() {
            Computes::Rotation(rope) => Some(rope),
            _ => None,
        })
    }

    /// Returns whether engines multiply the input of a linear by a factor, by its name.
    pub fn has_multiplied_input(&self, module: &str) -> bool {
        let Some(layer) = self.layer_of(module).filter(|_| !self.multiplied_inputs.is_empty()) else {
            return false;
        };
        self.multiplied_inputs.iter().any(|name| self.in_block(layer, name) == module)
    }

    /// Returns the full name of a module or tensor of block `index`, from its name inside the block.
    pub fn in_block(&self, index: usize, name: &str) -> String {
        format!("{}{name}", self.block_prefix.replace("{}", &index.to_string()))
    }

    /// Returns the modules that loaders may name differently, with their alternative names.
    pub fn aliases(&self) -> Vec<(String, String)> {
        let routers = self.router_alias.into_iter().flat_map(|names| {
            (0..self.layers).map(move |layer| names.map(|name| self.in_block(layer, name)).into())
        });
        let head = self.head_alias.map(|alias| (self.head.clone(), alias.to_owned()));
        routers.chain(head).collect()
    }

    /// Returns the module name of the embedding.
    pub fn embedding_module(&self) -> String {
        self.embedding.strip_suffix(".weight").unwrap_or(&self.embedding).to_owned()
    }

    /// Returns the linears that engines fuse in all blocks, in model order: those of which a block has at least two
    /// parts. A block whose keys are also its values has no linear for the values, but engines fuse three parts there
    /// too.
    pub fn fused_modules(&self) -> Vec<FusedLinears> {
        let of_layer = |layer: usize| {
            let has = move |part: &&str| self.graph(layer).linears().any(|(_, name, ..)| name == *part);
            self.fused.iter().filter_map(move |(name, parts)| {
                let (parts, absent): (Vec<&str>, Vec<&str>) = parts.iter().copied().partition(has);
                let full = |names: Vec<&str>| names.iter().map(|name| self.in_block(layer, name)).collect();
                (parts.len() > 1).then(|| FusedLinears {
                    name: self.in_block(layer, name),
                    parts: full(parts),
                    absent: full(absent),
                })
            })
        };
        (0..self.layers).flat_map(of_layer).collect()
    }

    /// Returns whether a tensor is named like part of a block, whether or not the block exists.
    pub fn is_in_some_block(&self, tensor: &str) -> bool {
        self.block_prefix.split_once("{}").is_some_and(|(before, _)| tensor.starts_with(before))
    }

    /// Returns the block that a tensor belongs to, by its name.
    pub fn layer_of(&self, tensor: &str) -> Option<usize> {
        self.index_of(tensor).filter(|index| *index < self.layers)
    }

    /// Returns whether a tensor belongs to one of the [further blocks](Self::further_blocks), by its name.
    pub fn is_in_further_block(&self, tensor: &str) -> bool {
        if self.further_module.is_some_and(|module| tensor.starts_with(module)) {
            return true;
        }
        let further = self.layers..self.layers.saturating_add(self.further_blocks);
        self.index_of(tensor).is_some_and(|index| further.contains(&index))
    }

    fn index_of(&self, tensor: &str) -> Option<usize> {
        Some(self.inside_block(tensor)?.0)
    }

    /// Splits a tensor's name into the index of its block, which may be after the last, and the rest.
    pub(crate) fn inside_block<'a>(&self, tensor: &'a str) -> Option<(usize, &'a str)> {
        let (before, after) = self.block_prefix.split_once("{}")?;
        let (index, inside) = tensor.strip_prefix(before)?.split_once(after)?;
        // `07` and `+7` parse as 7, but are not valid block indices.
        let parsed = index.parse().ok().filter(|i: &usize| i.to_string() == index)?;
        Some((parsed, inside))
    }
}

/// A supported model family.
pub trait Family: Send + Sync {
    /// Returns the family's name.
    fn name(&self) -> &'static str;

    /// Returns the values of `architectures` in `config.json` that denote this family.
    fn architectures(&self) -> &'static [&'static str];

    /// Returns classes of other families under which models of this one may be saved. `model_type` then identifies the
    /// family.
    fn borrowed_classes(&self) -> &'static [&'static str] {
        &[]
    }

    /// Returns whether `model_type` may have this value: by default only the family's name.
    fn has_model_type(&self, model_type: &str) -> bool {
        model_type == self.name()
    }

    /// Returns the architecture that a configuration describes.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field that is missing, malformed, out of range or unsupported.
    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture>;
}

/// The supported families.
pub static FAMILIES: &[&dyn Family] = &[
    &llama::Llama,
    &llama::Mistral,
    &llama::Qwen2,
    &llama::Qwen3,
    &llama_variants::SmolLm3,
    &llama_variants::Granite,
    &llama_variants::Ministral3,
    &llama_variants::SeedOss,
    &llama_variants::Ernie45,
    &llama_variants::HunYuanDenseV1,
    &gemma::Gemma2,
    &gemma::Gemma3Text,
    &gemma4::Gemma4Text,
    &olmo::Olmo2,
    &olmo::Olmo3,
    &olmo::Exaone4,
    &glm::Glm,
    &glm::Glm4,
    &phi::Phi3,
    &phi::Phi,
    &cohere::Cohere,
    &cohere::Cohere2,
    &cohere::Cohere2Moe,
    &starcoder2::Starcoder2,
    &gpt_neox::GptNeoX,
    &lfm2::Lfm2,
    &lfm2::Lfm2Moe,
    &nemotron_h::NemotronH,
    &falcon_h1::FalconH1,
    &qwen3_next::Qwen35,
    &mixtral::Mixtral,
    &mixtral::Qwen3Moe,
    &mixtral::Qwen2Moe,
    &mixtral::Olmoe,
    &qwen3_next::Qwen35Moe,
    &qwen3_next::Qwen3Next,
    &gpt_oss::GptOss,
    &experts_variants::MiniMaxM2,
    &experts_variants::Ernie45Moe,
    &experts_variants::GraniteMoe,
    &experts_variants::HunYuanMoeV1,
    &deepseek::Glm4Moe,
    &deepseek::Glm4MoeLite,
    &deepseek::DeepseekV2,
    &deepseek::DeepseekV3,
    &deepseek::DEEPSEEK_V32,
    &deepseek::GLM_MOE_DSA,
    &mistral4::Mistral4,
    &llama4::Llama4,
    &phimoe::PhiMoe,
    &internlm::InternLm2,
    &internlm::InternLm3,
    &experts_variants::HyV3,
    &granite_hybrid::GraniteMoeHybrid,
    &gpt2::Gpt2,
    &bloom::Bloom,
    &opt::Opt,
];

/// Reads the architecture from a configuration. If the decoder is part of a larger model, its names are taken from
/// `tensors`.
///
/// # Errors
/// [`Error::UnknownArchitecture`](crate::Error::UnknownArchitecture);
/// [`Error::AmbiguousNames`](crate::Error::AmbiguousNames); or as [`Family::describe`].
pub fn describe(config: &ConfigFields<'_>, tensors: &dyn TensorSource) -> Result<Architecture> {
    let found = match config.optional_str_list("architectures")?.as_deref() {
        Some([first, ..]) => *first,
        Some([]) => return Err(config.error("architectures", "is empty")),
        None => return Err(config.error("architectures", "is missing")),
    };
    if let Some(family) = FAMILIES.iter().find(|f| f.architectures().contains(&found)) {
        let model_type = config.optional_str("model_type")?;
        let borrows = |f: &&&dyn Family| {
            f.borrowed_classes().contains(&found) && model_type.is_some_and(|t| f.has_model_type(t))
        };
        if let Some(borrower) = FAMILIES.iter().find(borrows) {
            return borrower.describe(config);
        }
        // Loaders use one or the other; if the two disagree, different loaders would run different models.
        return match model_type {
            Some(kind) if !family.has_model_type(kind) => Err(config.error(
                "model_type",
                format!("is `{kind}`, but `architectures` is `{found}`, which implies `{}`", family.name()),
            )),
            _ => family.describe(config),
        };
    }
    match multimodal::describe(found, config, tensors)? {
        Some(architecture) => Ok(architecture),
        None => Err(unknown::refuse(config, found, tensors)),
    }
}

fn known() -> Vec<&'static str> {
    let families = FAMILIES.iter().flat_map(|family| family.architectures()).copied();
    families.chain(multimodal::classes().map(|(name, _)| name)).collect()
}

/// Returns the names to look up in tables of engine support.
pub fn supported() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|family| family.name()).chain(multimodal::classes().map(|(name, _)| name))
}
