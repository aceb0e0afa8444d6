//! What happens to one tensor between the source and the sink.

use sha2::{Digest, Sha256};

use super::Job;
use super::decision::{Decision, stored};
use super::report::{InputReport, Searched, TensorReport, WeightError};
use crate::checkpoint::{Dtype, non_finite_in_whole, require_finite_bytes};
use crate::digest::{hex, sha256_hex};
use crate::model::{NodeId, Op, WeightBody};
use crate::quantize::{ErrorStats, QuantizedTensor, Rows, quantize_tensor};
use crate::recipe::{Action, PlanEntry};
use crate::transform::Rewrite;
use crate::{Error, Result, TensorSink};

/// Tensors that are only copied go through in pieces of this many bytes.
const COPY_BYTES: usize = 8 << 20;

/// What was read of an entry, and the SHA-256 of it.
pub(super) struct Source {
    contents: Contents,
    sha256: String,
}

enum Contents {
    /// A float tensor as it stands in the file.
    Bytes(Vec<u8>),
    /// A weight that is quantized already.
    Packed(QuantizedTensor),
}

impl Source {
    /// Reads an entry, a float tensor into a buffer that served another, whose pages are there
    /// already.
    pub(super) fn read(job: &Job<'_>, entry: &PlanEntry, mut bytes: Vec<u8>) -> Result<Self> {
        if let Action::Repack { module, .. } = &entry.action {
            let shape = [entry.info.shape[0], entry.info.shape[1]];
            let contents = Contents::Packed(job.model.packed(module, shape)?);
            return Ok(Self { contents, sha256: sha256_of(job, entry)? });
        }
        let len = usize::try_from(entry.info.byte_len())
            .map_err(|_| Error::Internal(format!("tensor `{}` exceeds the address space", entry.tensor)))?;
        bytes.resize(len, 0);
        job.model.source().read_range(&entry.stored, 0, &mut bytes)?;
        let sha256 = sha256_hex(&bytes);
        Ok(Self { contents: Contents::Bytes(bytes), sha256 })
    }

    fn bytes(self) -> Result<(Vec<u8>, String)> {
        match self.contents {
            Contents::Bytes(bytes) => Ok((bytes, self.sha256)),
            Contents::Packed(_) => {
                Err(Error::Internal("a packed weight stands where a float one should".into()))
            }
        }
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
    if sha256_of(job, entry)? != tensor.source_sha256 {
        return Err(Error::usage(
            format!("tensor `{}` is not what it was when the run was interrupted", entry.tensor),
            "start again without --resume",
        ));
    }
    Ok(tensor)
}

/// The SHA-256 of an entry's bytes in the input; of several tensors, one after the other.
fn sha256_of(job: &Job<'_>, entry: &PlanEntry) -> Result<String> {
    let mut hash = Sha256::new();
    for (name, len) in entry.sources() {
        each_piece(job, name, len, |_, piece| {
            hash.update(piece);
            Ok(())
        })?;
    }
    Ok(hex(&hash.finalize()))
}

/// Hands over a tensor's bytes piece by piece; while one is used, the next is read.
fn each_piece(
    job: &Job<'_>,
    name: &str,
    len: u64,
    mut take: impl FnMut(u64, &[u8]) -> Result<()> + Send,
) -> Result<()> {
    let read = |piece: &mut Vec<u8>, at: u64| {
        piece.resize(COPY_BYTES.min((len - at) as usize), 0);
        job.model.source().read_range(name, at, piece)
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
    let (name, dtype) = (&entry.stored, entry.info.dtype);
    let Some(output) = entry.outputs.first().map(|o| o.name.as_str()) else {
        return Err(Error::Internal(format!("`{name}` is copied nowhere")));
    };
    let mut hash = Sha256::new();
    each_piece(job, name, entry.info.byte_len(), |at, piece| {
        let (written, ()) = rayon::join(
            || finite(job, name, dtype, piece).and_then(|()| sink.write(output, at, piece)),
            || hash.update(piece),
        );
        written
    })?;
    if entry.info.byte_len() == 0 {
        sink.write(output, 0, &[])?;
    }
    let sha256 = hex(&hash.finalize());
    Ok(match entry.turned {
        true => TensorReport::rewritten(entry, sha256),
        false => TensorReport::copied(entry, sha256),
    })
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

/// Applies what was decided to a tensor, and rounds it if it is to be quantized.
pub(super) fn apply_rewrite(
    job: &Job<'_>,
    entry: &PlanEntry,
    source: Source,
    decision: &Decision,
) -> Result<Finished> {
    let rewrite = &decision.rewrite;
    let path = || job.model.source().location(entry.sources()[0].0);
    match &entry.action {
        Action::Copy => Err(Error::Internal(format!("`{}` is copied, not transformed", entry.tensor))),
        Action::Repack { module, scheme, scale_dtype, .. } => {
            let Source { contents: Contents::Packed(tensor), sha256 } = source else {
                return Err(Error::Internal(format!("`{}` was not read as packed", entry.tensor)));
            };
            let tensor = tensor.restated(*scheme, *scale_dtype).map_err(|reason| Error::NotRepackable {
                path: path(),
                module: module.clone(),
                reason,
            })?;
            let outputs = job.plan.container.pack(module, &tensor)?;
            let outputs = outputs.into_iter().map(|(spec, bytes)| (spec.name, bytes)).collect();
            Ok(Finished { report: TensorReport::repacked(entry, sha256), outputs, spare: Vec::new() })
        }
        Action::Rewrite { layer, node } => {
            let (bytes, sha256) = source.bytes()?;
            require_finite_bytes(path(), &entry.tensor, entry.info.dtype, &bytes)?;
            let values = rewritten(job, entry, (*layer, *node), &bytes, rewrite)?;
            let bytes = match values {
                Some(values) => {
                    // What is finite in f32 need not be in the type that it is stored in.
                    let bytes = entry.info.dtype.narrow(&values);
                    require_finite_bytes(path(), &entry.tensor, entry.info.dtype, &bytes)?;
                    bytes
                }
                None => bytes,
            };
            let report = TensorReport::rewritten(entry, sha256);
            let outputs = vec![(entry.tensor.clone(), bytes)];
            Ok(Finished { report, outputs, spare: Vec::new() })
        }
        Action::Quantize { node, module, scheme, scale_dtype, .. } => {
            let shape = [entry.info.shape[0], entry.info.shape[1]];
            let (bytes, sha256) = source.bytes()?;
            let clip = node.and_then(|node| rewrite.clips.get(&node)).map(Vec::as_slice);
            let changed = node.filter(|node| clip.is_some() || rewrite.changes(*node));
            let mut spare = Vec::new();
            let rounded = node.and_then(|node| decision.rounded.get(&node));
            let input = node.and_then(|node| decision.inputs.get(&node)).copied();
            let (mut own, mut error);
            let quantized = if let (Some(rounded), Some(node)) = (rounded, *node) {
                let values = rewrite.weight(node, &WeightBody::raw(shape, entry.info.dtype, bytes)?)?;
                error = ErrorStats::of(&values, &rounded.tensor)?;
                &rounded.tensor
            } else if let Some(node) = changed {
                let body = WeightBody::raw(shape, entry.info.dtype, bytes)?;
                let values = rewrite.weight(node, &body)?;
                drop(body);
                (own, error) = quantize_tensor(Rows::Floats(&values), shape, *scheme, *scale_dtype, clip)
                    .map_err(|e| e.within(&entry.tensor, None))?;
                own.input = input;
                if scheme.progressive {
                    own = stored(own, job.plan.container, *scale_dtype, &entry.tensor)?;
                    error = ErrorStats::of(&values, &own)?;
                }
                &own
            } else {
                spare = bytes;
                let rows = Rows::Bytes(&spare, entry.info.dtype);
                (own, error) = quantize_tensor(rows, shape, *scheme, *scale_dtype, None)
                    .map_err(|e| e.within(&entry.tensor, Some(path())))?;
                own.input = input;
                if scheme.progressive {
                    own = stored(own, job.plan.container, *scale_dtype, &entry.tensor)?;
                    let body = WeightBody::raw(shape, entry.info.dtype, std::mem::take(&mut spare))?;
                    error = ErrorStats::of(&body.to_f32()?, &own)?;
                }
                &own
            };
            let outputs = job.plan.container.pack(module, quantized)?;
            let fold = rewrite.folds.iter().find(|f| f.consumers.contains(module));
            let clip = rewrite.clip_records.iter().find(|c| c.module == *module);
            let seen = node.and_then(|node| rewrite.tokens.get(&node)).copied();
            let search = Searched {
                fold: fold.cloned(),
                clip: clip.cloned(),
                tokens: seen.or(rounded.map(|r| r.tokens)),
                gptq: rounded.map(|r| r.record.clone()),
                smooth: rewrite.smooth.iter().find(|s| s.consumers.contains(module)).cloned(),
                attention: rewrite.attention.iter().find(|a| a.keys == *module).cloned(),
                reordered: node.is_some_and(|node| rewrite.reorders(node)),
                stored: Some(quantized.scheme),
                input: quantized.input.map(|by| InputReport { scale: by.scale, zero: by.zero }),
            };
            let report = TensorReport::quantized(entry, sha256, WeightError::from(error), search);
            let outputs = outputs.into_iter().map(|(spec, bytes)| (spec.name, bytes)).collect();
            Ok(Finished { report, outputs, spare })
        }
    }
}

/// The new values of a norm, a float linear or a bias; `None` where nothing changes.
fn rewritten(
    job: &Job<'_>,
    entry: &PlanEntry,
    (layer, node): (usize, NodeId),
    bytes: &[u8],
    rewrite: &Rewrite,
) -> Result<Option<Vec<f32>>> {
    let mut values = vec![0.0; entry.info.elements()];
    entry.info.dtype.widen(bytes, &mut values);
    Ok(match &job.model.architecture().graph(layer).nodes()[node].op {
        op if op.is_norm() => match entry.tensor.ends_with(".bias") {
            true => rewrite.norm_biases.get(&node).cloned(),
            false => rewrite.norms.get(&node).cloned(),
        },
        Op::Linear { .. } if !rewrite.changes(node) => None,
        Op::Linear { shape, .. } if entry.info.shape.len() == 2 => {
            Some(rewrite.weight(node, &WeightBody::F32 { shape: *shape, values })?)
        }
        Op::Linear { .. } => Some(rewrite.bias(node, values)),
        _ => None,
    })
}
