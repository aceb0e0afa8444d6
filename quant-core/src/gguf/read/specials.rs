//! Fields of a `config.json` for parts that only some families have.

use serde_json::{Value as Json, json};

use super::About;
use super::config::shortest;
use crate::Result;
use crate::gguf::families::{How, RoutingKeys};
use crate::gguf::llama4::EXPERTS_WITHOUT_NORMS;
use crate::gguf::specials::ROTATIONS;

/// Sets the fields of latent attention, if the family has it, and returns the number of rotated features per head.
pub(super) fn latent(about: &About<'_>, set: &mut impl FnMut(&str, Json)) -> Result<Option<u64>> {
    if !about.family.tensors.iter().any(|(_, how)| matches!(how, How::Latent(_))) {
        return Ok(None);
    }
    let rotary = about.require("rope.dimension_count")?;
    let key = "attention.key_length_mla";
    let Some(width) = about.integer(key)? else {
        return Err(about.unread(key, "is missing; files that predate this key are not supported"));
    };
    let Some(plain) = width.checked_sub(rotary).filter(|plain| *plain > 0) else {
        return Err(
            about.broken(key, &format!("is {width}, which must exceed the {rotary} rotated features"))
        );
    };
    set("num_key_value_heads", json!(about.heads()?));
    set("q_lora_rank", json!(about.integer("attention.q_lora_rank")?.filter(|rank| *rank > 0)));
    set("kv_lora_rank", json!(about.require("attention.kv_lora_rank")?));
    set("qk_nope_head_dim", json!(plain));
    set("qk_rope_head_dim", json!(rotary));
    set("v_head_dim", json!(about.require("attention.value_length_mla")?));
    set("rope_interleave", json!(true));
    Ok(Some(rotary))
}

pub(super) fn routing(about: &About<'_>, set: &mut impl FnMut(&str, Json)) -> Result<()> {
    let family = about.family;
    match family.routing {
        RoutingKeys::Full | RoutingKeys::OneShared => {}
        RoutingKeys::Implied => return Ok(()),
        RoutingKeys::Sigmoid => {
            if let Some(other) = about.integer("expert_gating_func")?.filter(|function| *function != 2) {
                return Err(
                    about.unread("expert_gating_func", &format!("is {other}, which is not supported"))
                );
            }
            set("rotary_dim", json!(about.integer("rope.dimension_count")?));
            return Ok(());
        }
    }
    let sigmoid = match about.integer("expert_gating_func")? {
        None => !family.softmax_scores,
        Some(1) => false,
        Some(2) => true,
        Some(other) => {
            return Err(about.unread("expert_gating_func", &format!("is {other}, which is not supported")));
        }
    };
    if sigmoid == family.softmax_scores {
        return Err(about.unread(
            "expert_gating_func",
            "differs from the function of this architecture, which is not supported",
        ));
    }
    let flag = |key: &str| about.flag(&format!("{}.{key}", family.arch));
    set("scoring_func", json!(if sigmoid { "sigmoid" } else { "softmax" }));
    let shared = about.integer("expert_shared_count")?.unwrap_or(0);
    for field in ["n_shared_experts", "num_shared_experts"] {
        set(field, json!(shared));
    }
    let dense = about.integer("leading_dense_block_count")?.unwrap_or(0);
    set("first_k_dense_replace", json!(dense));
    if family.has_expert_step {
        let key = "interleave_moe_layer_step";
        if let Some(other) = about.integer(key)?.filter(|step| *step != 1) {
            return Err(about.unread(key, &format!("is {other}, which is not supported")));
        }
        set("moe_num_shared_experts", json!(shared));
        set("moe_layer_start_index", json!(dense));
    }
    // 0 means no factor.
    let scale = about.float("expert_weights_scale")?.filter(|scale| *scale != 0.0).unwrap_or(1.0);
    for field in ["routed_scaling_factor", "router_scaling_factor"] {
        set(field, json!(shortest(scale)));
    }
    set("norm_topk_prob", json!(flag("expert_weights_norm")?.unwrap_or(false)));
    let groups = |key: &str| Ok::<_, crate::Error>(about.integer(key)?.filter(|n| *n > 0).unwrap_or(1));
    let (count, chosen) = (groups("expert_group_count")?, groups("expert_group_used_count")?);
    if !sigmoid && count > 1 && chosen < count {
        return Err(
            about.unread("expert_group_count", "groups experts, which is not supported with softmax routing")
        );
    }
    set("topk_method", json!(if sigmoid { "noaux_tc" } else { "greedy" }));
    set("n_group", json!(count));
    set("topk_group", json!(chosen));
    set("use_qk_norm", json!(about.file.tensor("blk.0.attn_q_norm.weight").is_some()));
    Ok(())
}

pub(super) fn delta_nets(about: &About<'_>, set: &mut impl FnMut(&str, Json)) -> Result<()> {
    if !about.family.gates_attention {
        return Ok(());
    }
    let (heads, width) = (about.require("ssm.time_step_rank")?, about.require("ssm.state_size")?);
    let inner = about.require("ssm.inner_size")?;
    if heads.checked_mul(width) != Some(inner) {
        return Err(about.broken(
            "ssm.inner_size",
            &format!("is {inner}, but must be the total width of {heads} heads of width {width}"),
        ));
    }
    set("linear_num_value_heads", json!(heads));
    set("linear_num_key_heads", json!(about.require("ssm.group_count")?));
    set("linear_key_head_dim", json!(width));
    set("linear_value_head_dim", json!(width));
    set("linear_conv_kernel_dim", json!(about.require("ssm.conv_kernel")?));
    let Some(flags) = flags(about, "attention.recurrent_layers")? else {
        set("full_attention_interval", json!(about.integer("full_attention_interval")?.unwrap_or(4)));
        return Ok(());
    };
    let kinds = flags.iter().map(|recurrent| match recurrent {
        true => "linear_attention",
        false => "full_attention",
    });
    set("layer_types", json!(kinds.collect::<Vec<_>>()));
    Ok(())
}

/// One boolean per block; `None` if the key is missing.
fn flags(about: &About<'_>, key: &str) -> Result<Option<Vec<bool>>> {
    let Some(value) = about.get(key) else { return Ok(None) };
    let blocks = about.blocks()?;
    // The list may also cover blocks for multi-token prediction, which come last.
    let flags = value.as_bools().filter(|flags| flags.len() as u64 >= blocks);
    match flags {
        Some(flags) => Ok(Some(flags[..blocks as usize].to_vec())),
        None => {
            let reason = format!("must be a list of at least {blocks} booleans, one per block");
            Err(about.broken(key, &reason))
        }
    }
}

/// Sets the fields of indexers, if the family has them.
pub(super) fn indexers(about: &About<'_>, set: &mut impl FnMut(&str, Json)) -> Result<()> {
    if !about.family.has_indexer() {
        return Ok(());
    }
    set("index_n_heads", json!(about.require("attention.indexer.head_count")?));
    set("index_head_dim", json!(about.require("attention.indexer.key_length")?));
    set("index_topk", json!(about.require("attention.indexer.top_k")?));
    if about.family.shares_indexers {
        // Without the key, every block has an indexer.
        let own = flags(about, "attention.indexer.types")?;
        set(
            "indexer_types",
            own.map_or(Json::Null, |own| {
                json!(own.iter().map(|own| if *own { "full" } else { "shared" }).collect::<Vec<_>>())
            }),
        );
    }
    Ok(())
}

pub(super) fn yarn(about: &About<'_>, factor: Option<f64>) -> Result<Json> {
    let float = |key: &str, default: f64| Ok::<_, crate::Error>(about.float(key)?.unwrap_or(default));
    let factor = factor.ok_or_else(|| about.broken("rope.scaling.factor", "is missing"))?;
    if factor <= 0.0 {
        return Err(about.broken("rope.scaling.factor", &format!("is {factor}; it must be greater than 0")));
    }
    let key = "rope.scaling.yarn_ext_factor";
    if let Some(other) = about.float(key)?.filter(|mix| *mix >= 0.0 && *mix != 1.0) {
        return Err(about.unread(key, &format!("is {other}, which is not supported")));
    }
    let positions = match about.integer("rope.scaling.original_context_length")? {
        Some(positions) => positions,
        None => about.require("context_length")?,
    };
    for (key, due) in
        ["rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"].into_iter().zip(ROTATIONS)
    {
        if let Some(other) = about.float(key)?.filter(|beta| *beta != due) {
            return Err(about.unread(key, &format!("is {other}, but llama.cpp always uses {due}")));
        }
    }
    let mut yarn = json!({
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": positions,
        "beta_fast": ROTATIONS[0],
        "beta_slow": ROTATIONS[1],
        "truncate": true,
    });
    let is_latent = about.family.tensors.iter().any(|(_, how)| matches!(how, How::Latent(_)));
    let recommended = 1.0 + 0.1 * factor.max(1.0).ln();
    let key = "rope.scaling.yarn_log_multiplier";
    match about.float(key)?.filter(|weight| *weight != 0.0) {
        Some(weight) if is_latent => {
            yarn["attention_factor"] = json!(1.0);
            yarn["mscale_all_dim"] = json!(shortest(10.0 * weight));
        }
        Some(weight) if about.family.scales_queries => {
            let effect = 1.0 + 0.1 * weight * factor.max(1.0).ln();
            yarn["attention_factor"] = json!(recommended / effect * float("rope.scaling.attn_factor", 1.0)?);
        }
        Some(weight) => return Err(about.unread(key, &format!("is {weight}, which is not supported"))),
        None if is_latent => {
            return Err(about.unread(key, "is missing, but required for YaRN"));
        }
        None => {
            yarn["attention_factor"] = json!(recommended * float("rope.scaling.attn_factor", 1.0)?);
        }
    }
    Ok(yarn)
}

/// Adds the base, and the scale of queries, which grows with the position, to the parameters of RoPE.
pub(super) fn position_scale(about: &About<'_>, rope: Json) -> Result<Json> {
    let mut rope = if rope.is_null() { json!({ "rope_type": "default" }) } else { rope };
    rope["rope_theta"] = json!(about.float("rope.freq_base")?.unwrap_or(10_000.0));
    let beta = about.float("attention.temperature_scale")?.unwrap_or(0.0);
    rope["llama_4_scaling_beta"] = json!(shortest(beta));
    let key = "rope.scaling.original_context_length";
    rope["original_max_position_embeddings"] = match about.integer(key)? {
        Some(positions) => json!(positions),
        None => json!(about.require("context_length")?),
    };
    Ok(rope)
}

pub(super) fn single_families(about: &About<'_>, set: &mut impl FnMut(&str, Json)) -> Result<()> {
    let family = about.family;
    if family.states_parallel {
        let key = format!("{}.use_parallel_residual", family.arch);
        set("use_parallel_residual", json!(about.flag(&key)?.unwrap_or(true)));
    }
    if family.never_rotates() && family.mixer.is_none() {
        set("n_inner", json!(about.require("feed_forward_length")?));
    }
    if family.approximates_gelu {
        set("hidden_act", json!("gelu"));
    }
    if family.has_chunks {
        let key = "attention.sliding_window";
        if about.integer(key)? == Some(0) {
            return Err(about.unread(key, "is 0; models without chunks are not supported"));
        }
        set("interleave_moe_layer_step", json!(about.require("interleave_moe_layer_step")?));
        set("intermediate_size_mlp", json!(about.require("feed_forward_length")?));
        let normalizes = about.integer("expert_count")? != Some(EXPERTS_WITHOUT_NORMS as u64);
        set("use_qk_norm", json!(normalizes));
    }
    Ok(())
}
