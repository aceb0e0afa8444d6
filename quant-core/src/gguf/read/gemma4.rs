//! Fields of a `config.json` of Gemma 4.

use serde_json::{Map, Value as Json, json};

use super::About;
use super::config::{divisors, shortest};
use crate::Result;
use crate::gguf::GgufFile;
use crate::gguf::families::ROPE_FACTORS;

/// Pairs with divisors from this value on are not rotated.
const UNROTATED_DIVISOR: f32 = 1e29;

pub(super) fn config(about: &About<'_>, set: &mut impl FnMut(&str, Json)) -> Result<()> {
    let blocks = about.blocks()?;
    let key = "attention.sliding_window_pattern";
    let windows = about.get(key).and_then(|value| value.as_bools());
    let windows = windows.filter(|windows| windows.len() as u64 == blocks);
    let windows = windows
        .ok_or_else(|| about.broken(key, &format!("must be a list of {blocks} booleans, one per block")))?;
    let [full, windowed] = [about.head_width()?, about.require("attention.key_length_swa")?];
    let keys = about.integers("attention.head_count_kv", blocks)?;
    let of = |windowed: bool| windows.iter().position(|w| *w == windowed);
    let Some((at_full, at_windowed)) = of(false).zip(of(true)) else {
        return Err(about.unread(key, "must contain both values"));
    };
    set("head_dim", json!(windowed));
    set("global_head_dim", json!(full));
    set("num_key_value_heads", json!(keys[at_windowed]));
    let mut own = Map::new();
    for (layer, _) in windows.iter().enumerate().filter(|(_, windowed)| !**windowed) {
        own.insert(layer.to_string(), json!({ "head_dim": full, "num_key_value_heads": keys[layer] }));
    }
    set("per_layer_config", Json::Object(own));
    let values = about.file.tensor(&format!("blk.{at_full}.attn_v.weight")).is_some();
    set("attention_k_eq_v", json!(!values));
    let kinds = windows.iter().map(|w| if *w { "sliding_attention" } else { "full_attention" });
    set("layer_types", json!(kinds.collect::<Vec<_>>()));
    set("num_kv_shared_layers", json!(about.integer("attention.shared_kv_layers")?.unwrap_or(0)));
    let inputs = about.integer("embedding_length_per_layer_input")?.unwrap_or(0);
    set("hidden_size_per_layer_input", json!(inputs));
    if let Some(table) = about.file.tensor("per_layer_token_embd.weight").filter(|_| inputs > 0) {
        set("vocab_size_per_layer_input", json!(table.shape[0]));
    }
    let widths = about.integers("feed_forward_length", blocks)?;
    let (first, last) = (widths[0], widths[widths.len() - 1]);
    set("intermediate_size", json!(first));
    set("use_double_wide_mlp", json!(last != first));
    let experts = about.integer("expert_count")?.unwrap_or(0);
    set("enable_moe_block", json!(experts > 0));
    if experts > 0 {
        set("top_k_experts", json!(about.require("expert_used_count")?));
    }
    let theta =
        |key: &str, default: f64| Ok::<_, crate::Error>(shortest(about.float(key)?.unwrap_or(default)));
    let (pairs, factor) = match about.file.tensor(ROPE_FACTORS) {
        None => (full / 2, 1.0),
        Some(tensor) => {
            let divisors = divisors(about, tensor, full)?;
            let pairs = divisors.iter().take_while(|divisor| **divisor < UNROTATED_DIVISOR).count();
            let factor = divisors.first().copied().filter(|_| pairs > 0).unwrap_or(1.0);
            if divisors[..pairs].iter().any(|divisor| *divisor != factor)
                || divisors[pairs..].iter().any(|divisor| *divisor < UNROTATED_DIVISOR)
            {
                let reason =
                    format!("`{ROPE_FACTORS}` has different frequency divisors, which is not supported");
                return Err(GgufFile::unread(about.file.path(), reason));
            }
            (pairs as u64, factor)
        }
    };
    let rotary = about.integer("rope.dimension_count_swa")?.unwrap_or(windowed);
    if rotary != windowed {
        let reason = format!("is {rotary}, which is not supported for heads of width {windowed}");
        return Err(about.unread("rope.dimension_count_swa", &reason));
    }
    set(
        "rope_parameters",
        json!({
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": 2.0 * pairs as f64 / full as f64,
                "factor": factor, "rope_theta": theta("rope.freq_base", 1e6)?,
            },
            "sliding_attention": { "rope_type": "default", "rope_theta": theta("rope.freq_base_swa", 1e4)? },
        }),
    );
    Ok(())
}
