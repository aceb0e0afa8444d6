//! `quant inspect --verify`: damaged and incomplete copies of a quantized checkpoint are detected.

use std::path::Path;

use quant_tests::files::copy_files;
use quant_tests::program::quant;
use quant_tests::refusal::check_message;
use quant_tests::{args, demo_model};
use serde_json::{Value, json};

const MANIFEST: &str = "quant_manifest.json";

fn quantized(out: &Path) {
    quant(args!["quantize", demo_model(), "-o", out, "--method", "rtn", "--quiet"]).succeeded();
}

fn refused(directory: &Path, parts: &[&str]) {
    let run = quant(args!["inspect", directory, "--verify"]);
    check_message(&parts.join(", "), &run, 4, parts);
}

#[test]
fn damaged_and_incomplete_copies_are_detected() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    quantized(&out);
    let report = quant(args!["inspect", &out, "--verify", "--json"]).json();
    assert_eq!(report["verified"]["files"], 6);
    assert_eq!(report["verified"]["unlisted"], json!([]));
    let copy = |name: &str| {
        let copy = scratch.path().join(name);
        copy_files(&out, &copy);
        copy
    };

    let flipped = copy("flipped");
    let weights = flipped.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&weights, &bytes).unwrap();
    refused(&flipped, &["model.safetensors", "SHA-256", MANIFEST]);
    quant(args!["inspect", &flipped]).succeeded();

    let longer = copy("longer");
    let card = std::fs::read_to_string(longer.join("README.md")).unwrap();
    std::fs::write(longer.join("README.md"), format!("{card}\n")).unwrap();
    refused(&longer, &["README.md", "bytes", MANIFEST]);

    let incomplete = copy("incomplete");
    std::fs::remove_file(incomplete.join("generation_config.json")).unwrap();
    refused(&incomplete, &["generation_config.json", "does not exist"]);

    let other = copy("other");
    std::fs::remove_file(other.join("README.md")).unwrap();
    std::fs::create_dir(other.join("README.md")).unwrap();
    refused(&other, &["README.md", "not a regular file"]);

    let with_more = copy("with-more");
    std::fs::write(with_more.join("notes.txt"), "mine").unwrap();
    let shown = quant(args!["inspect", &with_more, "--verify"]).succeeded();
    assert!(shown.stdout.contains("verified: 6 files"), "{}", shown.stdout);
    assert!(shown.stdout.contains("not in the manifest: notes.txt"), "{}", shown.stdout);
}

#[test]
fn manifests_are_not_trusted() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    quantized(&out);
    let path = out.join(MANIFEST);
    let original: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut manifest = original.clone();
        change(&mut manifest);
        std::fs::write(&path, manifest.to_string()).unwrap();
    };
    let changes: [&dyn Fn(&mut Value); 7] = [
        &|manifest| manifest["schema"] = json!("quant-manifest/9"),
        &|manifest| manifest["files"] = json!([]),
        &|manifest| manifest["files"] = json!("all"),
        &|manifest| manifest["files"][0]["name"] = json!("../config.json"),
        &|manifest| manifest["files"][0]["name"] = json!("/etc/hostname"),
        &|manifest| manifest["files"][0]["bytes"] = json!(u64::MAX),
        &|manifest| manifest["files"][0]["sha256"] = json!("00"),
    ];
    for change in changes {
        changed(change);
        refused(&out, &[MANIFEST]);
    }
    std::fs::write(&path, "{").unwrap();
    refused(&out, &[MANIFEST]);
    std::fs::remove_file(&path).unwrap();
    check_message("no manifest", &quant(args!["inspect", &out, "--verify"]), 2, &[MANIFEST, "written"]);
}
