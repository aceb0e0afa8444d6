//! DeepSeek-V2, V3 and models with V3's design: GLM-4.5 with standard attention, GLM-4.7-Flash with latent attention.
//!
//! The first layers have an MLP. The other layers have routed experts and a shared one.

use super::blocks::MAX_LAYERS;
use super::decoder::{Decoder, Defaults};
use super::experts::{GatedExperts, SharedExpert, mlp_layer_types, routing};
use super::latent::Latent;
use super::parts::{Attention, HeadNorms, Projections};
use super::{Architecture, Correction, Family, Groups, RouterScores, Routing};
use crate::Result;
use crate::checkpoint::ConfigFields;
use crate::model::rope::{RopeLayout, RopeRequest};

#[derive(Debug, Clone, Copy)]
pub(super) struct DeepseekV2;

#[derive(Debug, Clone, Copy)]
pub(super) struct DeepseekV3;

#[derive(Debug, Clone, Copy)]
pub(super) struct Glm4Moe;

#[derive(Debug, Clone, Copy)]
pub(super) struct Glm4MoeLite;

/// Published configurations use the last one.
pub(super) const EXPERTS: [&str; 3] = ["num_experts", "num_local_experts", "n_routed_experts"];

impl Family for DeepseekV2 {
    fn name(&self) -> &'static str {
        "deepseek_v2"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["DeepseekV2ForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        const METHOD: &str = "topk_method";
        require(config, "scoring_func", "softmax")?;
        let d = decoder(config, self.name(), 1e-6)?;
        d.refuse("mlp_bias", "this family does not support biases of MLPs")?;
        if config.optional_bool("norm_topk_prob")? == Some(true) {
            let reason = "is true, which is not supported, because implementations disagree on whether the \
                weights are then also scaled";
            return Err(config.error("norm_topk_prob", reason));
        }
        let mut routing = routing(config, &EXPERTS)?;
        routing.scale = d.factor("routed_scaling_factor")?.unwrap_or(1.0) as f32;
        routing.groups = match config.optional_str(METHOD)? {
            None | Some("greedy") => None,
            Some("group_limited_greedy") => groups(config, routing, [1, 1], 1)?,
            Some(other) => {
                let other = other.escape_default();
                let reason = format!("is `{other}`; this family supports greedy and group_limited_greedy");
                return Err(config.error(METHOD, reason));
            }
        };
        let experts = with_shared(config, routing, 2)?;
        let dense = config.optional_usize("first_k_dense_replace")?.unwrap_or(0);
        latent(&d, experts, |layer| layer < dense, true)
    }
}

impl Family for DeepseekV3 {
    fn name(&self) -> &'static str {
        "deepseek_v3"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["DeepseekV3ForCausalLM"]
    }

    fn has_model_type(&self, model_type: &str) -> bool {
        ["deepseek_v3", "kimi_k2"].contains(&model_type)
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        require(config, "scoring_func", "sigmoid")?;
        require(config, "topk_method", "noaux_tc")?;
        let d = decoder(config, self.name(), 1e-6)?;
        let experts = with_shared(config, by_sigmoid(&d, 2.5, [8, 4])?, 1)?;
        let dense = config.optional_usize("first_k_dense_replace")?.unwrap_or(3);
        latent(&d, experts, |layer| layer < dense, d.flag("rope_interleave", true)?)
    }
}

impl Family for Glm4MoeLite {
    fn name(&self) -> &'static str {
        "glm4_moe_lite"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Glm4MoeLiteForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = decoder(config, self.name(), 1e-5)?;
        let experts = with_shared(config, by_sigmoid(&d, 1.8, [1, 1])?, 1)?;
        let dense = match mlp_layer_types(config, d.layers)? {
            Some(dense) => dense,
            None => (0..d.layers).map(|layer| layer == 0).collect(),
        };
        latent(&d, experts, |layer| dense.get(layer) == Some(&true), d.flag("rope_interleave", true)?)
    }
}

impl Family for Glm4Moe {
    fn name(&self) -> &'static str {
        "glm4_moe"
    }

    fn architectures(&self) -> &'static [&'static str] {
        &["Glm4MoeForCausalLM"]
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let defaults = Defaults { kv_heads: Some(8), norm_eps: 1e-5, ..Defaults::new(self.name()) };
        let d = Decoder::read(config, defaults)?;
        let experts = with_shared(config, by_sigmoid(&d, 1.0, [1, 1])?, 1)?;
        let rope = RopeRequest { partial: Some(0.5), ..d.rope_request() }.read(config)?;
        let mut attention = d.attention(Some(rope), [d.flag("attention_bias", false)?, false]);
        attention.head_norms = d.flag("use_qk_norm", false)?.then_some(HeadNorms::DEFAULT);
        let dense = config.optional_usize("first_k_dense_replace")?.unwrap_or(1);
        architecture(&d, &attention, experts, |layer| layer < dense)
    }
}

fn require(config: &ConfigFields<'_>, key: &str, value: &str) -> Result<()> {
    match config.optional_str(key)?.filter(|found| *found != value) {
        Some(found) => {
            let reason = format!("is `{}`; this family supports only `{value}`", found.escape_default());
            Err(config.error(key, reason))
        }
        None => Ok(()),
    }
}

pub(super) fn decoder<'a>(
    config: &'a ConfigFields<'a>,
    family: &'static str,
    norm_eps: f64,
) -> Result<Decoder<'a>> {
    // `head_dim`, if present, is the width of the rotated part and is not used.
    let (_, shape) = Latent::read(config)?;
    let head_dim = Some(shape.head_dim);
    let d = Decoder::read(config, Defaults { head_dim, norm_eps, ..Defaults::new(family) })?;
    Ok(Decoder { shape, ..d })
}

/// Sigmoid routing with a stored correction. `factor` and `groups_by_default` (count, chosen) are the defaults for the
/// scale of the weights and the groups.
fn by_sigmoid(d: &Decoder<'_>, factor: f64, groups_by_default: [usize; 2]) -> Result<Routing> {
    corrected_sigmoid(d, "mlp.gate", factor, groups_by_default)
}

pub(super) fn corrected_sigmoid(
    d: &Decoder<'_>,
    module: &'static str,
    factor: f64,
    groups_by_default: [usize; 2],
) -> Result<Routing> {
    let routing = Routing {
        scores: RouterScores::Sigmoid,
        correction: Some(Correction { module, tensor: "e_score_correction_bias", is_row: false }),
        normalized: d.flag("norm_topk_prob", true)?,
        epsilon: 1e-20,
        scale: d.factor("routed_scaling_factor")?.unwrap_or(factor) as f32,
        ..routing(d.config, &EXPERTS)?
    };
    Ok(Routing { groups: groups(d.config, routing, groups_by_default, 2)?, ..routing })
}

/// Reads the groups that experts are chosen from, with these defaults for `n_group` and `topk_group`. A group is ranked
/// by the sum of its `by_largest` largest scores. Returns `None` if all groups are chosen.
pub(super) fn groups(
    config: &ConfigFields<'_>,
    routing: Routing,
    [count, chosen]: [usize; 2],
    by_largest: usize,
) -> Result<Option<Groups>> {
    const COUNT: &str = "n_group";
    const CHOSEN: &str = "topk_group";
    let count = config.optional_positive(COUNT)?.unwrap_or(count);
    let chosen = config.optional_positive(CHOSEN)?.unwrap_or(chosen);
    let (experts, top_k) = (routing.experts, routing.top_k);
    if !experts.is_multiple_of(count) {
        return Err(config
            .error(COUNT, format!("is {count}, which does not divide the number of experts, {experts}")));
    }
    if experts / count < by_largest {
        let reason =
            format!("is {count} for {experts} experts; every group must have at least {by_largest} experts");
        return Err(config.error(COUNT, reason));
    }
    if chosen > count {
        return Err(config.error(CHOSEN, format!("is {chosen}, but there are only {count} groups")));
    }
    if top_k > experts / count * chosen {
        let reason = format!("is {chosen}; these groups contain fewer than the {top_k} experts per token");
        return Err(config.error(CHOSEN, reason));
    }
    Ok((chosen < count).then_some(Groups { count, chosen, by_largest }))
}

/// Experts plus a shared expert that is as wide as `n_shared_experts` experts; `shared` is the default of that key.
pub(super) fn with_shared(
    config: &ConfigFields<'_>,
    routing: Routing,
    shared: usize,
) -> Result<GatedExperts> {
    const KEY: &str = "moe_layer_freq";
    if let Some(other) = config.optional_usize(KEY)?.filter(|step| *step != 1) {
        return Err(config.error(KEY, format!("is {other}; only 1 is supported")));
    }
    let intermediate = config.require_positive("moe_intermediate_size")?;
    let shared = config.optional_usize("n_shared_experts")?.unwrap_or(shared);
    let shared = (shared > 0).then_some(SharedExpert {
        prefix: "mlp.shared_experts",
        intermediate: intermediate * shared,
        gate: None,
        fused: None,
    });
    Ok(GatedExperts { shared, ..GatedExperts::new(routing, intermediate) })
}

fn latent(
    d: &Decoder<'_>,
    experts: GatedExperts,
    is_dense: impl Fn(usize) -> bool,
    interleaved: bool,
) -> Result<Architecture> {
    let (latent, _) = Latent::read(d.config)?;
    let layout = if interleaved { RopeLayout::Interleaved } else { RopeLayout::Halves };
    let rope =
        RopeRequest { layout, ..RopeRequest::new(latent.rotated(), d.defaults.theta) }.read(d.config)?;
    let mut attention = d.attention(Some(rope), [d.flag("attention_bias", false)?; 2]);
    attention.projections = Projections::Latent(latent);
    architecture(d, &attention, experts, is_dense)
}

pub(super) fn architecture(
    d: &Decoder<'_>,
    attention: &Attention,
    experts: GatedExperts,
    is_dense: impl Fn(usize) -> bool,
) -> Result<Architecture> {
    let block = d.block(attention.clone(), d.mlp(false));
    let architecture = d.with_experts(|_| block.clone(), |layer| (!is_dense(layer)).then_some(experts))?;
    let further = d.config.optional_usize("num_nextn_predict_layers")?.unwrap_or(0);
    Ok(Architecture { further_blocks: further.min(MAX_LAYERS), ..architecture })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;
    use crate::checkpoint::MemorySource;
    use crate::model::arch::{self, BlockGraph, NodeId};

    fn read(class: &str, changes: &Value) -> Result<Architecture> {
        let mut config = json!({
            "architectures": [class], "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
            "num_hidden_layers": 3, "vocab_size": 100, "q_lora_rank": 24, "kv_lora_rank": 16,
            "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8,
            "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2,
            "num_key_value_heads": 4,
        });
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let config = ConfigFields::new(Path::new("config.json"), config.as_object().unwrap());
        arch::describe(&config, &MemorySource::new())
    }

    fn node(graph: &BlockGraph, name: &str) -> NodeId {
        graph.linears().find(|(_, found, ..)| *found == name).unwrap().0
    }

    #[test]
    fn latents_are_distinguished_from_heads() {
        let architecture = read("DeepseekV3ForCausalLM", &json!({ "first_k_dense_replace": 1 })).unwrap();
        let graph = architecture.graph(1);
        let shape = graph.attentions().next().unwrap();
        assert_eq!((shape.heads(), shape.head_dim, shape.value_dim), (4, 20, 10));
        for (name, is_latent, width) in [
            ("self_attn.q_a_proj", true, 20),
            ("self_attn.kv_a_proj_with_mqa", true, 20),
            ("self_attn.q_b_proj", false, 20),
            ("self_attn.kv_b_proj", false, 22),
        ] {
            let node = node(graph, name);
            assert_eq!((graph.makes_latents(node), name), (is_latent, name));
            assert!(
                is_latent || graph.feeds_attention(node) && graph.head_width(node, shape) == width,
                "{name}"
            );
        }
        let fused = architecture.fused_modules();
        assert!(fused.iter().any(|f| f.name == "model.layers.2.self_attn.fused_qkv_a_proj"));
        assert!(fused.iter().any(|f| f.name == "model.layers.1.mlp.shared_experts.gate_up_proj"));
        assert!(architecture.graph(0).linears().all(|(_, name, ..)| name != "mlp.gate"));
        assert_eq!(graph.linears().find(|(_, name, ..)| *name == "mlp.gate").unwrap().2, [8, 64]);
    }

    #[test]
    fn blocks_after_the_last_belong_to_no_layer() {
        let architecture = read("DeepseekV3ForCausalLM", &json!({ "num_nextn_predict_layers": 1 })).unwrap();
        let further = |name: &str| architecture.is_in_further_block(name);
        assert!(further("model.layers.3.eh_proj.weight") && !further("model.layers.2.mlp.gate.weight"));
        assert!(!further("model.layers.4.x") && !further("model.layers.03.x") && !further("lm_head.weight"));
        assert_eq!(architecture.layer_of("model.layers.3.eh_proj.weight"), None);
        let none = read("Glm4MoeForCausalLM", &json!({})).unwrap();
        assert!(!none.is_in_further_block("model.layers.3.x"));
    }

    #[test]
    fn kimi_k2_is_known_by_its_own_model_type() {
        let k2 =
            json!({ "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1 });
        assert_eq!(read("DeepseekV3ForCausalLM", &k2).unwrap().family, "deepseek_v3");
        assert!(read("DeepseekV2ForCausalLM", &json!({ "model_type": "kimi_k2" })).is_err());
    }

    /// With `mscale_all_dim`, scores are multiplied by the square of YaRN's recommended factor.
    #[test]
    fn mscale_multiplies_scores() {
        let scale = |rope: Value| {
            let architecture = read("DeepseekV3ForCausalLM", &rope).unwrap();
            f64::from(architecture.graph(0).attentions().next().unwrap().scale()) * 20.0_f64.sqrt()
        };
        let yarn = |all_dim: f64, kind: &str| {
            json!({ "rope_scaling": {
                "type": kind, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": all_dim,
                "original_max_position_embeddings": 64,
            } })
        };
        approx::assert_relative_eq!(scale(json!({})), 1.0, max_relative = 1e-6);
        approx::assert_relative_eq!(scale(yarn(0.0, "yarn")), 1.0, max_relative = 1e-6);
        let expected = (0.1 * 0.7 * 40.0_f64.ln() + 1.0).powi(2);
        approx::assert_relative_eq!(scale(yarn(0.7, "yarn")), expected, max_relative = 1e-6);
        approx::assert_relative_eq!(scale(yarn(0.7, "default")), 1.0, max_relative = 1e-6);
    }

    #[test]
    fn what_is_not_computed_is_refused_by_its_field() {
        let (v2, v3, glm) = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM");
        for (class, field, value) in [
            (v3, "kv_lora_rank", json!(0)),
            (v3, "qk_rope_head_dim", json!(7)),
            (v3, "num_key_value_heads", json!(2)),
            (v3, "n_group", json!(3)),
            (v3, "n_group", json!(8)),
            (v3, "topk_group", json!(5)),
            (v3, "topk_group", json!(1)),
            (v3, "n_routed_experts", json!(1_u64 << 40)),
            (v3, "num_experts_per_tok", json!(9)),
            (v3, "scoring_func", json!("softmax")),
            (v3, "topk_method", json!("greedy")),
            (v3, "moe_layer_freq", json!(2)),
            (v3, "routed_scaling_factor", json!(-1.0)),
            (v2, "topk_method", json!("noaux_tc")),
            (v2, "norm_topk_prob", json!(true)),
            (v2, "mlp_bias", json!(true)),
            (glm, "n_shared_experts", json!(-1)),
            ("Glm4MoeLiteForCausalLM", "mlp_layer_types", json!(["dense"])),
            ("Glm4MoeLiteForCausalLM", "mlp_layer_types", json!(["dense", "sparse", "other"])),
        ] {
            let message = match read(class, &json!({ field: value })) {
                Err(error) => error.to_string(),
                Ok(_) => panic!("{class} takes {field} = {value}"),
            };
            assert!(message.contains(field) || field.contains("rope"), "{message}");
        }
    }
}
