use std::path::Path;

use serde_json::json;

use super::forms::{Step, steps};
use super::*;

#[test]
fn steps_have_names() {
    let form = |name: &str| Form::named(name).unwrap();
    // What is read from a file of any of these names is recognized again by its steps, unless another name has the same.
    for (name, found) in [
        ("gpt-2", "gpt-2"),
        ("olmo", "gpt-2"),
        ("starcoder", "smollm"),
        ("llama-bpe", "llama-bpe"),
        ("pixtral", "llama-bpe"),
        ("glm4", "smaug-bpe"),
        ("qwen2", "qwen2"),
        ("stablelm2", "qwen2"),
        ("qwen35", "qwen35"),
        ("tekken", "tekken"),
        ("llama4", "gpt-4o"),
        ("deepseek-v3", "deepseek-v3"),
        ("deepseek-llm", "deepseek-llm"),
        ("deepseek-coder", "deepseek-coder"),
        ("seed-coder", "seed-coder"),
        ("kimi-k2", "kimi-k2"),
        ("viking", "viking"),
    ] {
        let form = form(name);
        let json = json!({
            "normalizer": form.composes.then(|| json!({ "type": "NFC" })), "pre_tokenizer": form.json(),
            "model": { "ignore_merges": form.whole },
        });
        let known = find(&json, &[1, 2]).unwrap_or_else(|| panic!("{name} is not recognized"));
        assert_eq!((known.0.as_str(), known.1.as_str()), (found, "recognized by its steps"), "{name}");
    }
    assert!(Form::named("tekken-2").is_none());
}

#[test]
fn other_spellings_and_other_steps() {
    let split = |expression: &str, behavior: &str, invert: bool| {
        json!({ "type": "Split", "pattern": { "Regex": expression }, "behavior": behavior, "invert": invert })
    };
    let whole = r"\p{N}|\s+(?!\S)|\s+";
    assert_eq!(steps(&split(whole, "Removed", true)), Some(vec![Step::Split(whole.into())]));
    assert_eq!(steps(&split("a\r\n", "Isolated", false)), Some(vec![Step::Split(r"a\r\n".into())]));
    assert_eq!(steps(&split(r"\p{N}", "Isolated", false)), Some(vec![Step::Digits]));
    assert_eq!(steps(&split(r"\p{N}", "Removed", true)), None);
    assert_eq!(steps(&split(whole, "Removed", false)), None);
    assert_eq!(steps(&json!({ "type": "ByteLevel", "add_prefix_space": true })), None);
    assert_eq!(steps(&json!({ "type": "Metaspace" })), None);
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "use_regex": true });
    let found = |normalizer: Json| find(&json!({ "normalizer": normalizer, "pre_tokenizer": bytes }), &[]);
    let sequence = |parts: Json| json!({ "type": "Sequence", "normalizers": parts });
    for (normalizer, is_found) in [
        (Json::Null, true),
        (json!({ "type": "NFC" }), true),
        (sequence(json!([])), true),
        (sequence(json!([{ "type": "NFC" }])), true),
        (json!({ "type": "Lowercase" }), false),
        (sequence(json!([{ "type": "NFC" }, { "type": "Lowercase" }])), false),
    ] {
        assert_eq!(found(normalizer.clone()).is_some(), is_found, "{normalizer}");
    }
}

#[test]
fn one_that_is_not_recognized_can_be_named() {
    assert_eq!(find(&json!({ "pre_tokenizer": { "type": "Whitespace" } }), &[1, 2]), None);
    let error = unrecognized(Path::new("tokenizer.json"));
    assert_eq!(error.category(), crate::Category::Input);
    assert!(error.remedy().contains("‹pre=NAME›") && error.remedy().contains("‹pre=none›"));
}
