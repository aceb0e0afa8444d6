//! QServe's format as a user sees it.

use std::ffi::OsString;
use std::path::Path;

use half::f16;
use quant_tests::args;
use quant_tests::files::hashes;
use quant_tests::models::{RawTensor, TinyLlama, edit_config, read_safetensors, write_cut_demo_model};
use quant_tests::program::{Run, command, quant};
use quant_tests::refusal::{check_message, job_of};
use serde_json::{Value, json};

const GROUPS: &str = "w4a8-g128-asym-progressive";
const SCHEMES: [&str; 3] = [GROUPS, "w4a8-channel-asym", "w8a8-channel-sym"];

fn quantize(model: &Path, out: &Path, scheme: &str, formats: &[&str]) -> Vec<OsString> {
    let formats = formats.iter().flat_map(|f| ["--format", f]);
    let options = ["--method", "rtn", "--scheme", scheme].into_iter().chain(formats);
    args!["quantize", model, "-o", out].into_iter().chain(options.map(OsString::from)).collect()
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn tensor(checkpoint: &Path, name: &str) -> RawTensor {
    let tensors = read_safetensors(&checkpoint.join("model.safetensors"));
    tensors.into_iter().find(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"))
}

fn halves(tensor: &RawTensor) -> Vec<f32> {
    assert_eq!(tensor.dtype, "F16");
    tensor.data.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
}

fn words(tensor: &RawTensor) -> Vec<u32> {
    assert_eq!(tensor.dtype, "I32");
    tensor.data.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn eval(model: &Path, options: &[&str]) -> Run {
    let text = ["--text", "builtin-heldout", "--window", "64", "--windows", "6", "--json"];
    quant(args!["eval", model].into_iter().chain(text.iter().chain(options).map(OsString::from)))
}

#[test]
fn what_is_written_is_described_runs_and_is_written_again() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    write_cut_demo_model(&model, 2);
    for scheme in SCHEMES {
        let out = at(scheme);
        quant(quantize(&model, &out, scheme, &["qserve"])).succeeded();
        let config = read_json(&out.join("config.json"))["quantization_config"].clone();
        assert_eq!(config["quant_method"], "qoq");
        let expected = match scheme {
            GROUPS => (json!(4), json!(128), json!("kernel")),
            "w4a8-channel-asym" => (json!(4), json!(-1), Value::Null),
            _ => (json!(8), json!(-1), Value::Null),
        };
        let order = config.get("s2_order").cloned().unwrap_or_default();
        assert_eq!((config["wbits"].clone(), config["group_size"].clone(), order), expected);
        let manifest = read_json(&out.join(config["manifest"].as_str().unwrap()));
        assert_eq!(manifest["weights"]["scheme"], scheme);
        assert_eq!(manifest["modules_to_not_convert"], json!(["lm_head"]));

        let inspected = quant(args!["inspect", &out, "--json"]).json();
        assert_eq!(inspected["quant_method"], "qoq");
        assert_eq!(inspected["keeps_levels"], scheme == GROUPS);
        assert_eq!(inspected["loses"].as_array().unwrap().len(), usize::from(scheme == "w4a8-channel-asym"));
        assert!(inspected["linears"].as_array().unwrap().iter().all(|l| l["stored"] == scheme), "{scheme}");

        // Both executions use the same integers, but float sums round differently.
        let perplexity =
            |options: &[&str]| eval(&out, options).succeeded().json()["perplexity"]["mean"].as_f64().unwrap();
        let (fake, kernels) = (perplexity(&["--execution", "fake"]), perplexity(&["--execution", "kernels"]));
        assert!((kernels / fake - 1.0).abs() < 5e-4, "{scheme}: {kernels}, not {fake}");

        // The other format represents the same numbers. They can be converted back if the scales are F16.
        let other = at(&format!("{scheme} other"));
        let again = |from: &Path, to: &Path, format: &str| {
            quant(args!["quantize", from, "-o", to, "--format", format]).succeeded()
        };
        again(&out, &other, "compressed-tensors");
        assert_eq!(perplexity(&["--execution", "fake"]), {
            eval(&other, &["--execution", "fake"]).succeeded().json()["perplexity"]["mean"].as_f64().unwrap()
        });
        if scheme == GROUPS {
            assert_eq!(tensor(&other, "model.layers.0.mlp.up_proj.weight_scale").dtype, "F32");
        } else {
            let back = at(&format!("{scheme} back"));
            again(&other, &back, "qserve");
            assert_eq!(hashes(&back)["model.safetensors"], hashes(&out)["model.safetensors"]);
        }
    }
}

#[test]
fn what_other_formats_lose_is_reported_completely() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let model = at("model");
    write_cut_demo_model(&model, 1);
    let both = at("both");
    quant(quantize(&model, &both, GROUPS, &["qserve", "compressed-tensors"])).succeeded();
    let awq = at("awq");
    quant(quantize(&model, &awq, "w4a16-g128-asym-progressive", &["awq"])).succeeded();

    let (qserve, other) = (both.join("qserve"), both.join("compressed-tensors"));
    let name = |part: &str| format!("model.layers.0.mlp.up_proj.{part}");
    let rows = halves(&tensor(&qserve, &name("s1_scales")));
    let (scales, negated) = (tensor(&qserve, &name("s2_scales")), tensor(&qserve, &name("s2_zeros")));
    let (n, groups) = (rows.len(), scales.shape[0] as usize);
    assert_eq!(scales.shape, [groups as u64, n as u64]);
    let place = |o: usize| o - o % 32 + 4 * (o % 8) + o % 32 / 8;
    let group = |tensor: &RawTensor, o: usize, g: usize| tensor.data[g * n + place(o)];
    let flat = halves(&tensor(&other, &name("weight_scale")));
    let (theirs, zeros) = (halves(&tensor(&awq, &name("scales"))), words(&tensor(&awq, &name("qzeros"))));
    let mut rounded = 0;
    for o in 0..n {
        for g in 0..groups {
            let exact = rows[o] * f32::from(group(&scales, o, g));
            let once = f16::from_f32(exact).to_f32();
            assert!((once / exact - 1.0).abs() <= 2.0_f32.powi(-11), "{once}, not {exact}");
            rounded += usize::from(once != exact);
            assert_eq!((flat[o * groups + g], theirs[g * n + o]), (once, once), "({o}, {g})");
            // Bits 4j of a word belong to output (0, 2, 4, 6, 1, 3, 5, 7)[j].
            let nibble = [0, 4, 1, 5, 2, 6, 3, 7][o % 8];
            let zero = (zeros[g * (n / 8) + o / 8] >> (4 * nibble)) as u8 & 15;
            assert_eq!(group(&negated, o, g).wrapping_neg(), zero * group(&scales, o, g), "({o}, {g})");
        }
    }
    assert!(rounded > 0, "something is lost");

    let message = "each group scale is multiplied by its row scale into one F16 scale, with a relative error of up to \
        2^-11";
    let plan = args!["plan", &model, "--method", "rtn", "--scheme", GROUPS];
    let plan = |format: &str, json: &[&str]| {
        let options = ["--format", format].into_iter().chain(json.iter().copied()).map(OsString::from);
        quant(plan.iter().cloned().chain(options)).succeeded()
    };
    assert_eq!(plan("compressed-tensors", &["--json"]).json()["formats"][0]["loses"][0], message);
    assert_eq!(plan("qserve", &["--json"]).json()["formats"][0]["loses"], json!([]));
    let text = plan("compressed-tensors", &[]).stdout;
    assert!(text.contains(&format!("lost: {message}\n")), "{text}");
    let text = plan("qserve", &[]).stdout;
    assert!(
        text.contains("it does not support the qserve format") && text.contains("note: norm weights are"),
        "{text}"
    );
    for checkpoint in [&other, &awq] {
        let run = quant(args!["inspect", checkpoint]).succeeded();
        assert!(run.stdout.contains(&format!("lost: {message}\n")), "{run}");
        assert!(run.stderr.is_empty(), "the report fits what was written: {run}");
    }
    let cache = json!({ "bits": 4, "symmetric": false, "strategy": "token-head", "scale_dtype": "float16" });
    edit_config(&qserve, &json!({ "kv_cache_quantization": cache }));
    let text = quant(args!["inspect", &qserve]).succeeded().stdout;
    assert!(text.contains("kept: both levels of scales\n") && !text.contains("lost:"), "{text}");
    assert!(text.contains("KV cache: kv4\n"), "{text}");
}

#[test]
fn what_it_cannot_hold_is_refused_before_any_work() {
    let scratch = tempfile::tempdir().unwrap();
    let (model, narrow) = (scratch.path().join("model"), scratch.path().join("narrow"));
    let out = scratch.path().join("out");
    write_cut_demo_model(&model, 1);
    TinyLlama { kv_heads: 1, head_dim: 16, ..TinyLlama::default() }.write(&narrow);
    for (case, model, options, phrase) in [
        (
            "no groups of it",
            &model,
            &["--scheme", "w4a8-g64-asym-progressive"][..],
            "does not support w4a8-g64-asym-progressive",
        ),
        ("float inputs", &model, &["--scheme", "w4a16-g128-asym-progressive"], "choose --scheme w4a8-g128"),
        ("one level", &model, &["--scheme", "w4a8-g128"], "does not support w4a8-g128-asym"),
        ("symmetric", &model, &["--scheme", "w4a8-channel-sym"], "does not support w4a8-channel-sym"),
        (
            "two schemes",
            &model,
            &["--scheme", GROUPS, "--override", "down_proj=w8a8-sym"],
            "one scheme for all",
        ),
        (
            "the head",
            &model,
            &["--scheme", GROUPS, "--override", "lm_head=w4a8-g128-asym-progressive"],
            "keep it float",
        ),
        ("16 outputs", &narrow, &["--scheme", "w8a8"], "needs a multiple of 32 outputs, got 16"),
    ] {
        let arguments = args!["quantize", model, "-o", &out, "--method", "rtn", "--format", "qserve"];
        let run = quant(arguments.into_iter().chain(options.iter().map(OsString::from)));
        check_message(case, &run, 2, &[phrase]);
        assert!(!out.exists() && !job_of(&out).exists(), "{case}");
    }
}

#[test]
fn broken_tensors_are_reported_by_name() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let (model, out) = (at("model"), at("out"));
    write_cut_demo_model(&model, 1);
    quant(quantize(&model, &out, GROUPS, &["qserve"])).succeeded();
    let file = out.join("model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let entries: Value = serde_json::from_slice(&whole[8..8 + header]).unwrap();
    let begin = |name: &str| 8 + header + entries[name]["data_offsets"][0].as_u64().unwrap() as usize;
    for (name, value, phrase) in [
        ("model.layers.0.mlp.up_proj.s2_scales", 17, "scales of groups must be from 1 to 16"),
        ("model.layers.0.mlp.up_proj.s2_scales", 0, "has a scale of 0 for output 0, group 0"),
        ("model.layers.0.self_attn.o_proj.s2_zeros", 1, "has 1 for output 0, group 0"),
    ] {
        let mut bytes = whole.clone();
        bytes[begin(name)] = value;
        std::fs::write(&file, bytes).unwrap();
        let output =
            command(args!["eval", &out, "--text", "builtin-heldout", "--windows", "1"]).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(4), "{stderr}");
        for part in ["model.safetensors", name, phrase, "quantize"] {
            assert!(stderr.contains(part), "{name}: {part}: {stderr}");
        }
    }
    std::fs::write(&file, &whole).unwrap();
    let mut settings = read_json(&out.join("config.json"))["quantization_config"].clone();
    settings["s2_order"] = json!("reversed");
    edit_config(&out, &json!({ "quantization_config": settings }));
    check_message(
        "an order",
        &quant(args!["inspect", &out]),
        4,
        &["`quantization_config.s2_order` must be kernel or"],
    );
}
