//! OPT: layer norms, biases, a ReLU between the two linears of the MLP, learned positions.
//!
//! Not supported: the post-norm variant (`do_layer_norm_before: false`) and embeddings narrower than the hidden states
//! (`word_embed_proj_dim`), both of which only opt-350m has.

use super::{
    Activation, Architecture, AttentionShape, BlockGraph, Blocks, Family, GraphBuilder, LayerNormParameters,
    LearnedPositions, LogitsTransform, Op,
};
use crate::Result;
use crate::checkpoint::ConfigFields;

#[derive(Debug, Clone, Copy)]
pub(super) struct Opt;

const POSITION_OFFSET: usize = 2;
/// No configuration sets it.
const NORM_EPS: f64 = 1e-5;

impl Family for Opt {
    fn name(&self) -> &'static str {
        "opt"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["OPTForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let hidden = config.require_positive("hidden_size")?;
        let heads = config.require_positive("num_attention_heads")?;
        if hidden % heads != 0 {
            return Err(config.error(
                "num_attention_heads",
                format!("is {heads}, which does not divide hidden_size {hidden}"),
            ));
        }
        let flag = |key: &str, default: bool| config.optional_bool(key).map(|value| value.unwrap_or(default));
        if !flag("do_layer_norm_before", true)? {
            return Err(config.unsupported_setting(
                "do_layer_norm_before",
                "is false; norms after the residual additions, as in opt-350m, are not supported",
            ));
        }
        if let Some(width) = config.optional_positive("word_embed_proj_dim")?.filter(|w| *w != hidden) {
            return Err(config.unsupported_setting(
                "word_embed_proj_dim",
                format!("is {width}, but hidden_size is {hidden}; projected embeddings are not supported"),
            ));
        }
        let activation = config.optional_str("activation_function")?.unwrap_or("relu");
        if activation != "relu" {
            return Err(config.error(
                "activation_function",
                format!("is `{activation}`; this family supports only `relu`"),
            ));
        }
        let sizes = Sizes {
            hidden,
            ffn: config.require_positive("ffn_dim")?,
            heads,
            bias: flag("enable_bias", true)?,
            parameters: match flag("layer_norm_elementwise_affine", true)? {
                true => LayerNormParameters::WeightAndBias,
                false => LayerNormParameters::None,
            },
        };
        let final_norm = Op::LayerNorm {
            name: "model.decoder.final_layer_norm".into(),
            width: hidden,
            parameters: sizes.parameters,
            eps: NORM_EPS,
        };
        let layers = Blocks::layers(config)?;
        Ok(Architecture {
            family: self.name(),
            hidden,
            vocab: config.require_positive("vocab_size")?,
            layers,
            max_positions: config.optional_positive("max_position_embeddings")?.unwrap_or(2048),
            selected_keys: None,
            smoothing: 0.5,
            learned_positions: Some(LearnedPositions {
                table: "model.decoder.embed_positions.weight".into(),
                offset: POSITION_OFFSET,
            }),
            embedding_norm: None,
            embedding_scale: None,
            logits: LogitsTransform::IDENTITY,
            tied: flag("tie_word_embeddings", true)?,
            embedding: "model.decoder.embed_tokens.weight".into(),
            final_norm: (!flag("_remove_final_layer_norm", false)?).then_some(final_norm),
            head: "lm_head".into(),
            head_alias: None,
            router_alias: None,
            head_bias: false,
            block_prefix: "model.decoder.layers.{}.",
            base: "model.",
            stored_by_columns: &[],
            fused: &[("self_attn.qkv_proj", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"])],
            multiplied_inputs: Vec::new(),
            wrapper: None,
            per_layer_inputs: None,
            unread: None,
            further_blocks: 0,
            further_module: None,
            fused_experts: None,
            blocks: Blocks::uniform(layers, block(&sizes)),
        })
    }
}

struct Sizes {
    hidden: usize,
    ffn: usize,
    heads: usize,
    bias: bool,
    parameters: LayerNormParameters,
}

fn block(&Sizes { hidden, ffn, heads, bias, parameters }: &Sizes) -> BlockGraph {
    let linear =
        |name: &str, shape: [usize; 2]| Op::Linear { name: name.to_owned(), shape, bias, stays_float: false };
    let norm = |name: &str| Op::LayerNorm { name: name.to_owned(), width: hidden, parameters, eps: NORM_EPS };
    let mut g = GraphBuilder::default();
    let input = g.add(Op::Input { width: hidden }, &[]);

    let x = g.add(norm("self_attn_layer_norm"), &[input]);
    let q = g.add(linear("self_attn.q_proj", [hidden, hidden]), &[x]);
    let k = g.add(linear("self_attn.k_proj", [hidden, hidden]), &[x]);
    let v = g.add(linear("self_attn.v_proj", [hidden, hidden]), &[x]);
    let shape = AttentionShape::new(heads, 1, hidden / heads);
    let attended = g.add(Op::Attention(shape), &[q, k, v]);
    let out = g.add(linear("self_attn.out_proj", [hidden, hidden]), &[attended]);
    let attended_stream = g.add(Op::Add, &[input, out]);

    let x = g.add(norm("final_layer_norm"), &[attended_stream]);
    let fc1 = g.add(linear("fc1", [ffn, hidden]), &[x]);
    let rectified = g.add(Op::Activation(Activation::Relu), &[fc1]);
    let fc2 = g.add(linear("fc2", [hidden, ffn]), &[rectified]);
    g.add(Op::Add, &[attended_stream, fc2]);
    g.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn describe(changes: Value) -> Result<Architecture> {
        let mut config = json!({
            "hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 4, "num_hidden_layers": 2,
            "vocab_size": 100,
        });
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        let path = std::path::Path::new("config.json");
        Opt.describe(&ConfigFields::new(path, config.as_object().unwrap()))
    }

    #[test]
    fn balance_lists_follow_from_the_graph() {
        let groups = |affine: bool| -> Vec<(String, Vec<String>, String)> {
            let architecture = describe(json!({ "layer_norm_elementwise_affine": affine })).unwrap();
            let graph = architecture.graph(0);
            let name = |id: usize| graph.name(id).to_owned();
            let of = |g: super::super::FoldGroup| {
                assert_eq!(g.repeat, 1);
                (name(g.producer), g.consumers.iter().map(|&c| name(c)).collect(), name(g.inspected))
            };
            graph.fold_groups().into_iter().map(of).collect()
        };
        let expected = [
            (
                "self_attn_layer_norm",
                &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"][..],
                "self_attn.out_proj",
            ),
            ("self_attn.v_proj", &["self_attn.out_proj"], "self_attn.out_proj"),
            ("final_layer_norm", &["fc1"], "fc1"),
            ("fc1", &["fc2"], "fc2"),
        ];
        let expected = expected.map(|(producer, consumers, inspected)| {
            (producer.to_owned(), consumers.iter().map(|c| (*c).to_owned()).collect(), inspected.to_owned())
        });
        assert_eq!(groups(true), expected);
        assert_eq!(groups(false), [expected[1].clone(), expected[3].clone()]);
    }

    #[test]
    fn defaults() {
        let a = describe(json!({})).unwrap();
        assert!(a.tied && a.graph(0).linears().all(|(.., bias)| bias));
        assert_eq!((a.max_positions, a.attentions()[0].head_dim, a.attentions()[0].kv_heads), (2048, 16, 4));
        assert_eq!(a.in_block(1, "fc1"), "model.decoder.layers.1.fc1");
        let plain = describe(json!({ "enable_bias": false, "_remove_final_layer_norm": true })).unwrap();
        assert!(plain.final_norm.is_none() && plain.graph(0).linears().all(|(.., bias)| !bias));
    }

    #[test]
    fn what_is_not_supported_is_refused_by_its_field() {
        for (field, value, phrase) in [
            ("do_layer_norm_before", json!(false), "opt-350m"),
            ("word_embed_proj_dim", json!(32), "projected embeddings"),
            ("activation_function", json!("gelu"), "`gelu`"),
            ("num_attention_heads", json!(5), "does not divide"),
            ("enable_bias", json!("yes"), "true or false"),
            ("ffn_dim", json!(0), "is 0"),
        ] {
            let message = describe(json!({ field: value })).unwrap_err().to_string();
            assert!(message.contains(field) && message.contains(phrase), "{message}");
        }
        assert!(describe(json!({ "word_embed_proj_dim": 64, "activation_function": "relu" })).is_ok());
    }
}
