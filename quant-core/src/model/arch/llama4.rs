//! Llama 4: most layers rotate queries and keys, normalize each head without weights after the rotation, and attend
//! within chunks. The others attend to all positions without rotation, with queries scaled by position. An expert's
//! input is multiplied by the sigmoid of its logit, and the outputs of experts are added unweighted.

use super::decoder::{Decoder, Defaults};
use super::experts::{GatedExperts, SharedExpert, routing};
use super::parts::{HeadNorms, Mlp};
use super::{Activation, Architecture, Family, PositionScale, RouterScores, RoutingRule};
use crate::Result;
use crate::checkpoint::ConfigFields;
use crate::model::rope::{RopeLayout, RopeRequest};

#[derive(Debug, Clone, Copy)]
pub(super) struct Llama4;

const CHUNKED: &str = "chunked_attention";
const FULL: &str = "full_attention";
const DENSE: [&str; 3] = ["feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"];

impl Family for Llama4 {
    fn name(&self) -> &'static str {
        "llama4_text"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Llama4ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let defaults = Defaults {
            kv_heads: Some(8),
            head_dim: Some(128),
            theta: 5e5,
            norm_eps: 1e-5,
            ..Defaults::new(self.name())
        };
        let d = Decoder::read(config, defaults)?;
        let routing = RoutingRule {
            scores: RouterScores::Sigmoid,
            on_inputs: true,
            ..routing(config, &["num_experts", "num_local_experts"])?
        };
        let shared = SharedExpert {
            prefix: "feed_forward.shared_expert",
            intermediate: d.intermediate,
            gate: None,
            fused: None,
        };
        let experts = GatedExperts {
            router: "feed_forward.router",
            prefix: "feed_forward.experts",
            fused: ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"],
            shared: Some(shared),
            ..GatedExperts::new(routing, d.intermediate)
        };
        let sparse = sparse_layers(&d)?;
        let dense = match sparse.contains(&false) {
            true => config.optional_positive("intermediate_size_mlp")?.unwrap_or(16_384),
            false => d.intermediate,
        };
        let rotated = rotated_layers(&d)?;
        let chunks = chunks(&d, &rotated)?;
        let rope = RopeRequest { layout: RopeLayout::Interleaved, ..d.rope_request() }.read(config)?;
        let norms = d.flag("use_qk_norm", true)?.then_some(HeadNorms {
            after_rope: true,
            weightless: true,
            ..HeadNorms::DEFAULT
        });
        let bias = d.flag("attention_bias", false)?;
        let scale = match d.flag("attn_temperature_tuning", true)? {
            true => Some(position_scale(&d)?),
            false => None,
        };
        let mut architecture = d.architecture(|layer| {
            let mut attention = d.attention(rotated[layer].then(|| rope.clone()), [bias; 2]);
            attention.shape.chunk = chunks[layer];
            match rotated[layer] {
                true => attention.head_norms = norms,
                false => attention.position_scale = scale,
            }
            let mlp = match sparse[layer] {
                true => Mlp::Experts(experts),
                false => Mlp::GatedAs { names: DENSE, activation: Activation::Silu, intermediate: dense },
            };
            d.block(attention, mlp)
        })?;
        architecture.fused = &[
            ("self_attn.qkv_proj", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            ("feed_forward.gate_up_proj", &["feed_forward.gate_proj", "feed_forward.up_proj"]),
            (
                "feed_forward.shared_expert.gate_up_proj",
                &["feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"],
            ),
        ];
        Ok(architecture)
    }
}

/// Returns whether each layer has experts.
fn sparse_layers(d: &Decoder<'_>) -> Result<Vec<bool>> {
    const KEY: &str = "moe_layers";
    if let Some(list) = d.config.optional_usize_list(KEY)? {
        if let Some(other) = list.iter().find(|layer| **layer >= d.layers) {
            return Err(d
                .config
                .error(KEY, format!("contains {other}, but there are only {} blocks", d.layers)));
        }
        return Ok((0..d.layers).map(|layer| list.contains(&layer)).collect());
    }
    let step = d.config.optional_positive("interleave_moe_layer_step")?.unwrap_or(1);
    Ok((1..=d.layers).map(|n| n.is_multiple_of(step)).collect())
}

/// Returns whether each layer rotates queries and keys: 1 in `no_rope_layers` means rotated, despite the name.
fn rotated_layers(d: &Decoder<'_>) -> Result<Vec<bool>> {
    const KEY: &str = "no_rope_layers";
    match d.config.optional_usize_list(KEY)?.filter(|list| !list.is_empty()) {
        Some(list) if list.len() < d.layers => {
            Err(d.config.error(KEY, format!("has {} entries for {} blocks", list.len(), d.layers)))
        }
        Some(list) => match list.iter().find(|n| **n > 1) {
            Some(other) => Err(d.config.error(KEY, format!("contains {other}, expected 0 or 1"))),
            None => Ok(list.into_iter().take(d.layers).map(|n| n == 1).collect()),
        },
        None => {
            let interval = d.config.optional_positive("no_rope_layer_interval")?.unwrap_or(4);
            Ok((1..=d.layers).map(|n| !n.is_multiple_of(interval)).collect())
        }
    }
}

/// Returns the chunk length of each layer; `None` for full attention. Without `layer_types`, the rotated layers have
/// chunks.
fn chunks(d: &Decoder<'_>, rotated: &[bool]) -> Result<Vec<Option<usize>>> {
    const TYPES: &str = "layer_types";
    const SIZE: &str = "attention_chunk_size";
    let chunked: Vec<bool> = match d.config.optional_str_list(TYPES)? {
        Some(types) if types.len() != d.layers => {
            let reason = format!("has {} entries for {} blocks", types.len(), d.layers);
            return Err(d.config.error(TYPES, reason));
        }
        Some(types) => match types.iter().find(|kind| ![CHUNKED, FULL].contains(kind)) {
            Some(other) => {
                let reason = format!("contains an unknown entry, `{}`", other.escape_default());
                return Err(d.config.error(TYPES, reason));
            }
            None => types.iter().map(|kind| *kind == CHUNKED).collect(),
        },
        None => rotated.to_vec(),
    };
    let size = match d.config.has(SIZE) {
        true => d.config.optional_positive(SIZE)?,
        false => Some(8192),
    };
    match size {
        None if chunked.contains(&true) => {
            Err(d.config.error(SIZE, "is null, but some layers have chunked attention"))
        }
        size => Ok(chunked.into_iter().map(|is_chunked| size.filter(|_| is_chunked)).collect()),
    }
}

fn position_scale(d: &Decoder<'_>) -> Result<PositionScale> {
    const KEY: &str = "attn_scale";
    let beta = d.config.optional_f64(KEY)?.unwrap_or(0.1);
    if !(0.0..=1e6).contains(&beta) {
        return Err(d.config.error(KEY, format!("is {beta}; it must be from 0 to 1e6")));
    }
    let original_positions = d.config.optional_positive("floor_scale")?.unwrap_or(8192);
    Ok(PositionScale { beta: beta as f32, original_positions, offset: 1 })
}
