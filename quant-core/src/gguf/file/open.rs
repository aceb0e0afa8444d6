//! Open files.

use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use super::directory::{MISSING, names, renaming};
use super::fault::GgufFault;
use super::parts::{Part, file_name};
use super::read::{GgufHeader, GgufTensor};
use crate::checkpoint::{open_regular, printable, read_exact_at};
use crate::{Error, Result};

/// An open file, or all parts of a model, with headers that were read.
#[derive(Debug)]
pub struct GgufFile {
    /// The path of the first file, as given.
    path: PathBuf,
    files: Vec<(PathBuf, File)>,
    bytes: u64,
    /// The header of the first file, with the tensors of all.
    header: GgufHeader,
    places: HashMap<String, usize>,
}

impl GgufFile {
    /// Opens a file and checks its header.
    ///
    /// # Errors
    /// [`Error::InputFile`] if it breaks a rule of the format or uses an unsupported feature; [`Error::Io`] if it
    /// cannot be read or is not a regular file.
    pub fn open(path: &Path) -> Result<Self> {
        let real = path.canonicalize().map_err(|e| Error::io("open", path, e))?;
        let file = open_regular(&real, path)?;
        let bytes = file.metadata().map_err(|e| Error::io("read", path, e))?.len();
        let header = GgufHeader::parse(BufReader::with_capacity(1 << 16, &file), bytes);
        let header = header.map_err(|fault| Self::broken(path, fault))?;
        let places = header.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        let path = path.to_owned();
        Ok(Self { files: vec![(path.clone(), file)], path, bytes, header, places })
    }

    /// Opens all parts of a model, of which `path` is the first. The others are expected in the same directory.
    ///
    /// # Errors
    /// As [`open`](Self::open), for each part; [`Error::InputFile`] when `path` is not the first part, or parts are
    /// missing or do not belong together.
    pub fn open_model(path: &Path) -> Result<Self> {
        let mut first = Self::open(path)?;
        let Some(part) = Part::of(&first.header).map_err(|fault| Self::broken(path, fault))? else {
            return Ok(first);
        };
        if part.number != 0 {
            let reason = format!("is file {} of a model in {} files", part.number + 1, part.count);
            let remedy = match part.first(path) {
                Some(first) => format!("give the first file, {}", first.display()),
                None => "give the first file, whose name contains -00001-of-".to_owned(),
            };
            return Err(Self::refused(path, reason, &remedy));
        }
        let others = part.others(path).ok_or_else(|| {
            let ending = file_name("", 0, part.count);
            let reason = format!("is the first of {} files, so its name must end in `{ending}`", part.count);
            Self::refused(path, reason, &renaming(path, part.count))
        })?;
        let missing: Vec<&PathBuf> = others.iter().filter(|other| !other.exists()).collect();
        if !missing.is_empty() {
            let missing = missing.into_iter().filter_map(|path| path.file_name());
            let missing = names(missing.map(|name| name.to_string_lossy().into_owned()));
            let reason =
                format!("is the first of {} files, of which others are missing: {missing}", part.count);
            return Err(Self::refused(path, reason, MISSING));
        }
        for (number, other) in others.iter().enumerate() {
            let file = Self::open(other)?;
            let expected = Part { number: number + 1, ..part };
            if Part::of(&file.header).map_err(|fault| Self::broken(other, fault))? != Some(expected) {
                let reason = format!(
                    "is not file {} of {} of the model {}",
                    expected.number + 1,
                    part.count,
                    path.display()
                );
                return Err(Self::broken(other, reason));
            }
            first.join(file)?;
        }
        match first.header.tensors.len() {
            found if found == part.tensors => Ok(first),
            found => {
                let reason = format!("declares {} tensors, but the files contain {found}", part.tensors);
                Err(Self::broken(path, reason))
            }
        }
    }

    fn join(&mut self, other: Self) -> Result<()> {
        for tensor in other.header.tensors {
            let place = self.header.tensors.len();
            if self.places.insert(tensor.name.clone(), place).is_some() {
                let reason = format!(
                    "contains tensor `{}`, which is also in an earlier file",
                    printable(&tensor.name)
                );
                return Err(Self::broken(&other.path, reason));
            }
            self.header.tensors.push(GgufTensor { part: self.files.len(), ..tensor });
        }
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.files.extend(other.files);
        Ok(())
    }

    pub(crate) fn broken(path: &Path, fault: impl Into<GgufFault>) -> Error {
        match fault.into() {
            GgufFault::Unread(reason) => Self::unread(path, reason),
            GgufFault::Damaged(reason) => {
                Self::refused(path, reason, "the GGUF file is damaged or incomplete: download it again")
            }
        }
    }

    pub(crate) fn unread(path: &Path, reason: String) -> Error {
        Self::refused(path, reason, "give the Hugging Face directory of the model")
    }

    pub(crate) fn refused(path: &Path, reason: String, remedy: &str) -> Error {
        Error::InputFile { path: path.to_owned(), line: None, reason, remedy: remedy.into() }
    }

    /// The path of the file, or of the first part.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All files.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|(path, _)| path.as_path())
    }

    /// The size of all files in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The header of the file; for a model in parts, with the tensors of all.
    pub fn header(&self) -> &GgufHeader {
        &self.header
    }

    /// Returns a tensor by its name.
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.places.get(name).map(|&i| &self.header.tensors[i])
    }

    /// Fills `buffer` with a tensor's bytes, starting at `offset`.
    ///
    /// # Errors
    /// [`Error::Internal`] if the range exceeds the tensor; [`Error::Io`] if the file cannot be read.
    pub fn read(&self, tensor: &GgufTensor, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let (path, file) = self.files.get(tensor.part).ok_or_else(|| {
            Error::Internal(format!("tensor `{}` belongs to a different file", tensor.name))
        })?;
        if offset.checked_add(buffer.len() as u64).is_none_or(|end| end > tensor.bytes) {
            return Err(Error::Internal(format!("a range exceeds tensor `{}`", tensor.name)));
        }
        read_exact_at(file, path, tensor.offset + offset, buffer)
    }
}
