//! Directories of shards: indexes that do not match the files, and links that point elsewhere.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::json;
use tempfile::TempDir;

use super::vectors;
use crate::checkpoint::{HeaderError, ShardedCheckpoint, TensorSource};
use crate::{Error, Result};

const INDEX: &str = "model.safetensors.index.json";

fn put(directory: &Path, name: &str, bytes: impl AsRef<[u8]>) {
    let path = directory.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
}

fn sharded(weight_map: &serde_json::Value) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), "s1.safetensors", vectors(&[("a", 4), ("b", 6)]));
    put(dir.path(), "s2.safetensors", vectors(&[("c", 5)]));
    put(dir.path(), INDEX, json!({ "metadata": { "total_size": 15 }, "weight_map": weight_map }).to_string());
    dir
}

fn good() -> serde_json::Value {
    json!({ "a": "s1.safetensors", "b": "s1.safetensors", "c": "s2.safetensors" })
}

fn open(dir: &TempDir) -> Result<ShardedCheckpoint> {
    ShardedCheckpoint::open(dir.path())
}

fn index_reason(dir: &TempDir) -> String {
    match open(dir) {
        Err(Error::Index { path, reason }) => {
            assert!(path.ends_with(INDEX));
            assert!(!reason.chars().any(char::is_control), "{reason:?}");
            reason
        }
        other => panic!("expected an index error, got {other:?}"),
    }
}

fn index_text_reason(text: &str) -> String {
    let dir = sharded(&good());
    put(dir.path(), INDEX, text);
    index_reason(&dir)
}

#[test]
fn shards_read_as_one() {
    let checkpoint = open(&sharded(&good())).unwrap();
    assert_eq!(checkpoint.names(), ["a", "b", "c"]);
    assert_eq!(checkpoint.read("b").unwrap(), [4, 5, 6, 7, 8, 9]);
    let mut part = [0; 2];
    checkpoint.read_range("b", 3, &mut part).unwrap();
    assert_eq!(part, [7, 8]);
    assert!(matches!(checkpoint.read_range("b", 5, &mut part), Err(Error::Internal(_))));
    assert!(matches!(checkpoint.read_range("b", u64::MAX, &mut part), Err(Error::Internal(_))));
    assert!(matches!(checkpoint.read("x"), Err(Error::MissingTensor { .. })));
    assert!(checkpoint.location("c").ends_with("s2.safetensors"));
    assert!(checkpoint.warnings().is_empty(), "{:?}", checkpoint.warnings());
    assert_eq!((checkpoint.total_bytes(), checkpoint.shard_paths().count()), (15, 2));
}

#[test]
fn weight_map_names_stay_inside() {
    for (name, reason) in [
        ("../s1.safetensors", "outside"),
        ("x/../../s1.safetensors", "outside"),
        ("/etc/s1.safetensors", "absolute"),
        ("C:\\s1.safetensors", "backslash"),
        ("C:s1.safetensors", "colon"),
        ("\\\\host\\s1.safetensors", "backslash"),
        ("https://host/s1.safetensors", "colon"),
        ("s1\0.safetensors", "control"),
        ("s1\n.safetensors", "control"),
        ("", "empty"),
        ("./s1.safetensors", "plain"),
        ("x//s1.safetensors", "plain"),
        ("pytorch_model.bin", ".safetensors"),
    ] {
        let reason_given = index_reason(&sharded(&json!({ "a": name })));
        assert!(reason_given.contains(reason), "{name:?}: {reason_given}");
    }
    let long = format!("{}.safetensors", "x".repeat(5000));
    assert!(index_reason(&sharded(&json!({ "a": long }))).contains("too long"));
    let folded = json!({ "a": "s1.safetensors", "b": "S1.safetensors" });
    assert!(index_reason(&sharded(&folded)).contains("case"));
}

#[test]
fn broken_indices_are_refused() {
    assert!(index_text_reason("[]").contains("weight_map"));
    assert!(index_text_reason("{").contains("EOF"));
    assert!(index_text_reason("{}").contains("missing"));
    assert!(index_text_reason(r#"{"weight_map":{}}"#).contains("empty"));
    assert!(index_text_reason(r#"{"weight_map":[]}"#).contains("weight_map"));
    assert!(index_text_reason(r#"{"weight_map":{"a":1}}"#).contains("integer"));
    assert!(index_text_reason(r#"{"weight_map":{"a":"x.safetensors"},"weight_map":{}}"#).contains("twice"));
    let twice = r#"{"weight_map":{"a":"s1.safetensors","a":"s2.safetensors"}}"#;
    assert!(index_text_reason(twice).contains("`a` appears twice"));
    assert!(index_text_reason(r#"{"weight_map":{"\u001b":"s1.safetensors"}}"#).contains("control"));
    assert!(index_text_reason(&"[".repeat(100_000)).contains("weight_map"));
    let large = sharded(&good());
    fs::File::create(large.path().join(INDEX)).unwrap().set_len((64 << 20) + 1).unwrap();
    assert!(index_reason(&large).contains("limit"));
}

#[test]
fn index_and_shards_must_agree() {
    let mut map = good();
    map["d"] = json!("s1.safetensors");
    assert!(index_reason(&sharded(&map)).contains("`d` is not in s1.safetensors"));
    let mut map = good();
    map["c"] = json!("s1.safetensors");
    map["b"] = json!("s2.safetensors");
    let reason = index_reason(&sharded(&map));
    assert!(reason.contains("`c` is in s2.safetensors, but listed in s1.safetensors"), "{reason}");

    let dir = sharded(&good());
    put(dir.path(), "s2.safetensors", vectors(&[("c", 5), ("a", 4)]));
    assert!(index_reason(&dir).contains("tensor `a` is in both s1.safetensors and s2.safetensors"));

    let dir = sharded(&json!({ "a": "n1.safetensors", "b": "s1.safetensors", "c": "n2.safetensors" }));
    let reason = index_reason(&dir);
    assert!(reason.contains("2 of 3 shards are missing: n1.safetensors, n2.safetensors"), "{reason}");
}

#[test]
fn oddities_are_warnings() {
    let dir = sharded(&json!({ "a": "s1.safetensors", "c": "s2.safetensors" }));
    put(dir.path(), "stray.safetensors", b"");
    let checkpoint = open(&dir).unwrap();
    assert_eq!(checkpoint.names(), ["a", "c"]);
    let warnings = checkpoint.warnings().join("\n");
    for part in ["are ignored (1)", ": b", "is 15", "have 9 bytes", "stray.safetensors"] {
        assert!(warnings.contains(part), "{warnings} lacks {part}");
    }
    for (text, warns) in [("null", false), ("{}", false), (r#"{"total_size":15.0}"#, true)] {
        let map = good();
        put(dir.path(), INDEX, format!(r#"{{"metadata":{text},"weight_map":{map}}}"#));
        let warned = open(&dir).unwrap().warnings().iter().any(|w| w.contains("total_size"));
        assert_eq!(warned, warns, "{text}");
    }
}

#[test]
fn single_file_next_to_an_index() {
    let dir = sharded(&good());
    put(dir.path(), "model.safetensors", vectors(&[("a", 4), ("b", 6), ("c", 5)]));
    assert!(open(&dir).unwrap().warnings().iter().any(|w| w.contains("model.safetensors is ignored")));
    for other in [vectors(&[("a", 4), ("b", 6)]), vectors(&[("a", 4), ("b", 6), ("c", 6)])] {
        put(dir.path(), "model.safetensors", other);
        assert!(index_reason(&dir).contains("these tensors differ: c"));
    }
    let only = json!({ "a": "model.safetensors", "b": "model.safetensors" });
    let dir = sharded(&only);
    put(dir.path(), "model.safetensors", vectors(&[("a", 4), ("b", 6)]));
    assert_eq!(open(&dir).unwrap().names(), ["a", "b"]);
}

#[test]
fn directories_without_safetensors() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(open(&dir), Err(Error::NoCheckpoint { .. })));
    put(dir.path(), "pytorch_model-00001-of-00002.bin", b"");
    put(dir.path(), "x.pth", b"");
    match open(&dir) {
        Err(Error::PickleOnly { files, .. }) => assert_eq!(files.len(), 2),
        other => panic!("{other:?}"),
    }
    put(dir.path(), "adapter_model.safetensors", b"");
    match open(&dir) {
        Err(Error::NoCheckpoint { reason, .. }) => assert!(reason.contains("adapter_model.safetensors")),
        other => panic!("{other:?}"),
    }
    for (names, reason, remedy) in [
        (
            &["adapter_config.json", "adapter_model.bin"][..],
            "a LoRA adapter",
            "merge the adapter into its base model",
        ),
        (&["a.gguf", "config.json"], "only a.gguf", "give the path of the GGUF file"),
        (&["model-00001-of-00002.safetensors"], "only model-00001", "download model.safetensors.index.json"),
        (&["consolidated.safetensors"], "only consolidated", "that transformers loads"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        names.iter().for_each(|name| put(dir.path(), name, b""));
        let error = open(&dir).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
        assert!(error.remedy().to_string().contains(remedy), "{}", error.remedy());
    }
    let merged = tempfile::tempdir().unwrap();
    ["adapter_config.json", "pytorch_model.bin"].iter().for_each(|name| put(merged.path(), name, b""));
    assert!(matches!(open(&merged), Err(Error::PickleOnly { .. })));
    put(dir.path(), "model.safetensors", super::file("{}", b""));
    assert!(matches!(open(&dir), Err(Error::NoCheckpoint { .. })));
    let file = dir.path().join("x.pth");
    assert!(matches!(ShardedCheckpoint::open(&file), Err(Error::NoCheckpoint { .. })));
    assert!(matches!(ShardedCheckpoint::open(&dir.path().join("no")), Err(Error::NoCheckpoint { .. })));
}

#[test]
fn links_stay_inside_or_in_the_cache() {
    let outside = tempfile::tempdir().unwrap();
    put(outside.path(), "secret.safetensors", vectors(&[("c", 5)]));
    let dir = sharded(&good());
    let shard = dir.path().join("s2.safetensors");
    fs::remove_file(&shard).unwrap();
    symlink(outside.path().join("secret.safetensors"), &shard).unwrap();
    assert!(index_reason(&dir).contains("outside the model directory"));
    // A link may not point outside through a directory either.
    symlink(outside.path(), dir.path().join("sub")).unwrap();
    put(dir.path(), INDEX, r#"{"weight_map":{"c":"sub/secret.safetensors"}}"#);
    assert!(index_reason(&dir).contains("outside the model directory"));
    // Links within the directory are followed; loops are rejected.
    put(dir.path(), INDEX, json!({ "weight_map": good() }).to_string());
    fs::remove_file(&shard).unwrap();
    put(dir.path(), "real.safetensors", vectors(&[("c", 5)]));
    symlink("real.safetensors", &shard).unwrap();
    assert!(open(&dir).is_ok());
    fs::remove_file(&shard).unwrap();
    symlink("s2.safetensors", &shard).unwrap();
    assert!(index_reason(&dir).contains("loop of links"));
    // The index itself may not point outside either.
    let index = dir.path().join(INDEX);
    fs::remove_file(&index).unwrap();
    symlink(outside.path().join("secret.safetensors"), &index).unwrap();
    assert!(matches!(open(&dir), Err(Error::NoCheckpoint { .. })));
}

#[test]
fn hugging_face_cache_layout() {
    let cache = tempfile::tempdir().unwrap();
    let repo = cache.path().join("models--x--y");
    let snapshot = repo.join("snapshots/abc");
    fs::create_dir_all(&snapshot).unwrap();
    put(&repo, "blobs/0123", vectors(&[("a", 3)]));
    let link = snapshot.join("model.safetensors");
    symlink("../../blobs/0123", &link).unwrap();
    assert_eq!(ShardedCheckpoint::open(&snapshot).unwrap().read("a").unwrap(), [0, 1, 2]);
    symlink(&snapshot, cache.path().join("model")).unwrap();
    assert!(ShardedCheckpoint::open(&cache.path().join("model")).is_ok());

    let no_checkpoint = |part: &str| match ShardedCheckpoint::open(&snapshot) {
        Err(Error::NoCheckpoint { reason, .. }) => assert!(reason.contains(part), "{reason}"),
        other => panic!("{other:?}"),
    };
    let relink = |to: &str| {
        fs::remove_file(&link).unwrap();
        symlink(to, &link).unwrap();
    };
    relink("../../blobs/missing");
    no_checkpoint("hf download");
    put(&repo, "blobs/77.incomplete", vectors(&[("a", 3)]));
    relink("../../blobs/77.incomplete");
    no_checkpoint("hf download");
    // The blobs of other repositories, and deeper paths, are outside.
    put(cache.path(), "models--z/blobs/0123", vectors(&[("a", 3)]));
    relink("../../../models--z/blobs/0123");
    no_checkpoint("outside");
    put(&repo, "blobs/deep/0123", vectors(&[("a", 3)]));
    relink("../../blobs/deep/0123");
    no_checkpoint("outside");
    // A `blobs` directory that is itself a link is not trusted.
    fs::rename(repo.join("blobs"), cache.path().join("elsewhere")).unwrap();
    symlink(cache.path().join("elsewhere"), repo.join("blobs")).unwrap();
    relink("../../blobs/0123");
    no_checkpoint("outside");
}

#[test]
fn special_files_are_refused_without_waiting() {
    let dir = sharded(&good());
    let shard = dir.path().join("s2.safetensors");
    fs::remove_file(&shard).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &shard,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    assert!(index_reason(&dir).contains("not a regular file"));
    assert!(crate::checkpoint::input_file::open_regular(&shard, &shard).is_err());
    fs::remove_file(&shard).unwrap();
    fs::create_dir(&shard).unwrap();
    assert!(index_reason(&dir).contains("not a regular file"));
    fs::remove_dir(&shard).unwrap();
    symlink("/dev/zero", &shard).unwrap();
    assert!(index_reason(&dir).contains("outside"));
}

#[test]
fn broken_shards_name_their_file() {
    let dir = sharded(&good());
    let whole = vectors(&[("c", 5)]);
    put(dir.path(), "s2.safetensors", &whole[..whole.len() - 1]);
    match open(&dir) {
        Err(Error::Safetensors { path, source }) => {
            assert!(path.ends_with("s2.safetensors"));
            assert!(matches!(*source, HeaderError::PastEnd { tensor, .. } if tensor == "c"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_file_that_shrinks_is_an_error() {
    let dir = sharded(&good());
    let checkpoint = open(&dir).unwrap();
    let shard = fs::OpenOptions::new().write(true).open(dir.path().join("s2.safetensors")).unwrap();
    shard.set_len(shard.metadata().unwrap().len() - 2).unwrap();
    let message = checkpoint.read("c").unwrap_err().to_string();
    assert!(message.contains("s2.safetensors") && message.contains("but only 3 are left"), "{message}");
    // A shard that is deleted after opening can still be read.
    let dir = sharded(&good());
    let checkpoint = open(&dir).unwrap();
    fs::remove_file(dir.path().join("s2.safetensors")).unwrap();
    assert_eq!(checkpoint.read("c").unwrap(), [0, 1, 2, 3, 4]);
}
