//! The first and last stage of the path: checkpoints are read by ranges and written atomically.
//!
//! ```text
//! read    directory ─► shards ─► header         config.json, shards and index, checks on each file
//! write   layout ─► writer ─► verify ─► publish   where each byte goes, staging, proof, one rename
//! ```

mod archive;
mod config_fields;
mod contract;
mod directory;
mod dtype;
mod file_system;
mod header;
mod header_error;
mod identity;
mod input_file;
mod job;
mod journal;
mod layout;
mod manifest;
mod memory;
mod names;
mod overlap;
mod publish;
mod repository;
mod shard_index;
mod shards;
mod staging;
mod strict_json;
mod tensor_io;
#[cfg(test)]
mod tests;
mod verify;
mod writer;

pub use archive::{Archive, SafetensorsDirectory};
pub(crate) use config_fields::Asked;
pub use config_fields::ConfigFields;
pub(crate) use contract::check_specs;
pub use directory::{ModelDirectory, Sidecar};
pub use dtype::{Dtype, OpaqueDtype};
pub use header_error::HeaderError;
pub(crate) use identity::file_blake3;
pub use identity::file_sha256;
pub(crate) use input_file::{open_regular, read_capped, read_exact_at};
pub(crate) use job::differences;
pub use layout::{PlacedTensor, ShardFile, ShardLayout};
pub use manifest::PublishedFile;
pub use memory::{MemorySink, MemorySource};
pub(crate) use names::printable;
pub use names::{printable_lines, steers};
pub use overlap::refuse_overlap;
pub use publish::Published;
pub use repository::{WantedFiles, shards_of_index, wanted_files};
pub use shards::ShardedCheckpoint;
pub use strict_json::parse as parse_strictly;
pub(crate) use tensor_io::non_finite_in_whole;
pub use tensor_io::{
    Checkpoint, TensorInfo, TensorSink, TensorSource, TensorSpec, require_finite, require_finite_bytes,
    require_weight_float,
};
pub use writer::{CheckpointWriter, Prepared, WriteOptions};
