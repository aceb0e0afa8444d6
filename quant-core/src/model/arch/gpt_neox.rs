//! GPT-NeoX and Pythia: layer norms with biases; attention and MLP in parallel; queries, keys and values of each head
//! in consecutive rows of one linear; partially rotated heads.

use super::decoder::{Decoder, Defaults, GELU_TANH};
use super::parts::{DecoderBlock, Mlp, NormKind, PRE, Placement, Projections};
use super::{Activation, Architecture, Family};
use crate::Result;
use crate::checkpoint::ConfigFields;

#[derive(Debug, Clone, Copy)]
pub(super) struct GptNeoX;

const NORMS: [&str; 2] = ["input_layernorm", "post_attention_layernorm"];

impl Family for GptNeoX {
    fn name(&self) -> &'static str {
        "gpt_neox"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["GPTNeoXForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        // Pythia uses the exact GELU.
        let activation = match config.optional_str("hidden_act")? {
            Some(name) if GELU_TANH.contains(&name) => (Activation::GeluTanh, GELU_TANH),
            _ => (Activation::Gelu, &["gelu"][..]),
        };
        let defaults = Defaults {
            norm: NormKind::LayerNorm,
            norm_eps_key: "layer_norm_eps",
            norm_eps: 1e-5,
            activation,
            ..Defaults::new(self.name())
        };
        let d = Decoder::read(config, defaults)?;
        if d.shape.repeat != 1 || d.shape.heads() * d.shape.head_dim != d.hidden {
            let reason = "or `head_dim` is not supported: in this family, the heads divide the hidden size, and every \
                head has its own keys";
            return Err(config.unsupported_setting("num_key_value_heads", reason));
        }
        let mut request = d.rope_request();
        (request.partial, request.partial_key) = (Some(0.25), "rotary_pct");
        request.theta_key = "rotary_emb_base";
        let bias = d.flag("attention_bias", true)?;
        let mut attention = d.attention(Some(request.read(config)?), [bias; 2]);
        attention.projections = Projections::FusedByHead("attention.query_key_value");
        attention.output = "attention.dense";
        let mlp = Mlp::Plain {
            names: ["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"],
            activation: activation.0,
            intermediate: d.intermediate,
            bias: true,
        };
        let placement = match d.flag("use_parallel_residual", true)? {
            true => Placement::Parallel(NORMS),
            false => PRE,
        };
        let block = DecoderBlock { placement, ..d.block(attention, mlp) };
        let mut architecture = d.architecture(|_| block.clone())?;
        architecture.embedding = "gpt_neox.embed_in.weight".into();
        architecture.final_norm = Some(d.norm.op("gpt_neox.final_layer_norm", d.hidden));
        architecture.head = "embed_out".into();
        // transformers 5 renames the head on loading.
        architecture.head_alias = Some("lm_head");
        architecture.block_prefix = "gpt_neox.layers.{}.";
        Ok(architecture)
    }
}
