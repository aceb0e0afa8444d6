//! The error for an unsupported family: the nearest supported family, and the differences between the two. If no family
//! is near, the error names the closest one and what separates it from the model.
//!
//! Every supported family is asked to describe the configuration, and the keys that it reads are recorded. The nearest
//! family is the one that reads most of the configuration, rejects least of it, reads few characteristic keys that the
//! configuration lacks, and has the most similar names of tensors. Of a model with a `text_config`, the text model is
//! compared, and the nearest is a class around its family. Fields that only other families read indicate a difference.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Map, Value};

use super::unknown_names::{BlockNames, CheckpointNames, of_family};
use super::{FAMILIES, Family, known, multimodal};
use crate::checkpoint::{Asked, ConfigFields, printable};
use crate::{Error, TensorSource};

/// A field that indicates a difference from most families.
struct Marker {
    key: &'static str,
    /// Returns whether the value enables the feature. `null` and absent fields never do.
    applies: fn(&Value) -> bool,
    /// Completes the sentence that the field begins.
    means: &'static str,
}

const fn marker(key: &'static str, applies: fn(&Value) -> bool, means: &'static str) -> Marker {
    Marker { key, applies, means }
}

fn any(_: &Value) -> bool {
    true
}

fn positive(value: &Value) -> bool {
    value.as_f64().is_some_and(|n| n > 0.0)
}

fn not_one(value: &Value) -> bool {
    value.as_f64().is_some_and(|n| n != 1.0)
}

fn several(value: &Value) -> bool {
    value.as_u64().is_some_and(|n| n > 1)
}

fn is_true(value: &Value) -> bool {
    value.as_bool() == Some(true)
}

const EXPERTS: &str = "layers are mixtures of experts";

static MARKERS: &[Marker] = &[
    marker("num_experts", several, EXPERTS),
    marker("num_local_experts", several, EXPERTS),
    marker("n_routed_experts", several, EXPERTS),
    marker("n_shared_experts", positive, "shared experts see every token"),
    marker("shared_expert_intermediate_size", positive, "a shared expert sees every token"),
    marker("topk_method", |v| v.as_str() == Some("noaux_tc"), "experts are selected with a correction bias"),
    marker("kv_lora_rank", positive, "keys and values are projected from a latent vector (MLA)"),
    marker("index_topk", positive, "queries attend only to the keys that an indexer selects"),
    marker("linear_num_value_heads", positive, "some layers have linear attention (gated delta nets)"),
    marker("swiglu_limit", positive, "gate and up projections are clamped"),
    marker("attn_logit_softcapping", positive, "attention scores are bounded by a tanh"),
    marker("final_logit_softcapping", positive, "logits are bounded by a tanh"),
    marker("query_pre_attn_scalar", positive, "attention scores are scaled by a configured factor"),
    marker("partial_rotary_factor", not_one, "RoPE is applied to only part of each head"),
    marker("rotary_pct", not_one, "RoPE is applied to only part of each head"),
    marker("attention_chunk_size", positive, "some layers have chunked attention"),
    marker("no_rope_layers", any, "some layers have no RoPE"),
    marker("no_rope_layer_interval", positive, "some layers have no RoPE"),
    marker("num_kv_shared_layers", positive, "layers share keys and values"),
    marker("hidden_size_per_layer_input", positive, "every layer has its own embeddings"),
    marker("embedding_multiplier", not_one, "embeddings are scaled"),
    marker("residual_multiplier", not_one, "residual updates are scaled"),
    marker("attention_multiplier", not_one, "attention scores are scaled by a configured factor"),
    marker("logits_scaling", not_one, "logits are scaled"),
    marker("logit_scale", not_one, "logits are scaled"),
    marker("use_parallel_residual", is_true, "attention and MLP run in parallel on the same hidden states"),
    marker("mamba_d_state", positive, "some layers are state-space layers (Mamba)"),
    marker("ssm_state_size", positive, "some layers are state-space layers (Mamba)"),
    marker("conv_L_cache", positive, "some layers are short convolutions"),
    marker("clip_qkv", positive, "queries, keys and values are clamped"),
    marker("alibi", is_true, "attention scores are biased by position (ALiBi)"),
    marker("image_grid_pinpoints", any, "images are split into tiles"),
];

/// Differences of published families that no field of their configuration shows.
static FACTS: &[(&str, &[&str])] = &[
    (
        "muse_glimmer",
        &[
            "queries and keys are normalized without a weight",
            "the output of attention is gated",
            "the pattern of sliding windows is counted from the last block",
        ],
    ),
    ("llava_next", LLAVA),
    ("llava_onevision", LLAVA),
];

const LLAVA: &[&str] =
    &["the names of its tensors and `image_newline` have not been compared with transformers yet; the text \
    model alone is supported, as `LlamaForCausalLM`, `MistralForCausalLM` or `Qwen2ForCausalLM`"];

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

/// Returns whether a key has no effect on the computation.
fn is_bookkeeping(key: &str) -> bool {
    const KEYS: &[&str] = &[
        "architectures",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "bos_token",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token",
        "id2label",
        "initializer_factor",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "max_length",
        "model_type",
        "pretraining_tp",
        "problem_type",
        "quantization_config",
        "return_dict",
        "router_aux_loss_coef",
        "task_specific_params",
        "text_config",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_cache",
    ];
    let ends = ["token_id", "token_ids", "pdrop", "_loss_coef"];
    KEYS.contains(&key)
        || key.contains("dropout")
        || ["_", "output_", "use_flash", "unsloth"].iter().any(|start| key.starts_with(start))
        || ends.iter().any(|end| key.ends_with(end))
}

/// Returns whether a value disables a feature. Most configurations contain such values for features that the family
/// lacks.
fn is_unset(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(true) => false,
    }
}

/// A key that hides older ones, such as `rope_theta`.
const ROPE_PARAMETERS: &str = "rope_parameters";
/// Maximum number of attempts of a family to describe a configuration.
const REFUSALS: usize = 16;

struct Reading {
    family: &'static dyn Family,
    /// The keys that the family reads.
    asked: BTreeSet<String>,
    /// The keys that it reads if newer keys of the same meaning are missing.
    older: BTreeSet<String>,
    refused: Vec<(String, String)>,
    /// The names in its blocks; none if it cannot describe the configuration.
    names: BlockNames,
}

impl Reading {
    /// Makes a family describe the configuration repeatedly: each time without the field that it rejected, or with a
    /// number for the field that was missing.
    fn of(family: &'static dyn Family, fields: &ConfigFields<'_>) -> Self {
        let mut reading = Self::with(family, fields.path(), fields.map().clone());
        let mut older = fields.map().clone();
        if older.remove(ROPE_PARAMETERS).is_some() {
            reading.older = Self::with(family, fields.path(), older).asked;
        }
        reading
    }

    fn with(family: &'static dyn Family, path: &Path, mut map: Map<String, Value>) -> Self {
        let mut filled = BTreeSet::new();
        let (asked, older) = Default::default();
        let mut reading = Self { family, asked, older, refused: Vec::new(), names: BlockNames::new() };
        for _ in 0..REFUSALS {
            let asked = Asked::default();
            let result = family.describe(&ConfigFields::new(path, &map).noting(&asked));
            reading.asked.extend(asked.into_keys());
            let (field, reason) = match result {
                Err(Error::Config { field, reason, .. }) => (field, reason),
                result => {
                    reading.names = result.map(|architecture| of_family(&architecture)).unwrap_or_default();
                    break;
                }
            };
            let key = field.split('.').next().unwrap_or_default().to_owned();
            let was_there = map.remove(&key).is_some();
            if filled.contains(&key) || !was_there && field != key {
                break;
            }
            if !was_there {
                map.insert(key.clone(), 2.into());
                filled.insert(key);
            }
            reading.refused.push((field, reason));
        }
        reading
    }

    fn reads(&self, key: &str) -> bool {
        self.asked.contains(key) || self.older.contains(key)
    }

    fn class(&self) -> &'static str {
        self.family.architectures()[0]
    }

    fn lacks(reason: &str) -> bool {
        reason.starts_with("is missing")
    }

    fn resemblance(&self, model: &Unknown<'_>) -> i64 {
        let names = self.family.architectures().iter();
        let letters_in_common = names.map(|name| common_prefix(&letters(name), &letters(model.found))).max();
        let by_name = letters_in_common.filter(|n| *n >= MIN_LETTERS).map_or(0, |n| n as i64);
        let by_type = if self.family.has_model_type(model.model_type) { OF_MODEL_TYPE } else { 0 };
        let by_fields = model.relevant.iter().map(|field| match self.reads(field.key) {
            true => field.weight,
            false => -field.weight,
        });
        let by_refusals = self.refused.iter().map(|(_, reason)| if Self::lacks(reason) { -2 } else { -3 });
        let by_tensors = match model.names.is_empty() {
            true => 0,
            false => (OF_TENSORS * model.names.similarity(&self.names)).round() as i64 - MIN_OF_TENSORS,
        };
        by_name + by_type + by_fields.sum::<i64>() + by_refusals.sum::<i64>() + by_tensors
    }

    /// The number of keys that few families read, this one among them, and that the configuration lacks. Keys that the
    /// family requires are [refused](Self::refused).
    fn missing(&self, model: &Unknown<'_>, readers: &BTreeMap<String, usize>) -> i64 {
        let is_rare = |key: &&String| readers.get(*key).is_some_and(|n| n * RARE <= FAMILIES.len());
        let is_refused = |key: &String| self.refused.iter().any(|(field, _)| field == key);
        let is_there = |key: &String| model.fields.get(key).is_some();
        let rare = self.asked.iter().filter(is_rare);
        rare.filter(|key| !is_bookkeeping(key) && !is_refused(key) && !is_there(key)).count() as i64
    }
}

/// The model of an unknown family.
struct Unknown<'a> {
    found: &'a str,
    model_type: &'a str,
    /// The fields of the text model.
    fields: &'a ConfigFields<'a>,
    relevant: Vec<RelevantField<'a>>,
    names: CheckpointNames,
}

struct RelevantField<'a> {
    key: &'a str,
    value: &'a Value,
    marker: Option<&'static Marker>,
    weight: i64,
}

impl<'a> RelevantField<'a> {
    fn of(fields: &ConfigFields<'a>) -> Vec<Self> {
        let relevant = |(key, value): (&'a String, &'a Value)| {
            let marker = MARKERS.iter().find(|marker| marker.key == *key);
            let is_relevant = !is_bookkeeping(key)
                && !is_unset(value)
                && marker.is_none_or(|marker| (marker.applies)(value));
            let weight = if marker.is_some() { 3 } else { 1 };
            is_relevant.then_some(Self { key, value, marker, weight })
        };
        fields.map().iter().filter_map(relevant).collect()
    }

    fn shown(&self, fields: &ConfigFields<'_>) -> String {
        let value = match self.value {
            Value::Array(_) | Value::Object(_) => "set".to_owned(),
            Value::String(text) => format!("`{}`", printable(text)),
            scalar => scalar.to_string(),
        };
        format!("`{}` is {value}", printable(&fields.name_of(self.key)))
    }
}

const MIN_SCORE: i64 = 4;
/// Fewer common letters say nothing.
const MIN_LETTERS: usize = 4;
/// The score of a family whose `model_type` is that of the text model.
const OF_MODEL_TYPE: i64 = 8;
/// The score of a family with the same names of tensors, and the deduction from all: different names are evidence
/// against a family.
const OF_TENSORS: f64 = 24.0;
const MIN_OF_TENSORS: i64 = 8;
/// A key is rare if at most one family in `RARE` reads it.
const RARE: usize = 4;
const MAX_LISTED: usize = 8;

pub(super) fn refuse(config: &ConfigFields<'_>, found: &str, tensors: &dyn TensorSource) -> Error {
    let nested = config.optional_object(multimodal::TEXT).ok().flatten();
    let fields = nested.as_ref().unwrap_or(config);
    let model = Unknown {
        found,
        model_type: fields.optional_str("model_type").ok().flatten().unwrap_or_default(),
        fields,
        relevant: RelevantField::of(fields),
        names: CheckpointNames::of(tensors),
    };
    let readings: Vec<Reading> = FAMILIES.iter().map(|family| Reading::of(*family, fields)).collect();
    let mut readers: BTreeMap<String, usize> = BTreeMap::new();
    for key in readings.iter().flat_map(|reading| &reading.asked) {
        *readers.entry(key.clone()).or_default() += 1;
    }
    let score = |reading: &Reading| reading.resemblance(&model) - reading.missing(&model, &readers);
    let mut ranked: Vec<(i64, Reading)> =
        readings.into_iter().map(|reading| (score(&reading), reading)).collect();
    // The sort is stable: among equal scores, the first in the registry wins.
    ranked.sort_by_key(|(score, _)| std::cmp::Reverse(*score));
    let has_nearest = ranked.first().is_some_and(|(score, _)| *score >= MIN_SCORE);
    let ranked: Vec<Reading> = ranked.into_iter().map(|(_, reading)| reading).collect();
    let nearest = ranked.first().filter(|_| has_nearest);
    Error::UnknownArchitecture {
        path: config.path().to_owned(),
        found: found.to_owned(),
        nearest: nearest.map(|reading| class_around(config, found, nested.is_some(), reading.family)),
        differences: differences(config, nested.is_some(), &model, nearest, &ranked),
        known: known(),
    }
}

/// The class with vision whose text model may be of this family, if the model seems to be one; otherwise the family's
/// class. Of several, the first of those with the most similar names.
fn class_around(
    config: &ConfigFields<'_>,
    found: &str,
    is_nested: bool,
    family: &dyn Family,
) -> &'static str {
    let own = family.architectures()[0];
    if !is_nested && config.get("vision_config").is_none() {
        return own;
    }
    let similarity = |name: &str| common_prefix(&letters(name), &letters(found));
    let classes = multimodal::classes().filter(|(_, texts)| texts.contains(&family.name()));
    let classes: Vec<&'static str> = classes.map(|(name, _)| name).collect();
    let most = classes.iter().map(|name| similarity(name)).max();
    classes.into_iter().find(|name| Some(similarity(name)) == most).unwrap_or(own)
}

/// Names of the most similar blocks of the model that the family lacks, and of the family that the model lacks.
fn of_tensors(model: &Unknown<'_>, reading: &Reading) -> Vec<String> {
    let class = reading.class();
    let (theirs, ours) = model.names.differences(&reading.names);
    let has =
        (!theirs.is_empty()).then(|| format!("its blocks have {}, which {class} does not", listed(&theirs)));
    let lacks = (!ours.is_empty()).then(|| format!("its blocks lack {}, which {class} has", listed(&ours)));
    has.into_iter().chain(lacks).collect()
}

/// The names in backticks, at most [`MAX_LISTED`] of them.
fn listed(names: &[String]) -> String {
    let more = names.len().saturating_sub(MAX_LISTED);
    let shown: Vec<String> =
        names[..names.len() - more].iter().map(|name| format!("`{}`", printable(name))).collect();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    shown.join(", ") + &more
}

/// Why no family is the nearest: what the closest one requires.
fn without_nearest(fields: &ConfigFields<'_>, closest: &Reading) -> String {
    let lacked = closest.refused.iter().filter(|(_, reason)| Reading::lacks(reason));
    let lacked: Vec<String> = lacked.map(|(field, _)| fields.name_of(field)).collect();
    let requires = match lacked.is_empty() {
        true => String::new(),
        false => format!(", which requires {}", listed(&lacked)),
    };
    format!("no supported family is similar; the closest is `{}`{requires}", closest.class())
}

fn differences(
    config: &ConfigFields<'_>,
    is_nested: bool,
    model: &Unknown<'_>,
    nearest: Option<&Reading>,
    ranked: &[Reading],
) -> Vec<String> {
    let fields = model.fields;
    let mut reasons = Vec::new();
    // A family that cannot describe the model even with values for what is missing has no names to compare.
    let closest = nearest.or_else(|| ranked.iter().find(|reading| !reading.names.is_empty()));
    if let Some(closest) = closest.filter(|_| nearest.is_none()) {
        reasons.push(without_nearest(fields, closest));
    }
    if is_nested {
        let classes: Vec<_> = multimodal::classes().map(|(name, _)| name).collect();
        reasons.push(format!(
            "it contains a text model and other parts (`text_config`), which is supported only for {}",
            classes.join(", ")
        ));
        let outside = RelevantField::of(config).into_iter();
        let marked =
            outside.filter_map(|field| Some(format!("{}: {}", field.shown(config), field.marker?.means)));
        reasons.extend(marked);
    }
    let of_nearest = |field: &&RelevantField<'_>| nearest.is_some_and(|reading| reading.reads(field.key));
    let mut unknown = Vec::new();
    for field in model.relevant.iter().filter(|field| !of_nearest(field)) {
        let other = ranked.iter().find(|reading| reading.reads(field.key));
        match (field.marker, other, nearest) {
            (Some(marker), ..) => reasons.push(format!("{}: {}", field.shown(fields), marker.means)),
            (None, Some(other), Some(nearest)) => {
                let [nearest, other] = [nearest, other].map(Reading::class);
                reasons.push(format!("{}, which {other} has, but {nearest} does not", field.shown(fields)));
            }
            (None, Some(_), None) => {}
            (None, None, _) => unknown.push(fields.name_of(field.key)),
        }
    }
    let kinds = [config, fields].map(|fields| fields.optional_str("model_type").ok().flatten().unwrap_or(""));
    let facts = |kind: &str| {
        // If several names are prefixes of the type, the longest wins.
        let of = FACTS.iter().filter(|(family, _)| kind.starts_with(family));
        of.max_by_key(|(family, _)| family.len()).map_or(&[][..], |(_, facts)| *facts)
    };
    for fact in kinds.into_iter().flat_map(facts).map(|fact| (*fact).to_owned()) {
        if !reasons.contains(&fact) {
            reasons.push(fact);
        }
    }
    // Fields that the nearest family misses are not listed: the unknown family may not need them.
    let refused = nearest.iter().flat_map(|reading| &reading.refused);
    for (field, reason) in refused.filter(|(_, reason)| !Reading::lacks(reason)) {
        reasons.push(format!("`{}` {reason}", printable(&fields.name_of(field))));
    }
    if !unknown.is_empty() {
        reasons.push(format!("no supported family has {}", listed(&unknown)));
    }
    reasons.extend(closest.into_iter().flat_map(|closest| of_tensors(model, closest)));
    if reasons.is_empty() {
        let compared = match model.names.is_empty() {
            true => "in its configuration",
            false => "in its configuration or in the names of its tensors",
        };
        reasons.push(format!("none {compared}, but its class may still compute different results"));
    }
    if let Some(method) = config.get("quantization_config").and_then(|q| q.get("quant_method")) {
        let method = method.as_str().unwrap_or_default();
        if crate::format::container_of(method).is_none() {
            reasons.push(format!(
                "its weights are quantized with `{}`, which is not supported",
                printable(method)
            ));
        }
    }
    reasons
}

#[cfg(test)]
#[path = "unknown_tests.rs"]
mod tests;
