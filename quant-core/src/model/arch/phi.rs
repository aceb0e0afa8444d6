//! Phi-3 and Phi-4, with fused linears, and Phi-1 and Phi-2, with one layer norm for attention and MLP, which run in
//! parallel.

use super::decoder::{Decoder, Defaults, GELU_TANH};
use super::parts::{DecoderBlock, HeadNorms, Mlp, NormKind, Placement, Projections};
use super::windows::Windows;
use super::{Activation, Architecture, Family};
use crate::Result;
use crate::checkpoint::ConfigFields;

#[derive(Debug, Clone, Copy)]
pub(super) struct Phi3;

#[derive(Debug, Clone, Copy)]
pub(super) struct Phi;

impl Family for Phi3 {
    fn name(&self) -> &'static str {
        "phi3"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Phi3ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = Decoder::read(config, Defaults { norm_eps: 1e-5, ..Defaults::new(self.name()) })?;
        let mut request = d.rope_request();
        request.partial = Some(1.0);
        request.original_positions = Some(4096);
        request.longrope_names = &["su", "yarn"];
        let mut attention = d.attention(Some(request.read(config)?), [false; 2]);
        attention.projections = Projections::Fused("self_attn.qkv_proj");
        attention.shape.window = Windows::uniform(config, None, true)?.of(0);
        let mlp = Mlp::FusedGated { activation: d.defaults.activation.0, intermediate: d.intermediate };
        let block = d.block(attention, mlp);
        d.architecture(|_| block.clone())
    }
}

impl Family for Phi {
    fn name(&self) -> &'static str {
        "phi"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["PhiForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let defaults = Defaults {
            norm: NormKind::LayerNorm,
            norm_eps_key: "layer_norm_eps",
            norm_eps: 1e-5,
            activation: (Activation::GeluTanh, GELU_NEW),
            ..Defaults::new(self.name())
        };
        let d = Decoder::read(config, defaults)?;
        let mut request = d.rope_request();
        request.partial = Some(0.5);
        let mut attention = d.attention(Some(request.read(config)?), [true; 2]);
        attention.output = "self_attn.dense";
        if d.flag("qk_layernorm", false)? {
            let names = ["self_attn.q_layernorm", "self_attn.k_layernorm"];
            attention.head_norms = Some(HeadNorms { names, ..HeadNorms::DEFAULT });
        }
        let mlp = Mlp::Plain {
            names: ["mlp.fc1", "mlp.fc2"],
            activation: d.defaults.activation.0,
            intermediate: d.intermediate,
            bias: true,
        };
        let block =
            DecoderBlock { placement: Placement::Shared("input_layernorm"), ..d.block(attention, mlp) };
        let mut architecture = d.architecture(|_| block.clone())?;
        architecture.final_norm = Some(d.norm.op("model.final_layernorm", d.hidden));
        architecture.head_bias = true;
        Ok(architecture)
    }
}

/// The first name is the family's own.
const GELU_NEW: &[&str] = &["gelu_new", GELU_TANH[0], GELU_TANH[2]];
