//! GPTQ as a user sees it.

use std::ffi::OsString;
use std::path::Path;

use quant_tests::args;
use quant_tests::files::hashes;
use quant_tests::models::{RawTensor, TinyLlama, byte_tokenizer, read_safetensors, write_cut_demo_model};
use quant_tests::program::{Running, Signal, command, quant};
use quant_tests::refusal::{check_message, job_of};
use quant_tests::{demo_model, shared_data};
use serde_json::{Value, json};

const GPTQ: [&str; 6] = ["--method", "gptq", "--samples", "4", "--seq-len", "128"];

fn quantize(model: &Path, out: &Path, options: &[&str]) -> Vec<OsString> {
    let arguments = args!["quantize", model, "-o", out];
    arguments.into_iter().chain(options.iter().map(OsString::from)).collect()
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn tensor(checkpoint: &Path, name: &str) -> RawTensor {
    let tensors = read_safetensors(&checkpoint.join("model.safetensors"));
    tensors.into_iter().find(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"))
}

#[test]
fn each_container_holds_the_same_numbers() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    write_cut_demo_model(&model, 2);
    for scheme in ["w4a16-g64-sym", "w3a16-g32-asym", "w2a16-g32-sym", "w8a16-channel-sym"] {
        let options = |format| [&GPTQ[..], &["--scheme", scheme, "--format", format]].concat();
        let out = at(&format!("gptq {scheme}"));
        quant(quantize(&model, &out, &options("gptq"))).succeeded();
        let other = at(&format!("other {scheme}"));
        quant(quantize(&model, &other, &options("compressed-tensors"))).succeeded();
        let again = at(&format!("again {scheme}"));
        quant(quantize(&other, &again, &["--format", "gptq"])).succeeded();
        assert_eq!(hashes(&again)["model.safetensors"], hashes(&out)["model.safetensors"], "{scheme}");

        let config = read_json(&out.join("config.json"))["quantization_config"].clone();
        assert_eq!(config, read_json(&out.join("quantize_config.json")));
        let channel = scheme.contains("channel");
        assert_eq!(config["quant_method"], "gptq");
        assert_eq!(config["checkpoint_format"], "gptq");
        assert_eq!(config["desc_act"], false);
        assert_eq!(config["sym"], scheme.ends_with("-sym"));
        assert_eq!(config["bits"].as_u64().unwrap(), scheme[1..2].parse::<u64>().unwrap());
        let index = tensor(&out, "model.layers.0.mlp.down_proj.g_idx");
        let index: Vec<i32> =
            index.data.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect();
        let size = if channel { index.len() } else { config["group_size"].as_u64().unwrap() as usize };
        assert!(index.iter().enumerate().all(|(i, &g)| g as usize == i / size), "monotone");
        quant(args!["inspect", &out]).succeeded();
    }
}

#[test]
fn the_report_says_what_was_done_to_each_linear() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    let model = scratch.path().join("model");
    write_cut_demo_model(&model, 1);
    let options = ["--act-order", "static-groups", "--damping", "0.05", "--layer-inputs", "float"];
    quant(quantize(&model, &out, &[&GPTQ[..], &options].concat())).succeeded();
    let report = read_json(&out.join("quant_report.json"));
    let settings = json!({
        "damping": 0.05, "block_size": 128, "act_order": "static-groups", "inputs": "float",
    });
    assert_eq!(report["gptq"], settings);
    assert!(report["calibration"].get("search").is_none());
    let linears: Vec<&Value> =
        report["tensors"].as_array().unwrap().iter().filter(|t| t["action"] == "quantized").collect();
    assert_eq!(linears.len(), 7);
    for linear in linears {
        assert!(linear["gptq"]["loss"].as_f64().unwrap() > 0.0);
        assert_eq!(linear["gptq"]["damping"], 0.05);
        assert_eq!(linear["gptq"]["act_order"], "static-groups");
        assert!(linear["gptq"]["dead_channels"].is_u64());
        assert!(linear["weight_error"]["relative_rms"].as_f64().unwrap() > 0.0);
        assert_eq!(linear["calibration_tokens"], 4 * 128);
    }
}

#[test]
fn every_setting_changes_bytes_and_threads_do_not() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    write_cut_demo_model(&model, 2);
    let weights = |name: &str, options: &[&str]| {
        let out = scratch.path().join(name);
        quant(quantize(&model, &out, &[&GPTQ[..], options].concat())).succeeded();
        hashes(&out)["model.safetensors"].clone()
    };
    let expected = weights("default", &["--threads", "1"]);
    assert_eq!(weights("two threads", &["--threads", "2"]), expected);
    let mut seen = vec![expected];
    for (i, options) in [
        &["--damping", "0.2"][..],
        &["--act-order", "none"],
        &["--act-order", "group-aware"],
        &["--layer-inputs", "float"],
        &["--method", "rtn"],
        &["--method", "awq-gptq"],
        &["--method", "awq"],
    ]
    .into_iter()
    .enumerate()
    {
        let given = |option: &str| options.contains(&option);
        let out = scratch.path().join(i.to_string());
        let method = if given("--method") { &[][..] } else { &GPTQ[..2] };
        let text = if given("rtn") { &[][..] } else { &GPTQ[2..] };
        quant(quantize(&model, &out, &[method, text, options].concat())).succeeded();
        let hash = hashes(&out)["model.safetensors"].clone();
        assert!(!seen.contains(&hash), "{options:?} changes nothing");
        seen.push(hash);
    }
}

#[test]
fn an_interrupted_run_resumes_to_the_same_bytes() {
    for method in ["gptq", "awq-gptq"] {
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        let model = at("model");
        write_cut_demo_model(&model, 3);
        let options = [&["--method", method][..], &GPTQ[2..], &["--format", "gptq"]].concat();
        quant(quantize(&model, &at("whole"), &options)).succeeded();
        let out = at("out");
        let mut run = Running::start(command(quantize(&model, &out, &options)));
        let journal = job_of(&out).join("journal.jsonl");
        let block_done =
            || std::fs::read_to_string(&journal).unwrap_or_default().contains("layers.0.self_attn.v_proj");
        assert!(run.wait_until(block_done), "ended before a block was finished");
        run.signal(Signal::INT);
        check_message("SIGINT", &run.wait(), 75, &["continue with: "]);
        let other = [&options[..], &["--resume", "--damping", "0.5"]].concat();
        let differs = "inputs or settings:\n  gptq.damping: was 0.01, is 0.5\n  run with the settings";
        check_message("other settings", &quant(quantize(&model, &out, &other)), 2, &[differs]);
        let run = quant(quantize(&model, &out, &[&options[..], &["--resume"]].concat())).succeeded();
        assert!(run.stderr.contains("note: resumed: "), "{run}");
        assert_eq!(hashes(&out), hashes(&at("whole")), "{method}");
    }
}

#[test]
fn several_formats_get_what_each_would_get_alone() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    write_cut_demo_model(&model, 2);
    // AWQ's grids are asymmetric, so the outputs of its blocks differ.
    let formats = ["compressed-tensors", "awq", "gptq"];
    let all = formats.map(|f| ["--format", f]).concat();
    quant(quantize(&model, &at("all"), &[&GPTQ[..], &all].concat())).succeeded();
    for format in formats {
        let alone = at(&format!("{format} alone"));
        quant(quantize(&model, &alone, &[&GPTQ[..], &["--format", format]].concat())).succeeded();
        assert_eq!(hashes(&at("all").join(format)), hashes(&alone), "{format}");
    }
}

#[test]
fn what_makes_no_sense_is_refused_before_any_work() {
    let scratch = tempfile::tempdir().unwrap();
    let (model, out) = (scratch.path().join("model"), scratch.path().join("out"));
    write_cut_demo_model(&model, 1);
    for (case, options, phrase) in [
        ("damping of rtn", &["--method", "rtn", "--damping", "0.1"][..], "--damping has no effect"),
        ("order of awq", &["--method", "awq", "--act-order", "none"], "--act-order has no effect"),
        ("search of gptq", &["--method", "gptq", "--search", "fast"], "--search has no effect"),
        ("no damping", &["--method", "gptq", "--damping", "0"], "greater than 0 and at most 100"),
        ("no block", &["--method", "gptq", "--block-size", "0"], "must be from 1 to 4096"),
        ("an order", &["--method", "gptq", "--act-order", "desc"], "unknown act order `desc`"),
        ("inputs", &["--method", "gptq", "--layer-inputs", "both"], "layer inputs `both`"),
        (
            "awq's bits",
            &["--method", "gptq", "--format", "awq", "--scheme", "w3a16"],
            "4-bit weights only, not 3",
        ),
        (
            "two schemes",
            &["--method", "gptq", "--format", "gptq", "--override", "down_proj=w8a16"],
            "one scheme for all",
        ),
        ("the head", &["--format", "gptq", "--override", "lm_head=w4a16"], "not all engines"),
    ] {
        check_message(case, &quant(quantize(&model, &out, options)), 2, &[phrase]);
        assert!(!out.exists() && !job_of(&out).exists(), "{case}");
    }
    let plan = quant(args!["plan", &model, "--preset", "gptq-w4a16", "--format", "gptq"]).succeeded();
    assert!(plan.stdout.contains("gptq with gptq"), "{plan}");
}

#[test]
fn recipes_compose_a_search_and_gptq() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    write_cut_demo_model(&model, 1);
    let recipe = at("recipe.toml");
    std::fs::write(
        &recipe,
        "[[transform]]\nkind = \"awq\"\n[quantize]\nmethod = \"gptq\"\nscheme = \"w4a16-g64\"\n\
         [quantize.gptq]\ndamping = 0.02\n[calibration]\nsamples = 4\nlength = 128\n",
    )
    .unwrap();
    quant(args!["quantize", &model, "-o", at("recipe"), "--recipe", &recipe]).succeeded();
    let options = ["--method", "awq-gptq", "--scheme", "w4a16-g64", "--damping", "0.02"];
    quant(quantize(&model, &at("options"), &[&options[..], &GPTQ[2..]].concat())).succeeded();
    assert_eq!(hashes(&at("recipe")), hashes(&at("options")));
    let report = read_json(&at("recipe").join("quant_report.json"));
    assert_eq!(report["method"], "awq-gptq");
    assert_eq!(report["calibration"]["search"], "fast");
}

#[test]
fn dead_norms_and_two_tokens_are_defined() {
    let scratch = tempfile::tempdir().unwrap();
    let (model, text) = (scratch.path().join("model"), scratch.path().join("text.txt"));
    let tiny = TinyLlama::default();
    let mut tensors = tiny.tensors();
    // Dead inputs: all outputs of one norm, and some of another.
    for (name, every) in
        [("model.layers.0.input_layernorm.weight", 1), ("post_attention_layernorm.weight", 5)]
    {
        for tensor in tensors.iter_mut().filter(|t| t.name.ends_with(name)) {
            (0..tensor.data.len() / 2).step_by(every).for_each(|i| tensor.set_f16(i, 0.0));
        }
    }
    tiny.write_with(&model, &tensors);
    std::fs::write(model.join("tokenizer.json"), byte_tokenizer().to_string()).unwrap();
    std::fs::write(&text, "to be or not to be").unwrap();
    let one = ["--method", "gptq", "--group-size", "32", "--samples", "1", "--seq-len", "2"];
    for (i, order) in ["none", "static-groups", "group-aware"].into_iter().enumerate() {
        let out = scratch.path().join(i.to_string());
        let mut arguments = quantize(&model, &out, &[&one[..], &["--act-order", order]].concat());
        arguments.extend(args!["--calibration", &text]);
        quant(arguments).succeeded();
        let report = read_json(&out.join("quant_report.json"));
        let dead: Vec<u64> = (report["tensors"].as_array().unwrap().iter())
            .filter_map(|t| t["gptq"]["dead_channels"].as_u64())
            .collect();
        assert!(dead.iter().any(|&d| d > 0), "{dead:?}");
        for tensor in read_safetensors(&out.join("model.safetensors")).iter().filter(|t| t.dtype == "F16") {
            let finite = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]) & 0x7c00 != 0x7c00;
            assert!(tensor.data.chunks_exact(2).all(finite), "{} holds NaN or infinity", tensor.name);
        }
    }
}

#[test]
fn inputs_that_are_not_finite_are_a_numeric_error() {
    let scratch = tempfile::tempdir().unwrap();
    let (model, out) = (scratch.path().join("model"), scratch.path().join("out"));
    let tiny = TinyLlama::default();
    let mut tensors = tiny.tensors();
    // The weights are finite, but the square of gate · up overflows, and so do the sums.
    for tensor in &mut tensors {
        let value = if tensor.name.contains("norm") { 60000.0 } else { 20000.0 };
        if ["norm", "up_proj", "gate_proj"].iter().any(|name| tensor.name.contains(name)) {
            (0..tensor.data.len() / 2).for_each(|i| tensor.set_f16(i, value));
        }
    }
    tiny.write_with(&model, &tensors);
    std::fs::write(model.join("tokenizer.json"), byte_tokenizer().to_string()).unwrap();
    let text = scratch.path().join("text.txt");
    std::fs::write(&text, "to be or not to be, that is the question".repeat(20)).unwrap();
    for inputs in ["quantized", "float"] {
        let options = ["--method", "gptq", "--group-size", "32", "--samples", "2", "--seq-len", "32"];
        let mut arguments = quantize(&model, &out, &[&options[..], &["--layer-inputs", inputs]].concat());
        arguments.extend(args!["--calibration", &text]);
        let run = quant(arguments);
        check_message(inputs, &run, 6, &["NaN or infinite"]);
        assert!(!out.exists() && !job_of(&out).exists());
    }
}

fn divergence(model: &Path, checkpoint: &Path, text: &Path, windows: &str, length: &str) -> f64 {
    let run = quant(args![
        "eval",
        checkpoint,
        "--reference",
        model,
        "--text",
        text,
        "--windows",
        windows,
        "--window",
        length,
        "--json"
    ]);
    run.json()["comparison"]["kl"]["mean"].as_f64().unwrap()
}

#[test]
fn it_loses_less_than_rounding_to_nearest() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let (model, options) = (demo_model(), ["--samples", "32", "--seq-len", "256"]);
    for scheme in ["w3a16-g64-sym", "w4a16-g128-sym"] {
        let out = |method: &str| at(&format!("{method} {scheme}"));
        quant(quantize(&model, &out("rtn"), &["--method", "rtn", "--scheme", scheme])).succeeded();
        let gptq = [&["--method", "gptq", "--scheme", scheme][..], &options].concat();
        quant(quantize(&model, &out("gptq"), &gptq)).succeeded();
        let Some(data) = shared_data() else { return };
        let text = data.join("text/books_valid.txt");
        let kl = |method: &str| divergence(&model, &out(method), &text, "12", "256");
        let (gptq, rtn) = (kl("gptq"), kl("rtn"));
        assert!(gptq < 0.9 * rtn, "{scheme}: KL {gptq} against {rtn} of rounding to nearest");
    }
}
