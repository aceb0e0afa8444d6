//! The bytes of a tensor, from the checkpoint or from its block if it was already read, and their SHA-256.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use sha2::{Digest, Sha256};

use super::Job;
use super::report::TensorReport;
use super::tensor::as_written;
use crate::checkpoint::{Dtype, non_finite_in_whole, require_finite_bytes};
use crate::digest::{hex, sha256_hex};
use crate::model::{Block, StoredWeight};
use crate::quantize::QuantizedTensor;
use crate::recipe::{Action, PlanEntry, is_reused};
use crate::{Error, Result, TensorSink, allocate};

/// The chunk size for tensors that are only copied.
const COPY_BYTES: usize = 8 << 20;

/// The SHA-256 of tensors that an earlier run has finished, by the names that each was read from, so that several jobs
/// over one model read them only once.
#[derive(Default)]
pub(super) struct Hashes(Mutex<BTreeMap<Vec<String>, String>>);

/// The weights of a block that have been read, by tensor name.
pub(super) struct ReadWeights<'b> {
    weights: BTreeMap<&'b str, &'b StoredWeight>,
    shared: bool,
    hashes: &'b Hashes,
}

impl<'b> ReadWeights<'b> {
    /// Takes the weights of a block, or none without one. The hashes are those of the same span.
    pub(super) fn of(block: Option<&'b Block>, shared: bool, hashes: &'b Hashes) -> Self {
        let weights = block.into_iter().flat_map(Block::stored_weights);
        Self { weights: weights.map(|weight| (weight.name(), weight)).collect(), shared, hashes }
    }

    fn sha256(&self, job: &Job<'_>, entry: &PlanEntry) -> Result<String> {
        if let Some(bytes) = self.take(&entry.stored) {
            return Ok(sha256_hex(&*bytes));
        }
        let names: Vec<_> = entry.sources().into_iter().map(|(name, _)| name.to_owned()).collect();
        let mut hashes = self.hashes.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = hashes.get(&names) {
            return Ok(known.clone());
        }
        let sha256 = sha256_of(job, entry)?;
        hashes.insert(names, sha256.clone());
        Ok(sha256)
    }

    /// The hash of an entry's bytes. Bytes in memory stay there.
    pub(super) fn peek_sha256(&self, job: &Job<'_>, entry: &PlanEntry) -> Result<String> {
        match self.peek(&entry.stored) {
            Some(bytes) => Ok(sha256_hex(&*bytes)),
            None => self.sha256(job, entry),
        }
    }

    /// Whether results so far may depend on an entry's bytes: all but the weights of a block that it has not read yet,
    /// such as those of experts to which no token was routed.
    pub(super) fn may_be_used(&self, entry: &PlanEntry) -> bool {
        self.weights.get(&*entry.stored).is_none_or(|weight| weight.was_read())
    }

    pub(super) fn peek(&self, name: &str) -> Option<Bytes> {
        self.weights.get(name)?.held().map(Bytes::Held)
    }

    /// Returns the bytes of a tensor if they are in memory, and drops them from the block unless they are needed again.
    fn take(&self, name: &str) -> Option<Bytes> {
        let weight = self.weights.get(name)?;
        let bytes = if self.shared { weight.held() } else { weight.release() };
        bytes.map(Bytes::Held)
    }
}

pub(super) enum Bytes {
    Own(Vec<u8>),
    /// Read with its block, and checked to be finite.
    Held(Arc<Vec<u8>>),
}

impl Bytes {
    pub(super) fn into_spare(self) -> Vec<u8> {
        match self {
            Self::Own(bytes) => bytes,
            Self::Held(_) => Vec::new(),
        }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Held(bytes) => bytes,
        }
    }
}

pub(super) struct Source {
    contents: Contents,
    sha256: String,
}

enum Contents {
    Float(Bytes),
    /// A weight that is already quantized.
    Packed(Box<QuantizedTensor>),
}

impl Source {
    /// Reads an entry unless it is in memory. Float tensors are read into a reused buffer, whose pages are already
    /// mapped.
    pub(super) fn read(
        job: &Job<'_>,
        entry: &PlanEntry,
        held: &ReadWeights<'_>,
        spare: Vec<u8>,
    ) -> Result<Self> {
        if let Action::Repack { module, .. } = &entry.action {
            let shape = [entry.info.shape[0], entry.info.shape[1]];
            let contents = Contents::Packed(Box::new(job.model.packed(module, shape)?));
            return Ok(Self { contents, sha256: sha256_of(job, entry)? });
        }
        let bytes = match held.take(&entry.stored) {
            Some(bytes) => bytes,
            None => Bytes::Own(read_into(job, entry, spare)?),
        };
        let sha256 = sha256_hex(&*bytes);
        Ok(Self { contents: Contents::Float(bytes), sha256 })
    }

    pub(super) fn sha256(&self) -> &str {
        &self.sha256
    }

    pub(super) fn float(self) -> Result<(Bytes, String)> {
        match self.contents {
            Contents::Float(bytes) => Ok((bytes, self.sha256)),
            Contents::Packed(_) => Err(Error::Internal("expected a float weight, found a packed one".into())),
        }
    }

    pub(super) fn packed(self) -> Result<(QuantizedTensor, String)> {
        match self.contents {
            Contents::Packed(tensor) => Ok((*tensor, self.sha256)),
            Contents::Float(_) => Err(Error::Internal("expected a packed weight, found a float one".into())),
        }
    }
}

pub(super) fn read_into(job: &Job<'_>, entry: &PlanEntry, mut bytes: Vec<u8>) -> Result<Vec<u8>> {
    let len = usize::try_from(entry.info.byte_len())
        .map_err(|_| Error::Internal(format!("tensor `{}` exceeds the address space", entry.tensor)))?;
    if !is_reused(bytes.capacity() as u64, entry.info.byte_len()) {
        bytes = Vec::new();
    }
    allocate::grow(&mut bytes, len, format_args!("tensor `{}`", entry.tensor))?;
    job.model.source().read_range(&entry.stored, 0, &mut bytes)?;
    Ok(bytes)
}

/// Returns the report that an earlier run stored for a tensor, unless it has been damaged since.
pub(super) fn stored_report(entry: &PlanEntry, sink: &dyn TensorSink) -> Option<TensorReport> {
    report_of(entry, sink.recall(&entry.tensor)?)
}

/// Returns a report that was stored for a tensor, if it is one.
pub(crate) fn report_of(entry: &PlanEntry, stored: serde_json::Value) -> Option<TensorReport> {
    let tensor: TensorReport = serde_json::from_value(stored).ok()?;
    (tensor.tensor == entry.tensor).then_some(tensor)
}

/// Returns the report of a tensor that an earlier run finished. Fails if the input has changed since.
pub(super) fn unchanged_report(
    job: &Job<'_>,
    entry: &PlanEntry,
    held: &ReadWeights<'_>,
    sink: &dyn TensorSink,
) -> Result<TensorReport> {
    let tensor = stored_report(entry, sink)
        .ok_or_else(|| Error::Internal(format!("the record of `{}` is missing", entry.tensor)))?;
    if held.sha256(job, entry)? != tensor.source_sha256 {
        return Err(Error::InputChanged { tensor: entry.tensor.clone() });
    }
    Ok(tensor)
}

/// The hash of an entry's bytes in the input; for several tensors, of their concatenation.
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

/// Passes a tensor's bytes on in chunks, and reads the next chunk while one is used.
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

/// Copies a tensor to the sink unchanged; NaN and infinity are errors.
pub(super) fn copy(
    job: &Job<'_>,
    entry: &PlanEntry,
    held: &ReadWeights<'_>,
    sink: &mut dyn TensorSink,
) -> Result<TensorReport> {
    let (name, dtype) = (&entry.stored, entry.info.dtype);
    let Some(output) = entry.outputs.first().map(|o| o.name.as_str()) else {
        return Err(Error::Internal(format!("tensor `{name}` must be copied, but has no output")));
    };
    if entry.by_columns {
        let bytes = match held.take(name) {
            Some(bytes) => bytes,
            None => Bytes::Own(read_into(job, entry, Vec::new())?),
        };
        finite(job, name, dtype, &bytes)?;
        let sha256 = sha256_hex(&*bytes);
        sink.write(output, 0, &as_written(entry, bytes)?)?;
        return Ok(copied(entry, sha256));
    }
    let mut hash = Sha256::new();
    let mut pass_on = |at: u64, piece: &[u8], check: bool| {
        let (written, ()) = rayon::join(
            || {
                if check {
                    finite(job, name, dtype, piece)?;
                }
                sink.write(output, at, piece)
            },
            || hash.update(piece),
        );
        written
    };
    match held.take(name) {
        Some(bytes) => pass_on(0, &bytes, false)?,
        None => each_piece(job, name, entry.info.byte_len(), |at, piece| pass_on(at, piece, true))?,
    }
    if entry.info.byte_len() == 0 {
        sink.write(output, 0, &[])?;
    }
    Ok(copied(entry, hex(&hash.finalize())))
}

fn copied(entry: &PlanEntry, sha256: String) -> TensorReport {
    match entry.modified {
        true => TensorReport::rewritten(entry, sha256),
        false => TensorReport::copied(entry, sha256),
    }
}

/// Fails if a chunk holds NaN or infinity. The error has their number and the position of the first one in the tensor.
fn finite(job: &Job<'_>, name: &str, dtype: Dtype, piece: &[u8]) -> Result<()> {
    if !dtype.is_weight_float() {
        return Ok(());
    }
    let source = job.model.source();
    require_finite_bytes(source.location(name), name, dtype, piece)
        .map_err(|e| non_finite_in_whole(source.as_ref(), dtype, e))
}
