//! A GGUF file as a model directory would be: tensors under the names of the checkpoint, as floats, a configuration,
//! a tokenizer.
//!
//! What blocks stand for is exact in `f32`, and so are the tensors that are read. What a writer changed is undone:
//! rows of queries and keys go back to their order, norms lose what was added, experts are apart again.

mod config;
mod tensors;
mod tokenizer;

use std::path::Path;
use std::sync::Arc;

use super::families::{self, GgufFamily};
use super::file::{GgufFile, Value};
use crate::checkpoint::ModelDirectory;
use crate::{Error, Result};

pub use tensors::GgufSource;

/// Opens a file as a model.
///
/// # Errors
/// [`Error::InputFile`] when the file is damaged, holds an importance matrix or a part of a model, or is of an
/// architecture that is not read; [`Error::Io`].
pub fn open(path: &Path) -> Result<ModelDirectory> {
    let file = Arc::new(GgufFile::open(path)?);
    let about = About::of(&file)?;
    let config = config::config(&about)?;
    let source = GgufSource::new(file.clone(), about.family)?;
    let mut notes = Vec::new();
    let kinds = source.kinds();
    if !kinds.is_empty() {
        notes.push(format!("blocks of {} are read as the floats that they stand for", kinds.join(", ")));
    }
    let sidecars = match tokenizer::files(&about)? {
        Ok(files) => files,
        Err(reason) => {
            notes.push(format!("the file's tokenizer is not read: {reason}"));
            Vec::new()
        }
    };
    Ok(ModelDirectory::in_memory(path, config, Arc::new(source), sidecars, notes))
}

/// Whether a path names a file of this kind, by how it begins.
pub fn is_gguf(path: &Path) -> bool {
    use std::io::Read;
    let mut magic = [0; 4];
    let is_file = std::fs::metadata(path).is_ok_and(|m| m.is_file());
    is_file
        && std::fs::File::open(path)
            .and_then(|mut f| f.read_exact(&mut magic))
            .is_ok_and(|()| magic == super::MAGIC)
}

/// Typed access to the metadata of a model's file.
struct About<'a> {
    file: &'a GgufFile,
    family: &'static GgufFamily,
}

impl<'a> About<'a> {
    fn of(file: &'a GgufFile) -> Result<Self> {
        let broken = |reason: String| GgufFile::broken(file.path(), reason);
        let text = |key: &str| file.header().get(key).and_then(Value::as_str);
        if let Some(kind) = text("general.type").filter(|kind| *kind != "model") {
            return Err(broken(format!("`general.type` is `{kind}`, not `model`")));
        }
        let arch = text("general.architecture")
            .ok_or_else(|| broken("`general.architecture` is missing or no text".into()))?;
        if file.header().get("split.count").and_then(Value::as_u64).is_some_and(|n| n > 1) {
            return Err(broken(
                "`split.count` says that it is a part of a model, and parts are not read".into(),
            ));
        }
        let experts = file.header().get(&format!("{arch}.expert_count")).and_then(Value::as_u64);
        let family = families::architecture(arch, experts.is_some_and(|n| n > 0)).ok_or_else(|| {
            let known: Vec<&str> = families::FAMILIES.iter().map(|f| f.arch).collect();
            broken(format!("`general.architecture` is `{arch}`; read are {}", known.join(", ")))
        })?;
        Ok(Self { file, family })
    }

    /// A value by its key, behind the architecture's name.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.file.header().get(&format!("{}.{key}", self.family.arch))
    }

    fn broken(&self, key: &str, reason: &str) -> Error {
        GgufFile::broken(self.file.path(), format!("`{}.{key}` {reason}", self.family.arch))
    }

    /// An integer; of a list with one for every block, the one that all have.
    fn integer(&self, key: &str) -> Result<Option<u64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        if let Some(list) = value.as_integers() {
            let first = list.first().and_then(|v| u64::try_from(*v).ok());
            return match first.filter(|first| list.iter().all(|v| u64::try_from(*v).ok() == Some(*first))) {
                Some(first) => Ok(Some(first)),
                None => Err(self.broken(key, "differs from block to block, which is not read")),
            };
        }
        value.as_u64().map(Some).ok_or_else(|| self.broken(key, "is no integer"))
    }

    fn require(&self, key: &str) -> Result<u64> {
        self.integer(key)?.ok_or_else(|| self.broken(key, "is missing"))
    }

    fn float(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(v) if v.is_finite() => Ok(Some(v)),
            _ => Err(self.broken(key, "is no finite float")),
        }
    }

    /// A value by its whole key.
    fn global(&self, key: &str) -> Option<&'a Value> {
        self.file.header().get(key)
    }
}
