//! Values of a calibration batch, in memory or in a file.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use crate::{Error, Result, allocate};

const CHUNK_BYTES: usize = 1 << 20;

/// The storage for hidden states and samples of the calibration batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Residence {
    /// In memory.
    #[default]
    Memory,
    /// In files.
    Files {
        /// The approximate memory in bytes for the tokens that a round of a search compares.
        round_bytes: u64,
        /// Whether the experts of a block are read and processed one at a time, if the method allows it.
        experts_apart: bool,
    },
}

/// The location for values that do not fit into memory. Results do not depend on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spill {
    directory: PathBuf,
    round_bytes: u64,
    experts_apart: bool,
}

impl Spill {
    /// Keeps values in unnamed files in `directory`; the system removes them when the process ends. One round of a
    /// search uses about `round_bytes` bytes of memory for the tokens that it compares.
    pub fn new(directory: impl Into<PathBuf>, round_bytes: u64) -> Self {
        Self { directory: directory.into(), round_bytes, experts_apart: false }
    }

    /// Sets whether the experts of a block are processed one at a time, if the method allows it. Their weights are then
    /// read several times.
    #[must_use]
    pub fn with_experts_apart(mut self, experts_apart: bool) -> Self {
        self.experts_apart = experts_apart;
        self
    }

    /// Returns whether the experts of a block are processed one at a time, if the method allows it.
    pub fn experts_apart(&self) -> bool {
        self.experts_apart
    }

    /// Returns the memory in bytes for the tokens that one round of a search compares.
    pub fn round_bytes(&self) -> u64 {
        self.round_bytes
    }

    pub(crate) fn file(&self) -> Result<SpillFile> {
        let file = tempfile::tempfile_in(&self.directory)
            .map_err(|e| Error::io("create a file in", &self.directory, e))?;
        Ok(SpillFile { file: Mutex::new(file), directory: self.directory.clone() })
    }
}

#[derive(Debug)]
pub(crate) struct SpillFile {
    file: Mutex<File>,
    directory: PathBuf,
}

impl SpillFile {
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.at("read a file in", offset, |file| file.read_exact(bytes))
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.at("write a file in", offset, |file| file.write_all(bytes))
    }

    fn at(
        &self,
        action: &'static str,
        offset: u64,
        work: impl FnOnce(&mut File) -> io::Result<()>,
    ) -> Result<()> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let done = file.seek(SeekFrom::Start(offset)).and_then(|_| work(&mut file));
        done.map_err(|e| Error::io(action, &self.directory, e))
    }
}

/// A list of `f32` values of fixed length, in memory or in a file.
#[derive(Debug)]
pub struct BatchValues {
    len: usize,
    place: ValueStore,
}

#[derive(Debug)]
enum ValueStore {
    Memory(Vec<f32>),
    File(Spill, SpillFile),
}

impl From<Vec<f32>> for BatchValues {
    fn from(values: Vec<f32>) -> Self {
        Self { len: values.len(), place: ValueStore::Memory(values) }
    }
}

impl BatchValues {
    pub(crate) fn zeros(spill: Option<&Spill>, len: usize) -> Result<Self> {
        let place = match spill {
            Some(spill) => {
                let file = spill.file()?;
                if let Some(last) = len.checked_sub(1) {
                    // Parts of a file that were never written read as zeros.
                    file.write(4 * last as u64, &[0; 4])?;
                }
                ValueStore::File(spill.clone(), file)
            }
            None => ValueStore::Memory(allocate::zeros(len, "the values of the calibration batch")?),
        };
        Ok(Self { len, place })
    }

    pub(crate) fn zeros_like(&self, len: usize) -> Result<Self> {
        Self::zeros(self.spill(), len)
    }

    pub(crate) fn try_clone(&self) -> Result<Self> {
        let mut copy = self.zeros_like(self.len)?;
        for at in (0..self.len).step_by(CHUNK_BYTES) {
            let piece = self.read(at..(at + CHUNK_BYTES).min(self.len))?;
            copy.write(at, &piece)?;
        }
        Ok(copy)
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// `None` if these values are in memory.
    pub(crate) fn spill(&self) -> Option<&Spill> {
        match &self.place {
            ValueStore::Memory(_) => None,
            ValueStore::File(spill, _) => Some(spill),
        }
    }

    /// Returns the values in `range`.
    ///
    /// # Errors
    /// [`Error::Internal`] when the range is out of bounds; errors of files.
    pub fn read(&self, range: Range<usize>) -> Result<Cow<'_, [f32]>> {
        self.check(&range)?;
        match &self.place {
            ValueStore::Memory(values) => Ok(Cow::Borrowed(&values[range])),
            ValueStore::File(_, file) => {
                let mut values = vec![0.0; range.len()];
                let mut bytes = vec![0; CHUNK_BYTES.min(4 * range.len())];
                for (i, piece) in values.chunks_mut(CHUNK_BYTES / 4).enumerate() {
                    let bytes = &mut bytes[..4 * piece.len()];
                    file.read(4 * range.start as u64 + (i * CHUNK_BYTES) as u64, bytes)?;
                    for (value, bytes) in piece.iter_mut().zip(bytes.chunks_exact(4)) {
                        *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                    }
                }
                Ok(Cow::Owned(values))
            }
        }
    }

    /// Replaces values, beginning with the one at index `at`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write(&mut self, at: usize, values: &[f32]) -> Result<()> {
        self.check(&(at..at.saturating_add(values.len())))?;
        match &mut self.place {
            ValueStore::Memory(all) => all[at..at + values.len()].copy_from_slice(values),
            ValueStore::File(_, file) => {
                let mut bytes = Vec::with_capacity(CHUNK_BYTES.min(4 * values.len()));
                for (i, piece) in values.chunks(CHUNK_BYTES / 4).enumerate() {
                    bytes.clear();
                    bytes.extend(piece.iter().flat_map(|value| value.to_le_bytes()));
                    file.write(4 * at as u64 + (i * CHUNK_BYTES) as u64, &bytes)?;
                }
            }
        }
        Ok(())
    }

    /// Changes the rows, of `width` values each, of these tokens, which must be ascending. `change` gets a slice of
    /// rows and a function from a row's index to its token. The slice may contain rows of other tokens too.
    pub(crate) fn update_rows(
        &mut self,
        tokens: &[u32],
        width: usize,
        change: impl FnOnce(&mut [f32], &dyn Fn(usize) -> u32) -> Result<()>,
    ) -> Result<()> {
        let (Some(&first), Some(&last)) = (tokens.first(), tokens.last()) else { return Ok(()) };
        let rows = |first: u32, count: usize| first as usize * width..(first as usize + count) * width;
        let all = rows(first, (last - first) as usize + 1);
        self.check(&all)?;
        if let ValueStore::Memory(values) = &mut self.place {
            return change(&mut values[all], &|row| first + row as u32);
        }
        let runs = || tokens.chunk_by(|a, b| a.checked_add(1) == Some(*b));
        let mut values = allocate::room(tokens.len() * width, "the values of some tokens")?;
        for run in runs() {
            values.extend_from_slice(&self.read(rows(run[0], run.len()))?);
        }
        change(&mut values, &|row| tokens[row])?;
        let mut rest = &values[..];
        for run in runs() {
            let (changed, others) = rest.split_at(run.len() * width);
            self.write(run[0] as usize * width, changed)?;
            rest = others;
        }
        Ok(())
    }

    fn check(&self, range: &Range<usize>) -> Result<()> {
        match range.start <= range.end && range.end <= self.len {
            true => Ok(()),
            false => {
                Err(Error::Internal(format!("values {range:?} are out of range for {} values", self.len)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_holds_what_memory_holds() {
        let directory = tempfile::tempdir().unwrap();
        let spill = Spill::new(directory.path(), 1 << 20);
        let len = CHUNK_BYTES / 4 * 2 + 3;
        let (mut memory, mut file) =
            (BatchValues::zeros(None, len).unwrap(), BatchValues::zeros(Some(&spill), len).unwrap());
        let values: Vec<f32> = (0..len).map(|i| i as f32 - 0.5).collect();
        for values_of in [&mut memory, &mut file] {
            assert!(values_of.read(0..len).unwrap().iter().all(|v| *v == 0.0));
            values_of.write(5, &values[5..]).unwrap();
            values_of.write(0, &[f32::NAN, -0.0, f32::MIN_POSITIVE, f32::INFINITY]).unwrap();
        }
        let bits = |values: &BatchValues, range: Range<usize>| -> Vec<u32> {
            values.read(range).unwrap().iter().map(|v| v.to_bits()).collect()
        };
        let copy = file.try_clone().unwrap();
        for range in [0..len, 0..0, 1..7, CHUNK_BYTES / 4 - 1..CHUNK_BYTES / 4 + 1, len - 1..len] {
            assert_eq!(bits(&memory, range.clone()), bits(&file, range.clone()));
            assert_eq!(bits(&memory, range.clone()), bits(&copy, range));
        }
        assert!(copy.spill().is_some() && memory.spill().is_none());
        // The file has no name in the directory.
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn rows_of_some_tokens_change() {
        let directory = tempfile::tempdir().unwrap();
        let spill = Spill::new(directory.path(), 0);
        let tokens = [1, 2, 5];
        for mut values in
            [BatchValues::zeros(None, 14).unwrap(), BatchValues::zeros(Some(&spill), 14).unwrap()]
        {
            let change = |rows: &mut [f32], token: &dyn Fn(usize) -> u32| {
                for (i, row) in rows.chunks_mut(2).enumerate().filter(|(i, _)| tokens.contains(&token(*i))) {
                    row.fill(token(i) as f32);
                }
                Ok(())
            };
            values.update_rows(&tokens, 2, change).unwrap();
            let expected = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 5.0, 5.0, 0.0, 0.0];
            assert_eq!(values.read(0..14).unwrap()[..], expected);
            assert!(values.update_rows(&[6, 7], 2, |_, _| Ok(())).is_err());
        }
    }

    #[test]
    fn values_that_are_not_there_are_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let spill = Spill::new(directory.path(), 0);
        for mut values in [BatchValues::from(vec![1.0; 4]), BatchValues::zeros(Some(&spill), 4).unwrap()] {
            assert!(values.read(3..5).is_err() && values.write(4, &[1.0]).is_err());
            assert!(values.read(4..4).unwrap().is_empty());
        }
        let gone = Spill::new(directory.path().join("gone"), 0);
        assert!(matches!(BatchValues::zeros(Some(&gone), 4), Err(Error::Io { .. })));
    }
}
