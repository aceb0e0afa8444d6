//! Bloom: layer norms with biases, one of them on the embeddings; ALiBi instead of position embeddings; queries, keys
//! and values of each head in consecutive rows of one linear.

use super::decoder::{Decoder, Defaults, either};
use super::parts::{Mlp, NormKind, Projections};
use super::{Activation, Architecture, AttentionShape, Blocks, Family};
use crate::Result;
use crate::checkpoint::ConfigFields;

#[derive(Debug, Clone, Copy)]
pub(super) struct Bloom;

impl Family for Bloom {
    fn name(&self) -> &'static str {
        "bloom"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["BloomForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let hidden_key = either(config, ["n_embed", "hidden_size"]);
        let hidden = config.require_positive(hidden_key)?;
        let heads_key = either(config, ["n_head", "num_attention_heads"]);
        let heads = config.require_positive(heads_key)?;
        if hidden % heads != 0 {
            let reason = format!("is {heads}, which does not divide {hidden_key} {hidden}");
            return Err(config.error(heads_key, reason));
        }
        const INNER: &str = "n_inner";
        if let Some(width) = config.optional_positive(INNER)?.filter(|width| *width != 4 * hidden) {
            let reason = format!("is {width}; in this family, it must be four times the hidden size");
            return Err(config.error(INNER, reason));
        }
        let defaults = Defaults {
            norm: NormKind::LayerNorm,
            norm_eps_key: "layer_norm_epsilon",
            norm_eps: 1e-5,
            tied: true,
            ..Defaults::new(self.name())
        };
        let d = Decoder {
            config,
            defaults,
            hidden,
            intermediate: 4 * hidden,
            shape: AttentionShape { alibi: true, ..AttentionShape::new(heads, 1, hidden / heads) },
            layers: Blocks::layers_by(config, either(config, ["n_layer", "num_hidden_layers"]))?,
            norm: Decoder::norms(config, defaults)?,
        };
        d.refuse(
            "apply_residual_connection_post_layernorm",
            "adding the normalized hidden states to the residual stream is not supported",
        )?;
        let mut attention = d.attention(None, [true; 2]);
        attention.projections = Projections::FusedByHead("self_attention.query_key_value");
        attention.output = "self_attention.dense";
        let mlp = Mlp::Plain {
            names: ["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"],
            activation: Activation::GeluTanh,
            intermediate: d.intermediate,
            bias: true,
        };
        let block = d.block(attention, mlp);
        let mut architecture = d.architecture(|_| block.clone())?;
        architecture.max_positions = config.optional_positive("seq_length")?.unwrap_or(2048);
        architecture.embedding = "transformer.word_embeddings.weight".into();
        architecture.embedding_norm = Some(d.norm.op("transformer.word_embeddings_layernorm", hidden));
        architecture.final_norm = Some(d.norm.op("transformer.ln_f", hidden));
        architecture.block_prefix = "transformer.h.{}.";
        architecture.base = "transformer.";
        architecture.fused = &[];
        architecture.smoothing = 0.5;
        Ok(architecture)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn describe(changes: &Value) -> Result<Architecture> {
        let mut config = json!({ "n_embed": 64, "num_attention_heads": 4, "n_layer": 2, "vocab_size": 100 });
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let path = std::path::Path::new("config.json");
        Bloom.describe(&ConfigFields::new(path, config.as_object().unwrap()))
    }

    #[test]
    fn keys_have_two_names() {
        let published = describe(&json!({ "seq_length": 512 })).unwrap();
        assert_eq!((published.hidden, published.layers, published.max_positions), (64, 2, 512));
        let [shape] = published.attentions()[..] else { panic!("expected one attention") };
        assert!(shape.alibi && shape.heads() == 4 && published.ropes().next().is_none());
        let mut config = json!({ "hidden_size": 64, "n_head": 8, "n_layer": 2, "vocab_size": 100 });
        let path = std::path::Path::new("config.json");
        let written = Bloom.describe(&ConfigFields::new(path, config.as_object().unwrap())).unwrap();
        assert_eq!((written.hidden, written.attentions()[0].heads()), (64, 8));
        config.as_object_mut().unwrap().remove("n_head");
        assert!(Bloom.describe(&ConfigFields::new(path, config.as_object().unwrap())).is_err());
    }

    #[test]
    fn what_is_not_supported_is_refused_by_its_field() {
        for (field, value) in [
            ("num_attention_heads", json!(5)),
            ("n_embed", json!("64")),
            ("n_inner", json!(100)),
            ("n_layer", json!(1 << 20)),
            ("apply_residual_connection_post_layernorm", json!(true)),
        ] {
            let message = describe(&json!({ field: value })).unwrap_err().to_string();
            assert!(message.contains(field), "{message}");
        }
        assert!(describe(&json!({ "n_inner": 256 })).is_ok());
    }
}
