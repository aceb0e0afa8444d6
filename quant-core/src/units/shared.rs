//! Small files that several processes share, other than those of a job.

use std::path::{Path, PathBuf};

use super::store::{self, Files, MAX_INPUT_BYTES, Publication};
use crate::checkpoint::printable;
use crate::run::Host;
use crate::{Error, Result};

/// Small files in a directory that all processes see, or at the URL of an object store, which needs the feature
/// `store`.
///
/// A name never refers to an incomplete file, and the first of several processes that publish a file wins. Files are
/// published in the same way as the results of a [job](super).
///
/// ```
/// use quant_core::run::{Host, Nothing};
/// use quant_core::units::SharedFiles;
/// use quant_core::{CancelToken, Silent};
///
/// # let temporary = tempfile::tempdir().unwrap();
/// let cancel = CancelToken::new();
/// let host = Host::new(&Silent, &cancel, &Nothing);
/// let files = SharedFiles::create(&temporary.path().join("shared"), &host)?;
/// assert!(files.publish("a", b"1")?);
/// assert!(files.publish("a", b"1")?, "it has these contents already");
/// assert!(!files.publish("a", b"2")?);
/// assert_eq!(files.read("a")?, Some(b"1".to_vec()));
/// # Ok::<(), quant_core::Error>(())
/// ```
#[derive(Debug)]
pub struct SharedFiles {
    location: PathBuf,
    files: Box<dyn Files>,
}

impl SharedFiles {
    /// Opens a directory or a place in an object store to read files. It need not exist.
    ///
    /// # Errors
    /// [`Error::Usage`] for an invalid URL; [`Error::Unavailable`] if the object store cannot be opened.
    pub fn open(location: &Path, host: &Host<'_>) -> Result<Self> {
        Ok(Self { location: location.to_owned(), files: store::files(location, host)? })
    }

    /// Creates the directory if it does not exist, or checks that the object store never replaces a file by another.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`Error::Io`]; [`Error::Unavailable`] if the object store replaces files.
    pub fn create(location: &Path, host: &Host<'_>) -> Result<Self> {
        let shared = Self::open(location, host)?;
        shared.files.prepare(&[])?;
        // Those of killed processes.
        let (parent, prefix) = shared.files.scratch();
        super::temporary::remove_abandoned(parent, prefix);
        Ok(shared)
    }

    /// The path or URL of a file, for messages.
    pub fn shown(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.location.clone() } else { self.location.join(name) }
    }

    /// The names of all files, in any order. Others than those of this program may be among them.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Unavailable`].
    pub fn names(&self) -> Result<Vec<String>> {
        self.files.list("")
    }

    /// Returns the contents of a file; `None` if it does not exist.
    ///
    /// # Errors
    /// [`Error::InputFile`] if it has more than 1 GiB or is not a regular file; [`Error::Io`]; [`Error::Unavailable`].
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.files.bytes(checked(name)?, MAX_INPUT_BYTES)
    }

    /// Writes a file. Returns whether it has these contents now: `false` if it exists with different ones, which stay.
    ///
    /// # Errors
    /// [`Error::InputFile`] if something other than a file has the name; [`Error::Io`]; [`Error::DiskFull`];
    /// [`Error::Unavailable`].
    pub fn publish(&self, name: &str, bytes: &[u8]) -> Result<bool> {
        Ok(self.files.publish_bytes(checked(name)?, bytes)? != Publication::Different)
    }
}

/// Fails if a name could lead out of the directory.
fn checked(name: &str) -> Result<&str> {
    match store::is_plain(name) {
        true => Ok(name),
        false => Err(Error::usage(
            format!("`{}` is not the name of a shared file", printable(name)),
            "use letters, digits and -._",
        )),
    }
}
