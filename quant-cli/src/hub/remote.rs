//! A repository on a hub, accessed through hf-hub. hf-hub cannot be cancelled, and does not time out if a server sends
//! nothing. Therefore every call runs on its own thread, and the calling thread watches it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use hf_hub::progress::{DownloadEvent, FileStatus, ProgressEvent, ProgressHandler};
use hf_hub::repository::RepoTreeEntry;
use hf_hub::{
    HFClient, HFClientSync, HFError, HFRepositorySync, HFResult, RepoType, RepoTypeDataset, RepoTypeModel,
};
use quant_core::{Error, Event, Observer, Result};

use super::cache::{Announced, BlobCheck, RepositoryCache, is_commit};
use super::fault::Request;
use crate::commands::Session;
use crate::output::bytes;
use crate::snapshot::Digest;

/// Maximum number of attempts at a transfer that breaks.
const ATTEMPTS: u32 = 3;
/// Timeout for a server that sends nothing, unless `HF_HUB_DOWNLOAD_TIMEOUT` sets a different one.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
const MIB: u64 = 1 << 20;

/// Returns whether `HF_HUB_OFFLINE` disables network access.
pub fn is_offline() -> bool {
    let value = std::env::var("HF_HUB_OFFLINE").unwrap_or_default();
    matches!(value.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE")
}

/// The two kinds of repository.
pub trait Kind: RepoType {
    /// The word for this kind in messages.
    const WORD: &'static str;
    /// The prefix of this kind's directories in the cache.
    const FOLDER: &'static str;
    /// Requests the commit that a revision points to.
    fn commit(repository: &HFRepositorySync<Self>, revision: String) -> HFResult<Option<String>>;
}

impl Kind for RepoTypeModel {
    const WORD: &'static str = "model";
    const FOLDER: &'static str = "models";

    fn commit(repository: &HFRepositorySync<Self>, revision: String) -> HFResult<Option<String>> {
        repository.info().revision(revision).send().map(|info| info.sha)
    }
}

impl Kind for RepoTypeDataset {
    const WORD: &'static str = "data set";
    const FOLDER: &'static str = "datasets";

    fn commit(repository: &HFRepositorySync<Self>, revision: String) -> HFResult<Option<String>> {
        repository.info().revision(revision).send().map(|info| info.sha)
    }
}

#[derive(Debug, Clone)]
pub struct Listed {
    pub name: String,
    /// The size and hash that the hub announces for the file.
    pub announced: Announced,
}

pub struct Remote<'a, K: Kind> {
    repository: HFRepositorySync<K>,
    /// `org/name`.
    name: String,
    revision: String,
    endpoint: String,
    cache_root: PathBuf,
    /// The repository's part of the cache.
    pub cache: RepositoryCache,
    session: &'a Session,
    patience: Duration,
}

impl<'a, K: Kind> Remote<'a, K> {
    /// Creates the client.
    pub fn new(owner: &str, name: &str, revision: &str, session: &'a Session) -> Result<Self> {
        let cache_root = hf_hub::resolve_cache_dir();
        let repository = format!("{owner}/{name}");
        let endpoint = std::env::var("HF_ENDPOINT").unwrap_or_default();
        let request = Request {
            kind: K::WORD,
            repository: &repository,
            revision,
            file: None,
            endpoint: &endpoint,
            cache: &cache_root,
        };
        let agent = concat!("quant/", env!("CARGO_PKG_VERSION"));
        let client = HFClient::builder().user_agent(agent).cache_dir(&cache_root).build();
        let client = client.map_err(|e| request.explain(e))?;
        let endpoint = client.endpoint().to_owned();
        let client = HFClientSync::from_inner(client).map_err(|e| request.explain(e))?;
        let seconds = std::env::var("HF_HUB_DOWNLOAD_TIMEOUT").ok().and_then(|s| s.parse().ok());
        Ok(Self {
            repository: client.repository(K::default(), owner, name),
            cache: RepositoryCache::new(&cache_root, K::FOLDER, &repository),
            name: repository,
            revision: revision.to_owned(),
            endpoint,
            cache_root,
            session,
            patience: seconds.map_or(DEFAULT_TIMEOUT, |s: u64| Duration::from_secs(s.max(1))),
        })
    }

    /// Requests the commit that the revision points to now.
    pub fn commit(&self) -> Result<String> {
        let (repository, revision) = (self.repository.clone(), self.revision.clone());
        let answer = self.watch(None, &Silence, move |_| K::commit(&repository, revision))?;
        match answer.map_err(|e| self.request(None).explain(e))? {
            // The commit becomes part of a path, so it must be a hash.
            Some(commit) if is_commit(&commit) => Ok(commit),
            _ => {
                let what = HFError::malformed_response("no commit hash");
                Err(self.request(None).explain(what))
            }
        }
    }

    pub fn files(&self, commit: &str) -> Result<Vec<Listed>> {
        let (repository, commit) = (self.repository.clone(), commit.to_owned());
        let answer = self
            .watch(None, &Silence, move |_| repository.list_tree().revision(commit).recursive(true).send())?;
        Ok(listed(answer.map_err(|e| self.request(None).explain(e))?))
    }

    /// Requests the entry of one file at a commit, without listing all files.
    pub fn file(&self, commit: &str, name: &str) -> Result<Listed> {
        let (repository, commit, path) = (self.repository.clone(), commit.to_owned(), name.to_owned());
        let answer = self.watch(Some(name), &Silence, move |_| {
            repository.get_paths_info().paths(vec![path]).revision(commit).send()
        })?;
        let files = listed(answer.map_err(|e| self.request(Some(name)).explain(e))?);
        files.into_iter().find(|f| f.name == name).ok_or_else(|| self.request(Some(name)).no_such_file())
    }

    /// Ensures that these files of a commit are in the cache and match the hub's announcement.
    pub fn fetch(&self, commit: &str, names: &[String], files: &[Listed]) -> Result<()> {
        let find = |name: &String| {
            files.iter().find(|f| f.name == *name).ok_or_else(|| self.request(Some(name)).no_such_file())
        };
        let found = names.iter().map(find).collect::<Result<Vec<_>>>()?;
        for (index, file) in found.into_iter().enumerate() {
            self.session.cancel.check()?;
            let name = &file.name;
            let request = self.request(Some(name));
            let link = self.cache.snapshot(commit).join(name);
            if !link.exists() {
                let size = file.announced.size.map(|s| format!(", {}", bytes(s))).unwrap_or_default();
                let place = format!("{} of {}", index + 1, names.len());
                self.session.progress.note(&format!("downloading {name} from {} ({place}{size})", self.name));
                self.download(commit, file, &link)?;
            }
            check(&self.cache, &link, &file.announced, &request, self.session)?;
        }
        Ok(())
    }

    fn download(&self, commit: &str, file: &Listed, link: &Path) -> Result<()> {
        let request = self.request(Some(&file.name));
        let mut attempt = 1;
        loop {
            let (repository, name, revision) =
                (self.repository.clone(), file.name.clone(), commit.to_owned());
            let shown = Transfer::start(self.session, &file.name, file.announced.size);
            let outcome = self.watch(Some(&file.name), &shown, move |counter| {
                let progress = hf_hub::progress::Progress::from(counter);
                repository.download_file().filename(name).revision(revision).progress(progress).send()
            });
            drop(shown);
            match outcome? {
                Ok(path) if path == link => return Ok(()),
                Ok(_) => {
                    let what = HFError::malformed_response("the server sent a file from a different commit");
                    return Err(request.explain(what));
                }
                // hf-hub itself retries connecting.
                Err(HFError::Request { source, .. }) if attempt < ATTEMPTS && !source.is_connect() => {
                    let again = format!("warning: the download of {} was interrupted; retrying", file.name);
                    self.session.progress.note(&again);
                    self.pause(Duration::from_millis(500) * attempt)?;
                    attempt += 1;
                }
                Err(error) => return Err(request.explain(error)),
            }
        }
    }

    fn pause(&self, time: Duration) -> Result<()> {
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.session.cancel.check()?;
            std::thread::sleep(POLL_INTERVAL.min(time));
        }
        Ok(())
    }

    /// Runs a call of hf-hub until it ends, the user cancels it, or the server has sent nothing until the timeout. An
    /// abandoned call continues until the process ends; its partial file has a name that is never mistaken for that of
    /// a complete file.
    fn watch<T: Send + 'static>(
        &self,
        file: Option<&str>,
        shown: &dyn Shown,
        call: impl FnOnce(Arc<Counter>) -> HFResult<T> + Send + 'static,
    ) -> Result<HFResult<T>> {
        let counter = Arc::new(Counter::default());
        let (sender, receiver) = sync_channel(1);
        let theirs = counter.clone();
        std::thread::Builder::new()
            .name("hub".into())
            .spawn(move || {
                // The call was abandoned if the receiver is gone.
                let _ = sender.send(call(theirs));
            })
            .map_err(|e| Error::Internal(format!("threads cannot be started: {e}")))?;
        let (mut last, mut since) = (0, Instant::now());
        loop {
            match receiver.recv_timeout(POLL_INTERVAL) {
                Ok(outcome) => return Ok(outcome),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::Internal("the hub library panicked".into()));
                }
            }
            self.session.cancel.check()?;
            let now = counter.0.load(Ordering::Relaxed);
            if now != last {
                (last, since) = (now, Instant::now());
                shown.update(now);
            } else if since.elapsed() > self.patience {
                return Err(self.request(file).stalled(self.patience.as_secs()));
            }
        }
    }

    fn request<'r>(&'r self, file: Option<&'r str>) -> Request<'r> {
        Request {
            kind: K::WORD,
            repository: &self.name,
            revision: &self.revision,
            file,
            endpoint: &self.endpoint,
            cache: &self.cache_root,
        }
    }
}

/// Checks a cached file against the announcement; if they differ, removes the file and returns an error.
pub fn check(
    cache: &RepositoryCache,
    link: &Path,
    announced: &Announced,
    request: &Request<'_>,
    session: &Session,
) -> Result<()> {
    match cache.check(link, announced, &session.cancel)? {
        BlobCheck::Matches => {}
        BlobCheck::Unknown => {
            let file = request.file.unwrap_or_default();
            session.progress.note(&format!(
                "warning: {file} cannot be verified, because the hub gives no checksum for it"
            ));
        }
        BlobCheck::Wrong { announced, found } => {
            cache.remove(link)?;
            return Err(request.wrong_content(&announced, &found));
        }
    }
    Ok(())
}

fn listed(entries: Vec<RepoTreeEntry>) -> Vec<Listed> {
    let file = |entry| match entry {
        RepoTreeEntry::File { oid, size, path, lfs, .. } => {
            let digest = match lfs {
                // For large files, `oid` is the hash of the LFS pointer, not of the content.
                Some(lfs) => lfs.sha256.as_deref().and_then(Digest::from_tag),
                None => Digest::from_tag(&oid),
            };
            Some(Listed { name: path, announced: Announced { size: Some(size), digest } })
        }
        RepoTreeEntry::Directory { .. } => None,
    };
    entries.into_iter().filter_map(file).collect()
}

#[derive(Debug, Default)]
struct Counter(AtomicU64);

impl ProgressHandler for Counter {
    fn on_progress(&self, event: &ProgressEvent) {
        let bytes = match event {
            ProgressEvent::Download(DownloadEvent::Progress { files }) => {
                let running = files.iter().filter(|f| f.status == FileStatus::InProgress);
                running.map(|f| f.bytes_completed).sum()
            }
            ProgressEvent::Download(DownloadEvent::AggregateProgress { bytes_completed, .. }) => {
                *bytes_completed
            }
            _ => return,
        };
        self.0.fetch_max(bytes, Ordering::Relaxed);
    }
}

trait Shown {
    fn update(&self, bytes: u64);
}

struct Silence;

impl Shown for Silence {
    fn update(&self, _bytes: u64) {}
}

struct Transfer<'a> {
    session: &'a Session,
    name: &'a str,
    reported: std::cell::Cell<u64>,
    units: u64,
}

impl<'a> Transfer<'a> {
    fn start(session: &'a Session, name: &'a str, size: Option<u64>) -> Self {
        let units = size.unwrap_or_default() / MIB;
        session.progress.event(&Event::StageStarted { stage: "download", unit: "MiB", units });
        Self { session, name, reported: std::cell::Cell::new(0), units }
    }
}

impl Shown for Transfer<'_> {
    fn update(&self, bytes: u64) {
        let done = (bytes / MIB).min(self.units);
        for _ in self.reported.get()..done {
            self.session.progress.event(&Event::UnitDone { detail: self.name.to_owned() });
        }
        self.reported.set(done.max(self.reported.get()));
    }
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        self.session.progress.event(&Event::StageDone);
    }
}
