//! Command R and R7B: one layer norm without a bias for attention and MLP, which run side by side; neighboring channels
//! turn together; logits are scaled. Command R+ norms queries and keys, with a weight for every single head. In Cohere 2
//! the layers without a window are not turned.

use super::decoder::{Decoder, Defaults};
use super::parts::{DecoderBlock, HeadNorms, NormKind, Placement};
use super::windows::Windows;
use super::{Architecture, AttentionShape, Family, LogitsTransform};
use crate::Result;
use crate::checkpoint::ConfigFields;
use crate::model::rope::RopeLayout;

/// The family of `CohereForCausalLM`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cohere;

/// The family of `Cohere2ForCausalLM`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cohere2;

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
            d.flag("use_qk_norm", false)?.then_some(HeadNorms { by_head: true, ..HeadNorms::OF_HEADS });
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
        // Readers take the hidden size's share for the width of heads, whatever the configuration says.
        if d.shape.head_dim * d.shape.heads() != d.hidden {
            let reason = format!("is {}; heads of this family share the hidden size", d.shape.head_dim);
            return Err(config.error("head_dim", reason));
        }
        let pattern = config.optional_positive("sliding_window_pattern")?.unwrap_or(4);
        let windows = Windows::patterned(config, Some(4096), |layer| !(layer + 1).is_multiple_of(pattern))?;
        describe(&d, &windows, None, false)
    }
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

/// `all_turn`: whether layers without a window are turned too.
fn describe(
    d: &Decoder<'_>,
    windows: &Windows,
    head_norms: Option<HeadNorms>,
    all_turn: bool,
) -> Result<Architecture> {
    let mut request = d.rope_request();
    request.layout = RopeLayout::Interleaved;
    let rope = request.read(d.config)?;
    let bias = d.flag("attention_bias", false)?;
    let mut architecture = d.architecture(|layer| {
        let window = windows.of(layer);
        let rope = (all_turn || window.is_some()).then(|| rope.clone());
        let mut attention = d.attention(rope, [bias; 2]);
        attention.shape = AttentionShape { window, ..d.shape };
        attention.head_norms = head_norms;
        DecoderBlock { placement: Placement::Shared("input_layernorm"), ..d.block(attention, d.mlp(false)) }
    })?;
    let scale = d.factor("logit_scale")?.unwrap_or(0.0625);
    architecture.logits = LogitsTransform { scale: scale as f32, softcap: None };
    Ok(architecture)
}
