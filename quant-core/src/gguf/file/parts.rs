//! Models in several files: their names, what each says of itself, and all of them as one.

use std::path::{Path, PathBuf};

use super::fault::GgufFault;
use super::read::GgufHeader;
use super::value::Value;

/// The number of a file among those of its model, from 0 on.
pub(super) const NUMBER: &str = "split.no";
/// How many files the model has.
pub(super) const COUNT: &str = "split.count";
/// How many tensors all of them hold.
pub(super) const TENSORS: &str = "split.tensors.count";
/// Files of a model, at most: numbers have 16 bits.
pub(super) const MOST: usize = u16::MAX as usize;

/// The name of file `number`, from 0 on, of `count`, in llama.cpp's way.
pub(super) fn file_name(stem: &str, number: usize, count: usize) -> String {
    format!("{stem}-{:05}-of-{count:05}.gguf", number + 1)
}

/// What a file says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) number: usize,
    pub(super) count: usize,
    pub(super) tensors: usize,
}

impl Part {
    /// What the header of a file says; `None` where it is a whole model.
    pub(super) fn of(header: &GgufHeader) -> Result<Option<Self>, GgufFault> {
        let number = |key: &str| match header.get(key) {
            None => Ok(None),
            Some(value) => match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
                Some(n) => Ok(Some(n)),
                None => Err(GgufFault::from(format!("`{key}` is not an integer"))),
            },
        };
        let Some(count) = number(COUNT)?.filter(|count| *count > 1) else { return Ok(None) };
        let missing = |key: &str| GgufFault::from(format!("`{key}` is missing beside `{COUNT}`"));
        let part = Self {
            number: number(NUMBER)?.ok_or_else(|| missing(NUMBER))?,
            count,
            tensors: number(TENSORS)?.ok_or_else(|| missing(TENSORS))?,
        };
        if count > MOST || part.number >= count {
            return Err(format!("`{NUMBER}` is {}, of {count} files", part.number).into());
        }
        Ok(Some(part))
    }

    /// The entries that say so.
    pub(super) fn entries(self) -> [(String, Value); 3] {
        // At most `MOST` files; tensors are fewer than a header may describe.
        [
            (NUMBER.to_owned(), Value::U16(self.number as u16)),
            (COUNT.to_owned(), Value::U16(self.count as u16)),
            (TENSORS.to_owned(), Value::I32(self.tensors as i32)),
        ]
    }

    /// The files after the first, by the name of that one.
    pub(super) fn others(self, first: &Path) -> Result<Vec<PathBuf>, GgufFault> {
        let name = first.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let ending = file_name("", 0, self.count);
        let stem = name.strip_suffix(&ending).ok_or_else(|| {
            GgufFault::from(format!(
                "holds the first of {} files, and its name does not end in `{ending}`",
                self.count
            ))
        })?;
        Ok((1..self.count).map(|number| first.with_file_name(file_name(stem, number, self.count))).collect())
    }
}
