//! Reads the written files back before they become visible.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::Archive;
use super::file_system::FileSystem;
use super::input_file::{open_regular, read_exact_at};
use super::layout::{PlacedTensor, ShardFile};
use super::manifest::PublishedFile;
use super::seal::seal;
use crate::digest::Digest256;
use crate::{CancelToken, Error, Result};

const CHUNK: usize = 4 << 20;

/// Reads a shard back. Compares its header byte for byte, and each tensor with the hash of the bytes that were written;
/// also reads the header with the strict reader.
///
/// # Errors
/// [`Error::Verification`] when the length, the header or a tensor differs; [`Error::Interrupted`], [`Error::Io`].
pub(crate) fn verify_shard(
    fs: &dyn FileSystem,
    archive: &dyn Archive,
    directory: &Path,
    shard: &ShardFile,
    written: impl Fn(&str) -> Option<Digest256> + Sync,
    cancel: &CancelToken,
) -> Result<PublishedFile> {
    let path = directory.join(&shard.name);
    let differs = |reason: String| Error::Verification { path: path.clone(), reason };
    let file = open_regular(&path, &path)?;
    fs.forget_cached(&file);
    let len = file.metadata().map_err(|e| Error::io("read", &path, e))?.len();
    if len != shard.bytes {
        return Err(differs(format!("has {len} bytes, but {} bytes were written", shard.bytes)));
    }
    let mut header = vec![0; shard.header.len()];
    read_exact_at(&file, &path, 0, &mut header)?;
    if header != *sealed(shard, &written) {
        return Err(differs("the header differs from what was written".into()));
    }
    let parsed = archive.read_header(&file, &path).map_err(|e| differs(e.to_string()))?;
    let parsed: HashMap<&str, &PlacedTensor> = parsed.iter().map(|t| (t.name.as_str(), t)).collect();
    let found = |t: &PlacedTensor| {
        parsed.get(t.name.as_str()).is_some_and(|p| p.info == t.info && p.offset == t.offset)
    };
    let as_planned = parsed.len() == shard.tensors.len() && shard.tensors.iter().all(found);
    if !as_planned {
        return Err(differs("the header does not match the tensors that were written".into()));
    }
    let mut whole = Sha256::new();
    let mut tensors = TensorDigests::of(&shard.tensors);
    let mut changed = None;
    each_chunk(&file, &path, 0..len, |chunk| {
        cancel.check()?;
        let matches = |tensor: &PlacedTensor, digest| written(&tensor.name) == Some(digest);
        rayon::join(|| whole.update(chunk), || changed = tensors.take(chunk, matches));
        match changed {
            Some(tensor) => {
                let name = &tensor.name;
                Err(differs(format!("tensor `{name}` does not read back as it was written")))
            }
            None => Ok(()),
        }
    })?;
    Ok(PublishedFile::new(&shard.name, shard.bytes, whole.finalize().into()))
}

/// The header of a file whose tensors are all written.
pub(crate) fn sealed(shard: &ShardFile, written: impl Fn(&str) -> Option<Digest256>) -> Cow<'_, [u8]> {
    let Some(range) = shard.seal.clone() else { return Cow::Borrowed(&shard.header) };
    let digests = shard.tensors.iter().filter_map(|tensor| written(&tensor.name));
    let mut header = shard.header.clone();
    header[range].copy_from_slice(seal(&shard.header, digests).as_bytes());
    Cow::Owned(header)
}

/// Reads a small file back.
///
/// # Errors
/// [`Error::Verification`] when it differs.
pub(crate) fn verify_file(fs: &dyn FileSystem, directory: &Path, expected: &PublishedFile) -> Result<()> {
    let path = directory.join(&expected.name);
    let file = open_regular(&path, &path)?;
    fs.forget_cached(&file);
    let len = file.metadata().map_err(|e| Error::io("read", &path, e))?.len();
    let mut hash = Sha256::new();
    each_chunk(&file, &path, 0..len, |chunk| {
        hash.update(chunk);
        Ok(())
    })?;
    if len != expected.bytes || Digest256::from(hash.finalize()) != expected.sha256 {
        return Err(Error::Verification { path, reason: "does not read back as it was written".into() });
    }
    Ok(())
}

pub(crate) fn tensor_digest(file: &File, path: &Path, tensor: &PlacedTensor) -> Result<Digest256> {
    let mut hash = blake3::Hasher::new();
    each_chunk(file, path, tensor.offset..tensor.offset + tensor.info.byte_len(), |chunk| {
        hash.update(chunk);
        Ok(())
    })?;
    Ok(hash.finalize().into())
}

/// Reads a range of a file in chunks. The next chunk is read while `take` handles one.
pub(crate) fn each_chunk(
    file: &File,
    path: &Path,
    range: Range<u64>,
    mut take: impl FnMut(&[u8]) -> Result<()> + Send,
) -> Result<()> {
    let read = |buffer: &mut Vec<u8>, at: u64| {
        let len = usize::try_from(range.end - at).map_or(CHUNK, |left| left.min(CHUNK));
        buffer.resize(len, 0);
        read_exact_at(file, path, at, buffer)
    };
    let (mut chunk, mut next) = (Vec::new(), Vec::new());
    let mut at = range.start;
    read(&mut chunk, at)?;
    while !chunk.is_empty() {
        at += chunk.len() as u64;
        let (taken, ahead) = rayon::join(|| take(&chunk), || read(&mut next, at));
        taken?;
        ahead?;
        std::mem::swap(&mut chunk, &mut next);
    }
    Ok(())
}

/// The digests of consecutive tensors in a file that is read in pieces.
struct TensorDigests<'a> {
    tensors: &'a [PlacedTensor],
    running: blake3::Hasher,
    at: u64,
}

impl<'a> TensorDigests<'a> {
    fn of(tensors: &'a [PlacedTensor]) -> Self {
        Self { tensors, running: blake3::Hasher::new(), at: 0 }
    }

    /// Adds the next piece. Returns the first tensor that ends in it and whose digest does not match.
    fn take(
        &mut self,
        mut piece: &[u8],
        matches: impl Fn(&PlacedTensor, Digest256) -> bool,
    ) -> Option<&'a PlacedTensor> {
        while let Some((tensor, rest)) = self.tensors.split_first() {
            self.advance(&mut piece, tensor.offset);
            let end = tensor.offset + tensor.info.byte_len();
            if self.at < tensor.offset {
                return None;
            }
            let part = self.advance(&mut piece, end);
            self.running.update(part);
            if self.at < end {
                return None;
            }
            self.tensors = rest;
            let digest = std::mem::take(&mut self.running).finalize().into();
            if !matches(tensor, digest) {
                return Some(tensor);
            }
        }
        None
    }

    fn advance<'p>(&mut self, piece: &mut &'p [u8], to: u64) -> &'p [u8] {
        let len = usize::try_from(to.saturating_sub(self.at)).map_or(piece.len(), |l| l.min(piece.len()));
        let (part, rest) = piece.split_at(len);
        *piece = rest;
        self.at += len as u64;
        part
    }
}
