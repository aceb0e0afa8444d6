//! `quant inspect --verify`: damaged and incomplete copies of a quantized checkpoint are detected.

use std::path::Path;

use quant_tests::files::copy_files;
use quant_tests::program::quant;
use quant_tests::refusal::check_message;
use quant_tests::{args, demo_model};
use serde_json::{Value, json};
use sha1::{Digest, Sha1};

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
    assert!(shown.stdout.contains("not compared: notes.txt"), "{}", shown.stdout);
}

/// A GGUF file that is not in a directory of its own has no manifest.
#[test]
fn a_single_gguf_file_has_no_manifest() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("model.gguf");
    quant(args!["quantize", demo_model(), "-o", &file, "--scheme", "Q8_0", "--quiet"]).succeeded();
    let run = quant(args!["inspect", &file, "--verify"]);
    check_message("a file", &run, 2, &["model.gguf` has no quant_manifest.json"]);
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

/// Large files are named by their SHA-256 in the cache of a hub, and small ones by git's hash.
#[test]
fn cached_files_are_compared_with_the_names_of_their_blobs() {
    let scratch = tempfile::tempdir().unwrap();
    let (blobs, snapshot) = (scratch.path().join("blobs"), scratch.path().join("snapshots/0123"));
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::create_dir_all(&snapshot).unwrap();
    let mut names = Vec::new();
    for entry in std::fs::read_dir(demo_model()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let content = std::fs::read(&path).unwrap();
        let blob = match name.ends_with(".safetensors") {
            true => quant_core::digest::sha256_hex(&content),
            false => {
                let mut hash = Sha1::new();
                hash.update(format!("blob {}\0", content.len()));
                hash.update(&content);
                quant_core::digest::hex(&hash.finalize())
            }
        };
        std::fs::write(blobs.join(&blob), content).unwrap();
        std::os::unix::fs::symlink(format!("../../blobs/{blob}"), snapshot.join(&name)).unwrap();
        names.push((name, blobs.join(blob)));
    }
    let shown = quant(args!["inspect", &snapshot, "--verify"]).succeeded();
    let line = format!("verified: {} files", names.len());
    assert!(shown.stdout.contains(&line) && shown.stdout.contains("the names of their blobs"), "{shown}");
    for (name, blob) in &names {
        let content = std::fs::read(blob).unwrap();
        // A change that leaves the model readable.
        let mut changed = content.clone();
        match name.ends_with(".safetensors") {
            true => *changed.last_mut().unwrap() ^= 1,
            false => changed.push(b'\n'),
        }
        std::fs::write(blob, changed).unwrap();
        refused(&snapshot, &[name, "is damaged: it has the", blob.file_name().unwrap().to_str().unwrap()]);
        std::fs::write(blob, content).unwrap();
    }
    // A file that is not in the cache has no hash.
    std::fs::write(snapshot.join("notes.txt"), "mine").unwrap();
    let shown = quant(args!["inspect", &snapshot, "--verify"]).succeeded();
    assert!(shown.stdout.contains("not compared: notes.txt"), "{shown}");
}

/// Shards and tensors that the index does not list are only a warning, unless the files are to be verified.
#[test]
fn weights_that_the_index_does_not_list() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("out");
    quantized(&model);
    let stray = model.join("stray.safetensors");
    std::fs::copy(model.join("model.safetensors"), &stray).unwrap();
    let shown = quant(args!["inspect", &model]).succeeded();
    assert!(shown.stderr.contains("warning: ") && shown.stderr.contains("stray.safetensors"), "{shown}");
    refused(&model, &["do not agree with the index", "stray.safetensors"]);
    std::fs::remove_file(stray).unwrap();
    quant(args!["inspect", &model, "--verify"]).succeeded();
}
