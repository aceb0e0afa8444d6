//! Broken, hostile and unsupported model directories.

use std::path::Path;
use std::process::Command;

use quant_tests::models::{
    RawTensor, TinyLlama, byte_tokenizer, edit_config, safetensors, safetensors_with_header,
};
use quant_tests::program::quant;
use quant_tests::refusal::{check_message, refuses_to_quantize};
use quant_tests::{args, demo_model};
use serde_json::{Value, json};
use tempfile::TempDir;

const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const RTN: [&str; 4] = ["--method", "rtn", "--scheme", "w4a16-g32"];
const AWQ: [&str; 8] = ["--method", "awq", "--scheme", "w4a16-g32", "--samples", "2", "--seq-len", "64"];

/// A fault, and the expected message.
type Fault = (&'static str, fn(&Path), &'static [&'static str]);

fn broken(fault: fn(&Path)) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    TinyLlama::default().write(directory.path());
    fault(directory.path());
    directory
}

fn refused_by_all_commands(faults: &[Fault]) {
    for (case, fault, expected) in faults {
        let model = broken(*fault);
        refuses_to_quantize(case, model.path(), &RTN, 4, expected);
        for arguments in [
            args!["plan", model.path(), "--group-size", "32", "--json"],
            args!["inspect", model.path()],
            args!["eval", model.path(), "--text", "builtin-heldout", "--window", "64", "--windows", "1"],
            args!["bench", model.path(), "--prefill", "1", "--decode", "1", "--repeat", "1"],
        ] {
            check_message(case, &quant(arguments), 4, expected);
        }
    }
}

fn cut(model: &Path, len: usize) {
    let path = model.join(WEIGHTS);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.truncate(len);
    std::fs::write(path, bytes).unwrap();
}

fn overwrite(model: &Path, name: &str, bytes: impl AsRef<[u8]>) {
    std::fs::write(model.join(name), bytes).unwrap();
}

fn described_as(model: &Path, entry: Value, data: &[u8]) {
    let header = json!({ "model.norm.weight": entry }).to_string();
    overwrite(model, WEIGHTS, safetensors_with_header(&header, data));
}

/// Splits the model into two shards with an index.
fn shard(model: &Path, edit_map: fn(&mut serde_json::Map<String, Value>)) {
    let tensors = TinyLlama::default().tensors();
    let (first, second) = tensors.split_at(tensors.len() / 2);
    let mut map = serde_json::Map::new();
    for (name, part) in [("a.safetensors", first), ("b.safetensors", second)] {
        overwrite(model, name, safetensors(part));
        map.extend(part.iter().map(|t| (t.name.clone(), json!(name))));
    }
    edit_map(&mut map);
    overwrite(model, INDEX, json!({ "metadata": {}, "weight_map": map }).to_string());
    std::fs::remove_file(model.join(WEIGHTS)).unwrap();
}

fn fifo(path: &Path) {
    let _ = std::fs::remove_file(path);
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn weights() {
    refused_by_all_commands(&[
        (
            "no weights",
            |m| std::fs::remove_file(m.join(WEIGHTS)).unwrap(),
            &["does not contain a checkpoint", WEIGHTS],
        ),
        ("an empty file", |m| cut(m, 0), &[WEIGHTS, "has 0 bytes, too few"]),
        ("seven bytes", |m| cut(m, 7), &[WEIGHTS, "has 7 bytes, too few"]),
        ("cut within the header", |m| cut(m, 200), &[WEIGHTS, "the header length", "192"]),
        ("cut within a tensor", |m| cut(m, 60_000), &[WEIGHTS, "truncated within tensor `model.", "60000"]),
        (
            "a header longer than the file",
            |m| overwrite(m, WEIGHTS, [1_000_000u64.to_le_bytes().as_slice(), b"{}"].concat()),
            &[WEIGHTS, "the header length is 1000000 bytes, but only 2 bytes follow"],
        ),
        (
            "a Git LFS pointer",
            |m| {
                overwrite(
                    m,
                    WEIGHTS,
                    "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 27263736\n",
                )
            },
            &[WEIGHTS, "is a Git LFS pointer", "fetch the files with `git lfs pull`"],
        ),
        (
            "a page",
            |m| overwrite(m, WEIGHTS, "\n<!DOCTYPE html>\n<html><title>Sign in</title></html>\n"),
            &[WEIGHTS, "is an HTML page", "download the file again"],
        ),
        (
            "a header of 2^64 bytes",
            |m| overwrite(m, WEIGHTS, [u64::MAX.to_le_bytes().as_slice(), b"{}"].concat()),
            &[WEIGHTS, "the header length is 18446744073709551615 bytes"],
        ),
        (
            "a header that is not JSON",
            |m| overwrite(m, WEIGHTS, safetensors_with_header("{\"a\":", &[])),
            &[WEIGHTS, "not valid JSON"],
        ),
        (
            "a shape whose product overflows",
            |m| {
                let entry =
                    json!({ "dtype": "F16", "shape": [1u64 << 40, 1u64 << 40], "data_offsets": [0, 2] });
                described_as(m, entry, &[0; 2]);
            },
            &[WEIGHTS, "`model.norm.weight`", "overflows"],
        ),
        (
            "a shape larger than its bytes",
            |m| {
                let entry = json!({ "dtype": "F16", "shape": [64], "data_offsets": [0, 2] });
                described_as(m, entry, &[0; 2]);
            },
            &[WEIGHTS, "`model.norm.weight`", "takes 128 bytes", "span 2 bytes"],
        ),
        (
            "a tensor described twice",
            |m| {
                let entry = r#"{"dtype":"F16","shape":[1],"data_offsets":[0,2]}"#;
                let header = format!(r#"{{"twice":{entry},"twice":{entry}}}"#);
                overwrite(m, WEIGHTS, safetensors_with_header(&header, &[0; 2]));
            },
            &[WEIGHTS, "`twice` appears twice"],
        ),
        (
            "an unknown dtype",
            |m| {
                let mut tensors = TinyLlama::default().tensors();
                tensors[1].dtype = "F12".into();
                overwrite(m, WEIGHTS, safetensors(&tensors));
            },
            &[WEIGHTS, "`model.layers.0.self_attn.q_proj.weight`", "F12"],
        ),
        (
            "a dtype that cannot be one",
            |m| {
                described_as(m, json!({ "dtype": "F-12", "shape": [1], "data_offsets": [0, 2] }), &[0; 2]);
            },
            &[WEIGHTS, "`model.norm.weight`", "F-12"],
        ),
        (
            "a tensor that is missing",
            |m| {
                let mut tensors = TinyLlama::default().tensors();
                tensors.retain(|t| t.name != "model.layers.1.mlp.up_proj.weight");
                overwrite(m, WEIGHTS, safetensors(&tensors));
            },
            &["tensor `model.layers.1.mlp.up_proj.weight` is missing"],
        ),
        (
            "integers where floats should be",
            |m| {
                let mut tensors = TinyLlama::default().tensors();
                tensors[1].dtype = "I16".into();
                overwrite(m, WEIGHTS, safetensors(&tensors));
            },
            &[WEIGHTS, "`model.layers.0.self_attn.q_proj.weight`", "I16"],
        ),
        ("a pipe in the place of the weights", |m| fifo(&m.join(WEIGHTS)), &[WEIGHTS, "not a regular file"]),
        (
            "pickle only",
            |m| std::fs::rename(m.join(WEIGHTS), m.join("pytorch_model.bin")).unwrap(),
            &["only pickle weights", "pytorch_model.bin", "safe_serialization=True"],
        ),
    ]);
}

#[test]
fn shards() {
    refused_by_all_commands(&[
        (
            "a shard that is missing",
            |m| {
                shard(m, |_| ());
                std::fs::remove_file(m.join("b.safetensors")).unwrap();
            },
            &[INDEX, "1 of 2 shards are missing: b.safetensors"],
        ),
        (
            "all shards missing: all are listed",
            |m| {
                shard(m, |_| ());
                std::fs::remove_file(m.join("a.safetensors")).unwrap();
                std::fs::remove_file(m.join("b.safetensors")).unwrap();
            },
            &[INDEX, "2 of 2 shards are missing: a.safetensors, b.safetensors"],
        ),
        (
            "an empty shard",
            |m| {
                shard(m, |_| ());
                overwrite(m, "b.safetensors", "");
            },
            &["b.safetensors", "0 bytes"],
        ),
        (
            "a shard outside the directory",
            |m| shard(m, |map| drop(map.insert("x".into(), json!("../secret.safetensors")))),
            &[INDEX, "`weight_map`", "../secret.safetensors", "points outside the model directory"],
        ),
        (
            "an absolute shard",
            |m| shard(m, |map| drop(map.insert("x".into(), json!("/etc/x.safetensors")))),
            &[INDEX, "`weight_map`", "absolute"],
        ),
        (
            "a link out of the directory",
            |m| {
                shard(m, |_| ());
                std::fs::remove_file(m.join("b.safetensors")).unwrap();
                std::os::unix::fs::symlink(demo_model().join(WEIGHTS), m.join("b.safetensors")).unwrap();
            },
            &[INDEX, "b.safetensors", "outside the model directory"],
        ),
        (
            "a tensor that no shard holds",
            |m| shard(m, |map| drop(map.insert("x".into(), json!("a.safetensors")))),
            &[INDEX, "`x` is not in a.safetensors"],
        ),
        (
            "a tensor in two shards",
            |m| {
                shard(m, |_| ());
                overwrite(m, "a.safetensors", safetensors(&TinyLlama::default().tensors()));
            },
            &[INDEX, "a.safetensors", "b.safetensors"],
        ),
        ("an index that is not JSON", |m| overwrite(m, INDEX, "{"), &[INDEX, "line 1"]),
        (
            "a pipe in the place of a shard",
            |m| {
                shard(m, |_| ());
                fifo(&m.join("a.safetensors"));
            },
            &[INDEX, "a.safetensors", "not a regular file"],
        ),
    ]);
}

#[test]
fn configuration() {
    const CONFIG: &str = "config.json";
    refused_by_all_commands(&[
        (
            "no configuration",
            |m| std::fs::remove_file(m.join(CONFIG)).unwrap(),
            &[CONFIG, "is missing", "download config.json from where the weights come from"],
        ),
        ("not JSON", |m| overwrite(m, CONFIG, "{"), &[CONFIG, "not valid JSON"]),
        ("a page", |m| overwrite(m, CONFIG, "<html></html>"), &[CONFIG, "is an HTML page", "hf download"]),
        ("no object", |m| overwrite(m, CONFIG, "[]"), &[CONFIG, "one JSON object"]),
        ("a key twice", |m| overwrite(m, CONFIG, r#"{"a":1,"a":2}"#), &[CONFIG, "`a`"]),
        ("over 1 MiB", |m| overwrite(m, CONFIG, vec![b' '; (1 << 20) + 1]), &[CONFIG, "1048577", "1048576"]),
        ("a pipe", |m| fifo(&m.join(CONFIG)), &[CONFIG, "not a regular file"]),
        (
            "sizes that disagree with the shapes",
            |m| edit_config(m, &json!({ "intermediate_size": 128 })),
            &[WEIGHTS, "`model.layers.0.mlp.gate_proj.weight`", "[96, 64]", "[128, 64]"],
        ),
        (
            "a vocabulary that disagrees",
            |m| edit_config(m, &json!({ "vocab_size": 255 })),
            &["`model.embed_tokens.weight`", "[256, 64]", "[255, 64]"],
        ),
        (
            "more blocks than there are tensors",
            |m| edit_config(m, &json!({ "num_hidden_layers": 1u64 << 31 })),
            &[CONFIG, "`num_hidden_layers`", "2147483648"],
        ),
        (
            "more blocks than a machine word",
            |m| edit_config(m, &json!({ "num_hidden_layers": u64::MAX })),
            &[CONFIG, "`num_hidden_layers`", "18446744073709551615"],
        ),
        (
            "a vocabulary of 2^40",
            |m| edit_config(m, &json!({ "vocab_size": 1u64 << 40 })),
            &[CONFIG, "`vocab_size`", "1099511627776"],
        ),
        (
            "sizes whose product overflows",
            |m| {
                edit_config(
                    m,
                    &json!({ "num_attention_heads": 1u64 << 31, "num_key_value_heads": 1u64 << 31,
                                        "head_dim": 1u64 << 31 }),
                )
            },
            &["q_proj"],
        ),
        (
            "a number as text",
            |m| edit_config(m, &json!({ "hidden_size": "4096" })),
            &[CONFIG, "`hidden_size`", "the text \"4096\""],
        ),
        ("a float", |m| edit_config(m, &json!({ "hidden_size": 64.5 })), &[CONFIG, "`hidden_size`", "64.5"]),
        ("negative", |m| edit_config(m, &json!({ "vocab_size": -1 })), &[CONFIG, "`vocab_size`", "negative"]),
        ("zero", |m| edit_config(m, &json!({ "num_attention_heads": 0 })), &["`num_attention_heads` is 0"]),
        (
            "a field missing",
            |m| edit_config(m, &json!({ "hidden_size": null })),
            &["`hidden_size` is missing"],
        ),
        (
            "heads that do not divide",
            |m| edit_config(m, &json!({ "num_attention_heads": 3, "num_key_value_heads": 2 })),
            &["`num_key_value_heads` is 2"],
        ),
        (
            "an unknown type of RoPE scaling",
            |m| edit_config(m, &json!({ "rope_scaling": { "rope_type": "yarm", "factor": 4.0 } })),
            &[
                CONFIG,
                "`rope_scaling.rope_type` is `yarm`, which is not supported\n  did you mean yarn? supported values of \
                 `rope_scaling.rope_type`: default, linear, dynamic, llama3, yarn, longrope, proportional",
            ],
        ),
        (
            "an unknown architecture",
            |m| edit_config(m, &json!({ "architectures": ["MambaForCausalLM"] })),
            &[CONFIG, "`MambaForCausalLM`", "LlamaForCausalLM"],
        ),
        (
            "two families at once",
            |m| edit_config(m, &json!({ "model_type": "mistral" })),
            &[CONFIG, "`model_type`", "`LlamaForCausalLM`"],
        ),
        (
            "a quantization that nobody knows",
            |m| edit_config(m, &json!({ "quantization_config": { "quant_method": "mystery" } })),
            &[CONFIG, "quantization_config", "mystery"],
        ),
    ]);
}

#[test]
fn names_that_are_taken() {
    let model = broken(|m| {
        let mut tensors = TinyLlama::default().tensors();
        tensors.push(RawTensor::f16("model.layers.0.mlp.up_proj.weight_scale", &[1], [1.0]));
        TinyLlama::default().write_with(m, &tensors);
    });
    let expected = [
        "model.safetensors",
        "`model.layers.0.mlp.up_proj.weight_scale`",
        "`model.layers.0.mlp.up_proj.weight`",
    ];
    refuses_to_quantize("a name that is taken", model.path(), &RTN, 4, &expected);
    check_message("plan", &quant(args!["plan", model.path(), "--group-size", "32"]), 4, &expected);
}

/// Values that overflow are an error, not an infinite perplexity.
#[test]
fn a_perplexity_that_overflows() {
    let model = broken(|m| {
        let mut tensors = TinyLlama::default().tensors();
        let last = tensors.iter().position(|t| t.name == "model.norm.weight").unwrap();
        tensors[last] = RawTensor::f16("model.norm.weight", &[64], std::iter::repeat_n(1e4, 64));
        TinyLlama::default().write_with(m, &tensors);
    });
    let text = ["--text", "builtin-heldout", "--window", "64", "--windows", "2"];
    let run = quant(args!["eval", model.path()].into_iter().chain(text.map(Into::into)));
    check_message("overflow", &run, 6, &["nats per token"]);
}

/// A configuration that declares fewer blocks than exist would leave weights out.
#[test]
fn blocks_that_are_not_counted() {
    let model = broken(|m| edit_config(m, &json!({ "num_hidden_layers": 1 })));
    let expected = ["`num_hidden_layers` is 1", "contains `model.layers.1."];
    refuses_to_quantize("a block too many", model.path(), &RTN, 4, &expected);
    check_message("plan", &quant(args!["plan", model.path(), "--group-size", "32"]), 4, &expected);
}

/// If embedding and head are declared tied but two different ones are stored, both are used, as in other
/// implementations.
#[test]
fn tied_heads_that_differ() {
    let perplexity = |tied: bool, head: bool| {
        let model = tempfile::tempdir().unwrap();
        TinyLlama::default().write(model.path());
        edit_config(model.path(), &json!({ "tie_word_embeddings": tied }));
        if !head {
            let tied = TinyLlama { tied: true, ..TinyLlama::default() };
            let tensors = TinyLlama::default().tensors();
            let tensors: Vec<_> = tensors.into_iter().filter(|t| t.name != "lm_head.weight").collect();
            tied.write_with(model.path(), &tensors);
        }
        let text = ["--text", "builtin-heldout", "--window", "64", "--windows", "2", "--json"];
        let arguments = args!["eval", model.path()].into_iter().chain(text.map(Into::into));
        let run = quant(arguments).succeeded();
        // Only where the configuration and the file disagree.
        let warned = run.stderr.contains("`lm_head.weight` is stored and differs: the stored head is used");
        assert_eq!(warned, tied && head, "{run}");
        run.json()["perplexity"]["mean"].as_f64().unwrap()
    };
    let (stored, one) = (perplexity(false, true), perplexity(true, false));
    assert_eq!(perplexity(true, true), stored);
    assert!((one - stored).abs() > 1e-3, "{one} and {stored} are too close to distinguish");
}

#[test]
fn what_was_quantized_already() {
    let scratch = tempfile::tempdir().unwrap();
    let (model, once) = (scratch.path().join("model"), scratch.path().join("once"));
    TinyLlama::default().write(&model);
    let rtn = RTN.map(std::ffi::OsString::from);
    quant(args!["quantize", &model, "-o", &once].into_iter().chain(rtn)).succeeded();
    let expected = ["config.json is already quantized (compressed-tensors)"];
    refuses_to_quantize("already quantized", &once, &RTN, 4, &expected);
    check_message("plan", &quant(args!["plan", &once, "--group-size", "32"]), 4, &expected);
}

#[test]
fn tokenizers() {
    let faults: &[Fault] = &[
        (
            "no tokenizer",
            |m| std::fs::remove_file(m.join("tokenizer.json")).unwrap(),
            &["tokenizer.json is missing"],
        ),
        ("not JSON", |m| overwrite(m, "tokenizer.json", "{"), &["tokenizer.json", "is not a tokenizer"]),
        (
            "a Git LFS pointer",
            |m| overwrite(m, "tokenizer.json", "version https://git-lfs.github.com/spec/v1\noid sha256:00\n"),
            &["tokenizer.json", "is a Git LFS pointer"],
        ),
        ("empty", |m| overwrite(m, "tokenizer.json", ""), &["tokenizer.json", "is not a tokenizer"]),
        ("a pipe", |m| fifo(&m.join("tokenizer.json")), &["tokenizer.json"]),
        (
            "tokens outside the embedding",
            |m| TinyLlama { vocab: 100, ..TinyLlama::default() }.write(m),
            &["tokenizer.json", "the embedding has only 100 rows"],
        ),
        (
            "merges that the vocabulary lacks",
            |m| {
                let mut tokenizer = byte_tokenizer();
                tokenizer["model"]["merges"] = json!([["zz", "qq"]]);
                overwrite(m, "tokenizer.json", tokenizer.to_string());
            },
            &["tokenizer.json"],
        ),
    ];
    for (case, fault, expected) in faults {
        let model = broken(*fault);
        refuses_to_quantize(case, model.path(), &AWQ, 4, expected);
        let run = quant(args!["eval", model.path(), "--text", "builtin-heldout", "--window", "64"]);
        check_message(case, &run, 4, expected);
    }
    // A vocabulary is also checked if no text is read.
    let vocabularies: &[Fault] = &[
        (
            "two tokens of one number",
            |m| {
                let mut tokenizer = byte_tokenizer();
                tokenizer["model"]["vocab"]["a"] = json!(98);
                overwrite(m, "tokenizer.json", tokenizer.to_string());
            },
            &["tokenizer.json", "two tokens have the number 98"],
        ),
        (
            "no tokens",
            |m| {
                let mut tokenizer = byte_tokenizer();
                tokenizer["model"]["vocab"] = json!({});
                overwrite(m, "tokenizer.json", tokenizer.to_string());
            },
            &["tokenizer.json", "empty vocabulary"],
        ),
        (
            "deep",
            |m| overwrite(m, "tokenizer.json", "[".repeat(100_000)),
            &["tokenizer.json", "not a tokenizer"],
        ),
    ];
    for (case, fault, expected) in vocabularies.iter().chain(&faults[1..4]) {
        let model = broken(*fault);
        for options in [&RTN[..], &AWQ] {
            refuses_to_quantize(case, model.path(), options, 4, expected);
        }
    }
    // Rounding to nearest reads no text, so it needs no tokenizer.
    let model = broken(|m| std::fs::remove_file(m.join("tokenizer.json")).unwrap());
    let out = model.path().with_extension("out");
    let run = quant(args!["quantize", model.path(), "-o", &out].into_iter().chain(RTN.map(Into::into)));
    assert!(run.succeeded().stderr.contains("warning: the model has no tokenizer.json"));
    std::fs::remove_dir_all(out).unwrap();
}

#[test]
fn paths_without_a_model() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("file");
    std::fs::write(&file, "text").unwrap();
    let nowhere = scratch.path().join("nowhere");
    for (case, path, expected) in [
        ("a file", file.as_path(), ["file", "not a directory"]),
        ("nothing", &nowhere, ["nowhere", "does not exist"]),
    ] {
        refuses_to_quantize(case, path, &RTN, 4, &expected);
        for subcommand in ["plan", "inspect", "bench"] {
            check_message(case, &quant(args![subcommand, path]), 4, &expected);
        }
    }
}
