//! Writing, last stage of the path: the step from prepared to published.
//!
//! Before it the target is absent or the old one, after it the new one; there is no moment between,
//! except on file systems that cannot exchange two directories, where the old target stands aside
//! for the moment between two renames and is put back by the next run if that moment was the last.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::file_system::{FileSystem, failure, is_unsupported};
use super::job::{Job, parent_of};
use super::manifest::{MANIFEST, PublishedFile};
use crate::{Error, Result};

/// What was published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// The directory, absolute and without links.
    pub path: PathBuf,
    /// Its files sorted by name, with the manifest last.
    pub files: Vec<PublishedFile>,
    /// Bytes of all files together.
    pub bytes: u64,
    /// Whether something was there before.
    pub replaced: bool,
    /// Staging files that could not be removed, if any; the result is not affected.
    pub leftover: Option<PathBuf>,
}

/// Whether the target is there, once it is known that it may be written.
///
/// # Errors
/// [`Error::OutputExists`] without `force`; [`Error::Usage`] when it is nothing that this program
/// could have written, so that a mistyped path does not cost a home directory.
pub(crate) fn check_target(target: &Path, force: bool) -> Result<bool> {
    let metadata = match fs::symlink_metadata(target) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(Error::io("open", target, e)),
    };
    if !force {
        return Err(Error::OutputExists { path: target.to_owned() });
    }
    let reason = if !metadata.is_dir() {
        "is not a directory"
    } else if !is_replaceable(target).map_err(|e| Error::io("list", target, e))? {
        "holds files but no model, so --force does not replace it"
    } else {
        return Ok(true);
    };
    Err(Error::usage(
        format!("{} {reason}", target.display()),
        "choose another output, or remove it yourself",
    ))
}

fn is_replaceable(directory: &Path) -> io::Result<bool> {
    let mut empty = true;
    for entry in fs::read_dir(directory)? {
        let name = entry?.file_name();
        let is_model = name == OsStr::new(MANIFEST)
            || name == OsStr::new("config.json")
            || Path::new(&name).extension() == Some(OsStr::new("safetensors"));
        if is_model {
            return Ok(true);
        }
        empty = false;
    }
    Ok(empty)
}

/// Gives the prepared directory its final name; whether it replaced an old one.
///
/// # Errors
/// The target is then what it was before, unless the error is about syncing or restoring.
pub(crate) fn move_into_place(fs: &dyn FileSystem, job: &Job, force: bool) -> Result<bool> {
    let (out, target) = (job.out(), job.target());
    let replaced = check_target(target, force)?;
    if replaced {
        replace(fs, job)?;
    } else {
        fs.rename_new(&out, target).map_err(|e| match e.kind() {
            ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty => {
                Error::OutputExists { path: target.to_owned() }
            }
            _ => failure(fs, "rename", target, 0, e),
        })?;
    }
    // Both directories changed.
    for directory in [parent_of(target), job.path()] {
        fs.sync_dir(directory).map_err(|e| failure(fs, "sync", directory, 0, e))?;
    }
    Ok(replaced)
}

fn replace(fs: &dyn FileSystem, job: &Job) -> Result<()> {
    let (out, target, previous) = (job.out(), job.target(), job.previous());
    match fs.exchange(&out, target) {
        Ok(()) => return Ok(()),
        Err(e) if is_unsupported(&e) => {}
        Err(e) => return Err(failure(fs, "replace", target, 0, e)),
    }
    fs.rename_new(target, &previous).map_err(|e| failure(fs, "set aside", target, 0, e))?;
    let Err(error) = fs.rename_new(&out, target) else { return Ok(()) };
    match fs.rename_new(&previous, target) {
        Ok(()) => Err(failure(fs, "rename", target, 0, error)),
        Err(second) => {
            let told = format!("{second}, after {error}; the old content is kept in {}", previous.display());
            Err(Error::io("restore", target, io::Error::new(second.kind(), told)))
        }
    }
}
