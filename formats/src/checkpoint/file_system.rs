//! Writing, last stage of the path: the few file operations that it is made of.
//!
//! They stand behind a trait so that a test can let each of them fail, or let the power go off
//! after it, and look at what is left.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::Path;

pub(crate) use crate::system::is_unsupported;
use crate::{Error, Result, system};

/// Operations that change what is on disk.
pub(crate) trait FileSystem: Send + Sync {
    /// Creates a directory whose parent exists.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Opens the lock file, creating it if need be.
    fn open_lock(&self, path: &Path) -> io::Result<File>;
    /// Creates a file that must not exist, for writing and reading.
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn StagedFile>>;
    /// Opens a regular file for writing and reading.
    fn open_file(&self, path: &Path) -> io::Result<Box<dyn StagedFile>>;
    /// Makes the entries of a directory survive a crash.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Gives a file or directory another name, replacing a file that has it.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Gives a directory a name that nothing has.
    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Exchanges two names in one step.
    fn exchange(&self, one: &Path, other: &Path) -> io::Result<()>;
    /// Removes a file or link.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes an empty directory.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    /// Removes a directory and everything below it, without following links.
    fn remove_tree(&self, path: &Path) -> io::Result<()>;
    /// Bytes that may still be written below a path, if the file system can tell.
    fn free_bytes(&self, path: &Path) -> io::Result<Option<u64>>;
    /// Asks the system to read the file from the disk next, not from its memory of what was
    /// written. Only a hint.
    fn forget_cached(&self, file: &File);
}

/// A file in the staging directory.
pub(crate) trait StagedFile: Send + Sync {
    /// Writes all bytes at an offset.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Gives the file this length and takes the room for it from the disk.
    fn allocate(&self, len: u64) -> io::Result<()>;
    /// Makes the file's bytes survive a crash.
    fn sync_data(&self) -> io::Result<()>;
    /// The file, for reading.
    fn file(&self) -> &File;
}

/// The file system of the machine.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RealFileSystem;

impl FileSystem for RealFileSystem {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn open_lock(&self, path: &Path) -> io::Result<File> {
        no_follow().create(true).truncate(false).open(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn StagedFile>> {
        Ok(Box::new(no_follow().create_new(true).open(path)?))
    }

    fn open_file(&self, path: &Path) -> io::Result<Box<dyn StagedFile>> {
        let file = no_follow().open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        Ok(Box::new(file))
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        system::sync_directory(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        match system::rename_new(from, to) {
            Err(e) if is_unsupported(&e) => match fs::symlink_metadata(to) {
                Ok(_) => Err(ErrorKind::AlreadyExists.into()),
                Err(e) if e.kind() == ErrorKind::NotFound => fs::rename(from, to),
                Err(e) => Err(e),
            },
            other => other,
        }
    }

    fn exchange(&self, one: &Path, other: &Path) -> io::Result<()> {
        system::exchange(one, other)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn remove_tree(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }

    fn free_bytes(&self, path: &Path) -> io::Result<Option<u64>> {
        system::free_bytes(path)
    }

    fn forget_cached(&self, file: &File) {
        system::forget_cached(file);
    }
}

impl StagedFile for File {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        system::write_all_at(self, bytes, offset)
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        system::allocate(self, len)
    }

    fn sync_data(&self) -> io::Result<()> {
        File::sync_data(self)
    }

    fn file(&self) -> &File {
        self
    }
}

/// Read and write, and never through a link that someone put in the file's place. Permissions are
/// those of the umask.
fn no_follow() -> OpenOptions {
    let mut options = system::open_options();
    options.read(true).write(true);
    options
}

/// An error of the system as ours: a full disk or an exhausted quota is reported with numbers.
pub(crate) fn failure(
    fs: &dyn FileSystem,
    action: &'static str,
    path: &Path,
    needed: u64,
    error: io::Error,
) -> Error {
    let over_quota = system::is_over_quota(&error);
    if over_quota || system::is_disk_full(&error) {
        let place = path.parent().unwrap_or(path);
        // What the disk has is not for someone whose quota is used up.
        let free = if over_quota { None } else { fs.free_bytes(place).ok().flatten() };
        return Error::DiskFull { path: path.to_owned(), needed: needed.max(1), free: free.unwrap_or(0) };
    }
    Error::io(action, path, error)
}

/// Writes a small file that must not exist, and makes its bytes survive a crash.
pub(crate) fn write_new(fs: &dyn FileSystem, path: &Path, bytes: &[u8]) -> Result<Box<dyn StagedFile>> {
    let fail = |action, e| failure(fs, action, path, bytes.len() as u64, e);
    let file = fs.create_file(path).map_err(|e| fail("create", e))?;
    file.write_at(0, bytes).map_err(|e| fail("write", e))?;
    file.sync_data().map_err(|e| fail("sync", e))?;
    Ok(file)
}

/// Writes a small file under a passing name and gives it its own in one step, so that it is there
/// whole or not at all.
pub(crate) fn replace_file(fs: &dyn FileSystem, path: &Path, bytes: &[u8]) -> Result<Box<dyn StagedFile>> {
    let mut passing = path.as_os_str().to_owned();
    passing.push(OsStr::new(".new"));
    let passing = Path::new(&passing);
    remove_if_present(fs, passing)?;
    let file = write_new(fs, passing, bytes)?;
    fs.rename(passing, path).map_err(|e| failure(fs, "rename", path, bytes.len() as u64, e))?;
    if let Some(parent) = path.parent() {
        fs.sync_dir(parent).map_err(|e| failure(fs, "sync", parent, 0, e))?;
    }
    Ok(file)
}

/// Removes whatever has this name, if anything does.
pub(crate) fn remove_if_present(fs: &dyn FileSystem, path: &Path) -> Result<()> {
    let metadata = match path.symlink_metadata() {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Error::io("remove", path, e)),
    };
    let removed = if metadata.is_dir() { fs.remove_tree(path) } else { fs.remove_file(path) };
    removed.map_err(|e| Error::io("remove", path, e))
}
