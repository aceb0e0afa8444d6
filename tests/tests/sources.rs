//! Quantized checkpoints as sources: read, converted to another format, and requantized on request.

use std::path::Path;

use quant_tests::args;
use quant_tests::models::{RawTensor, TinyLlama, edit_config, read_safetensors, safetensors};
use quant_tests::program::quant;
use quant_tests::refusal::check_message;
use serde_json::{Value, json};

const TEXT: &str = "calibration-data/heldout/narrative.txt";

fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * 2.0_f32.powi(exponent - 7),
    };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Scales {
    Blocks(&'static str, &'static str),
    Tensor(&'static str),
}

/// A model whose block linears are all FP8, with some sizes that are not multiples of 128; and the same model in F32.
fn fp8_models(native: &Path, float: &Path, scales: Scales) {
    let tiny = TinyLlama { hidden: 192, intermediate: 320, heads: 6, kv_heads: 3, ..TinyLlama::default() };
    let (mut stored, mut wide) = (Vec::new(), Vec::new());
    let mut state = 0x1234_5678_u64;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    for tensor in tiny.tensors() {
        let Some(module) = tensor.name.strip_suffix("_proj.weight").map(|m| format!("{m}_proj")) else {
            stored.push(tensor.clone());
            wide.push(tensor);
            continue;
        };
        let [n, k] = [tensor.shape[0] as usize, tensor.shape[1] as usize];
        // Every code except the two NaNs, with small exponents more often.
        let codes: Vec<u8> = (0..n * k)
            .map(|_| match random() {
                r if r % 7 == 0 => (r >> 8) as u8,
                r => (r >> 8) as u8 & 0xbf,
            })
            .map(|code| if code & 0x7f == 0x7f { 0x38 } else { code })
            .collect();
        let (height, width) = match scales {
            Scales::Blocks(..) => (n.div_ceil(128), k.div_ceil(128)),
            Scales::Tensor(_) => (1, 1),
        };
        let exponents: Vec<u8> = (0..height * width).map(|_| 119 - (random() % 4) as u8).collect();
        let (name, dtype) = match scales {
            Scales::Blocks(name, dtype) => (name, dtype),
            Scales::Tensor(dtype) => ("weight_scale", dtype),
        };
        // Values that are not powers of two, if the type can represent them.
        let values: Vec<f32> = (exponents.iter().enumerate())
            .map(|(i, e)| {
                let power = 2.0_f32.powi(i32::from(*e) - 127);
                if matches!(dtype, "F8_E8M0" | "U8") { power } else { power * (1.0 + i as f32 / 8.0 % 1.0) }
            })
            .collect();
        let data = match dtype {
            "F32" => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            "BF16" => values.iter().flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect(),
            _ => exponents.clone(),
        };
        let shape = match scales {
            Scales::Blocks(..) => vec![height as u64, width as u64],
            Scales::Tensor(_) => vec![],
        };
        let scale = |i: usize| match scales {
            Scales::Blocks(..) => values[i / k / 128 * width + i % k / 128],
            Scales::Tensor(_) => values[0],
        };
        let weights = codes.iter().enumerate().flat_map(|(i, code)| (e4m3(*code) * scale(i)).to_le_bytes());
        let of = |name: String, dtype: &str, shape: &[u64], data: Vec<u8>| RawTensor {
            name,
            dtype: dtype.into(),
            shape: shape.to_vec(),
            data,
        };
        wide.push(of(tensor.name.clone(), "F32", &tensor.shape, weights.collect()));
        stored.push(of(tensor.name.clone(), "F8_E4M3", &tensor.shape, codes));
        stored.push(of(format!("{module}.{name}"), dtype, &shape, data));
        if let Scales::Tensor(_) = scales {
            let one = 0.5_f32.to_le_bytes().to_vec();
            stored.push(of(format!("{module}.input_scale"), "F32", &[], one));
        }
    }
    tiny.write_with(float, &wide);
    tiny.write_with(native, &stored);
    let config = match scales {
        Scales::Blocks(..) => json!({ "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                      "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"] }),
        Scales::Tensor(_) => json!({ "quant_method": "fp8", "activation_scheme": "static" }),
    };
    edit_config(native, &json!({ "quantization_config": config }));
}

const ALL: [Scales; 5] = [
    Scales::Blocks("weight_scale_inv", "F32"),
    Scales::Blocks("weight_scale_inv", "BF16"),
    Scales::Blocks("weight_scale", "F8_E8M0"),
    Scales::Blocks("scale", "U8"),
    Scales::Tensor("F32"),
];

#[test]
fn fp8_is_rounded_again_from_the_values_of_its_codes() {
    for scales in ALL {
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        fp8_models(&at("native"), &at("float"), scales);
        let options = ["--scheme", "w4a16-g32", "--method", "rtn", "--quiet"];
        let quantize = |from: &str, to: &str, more: &[&str]| {
            let mut arguments = args!["quantize", at(from), "-o", at(to)];
            arguments.extend(options.iter().chain(more).map(Into::into));
            quant(arguments)
        };
        check_message("asked", &quantize("native", "out", &[]), 4, &["is already quantized", "--requantize"]);
        quantize("native", "out", &["--requantize"]).succeeded();
        quantize("float", "expected", &[]).succeeded();
        let read = |name: &str| std::fs::read(at(name).join("model.safetensors")).unwrap();
        assert!(read("out") == read("expected"), "{scales:?}");
        let report: Value =
            serde_json::from_slice(&std::fs::read(at("out").join("quant_report.json")).unwrap()).unwrap();
        assert_eq!(report["requantized_from"], json!("fp8"));
        let useless = quantize("float", "useless", &["--requantize"]);
        check_message("float", &useless, 2, &["--requantize has no effect"]);
    }
}

#[test]
fn fp8_is_evaluated_and_restated_without_loss() {
    for scales in ALL {
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        fp8_models(&at("native"), &at("float"), scales);
        let text = quant_tests::workspace_root().join(TEXT);
        let mean = |name: &str| {
            let eval = args![
                "eval",
                at(name),
                "--text",
                &text,
                "--window",
                "32",
                "--windows",
                "2",
                "--quiet",
                "--json"
            ];
            quant(eval).json()["perplexity"]["mean"].as_f64().unwrap()
        };
        let native = mean("native");
        assert!(native > 1.0);
        quant(args!["quantize", at("native"), "-o", at("out"), "--format", "compressed-tensors", "--quiet"])
            .succeeded();
        assert_eq!(mean("out"), native, "{scales:?}");
        let tensors = read_safetensors(&at("out").join("model.safetensors"));
        let codes = |tensors: &[RawTensor]| {
            let name = "model.layers.1.mlp.down_proj.weight";
            tensors.iter().find(|t| t.name == name).map(|t| (t.dtype.clone(), t.data.clone())).unwrap()
        };
        assert_eq!(codes(&tensors), codes(&read_safetensors(&at("native").join("model.safetensors"))));
    }
}

/// Experts of DeepSeek-V4 next to its FP8 linears: I8 bytes with two FP4 codes each, and one E8M0 scale per 32 columns.
/// The experts are read as MXFP4, converted to it with the same bytes, and equal the floats of its definition.
#[test]
fn fp4_next_to_fp8_is_mxfp4() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    for dtype in ["F8_E8M0", "U8"] {
        fp8_models(&at("native"), &at("float"), ALL[2]);
        let config: Value =
            serde_json::from_slice(&std::fs::read(at("native").join("config.json")).unwrap()).unwrap();
        let mut stored = read_safetensors(&at("native").join("model.safetensors"));
        let mut wide = read_safetensors(&at("float").join("model.safetensors"));
        let magnitudes = [0.0_f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let mut packed = Vec::new();
        for weight in stored.iter_mut().filter(|t| t.name.ends_with("mlp.up_proj.weight")) {
            let [n, k] = [weight.shape[0] as usize, weight.shape[1] as usize];
            let bytes: Vec<u8> = (0..n * k / 2).map(|i| (i * 37 + i / 11) as u8).collect();
            let exponents: Vec<u8> = (0..n * k / 32).map(|i| 118 + (i % 5) as u8).collect();
            let number = |i: usize| {
                let code = bytes[i / 2] >> (4 * (i % 2)) & 15;
                let sign = if code & 8 != 0 { -1.0 } else { 1.0 };
                sign * magnitudes[usize::from(code & 7)] * 2.0_f32.powi(i32::from(exponents[i / 32]) - 127)
            };
            let float = wide.iter_mut().find(|t| t.name == weight.name).unwrap();
            float.data = (0..n * k).flat_map(|i| number(i).to_le_bytes()).collect();
            packed.push((
                weight.name.replace(".weight", ".weight_scale"),
                exponents.clone(),
                vec![n as u64, k as u64 / 32],
            ));
            (weight.dtype, weight.shape, weight.data) = ("I8".into(), vec![n as u64, k as u64 / 2], bytes);
        }
        for (name, exponents, shape) in &packed {
            let scale = stored.iter_mut().find(|t| t.name == *name).unwrap();
            (scale.dtype, scale.shape, scale.data) = (dtype.into(), shape.clone(), exponents.clone());
        }
        quant_tests::models::write_model(&at("fp4"), &config, &stored);
        let plain: Value =
            serde_json::from_slice(&std::fs::read(at("float").join("config.json")).unwrap()).unwrap();
        quant_tests::models::write_model(&at("wide"), &plain, &wide);
        let requantize = |from: &str, to: &str, more: &[&str]| {
            let mut arguments = args!["quantize", at(from), "-o", at(to), "--force"];
            let options = ["--scheme", "w8a16-g32", "--method", "rtn", "--quiet"];
            arguments.extend(options.iter().chain(more).map(Into::into));
            quant(arguments).succeeded();
            std::fs::read(at(to).join("model.safetensors")).unwrap()
        };
        assert!(
            requantize("fp4", "out", &["--requantize"]) == requantize("wide", "expected", &[]),
            "{dtype}"
        );
        quant(args![
            "quantize",
            at("fp4"),
            "-o",
            at("restated"),
            "--format",
            "compressed-tensors",
            "--quiet",
            "--force"
        ])
        .succeeded();
        let restated = read_safetensors(&at("restated").join("model.safetensors"));
        for (name, exponents, _) in &packed {
            let of = |name: &str| &restated.iter().find(|t| t.name == name).unwrap().data;
            let codes = &stored.iter().find(|t| t.name == name.replace("_scale", "")).unwrap().data;
            assert!(
                of(name) == exponents && of(&name.replace("_scale", "_packed")) == codes,
                "{dtype} {name}"
            );
        }
    }
    let config: Value =
        serde_json::from_slice(&std::fs::read(at("fp4").join("config.json")).unwrap()).unwrap();
    let stored = read_safetensors(&at("fp4").join("model.safetensors"));
    let up = "model.layers.0.mlp.up_proj";
    type Damage<'a> = &'a dyn Fn(&mut RawTensor);
    let cases: [(&str, i32, &str, Damage<'_>); 3] = [
        ("another type", 4, "one E8M0 scale per 32 columns", &|t| {
            t.data = t.data.iter().flat_map(|_| [0, 0x3f]).collect();
            t.dtype = "BF16".into();
        }),
        ("another grid", 4, "one E8M0 scale per 32 columns", &|t| t.shape.reverse()),
        ("NaN", 6, "non-finite", &|t| t.data[3] = 255),
    ];
    for (case, code, expected, change) in cases {
        let mut changed = stored.clone();
        change(changed.iter_mut().find(|t| t.name == format!("{up}.weight_scale")).unwrap());
        quant_tests::models::write_model(&at(case), &config, &changed);
        let arguments =
            args!["quantize", at(case), "-o", at("none"), "--requantize", "--scheme", "w8a16-g32", "--quiet"];
        check_message(case, &quant(arguments), code, &[up, expected]);
        assert!(!at("none").exists());
    }
}

#[test]
fn fp8_of_modelopt_is_read() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    fp8_models(&at("native"), &at("float"), Scales::Tensor("F32"));
    let mut tensors = read_safetensors(&at("native").join("model.safetensors"));
    let number = |name: String, value: f32| RawTensor {
        name,
        dtype: "F32".into(),
        shape: vec![],
        data: value.to_le_bytes().to_vec(),
    };
    for layer in 0..2 {
        for (part, scale) in [("k", 0.031), ("v", 0.017)] {
            let name = format!("model.layers.{layer}.self_attn.{part}_proj.{part}_scale");
            tensors.push(number(name, scale));
        }
    }
    std::fs::write(at("native").join("model.safetensors"), safetensors(&tensors)).unwrap();
    let config = |cache: Value| {
        json!({ "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "kv_cache_scheme": cache,
                "producer": { "name": "modelopt", "version": "0.47.0" } })
    };
    let cache = json!({ "dynamic": false, "num_bits": 8, "type": "float" });
    edit_config(&at("native"), &json!({ "quantization_config": config(cache) }));
    let quantize = |from: &str, to: &str, more: &[&str]| {
        let options = ["--scheme", "w4a16-g32", "--method", "rtn", "--quiet"];
        let mut arguments = args!["quantize", at(from), "-o", at(to)];
        arguments.extend(options.iter().chain(more).map(Into::into));
        quant(arguments).succeeded()
    };
    quantize("native", "out", &["--requantize"]);
    quantize("float", "expected", &[]);
    let read = |name: &str| std::fs::read(at(name).join("model.safetensors")).unwrap();
    assert!(read("out") == read("expected"));
    let inspected = quant(args!["inspect", at("native"), "--json"]).json();
    assert_eq!(inspected["kv_cache"], "kvf8");
    // After conversion for other loaders, the cache scales have the names under which those loaders look for them.
    quant(args!["quantize", at("native"), "-o", at("ct"), "--format", "compressed-tensors", "--quiet"])
        .succeeded();
    let restated = read_safetensors(&at("ct").join("model.safetensors"));
    for (name, scale) in [("k_scale", 0.031_f32), ("v_scale", 0.017)] {
        let name = format!("model.layers.1.self_attn.{name}");
        assert_eq!(restated.iter().find(|t| t.name == name).unwrap().data, scale.to_le_bytes());
    }
    for (key, value, phrase) in [
        ("kv_cache_quant_algo", json!("NVFP4"), "kv_cache_quant_algo` is \"NVFP4\""),
        ("kv_cache_scheme", json!({ "num_bits": 4, "type": "float" }), "kv_cache_scheme` must be"),
        (
            "kv_cache_scheme",
            json!({ "num_bits": 8, "type": "float", "dynamic": true }),
            "kv_cache_scheme` must be",
        ),
        ("quant_algo", json!("FP8_SOMETHING"), "quant_algo` is FP8_SOMETHING"),
    ] {
        let mut changed = config(Value::Null);
        changed[key] = value;
        edit_config(&at("native"), &json!({ "quantization_config": changed }));
        check_message(phrase, &quant(args!["inspect", at("native")]), 4, &[phrase]);
    }
}

#[test]
fn mxfp4_is_restated_as_nvfp4_without_loss() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    TinyLlama { hidden: 128, intermediate: 256, heads: 4, kv_heads: 2, ..TinyLlama::default() }
        .write(&at("model"));
    let options = ["--scheme", "mxfp4a16", "--method", "rtn", "--quiet"].map(Into::into);
    quant(args!["quantize", at("model"), "-o", at("mx")].into_iter().chain(options)).succeeded();
    for (from, to, format) in [("mx", "nv", "modelopt"), ("nv", "again", "compressed-tensors")] {
        quant(args!["quantize", at(from), "-o", at(to), "--format", format, "--quiet"]).succeeded();
    }
    let [mx, nv] = ["mx", "nv"].map(|name| read_safetensors(&at(name).join("model.safetensors")));
    let data = |tensors: &[RawTensor], name: String| {
        tensors.iter().find(|t| t.name == name).unwrap_or_else(|| panic!("there is no {name}")).data.clone()
    };
    let mut multipliers = std::collections::BTreeMap::new();
    for tensor in mx.iter().filter(|t| t.name.ends_with(".weight_packed")) {
        let module = tensor.name.trim_end_matches(".weight_packed");
        assert_eq!(data(&nv, format!("{module}.weight")), tensor.data, "{module}: other codes");
        let scale = data(&nv, format!("{module}.weight_scale_2"));
        let multiplier = f32::from_le_bytes(scale[..].try_into().unwrap());
        let (before, after) =
            (data(&mx, format!("{module}.weight_scale")), data(&nv, format!("{module}.weight_scale")));
        assert_eq!(after.len(), 2 * before.len());
        for (pair, exponent) in after.chunks(2).zip(before) {
            let power = 2.0_f32.powi(i32::from(exponent) - 127);
            assert_eq!([e4m3(pair[0]) * multiplier, e4m3(pair[1]) * multiplier], [power; 2], "{module}");
        }
        multipliers.insert(module.to_owned(), multiplier);
    }
    assert_eq!(multipliers.len(), 14);
    for (a, b) in [
        ("self_attn.q_proj", "self_attn.k_proj"),
        ("self_attn.q_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    ] {
        for layer in 0..2 {
            let of = |part: &str| multipliers[&format!("model.layers.{layer}.{part}")];
            assert_eq!(of(a), of(b), "engines run {a} and {b} as one");
        }
    }
    let text = quant_tests::workspace_root().join(TEXT);
    let windows = |name: &str| {
        let arguments =
            args!["eval", at(name), "--text", &text, "--window", "32", "--windows", "2", "--quiet", "--json"];
        quant(arguments).json()["window_nll"].clone()
    };
    assert_eq!((windows("nv"), windows("again")), (windows("mx"), windows("mx")));

    // Scales that span a wider range than E4M3's powers of two are refused, with the weight's name.
    let mut separate = mx.clone();
    let name = "model.layers.1.mlp.up_proj.weight_scale";
    separate.iter_mut().find(|t| t.name == name).unwrap().data[5] -= 40;
    std::fs::write(at("mx").join("model.safetensors"), safetensors(&separate)).unwrap();
    let refused = quant(args!["quantize", at("mx"), "-o", at("refused"), "--format", "modelopt", "--quiet"]);
    check_message("apart", &refused, 4, &["_proj", "NVFP4 scales can differ by"]);
    assert!(!at("refused").exists());
    // A float model is refused here: quantizing it to NVFP4 directly is more accurate.
    let fresh = quant(args![
        "quantize",
        at("model"),
        "-o",
        at("refused"),
        "--scheme",
        "mxfp4a16",
        "--method",
        "rtn",
        "--format",
        "modelopt"
    ]);
    check_message("float", &fresh, 2, &["supports only NVFP4 weights, not wf4a16-g32-mx"]);
}

#[test]
fn damaged_fp8_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    fp8_models(&at("native"), &at("float"), ALL[0]);
    let tensors = read_safetensors(&at("native").join("model.safetensors"));
    let config: Value =
        serde_json::from_slice(&std::fs::read(at("native").join("config.json")).unwrap()).unwrap();
    let up = "model.layers.0.mlp.up_proj";
    type Damage<'a> = &'a dyn Fn(&mut Vec<RawTensor>);
    let cases: [(&str, i32, &str, Damage<'_>); 4] = [
        ("no scale", 4, "is FP8, but has no scale", &|t| {
            t.retain(|t| t.name != format!("{up}.weight_scale_inv"))
        }),
        ("another grid", 4, "block of 128 × 128", &|t| {
            let scale = t.iter_mut().find(|t| t.name == format!("{up}.weight_scale_inv")).unwrap();
            scale.shape.reverse();
        }),
        ("a NaN code", 6, "non-finite", &|t| {
            t.iter_mut().find(|t| t.name == format!("{up}.weight")).unwrap().data[9] = 0x7f;
        }),
        ("an infinite scale", 6, "non-finite", &|t| {
            let scale = t.iter_mut().find(|t| t.name == format!("{up}.weight_scale_inv")).unwrap();
            scale.data[..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
        }),
    ];
    for (case, code, expected, change) in cases {
        let mut changed = tensors.clone();
        change(&mut changed);
        let model = at(case);
        quant_tests::models::write_model(&model, &config, &changed);
        let out = at("out");
        let options = ["--requantize", "--scheme", "w4a16-g32", "--method", "rtn", "--quiet"];
        let mut arguments = args!["quantize", &model, "-o", &out];
        arguments.extend(options.iter().map(Into::into));
        check_message(case, &quant(arguments), code, &[up, expected]);
        assert!(!out.exists());
    }
    for (key, value, expected) in [
        ("weight_block_size", json!([64, 64]), "only [128, 128]"),
        ("fmt", json!("e5m2"), "only e4m3"),
        ("activation_scheme", json!("some"), "must be dynamic or static"),
    ] {
        let mut config = config.clone();
        config["quantization_config"][key] = value;
        let model = at(key);
        quant_tests::models::write_model(&model, &config, &tensors);
        check_message(key, &quant(args!["inspect", &model]), 4, &[key, expected]);
    }
}

#[test]
fn every_container_can_be_rounded_once_more() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    TinyLlama { hidden: 128, intermediate: 256, heads: 4, kv_heads: 2, ..TinyLlama::default() }
        .write(&at("model"));
    // Power-of-two scales are recovered exactly. A different global scale changes all values slightly.
    for (scheme, format, max) in [
        ("nvfp4a16", "compressed-tensors", 0.09),
        ("mxfp4a16", "compressed-tensors", 0.0),
        ("fp8-block", "compressed-tensors", 0.03),
        ("w8a16-g32", "gptq", 0.01),
        ("w4a16-g32", "awq", 0.1),
    ] {
        let (first, second) = (at(&format!("{scheme}-{format}")), at(&format!("{scheme}-{format}-again")));
        let options = ["--method", "rtn", "--quiet"];
        let mut arguments =
            args!["quantize", at("model"), "-o", &first, "--scheme", scheme, "--format", format];
        arguments.extend(options.iter().map(Into::into));
        quant(arguments).succeeded();
        let mut arguments = args!["quantize", &first, "-o", &second, "--scheme", scheme, "--format", format];
        arguments.extend(options.iter().chain(&["--requantize"]).map(Into::into));
        quant(arguments).succeeded();
        let report: Value =
            serde_json::from_slice(&std::fs::read(second.join("quant_report.json")).unwrap()).unwrap();
        for tensor in report["tensors"].as_array().unwrap() {
            if let Some(error) = tensor["weight_error"]["relative_rms"].as_f64() {
                assert!(error <= max, "{scheme} {format}: {} is {error} off", tensor["tensor"]);
            }
        }
    }
}
