//! Models and texts from a hub, tested against a local server, without the network.

mod server;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use quant_tests::args;
use quant_tests::files::{copy_files, hashes, sha256, snapshot};
use quant_tests::models::{RawTensor, TinyLlama, safetensors};
use quant_tests::program::{Run, Running, Signal};
use quant_tests::refusal::check_message;
use serde_json::{Value, json};
use server::{Fault, Hub, Repository};
use tempfile::TempDir;

const WEIGHTS: &str = "model.safetensors";
const MODEL: &str = "models/org/tiny";

struct User {
    scratch: TempDir,
}

impl User {
    fn new() -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let model = scratch.path().join("model");
        TinyLlama::default().write(&model);
        std::fs::write(model.join("LICENSE"), "as you like").unwrap();
        Self { scratch }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// The model's repository, with additional files.
    fn repository(&self) -> Repository {
        let mut repository = Repository::of(&self.at("model"));
        repository.put("README.md", "a model");
        repository.put("modeling_tiny.py", "import os");
        repository.put("pytorch_model.bin", "pickle");
        repository.put("onnx/tokenizer.json", "{}");
        repository
    }

    fn command(&self, endpoint: &str, arguments: Vec<OsString>) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quant"));
        command.args(arguments).stdin(Stdio::null()).current_dir(self.scratch.path());
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            let upper = name.to_ascii_uppercase();
            if ["HF_", "HUGGINGFACE_", "XDG_"].iter().any(|p| upper.starts_with(p))
                || upper.ends_with("_PROXY")
            {
                command.env_remove(name);
            }
        }
        command.env_remove("QUANT_LOG").env("RUST_BACKTRACE", "0").env("HOME", self.scratch.path());
        command.env("HF_HOME", self.at("home")).env("HF_ENDPOINT", endpoint);
        command
    }

    #[track_caller]
    fn run(&self, hub: &Hub, arguments: Vec<OsString>) -> Run {
        Running::start(self.command(&hub.endpoint(), arguments)).wait()
    }

    #[track_caller]
    fn run_offline(&self, arguments: Vec<OsString>) -> Run {
        let mut command = self.command("http://127.0.0.1:1", arguments);
        command.env("HF_HUB_OFFLINE", "1");
        Running::start(command).wait()
    }

    fn cache(&self) -> PathBuf {
        self.at("home/hub/models--org--tiny")
    }

    fn cached(&self) -> Vec<String> {
        let all = snapshot(&self.at("home")).into_iter().filter(|(_, bytes)| bytes.is_some());
        all.map(|(name, _)| name).filter(|n| n.contains("/snapshots/")).map(|n| last(&n).to_owned()).collect()
    }

    fn expected(&self) -> BTreeMap<String, String> {
        let out = self.at("expected");
        let _ = std::fs::remove_dir_all(&out);
        Running::start(self.command("http://127.0.0.1:1", quantize("model", &out))).wait().succeeded();
        hashes(&out)
    }
}

fn last(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn quantize(model: impl Into<OsString>, out: &Path) -> Vec<OsString> {
    args!["quantize", model.into(), "-o", out, "--method", "rtn", "--group-size", "32"]
}

fn inspect(model: &str) -> Vec<OsString> {
    args!["inspect", model, "--json"]
}

fn downloads(requests: &[String]) -> Vec<String> {
    let gets = requests.iter().filter_map(|r| r.strip_prefix("GET "));
    gets.filter(|r| r.contains("/resolve/")).map(|r| last(r).to_owned()).collect()
}

#[test]
fn a_named_model_becomes_the_same_bytes_as_its_directory() {
    let user = User::new();
    let hub = Hub::start([(MODEL, user.repository())]);
    let run = user.run(&hub, quantize("org/tiny", &user.at("out"))).succeeded();
    assert_eq!(hashes(&user.at("out")), user.expected());
    assert!(user.at("out/LICENSE").is_file());
    for file in ["config.json", WEIGHTS, "tokenizer.json", "generation_config.json", "LICENSE"] {
        assert!(run.stderr.contains(&format!("downloading {file} from org/tiny")), "{run}");
    }
    assert!(run.stderr.contains("(1 of 5, "), "{run}");
    let mut fetched = downloads(&hub.requests());
    fetched.sort();
    assert_eq!(fetched, ["LICENSE", "config.json", "generation_config.json", WEIGHTS, "tokenizer.json"]);

    let run = user.run(&hub, quantize("org/tiny", &user.at("again"))).succeeded();
    assert_eq!(hashes(&user.at("again")), user.expected());
    assert_eq!(downloads(&hub.requests()), [""; 0]);
    assert!(!run.stderr.contains("downloading"), "{run}");

    drop(hub);
    user.run_offline(quantize("org/tiny", &user.at("offline"))).succeeded();
    assert_eq!(hashes(&user.at("offline")), user.expected());
    user.run_offline(args!["plan", "org/tiny@main", "--group-size", "32"]).succeeded();
    let evaluate = args![
        "eval",
        "org/tiny",
        "--reference",
        "org/tiny",
        "--text",
        "model/tokenizer.json",
        "--window",
        "64",
        "--windows",
        "2",
        "--json"
    ];
    let report = user.run_offline(evaluate).json();
    assert_eq!(report["comparison"]["kl"]["mean"], 0.0, "{report}");
    user.run_offline(args!["bench", "org/tiny", "--prefill", "4", "--decode", "1", "--repeat", "1"])
        .succeeded();
    let mut command = user.command("http://127.0.0.1:1", inspect("org/tiny"));
    command
        .env("HF_HUB_OFFLINE", "true")
        .env("HF_HUB_CACHE", user.at("home/hub"))
        .env("HF_HOME", "/nonexistent");
    Running::start(command).wait().succeeded();
    // If the server cannot be reached and offline mode is not set, a cached commit is not used, because it may be
    // stale.
    let mut command = user.command("http://127.0.0.1:1", inspect("org/tiny"));
    command.env("HF_HUB_OFFLINE", "0");
    let run = Running::start(command).wait();
    check_message(
        "no server",
        &run,
        5,
        &["org/tiny", "http://127.0.0.1:1 cannot be reached", "HF_HUB_OFFLINE=1"],
    );
}

#[test]
fn shards_are_those_of_the_index_at_the_revision() {
    let user = User::new();
    let tensors = TinyLlama::default().tensors();
    let mut repository = user.repository();
    repository.take(WEIGHTS);
    let mut map = serde_json::Map::new();
    for (shard, part) in ["one.safetensors", "two.safetensors"].into_iter().zip(tensors.chunks(12)) {
        map.extend(part.iter().map(|t: &RawTensor| (t.name.clone(), json!(shard))));
        repository.put(shard, safetensors(part));
    }
    assert_eq!(map.len(), tensors.len());
    repository.put("model.safetensors.index.json", json!({ "weight_map": map }).to_string());
    repository.put("consolidated.safetensors", "the same again");
    repository.tag = Some("v1.0".into());
    repository.silent = true;
    let hub = Hub::start([(MODEL, repository)]);
    user.run(&hub, quantize("org/tiny@v1.0", &user.at("out"))).succeeded();
    let weights = |files: BTreeMap<String, String>| files.get(WEIGHTS).cloned();
    assert_eq!(weights(hashes(&user.at("out"))), weights(user.expected()));
    let fetched = downloads(&hub.requests());
    assert!(
        fetched.contains(&"two.safetensors".into()) && !fetched.contains(&"consolidated.safetensors".into())
    );
    // The branch was never requested, so it is unknown offline; the commit is known.
    let commit = std::fs::read_to_string(user.cache().join("refs/v1.0")).unwrap();
    user.run_offline(inspect("org/tiny@v1.0")).succeeded();
    user.run_offline(inspect(&format!("org/tiny@{commit}"))).succeeded();
    let run = user.run_offline(inspect("org/tiny"));
    check_message("another revision", &run, 5, &["org/tiny (revision main)", "HF_HUB_OFFLINE is set"]);
    std::fs::remove_file(user.cache().join(format!("snapshots/{commit}/two.safetensors"))).unwrap();
    let run = user.run_offline(inspect("org/tiny@v1.0"));
    check_message("a shard is missing", &run, 5, &["two.safetensors", "org/tiny", "HF_HUB_OFFLINE is set"]);
}

#[test]
fn a_broken_connection_is_tried_again_and_what_is_complete_is_kept() {
    let user = User::new();
    let hub = Hub::start([(MODEL, user.repository())]);
    hub.set_fault(WEIGHTS, Some(Fault::Break(1)));
    let run = user.run(&hub, quantize("org/tiny", &user.at("out"))).succeeded();
    assert!(run.stderr.contains("warning: the download of model.safetensors was interrupted"), "{run}");
    assert_eq!(hashes(&user.at("out")), user.expected());

    let user = User::new();
    hub.requests();
    hub.set_fault(WEIGHTS, Some(Fault::Break(100)));
    let run = user.run(&hub, quantize("org/tiny", &user.at("out")));
    check_message("broken for good", &run, 5, &[WEIGHTS, "org/tiny", "run the same command again"]);
    assert_eq!(downloads(&hub.requests()).iter().filter(|f| *f == WEIGHTS).count(), 3);
    assert!(!user.at("out").exists() && !user.cached().contains(&WEIGHTS.to_owned()));
    let run = user.run_offline(inspect("org/tiny"));
    check_message("not whole", &run, 5, &["org/tiny", "HF_HUB_OFFLINE is set"]);

    hub.set_fault(WEIGHTS, None);
    user.run(&hub, quantize("org/tiny", &user.at("out"))).succeeded();
    assert_eq!(downloads(&hub.requests()), [WEIGHTS]);
    assert_eq!(hashes(&user.at("out")), user.expected());
}

#[test]
fn what_is_not_what_was_announced_is_refused_and_removed() {
    for (file, silent, fault, phrase) in [
        (WEIGHTS, false, Fault::Bend, "SHA-256"),
        (WEIGHTS, true, Fault::Bend, "SHA-256"),
        ("config.json", false, Fault::Bend, "git hash"),
        // hf-hub ignores the status here and treats the error response as the file's content.
        (WEIGHTS, false, Fault::Refuse, "bytes"),
    ] {
        let user = User::new();
        let mut repository = user.repository();
        repository.silent = silent;
        let hub = Hub::start([(MODEL, repository)]);
        hub.set_fault(file, Some(fault));
        let run = user.run(&hub, inspect("org/tiny"));
        check_message(
            file,
            &run,
            5,
            &[file, "org/tiny", "the hub announced", phrase, "removed from the cache"],
        );
        assert!(!user.cached().contains(&file.to_owned()), "{run}");
        hub.set_fault(file, None);
        user.run(&hub, inspect("org/tiny")).succeeded();
    }
}

#[test]
fn a_cache_that_was_damaged_since_is_noticed() {
    let user = User::new();
    let hub = Hub::start([(MODEL, user.repository())]);
    user.run(&hub, inspect("org/tiny")).succeeded();
    let weights = std::fs::read(user.at("model").join(WEIGHTS)).unwrap();
    let blob = user.cache().join("blobs").join(sha256(&weights));
    let mut bent = weights.clone();
    bent[weights.len() - 1] ^= 1;
    std::fs::write(&blob, &bent).unwrap();
    let run = user.run_offline(inspect("org/tiny"));
    check_message("damaged", &run, 5, &[WEIGHTS, &sha256(&weights), &sha256(&bent)]);
    assert!(!blob.exists());
    user.run(&hub, inspect("org/tiny")).succeeded();
    assert_eq!(std::fs::read(&blob).unwrap(), weights);
}

#[test]
fn closed_repositories_ask_for_a_token() {
    let user = User::new();
    let mut repository = user.repository();
    repository.token = Some("hf_secret".into());
    let hub = Hub::start([(MODEL, repository)]);
    let run = user.run(&hub, inspect("org/tiny"));
    let phrase = ["org/tiny", "401", "Access to this repository is restricted", "HF_TOKEN", "licence"];
    check_message("no token", &run, 5, &phrase);
    let with = |name: &str, value: &str| {
        let mut command = user.command(&hub.endpoint(), inspect("org/tiny"));
        command.env(name, value);
        Running::start(command).wait()
    };
    let run = with("HF_TOKEN", "hf_wrong");
    check_message("wrong token", &run, 5, &phrase);
    assert!(!run.stderr.contains("hf_wrong"), "{run}");
    std::fs::write(user.at("token"), "hf_secret\n").unwrap();
    with("HF_TOKEN_PATH", user.at("token").to_str().unwrap()).succeeded();
    std::fs::remove_dir_all(user.at("home")).unwrap();
    with("HF_TOKEN", "hf_secret").succeeded();
}

#[test]
fn what_is_not_there_is_named() {
    let user = User::new();
    let hub = Hub::start([(MODEL, user.repository())]);
    for (model, phrase) in [
        ("org/other", ["org/other", "no such repository"]),
        ("org/tiny@v9", ["org/tiny (revision v9)", "no such branch, tag or commit"]),
    ] {
        check_message(model, &user.run(&hub, inspect(model)), 5, &phrase);
    }
    hub.change(MODEL, |r| drop(r.take("config.json")));
    let run = user.run(&hub, inspect("org/tiny"));
    check_message("no configuration", &run, 5, &["config.json", "org/tiny", "does not contain this file"]);
    hub.change(MODEL, |r| drop(r.take(WEIGHTS)));
    let run = user.run(&hub, inspect("org/tiny"));
    check_message("pickle", &run, 4, &["org/tiny", "only pickle weights (pytorch_model.bin)"]);
    assert_eq!(downloads(&hub.requests()), [""; 0]);
    let run = user.run_offline(inspect("org/never"));
    check_message("never fetched", &run, 5, &["org/never", "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"]);
    let run = Running::start(user.command("no address", inspect("org/tiny"))).wait();
    check_message("no address", &run, 5, &["no address is not a URL", "HF_ENDPOINT"]);
    std::fs::create_dir(user.at("out")).unwrap();
    let run = user.run(&hub, quantize("org/tiny", &user.at("out")));
    check_message("output exists", &run, 2, &["out exists already"]);
    assert_eq!(hub.requests(), [""; 0]);
}

#[test]
fn a_local_directory_is_never_searched_on_the_hub() {
    let user = User::new();
    copy_files(&user.at("model"), &user.at("org/tiny"));
    let hub = Hub::start([(MODEL, user.repository())]);
    user.run(&hub, inspect("org/tiny")).succeeded();
    assert_eq!(hub.requests(), [""; 0]);
    // No client is created: its creation would fail because of this address.
    Running::start(user.command("no address", quantize("org/tiny", &user.at("out")))).wait().succeeded();
    assert_eq!(hashes(&user.at("out")), user.expected());
    assert!(!user.at("home").exists());
    let run = user.run(&hub, inspect("./org/none"));
    check_message("a path", &run, 4, &["./org/none", "does not exist"]);
    assert_eq!(hub.requests(), [""; 0]);
}

#[test]
fn a_silent_server_times_out_and_a_download_can_be_cancelled() {
    let user = User::new();
    let hub = Hub::start([(MODEL, user.repository())]);
    hub.set_fault(WEIGHTS, Some(Fault::Stall));
    let mut command = user.command(&hub.endpoint(), inspect("org/tiny"));
    command.env("HF_HUB_DOWNLOAD_TIMEOUT", "1");
    let run = Running::start(command).wait();
    check_message("silent", &run, 5, &[WEIGHTS, "org/tiny", "no data from", "for 1 s"]);

    let mut running = Running::start(user.command(&hub.endpoint(), inspect("org/tiny")));
    hub.requests();
    assert!(running.wait_until(|| downloads(&hub.requests()).contains(&WEIGHTS.to_owned())));
    let asked = Instant::now();
    running.signal(Signal::INT);
    check_message("interrupted", &running.wait(), 75, &["interrupted"]);
    assert!(asked.elapsed() < Duration::from_secs(20), "far below the server's delay");
    assert!(!user.cached().contains(&WEIGHTS.to_owned()));
    hub.set_fault(WEIGHTS, None);
    user.run(&hub, inspect("org/tiny")).succeeded();
}

/// Rows of text in WikiText's form, with empty ones among them.
fn rows() -> Vec<String> {
    let row = |i: usize| match i % 3 {
        0 => String::new(),
        1 => format!(" = Chapter {i} = \n"),
        _ => format!(" It rained on day {i}, and the river rose by {} inches. \n", i % 7),
    };
    (0..120).map(row).collect()
}

fn json_lines(rows: &[String]) -> String {
    rows.iter().map(|r| json!({ "text": r, "meta": { "n": r.len() } }).to_string() + "\n").collect()
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

fn zstd(text: &str) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(text.as_bytes(), ruzstd::encoding::CompressionLevel::Fastest)
}

fn parquet(rows: &[String]) -> Vec<u8> {
    let schema = parse_message_type("message schema { OPTIONAL BYTE_ARRAY text (UTF8); }").unwrap();
    let mut file = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut file, Arc::new(schema), Arc::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let values: Vec<ByteArray> = rows.iter().map(|r| ByteArray::from(r.as_str())).collect();
    column.typed::<ByteArrayType>().write_batch(&values, Some(&vec![1; rows.len()]), None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    file
}

const C4: &str = "en/c4-train.00000-of-01024.json.gz";

fn public_sets() -> Hub {
    let set =
        |file: &str, bytes| Repository::new([(file.to_owned(), bytes), ("README.md".into(), b"x".to_vec())]);
    Hub::start([
        ("datasets/mit-han-lab/pile-val-backup", set("val.jsonl.zst", zstd(&json_lines(&rows())))),
        ("datasets/allenai/c4", set(C4, gzip(&json_lines(&rows())))),
        (
            "datasets/Salesforce/wikitext",
            set("wikitext-2-raw-v1/test-00000-of-00001.parquet", parquet(&rows())),
        ),
    ])
}

#[test]
fn public_sets_are_fetched_and_unpacked() {
    let user = User::new();
    let hub = public_sets();
    // The published convention for WikiText-2: rows joined by two newlines, including empty rows.
    let joined = rows().join("\n\n");
    let local = user.at("text.jsonl");
    std::fs::write(&local, json_lines(&rows())).unwrap();
    let evaluate =
        |text: OsString| args!["eval", "model", "--text", text, "--window", "64", "--windows", "2", "--json"];
    let result = |run: Run| -> Value {
        let report = run.json();
        assert_eq!(report["text"]["sha256"], json!(sha256(joined.as_bytes())), "{report}");
        report["perplexity"].clone()
    };
    let expected = result(user.run(&hub, evaluate(local.clone().into())));
    let quantize = |text: OsString, out: &str| {
        let mut arguments = args!["quantize", "model", "-o", user.at(out), "--group-size", "32"];
        arguments.extend(args!["--calibration", text, "--samples", "2", "--seq-len", "64"]);
        arguments
    };
    user.run(&hub, quantize(local.into(), "expected-awq")).succeeded();
    let weights = |out: &str| hashes(&user.at(out))[WEIGHTS].clone();
    for set in ["pile-val", "c4", "wikitext-2"] {
        assert_eq!(result(user.run(&hub, evaluate(set.into()))), expected, "{set}");
        let out = format!("{set}-awq");
        user.run(&hub, quantize(set.into(), &out)).succeeded();
        assert_eq!(weights(&out), weights("expected-awq"), "{set}");
    }
    let fetched = downloads(&hub.requests());
    assert_eq!(fetched, ["val.jsonl.zst", last(C4), "test-00000-of-00001.parquet"]);
    drop(hub);
    assert_eq!(result(user.run_offline(evaluate("c4".into()))), expected);

    let other = User::new();
    let run = other.run_offline(evaluate("c4".into()));
    check_message("not cached", &run, 5, &[C4, "allenai/c4", "HF_HUB_OFFLINE is set"]);
}

#[test]
fn a_public_set_that_changed_is_refused() {
    let user = User::new();
    let hub = public_sets();
    let evaluate = || args!["eval", "model", "--text", "c4", "--window", "64", "--windows", "2"];
    user.run(&hub, evaluate()).succeeded();
    let (before, after) = (gzip(&json_lines(&rows())), gzip(&json_lines(&rows()[1..])));
    hub.change("datasets/allenai/c4", |r| r.put(C4, after.clone()));
    let run = user.run(&hub, evaluate());
    let record = user.at("home/hub/datasets--allenai--c4/.quant/sha256sums");
    let phrase = [C4, "allenai/c4", &sha256(&before), &sha256(&after), record.to_str().unwrap()];
    check_message("changed", &run, 5, &phrase);
    assert_eq!(std::fs::read_to_string(&record).unwrap(), format!("{}  {C4}\n", sha256(&before)));
    std::fs::remove_file(&record).unwrap();
    user.run(&hub, evaluate()).succeeded();

    hub.set_fault(C4, Some(Fault::Bend));
    let other = User::new();
    let run = Running::start(other.command(&hub.endpoint(), evaluate())).wait();
    check_message("bent", &run, 5, &[C4, "allenai/c4", "the hub announced SHA-256"]);
}
