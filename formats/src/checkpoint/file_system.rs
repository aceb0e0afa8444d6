//! The file operations that writing uses, as a trait. Tests make each of them fail, or simulate a power loss after it.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::Path;

pub(crate) use crate::system::is_unsupported;
use crate::{Error, Result, system};

/// Operations that modify the disk.
pub(crate) trait FileSystem: Send + Sync {
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Opens the lock file, creating it if necessary.
    fn open_lock(&self, path: &Path) -> io::Result<File>;
    /// Creates a new file for writing and reading; fails if it exists.
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn StagedFile>>;
    /// Opens a regular file for writing and reading.
    fn open_file(&self, path: &Path) -> io::Result<Box<dyn StagedFile>>;
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Renames a file or directory, replacing an existing file.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Renames a file or directory; fails if the new name exists.
    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn exchange(&self, one: &Path, other: &Path) -> io::Result<()>;
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    /// Removes a directory and everything below it, without following links.
    fn remove_tree(&self, path: &Path) -> io::Result<()>;
    fn free_bytes(&self, path: &Path) -> io::Result<Option<u64>>;
    fn forget_cached(&self, file: &File);
}

/// A file in the staging directory.
pub(crate) trait StagedFile: Send + Sync {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    fn allocate(&self, len: u64) -> io::Result<()>;
    /// Makes the file's bytes durable.
    fn sync_data(&self) -> io::Result<()>;
    /// The file, for reading.
    fn file(&self) -> &File;
}

/// The operating system's file system.
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

/// Does not follow a link that someone put in the file's place.
fn no_follow() -> OpenOptions {
    let mut options = system::open_options();
    options.read(true).write(true);
    options
}

/// Converts a system error; a full disk, an exhausted quota and a limit on file sizes are reported with numbers.
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
        // If a quota is exhausted, the user cannot use the free space of the disk.
        let free = if over_quota { None } else { fs.free_bytes(place).ok().flatten() };
        return Error::DiskFull { path: path.to_owned(), needed: needed.max(1), free: free.unwrap_or(0) };
    }
    match error.kind() {
        ErrorKind::FileTooLarge => Error::file_too_large(path.to_owned(), needed),
        _ => Error::io(action, path, error),
    }
}

/// Writes a small new file and makes its bytes durable; fails if it exists.
pub(crate) fn write_new(fs: &dyn FileSystem, path: &Path, bytes: &[u8]) -> Result<Box<dyn StagedFile>> {
    let fail = |action, e| failure(fs, action, path, bytes.len() as u64, e);
    let file = fs.create_file(path).map_err(|e| fail("create", e))?;
    file.write_at(0, bytes).map_err(|e| fail("write", e))?;
    file.sync_data().map_err(|e| fail("sync", e))?;
    Ok(file)
}

/// Writes a small file under a temporary name and renames it, so that it is either complete or absent.
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

pub(crate) fn remove_if_present(fs: &dyn FileSystem, path: &Path) -> Result<()> {
    let metadata = match path.symlink_metadata() {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Error::io("remove", path, e)),
    };
    let removed = if metadata.is_dir() { fs.remove_tree(path) } else { fs.remove_file(path) };
    removed.map_err(|e| Error::io("remove", path, e))
}
