//! Tensor names of checkpoints that were saved without the head: they lack the common prefix, which loaders add.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use super::{Architecture, Op};
use crate::checkpoint::{TensorInfo, TensorSource};
use crate::{Error, Result};

/// Returns the tensors under the architecture's names. The output has these names too, because module names in a
/// `quantization_config` are those of the modules that loaders create.
pub(super) fn with_base(source: Arc<dyn TensorSource>, architecture: &Architecture) -> Arc<dyn TensorSource> {
    let (embedding, base) = (&architecture.embedding, architecture.base);
    let Some(bare) = embedding.strip_prefix(base).filter(|_| !base.is_empty()) else { return source };
    if source.info(embedding).is_some() || source.info(bare).is_none() {
        return source;
    }
    // Tensors outside the outermost modules of the headless model, such as the head, already have their full name.
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
    // If several tensors get the same name, all but one of them would be lost.
    if names.len() != source.names().len() {
        return source;
    }
    Arc::new(WithBase { source, names })
}

struct WithBase {
    source: Arc<dyn TensorSource>,
    /// Names in the checkpoint, by full name.
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
