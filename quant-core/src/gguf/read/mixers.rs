//! Fields of a `config.json` for families with state-space operations or short convolutions.

use serde_json::{Value as Json, json};

use super::About;
use crate::Result;
use crate::gguf::families::Mixer;

const KEY_HEADS: &str = "attention.head_count_kv";
const WIDTHS: &str = "feed_forward_length";

/// The number of key heads in blocks with attention.
pub(super) fn key_heads(about: &About<'_>) -> Result<u64> {
    same(about, KEY_HEADS)
}

/// The width of MLPs, or of experts if all blocks with an MLP have experts.
pub(super) fn width(about: &About<'_>) -> Result<u64> {
    match about.family.has_single_operations {
        true => same(about, WIDTHS),
        false => about.require(WIDTHS),
    }
}

/// The value of a key that all blocks share, except for those where it is 0.
fn same(about: &About<'_>, key: &str) -> Result<u64> {
    let list = about.integers(key, about.blocks()?)?;
    let mut used = list.iter().copied().filter(|n| *n > 0);
    let first = used.next().unwrap_or(0);
    match used.all(|n| n == first) {
        true => Ok(first),
        false => Err(about.unread(key, "has different values for different blocks, which is not supported")),
    }
}

pub(super) fn config(about: &About<'_>, set: &mut impl FnMut(&str, Json)) -> Result<()> {
    let Some(mixer) = about.family.mixer else { return Ok(()) };
    let blocks = about.blocks()?;
    let attends: Vec<bool> = about.integers(KEY_HEADS, blocks)?.into_iter().map(|heads| heads > 0).collect();
    let of_blocks = |with: &str, without: &str| -> Json {
        attends.iter().map(|attends| if *attends { with } else { without }).collect()
    };
    match mixer {
        Mixer::ShortConvolution => {
            set("layer_types", of_blocks("full_attention", "conv"));
            set("conv_L_cache", json!(about.require("shortconv.l_cache")?));
            set("conv_bias", json!(false));
            set("block_auto_adjust_ff_dim", json!(false));
            set("num_dense_layers", json!(about.integer("leading_dense_block_count")?.unwrap_or(0)));
            set("use_expert_bias", json!(true));
            Ok(())
        }
        Mixer::StateSpace { expand, .. } => {
            let (inner, heads) = (about.require("ssm.inner_size")?, about.require("ssm.time_step_rank")?);
            let head_dim = inner.checked_div(heads).filter(|width| width.checked_mul(heads) == Some(inner));
            let Some(head_dim) = head_dim.filter(|width| *width > 0) else {
                let reason = format!("is {inner}, which is not a multiple of the number of heads, {heads}");
                return Err(about.broken("ssm.inner_size", &reason));
            };
            let hidden = about.require("embedding_length")?;
            if let Some(ratio) = expand.filter(|ratio| hidden.checked_mul(*ratio as u64) != Some(inner)) {
                let reason = format!("is {inner}, but must be {ratio} times `embedding_length`");
                return Err(about.broken("ssm.inner_size", &reason));
            }
            for field in ["mamba_n_heads", "mamba_num_heads"] {
                set(field, json!(heads));
            }
            for field in ["mamba_d_head", "mamba_head_dim"] {
                set(field, json!(head_dim));
            }
            let groups = about.require("ssm.group_count")?;
            for field in ["mamba_n_groups", "n_groups"] {
                set(field, json!(groups));
            }
            let state = about.require("ssm.state_size")?;
            for field in ["mamba_d_state", "ssm_state_size"] {
                set(field, json!(state));
            }
            let kernel = about.require("ssm.conv_kernel")?;
            for field in ["mamba_d_conv", "conv_kernel"] {
                set(field, json!(kernel));
            }
            for field in ["mamba_conv_bias", "use_conv_bias"] {
                set(field, json!(true));
            }
            for field in ["mamba_proj_bias", "use_bias", "mamba_norm_before_gate", "projectors_bias"] {
                set(field, json!(false));
            }
            set("mamba_d_ssm", json!(inner));
            set("mamba_rms_norm", json!(about.has_in_some_block("ssm_norm.weight")));
            if about.family.has_single_operations {
                set("layers_block_type", operations(about, blocks, &attends)?);
                set("moe_latent_size", json!(about.integer("moe_latent_size")?.filter(|width| *width > 0)));
                let shared = about.integer("expert_shared_feed_forward_length")?;
                set("moe_shared_expert_intermediate_size", json!(shared));
                return Ok(());
            }
            if !about.family.folds_factors {
                set("layer_types", of_blocks("attention", "mamba"));
                set("mamba_expand", json!(expand));
                let rotates =
                    about.flag(&format!("{}.rope.scaling.finetuned", about.family.arch))?.unwrap_or(true);
                set("position_embedding_type", json!(if rotates { "rope" } else { "nope" }));
                let shared = match about.integer("expert_count")?.unwrap_or(0) {
                    0 => Some(about.require(WIDTHS)?),
                    _ => about.integer("expert_shared_feed_forward_length")?,
                };
                set("shared_intermediate_size", json!(shared));
                return Ok(());
            }
            // The weights in the file include all factors.
            for field in [
                "embedding_multiplier",
                "lm_head_multiplier",
                "attention_in_multiplier",
                "attention_out_multiplier",
                "key_multiplier",
                "ssm_in_multiplier",
                "ssm_out_multiplier",
            ] {
                set(field, json!(1.0));
            }
            set("mlp_multipliers", json!(vec![1.0; 2]));
            set("ssm_multipliers", json!(vec![1.0; 5]));
            Ok(())
        }
    }
}

/// The kinds of blocks if each is a single operation.
fn operations(about: &About<'_>, blocks: u64, attends: &[bool]) -> Result<Json> {
    let mlp = if about.family.experts.is_some() { "moe" } else { "mlp" };
    let kinds =
        about.integers(WIDTHS, blocks)?.into_iter().zip(attends).map(|(width, attends)| match width {
            0 if *attends => "attention",
            0 => "mamba",
            _ => mlp,
        });
    Ok(kinds.collect())
}
