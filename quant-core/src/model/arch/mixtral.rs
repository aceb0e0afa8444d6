//! Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE: Llama-like blocks with experts in place of the MLP, in some or all layers.

use super::decoder::{Decoder, Defaults};
use super::experts::{GatedExperts, SharedExpert, routing, sparse_layers};
use super::parts::{HeadNorms, Mlp};
use super::windows::Windows;
use super::{Architecture, Family, RoutingRule};
use crate::Result;
use crate::checkpoint::ConfigFields;

#[derive(Debug, Clone, Copy)]
pub(super) struct Mixtral;

#[derive(Debug, Clone, Copy)]
pub(super) struct Qwen3Moe;

#[derive(Debug, Clone, Copy)]
pub(super) struct Qwen2Moe;

#[derive(Debug, Clone, Copy)]
pub(super) struct Olmoe;

/// transformers 5 accepts either name for all these families, and writes the second.
const EXPERTS: [&str; 2] = ["num_experts", "num_local_experts"];

impl Family for Mixtral {
    fn name(&self) -> &'static str {
        "mixtral"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["MixtralForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let routing = RoutingRule { normalized: true, ..routing(config, &EXPERTS)? };
        let experts = GatedExperts {
            router: "block_sparse_moe.gate",
            prefix: "block_sparse_moe.experts",
            linears: ["w1", "w3", "w2"],
            ..GatedExperts::new(routing, config.require_positive("intermediate_size")?)
        };
        // Unlike in Mistral, a missing key means no window.
        let windows = match config.has("sliding_window") {
            true => Windows::uniform(config, Some(4096), true)?,
            false => Windows::Never,
        };
        let (theta, norm_eps) = (1e6, 1e-5);
        let d = Decoder::read(
            config,
            Defaults { kv_heads: Some(8), theta, norm_eps, ..Defaults::new(self.name()) },
        )?;
        let block = d.block(d.attention(Some(d.rope()?), [false; 2]), Mlp::Experts(experts));
        d.architecture(|layer| windows.apply(&block, layer))
    }
}

impl Family for Qwen3Moe {
    fn name(&self) -> &'static str {
        "qwen3_moe"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Qwen3MoeForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let routing = normalized_if_asked(config)?;
        let experts = GatedExperts::new(routing, config.require_positive("moe_intermediate_size")?);
        let d = Decoder::read(config, Defaults { kv_heads: Some(4), ..Defaults::new(self.name()) })?;
        let mut attention = d.attention(Some(d.rope()?), [d.flag("attention_bias", false)?; 2]);
        attention.head_norms = Some(HeadNorms::DEFAULT);
        // Unlike in Qwen3, all blocks have a window; `max_window_layers` is not read.
        let windows = Windows::uniform(config, Some(4096), d.flag("use_sliding_window", false)?)?;
        let sparse = sparse_layers(config)?;
        let block = d.block(attention, d.mlp(false));
        let experts = |layer: usize| (sparse.get(layer) == Some(&true)).then_some(experts);
        d.with_experts(|layer| windows.apply(&block, layer), experts)
    }
}

impl Family for Qwen2Moe {
    fn name(&self) -> &'static str {
        "qwen2_moe"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Qwen2MoeForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let routing = normalized_if_asked(config)?;
        let experts = GatedExperts {
            shared: Some(SharedExpert::gated(config)?),
            ..GatedExperts::new(routing, config.require_positive("moe_intermediate_size")?)
        };
        let d = Decoder::read(config, Defaults { kv_heads: Some(16), ..Defaults::new(self.name()) })?;
        let attention = d.attention(Some(d.rope()?), [d.flag("qkv_bias", true)?, false]);
        // Among the first `max_window_layers` blocks, every second one has a window. In Qwen2, the blocks after the
        // first `max_window_layers` have one.
        let windows = match d.flag("use_sliding_window", false)? {
            true => {
                let below = config.optional_usize("max_window_layers")?.unwrap_or(28);
                Windows::patterned(config, Some(4096), |layer| layer < below && layer.is_multiple_of(2))?
            }
            // If windows are disabled, transformers writes a window of 0.
            false => Windows::off(config)?,
        };
        let sparse = sparse_layers(config)?;
        let block = d.block(attention, d.mlp(false));
        let experts = |layer: usize| (sparse.get(layer) == Some(&true)).then_some(experts);
        d.with_experts(|layer| windows.apply(&block, layer), experts)
    }
}

impl Family for Olmoe {
    fn name(&self) -> &'static str {
        "olmoe"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["OlmoeForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        if let Some(bound) = config.optional_f64("clip_qkv")? {
            let reason = format!("is {bound}; clamping queries, keys and values is not supported");
            return Err(config.unsupported_setting("clip_qkv", reason));
        }
        let routing = normalized_if_asked(config)?;
        let experts = GatedExperts::new(routing, config.require_positive("intermediate_size")?);
        let d = Decoder::read(config, Defaults { norm_eps: 1e-5, ..Defaults::new(self.name()) })?;
        let mut attention = d.attention(Some(d.rope()?), [d.flag("attention_bias", false)?; 2]);
        attention.head_norms = Some(HeadNorms { whole_width: true, ..HeadNorms::DEFAULT });
        let block = d.block(attention, Mlp::Experts(experts));
        d.architecture(|_| block.clone())
    }
}

fn normalized_if_asked(config: &ConfigFields<'_>) -> Result<RoutingRule> {
    let normalized = config.optional_bool("norm_topk_prob")?.unwrap_or(false);
    Ok(RoutingRule { normalized, ..routing(config, &EXPERTS)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(family: &dyn Family, changes: Value) -> Result<Architecture> {
        let mut config = json!({
            "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
            "num_hidden_layers": 4, "vocab_size": 100, "num_experts_per_tok": 2, "num_local_experts": 3,
            "moe_intermediate_size": 32,
        });
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        let path = std::path::Path::new("config.json");
        family.describe(&ConfigFields::new(path, config.as_object().unwrap()))
    }

    /// The fold groups of the last layer by name: producer, consumers and inspected node.
    fn groups(architecture: &Architecture) -> Vec<(String, Vec<String>, String)> {
        let graph = architecture.graph(architecture.layers - 1);
        let name = |id: usize| graph.name(id).to_owned();
        let of = |group: super::super::FoldGroup| {
            let consumers = group.consumers.iter().map(|&c| name(c)).collect();
            (name(group.producer), consumers, name(group.inspected))
        };
        graph.fold_groups().into_iter().map(of).collect()
    }

    #[test]
    fn the_router_and_every_expert_are_consumers_of_the_norm() {
        let groups = groups(&read(&Mixtral, json!({})).unwrap());
        let experts =
            |linear: &'static str| (0..3).map(move |e| format!("block_sparse_moe.experts.{e}.{linear}"));
        let mut consumers = vec!["block_sparse_moe.gate".to_owned()];
        consumers.extend(experts("w1").zip(experts("w3")).flat_map(|(gate, up)| [gate, up]));
        assert_eq!(
            groups[2],
            ("post_attention_layernorm".into(), consumers, "block_sparse_moe.experts".into())
        );
        for (group, (up, down)) in groups[3..].iter().zip(experts("w3").zip(experts("w2"))) {
            assert_eq!(group, &(up, vec![down.clone()], down));
        }
        assert_eq!(groups.len(), 6);
        assert_eq!(groups[0].0, "input_layernorm");
    }

    #[test]
    fn routers_are_folded_and_never_quantized() {
        let architecture = read(&Qwen3Moe, json!({})).unwrap();
        let graph = architecture.graph(0);
        let float = graph.linears().filter(|(id, ..)| !graph.nodes()[*id].op.is_quantizable());
        assert_eq!(float.map(|(_, name, ..)| name).collect::<Vec<_>>(), ["mlp.gate"]);
        let (down, ..) = graph.linears().find(|(_, name, ..)| *name == "mlp.experts.1.down_proj").unwrap();
        assert!((graph.share_of_tokens(down) - 2.0 / 3.0).abs() < 1e-12);
        assert!(graph.rows_selected_by(down).is_some() && graph.rows_selected_by(graph.output()).is_none());
    }

    #[test]
    fn layers_without_experts_have_an_mlp() {
        let kinds = |changes: Value| -> Vec<bool> {
            let architecture = read(&Qwen3Moe, changes).unwrap();
            let has =
                |layer: usize| architecture.graph(layer).linears().any(|(_, name, ..)| name == "mlp.gate");
            (0..4).map(has).collect()
        };
        assert_eq!(kinds(json!({})), [true; 4]);
        assert_eq!(kinds(json!({ "decoder_sparse_step": 2 })), [false, true, false, true]);
        assert_eq!(kinds(json!({ "mlp_only_layers": [0, 3, 9] })), [false, true, true, false]);
        assert_eq!(kinds(json!({ "mlp_only_layers": null })), [true; 4]);
        let mixed = read(&Qwen3Moe, json!({ "mlp_only_layers": [0] })).unwrap();
        assert_eq!(
            mixed.blocks.kinds().map(|kind| (kind.first, kind.layers)).collect::<Vec<_>>(),
            [(0, 1), (1, 3)]
        );
        assert!(mixed.fused_modules().iter().any(|f| f.name == "model.layers.0.mlp.gate_up_proj"));
        assert!(!mixed.fused_modules().iter().any(|f| f.name == "model.layers.1.mlp.gate_up_proj"));
    }

    /// Published Qwen3-MoE configurations contain `max_window_layers`, but it has no effect in transformers.
    #[test]
    fn windows_are_those_of_all_blocks() {
        let windows = |family: &dyn Family, changes: Value| -> Vec<Option<usize>> {
            let architecture = read(family, changes).unwrap();
            (0..4).map(|layer| architecture.graph(layer).attentions().next().unwrap().window).collect()
        };
        let on = |more: Value| {
            let mut changes = json!({ "use_sliding_window": true, "sliding_window": 16 });
            changes.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            changes
        };
        assert_eq!(windows(&Qwen3Moe, on(json!({}))), [Some(16); 4]);
        assert_eq!(windows(&Qwen3Moe, on(json!({ "max_window_layers": 3 }))), [Some(16); 4]);
        let off = json!({ "sliding_window": 16, "use_sliding_window": false, "max_window_layers": 1 });
        assert_eq!(windows(&Qwen3Moe, off), [None; 4]);
        assert_eq!(windows(&Mixtral, json!({ "sliding_window": 16 })), [Some(16); 4]);
        assert_eq!(windows(&Mixtral, json!({ "sliding_window": null })), [None; 4]);
        assert_eq!(windows(&Mixtral, json!({})), [None; 4]);
        let types = json!(["full_attention", "sliding_attention", "full_attention", "full_attention"]);
        let message = read(&Qwen3Moe, on(json!({ "layer_types": types }))).unwrap_err().to_string();
        assert!(message.contains("layer_types"), "{message}");
    }

    #[test]
    fn absurd_numbers_are_refused_by_their_field() {
        for (family, field, value) in [
            (&Mixtral as &dyn Family, "num_local_experts", json!(0)),
            (&Mixtral, "num_local_experts", json!(1_u64 << 40)),
            (&Mixtral, "num_experts_per_tok", json!(4)),
            (&Qwen3Moe, "num_experts", json!(-3)),
            (&Qwen3Moe, "moe_intermediate_size", json!(-1)),
            (&Qwen3Moe, "mlp_only_layers", json!(["0"])),
            (&Qwen3Moe, "decoder_sparse_step", json!(0)),
        ] {
            let message = read(family, json!({ field: value })).unwrap_err().to_string();
            assert!(message.contains(field), "{message}");
        }
    }
}
