//! DeepSeek-V2, V3 and models with V3's design: GLM-4.5 with standard attention, GLM-4.7-Flash with latent attention,
//! DeepSeek-V3.2 and GLM-5 with an indexer.
//!
//! The first layers have an MLP. The other layers have routed experts and a shared one.

use super::blocks::MAX_LAYERS;
use super::decoder::{Decoder, Defaults};
use super::experts::{GatedExperts, SharedExpert, mlp_layer_types, routing};
use super::latent::{Indexer, Latent};
use super::parts::{Attention, HeadNorms, Projections};
use super::{Architecture, Correction, Family, Groups, RouterScores, RoutingRule};
use crate::checkpoint::ConfigFields;
use crate::model::rope::{RopeLayout, RopeRequest};
use crate::{Error, Result};

#[derive(Debug, Clone, Copy)]
pub(super) struct DeepseekV2;

#[derive(Debug, Clone, Copy)]
pub(super) struct DeepseekV3;

/// A family with V3's design and an indexer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Indexed {
    name: &'static str,
    classes: &'static [&'static str],
    /// The defaults of `rms_norm_eps`, of `n_group` and `topk_group`, and of the indexer's heads.
    norm_eps: f64,
    groups: [usize; 2],
    heads: usize,
    /// Returns which layers have an indexer.
    with_indexer: fn(&ConfigFields<'_>, usize) -> Result<Vec<bool>>,
}

pub(super) const DEEPSEEK_V32: Indexed = Indexed {
    name: "deepseek_v32",
    classes: &["DeepseekV32ForCausalLM"],
    norm_eps: 1e-6,
    groups: [8, 4],
    heads: 64,
    with_indexer: |_, layers| Ok(vec![true; layers]),
};

pub(super) const GLM_MOE_DSA: Indexed = Indexed {
    name: "glm_moe_dsa",
    classes: &["GlmMoeDsaForCausalLM"],
    norm_eps: 1e-5,
    groups: [1, 1],
    heads: 32,
    with_indexer: indexer_types,
};

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
            return Err(config.unsupported_setting("norm_topk_prob", reason));
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

impl Family for Indexed {
    fn name(&self) -> &'static str {
        self.name
    }

    fn architectures(&self) -> &'static [&'static str] {
        self.classes
    }

    fn describe(&self, config: &ConfigFields<'_>) -> Result<Architecture> {
        let d = decoder(config, self.name, self.norm_eps)?;
        let with_indexer = (self.with_indexer)(config, d.layers)?;
        indexed(&d, self.groups, self.heads, &with_indexer)
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
fn by_sigmoid(d: &Decoder<'_>, factor: f64, groups_by_default: [usize; 2]) -> Result<RoutingRule> {
    corrected_sigmoid(d, "mlp.gate", factor, groups_by_default)
}

pub(super) fn corrected_sigmoid(
    d: &Decoder<'_>,
    module: &'static str,
    factor: f64,
    groups_by_default: [usize; 2],
) -> Result<RoutingRule> {
    let routing = RoutingRule {
        scores: RouterScores::Sigmoid,
        correction: Some(Correction { module, tensor: "e_score_correction_bias", is_row: false }),
        normalized: d.flag("norm_topk_prob", true)?,
        epsilon: 1e-20,
        scale: d.factor("routed_scaling_factor")?.unwrap_or(factor) as f32,
        ..routing(d.config, &EXPERTS)?
    };
    Ok(RoutingRule { groups: groups(d.config, routing, groups_by_default, 2)?, ..routing })
}

/// Reads the groups that experts are chosen from, with these defaults for `n_group` and `topk_group`. A group is ranked
/// by the sum of its `by_largest` largest scores. Returns `None` if all groups are chosen.
pub(super) fn groups(
    config: &ConfigFields<'_>,
    routing: RoutingRule,
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

/// Experts plus a shared expert that is as wide as `n_shared_experts` experts; `shared` is the default of that key, and
/// `null` means that there is no shared expert, as in DeepSeek's own code.
pub(super) fn with_shared(
    config: &ConfigFields<'_>,
    routing: RoutingRule,
    shared: usize,
) -> Result<GatedExperts> {
    const KEY: &str = "moe_layer_freq";
    if let Some(other) = config.optional_usize(KEY)?.filter(|step| *step != 1) {
        return Err(config.unsupported_setting(KEY, format!("is {other}; only 1 is supported")));
    }
    let intermediate = config.require_positive("moe_intermediate_size")?;
    const SHARED: &str = "n_shared_experts";
    let default = if config.has(SHARED) { 0 } else { shared };
    let shared = config.optional_usize(SHARED)?.unwrap_or(default);
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
    architecture(d, &latent_attention(d, latent, interleaved)?, experts, is_dense)
}

fn latent_attention(d: &Decoder<'_>, latent: Latent, interleaved: bool) -> Result<Attention> {
    let layout = if interleaved { RopeLayout::Interleaved } else { RopeLayout::Halves };
    let rope =
        RopeRequest { layout, ..RopeRequest::new(latent.rotated(), d.defaults.theta) }.read(d.config)?;
    let mut attention = d.attention(Some(rope), [d.flag("attention_bias", false)?; 2]);
    attention.projections = Projections::Latent(latent);
    Ok(attention)
}

/// DeepSeek-V3's blocks with an indexer in some layers. `groups_by_default` and `heads` (of the indexer) are defaults.
fn indexed(
    d: &Decoder<'_>,
    groups_by_default: [usize; 2],
    heads: usize,
    with_indexer: &[bool],
) -> Result<Architecture> {
    let config = d.config;
    require(config, "scoring_func", "sigmoid")?;
    require(config, "topk_method", "noaux_tc")?;
    let experts = with_shared(config, by_sigmoid(d, 2.5, groups_by_default)?, 1)?;
    let dense = match mlp_layer_types(config, d.layers)? {
        Some(dense) => dense,
        None => {
            let first = config.optional_usize("first_k_dense_replace")?.unwrap_or(3);
            (0..d.layers).map(|layer| layer < first).collect()
        }
    };
    let size = |key: &str, default| Ok::<_, Error>(config.optional_positive(key)?.unwrap_or(default));
    let indexer = Indexer { heads: size("index_n_heads", heads)?, head_dim: size("index_head_dim", 128)? };
    let keys = size("index_topk", 2048)?;
    let (latent, _) = Latent::read(config)?;
    let plain = latent_attention(d, latent, true)?;
    let projections = Projections::Latent(latent.indexed(config, indexer)?);
    let indexed = Attention { projections, ..plain.clone() };
    let block = |layer: usize| {
        let attention = if with_indexer[layer] { &indexed } else { &plain };
        d.block(attention.clone(), d.mlp(false))
    };
    let architecture =
        with_further_blocks(d, d.with_experts(block, |layer| (!dense[layer]).then_some(experts))?)?;
    let max_positions = architecture.max_positions.min(keys);
    Ok(Architecture { selected_keys: Some(keys), max_positions, ..architecture })
}

/// Reads which layers have an indexer. The others use the keys that the previous indexer selected.
fn indexer_types(config: &ConfigFields<'_>, layers: usize) -> Result<Vec<bool>> {
    const TYPES: &str = "indexer_types";
    const PATTERN: &str = "index_topk_pattern";
    let pattern = config.optional_str(PATTERN)?;
    let (key, [full, shared], kinds) = match (config.optional_str_list(TYPES)?, pattern) {
        (Some(types), _) => (TYPES, ["full", "shared"], types),
        (None, Some(pattern)) => (PATTERN, ["F", "S"], pattern.split("").filter(|s| !s.is_empty()).collect()),
        (None, None) => {
            let step = config.optional_usize("index_topk_freq")?.unwrap_or(1).max(1);
            let offset = config.optional_usize("index_skip_topk_offset")?.unwrap_or(2);
            let full = |layer: usize| (layer + 1).saturating_sub(offset).is_multiple_of(step);
            return Ok((0..layers).map(full).collect());
        }
    };
    if kinds.len() != layers {
        return Err(config.error(key, format!("has {} entries for {layers} blocks", kinds.len())));
    }
    if let Some(other) = kinds.iter().find(|kind| ![full, shared].contains(kind)) {
        return Err(config.error(key, format!("contains an unknown entry, `{}`", other.escape_default())));
    }
    if kinds.first() == Some(&shared) {
        return Err(config.error(key, "begins with a block that shares the keys of an earlier one"));
    }
    Ok(kinds.iter().map(|kind| *kind == full).collect())
}

pub(super) fn architecture(
    d: &Decoder<'_>,
    attention: &Attention,
    experts: GatedExperts,
    is_dense: impl Fn(usize) -> bool,
) -> Result<Architecture> {
    let block = d.block(attention.clone(), d.mlp(false));
    with_further_blocks(d, d.with_experts(|_| block.clone(), |layer| (!is_dense(layer)).then_some(experts))?)
}

fn with_further_blocks(d: &Decoder<'_>, architecture: Architecture) -> Result<Architecture> {
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
    fn shared_experts_may_be_absent() {
        let shared = |changes: Value| {
            let architecture = read("DeepseekV3ForCausalLM", &changes).unwrap();
            architecture.graph(2).linears().any(|(_, name, ..)| name.starts_with("mlp.shared_experts"))
        };
        assert!(shared(json!({ "first_k_dense_replace": 1 })));
        for value in [json!(0), json!(null)] {
            assert!(!shared(json!({ "first_k_dense_replace": 1, "n_shared_experts": value })));
        }
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
    fn folds_contain_the_indexer() {
        let indexed = json!({ "first_k_dense_replace": 0, "index_n_heads": 5, "index_head_dim": 16 });
        let architecture = read("DeepseekV32ForCausalLM", &indexed).unwrap();
        assert_eq!((architecture.selected_keys, architecture.max_positions), (Some(2048), 2048));
        let graph = architecture.graph(2);
        let folded = |producer: &str| {
            let group = graph.fold_groups().into_iter().find(|g| graph.name(g.producer) == producer).unwrap();
            let names = group.consumers.iter().map(|&c| graph.name(c).strip_prefix("self_attn.").unwrap());
            (names.map(str::to_owned).collect::<Vec<_>>(), group.inspected)
        };
        let (names, inspected) = folded("input_layernorm");
        assert_eq!(names, ["q_a_proj", "indexer.wk", "indexer.weights_proj", "kv_a_proj_with_mqa"]);
        assert_eq!(inspected, node(graph, "self_attn.o_proj"));
        let (names, inspected) = folded("self_attn.q_a_layernorm");
        assert_eq!(names, ["q_b_proj", "indexer.wq_b"]);
        // The queries, which depend on nothing but this norm.
        assert_eq!((graph.width(inspected), graph.needed_by(inspected).len()), (80, 1));
        for name in ["wq_b", "wk", "weights_proj"] {
            let node = node(graph, &format!("self_attn.indexer.{name}"));
            assert!(!graph.nodes()[node].op.is_quantizable(), "{name}");
        }
    }

    #[test]
    fn layers_of_glm_5_share_indexers() {
        let with_indexer = |changes: Value| -> Result<Vec<bool>> {
            let architecture = read("GlmMoeDsaForCausalLM", &changes)?;
            let has =
                |layer| architecture.graph(layer).linears().any(|(_, name, ..)| name.contains("indexer"));
            Ok((0..architecture.layers).map(has).collect())
        };
        for (changes, expected) in [
            (json!({}), vec![true; 3]),
            (json!({ "index_topk_freq": 2 }), vec![true, true, false]),
            (json!({ "index_topk_freq": 2, "index_skip_topk_offset": 1 }), vec![true, false, true]),
            (json!({ "index_topk_pattern": "FSF" }), vec![true, false, true]),
            (json!({ "indexer_types": ["full", "shared", "shared"] }), vec![true, false, false]),
        ] {
            assert_eq!(with_indexer(changes.clone()).unwrap(), expected, "{changes}");
        }
        for (changes, expected) in [
            (json!({ "indexer_types": ["shared", "full", "full"] }), "indexer_types"),
            (json!({ "indexer_types": ["full", "other", "full"] }), "unknown entry, `other`"),
            (json!({ "indexer_types": ["full"] }), "1 entries for 3 blocks"),
            (json!({ "index_topk_pattern": "FSX" }), "`index_topk_pattern` contains an unknown entry, `X`"),
            (json!({ "index_topk_pattern": "FSé" }), "unknown entry, `\\u{e9}`"),
            (json!({ "index_topk_pattern": "SFF" }), "begins with a block that shares"),
            (json!({ "index_topk_pattern": "F" }), "1 entries for 3 blocks"),
            (json!({ "index_topk": 0 }), "index_topk"),
            (json!({ "q_lora_rank": null }), "q_lora_rank"),
        ] {
            let message = with_indexer(changes.clone()).unwrap_err().to_string();
            assert!(message.contains(expected), "{changes}: {message}");
        }
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
