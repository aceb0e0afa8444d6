//! The files of a job in an object store: S3 and compatible stores, Google Cloud Storage, or Azure.
//!
//! Small files are objects. A result consists of [parts and a manifest](manifest). A name is given by a write that fails
//! if the name exists (`If-None-Match: *`), so the first of several workers wins.
//!
//! Workers read and write local copies, which are in a directory of this process and removed when it ends. A copy is
//! verified while it is downloaded. Sizes in the store are checked against limits before anything is allocated.

mod client;
mod fault;
mod location;
mod manifest;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

use object_store::path::Path as Key;
use sha2::{Digest, Sha256};

use self::client::{Client, Contents, Pending};
use self::location::Location;
use self::manifest::{Manifest, Part, Wanted};
use super::{
    FOLDERS, Files, LocalFile, MAX_INPUT_BYTES, Publication, RECORD, damaged, temporary_directory, written,
};
use crate::checkpoint::printable;
use crate::digest::hex;
use crate::run::Host;
use crate::units::temporary::Temporary;
use crate::{CancelToken, Error, Result, system};

const PARTS: &str = "parts";
const TEMPORARY: &str = "tmp";
/// The prefix of the names of local directories.
const PREFIX: &str = "quant-job-";
/// Parts that are transferred at the same time. Each is in memory.
const IN_FLIGHT: usize = 4;
/// A part whose contents are wrong is downloaded this often before it counts as damaged.
const DOWNLOADS: usize = 2;
/// How often a name is tried that another worker takes and then gives up.
const ATTEMPTS: usize = 8;

#[derive(Debug)]
pub(super) struct Objects {
    client: Client,
    prefix: Key,
    url: PathBuf,
    /// The parent of temporary directories.
    scratch: PathBuf,
    /// Holds the local copies.
    copies: Temporary,
    /// Cancels requests that are not part of a longer operation.
    cancel: CancelToken,
}

pub(super) fn check_url(url: &Path) -> Result<()> {
    Location::parse(url).map(drop)
}

pub(super) fn open(url: &Path, host: &Host<'_>) -> Result<Box<dyn Files>> {
    Ok(Box::new(Objects::open(url, host)?))
}

impl Objects {
    fn open(url: &Path, host: &Host<'_>) -> Result<Self> {
        let location = Location::parse(url)?;
        let store = match host.object_store {
            Some(store) => store.clone(),
            None => location.open()?,
        };
        let scratch = host.scratch.map_or_else(std::env::temp_dir, Path::to_owned);
        let copies = temporary_directory(&scratch, &format!("{PREFIX}copies"))?;
        let client = Client::new(store, location.url())?;
        let cancel = host.cancel.clone();
        Ok(Self { client, prefix: location.prefix, url: url.to_owned(), scratch, copies, cancel })
    }

    fn key(&self, key: &str) -> Key {
        // Keys of this crate need no encoding.
        key.split('/').filter(|part| !part.is_empty()).fold(self.prefix.clone(), |path, part| path.join(part))
    }

    fn shown(&self, key: &str) -> PathBuf {
        self.url.join(key)
    }

    fn wait<T>(&self, pending: Pending<T>, action: &str) -> Result<T> {
        self.client.wait(pending, action, &self.cancel)
    }

    /// Fails if the store replaces an object that it should not. The contract of jobs depends on this, and not all
    /// stores with the interface of S3 keep it.
    fn check_conditions(&self) -> Result<()> {
        // The name of the local directory is random, so no other process writes this object.
        let unique = self.copies.path().file_name().unwrap_or_default().to_string_lossy();
        let key = self.key(&format!("{TEMPORARY}/probe-{unique}"));
        let create = || self.wait(self.client.create(&key, b"probe".to_vec())?, "write objects");
        let replaced = create()? && create()?;
        self.wait(self.client.remove(&key)?, "delete objects")?;
        match replaced {
            false => Ok(()),
            true => Err(Error::Unavailable {
                what: format!("the object store {}", self.url.display()),
                reason:
                    "it replaces objects despite `If-None-Match: *`, so workers would overwrite each other's \
                    results"
                        .into(),
                remedy: "use a store that supports conditional writes, or a directory".into(),
            }),
        }
    }

    /// Reads an object of at most `max_bytes`; `None` if it does not exist.
    fn get(&self, key: &str, max_bytes: u64, cancel: &CancelToken) -> Result<Option<Vec<u8>>> {
        let request = self.client.get(&self.key(key), max_bytes)?;
        match self.client.wait(request, &format!("read {key}"), cancel)? {
            Contents::Absent => Ok(None),
            Contents::Bytes(bytes) => Ok(Some(bytes)),
            Contents::TooLong => {
                Err(damaged(&self.shown(key), format!("has more than {max_bytes} bytes, which is the limit")))
            }
        }
    }

    /// Writes an object if none has its name, and compares it with the existing one otherwise.
    fn create(&self, key: &str, bytes: &[u8], cancel: &CancelToken) -> Result<Publication> {
        for _ in 0..ATTEMPTS {
            let request = self.client.create(&self.key(key), bytes.to_vec())?;
            if self.client.wait(request, &format!("write {key}"), cancel)? {
                return Ok(Publication::Created);
            }
            if let Some(publication) = self.compare(key, bytes, cancel)? {
                return Ok(publication);
            }
            // A worker has set it aside, or the store has refused one of two simultaneous writes.
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
        Err(Error::Unavailable {
            what: self.shown(key).display().to_string(),
            reason: "the store neither has the object nor creates it".into(),
            remedy: "run the same command again".into(),
        })
    }

    /// Compares an object with bytes; `None` if it does not exist.
    fn compare(&self, key: &str, bytes: &[u8], cancel: &CancelToken) -> Result<Option<Publication>> {
        let request = self.client.get(&self.key(key), bytes.len() as u64)?;
        Ok(match self.client.wait(request, &format!("read {key}"), cancel)? {
            Contents::Absent => None,
            Contents::Bytes(found) if found == bytes => Some(Publication::Same),
            Contents::Bytes(_) | Contents::TooLong => Some(Publication::Different),
        })
    }

    fn manifest(&self, key: &str, cancel: &CancelToken) -> Result<Option<Manifest>> {
        let Some(bytes) = self.get(key, manifest::MAX_BYTES, cancel)? else { return Ok(None) };
        Manifest::parse(&bytes).map(Some).map_err(|reason| damaged(&self.shown(key), reason))
    }

    /// Downloads the wanted parts of a result. The rest of the copy has no contents.
    fn copy(
        &self,
        key: &str,
        manifest: &Manifest,
        wanted: Wanted,
        cancel: &CancelToken,
    ) -> Result<LocalFile> {
        let needed = manifest.parts(wanted).map(|(_, part)| part.bytes).sum();
        let directory = self.copies.path();
        if let Ok(Some(free)) = system::free_bytes(directory)
            && free < needed
        {
            return Err(Error::DiskFull { path: directory.to_owned(), needed, free });
        }
        let name = key.rsplit('/').next().unwrap_or(key);
        let (stem, extension) = name.rsplit_once('.').unwrap_or((name, ""));
        let file = tempfile::Builder::new()
            .prefix(&format!("{stem}."))
            .suffix(&format!(".{extension}"))
            .tempfile_in(directory)
            .map_err(|e| written(directory, needed, e))?;
        let (file, path) = file.into_parts();
        file.set_len(manifest.bytes).map_err(|e| written(&path, needed, e))?;
        let (mut parts, mut running) = (manifest.parts(wanted), VecDeque::new());
        loop {
            while running.len() < IN_FLIGHT
                && let Some((at, part)) = parts.next()
            {
                running.push_back((at, part, self.start_part(part)?));
            }
            let Some((at, part, request)) = running.pop_front() else { break };
            let bytes = self.part(key, part, request, cancel)?;
            system::write_all_at(&file, &bytes, at).map_err(|e| written(&path, needed, e))?;
        }
        Ok(LocalFile { path: path.to_path_buf(), _copy: Some(path) })
    }

    fn start_part(&self, part: &Part) -> Result<Pending<Contents>> {
        self.client.get(&self.key(&format!("{PARTS}/{}", part.sha256)), part.bytes)
    }

    /// Waits for a part, and checks its contents.
    fn part(
        &self,
        key: &str,
        part: &Part,
        mut request: Pending<Contents>,
        cancel: &CancelToken,
    ) -> Result<Vec<u8>> {
        let mut reason = "";
        for attempt in 1..=DOWNLOADS {
            match self.client.wait(request, &format!("read {PARTS}/{}", part.sha256), cancel)? {
                Contents::Bytes(bytes)
                    if bytes.len() as u64 == part.bytes && hex(&Sha256::digest(&bytes)) == part.sha256 =>
                {
                    return Ok(bytes);
                }
                Contents::Absent => reason = "is missing",
                Contents::Bytes(_) | Contents::TooLong => reason = "does not have the hash in its name",
            }
            if attempt == DOWNLOADS {
                break;
            }
            request = self.start_part(part)?;
        }
        Err(damaged(&self.shown(key), format!("is damaged: {PARTS}/{} {reason}", part.sha256)))
    }

    /// Uploads the parts of a result.
    fn upload(&self, file: &Path, cancel: &CancelToken) -> Result<Manifest> {
        let mut running = VecDeque::new();
        let finish = |request| self.client.wait(request, "write a part of a result", cancel);
        let manifest = Manifest::of(file, |part, bytes| {
            if running.len() == IN_FLIGHT
                && let Some(request) = running.pop_front()
            {
                finish(request)?;
            }
            // Replacing a part with the same contents is harmless, and repairs a damaged one.
            running.push_back(self.client.put(&self.key(&format!("{PARTS}/{}", part.sha256)), bytes)?);
            Ok(())
        })?;
        running.into_iter().try_for_each(finish)?;
        Ok(manifest)
    }
}

impl Files for Objects {
    fn check_unused(&self) -> Result<()> {
        let is_known = |name: &str| [RECORD, PARTS, TEMPORARY].contains(&name) || FOLDERS.contains(&name);
        match self.list("")?.iter().find(|name| !is_known(name)) {
            None => Ok(()),
            Some(name) => Err(Error::usage(
                format!("{} contains `{}`, which is not part of a job", self.url.display(), printable(name)),
                "choose a new prefix",
            )),
        }
    }

    fn prepare(&self, _folders: &[&str]) -> Result<()> {
        self.check_conditions()
    }

    fn scratch(&self) -> (&Path, &'static str) {
        (&self.scratch, PREFIX)
    }

    fn exists(&self, key: &str) -> Result<bool> {
        self.wait(self.client.exists(&self.key(key))?, &format!("find {key}"))
    }

    fn bytes(&self, key: &str, max_bytes: u64) -> Result<Option<Vec<u8>>> {
        self.get(key, max_bytes, &self.cancel)
    }

    fn small(&self, key: &str, max_bytes: u64) -> Result<Option<PathBuf>> {
        let Some(bytes) = self.get(key, max_bytes.min(MAX_INPUT_BYTES), &self.cancel)? else {
            return Ok(None);
        };
        let path = self.copies.path().join(key);
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
        }
        std::fs::write(&path, &bytes).map_err(|e| written(&path, bytes.len() as u64, e))?;
        Ok(Some(path))
    }

    fn result(&self, key: &str, max_bytes: u64, cancel: &CancelToken) -> Result<Option<LocalFile>> {
        let Some(manifest) = self.manifest(key, cancel)? else { return Ok(None) };
        if manifest.bytes > max_bytes {
            let reason = format!("has {} bytes, more than a result of this unit can have", manifest.bytes);
            return Err(damaged(&self.shown(key), reason));
        }
        self.copy(key, &manifest, Wanted::All, cancel).map(Some)
    }

    fn outline(&self, key: &str) -> Result<Option<LocalFile>> {
        let Some(manifest) = self.manifest(key, &self.cancel)? else { return Ok(None) };
        self.copy(key, &manifest, Wanted::Outline, &self.cancel).map(Some)
    }

    fn publish_bytes(&self, key: &str, bytes: &[u8]) -> Result<Publication> {
        self.create(key, bytes, &self.cancel)
    }

    fn publish(&self, file: &Path, key: &str, cancel: &CancelToken) -> Result<Publication> {
        // Another worker may have been faster, and then nothing is uploaded.
        if self.exists(key)? {
            let manifest = Manifest::of(file, |_, _| cancel.check())?.to_bytes()?;
            if let Some(publication) = self.compare(key, &manifest, cancel)? {
                return Ok(publication);
            }
        }
        let manifest = self.upload(file, cancel)?.to_bytes()?;
        self.create(key, &manifest, cancel)
    }

    fn set_aside(&self, key: &str) -> Result<Option<String>> {
        for number in 0..1000 {
            let aside = format!("{key}.bad-{number}");
            if self.exists(&aside)? {
                continue;
            }
            let request = self.client.rename(&self.key(key), &self.key(&aside))?;
            return Ok(self
                .wait(request, &format!("rename {key}"))?
                .then(|| aside.rsplit('/').next().unwrap_or(&aside).to_owned()));
        }
        Err(damaged(&self.shown(key), "is damaged, and so are 1000 earlier versions".into()))
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        let found = self.wait(self.client.list(&self.key(folder))?, "list objects")?;
        Ok(found.iter().filter_map(|key| key.filename().map(str::to_owned)).collect())
    }
}
