//! One repository's part of the Hugging Face cache: the paths, and the checks of files against the hub's hashes.
//!
//! ```text
//! models--org--name/
//!   blobs/<etag>                    the downloaded file; a hub's tag is a hash of the content
//!   snapshots/<commit>/<file>       links to blobs
//!   refs/<revision>                 the commit that a branch or tag pointed to when it was fetched
//!   .quant/checked/<etag>           quant: size and time of a blob whose hash was verified
//!   .quant/sha256sums               quant: the hashes of data files when they were first fetched
//! ```

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use quant_core::{CancelToken, Error, Result};

use crate::snapshot::Digest;

/// The size and hash that a hub announces for a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Announced {
    /// The file's size in bytes.
    pub size: Option<u64>,
    /// The hash of the file's content.
    pub digest: Option<Digest>,
}

/// The result of [`RepositoryCache::check`].
#[derive(Debug, PartialEq, Eq)]
pub enum BlobCheck {
    /// The content matches what the hub announced.
    Matches,
    /// Neither the hub's announcement nor the blob's tag contains a hash.
    Unknown,
    /// The content differs from what the hub announced, or from the blob's tag.
    Wrong {
        /// What the hub announced.
        announced: String,
        /// What the file contains.
        found: String,
    },
}

/// One repository in the cache.
#[derive(Debug, Clone)]
pub struct RepositoryCache {
    root: PathBuf,
}

impl RepositoryCache {
    /// Names the part of a cache that belongs to a repository. `kind` is `models` or `datasets`, `repository` is
    /// `org/name`.
    pub fn new(cache: &Path, kind: &str, repository: &str) -> Self {
        Self { root: cache.join(format!("{kind}--{}", repository.replace('/', "--"))) }
    }

    /// Returns the directory of a commit.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    /// Returns the commit that a revision pointed to when it was last fetched. Returns a full commit hash unchanged.
    pub fn commit_of(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let commit = fs::read_to_string(self.root.join("refs").join(revision)).ok()?;
        Some(commit.trim().to_owned()).filter(|c| is_commit(c))
    }

    /// Records the commit of a revision. This is the last step of a download, so a recorded commit is complete.
    pub fn remember_revision(&self, revision: &str, commit: &str) -> Result<()> {
        // The cache may be read-only for this user.
        if self.commit_of(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        write_whole(&self.root.join("refs").join(revision), commit)
    }

    /// Compares a file of a snapshot with the hub's announcement and with its blob's tag.
    ///
    /// A blob whose size or time has changed since is hashed again.
    pub fn check(&self, link: &Path, announced: &Announced, cancel: &CancelToken) -> Result<BlobCheck> {
        let failed = |e| Error::io("open", link, e);
        let real = link.canonicalize().map_err(failed)?;
        let metadata = fs::metadata(&real).map_err(failed)?;
        let size = metadata.len();
        if let Some(expected) = announced.size.filter(|&s| s != size) {
            return Ok(BlobCheck::Wrong {
                announced: format!("{expected} bytes"),
                found: format!("{size} bytes"),
            });
        }
        let tag = self.tag_of(&real);
        let mut digests = Vec::from_iter(announced.digest.clone());
        digests.extend(
            tag.as_deref().and_then(Digest::from_tag).filter(|d| Some(d) != announced.digest.as_ref()),
        );
        if digests.is_empty() {
            return Ok(BlobCheck::Unknown);
        }
        let mark = tag.map(|tag| self.mark(&tag));
        let stamp = stamp(size, metadata.modified().ok(), &digests);
        if mark.as_ref().is_some_and(|m| fs::read_to_string(m).is_ok_and(|s| s == stamp)) {
            return Ok(BlobCheck::Matches);
        }
        for digest in &digests {
            let found = digest.of(&real, size, cancel)?;
            if found != *digest {
                return Ok(BlobCheck::Wrong { announced: digest.describe(), found: found.describe() });
            }
        }
        if let Some(mark) = mark {
            // Another user's cache may be read-only.
            let _ = write_whole(&mark, &stamp);
        }
        Ok(BlobCheck::Matches)
    }

    /// Removes a file from the cache, so that it is downloaded again.
    pub fn remove(&self, link: &Path) -> Result<()> {
        if let Ok(real) = link.canonicalize()
            && let Some(tag) = self.tag_of(&real)
        {
            remove_file(&self.mark(&tag))?;
            remove_file(&real)?;
        }
        remove_file(link)
    }

    /// Returns the path of the file with the hashes of data files at their first download, in the format of
    /// `sha256sum`.
    pub fn sums_path(&self) -> PathBuf {
        self.root.join(".quant").join("sha256sums")
    }

    /// Returns the recorded hash of a data file, if there is one.
    pub fn recorded_sum(&self, file: &str) -> Result<Option<String>> {
        let path = self.sums_path();
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io("read", path, e)),
        };
        let mut lines = text.lines().filter_map(|l| l.split_once("  "));
        Ok(lines.find(|(_, name)| *name == file).map(|(sum, _)| sum.to_owned()))
    }

    /// Records the hash of a data file for which none is recorded yet.
    pub fn record_sum(&self, file: &str, sum: &str) -> Result<()> {
        let path = self.sums_path();
        let before = fs::read_to_string(&path).unwrap_or_default();
        write_whole(&path, &format!("{before}{sum}  {file}\n"))
    }

    fn tag_of(&self, real: &Path) -> Option<String> {
        let blobs = self.root.join("blobs").canonicalize().ok()?;
        (real.parent() == Some(&blobs)).then(|| real.file_name()?.to_str().map(str::to_owned))?
    }

    fn mark(&self, tag: &str) -> PathBuf {
        self.root.join(".quant").join("checked").join(tag)
    }
}

/// Returns whether a revision is a full commit hash.
pub fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}

fn stamp(size: u64, modified: Option<SystemTime>, digests: &[Digest]) -> String {
    let since = modified.and_then(|t| t.duration_since(SystemTime::UNIX_EPOCH).ok()).unwrap_or_default();
    let digests: Vec<_> = digests.iter().map(Digest::describe).collect();
    format!("{size} bytes, {} ns, {}\n", since.as_nanos(), digests.join(", "))
}

/// Writes a small file atomically.
fn write_whole(path: &Path, text: &str) -> Result<()> {
    let failed = |e| Error::io("write", path, e);
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(failed)?;
    // Temporary files cannot be read by other users, and caches are shared.
    let mut draft = path.as_os_str().to_owned();
    draft.push(format!(".{}.incomplete", std::process::id()));
    let outcome = fs::write(&draft, text).and_then(|()| fs::rename(&draft, path));
    if outcome.is_err() {
        let _ = fs::remove_file(&draft);
    }
    outcome.map_err(failed)
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(Error::io("remove", path, e)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// The two hashes of `abc`; the second is the output of `git hash-object`.
    const SHA256: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    const GIT: &str = "f2ba8f84ab5c1bce84a7b441cb1959cfc7093b7f";

    fn cached(cache: &Path, tag: &str, content: &str) -> (RepositoryCache, PathBuf) {
        let repository = RepositoryCache::new(cache, "models", "a/b");
        let snapshot = repository.snapshot(GIT);
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir_all(repository.root.join("blobs")).unwrap();
        fs::write(repository.root.join("blobs").join(tag), content).unwrap();
        let link = snapshot.join("file");
        symlink(format!("../../blobs/{tag}"), &link).unwrap();
        (repository, link)
    }

    #[test]
    fn a_blob_is_checked_against_its_tag_and_the_announcement() {
        let announced = |size, digest| Announced { size, digest };
        let sha = || Some(Digest::Sha256(SHA256.into()));
        let none = Announced::default();
        for (tag, content, announced, wrong) in [
            (SHA256, "abc", none.clone(), ""),
            (GIT, "abc", none.clone(), ""),
            (GIT, "abc", announced(Some(3), sha()), ""),
            ("odd", "abc", announced(None, sha()), ""),
            (SHA256, "abd", none.clone(), "SHA-256"),
            (GIT, "abd", none.clone(), "git hash"),
            (GIT, "abc", announced(Some(4), None), "4 bytes"),
            ("odd", "abd", announced(Some(3), sha()), "SHA-256"),
        ] {
            let scratch = tempfile::tempdir().unwrap();
            let (cache, link) = cached(scratch.path(), tag, content);
            match cache.check(&link, &announced, &CancelToken::new()).unwrap() {
                BlobCheck::Matches => assert_eq!(wrong, "", "{tag} {content}"),
                BlobCheck::Wrong { announced, .. } => {
                    assert!(announced.starts_with(wrong) && !wrong.is_empty())
                }
                BlobCheck::Unknown => panic!("{tag} {content}"),
            }
        }
        let scratch = tempfile::tempdir().unwrap();
        let (cache, link) = cached(scratch.path(), "odd", "abc");
        assert_eq!(cache.check(&link, &none, &CancelToken::new()).unwrap(), BlobCheck::Unknown);
    }

    #[test]
    fn what_changes_after_it_was_checked_is_checked_again() {
        let scratch = tempfile::tempdir().unwrap();
        let (cache, link) = cached(scratch.path(), SHA256, "abc");
        let look = || cache.check(&link, &Announced::default(), &CancelToken::new());
        assert_eq!(look().unwrap(), BlobCheck::Matches);
        // Hashing the blob again would fail here, because the token is cancelled.
        let stopped = CancelToken::new();
        stopped.cancel();
        assert_eq!(cache.check(&link, &Announced::default(), &stopped).unwrap(), BlobCheck::Matches);
        fs::write(&link, "abd").unwrap();
        assert!(matches!(look().unwrap(), BlobCheck::Wrong { .. }));
        cache.remove(&link).unwrap();
        assert!(link.symlink_metadata().is_err() && !cache.root.join("blobs").join(SHA256).exists());
    }

    #[test]
    fn revisions_and_sums_are_remembered() {
        let scratch = tempfile::tempdir().unwrap();
        let cache = RepositoryCache::new(scratch.path(), "datasets", "a/b");
        assert_eq!(cache.commit_of("refs/pr/1"), None);
        cache.remember_revision("refs/pr/1", GIT).unwrap();
        assert_eq!(cache.commit_of("refs/pr/1").as_deref(), Some(GIT));
        assert_eq!(cache.commit_of(GIT).as_deref(), Some(GIT));
        assert_eq!(cache.recorded_sum("x/y.gz").unwrap(), None);
        cache.record_sum("x/y.gz", SHA256).unwrap();
        cache.record_sum("z", GIT).unwrap();
        assert_eq!(cache.recorded_sum("x/y.gz").unwrap().as_deref(), Some(SHA256));
        assert_eq!(cache.recorded_sum("z").unwrap().as_deref(), Some(GIT));
    }
}
