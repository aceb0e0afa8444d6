//! The first and last stage of the path: checkpoints are read by ranges and written atomically.

mod dtype;
mod header;
mod tensor_io;

pub use dtype::Dtype;
pub use header::HeaderError;
pub use tensor_io::{TensorInfo, TensorSink, TensorSource, TensorSpec, require_finite, require_weight_float};
