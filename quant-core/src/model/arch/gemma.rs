//! Gemma 2 and the text models of Gemma 3: zero-centered norms before and after attention and MLP, GELU in the MLP,
//! embeddings multiplied by `√hidden`, and sliding windows in most layers.

use super::decoder::{Decoder, Defaults, GELU_TANH};
use super::parts::{DecoderBlock, HeadNorms, NormKind, Placement};
use super::windows::Windows;
use super::{Activation, Architecture, AttentionShape, EmbeddingScale, Family, LogitsTransform};
use crate::Result;
use crate::checkpoint::ConfigFields;
use crate::model::rope::Rope;

#[derive(Debug, Clone, Copy)]
pub(super) struct Gemma2;

#[derive(Debug, Clone, Copy)]
pub(super) struct Gemma3Text;

/// The norms before attention and MLP, then those after.
pub(super) const SANDWICH: Placement = Placement::Sandwich(
    ["input_layernorm", "pre_feedforward_layernorm"],
    ["post_attention_layernorm", "post_feedforward_layernorm"],
);

impl Family for Gemma2 {
    fn name(&self) -> &'static str {
        "gemma2"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Gemma2ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = read(config, self.name())?;
        let windows = Windows::patterned(config, Some(4096), |layer| layer % 2 == 0)?;
        let rope = d.rope()?;
        let softcap = softcap(&d, "attn_logit_softcapping", Some(50.0))?;
        let mut architecture = describe(&d, &windows, |_| rope.clone(), None, softcap)?;
        architecture.logits.softcap = self::softcap(&d, "final_logit_softcapping", Some(30.0))?;
        Ok(architecture)
    }
}

impl Family for Gemma3Text {
    fn name(&self) -> &'static str {
        "gemma3_text"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Gemma3ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = read(config, self.name())?;
        let pattern = config.optional_positive("sliding_window_pattern")?.unwrap_or(6);
        let windows = Windows::patterned(config, Some(4096), |layer| !(layer + 1).is_multiple_of(pattern))?;
        if let Some(cap) = softcap(&d, "attn_logit_softcapping", None)? {
            // transformers ignores this key, but other implementations might not.
            let reason = format!("is {cap}; this family does not support a soft cap on scores");
            return Err(config.error("attn_logit_softcapping", reason));
        }
        let mut request = d.rope_request();
        (request.layer_type, request.theta) = (Some("full_attention"), 1e6);
        let full = request.read(config)?;
        (request.layer_type, request.theta) = (Some("sliding_attention"), 1e4);
        (request.theta_key, request.is_scaled) = ("rope_local_base_freq", false);
        let sliding = request.read(config)?;
        let rope = |slides: bool| if slides { sliding.clone() } else { full.clone() };
        let mut architecture = describe(&d, &windows, rope, Some(HeadNorms::DEFAULT), None)?;
        architecture.logits.softcap = softcap(&d, "final_logit_softcapping", None)?;
        Ok(architecture)
    }
}

fn read<'a>(config: &'a ConfigFields<'a>, family: &'static str) -> Result<Decoder<'a>> {
    let defaults = Defaults {
        kv_heads: Some(4),
        head_dim: Some(256),
        norm: NormKind::RmsZeroCentered,
        activation_key: "hidden_activation",
        activation: (Activation::GeluTanh, GELU_TANH),
        tied: true,
        ..Defaults::new(family)
    };
    let d = Decoder::read(config, defaults)?;
    d.refuse("use_bidirectional_attention", "only causal attention is supported")?;
    Ok(d)
}

/// Reads the soft cap of scores or logits: `default` if the key is missing, `None` if it is `null`.
pub(super) fn softcap(d: &Decoder<'_>, key: &str, default: Option<f32>) -> Result<Option<f32>> {
    match d.config.has(key) {
        true => Ok(d.factor(key)?.map(|cap| cap as f32)),
        false => Ok(default),
    }
}

fn describe(
    d: &Decoder<'_>,
    windows: &Windows,
    rope: impl Fn(bool) -> Rope,
    head_norms: Option<HeadNorms>,
    softcap: Option<f32>,
) -> Result<Architecture> {
    let query_scalar = d.factor("query_pre_attn_scalar")?.unwrap_or(256.0);
    let score_scale = Some(query_scalar.powf(-0.5) as f32);
    let bias = d.flag("attention_bias", false)?;
    let mut architecture = d.architecture(|layer| {
        let window = windows.of(layer);
        let mut attention = d.attention(Some(rope(window.is_some())), [bias; 2]);
        attention.shape = AttentionShape { window, score_scale, softcap, ..d.shape };
        attention.head_norms = head_norms;
        DecoderBlock { placement: SANDWICH, ..d.block(attention, d.mlp(false)) }
    })?;
    architecture.embedding_scale = Some(EmbeddingScale::Rounded((d.hidden as f64).sqrt()));
    architecture.logits = LogitsTransform::IDENTITY;
    Ok(architecture)
}
