//! GGUF files: typed metadata and tensors in blocks, one file for a whole model.
//!
//! `docs/formats/gguf.md` draws the bytes. The reader is strict, because files come from anywhere: every length is held
//! against what is left of the file before anything is allocated, and every error names the field and the offset.

mod archive;
mod fault;
mod open;
mod parts;
mod read;
#[cfg(test)]
mod tests;
mod value;
mod write;

pub use archive::GgufArchive;
pub use fault::GgufFault;
pub use open::GgufFile;
pub use read::{GgufHeader, GgufTensor};
pub use value::{Array, Value};
pub(crate) use write::write_file;

/// The first four bytes of a file.
pub const MAGIC: [u8; 4] = *b"GGUF";
/// The version that is written.
const VERSION: u32 = 3;
/// Tensor data begins at multiples of this where `general.alignment` says nothing.
const DEFAULT_ALIGNMENT: u64 = 32;
/// The key that says otherwise.
const ALIGNMENT_KEY: &str = "general.alignment";
/// Bytes of a tensor's name, less the NUL that llama.cpp keeps behind it.
const MAX_NAME: usize = 63;
/// Dimensions of a tensor.
const MAX_DIMS: usize = 4;
