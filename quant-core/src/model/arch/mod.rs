//! Families of models as data. No tensor name of an architecture stands outside this folder.

mod attention_shape;
mod beside;
mod blocks;
mod bloom;
mod cohere;
mod decoder;
mod deepseek;
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
mod qwen3_next;
mod recurrent;
mod routing;
mod starcoder2;
mod unknown;
mod windows;

pub use attention_shape::AttentionShape;
pub use blocks::{BlockKind, Blocks};
pub use fused_experts::FusedExperts;
pub use graph::{BlockGraph, FoldGroup, GraphBuilder, Node, NodeId, OrderGroup, QueryKey};
pub(crate) use multimodal::TEXT as TEXT_CONFIG;
pub use multimodal::Wrapper;
pub use op::*;
pub use recurrent::{Convolution, DeltaNet, Recurrent, RecurrentKind, StateSpace};
pub use routing::{Correction, Groups, Routing, Scores};

use crate::Result;
use crate::checkpoint::{ConfigFields, TensorSource};
use crate::format::FusedLinears;
use crate::model::rope::Rope;

/// Everything the pipeline must know of a model's family and sizes.
#[derive(Debug, Clone)]
pub struct Architecture {
    /// The family's name, as users write it.
    pub family: &'static str,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Number of decoder blocks.
    pub layers: usize,
    /// Positions the model was made for.
    pub max_positions: usize,
    /// The exponent α that SmoothQuant takes for the family where nobody says otherwise; `docs/smoothquant.md` has
    /// the sources.
    pub smoothing: f32,
    /// Rows that are added to the embeddings by position, where the family has them. Others rotate queries and keys
    /// inside the blocks.
    pub learned_positions: Option<LearnedPositions>,
    /// The norm of embeddings before the first block, with its whole name, if there is one.
    pub embedding_norm: Option<Op>,
    /// What embeddings are multiplied by before the first block, if by anything.
    pub embedding_scale: Option<EmbeddingScale>,
    /// What becomes of the head's output.
    pub logits: LogitsTransform,
    /// Whether the output head is the embedding.
    pub tied: bool,
    /// Name of the embedding tensor.
    pub embedding: String,
    /// The norm before the head, with its whole name, if there is one.
    pub final_norm: Option<Op>,
    /// Module name of the head.
    pub head: String,
    /// Another module name that readers may have for the head: a head that stays float is named by both.
    pub head_alias: Option<&'static str>,
    /// The router's name inside a block, and another one that readers may have for it: one that stays float is named by
    /// both.
    pub router_alias: Option<[&'static str; 2]>,
    /// Whether the head has a bias.
    pub head_bias: bool,
    /// Prefix of a block's tensors, with `{}` for its index.
    pub block_prefix: &'static str,
    /// What all names but the head's begin with, if checkpoints that were saved without the head may
    /// lack it; else empty.
    pub base: &'static str,
    /// Linears inside a block whose float weights are stored as `[in, out]`. What is quantized is stored as everywhere.
    pub stored_by_columns: &'static [&'static str],
    /// Linears inside a block that engines run as one matrix: the name they give it, and its parts
    /// in order.
    pub fused: &'static [(&'static str, &'static [&'static str])],
    /// The model that the decoder is a part of, if it is not the whole of it.
    pub wrapper: Option<Wrapper>,
    /// What is computed of every token before the first block, for all blocks, where the family has such inputs.
    pub per_layer_inputs: Option<PerLayerInputs>,
    /// Tensors that a checkpoint may hold and that nothing computes with, where the family has such.
    pub unread: Option<Unread>,
    /// Blocks that may follow the last one and predict further tokens. They are copied, and no part of what is run here.
    pub further_blocks: usize,
    /// What the names of such blocks begin with, where they are not named like the others.
    pub further_module: Option<&'static str>,
    /// The tensors that may hold all experts of a block together, where blocks have experts.
    pub fused_experts: Option<FusedExperts>,
    /// The graph of each block.
    pub blocks: Blocks,
}

/// A factor of embeddings.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum EmbeddingScale {
    /// As the configuration has it.
    Exact(f64),
    /// Rounded to the type that the embedding is stored in: Gemma's `√hidden` is 55.5 in bf16 for 3072.
    Rounded(f64),
}

/// The head's output becomes logits: it is multiplied by `scale`, and then, with a soft cap `c`, becomes `c tanh(x / c)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitsTransform {
    /// The factor.
    pub scale: f32,
    /// The bound of logits, if there is one.
    pub softcap: Option<f32>,
}

impl LogitsTransform {
    /// The head's output as it is.
    pub const IDENTITY: Self = Self { scale: 1.0, softcap: None };
}

/// A table of positions: a model has as many positions as the table has rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LearnedPositions {
    /// Name of the tensor `[offset + positions, hidden]`.
    pub table: String,
    /// The row of position 0.
    pub offset: usize,
}

/// Inputs of single blocks that depend on the token and its embedding `x`: of block `i` it is part `i` of
/// `(table[token] · √width + norm(projection(x) / √hidden)) / √2`, where each of the three is `width` features for every
/// block, and the norm is over each block's.
///
/// They stand after the embedding in what enters the first block.
#[derive(Debug, Clone, PartialEq)]
pub struct PerLayerInputs {
    /// Features of a block's input.
    pub width: usize,
    /// Rows of the table.
    pub vocab: usize,
    /// Module name of the table `[vocab, layers · width]`; its factor is rounded to the type that it is stored in.
    pub table: String,
    /// Module name of the projection `[layers · width, hidden]`.
    pub projection: String,
    /// The norm, with its whole name.
    pub norm: Op,
}

/// Modules of some blocks that are no part of these blocks' computation, though checkpoints may hold them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unread {
    /// The first block that they are unread in; those after it have none either.
    pub first: usize,
    /// Their names inside the block.
    pub modules: &'static [&'static str],
}

impl Architecture {
    /// Features of what stands before block `layer`, or after the last one: the hidden states, and what travels beside
    /// them.
    pub fn state_width(&self, layer: usize) -> usize {
        match layer < self.layers {
            true => self.graph(layer).width(self.graph(layer).input()),
            false => self.hidden,
        }
    }

    /// Whether a tensor is a float weight that is stored as `[in, out]`, by its name.
    pub fn is_stored_by_columns(&self, tensor: &str) -> bool {
        let Some(layer) = self.layer_of(tensor).filter(|_| !self.stored_by_columns.is_empty()) else {
            return false;
        };
        let prefix = self.in_block(layer, "");
        let module = tensor.strip_prefix(&prefix).and_then(|name| name.strip_suffix(".weight"));
        module.is_some_and(|module| self.stored_by_columns.contains(&module))
    }

    /// Whether nothing computes with a tensor, by its name.
    pub fn is_unread(&self, tensor: &str) -> bool {
        let Some(unread) = self.unread else { return false };
        let within = |layer: usize| tensor.strip_prefix(&self.in_block(layer, "")).map(str::to_owned);
        let name = self.layer_of(tensor).filter(|layer| *layer >= unread.first).and_then(within);
        let of = |module: &&str| {
            name.as_ref().is_some_and(|n| n.strip_prefix(*module).is_some_and(|n| n.starts_with('.')))
        };
        unread.modules.iter().any(of)
    }

    /// The graph of block `layer`.
    ///
    /// # Panics
    /// When there is no such block.
    pub fn graph(&self, layer: usize) -> &BlockGraph {
        self.blocks.graph(layer)
    }

    /// The distinct attentions of all blocks, in order of their first layers.
    pub fn attentions(&self) -> Vec<AttentionShape> {
        let mut shapes: Vec<AttentionShape> = Vec::new();
        for shape in self.blocks.kinds().flat_map(|kind| kind.graph.attentions()) {
            if !shapes.contains(&shape) {
                shapes.push(shape);
            }
        }
        shapes
    }

    /// The rotations of all blocks.
    pub fn ropes(&self) -> impl Iterator<Item = &Rope> {
        self.blocks.kinds().flat_map(|kind| kind.graph.nodes()).filter_map(|node| match node.op.computes() {
            Computes::Rotation(rope) => Some(rope),
            _ => None,
        })
    }

    /// The name of a module or tensor of block `index`, from its name inside the block.
    pub fn in_block(&self, index: usize, name: &str) -> String {
        format!("{}{name}", self.block_prefix.replace("{}", &index.to_string()))
    }

    /// Modules that readers may have other names for, with these.
    pub fn aliases(&self) -> Vec<(String, String)> {
        let routers = self.router_alias.into_iter().flat_map(|names| {
            (0..self.layers).map(move |layer| names.map(|name| self.in_block(layer, name)).into())
        });
        let head = self.head_alias.map(|alias| (self.head.clone(), alias.to_owned()));
        routers.chain(head).collect()
    }

    /// Module name of the embedding.
    pub fn embedding_module(&self) -> String {
        self.embedding.strip_suffix(".weight").unwrap_or(&self.embedding).to_owned()
    }

    /// What engines fuse in all blocks, in model order.
    pub fn fused_modules(&self) -> Vec<FusedLinears> {
        let of_layer = |layer: usize| {
            let has = move |part: &&str| self.graph(layer).linears().any(|(_, name, ..)| name == *part);
            let whole = self.fused.iter().filter(move |(_, parts)| parts.iter().all(&has));
            whole.map(move |(name, parts)| FusedLinears {
                name: self.in_block(layer, name),
                parts: parts.iter().map(|part| self.in_block(layer, part)).collect(),
            })
        };
        (0..self.layers).flat_map(of_layer).collect()
    }

    /// Whether a tensor is named as if it belonged to a block, whether or not there is such a block.
    pub fn is_in_some_block(&self, tensor: &str) -> bool {
        self.block_prefix.split_once("{}").is_some_and(|(before, _)| tensor.starts_with(before))
    }

    /// The block that a tensor belongs to, by its name.
    pub fn layer_of(&self, tensor: &str) -> Option<usize> {
        self.index_of(tensor).filter(|index| *index < self.layers)
    }

    /// Whether a tensor belongs to one of the [further blocks](Self::further_blocks), by its name.
    pub fn is_in_further_block(&self, tensor: &str) -> bool {
        if self.further_module.is_some_and(|module| tensor.starts_with(module)) {
            return true;
        }
        let further = self.layers..self.layers.saturating_add(self.further_blocks);
        self.index_of(tensor).is_some_and(|index| further.contains(&index))
    }

    /// The index of the block that a tensor is named after.
    fn index_of(&self, tensor: &str) -> Option<usize> {
        let (before, after) = self.block_prefix.split_once("{}")?;
        let (index, _) = tensor.strip_prefix(before)?.split_once(after)?;
        // `07` and `+7` parse as 7, but no tensor of a block is called so.
        index.parse().ok().filter(|i: &usize| i.to_string() == index)
    }
}

/// A family this version can read.
pub trait Family: Send + Sync {
    /// The name users know it by.
    fn name(&self) -> &'static str;

    /// The values of `architectures` in `config.json` that mean this family.
    fn architectures(&self) -> &'static [&'static str];

    /// Classes of other families under which models of this one may be saved: `model_type` then tells.
    fn borrowed_classes(&self) -> &'static [&'static str] {
        &[]
    }

    /// Whether `model_type` may have this value: the family's name, if it has no other.
    fn has_model_type(&self, model_type: &str) -> bool {
        model_type == self.name()
    }

    /// The graph and sizes that a configuration implies.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) with the field that is missing, malformed, absurd or not supported.
    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture>;
}

/// The families this version knows.
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

/// Reads the family and sizes from a configuration. Where the decoder is a part of a larger model, its names are
/// those that `tensors` has for it.
///
/// # Errors
/// [`Error::UnknownArchitecture`](crate::Error::UnknownArchitecture) listing the known ones, or as [`Family::describe`]; [`Error::AmbiguousNames`](crate::Error::AmbiguousNames).
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
        // Readers go by either; where the two disagree, they would not run the same model.
        return match model_type {
            Some(kind) if !family.has_model_type(kind) => Err(config.error(
                "model_type",
                format!("is `{kind}`, and `architectures` says `{found}`, which is `{}`", family.name()),
            )),
            _ => family.describe(config),
        };
    }
    match multimodal::describe(found, config, tensors)? {
        Some(architecture) => Ok(architecture),
        None => Err(unknown::refuse(config, found)),
    }
}

/// The values of `architectures` that are read.
fn known() -> Vec<&'static str> {
    let families = FAMILIES.iter().flat_map(|family| family.architectures()).copied();
    families.chain(multimodal::classes().map(|(name, _)| name)).collect()
}

/// What engines may be asked about: the names of families, and the classes of vision-language models.
pub fn supported() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|family| family.name()).chain(multimodal::classes().map(|(name, _)| name))
}
