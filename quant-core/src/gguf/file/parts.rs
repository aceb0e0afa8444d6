//! Models in several files.

use std::path::{Path, PathBuf};

use super::fault::GgufFault;
use super::read::GgufHeader;
use super::value::Value;

/// The number of a part, counted from 0.
pub(super) const NUMBER: &str = "split.no";
pub(super) const COUNT: &str = "split.count";
/// The number of tensors in all parts.
pub(super) const TENSORS: &str = "split.tensors.count";
/// The maximum number of parts: their numbers have 16 bits.
pub(super) const MAX_FILES: usize = u16::MAX as usize;

/// The name of part `number`, counted from 0, of `count`, as in llama.cpp.
pub(super) fn file_name(stem: &str, number: usize, count: usize) -> String {
    format!("{stem}-{:05}-of-{count:05}.gguf", number + 1)
}

/// The stem, the number, counted from 0, and the count in a name as [`file_name`] makes it.
pub(super) fn split_name(name: &str) -> Option<(&str, usize, usize)> {
    let (start, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = start.rsplit_once('-')?;
    let digits = |text: &str| (text.len() == 5).then(|| text.parse::<usize>().ok()).flatten();
    let (number, count) = (digits(number)?, digits(count)?);
    let part = (stem, number.checked_sub(1)?, count);
    (number <= count && file_name(part.0, part.1, part.2) == name).then_some(part)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) number: usize,
    pub(super) count: usize,
    pub(super) tensors: usize,
}

impl Part {
    /// The part that a header describes; `None` if the file is a whole model.
    pub(super) fn of(header: &GgufHeader) -> Result<Option<Self>, GgufFault> {
        let number = |key: &str| match header.get(key) {
            None => Ok(None),
            Some(value) => match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
                Some(n) => Ok(Some(n)),
                None => Err(GgufFault::from(format!("`{key}` must be an integer of at least 0"))),
            },
        };
        let Some(count) = number(COUNT)?.filter(|count| *count > 1) else { return Ok(None) };
        let missing = |key: &str| GgufFault::from(format!("`{COUNT}` is set, but `{key}` is missing"));
        let part = Self {
            number: number(NUMBER)?.ok_or_else(|| missing(NUMBER))?,
            count,
            tensors: number(TENSORS)?.ok_or_else(|| missing(TENSORS))?,
        };
        if count > MAX_FILES {
            return Err(format!("`{COUNT}` is {count}, but the maximum is {MAX_FILES}").into());
        }
        if part.number >= count {
            let number = part.number;
            return Err(format!("`{NUMBER}` is {number}; it must be less than `{COUNT}`, {count}").into());
        }
        Ok(Some(part))
    }

    pub(super) fn entries(self) -> [(String, Value); 3] {
        // The casts are lossless: there are at most `MAX_FILES` files, and models have far fewer than 2³¹ tensors.
        [
            (NUMBER.to_owned(), Value::U16(self.number as u16)),
            (COUNT.to_owned(), Value::U16(self.count as u16)),
            (TENSORS.to_owned(), Value::I32(self.tensors as i32)),
        ]
    }

    /// The paths of the other parts, given that of the first; `None` if its name does not state that it is the first.
    pub(super) fn others(self, first: &Path) -> Option<Vec<PathBuf>> {
        let name = first.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let stem = name.strip_suffix(&file_name("", 0, self.count))?;
        Some(
            (1..self.count).map(|number| first.with_file_name(file_name(stem, number, self.count))).collect(),
        )
    }

    /// The path of the first part, given that of this one, if its name states its number and the first part exists.
    pub(super) fn first(self, path: &Path) -> Option<PathBuf> {
        let (stem, number, count) = path.file_name()?.to_str().and_then(split_name)?;
        let first = path.with_file_name(file_name(stem, 0, count));
        (number == self.number && count == self.count && first.is_file()).then_some(first)
    }
}
