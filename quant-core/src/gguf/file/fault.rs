//! Reasons why a file cannot be read.

use std::fmt;

/// A rule that a file breaks, or a feature that this version does not support.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum GgufFault {
    /// The file violates the format, or exceeds a limit of this reader: it is damaged, incomplete or malicious.
    Damaged(String),
    /// The file may be valid, but uses an unsupported feature.
    Unread(String),
}

impl fmt::Display for GgufFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Damaged(reason) | Self::Unread(reason) => f.write_str(reason),
        }
    }
}

impl std::error::Error for GgufFault {}

impl From<String> for GgufFault {
    fn from(reason: String) -> Self {
        Self::Damaged(reason)
    }
}

impl From<&str> for GgufFault {
    fn from(reason: &str) -> Self {
        Self::Damaged(reason.to_owned())
    }
}
