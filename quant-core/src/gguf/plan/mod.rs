//! Plans a file: every tensor with its type and its source, determined before any computation.

mod types;

use std::collections::{BTreeMap, BTreeSet};

use self::types::{Types, Unfit};
use super::description;
use super::families::{self, GgufFamily};
use super::file::{GgufArchive, Value};
use super::general;
use super::layout;
use super::metadata;
use super::mixture::{Mixture, Role};
use super::rows::{RowOrder, Source, View};
use super::tokenizer;
use crate::blocks::{BlockSearch, BlockType};
use crate::checkpoint::{ModelDirectory, TensorSpec};
use crate::model::{Architecture, Model};
use crate::quantize::gptq::GptqSettings;
use crate::recipe::{Method, Pattern};
use crate::round::BlockRounding;
use crate::transform::{StepContext, TransformSettings};
use crate::{Error, Result};

/// The options of a run.
#[derive(Debug, Clone)]
pub struct GgufRequest {
    /// The mixture, which chooses the types of tensors.
    pub mixture: &'static Mixture,
    /// Whether the mixture was asked for, and is not the default.
    pub is_mixture_given: bool,
    /// Tensors with a type of their own, by the names of their modules in the checkpoint or in the file; the last match
    /// wins.
    pub overrides: Vec<(Pattern, &'static BlockType)>,
    /// Tensors that keep the float type in which they are stored.
    pub ignore: Vec<Pattern>,
    /// The pre-tokenizer; recognized automatically if `None`.
    pub pre: Option<String>,
    /// Whether rows that do not fit a type get llama.cpp's fallback type.
    pub allow_fallback: bool,
    /// Whether there is an importance matrix.
    pub weighted: bool,
    /// How scales are searched for.
    pub search: BlockSearch,
    /// The steps that rewrite the float weights of blocks before rounding, which
    /// [support blocks](crate::transform::Transform::supports_blocks), and the rounding, which [does
    /// too](crate::round::Rounding::blocks).
    pub method: Method,
    /// Settings of the steps and of the rounding.
    pub settings: TransformSettings,
}

impl GgufRequest {
    pub(super) fn largest_value(&self) -> u64 {
        let kinds = self.overrides.iter().map(|(_, kind)| *kind).chain([self.mixture.base]);
        kinds.map(|kind| kind.bytes.div_ceil(kind.elements) as u64).max().unwrap_or(4)
    }

    /// The names of the steps before rounding.
    pub fn steps(&self) -> Vec<&'static str> {
        self.method.steps()
    }

    /// The settings with which codes compensate each other's rounding errors, if the rounding does that.
    pub fn compensation(&self) -> Option<GptqSettings> {
        match self.method.rounding.blocks(&self.settings) {
            BlockRounding::Compensated { settings, .. } => Some(settings),
            _ => None,
        }
    }

    /// Whether the method needs a calibration text.
    pub fn needs_text(&self) -> bool {
        self.compensation().is_some() || !self.method.transforms.is_empty()
    }

    /// Whether a requested type needs an importance matrix.
    pub fn needs_importance(&self) -> bool {
        self.mixture.needs_importance || self.overrides.iter().any(|(_, kind)| kind.needs_importance)
    }

    /// Fails if a step of the method is meaningless for the tensors.
    fn check_steps(&self, architecture: &Architecture, tensors: &[PlannedTensor]) -> Result<()> {
        let rounded = tensors.iter().filter(|tensor| !tensor.kind.is_float() && !tensor.keeps_codes());
        self.method.check_steps(StepContext {
            block_types: rounded.map(|tensor| tensor.kind).collect(),
            ..StepContext::new(architecture, &self.method.name, &self.settings)
        })
    }

    /// A note on the weights of blocks for which the method computes Hessians without effect.
    fn without_effect(&self, tensors: &[PlannedTensor]) -> Option<String> {
        self.compensation()?;
        let rounded =
            tensors.iter().filter(|t| t.layer().is_some() && !t.kind.is_float() && !t.keeps_codes());
        let (with, without): (Vec<_>, Vec<_>) = rounded.partition(|tensor| tensor.may_compensate());
        let mut types: BTreeMap<&str, usize> = BTreeMap::new();
        without.iter().for_each(|tensor| *types.entry(tensor.kind.name).or_default() += 1);
        let types: Vec<String> = types.into_iter().map(|(kind, n)| format!("{n} × {kind}")).collect();
        let (name, types) = (self.method.rounding.name(), types.join(", "));
        match (with.len(), without.len()) {
            (_, 0) => None,
            (0, _) => Some(format!(
                "`{name}` has no effect on this file, because it does not apply to the weights of any block ({types})"
            )),
            _ => Some(format!(
                "`{name}` has no effect on some weights, which are rounded as without it: {types}"
            )),
        }
    }

    /// Whether only float types are requested.
    pub fn is_float(&self) -> bool {
        self.mixture.base.is_float() && self.overrides.iter().all(|(_, kind)| kind.is_float())
    }
}

/// A tensor of the file.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedTensor {
    /// The name in the file.
    pub name: String,
    /// The shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// The type.
    pub kind: &'static BlockType,
    /// The requested type, if rows do not fit it and `kind` replaces it.
    pub replaces: Option<&'static BlockType>,
    pub(super) source: Source,
}

impl PlannedTensor {
    /// The tensors or modules of the checkpoint from which the tensor is built.
    pub fn sources(&self) -> Vec<&str> {
        match &self.source {
            Source::Stored { tensors, .. } => tensors.iter().map(String::as_str).collect(),
            Source::Codes { modules, .. } => modules.iter().map(String::as_str).collect(),
            Source::Blocks { tensors } => tensors.iter().map(String::as_str).collect(),
            Source::Values(_) => Vec::new(),
        }
    }

    pub(super) fn layer(&self) -> Option<usize> {
        self.name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
    }

    /// Whether the codes are copied from the checkpoint.
    pub fn keeps_codes(&self) -> bool {
        matches!(self.source, Source::Codes { .. } | Source::Blocks { .. })
    }

    /// Whether the rows are whole rows of the checkpoint, with their columns in the same order.
    pub(super) fn keeps_columns(&self) -> bool {
        let Source::Stored { view, .. } = &self.source else { return true };
        view.columns == RowOrder::AsStored && !self.is_transposed()
    }

    /// Whether the columns are rows of the checkpoint.
    pub(super) fn is_transposed(&self) -> bool {
        matches!(&self.source, Source::Stored { view, .. } if matches!(view.order, RowOrder::Transposed { .. }))
    }

    /// Whether codes can compensate each other's rounding errors: in weights of blocks with columns in the order of the
    /// checkpoint, unless their type ignores the importance of channels, as Q8_0 does.
    fn may_compensate(&self) -> bool {
        self.kind.uses_importance && self.keeps_columns()
    }

    /// The column of the checkpoint's tensor at this column of the file.
    pub(super) fn stored_column(&self, column: usize) -> usize {
        match &self.source {
            Source::Stored { view, .. } => view.columns.stored(column),
            _ => column,
        }
    }

    /// The size of the data in bytes.
    pub fn bytes(&self) -> u64 {
        let columns = self.shape.last().copied().unwrap_or_default();
        let rows: usize = self.shape[..self.shape.len() - 1].iter().product();
        (self.kind.row_bytes(columns).unwrap_or_default() * rows) as u64
    }
}

/// The contents of a file.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GgufPlan {
    /// The options.
    pub request: GgufRequest,
    /// Metadata, without the entries for an importance matrix.
    pub metadata: Vec<(String, Value)>,
    /// The tensors, in file order.
    pub tensors: Vec<PlannedTensor>,
    /// Notes on the file for the user.
    pub notes: Vec<String>,
}

struct Draft {
    name: String,
    module: String,
    shape: Vec<usize>,
    role: Role,
    layer: usize,
    source: Source,
    is_weight: bool,
}

impl GgufPlan {
    /// Plans the file for a model. A model that is already quantized keeps its codes.
    ///
    /// # Errors
    /// [`Error::Usage`] if llama.cpp does not support the family or a property of the model, or the request does not
    /// fit the model; [`Error::NotRepackable`] if codes cannot be kept; [`Error::Tokenizer`] if the tokenizer cannot be
    /// loaded; [`Error::InputFile`] if it cannot be written or its pre-tokenizer is not recognized.
    pub fn new(model: &Model, directory: &ModelDirectory, request: GgufRequest) -> Result<Self> {
        let a = model.architecture();
        let family = families::require(a)?;
        let mixture = request.mixture;
        if mixture.needs_importance && !request.weighted {
            return Err(Error::usage(
                format!("the mixture {} needs an importance matrix", mixture.name),
                "set ‹calibration› or ‹imatrix›, or choose a larger mixture",
            ));
        }
        let about = metadata::metadata(a, family, directory.config())?;
        let mut notes = about.warnings;
        if let Some(wrapper) = &a.wrapper {
            notes.push(format!(
                "the file contains only the text model of {}, not its vision tower",
                wrapper.class
            ));
        }
        if model.source().names().iter().any(|name| a.is_in_further_block(name)) {
            notes.push("the blocks for multi-token prediction are not written".into());
        }
        let mut drafts = drafts(model, family)?;
        for (name, factors) in about.rope_factors {
            drafts.insert(
                1,
                Draft {
                    name: name.into(),
                    module: String::new(),
                    shape: vec![factors.len()],
                    role: Role::Other,
                    layer: 0,
                    source: Source::Values(factors),
                    is_weight: false,
                },
            );
        }
        let types = Types::new(a, family, &request, &drafts);
        types.check_patterns(model, &drafts)?;
        let mut tensors = Vec::with_capacity(drafts.len());
        let mut unfit = Vec::new();
        for draft in drafts {
            match types.of(model, draft)? {
                Ok(tensor) => tensors.push(tensor),
                Err(reason) => unfit.push(reason),
            }
        }
        if !unfit.is_empty() {
            let listed: Vec<String> = unfit.iter().take(8).map(|unfit| format!("\n  {unfit}")).collect();
            let fallbacks: BTreeSet<String> = unfit.iter().filter_map(Unfit::fallback).collect();
            let fallbacks: Vec<String> = fallbacks.into_iter().collect();
            let more = unfit.len().saturating_sub(8);
            let more = if more > 0 { format!("\n  and {more} more") } else { String::new() };
            let fault = match unfit.len() {
                1 => "the row width of 1 tensor does not suit its type".to_owned(),
                n => format!("the row widths of {n} tensors do not suit their types"),
            };
            return Err(Error::usage(
                format!("{fault}:{}{more}", listed.concat()),
                format!(
                    "set ‹allow_fallback› to use the fallback types of llama-quantize ({}), which have smaller \
                    blocks and more bits; or set a type with a suitable block size with ‹override›",
                    fallbacks.join(", ")
                ),
            ));
        }
        if request.is_mixture_given {
            check_mixture(model, mixture, &tensors)?;
        }
        let kept = tensors.iter().find(|t| t.keeps_codes()).filter(|_| !request.method.transforms.is_empty());
        if let Some(kept) = kept {
            return Err(Error::usage(
                format!(
                    "the steps {} cannot rewrite `{}`, because its codes are kept",
                    request.steps().join(", "),
                    kept.name
                ),
                "add ‹requantize›, or omit ‹method›",
            ));
        }
        if request.needs_text() && !tensors.iter().any(|t| t.layer().is_some() && !t.kind.is_float()) {
            return Err(Error::usage(
                "the method has no effect: no weight of a block is rounded",
                "omit ‹method›, or change ‹ignore› or ‹override› so that weights are rounded",
            ));
        }
        request.check_steps(a, &tensors)?;
        notes.extend(request.without_effect(&tensors));
        if request.weighted && !tensors.iter().any(|t| t.kind.uses_importance && !t.keeps_codes()) {
            let kinds: BTreeSet<&str> =
                tensors.iter().filter(|t| t.layer().is_some()).map(|t| t.kind.name).collect();
            let kinds: Vec<&str> = kinds.into_iter().collect();
            notes.push(format!(
                "the importance matrix has no effect on types of this file ({})",
                kinds.join(", ")
            ));
        }
        let file_type = commonest_type(&tensors).unwrap_or(mixture).id;
        let mut metadata = general::general(family, &general::name(directory), file_type, &tensors);
        metadata.extend(description::entries(directory.description()));
        let described: BTreeSet<String> = metadata.iter().map(|(key, _)| key.clone()).collect();
        metadata.extend(general::sampling(directory).into_iter().filter(|(key, _)| !described.contains(key)));
        metadata.extend(about.entries);
        let vocabulary = tokenizer::metadata(directory, family, a.vocab, request.pre.as_deref())?;
        notes.extend(vocabulary.notes);
        metadata.extend(vocabulary.entries);
        Ok(Self { request, metadata, tensors, notes })
    }

    /// The specifications of all tensors, in file order.
    ///
    /// # Errors
    /// [`Error::Internal`] if this crate has a bug.
    pub fn outputs(&self) -> Result<Vec<TensorSpec>> {
        self.tensors.iter().map(|t| GgufArchive::spec(&t.name, t.kind, &t.shape)).collect()
    }

    /// The size of all tensors in bytes.
    pub fn output_bytes(&self) -> u64 {
        self.tensors.iter().map(PlannedTensor::bytes).sum()
    }

    /// The mixture that the file names: the requested one, or that of the model's codes if they are kept.
    pub fn mixture(&self) -> &'static Mixture {
        commonest_type(&self.tensors).unwrap_or(self.request.mixture)
    }

    /// Whether codes of the model are kept, because it is already quantized.
    pub fn keeps_codes(&self) -> bool {
        self.tensors.iter().any(PlannedTensor::keeps_codes)
    }

    /// Tensors whose rows did not fit the requested type.
    pub fn replaced(&self) -> impl Iterator<Item = &PlannedTensor> {
        self.tensors.iter().filter(|t| t.replaces.is_some())
    }
}

/// Fails if a mixture was asked for that chooses no type, because the model is already quantized: its codes are kept as
/// they are, and its float tensors as they are stored.
fn check_mixture(model: &Model, mixture: &Mixture, tensors: &[PlannedTensor]) -> Result<()> {
    let kept = commonest_type(tensors).filter(|_| model.quant_method().is_some());
    match kept {
        Some(kept) if kept.name != mixture.name && !mixture.is_of_experts() => Err(Error::usage(
            format!(
                "‹scheme={}› has no effect: the model is already quantized, and its codes are kept as {}",
                mixture.name, kept.name
            ),
            "add ‹requantize› to round the dequantized weights again, which adds a second rounding error, or omit \
             ‹scheme›",
        )),
        _ => Ok(()),
    }
}

/// The mixture that is named after the most common type of kept codes, by weights; `None` if no codes are kept.
fn commonest_type(tensors: &[PlannedTensor]) -> Option<&'static Mixture> {
    let mut elements: BTreeMap<&str, usize> = BTreeMap::new();
    for tensor in tensors.iter().filter(|t| t.keeps_codes()) {
        *elements.entry(tensor.kind.name).or_default() += tensor.shape.iter().product::<usize>();
    }
    let (name, _) = elements.into_iter().max_by_key(|(_, n)| *n)?;
    super::mixture::MIXTURES.iter().find(|m| m.stacked().unwrap_or(m.base).name == name)
}

fn drafts(model: &Model, family: &GgufFamily) -> Result<Vec<Draft>> {
    let a = model.architecture();
    let mut drafts = Vec::new();
    let stored =
        |tensor: String, shift| Source::Stored { tensors: vec![tensor], view: View::AS_STORED.plus(shift) };
    let outer = |name: &str, module: &str, tensor: String, factor: f32, role| Draft {
        name: name.to_owned(),
        module: module.to_owned(),
        shape: vec![a.vocab, a.hidden],
        role,
        layer: 0,
        source: Source::Stored { tensors: vec![tensor], view: View::AS_STORED.times(factor) },
        is_weight: true,
    };
    let [embedding_factor, head_factor] = metadata::folded_factors(a, family);
    // A head and an embedding with different factors cannot share a tensor.
    let tied = a.tied && embedding_factor == head_factor;
    let embedding_role = if tied { Role::Head } else { Role::Embedding };
    let embedding = (a.embedding_module(), model.embedding_name());
    drafts.push(outer(
        families::EMBEDDING,
        &embedding.0,
        embedding.1.clone(),
        embedding_factor,
        embedding_role,
    ));
    if let Some(inputs) = &a.per_layer_inputs {
        let all = a.layers * inputs.width;
        let mut input = |name: &str, module: &str, shape: Vec<usize>, role| {
            let source = stored(format!("{module}.weight"), 0.0);
            let (is_weight, module) = (layout::takes_type(name, &shape), module.to_owned());
            drafts.push(Draft { name: name.to_owned(), module, shape, role, layer: 0, source, is_weight });
        };
        input(families::INPUT_TABLE, &inputs.table, vec![inputs.vocab, all], embedding_role);
        input(families::INPUT_PROJECTION, &inputs.projection, vec![all, a.hidden], Role::Other);
        input(families::INPUT_NORM, inputs.norm.name(), vec![inputs.width], Role::Other);
    }
    if let Some(positions) = &a.learned_positions {
        let (module, shape) = (positions.table.clone(), vec![a.max_positions, a.hidden]);
        let (name, source) = (families::POSITIONS.to_owned(), stored(positions.table.clone(), 0.0));
        drafts.push(Draft { name, module, shape, role: Role::Other, layer: 0, source, is_weight: false });
    }
    for layer in 0..a.layers {
        block(a, family, layer, &mut drafts)?;
    }
    let norms = [(&a.embedding_norm, families::EMBEDDING_NORM), (&a.final_norm, family.final_norm)];
    for (norm, in_file) in norms.into_iter().filter_map(|(norm, in_file)| Some((norm.as_ref()?, in_file))) {
        for parameter in norm.parameters() {
            let name = format!("{in_file}.{}", parameter.name);
            let tensor = format!("{}.{}", norm.name(), parameter.name);
            let source = stored(tensor, norm.weight_offset());
            let (module, shape) = (norm.name().to_owned(), parameter.shape);
            drafts.push(Draft { name, module, shape, role: Role::Other, layer: 0, source, is_weight: false });
        }
    }
    if !tied {
        let name = format!("{}.weight", families::HEAD);
        let (module, tensor) =
            if a.tied { embedding } else { (a.head.clone(), format!("{}.weight", a.head)) };
        drafts.push(outer(&name, &module, tensor, head_factor, Role::Head));
    }
    if a.head_bias {
        let (module, source) = (a.head.clone(), stored(format!("{}.bias", a.head), 0.0));
        let (name, shape) = (format!("{}.bias", families::HEAD), vec![a.vocab]);
        drafts.push(Draft { name, module, shape, role: Role::Other, layer: 0, source, is_weight: false });
    }
    Ok(drafts)
}

/// Adds the tensors of one block: in order of use, then those of experts, by name. All experts share one tensor.
fn block(a: &Architecture, family: &GgufFamily, layer: usize, drafts: &mut Vec<Draft>) -> Result<()> {
    let mut experts: BTreeMap<String, Draft> = BTreeMap::new();
    for placed in layout::of_block(a, family, layer)? {
        let name = placed.name(layer);
        let stem = placed.stored.rsplit_once('.').map_or(placed.stored.as_str(), |(stem, _)| stem);
        let draft = |shape: Vec<usize>, tensors| Draft {
            is_weight: layout::takes_type(&name, &shape),
            name: name.clone(),
            module: placed.module.clone(),
            shape,
            role: role(stem),
            layer,
            source: Source::Stored { tensors, view: placed.view },
        };
        let Some(expert) = placed.expert else {
            drafts.push(draft(placed.stored_shape.clone(), vec![placed.tensor.clone()]));
            continue;
        };
        let all = experts.entry(placed.stored.clone()).or_insert_with(|| {
            draft([&[family_experts(a, layer)], placed.stored_shape.as_slice()].concat(), Vec::new())
        });
        if let Source::Stored { tensors, .. } = &mut all.source {
            if tensors.len() != expert {
                return Err(Error::Internal(format!("expert {expert} of `{name}` is out of order")));
            }
            tensors.push(placed.tensor);
        }
    }
    drafts.extend(experts.into_values());
    Ok(())
}

fn family_experts(a: &Architecture, layer: usize) -> usize {
    let routings = a.graph(layer).nodes().iter().filter_map(|node| node.op.routing());
    routings.map(|routing| routing.experts).max().unwrap_or(0)
}

fn role(stored: &str) -> Role {
    match stored {
        "attn_q" => Role::Query,
        // llama.cpp chooses types by the end of the name.
        "attn_k" | "indexer.attn_k" => Role::Key,
        "attn_v" | "attn_qkv" => Role::Value,
        "attn_output" => Role::AttentionOutput,
        "ffn_gate" | "ffn_gate_exps" | "ffn_gate_shexp" => Role::Gate,
        "ffn_up" | "ffn_up_exps" | "ffn_up_shexp" => Role::Up,
        "ffn_down" | "ffn_down_exps" | "ffn_down_shexp" => Role::Down,
        _ => Role::Other,
    }
}
