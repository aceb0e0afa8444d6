//! InternLM2 (Llama's block with different names and a fused linear for queries, keys and values) and InternLM3
//! (Llama's block with different biases).

use super::decoder::{Decoder, Defaults};
use super::parts::{DecoderBlock, Mlp, Placement, Projections};
use super::{Architecture, Family};
use crate::Result;
use crate::checkpoint::ConfigFields;

#[derive(Debug, Clone, Copy)]
pub(super) struct InternLm2;

#[derive(Debug, Clone, Copy)]
pub(super) struct InternLm3;

impl Family for InternLm2 {
    fn name(&self) -> &'static str {
        "internlm2"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["InternLM2ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = Decoder::read(config, Defaults::new(self.name()))?;
        let mut attention = d.attention(Some(d.rope()?), [d.flag("bias", true)?; 2]);
        attention.projections = Projections::FusedByHead("attention.wqkv");
        attention.output = "attention.wo";
        let mlp = Mlp::GatedAs {
            names: ["feed_forward.w1", "feed_forward.w3", "feed_forward.w2"],
            activation: d.defaults.activation.0,
            intermediate: d.intermediate,
        };
        let placement = Placement::Pre(["attention_norm", "ffn_norm"]);
        let block = DecoderBlock { placement, ..d.block(attention, mlp) };
        let mut architecture = d.architecture(|_| block.clone())?;
        architecture.embedding = "model.tok_embeddings.weight".into();
        architecture.head = "output".into();
        architecture.fused = &[("feed_forward.gate_up_proj", &["feed_forward.w1", "feed_forward.w3"])];
        Ok(architecture)
    }
}

impl Family for InternLm3 {
    fn name(&self) -> &'static str {
        "internlm3"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["InternLM3ForCausalLM"]
    }

    /// transformers has no model class for InternLM3. It loads these models as Llama and saves them under Llama's class
    /// name.
    fn borrowed_classes(&self) -> &'static [&'static str] {
        &["LlamaForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let defaults = Defaults {
            kv_heads: Some(2),
            head_dim: (!config.has("head_dim")).then_some(128),
            norm_eps: 1e-5,
            ..Defaults::new(self.name())
        };
        let d = Decoder::read(config, defaults)?;
        // The first key is that of published configurations; the second is its name in transformers.
        let either = |keys: [&str; 2]| -> Result<bool> {
            let found = config.optional_bool(keys[0])?;
            Ok(found.or(config.optional_bool(keys[1])?).unwrap_or(false))
        };
        let (qkv_bias, bias) = (either(["qkv_bias", "attention_bias"])?, either(["bias", "mlp_bias"])?);
        let block = d.block(d.attention(Some(d.rope()?), [qkv_bias, bias]), d.mlp(bias));
        d.architecture(|_| block.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::MemorySource;
    use crate::model::arch;
    use serde_json::{Value, json};

    fn read(changes: &Value) -> Result<Architecture> {
        let mut config = json!({
            "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2,
            "num_hidden_layers": 1, "vocab_size": 100, "head_dim": 8,
        });
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let path = std::path::Path::new("config.json");
        arch::describe(&ConfigFields::new(path, config.as_object().unwrap()), &MemorySource::new())
    }

    fn linears(architecture: &Architecture) -> Vec<(String, bool)> {
        architecture.graph(0).linears().map(|(_, name, _, bias)| (name.to_owned(), bias)).collect()
    }

    #[test]
    fn biases_have_keys_of_their_own() {
        let biased = |config: Value| -> Vec<String> {
            let linears = linears(&read(&config).unwrap());
            linears.into_iter().filter(|(_, bias)| *bias).map(|(name, _)| name).collect()
        };
        let of = |more: Value| {
            let mut config = json!({ "architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3" });
            config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            biased(config)
        };
        let qkv = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
        let rest = ["self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];
        assert_eq!(of(json!({})), [""; 0]);
        assert_eq!(of(json!({ "qkv_bias": true })), qkv);
        assert_eq!(of(json!({ "bias": true })), rest);
        assert_eq!(of(json!({ "attention_bias": true, "mlp_bias": true })).len(), 7);
        let internlm2 = json!({ "architectures": ["InternLM2ForCausalLM"] });
        assert_eq!(biased(internlm2), ["attention.wqkv", "attention.wo"]);
    }

    /// transformers saves InternLM3 as Llama's class; Llama itself must stay unaffected.
    #[test]
    fn the_model_type_distinguishes_families_of_one_class() {
        let of = |kind: &str| {
            read(&json!({ "architectures": ["LlamaForCausalLM"], "model_type": kind })).map(|a| a.family)
        };
        assert_eq!(of("internlm3").unwrap(), "internlm3");
        assert_eq!(of("llama").unwrap(), "llama");
        assert!(of("internlm2").unwrap_err().to_string().contains("model_type"));
        let swapped = json!({ "architectures": ["InternLM3ForCausalLM"], "model_type": "llama" });
        assert!(read(&swapped).is_err());
    }

    /// For each key head, the queries come first, then the key, then the value.
    #[test]
    fn rows_are_grouped_by_key_head() {
        let a = read(&json!({ "architectures": ["InternLM2ForCausalLM"] })).unwrap();
        let slices: Vec<[usize; 3]> = (a.graph(0).nodes().iter())
            .filter_map(|node| match node.op {
                arch::Op::Slice { period, start, width } => Some([period, start, width]),
                _ => None,
            })
            .collect();
        assert_eq!(slices, [[48, 0, 32], [48, 32, 8], [48, 40, 8]]);
        assert_eq!(a.fused_modules().len(), 1);
    }
}
