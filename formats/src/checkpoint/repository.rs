//! Selects the files of a repository that make up a checkpoint, by their names alone, for a downloader.

use std::path::Path;

use super::directory::{CONFIG, is_sidecar};
use super::input_file::{Root, read_capped, relative_name_fault};
use super::shard_index::{MAX_INDEX_BYTES, ShardIndex};
use super::shards::{INDEX, SINGLE, nothing_to_read, weight_file};
use crate::{Error, Result};

/// The files to fetch from a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedFiles {
    /// `config.json`, even if it was not listed, and the accompanying files, sorted. Never code or pickle files.
    pub companions: Vec<String>,
    /// The weights, or the index of their shards.
    pub weights: String,
    /// Whether the weights are an index, whose shards [`shards_of_index`] names.
    pub sharded: bool,
}

/// Selects a checkpoint's files from the names in a repository; `repository` is for messages.
///
/// # Errors
/// [`Error::NoCheckpoint`] or [`Error::PickleOnly`]: there are no weights that this crate reads.
pub fn wanted_files(repository: &Path, names: &[String]) -> Result<WantedFiles> {
    let listed = |name: &str| names.iter().any(|n| n == name);
    let (weights, sharded) = match (listed(INDEX), listed(SINGLE)) {
        (true, _) => (INDEX, true),
        (false, true) => (SINGLE, false),
        (false, false) => return Err(nothing_to_read(repository, names)),
    };
    let mut companions = vec![CONFIG.to_owned()];
    // Only files at the root accompany the model.
    let plain = |name: &str| !name.contains('/') && relative_name_fault(name).is_none();
    companions.extend(names.iter().filter(|n| is_sidecar(n) && plain(n)).cloned());
    companions.sort_unstable();
    companions.dedup();
    Ok(WantedFiles { companions, weights: weights.to_owned(), sharded })
}

/// Returns the shards that a directory's `model.safetensors.index.json` names, sorted. They need not exist yet.
///
/// # Errors
/// [`Error::NoCheckpoint`] when there is no index, [`Error::Index`] when it is malformed, [`Error::Io`] when it cannot
/// be read.
pub fn shards_of_index(directory: &Path) -> Result<Vec<String>> {
    let root = Root::open(directory)?;
    let shown = root.join(INDEX);
    let Some(real) = weight_file(&root, INDEX)? else {
        return Err(Error::NoCheckpoint {
            path: directory.to_owned(),
            reason: format!("{INDEX} is missing"),
            remedy: None,
        });
    };
    let broken = |reason: String| Error::Index { path: shown.clone(), reason };
    let bytes = read_capped(&real, &shown, MAX_INDEX_BYTES)?.map_err(broken)?;
    Ok(ShardIndex::parse(&bytes).map_err(broken)?.shards)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(names: &[&str]) -> Result<WantedFiles> {
        let names: Vec<String> = names.iter().map(|&n| n.to_owned()).collect();
        wanted_files(Path::new("a/b"), &names)
    }

    #[test]
    fn only_what_is_read_is_wanted() {
        let files = wanted(&[
            ".gitattributes",
            "LICENSE",
            "LICENSE/../../evil",
            "README.md",
            "config.json",
            "consolidated.safetensors",
            "modeling_x.py",
            "model.safetensors",
            "original/tokenizer.json",
            "pytorch_model.bin",
            "tokenizer.json",
        ])
        .unwrap();
        assert_eq!(files.companions, ["LICENSE", "config.json", "tokenizer.json"]);
        assert_eq!((files.weights.as_str(), files.sharded), (SINGLE, false));
        let files = wanted(&[INDEX, SINGLE]).unwrap();
        assert_eq!((files.weights.as_str(), files.sharded), (INDEX, true));
        assert_eq!(files.companions, [CONFIG], "it is requested although it is not listed");
    }

    #[test]
    fn what_cannot_be_read_is_refused_by_name() {
        let error = wanted(&["config.json", "pytorch_model.bin"]).unwrap_err();
        assert!(
            matches!(&error, Error::PickleOnly { files, .. } if files == &["pytorch_model.bin"]),
            "{error}"
        );
        assert!(matches!(wanted(&["config.json"]), Err(Error::NoCheckpoint { .. })));
        let error = wanted(&["a.safetensors"]).unwrap_err();
        assert!(error.to_string().contains("only a.safetensors"), "{error}");
    }

    #[test]
    fn shards_come_from_a_checked_index() {
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(shards_of_index(directory.path()), Err(Error::NoCheckpoint { .. })));
        let write = |text: &str| std::fs::write(directory.path().join(INDEX), text).unwrap();
        write(r#"{"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}"#);
        assert_eq!(shards_of_index(directory.path()).unwrap(), ["a.safetensors", "b.safetensors"]);
        write(r#"{"weight_map": {"x": "../b.safetensors"}}"#);
        assert!(matches!(shards_of_index(directory.path()), Err(Error::Index { .. })));
    }
}
