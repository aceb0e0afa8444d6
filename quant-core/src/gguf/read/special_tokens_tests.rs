//! Special tokens, recommended sampling and chat templates that are read from files.

use serde_json::{Value as Json, json};

use super::tests::{Metadata, Tensors, model, read, set, tensor, texts};
use crate::checkpoint::ModelDirectory;
use crate::gguf::file::{Array, Value};

/// A model with 12 tokens, of which the last six are control tokens.
fn with_controls(entries: &[(&str, Value)]) -> (Metadata, Tensors) {
    let (mut metadata, mut tensors) = model();
    let tokens =
        ["<unk>", "<s>", "a", "b", "ab", "aba", "</s>", "<sep>", "<mask>", "<|eot_id|>", "<|eom_id|>", "<x>"];
    let mut types = vec![2, 3, 1, 1, 1, 1];
    types.resize(tokens.len(), 3);
    set(&mut metadata, "tokenizer.ggml.tokens", texts(&tokens));
    set(&mut metadata, "tokenizer.ggml.token_type", Value::Array(Array::I32(types)));
    set(&mut metadata, "tokenizer.ggml.scores", Value::Array(Array::F32(vec![0.0; tokens.len()])));
    tensors[0] = tensor("token_embd.weight", &[tokens.len(), 8], 0.0);
    for (key, value) in entries {
        set(&mut metadata, key, value.clone());
    }
    (metadata, tensors)
}

fn contents(model: &ModelDirectory, name: &str) -> String {
    let contents = model.sidecar(name).unwrap_or_else(|| panic!("no {name}")).contents.clone().unwrap();
    String::from_utf8(contents.to_vec()).unwrap()
}

fn json_of(model: &ModelDirectory, name: &str) -> Json {
    serde_json::from_str(&contents(model, name)).unwrap()
}

#[test]
fn special_tokens_become_fields_of_the_configuration() {
    let id = |name: &str, id: u32| (format!("tokenizer.ggml.{name}_token_id"), Value::U32(id));
    let fields = |ids: &[(String, Value)]| {
        let ids: Vec<(&str, Value)> = ids.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
        let (_scratch, read) = read(&with_controls(&ids));
        let read = read.unwrap();
        let generation = json_of(&read, "generation_config.json");
        for field in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            assert_eq!(read.config().get(field), generation.get(field), "{field}");
        }
        (generation, json_of(&read, "tokenizer_config.json"))
    };
    // The control tokens that end turns end texts too, whether or not the file names them.
    let named =
        [id("eos", 6), id("eot", 11), id("eom", 10), id("padding", 0), id("seperator", 7), id("mask", 8)];
    let (generation, settings) = fields(&named);
    assert_eq!(generation, json!({ "bos_token_id": 1, "eos_token_id": [6, 11, 10], "pad_token_id": 0 }));
    assert_eq!(
        settings,
        json!({
            "bos_token": "<s>", "eos_token": "</s>", "sep_token": "<sep>", "pad_token": "<unk>", "mask_token": "<mask>",
        })
    );
    assert_eq!(fields(&[id("eos", 6)]).0["eos_token_id"], json!([6, 9, 10]));
    assert_eq!(fields(&[id("eos", 9), id("eom", 9)]).0["eos_token_id"], 9);
    // IDs outside the vocabulary are left out.
    let outside = fields(&[id("eos", 12), id("eot", 6), id("eom", 6), id("mask", 99), id("padding", 4096)]);
    assert_eq!(outside.0, json!({ "bos_token_id": 1, "eos_token_id": 6 }));
    assert_eq!(outside.1.get("mask_token"), None);
    // In vocabularies with <|return|>, <|end|> ends only a part of a turn.
    for (text, expected) in [("<x>", json!([6, 9])), ("<|return|>", json!(6))] {
        let mut model = with_controls(&[("tokenizer.ggml.eos_token_id", Value::U32(6))]);
        let tokens = ["<unk>", "<s>", "a", "b", "ab", "aba", "</s>", "c", "d", "<|end|>", "e", text];
        set(&mut model.0, "tokenizer.ggml.tokens", texts(&tokens));
        let (_scratch, read) = read(&model);
        assert_eq!(read.unwrap().config()["eos_token_id"], expected, "{text}");
    }
    // Without token types, or with a tokenizer that is not supported, only stated IDs are known.
    let mut other = with_controls(&[("tokenizer.ggml.model", Value::string("other"))]);
    other.0.retain(|(key, _)| key != "tokenizer.ggml.token_type");
    let (_scratch, read) = read(&other);
    let read = read.unwrap();
    assert_eq!(json_of(&read, "generation_config.json"), json!({ "bos_token_id": 1 }));
    assert!(read.unread_tokenizer().is_some());
}

#[test]
fn recommended_sampling_is_used_within_its_range() {
    let generation = |values: &[(&str, Value)]| {
        let entries = values.iter().map(|(key, value)| (format!("general.sampling.{key}"), value.clone()));
        let mut model = model();
        entries.for_each(|(key, value)| set(&mut model.0, &key, value));
        let (_scratch, read) = read(&model);
        let read = read.unwrap();
        crate::generate::GenerationSettings::open(&read).unwrap();
        json_of(&read, "generation_config.json")
    };
    let all = [
        ("temp", Value::F32(0.6)),
        ("top_k", Value::I32(20)),
        ("top_p", Value::F32(0.95)),
        ("min_p", Value::F32(0.0)),
        ("penalty_repeat", Value::F32(1.05)),
        ("mirostat", Value::I32(1)),
    ];
    assert_eq!(
        generation(&all),
        json!({
            "bos_token_id": 1, "do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0,
            "repetition_penalty": 1.05,
        })
    );
    let unfit = [
        ("temp", Value::F32(0.0)),
        ("top_k", Value::I32(-1)),
        ("top_p", Value::F32(7.0)),
        ("min_p", Value::F32(f32::NAN)),
        ("penalty_repeat", Value::string("x")),
    ];
    assert_eq!(generation(&unfit), json!({ "bos_token_id": 1, "do_sample": false }));
}

#[test]
fn chat_templates_with_names_are_kept() {
    let default = ("tokenizer.chat_template", Value::string("{{ 1 }}"));
    let named = [
        ("tokenizer.chat_templates", texts(&["tool_use", "rag"])),
        ("tokenizer.chat_template.tool_use", Value::string("{{ 2 }}")),
        ("tokenizer.chat_template.rag", Value::string("{{ 3 }}")),
    ];
    let (_scratch, single) = read(&with_controls(std::slice::from_ref(&default)));
    let single = single.unwrap();
    assert_eq!(contents(&single, "chat_template.jinja"), "{{ 1 }}");
    assert_eq!(json_of(&single, "tokenizer_config.json").get("chat_template"), None);
    let tools = json!({ "name": "tool_use", "template": "{{ 2 }}" });
    let rag = json!({ "name": "rag", "template": "{{ 3 }}" });
    let all = [std::slice::from_ref(&default), &named].concat();
    let first = json!({ "name": "default", "template": "{{ 1 }}" });
    for (entries, expected) in
        [(&all[..], vec![first, tools.clone(), rag.clone()]), (&named, vec![tools, rag])]
    {
        let (_scratch, several) = read(&with_controls(entries));
        let several = several.unwrap();
        assert!(several.sidecar("chat_template.jinja").is_none());
        assert_eq!(json_of(&several, "tokenizer_config.json")["chat_template"], json!(expected));
    }
}
