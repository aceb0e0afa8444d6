//! The names of the tensors of blocks, by which the checkpoint of an unknown family is compared with the families.

use std::collections::{BTreeMap, BTreeSet};

use super::Architecture;
use super::uncomputed::is_auxiliary;
use crate::TensorSource;

/// Names in a block: the module, and `bias` if the tensor is one. Other tensors of a module, such as codes and scales,
/// have the same name as its weight, and all experts have the same names.
pub(super) type BlockNames = BTreeSet<String>;

fn is_number(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit())
}

fn shortened(parts: &[&str]) -> String {
    let kept = match parts {
        [module @ .., last] if !module.is_empty() && *last != "bias" => module,
        all => all,
    };
    kept.iter().map(|part| if is_number(part) { "#" } else { part }).collect::<Vec<_>>().join(".")
}

/// The names in the blocks of a family.
pub(super) fn of_family(architecture: &Architecture) -> BlockNames {
    let kinds = architecture.blocks.kinds();
    let ops = kinds.flat_map(|kind| kind.graph.nodes().iter().map(|node| &node.op));
    let names = ops.flat_map(|op| op.parameters().into_iter().map(|parameter| op.tensor_name(&parameter)));
    names.map(|name| shortened(&name.split('.').collect::<Vec<_>>())).collect()
}

/// The names in the blocks of a checkpoint, by the prefix of the blocks. A vision tower has blocks of its own.
pub(super) struct CheckpointNames(BTreeMap<String, BlockNames>);

impl CheckpointNames {
    pub(super) fn of(tensors: &dyn TensorSource) -> Self {
        let mut blocks: BTreeMap<String, BlockNames> = BTreeMap::new();
        for name in tensors.names() {
            let parts: Vec<&str> = name.split('.').collect();
            let Some(layer) = parts.iter().position(|part| is_number(part)) else { continue };
            if layer + 1 < parts.len() && !is_auxiliary(&parts[layer + 1..].join(".")) {
                blocks.entry(parts[..layer].join(".")).or_default().insert(shortened(&parts[layer + 1..]));
            }
        }
        Self(blocks)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The number of common names divided by the number of all names, for the blocks where this is largest.
    pub(super) fn similarity(&self, names: &BlockNames) -> f64 {
        self.0.values().map(|blocks| similarity(blocks, names)).fold(0.0, f64::max)
    }

    /// The names of the most similar blocks that are not among `names`, and the reverse. Both are empty if either side
    /// has no names. Experts that are stored together are the same as single ones.
    pub(super) fn differences(&self, names: &BlockNames) -> (Vec<String>, Vec<String>) {
        let blocks = self.0.values().max_by(|a, b| similarity(a, names).total_cmp(&similarity(b, names)));
        let Some(blocks) = blocks.filter(|_| !names.is_empty()) else { return Default::default() };
        let is_single = |name: &String, experts: &String| name.starts_with(&format!("{experts}.#."));
        let is_joined = |name: &String, all: &BlockNames| all.iter().any(|other| is_single(other, name));
        let is_split = |name: &String, all: &BlockNames| all.iter().any(|other| is_single(name, other));
        let without = |one: &BlockNames, other: &BlockNames| {
            let rest = one.difference(other).filter(|name| !is_joined(name, other) && !is_split(name, other));
            rest.cloned().collect()
        };
        (without(blocks, names), without(names, blocks))
    }
}

fn similarity(blocks: &BlockNames, names: &BlockNames) -> f64 {
    let common = blocks.intersection(names).count();
    common as f64 / (blocks.len() + names.len() - common).max(1) as f64
}
