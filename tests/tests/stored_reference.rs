//! `quant eval --save-reference`: a stored reference gives bit-identical results to the model, and damaged or unrelated
//! files are rejected.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use quant_tests::files::copy_files;
use quant_tests::models::edit_config;
use quant_tests::program::{Run, quant};
use quant_tests::refusal::check_message;
use quant_tests::{args, demo_model};
use serde_json::{Value, json};

const TEXT: [&str; 6] = ["--text", "builtin-heldout", "--window", "64", "--windows", "20"];

/// A quantized model, the stored reference of its float source, and the result of the evaluation that stored it.
struct Bench {
    scratch: tempfile::TempDir,
    alone: Value,
}

impl Bench {
    fn get() -> &'static Self {
        static BENCH: OnceLock<Bench> = OnceLock::new();
        BENCH.get_or_init(|| {
            let scratch = tempfile::tempdir().unwrap();
            let at = |name: &str| scratch.path().join(name);
            let rtn = args!["quantize", demo_model(), "-o", at("w3"), "--method", "rtn"];
            quant(rtn.into_iter().chain(args!["--scheme", "w3a16-g64-sym"])).succeeded();
            let save = args!["eval", demo_model(), "--json", "--save-reference", at("kept")];
            let alone = quant(save.into_iter().chain(TEXT.map(Into::into))).json();
            Self { scratch, alone }
        })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn compare(&self, reference: &Path, options: &[&str]) -> Run {
        let eval = args!["eval", self.at("w3"), "--json", "--reference", reference];
        quant(eval.into_iter().chain(options.iter().map(OsString::from)))
    }
}

/// A result without its timing.
fn numbers(mut result: Value) -> Value {
    for key in ["seconds", "tokens_per_second", "sha256"] {
        result.as_object_mut().unwrap().remove(key);
    }
    result
}

#[test]
fn a_kept_reference_replaces_the_model_bit_for_bit() {
    let bench = Bench::get();
    let kept = numbers(bench.compare(&bench.at("kept"), &TEXT).json());
    let model = numbers(bench.compare(&demo_model(), &TEXT).json());
    assert_eq!(kept, model);
    assert!(kept["comparison"]["kl"]["mean"].as_f64().unwrap() > 1e-3);
    assert_eq!(kept["comparison"]["noise_floor"]["windows"], 8);
    // The scores that were reported when the reference was saved equal those of a comparison and those of the model
    // alone.
    let fields = ["perplexity", "nll", "bits_per_byte", "window_nll"];
    let alone = quant(args!["eval", demo_model(), "--json"].into_iter().chain(TEXT.map(Into::into))).json();
    for field in fields {
        assert_eq!(bench.alone[field], kept["comparison"]["reference"][field], "{field}");
        assert_eq!(bench.alone[field], alone[field], "{field}");
    }
    assert_eq!(bench.alone["comparison"], json!(null));
    // The head is 4096 × 256 in F16; the rest is one hidden state per scored token.
    let bytes = std::fs::metadata(bench.at("kept")).unwrap().len();
    let parts = 4096 * 256 * 2 + 20 * 63 * 256 * 4;
    assert!((parts..parts + 10_000).contains(&bytes), "{bytes}");
    assert!(!bench.at("kept.part").exists());
}

#[test]
fn one_of_another_text_rule_or_model_is_refused() {
    let bench = Bench::get();
    let kept = bench.at("kept");
    let other = bench.at("other.txt");
    std::fs::write(&other, "Rain in the morning and no sun at noon. ".repeat(200)).unwrap();
    let other = other.to_str().unwrap();
    for (options, expected) in [
        (["--text", other, "--window", "64", "--windows", "20"], "on a different text, builtin-heldout"),
        (["--text", TEXT[1], "--window", "63", "--windows", "20"], "with a different profile, gptq-64"),
        (["--text", TEXT[1], "--window", "64", "--windows", "19"], "on 20 windows, not 19"),
    ] {
        check_message(expected, &bench.compare(&kept, &options), 2, &[expected, "--save-reference"]);
    }
    // A different tokenizer file is rejected even if it gives the same tokens for this text.
    let model = bench.at("tokenizer");
    copy_files(&bench.at("w3"), &model);
    let path = model.join("tokenizer.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text + "\n").unwrap();
    let eval = args!["eval", &model, "--reference", &kept].into_iter().chain(TEXT.map(Into::into));
    check_message("tokenizer", &quant(eval), 2, &["with a different tokenizer"]);

    // Options cannot change how the reference is computed.
    for option in [["--reference", "x"], ["--kv", "4"], ["--execution", "kernels"], ["--journal", "x"]] {
        let save = args!["eval", demo_model(), "--save-reference", bench.at("never")];
        let run = quant(save.into_iter().chain(TEXT.map(Into::into)).chain(option.map(Into::into)));
        check_message(option[0], &run, 2, &["--save-reference", "cannot be used"]);
    }
    assert!(!bench.at("never").exists());
}

#[test]
fn cut_changed_and_hostile_files_are_refused() {
    let bench = Bench::get();
    let good = std::fs::read(bench.at("kept")).unwrap();
    let number = |at: usize| u64::from_le_bytes(good[at..at + 8].try_into().unwrap()) as usize;
    let (offset, length) = (number(8), number(16));
    let header: Value = serde_json::from_slice(&good[offset..offset + length]).unwrap();
    let path = bench.at("broken");
    let refused = |name: &str, bytes: &[u8], expected: &str| {
        std::fs::write(&path, bytes).unwrap();
        check_message(name, &bench.compare(&path, &TEXT), 4, &[expected, "--save-reference"]);
    };
    let changed = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        bytes
    };
    refused("a few bytes", &good[..20], "too short");
    refused("half of it", &good[..good.len() / 2], "the header does not end at the end of the file");
    refused(
        "more at the end",
        &[&good[..], b"{}"].concat(),
        "the header does not end at the end of the file",
    );
    refused("the digest", &changed(30), "header does not match");
    refused("the header", &changed(offset + length / 2), "header does not match");
    refused("the head", &changed(56 + 1000), "head does not match");
    refused("the first window", &changed(56 + 4096 * 256 * 2), "window 0 does not match");
    refused("the last window", &changed(offset - 1), "window 19 does not match");
    let mut endless = good.clone();
    endless[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
    refused("an endless header", &endless, "at most");
    endless[16..24].copy_from_slice(&(1_u64 << 25).to_le_bytes());
    refused("a header beyond the end", &endless, "the header does not end at the end of the file");

    let sealed = |edit: &dyn Fn(&mut Value)| {
        let mut header = header.clone();
        edit(&mut header);
        let text = header.to_string();
        let mut bytes = good[..offset].to_vec();
        bytes[16..24].copy_from_slice(&(text.len() as u64).to_le_bytes());
        bytes[24..56].copy_from_slice(blake3::hash(text.as_bytes()).as_bytes());
        [bytes, text.into_bytes()].concat()
    };
    let set = |key: &str, value: Value| sealed(&|header| header[key] = value.clone());
    refused("another version", &set("schema", json!("quant-reference/9")), "schema `quant-reference/9`");
    refused("a key more", &set("more", json!(1)), "an invalid header");
    refused("an endless vocabulary", &set("vocabulary", json!(u64::MAX)), "invalid sizes");
    refused("a vast vocabulary", &set("vocabulary", json!(1_u64 << 40)), "bytes before its header");
    refused("no width", &set("width", json!(0)), "invalid sizes");
    refused("integers", &set("head_dtype", json!("I8")), "invalid sizes");
    refused("a bias that is not there", &set("head_bias", json!(true)), "bytes before its header");
    refused("windows of nothing", &set("window_tokens", json!([])), "invalid sizes");
    refused("endless windows", &set("window_tokens", json!(vec![u64::MAX / 8; 20])), "invalid sizes");
    let mut shifted = vec![63; 20];
    (shifted[0], shifted[1]) = (62, 64);
    std::fs::write(&path, set("window_tokens", json!(shifted))).unwrap();
    check_message("other windows", &bench.compare(&path, &TEXT), 2, &["with different tokens"]);
    std::fs::write(&path, sealed(&|_| {})).unwrap();
    bench.compare(&path, &TEXT).succeeded();
}

/// A model with fewer than 2048 positions is evaluated on windows of its own length, one with more on 2048.
#[test]
fn the_default_window_is_one_that_the_model_was_made_for() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    copy_files(&demo_model(), &model);
    for (positions, profile) in [(512, "gptq-512"), (96, "gptq-96"), (4096, "gptq-2048")] {
        edit_config(&model, &json!({ "max_position_embeddings": positions }));
        let run = quant(args!["eval", &model, "--text", "builtin-heldout", "--windows", "1", "--json"]);
        assert!(!run.stderr.contains("longer than"), "{run}");
        assert_eq!(run.json()["profile"], profile);
    }
    edit_config(&model, &json!({ "max_position_embeddings": 3000 }));
    let run = quant(args![
        "eval",
        &model,
        "--text",
        "builtin-heldout",
        "--windows",
        "1",
        "--profile",
        "gptq",
        "--json"
    ]);
    assert_eq!(run.json()["profile"], "gptq-3000");
}
