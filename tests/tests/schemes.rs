//! Schemes that only some formats and kernels support, and tensor types that are only copied.

use std::path::Path;

use quant_tests::args;
use quant_tests::models::{RawTensor, TinyLlama, read_safetensors};
use quant_tests::program::{Run, quant};
use quant_tests::refusal::check_message;
use serde_json::{Value, json};

const TEXT: &str = "calibration-data/heldout/narrative.txt";

fn quantize(model: &Path, out: &Path, scheme: &str, options: &[&str]) -> Run {
    let mut arguments = args!["quantize", model, "-o", out, "--scheme", scheme, "--quiet"];
    arguments.extend(options.iter().map(Into::into));
    quant(arguments)
}

fn config(checkpoint: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(checkpoint.join("config.json")).unwrap()).unwrap()
}

fn tensor<'a>(tensors: &'a [RawTensor], name: &str) -> &'a RawTensor {
    tensors.iter().find(|t| t.name == name).unwrap_or_else(|| panic!("there is no {name}"))
}

#[test]
fn floating_point_weights_by_every_method() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    TinyLlama::default().write(&model);
    for method in ["rtn", "awq", "gptq", "awq-gptq"] {
        let out = scratch.path().join(method);
        let batch: &[&str] = if method == "rtn" { &[] } else { &["--samples", "2", "--seq-len", "32"] };
        quantize(&model, &out, "wf8a16", &[&["--method", method], batch].concat()).succeeded();
        let written = config(&out);
        let group = &written["quantization_config"]["config_groups"]["group_0"];
        assert_eq!(written["quantization_config"]["format"], "float-quantized");
        assert_eq!(
            group["weights"],
            json!({ "num_bits": 8, "type": "float", "symmetric": true, "strategy": "channel", "dynamic": false })
        );
        assert_eq!(
            (&group["input_activations"], &group["format"]),
            (&Value::Null, &json!("float-quantized"))
        );
        let tensors = read_safetensors(&out.join("model.safetensors"));
        let weight = tensor(&tensors, "model.layers.0.mlp.up_proj.weight");
        let scale = tensor(&tensors, "model.layers.0.mlp.up_proj.weight_scale");
        assert_eq!((weight.dtype.as_str(), scale.dtype.as_str()), ("F8_E4M3", "F16"));
        assert_eq!(scale.shape, [weight.shape[0], 1]);
        assert_eq!(weight.data.len() as u64, weight.shape[0] * weight.shape[1]);
        assert!(weight.data.iter().all(|code| code & 0x7f != 0x7f), "{method}: a NaN");
        if method == "rtn" {
            for row in weight.data.chunks(weight.shape[1] as usize) {
                assert!(row.iter().any(|code| code & 0x7f >= 0x7e - 1), "the largest of a row reaches 448");
            }
        }
        let text = quant_tests::workspace_root().join(TEXT);
        let windows = ["--window", "32", "--windows", "2", "--quiet", "--json"];
        let eval = args!["eval", &out, "--text", &text].into_iter().chain(windows.iter().map(Into::into));
        let dense = quant(eval.clone()).json()["perplexity"]["mean"].as_f64().unwrap();
        let kernels = quant(eval.chain(["--execution", "kernels"].iter().map(Into::into)));
        let kernels = kernels.json()["perplexity"]["mean"].as_f64().unwrap();
        assert!(dense > 1.0 && (kernels / dense - 1.0).abs() < 1e-3, "{method}: {kernels}, not {dense}");
    }
}

#[test]
fn containers_refuse_what_they_cannot_hold() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    TinyLlama::default().write(&model);
    for (format, expected) in [
        ("awq", "the awq format supports 4-bit weights only, not FP8"),
        ("gptq", "the gptq format supports 2, 3, 4 or 8 bits, not FP8"),
        ("qserve", "wf8a16-channel"),
    ] {
        let run = quant(args!["plan", &model, "--method", "rtn", "--scheme", "wf8a16", "--format", format]);
        check_message(format, &run, 2, &[expected]);
        let out = scratch.path().join(format);
        let run = quantize(&model, &out, "wf8a16", &["--method", "rtn", "--format", format]);
        check_message(format, &run, 2, &[expected]);
        assert!(!out.exists(), "{format}: an output was created");
    }
    for (scheme, expected) in [
        ("wf8a8", "cannot be combined with int8 activations"),
        ("wf8a16-g128", "one scale per row"),
        ("wf8a16-channel-asym", "unknown part `asym`"),
        ("wf4a16", "FP4 weights require groups: -g16-nv or -g32-mx"),
        ("wf4a16-g16-mx", "-mx does not match the granularity"),
        ("w4af8-g64", "symmetric 4-bit weights in groups of 128"),
    ] {
        let run = quant(args!["plan", &model, "--scheme", scheme]);
        check_message(scheme, &run, 2, &[expected]);
    }
}

fn wide(directory: &Path) {
    let tiny = TinyLlama { hidden: 128, intermediate: 256, heads: 4, kv_heads: 2, ..TinyLlama::default() };
    tiny.write(directory);
}

#[test]
fn every_floating_point_scheme_is_written_and_evaluated() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    wide(&model);
    let batch = ["--samples", "2", "--seq-len", "32"];
    for (scheme, method, format, expected) in [
        ("wf8a16-tensor", "rtn", "float-quantized", ["weight F8_E4M3", "weight_scale BF16", ""]),
        ("fp8", "gptq", "float-quantized", ["weight F8_E4M3", "weight_scale BF16", ""]),
        ("fp8-static", "rtn", "float-quantized", ["weight F8_E4M3", "weight_scale BF16", "input_scale F32"]),
        (
            "wf8af8-channel-static",
            "awq",
            "float-quantized",
            ["weight F8_E4M3", "weight_scale BF16", "input_scale F32"],
        ),
        ("fp8-block", "awq-gptq", "float-quantized", ["weight F8_E4M3", "weight_scale BF16", ""]),
        (
            "nvfp4a16",
            "rtn",
            "nvfp4-pack-quantized",
            ["weight_packed U8", "weight_scale F8_E4M3", "weight_global_scale F32"],
        ),
        (
            "nvfp4",
            "gptq",
            "nvfp4-pack-quantized",
            ["weight_packed U8", "weight_scale F8_E4M3", "input_global_scale F32"],
        ),
        ("mxfp4a16", "awq", "mxfp4-pack-quantized", ["weight_packed U8", "weight_scale U8", ""]),
        ("mxfp8a16", "gptq", "mxfp8-quantized", ["weight F8_E4M3", "weight_scale U8", ""]),
        ("mxfp8", "rtn", "mxfp8-quantized", ["weight F8_E4M3", "weight_scale U8", ""]),
    ] {
        let out = scratch.path().join(scheme);
        let needs_text = method != "rtn" || scheme.ends_with("static");
        let batch: &[&str] = if needs_text { &batch } else { &[] };
        quantize(&model, &out, scheme, &[&["--method", method], batch].concat()).succeeded();
        let written = config(&out);
        assert_eq!(written["quantization_config"]["format"], format, "{scheme}");
        let tensors = read_safetensors(&out.join("model.safetensors"));
        for what in expected.iter().filter(|what| !what.is_empty()) {
            let (name, dtype) = what.split_once(' ').unwrap();
            assert_eq!(
                tensor(&tensors, &format!("model.layers.0.mlp.up_proj.{name}")).dtype,
                dtype,
                "{scheme} {name}"
            );
        }
        for scale in ["weight_scale", "weight_global_scale", "input_scale", "input_global_scale"] {
            let of = |part: &str| {
                let name = format!("model.layers.1.{part}.{scale}");
                tensors.iter().find(|t| t.name == name).filter(|t| t.shape == [1]).map(|t| t.data.clone())
            };
            assert_eq!(of("self_attn.q_proj"), of("self_attn.k_proj"), "{scheme} {scale}");
            assert_eq!(of("self_attn.q_proj"), of("self_attn.v_proj"), "{scheme} {scale}");
            assert_eq!(of("mlp.gate_proj"), of("mlp.up_proj"), "{scheme} {scale}");
        }
        let text = quant_tests::workspace_root().join(TEXT);
        let eval =
            args!["eval", &out, "--text", &text, "--window", "32", "--windows", "2", "--quiet", "--json"];
        let dense = quant(eval.clone()).json()["perplexity"]["mean"].as_f64().unwrap();
        let kernels = quant(eval.into_iter().chain(["--execution", "kernels"].iter().map(Into::into)));
        let kernels = kernels.json()["perplexity"]["mean"].as_f64().unwrap();
        // An input near the midpoint between two codes may be rounded to either.
        assert!(dense > 1.0 && (kernels / dense - 1.0).abs() < 1e-2, "{scheme}: {kernels}, not {dense}");
        let shown = quant(args!["inspect", &out]).succeeded().stdout;
        let whole = written_scheme(scheme);
        assert!(shown.contains(whole), "{whole} is not in {shown}");
    }
}

fn written_scheme(name: &str) -> &str {
    match name {
        "fp8" => "wf8af8-channel",
        "fp8-static" => "wf8af8-tensor-static",
        "fp8-block" => "wf8af8-b128",
        "nvfp4a16" => "wf4a16-g16-nv",
        "nvfp4" => "wf4af4-g16-nv",
        "mxfp4a16" => "wf4a16-g32-mx",
        "mxfp8a16" => "wf8a16-g32-mx",
        "mxfp8" => "wf8af8-g32-mx",
        name => name,
    }
}

#[test]
fn what_makes_no_sense_for_floating_point_weights_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    wide(&model);
    let refused = |options: &[&str], expected: &[&str]| {
        let mut arguments = args!["plan", &model];
        arguments.extend(options.iter().map(Into::into));
        check_message(&options.join(" "), &quant(arguments), 2, expected);
    };
    refused(
        &["--method", "smoothquant", "--scheme", "nvfp4"],
        &["`smoothquant` would not improve wf4af4-g16-nv"],
    );
    refused(&["--method", "clip", "--scheme", "mxfp4a16"], &["`clip` has no effect on wf4a16-g32-mx"]);
    refused(
        &["--method", "rtn", "--scheme", "fp8", "--scale-search", "amax"],
        &["--scale-search has no effect"],
    );
    refused(
        &["--method", "rtn", "--scheme", "nvfp4", "--scale-search", "best"],
        &["unknown scale search `best`", "sweep"],
    );
    refused(&["--method", "rtn", "--scheme", "nvfp4a16", "--asymmetric"], &["contradicts"]);
    refused(
        &["--method", "rtn", "--scheme", "nvfp4", "--override", "lm_head=wf4af4-g16-nv"],
        &["`lm_head` does not support wf4af4-g16-nv"],
    );
    let narrow = scratch.path().join("narrow");
    TinyLlama { hidden: 24, intermediate: 40, heads: 3, kv_heads: 3, head_dim: 8, ..TinyLlama::default() }
        .write(&narrow);
    for (scheme, expected) in [("nvfp4a16", "16"), ("mxfp4a16", "32"), ("fp8-block", "128")] {
        let out = scratch.path().join("narrow-out");
        let run = quantize(&narrow, &out, scheme, &["--method", "rtn"]);
        check_message(scheme, &run, 2, &["down_proj.weight", expected]);
        assert!(!out.exists(), "{scheme}: an output was created");
    }
    // If only weights are quantized, widths need not be multiples of the block's.
    quantize(&narrow, &scratch.path().join("blocks"), "wf8a16-b128", &["--method", "rtn"]).succeeded();
}

#[test]
fn runs_of_scale_searches_differ_and_are_not_resumed_as_another() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    wide(&model);
    let mut written = Vec::new();
    for search in ["amax", "four-over-six", "sweep"] {
        let out = scratch.path().join(search);
        quantize(&model, &out, "nvfp4a16", &["--method", "rtn", "--scale-search", search]).succeeded();
        let report: Value =
            serde_json::from_slice(&std::fs::read(out.join("quant_report.json")).unwrap()).unwrap();
        let errors = report["tensors"].as_array().unwrap().iter();
        let errors: Vec<f64> = errors.filter_map(|t| t["weight_error"]["relative_rms"].as_f64()).collect();
        assert!(!errors.is_empty(), "{report}");
        written.push(errors.iter().sum::<f64>());
    }
    assert!(written[2] < written[0] && written[1] < written[0], "{written:?}");
    let out = scratch.path().join("default");
    quantize(&model, &out, "nvfp4a16", &["--method", "rtn"]).succeeded();
    let of = |name: &str| std::fs::read(scratch.path().join(name).join("model.safetensors")).unwrap();
    assert_eq!(of("default"), of("sweep"));
    let recipe = scratch.path().join("recipe.toml");
    std::fs::write(&recipe, "[quantize]\nscheme = \"nvfp4a16\"\nscale_search = \"four-over-six\"\n").unwrap();
    let out = scratch.path().join("by-recipe");
    quant(args!["quantize", &model, "-o", &out, "--recipe", &recipe, "--quiet"]).succeeded();
    assert_eq!(of("by-recipe"), of("four-over-six"));
}

#[test]
fn five_and_six_bits_are_for_compressed_tensors() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    TinyLlama::default().write(&model);
    for (scheme, bits) in [("w5a16-g32", 5), ("w6a16-g32-asym", 6), ("w7a16-channel", 7)] {
        let out = scratch.path().join(scheme);
        quantize(&model, &out, scheme, &["--method", "rtn"]).succeeded();
        let tensors = read_safetensors(&out.join("model.safetensors"));
        let packed = tensor(&tensors, "model.layers.0.mlp.up_proj.weight_packed");
        let shape = tensor(&tensors, "model.layers.0.mlp.up_proj.weight_shape");
        let columns = u64::from_le_bytes(shape.data[8..16].try_into().unwrap());
        assert_eq!(packed.shape[1], (columns * bits).div_ceil(32), "{scheme}");
        let text = quant_tests::workspace_root().join(TEXT);
        for execution in ["fake", "kernels"] {
            let run = args!["eval", &out, "--text", &text, "--execution", execution, "--window", "32"];
            let options = ["--windows", "2", "--quiet", "--json"];
            let run = quant(run.into_iter().chain(options.iter().map(Into::into)));
            assert!(
                run.json()["perplexity"]["mean"].as_f64().is_some_and(|p| p > 1.0),
                "{scheme} {execution}"
            );
        }
        for format in ["awq", "gptq", "qserve"] {
            let run = quant(args!["plan", &model, "--method", "rtn", "--scheme", scheme, "--format", format]);
            check_message(scheme, &run, 2, &[format]);
        }
    }
}

#[test]
fn unknown_types_of_tensors_are_copied() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    let data: Vec<u8> = (0..24).map(|i| i * 9 + 3).collect();
    let raw = |name: &str, dtype: &str, shape: &[u64]| RawTensor {
        name: name.into(),
        dtype: dtype.into(),
        shape: shape.to_vec(),
        data: data.clone(),
    };
    let others = [
        raw("vision.table", "C64", &[3]),
        raw("vision.codes", "F4", &[6, 8]),
        raw("vision.mask", "F6_E3M2", &[4, 8]),
        raw("vision.exponents", "F8_E8M0", &[24]),
        raw("vision.numbers", "F8_E4M3FNUZ", &[2, 12]),
    ];
    let mut tensors = TinyLlama::default().tensors();
    tensors.extend(others.iter().cloned());
    TinyLlama::default().write_with(&model, &tensors);
    let out = scratch.path().join("out");
    quantize(&model, &out, "w4a16-g32", &["--method", "rtn"]).succeeded();
    let written = read_safetensors(&out.join("model.safetensors"));
    for other in &others {
        let copy = tensor(&written, &other.name);
        assert_eq!((&copy.dtype, &copy.shape, &copy.data), (&other.dtype, &other.shape, &other.data));
    }
    let listed = quant(args!["inspect", &model, "--json"]).json().to_string();
    assert!(listed.contains("\"C64\"") && listed.contains("\"F8_E4M3FNUZ\""), "{listed}");
}

/// Several formats in one checkpoint. One group has the class as its target; the others list exact names, including
/// those of fused linears. Reading gives back what was written.
#[test]
fn attention_in_fp8_and_mlps_in_nvfp4() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    wide(&model);
    let out = scratch.path().join("out");
    let options =
        ["--method", "rtn", "--override", "*self_attn*=fp8", "--override", "*.1.mlp.down_proj=w4af8"];
    let batch = ["--samples", "2", "--seq-len", "32", "--ignore", "*.0.mlp.down_proj"];
    quantize(&model, &out, "nvfp4", &[&options[..], &batch].concat()).succeeded();
    let quantization = config(&out)["quantization_config"].clone();
    assert_eq!(quantization["format"], "mixed-precision");
    let groups = quantization["config_groups"].as_object().unwrap();
    let of = |format: &str| groups.values().find(|group| group["format"] == format).unwrap();
    let targets = |format: &str| {
        let targets = of(format)["targets"].as_array().unwrap().iter();
        targets.map(|target| target.as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    // In some engines, a class also matches fused linears, so the fused linears of other groups are named as well.
    let (fp8, four) = (targets("float-quantized"), targets("pack-quantized"));
    for layer in 0..2 {
        for part in ["q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"] {
            let name = format!("model.layers.{layer}.self_attn.{part}");
            let is_class = fp8 == ["Linear"];
            assert!(is_class || fp8.contains(&name), "{name} is not in {fp8:?}");
        }
    }
    assert_eq!(four, ["model.layers.1.mlp.down_proj"]);
    let nvfp4 = targets("nvfp4-pack-quantized");
    assert!(fp8 == ["Linear"] || nvfp4 == ["Linear"]);
    assert!(
        nvfp4 == ["Linear"] || nvfp4.contains(&"model.layers.0.mlp.gate_up_proj".to_owned()),
        "{nvfp4:?}"
    );
    let inputs = &of("pack-quantized")["input_activations"];
    assert_eq!(
        (&inputs["type"], &inputs["strategy"], &inputs["dynamic"]),
        (&json!("float"), &json!("token"), &json!(true))
    );
    assert!(quantization["ignore"].as_array().unwrap().contains(&json!("model.layers.0.mlp.down_proj")));
    let text = quant_tests::workspace_root().join(TEXT);
    let eval = args!["eval", &out, "--text", &text, "--window", "32", "--windows", "2", "--quiet", "--json"];
    let dense = quant(eval.clone()).json()["perplexity"]["mean"].as_f64().unwrap();
    let kernels = quant(eval.into_iter().chain(["--execution", "kernels"].iter().map(Into::into)));
    let kernels = kernels.json()["perplexity"]["mean"].as_f64().unwrap();
    assert!(dense > 1.0 && (kernels / dense - 1.0).abs() < 1e-2, "{kernels}, not {dense}");
    let shown = quant(args!["inspect", &out]).succeeded().stdout;
    for scheme in ["wf8af8-channel", "wf4af4-g16-nv", "w4af8-g128-sym"] {
        assert!(shown.contains(scheme), "{scheme} is not in {shown}");
    }
}

/// NVFP4 in ModelOpt's layout is equivalent to that of compressed-tensors: each converts to the other, byte for byte
/// except for the scales of inputs.
#[test]
fn nvfp4_goes_from_layout_to_layout() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    // An F16 model: the largest magnitudes of F32 weights have no exact reciprocal.
    wide(&at("model"));
    for (scheme, algorithm) in [("nvfp4", "NVFP4"), ("nvfp4a16", "W4A16_NVFP4")] {
        let of = |name: &str| at(&format!("{name}-{scheme}"));
        let options = ["--method", "rtn", "--samples", "2", "--seq-len", "32"];
        let options = if scheme == "nvfp4" { &options[..] } else { &options[..2] };
        for (name, format) in [("ct", "compressed-tensors"), ("mo", "modelopt")] {
            quantize(&at("model"), &of(name), scheme, &[options, &["--format", format]].concat()).succeeded();
        }
        for (from, to, format) in [
            ("ct", "ct-mo", "modelopt"),
            ("ct-mo", "ct-mo-ct", "compressed-tensors"),
            ("mo", "mo-ct", "compressed-tensors"),
        ] {
            quant(args!["quantize", of(from), "-o", of(to), "--format", format, "--quiet"]).succeeded();
        }
        let same = |one: &str, other: &str| {
            let [one, other] = [one, other].map(|name| {
                let mut tensors = read_safetensors(&of(name).join("model.safetensors"));
                tensors.sort_by(|a, b| a.name.cmp(&b.name));
                tensors
            });
            assert_eq!(one.len(), other.len());
            for (one, other) in one.iter().zip(&other) {
                assert_eq!((&one.name, &one.dtype, &one.shape), (&other.name, &other.dtype, &other.shape));
                // Inputs are F32, and the reciprocal of their scale may be off by a unit or two in the last place.
                if one.name.ends_with(".input_scale") || one.name.ends_with(".input_global_scale") {
                    let [one, other] =
                        [one, other].map(|t| u32::from_le_bytes(t.data[..].try_into().unwrap()));
                    assert!(one.abs_diff(other) <= 2, "{scheme}");
                } else {
                    assert!(one.data == other.data, "{scheme}: {}", one.name);
                }
            }
        };
        same("ct-mo", "mo");
        same("ct-mo-ct", "ct");
        same("mo-ct", "ct");
        let file: Value =
            serde_json::from_slice(&std::fs::read(of("mo").join("hf_quant_config.json")).unwrap()).unwrap();
        assert_eq!(file["quantization"]["quant_algo"], algorithm);
        assert_eq!(config(&of("mo"))["quantization_config"]["quant_algo"], algorithm);
        let text = quant_tests::workspace_root().join(TEXT);
        let mean = |name: &str| {
            let eval = args![
                "eval",
                of(name),
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
        let (here, there) = (mean("mo"), mean("ct"));
        let max = if scheme == "nvfp4" { 1e-2 } else { 0.0 };
        assert!((here / there - 1.0).abs() <= max, "{scheme}: {here}, not {there}");
    }
    let run = quantize(&at("model"), &at("other"), "fp8", &["--method", "rtn", "--format", "modelopt"]);
    check_message("fp8", &run, 2, &["the modelopt format supports only NVFP4 weights"]);
}
