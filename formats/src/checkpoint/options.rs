//! The settings of a writer.

use std::sync::Arc;

use serde_json::Value;

use super::layout::DEFAULT_SHARD_BYTES;
use super::publish::ReplacePolicy;
use super::{Archive, SafetensorsDirectory};

/// What a writer does with the unfinished job of an earlier run on the same target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Resume {
    /// Discards it.
    #[default]
    Never,
    /// Resumes it if it had the same request. A job with a different request that has finished work is an error, except
    /// with [`WriteOptions::force`], which discards it.
    IfSame,
    /// Resumes it. A job with a different request is an error.
    Required,
}

/// How a checkpoint is written.
#[derive(Debug, Clone)]
pub struct WriteOptions {
    /// Replace an existing checkpoint. It stays until the new one is complete and verified.
    pub force: bool,
    /// What happens to the unfinished job of an earlier run.
    pub resume: Resume,
    /// Maximum bytes of tensor data per shard; a larger tensor gets a shard of its own.
    pub max_shard_bytes: u64,
    /// Bytes of the files that will be added to the shards, as far as known, for the check of the disk space.
    pub companion_bytes: u64,
    /// Identifies the input of the tensors: a resumed job must have started with the same fingerprint.
    pub fingerprint: Value,
    /// The version that the manifest names.
    pub tool_version: String,
    /// The file format to write.
    pub archive: Arc<dyn Archive>,
    /// Whether the target is the single file that the archive writes, without other files or a manifest.
    pub single_file: bool,
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self {
            force: false,
            resume: Resume::Never,
            max_shard_bytes: DEFAULT_SHARD_BYTES,
            companion_bytes: 0,
            fingerprint: Value::Null,
            tool_version: env!("CARGO_PKG_VERSION").into(),
            archive: Arc::new(SafetensorsDirectory),
            single_file: false,
        }
    }
}

impl WriteOptions {
    pub(super) fn place(&self) -> ReplacePolicy {
        ReplacePolicy::new(self.force, self.single_file.then(|| self.archive.clone()))
    }
}
