//! Why a file cannot be read.

use std::fmt;

/// A rule that a file breaks, or what of it this version does not read.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum GgufFault {
    /// It is not as the format says: damaged, incomplete, or made to mislead.
    Damaged(String),
    /// It may be sound, and holds what is not read.
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
