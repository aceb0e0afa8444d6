//! The subject of an error.

use std::path::Path;

use super::Error;

impl Error {
    /// Returns the affected tensor or linear, if any.
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Self::MissingTensor { tensor, .. }
            | Self::TensorShape { tensor, .. }
            | Self::UnknownExperts { tensor, .. }
            | Self::TensorDtype { tensor, .. }
            | Self::NameTaken { tensor, .. }
            | Self::NonFinite { tensor, .. }
            | Self::Numeric { tensor, .. }
            | Self::Calibration { tensor, .. } => Some(tensor),
            Self::NotRepackable { module, .. } => Some(module),
            Self::MissingLinear { linear, .. } => Some(linear),
            Self::GroupSizeDoesNotDivide(offenders) => offenders.first().map(|o| o.tensor.as_str()),
            _ => None,
        }
    }

    /// Returns the affected file or directory, if any.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::OutputExists { path }
            | Self::NoCheckpoint { path, .. }
            | Self::PickleOnly { path, .. }
            | Self::Safetensors { path, .. }
            | Self::Index { path, .. }
            | Self::MissingTensor { path, .. }
            | Self::TensorShape { path, .. }
            | Self::UnknownExperts { path, .. }
            | Self::TensorDtype { path, .. }
            | Self::Config { path, .. }
            | Self::UnknownArchitecture { path, .. }
            | Self::AmbiguousNames { path, .. }
            | Self::AlreadyQuantized { path, .. }
            | Self::UnsupportedQuantization { path, .. }
            | Self::NotRepackable { path, .. }
            | Self::Tokenizer { path, .. }
            | Self::Text { path, .. }
            | Self::InputFile { path, .. }
            | Self::Io { path, .. }
            | Self::NameTaken { path, .. }
            | Self::Recipe { path, .. }
            | Self::DiskFull { path, .. }
            | Self::FileTooLarge { path, .. }
            | Self::Locked { path, .. }
            | Self::Verification { path, .. }
            | Self::NonFinite { path, .. } => Some(path),
            Self::OutputIsInput { output, .. } => Some(output),
            _ => None,
        }
    }
}
