//! A GGUF file presented as a model directory: float tensors under the names of the checkpoint, a configuration, and a
//! tokenizer.
//!
//! Blocks are decoded to `f32`, and the changes that the writer made are undone.

mod config;
mod gemma4;
mod mixers;
mod special_tokens;
#[cfg(test)]
mod special_tokens_tests;
mod specials;
mod tensors;
#[cfg(test)]
mod tests;
mod tokenizer;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use super::description;
use super::families::{self, GgufFamily, Stated};
use super::file::{GgufFile, Value};
use crate::checkpoint::{ConfigFields, MemorySource, ModelDirectory, printable};
use crate::model::describe;
use crate::{Error, Result};

pub use tensors::GgufSource;

/// Opens a file as a model.
///
/// # Errors
/// [`Error::InputFile`] when the file is damaged, is not the first file of a model, or has an unsupported architecture
/// or tensor; [`Error::Config`] if its metadata imply an invalid or unsupported configuration; [`Error::Io`] if it
/// cannot be read.
pub fn open(path: &Path) -> Result<ModelDirectory> {
    let file = Arc::new(GgufFile::open_model(path)?);
    let about = About::of(&file)?;
    GgufSource::check_experts(&about)?;
    let mut config = config::config(&about)?;
    let architecture = describe(&ConfigFields::new(path, &config), &MemorySource::default())?;
    let source = GgufSource::new(file.clone(), &about, &architecture)?;
    let special = special_tokens::fields(&about, architecture.vocab)?;
    let generation = special_tokens::generation(&about, &special);
    let generation =
        generation.map(|fields| tokenizer::file(&about, "generation_config.json", format!("{fields:#}\n")));
    config.extend(special);
    let mut notes = Vec::new();
    let kinds = source.kinds();
    let directory = match tokenizer::files(&about)? {
        Ok(mut files) => {
            files.extend(generation);
            ModelDirectory::in_memory(path, config, Arc::new(source), files, notes)
        }
        Err(reason) => {
            notes.push(match reason == tokenizer::NONE {
                true => format!("{reason}: it can be inspected and converted, but not run on text"),
                false => format!("the tokenizer in the file cannot be used: {reason}"),
            });
            let files = generation.into_iter().collect();
            ModelDirectory::in_memory(path, config, Arc::new(source), files, notes).without_tokenizer(reason)
        }
    };
    let directory = directory.with_description(description::of(file.header()));
    Ok(if kinds.is_empty() { directory } else { directory.with_rounded(kinds.join(", ")) })
}

/// Whether a path is a GGUF file, judged by its first bytes.
pub fn is_gguf(path: &Path) -> bool {
    use std::io::Read;
    let mut magic = [0; 4];
    let is_file = std::fs::metadata(path).is_ok_and(|m| m.is_file());
    is_file
        && std::fs::File::open(path)
            .and_then(|mut f| f.read_exact(&mut magic))
            .is_ok_and(|()| magic == super::MAGIC)
}

struct About<'a> {
    file: &'a GgufFile,
    family: &'static GgufFamily,
}

impl<'a> About<'a> {
    fn of(file: &'a GgufFile) -> Result<Self> {
        let text = |key: &str| typed(file, key, "a string", Value::as_str);
        if let Some(kind) = text("general.type")?.filter(|kind| *kind != "model") {
            let reason = format!("`general.type` is `{}`; only `model` is supported", printable(kind));
            return Err(GgufFile::refused(file.path(), reason, "give the GGUF file of a model"));
        }
        let arch = text("general.architecture")?
            .ok_or_else(|| GgufFile::broken(file.path(), "`general.architecture` is missing"))?;
        let experts = integer(file, &format!("{arch}.expert_count"))?.unwrap_or(0);
        let scores = integer(file, &format!("{arch}.expert_gating_func"))?;
        let windows = integer(file, &format!("{arch}.attention.sliding_window"))?.unwrap_or(0);
        let scale = file.header().get(&format!("{arch}.attention.temperature_scale"));
        let stated = Stated {
            has_experts: experts > 0,
            has_windows: windows > 0,
            scores,
            scales_queries: scale.and_then(Value::as_f64).is_some_and(|scale| scale != 0.0),
        };
        match families::architecture(arch, stated) {
            Some(family) => Ok(Self { file, family }),
            None => Err(unread_architecture(file, arch, experts)),
        }
    }

    /// A value by its key without the architecture's prefix.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.file.header().get(&format!("{}.{key}", self.family.arch))
    }

    fn broken(&self, key: &str, reason: &str) -> Error {
        GgufFile::broken(self.file.path(), format!("`{}.{key}` {reason}", self.family.arch))
    }

    fn unread(&self, key: &str, reason: &str) -> Error {
        GgufFile::unread(self.file.path(), format!("`{}.{key}` {reason}", self.family.arch))
    }

    /// An integer. A list with one value per block is accepted if all are equal.
    fn integer(&self, key: &str) -> Result<Option<u64>> {
        integer(self.file, &format!("{}.{key}", self.family.arch))
    }

    /// One integer per block, from a list or a single value.
    fn integers(&self, key: &str, blocks: u64) -> Result<Vec<u64>> {
        let Some(list) = self.get(key).and_then(Value::as_integers) else {
            // Every block has tensors, so the number of tensors bounds the allocation.
            let max = self.file.header().tensors.len() as u64;
            return match blocks <= max && blocks > 0 {
                true => Ok(vec![self.require(key)?; blocks as usize]),
                false => Err(self.broken(
                    "block_count",
                    &format!("is {blocks}; it must be from 1 to the number of tensors, {max}"),
                )),
            };
        };
        let list = list.into_iter().map(|n| u64::try_from(n).ok()).collect::<Option<Vec<u64>>>();
        let list = list.filter(|list| !list.is_empty() && list.len() as u64 == blocks);
        list.ok_or_else(|| {
            self.broken(key, &format!("must be an integer or a list of {blocks} integers, one per block"))
        })
    }

    fn require(&self, key: &str) -> Result<u64> {
        self.integer(key)?.ok_or_else(|| self.broken(key, "is missing"))
    }

    /// The number of blocks for multi-token prediction, which follow the others.
    fn further_blocks(&self) -> Result<usize> {
        let (all, further) =
            (self.require("block_count")?, self.integer("nextn_predict_layers")?.unwrap_or(0));
        match usize::try_from(further).ok().filter(|_| further < all) {
            Some(further) => Ok(further),
            None => Err(self.broken(
                "nextn_predict_layers",
                &format!("is {further}; it must be less than `block_count`, {all}"),
            )),
        }
    }

    /// Whether a block has a tensor, by its name within the block.
    fn has_in_some_block(&self, name: &str) -> bool {
        let is_it = |tensor: &str| {
            let within = tensor.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
            within.is_some_and(|(_, within)| within == name)
        };
        self.file.header().tensors.iter().any(|tensor| is_it(&tensor.name))
    }

    fn blocks(&self) -> Result<u64> {
        Ok(self.require("block_count")? - self.further_blocks()? as u64)
    }

    fn heads(&self) -> Result<u64> {
        match self.require("attention.head_count")? {
            0 => Err(self.broken("attention.head_count", "is 0")),
            heads => Ok(heads),
        }
    }

    /// The number of channels per head of queries or keys.
    fn head_width(&self) -> Result<u64> {
        let own = self.integer("attention.key_length")?;
        own.map_or_else(|| Ok(self.require("embedding_length")? / self.heads()?), Ok)
    }

    fn float(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(v) if v.is_finite() => Ok(Some(v)),
            _ => Err(self.broken(key, "must be a finite float")),
        }
    }

    /// A value by its full key.
    fn global(&self, key: &str) -> Option<&'a Value> {
        self.file.header().get(key)
    }

    fn typed<T>(&self, key: &str, what: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        typed(self.file, key, what, read)
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a string", Value::as_str)
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "a boolean", Value::as_bool)
    }
}

fn typed<'a, T>(
    file: &'a GgufFile,
    key: &str,
    what: &str,
    read: impl Fn(&'a Value) -> Option<T>,
) -> Result<Option<T>> {
    let Some(value) = file.header().get(key) else { return Ok(None) };
    let fault = || GgufFile::broken(file.path(), format!("`{}` must be {what}", printable(key)));
    read(value).map(Some).ok_or_else(fault)
}

/// An integer by its full key. A list with one value per block is accepted if all are equal.
fn integer(file: &GgufFile, key: &str) -> Result<Option<u64>> {
    let Some(list) = file.header().get(key).and_then(Value::as_integers) else {
        return typed(file, key, "an integer of at least 0", Value::as_u64);
    };
    let first = list.first().and_then(|v| u64::try_from(*v).ok());
    match first.filter(|first| list.iter().all(|v| u64::try_from(*v).ok() == Some(*first))) {
        Some(first) => Ok(Some(first)),
        None => {
            let reason = format!(
                "`{}` must be the same integer of at least 0 for all blocks; other lists are not supported",
                printable(key)
            );
            Err(GgufFile::unread(file.path(), reason))
        }
    }
}

fn unread_architecture(file: &GgufFile, arch: &str, experts: u64) -> Error {
    let shown = printable(arch);
    let reason = match families::FAMILIES.iter().find(|f| f.arch == arch) {
        Some(family) if family.experts.is_some() => {
            format!("`{shown}.expert_count` is missing or 0, but the architecture `{shown}` requires experts")
        }
        Some(_) => {
            format!(
                "`{shown}.expert_count` is {experts}, but the architecture `{shown}` is supported only \
                without experts"
            )
        }
        None => {
            let known: BTreeSet<&str> = families::FAMILIES.iter().map(|f| f.arch).collect();
            let known: Vec<&str> = known.into_iter().collect();
            format!("`general.architecture` is `{shown}`; supported architectures: {}", known.join(", "))
        }
    };
    GgufFile::unread(file.path(), reason)
}
