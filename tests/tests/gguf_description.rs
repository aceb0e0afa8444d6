//! What the metadata of a GGUF file say about the model.

use std::ffi::OsString;
use std::path::Path;

use quant_core::gguf::{GgufFile, Value};
use quant_tests::args;
use quant_tests::models::write_cut_demo_model;
use quant_tests::program::{Run, quant};
use quant_tests::refusal::check_message;
use serde_json::{Value as Json, json};

fn quantize(model: &Path, out: &Path, options: &[&str]) -> Run {
    let arguments = args!["quantize", model, "-o", out, "--format", "gguf"];
    quant(arguments.into_iter().chain(options.iter().map(OsString::from)))
}

/// What people wrote about a model is copied from file to file: its name, license and recommended sampling.
#[test]
fn a_file_from_a_file_keeps_its_description() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("The model");
    write_cut_demo_model(&model, 1);
    let sampling = json!({ "do_sample": true, "temperature": 0.6, "top_k": 20, "min_p": 0.05 });
    std::fs::write(model.join("generation_config.json"), sampling.to_string()).unwrap();
    quantize(&model, &at("first.gguf"), &["--scheme", "f16"]).succeeded();
    // Entries are inserted before the first one. Their size keeps the tensors aligned.
    let mut bytes = std::fs::read(at("first.gguf")).unwrap();
    let mut inserted = Vec::new();
    for (key, text) in [("general.license", "apache-2.0"), ("general.quantized_by", "somebody else")] {
        let padded = text.len() + (64 - (8 + key.len() + 4 + 8 + text.len()) % 64) % 64;
        inserted.extend((key.len() as u64).to_le_bytes());
        inserted.extend(key.bytes());
        inserted.extend(8_u32.to_le_bytes());
        inserted.extend((padded as u64).to_le_bytes());
        inserted.extend(format!("{text:padded$}").bytes());
    }
    bytes[16] += 2;
    bytes.splice(24..24, inserted);
    std::fs::write(at("second.gguf"), bytes).unwrap();
    quantize(&at("second.gguf"), &at("third.gguf"), &["--scheme", "q8_0"]).succeeded();
    let again = ["--scheme", "q4_k_m", "--requantize"];
    quantize(&at("third.gguf"), &at("fourth.gguf"), &again).succeeded();
    let described = |name: &str| {
        let file = GgufFile::open(&at(name)).unwrap();
        let is_kept = |key: &str| ["general.name", "general.license"].contains(&key);
        let mut all = file.header().metadata.clone();
        all.retain(|(key, _)| is_kept(key) || key.starts_with("general.sampling."));
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        let is_attributed = file.header().get("general.quantized_by").is_some();
        (all, is_attributed)
    };
    let (second, is_attributed) = described("second.gguf");
    assert_eq!((second.len(), is_attributed), (5, true), "{second:?}");
    assert!(second.contains(&("general.name".to_owned(), Value::string("The model"))), "{second:?}");
    for name in ["third.gguf", "fourth.gguf"] {
        let (all, is_attributed) = described(name);
        assert_eq!((&all, is_attributed), (&second, false), "{name}");
    }
}

/// No reader accepts a file whose tokenizer adds a token that does not exist.
#[test]
fn a_tokenizer_that_adds_an_unknown_token_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let (model, out) = (scratch.path().join("model"), scratch.path().join("out.gguf"));
    write_cut_demo_model(&model, 1);
    let path = model.join("tokenizer.json");
    let intact: Json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let text = json!({ "Sequence": { "id": "A", "type_id": 0 } });
    let other = json!({ "Sequence": { "id": "B", "type_id": 0 } });
    let added = json!({ "SpecialToken": { "id": "<x>", "type_id": 0 } });
    for single in [[&added, &text], [&text, &added]] {
        let mut tokenizer = intact.clone();
        tokenizer["post_processor"] = json!({
            "type": "TemplateProcessing", "single": single, "pair": [text, other],
            "special_tokens": { "<x>": { "id": "<x>", "ids": [70_000], "tokens": ["<x>"] } },
        });
        std::fs::write(&path, tokenizer.to_string()).unwrap();
        let run = quantize(&model, &out, &["--scheme", "f16"]);
        check_message(
            "an unknown token",
            &run,
            4,
            &["tokenizer.json", "adds the token 70000", "4096 tokens"],
        );
        assert!(!out.exists());
    }
}
