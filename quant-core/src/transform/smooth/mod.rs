//! SmoothQuant: moves outliers of activations into the weights (Xiao et al., ICML 2023).
//!
//! A few input channels of a linear have values that dwarf the others, and a grid that covers them leaves few codes for
//! the rest. Dividing a channel by `s` and multiplying the matching column of the weight by it changes nothing in real
//! arithmetic; the division is folded into the norm that produces the channel. With `X` the inputs and `W` the weights
//! of all linears that read them (§4 of the paper, equation 4):
//!
//! ```text
//! s_j = max |X_j|^α / max |W_j|^(1 − α)          both maxima at least 1e-5
//! ```
//!
//! `α` is given, the family's default, or searched. The search tries 0.40, 0.45 … 0.95 and no smoothing, and takes the
//! one with the least squared error in the output of the whole block when its linears and their inputs are quantized,
//! one producer after the other in evaluation order.
//!
//! A channel that is always 0 on the text keeps its scale: the published code divides the norm by 1e-5 there, which
//! exceeds the range of half-precision types.
//!
//! [`SmoothOutputs`] does this between linears only (QServe, §4.3.3): the inputs of `down_proj` and `o_proj` are
//! divided by folding into `up_proj` and `v_proj`. There, `α` is close to 0, because the goal is to even out the
//! columns of the weights. It is 0.3 if weights have groups and 0.1 if a row has one scale, as deepcompressor uses for
//! Llama-3-8B, or searched among 0, 0.05 … 0.55.

mod planned;
mod search;
mod settings;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use self::search::BlockSearch;
pub use settings::{OutputSettings, Producers, SmoothSettings};

use super::{
    Alpha, BlockTask, ChannelOutlier, Needs, Rewrite, SearchWork, StepContext, StepKey, Transform,
    TransformSettings, TriedScales, Workload, fold,
};
use crate::calibrate::{ChannelMaxima, ChannelRanges, HiddenStates};
use crate::keys::no_such_key;
use crate::model::{BlockGraph, ExpertOrder, FoldGroup, NodeId};
use crate::quantize::{fp8_static_scale, nvfp4_input_scale, static_grid};
use crate::scheme::{ActivationScheme, Granularity};
use crate::{Error, Result};
use quant_kernels_cpu::StaticScale;

const MIN_MAXIMUM: f32 = 1e-5;
/// The exponents that a search tries, in twentieths.
const TWENTIETHS: std::ops::RangeInclusive<u8> = 8..=19;
/// The exponents that a search of outputs tries, in twentieths.
const TWENTIETHS_OF_OUTPUTS: std::ops::RangeInclusive<u8> = 0..=11;
/// The default exponents for outputs that are read by weights in groups, and by weights with a scale per row.
const DEFAULT_OF_OUTPUTS: [f32; 2] = [0.3, 0.1];
/// The number of candidates per producer: the exponents, and no smoothing.
const CANDIDATES: usize = 13;
const SEARCH_TOKENS: usize = 2048;

/// The result of SmoothQuant for a producer and its consumers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SmoothRecord {
    /// The norm or linear that is divided.
    pub producer: String,
    /// The linears that are multiplied; in the report of a tensor, only the
    /// [first few](super::MAX_LISTED_CONSUMERS).
    pub consumers: Vec<String>,
    /// The number of consumers not listed.
    #[serde(default, skip_serializing_if = "super::rewrite::is_zero")]
    pub unlisted_consumers: usize,
    /// The exponent; absent if no smoothing was best.
    pub alpha: Option<f32>,
    /// The largest magnitude of any channel divided by that of the median channel; absent if at least half of the
    /// channels are dead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outlier: Option<ChannelOutlier>,
    /// The search, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub search: Option<SmoothSearch>,
}

/// The search for an exponent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SmoothSearch {
    /// All candidates, no smoothing first, with the mean squared error of the block's output.
    pub tried: Vec<TriedScales>,
}

impl SmoothSearch {
    /// The exponent of the best candidate; `None` if no smoothing is best.
    fn best(&self) -> Option<f32> {
        // Ties go to the first candidate, which moves least.
        self.tried.iter().min_by(|a, b| a.error.total_cmp(&b.error)).and_then(|best| best.ratio)
    }
}

/// Smooths the outputs of norms and, if requested, of linears.
#[derive(Debug, Clone, Copy)]
pub struct SmoothQuant;

/// Smooths the outputs of linears.
#[derive(Debug, Clone, Copy)]
pub struct SmoothOutputs;

#[derive(Debug, Clone, Copy)]
struct Smoothing {
    producers: Smoothed,
    alpha: Option<Alpha>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Smoothed {
    Norms,
    Linears,
    All,
}

impl Smoothing {
    fn of_inputs(settings: &TransformSettings) -> Self {
        let SmoothSettings { alpha, producers, .. } = settings.steps.get();
        let producers = match producers {
            Producers::Norms => Smoothed::Norms,
            Producers::All => Smoothed::All,
        };
        Self { producers, alpha }
    }

    fn of_outputs(settings: &TransformSettings) -> Self {
        let OutputSettings { alpha } = settings.steps.get();
        Self { producers: Smoothed::Linears, alpha }
    }

    fn groups(self, graph: &BlockGraph) -> Vec<FoldGroup> {
        let is_meant = |g: &FoldGroup| match self.producers {
            Smoothed::Norms => graph.nodes()[g.producer].op.is_norm(),
            Smoothed::Linears => !graph.nodes()[g.producer].op.is_norm(),
            Smoothed::All => true,
        };
        graph.fold_groups().into_iter().filter(is_meant).collect()
    }

    fn folded_nodes(self, graph: &BlockGraph) -> Vec<NodeId> {
        let groups = self.groups(graph).into_iter();
        groups.flat_map(|g| std::iter::once(g.producer).chain(g.consumers)).collect()
    }

    fn is_searched(self) -> bool {
        matches!(self.alpha, Some(Alpha::Auto(_)))
    }

    fn default_alpha(self, task: &BlockTask<'_>) -> f32 {
        match self.producers {
            Smoothed::Linears => {
                let grouped =
                    task.grids.values().any(|grid| matches!(grid.scheme.granularity, Granularity::Group(_)));
                DEFAULT_OF_OUTPUTS[usize::from(!grouped)]
            }
            _ => task.smoothing,
        }
    }

    fn takes_experts_apart(self, graph: &BlockGraph) -> bool {
        !self.is_searched() || ExpertOrder::of(graph).is_some()
    }

    fn exponents(self) -> impl Iterator<Item = f32> {
        let twentieths = match self.producers {
            Smoothed::Linears => TWENTIETHS_OF_OUTPUTS,
            _ => TWENTIETHS,
        };
        twentieths.map(|twentieth| f32::from(twentieth) / 20.0)
    }

    /// Whether smoothing helps a linear. SmoothQuant does not help linears with float activations.
    fn is_for(self, task: &BlockTask<'_>, node: NodeId) -> bool {
        task.grids.get(&node).is_some_and(|grid| {
            self.producers == Smoothed::Linears || grid.scheme.activations != ActivationScheme::Float
        })
    }

    fn search(
        self,
        tasks: &[BlockTask<'_>],
        hidden: Option<&mut HiddenStates>,
        advance: bool,
    ) -> Result<Vec<Rewrite>> {
        let states = hidden.as_deref();
        let rewrites = tasks.iter().map(|task| smoothed(task, self, states)).collect();
        if let (Some(first), Some(hidden), true) = (tasks.first(), hidden, advance) {
            first.advance(hidden)?;
        }
        rewrites
    }
}

impl Transform for SmoothQuant {
    fn name(&self) -> &'static str {
        "smoothquant"
    }

    fn summary(&self) -> &'static str {
        "moves outliers from activations into weights, for 8-bit activations"
    }

    fn folded_nodes(&self, graph: &BlockGraph, settings: &TransformSettings) -> Vec<NodeId> {
        Smoothing::of_inputs(settings).folded_nodes(graph)
    }

    fn needs(&self, settings: &TransformSettings) -> Needs {
        let searched = Smoothing::of_inputs(settings).is_searched();
        Needs { ranges: SmoothSettings::of(settings).maxima.is_none() || searched, states: searched }
    }

    fn keys(&self) -> Vec<StepKey> {
        SmoothSettings::keys()
    }

    fn set(&self, key: &str, value: &Value, settings: &mut TransformSettings) -> Result<()> {
        let mut own = SmoothSettings::of(settings);
        own.set(key, value)?;
        settings.steps.set(own);
        Ok(())
    }

    fn set_file(&self, _key: &str, path: &Path, settings: &mut TransformSettings) -> Result<()> {
        let maxima = Some(Arc::new(ChannelMaxima::read(path)?));
        settings.steps.change(|own: &mut SmoothSettings| own.maxima = maxima);
        Ok(())
    }

    fn described(&self, settings: &TransformSettings) -> Map<String, Value> {
        SmoothSettings::of(settings).described()
    }

    fn is_for_rounded_inputs(&self) -> bool {
        true
    }

    fn smooths_linears(&self, settings: &TransformSettings) -> bool {
        SmoothSettings::of(settings).producers == Producers::All
    }

    fn takes_experts_apart(&self, graph: &BlockGraph, settings: &TransformSettings) -> bool {
        Smoothing::of_inputs(settings).takes_experts_apart(graph)
    }

    fn fingerprint(&self, settings: &TransformSettings) -> Value {
        SmoothSettings::of(settings).fingerprint()
    }

    fn check(&self, context: &StepContext<'_>) -> Result<()> {
        planned::check_scales(self.name(), context)?;
        planned::check_inputs(context)
    }

    fn memory(&self, work: &Workload<'_>) -> u64 {
        Smoothing::of_inputs(work.settings).memory(work)
    }

    fn work(&self, work: &Workload<'_>) -> SearchWork {
        Smoothing::of_inputs(work.settings).work(work)
    }

    fn search(
        &self,
        tasks: &[BlockTask<'_>],
        hidden: Option<&mut HiddenStates>,
        advance: bool,
    ) -> Result<Vec<Rewrite>> {
        let Some(first) = tasks.first() else { return Ok(Vec::new()) };
        Smoothing::of_inputs(first.settings).search(tasks, hidden, advance)
    }
}

impl Transform for SmoothOutputs {
    fn name(&self) -> &'static str {
        "smooth-outputs"
    }

    fn summary(&self) -> &'static str {
        "moves outliers from the inputs of o_proj and down_proj into their weights"
    }

    fn folded_nodes(&self, graph: &BlockGraph, settings: &TransformSettings) -> Vec<NodeId> {
        Smoothing::of_outputs(settings).folded_nodes(graph)
    }

    fn needs(&self, settings: &TransformSettings) -> Needs {
        Needs { ranges: true, states: Smoothing::of_outputs(settings).is_searched() }
    }

    fn keys(&self) -> Vec<StepKey> {
        OutputSettings::keys()
    }

    fn set(&self, key: &str, value: &Value, settings: &mut TransformSettings) -> Result<()> {
        if key != "alpha" {
            return Err(no_such_key(self.name(), key));
        }
        settings.steps.set(OutputSettings { alpha: Some(Alpha::from_value(value)?) });
        Ok(())
    }

    fn described(&self, settings: &TransformSettings) -> Map<String, Value> {
        settings.steps.get::<OutputSettings>().described()
    }

    fn smooths_linears(&self, _settings: &TransformSettings) -> bool {
        true
    }

    fn takes_experts_apart(&self, graph: &BlockGraph, settings: &TransformSettings) -> bool {
        Smoothing::of_outputs(settings).takes_experts_apart(graph)
    }

    fn fingerprint(&self, settings: &TransformSettings) -> Value {
        settings.steps.get::<OutputSettings>().fingerprint()
    }

    fn check(&self, context: &StepContext<'_>) -> Result<()> {
        planned::check_scales(self.name(), context)
    }

    fn memory(&self, work: &Workload<'_>) -> u64 {
        Smoothing::of_outputs(work.settings).memory(work)
    }

    fn work(&self, work: &Workload<'_>) -> SearchWork {
        Smoothing::of_outputs(work.settings).work(work)
    }

    fn search(
        &self,
        tasks: &[BlockTask<'_>],
        hidden: Option<&mut HiddenStates>,
        advance: bool,
    ) -> Result<Vec<Rewrite>> {
        let Some(first) = tasks.first() else { return Ok(Vec::new()) };
        Smoothing::of_outputs(first.settings).search(tasks, hidden, advance)
    }
}

struct Migration {
    group: FoldGroup,
    /// `max |x|` of the producer's channels.
    activations: Vec<f32>,
    /// `max |w|` of the same channels, over all rows of the quantized linears that read them.
    weights: Vec<f32>,
}

impl Migration {
    fn new(task: &BlockTask<'_>, group: FoldGroup) -> Result<Self> {
        let k = task.block.linear(group.consumers[0]).weight().shape()[1];
        let activations = group.gather_largest(&maxima(task, &group, k)?);
        let mut columns = vec![0.0_f32; k];
        let mut scratch = Vec::new();
        for consumer in group.consumers.iter().filter(|c| task.grids.contains_key(c)) {
            let weight = task.block.linear(*consumer).weight().read()?;
            for row in 0..weight.shape()[0] {
                for (max, w) in columns.iter_mut().zip(weight.rows(row..row + 1, &mut scratch)?) {
                    *max = max.max(w.abs());
                }
            }
            drop(weight);
            task.done_with(*consumer);
        }
        let weights = group.gather_largest(&columns);
        Ok(Self { group, activations, weights })
    }

    /// The scales by equation 4; 1 for a channel whose inputs are all 0 or whose scale is not a normal float.
    fn scales(&self, alpha: f32) -> Vec<f32> {
        let scale = |(&x, &w): (&f32, &f32)| match x > 0.0 {
            false => 1.0,
            true => {
                let scale =
                    (x.max(MIN_MAXIMUM).powf(alpha) / w.max(MIN_MAXIMUM).powf(1.0 - alpha)).max(MIN_MAXIMUM);
                if scale.is_normal() { scale } else { 1.0 }
            }
        };
        self.activations.iter().zip(&self.weights).map(scale).collect()
    }

    fn record(&self, task: &BlockTask<'_>, alpha: Option<f32>, search: Option<SmoothSearch>) -> SmoothRecord {
        let scales = alpha.map(|alpha| self.scales(alpha));
        SmoothRecord {
            producer: task.module(self.group.producer),
            consumers: self.group.consumers.iter().map(|&c| task.module(c)).collect(),
            unlisted_consumers: 0,
            alpha,
            outlier: ChannelOutlier::new(&self.activations, scales.as_deref()),
            search,
        }
    }
}

impl SmoothRecord {
    /// The record as it appears in the report of one tensor.
    pub fn shortened(mut self) -> Self {
        self.unlisted_consumers += super::rewrite::shorten(&mut self.consumers);
        self
    }
}

/// `max |x|` of the columns of a group's consumers, as observed or from a file.
fn maxima(task: &BlockTask<'_>, group: &FoldGroup, k: usize) -> Result<Vec<f32>> {
    if let Some(file) = SmoothSettings::of(task.settings).maxima {
        return Ok(file.of(&task.module(group.consumers[0]), k)?.to_vec());
    }
    let ranges = task.ranges.get(&group.input);
    Ok(ranges.ok_or_else(|| Error::Internal("SmoothQuant without channel maxima".into()))?.maxima())
}

fn smoothed(task: &BlockTask<'_>, smoothing: Smoothing, hidden: Option<&HiddenStates>) -> Result<Rewrite> {
    let gains = |g: &FoldGroup| g.consumers.iter().any(|&c| smoothing.is_for(task, c));
    let groups = smoothing.groups(task.block.graph()).into_iter().filter(gains);
    let migrations = groups.map(|group| Migration::new(task, group)).collect::<Result<Vec<_>>>()?;
    let alpha = match smoothing.alpha {
        Some(Alpha::Fixed(alpha)) => alpha,
        _ => smoothing.default_alpha(task),
    };
    let mut alphas = vec![Some(alpha); migrations.len()];
    let mut records = Vec::with_capacity(migrations.len());
    if let (true, Some(hidden)) = (smoothing.is_searched(), hidden) {
        let mut search = None;
        for (i, migration) in migrations.iter().enumerate() {
            let about = format!("exponent for {}", task.module(migration.group.producer));
            let found = match task.recall(&about) {
                Some(found) => {
                    search.iter_mut().for_each(BlockSearch::skip);
                    found
                }
                None => {
                    let search = match &mut search {
                        Some(search) => search,
                        none => none.insert(BlockSearch::new(task, hidden, &migrations)?),
                    };
                    let found = search.tried(&alphas, i, smoothing.exponents())?;
                    task.remember(&about, &found)?;
                    found
                }
            };
            alphas[i] = found.best();
            records.push(migration.record(task, alphas[i], Some(found)));
        }
    } else {
        records.extend(migrations.iter().map(|m| m.record(task, Some(alpha), None)));
    }
    for record in &records {
        tracing::debug!(producer = record.producer, alpha = record.alpha, "smoothed");
    }
    let rewrite = folded(task, &migrations, &alphas)?;
    Ok(Rewrite { smooth: records, ..rewrite })
}

fn folded(task: &BlockTask<'_>, migrations: &[Migration], alphas: &[Option<f32>]) -> Result<Rewrite> {
    let mut rewrite = Rewrite::default();
    for (migration, alpha) in migrations.iter().zip(alphas) {
        if let Some(alpha) = alpha {
            fold(&mut rewrite, task, &migration.group, &migration.scales(*alpha))?;
        }
    }
    Ok(rewrite)
}

impl BlockTask<'_> {
    /// The calibrated parameters of a linear's input, if its scheme needs any. They are computed from the ranges of
    /// linears' inputs after all rewrites.
    ///
    /// # Errors
    /// [`Error::Internal`] when the ranges of the input were not gathered.
    pub fn input_grid(
        &self,
        node: NodeId,
        ranges: &BTreeMap<NodeId, ChannelRanges>,
    ) -> Result<Option<StaticScale>> {
        let Some(activations) = self.grids.get(&node).map(|g| g.scheme.activations).filter(|a| a.is_static())
        else {
            return Ok(None);
        };
        let value = self.block.graph().nodes()[node].inputs[0];
        let ranges = ranges.get(&value);
        let ranges =
            ranges.ok_or_else(|| Error::Internal("a static grid without collected ranges".into()))?;
        let whole = ranges.whole();
        let scaled = |scale| StaticScale { scale, zero: 0 };
        Ok(Some(match activations {
            ActivationScheme::Fp8Static => scaled(fp8_static_scale(whole)),
            ActivationScheme::Nvfp4 => scaled(nvfp4_input_scale(whole)),
            activations => static_grid(whole, activations == ActivationScheme::Static { symmetric: true }),
        }))
    }
}
