//! Names of tensors in checkpoints that were saved without the head: they lack their first part, which
//! readers add.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::Architecture;
use crate::checkpoint::{TensorInfo, TensorSource};
use crate::{Error, Result};

/// The same tensors under the names that the architecture has for them. What is written has these too: the
/// names of modules in a `quantization_config` mean the modules of readers.
pub(super) fn with_base(source: Arc<dyn TensorSource>, architecture: &Architecture) -> Arc<dyn TensorSource> {
    let (embedding, base) = (&architecture.embedding, architecture.base);
    let Some(bare) = embedding.strip_prefix(base).filter(|_| !base.is_empty()) else { return source };
    if source.info(embedding).is_some() || source.info(bare).is_none() {
        return source;
    }
    // What stands beside the embedding's outermost module, such as a head, has its whole name.
    let outermost = bare.split_inclusive('.').next().unwrap_or_default();
    let full = |name: &str| match name.starts_with(outermost) {
        true => format!("{base}{name}"),
        false => name.to_owned(),
    };
    let names: BTreeMap<String, String> =
        source.names().into_iter().map(|name| (full(name), name.to_owned())).collect();
    // Two tensors of one name: one of them would be lost.
    if names.len() != source.names().len() {
        return source;
    }
    Arc::new(WithBase { source, names })
}

struct WithBase {
    source: Arc<dyn TensorSource>,
    /// Names in the checkpoint, by the names that readers know.
    names: BTreeMap<String, String>,
}

impl TensorSource for WithBase {
    fn names(&self) -> Vec<&str> {
        self.names.keys().map(String::as_str).collect()
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.source.info(self.names.get(name)?)
    }

    fn read_range(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        match self.names.get(name) {
            Some(stored) => self.source.read_range(stored, offset, buffer),
            None => Err(Error::MissingTensor { path: self.location(name), tensor: name.to_owned() }),
        }
    }

    fn location(&self, name: &str) -> PathBuf {
        self.source.location(self.names.get(name).map_or(name, String::as_str))
    }
}
