//! The plan: the action for every tensor, determined before any computation.

mod draft;
mod summary;

use std::collections::HashMap;
use std::ops::Range;

pub(super) use draft::FoldedNodes;

use draft::{Draft, Drafted};

use super::part::{Calibrated, ExpertPart};
use super::scale_groups::ScaleGroups;
use super::select::Selection;
use super::{CacheScale, Recipe, SelectorMatches};
use crate::calibrate::Sampling;
use crate::checkpoint::{Dtype, TensorInfo, TensorSpec};
use crate::digest::sha256_hex;
use crate::format::FusedLinears;
use crate::format::{Container, WrapperNames};
use crate::model::{Model, NodeId};
use crate::recipe::Method;
use crate::scheme::LinearScheme;
use crate::transform::TransformSettings;
use crate::{Error, Result};

/// The action for a tensor of the input.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// Copied without change.
    Copy,
    /// Written as float, but changed if the method folds scales into it.
    Rewrite {
        /// The block.
        layer: usize,
        /// The norm or linear of the block.
        node: NodeId,
    },
    /// Quantized.
    Quantize {
        /// The linear's node in the block; `None` outside the blocks.
        node: Option<NodeId>,
        /// The linear's name.
        module: String,
        /// The grid.
        scheme: LinearScheme,
        /// The dtype of stored scales.
        scale_dtype: Dtype,
    },
    /// Already quantized, and written in a different format with the same values.
    Repack {
        /// The linear's name.
        module: String,
        /// The grid in the input.
        from: LinearScheme,
        /// The grid as written.
        scheme: LinearScheme,
        /// The dtype of stored scales.
        scale_dtype: Dtype,
        /// The tensors of the input that contain it.
        sources: Vec<TensorSpec>,
    },
}

/// A tensor of the input, the action for it, and the tensors that are written for it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanEntry {
    /// The name as a float tensor of the model.
    pub tensor: String,
    /// The tensor of the input that contains it; for a repacked weight, the first of its tensors. For a head that is
    /// tied in the input, this is the embedding, unless the preparation unties the head.
    pub stored: String,
    /// The index of the block that contains it; `None` outside the blocks.
    pub layer: Option<usize>,
    /// The dtype and shape in the input; for a weight that is repacked, the dtype of its scales and its logical shape.
    pub info: TensorInfo,
    /// Whether the preparation has modified the tensor.
    pub modified: bool,
    /// Whether the tensor is stored and written as `[in, out]`, the transpose of its shape in `info`.
    pub by_columns: bool,
    /// The action for the tensor.
    pub action: Action,
    /// The tensors to write: the tensor itself, or the tensors that represent it, followed by the scales of `cache`.
    pub outputs: Vec<TensorSpec>,
    /// Static scales of keys and values produced by it.
    pub cache: Vec<CacheScale>,
}

impl PlanEntry {
    /// The tensors of the input from which the tensor is computed, with their sizes in bytes.
    pub fn sources(&self) -> Vec<(&str, u64)> {
        match &self.action {
            Action::Repack { sources, .. } => {
                sources.iter().map(|s| (s.name.as_str(), s.info.byte_len())).collect()
            }
            _ => vec![(self.stored.as_str(), self.info.byte_len())],
        }
    }

    /// The size in the input, in bytes.
    pub fn input_bytes(&self) -> u64 {
        self.sources().iter().map(|(_, bytes)| bytes).sum()
    }

    /// The linear and its scheme, if it is stored quantized.
    pub fn quantized(&self) -> Option<(&str, LinearScheme)> {
        match &self.action {
            Action::Quantize { module, scheme, .. } | Action::Repack { module, scheme, .. } => {
                Some((module, *scheme))
            }
            _ => None,
        }
    }

    fn quantized_shape(&self) -> Option<(&str, [usize; 2])> {
        let (module, _) = self.quantized()?;
        Some((module, self.info.shape.as_slice().try_into().ok()?))
    }

    /// The number of bytes to write.
    pub fn output_bytes(&self) -> u64 {
        self.outputs.iter().map(|t| t.info.byte_len()).sum()
    }
}

/// The action for every tensor, in the order of writing: tensors before the blocks, the blocks, the rest.
///
/// ```
/// use quant_core::checkpoint::ModelDirectory;
/// use quant_core::model::Model;
/// use quant_core::recipe::{Plan, Recipe};
/// # mod tiny { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/support/tiny.rs")); }
/// # let temporary = tempfile::tempdir().unwrap();
/// # let path = temporary.path();
/// # tiny::tiny_llama(path).unwrap();
///
/// let model = Model::open(&ModelDirectory::open(path)?)?;
/// let recipe = Recipe { scheme: "w4a16-g32".parse()?, ..Recipe::preset("awq-w4a16")? };
/// let plan = Plan::new(&model, &recipe, recipe.containers[0])?;
/// assert_eq!(plan.float_modules, ["lm_head"]);
/// assert!(Plan::peak_memory(&[plan], &model) > 0);
///
/// // Unsupported shapes are found before any weight is read: 96 inputs are not a multiple of 128.
/// let wide = Recipe { scheme: "w4a16-g128".parse()?, ..recipe };
/// assert!(Plan::new(&model, &wide, wide.containers[0]).is_err());
/// # Ok::<(), quant_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Plan {
    /// The quantization method.
    pub method: Method,
    /// The format.
    pub container: &'static dyn Container,
    /// The calibration batch, for methods that need one.
    pub sampling: Sampling,
    /// Settings of transforms and of the rounding.
    pub settings: TransformSettings,
    /// All tensors.
    pub entries: Vec<PlanEntry>,
    /// The blocks covered by the plan.
    pub(super) blocks: Range<usize>,
    /// The calibration of the whole plan, if this is a part of one.
    pub(super) calibrated: Option<Calibrated>,
    /// The bytes of the largest block, if the plan only moves the batch through the float model.
    pub(super) forward: Option<u64>,
    /// Set if the plan covers only some experts of a block, or everything but its experts.
    pub(super) experts: Option<ExpertPart>,
    /// The SHA-256 of the schemes and scale dtypes of all quantized modules, including those outside the covered
    /// blocks.
    pub(super) grids_sha256: String,
    /// The modules that the patterns of the recipe selected.
    pub selectors: Vec<SelectorMatches>,
    /// Linears that stay float: those of the blocks in model order, then others such as the head.
    pub float_modules: Vec<String>,
    /// Whether the preparation (rotation or folding of norms) unties the head from the embedding.
    pub(super) untied_by_preparation: bool,
    pub(super) head: String,
    /// Modules that engines may name differently, with these other names.
    pub(super) aliases: Vec<(String, String)>,
    pub(super) embedding: String,
    pub(super) fused: Vec<FusedLinears>,
    pub(super) scale_groups: ScaleGroups,
    pub(super) step_notes: Vec<String>,
    /// Names in the larger model that contains the decoder, if there is one.
    pub(super) wrapper: Option<WrapperNames>,
}

impl Plan {
    /// Plans a recipe for a model and one of the recipe's formats. The model must be prepared by [`Recipe::prepared`].
    ///
    /// # Errors
    /// If the model is already quantized, the model, method or format does not support what the recipe requests (the
    /// error lists all weights whose width a group size does not divide), a pattern has no effect, or nothing is left
    /// to quantize; [`Error::Internal`] if the model is not prepared.
    pub fn new(model: &Model, recipe: &Recipe, container: &'static dyn Container) -> Result<Self> {
        model.require_float()?;
        let architecture = model.architecture();
        let modules: Vec<(usize, NodeId, String, [usize; 2])> = (0..architecture.layers)
            .flat_map(|layer| {
                architecture.graph(layer).linears().map(move |(node, name, shape, _)| {
                    (layer, node, architecture.in_block(layer, name), shape)
                })
            })
            .collect();
        let is_quantizable =
            |layer: usize, node: NodeId| architecture.graph(layer).nodes()[node].op.is_quantizable();
        let named = |quantizable: bool| {
            let modules =
                modules.iter().filter(move |(layer, node, ..)| is_quantizable(*layer, *node) == quantizable);
            modules.map(|(_, _, name, _)| name.as_str())
        };
        let names: Vec<&str> = named(true).collect();
        let selection = Selection::new(recipe, &names);
        let (head, embedding) = (architecture.head.clone(), architecture.embedding_module());
        let outside: Vec<&str> = [&*embedding, &*head].into_iter().chain(named(false)).collect();
        let selectors = selection.matches(&names, &outside)?;
        if let Some(router) = named(false).find(|router| selection.outside(router).is_some()) {
            return Err(Error::usage(
                format!("`{router}` cannot be quantized: routers and gates always stay float"),
                "remove the override",
            ));
        }

        if recipe.method.preparation != model.preparation() {
            return Err(Error::Internal("the model was not prepared as the recipe requires".into()));
        }
        for scheme in std::iter::once(&recipe.scheme).chain(recipe.overrides.iter().map(|(_, scheme)| scheme))
        {
            scheme.check()?;
        }
        let folds = FoldedNodes::new(architecture, &recipe.method.transforms, &recipe.settings);
        let mut drafts = Vec::new();
        for (layer, node, module, shape) in modules {
            let scheme = is_quantizable(layer, node).then(|| selection.in_block(&module)).flatten();
            let float =
                if folds.contains(layer, node) { Action::Rewrite { layer, node } } else { Action::Copy };
            let name = format!("{module}.weight");
            let stored = name.clone();
            let (layer, node) = (Some(layer), Some(node));
            drafts.push(Draft { layer, node, module, shape, stored, name, scheme, float });
        }
        let head_scheme = selection.outside(&head);
        // A quantized head is no longer tied to the embedding.
        let shared = architecture.tied && head_scheme.is_none();
        let outer = |module: String, stored, name, scheme| {
            let (shape, float) = ([architecture.vocab, architecture.hidden], Action::Copy);
            Draft { layer: None, node: None, module, shape, stored, name, scheme, float }
        };
        let stored = model.embedding_name();
        let name = if shared { stored.clone() } else { architecture.embedding.clone() };
        let embedding_scheme = selection.outside(&embedding);
        if shared && embedding_scheme.is_some() {
            return Err(Error::usage(
                format!("`{embedding}` cannot be quantized alone: its weight is tied to the head `{head}`"),
                format!(
                    "also quantize the head, for example with ‹override={head}=w8a16›, which unties them"
                ),
            ));
        }
        let embedding = outer(embedding, stored.clone(), name, embedding_scheme);
        if !shared {
            let name = format!("{head}.weight");
            let stored = if architecture.tied { stored } else { name.clone() };
            drafts.push(outer(head.clone(), stored, name, head_scheme));
        }

        let (mut offenders, mut unfit) = (Vec::new(), None);
        let mut entries = Vec::new();
        let mut float_modules = Vec::new();
        for draft in drafts {
            let module = draft.module.clone();
            match draft.entry(model, container)? {
                Drafted::Entry(entry) => {
                    if entry.quantized().is_none() {
                        float_modules.push(module);
                    }
                    entries.push(*entry);
                }
                Drafted::Indivisible(offender) => offenders.push(offender),
                Drafted::Unfit(error) => unfit = unfit.or(Some(error)),
            }
        }
        if shared {
            float_modules.push(head);
        }
        match embedding.entry(model, container)? {
            Drafted::Entry(entry) => entries.push(*entry),
            Drafted::Indivisible(offender) => offenders.push(offender),
            Drafted::Unfit(error) => unfit = unfit.or(Some(error)),
        }
        if let Some(error) = unfit {
            let fits_none = offenders.is_empty() && !entries.iter().any(|e| e.quantized().is_some());
            return Err(if fits_none { draft::without_ignoring(error) } else { error });
        }
        if !offenders.is_empty() {
            return Err(Error::GroupSizeDoesNotDivide(offenders));
        }
        if !entries.iter().any(|e| e.quantized().is_some()) {
            return Err(Error::usage("nothing is left to quantize", "ignore fewer linears"));
        }
        let mut plan = Self {
            method: recipe.method.clone(),
            container,
            sampling: recipe.sampling,
            settings: recipe.settings.clone(),
            entries,
            blocks: 0..architecture.layers,
            calibrated: None,
            forward: None,
            experts: None,
            grids_sha256: String::new(),
            selectors,
            float_modules,
            untied_by_preparation: model.untied_by_preparation(),
            head: architecture.head.clone(),
            aliases: architecture.aliases(),
            embedding: architecture.embedding_module(),
            fused: architecture.fused_modules(),
            scale_groups: ScaleGroups::of(architecture),
            step_notes: recipe.method.transforms.iter().flat_map(|t| t.notes(architecture)).collect(),
            wrapper: architecture.wrapper.as_ref().map(|wrapper| wrapper.names.clone()),
        };
        plan.add_cache_scales(model)?;
        plan.check_steps(architecture)?;
        plan.check_activations(architecture)?;
        if plan.sampling.experts.is_routed() && plan.has_static_experts(architecture) {
            // Without any token, the static scale of an input would be arbitrary.
            plan.sampling.experts.floor = 1;
        }
        if plan.needs_text() {
            plan.sampling.check()?;
            plan.check_experts(architecture)?;
            model.check_positions(plan.sampling.length)?;
        }
        plan.method.rounding.check(&plan.settings)?;
        plan.complete(model, &folds)
    }

    /// A plan for every format of the recipe.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn all(model: &Model, recipe: &Recipe) -> Result<Vec<Self>> {
        recipe.containers.iter().map(|container| Self::new(model, recipe, *container)).collect()
    }

    pub(super) fn complete(mut self, model: &Model, folds: &FoldedNodes) -> Result<Self> {
        self.container.check(&self.module_schemes())?;
        self.add_float_tensors(model, folds)?;
        for entry in &mut self.entries {
            entry.modified = model.is_modified(&entry.stored);
            entry.by_columns = entry.quantized().is_none()
                && entry.info.shape.len() == 2
                && model.architecture().is_stored_by_columns(&entry.stored);
            if entry.by_columns {
                entry.outputs.iter_mut().take(1).for_each(|output| output.info.shape.reverse());
            }
        }
        self.sort(model);
        self.check_names(model)?;
        self.grids_sha256 = self.hash_of_grids();
        Ok(self)
    }

    fn hash_of_grids(&self) -> String {
        let grid = |entry: &PlanEntry| match &entry.action {
            Action::Quantize { module, scheme, scale_dtype, .. }
            | Action::Repack { module, scheme, scale_dtype, .. } => {
                format!("{module} {scheme} {scale_dtype}\n")
            }
            Action::Copy | Action::Rewrite { .. } => String::new(),
        };
        sha256_hex(self.entries.iter().map(grid).collect::<String>())
    }

    /// The hash of the grids of the whole plan, even if this is a part of it.
    pub(crate) fn grids_sha256(&self) -> &str {
        &self.grids_sha256
    }

    pub(super) fn check_names(&self, model: &Model) -> Result<()> {
        let mut writers: HashMap<&str, &PlanEntry> = HashMap::new();
        for entry in &self.entries {
            for output in &entry.outputs {
                let Some(other) = writers.insert(&output.name, entry) else { continue };
                let quantized = entry.quantized().is_some();
                let (copied, module) = if quantized { (other, entry) } else { (entry, other) };
                return Err(Error::NameTaken {
                    path: model.source().location(&copied.stored),
                    tensor: output.name.clone(),
                    module: module.tensor.clone(),
                });
            }
        }
        Ok(())
    }

    /// Adds all tensors that no entry uses: norms, biases, and unknown tensors.
    fn add_float_tensors(&mut self, model: &Model, folds: &FoldedNodes) -> Result<()> {
        let architecture = model.architecture();
        let mut rewritten = std::collections::BTreeMap::new();
        for layer in 0..architecture.layers {
            for (node, op) in architecture.graph(layer).nodes().iter().enumerate().map(|(i, n)| (i, &n.op)) {
                if !folds.contains(layer, node) {
                    continue;
                }
                let own = |name: &str| op.linear_shape().is_none() || name != "weight";
                for parameter in op.parameters().into_iter().filter(|p| own(p.name)) {
                    let name = op.tensor_name(&parameter);
                    rewritten.insert(architecture.in_block(layer, &name), (layer, node));
                }
            }
        }
        let sources = self.entries.iter().flat_map(PlanEntry::sources);
        let mut planned: std::collections::BTreeSet<String> =
            sources.map(|(name, _)| name.to_owned()).collect();
        // A tied checkpoint may contain a copy of the head, which is dropped when the head is untied.
        planned.extend(self.quantizes(&self.head).then(|| format!("{}.weight", self.head)));
        // Unused tensors are dropped: engines that fuse them with other linears would otherwise have to mix float and
        // quantized parts.
        planned.extend(
            model.source().names().into_iter().filter(|n| architecture.is_unread(n)).map(str::to_owned),
        );
        let inputs = architecture.per_layer_inputs.as_ref().map(|inputs| &inputs.projection);
        let inputs = inputs.filter(|module| !self.quantizes(module) && !self.float_modules.contains(module));
        self.float_modules.extend(inputs.cloned());
        for name in model.source().names() {
            if planned.contains(name) {
                continue;
            }
            let info = model.source().require(name)?.clone();
            let action = match rewritten.get(name) {
                Some(&(layer, node)) => Action::Rewrite { layer, node },
                None => Action::Copy,
            };
            let outputs = vec![TensorSpec { name: name.to_owned(), info: info.clone() }];
            let layer = architecture.layer_of(name);
            if architecture.is_in_further_block(name) {
                // Engines that run these blocks must know that their linears are not quantized.
                let module = name.strip_suffix(".weight").filter(|_| info.shape.len() == 2);
                self.float_modules.extend(module.map(str::to_owned));
            } else if layer.is_none() && architecture.is_in_some_block(name) {
                return Err(Error::Config {
                    path: model.path().to_owned(),
                    field: "num_hidden_layers".into(),
                    reason: format!("is {}, but the checkpoint contains `{name}`", architecture.layers),
                    remedy: None,
                });
            }
            let (tensor, stored) = (name.to_owned(), name.to_owned());
            let cache = Vec::new();
            self.entries.push(PlanEntry {
                tensor,
                stored,
                layer,
                info,
                modified: false,
                by_columns: false,
                action,
                outputs,
                cache,
            });
        }
        Ok(())
    }

    /// Sorts the entries: the embedding, the blocks in order, then all other tensors. A program that streams the file
    /// finds each block in one place.
    fn sort(&mut self, model: &Model) {
        let embedding = [model.embedding_name(), model.architecture().embedding.clone()];
        let layers = model.architecture().layers;
        let place = |entry: &PlanEntry| match entry.layer {
            Some(index) => index + 1,
            None if embedding.contains(&entry.tensor) => 0,
            None => layers + 1,
        };
        self.entries.sort_by(|a, b| (place(a), &a.tensor).cmp(&(place(b), &b.tensor)));
    }
}
