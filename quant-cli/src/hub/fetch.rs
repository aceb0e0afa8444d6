//! Resolves a hub model to a directory: its files are downloaded into the cache, or found there.

use std::path::{Path, PathBuf};

use hf_hub::RepoTypeModel;
use quant_core::checkpoint::{WantedFiles, shards_of_index, wanted_files};
use quant_core::{Error, Result};

use super::cache::{Announced, RepositoryCache};
use super::fault::Request;
use super::id::HubId;
use super::remote::{Kind, Remote, check, is_offline};
use crate::commands::Session;

/// The default branch, used if no revision is given.
pub const MAIN: &str = "main";

/// Returns the directory of a model in the cache, complete and verified.
pub fn model(id: &HubId, session: &Session) -> Result<PathBuf> {
    let revision = id.revision.as_deref().unwrap_or(MAIN);
    if is_offline() {
        return cached_model(id, revision, session);
    }
    let remote = Remote::<RepoTypeModel>::new(&id.owner, &id.name, revision, session)?;
    let commit = remote.commit()?;
    let files = remote.files(&commit)?;
    let names: Vec<String> = files.iter().map(|f| f.name.clone()).collect();
    let WantedFiles { mut companions, weights, sharded } = wanted_files(Path::new(&id.to_string()), &names)?;
    companions.push(weights);
    remote.fetch(&commit, &companions, &files)?;
    let snapshot = remote.cache.snapshot(&commit);
    if sharded {
        remote.fetch(&commit, &shards_of_index(&snapshot)?, &files)?;
    }
    remote.cache.remember_revision(revision, &commit)?;
    Ok(snapshot)
}

/// Like `model`, without the network: the cached files must suffice.
fn cached_model(id: &HubId, revision: &str, session: &Session) -> Result<PathBuf> {
    let (repository, root) = (id.repository(), hf_hub::resolve_cache_dir());
    let request = offline_request::<RepoTypeModel>(&repository, revision, &root);
    let cache = RepositoryCache::new(&root, RepoTypeModel::FOLDER, &repository);
    let snapshot = cache.commit_of(revision).map(|c| cache.snapshot(&c)).filter(|s| s.is_dir());
    let snapshot = snapshot.ok_or_else(|| not_cached(&request))?;
    let names = entries(&snapshot)?;
    // A snapshot without weights is an incomplete download; the repository may have them.
    let wanted = wanted_files(&snapshot, &names).map_err(|_| not_cached(&request))?;
    let require = |name: &str| {
        let request = Request { file: Some(name), ..request.clone() };
        let link = snapshot.join(name);
        if !link.exists() {
            return Err(not_cached(&request));
        }
        check(&cache, &link, &Announced::default(), &request, session)
    };
    wanted.companions.iter().chain([&wanted.weights]).try_for_each(|n| require(n))?;
    if wanted.sharded {
        shards_of_index(&snapshot)?.iter().try_for_each(|n| require(n))?;
    }
    Ok(snapshot)
}

pub fn offline_request<'a, K: Kind>(repository: &'a str, revision: &'a str, cache: &'a Path) -> Request<'a> {
    Request { kind: K::WORD, repository, revision, file: None, endpoint: "", cache }
}

pub fn not_cached(request: &Request<'_>) -> Error {
    request.unavailable(
        format!("HF_HUB_OFFLINE is set, and the cache {} does not contain it", request.cache.display()),
        "unset HF_HUB_OFFLINE to download it, or point HF_HOME or HF_HUB_CACHE at a cache that contains it",
    )
}

fn entries(directory: &Path) -> Result<Vec<String>> {
    let list = || -> std::io::Result<Vec<String>> {
        let names = std::fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name().into_string().ok()));
        names.filter_map(std::io::Result::transpose).collect()
    };
    list().map_err(|e| Error::io("list", directory, e))
}
