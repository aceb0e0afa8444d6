//! Qwen3-Next and the text models of Qwen3.5 and Qwen3.6: most layers have a gated delta net in the place of attention;
//! attention has an output gate, and turns a quarter of each head; norms multiply by `1 + weight`.

use super::decoder::{Decoder, Defaults};
use super::mixers::{DeltaProjections, GatedDeltaNet, Mixer};
use super::parts::{DecoderBlock, HeadNorms, NormKind, Projections};
use super::{Architecture, DeltaNet, Family};
use crate::Result;
use crate::checkpoint::ConfigFields;

/// The family of `Qwen3_5ForCausalLM`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Qwen35;

/// The family of `Qwen3NextForCausalLM`.
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
        describe(config, self.name(), 4, DeltaProjections::Separate)
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
        let architecture = describe(config, self.name(), 2, DeltaProjections::ByKeyHead)?;
        check_dense(config, architecture.layers)?;
        Ok(architecture)
    }
}

/// Fails where a layer has experts: those of this family stand beside a shared one, which is not read.
fn check_dense(config: &ConfigFields<'_>, layers: usize) -> Result<()> {
    let experts = config.optional_usize("num_experts")?.unwrap_or(512);
    let step = config.optional_positive("decoder_sparse_step")?.unwrap_or(1);
    let dense = config.optional_usize_list("mlp_only_layers")?.unwrap_or_default();
    let has_experts = |layer: &usize| !dense.contains(layer) && (layer + 1).is_multiple_of(step);
    match (0..layers).find(has_experts).filter(|_| experts > 0) {
        Some(layer) => Err(config.error(
            "mlp_only_layers",
            format!("leaves experts to layer {layer}, and experts of this family are not supported"),
        )),
        None => Ok(()),
    }
}

fn describe(
    config: &ConfigFields<'_>,
    family: &'static str,
    kv_heads: usize,
    projections: DeltaProjections,
) -> Result<Architecture> {
    let (kv_heads, head_dim) = (Some(kv_heads), Some(256));
    let norm = NormKind::RmsZeroCentered;
    let d = Decoder::read(config, Defaults { kv_heads, head_dim, norm, ..Defaults::new(family) })?;
    let mixer = Mixer::GatedDeltaNet(GatedDeltaNet {
        net: delta_net(config)?,
        kernel: config.optional_positive("linear_conv_kernel_dim")?.unwrap_or(4),
        projections,
    });
    let mut request = d.rope_request();
    request.partial = Some(0.25);
    let mut attention = d.attention(Some(request.read(config)?), [d.flag("attention_bias", false)?; 2]);
    attention.projections = Projections::WithOutputGate;
    attention.head_norms = Some(HeadNorms::OF_HEADS);
    let full = d.block(attention, d.mlp(false));
    let linear = DecoderBlock { mixer: Some(mixer), ..full.clone() };
    let is_full = full_attention(config, d.layers)?;
    let mut architecture =
        d.architecture(|layer| if is_full[layer] { full.clone() } else { linear.clone() })?;
    // Parts of one value, which engines multiply as one matrix.
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
];

/// Heads, and channels of a head. No model has a hundredth of it; what is more is a damaged configuration.
const MOST: usize = 1 << 16;

fn delta_net(config: &ConfigFields<'_>) -> Result<DeltaNet> {
    let number = |key: &str, default: usize| match config.optional_positive(key)?.unwrap_or(default) {
        number if number <= MOST => Ok(number),
        number => Err(config.error(key, format!("is {number}; at most {MOST} are supported"))),
    };
    let (keys, values) = ("linear_num_key_heads", "linear_num_value_heads");
    let (key_heads, value_heads) = (number(keys, 16)?, number(values, 32)?);
    if value_heads % key_heads != 0 {
        let reason = format!("is {value_heads}, which the {key_heads} of `{keys}` do not divide");
        return Err(config.error(values, reason));
    }
    Ok(DeltaNet {
        key_heads,
        repeat: value_heads / key_heads,
        key_dim: number("linear_key_head_dim", 128)?,
        value_dim: number("linear_value_head_dim", 128)?,
    })
}

/// Whether each layer has attention: as `layer_types` says, else every `full_attention_interval`-th.
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
            let reason = format!("holds `{}`, which is not known", other.escape_default());
            Err(config.error(KEY, reason))
        }
    };
    types.iter().map(is_full).collect()
}
