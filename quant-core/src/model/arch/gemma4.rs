//! The text models of Gemma 4: norms before and after attention and MLP, with plain weights. Layers without a window
//! have wider, partially rotated heads. Values are normalized, and scores are not scaled.
//!
//! In the small models, each block has an input of its own, and the last blocks read keys and values that an earlier
//! block computed. The MoE models have experts in addition to the MLP.

use super::decoder::{Decoder, Defaults, GELU_TANH};
use super::gemma::{SANDWICH, softcap};
use super::gemma4_experts::ParallelExperts;
use super::parts::{Attention, DecoderBlock, HeadNorms, Mlp, Projections};
use super::side_values::{OwnInput, SharedKeys, Sharing, SideValues};
use super::windows::Windows;
use super::{Activation, Architecture, AttentionShape, EmbeddingScale, Family, PerLayerInputs, Unread};
use crate::Result;
use crate::checkpoint::ConfigFields;

/// The maximum number of layers if all blocks differ. A larger number means that the configuration is damaged.
const MAX_LAYERS: usize = 1024;
const OWN: [&str; 3] = ["per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"];
/// Modules that are unused in blocks that read another block's keys and values, though files may contain them.
const UNUSED_MODULES: &[&str] =
    &["self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm", "self_attn.v_norm"];

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
        let own = own_width(&d)?;
        let windows = Windows::patterned(config, Some(512), |layer| !(layer + 1).is_multiple_of(6))?;
        // The last layer never has a sliding window, even if the list gives it one.
        let slides = |layer: usize| windows.of(layer).filter(|_| layer + 1 < d.layers);
        let same = d.flag("attention_k_eq_v", false)?;
        let bias = d.flag("attention_bias", false)?;
        let mut attentions: Vec<Attention> = (0..d.layers)
            .map(|layer| {
                let window = slides(layer);
                let shape = shape(&d, layer, window, same)?;
                let mut request = d.rope_request();
                request.head_dim = shape.head_dim;
                (request.layer_type, request.theta) = match window {
                    Some(_) => (Some("sliding_attention"), 1e4),
                    None => (Some("full_attention"), 1e6),
                };
                let mut attention = d.attention(Some(request.read(config)?), [bias; 2]);
                attention.shape = shape;
                attention.head_norms = Some(HeadNorms::DEFAULT);
                attention.norms_values = true;
                if same && window.is_none() {
                    attention.projections = Projections::SharedKeysAndValues;
                }
                Ok(attention)
            })
            .collect::<Result<_>>()?;
        let first_reader = share(&d, &mut attentions)?;
        let doubled = d.flag("use_double_wide_mlp", false)?;
        let mlp = |layer: usize| Mlp::Gated {
            activation: d.defaults.activation.0,
            intermediate: if doubled && layer >= first_reader { 2 * d.intermediate } else { d.intermediate },
            bias: false,
        };
        let experts = match d.flag("enable_moe_block", false)? {
            true => Some(ParallelExperts::read(config)?),
            false => None,
        };
        let mut architecture = d.architecture(|layer| DecoderBlock {
            placement: SANDWICH,
            output_scale: Some("layer_scalar"),
            parallel_experts: experts,
            side_values: side_values(layer, &attentions, own),
            ..d.block(attentions[layer].clone(), mlp(layer))
        })?;
        architecture.embedding_scale = Some(EmbeddingScale::Rounded((d.hidden as f64).sqrt()));
        architecture.logits.softcap = softcap(&d, "final_logit_softcapping", None)?;
        architecture.fused_experts = experts.map(|experts| experts.0.fused(d.hidden));
        if own > 0 {
            let vocab = config.optional_positive("vocab_size_per_layer_input")?.unwrap_or(262_144);
            if vocab < architecture.vocab {
                let reason = format!("is {vocab}, but the vocabulary has {} tokens", architecture.vocab);
                return Err(config.error("vocab_size_per_layer_input", reason));
            }
            architecture.per_layer_inputs = Some(PerLayerInputs {
                width: own,
                vocab,
                table: "model.embed_tokens_per_layer".into(),
                projection: "model.per_layer_model_projection".into(),
                norm: d.norm.op("model.per_layer_projection_norm", own),
            });
        }
        architecture.unread =
            (first_reader < d.layers).then_some(Unread { first: first_reader, modules: UNUSED_MODULES });
        Ok(architecture)
    }
}

fn own_width(d: &Decoder<'_>) -> Result<usize> {
    const KEY: &str = "hidden_size_per_layer_input";
    let width = match d.config.has(KEY) {
        true => d.config.optional_usize(KEY)?.unwrap_or(0),
        false => 256,
    };
    few_layers(d, width > 0)?;
    Ok(width)
}

fn few_layers(d: &Decoder<'_>, all_differ: bool) -> Result<()> {
    if all_differ && d.layers > MAX_LAYERS {
        let reason = format!("is {}; at most {MAX_LAYERS} are supported if all blocks differ", d.layers);
        return Err(d.config.error("num_hidden_layers", reason));
    }
    Ok(())
}

/// The index of the key-value pair that a layer computes or reads.
fn pair_of(attention: &Attention) -> usize {
    usize::from(attention.shape.window.is_none())
}

/// Makes the last `num_kv_shared_layers` blocks read the keys and values of the last earlier block of their kind;
/// returns the number of blocks before them.
fn share(d: &Decoder<'_>, attentions: &mut [Attention]) -> Result<usize> {
    const KEY: &str = "num_kv_shared_layers";
    let readers = d.config.optional_usize(KEY)?.unwrap_or(0);
    few_layers(d, readers > 0)?;
    let Some(first) = d.layers.checked_sub(readers) else {
        return Err(d.config.error(KEY, format!("is {readers}, but there are only {} blocks", d.layers)));
    };
    let (makers, readers) = attentions.split_at_mut(first);
    for (at, reader) in readers.iter_mut().enumerate() {
        let pair = pair_of(reader);
        let Some(maker) = makers.iter_mut().rfind(|maker| pair_of(maker) == pair) else {
            let reason =
                format!("leaves no earlier block whose keys and values block {} can share", first + at);
            return Err(d.config.error(KEY, reason));
        };
        let [made, read] = [&maker.shape, &reader.shape].map(|shape| (shape.kv_heads, shape.head_dim));
        if made != read {
            let reason = format!(
                "makes block {} share keys whose heads differ from its own in number or width",
                first + at
            );
            return Err(d.config.error(KEY, reason));
        }
        maker.sharing = Some(Sharing::Makes(pair));
        reader.sharing = Some(Sharing::Reads(pair));
    }
    Ok(first)
}

/// The values that follow the residual stream in the input and output of a block.
fn side_values(layer: usize, attentions: &[Attention], own: usize) -> SideValues {
    let shared = [0, 1].map(|pair| {
        let place = |sharing: Sharing| attentions.iter().rposition(|a| a.sharing == Some(sharing));
        match (place(Sharing::Makes(pair)), place(Sharing::Reads(pair))) {
            (Some(maker), Some(last)) => SharedKeys {
                width: attentions[maker].shape.kv_heads * attentions[maker].shape.head_dim,
                enter: maker < layer && layer <= last,
                leave: maker <= layer && layer < last,
            },
            _ => SharedKeys::default(),
        }
    });
    // Blocks that neither receive nor pass on shared keys get the same default, so that they share one graph.
    let shared = shared.map(|keys| if keys.enter || keys.leave { keys } else { SharedKeys::default() });
    let input = OwnInput { width: own, activation: Activation::GeluTanh, names: OWN };
    SideValues { own: (own > 0).then_some(input), later: own * (attentions.len() - layer - 1), shared }
}

fn check(d: &Decoder<'_>) -> Result<()> {
    let config = d.config;
    if config.optional_object("rope_parameters")?.is_none() {
        return Err(config.error("rope_parameters", "is missing"));
    }
    // `vision` makes attention bidirectional among image tokens only, so it does not change results for text.
    match config.optional_str("use_bidirectional_attention")? {
        None | Some("vision") => Ok(()),
        Some(other) => {
            let reason = format!("is `{}`; only causal attention is supported", other.escape_default());
            Err(config.unsupported_setting("use_bidirectional_attention", reason))
        }
    }
}

/// Values in `per_layer_config` take precedence.
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
                    return Err(
                        own.error(&other.escape_default().to_string(), "is an unknown field of a layer")
                    );
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
        let reason = format!("is {kv_heads}, which does not divide the number of heads, {heads}");
        return Err(config.error(kv_key, reason));
    }
    let score_scale = Some(1.0);
    Ok(AttentionShape { window, score_scale, ..AttentionShape::new(kv_heads, heads / kv_heads, head_dim) })
}
