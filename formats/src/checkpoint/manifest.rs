//! `quant_manifest.json`, the list of the written files.
//!
//! It holds length and SHA-256 of every other file, so that copies can be checked ([`verify_checkpoint`]).

use std::collections::HashMap;
use std::path::Path;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::input_file::{open_regular, read_capped, relative_name_fault};
use super::strict_json;
use super::verify::each_chunk;
use crate::digest::{Digest256, from_hex, hex};
use crate::wording::Remedy;
use crate::{CancelToken, Error, Event, Observer, Result};

/// The manifest's file name.
pub(crate) const MANIFEST: &str = "quant_manifest.json";
const SCHEMA: &str = "quant-manifest/1";
pub(crate) const MAX_BYTES: u64 = 64 << 20;

/// A file of a checkpoint that was written and read back.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub struct PublishedFile {
    /// The file's name within the directory.
    pub name: String,
    /// The file's length in bytes.
    pub bytes: u64,
    /// The file's SHA-256.
    pub sha256: Digest256,
}

impl PublishedFile {
    pub(crate) fn new(name: impl Into<String>, bytes: u64, sha256: Digest256) -> Self {
        Self { name: name.into(), bytes, sha256 }
    }

    /// The SHA-256 in hexadecimal digits.
    pub fn sha256_hex(&self) -> String {
        hex(&self.sha256)
    }
}

/// Writes the manifest of these files, which must be sorted by name.
pub(crate) fn manifest_bytes(files: &[PublishedFile], tool_version: &str) -> Vec<u8> {
    let files: Vec<Value> =
        files.iter().map(|f| json!({ "name": f.name, "bytes": f.bytes, "sha256": f.sha256_hex() })).collect();
    let manifest = json!({
        "schema": SCHEMA,
        "tool": { "name": "quant", "version": tool_version },
        "files": files,
    });
    format!("{manifest:#}\n").into_bytes()
}

/// Returns names and lengths of the files that a manifest lists, or `None` when it is not a manifest.
pub(crate) fn manifest_files(manifest: &[u8]) -> Option<HashMap<String, u64>> {
    let manifest: Value = serde_json::from_slice(manifest).ok()?;
    let files = manifest.get("files")?.as_array()?;
    files.iter().map(|f| Some((f.get("name")?.as_str()?.to_owned(), f.get("bytes")?.as_u64()?))).collect()
}

/// The result of [`verify_checkpoint`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerifiedFiles {
    /// The number of files that match the manifest, without the manifest itself.
    pub files: usize,
    /// Their total size in bytes.
    pub bytes: u64,
    /// Further files in the directory, sorted. They are not read.
    pub unlisted: Vec<String>,
}

/// Reads all files of a checkpoint and compares their lengths and SHA-256 with its `quant_manifest.json`, to detect
/// copies that are incomplete or damaged. Links are followed. The manifest is not signed: someone who can change the
/// files can change it, too.
///
/// # Errors
/// - [`Error::Usage`]: there is no manifest.
/// - [`Error::InputFile`]: the manifest is malformed, or a file is missing or differs; the message names the file.
/// - [`Error::Interrupted`], [`Error::Io`].
pub fn verify_checkpoint(
    directory: &Path,
    observer: &dyn Observer,
    cancel: &CancelToken,
) -> Result<VerifiedFiles> {
    let path = directory.join(MANIFEST);
    let real = |path: &Path| path.canonicalize().map_err(|e| Error::io("open", path, e));
    // A GGUF file is not a directory, and has no manifest.
    let is_absent = |e: std::io::Error| {
        matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory)
    };
    if std::fs::symlink_metadata(&path).is_err_and(is_absent) {
        return Err(Error::usage(
            format!(
                "`{}` has no {MANIFEST}, so there is nothing to compare its files with",
                directory.display()
            ),
            "verify a directory that quant has written",
        ));
    }
    let broken = |path: &Path, reason: String| Error::InputFile {
        path: path.to_owned(),
        line: None,
        reason,
        remedy: Remedy::from("copy or download the checkpoint again, or quantize the model again"),
    };
    let is_file = |real: &Path| real.metadata().is_ok_and(|metadata| metadata.is_file());
    if !is_file(&real(&path)?) {
        return Err(broken(&path, "is not a regular file".into()));
    }
    let text = read_capped(&real(&path)?, &path, MAX_BYTES)?.map_err(|reason| broken(&path, reason))?;
    let listed = listed(&text).map_err(|reason| broken(&path, reason))?;
    observer.event(&Event::StageStarted { stage: "verify", unit: "file", units: listed.len() as u64 });
    for file in &listed {
        let path = directory.join(&file.name);
        let differs = |reason: String| Err(broken(&path, reason));
        let opened = match path.canonicalize() {
            Ok(real) if !is_file(&real) => {
                return differs(format!("the file is listed in {MANIFEST}, but it is not a regular file"));
            }
            Ok(real) => open_regular(&real, &path)?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return differs(format!("the file is listed in {MANIFEST}, but it does not exist"));
            }
            Err(e) => return Err(Error::io("open", &path, e)),
        };
        let len = opened.metadata().map_err(|e| Error::io("read", &path, e))?.len();
        if len != file.bytes {
            return differs(format!("the file has {len} bytes, but {} according to {MANIFEST}", file.bytes));
        }
        let mut hash = Sha256::new();
        each_chunk(&opened, &path, 0..len, |chunk| {
            cancel.check()?;
            hash.update(chunk);
            Ok(())
        })?;
        if Digest256::from(hash.finalize()) != file.sha256 {
            return differs(format!(
                "the file is damaged or was changed: its SHA-256 differs from that in {MANIFEST}"
            ));
        }
        observer.event(&Event::UnitDone { detail: file.name.clone() });
    }
    observer.event(&Event::StageDone);
    let entries = std::fs::read_dir(directory).map_err(|e| Error::io("list", directory, e))?;
    let names =
        entries.filter_map(std::result::Result::ok).map(|e| e.file_name().to_string_lossy().into_owned());
    let mut unlisted: Vec<String> =
        names.filter(|name| name != MANIFEST && listed.iter().all(|file| file.name != *name)).collect();
    unlisted.sort();
    Ok(VerifiedFiles { files: listed.len(), bytes: listed.iter().map(|file| file.bytes).sum(), unlisted })
}

fn listed(manifest: &[u8]) -> Result<Vec<PublishedFile>, String> {
    let manifest = strict_json::parse(manifest)?;
    match manifest.get("schema").and_then(Value::as_str) {
        Some(SCHEMA) => {}
        _ => return Err(format!("the schema is not {SCHEMA}")),
    }
    let files = manifest.get("files").and_then(Value::as_array).ok_or("`files` is not a list")?;
    let mut total = 0_u64;
    let of = |file: &Value| {
        let text = |key: &str| file.get(key).and_then(Value::as_str);
        let name = text("name").filter(|name| relative_name_fault(name).is_none() && !name.contains('/'))?;
        let bytes = file.get("bytes").and_then(Value::as_u64)?;
        total = total.checked_add(bytes)?;
        Some(PublishedFile::new(name, bytes, from_hex(text("sha256")?)?))
    };
    let files: Option<Vec<PublishedFile>> = files.iter().map(of).collect();
    files.filter(|files| !files.is_empty()).ok_or_else(|| {
        "`files` must list at least one file, each with a plain name, its bytes and its sha256".to_owned()
    })
}
