//! Phi-3.5-MoE: layer norms with biases, and experts chosen one after the other, each weighted by a softmax over the
//! logits close to the largest.

use super::decoder::{Decoder, Defaults};
use super::experts::{GatedExperts, routing};
use super::parts::{Mlp, NormKind};
use super::windows::Windows;
use super::{Architecture, Family, RouterScores, RoutingRule};
use crate::Result;
use crate::checkpoint::ConfigFields;
use crate::model::rope::{Rope, RopeScaling};

#[derive(Debug, Clone, Copy)]
pub(super) struct PhiMoe;

impl Family for PhiMoe {
    fn name(&self) -> &'static str {
        "phimoe"
    }

    // Published models use the second name.
    fn architectures(&self) -> &'static [&'static str] {
        &["PhimoeForCausalLM", "PhiMoEForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        const CHOSEN: &str = "num_experts_per_tok";
        const JITTER: &str = "router_jitter_noise";
        let defaults = Defaults {
            kv_heads: Some(8),
            theta: 1e6,
            norm: NormKind::LayerNorm,
            norm_eps: 1e-5,
            ..Defaults::new(self.name())
        };
        let d = Decoder::read(config, defaults)?;
        let jitter = config.optional_f64(JITTER)?.unwrap_or(0.01);
        if !(0.0..=1.0).contains(&jitter) {
            return Err(config.error(JITTER, format!("is {jitter}; it must be from 0 to 1")));
        }
        let scores = RouterScores::Sparse { tolerance: (2.0 * jitter) as f32 };
        let routing = RoutingRule { scores, ..routing(config, &["num_experts", "num_local_experts"])? };
        if routing.top_k != 2 {
            let reason = format!("is {}; this family supports only 2 experts per token", routing.top_k);
            return Err(config.error(CHOSEN, reason));
        }
        let experts = GatedExperts {
            router: "block_sparse_moe.gate",
            prefix: "block_sparse_moe.experts",
            linears: ["w1", "w3", "w2"],
            ..GatedExperts::new(routing, d.intermediate)
        };
        let mut attention = d.attention(Some(rope(&d)?), [d.flag("attention_bias", false)?; 2]);
        attention.shape.window = Windows::uniform(config, None, true)?.of(0);
        let block = d.block(attention, Mlp::Experts(experts));
        let mut architecture = d.architecture(|_| block.clone())?;
        // transformers names this linear differently.
        architecture.router_alias = Some(["block_sparse_moe.gate", "mlp.router"]);
        architecture.head_bias = d.flag("lm_head_bias", false)?;
        Ok(architecture)
    }
}

/// Unlike in other families with `longrope`, the configuration contains the attention factors for short and long
/// sequences.
fn rope(d: &Decoder<'_>) -> Result<Rope> {
    let mut rope = d.rope()?;
    let RopeScaling::LongRope(longrope) = &mut rope.scaling else { return Ok(rope) };
    const SHORT: &str = "short_mscale";
    const LONG: &str = "long_mscale";
    let fields = d.config.optional_object("rope_scaling")?;
    let Some(fields) = fields.or(d.config.optional_object("rope_parameters")?) else { return Ok(rope) };
    let (short, long) = (fields.require_f64(SHORT)?, fields.require_f64(LONG)?);
    if !(short > 0.0 && (short as f32).is_normal()) {
        return Err(fields.error(SHORT, format!("is {short}; it must be positive and in the range of f32")));
    }
    if short != long {
        return Err(fields.error(LONG, format!("is {long}, but {SHORT} is {short}; both must be equal")));
    }
    longrope.attention_factor = short;
    Ok(rope)
}
