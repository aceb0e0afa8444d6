//! Rewrites of float weights that leave the block's output unchanged (folding), or trade a little of its accuracy for
//! less rounding error (clipping).
//!
//! A [`Transform`] takes one float block and its inputs and returns a [`Rewrite`]. Several transforms are applied in
//! sequence, each to the block as rewritten by the previous ones. Nothing is changed in place; the quantizer applies
//! the rewrite to each weight as it reads it.
//!
//! Steps that concern the whole model are not transforms: [`rotate`] and [`fold_norms`] prepare a modified model before
//! any transform runs.

mod awq;
mod awq_by_expert;
mod by_expert;
mod candidates;
mod clip;
mod difference;
mod findings;
mod fold;
mod objective;
mod on_read;
mod race;
mod reorder;
mod rewrite;
mod rewritten;
mod rotate;
mod rounding;
mod rows;
mod sample;
mod settings;
mod shared;
mod smooth;
mod smooth_attention;
mod statistics;
mod work;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::Path;

use serde_json::{Map, Value};

pub use awq::{Awq, AwqSettings};
pub use candidates::{Search, TriedScales};
pub use clip::Clip;
pub(crate) use findings::{FindingStore, Findings};
pub use fold::fold;
pub use reorder::Reorder;
pub use rewrite::{ChannelOutlier, ClipRecord, FoldRecord, MAX_LISTED_CONSUMERS, Rewrite, StepRecord};
pub use rewritten::rewritten;
pub use rotate::{fold_norms, rotate};
pub use settings::{Alpha, Automatic, SettingsType, StepSettings, TransformSettings};
pub use smooth::{
    OutputSettings, Producers, SmoothOutputs, SmoothQuant, SmoothRecord, SmoothSearch, SmoothSettings,
};
pub use smooth_attention::{AttentionRecord, AttentionSettings, SmoothAttention};
pub use work::{SearchWork, StepContext, Workload};

const SCALE_CANDIDATES: usize = awq::GRID + 1;

use crate::blocks::{BlockSearch, BlockType};
use crate::calibrate::{ChannelRanges, HiddenStates, StatisticsPass};
use crate::checkpoint::Dtype;
use crate::model::{Architecture, Block, BlockGraph, ExpertOrder, NodeId};
use crate::scheme::LinearScheme;
use crate::{CancelToken, Error, Result};

pub use crate::keys::StepKey;

/// The grid to which a linear's weight will be rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearGrid {
    /// Bits, granularity, symmetry.
    pub scheme: LinearScheme,
    /// The dtype of stored scales.
    pub scale_dtype: Dtype,
    /// The first of the linears for which engines use one common tensor scale, if this linear shares it with others.
    pub fused: Option<NodeId>,
}

impl LinearGrid {
    pub(crate) fn shares_with(&self, other: &Self) -> bool {
        self.fused.is_some()
            && self.fused == other.fused
            && self.scheme == other.scheme
            && self.scheme.shares_over_tensor()
    }
}

/// The blocks of a GGUF file to which a linear's weight will be rounded.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockGrid {
    /// The type of the blocks.
    pub kind: &'static BlockType,
    /// The search for scales when a candidate is rounded.
    pub search: BlockSearch,
    /// The importance of each input channel, which weights squared errors; 1 if `None`.
    pub importance: Option<Vec<f32>>,
}

impl BlockGrid {
    /// The number of adjacent weights that share a scale in most block types.
    const PART: usize = 32;
}

/// A block and the information about it that a [`Transform`] needs.
#[derive(Debug)]
#[non_exhaustive]
pub struct BlockTask<'a> {
    /// The prefix of the block's modules, for messages and records.
    pub prefix: &'a str,
    /// The float block.
    pub block: &'a Block,
    /// The grids of the linears that will be quantized to a scheme.
    pub grids: &'a BTreeMap<NodeId, LinearGrid>,
    /// The blocks of the linears that will be quantized to a block type, for transforms that
    /// [support](Transform::supports_blocks) them.
    pub block_grids: &'a BTreeMap<NodeId, BlockGrid>,
    /// The dtypes in which norms are stored.
    pub norm_dtypes: &'a BTreeMap<NodeId, Dtype>,
    /// Settings of transforms.
    pub settings: &'a TransformSettings,
    /// The family's default exponent for SmoothQuant.
    pub smoothing: f32,
    /// The ranges of linears' inputs in the block as stored in the checkpoint, if some transform or grid needs them.
    pub ranges: &'a BTreeMap<NodeId, ChannelRanges>,
    /// Whether the weights of only one expert may be in memory at a time, if the transform
    /// [allows it](Transform::takes_experts_apart).
    pub experts_apart: bool,
    /// What an interrupted run has found, and what a resumed run will need.
    pub(crate) findings: Option<Findings<'a>>,
    /// Checked between pieces of work.
    pub cancel: &'a CancelToken,
}

static NO_GRIDS: BTreeMap<NodeId, LinearGrid> = BTreeMap::new();
static NO_BLOCKS: BTreeMap<NodeId, BlockGrid> = BTreeMap::new();
static NO_DTYPES: BTreeMap<NodeId, Dtype> = BTreeMap::new();
static NO_RANGES: BTreeMap<NodeId, ChannelRanges> = BTreeMap::new();

impl<'a> BlockTask<'a> {
    /// Creates a task for a block of which no linear is quantized, with SmoothQuant's default exponent 0.5. Set the
    /// other fields as needed.
    pub fn new(
        prefix: &'a str,
        block: &'a Block,
        settings: &'a TransformSettings,
        cancel: &'a CancelToken,
    ) -> Self {
        Self {
            prefix,
            block,
            grids: &NO_GRIDS,
            block_grids: &NO_BLOCKS,
            norm_dtypes: &NO_DTYPES,
            settings,
            smoothing: 0.5,
            ranges: &NO_RANGES,
            experts_apart: false,
            findings: None,
            cancel,
        }
    }

    /// Whether a linear's weight will be rounded.
    fn is_rounded(&self, node: NodeId) -> bool {
        self.grids.contains_key(&node) || self.block_grids.contains_key(&node)
    }

    /// The number of adjacent weights in a row of width `k` that share a scale; `None` if the weight stays float.
    fn group_size(&self, node: NodeId, k: usize) -> Option<usize> {
        match self.grids.get(&node) {
            Some(grid) => Some(grid.scheme.granularity.group_size(k)),
            None => self.block_grids.get(&node).map(|_| BlockGrid::PART.min(k)),
        }
    }

    /// Drops the bytes of a weight, if it belongs to an expert and experts are processed one at a time.
    fn done_with(&self, node: NodeId) {
        let of_expert = self.experts_apart && self.block.graph().expert_of(node).is_some();
        let stored = self.block.linear(node).weight().as_stored();
        stored.filter(|_| of_expert).map(|weight| weight.release());
    }

    /// The order of experts, if they are processed one at a time.
    fn order(&self) -> Option<ExpertOrder> {
        ExpertOrder::of(self.block.graph()).filter(|_| self.experts_apart)
    }

    /// Runs a pass through the block, one expert at a time if necessary, and returns the number of tokens of each
    /// linear.
    fn run(
        &self,
        pass: StatisticsPass<'_>,
        states: &mut HiddenStates,
        advance: bool,
    ) -> Result<BTreeMap<NodeId, u64>> {
        match self.order() {
            Some(order) => pass.run_by_expert(states, advance, &order),
            None => pass.run(states, advance),
        }
    }

    /// Replaces the states before the block with its output.
    fn advance(&self, states: &mut HiddenStates) -> Result<()> {
        let Some(order) = self.order() else { return states.advance(self.block, self.cancel) };
        let (block, layout) = (self.block.routed(), states.layout().clone());
        StatisticsPass::new(&block, &layout, self.cancel).run_by_expert(states, true, &order).map(drop)
    }

    /// A node's full module name.
    pub fn module(&self, node: NodeId) -> String {
        format!("{}{}", self.prefix, self.block.graph().name(node))
    }
}

/// The data that a transform needs in addition to the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// The ranges of linears' inputs.
    pub ranges: bool,
    /// The hidden states of the batch before the block.
    pub states: bool,
}

/// A search for a rewrite of a block, with everything that a run needs to know about it.
///
/// A transform that another crate defines either stores its settings itself, and returns them from
/// [`fingerprint`](Self::fingerprint), or lists [`keys`](Self::keys) that recipes may set. The values of these keys are
/// in [`TransformSettings::others`]. [`Extensions`](crate::recipe::Extensions) makes it known by its name.
///
/// ```
/// use quant_core::calibrate::HiddenStates;
/// use quant_core::model::{BlockGraph, FoldGroup, NodeId};
/// use quant_core::recipe::Extensions;
/// use quant_core::run::{Done, Host, Nothing, QuantizeRequest, RecipeSettings, quantize};
/// use quant_core::transform::{BlockTask, Needs, Rewrite, Transform, TransformSettings, fold};
/// use quant_core::{CancelToken, Result, Silent};
/// # mod tiny { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/support/tiny.rs")); }
/// # let temporary = tempfile::tempdir().unwrap();
/// # let path = temporary.path().join("model");
/// # std::fs::create_dir(&path).unwrap();
/// # tiny::tiny_llama(&path).unwrap();
/// # let recipe = temporary.path().join("recipe.toml");
/// # let out = temporary.path().join("out");
///
/// /// Gives all columns of linears that read norms the same largest weight. It needs no calibration text.
/// #[derive(Debug)]
/// struct EvenColumns;
///
/// fn groups(graph: &BlockGraph) -> impl Iterator<Item = FoldGroup> {
///     graph.fold_groups().into_iter().filter(|group| group.repeat == 1)
/// }
///
/// impl Transform for EvenColumns {
///     fn name(&self) -> &'static str {
///         "even-columns"
///     }
///
///     fn summary(&self) -> &'static str {
///         "evens out the columns of weights"
///     }
///
///     fn folded_nodes(&self, graph: &BlockGraph, _: &TransformSettings) -> Vec<NodeId> {
///         groups(graph).flat_map(|group| std::iter::once(group.producer).chain(group.consumers)).collect()
///     }
///
///     fn needs(&self, _: &TransformSettings) -> Needs {
///         Needs { ranges: false, states: false }
///     }
///
///     fn search(&self, tasks: &[BlockTask<'_>], _: Option<&mut HiddenStates>, _: bool) -> Result<Vec<Rewrite>> {
///         let one = |task: &BlockTask<'_>| {
///             let mut rewrite = Rewrite::default();
///             for group in groups(task.block.graph()) {
///                 let mut largest = vec![1e-3_f32; group.rows.len()];
///                 for &consumer in &group.consumers {
///                     let weight = task.block.linear(consumer).weight().read()?.to_f32()?;
///                     for row in weight.chunks_exact(largest.len()) {
///                         largest.iter_mut().zip(row).for_each(|(l, w)| *l = l.max(w.abs()));
///                     }
///                 }
///                 let scales: Vec<f32> = largest.iter().map(|l| 1.0 / l).collect();
///                 fold(&mut rewrite, task, &group, &scales)?; // columns times scales, the norm divided by them
///             }
///             Ok(rewrite)
///         };
///         tasks.iter().map(one).collect()
///     }
/// }
///
/// let text = "format = 'awq'\n[[transform]]\nkind = 'even-columns'\n[quantize]\nscheme = 'w4a16-g32'\n";
/// std::fs::write(&recipe, text).unwrap();
/// let settings = RecipeSettings { recipe: Some(recipe), ..RecipeSettings::default() };
/// let extensions = Extensions { transforms: vec![&EvenColumns], ..Extensions::default() };
/// let request = QuantizeRequest { settings, extensions, ..QuantizeRequest::new(&path, &out) };
/// let done = quantize(&request, &Host::new(&Silent, &CancelToken::new(), &Nothing))?;
/// let Done::Checkpoints(done) = done else { panic!("a GGUF file") };
/// assert_eq!(done.outputs[0].1.steps, ["even-columns"]);
/// # Ok::<(), quant_core::Error>(())
/// ```
pub trait Transform: Debug + Send + Sync {
    /// The name in recipes.
    fn name(&self) -> &'static str;

    /// A one-line description for help and tables.
    fn summary(&self) -> &'static str;

    /// Norms and linears whose stored parameters the search may change, apart from rounding.
    fn folded_nodes(&self, graph: &BlockGraph, settings: &TransformSettings) -> Vec<NodeId>;

    /// The data that the transform needs in addition to the block.
    fn needs(&self, settings: &TransformSettings) -> Needs;

    /// The settings of the transform: the keys of a `[[transform]]` entry of a recipe file, in addition to `kind`.
    fn keys(&self) -> Vec<StepKey> {
        Vec::new()
    }

    /// Applies the value of one of the [`keys`](Self::keys) to the settings. By default, the value goes into
    /// [`TransformSettings::others`]; a transform that checks values overrides this method.
    ///
    /// # Errors
    /// [`Error::Usage`] when the value is invalid. The recipe parser adds the line number.
    fn set(&self, key: &str, value: &Value, settings: &mut TransformSettings) -> Result<()> {
        settings.others.entry(self.name()).or_default().insert(key.to_owned(), value.clone());
        Ok(())
    }

    /// Reads the file that a [key](StepKey::is_file) names.
    ///
    /// # Errors
    /// When the file cannot be read or is invalid.
    fn set_file(&self, key: &str, _path: &Path, _settings: &mut TransformSettings) -> Result<()> {
        Err(Error::Internal(format!("`{}` reads no file for `{key}`", self.name())))
    }

    /// The keys of a recipe file that result in these settings.
    fn described(&self, settings: &TransformSettings) -> Map<String, Value> {
        settings.others.get(self.name()).cloned().unwrap_or_default()
    }

    /// How the transform compares candidates on the batch, if it searches for scales.
    fn search_mode(&self, _settings: &TransformSettings) -> Option<Search> {
        None
    }

    /// Whether the transform has an effect only on linears whose inputs are rounded.
    fn is_for_rounded_inputs(&self) -> bool {
        false
    }

    /// Whether the transform divides the outputs of linears by scales computed from the maxima of activations. Two such
    /// steps repeat each other.
    fn smooths_linears(&self, _settings: &TransformSettings) -> bool {
        false
    }

    /// Whether the search takes account of [`BlockTask::block_grids`], and only multiplies columns and divides rows,
    /// norms and biases. GGUF files are written only with such transforms, and always need a calibration text for them.
    fn supports_blocks(&self) -> bool {
        false
    }

    /// Whether the transform narrows the ranges of weights, which later steps must not change.
    fn narrows_ranges(&self) -> bool {
        false
    }

    /// Whether the search of a block with this graph can process the block's experts one at a time, with the same
    /// result.
    fn takes_experts_apart(&self, _graph: &BlockGraph, _settings: &TransformSettings) -> bool {
        false
    }

    /// A fingerprint of the settings: a run is only resumed if the fingerprint is the same. By default these are the
    /// [described](Self::described) keys, so a transform that stores its settings in [`StepSettings`] must describe them.
    fn fingerprint(&self, settings: &TransformSettings) -> Value {
        let described = self.described(settings);
        if described.is_empty() { Value::Null } else { Value::Object(described) }
    }

    /// Fails if the transform would have no effect on the request, or undo another step.
    ///
    /// # Errors
    /// [`Error::Usage`] with the remedy.
    fn check(&self, _context: &StepContext<'_>) -> Result<()> {
        Ok(())
    }

    /// Notes for the user: parts of the model that the transform leaves unchanged, with the reason.
    fn notes(&self, _architecture: &Architecture) -> Vec<String> {
        Vec::new()
    }

    /// The memory in bytes that the transform needs while it searches a block, in addition to the block and the hidden
    /// states.
    fn memory(&self, _work: &Workload<'_>) -> u64 {
        0
    }

    /// The part of [`memory`](Self::memory) that is kept while the batch passes through the block.
    fn gathering_memory(&self, work: &Workload<'_>) -> u64 {
        self.memory(work)
    }

    /// The operations of the search in a block, in addition to one pass of the batch.
    fn work(&self, _work: &Workload<'_>) -> SearchWork {
        SearchWork::default()
    }

    /// Finds a rewrite of the block for each task. `hidden` are the states that enter the block, if the transform needs
    /// them. With `advance`, a transform that needs them replaces them with the output of the float block.
    ///
    /// Tasks differ only in the grids of linears, since a recipe may have several formats. The rewrite of a task does
    /// not depend on the others.
    ///
    /// # Errors
    /// When the block fails, numbers are not finite, or the run is cancelled.
    fn search(
        &self,
        tasks: &[BlockTask<'_>],
        hidden: Option<&mut HiddenStates>,
        advance: bool,
    ) -> Result<Vec<Rewrite>>;
}
