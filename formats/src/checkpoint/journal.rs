//! The journal of completed tensors, for a run that resumes after an interruption.
//!
//! It has one line per tensor, appended after the tensor's bytes are durable. On resuming, these tensors are read back
//! and hashed. The journal also holds records of the caller. Each line ends with a hash of itself, so a torn or damaged
//! line only costs the work that it stands for.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::file_system::{FileSystem, StagedFile, failure, replace_file};
use super::input_file::open_regular;
use crate::digest::{Digest256, from_hex, hex, sha256_hex};
use crate::{Error, Result};

const PIECE: usize = 1 << 20;
/// The last field of a line, up to its value.
const CHECK: &[u8] = b",\"check\":\"";
/// The number of digits of the hash of a line.
const CHECK_DIGITS: usize = 16;

pub(crate) struct WriteJournal {
    path: PathBuf,
    file: Box<dyn StagedFile>,
    /// A line that was written incompletely is overwritten by the next attempt.
    len: u64,
}

/// The contents of a journal.
#[derive(Debug, Default)]
pub(crate) struct Entries {
    /// Completed tensors, with the BLAKE3 of their bytes.
    pub(crate) tensors: BTreeMap<String, Digest256>,
    /// Records by key, as JSON text, which takes a tenth of the memory of parsed values.
    pub(crate) records: BTreeMap<String, Box<str>>,
}

impl Entries {
    pub(crate) fn is_empty(&self) -> bool {
        self.tensors.is_empty() && self.records.is_empty()
    }

    /// Stands for a journal that cannot be read: it may have had entries.
    pub(crate) fn unknown() -> Self {
        Self { records: BTreeMap::from([(String::new(), "null".into())]), ..Self::default() }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Tensor { tensor: String, blake3: String },
    Record { record: String, value: Value },
}

impl WriteJournal {
    /// Starts a journal with these entries, atomically replacing an earlier one.
    pub(crate) fn start(fs: &dyn FileSystem, path: &Path, entries: &Entries) -> Result<Self> {
        let mut text = Vec::new();
        let records = entries.records.iter().map(|(key, record)| (key.as_str(), &**record));
        let tensors = entries.tensors.iter().map(|(name, hash)| (name.as_str(), *hash));
        each_line(records, tensors, |line| {
            text.extend_from_slice(line);
            Ok(())
        })?;
        let file = replace_file(fs, path, &text)?;
        Ok(Self { path: path.to_owned(), file, len: text.len() as u64 })
    }

    /// Reads a journal; a missing one is empty. Damaged lines are skipped, and the last line for a tensor or record
    /// counts. A record whose last value is null is removed.
    pub(crate) fn load(path: &Path) -> Result<Entries> {
        let fail = |e| Error::io("read", path, e);
        let mut reader = match path.symlink_metadata() {
            Ok(_) => BufReader::new(open_regular(path, path)?),
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Entries::default()),
            Err(e) => return Err(fail(e)),
        };
        let mut entries = Entries::default();
        let mut line = Vec::new();
        loop {
            line.clear();
            if reader.read_until(b'\n', &mut line).map_err(fail)? == 0 {
                return Ok(entries);
            }
            // The line may be incomplete, even if it parses.
            let Some(line) = line.strip_suffix(b"\n").filter(|line| is_intact(line)) else { continue };
            match serde_json::from_slice(line) {
                Ok(Line::Tensor { tensor, blake3 }) => {
                    if let Some(hash) = from_hex(&blake3) {
                        entries.tensors.insert(tensor, hash);
                    }
                }
                Ok(Line::Record { record, value: Value::Null }) => {
                    entries.records.remove(&record);
                }
                Ok(Line::Record { record, value }) => {
                    entries.records.insert(record, value.to_string().into());
                }
                Err(_) => {}
            }
        }
    }

    /// Appends entries and makes them durable.
    pub(crate) fn append<'e>(
        &mut self,
        fs: &dyn FileSystem,
        records: impl Iterator<Item = (&'e str, &'e str)>,
        tensors: impl Iterator<Item = (&'e str, Digest256)>,
    ) -> Result<()> {
        let (mut piece, mut at) = (Vec::new(), self.len);
        let write = |piece: &mut Vec<u8>, at: &mut u64| {
            let fail = |e| failure(fs, "write", &self.path, piece.len() as u64, e);
            self.file.write_at(*at, piece).map_err(fail)?;
            *at += piece.len() as u64;
            piece.clear();
            Ok(())
        };
        each_line(records, tensors, |line| {
            piece.extend_from_slice(line);
            if piece.len() < PIECE { Ok(()) } else { write(&mut piece, &mut at) }
        })?;
        if !piece.is_empty() {
            write(&mut piece, &mut at)?;
        }
        if at > self.len {
            self.file.sync_data().map_err(|e| failure(fs, "sync", &self.path, at - self.len, e))?;
            self.len = at;
        }
        Ok(())
    }
}

/// Formats entries as lines. Records come first, so that they are complete if their tensor's line is.
fn each_line<'e>(
    records: impl Iterator<Item = (&'e str, &'e str)>,
    tensors: impl Iterator<Item = (&'e str, Digest256)>,
    mut take: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let quoted =
        |text: &str| serde_json::to_string(text).map_err(|e| Error::Internal(format!("journal: {e}")));
    let mut line = |mut text: String| {
        let check = check(text.as_bytes());
        text.push_str(&format!(",\"check\":\"{check}\"}}\n"));
        take(text.as_bytes())
    };
    for (record, value) in records {
        line(format!("{{\"record\":{},\"value\":{value}", quoted(record)?))?;
    }
    for (tensor, hash) in tensors {
        line(format!("{{\"tensor\":{},\"blake3\":\"{}\"", quoted(tensor)?, hex(&hash)))?;
    }
    Ok(())
}

/// The first digits of the SHA-256 of a line before its check.
fn check(text: &[u8]) -> String {
    let mut digits = sha256_hex(text);
    digits.truncate(CHECK_DIGITS);
    digits
}

/// Whether a line without its end has the right check.
fn is_intact(line: &[u8]) -> bool {
    let digits = line.strip_suffix(b"\"}").and_then(|line| line.split_last_chunk::<CHECK_DIGITS>());
    let text = digits.and_then(|(head, digits)| Some((head.strip_suffix(CHECK)?, digits)));
    text.is_some_and(|(text, digits)| check(text).as_bytes() == digits)
}
