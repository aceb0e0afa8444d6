//! The files of a job, or other shared files, in a directory.
//!
//! A file is written under a temporary name in `tmp/`, synced, and then linked to its name, which fails if the name
//! exists. So a name never refers to an incomplete file, and the first of several workers wins. The file system must
//! support hard links. The temporary files of killed workers are removed later.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::{
    FOLDERS, Files, LocalFile, Publication, RECORD, damaged, is_regular, temporary_directory, written,
};
use crate::checkpoint::{open_regular, printable, read_capped};
use crate::{CancelToken, Error, Result, system};

const TEMPORARY: &str = "tmp";
const PIECE: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    temporary: PathBuf,
}

impl Directory {
    pub(super) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), temporary: path.join(TEMPORARY) }
    }

    fn existing(&self, key: &str) -> Result<Option<PathBuf>> {
        let path = self.path.join(key);
        Ok(is_regular(&path)?.then_some(path))
    }

    /// Fails if a file has more than `max_bytes`, which may be more than anyone wants to read.
    fn existing_within(&self, key: &str, max_bytes: u64) -> Result<Option<PathBuf>> {
        let Some(path) = self.existing(key)? else { return Ok(None) };
        let bytes = std::fs::metadata(&path).map_err(|e| Error::io("read", &path, e))?.len();
        match bytes <= max_bytes {
            true => Ok(Some(path)),
            false => Err(damaged(&path, format!("has {bytes} bytes; the limit is {max_bytes}"))),
        }
    }

    fn link(&self, file: &Path, target: &Path) -> Result<Publication> {
        let mut linked = std::fs::hard_link(file, target);
        if let (Err(error), Some(folder)) = (&linked, target.parent())
            && error.kind() == ErrorKind::NotFound
            && !folder.exists()
        {
            // Users delete the folder of results to compute them again.
            create_all(folder)?;
            linked = std::fs::hard_link(file, target);
        }
        match linked {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                is_regular(target)?;
                return match have_same_bytes(file, target)? {
                    true => Ok(Publication::Same),
                    false => Ok(Publication::Different),
                };
            }
            Err(e) => return Err(written(target, 0, e)),
        }
        sync_parent(target)?;
        Ok(Publication::Created)
    }

    fn entries(&self, directory: &Path) -> Result<Vec<String>> {
        let entries = match std::fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(Error::io("list", directory, e)),
        };
        let name = |entry: std::io::Result<std::fs::DirEntry>| {
            let entry = entry.map_err(|e| Error::io("list", directory, e))?;
            Ok(entry.file_name().to_string_lossy().into_owned())
        };
        entries.map(name).collect()
    }
}

impl Files for Directory {
    fn directory(&self) -> Option<&Path> {
        Some(&self.path)
    }

    fn check_unused(&self) -> Result<()> {
        let is_known = |name: &str| [RECORD, TEMPORARY].contains(&name) || FOLDERS.contains(&name);
        match self.entries(&self.path)?.iter().find(|name| !is_known(name)) {
            None => Ok(()),
            Some(name) => Err(Error::usage(
                format!("{} contains `{}`, which is not part of a job", self.path.display(), printable(name)),
                "choose a new directory",
            )),
        }
    }

    fn prepare(&self, folders: &[&str]) -> Result<()> {
        let path = &self.path;
        create_all(path)?;
        for directory in folders.iter().chain([&TEMPORARY]) {
            let directory = path.join(directory);
            std::fs::create_dir_all(&directory).map_err(|e| Error::io("create", &directory, e))?;
        }
        // An earlier call may have been killed before it synced what it created.
        sync(path)?;
        sync_parent(path)
    }

    /// A result gets its name by a hard link, which cannot lead to another file system.
    fn scratch(&self) -> (&Path, &'static str) {
        (&self.temporary, "")
    }

    fn exists(&self, key: &str) -> Result<bool> {
        Ok(self.existing(key)?.is_some())
    }

    fn bytes(&self, key: &str, max_bytes: u64) -> Result<Option<Vec<u8>>> {
        let Some(path) = self.existing(key)? else { return Ok(None) };
        let bytes = read_capped(&path, &path, max_bytes)?;
        bytes.map(Some).map_err(|reason| damaged(&path, reason))
    }

    fn small(&self, key: &str, max_bytes: u64) -> Result<Option<PathBuf>> {
        self.existing_within(key, max_bytes)
    }

    fn result(&self, key: &str, max_bytes: u64, _cancel: &CancelToken) -> Result<Option<LocalFile>> {
        Ok(self.existing_within(key, max_bytes)?.map(|path| LocalFile { path, _copy: None }))
    }

    fn outline(&self, key: &str) -> Result<Option<LocalFile>> {
        Ok(self.existing(key)?.map(|path| LocalFile { path, _copy: None }))
    }

    fn publish_bytes(&self, key: &str, bytes: &[u8]) -> Result<Publication> {
        let directory = temporary_directory(&self.temporary, "new")?;
        let path = directory.path().join("file");
        std::fs::write(&path, bytes).map_err(|e| written(&path, bytes.len() as u64, e))?;
        let file = File::open(&path).map_err(|e| Error::io("open", &path, e))?;
        file.sync_all().map_err(|e| written(&path, bytes.len() as u64, e))?;
        self.link(&path, &self.path.join(key))
    }

    fn publish(&self, file: &Path, key: &str, _cancel: &CancelToken) -> Result<Publication> {
        self.link(file, &self.path.join(key))
    }

    fn set_aside(&self, key: &str) -> Result<Option<String>> {
        let path = &self.path.join(key);
        for number in 0..1000 {
            let mut name = path.as_os_str().to_owned();
            name.push(format!(".bad-{number}"));
            let aside = PathBuf::from(name);
            let renamed = match system::rename_new(path, &aside) {
                Err(e) if system::is_unsupported(&e) => std::fs::rename(path, &aside),
                other => other,
            };
            match renamed {
                Ok(()) => {
                    sync_parent(path)?;
                    return Ok(aside.file_name().map(|name| name.to_string_lossy().into_owned()));
                }
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
                Err(e) => return Err(Error::io("rename", path, e)),
            }
        }
        Err(damaged(path, "is damaged, and so are 1000 earlier versions".into()))
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        self.entries(&self.path.join(folder))
    }

    fn temporary_files(&self) -> Result<usize> {
        Ok(self.entries(&self.temporary)?.len())
    }
}

/// Creates a directory and those above it, and syncs those that have a new entry.
fn create_all(directory: &Path) -> Result<()> {
    let is_absent = |path: &&Path| std::fs::symlink_metadata(path).is_err();
    let new: Vec<&Path> = directory.ancestors().take_while(is_absent).collect();
    std::fs::create_dir_all(directory).map_err(|e| Error::io("create", directory, e))?;
    new.into_iter().try_for_each(sync_parent)
}

/// Makes the name of a file or directory durable.
fn sync_parent(path: &Path) -> Result<()> {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => sync(Path::new(".")),
        Some(parent) => sync(parent),
        None => Ok(()),
    }
}

fn sync(directory: &Path) -> Result<()> {
    system::sync_directory(directory).map_err(|e| Error::io("sync", directory, e))
}

fn have_same_bytes(one: &Path, other: &Path) -> Result<bool> {
    let open = |path: &Path| open_regular(path, path);
    let (mut one_file, mut other_file) = (open(one)?, open(other)?);
    let len =
        |file: &File, path: &Path| file.metadata().map(|m| m.len()).map_err(|e| Error::io("read", path, e));
    if len(&one_file, one)? != len(&other_file, other)? {
        return Ok(false);
    }
    let mut pieces = [vec![0; PIECE], vec![0; PIECE]];
    loop {
        let [a, b] = &mut pieces;
        let read = fill(&mut one_file, a).map_err(|e| Error::io("read", one, e))?;
        if fill(&mut other_file, &mut b[..read]).map_err(|e| Error::io("read", other, e))? != read
            || a[..read] != b[..read]
        {
            return Ok(false);
        }
        if read < PIECE {
            return Ok(true);
        }
    }
}

fn fill(file: &mut File, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut at = 0;
    while at < buffer.len() {
        match file.read(&mut buffer[at..]) {
            Ok(0) => break,
            Ok(read) => at += read,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(at)
}
