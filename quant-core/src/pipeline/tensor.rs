//! The processing of one tensor between the source and the sink.

use std::collections::BTreeMap;

use quant_kernels_cpu::StaticScale;
use serde_json::Value;

use super::Job;
use super::decision::Decision;
use super::report::{InputReport, Searched, TensorReport, WeightError};
use super::source::{Bytes, ReadWeights, Source, read_into};
use crate::checkpoint::{Dtype, require_finite_bytes};
use crate::model::{NodeId, WeightRows, transposed};
use crate::quantize::{
    ErrorStats, QuantizedTensor, RowsError, ScaleContext, ScaleExponents, SharedExtents, SourceRows,
    fp8_static_scale,
};
use crate::recipe::{Action, CacheScale, PlanEntry};
use crate::round::{Rounded, WeightTask, stored};
use crate::scheme::LinearScheme;
use crate::transform::{FoldRecord, Rewrite, SmoothRecord};
use crate::{Error, Result, allocate};

pub(super) struct Finished {
    pub(super) report: TensorReport,
    /// The bytes to write, by tensor name.
    pub(super) outputs: Vec<(String, Bytes)>,
    pub(super) spare: Vec<u8>,
}

impl Finished {
    pub(super) fn written(report: TensorReport) -> Self {
        Self { report, outputs: Vec::new(), spare: Vec::new() }
    }
}

/// Applies the decisions to a tensor, and rounds it if it will be quantized and is not rounded yet. `amax` is the
/// largest magnitude over all linears that share a scale with it.
pub(super) fn apply_rewrite(
    job: &Job<'_>,
    entry: &PlanEntry,
    source: Source,
    (decision, amax): (&Decision, Option<f32>),
    rounded: Option<&Rounded>,
) -> Result<Finished> {
    match &entry.action {
        Action::Copy => Err(Error::Internal(format!("`{}` is copied, not transformed", entry.tensor))),
        Action::Repack { module, scheme, scale_dtype, .. } => {
            let (tensor, sha256) = source.packed()?;
            let restated = match tensor.scheme.as_nvfp4() {
                Some(nvfp4) if nvfp4 == *scheme => tensor.into_nvfp4(shared_exponents(job, (entry, module))?),
                _ => tensor.restated(*scheme, *scale_dtype),
            };
            let tensor = restated.map_err(|reason| Error::NotRepackable {
                path: job.model.source().location(entry.sources()[0].0),
                module: module.clone(),
                reason,
            })?;
            let outputs = packed(job, module, &tensor)?;
            Ok(Finished { report: TensorReport::repacked(entry, sha256), outputs, spare: Vec::new() })
        }
        Action::Rewrite { layer, node } => rewrite_float(job, entry, (*layer, *node), source, decision),
        Action::Quantize { node, module, scheme, scale_dtype } => {
            let shape = [entry.info.shape[0], entry.info.shape[1]];
            let input = node.and_then(|node| decision.inputs.get(&node)).copied();
            let linear = Linear {
                job,
                entry,
                node: *node,
                module,
                shape,
                scheme: *scheme,
                scale_dtype: *scale_dtype,
                input,
                context: ScaleContext { search: job.plan.settings.scale_search, amax },
            };
            linear.quantize(source, decision, rounded)
        }
    }
}

/// Returns the scale exponents of an MXFP4 weight and of the weights that share a tensor scale with it in engines.
fn shared_exponents(job: &Job<'_>, (entry, module): (&PlanEntry, &String)) -> Result<ScaleExponents> {
    let parts = job.plan.shares_scale_with(module);
    let shares = |entry: &&PlanEntry| match &entry.action {
        Action::Repack { module: other, from, .. } => {
            from.as_nvfp4().is_some() && (other == module || parts.is_some_and(|parts| parts.contains(other)))
        }
        _ => false,
    };
    let mut all = ScaleExponents::default();
    for entry in job.plan.entries.iter().filter(|e| e.layer == entry.layer).filter(shares) {
        let Some((other, _)) = entry.quantized() else { continue };
        let shape = [entry.info.shape[0], entry.info.shape[1]];
        all = all.and(ScaleExponents::of(&job.model.packed(other, shape)?));
    }
    Ok(all)
}

/// The largest magnitude of a weight after the rewrite.
pub(super) fn largest_magnitude(
    job: &Job<'_>,
    entry: &PlanEntry,
    decision: &Decision,
    held: &ReadWeights<'_>,
) -> Result<f32> {
    let bytes = match held.peek(&entry.stored) {
        Some(bytes) => bytes,
        None => Bytes::Own(read_into(job, entry, Vec::new())?),
    };
    let (Action::Quantize { node, scheme, .. }, &[n, k]) = (&entry.action, &entry.info.shape[..]) else {
        return Err(Error::Internal(format!("`{}` is not a weight to be rounded", entry.tensor)));
    };
    let rows = SourceRows::Bytes(&bytes, entry.info.dtype);
    let weight = WeightRows::float([n, k], rows)?;
    let values = match node.filter(|node| decision.rewrite.changes(*node)) {
        Some(node) => Some(decision.rewrite.weight(node, &weight)?),
        None => None,
    };
    let rows = values.as_ref().map_or(rows, |values| SourceRows::Floats(values));
    let load = |at: usize, row: &mut [f32]| {
        rows.load(at, row);
        Ok(())
    };
    let extents = SharedExtents::of(*scheme, [n, k], load).map_err(|e| e.within(&entry.tensor, None))?;
    Ok(extents.map_or(0.0, |extents| extents.amax()))
}

/// Returns the static scale tensors of the keys or values that come from a linear, and names them in its report.
pub(super) fn cache_scales(
    entry: &PlanEntry,
    decision: &Decision,
    report: &mut TensorReport,
) -> Result<Vec<(String, Bytes)>> {
    let tensor = |scale: &CacheScale| {
        let largest = decision.cached.get(&(scale.attention, scale.part)).copied();
        let largest =
            largest.ok_or_else(|| Error::Internal(format!("`{}` was not calibrated", scale.tensor)))?;
        let value = fp8_static_scale([-largest, largest]);
        report.cache_scales.insert(scale.tensor.clone(), value);
        Ok((scale.tensor.clone(), Bytes::Own(value.to_le_bytes().to_vec())))
    };
    entry.cache.iter().map(tensor).collect()
}

fn packed(job: &Job<'_>, module: &str, tensor: &QuantizedTensor) -> Result<Vec<(String, Bytes)>> {
    let outputs = job.plan.container.pack(module, tensor)?;
    Ok(outputs.into_iter().map(|(spec, bytes)| (spec.name, Bytes::Own(bytes))).collect())
}

fn rewrite_float(
    job: &Job<'_>,
    entry: &PlanEntry,
    node: (usize, NodeId),
    source: Source,
    decision: &Decision,
) -> Result<Finished> {
    let path = || job.model.source().location(&entry.stored);
    let (bytes, sha256) = source.float()?;
    require_finite_bytes(path(), &entry.tensor, entry.info.dtype, &bytes)?;
    let bytes = match rewritten(job, entry, node, &bytes, &decision.rewrite)? {
        Some(values) => {
            // A value that is finite in f32 may overflow the type that it is stored in.
            let bytes = entry.info.dtype.narrow(&values);
            require_finite_bytes(path(), &entry.tensor, entry.info.dtype, &bytes)?;
            Bytes::Own(bytes)
        }
        None => bytes,
    };
    let bytes = as_written(entry, bytes)?;
    let report = TensorReport::rewritten(entry, sha256);
    Ok(Finished { report, outputs: vec![(entry.tensor.clone(), bytes)], spare: Vec::new() })
}

pub(super) fn as_written(entry: &PlanEntry, bytes: Bytes) -> Result<Bytes> {
    match entry.info.shape[..] {
        [rows, columns] if entry.by_columns => {
            let bytes = transposed(&bytes, [rows, columns], entry.info.dtype.size())?;
            Ok(Bytes::Own(bytes))
        }
        _ => Ok(bytes),
    }
}

/// `None` if nothing changes.
fn rewritten(
    job: &Job<'_>,
    entry: &PlanEntry,
    (layer, node): (usize, NodeId),
    bytes: &[u8],
    rewrite: &Rewrite,
) -> Result<Option<Vec<f32>>> {
    let op = &job.model.architecture().graph(layer).nodes()[node].op;
    if op.is_norm() {
        let values = match entry.tensor.ends_with(".bias") {
            true => &rewrite.norm_biases,
            false => &rewrite.norms,
        };
        return Ok(values.get(&node).cloned());
    }
    let Some(shape) = op.linear_shape().filter(|_| rewrite.changes(node)) else { return Ok(None) };
    if entry.info.shape.len() == 2 {
        let rows = WeightRows::float(shape, SourceRows::Bytes(bytes, entry.info.dtype))?;
        return Ok(Some(rewrite.weight(node, &rows)?));
    }
    let mut values =
        allocate::zeros(entry.info.elements(), format_args!("tensor `{}` in f32", entry.tensor))?;
    entry.info.dtype.widen(bytes, &mut values);
    Ok(Some(rewrite.bias(node, values)))
}

struct Linear<'a> {
    job: &'a Job<'a>,
    entry: &'a PlanEntry,
    /// The node of the linear, if it is in a block.
    node: Option<NodeId>,
    module: &'a str,
    shape: [usize; 2],
    scheme: LinearScheme,
    scale_dtype: Dtype,
    input: Option<StaticScale>,
    context: ScaleContext,
}

impl Linear<'_> {
    fn quantize(&self, source: Source, decision: &Decision, rounded: Option<&Rounded>) -> Result<Finished> {
        let rewrite = &decision.rewrite;
        let (bytes, sha256) = source.float()?;
        let clip = self.node.and_then(|node| rewrite.clips.get(&node)).map(Vec::as_slice);
        let changed = self.node.filter(|node| clip.is_some() || rewrite.changes(*node));
        let (own, spare);
        let (quantized, error) = match (rounded, self.node, changed) {
            (Some(rounded), Some(node), _) => {
                spare = Vec::new();
                let tensor = rounded.tensor()?;
                let values = self.rewritten(node, bytes, rewrite)?;
                (tensor, ErrorStats::of(&values, tensor)?)
            }
            (_, _, Some(node)) => {
                spare = Vec::new();
                let values = self.rewritten(node, bytes, rewrite)?;
                own = self.round_values(&values, clip)?;
                (&own.0, own.1)
            }
            _ => {
                own = self.round_bytes(&bytes)?;
                spare = bytes.into_spare();
                (&own.0, own.1)
            }
        };
        let outputs = packed(self.job, self.module, quantized)?;
        let searched = self.searched(decision, rounded, quantized);
        let mut report = TensorReport::quantized(self.entry, sha256, WeightError::from(error), searched);
        report.vanished_groups = error.vanished_groups;
        report.all_zero = error.signal == 0.0;
        Ok(Finished { report, outputs, spare })
    }

    /// Returns the weight before clipping, and frees the original bytes.
    fn rewritten(&self, node: NodeId, bytes: Bytes, rewrite: &Rewrite) -> Result<Vec<f32>> {
        rewrite.weight(node, &self.rows(&bytes)?)
    }

    fn rows<'b>(&self, bytes: &'b [u8]) -> Result<WeightRows<'b>> {
        WeightRows::float(self.shape, SourceRows::Bytes(bytes, self.entry.info.dtype))
    }

    /// Rounds the weight by itself.
    fn round(
        &self,
        rows: SourceRows<'_>,
        clip: Option<&[f32]>,
    ) -> std::result::Result<(QuantizedTensor, ErrorStats), RowsError> {
        let Self { shape, scheme, scale_dtype, context, .. } = *self;
        let (settings, rounding) = (&self.job.plan.settings, self.job.plan.method.rounding);
        rounding.round_weight(&WeightTask { rows, shape, scheme, scale_dtype, clip, context, settings })
    }

    fn round_values(&self, values: &[f32], clip: Option<&[f32]>) -> Result<(QuantizedTensor, ErrorStats)> {
        let rounded = self.round(SourceRows::Floats(values), clip);
        let (tensor, error) = rounded.map_err(|e| e.within(&self.entry.tensor, None))?;
        let (tensor, is_other) = self.as_stored(tensor)?;
        let error = if is_other { ErrorStats::of(values, &tensor)? } else { error };
        Ok((tensor, error))
    }

    fn round_bytes(&self, bytes: &[u8]) -> Result<(QuantizedTensor, ErrorStats)> {
        let entry = self.entry;
        let path = self.job.model.source().location(&entry.stored);
        let (tensor, error) = self
            .round(SourceRows::Bytes(bytes, entry.info.dtype), None)
            .map_err(|e| e.within(&entry.tensor, Some(path)))?;
        let (tensor, is_other) = self.as_stored(tensor)?;
        let error = if is_other { ErrorStats::of(&self.rows(bytes)?.to_f32()?, &tensor)? } else { error };
        Ok((tensor, error))
    }

    /// Returns the weight as the container stores it, and whether its values may differ from those of `tensor`.
    fn as_stored(&self, mut tensor: QuantizedTensor) -> Result<(QuantizedTensor, bool)> {
        tensor.input = self.input;
        let has_levels = self.scheme.is_progressive();
        let tensor = stored(tensor, self.job.plan.container, self.scale_dtype, &self.entry.tensor)?;
        Ok((tensor, has_levels))
    }

    /// Returns the records of the rounding and of the steps of the calling program for the linear, by their names.
    fn records(&self, rewrite: &Rewrite, rounded: Option<&Rounded>) -> BTreeMap<String, Value> {
        let rounding = self.job.plan.method.rounding.name();
        let of_rounding = rounded.map(|rounded| (rounding.to_owned(), rounded.record.clone()));
        let own = rewrite.records.iter().filter(|record| record.module == self.module);
        let of_steps = own.map(|record| (record.step.to_owned(), record.value.clone()));
        of_rounding.into_iter().chain(of_steps).collect()
    }

    /// Returns the results of the searches and of the rounding for the linear.
    fn searched(
        &self,
        Decision { rewrite, seen, routed, .. }: &Decision,
        rounded: Option<&Rounded>,
        quantized: &QuantizedTensor,
    ) -> Searched {
        let is_it = |module: &String| module == self.module;
        let of_linear = |tokens: &BTreeMap<NodeId, u64>| tokens.get(&self.node?).copied();
        // Both numbers of tokens must come from the same pass.
        let (tokens, routed) = match (of_linear(&rewrite.tokens), rounded) {
            (None, Some(rounded)) => (Some(rounded.tokens), rounded.routed),
            (tokens, _) => (tokens.or_else(|| of_linear(seen)), of_linear(routed)),
        };
        Searched {
            fold: rewrite
                .folds
                .iter()
                .find(|f| f.consumers.iter().any(is_it))
                .cloned()
                .map(FoldRecord::shortened),
            clip: rewrite.clip_records.iter().find(|c| is_it(&c.module)).cloned(),
            tokens,
            routed,
            records: self.records(rewrite, rounded),
            smooth: rewrite
                .smooth
                .iter()
                .find(|s| s.consumers.iter().any(is_it))
                .cloned()
                .map(SmoothRecord::shortened),
            attention: rewrite.attention.iter().find(|a| is_it(&a.keys)).cloned(),
            reordered: self.node.is_some_and(|node| rewrite.reorders(node)),
            stored: Some(quantized.scheme),
            input: quantized.input.map(|by| InputReport { scale: by.scale, zero: by.zero }),
        }
    }
}
