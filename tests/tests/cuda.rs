//! `--device cuda`: quantized linears on a GPU, or on the stand-in for its driver library (`cargo xtask cuda`).

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use quant_tests::models::write_cut_demo_model;
use quant_tests::program::{Run, Running, command, quant};
use quant_tests::refusal::check_message;
use quant_tests::{args, demo_model};
use serde_json::Value;

/// Names a directory with a stand-in for the driver's library.
const STAND_IN: &str = "QUANT_CUDA_STAND_IN";
/// Set if the stand-in and the compiler must be available.
const REQUIRED: &str = "QUANT_REQUIRE_NVRTC";

const TEXT: [&str; 8] =
    ["--text", "builtin-heldout", "--window", "24", "--windows", "1", "--execution", "kernels"];

/// The command, set up to find the stand-in; without one, `None`, after a message.
fn on_stand_in(arguments: Vec<OsString>, images: &Path) -> Option<Command> {
    let Some(directory) = std::env::var_os(STAND_IN).filter(|path| !path.is_empty()) else {
        assert!(std::env::var_os(REQUIRED).is_none(), "{REQUIRED} is set, but {STAND_IN} is not");
        // Not recorded as skipped, because a separate CI step provides it.
        eprintln!("SKIPPED: {STAND_IN} does not name a stand-in for the driver");
        return None;
    };
    let mut command = command(arguments);
    command.env("LD_LIBRARY_PATH", directory).env("QUANT_CUDA_CACHE", images);
    Some(command)
}

fn evaluate(model: &Path, device: &str) -> Vec<OsString> {
    let mut arguments = args!["eval", model, "--device", device, "--json"];
    arguments.extend(TEXT.iter().map(Into::into));
    arguments
}

fn perplexity(result: &Value) -> f64 {
    result["perplexity"]["mean"].as_f64().unwrap()
}

#[test]
fn a_model_is_evaluated_on_the_device() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    write_cut_demo_model(&at("model"), 1);
    let floats = ["nvfp4a16", "mxfp4a16", "wf8a16-channel", "mxfp8a16", "fp8", "nvfp4"];
    for scheme in ["w4a16-g32", "w8a8", "w4a8-g64"].into_iter().chain(floats) {
        let out = at(scheme);
        quant(args!["quantize", at("model"), "-o", &out, "--method", "rtn", "--scheme", scheme]).succeeded();
        let Some(device) = on_stand_in(evaluate(&out, "cuda"), &at("images")) else { return };
        let there = Running::start(device).wait().succeeded().json();
        // The device computes norms and gates separately from linears, and so does the scalar path.
        let mut scalar = command(evaluate(&out, "cpu"));
        scalar.env("QUANT_ISA", "scalar");
        let here = Running::start(scalar).wait().succeeded().json();
        let isa = there["tool"]["isa"].as_str().unwrap();
        assert!(isa.contains("kernels cuda on PTX interpreter"), "{isa}");
        let (there, here) = (perplexity(&there), perplexity(&here));
        // On a coarse grid, the last bits of earlier results can decide how an input is rounded.
        let max = if matches!(scheme, "fp8" | "nvfp4") { 0.03 } else { 5e-4 };
        assert!((there / here - 1.0).abs() < max, "{scheme}: {there} on the device, {here} here");
    }
}

#[test]
fn speed_is_measured_on_the_device() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    write_cut_demo_model(&at("model"), 1);
    quant(args!["quantize", at("model"), "-o", at("out"), "--method", "rtn", "--scheme", "w8a8"]).succeeded();
    let run = args![
        "bench",
        at("out"),
        "--device",
        "cuda",
        "--prefill",
        "4",
        "--decode",
        "1",
        "--repeat",
        "1",
        "--json"
    ];
    let Some(command) = on_stand_in(run, &at("images")) else { return };
    let measured = Running::start(command).wait().succeeded().json();
    assert_eq!(measured["kernels"], "cuda on PTX interpreter");
}

#[test]
fn kernels_are_measured_on_the_device() {
    let scratch = tempfile::tempdir().unwrap();
    let table = scratch.path().join("table.json");
    let mut json = OsString::from("--json=");
    json.push(&table);
    let arguments = args!["bench", "kernels", "--device", "cuda", "--only", "quantize 4096 1", json];
    let Some(command) = on_stand_in(arguments, &scratch.path().join("images")) else { return };
    let run = Running::start(command).wait().succeeded();
    let shown = &run.stdout;
    let measured: Value = serde_json::from_slice(&std::fs::read(&table).unwrap()).unwrap();
    assert_eq!(measured["schema"], "quant-bench-kernels-cuda/1");
    assert_eq!(measured["device"]["name"], "PTX interpreter");
    assert_eq!(measured["failed"].as_array().unwrap().len(), 0);
    let kernels = measured["kernels"].as_array().unwrap();
    let names: Vec<&str> = kernels.iter().map(|kernel| kernel["kernel"].as_str().unwrap()).collect();
    assert_eq!(names, ["add_rms_norm_quantize", "silu_mul_quantize", "quantize"]);
    for kernel in kernels {
        let number = |key: &str| kernel[key].as_f64().unwrap();
        assert!(shown.contains(kernel["kernel"].as_str().unwrap()), "{shown}");
        assert_eq!((&kernel["shape"], &kernel["tokens"]), (&"4096".into(), &1.into()));
        assert_eq!(kernel["all_seconds"].as_array().unwrap().len(), 5);
        // On the stand-in, times are meaningless; only the relations between the numbers are checked.
        assert_eq!(kernel["bound"], "bytes");
        let floor = number("gb_per_second") / measured["ceilings"]["copy_gb_per_second"].as_f64().unwrap();
        assert!((number("share") / floor - 1.0).abs() < 1e-9, "{kernel}");
        assert!(
            (number("share") * number("seconds") / number("floor_seconds") - 1.0).abs() < 1e-9,
            "{kernel}"
        );
    }
    for ceiling in ["read_gb_per_second", "f16_tops", "bf16_tops", "int8_tops", "launch_seconds"] {
        let value = measured["ceilings"][ceiling].as_f64().unwrap();
        assert!(value > 0.0 && value.is_finite(), "{ceiling}: {value}");
    }
}

fn refused(arguments: Vec<OsString>) -> Run {
    let mut command = command(arguments);
    command.env("CUDA_VISIBLE_DEVICES", "");
    Running::start(command).wait()
}

#[test]
fn without_a_device_nothing_is_read() {
    let missing = Path::new("/nowhere/model");
    let run = refused(evaluate(missing, "cuda"));
    check_message("no device", &run, 5, &["an NVIDIA GPU is not available", "--device"]);
    let run = refused(args!["bench", missing, "--device", "cuda"]);
    check_message("no device", &run, 5, &["an NVIDIA GPU is not available"]);
    let run = refused(args!["bench", "kernels", "--device", "cuda"]);
    check_message("no device", &run, 5, &["an NVIDIA GPU is not available"]);
}

#[test]
fn the_device_is_for_kernels() {
    let text = ["--text", "builtin-heldout", "--device", "cuda"];
    let arguments = |more: &[&str]| {
        let mut all = args!["eval", demo_model()];
        all.extend(text.iter().chain(more).map(Into::into));
        all
    };
    check_message("no kernels", &quant(arguments(&[])), 2, &["--device cuda", "--execution kernels"]);
    let ablation = ["--execution", "kernels", "--ablation"];
    let run = quant(arguments(&ablation));
    assert_eq!(run.code(), Some(2), "{run}");
}
