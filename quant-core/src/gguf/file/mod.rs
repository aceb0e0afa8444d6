//! GGUF files: typed metadata and tensors in blocks, one file or several parts for a whole model.
//!
//! For the byte layout, see `docs/formats/gguf.md`. Files may come from untrusted sources, so every length is checked
//! against the remaining bytes of the file before anything is allocated.

mod archive;
mod directory;
mod fault;
mod open;
mod parts;
mod read;
#[cfg(test)]
mod tests;
mod value;
mod write;

pub use archive::GgufArchive;
pub use directory::model_in;
pub use fault::GgufFault;
pub use open::GgufFile;
pub use read::{GgufHeader, GgufTensor};
pub use value::{Array, Value};
pub(crate) use write::write_file;

/// The first four bytes of a file.
pub const MAGIC: [u8; 4] = *b"GGUF";
const VERSION: u32 = 3;
const DEFAULT_ALIGNMENT: u64 = 32;
const ALIGNMENT_KEY: &str = "general.alignment";
/// The maximum number of bytes in a tensor's name, without the NUL that llama.cpp appends.
const MAX_NAME: usize = 63;
const MAX_DIMS: usize = 4;
