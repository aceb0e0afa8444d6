//! The first and last stage of the path: checkpoints are read by ranges and written atomically.

mod config_fields;
mod directory;
mod dtype;
mod header;
mod tensor_io;

pub use config_fields::ConfigFields;
pub use dtype::Dtype;
pub use header::HeaderError;
pub use tensor_io::{TensorInfo, TensorSink, TensorSource, TensorSpec, require_finite, require_finite_bytes, require_weight_float};
pub use directory::ModelDirectory;
