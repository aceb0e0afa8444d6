//! Which program computes a run, and with which instructions: part of what a resumed job must have in common with
//! the one that was interrupted.
//!
//! The promise is that the same inputs, version and instruction set give the same bytes. A job that one build of the
//! program starts and another resumes, or that moves between processors, would mix the bytes of both.

use std::path::Path;

use quant_kernels_cpu::Isa;
use serde::Serialize;

use crate::checkpoint::file_blake3;
use crate::{CancelToken, Error, Result};

/// A build of the program and the instructions it runs with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Program {
    /// The BLAKE3 of the executable, or of the library that holds this crate: every run takes it, and SHA-256 would
    /// cost a fiftieth of a second each time.
    executable_blake3: String,
    /// The instruction set of the kernels, as `QUANT_ISA` names it.
    instruction_set: &'static str,
    /// The widest instruction set of the processor: products that do not run on the kernels choose by it.
    processor: &'static str,
}

impl Program {
    /// The running executable. A host that loads this crate as a shared library, such as a Python extension, names
    /// that library with [`Program::at`] instead: its executable says nothing about this code.
    ///
    /// # Errors
    /// When the executable cannot be read, or the run is cancelled.
    pub fn current(cancel: &CancelToken) -> Result<Self> {
        let path = crate::system::running_program().map_err(|e| Error::io("find", "the executable", e))?;
        Self::at(&path, cancel)
    }

    /// The program whose code is the file at `path`.
    ///
    /// # Errors
    /// When the file cannot be read, or the run is cancelled.
    pub fn at(path: &Path, cancel: &CancelToken) -> Result<Self> {
        Ok(Self {
            executable_blake3: file_blake3(path, cancel)?,
            instruction_set: Isa::detect().name(),
            processor: Isa::available().last().unwrap_or(Isa::Scalar).name(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::hex;

    #[test]
    fn the_code_and_the_instruction_set_are_named() {
        let cancel = CancelToken::default();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"code").unwrap();
        let program = Program::at(file.path(), &cancel).unwrap();
        assert_eq!(program.executable_blake3, hex(blake3::hash(b"code").as_bytes()));
        assert_eq!(program.instruction_set, Isa::detect().name());
        let own = std::env::current_exe().unwrap();
        assert_eq!(Program::current(&cancel).unwrap(), Program::at(&own, &cancel).unwrap());
        assert!(Program::at(Path::new("/no/such/program"), &cancel).is_err());
    }
}
