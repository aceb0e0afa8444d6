//! Metadata that describe the model. They are derived from the architecture, so they describe what this program
//! computes.

use super::families::{GgufFamily, How, Mixer, Multipliers, ROPE_FACTORS, ROPE_LONG, ROPE_SHORT};
use super::file::{Array, Value};
use super::specials::{self, LatentWidths};
use super::{gemma4, llama4, mixers};
use crate::model::{
    Activation, Architecture, AttentionShape, Computes, EmbeddingScale, Op, Rope, RopeLayout, RopeScaling,
    RoutingRule,
};
use crate::{Error, Result};

/// Metadata of the model, and warnings for cases in which llama.cpp gives different results.
pub(super) struct ModelMetadata {
    pub(super) entries: Vec<(String, Value)>,
    pub(super) warnings: Vec<String>,
    /// The frequency divisors of rotary embeddings that are stored as tensors, by tensor name.
    pub(super) rope_factors: Vec<(&'static str, Vec<f32>)>,
}

/// Properties of the blocks' graphs that a file describes once for all blocks.
struct Facts<'a> {
    attention: AttentionShape,
    ropes: Vec<&'a Rope>,
    eps: f64,
    intermediate: Option<usize>,
    expert_intermediate: Option<usize>,
    shared_intermediate: Option<usize>,
    /// The factor by which block outputs are multiplied before they are added to the residual stream.
    residual: Option<f32>,
    routing: Option<RoutingRule>,
}

pub(super) fn metadata(
    a: &Architecture,
    family: &GgufFamily,
    config: &serde_json::Map<String, serde_json::Value>,
) -> Result<ModelMetadata> {
    let facts = facts(a, family)?;
    let (mut entries, mut warnings) = (Vec::new(), Vec::new());
    let mut put = |key: &str, value: Value| entries.push((format!("{}.{key}", family.arch), value));
    let count = |n: usize| specials::count(family, n);
    put("block_count", count(a.layers)?);
    put("context_length", count(context_length(a, config))?);
    put("embedding_length", count(a.hidden)?);
    put("vocab_size", count(a.vocab)?);
    if family.has_two_kinds {
        put("feed_forward_length", gemma4::mlps(a, family)?);
    } else if family.has_single_operations {
        put("feed_forward_length", mixers::mlps(a, family)?);
    } else if let Some(n) = facts.intermediate.or_else(|| unused_width(config, facts.expert_intermediate?)) {
        put("feed_forward_length", count(n)?);
    }
    let shape = facts.attention;
    match family.has_two_kinds {
        true => gemma4::heads(a, family, &mut put)?,
        false => specials::heads(a, family, shape, &mut put)?,
    }
    put(eps_key(family), Value::F32(facts.eps as f32));
    if let Some(routing @ RoutingRule { experts, top_k, .. }) = facts.routing {
        put("expert_count", count(experts)?);
        put("expert_used_count", count(top_k)?);
        if let Some(n) = facts.expert_intermediate {
            put("expert_feed_forward_length", count(n)?);
        }
        if let Some(n) = facts.shared_intermediate {
            put("expert_shared_feed_forward_length", count(n)?);
        }
        let widths = [facts.expert_intermediate, facts.shared_intermediate];
        specials::routing(family, routing, widths, &mut put)?;
        if family.dense_first {
            put("leading_dense_block_count", count(dense_blocks(a))?);
        }
        if family.has_expert_step {
            put("interleave_moe_layer_step", Value::U32(1));
        }
    }
    specials::delta_nets(a, family, &mut put)?;
    specials::sections(a, family, config, &mut put);
    mixers::keys(a, family, &mut put)?;
    specials::position_scale(a, family, &mut put)?;
    specials::indexers(a, family, &mut put)?;
    llama4::keys(a, family, facts.routing.map_or(0, |routing| routing.experts), &mut put)?;
    let windows: Vec<Option<usize>> =
        (0..a.layers).map(|layer| a.graph(layer).attentions().find_map(|shape| shape.window)).collect();
    if let Some(window) = windows.iter().flatten().next() {
        match family.has_windows {
            true => put("attention.sliding_window", count(*window)?),
            false => warnings.push(format!(
                "llama.cpp ignores the sliding window of the architecture {}: results differ for texts of \
                more than {window} tokens",
                family.arch
            )),
        }
    }
    if let Some(cap) = shape.softcap {
        put("attn_logit_softcapping", Value::F32(cap));
    }
    if let Some(cap) = a.logits.softcap {
        put("final_logit_softcapping", Value::F32(cap));
    }
    if let Some(other) = norm_eps(a).find(|eps| *eps as f32 != facts.eps as f32) {
        warnings.push(format!(
            "llama.cpp uses an epsilon of {} in all norms of the architecture {}, but the model uses \
            {other} in some norms",
            facts.eps, family.arch
        ));
    }
    if family.ignores_eps {
        warnings.push(format!(
            "llama.cpp ignores the epsilon of {} in the norms of the architecture {}",
            facts.eps, family.arch
        ));
    }
    if family.states_parallel {
        put("use_parallel_residual", Value::Bool(is_parallel(a)));
    }
    if family.approximates_gelu && activations(a).any(|found| found == Activation::Gelu) {
        warnings.push(format!(
            "llama.cpp approximates the activation function GELU of the architecture {} by the form with tanh",
            family.arch
        ));
    }
    multipliers(a, family, &facts, &mut put)?;
    let (rope_factors, note) = rope(a, family, &facts, &mut put)?;
    warnings.extend(note);
    Ok(ModelMetadata { entries, warnings, rope_factors })
}

/// The number of positions. quant runs models with an indexer only on windows in which it selects all keys, but
/// llama.cpp runs them on longer ones.
fn context_length(a: &Architecture, config: &serde_json::Map<String, serde_json::Value>) -> usize {
    let stated = config.get("max_position_embeddings").and_then(serde_json::Value::as_u64);
    let stated = stated.and_then(|n| usize::try_from(n).ok());
    stated.filter(|_| a.selected_keys.is_some()).unwrap_or(a.max_positions)
}

/// The width of dense MLPs in a model without any, as the configuration has it: otherwise, that of an expert.
fn unused_width(config: &serde_json::Map<String, serde_json::Value>, of_expert: usize) -> Option<usize> {
    let text = config.get("text_config").and_then(serde_json::Value::as_object).unwrap_or(config);
    let stated = text.get("intermediate_size").and_then(serde_json::Value::as_u64).filter(|n| *n > 0);
    Some(stated.and_then(|n| usize::try_from(n).ok()).unwrap_or(of_expert))
}

pub(super) fn eps_key(family: &GgufFamily) -> &'static str {
    match family.layer_norms {
        true => "attention.layer_norm_epsilon",
        false => "attention.layer_norm_rms_epsilon",
    }
}

fn multipliers(
    a: &Architecture,
    family: &GgufFamily,
    facts: &Facts<'_>,
    put: &mut impl FnMut(&str, Value),
) -> Result<()> {
    let embeddings = match a.embedding_scale {
        Some(EmbeddingScale::Exact(scale)) => Some(scale as f32),
        _ => None,
    };
    let logits = a.logits.scale;
    if family.folds_factors {
        return Ok(());
    }
    match family.multipliers {
        Multipliers::All => {
            put("attention.scale", Value::F32(facts.attention.scale()));
            put("embedding_scale", Value::F32(embeddings.unwrap_or(1.0)));
            put("residual_scale", Value::F32(facts.residual.unwrap_or(1.0)));
            // In GGUF, logits are divided by this value.
            put("logit_scale", Value::F32(1.0 / logits));
        }
        _ if embeddings.is_some() || facts.residual.is_some() => {
            return Err(unfit(family, "it multiplies embeddings or residual updates by a factor".into()));
        }
        Multipliers::Logits => put("logit_scale", Value::F32(logits)),
        Multipliers::None if logits != 1.0 => {
            return Err(unfit(family, format!("it multiplies logits by {logits}")));
        }
        Multipliers::None => {}
    }
    Ok(())
}

/// The factors of the embedding and of the head that are multiplied into their weights.
pub(super) fn folded_factors(a: &Architecture, family: &GgufFamily) -> [f32; 2] {
    match a.embedding_scale {
        _ if !family.folds_factors => [1.0; 2],
        Some(EmbeddingScale::Exact(scale)) => [scale as f32, a.logits.scale],
        _ => [1.0, a.logits.scale],
    }
}

fn norm_eps(a: &Architecture) -> impl Iterator<Item = f64> + '_ {
    let nodes = (0..a.layers).flat_map(|layer| a.graph(layer).nodes());
    nodes.filter_map(|node| match &node.op {
        Op::RmsNorm { eps, .. } | Op::LayerNorm { eps, .. } | Op::Normalize { eps, .. } => Some(*eps),
        _ => None,
    })
}

fn activations(a: &Architecture) -> impl Iterator<Item = Activation> + '_ {
    let nodes = (0..a.layers).flat_map(|layer| a.graph(layer).nodes());
    nodes.filter_map(|node| match node.op.computes() {
        Computes::Activation(activation) => Some(activation),
        _ => None,
    })
}

/// Whether all norms of the first block have the same input.
fn is_parallel(a: &Architecture) -> bool {
    let graph = a.graph(0);
    graph.norms().all(|(norm, ..)| graph.nodes()[norm].inputs == [graph.input()])
}

fn dense_blocks(a: &Architecture) -> usize {
    (0..a.layers).find(|layer| has_experts(a, *layer)).unwrap_or(a.layers)
}

fn has_experts(a: &Architecture, layer: usize) -> bool {
    a.graph(layer).nodes().iter().any(|node| node.op.routing().is_some())
}

pub(super) fn unfit(family: &GgufFamily, what: String) -> Error {
    Error::usage(
        format!("the GGUF architecture {} cannot represent this model: {what}", family.arch),
        "write a different format, such as compressed-tensors",
    )
}

fn facts<'a>(a: &'a Architecture, family: &GgufFamily) -> Result<Facts<'a>> {
    let fault = |what: &str| unfit(family, what.to_owned());
    let alike = |shape| AttentionShape { window: None, chunk: None, ..shape };
    let mut attentions = a.attentions().into_iter().map(alike);
    let attention = attentions.next().ok_or_else(|| fault("it has no attention"))?;
    let attention = match family.has_two_kinds {
        true => AttentionShape { window: None, ..gemma4::attention(a, family)? },
        false if attentions.any(|other| other != attention) => {
            return Err(fault("the attention of its blocks differs in more than the window"));
        }
        false => attention,
    };
    let mut facts = Facts {
        attention,
        ropes: Vec::new(),
        eps: 0.0,
        intermediate: None,
        expert_intermediate: None,
        shared_intermediate: None,
        residual: None,
        routing: None,
    };
    for layer in 0..a.layers {
        for op in a.graph(layer).nodes().iter().map(|node| &node.op) {
            match op.computes() {
                Computes::Norm { eps } => facts.eps = eps,
                // This is the factor of a router's input.
                Computes::Factor(_) if family.has_two_kinds || family.folds_factors => {}
                Computes::Factor(factor) => facts.residual = Some(factor),
                Computes::Rotation(rope) => {
                    if !facts.ropes.contains(&rope) {
                        facts.ropes.push(rope);
                    }
                }
                Computes::RoutingRule(routing) => facts.routing = Some(*routing),
                Computes::Linear { name, shape, .. } => match (family.module(name), family.expert(name)) {
                    (Some("ffn_down"), _) => facts.intermediate = Some(shape[1]),
                    (Some("ffn_down_shexp"), _) => facts.shared_intermediate = Some(shape[1]),
                    (_, Some((_, "ffn_down_exps"))) => facts.expert_intermediate = Some(shape[1]),
                    _ => {}
                },
                // `check_graph` rejects operations that llama.cpp's graph of the family does not have.
                Computes::Activation(_)
                | Computes::ClampedGated { .. }
                | Computes::ExpertRows(_)
                | Computes::ExpertSum
                | Computes::Structure
                | Computes::Other => {}
            }
        }
    }
    check_graph(a, family, &facts)?;
    // GGUF cannot describe which blocks have experts, except for leading blocks without them.
    let first = if family.dense_first { dense_blocks(a) } else { 0 };
    if facts.routing.is_some()
        && !family.has_single_operations
        && !family.has_chunks
        && !(first..a.layers).all(|layer| has_experts(a, layer))
    {
        return Err(fault("some blocks have experts and others do not"));
    }
    if let Some(RoutingRule { normalized, scale, correction, on_inputs, .. }) = facts.routing {
        if on_inputs != family.has_chunks {
            return Err(fault("the routing weights are not factors of the values that llama.cpp expects"));
        }
        if normalized != family.normalizes_experts && !family.states_routing() {
            return Err(fault(match normalized {
                true => "the routing weights of each token are divided by their sum",
                false => "the routing weights of each token do not add up to 1",
            }));
        }
        if scale != 1.0 && !family.states_routing() {
            return Err(unfit(
                family,
                format!("the routing weights of each token are multiplied by {scale}"),
            ));
        }
        let is_corrected = family
            .tensors
            .iter()
            .any(|(_, how)| *how == How::Named("exp_probs_b.bias") || *how == How::Named("exp_probs_b"));
        // DeepSeek-V2 shares its table with V3.
        if is_corrected && correction.is_none() && !family.softmax_scores {
            return Err(fault("the scores of its experts are not corrected"));
        }
    }
    Ok(facts)
}

/// Whether llama.cpp's graph for the family contains an operation that belongs to no module.
fn has_unnamed(family: &GgufFamily, op: &Op) -> bool {
    let is_latent = || family.tensors.iter().any(|(_, how)| matches!(how, How::Latent(_)));
    let has_state_space = matches!(family.mixer, Some(Mixer::StateSpace { .. }));
    match op {
        Op::JoinHeads { .. } => is_latent(),
        Op::Concatenate => family.has_two_kinds || family.gates_attention || has_state_space,
        Op::Normalize { .. } if family.has_chunks => true,
        Op::Normalize { .. } | Op::ScaleBy { .. } => family.has_two_kinds || has_state_space,
        Op::Multiply => family.has_two_kinds || family.mixer == Some(Mixer::ShortConvolution),
        Op::PositionScale(_) => family.scales_queries || family.has_chunks,
        Op::SelectKeys => family.has_indexer(),
        _ => false,
    }
}

/// Checks that llama.cpp's graph for the family gives the same results.
fn check_graph(a: &Architecture, family: &GgufFamily, facts: &Facts<'_>) -> Result<()> {
    for layer in 0..a.layers {
        for op in a.graph(layer).nodes().iter().map(|node| &node.op) {
            match op.computes() {
                Computes::Linear { name, bias, .. } => {
                    let (may, must) =
                        (family.has_bias(name), family.expected_biases && family.has_bias(name));
                    match bias {
                        true if !may => return Err(unfit(family, format!("`{name}` has a bias"))),
                        false if must => return Err(unfit(family, format!("`{name}` has no bias"))),
                        _ => {}
                    }
                }
                Computes::Factor(factor) => {
                    if !family.has_two_kinds && !family.folds_factors && facts.residual != Some(factor) {
                        return Err(unfit(
                            family,
                            "it multiplies residual updates by different factors".into(),
                        ));
                    }
                }
                Computes::Activation(Activation::Sigmoid) if family.gates_attention => {}
                Computes::Activation(Activation::Gelu) if family.approximates_gelu => {}
                Computes::Activation(Activation::Silu) if family.mixer.is_some() => {}
                Computes::Activation(other) => {
                    if other != family.activation {
                        return Err(unfit(
                            family,
                            format!("its blocks contain the unsupported activation function {other:?}"),
                        ));
                    }
                }
                Computes::ClampedGated { alpha, limit } => {
                    if [alpha, limit] != [1.702, 7.0] {
                        return Err(unfit(
                            family,
                            format!("its experts use a clamp limit of {limit} and an alpha of {alpha}"),
                        ));
                    }
                }
                // Modules without a name in the family's list are rejected elsewhere.
                Computes::Norm { .. }
                | Computes::Rotation(_)
                | Computes::RoutingRule(_)
                | Computes::ExpertRows(_)
                | Computes::ExpertSum
                | Computes::Structure => {}
                Computes::Other => {
                    if !has_unnamed(family, op) {
                        return Err(unfit(
                            family,
                            format!("its blocks contain the unsupported operation {op:?}"),
                        ));
                    }
                }
            }
        }
    }
    let shape = facts.attention;
    let width = match super::families::scales_by_width(family, a.layers as u64) {
        true => a.hidden / shape.heads().max(1),
        false => shape.head_dim,
    };
    // The factor of YaRN in the scores of latent attention is written separately.
    let is_scaled = family.multipliers == Multipliers::All
        || family.has_two_kinds
        || (LatentWidths::of(a.graph(0)).is_some()
            && facts.ropes.iter().all(|rope| matches!(rope.scaling, RopeScaling::Yarn(_))));
    let scale = 1.0 / (width as f32).sqrt();
    if !is_scaled && (shape.scale() - scale).abs() > 1e-6 * scale {
        return Err(unfit(
            family,
            format!("attention scores are multiplied by {} instead of {scale}", shape.scale()),
        ));
    }
    if let Some(blocks) = family.windows_of_blocks
        && (a.layers == blocks) != family.has_windows
    {
        let fault = match family.has_windows {
            true => format!("it has {} blocks; sliding windows are supported only with {blocks}", a.layers),
            false => format!("it has {blocks} blocks but no sliding windows"),
        };
        return Err(unfit(family, fault));
    }
    if family.heads_as_wide && shape.heads() * shape.head_dim != a.hidden {
        let (heads, width, hidden) = (shape.heads(), shape.head_dim, a.hidden);
        let reason = format!("{heads} heads of width {width} are not as wide as the hidden size, {hidden}");
        return Err(unfit(family, reason));
    }
    if family.has_windows && !family.has_two_kinds {
        let windows = (0..a.layers).map(|layer| a.graph(layer).attentions().find_map(|shape| shape.window));
        let differs = |(layer, window): (usize, Option<usize>)| {
            window.is_some() != (layer % family.window_period != family.full_layer)
        };
        if let Some((layer, _)) = windows.enumerate().find(|w| differs(*w)) {
            return Err(unfit(
                family,
                format!(
                    "the sliding window of block {layer} does not follow the pattern of the architecture"
                ),
            ));
        }
    }
    for layer in (0..a.layers).filter(|layer| a.graph(*layer).attentions().next().is_some()) {
        let rotated =
            a.graph(layer).nodes().iter().any(|node| matches!(node.op.computes(), Computes::Rotation(_)));
        let expected = family.unrotated.is_none_or(|every| !(layer + 1).is_multiple_of(every));
        if rotated != expected && !(family.may_lack_rope && facts.ropes.is_empty()) {
            let does = if rotated { "rotates" } else { "does not rotate" };
            return Err(unfit(family, format!("block {layer} {does} queries and keys")));
        }
    }
    if family.keys_as_wide && shape.kv_heads != shape.heads() {
        let (keys, queries) = (shape.kv_heads, shape.heads());
        return Err(unfit(
            family,
            format!("it has {keys} key heads and {queries} query heads, which must be equal in number"),
        ));
    }
    if family.head_is_separate && a.tied {
        return Err(unfit(family, "its output head is tied to the embedding".into()));
    }
    if family.head_is_embedding && !a.tied {
        return Err(unfit(family, "its output head is not tied to the embedding".into()));
    }
    Ok(())
}

type RopeTensors = Vec<(&'static str, Vec<f32>)>;

/// Writes the rotary embedding. Returns tensors of divisors, and a note for the user.
fn rope(
    a: &Architecture,
    family: &GgufFamily,
    facts: &Facts<'_>,
    put: &mut impl FnMut(&str, Value),
) -> Result<(RopeTensors, Option<String>)> {
    if family.has_two_kinds {
        return Ok((gemma4::rope(a, family, put)?, None));
    }
    let ropes = facts.ropes.as_slice();
    if family.may_lack_rope {
        put("rope.scaling.finetuned", Value::Bool(!ropes.is_empty()));
    }
    if ropes.is_empty() && (family.may_lack_rope || family.never_rotates()) {
        return Ok((Vec::new(), None));
    }
    let is_scaled = |rope: &Rope| rope.scaling != RopeScaling::None;
    let order = |x: &&&Rope, y: &&&Rope| x.theta.total_cmp(&y.theta).then(is_scaled(x).cmp(&is_scaled(y)));
    let Some(first) = ropes.iter().max_by(order) else {
        return Err(unfit(family, "it does not use RoPE".into()));
    };
    if first.rotary_dim != first.head_dim && !family.partial_rotary {
        return Err(unfit(family, "it applies RoPE to only part of each head".into()));
    }
    if LatentWidths::of(a.graph(0)).is_some() && first.layout == RopeLayout::Halves {
        return Err(unfit(
            family,
            "its RoPE pairs the two halves of a head instead of adjacent channels".into(),
        ));
    }
    put("rope.dimension_count", Value::U32(first.rotary_dim as u32));
    put("rope.freq_base", Value::F32(first.theta as f32));
    match ropes {
        [_] => {}
        [one, other] if family.unscaled_windows => {
            let local = if is_scaled(one) { other } else { one };
            if is_scaled(local) || local.theta != first.theta {
                let reason = "blocks with sliding windows have a different RoPE base, or RoPE scaling";
                return Err(unfit(family, reason.into()));
            }
        }
        // The second RoPE, that of blocks with windows, must be unscaled and have a smaller base.
        [one, other] if family.has_windows => {
            let local = if one.theta < other.theta { one } else { other };
            if local.scaling != RopeScaling::None || local.theta == first.theta {
                let reason = "blocks with sliding windows do not have unscaled RoPE with a smaller base";
                return Err(unfit(family, reason.into()));
            }
            put("rope.freq_base_swa", Value::F32(local.theta as f32));
        }
        _ => return Err(unfit(family, "the RoPE of its blocks differs".into())),
    }
    let mut scale = |kind: &str, factor: f64| {
        put("rope.scaling.type", Value::string(kind));
        put("rope.scaling.factor", Value::F32(factor as f32));
    };
    match &first.scaling {
        RopeScaling::None => Ok((Vec::new(), None)),
        RopeScaling::Linear { factor } => {
            scale("linear", *factor);
            Ok((Vec::new(), None))
        }
        RopeScaling::Llama3 { .. } => Ok((vec![(ROPE_FACTORS, first.divisors())], None)),
        RopeScaling::Dynamic { positions, .. }
            if *positions >= a.max_positions && a.selected_keys.is_none() =>
        {
            Ok((Vec::new(), None))
        }
        RopeScaling::LongRope(long) if family.has_long_rope => {
            put("rope.scaling.original_context_length", Value::U32(long.original_positions as u32));
            put("rope.scaling.attn_factor", Value::F32(long.attention_factor as f32));
            Ok((vec![(ROPE_SHORT, long.short.to_vec()), (ROPE_LONG, long.long.to_vec())], None))
        }
        // A GGUF file with `rope_freqs.weight` is read as this.
        RopeScaling::LongRope(long) if long.short == long.long && long.attention_factor == 1.0 => {
            Ok((vec![(ROPE_FACTORS, long.short.to_vec())], None))
        }
        RopeScaling::Yarn(yarn) => {
            let note = specials::yarn(a, family, (first, yarn), facts.attention, put)?;
            Ok((Vec::new(), note))
        }
        RopeScaling::Dynamic { .. } | RopeScaling::LongRope(_) | RopeScaling::Proportional { .. } => {
            Err(unfit(family, "its RoPE scaling is not supported".into()))
        }
    }
}

pub(super) fn strings(texts: &[&str]) -> Value {
    Value::Array(Array::String(texts.iter().map(|t| (*t).to_owned()).collect()))
}
