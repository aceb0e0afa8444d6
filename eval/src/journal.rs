//! The measurements of an evaluation, written to a file while it runs, so that an interrupted run can resume.
//!
//! The first line identifies the evaluation. Each further line contains one window's results after a checksum, and is
//! written when a batch of windows is done. Numbers are read back bit-identical.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use quant_formats::digest::sha256_hex;
use quant_formats::{Error, Result, system};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::shared::Batches;

const SCHEMA: &str = "quant-eval-journal/3";
/// Longer lines count as incomplete.
const MAX_LINE_BYTES: u64 = 1 << 30;
/// The first line is shorter, so that a huge file of something else is not read.
const MAX_HEAD_BYTES: u64 = 1 << 20;

/// The measurement of one position.
pub trait Measured: Serialize + DeserializeOwned {
    /// Whether the value is plausible.
    fn is_valid(&self) -> bool;
}

impl Measured for f64 {
    /// A negative log-likelihood: at least zero, except for rounding.
    fn is_valid(&self) -> bool {
        self.is_finite() && *self >= -1e-6
    }
}

/// The windows that an evaluation has measured.
#[derive(Debug)]
pub struct Journal<T> {
    known: Vec<Vec<T>>,
    written: usize,
    place: Place,
}

/// Where a journal records measurements.
#[derive(Debug)]
enum Place {
    Nowhere,
    File(File, PathBuf),
    Shared(Batches),
}

impl<T: Measured> Journal<T> {
    /// Returns a journal that records nothing.
    pub fn none() -> Self {
        Self { known: Vec::new(), written: 0, place: Place::Nowhere }
    }

    /// Opens or creates a journal. `identity` identifies the evaluation; `windows` holds the number of scored tokens
    /// per window.
    ///
    /// # Errors
    /// [`Error::Usage`] when the file is damaged, not a journal, or the journal of a different evaluation;
    /// [`Error::Locked`] when another process uses it; [`Error::Io`] when it cannot be read or written.
    pub fn open(path: &Path, identity: &Value, windows: &[usize]) -> Result<Self> {
        let head = head(identity);
        let fault = |e| Error::io("write", path, e);
        // Opening a pipe would block, and a device would discard the data.
        if std::fs::metadata(path).is_ok_and(|m| !m.is_file()) {
            return Err(other(path, "not a regular file"));
        }
        let mut file = OpenOptions::new().read(true).create(true).append(true).open(path).map_err(fault)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Error::Locked {
                    path: path.to_owned(),
                    holder: "an evaluation with the same journal".into(),
                });
            }
            Err(TryLockError::Error(e)) => return Err(fault(e)),
        }
        let (known, end) = read(path, &file, &head, windows)?;
        // Remove an incomplete line or batch of an interrupted run.
        file.set_len(end).map_err(fault)?;
        if end == 0 {
            let written = file.write_all(format!("{head}\n").as_bytes()).and_then(|()| file.sync_all());
            if let Err(error) = written {
                // Half a line would be refused as a file of a different kind.
                let _ = file.set_len(0);
                return Err(fault(error));
            }
            sync_parent(path)?;
        }
        Ok(Self { written: known.len(), known, place: Place::File(file, path.to_owned()) })
    }

    /// Returns the journal of a shard, which records each batch of windows in a file of its own.
    pub(crate) fn shared(batches: Batches) -> Result<Self> {
        let known = batches.read()?;
        Ok(Self { written: known.len(), known, place: Place::Shared(batches) })
    }

    /// Takes the results of the windows that an earlier run measured, in order.
    pub fn take(&mut self) -> Vec<Vec<T>> {
        std::mem::take(&mut self.known)
    }

    /// Returns the number of windows that an earlier run measured and that were not [taken](Self::take) yet.
    pub fn windows(&self) -> usize {
        self.known.len()
    }

    /// Appends the results of a batch of windows, and syncs them, so that a power loss takes at most the last batch.
    pub(crate) fn keep(&mut self, windows: &[Vec<T>]) -> Result<()> {
        match &mut self.place {
            Place::Nowhere => {}
            Place::File(file, path) => {
                let lines = lines(self.written, windows)?;
                let written = file.write_all(lines.as_bytes()).and_then(|()| file.sync_data());
                written.map_err(|e| Error::io("write", path.as_path(), e))?;
            }
            Place::Shared(batches) => batches.publish(self.written, windows)?,
        }
        self.written += windows.len();
        Ok(())
    }

    /// Returns the path of the file, which the caller removes once the results are stored elsewhere; `None` for the
    /// journals of shards.
    pub fn finish(self) -> Option<PathBuf> {
        match self.place {
            Place::File(_, path) => Some(path),
            Place::Nowhere | Place::Shared(_) => None,
        }
    }
}

/// Returns the lines of a batch, whose first window has the number `first` in the file.
pub(crate) fn lines<T: Measured>(first: usize, windows: &[Vec<T>]) -> Result<String> {
    let mut lines = String::new();
    for (i, window) in windows.iter().enumerate() {
        let last = i + 1 == windows.len();
        let line = serde_json::to_string(&(last, window)).map_err(|e| Error::Internal(e.to_string()))?;
        lines.push_str(&format!("{} {line}\n", checksum(first + i, &line)));
    }
    Ok(lines)
}

pub(crate) fn head(identity: &Value) -> Value {
    serde_json::json!({ "schema": SCHEMA, "identity": identity })
}

/// Makes the name of a file durable.
pub(crate) fn sync_parent(path: &Path) -> Result<()> {
    let directory = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    system::sync_directory(directory).map_err(|e| Error::io("sync", directory, e))
}

/// Returns the checksum that begins a line. It covers the window's index, so that missing and duplicated lines are
/// detected.
fn checksum(window: usize, line: &str) -> String {
    let mut digest = sha256_hex(format!("{window} {line}"));
    digest.truncate(16);
    digest
}

pub(crate) fn other(path: &Path, what: &str) -> Error {
    Error::usage(
        format!("{} is {what}", path.display()),
        "remove the file, or set ‹journal› or ‹shards› to a different place; an evaluation can be continued only with \
         the options that it was begun with",
    )
}

/// Whether a file without a complete line can be a journal whose first line a killed process was writing. After a loss
/// of power, what was not synced may be zeros.
fn is_begun(line: &[u8], head: &Value) -> bool {
    let written = line.len() - line.iter().rev().take_while(|byte| **byte == 0).count();
    let begins = format!("{{\"schema\":{}", head["schema"]);
    line[..written].iter().zip(begins.as_bytes()).all(|(found, expected)| found == expected)
}

/// Reads the windows of complete batches. Also returns the offset where they end.
pub(crate) fn read<T: Measured>(
    path: &Path,
    file: impl Read,
    head: &Value,
    windows: &[usize],
) -> Result<(Vec<Vec<T>>, u64)> {
    let mut reader = BufReader::new(file);
    let other = |what: &str| other(path, what);
    let (mut known, mut whole) = (Vec::new(), 0);
    let (mut at, mut end) = (0, 0);
    let mut line = Vec::new();
    loop {
        line.clear();
        let most = if at == 0 { MAX_HEAD_BYTES } else { MAX_LINE_BYTES };
        let mut piece = Read::take(&mut reader, most);
        let read = piece.read_until(b'\n', &mut line).map_err(|e| Error::io("read", path, e))?;
        if line.last() != Some(&b'\n') {
            if at == 0 && !is_begun(&line, head) {
                return Err(other("not an evaluation journal"));
            }
            break;
        }
        if at == 0 {
            let Ok(found) = serde_json::from_slice::<Value>(&line) else {
                return Err(other("not an evaluation journal"));
            };
            if found.get("schema") != head.get("schema") {
                return Err(other("not an evaluation journal of this version"));
            }
            if &found != head {
                return Err(other("the journal of a different evaluation"));
            }
            end = read as u64;
        } else {
            let damaged = || other("damaged: a line is not a valid window record");
            let text = std::str::from_utf8(&line).map_err(|_| damaged())?.trim_end();
            let (sum, text) = text.split_once(' ').ok_or_else(damaged)?;
            if sum != checksum(known.len(), text) {
                return Err(damaged());
            }
            let (last, window): (bool, Vec<T>) = serde_json::from_str(text).map_err(|_| damaged())?;
            if windows.get(known.len()) != Some(&window.len()) || !window.iter().all(T::is_valid) {
                return Err(damaged());
            }
            known.push(window);
            if last {
                (whole, end) = (known.len(), at + read as u64);
            }
        }
        at += read as u64;
    }
    known.truncate(whole);
    Ok((known, end))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn whole_batches_are_known_again_to_the_bit() {
        let dir = std::env::temp_dir().join(format!("quant-journal-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("j");
        let _ = std::fs::remove_file(&path);
        let identity = json!({ "model": "a" });
        let counts = [2, 2, 1, 2];
        let open = |identity: &Value| Journal::<f64>::open(&path, identity, &counts);
        let mut journal = open(&identity).unwrap();
        assert_eq!(journal.windows(), 0);
        let batch = vec![vec![0.1, 1.0 / 3.0], vec![1e-300, f64::MAX]];
        journal.keep(&batch).unwrap();
        drop(journal);
        let text = std::fs::read_to_string(&path).unwrap();

        let third = "[false,[1.0]]";
        std::fs::write(&path, format!("{text}{} {third}\n0 [true,[2.0", checksum(2, third))).unwrap();
        let mut journal = open(&identity).unwrap();
        assert_eq!(journal.take(), batch);
        journal.keep(&[vec![5.0]]).unwrap();
        drop(journal);
        let mut journal = open(&identity).unwrap();
        assert_eq!(journal.take()[2], [5.0]);
        assert!(matches!(open(&identity), Err(Error::Locked { .. })));
        assert_eq!(journal.finish(), Some(path.clone()));
        assert!(open(&json!({ "model": "b" })).unwrap_err().to_string().contains("a different evaluation"));

        let long = "[true,[1.0,2.0]]";
        let lines: Vec<&str> = text.split_inclusive('\n').collect();
        let flipped = text.replacen("0.1", "0.3", 1);
        for broken in [
            "{}\n",
            "no json\n",
            "half",
            r#"{"schema": "quant-eval-journal/3"#,
            r#"{"schema":"quant-gate/1","#,
            &format!("{text}{} {long}\n", checksum(2, long)),
            &format!("{text}{long}\n"),
            &flipped,
            &[lines[0], lines[2]].concat(),
            &[lines[0], lines[1], lines[1]].concat(),
        ] {
            assert_ne!(broken, text);
            std::fs::write(&path, broken).unwrap();
            assert!(matches!(open(&identity), Err(Error::Usage { .. })), "{broken}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), broken);
        }
        // A killed process or a loss of power cut the first line.
        let cut = (0..lines[0].len()).map(|at| lines[0][..at].to_owned());
        let zeros = (0..lines[0].len()).map(|at| format!("{}\0\0\0", &lines[0][..at]));
        for lost in cut.chain(zeros) {
            std::fs::write(&path, &lost).unwrap();
            assert_eq!(open(&identity).unwrap().windows(), 0, "{lost}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), lines[0]);
        }
        let zeros = [&text, "\0\0\0\0"].concat();
        std::fs::write(&path, zeros).unwrap();
        assert_eq!(open(&identity).unwrap().take(), batch);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
