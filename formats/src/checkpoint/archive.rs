//! File formats for named tensors and their metadata: the position of every byte.
//! [`CheckpointWriter`](super::CheckpointWriter) does the rest for all of them.

use std::fmt::Debug;
use std::fs::File;
use std::path::Path;

use super::header::Header;
use super::{PlacedTensor, ShardLayout, ShardedCheckpoint, TensorSource, TensorSpec};
use crate::{Error, Result};

/// A file format that holds tensors.
pub trait Archive: Debug + Send + Sync {
    /// Assigns these tensors to files with at most `max_file_bytes` of tensor data each. A larger tensor gets a file of
    /// its own. Single-file formats ignore the limit.
    ///
    /// # Errors
    /// [`Error::Usage`] when there are no tensors or too many, [`Error::Internal`] when a tensor cannot be written.
    fn layout(&self, tensors: &[TensorSpec], max_file_bytes: u64) -> Result<ShardLayout>;

    /// Reads the tensors of a written file.
    ///
    /// # Errors
    /// When the strict reader rejects the file.
    fn read_header(&self, file: &File, path: &Path) -> Result<Vec<PlacedTensor>>;

    /// Checks all files together, as a loader of the directory does.
    ///
    /// # Errors
    /// [`Error::Verification`] unless the files open without warnings and have this number of tensors.
    fn check_directory(&self, directory: &Path, tensors: usize) -> Result<()>;

    /// Who wrote a file. On request, this program replaces files that it wrote.
    ///
    /// # Errors
    /// When it cannot be read.
    fn origin(&self, _path: &Path) -> Result<Origin> {
        Ok(Origin::Foreign)
    }
}

/// Who wrote a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// This program, and nothing has changed since.
    Own,
    /// Another program, from a file of this one; or the file is damaged.
    Changed,
    /// Another program.
    Foreign,
}

/// Safetensors shards in a directory, with an index if there are several.
#[derive(Debug, Clone, Copy, Default)]
pub struct SafetensorsDirectory;

impl Archive for SafetensorsDirectory {
    fn layout(&self, tensors: &[TensorSpec], max_file_bytes: u64) -> Result<ShardLayout> {
        ShardLayout::plan(tensors, max_file_bytes)
    }

    fn read_header(&self, file: &File, path: &Path) -> Result<Vec<PlacedTensor>> {
        let header = Header::read(file, path)?;
        let placed = |(name, located): (String, super::header::Located)| PlacedTensor {
            name,
            info: located.info,
            offset: located.offset,
        };
        Ok(header.tensors.into_iter().map(placed).collect())
    }

    fn check_directory(&self, directory: &Path, tensors: usize) -> Result<()> {
        let path = || directory.to_owned();
        let seen = ShardedCheckpoint::open(directory)
            .map_err(|e| Error::Verification { path: path(), reason: e.to_string() })?;
        if seen.names().len() != tensors || !seen.warnings().is_empty() {
            let reason = format!("does not read back as it was written: {}", seen.warnings().join("; "));
            return Err(Error::Verification { path: path(), reason });
        }
        Ok(())
    }
}
