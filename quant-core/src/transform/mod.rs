//! The fifth stage of the path: rewrites of float weights that leave the block's output unchanged
//! (folding), or trade a little of it for less rounding error (clipping).
//!
//! A [`Transform`] looks at one float block and its inputs and returns a [`Rewrite`]; several follow on each other, each
//! on the block that those before it have rewritten. A rewrite is orders of rows and columns, factors for
//! columns, divisors for rows, new norm weights, clip bounds. Nothing is changed in place; the
//! quantizer applies the rewrite to each weight as it reads it.
//!
//! What concerns the whole model at once is no such thing: [`rotate`] and [`fold_norms`] make another model, before anything looks at it.

mod awq;
mod candidates;
mod clip;
mod difference;
mod fold;
mod objective;
mod race;
mod reorder;
mod rewrite;
mod rotate;
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

use serde_json::Value;

pub use awq::Awq;
pub use candidates::{Search, TriedScales};
pub use clip::Clip;
pub use fold::fold;
pub use reorder::Reorder;
pub use rewrite::{ChannelOutlier, ClipRecord, FoldRecord, MAX_LISTED_CONSUMERS, Rewrite};
pub use rotate::{fold_norms, rotate};
pub use settings::{Alpha, Automatic, Producers, SmoothSettings, StepSettings, TransformSettings};
pub use smooth::{SmoothOutputs, SmoothQuant, SmoothRecord, SmoothSearch};
pub use smooth_attention::{AttentionRecord, SmoothAttention};
pub use work::{Outline, SearchWork, Workload};

/// Scales that a search tries for a group: no scaling, and the points of the grid.
const SCALE_CANDIDATES: usize = awq::GRID + 1;

use crate::calibrate::{ChannelRanges, HiddenStates};
use crate::checkpoint::Dtype;
use crate::model::{Block, BlockGraph, NodeId};
use crate::scheme::LinearScheme;
use crate::{CancelToken, Result};

/// The grid that a linear's weight will be rounded to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Bits, granularity, symmetry.
    pub scheme: LinearScheme,
    /// The type scales are stored in.
    pub scale_dtype: Dtype,
    /// The first of the linears that engines run as one with it, where there are several: their weights may need a scale
    /// in common.
    pub fused: Option<NodeId>,
}

impl Grid {
    /// Whether two linears have a scale in common.
    pub(crate) fn shares_with(&self, other: &Self) -> bool {
        self.fused.is_some()
            && self.fused == other.fused
            && self.scheme == other.scheme
            && self.scheme.shares_over_tensor()
    }
}

/// One block, as a [`Transform`] sees it.
#[derive(Debug)]
pub struct BlockTask<'a> {
    /// Prefix of the block's modules, for messages and records.
    pub prefix: &'a str,
    /// The float block.
    pub block: &'a Block,
    /// The grids of the linears that will be quantized.
    pub grids: &'a BTreeMap<NodeId, Grid>,
    /// The types that norms are stored in.
    pub norm_dtypes: &'a BTreeMap<NodeId, Dtype>,
    /// How transforms are run.
    pub settings: &'a TransformSettings,
    /// SmoothQuant's exponent of the family.
    pub smoothing: f32,
    /// The ranges of the values that linears read, in the block as the checkpoint has it, where some transform or grid
    /// needs them.
    pub ranges: &'a BTreeMap<NodeId, ChannelRanges>,
    /// Checked between pieces of work.
    pub cancel: &'a CancelToken,
}

impl BlockTask<'_> {
    /// A node's full module name.
    pub fn module(&self, node: NodeId) -> String {
        format!("{}{}", self.prefix, self.block.graph().name(node))
    }
}

/// What a transform looks at beside the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// The ranges of what linears read.
    pub ranges: bool,
    /// The hidden states of the batch before the block.
    pub states: bool,
}

/// A search for a rewrite of a block, with all that a run has to know of it: the settings that are its own, whether it makes
/// sense, and what it takes. Nothing outside asks for a transform by its name.
///
/// One that has settings of its own beyond [`TransformSettings`] holds them itself, and returns them from
/// [`fingerprint`](Self::fingerprint).
pub trait Transform: Debug + Send + Sync {
    /// The name that recipes take.
    fn name(&self) -> &'static str;

    /// One line for help and tables.
    fn summary(&self) -> &'static str;

    /// Norms and linears whose stored parameters the search may change, beyond rounding.
    fn folded_nodes(&self, graph: &BlockGraph, settings: &TransformSettings) -> Vec<NodeId>;

    /// What it has to be given.
    fn needs(&self, settings: &TransformSettings) -> Needs;

    /// The settings that act on this transform alone, by their names.
    fn settings(&self) -> &'static [&'static str] {
        &[]
    }

    /// The keys of [`StepSettings`] that act on it.
    fn recipe_keys(&self) -> &'static [&'static str] {
        &[]
    }

    /// Puts what a recipe file says of it into the settings.
    fn configure(&self, _said: StepSettings, _settings: &mut TransformSettings) {}

    /// What a recipe file would say for these settings.
    fn described(&self, _settings: &TransformSettings) -> StepSettings {
        StepSettings::default()
    }

    /// Whether it narrows the ranges of weights, which no step after it may change.
    fn narrows_ranges(&self) -> bool {
        false
    }

    /// How it is run: a run is resumed only where this is the same.
    fn fingerprint(&self, _settings: &TransformSettings) -> Value {
        Value::Null
    }

    /// Fails where it would have no effect on what is asked for, or undo another step.
    ///
    /// # Errors
    /// [`Error::Usage`](crate::Error::Usage) with what to ask for instead.
    fn check(&self, _outline: &Outline<'_>) -> Result<()> {
        Ok(())
    }

    /// Bytes that it keeps while it looks at a block, beside the block and the hidden states.
    fn memory(&self, _work: &Workload<'_>) -> u64 {
        0
    }

    /// What its search in a block takes, beside one pass of the batch.
    fn work(&self, _work: &Workload<'_>) -> SearchWork {
        SearchWork::default()
    }

    /// Finds a rewrite of one block for each task. `hidden` is what enters the block, where the transform needs it;
    /// with `advance` one that does moves it on to what comes out of the block while its weights are float.
    ///
    /// Tasks are of the same block and differ in the grids of the same linears, as several
    /// containers ask for them: what is gathered of the batch serves all. A task's rewrite does not
    /// depend on the others.
    ///
    /// # Errors
    /// When the block fails, numbers are not finite, or the token pulls.
    fn search(
        &self,
        tasks: &[BlockTask<'_>],
        hidden: Option<&mut HiddenStates>,
        advance: bool,
    ) -> Result<Vec<Rewrite>>;
}
