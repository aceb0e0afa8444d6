//! A KV cache in 4 or 8 bits: its effect in `eval` and `bench`, and configurations that request it.

use std::path::Path;

use quant_tests::models::{TinyLlama, edit_config};
use quant_tests::program::{Run, command, isa_values, quant};
use quant_tests::refusal::check_message;
use quant_tests::{args, demo_model};
use serde_json::{Value, json};

const TEXT: [&str; 6] = ["--text", "builtin-heldout", "--window", "96", "--windows", "8"];

fn eval(model: &Path, more: &[&str]) -> Run {
    let mut arguments = args!["eval", model];
    arguments.extend(TEXT.iter().chain(more).map(Into::into));
    quant(arguments)
}

fn result(model: &Path, more: &[&str]) -> Value {
    let mut all = more.to_vec();
    all.push("--json");
    eval(model, &all).json()
}

fn perplexity(result: &Value) -> f64 {
    result["perplexity"]["mean"].as_f64().unwrap()
}

fn setting(bits: u64) -> Value {
    json!({ "bits": bits, "symmetric": false, "strategy": "token-head", "scale_dtype": "float16" })
}

fn marked(directory: &Path, setting: &Value) {
    quant_tests::files::copy_files(&demo_model(), directory);
    edit_config(directory, &json!({ "kv_cache_quantization": setting }));
}

#[test]
fn the_configuration_is_followed_by_default() {
    let scratch = tempfile::tempdir().unwrap();
    let plain = result(&demo_model(), &[]);
    assert_eq!(plain["model"]["kv_cache"], Value::Null);
    assert_eq!(result(&demo_model(), &["--kv", "16"])["perplexity"], plain["perplexity"]);
    let asked = [4, 8].map(|bits| {
        let model = scratch.path().join(bits.to_string());
        marked(&model, &setting(bits));
        let bits = bits.to_string();
        let asked = result(&demo_model(), &["--kv", &bits]);
        assert_eq!(asked["model"]["kv_cache"], format!("kv{bits}"));
        let followed = result(&model, &[]);
        assert_eq!(followed["model"]["kv_cache"], format!("kv{bits}"));
        assert_eq!(followed["window_nll"], asked["window_nll"]);
        let floats = result(&model, &["--kv", "16"]);
        assert_eq!(floats["model"]["kv_cache"], Value::Null);
        assert_eq!(floats["window_nll"], plain["window_nll"]);
        asked
    });
    let away = asked.each_ref().map(|r| (perplexity(r) / perplexity(&plain) - 1.0).abs());
    assert!(away[0] > 1e-4 && away[0] < 0.05 && away[1] < 2e-3 && away[1] < away[0], "{away:?}");
    let shown = eval(&scratch.path().join("4"), &[]).succeeded();
    assert!(shown.stdout.contains("keys and values in kv4"), "{shown}");
    let inspected = quant(args!["inspect", scratch.path().join("4"), "--json"]).json();
    assert_eq!(inspected["kv_cache"], "kv4");
}

/// A reference uses the KV cache of its own configuration, so that the loss due to the cache alone can be measured.
#[test]
fn a_model_is_compared_with_itself_on_floats() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let reference = demo_model().display().to_string();
    let measure = |bits: &str, name: &str| {
        let json = format!("--json={}", at(name).display());
        let page = at("page.html").display().to_string();
        eval(&demo_model(), &["--kv", bits, "--reference", &reference, "--report", &page, &json]).succeeded();
        serde_json::from_slice::<Value>(&std::fs::read(at(name)).unwrap()).unwrap()
    };
    let kl = |result: &Value| result["comparison"]["kl"]["mean"].as_f64().unwrap();
    let [eight, four] = [("8", "eight.json"), ("4", "four.json")].map(|(bits, name)| measure(bits, name));
    assert!(kl(&eight) > 0.0 && kl(&four) > 20.0 * kl(&eight), "{} {}", kl(&eight), kl(&four));
    assert_eq!((&four["model"]["kv_cache"], &four["reference"]["kv_cache"]), (&json!("kv4"), &Value::Null));
    let page = std::fs::read_to_string(at("page.html")).unwrap();
    assert!(
        page.contains("keys and values cached in 4 bits") && page.contains("kv4, with a scale and a zero")
    );

    std::fs::write(
        at("gate.toml"),
        "schema = \"quant-gate-policy/1\"\n[[cap]]\nmetric = \"kl\"\nat_most = 1.0\n",
    )
    .unwrap();
    quant(args!["gate", at("four.json"), "--policy", at("gate.toml")]).succeeded();
    quant(args!["gate", at("eight.json"), "--baseline", at("baseline.json"), "--update"]).succeeded();
    let gate = |result: &str| {
        let baseline = at("baseline.json");
        quant(args!["gate", at(result), "--policy", at("gate.toml"), "--baseline", baseline])
    };
    gate("eight.json").succeeded();
    std::fs::rename(at("four.json"), at("eight.json")).unwrap();
    let expected = ["kv8 in the baseline, kv4 now", "--kv"];
    check_message("another cache", &gate("eight.json"), 4, &expected);

    let text = std::fs::read_to_string(at("eight.json")).unwrap();
    std::fs::write(at("eight.json"), text.replace("\"kv4\"", "\"kv8\"")).unwrap();
    check_message("an edited cache", &gate("eight.json"), 4, &["was modified after"]);
    std::fs::write(at("eight.json"), text.replace("\"kv4\"", "\"kv3\"")).unwrap();
    check_message("no cache", &gate("eight.json"), 4, &["is not an evaluation result"]);
}

/// The kernels' cache pages agree with the simulation; they differ mainly in that queries are rounded to 8 bits.
#[test]
fn pages_agree_with_what_is_simulated() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("w8");
    let rtn = ["--method", "rtn", "--scheme", "w8a16-channel"].map(Into::into);
    quant(args!["quantize", demo_model(), "-o", &model].into_iter().chain(rtn)).succeeded();
    for bits in ["4", "8"] {
        let simulated = result(&model, &["--kv", bits]);
        for isa in isa_values() {
            let mut arguments = args!["eval", &model, "--kv", bits, "--execution", "kernels", "--json"];
            arguments.extend(TEXT.map(Into::into));
            let output = command(arguments).env("QUANT_ISA", isa).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            let pages: Value = serde_json::from_slice(&output.stdout).unwrap();
            let message = pages["tool"]["isa"].as_str().unwrap();
            assert!(message.contains(", kernels ") && !message.contains("simulated"), "{message}");
            let distance = (perplexity(&pages) / perplexity(&simulated) - 1.0).abs();
            assert!(distance > 0.0 && distance < 5e-3, "kv{bits} on {message}: {distance}");
        }
    }
}

#[test]
fn heads_that_kernels_do_not_hold_are_simulated() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    TinyLlama { heads: 8, kv_heads: 4, head_dim: 8, ..TinyLlama::default() }.write(&model);
    let run = eval(&model, &["--kv", "4", "--execution", "kernels", "--json"]).succeeded();
    assert!(
        run.stderr.contains("is simulated: the cache of the kernels does not support a head width of 8"),
        "{run}"
    );
    let kernels: Value = run.json();
    assert!(kernels["tool"]["isa"].as_str().unwrap().ends_with(", cache simulated"), "{kernels}");
    assert_eq!(kernels["window_nll"], result(&model, &["--kv", "4"])["window_nll"]);
    let bench = ["--prefill", "8", "--decode", "4", "--repeat", "1", "--json"];
    for (kv, cache) in [("4", "kv4 (simulated)"), ("auto", "f32")] {
        let run = quant(args!["bench", &model, "--kv", kv].into_iter().chain(bench.map(Into::into)));
        assert_eq!(run.json()["kv_cache"], cache);
    }
}

#[test]
fn bench_decodes_on_the_cache_of_the_model() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    marked(&model, &setting(4));
    let bench = |more: &[&str]| {
        let mut arguments =
            args!["bench", &model, "--prefill", "70", "--decode", "3", "--repeat", "1", "--json"];
        arguments.extend(more.iter().map(Into::into));
        quant(arguments).json()
    };
    // Two pages of 64 tokens, two heads, six blocks.
    let pages = 2 * 2 * 6 * 64;
    for (options, cache, bytes) in [
        (&[][..], "kv4", (64 / 2 + 4) * 2),
        (&["--kv", "auto"], "kv4", (64 / 2 + 4) * 2),
        (&["--kv", "8"], "kv8", (64 + 4) * 2),
        (&["--kv", "16"], "f16", 64 * 2 * 2),
    ] {
        let report = bench(options);
        assert_eq!(report["schema"], "quant-bench/2");
        assert_eq!(report["kv_cache"], cache);
        assert_eq!(report["kv_cache_bytes"], pages * bytes, "{cache}");
        assert!(report["decode"]["tokens_per_second"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn what_a_cache_cannot_hold_is_reported_with_the_block() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    let tiny = TinyLlama::default();
    let mut tensors = tiny.tensors();
    // Keys of the second block beyond the range of F16 scales, but finite in f32.
    for tensor in &mut tensors {
        if matches!(
            &*tensor.name,
            "model.layers.1.self_attn.k_proj.weight" | "model.layers.1.input_layernorm.weight"
        ) {
            (0..tensor.data.len() / 2).for_each(|i| tensor.set_f16(i, if i % 3 == 0 { -6e4 } else { 6e4 }));
        }
    }
    tiny.write_with(&model, &tensors);
    assert!(eval(&model, &["--kv", "16"]).succeeded().code() == Some(0));
    let expected = ["keys and values of block 1: a value exceeds", "--kv 16"];
    check_message("--kv 4", &eval(&model, &["--kv", "4"]), 6, &expected);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    for kv in ["2", "32", "kv4", ""] {
        for subcommand in ["eval", "bench"] {
            let mut arguments = args![subcommand, demo_model(), "--kv", kv];
            arguments.extend(TEXT.iter().filter(|_| subcommand == "eval").map(Into::into));
            let run = quant(arguments);
            assert!(run.code() == Some(2) && run.stderr.contains("--kv"), "{run}");
        }
    }
    let with = |key: &str, value: Value| {
        let mut setting = setting(4);
        setting[key] = value;
        setting
    };
    for (i, (setting, field)) in [
        (json!("kv4"), "kv_cache_quantization` is the text"),
        (json!([4]), "kv_cache_quantization` is a list"),
        (json!({ "bits": 4 }), "kv_cache_quantization.symmetric` is missing"),
        (with("bits", json!(3)), "kv_cache_quantization.bits` is 3"),
        (with("bits", json!(-1)), "kv_cache_quantization.bits` is -1"),
        (with("symmetric", json!(true)), "kv_cache_quantization.symmetric` is true"),
        (with("strategy", json!("channel")), "kv_cache_quantization.strategy` is `channel`"),
        (with("scale_dtype", json!("float32")), "kv_cache_quantization.scale_dtype` is `float32`"),
        (with("zero\u{1b}[31m", json!(1)), "is an unknown key"),
    ]
    .into_iter()
    .enumerate()
    {
        let model = scratch.path().join(i.to_string());
        marked(&model, &setting);
        let out = scratch.path().join("out");
        let expected = ["config.json", field, "correct config.json"];
        check_message(field, &eval(&model, &[]), 4, &expected);
        check_message(field, &quant(args!["bench", &model, "--prefill", "1", "--decode", "1"]), 4, &expected);
        check_message(field, &quant(args!["quantize", &model, "-o", &out, "--method", "rtn"]), 4, &expected);
        assert!(!out.exists() && !eval(&model, &[]).stderr.contains('\u{1b}'));
    }
}

#[test]
fn journals_of_another_cache_are_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let journal = scratch.path().join("journal");
    let path = journal.display().to_string();
    // The journal is removed when the run ends, so it is copied while the run continues.
    let page = scratch.path().join("page.html");
    let mut arguments = args!["eval", demo_model(), "--kv", "4", "--journal", &journal, "--report", &page];
    arguments.extend(TEXT.map(Into::into));
    let mut child = command(arguments).spawn().unwrap();
    while std::fs::metadata(&journal).map_or(0, |m| m.len()) == 0 {
        assert!(child.try_wait().unwrap().is_none(), "it ended before anything was saved");
    }
    let kept = std::fs::copy(&journal, scratch.path().join("kept")).unwrap();
    assert!(child.wait().unwrap().success() && kept > 0);
    std::fs::rename(scratch.path().join("kept"), &journal).unwrap();
    check_message("another cache", &eval(&demo_model(), &["--kv", "8", "--journal", &path]), 2, &["journal"]);
    assert!(journal.exists());
}
