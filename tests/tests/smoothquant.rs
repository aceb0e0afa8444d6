//! SmoothQuant on the command line.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::Path;

use quant_tests::files::{sha256, snapshot};
use quant_tests::models::{TinyLlama, edit_config};
use quant_tests::opt::TinyOpt;
use quant_tests::program::{Run, quant};
use quant_tests::refusal::check_message;
use quant_tests::{args, demo_model};
use serde_json::json;

const TEXT: [&str; 4] = ["--samples", "4", "--seq-len", "128"];

fn quantize(model: &Path, out: &Path, options: &[&str]) -> Run {
    let start = args!["quantize", model, "-o", out, "--quiet"];
    quant(start.into_iter().chain(options.iter().map(OsString::from)))
}

fn weights(out: &Path) -> String {
    sha256(&std::fs::read(out.join("model.safetensors")).unwrap())
}

#[test]
fn every_option_changes_what_is_written() {
    let scratch = tempfile::tempdir().unwrap();
    let mut seen = BTreeSet::new();
    let cases: [&[&str]; 9] = [
        &["--method", "rtn", "--scheme", "w8a8"],
        &["--preset", "smoothquant-w8a8"],
        &["--preset", "smoothquant-w8a8", "--alpha", "0.3"],
        &["--preset", "smoothquant-w8a8", "--alpha", "auto"],
        &["--preset", "smoothquant-w8a8", "--smooth-producers", "all"],
        &["--method", "smoothquant", "--scheme", "w8a8-static"],
        &["--method", "smoothquant", "--scheme", "w8a8-static-asym"],
        &["--method", "smoothquant-gptq"],
        &["--method", "fold-norms,smoothquant"],
    ];
    for (i, options) in cases.iter().enumerate() {
        let out = scratch.path().join(i.to_string());
        let text = if options.contains(&"rtn") { &[][..] } else { &TEXT[..] };
        quantize(&demo_model(), &out, &[options, text].concat()).succeeded();
        assert!(seen.insert(weights(&out)), "{options:?} changes nothing");
        let perplexity = |execution: &str| {
            let window = ["--text", "builtin-heldout", "--window", "96", "--windows", "4", "--json"];
            let start = args!["eval", &out, "--execution", execution];
            let run = quant(start.into_iter().chain(window.map(OsString::from))).json();
            run["perplexity"]["mean"].as_f64().unwrap()
        };
        let (fake, kernels) = (perplexity("fake"), perplexity("kernels"));
        assert!((kernels / fake - 1.0).abs() < 0.005, "{options:?}: {fake} and {kernels}");
    }
}

#[test]
fn bytes_depend_on_neither_threads_nor_where_the_maxima_come_from() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let kept = at("maxima.safetensors");
    let preset = ["--preset", "smoothquant-w8a8"];
    let kept_text = kept.to_str().unwrap();
    let run = |name: &str, options: &[&str]| quantize(&demo_model(), &at(name), options);
    run("first", &[&preset[..], &TEXT, &["--save-channel-maxima", kept_text]].concat()).succeeded();
    run("one", &[&preset[..], &TEXT, &["--threads", "1"]].concat()).succeeded();
    assert_eq!(snapshot(&at("first")), snapshot(&at("one")));
    run("kept", &[&preset[..], &["--channel-maxima", kept_text]].concat()).succeeded();
    assert_eq!(weights(&at("first")), weights(&at("kept")));

    // Stored maxima do not apply to a model that a different step has changed first.
    for first in ["rotate", "fold-norms", "reorder"] {
        let method = format!("{first},smoothquant");
        let options = ["--method", &method, "--scheme", "w8a8", "--channel-maxima", kept_text];
        let expected = [&format!("`{first}` modifies it first")[..], "omit --channel-maxima"];
        check_message(first, &run("refused", &options), 2, &expected);
        let plan = args!["plan", demo_model()].into_iter().chain(options.iter().map(OsString::from));
        check_message(first, &quant(plan), 2, &expected);
    }
    // Maxima of a different model are refused before anything is computed, also by `plan`.
    let other = at("other");
    TinyLlama { hidden: 32, ..TinyLlama::default() }.write(&other);
    let options = [&preset[..], &["--channel-maxima", kept_text]].concat();
    let plan = args!["plan", &other].into_iter().chain(options.iter().map(OsString::from));
    check_message("another model", &quant(plan), 4, &["maxima.safetensors", "q_proj", "of the same model"]);
    // The maxima cannot be written inside the output directory either.
    let inside = at("refused").join("maxima.safetensors");
    let options = [&preset[..], &TEXT, &["--save-channel-maxima", inside.to_str().unwrap()]].concat();
    assert_eq!(run("refused", &options).code(), Some(2));
    assert!(!at("refused").exists());
}

#[test]
fn opt_is_smoothed_by_every_method_that_its_norms_allow() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("opt");
    TinyOpt::default().write(&model);
    let text = ["--samples", "2", "--seq-len", "32"];
    let mut seen = BTreeSet::new();
    for (i, options) in [
        &["--preset", "smoothquant-w8a8"][..],
        &["--method", "smoothquant-gptq", "--scheme", "w4a8-g16"],
        &["--method", "gptq", "--scheme", "w4a16-g16", "--format", "gptq"],
        &["--method", "awq-gptq", "--scheme", "w4a16-g16", "--format", "awq"],
        &["--method", "smooth-outputs,gptq", "--scheme", "w4a8-g16"],
    ]
    .iter()
    .enumerate()
    {
        let out = scratch.path().join(i.to_string());
        quantize(&model, &out, &[options, &text[..]].concat()).succeeded();
        assert!(seen.insert(weights(&out)), "{options:?}");
        quant(args!["inspect", &out]).succeeded();
    }
    for step in ["rotate", "fold-norms"] {
        let method = format!("{step},smoothquant");
        let refused =
            quantize(&model, &scratch.path().join("no"), &["--method", &method, "--scheme", "w8a8"]);
        check_message(step, &refused, 2, &["of the family `opt`", &format!("--skip {step}")]);
    }
    edit_config(&model, &json!({ "activation_function": "gelu" }));
    let refused = quantize(&model, &scratch.path().join("no"), &["--preset", "smoothquant-w8a8"]);
    assert_eq!(refused.code(), Some(4), "{refused}");
}
