//! Several formats from one run, and quantized checkpoints converted to another format.

use std::ffi::OsString;
use std::path::Path;

use quant_tests::args;
use quant_tests::files::{hashes, snapshot};
use quant_tests::models::{TinyLlama, edit_config, write_cut_demo_model};
use quant_tests::program::{Running, Signal, command, quant};
use quant_tests::refusal::{check_message, job_of};
use serde_json::{Value, json};

const BOTH: [&str; 4] = ["--format", "compressed-tensors", "--format", "awq"];
const SHORT: [&str; 4] = ["--samples", "2", "--seq-len", "128"];

fn quantize(model: &Path, out: &Path, options: &[&str]) -> Vec<OsString> {
    let arguments = args!["quantize", model, "-o", out];
    arguments.into_iter().chain(options.iter().map(OsString::from)).collect()
}

fn config(checkpoint: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(checkpoint.join("config.json")).unwrap()).unwrap()
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn one_run_writes_what_each_format_would_get_alone() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    write_cut_demo_model(&model, 2);
    let both = at("both");
    let options = [&BOTH[..], &SHORT[..], &["--json"]].concat();
    let summary = quant(quantize(&model, &both, &options)).json();
    assert_eq!(names(&both), ["awq", "compressed-tensors"]);
    let outputs = summary["outputs"].as_array().unwrap();
    assert_eq!(outputs.len(), 2);
    for (output, format) in outputs.iter().zip(["compressed-tensors", "awq"]) {
        assert_eq!(output["format"], format);
        let alone = at(&format!("{format} alone"));
        let single = quant(quantize(&model, &alone, &[&["--format", format, "--json"][..], &SHORT].concat()));
        assert_eq!(single.json()["outputs"][0]["bytes_after"], output["bytes_after"]);
        assert_eq!(hashes(&both.join(format)), hashes(&alone), "{format}");
    }
    // Neither output is overwritten without `--force`. With it, both are replaced together.
    let before = snapshot(&both);
    let run = quant(quantize(&model, &both, &options));
    check_message("they exist", &run, 2, &["compressed-tensors exists already", "--force"]);
    assert_eq!(snapshot(&both), before);
    quant(quantize(&model, &both, &[&options[..], &["--force"]].concat())).succeeded();
    assert_eq!(snapshot(&both), before);
}

#[test]
fn an_interrupted_run_of_both_leaves_neither_and_resumes() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    write_cut_demo_model(&model, 3);
    let options = [&BOTH[..], &SHORT[..]].concat();
    quant(quantize(&model, &at("whole"), &options)).succeeded();

    let out = at("out");
    let mut run = Running::start(command(quantize(&model, &out, &options)));
    let journal = job_of(&out.join("awq")).join("journal.jsonl");
    let block_done =
        || std::fs::read_to_string(&journal).unwrap_or_default().contains("layers.0.self_attn.v_proj");
    assert!(run.wait_until(block_done), "ended before a block was finished");
    run.signal(Signal::INT);
    let run = run.wait();
    check_message("SIGINT", &run, 75, &["continue with: "]);
    assert_eq!(names(&out), ["awq.job", "compressed-tensors.job"]);
    // A run of one format would leave these behind.
    let one = quant(quantize(&model, &out, &[&["--format", "awq"], &SHORT[..]].concat()));
    check_message("one format", &one, 2, &[".job holds an interrupted run", "with the formats that it had"]);
    assert_eq!(names(&out), ["awq.job", "compressed-tensors.job"]);
    let run = quant(quantize(&model, &out, &[&options[..], &["--resume"]].concat())).succeeded();
    assert_eq!(run.stderr.matches("note: resumed: ").count(), 2, "{run}");
    for format in ["awq", "compressed-tensors"] {
        assert_eq!(hashes(&out.join(format)), hashes(&at("whole").join(format)), "{format}");
    }
    assert_eq!(names(&out), ["awq", "compressed-tensors"]);
    // The state after a run was killed between the two renames: only one output exists.
    std::fs::remove_dir_all(out.join("awq")).unwrap();
    let run = quant(quantize(&model, &out, &[&options[..], &["--resume"]].concat()));
    check_message("one of two", &run, 2, &["compressed-tensors already exists", "add --force"]);
    quant(quantize(&model, &out, &[&options[..], &["--resume", "--force"]].concat())).succeeded();
    assert_eq!(hashes(&out.join("awq")), hashes(&at("whole").join("awq")));
}

#[test]
fn a_directory_for_formats_holds_nothing_else() {
    let scratch = tempfile::tempdir().unwrap();
    let (model, out) = (scratch.path().join("model"), scratch.path().join("out"));
    TinyLlama::default().write(&model);
    let options = [&BOTH[..], &["--method", "rtn", "--group-size", "32"]].concat();
    std::fs::create_dir(&out).unwrap();
    std::fs::write(out.join("letter.txt"), "dear").unwrap();
    let run = quant(quantize(&model, &out, &[&options[..], &["--force"]].concat()));
    check_message("a letter", &run, 2, &["letter.txt", "choose a different output"]);
    assert_eq!(names(&out), ["letter.txt"]);
    std::fs::remove_file(out.join("letter.txt")).unwrap();
    quant(quantize(&model, &out, &options)).succeeded();
    let run = quant(args!["inspect", &out]);
    check_message("several", &run, 4, &["these directories in it do: awq, compressed-tensors"]);

    let other = scratch.path().join("other");
    let three = [&BOTH[..], &["--method", "rtn", "--scheme", "w3a16-g32"]].concat();
    let run = quant(quantize(&model, &other, &three));
    check_message("3 bits", &run, 2, &["the awq format supports 4-bit weights only, not 3"]);
    assert!(!other.exists());
    for (case, formats, expected) in [
        ("twice", &["--format", "awq", "--format", "awq"][..], "`awq` is listed twice"),
        ("unknown", &["--format", "awq", "--format", "gguf9"], "unknown format `gguf9`"),
    ] {
        check_message(case, &quant(quantize(&model, &other, formats)), 2, &[expected]);
    }
}

#[test]
fn a_quantized_checkpoint_is_written_in_another_format() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    TinyLlama::default().write(&model);
    let rtn = ["--method", "rtn", "--group-size", "32"];
    quant(quantize(&model, &at("awq"), &[&rtn[..], &["--format", "awq"]].concat())).succeeded();

    let plan = quant(args!["plan", at("awq"), "--format", "compressed-tensors", "--json"]).json();
    let summary =
        quant(quantize(&at("awq"), &at("ct"), &["--format", "compressed-tensors", "--json"])).json();
    assert_eq!(summary["method"], "repack");
    assert_eq!(summary["outputs"][0]["bytes_after"], plan["formats"][0]["output_bytes"]);
    assert_eq!(config(&at("ct"))["quantization_config"]["quant_method"], "compressed-tensors");
    quant(quantize(&at("ct"), &at("back"), &["--format", "awq"])).succeeded();
    let weights = |name: &str| hashes(&at(name))["model.safetensors"].clone();
    assert_eq!(weights("back"), weights("awq"));
    assert_eq!(config(&at("back")), config(&at("awq")));
    quant(quantize(&at("awq"), &at("both"), &BOTH)).succeeded();
    assert_eq!(hashes(&at("both").join("compressed-tensors")), hashes(&at("ct")));
    let eval = |name: &str| {
        let text = args!["--text", "builtin-heldout", "--window", "64", "--windows", "2", "--json"];
        quant(args!["eval", at(name)].into_iter().chain(text)).json()["window_nll"].clone()
    };
    assert_eq!(eval("ct"), eval("awq"));

    for (case, options) in [
        ("nothing said", &[][..]),
        ("a method", &["--format", "awq", "--method", "rtn"]),
        ("a scheme", &["--format", "awq", "--scheme", "w4a16-g32"]),
        ("a pattern", &["--format", "awq", "--ignore", "down_proj"]),
        ("a sample", &["--format", "awq", "--samples", "3"]),
    ] {
        let run = quant(quantize(&at("ct"), &at("no"), options));
        check_message(case, &run, 4, &["is already quantized (compressed-tensors)", "set only --format"]);
        assert!(!at("no").exists(), "{case}");
    }
    let run = quant(quantize(&at("ct"), &at("no"), &["--format", "awq", "--calibration", "builtin"]));
    check_message("a text", &run, 2, &["--calibration builtin has no effect"]);
}

#[test]
fn a_checkpoint_that_does_not_fit_the_other_format_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    TinyLlama::default().write(&model);
    let rtn = ["--method", "rtn", "--scheme", "w4a16-g32"];
    let override_ = ["--override", "down_proj=w8a16-g32"];
    quant(quantize(&model, &at("mixed"), &[&rtn[..], &override_].concat())).succeeded();
    let run = quant(quantize(&at("mixed"), &at("no"), &["--format", "awq"]));
    check_message(
        "8 bits",
        &run,
        2,
        &["down_proj", "4-bit weights only, not 8", "original float checkpoint"],
    );
    quant(quantize(&model, &at("head"), &[&rtn[..], &["--override", "lm_head=w4a16-g32"]].concat()))
        .succeeded();
    let run = quant(quantize(&at("head"), &at("no"), &["--format", "awq"]));
    check_message("the head", &run, 2, &["`lm_head` cannot be quantized", "keep it float"]);
    edit_config(&at("mixed"), &json!({ "quantization_config": { "quant_method": "gguf" } }));
    let run = quant(quantize(&at("mixed"), &at("no"), &["--format", "awq"]));
    check_message("unknown", &run, 4, &["`quantization_config.quant_method` is gguf"]);
    assert!(!at("no").exists());
}

#[test]
fn plan_tells_which_engines_load_it() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    TinyLlama::default().write(&model);
    let arguments = args!["plan", &model, "--group-size", "32", "--ignore", "q_proj"];
    let text = quant(arguments.clone()).succeeded().stdout;
    for part in ["vLLM, CPU 0.32.0", "vLLM, CUDA 0.33.0", "; vLLM, CPU: of 0.33.0; see"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(
        text.contains(
            "`model.layers.0.self_attn.q_proj` and `model.layers.0.self_attn.k_proj` are fused into one"
        ),
        "{text}"
    );
    let out = scratch.path().join("out");
    let run = quant(quantize(&model, &out, &["--method", "rtn", "--group-size", "32", "--ignore", "q_proj"]));
    assert!(
        run.succeeded().stderr.contains("note: vLLM, CUDA 0.33.0 does not load this as compressed-tensors")
    );
    let plan = quant(arguments.into_iter().chain(args!["--json"])).json();
    let engines = plan["formats"][0]["engines"].as_array().unwrap();
    let of = |name: &str| engines.iter().find(|e| e["engine"].as_str().unwrap().starts_with(name)).unwrap();
    let vllm = of("vLLM, CUDA");
    assert!(vllm["version"].is_string() && vllm["read"].is_string() && vllm.get("read_version").is_none());
    let on_cpu = of("vLLM, CPU");
    assert_eq!((&on_cpu["version"], &on_cpu["read_version"]), (&json!("0.32.0"), &vllm["version"]));
    assert_eq!(vllm["ranks"].as_array().unwrap().len(), 4);
    assert_eq!(vllm["ranks"][0]["loads"], "no");
    assert_eq!(of("transformers")["ranks"], json!([{ "ranks": 1, "loads": "yes", "reason": null }]));
}

#[test]
fn a_note_says_once_that_an_engine_does_not_load_it() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    TinyLlama::default().write(&model);
    for (case, options, note, engines) in [
        (
            "modelopt",
            &["--format", "modelopt", "--scheme", "nvfp4a16"][..],
            "does not load the modelopt format",
            &["transformers"][..],
        ),
        (
            "gptq-asym",
            &["--format", "gptq", "--group-size", "32", "--asymmetric"],
            "support only symmetric grids in the gptq format",
            &["vLLM, CUDA", "SGLang"],
        ),
        (
            "w3a16",
            &["--scheme", "w3a16-g32"],
            "SGLang and llama.cpp's converter do not support them",
            &["SGLang"],
        ),
    ] {
        let out = scratch.path().join(case);
        let run = quant(quantize(&model, &out, &[&["--method", "rtn"], options].concat())).succeeded();
        assert_eq!(run.stderr.matches(note).count(), 1, "{run}");
        for engine in engines {
            let again = run
                .stderr
                .lines()
                .any(|line| line.contains(engine) && line.contains("does not load this as"));
            assert!(!again, "{engine}: {run}");
        }
    }
}
