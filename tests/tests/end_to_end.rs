//! Quantization as a user sees it: the output is what `plan` predicts and what was requested, can be read back, and is
//! about as accurate as the float model.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use quant_core::checkpoint::{CheckpointWriter, ModelDirectory, WriteOptions};
use quant_core::model::Model;
use quant_core::pipeline::{self, Job};
use quant_core::recipe::{Plan, Recipe};
use quant_core::{CancelToken, Silent};
use quant_tests::files::{copy_files, hashes, sha256};
use quant_tests::models::{TinyLlama, read_safetensors, safetensors};
use quant_tests::program::quant;
use quant_tests::{args, demo_model};
use serde_json::{Value, json};

const SHORT: [&str; 4] = ["--samples", "4", "--seq-len", "128"];
const FILES: [&str; 7] = [
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "quant_manifest.json",
    "quant_report.json",
    "tokenizer.json",
];

fn quantize(model: &Path, out: &Path, options: &[&str]) -> Value {
    let arguments = args!["quantize", model, "-o", out, "--json"];
    quant(arguments.into_iter().chain(options.iter().map(OsString::from))).json()
}

fn read_json(path: PathBuf) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn texts(list: &Value, key: &str) -> Vec<String> {
    list.as_array().unwrap().iter().map(|v| v[key].as_str().unwrap().to_owned()).collect()
}

/// Quantizes the demo model and checks that all descriptions of the result agree.
fn checked(options: &[&str], out: &Path, scheme_of: impl Fn(&str) -> String) {
    let model = demo_model();
    let plan =
        quant(args!["plan", &model, "--json"].into_iter().chain(options.iter().map(OsString::from))).json();
    let summary = quantize(&model, out, options);
    let inspected = quant(args!["inspect", out, "--json"]).json();
    let report = read_json(out.join("quant_report.json"));
    let case = options.join(" ");

    let written = read_safetensors(&out.join("model.safetensors"));
    let found: BTreeMap<&str, Value> =
        written.iter().map(|t| (t.name.as_str(), json!([t.dtype, t.shape]))).collect();
    let (plan, summary) = (&plan["formats"][0], &summary["outputs"][0]);
    let entries = plan["tensors"].as_array().unwrap();
    let outputs = entries.iter().flat_map(|e| e["outputs"].as_array().unwrap());
    let planned: BTreeMap<&str, Value> =
        outputs.map(|o| (o["tensor"].as_str().unwrap(), json!([o["dtype"], o["shape"]]))).collect();
    assert_eq!(found, planned, "{case}");
    let bytes: u64 = written.iter().map(|t| t.data.len() as u64).sum();
    for (account, reported) in [
        ("plan", &plan["output_bytes"]),
        ("summary", &summary["bytes_after"]),
        ("report", &report["bytes_after"]),
        ("inspect", &inspected["bytes"]),
    ] {
        assert_eq!(reported.as_u64(), Some(bytes), "{case}: {account}");
    }

    assert_eq!(inspected["quant_method"], "compressed-tensors");
    let linears = inspected["linears"].as_array().unwrap();
    assert_eq!(linears.len(), 6 * 7);
    for linear in linears {
        let module = linear["module"].as_str().unwrap();
        assert_eq!(linear["stored"], scheme_of(module), "{case}: {module}");
    }

    assert_eq!(report["schema"], "quant-report/1");
    let names: BTreeSet<String> = texts(&report["tensors"], "tensor").into_iter().collect();
    let input = read_safetensors(&model.join("model.safetensors"));
    assert_eq!(names, input.iter().map(|t| t.name.clone()).collect(), "{case}");
    for tensor in report["tensors"].as_array().unwrap() {
        let source = input.iter().find(|t| t.name == tensor["tensor"]).unwrap();
        assert_eq!(tensor["source_sha256"], sha256(&source.data), "{case}: {}", source.name);
        assert_eq!(tensor["bytes_before"], source.data.len() as u64);
        let is_quantized = tensor["action"] == "quantized";
        assert_eq!(
            is_quantized,
            tensor["weight_error"]["relative_rms"].as_f64().is_some(),
            "{case}: {tensor}"
        );
    }

    let files = hashes(out);
    assert_eq!(files.keys().collect::<Vec<_>>(), FILES, "{case}");
    let manifest = read_json(out.join("quant_manifest.json"));
    for file in manifest["files"].as_array().unwrap() {
        assert_eq!(file["sha256"], files[file["name"].as_str().unwrap()], "{case}");
    }
    assert_eq!(texts(&manifest["files"], "name").len(), FILES.len() - 1);
    for name in ["tokenizer.json", "generation_config.json"] {
        assert_eq!(std::fs::read(out.join(name)).unwrap(), std::fs::read(model.join(name)).unwrap());
    }
    let mut config = read_json(out.join("config.json"));
    let settings = config.as_object_mut().unwrap().remove("quantization_config").unwrap();
    assert_eq!(config, read_json(model.join("config.json")), "{case}: other keys are as they were");
    assert_eq!(settings["format"], "pack-quantized");
    let card = std::fs::read_to_string(out.join("README.md")).unwrap();
    let scheme = scheme_of("model.layers.1.mlp.down_proj");
    for expected in ["---\nlibrary_name: transformers\n", "- compressed-tensors\n---", "## Load it", &scheme]
    {
        assert!(card.contains(expected), "{case}: no {expected:?} in {card}");
    }
}

/// Checks that the perplexities of a quantized demo model and of the float model on held-out text differ by at most the
/// factor `max`, and that the KL divergence is in proportion.
fn check_quality(out: &Path, case: &str, max: f64) {
    let arguments = args![
        "eval",
        out,
        "--reference",
        demo_model(),
        "--text",
        "builtin-heldout",
        "--window",
        "128",
        "--windows",
        "6",
        "--json"
    ];
    let result = quant(arguments).json();
    assert_eq!((&result["schema"], &result["profile"]), (&json!("quant-eval/4"), &json!("gptq-128")));
    assert_eq!(result["tokens_scored"], 6 * 127);
    let ratio = result["comparison"]["perplexity_ratio"]["mean"].as_f64().unwrap();
    let kl = result["comparison"]["kl"]["mean"].as_f64().unwrap();
    assert!(kl > 0.0 && kl < 2.0 * max.ln(), "{case}: KL {kl}");
    assert!((1.0 / max..max).contains(&ratio), "{case}: perplexity is {ratio} of the float model's");
    let windows: Vec<f64> = serde_json::from_value(result["comparison"]["window_kl"].clone()).unwrap();
    assert_eq!(windows.len(), 6);
    assert!((windows.iter().sum::<f64>() / 6.0 / kl - 1.0).abs() < 1e-12, "{case}: {windows:?}, mean {kl}");
}

#[test]
fn every_scheme_of_rounding_to_nearest() {
    let scratch = tempfile::tempdir().unwrap();
    let mut weights = BTreeSet::new();
    let mut count = 0;
    for (bits, max) in [(3, 1.5), (4, 1.06), (8, 1.005)] {
        for group in ["g32", "g64", "g128", "channel"] {
            for symmetry in ["sym", "asym"] {
                let scheme = format!("w{bits}a16-{group}-{symmetry}");
                let out = scratch.path().join(&scheme);
                checked(&["--method", "rtn", "--scheme", &scheme], &out, |_| scheme.clone());
                if group == "g64" || group == "channel" {
                    check_quality(&out, &scheme, max);
                }
                weights.insert(hashes(&out).remove("model.safetensors"));
                count += 1;
                std::fs::remove_dir_all(out).unwrap();
            }
        }
    }
    assert_eq!((weights.len(), count), (24, 24), "each scheme gives different bytes");
}

#[test]
fn activation_aware_schemes() {
    let scratch = tempfile::tempdir().unwrap();
    for (scheme, max) in [("w3a16-g32-asym", 1.5), ("w4a16-g128-sym", 1.06), ("w8a16-channel-sym", 1.005)] {
        let (out, nearest) = (scratch.path().join(scheme), scratch.path().join("rtn"));
        checked(&[&["--scheme", scheme], &SHORT[..]].concat(), &out, |_| scheme.to_owned());
        check_quality(&out, scheme, max);
        let card = std::fs::read_to_string(out.join("README.md")).unwrap();
        let load =
            "`AutoModelForCausalLM.from_pretrained(\"OUT\")`, after `pip install compressed-tensors` |";
        assert!(card.contains(load), "{card}");
        let text = " in 4 windows of 128 from the text `builtin`, seed 0; SHA-256 of the tokens: `";
        assert!(card.contains(text), "{card}");
        let report = read_json(out.join("quant_report.json"));
        assert_eq!(report["calibration"]["samples"], 4);
        let ratios = report["tensors"].as_array().unwrap().iter().filter(|t| t["ratio"].is_number()).count();
        assert!(ratios > 0, "{scheme}: the search chose no scale");
        quantize(&demo_model(), &nearest, &["--method", "rtn", "--scheme", scheme, "--force"]);
        assert_ne!(hashes(&out)["model.safetensors"], hashes(&nearest)["model.safetensors"], "{scheme}");
        assert!(read_json(nearest.join("quant_report.json"))["calibration"].is_null());
    }
}

#[test]
fn overrides_and_ignored_linears() {
    let scratch = tempfile::tempdir().unwrap();
    let own = [
        "--scheme",
        "w4a16-g64",
        "--override",
        "down_proj=w8a16-channel-asym",
        "--ignore",
        "*.layers.0.self_attn.*",
    ];
    let scheme_of = |module: &str| match module {
        m if m.starts_with("model.layers.0.self_attn.") => "F16".into(),
        m if m.ends_with(".down_proj") => "w8a16-channel-asym".into(),
        _ => "w4a16-g64-sym".to_owned(),
    };
    for (name, method) in [("rtn", &["--method", "rtn"][..]), ("awq", &SHORT[..])] {
        let out = scratch.path().join(name);
        checked(&[&own, method].concat(), &out, scheme_of);
        check_quality(&out, name, 1.06);
        let settings = &read_json(out.join("config.json"))["quantization_config"];
        assert_eq!(settings["config_groups"].as_object().unwrap().len(), 2);
        let ignored: Vec<&str> =
            settings["ignore"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        assert!(ignored.contains(&"lm_head") && ignored.contains(&"model.layers.0.self_attn.q_proj"));
        assert!(ignored.contains(&"model.layers.0.self_attn.qkv_proj"), "engines fuse three of them");
        assert_eq!(ignored.len(), 6, "{ignored:?}");
        // The embedding is neither quantized nor rescaled.
        let embedding = |dir: &Path| {
            let tensors = read_safetensors(&dir.join("model.safetensors"));
            tensors.into_iter().find(|t| t.name == "model.embed_tokens.weight").unwrap()
        };
        assert_eq!(embedding(&out), embedding(&demo_model()));
    }
}

#[test]
fn equal_bytes_on_every_run() {
    let scratch = tempfile::tempdir().unwrap();
    for (name, options) in [
        ("rtn", &["--method", "rtn", "--scheme", "w3a16-g64-asym"][..]),
        ("awq", &SHORT),
        ("awq-asym", &["--scheme", "w3a16-g32-asym", "--samples", "3", "--seq-len", "100"]),
    ] {
        let run = |threads: &str, what: &str| {
            let out = scratch.path().join(format!("{name}-{what}"));
            quantize(&demo_model(), &out, &[options, &["--threads", threads]].concat());
            hashes(&out)
        };
        let one = run("1", "one");
        assert_eq!(one.len(), FILES.len());
        assert_eq!(one, run("2", "two"), "{name}: threads");
        assert_eq!(one, run("2", "again"), "{name}: a second run");
    }
}

#[test]
fn shards_on_both_sides() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    copy_files(&demo_model(), &at("sharded"));
    let tensors = read_safetensors(&demo_model().join("model.safetensors"));
    let mut map = serde_json::Map::new();
    for (i, part) in tensors.chunks(tensors.len().div_ceil(3)).enumerate() {
        let name = format!("model-{:05}-of-00003.safetensors", i + 1);
        std::fs::write(at("sharded").join(&name), safetensors(part)).unwrap();
        map.extend(part.iter().map(|t| (t.name.clone(), json!(name))));
    }
    let index = json!({ "metadata": {}, "weight_map": map }).to_string();
    std::fs::write(at("sharded/model.safetensors.index.json"), index).unwrap();
    std::fs::remove_file(at("sharded/model.safetensors")).unwrap();
    let rtn = ["--method", "rtn"];
    quantize(&demo_model(), &at("one"), &rtn);
    quantize(&at("sharded"), &at("from-shards"), &rtn);
    assert_eq!(hashes(&at("one")), hashes(&at("from-shards")));

    // The command line has no option for the shard size, but the library does.
    let directory = ModelDirectory::open(&demo_model()).unwrap();
    let model = Model::open(&directory).unwrap();
    let recipe = Recipe::preset("rtn-w4a16").unwrap();
    let plan = Plan::new(&model, &recipe, recipe.containers[0]).unwrap();
    let options = WriteOptions { max_shard_bytes: 1_000_000, ..WriteOptions::default() };
    let mut writer = CheckpointWriter::create(&at("many"), plan.outputs(), options).unwrap();
    let job = Job {
        model: &model,
        plan: &plan,
        windows: None,
        maxima: None,
        searches: None,
        observer: &Silent,
        cancel: &CancelToken::new(),
    };
    let report = pipeline::quantize_job(&job, &mut writer).unwrap();
    pipeline::add_companions(&directory, &plan, &report, &mut writer).unwrap();
    let published = writer.publish().unwrap();
    let shards = published.files.iter().filter(|f| f.name.ends_with(".safetensors")).count();
    assert!(shards >= 6, "{shards} shards");
    let verdict = |dir: &Path| {
        let arguments =
            args!["eval", dir, "--text", "builtin-heldout", "--window", "64", "--windows", "2", "--json"];
        quant(arguments).json()["window_nll"].clone()
    };
    assert_eq!(verdict(&at("many")), verdict(&at("one")));
    let contents = |dir: &Path| {
        let mut report = quant(args!["inspect", dir, "--json"]).json();
        report["tensors"].as_array_mut().unwrap().iter_mut().for_each(|t| drop(t["file"].take()));
        report
    };
    assert_eq!(contents(&at("many")), contents(&at("one")));
}

/// A snapshot in a Hugging Face cache consists of links, including the companion files.
#[test]
fn a_cache_is_read_through_its_links() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let (plain, cache) = (at("plain"), at("models--a--b"));
    TinyLlama::default().write(&plain);
    std::fs::write(plain.join("LICENSE"), "as you like").unwrap();
    copy_files(&plain, &cache.join("blobs"));
    let snapshot = cache.join("snapshots/0123");
    std::fs::create_dir_all(&snapshot).unwrap();
    for name in hashes(&plain).keys() {
        std::os::unix::fs::symlink(format!("../../blobs/{name}"), snapshot.join(name)).unwrap();
    }
    let options = ["--method", "rtn", "--group-size", "32"];
    quantize(&plain, &at("expected"), &options);
    quantize(&snapshot, &at("out"), &options);
    assert!(at("out/LICENSE").is_file());
    assert_eq!(hashes(&at("out")), hashes(&at("expected")));
}

#[test]
fn tied_embeddings_under_the_head_s_name() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let tied = TinyLlama { tied: true, ..TinyLlama::default() };
    let mut tensors = tied.tensors();
    tied.write(&at("default"));
    assert_eq!(tensors[0].name, "model.embed_tokens.weight");
    tensors[0].name = "lm_head.weight".into();
    tied.write_with(&at("renamed"), &tensors);
    let mut verdicts = Vec::new();
    for (method, options) in [
        ("rtn", &["--method", "rtn", "--scheme", "w4a16-g32"][..]),
        ("awq", &["--method", "awq", "--scheme", "w4a16-g32", "--samples", "2", "--seq-len", "64"]),
    ] {
        for model in ["default", "renamed"] {
            let out = at(&format!("{model}-{method}"));
            quantize(&at(model), &out, options);
            let names: Vec<String> =
                read_safetensors(&out.join("model.safetensors")).into_iter().map(|t| t.name).collect();
            let has = |name: &str| names.iter().any(|n| n == name);
            assert_eq!(
                (has("lm_head.weight"), has("model.embed_tokens.weight")),
                (model == "renamed", model == "default")
            );
            assert_eq!(quant(args!["inspect", &out, "--json"]).json()["tied_embeddings"], true);
            let result = quant(args![
                "eval",
                &out,
                "--text",
                "builtin-heldout",
                "--window",
                "64",
                "--windows",
                "2",
                "--json"
            ])
            .json();
            let perplexity = result["perplexity"]["mean"].as_f64().unwrap();
            assert!((2.0..2000.0).contains(&perplexity), "{perplexity}");
            verdicts.push(result["window_nll"].clone());
        }
    }
    assert_eq!((&verdicts[0], &verdicts[2]), (&verdicts[1], &verdicts[3]));
    assert_ne!(verdicts[0], verdicts[2], "the methods differ");
}

#[test]
fn results_for_machines() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    TinyLlama::default().write(&model);
    let short = ["--text", "builtin-heldout", "--window", "64", "--windows", "1"].map(OsString::from);
    for (arguments, schema) in [
        (args!["plan", &model, "--group-size", "32"], "quant-plan/2"),
        (args!["inspect", &model], "quant-inspect/3"),
        (args!["eval", &model].into_iter().chain(short).collect(), "quant-eval/4"),
        (args!["bench", &model, "--prefill", "8", "--decode", "4"], "quant-bench/2"),
        (args!["bench", "kernels", "--only", "w8a8-channel 2048"], "quant-bench-kernels/4"),
        (
            args![
                "quantize",
                &model,
                "-o",
                scratch.path().join("out"),
                "--method",
                "rtn",
                "--group-size",
                "32"
            ],
            "quant-summary/2",
        ),
    ] {
        assert_eq!(quant(arguments.into_iter().chain(args!["--json"])).json()["schema"], schema);
    }
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = quant(args!["completions", shell]).succeeded().stdout;
        assert!(script.contains("quantize") && script.contains("group-size"), "{shell}");
    }
}
