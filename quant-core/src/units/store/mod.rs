//! The files of a job, which all workers share: in a directory, or in an object store.
//!
//! ```text
//! STORE/job.json    the record, written last by `init`
//!      /inputs/     recipe, channel maxima and tokens, named by their contents
//!      /units/      results, named by unit and by a hash of what they depend on
//!      /log/        who computed which unit, and how long it took
//! ```
//!
//! A name never refers to an incomplete file, and the first of several workers that publish a file wins. The modules
//! `directory` and `objects` say how. A key, such as `units/outside.0123.safetensors`, names a file in both.

#[cfg(not(feature = "store"))]
mod absent;
mod directory;
#[cfg(feature = "store")]
mod objects;

use std::fmt::Debug;
use std::io::ErrorKind;
use std::ops::Deref;
use std::path::{Path, PathBuf};

#[cfg(not(feature = "store"))]
use self::absent as objects;
use self::directory::Directory;
use super::temporary::{Temporary, remove_abandoned};
use crate::checkpoint::{file_sha256, printable};
use crate::digest::sha256_hex;
use crate::run::Host;
use crate::{CancelToken, Error, Result, system};

pub(super) const RECORD: &str = "job.json";
pub(super) const UNITS: &str = "units";
pub(super) const LOG: &str = "log";
const INPUTS: &str = "inputs";
/// The folders of a job.
const FOLDERS: [&str; 3] = [INPUTS, UNITS, LOG];
const INPUT_DIGITS: usize = 32;
/// The maximum size of an input.
pub(super) const MAX_INPUT_BYTES: u64 = 1 << 30;

/// How the files of a job, or other shared files, are kept.
pub(super) trait Files: Debug + Send + Sync {
    /// Returns the directory, if the files are in one.
    fn directory(&self) -> Option<&Path> {
        None
    }

    /// Fails if there is anything that is not part of a job.
    ///
    /// # Errors
    /// [`Error::Usage`].
    fn check_unused(&self) -> Result<()>;

    /// Prepares the place for files in these folders and outside of folders. Several processes may do this at the same
    /// time.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if a file that is published could replace another.
    fn prepare(&self, folders: &[&str]) -> Result<()>;

    /// Returns the local directory for temporary files, and the prefix of their names there.
    fn scratch(&self) -> (&Path, &'static str);

    /// Returns whether a file exists.
    ///
    /// # Errors
    /// [`Error::InputFile`] if something else has its name.
    fn exists(&self, key: &str) -> Result<bool>;

    /// Returns the contents of a small file; `None` if it does not exist.
    ///
    /// # Errors
    /// [`Error::InputFile`] if it is larger than `max_bytes`, or something else has its name.
    fn bytes(&self, key: &str, max_bytes: u64) -> Result<Option<Vec<u8>>>;

    /// Returns a local copy of a small file, which may be the file itself; `None` if it does not exist. The copy stays
    /// until `self` is dropped.
    ///
    /// # Errors
    /// [`Error::InputFile`] if it is larger than `max_bytes`.
    fn small(&self, key: &str, max_bytes: u64) -> Result<Option<PathBuf>>;

    /// Returns a local copy of a result, which may be the file itself; `None` if it does not exist.
    ///
    /// # Errors
    /// [`Error::InputFile`] if it is damaged or larger than `max_bytes`.
    fn result(&self, key: &str, max_bytes: u64, cancel: &CancelToken) -> Result<Option<LocalFile>>;

    /// As [`result`](Self::result), but only the header and the description of the copy are valid.
    fn outline(&self, key: &str) -> Result<Option<LocalFile>>;

    /// Writes a small file. If its name exists already, the contents are compared.
    fn publish_bytes(&self, key: &str, bytes: &[u8]) -> Result<Publication>;

    /// Gives a result, which is in a [temporary directory](Store::temporary_directory), its name. If the name exists
    /// already, the contents are compared.
    fn publish(&self, file: &Path, key: &str, cancel: &CancelToken) -> Result<Publication>;

    /// Renames a damaged file, so that it is written again. Returns the new name; `None` if another worker has renamed
    /// it already.
    ///
    /// # Errors
    /// [`Error::InputFile`] if all names for damaged versions of the file are in use.
    fn set_aside(&self, key: &str) -> Result<Option<String>>;

    /// Returns the names in a folder; outside of folders if `folder` is empty.
    fn list(&self, folder: &str) -> Result<Vec<String>>;

    /// Returns the number of temporary files of running or killed workers that are visible here.
    fn temporary_files(&self) -> Result<usize> {
        Ok(0)
    }
}

/// The files of a job.
#[derive(Debug)]
pub(super) struct Store {
    location: PathBuf,
    pub(super) files: Box<dyn Files>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Publication {
    Created,
    /// A file with the same contents has the name already.
    Same,
    /// A file with different contents has the name.
    Different,
}

/// A file of a job as a local file.
#[derive(Debug)]
pub(super) struct LocalFile {
    path: PathBuf,
    /// Removes a copy when it is dropped.
    _copy: Option<tempfile::TempPath>,
}

impl Deref for LocalFile {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.path
    }
}

impl Store {
    /// Opens the files of a job in a directory, or at the URL of an object store.
    ///
    /// # Errors
    /// [`Error::Usage`] if there is no job; [`Error::Unavailable`] if the object store is.
    pub(super) fn open(location: &Path, host: &Host<'_>) -> Result<Self> {
        let files = files(location, host)?;
        let exists = match files.directory() {
            // Something else of this name is reported when the record is read.
            Some(directory) => {
                let path = directory.join(RECORD);
                match std::fs::symlink_metadata(&path) {
                    Ok(_) => true,
                    Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => false,
                    Err(e) => return Err(Error::io("open", path, e)),
                }
            }
            None => files.exists(RECORD)?,
        };
        match exists {
            true => Ok(Self { location: location.to_owned(), files }),
            false => Err(Error::usage(
                format!("{} is not a job: it has no {RECORD}", location.display()),
                "create a job with ‹job_init()›",
            )),
        }
    }

    /// Prepares a directory or a place in an object store for a job.
    ///
    /// # Errors
    /// [`Error::Usage`] if it holds anything else; [`Error::Io`]; [`Error::Unavailable`].
    pub(super) fn create(location: &Path, host: &Host<'_>) -> Result<Self> {
        let files = files(location, host)?;
        files.check_unused()?;
        files.prepare(&FOLDERS)?;
        Ok(Self { location: location.to_owned(), files })
    }

    /// Returns the directory or URL.
    pub(super) fn location(&self) -> &Path {
        &self.location
    }

    /// Returns the path or URL of a file, for messages.
    pub(super) fn shown(&self, key: &str) -> PathBuf {
        self.location.join(key)
    }

    /// Returns a local copy of the record.
    pub(super) fn record(&self, max_bytes: u64) -> Result<PathBuf> {
        let found = self.files.small(RECORD, max_bytes)?;
        found.ok_or_else(|| damaged(&self.shown(RECORD), "is missing".into()))
    }

    /// Writes an input under a name that has the hash of its contents, and returns the name. A damaged file of this
    /// name is renamed.
    pub(super) fn publish_input(&self, bytes: &[u8], kind: &str, extension: &str) -> Result<String> {
        let name = format!("{kind}-{}.{extension}", &sha256_hex(bytes)[..INPUT_DIGITS]);
        let key = self.input(&name)?;
        for _ in 0..2 {
            match self.files.publish_bytes(&key, bytes)? {
                Publication::Different => drop(self.files.set_aside(&key)?),
                Publication::Created | Publication::Same => return Ok(name),
            }
        }
        Err(damaged(&self.shown(&key), "does not have the contents of its name".into()))
    }

    /// Returns a local copy of an input, whose contents have the hash in its name.
    pub(super) fn intact_input(&self, name: &str, cancel: &CancelToken) -> Result<PathBuf> {
        let key = self.input(name)?;
        let lost = |reason: &str| Error::InputFile {
            path: self.shown(&key),
            line: None,
            reason: reason.into(),
            remedy: "run ‹job_init()› again with the same arguments, which writes the file again".into(),
        };
        let path = self.files.small(&key, MAX_INPUT_BYTES)?.ok_or_else(|| lost("is missing"))?;
        let hash = file_sha256(&path, cancel)?;
        let stem = name.split('.').next().unwrap_or_default();
        match stem.rsplit('-').next() == Some(&hash[..INPUT_DIGITS]) {
            true => Ok(path),
            false => Err(lost("is damaged: its contents do not have the hash in its name")),
        }
    }

    /// Returns the key of an input. Fails if the name leads out of the store.
    fn input(&self, name: &str) -> Result<String> {
        match is_plain(name) {
            true => Ok(format!("{INPUTS}/{name}")),
            false => Err(damaged(&self.shown(RECORD), format!("names the input `{}`", printable(name)))),
        }
    }

    /// Creates a directory for temporary files, which is removed when it is dropped. Results are published from it.
    pub(super) fn temporary_directory(&self, name: &str) -> Result<Temporary> {
        let (parent, prefix) = self.files.scratch();
        temporary_directory(parent, &format!("{prefix}{name}"))
    }

    /// Removes the temporary files of killed workers, and returns how many workers these were.
    pub(super) fn remove_abandoned(&self) -> usize {
        let (parent, prefix) = self.files.scratch();
        remove_abandoned(parent, prefix)
    }
}

/// The files at a location, which need not exist.
pub(super) fn files(location: &Path, host: &Host<'_>) -> Result<Box<dyn Files>> {
    match is_url(location) {
        true => objects::open(location, host),
        false => Ok(Box::new(Directory::new(location))),
    }
}

/// Returns whether a name consists of letters, digits, `-`, `.` and `_`, and does not begin with a dot.
pub(super) fn is_plain(name: &str) -> bool {
    let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
    plain && !name.starts_with('.') && !name.is_empty()
}

/// Returns whether a location is the URL of an object store instead of a directory.
pub fn is_url(location: &Path) -> bool {
    let scheme = location.to_str().and_then(|text| text.split_once("://"));
    scheme.is_some_and(|(scheme, _)| {
        !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
    })
}

/// Fails if a location is the URL of an object store that is invalid, or that this program cannot open. No request is
/// made.
///
/// # Errors
/// [`Error::Usage`].
pub fn check_location(location: &Path) -> Result<()> {
    if is_url(location) { objects::check_url(location) } else { Ok(()) }
}

fn temporary_directory(parent: &Path, prefix: &str) -> Result<Temporary> {
    let create = || Temporary::create(parent, prefix);
    let created = match create() {
        // Whoever cleans up or copies a store may remove empty directories.
        Err(e) if e.kind() == ErrorKind::NotFound => {
            std::fs::create_dir_all(parent).map_err(|e| Error::io("create", parent, e))?;
            create()
        }
        other => other,
    };
    created.map_err(|e| written(parent, 0, e))
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
