//! OPT as a user sees it.

use std::path::Path;

use quant_tests::args;
use quant_tests::files::hashes;
use quant_tests::models::{edit_config, read_safetensors, safetensors};
use quant_tests::opt::TinyOpt;
use quant_tests::program::{Run, quant};
use quant_tests::refusal::{check_message, refuses_to_quantize};
use serde_json::{Value, json};

const SHORT: [&str; 4] = ["--samples", "4", "--seq-len", "128"];

fn model() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    TinyOpt::default().write(directory.path());
    directory
}

fn run(subcommand: &str, model: &Path, options: &[&str]) -> Run {
    quant(args![subcommand, model].into_iter().chain(options.iter().map(Into::into)))
}

fn quantize(model: &Path, out: &Path, options: &[&str]) {
    quant(args!["quantize", model, "-o", out].into_iter().chain(options.iter().map(Into::into))).succeeded();
}

#[test]
fn every_command_works_on_it() {
    let (model, scratch) = (model(), tempfile::tempdir().unwrap());
    let model = model.path();
    let plan = run("plan", model, &["--group-size", "32", "--seq-len", "96", "--json"]).json();
    let tensors = plan["formats"][0]["tensors"].as_array().unwrap();
    let quantized = |t: &&Value| t["outputs"].as_array().unwrap().len() > 1;
    assert_eq!(tensors.iter().filter(quantized).count(), 2 * 6);
    let inspected = run("inspect", model, &["--json"]).json();
    assert_eq!((&inspected["family"], &inspected["max_positions"]), (&json!("opt"), &json!(192)));

    for (name, options) in [
        ("rtn", &["--method", "rtn", "--scheme", "w8a16-g32"][..]),
        ("awq", &["--scheme", "w8a16-g32"]),
        ("awq4", &["--group-size", "32", "--format", "awq"]),
    ] {
        let out = scratch.path().join(name);
        let search = if name == "rtn" { &[][..] } else { &SHORT };
        quantize(model, &out, &[options, search].concat());
        let again = scratch.path().join(format!("{name} by one thread"));
        quantize(model, &again, &[options, search, &["--threads", "1"]].concat());
        assert_eq!(hashes(&out), hashes(&again), "{name}");

        let window =
            ["--text", "builtin-heldout", "--window", "96", "--windows", "4", "--json", "--reference"];
        let eval = run("eval", &out, &[&window[..], &[model.to_str().unwrap()]].concat()).json();
        let kl = eval["comparison"]["kl"]["mean"].as_f64().unwrap();
        assert!((0.0..if name == "awq4" { 0.2 } else { 2e-3 }).contains(&kl), "{name}: {kl}");
        let bench = run("bench", &out, &["--prefill", "16", "--decode", "4", "--repeat", "1", "--json"]);
        assert_eq!(bench.json()["schema"], "quant-bench/2");
    }

    // The head stays tied to the embedding, positions are unchanged, and names follow the engines' fused matrices.
    let written = read_safetensors(&scratch.path().join("awq/model.safetensors"));
    assert!(written.iter().all(|t| !t.name.starts_with("lm_head")));
    let positions = |tensors: &[quant_tests::models::RawTensor]| {
        tensors.iter().find(|t| t.name.ends_with("embed_positions.weight")).unwrap().clone()
    };
    assert_eq!(positions(&written), positions(&TinyOpt::default().tensors()));
    let out = scratch.path().join("ignored");
    quantize(model, &out, &["--method", "rtn", "--group-size", "32", "--ignore", "*.layers.1.self_attn.*"]);
    let config: Value = serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
    let ignored = config["quantization_config"]["ignore"].as_array().unwrap();
    for name in ["q_proj", "out_proj", "qkv_proj"] {
        let module = format!("model.decoder.layers.1.self_attn.{name}");
        assert!(ignored.contains(&json!(module)), "{ignored:?}");
    }
}

/// Names as saved by a class without a head.
#[test]
fn short_names_are_written_out() {
    let (long, short) = (model(), model());
    let file = short.path().join("model.safetensors");
    let mut tensors = read_safetensors(&file);
    for tensor in &mut tensors {
        tensor.name = tensor.name.strip_prefix("model.").unwrap().to_owned();
    }
    std::fs::write(&file, safetensors(&tensors)).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let written = |model: &Path, name: &str| {
        let out = scratch.path().join(name);
        quantize(model, &out, &[&["--group-size", "32"], &SHORT[..]].concat());
        ["model.safetensors", "config.json"].map(|file| std::fs::read(out.join(file)).unwrap())
    };
    assert_eq!(written(short.path(), "short"), written(long.path(), "long"));
}

#[test]
fn what_is_not_supported_is_refused() {
    let rtn = ["--method", "rtn", "--group-size", "32"];
    for (changes, expected) in [
        (json!({ "do_layer_norm_before": false }), "`do_layer_norm_before` is false"),
        (json!({ "word_embed_proj_dim": 32 }), "`word_embed_proj_dim` is 32"),
        (json!({ "activation_function": "gelu" }), "`activation_function` is `gelu`"),
    ] {
        let model = model();
        edit_config(model.path(), &changes);
        refuses_to_quantize(expected, model.path(), &rtn, 4, &["config.json", expected]);
    }
    let fewer = model();
    edit_config(fewer.path(), &json!({ "max_position_embeddings": 190 }));
    let expected = ["`model.decoder.embed_positions.weight`", "[194, 64]", "[192, 64]"];
    refuses_to_quantize("another table", fewer.path(), &rtn, 4, &expected);
}

#[test]
fn windows_longer_than_its_positions_are_refused() {
    let model = model();
    let expected = ["193 tokens", "192 learned positions", "request at most 192"];
    let options = ["--group-size", "32", "--samples", "2", "--seq-len", "193"];
    refuses_to_quantize("calibration", model.path(), &options, 2, &expected);
    check_message("plan", &run("plan", model.path(), &options), 2, &expected);
    let eval = ["--text", "builtin-heldout", "--window", "193", "--windows", "1"];
    check_message("eval", &run("eval", model.path(), &eval), 2, &expected);
    let bench = ["--prefill", "190", "--decode", "3"];
    check_message("bench", &run("bench", model.path(), &bench), 2, &expected);
    run("bench", model.path(), &["--prefill", "190", "--decode", "2", "--repeat", "1"]).succeeded();
}
