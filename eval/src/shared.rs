//! The measurements of shards, in files that several processes share.
//!
//! Each batch of windows is a file of its own, because object stores cannot append to one. Its name has the shard and
//! the first window, and its contents are those of a [journal](crate::journal) with these windows only.

use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::Arc;

use quant_formats::{Error, Result};
use serde_json::Value;

use crate::journal::{Measured, head, lines, read};
use crate::{EvaluationText, Shard};

/// Where processes share the measurements of shards: a directory that all of them see, or an object store.
///
/// [`SharedFiles`](https://docs.rs/quant-core/latest/quant_core/units/struct.SharedFiles.html) of `quant-core`
/// implements it if this crate has the feature `decoders`.
pub trait ShardFiles: Debug + Send + Sync {
    /// The path or URL of a file, for messages; that of the directory if `name` is empty.
    fn shown(&self, name: &str) -> PathBuf;

    /// The names of all files, in any order. Other files are ignored.
    ///
    /// # Errors
    /// When they cannot be listed.
    fn names(&self) -> Result<Vec<String>>;

    /// Returns the contents of a file; `None` if it does not exist.
    ///
    /// # Errors
    /// When it cannot be read.
    fn read(&self, name: &str) -> Result<Option<Vec<u8>>>;

    /// Writes a file, which appears complete or not at all. Returns whether it has these contents now: `false` if it
    /// exists with different ones, which stay.
    ///
    /// # Errors
    /// When it cannot be written.
    fn publish(&self, name: &str, bytes: &[u8]) -> Result<bool>;
}

#[cfg(feature = "decoders")]
impl ShardFiles for quant_core::units::SharedFiles {
    fn shown(&self, name: &str) -> PathBuf {
        self.shown(name)
    }

    fn names(&self) -> Result<Vec<String>> {
        self.names()
    }

    fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.read(name)
    }

    fn publish(&self, name: &str, bytes: &[u8]) -> Result<bool> {
        self.publish(name, bytes)
    }
}

/// The files of a shard.
#[derive(Debug)]
pub(crate) struct Batches {
    files: Arc<dyn ShardFiles>,
    shard: Shard,
    /// Identifies the evaluation and the shard.
    identity: Value,
    /// The first window.
    first: usize,
    /// The number of scored tokens per window.
    scored: Vec<usize>,
}

impl Batches {
    /// The files of a shard in an evaluation that `identity` identifies.
    pub(crate) fn new(
        files: Arc<dyn ShardFiles>,
        shard: Shard,
        identity: &Value,
        text: &EvaluationText,
    ) -> Self {
        let windows = shard.windows(text);
        let identity = serde_json::json!({
            "evaluation": identity, "first_window": windows.start, "end_window": windows.end,
        });
        let first = windows.start;
        let scored = text.windows[windows].iter().map(crate::Window::scored).collect();
        Self { files, shard, identity, first, scored }
    }

    /// The name of the file that begins with the window `at` of the shard.
    fn name(&self, at: usize) -> String {
        format!("{}.{}.journal", self.shard.name(), self.first + at)
    }

    /// Reads the name of a file, and returns its shard.
    pub(crate) fn shard_of(name: &str) -> Option<Shard> {
        let (shard, first) = name.strip_suffix(".journal")?.rsplit_once('.')?;
        first.parse::<usize>().ok()?;
        Shard::named(shard)
    }

    fn head(&self, at: usize) -> Value {
        let mut identity = self.identity.clone();
        identity["batch"] = (self.first + at).into();
        head(&identity)
    }

    /// Reads the measurements that exist, from the first window on.
    ///
    /// # Errors
    /// [`Error::Usage`] if a file is damaged or belongs to a different evaluation; when a file cannot be read.
    pub(crate) fn read<T: Measured>(&self) -> Result<Vec<Vec<T>>> {
        let mut known = Vec::new();
        while known.len() < self.scored.len()
            && let Some(windows) = self.read_at(known.len())?
        {
            known.extend(windows);
        }
        Ok(known)
    }

    /// Whether all windows are measured.
    pub(crate) fn is_whole<T>(&self, known: &[Vec<T>]) -> bool {
        known.len() == self.scored.len()
    }

    fn read_at<T: Measured>(&self, at: usize) -> Result<Option<Vec<Vec<T>>>> {
        let name = self.name(at);
        let Some(bytes) = self.files.read(&name)? else { return Ok(None) };
        let path = self.files.shown(&name);
        let (windows, end) = read(&path, &bytes[..], &self.head(at), &self.scored[at..])?;
        match windows.is_empty() || end != bytes.len() as u64 {
            true => Err(crate::journal::other(&path, "damaged: it is incomplete")),
            false => Ok(Some(windows)),
        }
    }

    /// Writes the measurements of the windows from `at` on. Another process may have written them already.
    ///
    /// # Errors
    /// [`Error::InputFile`] if it has measured something else; [`Error::Usage`] if the file belongs to a different
    /// evaluation; when the file cannot be written.
    pub(crate) fn publish<T: Measured>(&self, at: usize, windows: &[Vec<T>]) -> Result<()> {
        let (name, contents) = (self.name(at), format!("{}\n{}", self.head(at), lines(0, windows)?));
        if self.files.publish(&name, contents.as_bytes())? {
            return Ok(());
        }
        self.read_at::<T>(at)?;
        Err(Error::InputFile {
            path: self.files.shown(&name),
            line: None,
            reason: "another machine has measured these windows, with a different result: one of the two computes wrong \
                results"
                .into(),
            remedy: "measure this ‹shard› on a third machine in another place for ‹shards›, and remove the files of the \
                wrong machine"
                .into(),
        })
    }
}
