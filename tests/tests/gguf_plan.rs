//! What `plan` predicts for GGUF files, compared with what runs use.

use std::path::{Path, PathBuf};

use quant_tests::files::hashes;
use quant_tests::models::TinyLlama;
use quant_tests::program::{Run, quant};
use quant_tests::refusal::check_message;
use quant_tests::{args, demo_model};
use serde_json::Value;
use tempfile::TempDir;

struct Bench {
    scratch: TempDir,
}

impl Bench {
    /// A model whose largest weights have `hidden · intermediate` values, and a text of 240 000 tokens.
    fn new(hidden: u64, intermediate: u64) -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let bench = Self { scratch };
        let tiny = TinyLlama {
            hidden,
            intermediate,
            heads: hidden / 64,
            kv_heads: hidden / 128,
            head_dim: 64,
            ..TinyLlama::default()
        };
        tiny.write(&bench.at("model"));
        let line = |i: usize| format!("{i} {} {}\n", i * 7919 % 1009, i * i % 8191);
        std::fs::write(bench.at("text.txt"), (0..20_000).map(line).collect::<String>()).unwrap();
        bench
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn plan(&self, options: &[&str]) -> Value {
        let mut arguments = args!["plan", self.at("model"), "--format", "gguf", "--pre", "none", "--json"];
        arguments.extend(options.iter().map(Into::into));
        quant(arguments).json()
    }

    fn run(&self, out: &Path, options: &[&str]) -> Run {
        let mut arguments =
            args!["quantize", self.at("model"), "-o", out, "--format", "gguf", "--pre", "none", "--json"];
        arguments.extend(options.iter().map(Into::into));
        quant(arguments)
    }
}

fn bytes(of: &Value, key: &str) -> u64 {
    of[key].as_u64().unwrap_or_else(|| panic!("{key} in {of}"))
}

/// Checks that a run used no more than predicted, and that the prediction is at most `percent` or 64 MB above that.
#[track_caller]
fn check(what: &str, run: &Run, predicted: u64, percent: u64) {
    let summary: Value = serde_json::from_str(&run.stdout).unwrap();
    let used = bytes(&summary, "peak_memory_bytes");
    println!("{what}: {:.1} of {:.1} MB", used as f64 / 1e6, predicted as f64 / 1e6);
    assert!(used <= predicted, "{what}: {used} of {predicted}");
    assert!(
        predicted <= (used + used * percent / 100).max(used + 64_000_000),
        "{what}: {used} of {predicted}"
    );
}

#[test]
fn runs_use_the_predicted_memory() {
    let (plain, gptq) = (&[][..], &["--method", "gptq"][..]);
    let awq = &["--method", "awq"][..];
    // The largest model's tensors are encoded in several pieces. Searching scales for its wide weights, AWQ and GPTQ
    // would take minutes.
    for (hidden, intermediate, blocks, batch, methods) in [
        (256, 512, "q4_k_m", ["--samples", "1200", "--seq-len", "64"], &[plain, awq, gptq][..]),
        (512, 2048, "q4_k_m", ["--samples", "32", "--seq-len", "512"], &[gptq]),
        (1024, 6144, "q8_0", ["--samples", "32", "--seq-len", "512"], &[plain]),
    ] {
        let bench = Bench::new(hidden, intermediate);
        let text = bench.at("text.txt").to_str().unwrap().to_owned();
        for scheme in [blocks, "f16"] {
            let options = ["--scheme", scheme];
            let plan = bench.plan(&options);
            let run = bench.run(&bench.at("free"), &[&options[..], &["--force"]].concat()).succeeded();
            check(&format!("{hidden} {scheme}"), &run, bytes(&plan, "peak_memory_bytes"), 25);
            assert_eq!(bytes(&plan, "scratch_bytes"), 0);
        }
        for &method in methods {
            let options = [&["--scheme", blocks][..], method, &batch].concat();
            let plan = bench.plan(&options);
            // The prediction for AWQ counts the last round of a race, which is rarely run.
            let percent = match method {
                _ if method == gptq => 20,
                [] => 25,
                _ => 35,
            };
            let plan = if method.is_empty() { &plan["with_calibration"] } else { &plan };
            let options = [&options[..], &["--calibration", &text, "--force"]].concat();
            let run = bench.run(&bench.at("large"), &options).succeeded();
            check(&format!("{hidden} {method:?}"), &run, bytes(plan, "peak_memory_bytes"), percent);
            let smallest = bytes(plan, "smallest_budget_bytes");
            assert!(smallest <= bytes(plan, "peak_memory_bytes"));
            let budget = format!("{}MiB", smallest.div_ceil(1 << 20));
            let run = bench.run(&bench.at("small"), &[&options[..], &["--memory-budget", &budget]].concat());
            check(&format!("{hidden} {method:?} in {budget}"), &run.succeeded(), smallest, percent);
            assert_eq!(hashes(&bench.at("small")), hashes(&bench.at("large")), "{method:?}");
        }
    }
}

#[test]
fn plans_name_memory_and_disk_space() {
    let bench = Bench::new(256, 512);
    let shown = |options: &[&str]| {
        let arguments = args!["plan", bench.at("model"), "--format", "gguf", "--pre", "none"];
        quant(arguments.into_iter().chain(options.iter().map(Into::into)).collect::<Vec<_>>())
            .succeeded()
            .stdout
    };
    let free = shown(&["--samples", "4096"]);
    assert!(free.contains("\nneeds about ") && free.contains("\nwith --calibration: about "), "{free}");
    assert!(free.contains("with --memory-budget at least "), "{free}");
    // Without a matrix these types are not written, so the plan is that of a run that computes one.
    for options in [&["--scheme", "q2_k_s"][..], &["--override", "ffn_up=iq2_xs"]] {
        let with = shown(options);
        assert!(with.contains("\nneeds about ") && !with.contains("with --calibration"), "{with}");
    }
    let run = quant(args![
        "quantize",
        bench.at("model"),
        "-o",
        bench.at("no.gguf"),
        "--pre",
        "none",
        "--override",
        "ffn_up=iq2_xs"
    ]);
    check_message(
        "a type",
        &run,
        2,
        &["IQ2_XS of `blk.0.ffn_up.weight` needs an importance matrix", "--calibration"],
    );
}

/// The size includes the tokenizer. Files with an importance matrix that the run computes have some more metadata.
#[test]
fn the_size_of_the_file_is_predicted() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out.gguf");
    for (scheme, calibration) in [("q8_0", false), ("q4_k_m", true)] {
        let options = ["--format", "gguf", "--scheme", scheme].map(Into::into);
        let plan = quant(args!["plan", demo_model(), "--json"].into_iter().chain(options.clone())).json();
        let mut quantize = args!["quantize", demo_model(), "-o", &out, "--force"];
        quantize.extend(options.clone());
        if calibration {
            quantize.extend(args!["--calibration", "builtin", "--samples", "2", "--seq-len", "128"]);
        }
        quant(quantize).succeeded();
        let (written, tensors) = (std::fs::metadata(&out).unwrap().len(), bytes(&plan, "output_bytes"));
        let predicted = bytes(&plan, "file_bytes");
        let more = if calibration { 1024 } else { 0 };
        assert!(predicted <= written && written <= predicted + more, "{scheme}: {predicted} of {written}");
        assert!(predicted > tensors + 10_000, "{scheme}: {predicted}, tensors {tensors}");
        assert_eq!(plan["engines"][0]["engine"], "llama.cpp");

        let text = quant(args!["plan", demo_model()].into_iter().chain(options)).succeeded().stdout;
        assert!(text.contains("\nloads in llama.cpp ") && text.contains(" of memory and "), "{text}");
        assert_eq!(text.matches(" on this machine").count(), 2, "{text}");
    }
}
