//! Tensors in decoder blocks that take no part in the computation.
//!
//! Loaders ignore such tensors, so a model of a different family or version may load without an error and give
//! different results.

use std::collections::{BTreeMap, BTreeSet};

use super::{Architecture, BlockGraph};

/// The last parts of names of tensors that do not change the function of a decoder: constants that older versions of
/// transformers stored, and scales with which engines quantize inside attention.
const AUXILIARY: &[&str] = &[
    "inv_freq",
    "k_scale",
    "k_zero_point",
    "kv_scale",
    "masked_bias",
    "original_inv_freq",
    "output_scale",
    "prob_scale",
    "q_scale",
    "q_zero_point",
    "v_scale",
    "v_zero_point",
];
/// Causal masks that older versions of transformers stored.
const MASKS: &[&str] = &["attn.bias", "attention.bias", "self_attn.bias"];
/// Indexers are never run, see [`Op::SelectKeys`](super::Op::SelectKeys).
const INDEXER: &str = "self_attn.indexer.";

/// Returns whether a tensor has no effect on the function, by its name inside a block.
pub(super) fn is_auxiliary(name: &str) -> bool {
    name.rsplit('.').next().is_some_and(|last| AUXILIARY.contains(&last)) || MASKS.contains(&name)
}

/// The names that a graph accounts for.
struct Known<'a> {
    tensors: BTreeSet<String>,
    linears: BTreeSet<&'a str>,
    has_indexer: bool,
}

impl<'a> Known<'a> {
    fn of(graph: &'a BlockGraph) -> Self {
        let ops = || graph.nodes().iter().map(|node| &node.op);
        let names = ops().flat_map(|op| op.parameters().into_iter().map(|p| op.tensor_name(&p)));
        let linears: BTreeSet<&str> = graph.linears().map(|(_, name, ..)| name).collect();
        let has_indexer = linears.iter().any(|name| name.starts_with(INDEXER));
        Self { tensors: names.collect(), linears, has_indexer }
    }

    fn has(&self, name: &str) -> bool {
        // Formats of quantized weights differ in the names of codes, scales and so on.
        let is_of_linear = || {
            name.rsplit_once('.')
                .is_some_and(|(module, part)| !part.ends_with("bias") && self.linears.contains(module))
        };
        self.tensors.contains(name)
            || is_of_linear()
            || is_auxiliary(name)
            || self.has_indexer && name.starts_with(INDEXER)
    }
}

impl Architecture {
    /// Returns those of the tensors `names` that are in a block, but that neither the block nor a quantized form of it
    /// uses.
    pub(crate) fn uncomputed<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
        let mut known: BTreeMap<usize, Known<'_>> = BTreeMap::new();
        let mut found = Vec::new();
        for name in names {
            let Some(layer) = self.layer_of(name).filter(|_| !self.is_unread(name)) else { continue };
            let first = self.blocks.first_like(layer);
            let known = known.entry(first).or_insert_with(|| Known::of(self.graph(first)));
            let inside = name.strip_prefix(&self.in_block(layer, ""));
            if inside.is_some_and(|inside| !known.has(inside)) {
                found.push(name);
            }
        }
        found
    }

    /// Returns a tensor's name with `*` for the index of its block.
    pub(crate) fn for_all_blocks(&self, tensor: &str) -> String {
        let inside = self.layer_of(tensor).and_then(|layer| tensor.strip_prefix(&self.in_block(layer, "")));
        inside.map_or_else(|| tensor.to_owned(), |inside| self.block_prefix.replace("{}", "*") + inside)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::checkpoint::{ConfigFields, MemorySource};

    fn llama() -> Architecture {
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96, "rms_norm_eps": 1e-6,
        });
        let fields = ConfigFields::new(std::path::Path::new("config.json"), config.as_object().unwrap());
        super::super::describe(&fields, &MemorySource::new()).unwrap()
    }

    #[test]
    fn only_what_changes_the_function_is_found() {
        let in_block = |name: &str| format!("model.layers.1.{name}");
        let used = [
            "self_attn.q_proj.weight",
            "self_attn.q_proj.weight_packed",
            "self_attn.q_proj.qzeros",
            "self_attn.k_proj.k_scale",
            "self_attn.v_scale",
            "self_attn.rotary_emb.inv_freq",
            "self_attn.bias",
            "self_attn.masked_bias",
            "input_layernorm.weight",
            "mlp.down_proj.input_scale",
        ];
        let unused = [
            "self_attn.q_norm.weight",
            "self_attn.q_proj.bias",
            "input_layernorm.bias",
            "self_attn.sinks",
            "mlp.down_proj.lora_A.weight",
            "mlp.experts.0.up_proj.weight",
            "mlp.up_proj.e_score_correction_bias",
            "pre_feedforward_layernorm.weight",
        ];
        let names: Vec<String> = used.iter().chain(&unused).map(|name| in_block(name)).collect();
        let outside =
            ["model.norm.bias", "vision_tower.layers.0.q_norm.weight", "model.layers.2.q_norm.weight"];
        let llama = llama();
        let found = llama.uncomputed(names.iter().map(String::as_str).chain(outside));
        assert_eq!(found, unused.map(in_block));
        assert_eq!(llama.for_all_blocks(found[0]), "model.layers.*.self_attn.q_norm.weight");
        assert_eq!(llama.for_all_blocks("model.norm.weight"), "model.norm.weight");
    }
}
