//! Groups of linears for which engines keep one common scale per tensor.

use std::collections::BTreeSet;

use super::{Architecture, BlockGraph, Computes, NodeId, Op};

impl Architecture {
    /// Returns the linears, in groups of at least two, for which engines keep a single scale over the whole tensor: in
    /// NVFP4 and in FP8 per tensor, the members of a group must have equal scales.
    ///
    /// A group holds linears that engines [fuse](Self::fused), or the two factors of a gated product.
    pub fn scale_groups(&self) -> Vec<Vec<String>> {
        let of_layer = |layer: usize| {
            let graph = self.graph(layer);
            let names: BTreeSet<&str> = graph.linears().map(|(_, name, ..)| name).collect();
            let of_parts = |parts: &[&'static str]| {
                parts.iter().copied().filter(|part| names.contains(part)).collect::<Vec<&str>>()
            };
            let mut groups: Vec<Vec<&str>> = self.fused.iter().map(|(_, parts)| of_parts(parts)).collect();
            groups.retain(|group| group.len() > 1);
            let grouped: BTreeSet<&str> = groups.iter().flatten().copied().collect();
            let pairs = graph.gated_pairs().map(|pair| pair.map(|id| graph.name(id)));
            groups.extend(pairs.filter(|[gate, _]| !grouped.contains(gate)).map(Vec::from));
            let full = |name: &str| self.in_block(layer, name);
            groups.iter().map(|group| group.iter().copied().map(full).collect()).collect::<Vec<Vec<String>>>()
        };
        (0..self.layers).flat_map(of_layer).collect()
    }
}

impl BlockGraph {
    /// Returns the linears that compute the two factors of a gated product from the same value: gate and up.
    fn gated_pairs(&self) -> impl Iterator<Item = [NodeId; 2]> {
        let is_linear = |id: NodeId| matches!(self.nodes()[id].op.computes(), Computes::Linear { .. });
        self.nodes().iter().filter_map(move |node| {
            let (Op::Gated(_) | Op::ClampedGated { .. }, &[gate, up]) = (&node.op, &node.inputs[..]) else {
                return None;
            };
            let both =
                is_linear(gate) && is_linear(up) && self.nodes()[gate].inputs == self.nodes()[up].inputs;
            both.then_some([gate, up])
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use crate::checkpoint::{ConfigFields, MemorySource};
    use crate::model::arch::describe;

    fn groups(config: Value) -> Vec<Vec<String>> {
        let config = config.as_object().unwrap();
        let fields = ConfigFields::new(Path::new("config.json"), config);
        describe(&fields, &MemorySource::new()).unwrap().scale_groups()
    }

    #[test]
    fn gate_and_up_of_every_expert_share() {
        let sizes = json!({
            "architectures": ["MixtralForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "num_local_experts": 3,
            "num_experts_per_tok": 2,
        });
        let groups = groups(sizes);
        let expert = |layer: usize, expert: usize| {
            let of = |w: &str| format!("model.layers.{layer}.block_sparse_moe.experts.{expert}.{w}");
            vec![of("w1"), of("w3")]
        };
        assert_eq!(groups.len(), 2 * 4);
        assert_eq!(groups[0].len(), 3);
        for e in 0..3 {
            assert_eq!(groups[1 + e], expert(0, e));
            assert_eq!(groups[5 + e], expert(1, e));
        }
    }
}
