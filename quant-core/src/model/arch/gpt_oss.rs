//! gpt-oss: experts with biases and a clamped gated product, attention sinks, and alternating windows.

use serde_json::json;

use super::decoder::{Decoder, Defaults};
use super::experts::{GatedExperts, Product, routing};
use super::parts::Mlp;
use super::windows::Windows;
use super::{Architecture, Family, RoutingRule};
use crate::Result;
use crate::checkpoint::ConfigFields;

#[derive(Debug, Clone, Copy)]
pub(super) struct GptOss;

impl Family for GptOss {
    fn name(&self) -> &'static str {
        "gpt_oss"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["GptOssForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        const ROPE: &str = "rope_parameters";
        if config.get(ROPE).is_none() && config.get("rope_scaling").is_none() {
            let mut map = config.map().clone();
            let yarn = json!({
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
                "original_max_position_embeddings": 4096,
            });
            map.insert(ROPE.into(), yarn);
            return describe(self.name(), &config.with_map(&map));
        }
        describe(self.name(), config)
    }
}

fn describe(family: &'static str, config: &ConfigFields<'_>) -> Result<Architecture> {
    let defaults = Defaults {
        kv_heads: Some(8),
        head_dim: Some(64),
        theta: 150_000.0,
        norm_eps: 1e-5,
        ..Defaults::new(family)
    };
    let d = Decoder::read(config, defaults)?;
    let factor = |key: &str, default: f64| Ok::<_, crate::Error>(d.factor(key)?.unwrap_or(default) as f32);
    let product =
        Product::Clamped { alpha: factor("swiglu_alpha", 1.702)?, limit: factor("swiglu_limit", 7.0)? };
    // A softmax over the chosen experts equals the softmax over all experts, normalized to sum to 1.
    let routing = RoutingRule { normalized: true, ..routing(config, &["num_experts", "num_local_experts"])? };
    let experts = GatedExperts {
        router: "mlp.router",
        router_bias: true,
        bias: true,
        product,
        alternate: true,
        ..GatedExperts::new(routing, d.intermediate)
    };
    let mut attention = d.attention(Some(d.rope()?), [d.flag("attention_bias", true)?; 2]);
    attention.shape.sinks = Some("self_attn");
    let windows = Windows::patterned(config, Some(128), |layer| layer.is_multiple_of(2))?;
    let block = d.block(attention, Mlp::Experts(experts));
    d.architecture(|layer| windows.apply(&block, layer))
}
