//! The rules of a safetensors header that a file can violate.

use super::{Dtype, Placeholder};

/// A violated rule of the format. Names are shown with control characters escaped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The file is too short for the header's length.
    #[error("the file has {0} bytes, too few for a safetensors file")]
    TooShort(u64),
    /// The header extends beyond the end of the file.
    #[error("the header length is {declared} bytes, but only {available} bytes follow the length field")]
    HeaderPastEnd {
        /// Length in the first 8 bytes.
        declared: u64,
        /// Bytes of the file after the first 8.
        available: u64,
    },
    /// The file is a Git LFS pointer or an HTML page.
    #[error("the file {0}")]
    Placeholder(Placeholder),
    /// The header exceeds the maximum length.
    #[error("the header length is {declared} bytes; the limit is {limit}")]
    HeaderTooLarge {
        /// Length in the first 8 bytes.
        declared: u64,
        /// The maximum.
        limit: u64,
    },
    /// The header exceeds the maximum number of tensors.
    #[error("the header describes more than {limit} tensors")]
    TooManyTensors {
        /// The maximum.
        limit: usize,
    },
    /// The header does not begin with `{`.
    #[error("the header must begin with `{{`, {}", match found {
        Some(byte) => format!("its first byte is 0x{byte:02x}"),
        None => "it is empty".to_owned(),
    })]
    NotAnObject {
        /// The header's first byte; `None` if the header is empty.
        found: Option<u8>,
    },
    /// The header is not UTF-8.
    #[error("the header is not valid UTF-8 at byte {offset}")]
    NotUtf8 {
        /// Position of the first invalid byte within the header.
        offset: usize,
    },
    /// The header is not JSON.
    #[error("the header is not valid JSON: {reason}")]
    Json {
        /// The parser's error, with line and column.
        reason: String,
    },
    /// A tensor's entry is not an object with exactly the fields `dtype`, `shape` and `data_offsets`, each of the right
    /// type.
    #[error("tensor `{tensor}`: {reason}")]
    BadEntry {
        /// The tensor.
        tensor: String,
        /// The reason.
        reason: String,
    },
    /// Two entries have the same name.
    #[error("tensor `{tensor}` appears twice in the header")]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
    },
    /// There are two `__metadata__` entries.
    #[error("`__metadata__` appears twice in the header")]
    DuplicateMetadata,
    /// `__metadata__` is not an object of distinct keys with string values.
    #[error("`__metadata__` must be an object of string values: {reason}")]
    BadMetadata {
        /// The reason.
        reason: String,
    },
    /// A tensor's name cannot be displayed or stored safely.
    #[error("the tensor name `{name}` {reason}")]
    BadName {
        /// The name, escaped and truncated.
        name: String,
        /// The reason, as the end of the sentence.
        reason: &'static str,
    },
    /// A tensor's element type is unknown, and its name is invalid.
    #[error("tensor `{tensor}` has unknown dtype `{dtype}`; known dtypes: {}", known_dtypes())]
    UnknownDtype {
        /// The tensor.
        tensor: String,
        /// The name of the type in the file.
        dtype: String,
    },
    /// A tensor exceeds the maximum number of dimensions.
    #[error("tensor `{tensor}` has {rank} dimensions; the limit is {limit}")]
    RankTooHigh {
        /// The tensor.
        tensor: String,
        /// Number of the tensor's dimensions.
        rank: usize,
        /// The maximum.
        limit: usize,
    },
    /// The size of a tensor in bytes overflows 64 bits, or exceeds the address space.
    #[error("tensor `{tensor}`: the size of shape {shape:?} overflows")]
    SizeOverflow {
        /// The tensor.
        tensor: String,
        /// The tensor's shape.
        shape: Vec<u64>,
    },
    /// The sub-byte elements of a tensor do not fill whole bytes.
    #[error("tensor `{tensor}`: {dtype} {shape:?} does not fill whole bytes")]
    NotWholeBytes {
        /// The tensor.
        tensor: String,
        /// The tensor's element type.
        dtype: Dtype,
        /// The tensor's shape.
        shape: Vec<u64>,
    },
    /// A tensor's start is after its end.
    #[error("tensor `{tensor}` begins at byte {begin}, after its end at byte {end}")]
    OffsetsReversed {
        /// The tensor.
        tensor: String,
        /// First byte within the data.
        begin: u64,
        /// First byte after the tensor.
        end: u64,
    },
    /// Offsets and shape imply different sizes.
    #[error(
        "tensor `{tensor}`: {dtype} {shape:?} takes {expected} bytes, but `data_offsets` span {got} bytes"
    )]
    SizeMismatch {
        /// The tensor.
        tensor: String,
        /// The tensor's element type.
        dtype: Dtype,
        /// The tensor's shape.
        shape: Vec<u64>,
        /// Bytes implied by type and shape.
        expected: u64,
        /// Bytes between the offsets.
        got: u64,
    },
    /// Some bytes of the data do not belong to any tensor.
    #[error("bytes {begin} to {end} of the data, before tensor `{before}`, do not belong to any tensor")]
    Hole {
        /// The tensor after the gap.
        before: String,
        /// First byte of the gap within the data.
        begin: u64,
        /// First byte after the gap.
        end: u64,
    },
    /// Two tensors share bytes.
    #[error("tensors `{first}` (up to byte {first_end}) and `{second}` (from byte {second_begin}) overlap")]
    Overlap {
        /// The tensor that begins first.
        first: String,
        /// First byte after the tensor `first`.
        first_end: u64,
        /// The tensor that begins inside the tensor `first`.
        second: String,
        /// First byte of the tensor `second`.
        second_begin: u64,
    },
    /// The file ends before a tensor does, as after an interrupted download.
    #[error("the file is truncated within tensor `{tensor}`: it has {have} bytes, but needs {need}")]
    PastEnd {
        /// The first incomplete tensor.
        tensor: String,
        /// Length of the file.
        have: u64,
        /// Length that the header implies.
        need: u64,
    },
    /// The file continues after the last tensor.
    #[error("{} byte(s) follow the last tensor: the file has {have} bytes, but needs only {need}", have - need)]
    TrailingBytes {
        /// Length of the file.
        have: u64,
        /// Length that the header implies.
        need: u64,
    },
}

impl HeaderError {
    /// What lies in place of the file, if it is not a safetensors file at all.
    pub fn placeholder(&self) -> Option<Placeholder> {
        match self {
            Self::Placeholder(found) => Some(*found),
            _ => None,
        }
    }
}

fn known_dtypes() -> String {
    Dtype::ALL.iter().map(Dtype::name).collect::<Vec<_>>().join(", ")
}
