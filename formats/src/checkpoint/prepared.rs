//! A checkpoint between its verification and its publication.

use std::fmt;
use std::sync::Arc;

use super::file_system::FileSystem;
use super::job::Job;
use super::manifest::PublishedFile;
use super::publish::{Published, ReplacePolicy, move_into_place};
use crate::Result;

/// A checkpoint that is complete and verified, but not at its target yet.
///
/// Dropping it leaves the job directory, from which a writer can resume.
pub struct Prepared {
    pub(super) fs: Arc<dyn FileSystem>,
    pub(super) job: Job,
    pub(super) files: Vec<PublishedFile>,
    pub(super) place: ReplacePolicy,
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared").field("target", &self.job.target()).finish_non_exhaustive()
    }
}

impl Prepared {
    /// Moves the checkpoint to its target in one step.
    ///
    /// # Errors
    /// - [`Error::OutputExists`](crate::Error::OutputExists): the target has appeared in the meantime and may not be
    ///   replaced.
    /// - [`Error::Usage`](crate::Error::Usage): the target has changed in the meantime and may not be replaced.
    /// - [`Error::DiskFull`](crate::Error::DiskFull), [`Error::Io`](crate::Error::Io).
    ///
    /// The job can then be resumed. The target is unchanged, unless syncing failed after the rename.
    pub fn publish(self) -> Result<Published> {
        let Self { fs, job, files, place } = self;
        let replaced = move_into_place(&*fs, &job, &place)?;
        let leftover = job.remove(&*fs).is_err().then(|| job.path().to_owned());
        let bytes = files.iter().map(|f| f.bytes).sum();
        Ok(Published { path: job.target().to_owned(), files, bytes, replaced, leftover })
    }
}
