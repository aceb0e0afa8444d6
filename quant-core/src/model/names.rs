//! Names of tensors in checkpoints that were saved without the head: they lack their first part, which
//! readers add.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use super::{Architecture, Op};
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
    // What stands beside the outermost modules of the model without its head, such as the head, has its whole name.
    let norms = [&architecture.embedding_norm, &architecture.final_norm].into_iter().flatten();
    let positions = architecture.learned_positions.iter().map(|positions| positions.table.as_str());
    let inside = norms.map(Op::name).chain(positions).chain([architecture.block_prefix]);
    let inside = inside.filter_map(|name| name.strip_prefix(base)).chain([bare]);
    let outermost: BTreeSet<&str> = inside.filter_map(|name| name.split_inclusive('.').next()).collect();
    let full = |name: &str| match outermost.iter().any(|module| name.starts_with(module)) {
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
