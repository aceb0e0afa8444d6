//! What happens to one tensor between the source and the sink.

use sha2::{Digest, Sha256};

use super::Job;
use super::report::{Searched, TensorReport, WeightError};
use crate::checkpoint::{Dtype, non_finite_in_whole, require_finite_bytes};
use crate::digest::{hex, sha256_hex};
use crate::model::{Op, WeightBody};
use crate::quantize::{Rows, quantize_tensor};
use crate::recipe::{Action, PlanEntry};
use crate::transform::Rewrite;
use crate::{Error, Result, TensorSink};

/// Tensors that are only copied go through in pieces of this many bytes.
const COPY_BYTES: usize = 8 << 20;

/// A tensor's bytes and their SHA-256.
pub(super) struct Source {
    bytes: Vec<u8>,
    sha256: String,
}

impl Source {
    /// Reads a tensor into a buffer that served another, whose pages are there already.
    pub(super) fn read(job: &Job<'_>, entry: &PlanEntry, mut bytes: Vec<u8>) -> Result<Self> {
        let len = usize::try_from(entry.info.byte_len())
            .map_err(|_| Error::Internal(format!("tensor `{}` exceeds the address space", entry.tensor)))?;
        bytes.resize(len, 0);
        job.model.source().read_range(&entry.tensor, 0, &mut bytes)?;
        let sha256 = sha256_hex(&bytes);
        Ok(Self { bytes, sha256 })
    }
}

/// A tensor that only has to be written.
pub(super) struct Finished {
    pub(super) report: TensorReport,
    /// The bytes that are written for it, by name.
    pub(super) outputs: Vec<(String, Vec<u8>)>,
    /// A buffer that is free again.
    pub(super) spare: Vec<u8>,
}

impl Finished {
    /// A tensor of which nothing is left to write.
    pub(super) fn written(report: TensorReport) -> Self {
        Self { report, outputs: Vec::new(), spare: Vec::new() }
    }
}

/// What an earlier run noted of a tensor, unless the note was damaged since.
pub(super) fn remembered(entry: &PlanEntry, sink: &dyn TensorSink) -> Option<TensorReport> {
    let tensor: TensorReport = serde_json::from_value(sink.recall(&entry.tensor)?).ok()?;
    (tensor.tensor == entry.tensor).then_some(tensor)
}

/// What an earlier run reported of a tensor that it finished, if the input is still the same.
pub(super) fn recalled(job: &Job<'_>, entry: &PlanEntry, sink: &dyn TensorSink) -> Result<TensorReport> {
    let tensor = remembered(entry, sink)
        .ok_or_else(|| Error::Internal(format!("the record of `{}` is gone", entry.tensor)))?;
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

/// Hands over a tensor's bytes piece by piece; while one is used, the next is read.
fn each_piece(
    job: &Job<'_>,
    entry: &PlanEntry,
    mut take: impl FnMut(u64, &[u8]) -> Result<()> + Send,
) -> Result<()> {
    let len = entry.info.byte_len();
    let read = |piece: &mut Vec<u8>, at: u64| {
        piece.resize(COPY_BYTES.min((len - at) as usize), 0);
        job.model.source().read_range(&entry.tensor, at, piece)
    };
    let (mut piece, mut next) = (Vec::new(), Vec::new());
    let mut at = 0;
    read(&mut piece, at)?;
    while !piece.is_empty() {
        job.cancel.check()?;
        let after = at + piece.len() as u64;
        let (taken, ahead) = rayon::join(|| take(at, &piece), || read(&mut next, after));
        taken?;
        ahead?;
        std::mem::swap(&mut piece, &mut next);
        at = after;
    }
    Ok(())
}

/// Streams a tensor through unchanged, refusing NaN and infinity.
pub(super) fn copy(job: &Job<'_>, entry: &PlanEntry, sink: &mut dyn TensorSink) -> Result<TensorReport> {
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
pub(super) fn transformed(
    job: &Job<'_>,
    entry: &PlanEntry,
    source: Source,
    rewrite: &Rewrite,
) -> Result<Finished> {
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
            let report = TensorReport::rewritten(entry, source.sha256);
            let outputs = vec![(entry.tensor.clone(), bytes)];
            Ok(Finished { report, outputs, spare: Vec::new() })
        }
        Action::Quantize { node, module, scheme, scale_dtype, .. } => {
            let shape = [entry.info.shape[0], entry.info.shape[1]];
            let plain = !rewrite.columns.contains_key(node) && !rewrite.rows.contains_key(node);
            let clip = rewrite.clips.get(node).map(Vec::as_slice);
            let mut spare = Vec::new();
            let (quantized, error) = if plain && clip.is_none() {
                spare = source.bytes;
                let rows = Rows::Bytes(&spare, entry.info.dtype);
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
            let tokens = rewrite.tokens.get(node).copied();
            let search = Searched { fold: fold.cloned(), clip: clip.cloned(), tokens };
            let report = TensorReport::quantized(entry, source.sha256, WeightError::from(error), search);
            let outputs = outputs.into_iter().map(|(spec, bytes)| (spec.name, bytes)).collect();
            Ok(Finished { report, outputs, spare })
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
