//! Files with IQ2 and IQ3, whose magnitudes come from code books.

use std::ffi::OsString;
use std::path::Path;

use quant_tests::args;
use quant_tests::demo_model;
use quant_tests::models::write_cut_demo_model;
use quant_tests::program::{Run, quant};
use quant_tests::refusal::check_message;
use serde_json::Value;

const TEXT: [&str; 6] = ["--calibration", "builtin", "--samples", "16", "--seq-len", "256"];

fn quantize(model: &Path, out: &Path, options: &[&str]) -> Run {
    let arguments = args!["quantize", model, "-o", out, "--format", "gguf", "--force", "--json"];
    quant(arguments.into_iter().chain(options.iter().map(OsString::from)).collect::<Vec<_>>())
}

fn evaluated(model: &Path, options: &[&str]) -> Value {
    let arguments =
        args!["eval", model, "--text", "builtin-heldout", "--window", "128", "--windows", "24", "--json"];
    quant(arguments.into_iter().chain(options.iter().map(OsString::from)).collect::<Vec<_>>()).json()
}

fn perplexity(evaluated: &Value) -> f64 {
    evaluated["perplexity"]["mean"].as_f64().expect("a perplexity")
}

#[test]
fn mixtures_are_written_and_read() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    write_cut_demo_model(&model, 3);
    let matrix = at("imatrix.gguf").to_str().unwrap().to_owned();
    let first = [&["--scheme", "iq2_xxs", "--save-imatrix", &matrix][..], &TEXT].concat();
    quantize(&model, &at("first.gguf"), &first).succeeded();
    let mut last = 0;
    for (scheme, kinds) in [
        ("iq2_xxs", &["IQ2_XXS", "Q2_K"][..]),
        ("iq2_xs", &["IQ2_XS", "Q2_K"]),
        ("iq2_s", &["IQ2_XS", "IQ3_S"]),
        ("iq2_m", &["IQ2_S", "IQ3_S"]),
        ("iq3_xxs", &["IQ3_XXS", "IQ2_S", "IQ3_S"]),
        ("iq3_xs", &["IQ3_S", "IQ3_XXS"]),
        ("iq3_s", &["IQ3_S"]),
        ("iq3_m", &["IQ3_S", "Q4_K"]),
    ] {
        let out = at(scheme);
        let summary =
            quantize(&model, &out.with_extension("gguf"), &["--scheme", scheme, "--imatrix", &matrix]);
        let summary = summary.json();
        assert_eq!(summary["mixture"], scheme.to_uppercase());
        for kind in kinds {
            assert!(summary["types"][kind].as_u64().is_some_and(|n| n > 0), "{scheme}: {summary}");
        }
        let bytes = summary["bytes_after"].as_u64().unwrap();
        assert!(bytes >= last, "{scheme}");
        last = bytes;
        let inspected = quant(args!["inspect", out.with_extension("gguf"), "--json"]).json();
        assert_eq!(inspected["gguf"]["mixture"], scheme.to_uppercase());
    }
    let divergence = |name: &str| {
        let found = evaluated(&at(name), &["--reference", model.to_str().unwrap()]);
        found["comparison"]["kl"]["mean"].as_f64().expect("a KL divergence")
    };
    let [two, three] = ["iq2_xxs.gguf", "iq3_m.gguf"].map(divergence);
    assert!(three > 0.0 && three < 0.5 * two && two < 2.0, "{two} and {three}");
    let run = quant(args![
        "eval",
        at("iq3_s.gguf"),
        "--text",
        "builtin-heldout",
        "--windows",
        "1",
        "--execution",
        "kernels"
    ]);
    assert!(run.succeeded().stderr.contains("IQ3_S"));
    let again = ["--scheme", "q8_0", "--requantize"];
    quantize(&at("iq2_xs.gguf"), &at("again.gguf"), &again).succeeded();
    let [a, b] = ["iq2_xs.gguf", "again.gguf"].map(|name| perplexity(&evaluated(&at(name), &[])));
    assert!((a / b - 1.0).abs() < 0.01, "{a} and {b}");
}

#[test]
fn gptq_compensates_for_whole_blocks() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = demo_model();
    let divergence = |options: &[&str]| {
        quantize(&model, &at("out.gguf"), &[&["--scheme", "iq3_s"], &TEXT[..], options].concat()).succeeded();
        let reference = model.to_str().unwrap();
        let found = evaluated(&at("out.gguf"), &["--reference", reference]);
        found["comparison"]["kl"]["mean"].as_f64().expect("a KL divergence")
    };
    let [plain, gptq] = [divergence(&[]), divergence(&["--method", "gptq"])];
    assert!(gptq < 0.95 * plain, "{gptq} of {plain}");
}

#[test]
fn types_that_need_an_importance_matrix() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out.gguf");
    let model = demo_model();
    for scheme in ["iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs", "iq3_xs"] {
        let run = quantize(&model, &out, &["--scheme", scheme]);
        check_message(scheme, &run, 2, &["needs an importance matrix", "--calibration", "--imatrix"]);
    }
    let run = quantize(&model, &out, &["--scheme", "q4_k_m", "--override", "ffn_up=iq3_xxs"]);
    check_message("an override", &run, 2, &["IQ3_XXS of `blk.0.ffn_up.weight` needs an importance matrix"]);
    assert!(!out.exists());
    // As in llama-quantize, these do not need one; nor does the embedding, for which there is never any.
    quantize(&model, &out, &["--scheme", "iq3_s", "--override", "token_embd=iq2_s"]).succeeded();
}
