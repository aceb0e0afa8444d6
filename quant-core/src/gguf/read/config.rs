//! Converts metadata to the fields of a `config.json`.

use serde_json::{Map, Value as Json, json};

use super::{About, gemma4, mixers, specials};
use crate::Result;
use crate::gguf::families::{self, EMBEDDING, HEAD, Multipliers, ROPE_FACTORS, ROPE_LONG, ROPE_SHORT};
use crate::gguf::file::{GgufFile, GgufTensor};
use crate::gguf::metadata::eps_key;

const MAX_HEAD_DIM: u64 = 8192;

pub(super) fn config(about: &About<'_>) -> Result<Map<String, Json>> {
    let (file, family) = (about.file, about.family);
    let has = |tensor: &str| file.tensor(tensor).is_some();
    let hidden = about.require("embedding_length")?;
    let heads = about.heads()?;
    let head_dim = about.head_width()?;
    let embedding = file.tensor(EMBEDDING);
    let vocab = embedding.map(|t| t.shape[0]).ok_or_else(|| missing(file, EMBEDDING))?;
    let mut config = Map::new();
    let mut set = |key: &str, value: Json| {
        config.insert(key.to_owned(), value);
    };
    set("architectures", json!([family.class]));
    set("model_type", json!(family.family));
    set("hidden_size", json!(hidden));
    set("num_hidden_layers", json!(about.blocks()?));
    set("num_attention_heads", json!(heads));
    if family.mixer.is_some() {
        set("num_key_value_heads", json!(mixers::key_heads(about)?));
    } else if !family.has_two_kinds {
        set("num_key_value_heads", json!(about.integer("attention.head_count_kv")?.unwrap_or(heads)));
    }
    set("head_dim", json!(head_dim));
    set("vocab_size", json!(vocab));
    for field in ["max_position_embeddings", "seq_length"] {
        set(field, json!(about.require("context_length")?));
    }
    let key = eps_key(family);
    let eps = about.float(key)?.ok_or_else(|| about.broken(key, "is missing"))?;
    for field in ["rms_norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"] {
        set(field, json!(shortest(eps)));
    }
    set("tie_word_embeddings", json!(!has(&format!("{HEAD}.weight"))));
    let in_block = |tensor: &str| about.has_in_some_block(tensor);
    set("attention_bias", json!(in_block("attn_q.bias") || in_block("attn_qkv.bias")));
    set("attention_out_bias", json!(in_block("attn_output.bias")));
    set("qkv_bias", json!(in_block("attn_q.bias")));
    set("mlp_bias", json!(in_block("ffn_up.bias")));
    set("use_bias", json!(in_block("ffn_up.bias")));
    set("bias", json!(in_block("attn_output.bias")));
    match about.integer("expert_count")?.filter(|n| *n > 0) {
        Some(experts) => {
            set("num_local_experts", json!(experts));
            set("num_experts", json!(experts));
            set("num_experts_per_tok", json!(about.require("expert_used_count")?));
            set("norm_topk_prob", json!(family.normalizes_experts));
            if let Some(n) = about.integer("expert_shared_feed_forward_length")? {
                set("shared_expert_intermediate_size", json!(n));
            }
            let own = about.integer("expert_feed_forward_length")?;
            let of_expert = match own {
                Some(own) => own,
                None => mixers::width(about)?,
            };
            set("moe_intermediate_size", json!(of_expert));
            let dense = if family.dense_first { about.integer("feed_forward_length")? } else { None };
            set("intermediate_size", json!(dense.unwrap_or(of_expert)));
        }
        None if family.has_two_kinds => {}
        None => {
            set("num_local_experts", json!(0));
            set("intermediate_size", json!(mixers::width(about)?));
        }
    }
    if let Some(every) = family.unrotated {
        set("no_rope_layer_interval", json!(every));
    }
    let logits = match family.multipliers {
        Multipliers::None => None,
        Multipliers::Logits => Some("logit_scale"),
        Multipliers::All => Some("logits_scaling"),
    };
    let factors = [
        ("attention.scale", Some("attention_multiplier")),
        ("embedding_scale", Some("embedding_multiplier")),
        ("residual_scale", Some("residual_multiplier")),
        ("logit_scale", logits),
    ];
    for (key, field) in factors {
        if let (Some(field), Some(factor)) = (field.filter(|_| logits.is_some()), about.float(key)?) {
            set(field, json!(shortest(factor)));
        }
    }
    if family.has_two_kinds {
        gemma4::config(about, &mut set)?;
    }
    let rotary_heads = specials::latent(about, &mut set)?.unwrap_or(head_dim);
    specials::routing(about, &mut set)?;
    specials::delta_nets(about, &mut set)?;
    specials::indexers(about, &mut set)?;
    mixers::config(about, &mut set)?;
    specials::single_families(about, &mut set)?;
    if !family.has_two_kinds {
        rope(about, rotary_heads, &mut set)?;
    }
    // The key is set explicitly, because graphs without windows must not get the family's default.
    match about.integer("attention.sliding_window")?.filter(|_| family.has_windows) {
        Some(window) => set("sliding_window", json!(window)),
        None => set("sliding_window", Json::Null),
    }
    set("use_sliding_window", json!(false));
    for (key, field) in [
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ] {
        set(field, about.float(key)?.map_or(Json::Null, |cap| json!(shortest(cap))));
    }
    let large = families::scales_by_width(family, about.blocks()?);
    set("query_pre_attn_scalar", json!(if large { hidden / heads } else { head_dim }));
    Ok(config)
}

fn missing(file: &GgufFile, tensor: &str) -> crate::Error {
    GgufFile::broken(file.path(), format!("tensor `{tensor}` is missing"))
}

/// The shortest decimal that rounds to the same `f32`: 1e-5, not 9.999999747378752e-6.
pub(super) fn shortest(value: f64) -> f64 {
    format!("{:e}", value as f32).parse().unwrap_or(value)
}

/// Reads a tensor of frequency divisors, one per pair of rotated channels.
pub(super) fn divisors(about: &About<'_>, tensor: &GgufTensor, rotary_dim: u64) -> Result<Vec<f32>> {
    let count: usize = tensor.shape.iter().product();
    if rotary_dim > MAX_HEAD_DIM || count as u64 != rotary_dim / 2 {
        let reason = format!(
            "tensor `{}` has {count} values, but needs one per pair of the {rotary_dim} rotated channels of \
            a head",
            tensor.name
        );
        return Err(GgufFile::broken(about.file.path(), reason));
    }
    let mut bytes = vec![0; tensor.bytes as usize];
    about.file.read(tensor, 0, &mut bytes)?;
    let mut divisors = vec![0.0; count];
    tensor.kind.decode(&bytes, &mut divisors);
    Ok(divisors)
}

fn rope(about: &About<'_>, head_dim: u64, set: &mut impl FnMut(&str, Json)) -> Result<()> {
    let rotary_dim = about.integer("rope.dimension_count")?.unwrap_or(head_dim);
    if rotary_dim != head_dim {
        if !about.family.partial_rotary || rotary_dim > head_dim {
            let reason = format!("is {rotary_dim}, which is not supported for heads of width {head_dim}");
            return Err(about.unread("rope.dimension_count", &reason));
        }
        for field in ["partial_rotary_factor", "rotary_pct"] {
            set(field, json!(rotary_dim as f64 / head_dim as f64));
        }
    } else if about.family.partial_rotary {
        for field in ["partial_rotary_factor", "rotary_pct"] {
            set(field, json!(1.0));
        }
    }
    for field in ["rope_theta", "rotary_emb_base"] {
        set(field, json!(about.float("rope.freq_base")?.unwrap_or(10_000.0)));
    }
    if let Some(theta) = about.float("rope.freq_base_swa")? {
        set("rope_local_base_freq", json!(theta));
    }
    if about.family.unscaled_windows {
        set("rope_local_base_freq", json!(about.float("rope.freq_base")?.unwrap_or(10_000.0)));
    }
    // The older key is used if the newer one is missing. 0 means no factor.
    let factor = match about.float("rope.scaling.factor")? {
        None => about.float("rope.scale_linear")?,
        newer => newer,
    };
    let factor = factor.filter(|factor| *factor != 0.0);
    let key = format!("{}.rope.scaling.type", about.family.arch);
    // If the scaling type is missing, llama.cpp divides positions by the factor.
    let kind = match about.text(&key)? {
        Some(kind) => kind,
        None if factor.is_some_and(|factor| factor != 1.0) => "linear",
        None => "none",
    };
    let scaling = match (kind, about.file.tensor(ROPE_FACTORS)) {
        ("yarn", None) => specials::yarn(about, factor)?,
        ("none", None) if about.family.scales_rope_unasked => json!({ "rope_type": "default" }),
        ("none" | "longrope", None) => match (about.file.tensor(ROPE_SHORT), about.file.tensor(ROPE_LONG)) {
            (Some(short), Some(long)) => {
                let positions = about.require("rope.scaling.original_context_length")?;
                set("original_max_position_embeddings", json!(positions));
                json!({
                    "rope_type": "longrope", "short_factor": divisors(about, short, rotary_dim)?,
                    "long_factor": divisors(about, long, rotary_dim)?,
                    "attention_factor": about.float("rope.scaling.attn_factor")?.unwrap_or(1.0),
                })
            }
            (None, None) if kind == "none" => Json::Null,
            (None, Some(_)) => return Err(missing(about.file, ROPE_SHORT)),
            _ => return Err(missing(about.file, ROPE_LONG)),
        },
        ("none", Some(tensor)) => {
            let divisors = divisors(about, tensor, rotary_dim)?;
            let positions = about.require("context_length")?;
            // The file has only the divisors, not the parameters that they were computed from. LongRoPE takes any
            // divisors, so it describes the same rotation.
            json!({
                "rope_type": "longrope", "short_factor": divisors, "long_factor": divisors,
                "attention_factor": 1.0, "factor": 1.0, "original_max_position_embeddings": positions,
            })
        }
        ("linear", None) if about.file.tensor(ROPE_SHORT).or(about.file.tensor(ROPE_LONG)).is_none() => {
            let factor = factor.ok_or_else(|| about.broken("rope.scaling.factor", "is missing"))?;
            if factor < 0.0 {
                return Err(about.broken("rope.scaling.factor", "is negative"));
            }
            json!({ "rope_type": "linear", "factor": factor })
        }
        ("linear", _) => {
            return Err(about.unread(
                "rope.scaling.type",
                "is `linear` together with frequency \
            divisors, which is not supported",
            ));
        }
        _ => {
            let reason = format!("is `{}`, which is not supported", crate::checkpoint::printable(kind));
            return Err(about.unread("rope.scaling.type", &reason));
        }
    };
    match about.family.scales_queries {
        true => set("rope_parameters", specials::position_scale(about, scaling)?),
        false => set("rope_scaling", scaling),
    }
    Ok(())
}
