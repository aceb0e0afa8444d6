//! Errors about limits of the machine: the memory of a run, and the size of a file.

use std::path::PathBuf;

use super::Error;
use crate::system;

/// The memory that the threads of a run need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ThreadMemory {
    /// The number of threads.
    pub count: usize,
    /// The memory of each in bytes.
    pub bytes: u64,
}

impl ThreadMemory {
    /// `count` threads that need `bytes` each.
    pub const fn new(count: usize, bytes: u64) -> Self {
        Self { count, bytes }
    }

    /// The largest number of threads with which a run that needs `needed` bytes stays within `limit`, if that is at least
    /// one.
    pub(super) fn that_fit(self, needed: u64, limit: u64) -> Option<u64> {
        let excess = needed.saturating_sub(limit).div_ceil(self.bytes.max(1));
        (self.count as u64).checked_sub(excess).filter(|fit| *fit >= 1)
    }
}

impl Error {
    /// Creates the error for a file of which `needed` bytes were about to be written, when it became too large.
    pub(crate) fn file_too_large(path: PathBuf, needed: u64) -> Self {
        let limit = system::file_size_limit();
        // Only a part of the file may have been about to be written.
        let is_whole = |needed: &u64| *needed > limit.unwrap_or(1);
        Self::FileTooLarge { path, needed: Some(needed).filter(is_whole), limit }
    }
}

pub(super) fn too_large(needed: Option<u64>, limit: Option<u64>) -> String {
    let needs = needed.map_or("would grow".to_owned(), |needed| format!("needs {needed} bytes"));
    match limit {
        Some(limit) => format!("{needs}, but this process may write at most {limit} bytes to a file"),
        None => format!("{needs}, but its file system does not allow such large files"),
    }
}

pub(super) fn memory_limit(budget: Option<u64>, available: Option<u64>) -> String {
    match (budget, available) {
        (Some(budget), _) => format!("the budget is {} MiB", budget >> 20),
        (None, Some(available)) => format!("only {} MiB are available", available >> 20),
        (None, None) => "less memory is available".to_owned(),
    }
}
