//! Snapshots in the cache of the hub's programs: each file is a link into `blobs`, to a file whose name is the hash of
//! its content.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use quant_core::checkpoint::file_sha256;
use quant_core::digest::hex;
use quant_core::{CancelToken, Error, Result};
use sha1::{Digest as _, Sha1};

const PIECE: usize = 1 << 20;

/// A hash that a hub gives for a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Digest {
    /// SHA-256 of the content; used for large files.
    Sha256(String),
    /// Git's blob hash, which includes the length; used for small files.
    Git(String),
}

impl Digest {
    /// Interprets a tag as a hash by its length. Returns `None` for the tags of servers that do not use hashes.
    pub fn from_tag(tag: &str) -> Option<Self> {
        let is_hex = tag.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        match tag.len() {
            64 if is_hex => Some(Self::Sha256(tag.to_owned())),
            40 if is_hex => Some(Self::Git(tag.to_owned())),
            _ => None,
        }
    }

    /// Computes the same kind of hash of a file's content.
    pub fn of(&self, path: &Path, size: u64, cancel: &CancelToken) -> Result<Self> {
        Ok(match self {
            Self::Sha256(_) => Self::Sha256(file_sha256(path, cancel)?),
            Self::Git(_) => {
                let mut hash = Sha1::new();
                hash.update(format!("blob {size}\0"));
                each_chunk(path, cancel, |bytes| hash.update(bytes))?;
                Self::Git(hex(&hash.finalize()))
            }
        })
    }

    /// Names the kind and the value.
    pub fn describe(&self) -> String {
        match self {
            Self::Sha256(hex) => format!("SHA-256 {hex}"),
            Self::Git(hex) => format!("git hash {hex}"),
        }
    }
}

/// What was compared.
pub struct VerifiedSnapshot {
    /// Files whose content has the hash that is the name of their blob.
    pub files: usize,
    /// Their total size in bytes.
    pub bytes: u64,
    /// Other files in the directory, sorted. They are not read.
    pub others: Vec<String>,
}

/// Compares the files of a snapshot with the names of their blobs; `None` if the directory is not a snapshot.
///
/// # Errors
/// [`Error::InputFile`] when a link leads nowhere, or a file has a different hash; [`Error::Interrupted`];
/// [`Error::Io`].
pub fn verify_snapshot(directory: &Path, cancel: &CancelToken) -> Result<Option<VerifiedSnapshot>> {
    let real = directory.canonicalize().map_err(|e| Error::io("open", directory, e))?;
    let Some(blobs) = blobs_of(&real) else { return Ok(None) };
    let entries = std::fs::read_dir(&real).map_err(|e| Error::io("list", &real, e))?;
    let mut found = VerifiedSnapshot { files: 0, bytes: 0, others: Vec::new() };
    for entry in entries {
        cancel.check()?;
        let path = entry.map_err(|e| Error::io("list", &real, e))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let broken = |reason: String| Error::InputFile {
            path: directory.join(&name),
            line: None,
            reason,
            remedy: "remove the file of this name in `blobs`, and download it again".into(),
        };
        let blob = match path.canonicalize() {
            Ok(blob) => blob,
            Err(e) if e.kind() == ErrorKind::NotFound => {
                return Err(broken("is a link to a file that does not exist".into()));
            }
            Err(e) => return Err(Error::io("open", &path, e)),
        };
        let tag = blob.file_name().and_then(|tag| tag.to_str()).filter(|_| blob.parent() == Some(&blobs));
        let Some(expected) = tag.and_then(Digest::from_tag) else {
            found.others.push(name);
            continue;
        };
        let metadata = blob.metadata().map_err(|e| Error::io("read", &blob, e))?;
        if !metadata.is_file() {
            return Err(broken("is not a link to a regular file".into()));
        }
        let hash = expected.of(&blob, metadata.len(), cancel)?;
        if hash != expected {
            let (hash, expected) = (hash.describe(), expected.describe());
            return Err(broken(format!(
                "is damaged: it has the {hash}, but the name of its blob is the {expected}"
            )));
        }
        found.files += 1;
        found.bytes += metadata.len();
    }
    found.others.sort_unstable();
    Ok(Some(found))
}

fn blobs_of(snapshot: &Path) -> Option<PathBuf> {
    let snapshots =
        snapshot.parent().filter(|parent| parent.file_name().is_some_and(|n| n == "snapshots"))?;
    let blobs = snapshots.parent()?.join("blobs");
    blobs.is_dir().then_some(blobs)
}

fn each_chunk(path: &Path, cancel: &CancelToken, mut take: impl FnMut(&[u8])) -> Result<()> {
    let failed = |e| Error::io("read", path, e);
    let mut file = File::open(path).map_err(failed)?;
    let mut buffer = vec![0; PIECE];
    loop {
        cancel.check()?;
        match file.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => take(&buffer[..n]),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(failed(e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_git() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, "what is up, doc?").unwrap();
        // From `git hash-object`.
        let expected = Digest::from_tag("bd9dbf5aae1a3862dd1526723246b20206e5fc37").unwrap();
        assert_eq!(expected.of(&path, 16, &CancelToken::new()).unwrap(), expected);
    }
}
