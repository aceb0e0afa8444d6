//! The job directory next to the target, in which a run prepares it.
//!
//! ```text
//! OUT.job/lock            held while a run writes; the system releases it when the process ends
//!        /job.json        the request: a run that resumes must have the same one
//!        /journal.jsonl   completed tensors
//!        /out/            the future OUT
//!        /states.safetensors
//!                         hidden states before the next block, so that a resumed run need not recompute them
//!        /previous/       the old OUT, between two renames, if the file system
//!                         cannot exchange directories
//! ```

use std::ffi::OsStr;
use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::file_system::{FileSystem, failure, remove_if_present, replace_file};
use super::input_file::read_capped;
use super::names::printable;
use crate::wording::parser_message;
use crate::{Error, Result, system};

const LOCK: &str = "lock";
const RECORD: &str = "job.json";
const JOURNAL: &str = "journal.jsonl";
const OUT: &str = "out";
const PREVIOUS: &str = "previous";
const STATES: &str = "states.safetensors";
const MAX_RECORD_BYTES: u64 = 256 << 20;
const LOCK_BYTES: u64 = 32;
/// Entries of a job directory except the lock, in the order of removal. The record is first: without it, a job is never
/// resumed.
const CONTENTS: [&str; 8] =
    [RECORD, "job.json.new", JOURNAL, "journal.jsonl.new", STATES, "states.safetensors.new", OUT, PREVIOUS];

/// `OUT` → `OUT.job`.
///
/// # Errors
/// [`Error::Usage`] when the target has no name, such as `/`.
pub(crate) fn job_path(target: &Path) -> Result<PathBuf> {
    let Some(name) = target.file_name() else {
        return Err(Error::usage(
            format!("{} cannot be the output: the path has no file name", target.display()),
            "give the path of a new directory",
        ));
    };
    let mut name = name.to_owned();
    name.push(".job");
    Ok(target.with_file_name(name))
}

/// Fails if a target is inside a job directory, whose contents are moved or removed.
///
/// # Errors
/// [`Error::Usage`] in that case.
pub(crate) fn refuse_within_job(target: &Path) -> Result<()> {
    let is_job = |path: &&Path| {
        path.extension() == Some(OsStr::new("job")) && is_lock(&path.join(LOCK)).unwrap_or(false)
    };
    match target.ancestors().skip(1).find(is_job) {
        Some(job) => Err(Error::usage(
            format!(
                "{} is inside {}, which holds another run's unfinished output",
                target.display(),
                job.display()
            ),
            "choose an output outside that directory",
        )),
        None => Ok(()),
    }
}

/// Whether a job directory has the record of a run.
pub(crate) fn is_resumable(job: &Path) -> bool {
    is_lock(&job.join(LOCK)).unwrap_or(false) && job.join(RECORD).is_file()
}

pub(crate) fn parent_of(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

/// A job directory that this run has locked.
#[derive(Debug)]
pub(crate) struct Job {
    target: PathBuf,
    path: PathBuf,
    _lock: File,
}

impl Job {
    /// Creates the job directory of a target, or takes over an abandoned one, and restores an old target after a crash.
    ///
    /// # Errors
    /// [`Error::Locked`] when another run uses it; [`Error::Usage`] when something else has its name.
    pub(crate) fn acquire(fs: &dyn FileSystem, target: &Path) -> Result<Self> {
        let path = job_path(target)?;
        // Another attempt is needed only if another run removed the directory in the meantime.
        for _ in 0..16 {
            create_or_accept(fs, &path)?;
            let lock_path = path.join(LOCK);
            let lock = match fs.open_lock(&lock_path) {
                Ok(lock) => lock,
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                Err(e) => return Err(failure(fs, "create", &lock_path, 0, e)),
            };
            match lock.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::Locked { path, holder: holder(&lock) });
                }
                Err(TryLockError::Error(e)) => return Err(Error::io("lock", lock_path, e)),
            }
            if !is_same_file(&lock, &lock_path) {
                continue;
            }
            // Errors are ignored, because the process number only informs other processes.
            let _ = lock.set_len(0).and_then(|()| {
                system::write_all_at(&lock, format!("{}\n", std::process::id()).as_bytes(), 0)
            });
            let job = Self { target: target.to_owned(), path, _lock: lock };
            job.restore_previous(fs)?;
            return Ok(job);
        }
        Err(Error::Locked { path, holder: "a run that is finishing".into() })
    }

    pub(crate) fn target(&self) -> &Path {
        &self.target
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The directory or file that will become the target.
    pub(crate) fn out(&self) -> PathBuf {
        self.path.join(OUT)
    }

    pub(crate) fn journal(&self) -> PathBuf {
        self.path.join(JOURNAL)
    }

    pub(crate) fn states(&self) -> PathBuf {
        self.path.join(STATES)
    }

    /// The path of the old target between the two renames.
    pub(crate) fn previous(&self) -> PathBuf {
        self.path.join(PREVIOUS)
    }

    /// Returns the job's request, if the job can be resumed, or how its record is damaged.
    pub(crate) fn read_record(&self) -> Result<std::result::Result<Option<Value>, String>> {
        let path = self.path.join(RECORD);
        let damaged = |reason: String| Ok(Err(format!("{} is damaged: {reason}", path.display())));
        match path.symlink_metadata() {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Ok(None)),
            // Reading a pipe would block.
            Ok(metadata) if !metadata.is_file() => return damaged("it is not a regular file".into()),
            _ => {}
        }
        let text = match read_capped(&path, &path, MAX_RECORD_BYTES)? {
            Ok(text) => text,
            Err(reason) => return damaged(format!("it {reason}")),
        };
        match serde_json::from_slice(&text) {
            Ok(record @ Value::Object(_)) => match self.misplaced()? {
                None => Ok(Ok(Some(record))),
                Some(reason) => Ok(Err(reason)),
            },
            Ok(_) => damaged("it is not an object".into()),
            Err(e) => damaged(parser_message(&e.to_string(), "an object")),
        }
    }

    /// Names an entry of the wrong kind. A link would lead the run to files elsewhere.
    fn misplaced(&self) -> Result<Option<String>> {
        for (path, is_directory) in [(self.out(), true), (self.journal(), false)] {
            let kind = match path.symlink_metadata() {
                Ok(metadata) => metadata.file_type(),
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                Err(e) => return Err(Error::io("open", path, e)),
            };
            if !(if is_directory { kind.is_dir() } else { kind.is_file() }) {
                let what = if is_directory { "directory" } else { "regular file" };
                return Ok(Some(format!("{} is damaged: it is not a {what}", path.display())));
            }
        }
        Ok(None)
    }

    /// Records the job's request; from here on it can be resumed.
    pub(crate) fn write_record(&self, fs: &dyn FileSystem, record: &Value) -> Result<()> {
        let mut text = format!("{record:#}").into_bytes();
        text.push(b'\n');
        replace_file(fs, &self.path.join(RECORD), &text)?;
        fs.sync_dir(parent_of(&self.path)).map_err(|e| failure(fs, "sync", parent_of(&self.path), 0, e))
    }

    /// Empties the job directory, except for the lock.
    pub(crate) fn clear(&self, fs: &dyn FileSystem) -> Result<()> {
        CONTENTS.iter().try_for_each(|name| remove_if_present(fs, &self.path.join(name)))
    }

    /// Removes the job directory.
    pub(crate) fn remove(&self, fs: &dyn FileSystem) -> Result<()> {
        self.clear(fs)?;
        let lock = self.path.join(LOCK);
        fs.remove_file(&lock).map_err(|e| Error::io("remove", lock, e))?;
        match fs.remove_dir(&self.path) {
            // Another run may have started in it as soon as the lock was removed.
            Err(e) if e.kind() != ErrorKind::DirectoryNotEmpty => Err(Error::io("remove", &self.path, e)),
            _ => Ok(()),
        }
    }

    /// Restores the old target after a crash between the two renames of a replacement.
    fn restore_previous(&self, fs: &dyn FileSystem) -> Result<()> {
        let previous = self.previous();
        if previous.symlink_metadata().is_err() {
            return Ok(());
        }
        if self.target.symlink_metadata().is_ok() {
            // The replacement had succeeded; only the cleanup remained.
            return remove_if_present(fs, &previous);
        }
        fs.rename_new(&previous, &self.target).map_err(|e| Error::io("restore", &self.target, e))?;
        fs.sync_dir(parent_of(&self.target)).map_err(|e| Error::io("sync", parent_of(&self.target), e))
    }
}

fn create_or_accept(fs: &dyn FileSystem, path: &Path) -> Result<()> {
    match fs.create_dir(path) {
        Ok(()) => return Ok(()),
        Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
        Err(e) => return Err(failure(fs, "create", path, 0, e)),
    }
    // A user's own directory of that name must not be removed.
    let foreign = match path.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() => foreign_entry(path),
        Ok(_) => Ok(Some("is not a directory".to_owned())),
        Err(e) => Err(e),
    };
    match foreign {
        Ok(None) => Ok(()),
        // The caller retries.
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        Err(e) => Err(Error::io("open", path, e)),
        Ok(Some(reason)) => Err(Error::usage(
            format!("the output would be prepared in {}, which {reason}", path.display()),
            "move or remove it, or choose a different output",
        )),
    }
}

/// Returns why a directory is not a job's: it has an entry that jobs do not have, or entries without the lock, which is
/// created first and removed last.
fn foreign_entry(path: &Path) -> io::Result<Option<String>> {
    let (mut locked, mut unlocked) = (false, None);
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        let name = entry.file_name();
        let holds = || format!("contains `{}`", printable(&name.to_string_lossy()));
        if name == OsStr::new(LOCK) {
            locked = is_lock(&entry.path())?;
            if !locked {
                return Ok(Some(format!("{}, which is not the lock file of a run", holds())));
            }
        } else if CONTENTS.iter().any(|c| name == OsStr::new(c)) {
            unlocked = Some(holds());
        } else {
            return Ok(Some(holds()));
        }
    }
    Ok(unlocked.filter(|_| !locked).map(|holds| format!("{holds}, but not the lock file of a run")))
}

/// Whether a file is empty or contains a process number, as a lock does. The number is not synced, so after a loss of
/// power, it may be zeros.
fn is_lock(path: &Path) -> io::Result<bool> {
    let metadata = path.symlink_metadata()?;
    if !metadata.is_file() || metadata.len() > LOCK_BYTES {
        return Ok(false);
    }
    let bytes = std::fs::read(path)?;
    Ok(bytes.iter().all(|byte| *byte == 0) || bytes.trim_ascii_end().iter().all(u8::is_ascii_digit))
}

/// The process that holds a lock. It writes its number after taking the lock, so an empty file is read again.
fn holder(lock: &File) -> String {
    for _ in 0..20 {
        let mut text = [0; LOCK_BYTES as usize];
        let len = system::read_at(lock, &mut text, 0).unwrap_or(0);
        match std::str::from_utf8(&text[..len]).unwrap_or_default().trim() {
            "" => std::thread::sleep(std::time::Duration::from_millis(5)),
            pid if pid.bytes().all(|b| b.is_ascii_digit()) => return format!("process {pid}"),
            _ => break,
        }
    }
    "unknown".into()
}

/// Whether a path still refers to the file that was opened under it.
fn is_same_file(file: &File, path: &Path) -> bool {
    match (file.metadata(), path.symlink_metadata()) {
        (Ok(open), Ok(named)) => system::identity(&open) == system::identity(&named),
        _ => false,
    }
}
