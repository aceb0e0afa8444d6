//! The header of a safetensors file, checked against the file before anything is allocated.

/// A rule of the format that a file breaks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The file cannot hold even the header's length.
    #[error("{0} bytes, too short to be safetensors")]
    TooShort(u64),
}
