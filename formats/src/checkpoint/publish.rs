//! Publishes a prepared checkpoint by renaming it.
//!
//! A rename replaces the target in one step. On file systems that cannot exchange two directories, the old target is
//! set aside between two renames; after a crash at that moment, the next run restores it.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use super::archive::{Archive, Origin};
use super::file_system::{FileSystem, failure, is_unsupported};
use super::input_file::read_capped;
use super::job::{Job, parent_of};
use super::manifest::{MANIFEST, MAX_BYTES, PublishedFile, manifest_files};
use super::names::printable;
use crate::{Error, Result, system};

/// The targets that may be replaced.
#[derive(Debug)]
pub(crate) struct ReplacePolicy {
    /// Whether replacing is allowed at all.
    pub(crate) force: bool,
    /// The archive for a single-file target; `None` for a directory.
    pub(crate) file_of: Option<Arc<dyn Archive>>,
    /// The file that this program wrote, once one was found: reading it again would take long.
    known: Mutex<Option<State>>,
}

/// The identity of a file, its length, and when it was modified.
type State = ((u64, u64), u64, Option<SystemTime>);

impl ReplacePolicy {
    pub(crate) fn new(force: bool, file_of: Option<Arc<dyn Archive>>) -> Self {
        Self { force, file_of, known: Mutex::new(None) }
    }

    fn origin(&self, archive: &dyn Archive, target: &Path, metadata: &fs::Metadata) -> Result<Origin> {
        let state = (system::identity(metadata), metadata.len(), metadata.modified().ok());
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if *known == Some(state) {
            return Ok(Origin::Own);
        }
        let origin = archive.origin(target)?;
        *known = (origin == Origin::Own).then_some(state);
        Ok(origin)
    }
}

/// A published checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Published {
    /// The directory, or the single file, absolute and with links resolved.
    pub path: PathBuf,
    /// Its files sorted by name, with the manifest last.
    pub files: Vec<PublishedFile>,
    /// Total bytes of all files.
    pub bytes: u64,
    /// Whether an older target was replaced.
    pub replaced: bool,
    /// The job directory, if it could not be removed; this does not affect the result.
    pub leftover: Option<PathBuf>,
}

/// Checks that the target may be written, and returns whether it exists.
///
/// # Errors
/// [`Error::OutputExists`] without `force`. [`Error::Usage`] when the target holds anything that this program did not
/// write, or whose length has changed: a mistyped path must not destroy the user's files.
pub(crate) fn check_target(target: &Path, place: &ReplacePolicy) -> Result<bool> {
    let metadata = match fs::symlink_metadata(target) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(Error::io("open", target, e)),
    };
    if !place.force {
        return Err(Error::OutputExists { path: target.to_owned() });
    }
    let reason = match &place.file_of {
        Some(_) if !metadata.is_file() => Some("is not a regular file".into()),
        Some(archive) => match place.origin(&**archive, target, &metadata)? {
            Origin::Own => None,
            Origin::Changed => {
                Some("was modified after quant wrote it, so ‹force› does not replace it".into())
            }
            Origin::Foreign => Some("was not written by quant, so ‹force› does not replace it".into()),
        },
        None if metadata.is_dir() => not_replaceable(target)?,
        None => Some("is not a directory".into()),
    };
    let Some(reason) = reason else { return Ok(true) };
    Err(Error::usage(
        format!("{} {reason}", target.display()),
        "choose a different output, or remove this one yourself",
    ))
}

/// Returns the reason not to replace a directory; `None` if it is empty or holds only its manifest and the files listed
/// there, with unchanged lengths.
fn not_replaceable(directory: &Path) -> Result<Option<String>> {
    let fail = |e| Error::io("list", directory, e);
    let mut present = Vec::new();
    for entry in fs::read_dir(directory).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        let metadata = entry.metadata().map_err(fail)?;
        present.push((entry.file_name(), metadata.is_file().then_some(metadata.len())));
    }
    if present.is_empty() {
        return Ok(None);
    }
    let manifest = directory.join(MANIFEST);
    let listed = match read_capped(&manifest, &manifest, MAX_BYTES) {
        Ok(Ok(bytes)) => manifest_files(&bytes),
        Ok(Err(_)) => None,
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
            let reason =
                format!("was not written by quant (it has no {MANIFEST}), so ‹force› does not replace it");
            return Ok(Some(reason));
        }
        Err(e) => return Err(e),
    };
    let Some(listed) = listed else {
        return Ok(Some(format!("has an unreadable {MANIFEST}, so ‹force› does not replace it")));
    };
    present.sort_unstable();
    for (name, len) in &present {
        let printed = printable(&name.to_string_lossy());
        match name.to_str().filter(|n| *n != MANIFEST).map(|n| listed.get(n)) {
            _ if name == MANIFEST && len.is_some() => {}
            Some(Some(written)) if Some(*written) == *len => {}
            Some(Some(_)) if len.is_some() => {
                return Ok(Some(format!(
                    "contains `{printed}`, which was modified after quant wrote it, so ‹force› does not \
                    replace it"
                )));
            }
            _ => {
                return Ok(Some(format!(
                    "contains `{printed}`, which quant did not write, so ‹force› does not replace it"
                )));
            }
        }
    }
    Ok(None)
}

/// Gives the prepared directory or file its final name; returns whether it replaced an old one.
///
/// # Errors
/// Those of [`check_target`], and if a file operation fails. The target is then unchanged, unless syncing or restoring
/// failed.
pub(crate) fn move_into_place(fs: &dyn FileSystem, job: &Job, place: &ReplacePolicy) -> Result<bool> {
    let target = job.target();
    let out = match (&place.file_of, target.file_name()) {
        (Some(_), Some(name)) => job.out().join(name),
        _ => job.out(),
    };
    let replaced = check_target(target, place)?;
    if replaced {
        replace(fs, job, &out)?;
    } else {
        fs.rename_new(&out, target).map_err(|e| match e.kind() {
            ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty => {
                Error::OutputExists { path: target.to_owned() }
            }
            _ => failure(fs, "rename", target, 0, e),
        })?;
    }
    for directory in [parent_of(target), job.path()] {
        fs.sync_dir(directory).map_err(|e| failure(fs, "sync", directory, 0, e))?;
    }
    Ok(replaced)
}

fn replace(fs: &dyn FileSystem, job: &Job, out: &Path) -> Result<()> {
    let (target, previous) = (job.target(), job.previous());
    match fs.exchange(out, target) {
        Ok(()) => return Ok(()),
        Err(e) if is_unsupported(&e) => {}
        Err(e) => return Err(failure(fs, "replace", target, 0, e)),
    }
    fs.rename_new(target, &previous).map_err(|e| failure(fs, "set aside", target, 0, e))?;
    let Err(error) = fs.rename_new(out, target) else { return Ok(()) };
    match fs.rename_new(&previous, target) {
        Ok(()) => Err(failure(fs, "rename", target, 0, error)),
        Err(second) => {
            let reason = format!("{second} (after {error}); the old contents are in {}", previous.display());
            Err(Error::io("restore", target, io::Error::new(second.kind(), reason)))
        }
    }
}
