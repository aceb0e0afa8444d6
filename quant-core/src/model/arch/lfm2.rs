//! LFM2, dense and MoE: most layers have a short convolution in place of attention; heads are normalized.

use super::decoder::{Decoder, Defaults};
use super::experts::{GatedExperts, routing};
use super::mixers::{Mixer, ShortConvolution};
use super::parts::{DecoderBlock, HeadNorms, Mlp, Placement};
use super::{Activation, Architecture, Correction, Family, RouterScores, RoutingRule};
use crate::Result;
use crate::checkpoint::ConfigFields;

#[derive(Debug, Clone, Copy)]
pub(super) struct Lfm2;

#[derive(Debug, Clone, Copy)]
pub(super) struct Lfm2Moe;

impl Family for Lfm2 {
    fn name(&self) -> &'static str {
        "lfm2"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Lfm2ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = decoder(config, self.name())?;
        architecture(&d, intermediate(&d)?, |_| None)
    }
}

impl Family for Lfm2Moe {
    fn name(&self) -> &'static str {
        "lfm2_moe"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Lfm2MoeForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = decoder(config, self.name())?;
        let stored = Correction { module: "feed_forward", tensor: "expert_bias", is_row: false };
        let routing = RoutingRule {
            scores: RouterScores::Sigmoid,
            correction: d.flag("use_expert_bias", true)?.then_some(stored),
            normalized: d.flag("norm_topk_prob", true)?,
            epsilon: 1e-6,
            scale: d.factor("routed_scaling_factor")?.unwrap_or(1.0) as f32,
            ..routing(config, &["num_experts", "num_local_experts"])?
        };
        let experts = GatedExperts {
            router: "feed_forward.gate",
            prefix: "feed_forward.experts",
            linears: ["w1", "w3", "w2"],
            fused: ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"],
            ..GatedExperts::new(routing, config.require_positive("moe_intermediate_size")?)
        };
        let dense = config.optional_usize("num_dense_layers")?.unwrap_or(2);
        architecture(&d, d.intermediate, |layer| (layer >= dense).then_some(experts))
    }
}

fn decoder<'a>(config: &'a ConfigFields<'a>, family: &'static str) -> Result<Decoder<'a>> {
    let defaults = Defaults {
        kv_heads: Some(8),
        theta: 1e6,
        norm_eps_key: "norm_eps",
        norm_eps: 1e-5,
        tied: true,
        ..Defaults::new(family)
    };
    Decoder::read(config, defaults)
}

fn architecture(
    d: &Decoder<'_>,
    intermediate: usize,
    experts: impl Fn(usize) -> Option<GatedExperts>,
) -> Result<Architecture> {
    let config = d.config;
    let mut attention = d.attention(Some(d.rope()?), [false; 2]);
    attention.output = "self_attn.out_proj";
    attention.head_norms =
        Some(HeadNorms { names: ["self_attn.q_layernorm", "self_attn.k_layernorm"], ..HeadNorms::DEFAULT });
    let mlp = Mlp::GatedAs {
        names: ["feed_forward.w1", "feed_forward.w3", "feed_forward.w2"],
        activation: Activation::Silu,
        intermediate,
    };
    let placement = Placement::Pre(["operator_norm", "ffn_norm"]);
    let attends = DecoderBlock { placement, ..d.block(attention, mlp) };
    let kernel = config.optional_positive("conv_L_cache")?.unwrap_or(3);
    let convolution = ShortConvolution { kernel, bias: d.flag("conv_bias", false)? };
    let convolves = DecoderBlock { mixer: Some(Mixer::ShortConvolution(convolution)), ..attends.clone() };
    let attention_layers = attention_layers(config, d.layers)?;
    let block = |layer: usize| if attention_layers[layer] { attends.clone() } else { convolves.clone() };
    let mut architecture = d.with_experts(block, experts)?;
    // The older name takes precedence if both are present.
    architecture.tied = d.flag("tie_embedding", architecture.tied)?;
    architecture.final_norm = Some(d.norm.op("model.embedding_norm", d.hidden));
    architecture.fused = &[
        ("self_attn.qkv_proj", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        ("feed_forward.w13", &["feed_forward.w1", "feed_forward.w3"]),
    ];
    Ok(architecture)
}

/// The intermediate size of the MLP. Unless `block_auto_adjust_ff_dim` is false, it is two thirds of the configured
/// value, multiplied by a factor and rounded up to a multiple unless the factor is `null`.
fn intermediate(d: &Decoder<'_>) -> Result<usize> {
    let config = d.config;
    let given = config.optional_positive("block_ff_dim")?.unwrap_or(d.intermediate);
    if !d.flag("block_auto_adjust_ff_dim", true)? {
        return Ok(given);
    }
    let width = 2 * given / 3;
    let factor = match config.has("block_ffn_dim_multiplier") {
        true => d.factor("block_ffn_dim_multiplier")?,
        false => Some(1.0),
    };
    let Some(factor) = factor else { return Ok(width) };
    let unit = config.optional_positive("block_multiple_of")?.unwrap_or(256);
    let wide = factor * width as f64;
    if wide > f64::from(1 << 30) {
        return Err(config.error(
            "block_ffn_dim_multiplier",
            format!("is {factor}, which is too large for an intermediate size of {width}"),
        ));
    }
    Ok((wide as usize).div_ceil(unit) * unit)
}

/// Returns whether each layer has attention.
fn attention_layers(config: &ConfigFields<'_>, layers: usize) -> Result<Vec<bool>> {
    const KEY: &str = "layer_types";
    let Some(types) = config.optional_str_list(KEY)? else {
        let listed = config.optional_usize_list("full_attn_idxs")?;
        return Ok((0..layers).map(|l| listed.as_ref().is_none_or(|list| list.contains(&l))).collect());
    };
    if types.len() != layers {
        return Err(config.error(KEY, format!("has {} entries for {layers} blocks", types.len())));
    }
    let attends = |kind: &&str| match *kind {
        "full_attention" => Ok(true),
        "conv" => Ok(false),
        other => Err(config.error(KEY, format!("contains an unknown entry, `{}`", other.escape_default()))),
    };
    types.iter().map(attends).collect()
}
