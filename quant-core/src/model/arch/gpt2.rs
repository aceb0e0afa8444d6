//! GPT-2: layer norms with biases; learned positions; queries, keys and values in one linear. Linear weights are stored
//! as `[in, out]`.
//!
//! The configuration has its own key names; transformers accepts those of other families as aliases.

use super::decoder::{Decoder, Defaults, GELU_TANH, either};
use super::parts::{DecoderBlock, Mlp, NormKind, Placement, Projections};
use super::{Activation, Architecture, AttentionShape, Blocks, Family, LearnedPositions};
use crate::Result;
use crate::checkpoint::ConfigFields;

#[derive(Debug, Clone, Copy)]
pub(super) struct Gpt2;

impl Family for Gpt2 {
    fn name(&self) -> &'static str {
        "gpt2"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["GPT2LMHeadModel"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let hidden_key = either(config, ["n_embd", "hidden_size"]);
        let hidden = config.require_positive(hidden_key)?;
        let heads_key = either(config, ["n_head", "num_attention_heads"]);
        let heads = config.require_positive(heads_key)?;
        if hidden % heads != 0 {
            let reason = format!("is {heads}, which does not divide {hidden_key} {hidden}");
            return Err(config.error(heads_key, reason));
        }
        const ACTIVATION: &str = "activation_function";
        let activation = match config.optional_str(ACTIVATION)? {
            None => Activation::GeluTanh,
            Some(name) if GELU_TANH.contains(&name) => Activation::GeluTanh,
            // Used by Cerebras-GPT.
            Some("gelu") => Activation::Gelu,
            Some("relu") => Activation::Relu,
            Some(other) => {
                let reason =
                    format!("is `{}`; this family supports gelu_new, gelu and relu", other.escape_default());
                return Err(config.error(ACTIVATION, reason));
            }
        };
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
            intermediate: match config.optional_positive("n_inner")? {
                Some(width) => width,
                None => 4 * hidden,
            },
            shape: AttentionShape::new(heads, 1, hidden / heads),
            layers: Blocks::layers_by(config, either(config, ["n_layer", "num_hidden_layers"]))?,
            norm: Decoder::norms(config, defaults)?,
        };
        d.refuse("add_cross_attention", "this family does not support cross-attention")?;
        let scale = match d.flag("scale_attn_weights", true)? {
            true => 1.0 / (d.shape.head_dim as f64).sqrt(),
            false => 1.0,
        };
        let by_layer = d.flag("scale_attn_by_inverse_layer_idx", false)?;
        let mlp = Mlp::Plain {
            names: ["mlp.c_fc", "mlp.c_proj"],
            activation,
            intermediate: d.intermediate,
            bias: true,
        };
        let mut architecture = d.architecture(|layer| {
            let mut attention = d.attention(None, [true; 2]);
            attention.projections = Projections::Fused("attn.c_attn");
            attention.output = "attn.c_proj";
            let divisor = if by_layer { (layer + 1) as f64 } else { 1.0 };
            attention.shape.score_scale = Some((scale / divisor) as f32);
            DecoderBlock { placement: Placement::Pre(["ln_1", "ln_2"]), ..d.block(attention, mlp) }
        })?;
        architecture.max_positions = config
            .optional_positive(either(config, ["n_positions", "max_position_embeddings"]))?
            .unwrap_or(1024);
        architecture.learned_positions =
            Some(LearnedPositions { table: "transformer.wpe.weight".into(), offset: 0 });
        architecture.embedding = "transformer.wte.weight".into();
        architecture.final_norm = Some(d.norm.op("transformer.ln_f", hidden));
        architecture.block_prefix = "transformer.h.{}.";
        architecture.base = "transformer.";
        architecture.stored_by_columns = &["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"];
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
        let mut config = json!({ "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100 });
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let path = std::path::Path::new("config.json");
        Gpt2.describe(&ConfigFields::new(path, config.as_object().unwrap()))
    }

    #[test]
    fn defaults_are_those_of_the_published_models() {
        let a = describe(&json!({})).unwrap();
        assert!(a.tied && a.graph(0).linears().all(|(.., bias)| bias));
        assert_eq!((a.max_positions, a.attentions().len(), a.blocks.kinds().count()), (1024, 1, 1));
        assert!(a.graph(0).linears().any(|(_, name, shape, _)| name == "mlp.c_fc" && shape == [256, 64]));
        assert!(a.is_stored_by_columns("transformer.h.1.attn.c_attn.weight"));
        for name in
            ["transformer.h.2.attn.c_attn.weight", "transformer.h.1.ln_1.weight", "transformer.wte.weight"]
        {
            assert!(!a.is_stored_by_columns(name), "{name}");
        }
        let other = describe(&json!({ "hidden_size": 128, "n_embd": null, "num_hidden_layers": 3 })).unwrap();
        // The family's own key takes precedence if it has a value.
        assert_eq!((other.hidden, other.layers), (128, 2));
    }

    #[test]
    fn scores_may_be_divided_by_the_layer() {
        let scales = |changes: Value| -> Vec<f32> {
            let a = describe(&changes).unwrap();
            (0..2).map(|layer| a.graph(layer).attentions().next().unwrap().scale()).collect()
        };
        assert_eq!(scales(json!({})), [0.25, 0.25]);
        assert_eq!(scales(json!({ "scale_attn_by_inverse_layer_idx": true })), [0.25, 0.125]);
        assert_eq!(scales(json!({ "scale_attn_weights": false })), [1.0, 1.0]);
    }

    #[test]
    fn what_is_not_supported_is_refused_by_its_field() {
        for (field, value) in [
            ("n_head", json!(5)),
            ("n_embd", json!(0)),
            ("n_layer", json!(1 << 20)),
            ("n_inner", json!(-1)),
            ("activation_function", json!("silu")),
            ("add_cross_attention", json!(true)),
            ("layer_norm_epsilon", json!(2.0)),
        ] {
            let message = describe(&json!({ field: value })).unwrap_err().to_string();
            assert!(message.contains(field), "{message}");
        }
    }
}
