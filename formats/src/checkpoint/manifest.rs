//! `quant_manifest.json`, the list of the written files.
//!
//! It is written last and holds length and SHA-256 of every other file, so that a copy can be checked for completeness
//! and damage. It depends only on these files and the version.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::digest::{Digest256, hex};

/// The manifest's file name.
pub(crate) const MANIFEST: &str = "quant_manifest.json";

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
        "schema": "quant-manifest/1",
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
