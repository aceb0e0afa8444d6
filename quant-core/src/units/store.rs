//! The directory of a job, which all workers share.
//!
//! ```text
//! STORE/job.json    the record, written last by `init`
//!      /inputs/     recipe, channel maxima and tokens, named by their contents
//!      /units/      results, named by unit and by a hash of what they depend on
//!      /log/        who computed which unit, and how long it took
//!      /tmp/        files that are being written; those of killed workers are removed later
//! ```
//!
//! A file is written under a temporary name, synced, and then linked to its name, which fails if the name exists. So a
//! name never refers to an incomplete file, and the first of several workers wins. The file system must support hard
//! links.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::temporary::Temporary;
use crate::checkpoint::{file_sha256, open_regular, printable};
use crate::{CancelToken, Error, Result, system};

pub(super) const RECORD: &str = "job.json";
const INPUTS: &str = "inputs";
const UNITS: &str = "units";
const LOG: &str = "log";
const TEMPORARY: &str = "tmp";
pub(super) const INPUT_DIGITS: usize = 32;
const PIECE: usize = 1 << 20;

#[derive(Debug, Clone)]
pub(super) struct Store {
    path: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Publication {
    Created,
    /// A file with the same contents has the name already.
    Same,
    /// A file with different contents has the name.
    Different,
}

impl Store {
    pub(super) fn open(path: &Path) -> Result<Self> {
        if std::fs::symlink_metadata(path.join(RECORD)).is_err() {
            return Err(Error::usage(
                format!("{} is not a job: it has no {RECORD}", path.display()),
                "create a job with ‹job_init()›",
            ));
        }
        Ok(Self { path: path.to_owned() })
    }

    /// Creates the directories of a job.
    ///
    /// # Errors
    /// [`Error::Usage`] if the directory holds anything else; [`Error::Io`].
    pub(super) fn create(path: &Path) -> Result<Self> {
        let known = [RECORD, INPUTS, UNITS, LOG, TEMPORARY];
        match std::fs::read_dir(path) {
            Ok(entries) => {
                for entry in entries {
                    let name = entry.map_err(|e| Error::io("list", path, e))?.file_name();
                    if !known.iter().any(|known| name == *known) {
                        return Err(Error::usage(
                            format!(
                                "{} contains `{}`, which is not part of a job",
                                path.display(),
                                printable(&name.to_string_lossy())
                            ),
                            "choose a new directory",
                        ));
                    }
                }
            }
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(Error::io("list", path, e)),
        }
        create_all(path)?;
        for directory in [INPUTS, UNITS, LOG, TEMPORARY] {
            let directory = path.join(directory);
            std::fs::create_dir_all(&directory).map_err(|e| Error::io("create", &directory, e))?;
        }
        // An earlier call may have been killed before it synced what it created.
        sync(path)?;
        sync_parent(path)?;
        Ok(Self { path: path.to_owned() })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn record(&self) -> PathBuf {
        self.path.join(RECORD)
    }

    pub(super) fn units(&self) -> PathBuf {
        self.path.join(UNITS)
    }

    pub(super) fn log(&self) -> PathBuf {
        self.path.join(LOG)
    }

    pub(super) fn temporary(&self) -> PathBuf {
        self.path.join(TEMPORARY)
    }

    /// Returns the path of an input. Fails if the name leads out of the directory.
    pub(super) fn input(&self, name: &str) -> Result<PathBuf> {
        let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
        match plain && !name.starts_with('.') && !name.is_empty() {
            true => Ok(self.path.join(INPUTS).join(name)),
            false => Err(damaged(&self.record(), format!("names the input `{}`", printable(name)))),
        }
    }

    /// Returns the path of an input, and checks that its contents have the hash in its name.
    pub(super) fn intact_input(&self, name: &str, cancel: &CancelToken) -> Result<PathBuf> {
        let path = self.input(name)?;
        let lost = |reason: &str| Error::InputFile {
            path: path.clone(),
            line: None,
            reason: reason.into(),
            remedy: "run ‹job_init()› again with the same arguments, which writes the file again".into(),
        };
        if !is_regular(&path)? {
            return Err(lost("is missing"));
        }
        let hash = file_sha256(&path, cancel)?;
        let stem = name.split('.').next().unwrap_or_default();
        match stem.rsplit('-').next() == Some(&hash[..INPUT_DIGITS]) {
            true => Ok(path),
            false => Err(lost("is damaged: its contents do not have the hash in its name")),
        }
    }

    /// Writes a small file. If its name exists already, the contents are compared.
    pub(super) fn publish_bytes(&self, target: &Path, bytes: &[u8]) -> Result<Publication> {
        let directory = self.temporary_directory("new")?;
        let path = directory.path().join("file");
        std::fs::write(&path, bytes).map_err(|e| written(&path, bytes.len() as u64, e))?;
        let file = File::open(&path).map_err(|e| Error::io("open", &path, e))?;
        file.sync_all().map_err(|e| written(&path, bytes.len() as u64, e))?;
        self.publish(&path, target)
    }

    /// Creates a directory for temporary files, which is removed when it is dropped.
    pub(super) fn temporary_directory(&self, prefix: &str) -> Result<Temporary> {
        let parent = self.temporary();
        let create = || Temporary::create(&parent, prefix);
        let created = match create() {
            // Whoever cleans up or copies a store may remove empty directories.
            Err(e) if e.kind() == ErrorKind::NotFound => {
                std::fs::create_dir_all(&parent).map_err(|e| Error::io("create", &parent, e))?;
                create()
            }
            other => other,
        };
        created.map_err(|e| written(&parent, 0, e))
    }

    /// Gives a synced file its name, if no file has the name.
    pub(super) fn publish(&self, file: &Path, target: &Path) -> Result<Publication> {
        match std::fs::hard_link(file, target) {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                is_regular(target)?;
                return match have_same_bytes(file, target)? {
                    true => Ok(Publication::Same),
                    false => Ok(Publication::Different),
                };
            }
            Err(e) => return Err(written(target, 0, e)),
        }
        sync_parent(target)?;
        Ok(Publication::Created)
    }

    /// Renames a damaged file, so that its unit is computed again. Returns the new name; `None` if another worker has
    /// renamed it already.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::InputFile`] if 1000 names for damaged versions of the file are in use.
    pub(super) fn set_aside(&self, path: &Path) -> Result<Option<PathBuf>> {
        for number in 0..1000 {
            let mut name = path.as_os_str().to_owned();
            name.push(format!(".bad-{number}"));
            let aside = PathBuf::from(name);
            match system::rename_new(path, &aside) {
                Ok(()) => {
                    sync_parent(path)?;
                    return Ok(Some(aside));
                }
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
                Err(e) if system::is_unsupported(&e) => {
                    std::fs::rename(path, &aside).map_err(|e| Error::io("rename", path, e))?;
                    sync_parent(path)?;
                    return Ok(Some(aside));
                }
                Err(e) => return Err(Error::io("rename", path, e)),
            }
        }
        Err(damaged(path, "is damaged, and so are 1000 earlier versions".into()))
    }
}

/// Creates a directory and those above it, and syncs those that have a new entry.
fn create_all(directory: &Path) -> Result<()> {
    let is_absent = |path: &&Path| std::fs::symlink_metadata(path).is_err();
    let new: Vec<&Path> = directory.ancestors().take_while(is_absent).collect();
    std::fs::create_dir_all(directory).map_err(|e| Error::io("create", directory, e))?;
    new.into_iter().try_for_each(sync_parent)
}

/// Makes the name of a file or directory durable.
fn sync_parent(path: &Path) -> Result<()> {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => sync(Path::new(".")),
        Some(parent) => sync(parent),
        None => Ok(()),
    }
}

fn sync(directory: &Path) -> Result<()> {
    system::sync_directory(directory).map_err(|e| Error::io("sync", directory, e))
}

pub(super) fn written(path: &Path, needed: u64, error: std::io::Error) -> Error {
    match system::is_disk_full(&error) {
        true => Error::DiskFull {
            path: path.to_owned(),
            needed: needed.max(1),
            free: path.parent().and_then(|p| system::free_bytes(p).ok().flatten()).unwrap_or(0),
        },
        false => Error::io("write", path, error),
    }
}

/// The error for a file that no worker can have written.
pub(super) fn damaged(path: &Path, reason: String) -> Error {
    Error::InputFile {
        path: path.to_owned(),
        line: None,
        reason,
        remedy:
            "remove the file if it does not belong to the job, or create the job again in a new directory"
                .into(),
    }
}

/// Returns whether a file exists.
///
/// # Errors
/// [`Error::InputFile`] if the path is a link, a pipe or anything else but a regular file; [`Error::Io`].
pub(super) fn is_regular(path: &Path) -> Result<bool> {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_file() => Ok(true),
        Ok(_) => Err(damaged(path, "is not a regular file".into())),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
        Err(e) => Err(Error::io("read", path, e)),
    }
}

fn have_same_bytes(one: &Path, other: &Path) -> Result<bool> {
    let open = |path: &Path| open_regular(path, path);
    let (mut one_file, mut other_file) = (open(one)?, open(other)?);
    let len =
        |file: &File, path: &Path| file.metadata().map(|m| m.len()).map_err(|e| Error::io("read", path, e));
    if len(&one_file, one)? != len(&other_file, other)? {
        return Ok(false);
    }
    let mut pieces = [vec![0; PIECE], vec![0; PIECE]];
    loop {
        let [a, b] = &mut pieces;
        let read = fill(&mut one_file, a).map_err(|e| Error::io("read", one, e))?;
        if fill(&mut other_file, &mut b[..read]).map_err(|e| Error::io("read", other, e))? != read
            || a[..read] != b[..read]
        {
            return Ok(false);
        }
        if read < PIECE {
            return Ok(true);
        }
    }
}

fn fill(file: &mut File, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut at = 0;
    while at < buffer.len() {
        match file.read(&mut buffer[at..]) {
            Ok(0) => break,
            Ok(read) => at += read,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(at)
}
