//! Float checkpoints from GGUF files and from quantized checkpoints.

use std::path::Path;

use quant_tests::files::hashes;
use quant_tests::models::{TinyLlama, read_safetensors, write_cut_demo_model};
use quant_tests::program::{Run, quant};
use quant_tests::refusal::check_message;
use quant_tests::{args, demo_model};
use serde_json::Value;

fn floats(model: &Path, out: &Path, scheme: &str) -> Run {
    quant(args!["quantize", model, "-o", out, "--format", "safetensors", "--scheme", scheme, "--json"])
}

fn perplexity(model: &Path) -> f64 {
    let arguments = args![
        "eval",
        model,
        "--text",
        "builtin-heldout",
        "--profile",
        "gptq-128",
        "--windows",
        "4",
        "--json"
    ];
    quant(arguments).json()["perplexity"]["mean"].as_f64().expect("a perplexity")
}

/// 16-bit GGUF files hold every tensor exactly, so what is read back is what was written.
#[test]
fn a_float_file_becomes_the_original_checkpoint() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    TinyLlama { heads: 4, kv_heads: 2, ..TinyLlama::default() }.write(&at("model"));
    let gguf = args![
        "quantize",
        at("model"),
        "-o",
        at("f16.gguf"),
        "--format",
        "gguf",
        "--scheme",
        "f16",
        "--pre",
        "none"
    ];
    quant(gguf).succeeded();
    let summary = floats(&at("f16.gguf"), &at("floats"), "f16").json();
    assert_eq!((&summary["schema"], &summary["dtype"]), (&"quant-floats-summary/1".into(), &"F16".into()));
    assert_eq!(summary.get("dequantized_from"), None);
    let by_name = |directory: &str| {
        let mut tensors = read_safetensors(&at(directory).join("model.safetensors"));
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        tensors
    };
    assert!(by_name("model") == by_name("floats"));
    let config: Value =
        serde_json::from_slice(&std::fs::read(at("floats").join("config.json")).unwrap()).unwrap();
    assert_eq!((&config["torch_dtype"], &config["model_type"]), (&"float16".into(), &"llama".into()));
}

#[test]
fn blocks_are_dequantized_only_where_that_is_asked_for() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    write_cut_demo_model(&at("model"), 2);
    let gguf = args!["quantize", at("model"), "-o", at("q4.gguf"), "--format", "gguf", "--scheme", "q4_k_m"];
    quant(gguf).succeeded();
    let done = floats(&at("q4.gguf"), &at("f32"), "f32").json();
    assert_eq!(done["dequantized_from"], "Q6_K, Q4_K");
    assert_eq!(done["types"].as_object().map(|types| types.len()), Some(1));
    assert_eq!(perplexity(&at("f32")), perplexity(&at("q4.gguf")));
    let inspected = quant(args!["inspect", at("f32"), "--json"]).json();
    assert_eq!(inspected["quant_method"], Value::Null);
    // Matrices are rounded to the type; vectors that it cannot hold stay F32.
    floats(&at("q4.gguf"), &at("bf16"), "bf16").succeeded();
    let [a, b] = [at("bf16"), at("f32")].map(|m| perplexity(&m));
    assert!((a / b - 1.0).abs() < 5e-3 && a != b, "{a} and {b}");
    let report: Value =
        serde_json::from_slice(&std::fs::read(at("bf16").join("quant_report.json")).unwrap()).unwrap();
    let tensors = report["tensors"].as_array().unwrap();
    for tensor in tensors {
        let is_matrix = tensor["shape"].as_array().unwrap().len() > 1;
        assert!(!is_matrix || tensor["dtype"] == "BF16", "{tensor}");
        assert!(tensor["largest_change"].as_f64().unwrap() < 1.0 / 256.0, "{tensor}");
    }
    assert!(tensors.iter().any(|t| t["largest_change"].as_f64().unwrap() > 1e-3), "{report}");
    floats(&at("q4.gguf"), &at("again"), "bf16").succeeded();
    assert_eq!(hashes(&at("again")), hashes(&at("bf16")));
    let packed =
        args!["quantize", at("model"), "-o", at("packed"), "--method", "rtn", "--scheme", "w4a16-g128"];
    quant(packed).succeeded();
    let done = floats(&at("packed"), &at("unpacked"), "f32").json();
    assert_eq!(done["dequantized_from"], "compressed-tensors");
    assert_eq!(perplexity(&at("unpacked")), perplexity(&at("packed")));
    let config = std::fs::read_to_string(at("unpacked").join("config.json")).unwrap();
    assert!(!config.contains("quantization_config") && config.contains("float32"), "{config}");
}

/// A tokenizer that was written from metadata is not byte for byte that of the model, but gives the same tokens.
#[test]
fn floats_of_a_gguf_file_are_compared_with_the_model_of_the_file() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    write_cut_demo_model(&at("model"), 1);
    let gguf = args!["quantize", at("model"), "-o", at("f32.gguf"), "--format", "gguf", "--scheme", "f32"];
    quant(gguf).succeeded();
    floats(&at("f32.gguf"), &at("floats"), "f32").succeeded();
    let file = |name: &str| std::fs::read_to_string(at(name).join("tokenizer.json")).unwrap();
    assert_ne!(file("floats"), file("model"));
    let compared = || {
        quant(args![
            "eval",
            at("floats"),
            "--reference",
            at("model"),
            "--text",
            "builtin-heldout",
            "--window",
            "64",
            "--windows",
            "2",
            "--json"
        ])
    };
    assert_eq!(compared().json()["comparison"]["kl"]["mean"], 0.0);
    // With two tokens exchanged, positions cannot be compared.
    let mut tokenizer: Value = serde_json::from_str(&file("floats")).unwrap();
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let tokens = ["Ġthe", "Ġand"];
    let ids = tokens.map(|token| vocabulary[token].clone());
    tokens.iter().zip(ids.into_iter().rev()).for_each(|(token, id)| vocabulary[*token] = id);
    std::fs::write(at("floats").join("tokenizer.json"), tokenizer.to_string()).unwrap();
    check_message(
        "exchanged",
        &compared(),
        2,
        &["have different tokenizers", "the one it was quantized from"],
    );
}

#[test]
fn requests_for_floats_that_cannot_be_met() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = demo_model();
    let run = |options: &[&str]| {
        let arguments = args!["quantize", &model, "-o", at("out"), "--format", "safetensors"];
        quant(arguments.into_iter().chain(options.iter().map(Into::into)).collect::<Vec<_>>())
    };
    for (options, expected) in [
        (&[][..], "needs the type of the floats"),
        (&["--scheme", "q8_0"], "stores floats, not `q8_0`"),
        (&["--scheme", "bf16", "--method", "rtn"], "--method has no effect"),
        (&["--scheme", "bf16", "--samples", "8"], "--samples has no effect"),
        (&["--scheme", "bf16", "--calibration", "builtin"], "--calibration has no effect"),
        (&["--scheme", "bf16", "--pre", "none"], "--pre has no effect"),
        (&["--scheme", "bf16", "--format", "gptq"], "cannot be combined with other formats"),
        (&["--scheme", "bf16", "--report", "r.html"], "--report has no effect"),
    ] {
        check_message(expected, &run(options), 2, &[expected]);
        assert!(!at("out").exists(), "{options:?}");
    }
    let planned = quant(args!["plan", &model, "--format", "safetensors", "--scheme", "bf16"]);
    check_message("a plan", &planned, 2, &["there is no plan for float checkpoints"]);
    let hint = quant(args!["quantize", &model, "-o", at("out"), "--scheme", "bf16"]);
    check_message("without a format", &hint, 2, &["--format safetensors"]);
    let job = quant(args![
        "job",
        "init",
        &model,
        "--job",
        at("job"),
        "--format",
        "safetensors",
        "--scheme",
        "bf16"
    ]);
    check_message("a job", &job, 2, &["do not write float checkpoints"]);
    TinyLlama::default().write(&at("large"));
    let mut tensors = read_safetensors(&at("large").join("model.safetensors"));
    let of = tensors.iter_mut().find(|t| t.name.ends_with("up_proj.weight")).unwrap();
    of.dtype = "BF16".into();
    of.data[2..4].copy_from_slice(&0x7f00_u16.to_le_bytes());
    let file = quant_tests::models::safetensors(&tensors);
    std::fs::write(at("large").join("model.safetensors"), file).unwrap();
    let run = floats(&at("large"), &at("no"), "f16");
    check_message("range", &run, 6, &["up_proj", "exceeds the range of F16"]);
    assert!(!at("no").exists());
}
