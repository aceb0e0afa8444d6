//! Files of a model directory, which are untrusted.
//!
//! A name in an index or a link must not cause any other file of the machine to be read, and a pipe or device must not
//! block the run. Files are not mapped: access to a mapping of a file that has shrunk kills the process.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

use super::names::printable;
use crate::{Error, Result, system};

/// A model directory, resolved once; names are looked up inside it.
#[derive(Debug, Clone)]
pub(crate) struct Root {
    /// The path as the user gave it, for messages.
    given: PathBuf,
    real: PathBuf,
    /// `blobs` of a Hugging Face cache entry, if this directory is its `snapshots/<revision>`. Links may also point
    /// into it.
    blobs: Option<PathBuf>,
}

/// The result of looking up a name in a [`Root`].
#[derive(Debug)]
pub(crate) enum Lookup {
    /// A regular file, at this path with links resolved.
    File(PathBuf),
    /// The name does not exist.
    Absent,
    /// A dangling link, or one to an incomplete download in a cache.
    Dangling,
    /// Something that must not be read; the reason is the rest of a sentence that begins with the name.
    Refused(String),
}

impl Root {
    /// Opens a model directory.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] when the path is not a directory, [`Error::Io`] when it cannot be read.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let reason = match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => None,
            Ok(_) => Some("it is not a directory"),
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                Some("it does not exist")
            }
            Err(e) => return Err(Error::io("open", path, e)),
        };
        if let Some(reason) = reason {
            return Err(Error::NoCheckpoint {
                path: path.to_owned(),
                reason: reason.to_owned(),
                remedy: None,
            });
        }
        let real = path.canonicalize().map_err(|e| Error::io("open", path, e))?;
        let blobs = cache_blobs(&real);
        Ok(Self { given: path.to_owned(), real, blobs })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.given
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.given.join(name)
    }

    /// Resolves a plain relative name without opening it.
    ///
    /// # Errors
    /// [`Error::Io`] when the system reports an error.
    pub(crate) fn lookup(&self, name: &str) -> Result<Lookup> {
        let path = self.real.join(name);
        let real = match path.canonicalize() {
            Ok(real) => real,
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                let is_link = fs::symlink_metadata(&path).is_ok_and(|m| m.is_symlink());
                return Ok(if is_link { Lookup::Dangling } else { Lookup::Absent });
            }
            Err(e) if system::is_link_loop(&e) => {
                return Ok(Lookup::Refused("leads to a loop of links".into()));
            }
            Err(e) if e.kind() == ErrorKind::InvalidFilename => {
                return Ok(Lookup::Refused("is too long for a file name".into()));
            }
            Err(e) => return Err(Error::io("open", self.join(name), e)),
        };
        let in_cache = self.blobs.is_some() && real.parent() == self.blobs.as_deref();
        if !in_cache && !real.starts_with(&self.real) {
            return Ok(Lookup::Refused(
                "leads through a symbolic link to a file outside the model directory".into(),
            ));
        }
        if in_cache && real.extension() == Some(OsStr::new("incomplete")) {
            return Ok(Lookup::Dangling);
        }
        let metadata = fs::metadata(&real).map_err(|e| Error::io("open", self.join(name), e))?;
        if !metadata.is_file() {
            return Ok(Lookup::Refused("is not a regular file".into()));
        }
        Ok(Lookup::File(real))
    }

    /// Names of the directory's own entries, sorted; those that are not UTF-8 are left out.
    pub(crate) fn entries(&self) -> Result<Vec<String>> {
        let list = || -> io::Result<Vec<String>> {
            let mut names = Vec::new();
            for entry in fs::read_dir(&self.real)? {
                names.extend(entry?.file_name().into_string().ok());
            }
            Ok(names)
        };
        let mut names = list().map_err(|e| Error::io("list", &self.given, e))?;
        names.sort_unstable();
        Ok(names)
    }
}

fn cache_blobs(snapshot: &Path) -> Option<PathBuf> {
    let snapshots = snapshot.parent()?;
    if snapshots.file_name() != Some(OsStr::new("snapshots")) {
        return None;
    }
    let blobs = snapshots.parent()?.join("blobs");
    fs::symlink_metadata(&blobs).is_ok_and(|m| m.is_dir()).then_some(blobs)
}

/// Returns why a name from a file may not be used as a path below a directory, as the end of a sentence. Also rejects
/// names that are paths only on other systems.
pub(crate) fn relative_name_fault(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        return Some("is empty");
    }
    if name.chars().any(char::is_control) {
        return Some("contains control characters");
    }
    if name.contains('\\') {
        return Some("contains a backslash");
    }
    if name.contains(':') {
        return Some("contains a colon");
    }
    let path = Path::new(name);
    if path.is_absolute() {
        return Some("is an absolute path");
    }
    if path.components().any(|c| matches!(c, Component::ParentDir)) {
        return Some("points outside the model directory");
    }
    // Two spellings of one file would count as two shards.
    let plain: PathBuf = path.components().filter(|c| matches!(c, Component::Normal(_))).collect();
    (plain.as_os_str() != path.as_os_str()).then_some("is not a plain relative path")
}

/// Opens a regular file for reading without following a link or blocking on a pipe. `shown` is the path for messages.
///
/// # Errors
/// [`Error::Io`], also when it is not a regular file.
pub fn open_regular(real: &Path, shown: &Path) -> Result<File> {
    let file = system::open_options().read(true).open(real).map_err(|e| Error::io("open", shown, e))?;
    let metadata = file.metadata().map_err(|e| Error::io("open", shown, e))?;
    if !metadata.is_file() {
        return Err(Error::io("open", shown, io::Error::other("not a regular file")));
    }
    Ok(file)
}

/// Reads a whole small file, or returns the reason why its size is not accepted. `shown` is the path for messages.
///
/// # Errors
/// [`Error::Io`] when it is not a regular file, or cannot be read.
pub fn read_capped(real: &Path, shown: &Path, cap: u64) -> Result<Result<Vec<u8>, String>> {
    let file = open_regular(real, shown)?;
    let len = file.metadata().map_err(|e| Error::io("read", shown, e))?.len();
    if len > cap {
        return Ok(Err(format!("has {len} bytes; the limit is {cap}")));
    }
    let mut bytes = Vec::new();
    // The file may have grown since its length was checked.
    (&file).take(cap + 1).read_to_end(&mut bytes).map_err(|e| Error::io("read", shown, e))?;
    if bytes.len() as u64 > cap {
        return Ok(Err(format!("exceeds the limit of {cap} bytes")));
    }
    Ok(Ok(bytes))
}

pub(crate) const PLACEHOLDER_BYTES: usize = 64;

/// What an incomplete download may leave in place of a file. It is shown as the end of a sentence that begins with the
/// file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Placeholder {
    /// A pointer to the file in Git's large file storage.
    #[error("is a Git LFS pointer, not the file itself")]
    LfsPointer,
    /// A page of a site.
    #[error("is an HTML page, not the file itself")]
    Page,
}

impl Placeholder {
    /// What the user can do.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::LfsPointer => {
                "fetch the files with `git lfs pull`, or download the model with `hf download`"
            }
            Self::Page => {
                "the download gave a page of the site, for example to sign in: download the file again, for example \
                with `hf download`"
            }
        }
    }
}

/// Recognizes a placeholder by its first bytes.
pub fn placeholder(start: &[u8]) -> Option<Placeholder> {
    let start = start.trim_ascii_start();
    let begins = |word: &[u8]| start.len() >= word.len() && start[..word.len()].eq_ignore_ascii_case(word);
    if begins(b"version https://git-lfs") {
        return Some(Placeholder::LfsPointer);
    }
    (begins(b"<!doctype html") || begins(b"<html")).then_some(Placeholder::Page)
}

/// Fills `buffer` with the bytes at `offset`, continuing after interrupts and short reads.
///
/// # Errors
/// [`Error::Io`] with path and offset, also when the file ends before the buffer is full.
pub fn read_exact_at(file: &File, path: &Path, offset: u64, buffer: &mut [u8]) -> Result<()> {
    let need = buffer.len();
    let mut have = 0;
    while have < need {
        let at = offset.saturating_add(have as u64);
        let error = match system::read_at(file, &mut buffer[have..], at) {
            Ok(0) => {
                let message = format!(
                    "the file is truncated: {need} bytes are needed at offset {offset}, but only {have} are \
                    left"
                );
                io::Error::new(ErrorKind::UnexpectedEof, message)
            }
            Ok(n) => {
                have += n;
                continue;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => io::Error::new(e.kind(), format!("{e}, at offset {at}")),
        };
        return Err(Error::io("read", path, error));
    }
    Ok(())
}

/// A few names for a message, and the number of the remaining ones.
pub(crate) fn listed<'a>(names: impl IntoIterator<Item = &'a str>, max: usize) -> String {
    let mut names = names.into_iter();
    let shown: Vec<String> = names.by_ref().take(max).map(printable).collect();
    match names.count() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}
