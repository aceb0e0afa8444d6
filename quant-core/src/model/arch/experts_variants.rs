//! MiniMax-M2, Ernie 4.5 MoE, Granite MoE, HunYuan V1 MoE and Hy3: blocks of other supported families, with experts in
//! place of the MLP.

use super::blocks::MAX_LAYERS;
use super::decoder::{Decoder, Defaults, either};
use super::experts::{GatedExperts, SharedExpert, mlp_layer_types, routing_by};
use super::parts::{HeadNorms, Mlp};
use super::{Architecture, Correction, Family, RouterScores, RoutingRule};
use crate::Result;
use crate::checkpoint::ConfigFields;
use crate::model::rope::{RopeLayout, RopeRequest};

#[derive(Debug, Clone, Copy)]
pub(super) struct MiniMaxM2;

#[derive(Debug, Clone, Copy)]
pub(super) struct Ernie45Moe;

#[derive(Debug, Clone, Copy)]
pub(super) struct GraniteMoe;

#[derive(Debug, Clone, Copy)]
pub(super) struct HunYuanMoeV1;

#[derive(Debug, Clone, Copy)]
pub(super) struct HyV3;

/// Mixtral's names of an expert's gate, up and down linears.
const MIXTRAL: [&str; 3] = ["w1", "w3", "w2"];

impl Family for MiniMaxM2 {
    fn name(&self) -> &'static str {
        "minimax_m2"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["MiniMaxM2ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        if let Some(other) = config.optional_str("scoring_func")?.filter(|found| *found != "sigmoid") {
            let reason = format!("is `{}`; this family supports only `sigmoid`", other.escape_default());
            return Err(config.error("scoring_func", reason));
        }
        if config.optional_bool("use_qk_norm")? == Some(false) {
            return Err(
                config.error("use_qk_norm", "is false; this family always normalizes queries and keys")
            );
        }
        let routing = RoutingRule {
            scores: RouterScores::Sigmoid,
            correction: Some(Correction {
                module: "block_sparse_moe",
                tensor: "e_score_correction_bias",
                is_row: false,
            }),
            normalized: true,
            ..routing_by(config, &["num_experts", "num_local_experts"], &["num_experts_per_tok"])?
        };
        let defaults =
            Defaults { kv_heads: Some(8), head_dim: Some(128), theta: 5e6, ..Defaults::new(self.name()) };
        let d = Decoder::read(config, defaults)?;
        // Published configurations give the number of rotated channels instead of their fraction.
        let head_dim = d.shape.head_dim;
        let share = config.optional_positive("rotary_dim")?.map_or(1.0, |dim| dim as f64 / head_dim as f64);
        let rope = RopeRequest { partial: Some(share), ..d.rope_request() }.read(config)?;
        let mut attention = d.attention(Some(rope), [false; 2]);
        attention.head_norms = Some(HeadNorms { whole_width: true, ..HeadNorms::DEFAULT });
        let experts = GatedExperts {
            router: "block_sparse_moe.gate",
            prefix: "block_sparse_moe.experts",
            linears: MIXTRAL,
            ..GatedExperts::new(routing, d.intermediate)
        };
        let block = d.block(attention, Mlp::Experts(experts));
        d.architecture(|_| block.clone())
    }
}

impl Family for Ernie45Moe {
    fn name(&self) -> &'static str {
        "ernie4_5_moe"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Ernie4_5_MoeForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        const END: &str = "moe_layer_end_index";
        let defaults = Defaults {
            kv_heads: Some(4),
            theta: 5e5,
            norm_eps: 1e-5,
            tied: true,
            ..Defaults::new(self.name())
        };
        let d = Decoder::read(config, defaults)?;
        d.refuse("use_bias", "this family does not support biases of experts")?;
        let routing = RoutingRule {
            correction: Some(Correction {
                module: "mlp.moe_statics",
                tensor: "e_score_correction_bias",
                is_row: true,
            }),
            normalized: true,
            min_sum: d.factor("moe_norm_min")?.unwrap_or(1e-12) as f32,
            ..routing_by(
                config,
                &["num_experts", "num_local_experts", "moe_num_experts"],
                &["num_experts_per_tok", "moe_k"],
            )?
        };
        let intermediate = config.require_positive("moe_intermediate_size")?;
        let shared = config.optional_usize("moe_num_shared_experts")?.unwrap_or(2);
        let shared = (shared > 0).then_some(SharedExpert {
            prefix: "mlp.shared_experts",
            intermediate: intermediate * shared,
            gate: None,
            fused: None,
        });
        let experts = GatedExperts { shared, ..GatedExperts::new(routing, intermediate) };
        let step = config.optional_positive("moe_layer_interval")?.unwrap_or(1);
        let first = config.optional_usize("moe_layer_start_index")?.unwrap_or(1);
        let last = match config.optional_f64(END)? {
            None => usize::MAX,
            Some(-1.0) => usize::MAX,
            Some(_) => config.require_positive(END)?,
        };
        let rope = RopeRequest { layout: RopeLayout::Interleaved, ..d.rope_request() }.read(config)?;
        let block = d.block(d.attention(Some(rope), [false; 2]), d.mlp(false));
        let has_experts = |layer: usize| (first..=last).contains(&layer) && (layer + 1).is_multiple_of(step);
        d.with_experts(|_| block.clone(), |layer| has_experts(layer).then_some(experts))
    }
}

impl Family for GraniteMoe {
    fn name(&self) -> &'static str {
        "granitemoe"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["GraniteMoeForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = Decoder::read(config, Defaults::new(self.name()))?;
        // A softmax over the chosen experts equals the softmax over all experts, normalized to sum to 1.
        let routing = RoutingRule {
            normalized: true,
            ..routing_by(config, &["num_experts", "num_local_experts"], &["num_experts_per_tok"])?
        };
        let experts = GatedExperts {
            router: "block_sparse_moe.router.layer",
            prefix: "block_sparse_moe.experts",
            fused: ["block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"],
            ..GatedExperts::new(routing, d.intermediate)
        };
        d.granite(Mlp::Experts(experts))
    }
}

impl Family for HunYuanMoeV1 {
    fn name(&self) -> &'static str {
        "hunyuan_v1_moe"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["HunYuanMoEV1ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = Decoder::read(config, Defaults { norm_eps: 1e-5, ..Defaults::new(self.name()) })?;
        let routing = RoutingRule {
            normalized: true,
            ..routing_by(config, &["num_local_experts", "num_experts"], &["num_experts_per_tok", "moe_topk"])?
        };
        let shared =
            SharedExpert { prefix: "mlp.shared_mlp", intermediate: d.intermediate, gate: None, fused: None };
        let experts = GatedExperts {
            router: "mlp.gate.wg",
            shared: Some(shared),
            ..GatedExperts::new(routing, d.intermediate)
        };
        let block = d.block(d.hunyuan_attention()?, Mlp::Experts(experts));
        d.architecture(|_| block.clone())
    }
}

impl Family for HyV3 {
    fn name(&self) -> &'static str {
        "hy_v3"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["HYV3ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let defaults = Defaults {
            kv_heads: Some(8),
            head_dim: Some(128),
            theta: 11_158_840.0,
            norm_eps: 1e-5,
            ..Defaults::new(self.name())
        };
        let d = Decoder::read(config, defaults)?;
        if config.optional_bool("qk_norm")? == Some(false) {
            return Err(config.error("qk_norm", "is false; this family always normalizes queries and keys"));
        }
        if config.optional_bool("route_norm")? == Some(false) {
            let reason = "is false; this family always normalizes the weights of the chosen experts";
            return Err(config.error("route_norm", reason));
        }
        d.refuse("mlp_bias", "this family does not support biases of experts")?;
        // The key is required, because implementations have different defaults.
        const FACTOR: &str = "router_scaling_factor";
        let Some(factor) = d.factor(FACTOR)? else { return Err(config.error(FACTOR, "is missing")) };
        let routing = RoutingRule {
            scores: RouterScores::Sigmoid,
            correction: Some(Correction { module: "mlp", tensor: "expert_bias", is_row: false }),
            normalized: true,
            epsilon: 1e-20,
            scale: factor as f32,
            ..routing_by(config, &["num_local_experts", "num_experts"], &["num_experts_per_tok"])?
        };
        let width = either(config, ["moe_intermediate_size", "expert_hidden_dim"]);
        let intermediate = config.require_positive(width)?;
        let shared = config.optional_usize("num_shared_experts")?.unwrap_or(1);
        let shared = (shared > 0).then_some(SharedExpert {
            prefix: "mlp.shared_mlp",
            intermediate: intermediate * shared,
            gate: None,
            fused: None,
        });
        let experts =
            GatedExperts { router: "mlp.router.gate", shared, ..GatedExperts::new(routing, intermediate) };
        let dense = match mlp_layer_types(config, d.layers)? {
            Some(dense) => dense,
            None => {
                let first = config.optional_usize("first_k_dense_replace")?.unwrap_or(1);
                (0..d.layers).map(|layer| layer < first).collect()
            }
        };
        let mut attention = d.attention(Some(d.rope()?), [d.flag("attention_bias", false)?; 2]);
        attention.head_norms = Some(HeadNorms::DEFAULT);
        let block = d.block(attention, d.mlp(false));
        let architecture =
            d.with_experts(|_| block.clone(), |layer| (dense.get(layer) == Some(&false)).then_some(experts))?;
        let further = config.optional_usize("num_nextn_predict_layers")?.unwrap_or(0);
        Ok(Architecture { further_blocks: further.min(MAX_LAYERS), ..architecture })
    }
}
