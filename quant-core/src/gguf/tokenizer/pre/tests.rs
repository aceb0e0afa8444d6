use std::path::Path;

use serde_json::json;

use super::forms::{Step, steps};
use super::*;

#[test]
fn steps_have_names() {
    let form = |name: &str| Form::named(name).unwrap();
    // The steps of each name are recognized under the same name, or under another name that has the same steps.
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
        assert_eq!(
            (known.0.as_str(), known.1.as_str()),
            (found, "recognized by its pre-tokenization steps"),
            "{name}"
        );
    }
    assert!(Form::named("tekken-2").is_none());
}

#[test]
fn names_are_those_of_llama_cpp() {
    let written = hashes::HASHES.iter().map(|(name, _)| *name).chain(forms::names());
    for name in written.chain(["default", "none"]) {
        check_name(name).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    assert!(names::KNOWN.is_sorted() && names::KNOWN.len() == 90);
    for (name, near) in [("lama", "llama3"), ("Qwen2", "qwen2"), ("llama_bpe", "llama-bpe"), ("", "")] {
        let error = check_name(name).unwrap_err();
        assert_eq!(error.category(), crate::Category::Usage);
        assert_eq!(error.to_string(), format!("unknown pre-tokenizer `{name}`"));
        let remedy = error.remedy().marked().to_owned();
        let listed = "names in llama.cpp: a.x-4.0, ";
        assert!(remedy.contains(listed) && remedy.ends_with("youtu, none"), "{remedy}");
        assert!(near.is_empty() || remedy.starts_with(&format!("did you mean {near}? ")), "{remedy}");
    }
}

#[test]
fn other_spellings_and_other_steps() {
    let split = |expression: &str, behavior: &str, invert: bool| json!({ "type": "Split", "pattern": { "Regex": expression }, "behavior": behavior, "invert": invert });
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
    assert!(error.remedy().marked().contains("‹pre=NAME›") && error.remedy().marked().contains("‹pre=none›"));
}

const STARCODER_2: &[u32] = &[
    353, 736, 8886, 221, 10883, 4238, 16101, 28540, 222, 3822, 272, 246, 327, 4434, 46, 18445, 152, 46030,
    45022, 142, 13878, 327, 12585, 19884, 33773, 40920, 751, 46, 41839, 5954, 137, 271, 3822, 137, 271, 244,
    56, 244, 56, 56, 244, 56, 56, 56, 244, 56, 56, 56, 56, 244, 56, 56, 56, 56, 56, 244, 56, 56, 56, 56, 56,
    56, 244, 56, 56, 56, 56, 56, 56, 56, 244, 56, 56, 56, 56, 56, 56, 56, 56, 244, 56, 51, 56, 244, 56, 516,
    56, 244, 56, 1198, 56, 244, 14566, 246, 14566, 152, 14566, 265, 30428, 257, 14566, 261, 30428, 248,
    14566, 268, 14566, 153, 14566, 277, 30428, 247, 14566, 277, 14566, 133, 14566, 152, 14566, 251, 36570,
    247, 1037, 4995, 13379, 2924, 9515, 17823, 54, 56, 54, 57, 54, 58, 54, 11904, 47892, 20895, 16625, 13047,
    8389, 1059, 9504, 40216, 13858, 2073, 8983, 12571, 1539, 10721, 5918, 9643, 13298, 932, 31723, 31330,
    9221, 3226, 35426, 10400, 457, 4783, 2602, 349, 121, 1477, 957, 1200, 2038, 49, 349, 632, 863, 3673, 68,
    349, 82, 666, 3673, 457, 4650, 1949, 580, 49, 349, 73, 863, 2144, 1649, 35941, 68, 2726, 44, 7728, 331,
    44, 113, 81,
];

#[test]
fn published_vocabularies_have_hashes() {
    let with = |name: &str| json!({ "pre_tokenizer": Form::named(name).map(Form::json) });
    let found = |json: &Json, ids: &[u32]| find(json, ids).map(|(name, how)| format!("{name}, {how}"));
    let by_hash = Some("starcoder, recognized by its vocabulary".to_owned());
    assert_eq!(found(&with("starcoder"), STARCODER_2), by_hash);
    assert_eq!(found(&json!({ "pre_tokenizer": { "type": "Whitespace" } }), STARCODER_2), by_hash);
    // The steps of another model for the same tokens, and a vocabulary with one more token.
    assert_eq!(
        found(&with("gpt-2"), STARCODER_2),
        Some("gpt-2, recognized by its pre-tokenization steps".into())
    );
    let longer = [STARCODER_2, &[7]].concat();
    assert_eq!(
        found(&with("starcoder"), &longer),
        Some("smollm, recognized by its pre-tokenization steps".into())
    );
}
