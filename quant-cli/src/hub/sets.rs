//! Public text sets: one file of a data set, downloaded, compared with the hash in the manifest or that of the first
//! download, and decompressed.

use std::path::{Path, PathBuf};

use hf_hub::RepoTypeDataset;
use quant_calibration_data::PublicSet;
use quant_core::checkpoint::file_sha256;
use quant_core::{Error, Result};

use super::cache::{Announced, RepositoryCache};
use super::decode;
use super::fault::Request;
use super::fetch::{MAIN, not_cached, offline_request};
use super::remote::{Kind, Remote, check, is_offline};
use crate::commands::Session;

pub fn documents(set: &PublicSet, session: &Session) -> Result<Vec<String>> {
    let (cache, path) = if is_offline() { cached(set, session)? } else { fetched(set, session)? };
    check_first_hash(set, &cache, &path, session)?;
    decode::documents(&path, &set.file, &set.field).map_err(unreadable)
}

/// Replaces the remedy, which is for files that the user wrote.
fn unreadable(error: Error) -> Error {
    match error {
        Error::Text { path, line, reason } => Error::InputFile {
            path,
            line,
            reason,
            remedy: "give the path of a text or .jsonl file, or use a different set; if this file is damaged, remove \
                it, so that the next run downloads it again"
                .into(),
        },
        other => other,
    }
}

fn fetched(set: &PublicSet, session: &Session) -> Result<(RepositoryCache, PathBuf)> {
    let (owner, name) = set.hub_id.split_once('/').unwrap_or(("", &set.hub_id));
    let remote = Remote::<RepoTypeDataset>::new(owner, name, MAIN, session)?;
    let commit = remote.commit()?;
    let file = remote.file(&commit, &set.file)?;
    remote.fetch(&commit, std::slice::from_ref(&set.file), &[file])?;
    remote.cache.remember_revision(MAIN, &commit)?;
    let path = remote.cache.snapshot(&commit).join(&set.file);
    Ok((remote.cache, path))
}

fn cached(set: &PublicSet, session: &Session) -> Result<(RepositoryCache, PathBuf)> {
    let root = hf_hub::resolve_cache_dir();
    let request =
        Request { file: Some(&set.file), ..offline_request::<RepoTypeDataset>(&set.hub_id, MAIN, &root) };
    let cache = RepositoryCache::new(&root, RepoTypeDataset::FOLDER, &set.hub_id);
    let path = cache.commit_of(MAIN).map(|c| cache.snapshot(&c).join(&set.file)).filter(|p| p.exists());
    let path = path.ok_or_else(|| not_cached(&request))?;
    check(&cache, &path, &Announced::default(), &request, session)?;
    Ok((cache, path))
}

/// Checks that the file has the SHA-256 in the manifest or, if the manifest has none, the hash recorded at the first
/// download. An unnoticed change of a text would change every number measured on it.
fn check_first_hash(set: &PublicSet, cache: &RepositoryCache, path: &Path, session: &Session) -> Result<()> {
    let found = file_sha256(path, &session.cancel)?;
    let (recorded, origin) = match set.sha256.as_str() {
        "" => (cache.recorded_sum(&set.file)?, "an earlier download"),
        known => (Some(known.to_owned()), "the manifest of text sets"),
    };
    match recorded {
        None => cache.record_sum(&set.file, &found),
        Some(recorded) if recorded == found => Ok(()),
        Some(recorded) => Err(Error::Unavailable {
            what: format!("the text set `{}`, {} of {}", set.name, set.file, set.hub_id),
            reason: format!("its SHA-256 is {found}, but {origin} has {recorded}"),
            remedy: match set.sha256.is_empty() {
                true => format!(
                    "results measured on the two versions cannot be compared; give the path of the older file, or \
                    accept the new file by removing its line from {}",
                    cache.sums_path().display()
                )
                .into(),
                false => "results measured on the two versions cannot be compared; give the path of the file that \
                    the manifest describes, or use a different text"
                    .into(),
            },
        }),
    }
}

#[cfg(test)]
mod tests {
    use quant_core::CancelToken;

    use super::*;
    use crate::progress::Progress;

    /// The SHA-256 of `abc`.
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn the_manifest_s_hash_wins_over_the_first_one() {
        let scratch = tempfile::tempdir().unwrap();
        let session = Session {
            progress: Progress::new(true),
            cancel: CancelToken::new(),
            text_workers: std::sync::Arc::new(quant_core::calibrate::InProcess),
            code: None,
            wording: &quant_core::wording::CommandLine,
        };
        let cache = RepositoryCache::new(scratch.path(), "datasets", "a/b");
        let path = scratch.path().join("file");
        let mut set = quant_calibration_data::public_sets().unwrap().remove(0);
        let mut hold = |content: &str, manifest: &str| {
            std::fs::write(&path, content).unwrap();
            manifest.clone_into(&mut set.sha256);
            check_first_hash(&set, &cache, &path, &session).map_err(|e| e.to_string())
        };
        let error = hold("abd", ABC).unwrap_err();
        assert!(
            error.contains(&format!("the manifest of text sets has {ABC}")) && error.contains("a52d159f"),
            "{error}"
        );
        hold("abc", ABC).unwrap();
        assert!(!cache.sums_path().exists(), "the manifest has it");
        hold("abd", "").unwrap();
        hold("abd", "").unwrap();
        assert!(hold("abc", "").is_err(), "the first digest differs");
        hold("abc", ABC).unwrap();
    }
}
