//! Metadata for parts that only some families have.

use serde_json::{Map, Value as Json};

use super::families::{GgufFamily, INDEXER_KEY, INDEXER_WEIGHTS, RoutingKeys, Sections};
use super::file::{Array, Value};
use super::metadata::unfit;
use super::{layout, mixers};
use crate::Result;
use crate::model::{
    Architecture, AttentionShape, BlockGraph, Op, Rope, RopeScaling, RouterScores, RoutingRule, Yarn,
};

/// The start and end of YaRN's ramp, in rotations over the original context length. llama.cpp supports no others.
pub(super) const ROTATIONS: [f64; 2] = [32.0, 1.0];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LatentWidths {
    /// The width of the latent vector for queries, if they have one.
    pub(super) query_rank: Option<usize>,
    /// The width of the latent vector for keys and values.
    pub(super) rank: usize,
    pub(super) rotary: usize,
}

impl LatentWidths {
    pub(super) fn of(graph: &BlockGraph) -> Option<Self> {
        let norm = |module: &str| {
            graph.nodes().iter().find_map(|node| match &node.op {
                Op::RmsNorm { name, width, .. } if name == module => Some(*width),
                _ => None,
            })
        };
        let rotary = graph.nodes().iter().find_map(|node| match node.op {
            Op::JoinHeads { widths: [_, rotary], .. } => Some(rotary),
            _ => None,
        })?;
        let rank = norm("self_attn.kv_a_layernorm")?;
        Some(Self { query_rank: norm("self_attn.q_a_layernorm"), rank, rotary })
    }
}

pub(super) fn count(family: &GgufFamily, n: usize) -> Result<Value> {
    u32::try_from(n).map(Value::U32).map_err(|_| unfit(family, format!("{n} exceeds 32 bits")))
}

pub(super) fn heads(
    a: &Architecture,
    family: &GgufFamily,
    shape: AttentionShape,
    put: &mut impl FnMut(&str, Value),
) -> Result<()> {
    let count = |n: usize| count(family, n);
    put("attention.head_count", count(shape.heads())?);
    let Some(latent) = LatentWidths::of(a.graph(0)) else {
        put("attention.head_count_kv", mixers::key_heads(a, family, shape)?);
        put("attention.key_length", count(shape.head_dim)?);
        put("attention.value_length", count(shape.value_dim)?);
        return Ok(());
    };
    // llama.cpp's graph has one key for all heads, which consists of the latent vector and the rotated features.
    put("attention.head_count_kv", count(1)?);
    put("attention.key_length", count(latent.rank + latent.rotary)?);
    put("attention.value_length", count(latent.rank)?);
    put("attention.key_length_mla", count(shape.head_dim)?);
    put("attention.value_length_mla", count(shape.value_dim)?);
    put("attention.kv_lora_rank", count(latent.rank)?);
    // 0 if queries are computed from the hidden states.
    put("attention.q_lora_rank", count(latent.query_rank.unwrap_or(0))?);
    Ok(())
}

/// Writes how tokens are routed. The widths are those of an expert and of the shared expert.
pub(super) fn routing(
    family: &GgufFamily,
    routing: RoutingRule,
    [expert, shared]: [Option<usize>; 2],
    put: &mut impl FnMut(&str, Value),
) -> Result<()> {
    match family.routing {
        RoutingKeys::Full | RoutingKeys::OneShared => {}
        RoutingKeys::Implied => return Ok(()),
        RoutingKeys::Sigmoid => {
            put("expert_gating_func", Value::U32(gating(routing.scores)));
            return Ok(());
        }
    }
    let shared = match (shared, expert) {
        (Some(_), _) if family.routing == RoutingKeys::OneShared => 1,
        (Some(shared), Some(expert)) if shared % expert == 0 => shared / expert,
        (Some(shared), _) => {
            return Err(unfit(
                family,
                format!(
                    "the width of its shared expert, {shared}, is not a multiple of the width of an expert"
                ),
            ));
        }
        (None, _) => return Err(unfit(family, "it has no shared expert".into())),
    };
    put("expert_shared_count", count(family, shared)?);
    put("expert_gating_func", Value::U32(gating(routing.scores)));
    put("expert_weights_scale", Value::F32(routing.scale));
    put("expert_weights_norm", Value::Bool(routing.normalized));
    if let Some(groups) = routing.groups {
        if groups.by_largest != 2 {
            let reason =
                "it scores a group of experts by something other than the sum of the two largest scores";
            return Err(unfit(family, reason.into()));
        }
        put("expert_group_count", count(family, groups.count)?);
        put("expert_group_used_count", count(family, groups.chosen)?);
    }
    Ok(())
}

/// The value of `expert_gating_func`.
pub(super) fn gating(scores: RouterScores) -> u32 {
    match scores {
        // Families that use `Sparse` cannot be written as GGUF.
        RouterScores::Softmax | RouterScores::Sparse { .. } => 1,
        RouterScores::Sigmoid => 2,
    }
}

pub(super) fn delta_nets(
    a: &Architecture,
    family: &GgufFamily,
    put: &mut impl FnMut(&str, Value),
) -> Result<()> {
    let nets = (0..a.layers).filter_map(|layer| layout::delta_net(a.graph(layer)));
    let Some(net) = nets.clone().next() else {
        return match family.gates_attention {
            true => Err(unfit(family, "it has no delta net".into())),
            false => Ok(()),
        };
    };
    if nets.clone().any(|other| other != net) {
        return Err(unfit(family, "the shapes of its delta nets differ".into()));
    }
    if net.key_dim != net.value_dim {
        let reason = format!(
            "the key heads of its delta nets have {} features and the value heads {}, which must be equal",
            net.key_dim, net.value_dim
        );
        return Err(unfit(family, reason));
    }
    let count = |n: usize| count(family, n);
    put("ssm.conv_kernel", count(mixers::kernel(a))?);
    put("ssm.state_size", count(net.key_dim)?);
    put("ssm.group_count", count(net.key_heads)?);
    put("ssm.time_step_rank", count(net.value_heads())?);
    put("ssm.inner_size", count(net.width())?);
    let recurrent: Vec<bool> =
        (0..a.layers).map(|layer| layout::delta_net(a.graph(layer)).is_some()).collect();
    let interval = recurrent.iter().position(|recurrent| !recurrent).map_or(a.layers + 1, |first| first + 1);
    put("attention.recurrent_layers", Value::Array(Array::Bool(recurrent)));
    put("full_attention_interval", count(interval)?);
    Ok(())
}

/// Writes the number of channel pairs rotated by each coordinate of an image, and the number of blocks that add features
/// of an image. For text, all coordinates are equal, and no features are added.
pub(super) fn sections(
    a: &Architecture,
    family: &GgufFamily,
    config: &Map<String, Json>,
    put: &mut impl FnMut(&str, Value),
) {
    let Some(kind) = family.sections else { return };
    let pairs = a.ropes().map(|rope| rope.rotary_dim / 2).max().unwrap_or_default();
    put("rope.dimension_sections", Value::Array(Array::I32(section_pairs(config, kind, pairs))));
    if family.has_deepstack {
        let vision = config.get("vision_config").and_then(|vision| vision.get("deepstack_visual_indexes"));
        let blocks = vision.and_then(Json::as_array).map_or(0, Vec::len);
        put("n_deepstack_layers", Value::U32(blocks as u32));
    }
}

/// Channels without a coordinate would not be rotated. If coordinates take pairs in turn, the configuration's numbers
/// are therefore used only if none is below an equal share.
fn section_pairs(config: &Map<String, Json>, kind: Sections, pairs: usize) -> Vec<i32> {
    let text = config.get("text_config").and_then(Json::as_object).unwrap_or(config);
    let found =
        ["rope_parameters", "rope_scaling"].iter().find_map(|key| text.get(*key)?.get("mrope_section"));
    let numbers = |json: &Json| {
        let list = json.as_array()?;
        let numbers = list.iter().map(|n| i32::try_from(n.as_i64()?).ok()).collect::<Option<Vec<i32>>>()?;
        (numbers.len() <= 4).then_some(numbers)
    };
    let even: Vec<i32> = [pairs.div_ceil(3), (pairs + 1) / 3, pairs / 3, 0].map(|n| n as i32).to_vec();
    let mut sections = found.and_then(numbers).unwrap_or_else(|| even.clone());
    sections.resize(4, 0);
    let covers = match kind {
        Sections::Consecutive => {
            let sum = sections[..3].iter().try_fold(0_i32, |sum, n| sum.checked_add(*n));
            sections.iter().all(|n| *n >= 0) && sum == Some(pairs as i32)
        }
        Sections::Interleaved => sections.iter().zip(&even).all(|(found, due)| found >= due),
    };
    if covers { sections } else { even }
}

/// Writes the scale of queries, which grows with the position.
pub(super) fn position_scale(
    a: &Architecture,
    family: &GgufFamily,
    put: &mut impl FnMut(&str, Value),
) -> Result<()> {
    if !family.scales_queries {
        return Ok(());
    }
    let nodes = (0..a.layers).flat_map(|layer| a.graph(layer).nodes());
    let mut scales = nodes.filter_map(|node| match node.op {
        Op::PositionScale(scale) => Some(scale),
        _ => None,
    });
    let Some(scale) = scales.next() else { return Ok(()) };
    if scales.any(|other| other != scale) || scale.offset != 0 {
        return Err(unfit(family, "it scales queries by position in an unsupported way".into()));
    }
    let is_original = |rope: &Rope| match &rope.scaling {
        RopeScaling::Yarn(yarn) => yarn.original_positions == scale.original_positions,
        _ => false,
    };
    if !a.ropes().all(is_original) {
        let reason = "the period of its scale of queries is not the original context length of YaRN";
        return Err(unfit(family, reason.into()));
    }
    put("attention.temperature_scale", Value::F32(scale.beta));
    if LatentWidths::of(a.graph(0)).is_some() {
        put("attention.temperature_length", count(family, scale.original_positions)?);
    }
    Ok(())
}

/// Writes the sizes of the indexers and the number of keys that they select.
pub(super) fn indexers(
    a: &Architecture,
    family: &GgufFamily,
    put: &mut impl FnMut(&str, Value),
) -> Result<()> {
    let Some(keys) = a.selected_keys else { return Ok(()) };
    let rows = |layer: usize, linear: &str| {
        a.graph(layer).linears().find(|(_, name, ..)| *name == linear).map(|(_, _, [rows, _], _)| rows)
    };
    // The first block always has an indexer.
    let [Some(width), Some(heads)] = [INDEXER_KEY, INDEXER_WEIGHTS].map(|linear| rows(0, linear)) else {
        return Err(unfit(family, "its first block has no indexer".into()));
    };
    let rotated = LatentWidths::of(a.graph(0)).map_or(0, |latent| latent.rotary);
    if width < rotated {
        let reason = format!(
            "the heads of its indexer have {width} channels, but {rotated} channels of each head are rotated"
        );
        return Err(unfit(family, reason));
    }
    put("attention.indexer.head_count", count(family, heads)?);
    put("attention.indexer.key_length", count(family, width)?);
    put("attention.indexer.top_k", count(family, keys)?);
    if family.shares_indexers {
        let own = (0..a.layers).map(|layer| rows(layer, INDEXER_KEY).is_some()).collect();
        put("attention.indexer.types", Value::Array(Array::Bool(own)));
    }
    Ok(())
}

/// Writes the entries for YaRN, and returns a note for the user if one is due.
pub(super) fn yarn(
    a: &Architecture,
    family: &GgufFamily,
    (rope, yarn): (&Rope, &Yarn),
    shape: AttentionShape,
    put: &mut impl FnMut(&str, Value),
) -> Result<Option<String>> {
    if yarn.rotations != ROTATIONS {
        let [fast, slow] = yarn.rotations;
        return Err(unfit(
            family,
            format!("beta_fast and beta_slow of YaRN are {fast} and {slow}; only 32 and 1 are supported"),
        ));
    }
    put("rope.scaling.type", Value::string("yarn"));
    put("rope.scaling.factor", Value::F32(yarn.factor as f32));
    put("rope.scaling.original_context_length", count(family, yarn.original_positions)?);
    put("rope.scaling.yarn_beta_fast", Value::F32(yarn.rotations[0] as f32));
    put("rope.scaling.yarn_beta_slow", Value::F32(yarn.rotations[1] as f32));
    let recommended = 1.0 + 0.1 * yarn.factor.max(1.0).ln();
    if LatentWidths::of(a.graph(0)).is_some() {
        // llama.cpp applies the attention factor to all scores, the model only to the rotated part.
        if (yarn.attention_factor - 1.0).abs() > 1e-6 {
            let reason = format!(
                "YaRN's attention factor for rotated channels is {} instead of 1",
                yarn.attention_factor
            );
            return Err(unfit(family, reason));
        }
        let weight = latent_weight(shape, yarn.factor);
        // llama.cpp ignores another value in the factor of scores, but not in that of rotated channels.
        if family.scales_queries && (weight - 1.0).abs() > 1e-6 {
            return Err(unfit(family, format!("mscale_all_dim of YaRN is {weight} instead of 1")));
        }
        put("rope.scaling.yarn_log_multiplier", Value::F32(weight as f32 / 10.0));
    } else if (yarn.attention_factor / recommended - 1.0).abs() > 1e-6 {
        put("rope.scaling.attn_factor", Value::F32((yarn.attention_factor / recommended) as f32));
    }
    let rounds = !yarn.truncated && [yarn.low, yarn.high].iter().any(|end| end.fract() != 0.0);
    Ok(rounds.then(|| {
        format!(
            "llama.cpp rounds both ends of YaRN's ramp over the {} pairs of rotated channels to integers, \
            but the model does not",
            rope.rotary_dim / 2
        )
    }))
}

/// `mscale_all_dim`, derived from its effect on the scale of scores.
fn latent_weight(shape: AttentionShape, factor: f64) -> f64 {
    let root = (f64::from(shape.scale()) * (shape.head_dim as f64).sqrt()).sqrt();
    if factor > 1.0 { (root - 1.0) / (0.1 * factor.ln()) } else { 0.0 }
}
