//! The first and last stages of the pipeline: reading checkpoints by byte ranges, and writing them atomically.
//!
//! ```text
//! read    directory ─► shards ─► header         config.json, shards and index, checks of each file
//! write   layout ─► writer ─► verify ─► publish   byte positions, staging, read-back, one rename
//! ```

#[cfg(feature = "write")]
mod archive;
mod config_fields;
mod contract;
#[cfg(feature = "write")]
mod differences;
mod directory;
mod dtype;
#[cfg(feature = "write")]
mod file_system;
mod header;
mod header_error;
#[cfg(feature = "write")]
mod header_text;
#[cfg(feature = "write")]
mod identity;
mod input_file;
#[cfg(feature = "write")]
mod job;
#[cfg(feature = "write")]
mod journal;
#[cfg(feature = "write")]
mod layout;
#[cfg(feature = "write")]
mod manifest;
mod memory;
mod names;
#[cfg(feature = "write")]
mod options;
#[cfg(feature = "write")]
mod overlap;
#[cfg(feature = "write")]
mod prepared;
#[cfg(feature = "write")]
mod progress;
#[cfg(feature = "write")]
mod publish;
mod repository;
#[cfg(feature = "write")]
mod seal;
mod shard_index;
mod shards;
#[cfg(feature = "write")]
mod staging;
mod strict_json;
mod tensor_io;
#[cfg(all(test, feature = "write"))]
mod tests;
#[cfg(feature = "write")]
mod verify;
#[cfg(feature = "write")]
mod writer;

#[cfg(feature = "write")]
pub use archive::{Archive, Origin, SafetensorsDirectory};
pub use config_fields::Asked;
pub use config_fields::ConfigFields;
pub use contract::check_specs;
#[cfg(feature = "write")]
pub use differences::differences;
pub use directory::{ModelDirectory, Sidecar};
pub use dtype::{Dtype, OpaqueDtype};
pub use header_error::HeaderError;
#[cfg(feature = "write")]
pub use header_text::HeaderText;
#[cfg(feature = "write")]
pub use identity::file_blake3;
#[cfg(feature = "write")]
pub use identity::file_sha256;
pub use input_file::{Placeholder, open_regular, placeholder, read_capped, read_exact_at};
#[cfg(feature = "write")]
pub use layout::{PlacedTensor, ShardFile, ShardLayout};
#[cfg(feature = "write")]
pub use manifest::{PublishedFile, VerifiedFiles, verify_checkpoint};
pub use memory::{MemorySink, MemorySource};
pub use names::printable;
pub use names::{is_unprintable, printable_lines};
#[cfg(feature = "write")]
pub use options::{Resume, WriteOptions};
#[cfg(feature = "write")]
pub use overlap::refuse_overlap;
#[cfg(feature = "write")]
pub use prepared::Prepared;
#[cfg(feature = "write")]
pub use publish::Published;
pub use repository::{WantedFiles, shards_of_index, wanted_files};
#[cfg(feature = "write")]
pub use seal::{UNSEALED, seal};
pub use shards::ShardedCheckpoint;
pub use strict_json::parse as parse_strictly;
pub(crate) use tensor_io::WEIGHT_FLOATS;
pub use tensor_io::non_finite_in_whole;
pub use tensor_io::{
    TensorInfo, TensorSink, TensorSource, TensorSpec, WeightFiles, require_finite, require_finite_bytes,
    require_weight_float,
};
#[cfg(feature = "write")]
pub use writer::CheckpointWriter;
