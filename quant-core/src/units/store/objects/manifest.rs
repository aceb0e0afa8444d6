//! How a result is divided into objects.
//!
//! ```text
//! units/NAME           the manifest: the length and the SHA-256 of each part
//! parts/SHA-256        a part, of at most 16 MiB
//! ```
//!
//! Uploads in several parts cannot be made conditional in all stores, and large single uploads need much memory and
//! cannot be resumed. So parts are objects of their own, named by their contents, and only the small manifest is
//! published on the condition that its name is free. Equal manifests mean equal results. The first and last parts hold
//! the header of the file and its description, so that these can be read without the tensors.

use std::fs::File;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::checkpoint::{ShardedCheckpoint, TensorInfo, TensorSource, open_regular, parse_strictly};
use crate::digest::hex;
use crate::units::unit_file::ABOUT;
use crate::{Error, Result, system};

const SCHEMA: &str = "quant-parts/1";
pub(super) const PART_BYTES: u64 = 16 << 20;
/// The maximum size of a manifest.
pub(super) const MAX_BYTES: u64 = 16 << 20;
/// The maximum size of the header and the description together.
const MAX_OUTLINE_BYTES: u64 = 512 << 20;
/// The length of the hash at the end of a result.
const HASH_BYTES: u64 = 32;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    schema: String,
    /// The length of the file.
    pub(super) bytes: u64,
    /// The number of parts at the beginning that hold the header.
    head: usize,
    /// The number of parts at the end that hold the description.
    tail: usize,
    parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Part {
    pub(super) bytes: u64,
    pub(super) sha256: String,
}

/// Which parts are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    All,
    /// Those of the header and the description.
    Outline,
}

impl Manifest {
    /// Divides a result, whose parts are passed to `take` in order.
    pub(super) fn of(path: &Path, mut take: impl FnMut(&Part, Vec<u8>) -> Result<()>) -> Result<Self> {
        let file = open_regular(path, path)?;
        let [header, description, bytes] = borders(&file, path)?;
        let mut manifest = Self { schema: SCHEMA.into(), bytes, head: 0, tail: 0, parts: Vec::new() };
        for (start, end) in [(0, header), (header, description), (description, bytes)] {
            let mut at = start;
            let before = manifest.parts.len();
            while at < end {
                let mut piece = vec![0; PART_BYTES.min(end - at) as usize];
                system::read_exact_at(&file, &mut piece, at).map_err(|e| Error::io("read", path, e))?;
                let part = Part { bytes: piece.len() as u64, sha256: hex(&Sha256::digest(&piece)) };
                at += part.bytes;
                take(&part, piece)?;
                manifest.parts.push(part);
            }
            let count = manifest.parts.len() - before;
            match start {
                0 => manifest.head = count,
                _ if start == description => manifest.tail = count,
                _ => {}
            }
        }
        Ok(manifest)
    }

    /// Reads a manifest from a store, which may hold anything, or returns the reason why it is not accepted.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let value = parse_strictly(bytes)?;
        let manifest: Self = serde_json::from_value(value).map_err(|e| e.to_string())?;
        if manifest.schema != SCHEMA {
            return Err(format!("does not have the schema `{SCHEMA}`"));
        }
        let is_hash =
            |text: &str| text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if !manifest.parts.iter().all(|p| (1..=PART_BYTES).contains(&p.bytes) && is_hash(&p.sha256)) {
            return Err("lists a part of an invalid size or name".into());
        }
        let sum = manifest.parts.iter().try_fold(0_u64, |sum, part| sum.checked_add(part.bytes));
        if sum != Some(manifest.bytes) {
            return Err("lists parts whose sizes do not add up".into());
        }
        let outline = manifest.head.checked_add(manifest.tail);
        if manifest.head == 0 || manifest.tail == 0 || outline.is_none_or(|n| n > manifest.parts.len()) {
            return Err("does not say where the header and the description are".into());
        }
        if manifest.parts(Wanted::Outline).map(|(_, part)| part.bytes).sum::<u64>() > MAX_OUTLINE_BYTES {
            return Err("has a header or a description that is too long".into());
        }
        Ok(manifest)
    }

    pub(super) fn to_bytes(&self) -> Result<Vec<u8>> {
        let text = serde_json::to_string(self).map_err(|e| Error::Internal(e.to_string()))?;
        match text.len() as u64 <= MAX_BYTES {
            true => Ok(text.into_bytes()),
            false => Err(Error::usage(
                format!("a result of {} bytes is too large for an object store", self.bytes),
                "choose a smaller ‹blocks_per_unit› or more ‹forward_shards›, or use a directory",
            )),
        }
    }

    /// Returns parts with their places in the file, in order.
    pub(super) fn parts(&self, wanted: Wanted) -> impl Iterator<Item = (u64, &Part)> {
        let last = self.parts.len().saturating_sub(self.tail);
        let parts = self.parts.iter().enumerate().scan(0, |at, (i, part)| {
            let start = *at;
            *at += part.bytes;
            Some((i, start, part))
        });
        parts
            .filter(move |(i, _, _)| wanted == Wanted::All || *i < self.head || *i >= last)
            .map(|(_, start, part)| (start, part))
    }
}

/// Returns where the header ends, where the description starts, and where the file ends.
fn borders(file: &File, path: &Path) -> Result<[u64; 3]> {
    let bytes = file.metadata().map_err(|e| Error::io("read", path, e))?.len();
    let mut length = [0; 8];
    system::read_exact_at(file, &mut length, 0).map_err(|e| Error::io("read", path, e))?;
    let header = u64::from_le_bytes(length).saturating_add(8);
    let about = ShardedCheckpoint::open_file(path)?.info(ABOUT).map_or(0, TensorInfo::byte_len);
    let description = bytes.saturating_sub(about.saturating_add(HASH_BYTES));
    match header <= description {
        true => Ok([header, description, bytes]),
        false => Err(Error::Internal(format!("{} is not the result of a unit", path.display()))),
    }
}
