//! DeepSeek-V2, V3 and what follows V3's design: GLM-4.5 with plain attention, GLM-4.7-Flash with latent attention.
//!
//! The first layers have an MLP. The others have experts, chosen from the best groups, and a shared expert.

use super::blocks::MAX_LAYERS;
use super::decoder::{Decoder, Defaults};
use super::experts::{GatedExperts, SharedExpert, routing};
use super::latent::Latent;
use super::parts::{Attention, HeadNorms, Mlp, Projections};
use super::{Architecture, Correction, Family, Groups, Routing, Scores};
use crate::Result;
use crate::checkpoint::ConfigFields;
use crate::model::rope::{RopeLayout, RopeRequest};

/// The family of `DeepseekV2ForCausalLM`.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeepseekV2;

/// The family of `DeepseekV3ForCausalLM`.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeepseekV3;

/// The family of `Glm4MoeForCausalLM`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Glm4Moe;

/// The family of `Glm4MoeLiteForCausalLM`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Glm4MoeLite;

/// What the configuration may call the number of experts, the published name last.
const EXPERTS: [&str; 3] = ["num_experts", "num_local_experts", "n_routed_experts"];

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
        d.refuse("mlp_bias", "biases of MLPs are not computed in this family")?;
        if config.optional_bool("norm_topk_prob")? == Some(true) {
            let reason = "is true: readers disagree on whether weights are then scaled, too";
            return Err(config.error("norm_topk_prob", reason));
        }
        let mut routing = routing(config, &EXPERTS)?;
        routing.scale = d.factor("routed_scaling_factor")?.unwrap_or(1.0) as f32;
        routing.groups = match config.optional_str(METHOD)? {
            None | Some("greedy") => None,
            Some("group_limited_greedy") => groups(config, routing, [1, 1], 1)?,
            Some(other) => {
                let other = other.escape_default();
                let reason = format!("is `{other}`; this family has greedy and group_limited_greedy");
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
        const TYPES: &str = "mlp_layer_types";
        let d = decoder(config, self.name(), 1e-5)?;
        let experts = with_shared(config, by_sigmoid(&d, 1.8, [1, 1])?, 1)?;
        let dense = match config.optional_str_list(TYPES)? {
            None => (0..d.layers).map(|layer| layer == 0).collect(),
            Some(types) if types.len() != d.layers => {
                return Err(
                    config.error(TYPES, format!("has {} entries for {} blocks", types.len(), d.layers))
                );
            }
            Some(types) => match types.iter().find(|t| !["dense", "sparse"].contains(t)) {
                Some(other) => {
                    let reason = format!("holds `{}`, which is not known", other.escape_default());
                    return Err(config.error(TYPES, reason));
                }
                None => types.iter().map(|t| *t == "dense").collect::<Vec<bool>>(),
            },
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
        attention.head_norms = d.flag("use_qk_norm", false)?.then_some(HeadNorms::OF_HEADS);
        let dense = config.optional_usize("first_k_dense_replace")?.unwrap_or(1);
        architecture(&d, &attention, experts, |layer| layer < dense)
    }
}

/// Refuses another value than this one.
fn require(config: &ConfigFields<'_>, key: &str, value: &str) -> Result<()> {
    match config.optional_str(key)?.filter(|found| *found != value) {
        Some(found) => {
            let reason = format!("is `{}`; this family uses `{value}`", found.escape_default());
            Err(config.error(key, reason))
        }
        None => Ok(()),
    }
}

/// The sizes of a model with latent attention.
fn decoder<'a>(config: &'a ConfigFields<'a>, family: &'static str, norm_eps: f64) -> Result<Decoder<'a>> {
    // The width of a head that configurations may name is that of the turned part, and is not read.
    let (_, shape) = Latent::read(config)?;
    let head_dim = Some(shape.head_dim);
    let d = Decoder::read(config, Defaults { head_dim, norm_eps, ..Defaults::new(family) })?;
    Ok(Decoder { shape, ..d })
}

/// Routing by sigmoids, with a stored correction; `defaults` are the factor of weights, and how many groups there are and
/// are chosen.
fn by_sigmoid(d: &Decoder<'_>, factor: f64, groups_by_default: [usize; 2]) -> Result<Routing> {
    let routing = Routing {
        scores: Scores::Sigmoid,
        correction: Some(Correction { module: "mlp.gate", tensor: "e_score_correction_bias", is_row: false }),
        normalized: d.flag("norm_topk_prob", true)?,
        epsilon: 1e-20,
        scale: d.factor("routed_scaling_factor")?.unwrap_or(factor) as f32,
        ..routing(d.config, &EXPERTS)?
    };
    Ok(Routing { groups: groups(d.config, routing, groups_by_default, 2)?, ..routing })
}

/// The groups that experts are chosen from, each judged by the sum of its `by_largest` largest scores.
fn groups(
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
        return Err(config.error(COUNT, format!("is {count}, which does not divide the {experts} experts")));
    }
    if experts / count < by_largest {
        let reason = format!("is {count}, of {experts} experts: a group must have {by_largest} at least");
        return Err(config.error(COUNT, reason));
    }
    if chosen > count {
        return Err(config.error(CHOSEN, format!("is {chosen}, and there are only {count} groups")));
    }
    if top_k > experts / count * chosen {
        let reason = format!("is {chosen}: so many groups have fewer than the {top_k} experts of a token");
        return Err(config.error(CHOSEN, reason));
    }
    Ok((chosen < count).then_some(Groups { count, chosen, by_largest }))
}

/// Experts with a shared one, as wide as `n_shared_experts` of the others.
fn with_shared(config: &ConfigFields<'_>, routing: Routing, shared: usize) -> Result<GatedExperts> {
    const KEY: &str = "moe_layer_freq";
    if let Some(other) = config.optional_usize(KEY)?.filter(|step| *step != 1) {
        return Err(config.error(KEY, format!("is {other}: all layers but the first have experts here")));
    }
    let intermediate = config.require_positive("moe_intermediate_size")?;
    let shared = config.optional_usize("n_shared_experts")?.unwrap_or(shared);
    let shared = (shared > 0).then_some(SharedExpert {
        prefix: "mlp.shared_experts",
        intermediate: intermediate * shared,
        gate: None,
    });
    Ok(GatedExperts { shared, ..GatedExperts::new(routing, intermediate) })
}

/// The architecture of a model with latent attention.
fn latent(
    d: &Decoder<'_>,
    experts: GatedExperts,
    is_dense: impl Fn(usize) -> bool,
    interleaved: bool,
) -> Result<Architecture> {
    let (latent, _) = Latent::read(d.config)?;
    let layout = if interleaved { RopeLayout::Interleaved } else { RopeLayout::Halves };
    let rope =
        RopeRequest { layout, ..RopeRequest::new(latent.turned(), d.defaults.theta) }.read(d.config)?;
    let mut attention = d.attention(Some(rope), [d.flag("attention_bias", false)?; 2]);
    attention.projections = Projections::Latent(latent);
    architecture(d, &attention, experts, is_dense)
}

fn architecture(
    d: &Decoder<'_>,
    attention: &Attention,
    experts: GatedExperts,
    is_dense: impl Fn(usize) -> bool,
) -> Result<Architecture> {
    let block = d.block(attention.clone(), d.mlp(false));
    let architecture = d.architecture(|layer| {
        let mut block = block.clone();
        if !is_dense(layer) {
            block.mlp = Mlp::Experts(experts);
        }
        block
    })?;
    let further = d.config.optional_usize("num_nextn_predict_layers")?.unwrap_or(0);
    Ok(Architecture { further_blocks: further.min(MAX_LAYERS), ..architecture })
}
