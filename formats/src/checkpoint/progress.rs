//! The progress of a tensor or a file that is being written.

use std::io::{self, Write};

use sha2::{Digest, Sha256};

use super::file_system::StagedFile;
use crate::digest::Digest256;

pub(super) struct Progress {
    pub(super) written: u64,
    /// The digest of the bytes so far, until all are written. Boxed, because a hasher takes 2 kB.
    running: Option<Box<blake3::Hasher>>,
    /// The digest of all bytes, once they are written.
    pub(super) hash: Option<Digest256>,
    pub(super) journaled: bool,
    /// Whether an earlier run completed the tensor.
    pub(super) resumed: bool,
}

impl Progress {
    pub(super) fn new(len: u64) -> Self {
        // An output can have a hundred thousand tensors, so there is no hasher before the first byte.
        let hash = (len == 0).then(|| blake3::hash(&[]).into());
        Self { written: 0, running: None, hash, journaled: false, resumed: false }
    }

    pub(super) fn advance(&mut self, bytes: &[u8], len: u64) {
        if self.hash.is_some() {
            return;
        }
        let mut running = self.running.take().unwrap_or_default();
        running.update(bytes);
        self.written += bytes.len() as u64;
        if self.written == len {
            self.hash = Some(running.finalize().into());
        } else {
            self.running = Some(running);
        }
    }
}

/// Hashes what is written to a file.
pub(super) struct Hashed<'a> {
    pub(super) file: &'a dyn StagedFile,
    pub(super) hash: Sha256,
    pub(super) at: u64,
}

impl Write for Hashed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write_at(self.at, bytes)?;
        self.hash.update(bytes);
        self.at += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
