//! Command R and R7B: one layer norm without a bias for attention and MLP, which run in parallel; interleaved rotary
//! embeddings; scaled logits.

use super::decoder::{Decoder, Defaults};
use super::experts::{GatedExperts, SharedExpert, mlp_layer_types, routing_by};
use super::parts::{DecoderBlock, HeadNorms, Mlp, NormKind, Placement};
use super::windows::Windows;
use super::{Architecture, AttentionShape, Family, LogitsTransform, RouterScores, RoutingRule};
use crate::Result;
use crate::checkpoint::ConfigFields;
use crate::model::rope::RopeLayout;

#[derive(Debug, Clone, Copy)]
pub(super) struct Cohere;

#[derive(Debug, Clone, Copy)]
pub(super) struct Cohere2;

#[derive(Debug, Clone, Copy)]
pub(super) struct Cohere2Moe;

impl Family for Cohere {
    fn name(&self) -> &'static str {
        "cohere"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["CohereForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = read(config, self.name(), 5e5)?;
        let norms =
            d.flag("use_qk_norm", false)?.then_some(HeadNorms { by_head: true, ..HeadNorms::DEFAULT });
        describe(&d, &Windows::Never, norms, true)
    }
}

impl Family for Cohere2 {
    fn name(&self) -> &'static str {
        "cohere2"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Cohere2ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = read(config, self.name(), 1e4)?;
        // Other implementations use `hidden_size / num_attention_heads`, regardless of the configuration.
        if d.shape.head_dim * d.shape.heads() != d.hidden {
            let reason = format!(
                "is {}; in this family, it must be the hidden size divided by the number of \
                heads",
                d.shape.head_dim
            );
            return Err(config.error("head_dim", reason));
        }
        let pattern = config.optional_positive("sliding_window_pattern")?.unwrap_or(4);
        let windows = Windows::patterned(config, Some(4096), |layer| !(layer + 1).is_multiple_of(pattern))?;
        describe(&d, &windows, None, false)
    }
}

impl Family for Cohere2Moe {
    fn name(&self) -> &'static str {
        "cohere2_moe"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Cohere2MoeForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let root = config.optional_f64("rms_norm_eps")?.is_some();
        let defaults = Defaults {
            head_dim: Some(128),
            norm: if root { NormKind::Rms } else { NormKind::LayerNormWithoutBias },
            norm_eps_key: if root { "rms_norm_eps" } else { "layer_norm_eps" },
            norm_eps: 1e-5,
            tied: true,
            ..Defaults::new(self.name())
        };
        let d = Decoder::read(config, defaults)?;
        let first = config.optional_usize("first_k_dense_replace")?.unwrap_or(0);
        let dense = match mlp_layer_types(config, d.layers)? {
            Some(dense) => dense,
            None => (0..d.layers).map(|layer| layer < first).collect(),
        };
        // The leading dense layers have a window pattern of their own.
        let in_front = config.optional_positive("prefix_dense_sliding_window_pattern")?.unwrap_or(1);
        let behind = config.optional_positive("sliding_window_pattern")?.unwrap_or(4);
        let windows = Windows::patterned(config, Some(4096), |layer| match layer.checked_sub(first) {
            Some(layer) => !(layer + 1).is_multiple_of(behind),
            None => !(layer + 1).is_multiple_of(in_front),
        })?;
        let experts = experts(&d)?;
        let width = config.optional_positive("prefix_dense_intermediate_size")?.unwrap_or(d.intermediate);
        let mlp = |layer: usize| match dense[layer] {
            true => Mlp::Gated { activation: d.defaults.activation.0, intermediate: width, bias: false },
            false => Mlp::Experts(experts),
        };
        describe_with(&d, &windows, None, |layer, window| window || dense[layer] && in_front == 1, mlp)
    }
}

fn experts(d: &Decoder<'_>) -> Result<GatedExperts> {
    const CHOICE: &str = "expert_selection_fn";
    const STRATEGY: &str = "shared_expert_combination_strategy";
    let config = d.config;
    let other = |key: &str, found: &str, known: &str| {
        config.error(key, format!("is `{}`; this family supports {known}", found.escape_default()))
    };
    let routing = routing_by(config, &["num_local_experts", "num_experts"], &["num_experts_per_tok"])?;
    let routing = match config.optional_str(CHOICE)?.unwrap_or("softmax") {
        // A softmax over the chosen experts equals the softmax over all experts, normalized to sum to 1.
        "softmax" => RoutingRule { normalized: true, ..routing },
        "sigmoid" => RoutingRule {
            scores: RouterScores::Sigmoid,
            normalized: d.flag("norm_topk_prob", true)?,
            ..routing
        },
        found => return Err(other(CHOICE, found, "softmax and sigmoid")),
    };
    let averages = match config.optional_str(STRATEGY)?.unwrap_or("average") {
        "average" => true,
        "sum" => false,
        found => return Err(other(STRATEGY, found, "average and sum")),
    };
    let count = config.optional_usize("num_shared_experts")?.unwrap_or(0);
    let shared = (count > 0).then_some(SharedExpert {
        prefix: "mlp.shared_experts",
        intermediate: d.intermediate.saturating_mul(count),
        gate: None,
        fused: None,
    });
    Ok(GatedExperts { shared, averages, ..GatedExperts::new(routing, d.intermediate) })
}

fn read<'a>(config: &'a ConfigFields<'a>, family: &'static str, theta: f64) -> Result<Decoder<'a>> {
    let defaults = Defaults {
        theta,
        norm: NormKind::LayerNormWithoutBias,
        norm_eps_key: "layer_norm_eps",
        norm_eps: 1e-5,
        tied: true,
        ..Defaults::new(family)
    };
    Decoder::read(config, defaults)
}

/// `rotates_all`: whether layers without a window are rotated too.
fn describe(
    d: &Decoder<'_>,
    windows: &Windows,
    head_norms: Option<HeadNorms>,
    rotates_all: bool,
) -> Result<Architecture> {
    describe_with(d, windows, head_norms, |_, window| rotates_all || window, |_| d.mlp(false))
}

/// `rotates`: whether a layer is rotated, given its index and whether it has a window.
fn describe_with(
    d: &Decoder<'_>,
    windows: &Windows,
    head_norms: Option<HeadNorms>,
    rotates: impl Fn(usize, bool) -> bool,
    mlp: impl Fn(usize) -> Mlp,
) -> Result<Architecture> {
    let mut request = d.rope_request();
    request.layout = RopeLayout::Interleaved;
    let rope = request.read(d.config)?;
    let bias = d.flag("attention_bias", false)?;
    let mut architecture = d.architecture(|layer| {
        let window = windows.of(layer);
        let rope = rotates(layer, window.is_some()).then(|| rope.clone());
        let mut attention = d.attention(rope, [bias; 2]);
        attention.shape = AttentionShape { window, ..d.shape };
        attention.head_norms = head_norms;
        DecoderBlock { placement: Placement::Shared("input_layernorm"), ..d.block(attention, mlp(layer)) }
    })?;
    let scale = d.factor("logit_scale")?.unwrap_or(0.0625);
    architecture.logits = LogitsTransform { scale: scale as f32, softcap: None };
    Ok(architecture)
}
