//! The text models of Gemma 4 whose blocks depend on nothing but the hidden states before them: norms before and after
//! attention and MLP, with plain weights; layers without a window have wider heads, which turn in part, and may share keys
//! and values; values are normalized, scores are not scaled, and a stored number scales each block's output.

use super::decoder::{Decoder, Defaults, GELU_TANH};
use super::gemma::{SANDWICH, softcap};
use super::parts::{Attention, DecoderBlock, HeadNorms, Projections};
use super::windows::Windows;
use super::{Activation, Architecture, AttentionShape, EmbeddingScale, Family};
use crate::Result;
use crate::checkpoint::ConfigFields;

/// The family of `Gemma4ForCausalLM`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gemma4Text;

impl Family for Gemma4Text {
    fn name(&self) -> &'static str {
        "gemma4_text"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Gemma4ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let defaults = Defaults {
            kv_heads: Some(4),
            head_dim: Some(256),
            activation_key: "hidden_activation",
            activation: (Activation::GeluTanh, GELU_TANH),
            tied: true,
            ..Defaults::new(self.name())
        };
        let d = Decoder::read(config, defaults)?;
        check(&d)?;
        let windows = Windows::patterned(config, Some(512), |layer| !(layer + 1).is_multiple_of(6))?;
        // The last layer never slides, whatever the list says.
        let slides = |layer: usize| windows.of(layer).filter(|_| layer + 1 < d.layers);
        let shares = d.flag("attention_k_eq_v", false)?;
        let bias = d.flag("attention_bias", false)?;
        let attentions: Vec<Attention> = (0..d.layers)
            .map(|layer| {
                let window = slides(layer);
                let shape = shape(&d, layer, window, shares)?;
                let mut request = d.rope_request();
                request.head_dim = shape.head_dim;
                (request.layer_type, request.theta) = match window {
                    Some(_) => (Some("sliding_attention"), 1e4),
                    None => (Some("full_attention"), 1e6),
                };
                let mut attention = d.attention(Some(request.read(config)?), [bias; 2]);
                attention.shape = shape;
                attention.head_norms = Some(HeadNorms::OF_HEADS);
                attention.norms_values = true;
                if shares && window.is_none() {
                    attention.projections = Projections::SharedKeysAndValues;
                }
                Ok(attention)
            })
            .collect::<Result<_>>()?;
        let mut architecture = d.architecture(|layer| DecoderBlock {
            placement: SANDWICH,
            output_scale: Some("layer_scalar"),
            ..d.block(attentions[layer].clone(), d.mlp(false))
        })?;
        architecture.embedding_scale = Some(EmbeddingScale::Rounded((d.hidden as f64).sqrt()));
        architecture.logits.softcap = softcap(&d, "final_logit_softcapping", None)?;
        Ok(architecture)
    }
}

/// Refuses what blocks of this family may have beside their hidden states.
fn check(d: &Decoder<'_>) -> Result<()> {
    let config = d.config;
    match config.map().contains_key("hidden_size_per_layer_input") {
        true => match config.optional_usize("hidden_size_per_layer_input")?.unwrap_or(0) {
            0 => {}
            n => {
                let reason = format!("is {n}: embeddings for each layer are not supported");
                return Err(config.error("hidden_size_per_layer_input", reason));
            }
        },
        false => {
            let reason = "is missing, which means 256: embeddings for each layer are not supported";
            return Err(config.error("hidden_size_per_layer_input", reason));
        }
    }
    if let Some(layers) = config.optional_usize("num_kv_shared_layers")?.filter(|layers| *layers > 0) {
        let reason = format!("is {layers}: layers that share keys and values are not supported");
        return Err(config.error("num_kv_shared_layers", reason));
    }
    d.refuse("enable_moe_block", "experts beside the MLP are not supported")?;
    if config.optional_object("rope_parameters")?.is_none() {
        return Err(config.error("rope_parameters", "is missing"));
    }
    // Tokens of images see each other both ways with `vision`; a text has none.
    match config.optional_str("use_bidirectional_attention")? {
        None | Some("vision") => Ok(()),
        Some(other) => {
            let reason = format!("is `{}`; only causal attention is computed", other.escape_default());
            Err(config.error("use_bidirectional_attention", reason))
        }
    }
}

/// The heads of a layer. What `per_layer_config` says of it counts, where that is there.
fn shape(d: &Decoder<'_>, layer: usize, window: Option<usize>, shares: bool) -> Result<AttentionShape> {
    let (config, heads) = (d.config, d.shape.heads());
    let (mut head_dim, mut kv_heads) = (d.shape.head_dim, d.shape.kv_heads);
    let mut kv_key = "num_key_value_heads";
    match config.optional_object("per_layer_config")? {
        Some(layers) => {
            if let Some(own) = layers.optional_object(&layer.to_string())? {
                head_dim = own.optional_positive("head_dim")?.unwrap_or(head_dim);
                kv_heads = own.optional_positive(kv_key)?.unwrap_or(kv_heads);
                let known = |key: &&String| !["head_dim", kv_key].contains(&key.as_str());
                if let Some(other) = own.map().keys().find(known) {
                    return Err(own.error(&other.escape_default().to_string(), "is not known of a layer"));
                }
            }
        }
        None if window.is_none() => {
            head_dim = config.optional_positive("global_head_dim")?.unwrap_or(512);
            if let Some(own) = config.optional_positive("num_global_key_value_heads")?.filter(|_| shares) {
                (kv_heads, kv_key) = (own, "num_global_key_value_heads");
            }
        }
        None => {}
    }
    if heads % kv_heads != 0 {
        let reason = format!("is {kv_heads}, which does not divide the {heads} heads");
        return Err(config.error(kv_key, reason));
    }
    let score_scale = Some(1.0);
    Ok(AttentionShape { window, score_scale, ..AttentionShape::new(kv_heads, heads / kv_heads, head_dim) })
}
