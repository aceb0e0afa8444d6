//! Keys and values cached in FP8, with calibrated scales.

use std::path::Path;

use quant_tests::args;
use quant_tests::models::{RawTensor, TinyLlama, edit_config, read_safetensors, safetensors};
use quant_tests::program::{Run, quant};
use quant_tests::refusal::{check_message, refuses_to_quantize};
use serde_json::{Value, json};

const TEXT: &str = "calibration-data/heldout/narrative.txt";
const BATCH: [&str; 4] = ["--samples", "2", "--seq-len", "32"];

fn wide() -> TinyLlama {
    TinyLlama { hidden: 128, intermediate: 256, heads: 4, kv_heads: 2, ..TinyLlama::default() }
}

fn quantize(model: &Path, out: &Path, options: &[&str]) -> Run {
    let mut arguments = args!["quantize", model, "-o", out, "--quiet"];
    arguments.extend(options.iter().map(Into::into));
    quant(arguments)
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn tensors(checkpoint: &Path) -> Vec<RawTensor> {
    read_safetensors(&checkpoint.join("model.safetensors"))
}

fn number(tensors: &[RawTensor], name: &str) -> f32 {
    let tensor = tensors.iter().find(|t| t.name == name).unwrap_or_else(|| panic!("there is no {name}"));
    assert_eq!((tensor.dtype.as_str(), tensor.data.len()), ("F32", 4), "{name}");
    f32::from_le_bytes(tensor.data[..].try_into().unwrap())
}

fn eval(model: &Path, more: &[&str]) -> Run {
    let text = quant_tests::workspace_root().join(TEXT);
    let mut arguments = args!["eval", model, "--text", text, "--window", "32", "--windows", "2", "--quiet"];
    arguments.extend(more.iter().map(Into::into));
    quant(arguments)
}

fn result(model: &Path, more: &[&str]) -> Value {
    eval(model, &[more, &["--json"]].concat()).json()
}

fn f16(tensor: &RawTensor) -> Vec<f64> {
    let value = |b: &[u8]| half::f16::from_le_bytes([b[0], b[1]]).to_f64();
    tensor.data.chunks_exact(2).map(value).collect()
}

/// The largest key after rotary embedding, and the largest value, of the first block, computed from the definition in
/// double precision.
fn largest(tiny: &TinyLlama, tensors: &[RawTensor], text: &[u8]) -> [f64; 2] {
    let of = |name: &str| f16(tensors.iter().find(|t| t.name == format!("model.{name}.weight")).unwrap());
    let [embedding, norm] = ["embed_tokens", "layers.0.input_layernorm"].map(of);
    let projections = ["layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj"].map(of);
    let (hidden, d) = (tiny.hidden as usize, tiny.head_dim as usize);
    let mut largest = [0.0_f64; 2];
    for window in text.chunks_exact(32) {
        for (position, byte) in window.iter().enumerate() {
            let x = &embedding[usize::from(*byte) * hidden..][..hidden];
            let mean = x.iter().map(|x| x * x).sum::<f64>() / hidden as f64;
            let x: Vec<f64> = x.iter().zip(&norm).map(|(x, n)| x / (mean + 1e-5).sqrt() * n).collect();
            let [mut keys, values] = projections.each_ref().map(|weight| -> Vec<f64> {
                weight.chunks(hidden).map(|row| row.iter().zip(&x).map(|(w, x)| w * x).sum()).collect()
            });
            for head in keys.chunks_mut(d) {
                for i in 0..d / 2 {
                    let angle = position as f64 * 10000.0_f64.powf(-2.0 * i as f64 / d as f64);
                    let (a, b) = (head[i], head[i + d / 2]);
                    head[i] = a * angle.cos() - b * angle.sin();
                    head[i + d / 2] = b * angle.cos() + a * angle.sin();
                }
            }
            for (largest, values) in largest.iter_mut().zip([keys, values]) {
                *largest = values.iter().fold(*largest, |max, x| max.max(x.abs()));
            }
        }
    }
    largest
}

#[test]
fn scales_are_those_of_the_largest_key_and_value() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    let tiny = wide();
    tiny.write(&at("model"));
    // Every byte is a token.
    let text = std::fs::read(quant_tests::workspace_root().join(TEXT)).unwrap()[..64].to_vec();
    std::fs::write(at("text.txt"), &text).unwrap();
    let path = at("text.txt").display().to_string();
    let expected = largest(&tiny, &tiny.tensors(), &text).map(|amax| amax / 448.0);
    for (scheme, more, format) in [
        ("wf8af8kvf8-channel", &["--method", "rtn"][..], "float-quantized"),
        ("wf8af8kvf8-channel", &["--method", "gptq"], "float-quantized"),
        ("w4a16kvf8-g32", &["--method", "rtn", "--ignore", "*.k_proj"], "pack-quantized"),
    ] {
        let out = at("out");
        quantize(&at("model"), &out, &[&["--scheme", scheme, "--calibration", &path], more, &BATCH].concat())
            .succeeded();
        let config = json_of(&out.join("config.json"));
        assert_eq!(config["quantization_config"]["format"], format);
        let scheme = json!({ "num_bits": 8, "type": "float", "symmetric": true, "strategy": "tensor", "dynamic": false });
        assert_eq!(config["quantization_config"]["kv_cache_scheme"], scheme);
        assert!(config.get("kv_cache_quantization").is_none());
        let written = tensors(&out);
        for (part, expected) in ["k", "v"].into_iter().zip(expected) {
            let name = format!("model.layers.0.self_attn.{part}_scale");
            let found = number(&written, &name);
            assert_eq!(written.iter().find(|t| t.name == name).unwrap().shape, [1]);
            // Computed in f32 and rounded to BF16.
            assert!((f64::from(found) / expected - 1.0).abs() < 2.0_f64.powi(-8), "{found}, not {expected}");
            assert_eq!(half::bf16::from_f32(found).to_f32(), found);
            assert!(number(&written, &format!("model.layers.1.self_attn.{part}_scale")) > 0.0);
        }
        let report = json_of(&out.join("quant_report.json"));
        assert_eq!(report["kv"], "kvf8");
        let reports = report["tensors"].as_array().unwrap();
        let keys = reports.iter().find(|t| t["tensor"] == "model.layers.0.self_attn.k_proj.weight").unwrap();
        let reported = keys["cache_scales"]["model.layers.0.self_attn.k_scale"].as_f64().unwrap();
        assert_eq!(reported as f32, number(&written, "model.layers.0.self_attn.k_scale"));
        std::fs::remove_dir_all(&out).unwrap();
    }
}

/// The scales include what a step folds into keys and values: AWQ divides the rows of values by its scales.
#[test]
fn scales_are_of_the_block_as_it_is_written() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    // The model has as many value heads as query heads, so that values are folded, and some of the values are large.
    let tiny = TinyLlama { kv_heads: 4, ..wide() };
    let mut weights = tiny.tensors();
    for tensor in weights.iter_mut().filter(|t| t.name.ends_with("v_proj.weight")) {
        // Some channels are far larger than the others.
        (0..3 * 128).for_each(|i| tensor.set_f16(i, ((i % 7) as f32 - 3.0) * 2.0));
    }
    tiny.write_with(&at("model"), &weights);
    let options = ["--scheme", "w4a16kvf8-g32", "--method", "awq"];
    quantize(&at("model"), &at("out"), &[&options[..], &BATCH].concat()).succeeded();
    let again = ["--scheme", "w8a16kvf8-g32", "--method", "rtn", "--requantize"];
    quantize(&at("out"), &at("again"), &[&again[..], &BATCH].concat()).succeeded();
    let plain = ["--scheme", "w8a16kvf8-g32", "--method", "rtn"];
    quantize(&at("model"), &at("plain"), &[&plain[..], &BATCH].concat()).succeeded();
    let [out, again, plain] = ["out", "again", "plain"].map(|name| tensors(&at(name)));
    let mut folded = false;
    for name in ["model.layers.0.self_attn.v_scale", "model.layers.1.self_attn.v_scale"] {
        let [out, again, plain] = [&out, &again, &plain].map(|t| number(t, name));
        assert!((out / again - 1.0).abs() < 0.2, "{name}: {out}, and {again} of what was written");
        folded |= (out / plain - 1.0).abs() > 0.3;
    }
    assert!(folded, "nothing was folded into values, so the test shows nothing");
}

#[test]
fn files_are_obeyed_and_restated() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    wide().write(&at("model"));
    let options = ["--scheme", "nvfp4a16kvf8", "--method", "rtn"];
    let written = quantize(&at("model"), &at("ct"), &[&options[..], &BATCH].concat()).succeeded();
    assert!(written.code() == Some(0));
    for (from, to, format) in [("ct", "modelopt", "modelopt"), ("modelopt", "again", "compressed-tensors")] {
        quantize(&at(from), &at(to), &["--format", format]).succeeded();
    }
    let [before, between, after] = ["ct", "modelopt", "again"].map(|name| tensors(&at(name)));
    let scale =
        |tensors: &[RawTensor], name: &str| number(tensors, &format!("model.layers.0.self_attn.{name}"));
    for (here, there) in [("k_scale", "k_proj.k_scale"), ("v_scale", "v_proj.v_scale")] {
        let expected = scale(&before, here);
        assert_eq!((scale(&between, there), scale(&after, here)), (expected, expected));
        let other = |name: &str| between.iter().any(|t| t.name.ends_with(&format!("self_attn.{name}")));
        assert!(!other(here) && other(there));
        let shape = between.iter().find(|t| t.name.ends_with(there)).unwrap().shape.clone();
        assert!(shape.is_empty() || shape == [1], "{shape:?}");
    }
    let modelopt = json_of(&at("modelopt").join("hf_quant_config.json"));
    assert_eq!(modelopt["quantization"]["kv_cache_quant_algo"], "FP8");
    let scheme = &json_of(&at("modelopt").join("config.json"))["quantization_config"]["kv_cache_scheme"];
    assert_eq!(*scheme, json!({ "dynamic": false, "num_bits": 8, "type": "float" }));

    // The direct conversion and the conversion through the other layout give the same scales.
    quantize(&at("model"), &at("direct"), &[&options[..], &BATCH, &["--format", "modelopt"]].concat())
        .succeeded();
    assert_eq!(scale(&tensors(&at("direct")), "k_proj.k_scale"), scale(&before, "k_scale"));

    let obeyed = result(&at("ct"), &[]);
    assert_eq!(obeyed["model"]["kv_cache"], "kvf8");
    for same in ["modelopt", "again", "direct"] {
        assert_eq!(result(&at(same), &[])["window_nll"], obeyed["window_nll"], "{same}");
    }
    assert_eq!(result(&at("ct"), &["--kv", "fp8"])["window_nll"], obeyed["window_nll"]);
    let floats = result(&at("ct"), &["--kv", "16"]);
    let mean = |result: &Value| result["perplexity"]["mean"].as_f64().unwrap();
    let moved = (mean(&obeyed) / mean(&floats) - 1.0).abs();
    assert!(moved > 0.0 && moved < 0.02, "{moved}");
    let kernels = eval(&at("ct"), &["--execution", "kernels"]).succeeded();
    assert!(kernels.stdout.contains("keys and values in kvf8"), "{kernels}");
    let inspected = quant(args!["inspect", at("ct"), "--json"]).json();
    assert_eq!(inspected["kv_cache"], "kvf8");

    // If a model has no cache scales, keys and values are cached with a scale of 1, as engines do.
    let without = result(&at("model"), &["--kv", "fp8"]);
    assert_eq!(without["model"]["kv_cache"], "kvf8");
    assert_ne!(without["window_nll"], result(&at("model"), &[])["window_nll"]);

    quantize(&at("ct"), &at("rounded"), &["--requantize", "--scheme", "w8a16-g32", "--method", "rtn"])
        .succeeded();
    assert!(!tensors(&at("rounded")).iter().any(|t| t.name.ends_with("k_scale")));
    assert_eq!(result(&at("rounded"), &[])["model"]["kv_cache"], Value::Null);
}

#[test]
fn models_generate_with_an_fp8_cache() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("out");
    let options = ["--scheme", "wf8af8kvf8-channel", "--method", "rtn"];
    quantize(&quant_tests::demo_model(), &out, &[&options[..], &BATCH].concat()).succeeded();
    let generate = |more: &[&str]| {
        let mut arguments =
            args!["generate", &out, "--prompt", "The cat", "--max-new-tokens", "12", "--greedy", "--json"];
        arguments.extend(more.iter().map(Into::into));
        quant(arguments).succeeded()
    };
    let run = generate(&[]);
    assert!(run.stderr.contains("is simulated: the kernels do not support an FP8 cache"), "{run}");
    assert!(!generate(&["--kv", "16"]).stderr.contains("simulated"));
}

/// Saturation: scales that are far too small clip values, which is simulated and not an error.
#[test]
fn keys_beyond_the_scale_saturate() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    wide().write(&at("model"));
    let options = ["--scheme", "wf8af8kvf8-channel", "--method", "rtn"];
    quantize(&at("model"), &at("out"), &[&options[..], &BATCH].concat()).succeeded();
    let whole = result(&at("out"), &["--kv", "16"]);
    let mean = |result: &Value| result["perplexity"]["mean"].as_f64().unwrap();
    let with = |factor: f32| {
        let mut changed = tensors(&at("out"));
        for tensor in changed.iter_mut().filter(|t| t.name.ends_with("v_scale")) {
            let value = f32::from_le_bytes(tensor.data[..].try_into().unwrap());
            tensor.data = (value * factor).to_le_bytes().to_vec();
        }
        std::fs::write(at("out").join("model.safetensors"), safetensors(&changed)).unwrap();
        mean(&result(&at("out"), &[]))
    };
    let off = |found: f64| (found / mean(&whole) - 1.0).abs();
    let calibrated = off(with(1.0));
    let cut = off(with(1.0 / 64.0));
    assert!(cut > 4.0 * calibrated && cut.is_finite(), "{cut} against {calibrated}");
}

#[test]
fn what_is_damaged_or_not_known_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    wide().write(&at("model"));
    let options = ["--scheme", "nvfp4a16kvf8", "--method", "rtn"];
    quantize(&at("model"), &at("ct"), &[&options[..], &BATCH].concat()).succeeded();
    let good = tensors(&at("ct"));
    let config = json_of(&at("ct").join("config.json"));
    let name = "model.layers.1.self_attn.v_scale";
    let set = |value: f32| {
        move |t: &mut Vec<RawTensor>| {
            t.iter_mut().find(|t| t.name == name).unwrap().data = value.to_le_bytes().to_vec();
        }
    };
    let (zero, negative, nan) = (set(0.0), set(-1.0), set(f32::NAN));
    type Damage<'a> = &'a dyn Fn(&mut Vec<RawTensor>);
    let cases: [(&str, i32, &str, Damage<'_>); 6] = [
        ("missing", 4, name, &|t| t.retain(|t| t.name != name)),
        ("zero", 4, "is 0; a scale and its reciprocal must be", &zero),
        ("negative", 4, "is -1; a scale and its reciprocal must be", &negative),
        ("nan", 6, "non-finite", &nan),
        ("one a head", 4, name, &|t| {
            let scale = t.iter_mut().find(|t| t.name == name).unwrap();
            (scale.shape, scale.data) = (vec![2, 1, 1], scale.data.repeat(2));
        }),
        ("bytes", 4, name, &|t| {
            let scale = t.iter_mut().find(|t| t.name == name).unwrap();
            (scale.dtype, scale.data) = ("U8".into(), vec![56]);
        }),
    ];
    for (case, code, phrase, damage) in cases {
        let mut changed = good.clone();
        damage(&mut changed);
        quant_tests::models::write_model(&at(case), &config, &changed);
        check_message(case, &eval(&at(case), &[]), code, &[phrase]);
        refuses_to_quantize(case, &at(case), &["--format", "modelopt"], code, &[phrase]);
    }
    for (key, value, phrase) in [
        (
            "strategy",
            json!("attn_head"),
            "kv_cache_scheme.strategy` is \"attn_head\"; only tensor is supported",
        ),
        ("dynamic", json!(true), "kv_cache_scheme.strategy`"),
        ("num_bits", json!(4), "kv_cache_scheme.strategy`"),
        ("type", json!("int"), "kv_cache_scheme.type` is \"int\"; only float is supported"),
        ("symmetric", json!(false), "kv_cache_scheme.symmetric`"),
        ("unknown", json!(1), "kv_cache_scheme.unknown` is an unknown key"),
    ] {
        let mut changed = config.clone();
        changed["quantization_config"]["kv_cache_scheme"][key] = value;
        quant_tests::models::write_model(&at(key), &changed, &good);
        check_message(key, &eval(&at(key), &[]), 4, &[phrase]);
    }
    let setting =
        json!({ "bits": 4, "symmetric": false, "strategy": "token-head", "scale_dtype": "float16" });
    edit_config(&at("ct"), &json!({ "kv_cache_quantization": setting }));
    check_message(
        "two caches",
        &eval(&at("ct"), &[]),
        4,
        &["kv_cache_quantization", "contradicts the FP8 cache"],
    );
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    wide().write(&at("model"));
    let rtn = ["--method", "rtn"];
    for (options, phrase) in [
        (["--scheme", "w4a16kvf8-g32", "--format", "awq"], "the awq format cannot store the scales"),
        (["--scheme", "w4a16kvf8-g32", "--format", "gptq"], "the gptq format cannot store the scales"),
        (["--scheme", "w4a16kvf4", "--group-size", "32"], "unknown cache `kvf4`"),
    ] {
        check_message(
            phrase,
            &quantize(&at("model"), &at("out"), &[&rtn[..], &options].concat()),
            2,
            &[phrase],
        );
    }
    let qoq = ["--preset", "qoq-w4a8kv4", "--scheme", "w4a8kvf8-g32"];
    let phrase = ["`smooth-attention` only improves integer caches", "--skip smooth-attention"];
    check_message("qoq", &quantize(&at("model"), &at("out"), &qoq), 2, &phrase);
    assert!(!at("out").exists());
    let plan = quant(args!["plan", at("model"), "--scheme", "fp8kvf8", "--method", "rtn"]).succeeded();
    let message = format!("{}{}", plan.stdout, plan.stderr);
    assert!(
        message.contains("--kv-cache-dtype fp8") && message.contains("rejects FP8 cache scales"),
        "{plan}"
    );
}
