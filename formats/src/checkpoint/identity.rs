//! A digest that identifies a model.

use std::io::Read;
use std::path::Path;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::ModelDirectory;
use crate::digest::{hex, sha256_hex};
use crate::{CancelToken, Error, Result};

const READ_BYTES: usize = 1 << 20;

impl ModelDirectory {
    /// The SHA-256 of the model: the hash of the list that `sha256sum config.json *.safetensors` prints for its
    /// configuration and weight files, in order of names.
    ///
    /// # Errors
    /// When a file cannot be read, or when cancelled.
    pub fn sha256(&self, cancel: &CancelToken) -> Result<String> {
        let mut files = self.source().files();
        // In a single-file model, the weights and the configuration are one file.
        if !files.iter().any(|file| file == self.config_path()) {
            files.push(self.config_path().to_owned());
        }
        let name = |path: &Path| path.strip_prefix(self.path()).unwrap_or(path).display().to_string();
        let mut lines = files
            .into_par_iter()
            .map(|path| Ok((name(&path), file_sha256(&path, cancel)?)))
            .collect::<Result<Vec<_>>>()?;
        lines.sort_unstable();
        let list: String = lines.iter().map(|(name, digest)| format!("{digest}  {name}\n")).collect();
        Ok(sha256_hex(list))
    }
}

/// Computes the SHA-256 of a file in hexadecimal digits, reading it in chunks.
///
/// # Errors
/// When it cannot be read, or when cancelled.
pub fn file_sha256(path: &Path, cancel: &CancelToken) -> Result<String> {
    let mut hash = Sha256::new();
    each_piece(path, cancel, |piece| hash.update(piece))?;
    Ok(hex(&hash.finalize()))
}

/// Computes the BLAKE3 of a file in hexadecimal digits, reading it in chunks.
///
/// # Errors
/// When it cannot be read, or when cancelled.
pub fn file_blake3(path: &Path, cancel: &CancelToken) -> Result<String> {
    let mut hash = blake3::Hasher::new();
    each_piece(path, cancel, |piece| {
        hash.update(piece);
    })?;
    Ok(hex(hash.finalize().as_bytes()))
}

fn each_piece(path: &Path, cancel: &CancelToken, mut take: impl FnMut(&[u8])) -> Result<()> {
    let fault = |e| Error::io("read", path, e);
    let mut file = std::fs::File::open(path).map_err(fault)?;
    let mut piece = vec![0; READ_BYTES];
    loop {
        cancel.check()?;
        match file.read(&mut piece).map_err(fault)? {
            0 => return Ok(()),
            read => take(&piece[..read]),
        }
    }
}
