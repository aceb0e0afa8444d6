//! The two file formats of importance matrices.

use std::io::ErrorKind;
use std::path::Path;

use super::{Importance, ImportanceEntry};
use crate::checkpoint::{printable, read_capped};
use crate::gguf::file::{GgufFile, MAGIC, Value, write_file};
use crate::gguf::is_gguf;
use crate::gguf::metadata::strings;
use crate::{Error, Result};

const MAX_FILE_BYTES: u64 = 4 << 30;
const DATASETS: &str = "imatrix.datasets";
const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";
const MAX_VALUES: usize = 1 << 26;

impl Importance {
    /// Whether a file is an importance matrix in either format.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be read.
    pub fn is_matrix(path: &Path) -> Result<bool> {
        if is_gguf(path) {
            return match GgufFile::open(path) {
                Ok(file) => Ok(file.header().get(DATASETS).is_some()),
                Err(Error::InputFile { .. }) => Ok(false),
                Err(other) => Err(other),
            };
        }
        let bytes = read_capped(path, path, MAX_FILE_BYTES)?;
        Ok(bytes.is_ok_and(|bytes| Self::from_dat(&bytes).is_ok_and(|found| !found.entries.is_empty())))
    }

    /// Reads a file of either format.
    ///
    /// # Errors
    /// [`Error::InputFile`] if it does not exist, is a directory, is too large, has neither format, is damaged, or contains negative or
    /// non-finite values; [`Error::Io`] if it cannot be read.
    pub fn read(path: &Path) -> Result<Self> {
        let fault = |reason| Self::fault(path, reason);
        if path.is_dir() {
            return Err(fault("is a directory".into()));
        }
        let bytes = match read_capped(path, path, MAX_FILE_BYTES) {
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
                return Err(fault("does not exist".into()));
            }
            read => read?.map_err(fault)?,
        };
        let mut found = match bytes.starts_with(&MAGIC) {
            true => Self::from_gguf(path)?,
            false => Self::from_dat(&bytes).map_err(fault)?,
        };
        found.origin = path.display().to_string();
        for (name, entry) in &found.entries {
            let bad = entry.sums.iter().chain(&entry.counts).find(|v| !v.is_finite() || **v < 0.0);
            if let Some(bad) = bad {
                return Err(fault(format!(
                    "contains {bad} for `{}`; values must be finite and not negative",
                    printable(name)
                )));
            }
        }
        Ok(found)
    }

    fn from_gguf(path: &Path) -> Result<Self> {
        let fault = |reason: String| Self::fault(path, reason);
        let file = GgufFile::open(path).map_err(|error| match error {
            // The file's own remedies are those for a model.
            Error::InputFile { reason, .. } => fault(reason),
            other => other,
        })?;
        let key = |key: &str| file.header().get(&format!("imatrix.{key}"));
        let number = |name: &str| {
            let value = key(name).and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok());
            value.ok_or_else(|| {
                fault(format!("`imatrix.{name}` is missing or not an unsigned 32-bit integer"))
            })
        };
        let datasets = file.header().get(DATASETS).and_then(Value::as_strings);
        let mut found = Self {
            datasets: datasets
                .ok_or_else(|| fault(format!("`{DATASETS}` is missing or not a list of strings")))?
                .to_vec(),
            chunks: number("chunk_count")?,
            chunk_size: number("chunk_size")?,
            ..Self::default()
        };
        let floats = |name: &str| -> Result<Vec<f32>> {
            let tensor = file.tensor(name).filter(|t| *t.kind == crate::blocks::F32);
            let tensor = tensor.ok_or_else(|| fault(format!("tensor `{name}` is missing or not F32")))?;
            let mut bytes = vec![0; tensor.bytes as usize];
            file.read(tensor, 0, &mut bytes)?;
            Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        };
        for tensor in &file.header().tensors {
            let Some(name) = tensor.name.strip_suffix(SUMS) else { continue };
            let (sums, counts) = (floats(&tensor.name)?, floats(&format!("{name}{COUNTS}"))?);
            found.entries.insert(name.to_owned(), ImportanceEntry { sums, counts });
        }
        Ok(found)
    }

    fn from_dat(bytes: &[u8]) -> Result<Self, String> {
        let mut cursor = Dat { bytes, at: 0 };
        let entries = cursor.count("number of entries", 1 << 20)?;
        let mut found = Self::default();
        for i in 0..entries {
            let name = cursor.text(&format!("name of entry {i}"))?;
            let calls = cursor.count(&format!("calls of `{}`", printable(&name)), i32::MAX as usize)?;
            let values = cursor.count(&format!("number of values for `{}`", printable(&name)), MAX_VALUES)?;
            let stored = cursor.take("values", 4 * values)?;
            let values = stored.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            // Values are means times the number of calls. The file does not specify the number of matrices.
            let calls = calls.max(1) as f32;
            let sums: Vec<f32> = values.collect();
            if found.entries.insert(name.clone(), ImportanceEntry { sums, counts: vec![calls] }).is_some() {
                return Err(format!("`{}` appears twice", printable(&name)));
            }
        }
        if cursor.at < bytes.len() {
            found.chunks = cursor.count("number of chunks", i32::MAX as usize)? as u32;
            found.datasets.push(cursor.text("name of the text")?);
        }
        match cursor.at == bytes.len() {
            true => Ok(found),
            false => Err(format!("has extra data after byte {}", cursor.at)),
        }
    }

    /// The matrix as a GGUF file.
    ///
    /// # Errors
    /// [`Error::Internal`] when a name is too long for GGUF.
    pub fn to_gguf(&self) -> Result<Vec<u8>> {
        let datasets: Vec<&str> = self.datasets.iter().map(String::as_str).collect();
        let metadata = [
            ("general.type", Value::string("imatrix")),
            (DATASETS, strings(&datasets)),
            ("imatrix.chunk_count", Value::U32(self.chunks)),
            ("imatrix.chunk_size", Value::U32(self.chunk_size)),
        ];
        let metadata: Vec<(String, Value)> = metadata.into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
        let mut tensors = Vec::new();
        for (name, ImportanceEntry { sums, counts }) in &self.entries {
            let matrices = counts.len();
            tensors.push((
                format!("{name}{SUMS}"),
                vec![matrices, sums.len() / matrices.max(1)],
                sums.clone(),
            ));
            tensors.push((format!("{name}{COUNTS}"), vec![matrices, 1], counts.clone()));
        }
        write_file(&metadata, &tensors)
    }

    /// The matrix as a legacy file.
    pub fn to_dat(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut put = |n: usize| bytes.extend(i32::try_from(n).unwrap_or(i32::MAX).to_le_bytes());
        put(self.entries.len());
        let calls = self.chunks.max(1);
        for (name, ImportanceEntry { sums, counts }) in &self.entries {
            bytes.extend((name.len() as i32).to_le_bytes());
            bytes.extend_from_slice(name.as_bytes());
            bytes.extend((calls as i32).to_le_bytes());
            bytes.extend((sums.len() as i32).to_le_bytes());
            let columns = sums.len() / counts.len().max(1);
            for (sums, count) in sums.chunks_exact(columns.max(1)).zip(counts) {
                for sum in sums {
                    let mean = if *count > 0.0 { sum / count } else { 1.0 };
                    bytes.extend((mean * calls as f32).to_le_bytes());
                }
            }
        }
        bytes.extend((self.chunks as i32).to_le_bytes());
        let dataset = self.datasets.join(", ");
        bytes.extend((dataset.len() as i32).to_le_bytes());
        bytes.extend_from_slice(dataset.as_bytes());
        bytes
    }
}

struct Dat<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Dat<'a> {
    fn take(&mut self, what: &str, len: usize) -> Result<&'a [u8], String> {
        let part = self.at.checked_add(len).and_then(|end| self.bytes.get(self.at..end));
        let part =
            part.ok_or_else(|| format!("{what} at byte {} extends beyond the end of the file", self.at))?;
        self.at += len;
        Ok(part)
    }

    fn count(&mut self, what: &str, max: usize) -> Result<usize, String> {
        let at = self.at;
        let b = self.take(what, 4)?;
        let n = i32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        let fits = usize::try_from(n).ok().filter(|n| *n <= max);
        fits.ok_or_else(|| format!("{what} at byte {at} is {n}; it must be from 0 to {max}"))
    }

    fn text(&mut self, what: &str) -> Result<String, String> {
        let len = self.count(what, 1 << 16)?;
        let bytes = self.take(what, len)?;
        String::from_utf8(bytes.to_vec())
            .map_err(|_| format!("{what} before byte {} is not valid UTF-8", self.at))
    }
}
