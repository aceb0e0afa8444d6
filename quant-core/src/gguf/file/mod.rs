//! GGUF files: typed metadata and tensors in blocks, one file or several parts for a whole model.
//!
//! `docs/formats/gguf.md` shows the byte layout. The reader is strict, because files may come from untrusted sources:
//! every length is checked against the remaining bytes of the file before anything is allocated, and errors name the
//! field or tensor, mostly with its offset.

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
/// The alignment of tensor data if `general.alignment` is missing.
const DEFAULT_ALIGNMENT: u64 = 32;
/// The key of the alignment.
const ALIGNMENT_KEY: &str = "general.alignment";
/// The maximum number of bytes in a tensor's name, without the NUL that llama.cpp appends.
const MAX_NAME: usize = 63;
/// The maximum number of dimensions of a tensor.
const MAX_DIMS: usize = 4;
