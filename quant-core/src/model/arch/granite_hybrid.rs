//! Granite 4: Granite's factors, an MLP with gate and up in one linear, and optionally experts in addition to it. In
//! the hybrid models, most layers have Mamba 2 in place of attention.

use super::decoder::{Decoder, Defaults};
use super::experts::{GatedExperts, SharedExpert, routing_by};
use super::mamba::{GatedNorm, Mamba2, state_space};
use super::mixers::Mixer;
use super::parts::Mlp;
use super::{Activation, Architecture, Family, RoutingRule, StateSpace};
use crate::Result;
use crate::checkpoint::ConfigFields;

#[derive(Debug, Clone, Copy)]
pub(super) struct GraniteMoeHybrid;

const MLP: [&str; 2] = ["shared_mlp.input_linear", "shared_mlp.output_linear"];

impl Family for GraniteMoeHybrid {
    fn name(&self) -> &'static str {
        "granitemoehybrid"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["GraniteMoeHybridForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        const EXPERTS: &str = "num_local_experts";
        const POSITIONS: &str = "position_embedding_type";
        let d = Decoder::read(config, Defaults::new(self.name()))?;
        let mixes = mixing_layers(&d)?;
        let mamba = match mixes.contains(&true) {
            true => Some(mamba(&d)?),
            false => None,
        };
        let rope = match config.optional_str(POSITIONS)? {
            Some("rope") => Some(d.rope()?),
            None | Some("nope") => None,
            Some(other) => {
                let reason =
                    format!("is `{}`; this family supports `rope` and `nope`", other.escape_default());
                return Err(config.error(POSITIONS, reason));
            }
        };
        let shared = config.require_positive("shared_intermediate_size")?;
        let mlp = match config.optional_usize(EXPERTS)? {
            Some(0) => Mlp::FusedGatedAs { names: MLP, activation: Activation::Silu, intermediate: shared },
            _ => {
                // A softmax over the chosen experts equals the softmax over all experts, normalized to sum to 1.
                let routing = RoutingRule {
                    normalized: true,
                    ..routing_by(config, &[EXPERTS], &["num_experts_per_tok"])?
                };
                let shared =
                    SharedExpert { prefix: "shared_mlp", intermediate: shared, gate: None, fused: Some(MLP) };
                Mlp::Experts(GatedExperts {
                    router: "block_sparse_moe.router.layer",
                    prefix: "block_sparse_moe.experts",
                    fused: ["block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"],
                    shared: Some(shared),
                    ..GatedExperts::new(routing, d.intermediate)
                })
            }
        };
        let mut attention = d.attention(rope, [d.flag("attention_bias", false)?; 2]);
        // Unlike in most families, scores are not divided by √head_dim.
        attention.shape.score_scale = Some(d.factor("attention_multiplier")?.unwrap_or(1.0) as f32);
        let mut block = d.block(attention, mlp);
        block.residual_scale = d.granite_residual()?;
        let architecture = d.architecture(|layer| {
            let mut block = block.clone();
            block.mixer = mamba.filter(|_| mixes.get(layer) == Some(&true)).map(Mixer::Mamba2);
            block
        })?;
        d.granite_around(architecture)
    }
}

/// Returns whether each layer has Mamba 2 in place of attention. If the configuration does not list the layers, all
/// have it.
fn mixing_layers(d: &Decoder<'_>) -> Result<Vec<bool>> {
    for key in ["layer_types", "layers_block_type"] {
        let Some(types) = d.config.optional_str_list(key)? else { continue };
        if types.len() != d.layers {
            let reason = format!("has {} entries for {} blocks", types.len(), d.layers);
            return Err(d.config.error(key, reason));
        }
        let mixes = |kind: &&str| match *kind {
            "mamba" | "linear_attention" => Ok(true),
            "attention" | "full_attention" => Ok(false),
            other => {
                let reason = format!("contains an unknown entry, `{}`", other.escape_default());
                Err(d.config.error(key, reason))
            }
        };
        return types.iter().map(mixes).collect();
    }
    Ok(vec![true; d.layers])
}

fn mamba(d: &Decoder<'_>) -> Result<Mamba2> {
    const HEADS: &str = "mamba_n_heads";
    const HEAD_DIM: &str = "mamba_d_head";
    let config = d.config;
    let width = config.optional_positive("mamba_expand")?.unwrap_or(2).saturating_mul(d.hidden);
    let heads = config.optional_positive(HEADS)?.unwrap_or(128);
    if !width.is_multiple_of(heads) {
        return Err(
            config.error(HEADS, format!("is {heads}, which does not divide the total width, {width}"))
        );
    }
    let head_dim = match config.get(HEAD_DIM).and_then(serde_json::Value::as_str) {
        // `auto` means `width / heads`.
        Some("auto") => None,
        _ => config.optional_positive(HEAD_DIM)?,
    };
    if let Some(other) = head_dim.filter(|dim| dim * heads != width) {
        let reason = format!("is {other}, but {heads} heads must have a total width of {width}");
        return Err(config.error(HEAD_DIM, reason));
    }
    // `state_space` would reject `auto` as head width, so the head width is set below.
    let heads_key = (HEADS, Some(heads));
    let space = state_space(
        config,
        [heads_key, heads_key, ("mamba_n_groups", Some(1)), ("mamba_d_state", Some(256))],
    )?;
    let space = StateSpace { head_dim: width / heads, ..space };
    Ok(Mamba2 {
        space,
        kernel: config.optional_positive("mamba_d_conv")?.unwrap_or(4),
        conv_bias: d.flag("mamba_conv_bias", true)?,
        bias: [d.flag("mamba_proj_bias", false)?; 2],
        module: "mamba",
        norm: Some(GatedNorm {
            weight: "mamba.norm.weight",
            groups: space.groups,
            eps: d.norm.eps,
            before_gate: false,
        }),
        scales: [1.0; 5],
    })
}
