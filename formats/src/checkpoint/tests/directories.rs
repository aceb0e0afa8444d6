//! Model directories: configuration, its fields, and accompanying files.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::json;
use tempfile::TempDir;

use super::vectors;
use crate::Error;
use crate::checkpoint::{ConfigFields, ModelDirectory};

fn model(config: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("model.safetensors"), vectors(&[("a", 3)])).unwrap();
    fs::write(dir.path().join("config.json"), config).unwrap();
    dir
}

fn config_reason(config: &str) -> String {
    match ModelDirectory::open(model(config).path()) {
        Err(Error::Config { path, reason, .. }) => {
            assert!(path.ends_with("config.json"));
            reason
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn configuration_is_one_object() {
    let dir = model(r#"{"z":1,"a":{"y":[1,2.5,null,true,"x"]},"b":-3}"#);
    let opened = ModelDirectory::open(dir.path()).unwrap();
    assert_eq!(opened.config().keys().collect::<Vec<_>>(), ["z", "a", "b"]);
    assert_eq!(opened.config()["a"], json!({ "y": [1, 2.5, null, true, "x"] }));
    assert_eq!(opened.source().names(), ["a"]);
    assert_eq!(opened.fields().require_usize("z").unwrap(), 1);

    assert!(config_reason("[]").contains("object"));
    assert!(config_reason("").contains("EOF"));
    assert!(config_reason(r#"{"a":1,"a":1}"#).contains("`a` appears twice"));
    assert!(config_reason(r#"{"x":{"a":1,"a":1}}"#).contains("`a` appears twice"));
    for literal in ["NaN", "Infinity", "1e999"] {
        assert!(!config_reason(&format!(r#"{{"a":{literal}}}"#)).is_empty());
    }
    assert!(config_reason(&format!(r#"{{"a":{}"#, "[".repeat(100_000))).contains("recursion"));
    assert!(config_reason(&" ".repeat((1 << 20) + 1)).contains("1048576"));
    let missing = model("{}");
    fs::remove_file(missing.path().join("config.json")).unwrap();
    let message = ModelDirectory::open(missing.path()).unwrap_err().to_string();
    assert!(message.contains("config.json") && message.contains("missing"), "{message}");
}

#[test]
fn sidecars_are_those_on_the_list() {
    let dir = model(r#"{"auto_map":{}}"#);
    for name in [
        "tokenizer.json",
        "merges.txt",
        "LICENSE",
        "LICENSE.txt",
        "LICENSE-APACHE-2.0",
        "NOTICE.md",
        "USE_POLICY.md",
        "LICENSE.py",
        "LICENSE.safetensors",
        "modeling_x.py",
        "README.md",
        "training_args.bin",
        "setup.sh",
    ] {
        fs::write(dir.path().join(name), "x").unwrap();
    }
    fs::create_dir(dir.path().join("vocab.json")).unwrap();
    symlink("/etc/passwd", dir.path().join("tokenizer_config.json")).unwrap();
    symlink("gone", dir.path().join("vocab.txt")).unwrap();
    let opened = ModelDirectory::open(dir.path()).unwrap();
    let names: Vec<_> = opened
        .sidecar_files()
        .iter()
        .map(|s| s.path.file_name().unwrap().to_owned().into_string().unwrap())
        .collect();
    let expected = [
        "LICENSE",
        "LICENSE-APACHE-2.0",
        "LICENSE.txt",
        "NOTICE.md",
        "USE_POLICY.md",
        "merges.txt",
        "tokenizer.json",
    ];
    assert_eq!(names, expected);
    assert_eq!(opened.tokenizer_path(), Some(dir.path().join("tokenizer.json")));
    let warnings = opened.warnings().join("\n");
    for part in ["auto_map", "vocab.json is not a regular file", "tokenizer_config.json", "vocab.txt"] {
        assert!(warnings.contains(part), "{warnings}");
    }
}

#[test]
fn placeholders_are_not_copied() {
    let dir = model("{}");
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\n";
    let placeholders = [
        ("generation_config.json", "<!DOCTYPE html>"),
        ("vocab.json", pointer),
        ("tokenizer.model", pointer),
        ("tokenizer_config.json", "<html>"),
        ("LICENSE.html", "<html>"),
    ];
    for (name, text) in placeholders {
        fs::write(dir.path().join(name), text).unwrap();
    }
    // It is checked where it is read.
    fs::write(dir.path().join("tokenizer.json"), pointer).unwrap();
    let opened = ModelDirectory::open(dir.path()).unwrap();
    let names: Vec<_> = opened.sidecar_files().iter().map(|s| s.path.file_name().unwrap()).collect();
    assert_eq!(names, ["LICENSE.html", "tokenizer.json"]);
    let warnings = opened.warnings().join("\n");
    for part in [
        "generation_config.json is an HTML page, not the file itself; it is not copied",
        "vocab.json is a Git LFS pointer, not the file itself; it is not copied",
        "tokenizer.model is a Git LFS pointer, not the file itself; it is not copied",
        "tokenizer_config.json is an HTML page, not the file itself; it is not copied",
    ] {
        assert!(warnings.contains(part), "{warnings}");
    }
}

#[test]
fn fields_name_key_and_reason() {
    let config = json!({
        "hidden_size": "4096", "layers": 1e3, "heads": -1, "vocab": 1u64 << 40, "zero": 0, "max": 1u64 << 31,
        "null": null, "eps": 1e-6, "theta": 10000, "tie": true, "act": "silu", "archs": ["A", "B"],
        "mixed": ["A", 1], "rope": { "factor": "8\u{1b}" },
    });
    let map = config.as_object().unwrap();
    let fields = ConfigFields::new(Path::new("m/config.json"), map);
    let refused = |result: crate::Result<Option<usize>>, parts: &[&str]| {
        let message = result.unwrap_err().to_string();
        assert!(parts.iter().all(|p| message.contains(p)), "{message} lacks one of {parts:?}");
        assert!(message.starts_with("m/config.json: ") && !message.chars().any(char::is_control));
    };
    refused(fields.optional_usize("hidden_size"), &["`hidden_size`", "the text \"4096\""]);
    refused(fields.optional_usize("layers"), &["`layers`", "is 1000.0"]);
    refused(fields.optional_usize("heads"), &["`heads`", "negative"]);
    refused(fields.optional_usize("vocab"), &["`vocab`", "2^31"]);
    refused(fields.optional_usize("tie"), &["`tie`", "true"]);
    refused(fields.require_usize("gone").map(Some), &["`gone`", "missing"]);
    refused(fields.require_usize("null").map(Some), &["`null`", "null"]);
    refused(fields.require_positive("zero").map(Some), &["`zero`", "0"]);
    refused(fields.optional_f64("act").map(|_| None), &["`act`", "number"]);
    refused(fields.optional_bool("zero").map(|_| None), &["`zero`", "the number 0"]);
    refused(fields.optional_str("archs").map(|_| None), &["`archs`", "a list"]);
    refused(fields.optional_str_list("mixed").map(|_| None), &["`mixed`", "the number 1"]);
    refused(fields.optional_object("act").map(|_| None), &["`act`", "object"]);
    let rope = fields.optional_object("rope").unwrap().unwrap();
    refused(rope.optional_f64("factor").map(|_| None), &["`rope.factor`", "8\\u{1b}"]);

    assert_eq!(fields.optional_usize("null").unwrap(), None);
    assert_eq!(fields.require_usize("zero").unwrap(), 0);
    assert_eq!(fields.require_usize("max").unwrap(), 1 << 31);
    assert_eq!(fields.require_f64("eps").unwrap(), 1e-6);
    assert_eq!(fields.optional_f64("theta").unwrap(), Some(10000.0));
    assert_eq!(fields.optional_bool("tie").unwrap(), Some(true));
    assert_eq!(fields.require_str("act").unwrap(), "silu");
    assert_eq!(fields.optional_str_list("archs").unwrap().unwrap(), ["A", "B"]);
}
