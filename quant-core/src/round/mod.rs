//! The sixth stage of the pipeline: how the float weights of a block become codes.
//!
//! A [`Rounding`] answers all questions that the other stages ask: its settings, the states of the calibration batch
//! that it needs, its memory and time, and its work. No other code refers to a rounding by name,
//! except reports, whose field `gptq` is older than this trait.
//!
//! There are two kinds. A rounding that looks at one weight at a time ([`Nearest`]) rounds it when it is written. One
//! that needs the inputs of linears ([`Gptq`]) rounds a block in [stages](StagedRounding), before its tensors are
//! written.

mod gptq;
mod nearest;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::Arc;

use quant_kernels_cpu::StaticScale;
use serde_json::{Map, Value};

pub use gptq::{Gptq, GptqRecord};
pub use nearest::Nearest;

pub use crate::quantize::layer_inputs::LayerInputs;

use crate::calibrate::{ExpertSampling, HiddenStates};
use crate::checkpoint::Dtype;
use crate::format::Container;
use crate::keys::StepKey;
use crate::model::{Block, NodeId, WeightBody};
use crate::quantize::gptq::GptqSettings;
use crate::quantize::{ErrorStats, QuantizedTensor, RowsError, ScaleContext, SourceRows, quantize_within};
use crate::scheme::LinearScheme;
use crate::transform::{LinearGrid, Rewrite, TransformSettings, Workload};
use crate::{CancelToken, Error, Result};

/// All roundings of this library.
pub static ROUNDINGS: &[&dyn Rounding] = &[&Nearest, &Gptq];

/// The rounding of methods that name none.
pub const DEFAULT: &dyn Rounding = &Nearest;

/// How weights are rounded to codes.
///
/// A rounding that another crate defines either stores its settings itself, and returns them from
/// [`fingerprint`](Self::fingerprint), or lists [`keys`](Self::keys) that recipes may set. The values of these keys are
/// in [`TransformSettings::others`]. [`Extensions`](crate::recipe::Extensions) makes it known by its name.
///
/// ```
/// use quant_core::quantize::{ErrorStats, QuantizedTensor, RowsError, SourceRows, quantize_within};
/// use quant_core::recipe::{Extensions, Recipe};
/// use quant_core::round::{Rounding, WeightTask};
///
/// /// Rounds weights to nearest after all of them have moved towards zero by a hundredth.
/// #[derive(Debug)]
/// struct Shrunk;
///
/// impl Rounding for Shrunk {
///     fn name(&self) -> &'static str {
///         "shrunk"
///     }
///
///     fn summary(&self) -> &'static str {
///         "rounds to nearest, a little smaller"
///     }
///
///     fn round_weight(&self, task: &WeightTask<'_>) -> Result<(QuantizedTensor, ErrorStats), RowsError> {
///         let [n, k] = task.shape;
///         let mut values = vec![0.0; n * k];
///         for (i, row) in values.chunks_exact_mut(k).enumerate() {
///             task.rows.load(i, row);
///         }
///         let smaller: Vec<f32> = values.iter().map(|w| w * 0.99).collect();
///         let target = (task.scheme, task.scale_dtype);
///         let (tensor, _) =
///             quantize_within(SourceRows::Floats(&smaller), task.shape, target, task.clip, task.context)?;
///         let error = ErrorStats::of(&values, &tensor).map_err(|e| RowsError::Layout(e.to_string()))?;
///         Ok((tensor, error))
///     }
/// }
///
/// let extensions = Extensions { roundings: vec![&Shrunk], ..Extensions::default() };
/// let text = "[quantize]\nmethod = 'shrunk'\nscheme = 'w4a16-g32'\n";
/// assert_eq!(Recipe::parse_with(text, &extensions)?.method.name, "shrunk");
/// # Ok::<(), quant_core::Error>(())
/// ```
pub trait Rounding: Debug + Send + Sync {
    /// The name in recipes. A method that consists of only this rounding has the same name.
    fn name(&self) -> &'static str;

    /// A one-line description for help and tables.
    fn summary(&self) -> &'static str;

    /// The settings of the rounding: the keys of `[quantize.NAME]` in a recipe file.
    fn keys(&self) -> Vec<StepKey> {
        Vec::new()
    }

    /// Applies the value of one of the [`keys`](Self::keys) to the settings. Recipe files, requests and the command line
    /// all set keys with this method. By default, the value goes into [`TransformSettings::others`].
    ///
    /// # Errors
    /// [`Error::Usage`] when the value is invalid. The recipe parser adds the line number.
    fn set(&self, key: &str, value: &Value, settings: &mut TransformSettings) -> Result<()> {
        settings.others.entry(self.name()).or_default().insert(key.to_owned(), value.clone());
        Ok(())
    }

    /// Sets all keys to their defaults.
    fn reset(&self, settings: &mut TransformSettings) {
        settings.others.remove(self.name());
    }

    /// The keys of a recipe file that result in these settings.
    fn described(&self, settings: &TransformSettings) -> Map<String, Value> {
        settings.others.get(self.name()).cloned().unwrap_or_default()
    }

    /// A fingerprint of the settings: a run is only resumed if the fingerprint is the same.
    fn fingerprint(&self, settings: &TransformSettings) -> Value {
        Value::Object(self.described(settings))
    }

    /// Checks the settings together, when all are set.
    ///
    /// # Errors
    /// [`Error::Usage`] that names the setting.
    fn check(&self, _settings: &TransformSettings) -> Result<()> {
        Ok(())
    }

    /// The model whose hidden states the rounding needs; `None` if it looks only at weights. With states, the pipeline
    /// calls [`begin`](Self::begin) for each block.
    fn inputs(&self, _settings: &TransformSettings) -> Option<LayerInputs> {
        None
    }

    /// With states of the quantized model: the number of blocks in a span, whose first block gets the states of the
    /// float model; `None` if all blocks are one span.
    fn span_blocks(&self, _settings: &TransformSettings) -> Option<usize> {
        None
    }

    /// If blocks depend on the results of earlier blocks: the settings without this dependence, as a remedy with
    /// [marked](crate::wording) settings. A job in units needs independent blocks. By default, there are no such
    /// settings.
    fn independent_blocks(&self) -> Option<&'static str> {
        None
    }

    /// Whether only one expert's weights are in memory at a time while a block is rounded.
    fn takes_experts_apart(&self, _settings: &TransformSettings) -> bool {
        false
    }

    /// Whether each expert of a block is rounded without regard to the others on inputs of the float model, so that
    /// [`begin`](Self::begin) may get the grids of only some of them. A job in units can then split a block.
    fn rounds_experts_apart(&self) -> bool {
        false
    }

    /// The memory in bytes that each stage of rounding a block needs, in addition to the block and the hidden states, in
    /// the order of the stages. By default, rounding needs none.
    fn memory(&self, _work: &Workload<'_>) -> Vec<RoundingMemory> {
        Vec::new()
    }

    /// The floating-point operations for rounding a block, in addition to passes of the batch.
    fn operations(&self, _work: &Workload<'_>) -> f64 {
        0.0
    }

    /// How the rounding applies to the blocks of GGUF files.
    fn blocks(&self, _settings: &TransformSettings) -> BlockRounding {
        BlockRounding::Unsupported
    }

    /// Rounds one weight: of a linear outside the blocks, or of any linear if the rounding needs no states. By default
    /// to nearest.
    ///
    /// # Errors
    /// [`RowsError`] when values are not finite or do not fit the grid.
    fn round_weight(
        &self,
        task: &WeightTask<'_>,
    ) -> std::result::Result<(QuantizedTensor, ErrorStats), RowsError> {
        let target = (task.scheme, task.scale_dtype);
        quantize_within(task.rows, task.shape, target, task.clip, task.context)
    }

    /// Begins to round a block on the states before it, if the rounding [needs them](Self::inputs). If `advance` is
    /// set, states of the quantized model become the outputs of the rounded block, and [`States::Float`] those of the
    /// float block. [`States::Copy`] is not changed.
    ///
    /// # Errors
    /// When the block fails, numbers are not finite, or the run is cancelled.
    fn begin<'a>(
        &self,
        _task: RoundingTask<'a>,
        _states: (States, &'a mut HiddenStates),
        _advance: bool,
    ) -> Result<Box<dyn StagedRounding + 'a>> {
        Err(Error::Internal(format!("`{}` does not round blocks in stages", self.name())))
    }
}

impl PartialEq for dyn Rounding {
    /// Whether two roundings have the same name.
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for dyn Rounding {}

/// The hidden states that a pass uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum States {
    /// The states of the float model, which the pass advances.
    Float,
    /// The states of the float model from before the block, which the pass does not change.
    Copy,
    /// The states of the quantized model, which the pass advances.
    Quantized,
}

/// Memory in bytes for a stage of rounding a block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RoundingMemory {
    /// While the batch passes through the block.
    pub gathering: u64,
    /// While a weight is rounded.
    pub solving: u64,
    /// The linears that this stage rounds, if the weights of earlier stages are already quantized, and those of later
    /// stages not yet read. `None` if the whole block is in memory.
    pub rounds: Option<Vec<NodeId>>,
}

/// How a rounding applies to the blocks of GGUF files.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum BlockRounding {
    /// Each weight is rounded by itself, with the search of scales that is requested.
    Nearest,
    /// Errors are compensated with the Hessian of the inputs ([`encode_blocks`](crate::quantize::gptq::encode_blocks)).
    Compensated {
        /// The keys of the rounding that apply to blocks.
        keys: &'static [&'static str],
        /// Settings of the compensation, which follow from those of the rounding.
        settings: GptqSettings,
    },
    /// It cannot write GGUF files.
    Unsupported,
}

/// A weight to be rounded by itself.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct WeightTask<'a> {
    /// The values, row by row.
    pub rows: SourceRows<'a>,
    /// The shape `[n, k]`.
    pub shape: [usize; 2],
    /// Bits, granularity, symmetry.
    pub scheme: LinearScheme,
    /// The dtype of stored scales.
    pub scale_dtype: Dtype,
    /// Bounds `[n, groups]` of the ranges of grids, if a step narrowed them.
    pub clip: Option<&'a [f32]>,
    /// The context in which its scales are chosen.
    pub context: ScaleContext,
    /// Settings of the steps and of the rounding.
    pub settings: &'a TransformSettings,
}

/// A block to be rounded in stages.
#[non_exhaustive]
pub struct RoundingTask<'a> {
    /// Prefix of the block's modules, for messages.
    pub prefix: &'a str,
    /// The block with the rewrite applied.
    pub block: Block,
    /// The grids of the linears to be quantized.
    pub grids: &'a BTreeMap<NodeId, LinearGrid>,
    /// The decisions of the transforms. Its clip bounds limit the ranges of the grids.
    pub rewrite: &'a Rewrite,
    /// The static input grids, which are the same for all tokens.
    pub inputs: &'a BTreeMap<NodeId, StaticScale>,
    /// Settings of the steps and of the rounding.
    pub settings: &'a TransformSettings,
    /// The tokens that each expert is calibrated on.
    pub experts: ExpertSampling,
    /// Experts that are calibrated on all tokens, and the number of tokens routed to each in the float model.
    pub unrouted: &'a BTreeMap<NodeId, u64>,
    /// Linears that an interrupted run has rounded and written. A rounding may ignore them and round all linears again;
    /// [`StagedRounding::finished_stage`] avoids this.
    pub finished: BTreeSet<NodeId>,
    /// The format that the quantized linears are written in.
    pub container: &'static dyn Container,
    /// Checked between pieces of work.
    pub cancel: &'a CancelToken,
}

impl RoundingTask<'_> {
    /// Returns a rounded weight as the format stores it, with the static grid of the linear's input.
    ///
    /// # Errors
    /// [`Error::Numeric`] when a scale overflows its type.
    pub fn stored(&self, node: NodeId, mut tensor: QuantizedTensor) -> Result<QuantizedTensor> {
        tensor.input = self.inputs.get(&node).copied();
        stored(tensor, self.container, self.grids[&node].scale_dtype, &self.tensor(node))
    }

    /// The full name of a linear's weight.
    pub fn tensor(&self, node: NodeId) -> String {
        format!("{}{}.weight", self.prefix, self.block.graph().name(node))
    }
}

/// A block that is being rounded. The results of a stage may be written before the next stage begins.
///
/// ```
/// use std::sync::Arc;
/// use quant_core::calibrate::{HiddenStates, TokenWindows};
/// # use quant_core::checkpoint::{MemorySink, ModelDirectory};
/// use quant_core::model::{Model, WeightBody};
/// use quant_core::pipeline::{Job, quantize_job};
/// use quant_core::quantize::{ScaleContext, quantize_within};
/// use quant_core::recipe::{Extensions, Plan, Recipe};
/// use quant_core::round::{
///     LayerInputs, Rounded, Rounding, RoundingTask, StageRounded, StagedRounding, States,
/// };
/// use quant_core::transform::TransformSettings;
/// use quant_core::{CancelToken, Error, Result, Silent};
/// use serde_json::json;
/// # mod tiny { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/support/tiny.rs")); }
///
/// /// Rounds all linears of a block to nearest, in one stage.
/// #[derive(Debug)]
/// struct AtOnce;
///
/// impl Rounding for AtOnce {
///     fn name(&self) -> &'static str {
///         "at-once"
///     }
///
///     fn summary(&self) -> &'static str {
///         "rounds a block to nearest"
///     }
///
///     fn inputs(&self, _: &TransformSettings) -> Option<LayerInputs> {
///         Some(LayerInputs::Float)
///     }
///
///     fn begin<'a>(
///         &self,
///         task: RoundingTask<'a>,
///         (which, states): (States, &'a mut HiddenStates),
///         advance: bool,
///     ) -> Result<Box<dyn StagedRounding + 'a>> {
///         // A rounding that measures errors would pass the states through the block here.
///         if advance && which == States::Float {
///             states.advance(&task.block, task.cancel)?;
///         }
///         let tokens = states.layout().tokens() as u64;
///         Ok(Box::new(Stage { task: Some(task), tokens }))
///     }
/// }
///
/// struct Stage<'a> {
///     task: Option<RoundingTask<'a>>,
///     tokens: u64,
/// }
///
/// impl StagedRounding for Stage<'_> {
///     fn next_stage(&mut self) -> Result<Option<StageRounded>> {
///         let Some(task) = self.task.take() else { return Ok(None) };
///         let mut rounded = StageRounded::new();
///         for (&node, grid) in task.grids {
///             let weight = task.block.linear(node).weight().read()?;
///             let rows = weight.as_float().ok_or_else(|| Error::Internal("quantized already".into()))?;
///             let clip = task.rewrite.clips.get(&node).map(Vec::as_slice);
///             let target = (grid.scheme, grid.scale_dtype);
///             let (tensor, _) = quantize_within(rows, weight.shape(), target, clip, ScaleContext::default())
///                 .map_err(|error| error.within(&task.tensor(node), None))?;
///             let weight = Arc::new(WeightBody::Quantized(task.stored(node, tensor)?));
///             let record = json!({ "stage": 0 });
///             rounded.insert(node, Rounded { weight, record, tokens: self.tokens, routed: None });
///         }
///         Ok(Some(rounded))
///     }
///
///     fn finish(self: Box<Self>) -> Result<()> {
///         Ok(()) // `begin` has advanced the states
///     }
/// }
/// # let temporary = tempfile::tempdir().unwrap();
/// # tiny::tiny_llama(temporary.path()).unwrap();
/// # let model = Model::open(&ModelDirectory::open(temporary.path())?)?;
///
/// let extensions = Extensions { roundings: vec![&AtOnce], ..Extensions::default() };
/// let recipe = Recipe::parse_with("[quantize]\nmethod = 'at-once'\nscheme = 'w4a16-g32'\n", &extensions)?;
/// let plan = Plan::new(&model, &recipe, recipe.containers[0])?;
/// let windows = TokenWindows::cut((0..64).collect(), 16);
/// let (windows, observer, cancel) = (Some(&windows), &Silent, &CancelToken::new());
/// let job = Job { model: &model, plan: &plan, windows, maxima: None, searches: None, observer, cancel };
/// let report = quantize_job(&job, &mut MemorySink::new(plan.outputs())?)?;
/// let linears = report.tensors.iter().filter(|tensor| tensor.records.get("at-once") == Some(&json!({ "stage": 0 })));
/// assert_eq!(linears.count(), 2 * 7);
/// # Ok::<(), quant_core::Error>(())
/// ```
pub trait StagedRounding {
    /// Rounds the linears of the next stage; returns `None` after the last stage. Every linear of the task's grids must
    /// be in one stage.
    ///
    /// # Errors
    /// When the block fails, numbers are not finite, or the run is cancelled.
    fn next_stage(&mut self) -> Result<Option<StageRounded>>;

    /// If all linears of the next stage are [finished](RoundingTask::finished), returns them. Then
    /// [`skip_stage`](Self::skip_stage) is called instead of [`next_stage`](Self::next_stage). By default, no stage is
    /// skipped.
    fn finished_stage(&mut self) -> Option<Vec<NodeId>> {
        None
    }

    /// Skips the next stage. `read` returns the weight of one of its linears, as the interrupted run has written it.
    ///
    /// # Errors
    /// As [`next_stage`](Self::next_stage), and when a weight cannot be read.
    fn skip_stage(&mut self, _read: &mut dyn FnMut(NodeId) -> Result<WeightBody>) -> Result<()> {
        Err(Error::Internal("this rounding skips no stages".into()))
    }

    /// Advances the states past the block, if that was requested and has not been done yet.
    ///
    /// # Errors
    /// As [`next_stage`](Self::next_stage).
    fn finish(self: Box<Self>) -> Result<()>;
}

/// The linears that a stage has rounded.
pub type StageRounded = BTreeMap<NodeId, Rounded>;

/// A linear that was rounded in a stage.
#[derive(Debug, Clone)]
pub struct Rounded {
    /// The quantized weight, shared with the block that is still being evaluated: [`WeightBody::Quantized`].
    pub weight: Arc<WeightBody>,
    /// What the report of the tensor has under the name of the rounding.
    pub record: Value,
    /// The number of tokens on which it was rounded.
    pub tokens: u64,
    /// The number of these tokens that are routed to the linear's expert, if that expert was calibrated on all tokens.
    pub routed: Option<u64>,
}

impl Rounded {
    pub(crate) fn tensor(&self) -> Result<&QuantizedTensor> {
        match &*self.weight {
            WeightBody::Quantized(tensor) => Ok(tensor),
            _ => Err(Error::Internal("a rounded weight is not quantized".into())),
        }
    }
}

/// Converts a quantized weight to the form that the container stores: one level of scales if it supports only one, and
/// float activations if it cannot describe their grid.
///
/// # Errors
/// [`Error::Numeric`] when a scale overflows its type.
pub(crate) fn stored(
    tensor: QuantizedTensor,
    container: &dyn Container,
    scale_dtype: Dtype,
    name: &str,
) -> Result<QuantizedTensor> {
    let mut tensor = match container.keeps_levels() {
        true => tensor,
        false => tensor.flattened(scale_dtype).map_err(|scale| Error::Numeric {
            tensor: name.to_owned(),
            reason: format!("values with a scale of {scale} exceed the range of {scale_dtype}"),
        })?,
    };
    tensor.scheme = container.stored_scheme(tensor.scheme);
    Ok(tensor)
}
