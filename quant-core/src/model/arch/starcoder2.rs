//! StarCoder2: layer norms with biases, two linears with a GELU between them, rotary embeddings.

use super::decoder::{Decoder, Defaults, GELU_TANH};
use super::parts::{Mlp, NormKind};
use super::windows::Windows;
use super::{Activation, Architecture, Family};
use crate::Result;
use crate::checkpoint::ConfigFields;

#[derive(Debug, Clone, Copy)]
pub(super) struct Starcoder2;

impl Family for Starcoder2 {
    fn name(&self) -> &'static str {
        "starcoder2"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Starcoder2ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let defaults = Defaults {
            kv_heads: Some(2),
            norm: NormKind::LayerNorm,
            norm_eps_key: "norm_epsilon",
            norm_eps: 1e-5,
            activation: (Activation::GeluTanh, GELU_TANH),
            tied: true,
            ..Defaults::new(self.name())
        };
        let d = Decoder::read(config, defaults)?;
        let bias = d.flag("use_bias", true)?;
        let mut attention = d.attention(Some(d.rope()?), [bias; 2]);
        attention.shape.window = Windows::uniform(config, None, true)?.of(0);
        let mlp = Mlp::Plain {
            names: ["mlp.c_fc", "mlp.c_proj"],
            activation: d.defaults.activation.0,
            intermediate: d.intermediate,
            bias,
        };
        let mut block = d.block(attention, mlp);
        block.placement = super::parts::PRE;
        d.architecture(|_| block.clone())
    }
}
