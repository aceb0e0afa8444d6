//! How named tensors and their metadata become files: an archive. How a linear becomes tensors is packing, see
//! `format`.
//!
//! An archive says where every byte of a set of tensors goes; [`CheckpointWriter`](super::CheckpointWriter) does the
//! rest for all of them: staging, resuming, reading back, publishing.

use std::fmt::Debug;
use std::fs::File;
use std::path::Path;

use super::header::Header;
use super::{PlacedTensor, ShardLayout, ShardedCheckpoint, TensorSource, TensorSpec};
use crate::{Error, Result};

/// A kind of files that hold tensors.
pub trait Archive: Debug + Send + Sync {
    /// The files that these tensors become, none with more than `max_file_bytes` of tensor data where they can be
    /// divided.
    ///
    /// # Errors
    /// [`Error::Usage`] when there is nothing to write or too much; [`Error::Internal`] when a tensor cannot be
    /// written at all.
    fn layout(&self, tensors: &[TensorSpec], max_file_bytes: u64) -> Result<ShardLayout>;

    /// The tensors of a file that was written, as the strict reader finds them.
    ///
    /// # Errors
    /// When that reader refuses the file.
    fn read_header(&self, file: &File, path: &Path) -> Result<Vec<PlacedTensor>>;

    /// Looks at all files together, as a reader of the directory would.
    ///
    /// # Errors
    /// [`Error::Verification`] when it would see anything but so many tensors.
    fn check_directory(&self, directory: &Path, tensors: usize) -> Result<()>;

    /// Whether a file was written by this program, so that it may be replaced by one where that is asked for.
    ///
    /// # Errors
    /// When it cannot be read.
    fn is_own_file(&self, _path: &Path) -> Result<bool> {
        Ok(false)
    }
}

/// Safetensors shards in a directory, with an index where there are several.
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
            let reason = format!("does not open as it was written: {}", seen.warnings().join("; "));
            return Err(Error::Verification { path: path(), reason });
        }
        Ok(())
    }
}
