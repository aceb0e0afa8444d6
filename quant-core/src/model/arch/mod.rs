//! Families of models as data. No tensor name of an architecture stands outside this folder.

mod graph;
mod llama;
mod opt;

pub use graph::{BlockGraph, FoldGroup, GraphBuilder, Node, NodeId, Op, OrderGroup, QueryKey};

use crate::checkpoint::ConfigFields;
use crate::model::rope::RopeScaling;
use crate::{Error, Result};

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
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Positions the model was made for.
    pub max_positions: usize,
    /// Added to the mean square, or the variance, in norms.
    pub norm_eps: f64,
    /// The exponent α that SmoothQuant takes for the family where nobody says otherwise; `docs/smoothquant.md` has
    /// the sources.
    pub smoothing: f32,
    /// How positions are told apart.
    pub positions: Positions,
    /// Whether the output head is the embedding.
    pub tied: bool,
    /// Name of the embedding tensor.
    pub embedding: String,
    /// The norm before the head, with its whole name, if there is one.
    pub final_norm: Option<Op>,
    /// Module name of the head.
    pub head: String,
    /// Prefix of a block's tensors, with `{}` for its index.
    pub block_prefix: &'static str,
    /// What all names but the head's begin with, if checkpoints that were saved without the head may
    /// lack it; else empty.
    pub base: &'static str,
    /// Linears inside a block that engines run as one matrix: the name they give it, and its parts
    /// in order.
    pub fused: &'static [(&'static str, &'static [&'static str])],
    /// One block; all are alike.
    pub block: BlockGraph,
}

/// How a family tells positions apart.
#[derive(Debug, Clone, PartialEq)]
pub enum Positions {
    /// Queries and keys are turned: any position will do.
    Rotary {
        /// Base of the frequencies.
        theta: f64,
        /// Change of the frequencies for long contexts.
        scaling: RopeScaling,
    },
    /// A row is added to every token's embedding: there are as many positions as rows.
    Learned {
        /// Name of the tensor `[offset + positions, hidden]`.
        table: String,
        /// The row of position 0.
        offset: usize,
    },
}

/// Linears that engines run as one matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FusedLinears {
    /// The name that engines give it.
    pub name: String,
    /// Its parts by name, in order.
    pub parts: Vec<String>,
}

impl Architecture {
    /// The name of a module or tensor of block `index`, from its name inside the block.
    pub fn in_block(&self, index: usize, name: &str) -> String {
        format!("{}{name}", self.block_prefix.replace("{}", &index.to_string()))
    }

    /// Module name of the embedding.
    pub fn embedding_module(&self) -> String {
        self.embedding.strip_suffix(".weight").unwrap_or(&self.embedding).to_owned()
    }

    /// What engines fuse in all blocks, in model order.
    pub fn fused_modules(&self) -> Vec<FusedLinears> {
        let of_layer = |layer: usize| {
            self.fused.iter().map(move |(name, parts)| FusedLinears {
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
        let (before, after) = self.block_prefix.split_once("{}")?;
        let (index, _) = tensor.strip_prefix(before)?.split_once(after)?;
        // `07` and `+7` parse as 7, but no tensor of a block is called so.
        let layer = index.parse().ok().filter(|l: &usize| *l < self.layers && l.to_string() == index)?;
        Some(layer)
    }
}

/// A family this version can read.
pub trait Family: Send + Sync {
    /// The name users know it by.
    fn name(&self) -> &'static str;

    /// The values of `architectures` in `config.json` that mean this family.
    fn architectures(&self) -> &'static [&'static str];

    /// The graph and sizes that a configuration implies.
    ///
    /// # Errors
    /// [`Error::Config`] with the field that is missing, malformed, absurd or not supported.
    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture>;
}

/// The families this version knows.
pub static FAMILIES: &[&dyn Family] =
    &[&llama::Llama, &llama::Mistral, &llama::Qwen2, &llama::Qwen3, &opt::Opt];

/// Reads the family and sizes from a configuration.
///
/// # Errors
/// [`Error::UnknownArchitecture`] listing the known ones, or as [`Family::describe`].
pub fn describe(config: &ConfigFields<'_>) -> Result<Architecture> {
    let found = match config.optional_str_list("architectures")?.as_deref() {
        Some([first, ..]) => (*first).to_owned(),
        Some([]) => return Err(config.error("architectures", "is empty")),
        None => return Err(config.error("architectures", "is missing")),
    };
    let family = FAMILIES.iter().find(|f| f.architectures().contains(&found.as_str()));
    match family {
        Some(family) => {
            // Readers go by either; where the two disagree, they would not run the same model.
            match config.optional_str("model_type")? {
                Some(kind) if kind != family.name() => Err(config.error(
                    "model_type",
                    format!("is `{kind}`, and `architectures` says `{found}`, which is `{}`", family.name()),
                )),
                _ => family.describe(config),
            }
        }
        None => Err(Error::UnknownArchitecture {
            path: config.path().to_owned(),
            found,
            known: FAMILIES.iter().flat_map(|f| f.architectures()).copied().collect(),
        }),
    }
}
