//! Qwen3-Next and the text models of Qwen3.5 and Qwen3.6: most layers have a gated delta net in place of attention.
//! Attention has an output gate and rotates part of each head. Norms multiply by `1 + weight`.

use super::decoder::{Decoder, Defaults};
use super::experts::{GatedExperts, SharedExpert, routing, sparse_layers};
use super::mixers::{DeltaProjections, GatedDeltaNet, Mixer};
use super::parts::{DecoderBlock, HeadNorms, NormKind, Projections};
use super::{Architecture, DeltaNet, Family, RoutingRule};
use crate::Result;
use crate::checkpoint::ConfigFields;

#[derive(Debug, Clone, Copy)]
pub(super) struct Qwen35;

#[derive(Debug, Clone, Copy)]
pub(super) struct Qwen35Moe;

#[derive(Debug, Clone, Copy)]
pub(super) struct Qwen3Next;

impl Family for Qwen35 {
    fn name(&self) -> &'static str {
        "qwen3_5_text"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Qwen3_5ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = Decoder::read(config, defaults(self.name(), 4))?;
        architecture(&d, DeltaProjections::Separate, |_| None)
    }
}

impl Family for Qwen35Moe {
    fn name(&self) -> &'static str {
        "qwen3_5_moe_text"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Qwen3_5MoeForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        const NORMALIZED: &str = "norm_topk_prob";
        if config.optional_bool(NORMALIZED)? == Some(false) {
            let reason = "is false, which is not supported, because implementations disagree on whether the \
                routing weights then add up to 1";
            return Err(config.unsupported_setting(NORMALIZED, reason));
        }
        // No layer has an MLP, so its width is not configured.
        let defaults = Defaults { intermediate_key: INTERMEDIATE, ..defaults(self.name(), 2) };
        let d = Decoder::read(config, defaults)?;
        let experts = experts(&d, true)?;
        architecture(&d, DeltaProjections::Separate, |_| Some(experts))
    }
}

impl Family for Qwen3Next {
    fn name(&self) -> &'static str {
        "qwen3_next"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Qwen3NextForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = Decoder::read(config, defaults(self.name(), 2))?;
        let sparse = match config.optional_usize(EXPERTS[1])? {
            Some(0) => vec![false; d.layers],
            _ => sparse_layers(config)?,
        };
        let experts = match sparse.contains(&true) {
            true => Some(experts(&d, d.flag("norm_topk_prob", true)?)?),
            false => None,
        };
        let of = |layer: usize| experts.filter(|_| sparse.get(layer) == Some(&true));
        architecture(&d, DeltaProjections::ByKeyHead, of)
    }
}

/// transformers 5 accepts either name; the second is the published one.
const EXPERTS: [&str; 2] = ["num_local_experts", "num_experts"];
const INTERMEDIATE: &str = "moe_intermediate_size";

fn defaults(family: &'static str, kv_heads: usize) -> Defaults {
    let (kv_heads, head_dim) = (Some(kv_heads), Some(256));
    Defaults { kv_heads, head_dim, norm: NormKind::RmsZeroCentered, ..Defaults::new(family) }
}

fn experts(d: &Decoder<'_>, normalized: bool) -> Result<GatedExperts> {
    let routing = RoutingRule { normalized, ..routing(d.config, &EXPERTS)? };
    let shared = SharedExpert::gated(d.config)?;
    Ok(GatedExperts {
        shared: Some(shared),
        ..GatedExperts::new(routing, d.config.require_positive(INTERMEDIATE)?)
    })
}

fn architecture(
    d: &Decoder<'_>,
    projections: DeltaProjections,
    experts: impl Fn(usize) -> Option<GatedExperts>,
) -> Result<Architecture> {
    let config = d.config;
    let mixer = Mixer::GatedDeltaNet(GatedDeltaNet {
        net: delta_net(config)?,
        kernel: config.optional_positive("linear_conv_kernel_dim")?.unwrap_or(4),
        projections,
    });
    let mut request = d.rope_request();
    request.partial = Some(0.25);
    let mut attention = d.attention(Some(request.read(config)?), [d.flag("attention_bias", false)?; 2]);
    attention.projections = Projections::WithOutputGate;
    attention.head_norms = Some(HeadNorms::DEFAULT);
    let full = d.block(attention, d.mlp(false));
    let linear = DecoderBlock { mixer: Some(mixer), ..full.clone() };
    let is_full = full_attention(config, d.layers)?;
    let block = |layer: usize| if is_full[layer] { full.clone() } else { linear.clone() };
    let mut architecture = d.with_experts(block, experts)?;
    architecture.further_module = Some("mtp.");
    architecture.fused = match projections {
        DeltaProjections::Separate => FUSED,
        DeltaProjections::ByKeyHead => architecture.fused,
    };
    Ok(architecture)
}

const FUSED: &[(&str, &[&str])] = &[
    ("self_attn.qkv_proj", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    ("linear_attn.in_proj_qkvz", &["linear_attn.in_proj_qkv", "linear_attn.in_proj_z"]),
    ("mlp.gate_up_proj", &["mlp.gate_proj", "mlp.up_proj"]),
    ("mlp.shared_expert.gate_up_proj", &["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"]),
];

/// A larger number of heads, or of channels per head, means that the configuration is damaged.
const MAX_DIM: usize = 1 << 16;

fn delta_net(config: &ConfigFields<'_>) -> Result<DeltaNet> {
    let number = |key: &str, default: usize| match config.optional_positive(key)?.unwrap_or(default) {
        number if number <= MAX_DIM => Ok(number),
        number => Err(config.error(key, format!("is {number}; at most {MAX_DIM} are supported"))),
    };
    let (keys, values) = ("linear_num_key_heads", "linear_num_value_heads");
    let (key_heads, value_heads) = (number(keys, 16)?, number(values, 32)?);
    if value_heads % key_heads != 0 {
        let reason = format!("is {value_heads}, which is not a multiple of `{keys}` ({key_heads})");
        return Err(config.error(values, reason));
    }
    Ok(DeltaNet {
        key_heads,
        repeat: value_heads / key_heads,
        key_dim: number("linear_key_head_dim", 128)?,
        value_dim: number("linear_value_head_dim", 128)?,
    })
}

fn full_attention(config: &ConfigFields<'_>, layers: usize) -> Result<Vec<bool>> {
    const KEY: &str = "layer_types";
    let Some(types) = config.optional_str_list(KEY)? else {
        let interval = config.optional_positive("full_attention_interval")?.unwrap_or(4);
        return Ok((0..layers).map(|layer| (layer + 1).is_multiple_of(interval)).collect());
    };
    if types.len() != layers {
        return Err(config.error(KEY, format!("has {} entries for {layers} blocks", types.len())));
    }
    let is_full = |kind: &&str| match *kind {
        "full_attention" => Ok(true),
        "linear_attention" => Ok(false),
        other => {
            let reason = format!("contains an unknown entry, `{}`", other.escape_default());
            Err(config.error(KEY, reason))
        }
    };
    types.iter().map(is_full).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;

    fn read(family: &dyn Family, changes: &Value) -> Result<Architecture> {
        let mut config = json!({
            "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 100,
            "intermediate_size": 96, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        });
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        family.describe(&ConfigFields::new(Path::new("config.json"), config.as_object().unwrap()))
    }

    #[test]
    fn experts_are_where_the_configuration_leaves_them() {
        let sparse = |family: &dyn Family, changes: Value| -> Vec<bool> {
            let architecture = read(family, &changes).unwrap();
            let has =
                |layer: usize| architecture.graph(layer).linears().any(|(_, name, ..)| name == "mlp.gate");
            (0..4).map(has).collect()
        };
        assert_eq!(sparse(&Qwen3Next, json!({})), [true; 4]);
        assert_eq!(sparse(&Qwen3Next, json!({ "mlp_only_layers": [0] })), [false, true, true, true]);
        assert_eq!(sparse(&Qwen3Next, json!({ "decoder_sparse_step": 2 })), [false, true, false, true]);
        assert_eq!(sparse(&Qwen3Next, json!({ "num_experts": 0 })), [false; 4]);
        let all = json!({ "mlp_only_layers": [0], "intermediate_size": null });
        assert_eq!(sparse(&Qwen35Moe, all), [true; 4]);
        assert_eq!(sparse(&Qwen35, json!({})), [false; 4]);
        let message = read(&Qwen35Moe, &json!({ "norm_topk_prob": false })).unwrap_err().to_string();
        assert!(message.contains("norm_topk_prob"), "{message}");
    }

    #[test]
    fn layers_that_predict_further_tokens_belong_to_no_block() {
        let architecture = read(&Qwen3Next, &json!({})).unwrap();
        assert!(architecture.is_in_further_block("mtp.layers.0.mlp.experts.1.up_proj.weight"));
        assert!(!architecture.is_in_further_block("model.layers.0.mlp.gate.weight"));
        let fused = read(&Qwen35Moe, &json!({})).unwrap().fused_modules();
        assert!(fused.iter().any(|f| f.name == "model.layers.2.mlp.shared_expert.gate_up_proj"));
    }
}
