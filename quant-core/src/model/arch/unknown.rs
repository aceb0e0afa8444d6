//! What is said of a family that is not supported: the nearest one that is, and where the two differ.
//!
//! Differences are read from the configuration ([`MARKS`], and what the nearest family itself refuses), and known of
//! published families where no field shows them ([`FACTS`]).

use serde_json::Value;

use super::{FAMILIES, Family, known, multimodal};
use crate::Error;
use crate::checkpoint::ConfigFields;

/// A field that makes another model than the supported families are.
struct Mark {
    key: &'static str,
    /// Whether the value asks for it. `null` and absent fields never do.
    asks: fn(&Value) -> bool,
    /// What it means, ending the sentence that the field begins.
    means: &'static str,
    /// Families that do the same.
    honoured: &'static [&'static str],
}

const fn mark(key: &'static str, asks: fn(&Value) -> bool, means: &'static str) -> Mark {
    Mark { key, asks, means, honoured: &[] }
}

const fn of_experts(key: &'static str) -> Mark {
    let means = "layers are mixtures of experts";
    Mark { key, asks: |v| v.as_u64().is_some_and(|n| n > 1), means, honoured: EXPERTS }
}

/// Families with experts.
const EXPERTS: &[&str] = &[
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "olmoe",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "minimax_m2",
    "ernie4_5_moe",
    "granitemoe",
    "hunyuan_v1_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
    "lfm2_moe",
];
/// Those whose routers take a sigmoid, with a correction of each expert's score.
const BY_SIGMOID: &[&str] = &["glm4_moe", "glm4_moe_lite", "deepseek_v3"];
/// Families with a shared expert as wide as some of the others.
const SHARED: &[&str] = &["glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3"];
/// Families with latent attention.
const LATENT: &[&str] = &["glm4_moe_lite", "deepseek_v2", "deepseek_v3"];

fn any(_: &Value) -> bool {
    true
}

fn positive(value: &Value) -> bool {
    value.as_f64().is_some_and(|n| n > 0.0)
}

fn not_one(value: &Value) -> bool {
    value.as_f64().is_some_and(|n| n != 1.0)
}

fn is_true(value: &Value) -> bool {
    value.as_bool() == Some(true)
}

static MARKS: &[Mark] = &[
    of_experts("num_experts"),
    of_experts("num_local_experts"),
    of_experts("n_routed_experts"),
    Mark {
        key: "n_shared_experts",
        asks: positive,
        means: "shared experts see every token",
        honoured: SHARED,
    },
    Mark {
        key: "shared_expert_intermediate_size",
        asks: positive,
        means: "a shared expert sees every token",
        honoured: &["qwen2_moe", "qwen3_5_moe_text", "qwen3_next"],
    },
    Mark {
        key: "topk_method",
        asks: |v| v.as_str() == Some("noaux_tc"),
        means: "experts are chosen with a correction bias",
        honoured: BY_SIGMOID,
    },
    Mark {
        key: "kv_lora_rank",
        asks: positive,
        means: "keys and values are projected from a latent vector (MLA)",
        honoured: LATENT,
    },
    mark("index_topk", positive, "queries see the keys that an indexer selects"),
    Mark {
        key: "linear_num_value_heads",
        asks: positive,
        means: "some layers have linear attention (gated delta nets)",
        honoured: &["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"],
    },
    Mark {
        key: "swiglu_limit",
        asks: positive,
        means: "gate and up projections are clamped",
        honoured: &["gpt_oss"],
    },
    mark("attn_logit_softcapping", positive, "attention scores are bounded by a tanh"),
    mark("final_logit_softcapping", positive, "logits are bounded by a tanh"),
    mark("query_pre_attn_scalar", positive, "scores are scaled by a number of their own"),
    mark("partial_rotary_factor", not_one, "only a part of each head is rotated"),
    mark("rotary_pct", not_one, "only a part of each head is rotated"),
    mark("attention_chunk_size", positive, "some layers attend within chunks of the sequence"),
    mark("no_rope_layers", any, "some layers rotate nothing"),
    mark("no_rope_layer_interval", positive, "some layers rotate nothing"),
    mark("num_kv_shared_layers", positive, "layers share keys and values"),
    mark("hidden_size_per_layer_input", positive, "layers read embeddings of their own"),
    mark("embedding_multiplier", not_one, "embeddings are scaled"),
    mark("residual_multiplier", not_one, "what is added to the residual stream is scaled"),
    mark("attention_multiplier", not_one, "scores are scaled by a number of their own"),
    mark("logits_scaling", not_one, "logits are scaled"),
    mark("logit_scale", not_one, "logits are scaled"),
    mark("use_parallel_residual", is_true, "attention and MLP read the same hidden states"),
    mark("mamba_d_state", positive, "some layers are state-space layers (Mamba)"),
    mark("ssm_state_size", positive, "some layers are state-space layers (Mamba)"),
    mark("conv_L_cache", positive, "some layers are short convolutions"),
    mark("clip_qkv", positive, "queries, keys and values are clamped"),
    mark("alibi", is_true, "positions bias the scores (ALiBi)"),
    mark(
        "hidden_activation",
        |v| v.as_str().is_some_and(|s| s != "silu"),
        "the MLP has another activation than SiLU",
    ),
];

/// What of published families no field of their configuration shows.
static FACTS: &[(&str, &[&str])] = &[
    (
        "llama4",
        &[
            "rotation pairs neighboring channels",
            "queries and keys are normalized after the rotation",
            "each block's experts are one tensor",
        ],
    ),
    ("nemotron_h", &["each layer is one of attention, MLP, experts and Mamba", "the MLP has no gate"]),
];

/// Characters of a name that count when two are compared.
fn letters(name: &str) -> String {
    let stem = ["ForCausalLM", "ForConditionalGeneration", "LMHeadModel"]
        .iter()
        .find_map(|end| name.strip_suffix(end))
        .unwrap_or(name);
    stem.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

fn common_prefix(one: &str, other: &str) -> usize {
    one.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count()
}

/// How much a family resembles what a configuration asks for: letters that the names begin with, what kind of block its
/// fields describe, and how many of the fields that set families apart this one has too.
fn resemblance(family: &dyn Family, found: &str, fields: &ConfigFields<'_>) -> i64 {
    let has = |key: &str| fields.get(key).is_some();
    let names = family.architectures().iter();
    let letters_in_common = names.map(|name| common_prefix(&letters(name), &letters(found))).max();
    // Shorter beginnings are chance.
    let by_name = letters_in_common.filter(|n| *n >= 4).map_or(0, |n| n as i64);
    let wants_experts = MARKS
        .iter()
        .filter(|mark| mark.honoured == EXPERTS)
        .any(|mark| fields.get(mark.key).is_some_and(mark.asks));
    let by_experts = if EXPERTS.contains(&family.name()) == wants_experts { 4 } else { -4 };
    let is_layer_norm = family.name() == "opt";
    let by_norm = match (has("rms_norm_eps"), has("layer_norm_eps") || has("layer_norm_epsilon")) {
        (true, _) if is_layer_norm => -2,
        (true, _) => 2,
        (false, true) if is_layer_norm => 2,
        _ => 0,
    };
    let by_feed_forward = match (has("ffn_dim"), has("intermediate_size")) {
        (true, false) if is_layer_norm => 2,
        (false, true) if !is_layer_norm => 1,
        _ => 0,
    };
    let honours = |mark: &&Mark| {
        mark.honoured != EXPERTS
            && mark.honoured.contains(&family.name())
            && fields.get(mark.key).is_some_and(mark.asks)
    };
    let by_fields = MARKS.iter().filter(honours).count() as i64;
    by_name + by_experts + by_norm + by_feed_forward + by_fields
}

/// Families that honour none of the [`MARKS`] but for experts.
const PLAIN: &[&str] =
    &["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "opt"];

/// A family that resembles less is not worth naming.
const LEAST: i64 = 5;

/// [`Error::UnknownArchitecture`] for the class `found`.
pub(super) fn refuse(config: &ConfigFields<'_>, found: &str) -> Error {
    let nested = config.optional_object(multimodal::TEXT).ok().flatten();
    let fields = nested.as_ref().unwrap_or(config);
    let mut ranked: Vec<(i64, &dyn Family)> =
        FAMILIES.iter().map(|family| (resemblance(*family, found, fields), *family)).collect();
    // Stable: of equals, the first in the registry.
    ranked.sort_by_key(|(score, _)| std::cmp::Reverse(*score));
    let nearest = ranked.first().filter(|(score, _)| *score >= LEAST).map(|(_, family)| *family);
    Error::UnknownArchitecture {
        path: config.path().to_owned(),
        found: found.to_owned(),
        nearest: nearest.map(|family| family.architectures()[0]),
        differences: differences(config, fields, nested.is_some(), nearest),
        known: known(),
    }
}

fn differences(
    config: &ConfigFields<'_>,
    fields: &ConfigFields<'_>,
    is_nested: bool,
    nearest: Option<&dyn Family>,
) -> Vec<String> {
    let mut said = Vec::new();
    if is_nested {
        let classes: Vec<_> = multimodal::classes().map(|(name, _)| name).collect();
        said.push(format!(
            "it holds its text model beside other parts (`text_config`), which is read of {}",
            classes.join(", ")
        ));
    }
    let name = nearest.map_or("", Family::name);
    // Other families honour some of these fields, each its own.
    let plain = nearest.is_none() || PLAIN.contains(&name) || SHARED.contains(&name);
    for mark in MARKS.iter().filter(|mark| plain && !mark.honoured.contains(&name)) {
        let Some(value) = fields.get(mark.key).filter(|value| (mark.asks)(value)) else { continue };
        let value = match value {
            Value::Array(_) | Value::Object(_) => "set".to_owned(),
            Value::String(text) => crate::checkpoint::printable(text),
            scalar => scalar.to_string(),
        };
        said.push(format!("`{}` is {value}: {}", fields.name_of(mark.key), mark.means));
    }
    let kinds = [config, fields].map(|fields| fields.optional_str("model_type").ok().flatten().unwrap_or(""));
    let facts = |kind: &str| {
        // The longest name wins: `qwen3_vl_moe` before `qwen3`.
        let of = FACTS.iter().filter(|(family, _)| kind.starts_with(family));
        of.max_by_key(|(family, _)| family.len()).map_or(&[][..], |(_, facts)| *facts)
    };
    for fact in kinds.into_iter().flat_map(facts).map(|fact| (*fact).to_owned()) {
        if !said.contains(&fact) {
            said.push(fact);
        }
    }
    // A field that only the nearest family needs says nothing of this one.
    if let Some(Err(Error::Config { field, reason, .. })) = nearest.map(|family| family.describe(fields))
        && !reason.starts_with("is missing")
    {
        said.push(format!("`{field}` {reason}"));
    }
    if said.is_empty() && nearest.is_some() {
        said.push(
            "no field of its configuration shows how it differs; its class may compute something else".into(),
        );
    }
    if let Some(method) = config.get("quantization_config").and_then(|q| q.get("quant_method")) {
        let method = method.as_str().unwrap_or_default();
        if crate::format::container_of(method).is_none() {
            said.push(format!(
                "its weights are quantized by `{}`, which is not read",
                crate::checkpoint::printable(method)
            ));
        }
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The nearest architecture, and the message.
    fn of(config: &Value) -> (Option<&'static str>, String) {
        let config = config.as_object().unwrap();
        let found = config["architectures"][0].as_str().unwrap();
        let error = refuse(&ConfigFields::new(std::path::Path::new("config.json"), config), found);
        let message = error.to_string();
        match error {
            Error::UnknownArchitecture { nearest, .. } => (nearest, message),
            other => panic!("{other}"),
        }
    }

    /// A configuration of a dense decoder with more fields.
    fn dense(architecture: &str, more: &Value) -> Value {
        let mut config = json!({
            "architectures": [architecture], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    }

    #[test]
    fn names_and_fields_find_the_nearest_family() {
        let deepseek = json!({
            "model_type": "deepseek_v32", "n_routed_experts": 256, "n_shared_experts": 1, "kv_lora_rank": 512,
            "topk_method": "noaux_tc", "index_topk": 2048, "quantization_config": { "quant_method": "fp8" },
        });
        let next = json!({
            "model_type": "qwen3_other", "num_experts": 512, "linear_num_value_heads": 32,
            "partial_rotary_factor": 0.25, "shared_expert_intermediate_size": 512,
        });
        for (config, near, says) in [
            (
                dense("DeepseekV32ForCausalLM", &deepseek),
                "DeepseekV3ForCausalLM",
                &["`index_topk` is 2048", "indexer"][..],
            ),
            (
                dense("Qwen3OtherForCausalLM", &next),
                "Qwen3_5MoeForCausalLM",
                &["no field of its configuration"],
            ),
            (
                dense("Qwen3OtherForCausalLM", &json!({ "num_experts": 8, "partial_rotary_factor": 0.25 })),
                "Qwen3MoeForCausalLM",
                &["`partial_rotary_factor` is 0.25"],
            ),
            (
                dense("LlamaBitForCausalLM", &json!({})),
                "LlamaForCausalLM",
                &["no field of its configuration"],
            ),
            (
                dense("Qwen3BitForCausalLM", &json!({ "hidden_act": "gelu" })),
                "Qwen3ForCausalLM",
                &["`hidden_act` is `gelu`"],
            ),
        ] {
            let (nearest, message) = of(&config);
            assert_eq!(nearest, Some(near), "{message}");
            assert!(message.contains(near) && says.iter().all(|part| message.contains(part)), "{message}");
        }
    }

    #[test]
    fn nested_text_models_are_looked_at_where_they_are() {
        let text = dense(
            "-",
            &json!({
                "model_type": "qwen3_9_text", "linear_num_value_heads": 32, "partial_rotary_factor": 0.25,
            }),
        );
        let qwen = json!({
            "architectures": ["Qwen3_9ForConditionalGeneration"], "model_type": "qwen3_9", "text_config": text,
        });
        let (nearest, message) = of(&qwen);
        // A field that this family has too.
        assert_eq!(nearest, Some("Qwen3_5ForCausalLM"), "{message}");
        assert!(message.contains("Qwen3VLForConditionalGeneration"), "{message}");
        assert!(!message.contains("gated delta nets"), "{message}");
        let text = dense(
            "-",
            &json!({
                "model_type": "llama4_text", "num_local_experts": 16, "attention_chunk_size": 8192,
                "no_rope_layers": [1, 1, 1, 0],
            }),
        );
        let llama = json!({
            "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": text,
        });
        let (nearest, message) = of(&llama);
        assert!(nearest.is_some(), "{message}");
        for part in ["attention_chunk_size` is 8192", "no_rope_layers` is set", "neighboring channels"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn what_resembles_nothing_has_no_nearest() {
        let (nearest, message) = of(&json!({ "architectures": ["BertModel"], "num_experts": 0 }));
        assert_eq!(nearest, None, "{message}");
        // Nothing that a file says is shown raw, and nothing of it is trusted.
        let hostile = json!({
            "architectures": ["Evil\u{1b}[2J"], "text_config": 7, "num_experts": "many", "kv_lora_rank": [],
            "quantization_config": { "quant_method": "\u{202e}x" },
        });
        let (_, message) = of(&hostile);
        assert!(!message.contains('\u{1b}') && !message.contains('\u{202e}'), "{message}");
    }

    /// The table of `docs/families.md` says yes of what is supported, and no of nothing that is.
    #[test]
    fn the_table_of_families_is_right() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/families.md");
        let text = std::fs::read_to_string(path).unwrap();
        let table = text.split("## Other families").nth(1).unwrap().split("\n## ").next().unwrap();
        let rows = table.lines().filter(|line| line.starts_with("| `")).skip(1);
        let rows: Vec<Vec<&str>> = rows.map(|line| line.split('|').map(str::trim).collect()).collect();
        let listed = |supported: bool| -> Vec<&str> {
            let rows = rows.iter().filter(|row| (row[2] != "no") == supported);
            rows.flat_map(|row| row[1].split('`').skip(1).step_by(2)).collect()
        };
        let (yes, no) = (listed(true), listed(false));
        assert!(no.len() > 10, "{no:?}");
        for name in known() {
            assert!(yes.contains(&name) && !no.contains(&name), "{name}");
        }
        assert!(yes.iter().all(|name| known().contains(name)), "{yes:?}");
    }

    #[test]
    fn supported_families_are_not_among_the_unsupported() {
        for (family, _) in FACTS {
            assert!(FAMILIES.iter().all(|known| known.name() != *family), "{family}");
        }
    }
}
