//! Writing, last stage of the path: what was written is read back before anyone may see it.

use std::fs::File;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::file_system::FileSystem;
use super::header::Header;
use super::input_file::{open_regular, read_exact_at};
use super::journal::Hash;
use super::layout::ShardFile;
use super::manifest::PublishedFile;
use crate::{CancelToken, Error, Result};

/// Bytes read at once: enough that hashing them on two threads is worth the hand-over.
const CHUNK: usize = 4 << 20;

/// Reads a shard back: its header byte for byte and through the strict reader, then each tensor
/// against the hash of what was written.
///
/// # Errors
/// [`Error::Verification`] naming the tensor; [`Error::Interrupted`].
pub(crate) fn verify_shard(
    fs: &dyn FileSystem,
    directory: &Path,
    shard: &ShardFile,
    written: impl Fn(&str) -> Option<Hash>,
    cancel: &CancelToken,
) -> Result<PublishedFile> {
    let path = directory.join(&shard.name);
    let differs = |reason: String| Error::Verification { path: path.clone(), reason };
    let file = open_regular(&path, &path)?;
    fs.forget_cached(&file);
    let len = file.metadata().map_err(|e| Error::io("read", &path, e))?.len();
    if len != shard.bytes {
        return Err(differs(format!("has {len} bytes, {} were written", shard.bytes)));
    }
    let mut header = vec![0; shard.header.len()];
    read_exact_at(&file, &path, 0, &mut header)?;
    if header != shard.header {
        return Err(differs("the header is not the one that was written".into()));
    }
    let parsed = Header::read(&file, &path).map_err(|e| differs(e.to_string()))?;
    let as_planned = parsed.tensors.len() == shard.tensors.len()
        && shard
            .tensors
            .iter()
            .all(|t| parsed.tensors.get(&t.name).is_some_and(|p| p.info == t.info && p.offset == t.offset));
    if !as_planned {
        return Err(differs("the header does not describe the tensors that were written".into()));
    }
    // Header and tensors follow each other without a gap, so one pass gives both hashes.
    let mut whole = Sha256::new();
    whole.update(&header);
    for tensor in &shard.tensors {
        cancel.check()?;
        let hash =
            hash_range(&file, &path, tensor.offset, tensor.info.byte_len(), |part| whole.update(part))?;
        if written(&tensor.name) != Some(hash) {
            return Err(differs(format!("tensor `{}` does not read back as it was written", tensor.name)));
        }
    }
    Ok(PublishedFile::new(&shard.name, shard.bytes, whole.finalize().into()))
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
    if len != expected.bytes || hash_range(&file, &path, 0, len, |_| {})? != expected.sha256 {
        return Err(Error::Verification { path, reason: "does not read back as it was written".into() });
    }
    Ok(())
}

/// SHA-256 of a range of a file, whose parts `also` sees too.
pub(crate) fn hash_range(
    file: &File,
    path: &Path,
    offset: u64,
    len: u64,
    mut also: impl FnMut(&[u8]) + Send,
) -> Result<Hash> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; usize::try_from(len).map_or(CHUNK, |l| l.min(CHUNK))];
    let mut done = 0;
    while done < len {
        let part = usize::try_from(len - done).map_or(CHUNK, |l| l.min(CHUNK));
        let part = &mut buffer[..part];
        read_exact_at(file, path, offset + done, part)?;
        let part = &*part;
        rayon::join(|| hash.update(part), || also(part));
        done += part.len() as u64;
    }
    Ok(hash.finalize().into())
}
