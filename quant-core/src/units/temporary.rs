//! Directories for files that a worker is writing, and the removal of those that killed workers left.
//!
//! The name of a directory has the identifier of the running kernel, and a file in it is locked as long as the worker
//! runs. A directory with this kernel's identifier and an unlocked file belongs to a worker that was killed. Locks of
//! other machines may not be visible here, so their directories are removed only when they have not changed for long.
//! Nothing else is removed: a directory without the identifier of a kernel in its name is somebody else's.

use std::fs::{DirEntry, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::system;

const LOCK: &str = "lock";
/// The hexadecimal digits of a kernel's identifier.
const KERNEL_DIGITS: usize = 32;
/// Other workers ignore a directory of this age or less, because its file may not be locked yet.
const SETTLED: Duration = Duration::from_secs(60);
/// After this time without a change, the directory of a different machine is removed.
const ABANDONED: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// A directory that is removed when it is dropped.
#[derive(Debug)]
pub(super) struct Temporary {
    directory: tempfile::TempDir,
    /// Closing it releases the lock.
    _lock: File,
}

impl Temporary {
    pub(super) fn create(parent: &Path, prefix: &str) -> io::Result<Self> {
        let prefix = format!("{prefix}.{}-", system::boot_id().unwrap_or_default());
        let directory = tempfile::Builder::new().prefix(&prefix).tempdir_in(parent)?;
        let lock = OpenOptions::new().write(true).create_new(true).open(directory.path().join(LOCK))?;
        // On a file system without locks, the directory of a killed worker is removed later.
        let _ = lock.try_lock();
        Ok(Self { directory, _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Removes abandoned directories whose names have this prefix, and returns their number. A directory that cannot be
/// examined or removed stays.
pub(super) fn remove_abandoned(parent: &Path, prefix: &str) -> usize {
    let own = system::boot_id().map(|id| format!(".{id}-"));
    let is_abandoned = |entry: &DirEntry| {
        let name = entry.file_name();
        if !is_temporary(&name.to_string_lossy(), prefix) {
            return false;
        }
        let is_own = own.as_ref().is_some_and(|own| name.to_string_lossy().contains(own));
        let least = match (Lock::of(&entry.path().join(LOCK)), is_own) {
            (Lock::Held, _) => return false,
            (Lock::Free, true) => SETTLED,
            (Lock::Free, false) | (Lock::Unknown, _) => ABANDONED,
        };
        entry.file_type().is_ok_and(|kind| kind.is_dir())
            && unchanged_for(&entry.path()).is_some_and(|age| age >= least)
    };
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let abandoned = entries.filter(is_abandoned);
    abandoned.filter(|entry| std::fs::remove_dir_all(entry.path()).is_ok()).count()
}

/// Whether [`Temporary::create`] gives such names to directories whose prefix starts with this one.
fn is_temporary(name: &str, prefix: &str) -> bool {
    let Some((found, rest)) = name.rsplit_once('.') else { return false };
    let Some((kernel, random)) = rest.split_once('-') else { return false };
    found.starts_with(prefix)
        && kernel.len() == KERNEL_DIGITS
        && kernel.chars().all(|c| c.is_ascii_hexdigit())
        && !random.is_empty()
        && random.chars().all(|c| c.is_ascii_alphanumeric())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lock {
    Held,
    /// No process of this machine has locked it.
    Free,
    /// It does not exist, or locks are not supported.
    Unknown,
}

impl Lock {
    fn of(path: &Path) -> Self {
        let Ok(lock) = system::open_options().write(true).open(path) else { return Self::Unknown };
        match lock.try_lock() {
            Ok(()) => Self::Free,
            Err(TryLockError::WouldBlock) => Self::Held,
            Err(TryLockError::Error(_)) => Self::Unknown,
        }
    }
}

/// How long a directory and the files in it have not changed; `None` if that is unknown.
fn unchanged_for(path: &Path) -> Option<Duration> {
    let changed = |path: PathBuf| std::fs::symlink_metadata(path).and_then(|m| m.modified()).ok();
    let files = std::fs::read_dir(path).ok()?.flatten().map(|entry| changed(entry.path()));
    let last = files.chain([changed(path.to_owned())]).collect::<Option<Vec<_>>>()?.into_iter().max()?;
    SystemTime::now().duration_since(last).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn age(path: &Path, by: Duration) {
        let then = SystemTime::now() - by;
        let files = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
        for path in files.chain([path.to_owned()]) {
            File::open(path).unwrap().set_modified(then).unwrap();
        }
    }

    #[test]
    fn only_abandoned_directories_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let left = |running: Temporary| running.directory.keep();
        let (hour, week) = (Duration::from_secs(3600), ABANDONED + SETTLED);
        let running = Temporary::create(parent.path(), "running").unwrap();
        age(running.path(), week);
        let fresh = left(Temporary::create(parent.path(), "fresh").unwrap());
        let killed = left(Temporary::create(parent.path(), "killed").unwrap());
        age(&killed, hour);
        let of_others = |name: &str, by: Duration| {
            let path = parent.path().join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::write(path.join("lock"), "").unwrap();
            std::fs::write(path.join("unit.safetensors"), "x").unwrap();
            age(&path, by);
            path
        };
        let elsewhere = of_others("blocks-0.0123456789abcdef0123456789abcdef-x", hour);
        let long_ago = of_others("blocks-1.0123456789abcdef0123456789abcdef-x", week);
        let written_to = of_others("blocks-2.0123456789abcdef0123456789abcdef-x", week);
        std::fs::write(written_to.join("unit.safetensors"), "y").unwrap();
        // Directories of the user, however old, with similar names, also if they have a file of the lock's name.
        let kept =
            ["blocks-1", "results.2024-01", "blocks-1.0123456789abcdef-x"].map(|name| of_others(name, week));
        // Half removed, so that the lock is missing.
        let half = of_others("blocks-3.0123456789abcdef0123456789abcdef-y", week);
        std::fs::remove_file(half.join("lock")).unwrap();
        age(&half, week);
        assert_eq!(remove_abandoned(parent.path(), "other"), 0);
        assert_eq!(remove_abandoned(parent.path(), "blocks-1"), 1);
        assert_eq!(remove_abandoned(parent.path(), ""), 2);
        assert!(!half.exists() && !killed.exists() && !long_ago.exists());
        for path in
            [running.path(), &fresh, &elsewhere, &written_to].into_iter().chain(kept.iter().map(|p| &**p))
        {
            assert!(path.exists(), "{}", path.display());
        }
        assert_eq!(remove_abandoned(parent.path(), ""), 0);
        assert_eq!(remove_abandoned(&parent.path().join("missing"), ""), 0);
        let path = running.path().to_owned();
        drop(running);
        assert!(!path.exists());
    }
}
