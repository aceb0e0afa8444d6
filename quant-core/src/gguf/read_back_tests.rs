//! Files of every family with special parts, written from a configuration and read back.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value as Json, json};

use super::config_tests::{cases, config, merged};
use super::families::{self, EMBEDDING, EMBEDDING_NORM, GgufFamily, HEAD, POSITIONS, ROPE_FACTORS};
use super::file::{Value, write_file};
use super::{general, layout, metadata, open};
use crate::Error;
use crate::checkpoint::{ConfigFields, MemorySource};
use crate::model::{Architecture, Op, describe, restore_llama3};

type Tensors = Vec<(String, Vec<usize>, Vec<f32>)>;

/// The metadata and tensors of a file for a configuration, with the model that it describes.
fn file(config: &Json) -> (Architecture, &'static GgufFamily, Vec<(String, Value)>, Tensors) {
    let config = config.as_object().unwrap();
    let a = describe(&ConfigFields::new(Path::new("config.json"), config), &MemorySource::new()).unwrap();
    let family = families::of_model(&a).unwrap();
    let about = metadata::metadata(&a, family, config).unwrap();
    let mut entries = general::general(family, "x", 0, &[]);
    entries.extend(about.entries);
    let mut shapes: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    shapes.insert(EMBEDDING.into(), vec![a.vocab, a.hidden]);
    let [embedding, head] = metadata::folded_factors(&a, family);
    if !a.tied || embedding != head {
        shapes.insert(format!("{HEAD}.weight"), vec![a.vocab, a.hidden]);
    }
    if a.head_bias {
        shapes.insert(format!("{HEAD}.bias"), vec![a.vocab]);
    }
    if a.learned_positions.is_some() {
        shapes.insert(POSITIONS.into(), vec![a.max_positions, a.hidden]);
    }
    for (norm, name) in [(&a.final_norm, family.final_norm), (&a.embedding_norm, EMBEDDING_NORM)] {
        for parameter in norm.iter().flat_map(Op::parameters) {
            shapes.insert(format!("{name}.{}", parameter.name), parameter.shape);
        }
    }
    for layer in 0..a.layers {
        for placed in layout::of_block(&a, family, layer).unwrap() {
            let shape = shapes.entry(placed.name(layer)).or_default();
            *shape = match placed.expert {
                Some(expert) => [&[expert + 1], placed.stored_shape.as_slice()].concat(),
                None => placed.stored_shape.clone(),
            };
        }
    }
    let zeros = |(name, shape): (String, Vec<usize>)| {
        let count = shape.iter().product();
        (name, shape, vec![0.0; count])
    };
    let mut tensors: Tensors = shapes.into_iter().map(zeros).collect();
    for (name, factors) in about.rope_factors {
        tensors.push((name.to_owned(), vec![factors.len()], factors));
    }
    (a, family, entries, tensors)
}

fn read(entries: &[(String, Value)], tensors: &Tensors) -> crate::Result<Architecture> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.gguf");
    std::fs::write(&path, write_file(entries, tensors).unwrap()).unwrap();
    let model = open(&path)?;
    describe(&ConfigFields::new(&path, model.config()), &MemorySource::new())
}

/// Rotations are described by other parameters, such as divisors in place of those they were computed from.
fn assert_same(name: &str, ours: &Architecture, found: &Architecture) {
    assert_eq!((ours.layers, ours.vocab, ours.hidden), (found.layers, found.vocab, found.hidden), "{name}");
    for layer in 0..ours.layers {
        let (ours, found) = (ours.graph(layer).nodes(), found.graph(layer).nodes());
        assert_eq!(ours.len(), found.len(), "{name}: block {layer}");
        for (ours, found) in ours.iter().zip(found) {
            assert_eq!(ours.inputs, found.inputs, "{name}: block {layer}");
            match (&ours.op, &found.op) {
                (Op::Rope(ours), Op::Rope(found)) => {
                    assert_eq!(
                        (ours.rotary_dim, ours.layout, ours.theta),
                        (found.rotary_dim, found.layout, found.theta),
                        "{name}: block {layer}"
                    );
                }
                (ours, found) => assert_eq!(ours, found, "{name}: block {layer}"),
            }
        }
    }
}

#[test]
fn a_file_describes_the_model_that_it_was_written_from() {
    for (name, changes) in cases() {
        // Files of Gemma 4 have further tensors. A file with Falcon-H1's factors in its weights has no factors.
        if name == "gemma4_text" || name == "falcon_h1" {
            continue;
        }
        let (a, _, entries, tensors) = file(&config(name, changes));
        let found = read(&entries, &tensors).unwrap_or_else(|e| panic!("{name}: {e}"));
        let is_read_as_another = a.family == "granitemoehybrid" && found.family == "granite";
        assert!(found.family == a.family || is_read_as_another, "{name}: {}", found.family);
        assert_same(name, &a, &found);
    }
}

/// The divisors of Llama 3's scaling do not change when a file is written from a file.
#[test]
fn frequency_divisors_are_copied_bit_by_bit() {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128 },
    });
    let (_, _, entries, tensors) = file(&config);
    // Other programs round differently.
    for difference in [0, 1] {
        let mut tensors = tensors.clone();
        let (_, _, divisors) = tensors.iter_mut().find(|(name, ..)| name == ROPE_FACTORS).unwrap();
        assert!(divisors[0] == 1.0 && divisors[15] == 8.0);
        let middle = divisors.iter_mut().find(|d| **d > 1.0 && **d < 8.0).unwrap();
        *middle = f32::from_bits(middle.to_bits() + difference);
        let divisors = divisors.clone();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.gguf");
        std::fs::write(&path, write_file(&entries, &tensors).unwrap()).unwrap();
        let model = open(&path).unwrap();
        let a = describe(&ConfigFields::new(&path, model.config()), &MemorySource::new()).unwrap();
        let about = metadata::metadata(&a, families::of_model(&a).unwrap(), model.config()).unwrap();
        assert_eq!(about.rope_factors, [(ROPE_FACTORS, divisors)]);
        let written: Vec<_> = entries.iter().filter(|(key, _)| key.starts_with("llama.")).cloned().collect();
        assert_eq!(about.entries, written);
        // Other programs get the parameters.
        let mut restored = model.config().clone();
        restore_llama3(&mut restored);
        assert_eq!(restored["rope_scaling"], config["rope_scaling"]);
    }
}

#[test]
fn factors_in_weights_are_not_applied_again() {
    let factors = json!({
        "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 1.0], "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0,
        "attention_in_multiplier": 1.0, "key_multiplier": 1.0, "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0, "mlp_multipliers": [1.0, 1.0], "attention_out_multiplier": 1.0,
    });
    let (plain, ..) = file(&config("falcon_h1", factors));
    for tied in [false, true] {
        let (_, _, entries, tensors) = file(&config("falcon_h1", json!({ "tie_word_embeddings": tied })));
        let found = read(&entries, &tensors).unwrap();
        assert_same("falcon_h1", &plain, &found);
        assert_eq!((found.logits.scale, found.tied), (1.0, false));
    }
}

#[test]
fn contradictory_numbers_of_blocks_and_heads_are_refused() {
    let faults: [(&str, &str, Value, &str); 12] = [
        ("lfm2", "attention.head_count_kv", integers(&[0, 2]), "one per block"),
        ("lfm2", "attention.head_count_kv", integers(&[1, 2, 1]), "different values for different blocks"),
        ("granitemoehybrid", "ssm.inner_size", Value::U32(100), "multiple of the number of heads"),
        ("granitemoehybrid", "ssm.inner_size", Value::U32(64), "must be 2 times"),
        ("granitemoehybrid", "ssm.time_step_rank", Value::U32(0), "multiple of the number of heads"),
        ("nemotron_h", "feed_forward_length", integers(&[96, -1, 0, 0]), "one per block"),
        ("llama4_text", "attention.sliding_window", Value::U32(0), "models without chunks"),
        ("gpt_neox", "use_parallel_residual", Value::U32(1), "must be a boolean"),
        ("glm_moe_dsa", "attention.indexer.types", bools(&[true, true]), "at least 3 booleans"),
        ("glm_moe_dsa", "attention.indexer.types", bools(&[true; 3]), "blk.1.indexer.attn_q_b.weight"),
        ("glm_moe_dsa", "attention.indexer.types", bools(&[true, false, false]), "not supported for glm-dsa"),
        ("deepseek_v32", "attention.indexer.key_length", Value::U32(8), "indexer.attn_q_b.weight"),
    ];
    for (name, key, value, expected) in faults {
        let (_, family, mut entries, tensors) = file(&config(name, json!({})));
        let key = format!("{}.{key}", family.arch);
        entries.retain(|(known, _)| *known != key);
        entries.push((key.clone(), value));
        match read(&entries, &tensors) {
            Err(error @ Error::InputFile { .. }) => {
                assert!(error.to_string().contains(expected), "{key}: {error}");
            }
            other => panic!("{key}: {other:?}"),
        }
    }
    // Sizes that are not those of the tensors.
    let (_, family, mut entries, tensors) =
        file(&merged(config("lfm2", json!({})), json!({ "conv_L_cache": 4 })));
    let key = format!("{}.shortconv.l_cache", family.arch);
    entries.retain(|(known, _)| *known != key);
    entries.push((key, Value::U32(3)));
    let message = read(&entries, &tensors).unwrap_err().to_string();
    assert!(message.contains("shortconv.conv.weight"), "{message}");
}

fn bools(list: &[bool]) -> Value {
    Value::Array(super::file::Array::Bool(list.to_vec()))
}

fn integers(list: &[i32]) -> Value {
    Value::Array(super::file::Array::I32(list.to_vec()))
}
