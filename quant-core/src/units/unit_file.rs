//! The file of a unit that writes tensors.
//!
//! It is a safetensors file with the tensors of the unit as they will be in the checkpoint, in the order of the plan,
//! and two U8 vectors: `about`, JSON with the unit, the job, and the report of every tensor; and `sha256`, the hash of
//! all bytes before it, except the header. The plan determines the header, which is compared with it.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::store::{damaged, written};
use crate::checkpoint::{
    Dtype, HeaderText, ShardedCheckpoint, TensorInfo, TensorSink, TensorSource, TensorSpec, check_specs,
};
use crate::digest::hex;
use crate::{CancelToken, Error, Result, system};

pub(super) const SCHEMA: &str = "quant-unit/1";
pub(super) const ABOUT: &str = "about";
pub(super) const SHA256: &str = "sha256";
/// In `about`: the SHA-256 of weights that the unit has read, but does not write.
const READ: &str = "read_sha256";
/// The maximum size of `about`.
const MAX_ABOUT_BYTES: u64 = 256 << 20;
const HASH_BYTES: u64 = 32;
const PIECE: usize = 4 << 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) unit: String,
    /// The digest of the job record.
    pub(super) job: String,
    /// The hash of the job, the unit and its inputs.
    pub(super) key: String,
}

pub(super) struct UnitSink {
    path: PathBuf,
    file: File,
    specs: Vec<TensorSpec>,
    /// For each tensor, its place in the file, its length, and how much of it is written.
    tensors: BTreeMap<String, Progress>,
    header_bytes: u64,
    /// The reports as JSON text, which takes far less memory than parsed values.
    records: BTreeMap<String, Box<str>>,
}

struct Progress {
    offset: u64,
    len: u64,
    written: u64,
}

impl UnitSink {
    /// Creates the file, which must not exist.
    pub(super) fn create(path: &Path, specs: Vec<TensorSpec>) -> Result<Self> {
        check_specs(&specs)?;
        if let Some(reserved) = specs.iter().find(|s| s.name == ABOUT || s.name == SHA256) {
            return Err(Error::usage(
                format!("a tensor is named `{}`, which files of units reserve", reserved.name),
                "quantize this model with ‹quantize()›",
            ));
        }
        // The header is written at the end, so its room must not depend on the length of `about`.
        let header_bytes = header(&specs, MAX_ABOUT_BYTES)?.len() as u64;
        let (mut offset, mut tensors) = (header_bytes, BTreeMap::new());
        for TensorSpec { name, info } in &specs {
            let len = info.byte_len();
            tensors.insert(name.clone(), Progress { offset, len, written: 0 });
            offset += len;
        }
        let mut options = system::open_options();
        let file = options.read(true).write(true).create_new(true).open(path);
        let file = file.map_err(|e| Error::io("create", path, e))?;
        system::allocate(&file, offset).map_err(|e| written(path, offset, e))?;
        Ok(Self { path: path.to_owned(), file, specs, tensors, header_bytes, records: BTreeMap::new() })
    }

    /// Completes and syncs the file.
    ///
    /// `read` has the hashes of the weights that the unit has read, but does not write, by name.
    pub(super) fn finish(self, identity: &Identity, read: &BTreeMap<String, String>) -> Result<()> {
        if let Some((name, _)) = self.tensors.iter().find(|(_, t)| t.written != t.len) {
            return Err(Error::Internal(format!("tensor `{name}` of a unit is incomplete")));
        }
        let mut head = json!({
            "schema": SCHEMA,
            "version": env!("CARGO_PKG_VERSION"),
            "unit": identity.unit,
            "job": identity.job,
            "key": identity.key,
        });
        if !read.is_empty() {
            head[READ] = json!(read);
        }
        let mut about = head.to_string();
        about.pop();
        about.push_str(r#","reports":{"#);
        for (i, (tensor, report)) in self.records.iter().enumerate() {
            let separator = if i == 0 { "" } else { "," };
            about.push_str(&format!("{separator}{}:{report}", Value::from(tensor.as_str())));
        }
        about.push_str("}}");
        let data: u64 = self.specs.iter().map(|s| s.info.byte_len()).sum();
        let mut header = header(&self.specs, about.len() as u64)?;
        let room = usize::try_from(self.header_bytes).unwrap_or(usize::MAX);
        if header.len() > room {
            return Err(Error::Internal("the reports of a unit are too long".into()));
        }
        header.resize(room, b' ');
        // The length before the header counts the padding.
        header[..8].copy_from_slice(&(self.header_bytes - 8).to_le_bytes());
        let put = |at: u64, bytes: &[u8]| {
            system::write_all_at(&self.file, bytes, at)
                .map_err(|e| written(&self.path, bytes.len() as u64, e))
        };
        put(0, &header)?;
        put(self.header_bytes + data, about.as_bytes())?;
        let (mut hash, mut piece) = (Sha256::new(), Vec::new());
        let all = data + about.len() as u64;
        for at in (0..all).step_by(PIECE) {
            piece.resize((PIECE as u64).min(all - at) as usize, 0);
            system::read_exact_at(&self.file, &mut piece, self.header_bytes + at)
                .map_err(|e| Error::io("read", &self.path, e))?;
            hash.update(&piece);
        }
        put(self.header_bytes + all, &hash.finalize())?;
        self.file.sync_all().map_err(|e| written(&self.path, 0, e))
    }
}

/// The length of the header and the header, padded to a multiple of 8 bytes.
fn header(specs: &[TensorSpec], about_bytes: u64) -> Result<Vec<u8>> {
    let bytes = |len: u64| -> Result<TensorInfo> {
        let len = usize::try_from(len).map_err(|_| Error::Internal("the size of a unit overflows".into()))?;
        Ok(TensorInfo { dtype: Dtype::U8, shape: vec![len] })
    };
    let mut text = HeaderText::new();
    for TensorSpec { name, info } in specs {
        text.add(name, info)?;
    }
    text.add(ABOUT, &bytes(about_bytes)?)?;
    text.add(SHA256, &bytes(HASH_BYTES)?)?;
    Ok(text.finish())
}

impl TensorSink for UnitSink {
    fn is_complete(&self, _name: &str) -> bool {
        false
    }

    fn write(&mut self, name: &str, offset: u64, bytes: &[u8]) -> Result<()> {
        let progress = self
            .tensors
            .get_mut(name)
            .filter(|t| t.written == offset && bytes.len() as u64 <= t.len - t.written)
            .ok_or_else(|| Error::Internal(format!("tensor `{name}` does not continue a unit")))?;
        system::write_all_at(&self.file, bytes, progress.offset + offset)
            .map_err(|e| written(&self.path, bytes.len() as u64, e))?;
        progress.written += bytes.len() as u64;
        Ok(())
    }

    fn is_resumable(&self) -> bool {
        false
    }

    fn remember(&mut self, key: &str, value: &Value) -> Result<()> {
        self.records.insert(key.to_owned(), value.to_string().into());
        Ok(())
    }

    fn commit(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Receives a piece of a tensor: its name, the offset of the piece, and the bytes.
pub(super) type TakePiece<'t> = dyn FnMut(&str, u64, &[u8]) -> Result<()> + 't;

/// The file of a unit that writes tensors, with a header and `about` that match the unit.
pub(super) struct UnitFile<'a> {
    path: &'a Path,
    source: ShardedCheckpoint,
    specs: Vec<TensorSpec>,
    about: Value,
}

impl<'a> UnitFile<'a> {
    /// Opens a file that must hold exactly these tensors.
    pub(super) fn open(path: &'a Path, specs: Vec<TensorSpec>, identity: &Identity) -> Result<Self> {
        let source = ShardedCheckpoint::open_file(path)?;
        let about = about(&source, path)?;
        let is = |field: &str, expected: &str| about[field].as_str() == Some(expected);
        if !is("schema", SCHEMA) {
            return Err(damaged(path, format!("does not have the schema `{SCHEMA}`")));
        }
        if !(is("unit", &identity.unit) && is("job", &identity.job) && is("key", &identity.key)) {
            return Err(damaged(path, "is the result of a different unit".into()));
        }
        if source.names().len() != specs.len() + 2 {
            return Err(damaged(path, "has different tensors from the plan".into()));
        }
        for TensorSpec { name, info } in &specs {
            if source.info(name) != Some(info) {
                return Err(damaged(path, format!("has no tensor `{name}` as planned")));
            }
            if !about["reports"].is_object() {
                return Err(damaged(path, "has no reports".into()));
            }
        }
        Ok(Self { path, source, specs, about })
    }

    /// Reads all tensors in order, passes them to `take` in pieces, and compares the hash at the end. Returns the hash.
    pub(super) fn read(&self, cancel: &CancelToken, take: &mut TakePiece<'_>) -> Result<String> {
        let (mut hash, mut piece) = (Sha256::new(), Vec::new());
        for TensorSpec { name, info } in &self.specs {
            let len = info.byte_len();
            let mut at = 0;
            while at < len {
                cancel.check()?;
                piece.resize((PIECE as u64).min(len - at) as usize, 0);
                self.source.read_range(name, at, &mut piece)?;
                hash.update(&piece);
                take(name, at, &piece)?;
                at += piece.len() as u64;
            }
            if len == 0 {
                take(name, 0, &[])?;
            }
        }
        hash.update(self.source.read(ABOUT)?);
        let (found, stored) = (hex(&hash.finalize()), digest(&self.source, self.path)?);
        match found == stored {
            true => Ok(stored),
            false => Err(damaged(self.path, "is damaged: the contents do not match the stored hash".into())),
        }
    }

    /// The hashes of the weights that the unit has read, but does not write, by name.
    pub(super) fn others_read(&self) -> impl Iterator<Item = (&String, &str)> {
        let read = self.about[READ].as_object().into_iter().flatten();
        read.filter_map(|(name, hash)| Some((name, hash.as_str()?)))
    }

    /// The stored report of a tensor, which may be anything.
    pub(super) fn report(&self, tensor: &str) -> Option<&Value> {
        self.about["reports"].get(tensor)
    }

    /// The reports of the unit's tensors by name, which are correct if [`read`](Self::read) found no damage.
    pub(super) fn reports(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.about["reports"].as_object().into_iter().flatten()
    }
}

fn about(source: &ShardedCheckpoint, path: &Path) -> Result<Value> {
    let is_short = |len: u64| len <= MAX_ABOUT_BYTES;
    if !source.info(ABOUT).is_some_and(|info| info.dtype == Dtype::U8 && is_short(info.byte_len())) {
        return Err(damaged(path, "is not the result of a unit".into()));
    }
    serde_json::from_slice(&source.read(ABOUT)?)
        .map_err(|e| damaged(path, format!("is damaged: its description is invalid: {e}")))
}

/// Returns the hash that is stored in a file of a unit or of hidden states.
pub(super) fn stored_digest(path: &Path) -> Result<String> {
    digest(&ShardedCheckpoint::open_file(path)?, path)
}

fn digest(source: &ShardedCheckpoint, path: &Path) -> Result<String> {
    match source.info(SHA256) {
        Some(info) if info.dtype == Dtype::U8 && info.byte_len() == HASH_BYTES => {
            Ok(hex(&source.read(SHA256)?))
        }
        _ => Err(damaged(path, "has no hash of its contents".into())),
    }
}
