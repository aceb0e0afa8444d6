//! QoQ on the command line.

use quant_tests::files::snapshot;
use quant_tests::models::TinyLlama;
use quant_tests::opt::TinyOpt;
use quant_tests::program::quant;
use quant_tests::{args, demo_model};
use serde_json::Value;

const TEXT: [&str; 6] = ["--text", "builtin-heldout", "--window", "96", "--windows", "6"];

fn perplexity(model: &std::path::Path, more: &[&str]) -> f64 {
    let mut arguments = args!["eval", model, "--json"];
    arguments.extend(TEXT.iter().chain(more).map(Into::into));
    quant(arguments).json()["perplexity"]["mean"].as_f64().unwrap()
}

#[test]
fn what_is_written_is_read_back_by_both_executions() {
    let scratch = tempfile::tempdir().unwrap();
    let float = perplexity(&demo_model(), &[]);
    for (name, options) in [
        ("groups", &["--preset", "qoq-w4a8kv4", "--group-size", "32"][..]),
        ("channel", &["--preset", "qoq-w4a8kv4-channel"]),
        ("unrotated", &["--preset", "qoq-w4a8kv4", "--group-size", "32", "--skip", "rotate,clip"]),
        (
            "rtn",
            &[
                "--method",
                "qoq-rtn",
                "--scheme",
                "w8a8kv8",
                "--output-alpha",
                "auto",
                "--attention-alpha",
                "0.5",
            ],
        ),
    ] {
        let out = scratch.path().join(name);
        let mut arguments = args!["quantize", demo_model(), "-o", &out, "--samples", "8", "--seq-len", "128"];
        arguments.extend(options.iter().map(Into::into));
        quant(arguments.clone()).succeeded();
        let config: Value = serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
        let bits = if name == "rtn" { 8 } else { 4 };
        assert_eq!(config["kv_cache_quantization"]["bits"], bits, "{name}");
        let report: Value =
            serde_json::from_slice(&std::fs::read(out.join("quant_report.json")).unwrap()).unwrap();
        let steps = report["steps"].as_array().unwrap();
        assert_eq!(steps.contains(&"rotate".into()), name != "unrotated", "{name}");
        let (fake, kernels) = (perplexity(&out, &[]), perplexity(&out, &["--execution", "kernels"]));
        assert!((kernels / fake - 1.0).abs() < 0.01, "{name}: {kernels} and {fake}");
        let lost = fake / float - 1.0;
        assert!(lost.abs() < if bits == 8 { 0.01 } else { 0.1 }, "{name}: {fake} after {float}");
        let again = scratch.path().join("again");
        arguments[3] = again.clone().into();
        arguments.extend(args!["--threads", "1"]);
        quant(arguments).succeeded();
        let files = |at: &std::path::Path| snapshot(at);
        assert_eq!(files(&out), files(&again), "{name}");
        std::fs::remove_dir_all(&again).unwrap();
    }
}

#[test]
fn an_untied_head_is_written_separately() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    TinyLlama { tied: true, ..TinyLlama::default() }.write(&model);
    let out = scratch.path().join("out");
    let options = ["--method", "qoq-rtn", "--scheme", "w4a8-g32", "--samples", "2", "--seq-len", "32"];
    let mut arguments = args!["quantize", &model, "-o", &out];
    arguments.extend(options.iter().map(Into::into));
    quant(arguments).succeeded();
    let config: Value = serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["tie_word_embeddings"], false);
    let inspected = quant(args!["inspect", &out, "--json"]).succeeded();
    assert!(inspected.stdout.contains("lm_head.weight"), "{inspected}");
}

#[test]
fn families_that_cannot_be_rotated_say_so_and_go_without() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("opt");
    TinyOpt::default().write(&model);
    let out = scratch.path().join("out");
    let options = ["--method", "qoq", "--scheme", "w4a8kv4-g16", "--samples", "2", "--seq-len", "32"];
    for subcommand in [args!["plan", &model], args!["quantize", &model, "-o", &out]] {
        let mut arguments = subcommand;
        arguments.extend(options.iter().map(Into::into));
        let refused = quant(arguments);
        assert_eq!(refused.code(), Some(2), "{refused}");
        assert!(refused.stderr.contains("cannot be rotated"), "{refused}");
        assert!(refused.stderr.contains("--skip rotate"), "{refused}");
    }
    let mut arguments = args!["quantize", &model, "-o", &out, "--skip", "rotate"];
    arguments.extend(options.iter().map(Into::into));
    quant(arguments).succeeded();
}

#[test]
fn the_ablation_is_a_table_of_paired_rows() {
    let mut arguments =
        args!["eval", demo_model(), "--ablation", "--json", "--samples", "4", "--seq-len", "128"];
    arguments.extend(args!["--group-size", "32"]);
    arguments.extend(TEXT.iter().map(Into::into));
    let table = quant(arguments).json();
    assert_eq!(table["schema"], "quant-ablation/1");
    let rows = table["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 10);
    let kl = |i: usize| rows[i]["kl"]["mean"].as_f64().unwrap();
    for (i, row) in rows.iter().enumerate().skip(1) {
        let change = row["kl_change"]["mean"].as_f64().unwrap();
        assert!((kl(i) - kl(i - 1) - change).abs() < 1e-9, "{}", row["step"]);
    }
    // 8-bit weights lose least, and a float cache loses less than a 4-bit one.
    assert!((1..10).all(|i| kl(0) < kl(i)) && kl(4) < kl(5), "{rows:?}");
    assert_eq!(rows[9]["scheme"], "w4a8kv4-g32-sym-progressive");
    assert_eq!(rows[9]["kv_cache"], "kv4");

    let refused = quant(args!["eval", demo_model(), "--text", "builtin-heldout", "--ablation", "--kv", "4"]);
    assert_eq!(refused.code(), Some(2), "{refused}");
    let refused = quant(args!["eval", demo_model(), "--text", "builtin-heldout", "--samples", "4"]);
    assert_eq!(refused.code(), Some(2), "{refused}");
}

/// Activation quantization that a format cannot represent is dropped and reported; the weights are the same in all
/// formats.
#[test]
fn one_run_writes_what_engines_read_with_and_without_activations() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    let options = ["--method", "qoq-rtn", "--scheme", "w4a8kv4-g32-asym-progressive", "--samples", "4"];
    let formats = ["--seq-len", "128", "--format", "awq", "--format", "compressed-tensors", "--json"];
    let of = |start: Vec<std::ffi::OsString>| {
        let options = options.iter().chain(&formats).map(Into::into);
        quant(start.into_iter().chain(options)).succeeded().json()
    };
    let plan = quant(args!["plan", demo_model(), "--json"].into_iter().chain(
        options.iter().chain(&formats[..6]).filter(|o| **o != "--seq-len" && **o != "128").map(Into::into),
    ));
    let plan = plan.succeeded().json();
    let lost = |i: usize| plan["formats"][i]["loses"].as_array().unwrap().clone();
    assert_eq!((lost(0).len(), lost(1).len()), (3, 2), "{plan}");
    assert!(lost(0)[0].as_str().unwrap().contains("the awq format cannot describe quantized activations"));
    let summary = of(args!["quantize", demo_model(), "-o", &out]);
    let steps: Vec<&str> =
        summary["steps"].as_array().unwrap().iter().map(|s| s["step"].as_str().unwrap()).collect();
    for step in
        ["read and rotate", "reorder", "smooth-attention", "smooth-outputs", "clip", "round and write"]
    {
        assert!(steps.contains(&step), "{step}: {steps:?}");
    }
    let seconds = |value: &Value| value["seconds"].as_f64().unwrap();
    let sum: f64 = summary["steps"].as_array().unwrap().iter().map(seconds).sum();
    assert!(sum <= seconds(&summary), "{summary}");
    let scheme = |format: &str| {
        let inspected = quant(args!["inspect", out.join(format), "--json"]).succeeded().json();
        inspected["linears"][0]["stored"].as_str().unwrap().to_owned()
    };
    assert_eq!(
        (scheme("awq").as_str(), scheme("compressed-tensors").as_str()),
        ("w4a16-g32-asym", "w4a8-g32-asym")
    );
    let [awq, packed] = ["awq", "compressed-tensors"].map(|format| perplexity(&out.join(format), &[]));
    assert!(
        (awq / packed - 1.0).abs() < 0.01,
        "{awq} and {packed}: 8 bits of activations cost next to nothing"
    );
}

#[test]
fn the_ablation_goes_without_what_a_family_does_not_allow() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("opt");
    TinyOpt::default().write(&model);
    let ablation = |more: &[&str]| {
        let mut arguments =
            args!["eval", &model, "--ablation", "--json", "--samples", "2", "--seq-len", "32"];
        arguments.extend(
            ["--text", "builtin-heldout", "--window", "32", "--windows", "2"]
                .iter()
                .chain(more)
                .map(Into::into),
        );
        quant(arguments)
    };
    let refused = ablation(&["--group-size", "16"]);
    assert_eq!(refused.code(), Some(2), "{refused}");
    assert!(refused.stderr.contains("--skip rotate"), "{refused}");
    let refused = ablation(&["--group-size", "7", "--skip", "rotate"]);
    assert_eq!(refused.code(), Some(2), "{refused}");
    assert!(refused.stderr.contains("row `+ progressive groups`"), "{refused}");
    assert!(!refused.stderr.contains("--override"), "{refused}");
    let table = ablation(&["--group-size", "16", "--skip", "rotate,clip"]).succeeded().json();
    let steps: Vec<&str> =
        table["rows"].as_array().unwrap().iter().map(|r| r["step"].as_str().unwrap()).collect();
    assert!(
        steps.len() == 8 && !steps.contains(&"+ rotation") && !steps.contains(&"+ clipping"),
        "{steps:?}"
    );
    let refused = ablation(&["--skip", "awq"]);
    assert_eq!(refused.code(), Some(2), "{refused}");
    assert!(refused.stderr.contains("`awq` is not a step of method `qoq`"), "{refused}");
}
