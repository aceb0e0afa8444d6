//! The files that the program reads: each gives an error, or a consistent result.

use std::path::Path;
use std::sync::OnceLock;

use quant_core::calibrate::{ChannelMaxima, Corpus, read_corpus};
use quant_core::checkpoint::{
    CheckpointWriter, Dtype, ModelDirectory, Resume, ShardedCheckpoint, TensorSink, TensorSource, TensorSpec,
    WriteOptions,
};
use quant_core::gguf::Importance;
use quant_core::model::Model;
use quant_core::recipe::{Plan, Recipe};
use quant_evaluator::gate::{Baseline, Policy};
use quant_evaluator::{Evaluation, Journal, StoredReference};
use serde_json::json;

use crate::input::Input;
use crate::texts::{in_directory, in_file, text};

const HEADER: &str = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
"b.weight":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},"c":{"dtype":"U8","shape":[],"data_offsets":[32,33]}}"#;
const INDEX: &str = r#"{"metadata":{"total_size":40},
"weight_map":{"a":"one.safetensors","b":"two.safetensors","c":"two.safetensors"}}"#;
const RECIPES: [&str; 2] = [
    "format = \"awq\"\n[[transform]]\nkind = \"awq\"\nsearch = \"fast\"\n[quantize]\nmethod = \"rtn\"\nscheme = \"w4a16-g64\"\nignore = \
    [\"*.layers.0.*\", \"v_proj\"]\n[[quantize.override]]\npattern = \"down_proj\"\nscheme = \"w4a16-channel\"\n[calibration]\ntext \
    = \"pile-val\"\nsamples = 3\nlength = 100\nseed = 7\npacking = \"documents\"\nmask = \"prompts\"\nexpert_floor = 200\n",
    "format = [\"awq\", \"compressed-tensors\"]\n[[transform]]\nkind = \"smoothquant\"\nalpha = 0.5\n[quantize]\nmethod = \
    \"gptq\"\nscheme = \"w8a8-channel-sym\"\n",
];
const POLICY: &str = "schema = \"quant-gate-policy/1\"\nlevel = 0.05\non_inconclusive = \"inconclusive\"\n[[non_inferiority]]\n\
    metric = \"perplexity\"\nagainst = \"baseline\"\nmargin = 0.005\n[[cap]]\nmetric = \"kl_p99\"\nat_most = 0.5\nresults = \
    [\"a\"]\n";
const CHAT: &str = "{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"},{\"role\":\"assistant\",\"content\":\"Hello\"}]}\n\
    {\"messages\":[{\"role\":\"system\",\"content\":[{\"type\":\"text\",\"text\":\"Be brief.\"}]}],\"tools\":[{\"name\":\"f\"}]}\n";
const TEXT: &str = "{\"text\":\"one\"}\n{\"text\":\"two\",\"id\":2}\n";
const CONFIGS: [&str; 4] = [
    r#"{"architectures":["LlamaForCausalLM"],"hidden_size":64,"intermediate_size":96,"num_hidden_layers":2,
"num_attention_heads":2,"num_key_value_heads":1,"head_dim":32,"vocab_size":64,"rms_norm_eps":1e-5,
"max_position_embeddings":256,"hidden_act":"silu","tie_word_embeddings":false,
"rope_scaling":{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,
"original_max_position_embeddings":128}}"#,
    r#"{"architectures":["Qwen3MoeForCausalLM"],"hidden_size":64,"intermediate_size":96,"moe_intermediate_size":32,
"num_hidden_layers":2,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":32,"vocab_size":64,
"rms_norm_eps":1e-6,"max_position_embeddings":256,"num_experts":4,"num_experts_per_tok":2,"norm_topk_prob":true,
"decoder_sparse_step":1,"mlp_only_layers":[],"tie_word_embeddings":false}"#,
    r#"{"architectures":["Gemma3ForCausalLM"],"hidden_size":64,"intermediate_size":96,"num_hidden_layers":2,
"num_attention_heads":2,"num_key_value_heads":1,"head_dim":32,"vocab_size":64,"rms_norm_eps":1e-6,
"max_position_embeddings":256,"sliding_window":16,"layer_types":["sliding_attention","full_attention"],
"query_pre_attn_scalar":32,"rope_theta":1000000.0,"rope_local_base_freq":10000.0}"#,
    r#"{"architectures":["OPTForCausalLM"],"hidden_size":64,"ffn_dim":96,"num_hidden_layers":2,
"num_attention_heads":2,"vocab_size":64,"max_position_embeddings":256,"word_embed_proj_dim":64,
"do_layer_norm_before":true,"activation_function":"relu"}"#,
];

fn framed(header: &[u8], data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header, &vec![0; data]].concat()
}

/// The header of a safetensors file, with and without a length in front.
///
/// # Panics
/// If a property does not hold.
pub fn safetensors(data: &[u8]) {
    for bytes in [data.to_vec(), framed(&text(data, &[HEADER]), 33)] {
        in_file("one.safetensors", &bytes, |path| {
            let Ok(file) = ShardedCheckpoint::open_file(path) else { return };
            assert!(file.total_bytes() <= bytes.len() as u64);
            for name in file.names() {
                let len = file.info(name).expect("a tensor that is listed").byte_len();
                let read = file.read(name).expect("its data are in the file");
                assert_eq!(read.len() as u64, len);
            }
        });
    }
}

/// The index of a checkpoint with two shards.
///
/// # Panics
/// If a property does not hold.
pub fn shard_index(data: &[u8]) {
    in_directory(|directory| {
        let directory = directory.join("sharded");
        std::fs::create_dir_all(&directory).expect("a directory");
        let write = |name: &str, bytes: &[u8]| {
            std::fs::write(directory.join(name), bytes).expect("the directory can be written");
        };
        let one = br#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
        let two = br#"{"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"c":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#;
        write("one.safetensors", &framed(one, 24));
        write("two.safetensors", &framed(two, 16));
        write("model.safetensors.index.json", &text(data, &[INDEX]));
        let Ok(checkpoint) = ShardedCheckpoint::open(&directory) else { return };
        for name in checkpoint.names() {
            let read = checkpoint.read(name).expect("its data are in a shard");
            assert_eq!(read.len() as u64, checkpoint.info(name).expect("it is listed").byte_len());
        }
    });
}

/// The configuration of a model whose weights are those of a small Llama.
///
/// # Panics
/// If a property does not hold.
pub fn model_config(data: &[u8]) {
    in_directory(|directory| {
        let directory = directory.join("model");
        if !directory.join("model.safetensors").exists() {
            std::fs::create_dir_all(&directory).expect("a directory");
            tiny::tiny_llama(&directory).expect("the directory can be written");
        }
        std::fs::write(directory.join("config.json"), text(data, &CONFIGS)).expect("it can be written");
        let Ok(opened) = ModelDirectory::open(&directory) else { return };
        let Ok(model) = Model::open(&opened) else { return };
        let recipe = Recipe::preset("rtn-w8a16").expect("a preset");
        if let Ok(plan) = Plan::new(&model, &recipe, recipe.containers[0]) {
            assert!(Plan::peak_memory(&[plan], &model) > 0);
        }
    });
}

pub(crate) mod tiny {
    include!("../../quant-core/examples/support/tiny.rs");
}

/// A recipe, which comes back when it is written and read again.
///
/// # Panics
/// If a property does not hold.
pub fn recipe(data: &[u8]) {
    let Ok(text) = String::from_utf8(text(data, &RECIPES)) else { return };
    if let Ok(recipe) = Recipe::parse(&text) {
        let written = recipe.to_toml();
        let back = Recipe::parse(&written).expect("a recipe that was written");
        assert_eq!(back.to_toml(), written);
    }
}

/// The policy of a gate.
///
/// # Panics
/// If a property does not hold.
pub fn gate_policy(data: &[u8]) {
    let Ok(text) = String::from_utf8(text(data, &[POLICY])) else { return };
    if let Ok(policy) = Policy::parse(&text, Path::new("policy.toml")) {
        assert!(policy.level > 0.0 && policy.level < 0.5);
    }
}

const RESULT: &str = include_str!("../corpus/results/evaluation.json");
const BASELINE: &str = include_str!("../corpus/results/baseline.json");

/// Results of evaluations, and baselines of a gate, also with correct hashes, so that other checks are reached.
///
/// # Panics
/// If a property does not hold.
pub fn results(data: &[u8]) {
    let bytes = text(data, &[RESULT, BASELINE]);
    for path in [
        in_file("result.json", &bytes, Path::to_owned),
        in_file("sealed.json", &sealed(&bytes), Path::to_owned),
    ] {
        if let Ok(result) = Evaluation::read(&path) {
            assert_eq!(result.sha256, result.digest());
            assert_eq!(result.window_tokens.len(), result.windows);
        }
        if let Ok(baseline) = Baseline::read(&path) {
            assert!(!baseline.results.is_empty() && baseline.sha256().is_ok());
        }
    }
}

fn sealed(bytes: &[u8]) -> Vec<u8> {
    let Ok(mut value) = serde_json::from_slice::<serde_json::Value>(bytes) else { return bytes.to_vec() };
    let hash = match serde_json::from_value::<Evaluation>(value.clone()) {
        Ok(result) => result.digest(),
        Err(_) => match value.get("results").and_then(|results| serde_json::from_value(results.clone()).ok())
        {
            Some(results) => Baseline { results }.sha256().unwrap_or_default(),
            None => return bytes.to_vec(),
        },
    };
    if let Some(fields) = value.as_object_mut() {
        fields.insert("sha256".into(), hash.into());
    }
    value.to_string().into_bytes()
}

/// The journal of an interrupted evaluation.
///
/// # Panics
/// If a property does not hold.
pub fn eval_journal(data: &[u8]) {
    let windows = [3, 2, 4];
    let head = json!({ "schema": "quant-eval-journal/3", "identity": { "model": 1 } }).to_string();
    let line = |window: usize, last: bool, values: &str| {
        let line = format!("[{last},{values}]");
        let hash = quant_core::digest::sha256_hex(format!("{window} {line}"));
        format!("{} {line}\n", &hash[..16])
    };
    let whole = format!("{head}\n{}{}", line(0, false, "[0.5,1.5,2.5]"), line(1, true, "[1.0,2.0]"));
    let odd = format!("{head}\n{}{}", line(0, true, "[0.5,-1.5,1e999]"), line(1, true, "[1.0]"));
    in_file("journal", &text(data, &[&whole, &odd, &head]), |path| {
        let identity = json!({ "model": 1 });
        let Ok(mut journal) = Journal::<f64>::open(path, &identity, &windows) else { return };
        let known = journal.take();
        assert!(known.len() <= windows.len());
        assert!(known.iter().zip(windows).all(|(values, tokens)| values.len() == tokens));
        assert!(known.iter().flatten().all(|value| value.is_finite()));
        drop(journal);
        let mut again = Journal::<f64>::open(path, &identity, &windows).expect("a journal that was repaired");
        assert_eq!(again.take(), known);
    });
}

/// A stored reference, and one with these bytes as its header.
///
/// # Panics
/// If a property does not hold.
pub fn stored_reference(data: &[u8]) {
    let valid = include_str!("../corpus/stored_reference/header.json");
    // A small head instead of the model's.
    let head = vec![0_u8; 2 * 4];
    let mut small = serde_json::from_str::<serde_json::Value>(valid).expect("a header");
    for (key, value) in [("vocabulary", json!(1)), ("width", json!(2)), ("window_tokens", json!([1, 2]))] {
        small[key] = value;
    }
    (small["head_dtype"], small["head_bias"]) = (json!("F32"), json!(false));
    small["head_blake3"] = json!(blake3::hash(&head).to_hex().as_str());
    let header = text(data, &[&small.to_string(), valid]);
    let states = vec![0_u8; 3 * 2 * 4];
    let offset = 56 + (head.len() + states.len()) as u64;
    let mut sealed = b"QUANTREF".to_vec();
    sealed.extend(offset.to_le_bytes());
    sealed.extend((header.len() as u64).to_le_bytes());
    sealed.extend(blake3::hash(&header).as_bytes());
    for part in [head, states, header] {
        sealed.extend(part);
    }
    for bytes in [data, &sealed] {
        in_file("reference", bytes, |path| drop(StoredReference::open(path)));
    }
}

/// An importance matrix in either format.
///
/// # Panics
/// If a property does not hold.
pub fn imatrix(data: &[u8]) {
    let valid =
        [&1_i32.to_le_bytes()[..], &1_i32.to_le_bytes(), b"a", &3_i32.to_le_bytes(), &2_i32.to_le_bytes()];
    let valid = [valid.concat(), [1.0_f32, 2.0].iter().flat_map(|v| v.to_le_bytes()).collect()].concat();
    let mut input = Input::new(data);
    let mut changed = valid;
    for _ in 0..input.below(4) {
        let at = input.below(changed.len());
        changed[at] = input.byte();
    }
    for bytes in [data, &changed] {
        in_file("imatrix", bytes, |path| {
            let Ok(found) = Importance::read(path) else { return };
            let values = found.entries.values().flat_map(|entry| entry.sums.iter().chain(&entry.counts));
            assert!(values.into_iter().all(|value| value.is_finite() && *value >= 0.0));
        });
    }
}

/// A file of channel maxima.
///
/// # Panics
/// If a property does not hold.
pub fn channel_maxima(data: &[u8]) {
    let header = text(
        data,
        &[r#"{"q_proj":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
"k_proj":{"dtype":"BF16","shape":[4],"data_offsets":[8,16]}}"#],
    );
    let mut file = framed(&header, 0);
    file.extend(Input::new(data).bytes(16));
    for bytes in [data, &file] {
        in_file("maxima.safetensors", bytes, |path| {
            let Ok(found) = ChannelMaxima::read(path) else { return };
            let all = [("q_proj", 2), ("k_proj", 4)].map(|(linear, k)| found.of(linear, k));
            assert!(all.into_iter().flatten().flatten().all(|value| value.is_finite() && *value >= 0.0));
        });
    }
}

/// Calibration texts and conversations, one per line.
///
/// # Panics
/// If a property does not hold.
pub fn text_lines(data: &[u8]) {
    in_file("text.jsonl", &text(data, &[CHAT, TEXT]), |path| match read_corpus(path) {
        Ok(Corpus::Texts(texts)) => assert!(texts.iter().any(|text| !text.trim().is_empty())),
        Ok(Corpus::Chats(chats)) => assert!(!chats.is_empty()),
        Ok(_) | Err(_) => {}
    });
}

/// The journal of an interrupted run: a tensor counts as written only if its bytes are.
///
/// # Panics
/// If a property does not hold.
pub fn write_journal(data: &[u8]) {
    static LINES: OnceLock<String> = OnceLock::new();
    let specs = || vec![TensorSpec::new("a", Dtype::F32, [2]), TensorSpec::new("b", Dtype::U8, [3])];
    in_directory(|directory| {
        let (target, job) = (directory.join("written"), directory.join("written.job"));
        let writer = |resume| {
            CheckpointWriter::create(&target, specs(), WriteOptions { resume, ..Default::default() })
        };
        let mut first = writer(Resume::Never).expect("a new job");
        first.write("b", 0, &[1, 2, 3]).expect("it is expected");
        first.remember("b", &json!({ "loss": 0.5 })).expect("it is kept");
        first.commit().expect("the disk has room");
        drop(first);
        let journal = job.join("journal.jsonl");
        let valid = LINES.get_or_init(|| std::fs::read_to_string(&journal).expect("the journal exists"));
        let false_claim = valid.replace("\"b\"", "\"a\"");
        std::fs::write(&journal, text(data, &[valid, &false_claim])).expect("it can be written");
        let resumed = writer(Resume::Required).expect("a job that can be resumed");
        assert!(!resumed.is_complete("a"));
        if resumed.is_complete("b") {
            assert_eq!(resumed.read_back("b").expect("it can be read"), Some(vec![1, 2, 3]));
        }
        drop((resumed.recall("a"), resumed.recall("b")));
        resumed.abandon().expect("it can be removed");
    });
}
