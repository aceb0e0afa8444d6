//! Tiny checkpoints of several families, with all parameters random.
//!
//! The linears' input widths are multiples of 128, except in models that exist to test other widths.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::support::llama::Shape;
use crate::support::noise::Float;
use crate::support::shards::Entry;
use crate::synth::{Contents, Spread};

/// One shard holds any of these models.
const ONE_SHARD: u64 = 1 << 40;
/// Standard deviations for which every parameter affects the logits.
const SPREAD: Spread = Spread { matrices: 0.12, norms: 0.3, biases: 0.3 };
const POSITIONS: usize = 512;
/// Number of rows of OPT's position table before the row of position 0.
const OPT_OFFSET: usize = 2;
const CHAT_TEMPLATE: &str = "{%- for message in messages -%}
{{- '<' + message['role'] + '>' + message['content'].strip() + eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}";

/// The model that most cases quantize: grouped-query attention, bfloat16, with a chat template.
pub const MAIN: &str = "llama";
/// A model with a head tied to its embedding.
pub const TIED: &str = "llama-tied";
/// A model whose widths are multiples of 32 but not of 64.
pub const RAGGED: &str = "llama-ragged";

struct Tiny {
    name: &'static str,
    float: Float,
    shard_bytes: u64,
    config: Value,
    tensors: Vec<Entry>,
}

/// Writes all models into a directory; returns their names.
///
/// # Errors
/// When writing fails.
pub fn write_all(dir: &Path) -> Result<Vec<&'static str>> {
    let models = models();
    for (seed, tiny) in models.iter().enumerate() {
        let contents = Contents {
            tensors: tiny.tensors.clone(),
            config: tiny.config.clone(),
            float: tiny.float,
            spread: SPREAD,
            seed: seed as u64,
            shard_bytes: tiny.shard_bytes,
        };
        contents.write(&dir.join(tiny.name)).with_context(|| format!("model {}", tiny.name))?;
    }
    let main = dir.join(MAIN);
    std::fs::write(main.join("chat_template.jinja"), CHAT_TEMPLATE)?;
    std::fs::write(
        main.join("tokenizer_config.json"),
        json!({ "eos_token": "<|end_of_text|>" }).to_string(),
    )?;
    Ok(models.iter().map(|tiny| tiny.name).collect())
}

/// Writes calibration texts; returns the paths of the plain one, the documents and the conversations.
///
/// # Errors
/// When writing fails.
pub fn write_texts(dir: &Path) -> Result<[PathBuf; 3]> {
    let paths = ["plain.txt", "documents.jsonl", "chats.jsonl"].map(|name| dir.join(name));
    let sentence = |i: usize| format!("Line {i}: {} apples cost {} coins. ", i * i % 17, i * 31 % 101);
    let plain: String = (0..200).map(sentence).collect();
    let document = |i: usize| json!({ "text": (i..i + 1 + i % 5).map(sentence).collect::<String>() });
    let chat = |i: usize| {
        json!({ "messages": [
            { "role": "user", "content": "How far is it? ".repeat(1 + i % 3) },
            { "role": "assistant", "content": sentence(i) },
        ] })
    };
    let lines = |of: &dyn Fn(usize) -> Value| (0..24).map(|i| of(i).to_string() + "\n").collect::<String>();
    for (path, text) in paths.iter().zip([plain, lines(&document), lines(&chat)]) {
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(paths)
}

/// The sizes of most models.
const DEFAULT: Shape = Shape::TINY;

fn models() -> Vec<Tiny> {
    let (f16, bf16, f32) = (Float::F16, Float::Bf16, Float::F32);
    let tied = Shape { tied: true, ..DEFAULT };
    let ragged = Shape { hidden: 160, intermediate: 352, heads: 5, kv_heads: 1, ..DEFAULT };
    let plain_rope = json!({ "rope_scaling": null });
    let linear_rope = json!({ "rope_scaling": { "rope_type": "linear", "factor": 4.0 } });
    vec![
        gated(MAIN, "Llama", DEFAULT, bf16, json!({})),
        gated(TIED, "Llama", Shape { kv_heads: 4, ..tied }, f16, plain_rope.clone()),
        sharded(gated("llama-sharded", "Llama", Shape { layers: 3, ..DEFAULT }, f32, linear_rope)),
        gated("llama-biases", "Llama", DEFAULT, bf16, json!({ "attention_bias": true, "mlp_bias": true })),
        gated("llama-wide-heads", "Llama", Shape { head_dim: 64, ..DEFAULT }, f16, json!({})),
        gated(RAGGED, "Llama", ragged, bf16, plain_rope),
        gated("mistral", "Mistral", DEFAULT, f16, json!({ "sliding_window": null })),
        sharded(gated("mistral-window", "Mistral", DEFAULT, bf16, json!({ "sliding_window": 24 }))),
        gated("qwen2", "Qwen2", tied, bf16, json!({ "use_sliding_window": false })),
        gated(
            "qwen2-window",
            "Qwen2",
            DEFAULT,
            f32,
            json!({ "use_sliding_window": true, "sliding_window": 24, "max_window_layers": 0 }),
        ),
        gated("qwen3", "Qwen3", Shape { head_dim: 64, ..DEFAULT }, bf16, json!({})),
        gated("qwen3-biases", "Qwen3", tied, f16, json!({ "attention_bias": true })),
        opt("opt", f16, json!({})),
        opt("opt-plain", bf16, opt_plain()),
        without_base(opt("opt-bare", f32, json!({}))),
    ]
}

/// OPT without biases, without norm parameters, and with its own head.
fn opt_plain() -> Value {
    json!({ "enable_bias": false, "layer_norm_elementwise_affine": false, "tie_word_embeddings": false })
}

fn sharded(tiny: Tiny) -> Tiny {
    Tiny { shard_bytes: 400_000, ..tiny }
}

/// The checkpoint as saved by a class without a head: tensor names lack their first part.
fn without_base(mut tiny: Tiny) -> Tiny {
    for entry in &mut tiny.tensors {
        if let Some(bare) = entry.name.strip_prefix("model.") {
            entry.name = bare.to_owned();
        }
    }
    tiny
}

fn changed(mut config: Value, changes: &Value) -> Value {
    if let (Some(config), Some(changes)) = (config.as_object_mut(), changes.as_object()) {
        config.extend(changes.clone());
    }
    config
}

fn flag(config: &Value, key: &str, default: bool) -> bool {
    config.get(key).and_then(Value::as_bool).unwrap_or(default)
}

fn gated(name: &'static str, family: &str, shape: Shape, float: Float, changes: Value) -> Tiny {
    let config = changed(
        shape.config(float),
        &json!({
            "architectures": [format!("{family}ForCausalLM")],
            "model_type": family.to_lowercase(),
            "max_position_embeddings": POSITIONS,
        }),
    );
    let config = changed(config, &changes);
    let attention_bias = flag(&config, "attention_bias", false);
    let is_biased = |module: &str| match module {
        "q_proj" | "k_proj" | "v_proj" => attention_bias || family == "Qwen2",
        "o_proj" => attention_bias,
        _ => module.ends_with("_proj") && flag(&config, "mlp_bias", false),
    };
    let mut tensors = Vec::new();
    for entry in shape.tensors(float) {
        let module = entry.name.strip_suffix(".weight").unwrap_or(&entry.name).to_owned();
        let last = module.rsplit('.').next().unwrap_or_default();
        let bias = is_biased(last).then(|| Entry::new(format!("{module}.bias"), float, &entry.shape[..1]));
        let norm = (family == "Qwen3" && matches!(last, "q_proj" | "k_proj")).then(|| {
            Entry::new(format!("{}_norm.weight", module.trim_end_matches("_proj")), float, &[shape.head_dim])
        });
        tensors.push(entry);
        tensors.extend(bias.into_iter().chain(norm));
    }
    Tiny { name, float, shard_bytes: ONE_SHARD, config, tensors }
}

fn opt(name: &'static str, float: Float, changes: Value) -> Tiny {
    let Shape { layers, hidden, intermediate, heads, vocab, .. } = DEFAULT;
    let config = changed(
        json!({
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "activation_function": "relu",
            "bos_token_id": 256,
            "do_layer_norm_before": true,
            "enable_bias": true,
            "eos_token_id": 257,
            "ffn_dim": intermediate,
            "hidden_size": hidden,
            "layer_norm_elementwise_affine": true,
            "max_position_embeddings": POSITIONS,
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "tie_word_embeddings": true,
            "torch_dtype": float.config_name(),
            "vocab_size": vocab,
            "word_embed_proj_dim": hidden,
        }),
        &changes,
    );
    let (biased, affine) =
        (flag(&config, "enable_bias", true), flag(&config, "layer_norm_elementwise_affine", true));
    let decoder = "model.decoder";
    let table = |part: &str, rows: usize| {
        vec![Entry::new(format!("{decoder}.{part}.weight"), float, &[rows, hidden])]
    };
    let module = |name: String, shape: &[usize], has_bias: bool| {
        let bias = has_bias.then(|| Entry::new(format!("{name}.bias"), float, &shape[..1]));
        std::iter::once(Entry::new(format!("{name}.weight"), float, shape)).chain(bias).collect::<Vec<_>>()
    };
    let norm = |name: String| if affine { module(name, &[hidden], true) } else { Vec::new() };
    let mut tensors =
        [table("embed_tokens", vocab), table("embed_positions", POSITIONS + OPT_OFFSET)].concat();
    for layer in 0..layers {
        let at = |part: &str| format!("{decoder}.layers.{layer}.{part}");
        tensors.extend(norm(at("self_attn_layer_norm")));
        for part in ["q_proj", "k_proj", "v_proj", "out_proj"] {
            tensors.extend(module(at(&format!("self_attn.{part}")), &[hidden, hidden], biased));
        }
        tensors.extend(norm(at("final_layer_norm")));
        tensors.extend(module(at("fc1"), &[intermediate, hidden], biased));
        tensors.extend(module(at("fc2"), &[hidden, intermediate], biased));
    }
    tensors.extend(norm(format!("{decoder}.final_layer_norm")));
    if !flag(&config, "tie_word_embeddings", true) {
        tensors.extend(module("lm_head".into(), &[vocab, hidden], false));
    }
    Tiny { name, float, shard_bytes: ONE_SHARD, config, tensors }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::support::shards::Checkpoint;

    fn names(tiny: &str) -> Vec<String> {
        let models = models();
        let tiny = models.iter().find(|t| t.name == tiny).unwrap();
        tiny.tensors.iter().map(|entry| entry.name.clone()).collect()
    }

    #[test]
    fn tensors_follow_from_the_configuration() {
        let has = |tiny: &str, part: &str| names(tiny).iter().any(|name| name.ends_with(part));
        for part in ["q_proj.bias", "o_proj.bias", "down_proj.bias"] {
            assert!(has("llama-biases", part) && !has(MAIN, part), "{part}");
        }
        assert!(has("qwen2", "k_proj.bias") && !has("qwen2", "o_proj.bias"));
        assert!(has("qwen3", "layers.1.self_attn.k_norm.weight") && !has("qwen3", "k_proj.bias"));
        assert!(has("qwen3-biases", "o_proj.bias"));
        assert!(!has(TIED, "lm_head.weight") && has("opt-plain", "lm_head.weight"));
        assert!(names("opt-plain").iter().all(|n| !n.contains("norm") && !n.ends_with(".bias")));
        assert!(names("opt-bare").contains(&"decoder.layers.1.fc2.bias".to_owned()));
        assert!(names("opt").contains(&"model.decoder.final_layer_norm.bias".to_owned()));
    }

    #[test]
    fn every_parameter_is_random() {
        let dir = tempfile::tempdir().unwrap();
        let written = write_all(dir.path()).unwrap();
        assert_eq!(written.len(), models().len());
        for name in written {
            let checkpoint = Checkpoint::open(&dir.path().join(name)).unwrap();
            for entry in checkpoint.entries() {
                let values = entry.float().unwrap().widen(&checkpoint.read(entry).unwrap());
                let (first, rest) = values.split_first().unwrap();
                assert!(rest.iter().any(|v| v != first), "{name}: {} is constant", entry.name);
                assert!(values.iter().all(|v| v.is_finite()), "{name}: {}", entry.name);
            }
        }
        let shards = |name: &str| Checkpoint::open(&dir.path().join(name)).unwrap().shards.len();
        assert!(shards("llama-sharded") > 2 && shards("mistral-window") > 1 && shards(MAIN) == 1);
    }
}
