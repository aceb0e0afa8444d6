//! The build of the program and the instruction set that compute a run. The same inputs, version and instruction set
//! give the same bytes. A job that another build resumes, or that moves to another processor, could mix the bytes of
//! both.

use std::path::Path;

use quant_kernels_cpu::Isa;
use serde::Serialize;

use crate::checkpoint::file_blake3;
use crate::model::FloatProducts;
use crate::{CancelToken, Error, Result};

/// A build of the program, and the instructions it uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Program {
    /// The BLAKE3 hash of the executable, or of the library that holds this crate. Every run computes it; SHA-256 would
    /// be slower.
    executable_blake3: String,
    /// The instruction set of the kernels, as named in `QUANT_ISA`.
    instruction_set: &'static str,
    /// The widest instruction set of the processor. Matrix products that do not run in quant's kernels depend on it.
    processor: &'static str,
    /// How floats are multiplied, as named in `QUANT_FLOAT_PRODUCTS`.
    float_products: &'static str,
}

impl Program {
    /// Returns the running program, identified by its executable. A host that loads this crate as a shared library,
    /// such as a Python extension, must name that library with [`Program::at`] instead, because its executable does not
    /// identify this code.
    ///
    /// # Errors
    /// When the executable cannot be read, or the run is cancelled.
    pub fn current(cancel: &CancelToken) -> Result<Self> {
        let path = crate::system::running_program().map_err(|e| Error::io("find", "the executable", e))?;
        Self::at(&path, cancel)
    }

    /// Returns the program whose code is the file at `path`.
    ///
    /// # Errors
    /// When the file cannot be read, or the run is cancelled.
    pub fn at(path: &Path, cancel: &CancelToken) -> Result<Self> {
        Ok(Self {
            executable_blake3: file_blake3(path, cancel)?,
            instruction_set: Isa::detect().name(),
            processor: Isa::available().last().unwrap_or(Isa::Scalar).name(),
            float_products: FloatProducts::detect().name(),
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
