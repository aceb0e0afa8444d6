//! Llama 1, 2, 3 and everything that shares their block.

use super::{Architecture, BlockGraph, Family, GraphBuilder, Op};
use crate::Result;
use crate::checkpoint::ConfigFields;
use crate::model::rope::RopeScaling;

/// The family of `LlamaForCausalLM`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Llama;

impl Family for Llama {
    fn name(&self) -> &'static str {
        "llama"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["LlamaForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let hidden = config.require_positive("hidden_size")?;
        let intermediate = config.require_positive("intermediate_size")?;
        let heads = config.require_positive("num_attention_heads")?;
        let kv_heads = config.optional_positive("num_key_value_heads")?.unwrap_or(heads);
        if heads % kv_heads != 0 {
            return Err(config.error(
                "num_key_value_heads",
                format!("is {kv_heads}, which does not divide the {heads} heads"),
            ));
        }
        let head_dim = match config.optional_positive("head_dim")? {
            Some(width) => width,
            None if hidden % heads == 0 => hidden / heads,
            None => {
                return Err(config.error(
                    "num_attention_heads",
                    format!(
                        "is {heads}, which does not divide hidden_size {hidden}, and head_dim is not given"
                    ),
                ));
            }
        };
        if head_dim % 2 != 0 {
            return Err(config.error("head_dim", format!("is {head_dim}; rotary embedding needs it even")));
        }
        let activation = config.optional_str("hidden_act")?.unwrap_or("silu");
        if activation != "silu" {
            return Err(config.error("hidden_act", format!("is `{activation}`; this family uses `silu`")));
        }
        let norm_eps = config.optional_f64("rms_norm_eps")?.unwrap_or(1e-6);
        if !(0.0..1.0).contains(&norm_eps) {
            return Err(
                config.error("rms_norm_eps", format!("is {norm_eps}; expected 0 or a small positive number"))
            );
        }
        let (rope_theta, rope_scaling) = RopeScaling::from_config(config)?;
        let attention_bias = config.optional_bool("attention_bias")?.unwrap_or(false);
        let mlp_bias = config.optional_bool("mlp_bias")?.unwrap_or(false);
        Ok(Architecture {
            family: self.name(),
            hidden,
            vocab: config.require_positive("vocab_size")?,
            layers: config.require_positive("num_hidden_layers")?,
            heads,
            kv_heads,
            head_dim,
            max_positions: config.optional_positive("max_position_embeddings")?.unwrap_or(2048),
            norm_eps,
            rope_theta,
            rope_scaling,
            tied: config.optional_bool("tie_word_embeddings")?.unwrap_or(false),
            embedding: "model.embed_tokens.weight".into(),
            final_norm: "model.norm.weight".into(),
            head: "lm_head".into(),
            block_prefix: "model.layers.{}.",
            block: block(hidden, intermediate, heads, kv_heads, head_dim, attention_bias, mlp_bias),
        })
    }
}

fn block(
    hidden: usize,
    intermediate: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    attention_bias: bool,
    mlp_bias: bool,
) -> BlockGraph {
    let linear =
        |name: &str, shape: [usize; 2], bias: bool| Op::Linear { name: name.to_owned(), shape, bias };
    let norm = |name: &str| Op::RmsNorm { name: name.to_owned(), width: hidden };
    let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);

    let mut g = GraphBuilder::default();
    let input = g.add(Op::Input, &[]);

    let x = g.add(norm("input_layernorm"), &[input]);
    let q = g.add(linear("self_attn.q_proj", [q_width, hidden], attention_bias), &[x]);
    let k = g.add(linear("self_attn.k_proj", [kv_width, hidden], attention_bias), &[x]);
    let v = g.add(linear("self_attn.v_proj", [kv_width, hidden], attention_bias), &[x]);
    let q = g.add(Op::Rope, &[q]);
    let k = g.add(Op::Rope, &[k]);
    let attended = g.add(Op::Attention { repeat: heads / kv_heads, head_dim }, &[q, k, v]);
    let o = g.add(linear("self_attn.o_proj", [hidden, q_width], attention_bias), &[attended]);
    let middle = g.add(Op::Add, &[input, o]);

    let x = g.add(norm("post_attention_layernorm"), &[middle]);
    let gate = g.add(linear("mlp.gate_proj", [intermediate, hidden], mlp_bias), &[x]);
    let up = g.add(linear("mlp.up_proj", [intermediate, hidden], mlp_bias), &[x]);
    let product = g.add(Op::GatedSilu, &[gate, up]);
    let down = g.add(linear("mlp.down_proj", [hidden, intermediate], mlp_bias), &[product]);
    g.add(Op::Add, &[middle, down]);
    g.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of a fold group: producer, consumers, inspected, repeat.
    fn groups(graph: &BlockGraph) -> Vec<(String, Vec<String>, String, usize)> {
        let name = |id| graph.name(id).to_owned();
        let of = |g: &super::super::FoldGroup| {
            (name(g.producer), g.consumers.iter().map(|&c| name(c)).collect(), name(g.inspected), g.repeat)
        };
        graph.fold_groups().iter().map(of).collect()
    }

    #[test]
    fn balance_lists_follow_from_the_graph() {
        let s = |t: &str| t.to_owned();
        let qkv = vec![s("self_attn.q_proj"), s("self_attn.k_proj"), s("self_attn.v_proj")];
        let expected = |repeat| {
            vec![
                (s("input_layernorm"), qkv.clone(), s("self_attn.o_proj"), 1),
                (s("self_attn.v_proj"), vec![s("self_attn.o_proj")], s("self_attn.o_proj"), repeat),
                (
                    s("post_attention_layernorm"),
                    vec![s("mlp.gate_proj"), s("mlp.up_proj")],
                    s("mlp.down_proj"),
                    1,
                ),
                (s("mlp.up_proj"), vec![s("mlp.down_proj")], s("mlp.down_proj"), 1),
            ]
        };
        assert_eq!(groups(&block(64, 96, 8, 8, 8, false, false)), expected(1));
        assert_eq!(groups(&block(64, 96, 8, 2, 8, true, true)), expected(4));
    }

    #[test]
    fn clipping_leaves_queries_and_keys_alone() {
        let graph = block(64, 96, 8, 2, 8, false, false);
        let spared: Vec<_> = graph
            .linears()
            .filter(|(id, ..)| graph.feeds_queries_or_keys(*id))
            .map(|(_, name, ..)| name)
            .collect();
        assert_eq!(spared, ["self_attn.q_proj", "self_attn.k_proj"]);
    }
}
