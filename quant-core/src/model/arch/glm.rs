//! GLM-4 in two block designs: part of each head is rotated, interleaved; gate and up are one linear. The later design
//! also has norms after attention and MLP.

use super::decoder::{Decoder, Defaults};
use super::parts::{DecoderBlock, Mlp, PRE, Placement};
use super::{Architecture, Family};
use crate::Result;
use crate::checkpoint::ConfigFields;
use crate::model::rope::RopeLayout;

#[derive(Debug, Clone, Copy)]
pub(super) struct Glm;

#[derive(Debug, Clone, Copy)]
pub(super) struct Glm4;

/// `post_attention_layernorm` comes before the MLP, as in Llama.
const SANDWICH: Placement = Placement::Sandwich(
    ["input_layernorm", "post_attention_layernorm"],
    ["post_self_attn_layernorm", "post_mlp_layernorm"],
);

impl Family for Glm {
    fn name(&self) -> &'static str {
        "glm"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["GlmForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        describe(config, self.name(), PRE)
    }
}

impl Family for Glm4 {
    fn name(&self) -> &'static str {
        "glm4"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Glm4ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        describe(config, self.name(), SANDWICH)
    }
}

fn describe(config: &ConfigFields<'_>, family: &'static str, placement: Placement) -> Result<Architecture> {
    let (kv_heads, head_dim) = (Some(2), Some(128));
    let d =
        Decoder::read(config, Defaults { kv_heads, head_dim, norm_eps: 1.5625e-7, ..Defaults::new(family) })?;
    let mut request = d.rope_request();
    (request.partial, request.layout) = (Some(0.5), RopeLayout::Interleaved);
    let attention = d.attention(Some(request.read(config)?), [d.flag("attention_bias", true)?, false]);
    let mlp = Mlp::FusedGated { activation: d.defaults.activation.0, intermediate: d.intermediate };
    let block = DecoderBlock { placement, ..d.block(attention, mlp) };
    d.architecture(|_| block.clone())
}
