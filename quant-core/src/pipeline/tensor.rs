//! One tensor's way from the source to the sink.

use serde_json::json;
use sha2::{Digest, Sha256};

use super::Job;
use super::report::{QuantReport, TensorReport, WeightError};
use crate::checkpoint::{Dtype, non_finite_in_whole, require_finite_bytes};
use crate::model::{Op, WeightBody};
use crate::quantize::{Rows, quantize_tensor};
use crate::recipe::{Action, PlanEntry};
use crate::transform::Rewrite;
use crate::{Error, Result, TensorSink};

/// Tensors that are only copied go through in pieces of this many bytes.
const COPY_BYTES: usize = 8 << 20;

/// Whether all that an entry writes, and what was to be reported of it, is there already.
pub(super) fn is_complete(entry: &PlanEntry, sink: &dyn TensorSink) -> bool {
    sink.recall(&entry.tensor).is_some() && entry.outputs.iter().all(|o| sink.is_complete(&o.name))
}

/// Takes entries of one span to the sink, in order.
pub(super) fn process(
    job: &Job<'_>,
    entries: &[PlanEntry],
    rewrite: &Rewrite,
    sink: &mut dyn TensorSink,
    report: &mut QuantReport,
) -> Result<()> {
    // While one tensor is rounded, the next is read and hashed and the one before is written.
    let mut ahead: Option<Result<Source>> = None;
    let mut behind: Option<Finished> = None;
    for (i, entry) in entries.iter().enumerate() {
        job.cancel.check()?;
        if entry.action == Action::Copy || is_complete(entry, sink) {
            flush(behind.take(), sink, report)?;
            let tensor =
                if is_complete(entry, sink) { recalled(job, entry, sink)? } else { copy(job, entry, sink)? };
            flush(Some((tensor, Vec::new())), sink, report)?;
            continue;
        }
        let source = ahead.take().unwrap_or_else(|| Source::read(job, entry))?;
        let next = entries.get(i + 1).filter(|e| e.action != Action::Copy && !is_complete(e, sink));
        let before = behind.take();
        let (done, (read, flushed)) = rayon::join(
            || transformed(job, entry, source, rewrite),
            || rayon::join(|| next.map(|e| Source::read(job, e)), || flush(before, sink, report)),
        );
        flushed?;
        ahead = read;
        behind = Some(done?);
    }
    flush(behind, sink, report)
}

/// A tensor's report and the bytes that are written for it, by name.
type Finished = (TensorReport, Vec<(String, Vec<u8>)>);

fn flush(finished: Option<Finished>, sink: &mut dyn TensorSink, report: &mut QuantReport) -> Result<()> {
    let Some((tensor, outputs)) = finished else { return Ok(()) };
    for (name, bytes) in outputs {
        sink.write(&name, 0, &bytes)?;
    }
    sink.remember(&tensor.tensor, &json!(tensor))?;
    report.push(tensor);
    Ok(())
}

/// A tensor's bytes and their hash.
struct Source {
    bytes: Vec<u8>,
    sha256: String,
}

impl Source {
    fn read(job: &Job<'_>, entry: &PlanEntry) -> Result<Self> {
        let bytes = job.model.source().read(&entry.tensor)?;
        let sha256 = hex(&Sha256::digest(&bytes));
        Ok(Self { bytes, sha256 })
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// What an earlier run reported of a tensor that it finished, if the input is still the same.
fn recalled(job: &Job<'_>, entry: &PlanEntry, sink: &dyn TensorSink) -> Result<TensorReport> {
    let remembered = sink.recall(&entry.tensor);
    let tensor: TensorReport = remembered
        .and_then(|value| serde_json::from_value(value).ok())
        .ok_or_else(|| Error::Internal(format!("the record of `{}` cannot be read", entry.tensor)))?;
    let mut hash = Sha256::new();
    each_piece(job, entry, |_, piece| {
        hash.update(piece);
        Ok(())
    })?;
    if hex(&hash.finalize()) != tensor.source_sha256 {
        return Err(Error::usage(
            format!("tensor `{}` is not what it was when the run was interrupted", entry.tensor),
            "start again without --resume",
        ));
    }
    Ok(tensor)
}

fn each_piece(
    job: &Job<'_>,
    entry: &PlanEntry,
    mut take: impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let len = entry.info.byte_len();
    let mut buffer = vec![0; COPY_BYTES.min(len as usize)];
    let mut at = 0;
    while at < len {
        job.cancel.check()?;
        let piece = &mut buffer[..COPY_BYTES.min((len - at) as usize)];
        job.model.source().read_range(&entry.tensor, at, piece)?;
        take(at, piece)?;
        at += piece.len() as u64;
    }
    Ok(())
}

/// Streams a tensor through unchanged, refusing NaN and infinity.
fn copy(job: &Job<'_>, entry: &PlanEntry, sink: &mut dyn TensorSink) -> Result<TensorReport> {
    let (name, dtype) = (&entry.tensor, entry.info.dtype);
    let mut hash = Sha256::new();
    each_piece(job, entry, |at, piece| {
        let (written, ()) = rayon::join(
            || finite(job, name, dtype, piece).and_then(|()| sink.write(name, at, piece)),
            || hash.update(piece),
        );
        written
    })?;
    if entry.info.byte_len() == 0 {
        sink.write(name, 0, &[])?;
    }
    Ok(TensorReport::copied(entry, hex(&hash.finalize())))
}

/// Fails, with count and first position in the whole tensor, when a piece holds NaN or infinity.
fn finite(job: &Job<'_>, name: &str, dtype: Dtype, piece: &[u8]) -> Result<()> {
    if !dtype.is_weight_float() {
        return Ok(());
    }
    let source = job.model.source();
    require_finite_bytes(source.location(name), name, dtype, piece)
        .map_err(|e| non_finite_in_whole(source.as_ref(), dtype, e))
}

/// Rewrites or quantizes a tensor.
fn transformed(job: &Job<'_>, entry: &PlanEntry, source: Source, rewrite: &Rewrite) -> Result<Finished> {
    let path = || job.model.source().location(&entry.tensor);
    match &entry.action {
        Action::Copy => Err(Error::Internal(format!("`{}` is copied, not transformed", entry.tensor))),
        Action::Rewrite { node, .. } => {
            require_finite_bytes(path(), &entry.tensor, entry.info.dtype, &source.bytes)?;
            let values = rewritten(job, entry, *node, &source, rewrite)?;
            let bytes = match values {
                Some(values) => {
                    crate::checkpoint::require_finite(path(), &entry.tensor, &values)?;
                    entry.info.dtype.narrow(&values)
                }
                None => source.bytes,
            };
            let tensor = TensorReport::rewritten(entry, source.sha256);
            Ok((tensor, vec![(entry.tensor.clone(), bytes)]))
        }
        Action::Quantize { node, module, scheme, scale_dtype, .. } => {
            let shape = [entry.info.shape[0], entry.info.shape[1]];
            let plain = !rewrite.columns.contains_key(node) && !rewrite.rows.contains_key(node);
            let clip = rewrite.clips.get(node).map(Vec::as_slice);
            let (quantized, error) = if plain && clip.is_none() {
                let rows = Rows::Bytes(&source.bytes, entry.info.dtype);
                quantize_tensor(rows, shape, *scheme, *scale_dtype, None)
                    .map_err(|e| e.within(&entry.tensor, Some(path())))?
            } else {
                let body = WeightBody::raw(shape, entry.info.dtype, source.bytes)?;
                let values = rewrite.weight(*node, &body)?;
                drop(body);
                quantize_tensor(Rows::Floats(&values), shape, *scheme, *scale_dtype, clip)
                    .map_err(|e| e.within(&entry.tensor, None))?
            };
            let outputs = job.plan.container.pack(module, &quantized)?;
            let fold = rewrite.folds.iter().find(|f| f.consumers.contains(module));
            let clip = rewrite.clip_records.iter().find(|c| c.module == *module);
            let error = WeightError::from(error);
            let tensor = TensorReport::quantized(entry, source.sha256, error, fold.cloned(), clip.cloned());
            Ok((tensor, outputs.into_iter().map(|(spec, bytes)| (spec.name, bytes)).collect()))
        }
    }
}

/// The new values of a norm, a float linear or a bias; `None` where nothing changes.
fn rewritten(
    job: &Job<'_>,
    entry: &PlanEntry,
    node: usize,
    source: &Source,
    rewrite: &Rewrite,
) -> Result<Option<Vec<f32>>> {
    let mut values = vec![0.0; entry.info.elements()];
    entry.info.dtype.widen(&source.bytes, &mut values);
    Ok(match &job.model.architecture().block.nodes()[node].op {
        Op::RmsNorm { .. } => rewrite.norms.get(&node).cloned(),
        Op::Linear { .. } if !rewrite.columns.contains_key(&node) && !rewrite.rows.contains_key(&node) => {
            None
        }
        Op::Linear { shape, .. } if entry.info.shape.len() == 2 => {
            Some(rewrite.weight(node, &WeightBody::F32 { shape: *shape, values })?)
        }
        Op::Linear { .. } => Some(rewrite.bias(node, values)),
        _ => None,
    })
}
