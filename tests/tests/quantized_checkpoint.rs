//! Quantized checkpoints read as by an engine, without a model.

use std::path::Path;

use quant_core::Category;
use quant_core::checkpoint::ModelDirectory;
use quant_core::model::Model;
use quant_formats::format::{LinearInfo, QuantizedCheckpoint};
use quant_kernels_cpu::{FloatRows, IsaToken, RowLayout, Serial};
use quant_tests::args;
use quant_tests::models::{RawTensor, edit_config, read_safetensors, safetensors, write_cut_demo_model};
use quant_tests::program::quant;
use quant_tests::refusal::check_message;
use serde_json::json;

const LINEARS: [&str; 7] = [
    "mlp.down_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "self_attn.k_proj",
    "self_attn.o_proj",
    "self_attn.q_proj",
    "self_attn.v_proj",
];

fn quantize(model: &Path, out: &Path, format: &str, scheme: &str) -> QuantizedCheckpoint {
    let line = args!["quantize", model, "-o", out, "--method", "rtn", "--format", format, "--scheme", scheme];
    quant(line).succeeded();
    QuantizedCheckpoint::open(out).unwrap()
}

fn check_product(checkpoint: &QuantizedCheckpoint, linear: &LinearInfo, weight: &[f32]) {
    let [n, k] = linear.shape;
    let packed = checkpoint.read(&linear.name).unwrap().pack(None, &Serial).unwrap();
    let x: Vec<f32> = (0..2 * k).map(|i| (i as f32 * 0.37).sin()).collect();
    let mut rows = FloatRows::new(IsaToken::detect());
    rows.pack(&x, RowLayout::of(packed.layout()), &Serial).unwrap();
    let mut out = vec![0.0; 2 * n];
    packed.multiply_float(&rows, &mut out, &Serial).unwrap();
    for (row, x) in x.chunks_exact(k).enumerate() {
        for (o, weight) in weight.chunks_exact(k).enumerate() {
            let terms = || weight.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
            let (exact, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
            let off = (f64::from(out[row * n + o]) - exact).abs();
            // Codes are stored relative to the midpoint, so rounding applies to values up to 16 times the size of the
            // products.
            assert!(off <= 16.0 * 2.0_f64.powi(-15) * size + 1e-6, "{}: {off} of {size}", linear.name);
        }
    }
}

#[test]
fn every_container_is_read_without_a_model() {
    let scratch = tempfile::tempdir().unwrap();
    let model = scratch.path().join("model");
    write_cut_demo_model(&model, 2);
    for (format, scheme) in [
        ("awq", "w4a16-g32-asym"),
        ("gptq", "w4a16-g32-sym"),
        ("gptq", "w8a16-channel-sym"),
        ("compressed-tensors", "w4a16-g32-asym"),
        ("compressed-tensors", "w3a16-g32-sym"),
        ("compressed-tensors", "w8a8-channel-sym"),
        ("compressed-tensors", "fp8"),
        ("compressed-tensors", "nvfp4a16"),
        ("compressed-tensors", "mxfp4a16"),
        ("modelopt", "nvfp4a16"),
        ("qserve", "w4a8-g128-asym-progressive"),
        ("qserve", "w4a8-channel-asym"),
    ] {
        let out = scratch.path().join(format!("{format}-{scheme}"));
        let checkpoint = quantize(&model, &out, format, scheme);
        let directory = ModelDirectory::open(&out).unwrap();
        let read_back = Model::open(&directory).unwrap().dequantized().unwrap();
        let names: Vec<&str> = checkpoint.linears().iter().map(|linear| linear.name.as_str()).collect();
        let layers = (0..2).flat_map(|i| LINEARS.map(|name| format!("model.layers.{i}.{name}")));
        assert_eq!(names, layers.collect::<Vec<_>>(), "{format}, {scheme}");
        for linear in checkpoint.linears() {
            assert_eq!(checkpoint.linear(&linear.name), Some(linear));
            let weight = read_back.source().read_f32(&format!("{}.weight", linear.name)).unwrap();
            let tensor = checkpoint.read(&linear.name).unwrap();
            assert_eq!((tensor.shape, tensor.scheme), (linear.shape, linear.scheme));
            assert_eq!(tensor.dequantize().unwrap(), weight, "{format}, {scheme}: {}", linear.name);
            check_product(&checkpoint, linear, &weight);
        }
        assert_eq!(checkpoint.bias("model.layers.0.mlp.up_proj").unwrap(), None);
        assert!(checkpoint.source().info("model.norm.weight").is_some());
        assert!(checkpoint.read("lm_head").is_err() && checkpoint.linear("model.norm").is_none());
        assert_eq!(checkpoint.config()["model_type"], "llama");
    }
}

#[test]
fn what_is_not_a_quantized_checkpoint_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    write_cut_demo_model(&at("model"), 1);
    let refused = |path: &Path, expected: &str| {
        let error = QuantizedCheckpoint::open(path).unwrap_err();
        assert_eq!(error.category(), Category::Input, "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    };
    refused(&at("absent"), "absent");
    refused(&at("model"), "is not quantized");

    let out = at("packed");
    quantize(&at("model"), &out, "compressed-tensors", "w4a16-g32-sym");
    let file = out.join("model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    let damaged = |change: &dyn Fn(&mut RawTensor) -> bool, expected: &str| {
        let mut tensors = read_safetensors(&file);
        tensors.retain_mut(|tensor| change(tensor));
        std::fs::write(&file, safetensors(&tensors)).unwrap();
        refused(&out, expected);
        std::fs::write(&file, &whole).unwrap();
    };
    let ends = |tensor: &RawTensor, with: &str| tensor.name.ends_with(with);
    damaged(&|tensor| !ends(tensor, "up_proj.weight_shape"), "up_proj.weight_shape");
    damaged(&|tensor| !ends(tensor, "up_proj.weight_scale"), "up_proj.weight_scale");
    // Shapes that do not fit the codes, or are invalid.
    for stated in [i64::MAX, -1, 0] {
        let change = |tensor: &mut RawTensor| {
            if ends(tensor, "up_proj.weight_shape") {
                tensor.data = [stated; 2].iter().flat_map(|d| d.to_le_bytes()).collect();
            }
            true
        };
        damaged(&change, "up_proj");
    }
    edit_config(&out, &json!({ "quantization_config": { "quant_method": "unheard of" } }));
    refused(&out, "unheard of");
}

/// A GPTQ checkpoint with `desc_act`, as other programs write it: groups of scattered inputs.
#[test]
fn scattered_groups_are_read_and_not_repacked() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    write_cut_demo_model(&at("model"), 1);
    let ours = at("gptq");
    quantize(&at("model"), &ours, "gptq", "w4a16-g32-sym");
    let settings = QuantizedCheckpoint::open(&ours).unwrap().config()["quantization_config"].clone();
    let file = ours.join("model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    // Input `i` belongs to the group of input `7 i`, which is a permutation because no width is a multiple of 7.
    let scatter = |change: &dyn Fn(&mut Vec<usize>)| {
        std::fs::write(&file, &whole).unwrap();
        let mut tensors = read_safetensors(&file);
        for index in tensors.iter_mut().filter(|tensor| tensor.name.ends_with(".g_idx")) {
            let k = index.data.len() / 4;
            assert!(!k.is_multiple_of(7));
            let mut groups: Vec<usize> = (0..k).map(|i| 7 * i % k / 32).collect();
            change(&mut groups);
            index.data = groups.iter().flat_map(|&group| (group as i32).to_le_bytes()).collect();
        }
        std::fs::write(&file, safetensors(&tensors)).unwrap();
    };
    scatter(&|_| {});
    let mut settings = settings;
    settings["desc_act"] = json!(true);
    edit_config(&ours, &json!({ "quantization_config": settings }));
    let checkpoint = QuantizedCheckpoint::open(&ours).unwrap();
    let order = checkpoint.input_order("model.layers.0.mlp.up_proj").unwrap().unwrap();
    let k = order.len();
    assert!(order.iter().enumerate().all(|(c, &input)| 7 * input as usize % k / 32 == c / 32), "{order:?}");
    quant(args!["inspect", &ours]).succeeded();

    let convert = |out: &str, options: &[&str]| {
        let line = args!["quantize", &ours, "-o", at(out)];
        quant(line.into_iter().chain(options.iter().map(std::ffi::OsString::from)))
    };
    for format in ["awq", "compressed-tensors", "gptq"] {
        let run = convert("converted", &["--format", format]);
        check_message(format, &run, 2, &["groups of inputs that are not adjacent", "--requantize"]);
    }
    let run = convert("converted.gguf", &[]);
    check_message("gguf", &run, 4, &["groups of inputs are not adjacent", "no index of groups"]);
    assert!(!at("converted").exists() && !at("converted.gguf").exists());

    let again = ["--requantize", "--method", "rtn", "--scheme", "w8a16-g32-sym"];
    convert("again", &again).succeeded();
    let read_back = |path: &Path| {
        let model = Model::open(&ModelDirectory::open(path).unwrap()).unwrap().dequantized().unwrap();
        model.source().read_f32("model.layers.0.mlp.up_proj.weight").unwrap()
    };
    let (before, after) = (read_back(&ours), read_back(&at("again")));
    let largest = before.iter().fold(0.0_f32, |largest, w| largest.max(w.abs()));
    assert!(before.iter().zip(&after).all(|(a, b)| (a - b).abs() < largest / 100.0));

    scatter(&|groups| groups[3] = groups.len());
    let run = convert("damaged", &again);
    check_message("damaged", &run, 4, &["g_idx` assigns input 3 to group"]);
}
