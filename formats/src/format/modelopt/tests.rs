use half::bf16;
use proptest::prelude::*;
use quant_kernels_cpu::StaticScale;
use serde_json::{Value, json};

use super::*;
use crate::checkpoint::MemorySource;
use crate::format::{CompressedTensors, FusedLinears, PackedWeight};
use crate::quantize::quantize_rtn;

/// BF16 weights, as in checkpoints: `largest` is the largest magnitude.
fn wave(n: usize, k: usize, largest: f32) -> Vec<f32> {
    let mut weights: Vec<f32> =
        (0..n * k).map(|i| bf16::from_f32((i as f32 * 0.7).sin() * 0.9 * largest).to_f32()).collect();
    weights[0] = bf16::from_f32(largest).to_f32();
    weights
}

fn quantized(shape @ [n, k]: [usize; 2], scheme: &str, largest: f32) -> QuantizedTensor {
    let scheme: LinearScheme = scheme.parse().unwrap();
    let weights = wave(n, k, largest);
    let mut tensor = quantize_rtn("w", &weights, shape, scheme, Dtype::F8E4M3, None).unwrap();
    let input = 2688.0 / bf16::from_f32(11.3 * largest).to_f32();
    tensor.input = scheme.has_static_activations().then_some(StaticScale { scale: input, zero: 0 });
    tensor
}

type Tensors = Vec<(TensorSpec, Vec<u8>)>;

fn source(tensors: &Tensors) -> MemorySource {
    let mut source = MemorySource::new();
    for (spec, bytes) in tensors {
        source.insert(&spec.name, spec.info.dtype, spec.info.shape.clone(), bytes.clone()).unwrap();
    }
    source
}

fn config(container: &dyn Container, scheme: LinearScheme) -> Value {
    container.quantization_config(&ModuleSchemes { quantized: vec![("m", scheme)], ..Default::default() })
}

fn read(
    container: &dyn Container,
    config: &Value,
    source: &MemorySource,
    shape: [usize; 2],
) -> Result<QuantizedTensor> {
    let mut reader = container.reader(config).unwrap().unwrap();
    reader.survey(source)?;
    let scheme = reader.scheme("m").expect("a quantized linear");
    reader.read(source, PackedWeight { module: "m", shape, scheme })
}

proptest! {
    #[test]
    fn each_layout_becomes_the_other_and_comes_back(
        n in 1_usize..20, groups in 1_usize..6, largest in 1e-6_f32..200.0, rounded: bool,
    ) {
        let shape = [n, groups * NV_GROUP];
        let tensor = quantized(shape, if rounded { "wf4af4-g16-nv" } else { "wf4a16-g16-nv" }, largest);
        let here: &dyn Container = &ModelOpt;
        let there: &dyn Container = &CompressedTensors;
        for (first, second) in [(there, here), (here, there)] {
            let before = first.pack("m", &tensor).unwrap();
            let read_first = read(first, &config(first, tensor.scheme), &source(&before), shape).unwrap();
            prop_assert_eq!(&read_first, &tensor);
            let between = second.pack("m", &read_first).unwrap();
            let read_second = read(second, &config(second, tensor.scheme), &source(&between), shape).unwrap();
            prop_assert_eq!(&first.pack("m", &read_second).unwrap(), &before);
            prop_assert!(before[0].1 == between[0].1 && before[1].1 == between[1].1);
        }
    }

    #[test]
    fn hostile_files_are_errors(
        name in 0_usize..5, dtype in 0..Dtype::ALL.len(), shape in prop::collection::vec(0_usize..70, 0..3), fill: u8,
        key in 0_usize..13, value in 0_usize..9, n in 1_usize..5, k in 1_usize..100,
    ) {
        let tensor = quantized([n, k.next_multiple_of(16)], "wf4af4-g16-nv", 0.1);
        let mut tensors = ModelOpt.pack("m", &tensor).unwrap();
        let names = ["weight", "weight_scale", "weight_scale_2", "input_scale", "weight_scale_inv"];
        let other = format!("m.{}", names[name]);
        tensors.retain(|(spec, _)| spec.name != other);
        let dtype = Dtype::ALL[dtype];
        if let Some(len) = dtype.byte_len(shape.iter().product::<usize>() as u64) {
            tensors.push((TensorSpec::new(other, dtype, shape), vec![fill; len as usize]));
        }
        let mut config = config(&ModelOpt, tensor.scheme);
        let keys = ["quant_algo", "group_size", "ignore", "config_groups", "kv_cache_scheme", "exclude_modules",
                    "quantization", "has_zero_point", "quantized_layers", "producer", "quant_method", "unknown", ""];
        let values = [json!(null), json!(0), json!("FP8"), json!("nvfp4"), json!([]), json!({}), json!(true), json!(16),
                      json!({"quant_algo": "NVFP4", "kv_cache_quant_algo": null, "group_size": 16})];
        if !keys[key].is_empty() {
            config[keys[key]] = values[value].clone();
        }
        let Ok(Some(mut reader)) = ModelOpt.reader(&config) else { return Ok(()) };
        let source = source(&tensors);
        if reader.survey(&source).is_err() {
            return Ok(());
        }
        let Some(scheme) = reader.scheme("m") else { return Ok(()) };
        let weight = PackedWeight { module: "m", shape: [n, k], scheme };
        if let Ok(tensor) = reader.read(&source, weight) {
            prop_assert!(tensor.dequantize().is_ok());
            prop_assert!(tensor.input_grid().is_ok());
        }
    }
}

#[test]
fn global_scales_are_multipliers() {
    // The largest magnitude is 6 · 448 times the scale.
    let tensor = quantized([4, 32], "wf4af4-g16-nv", 0.25);
    let packed = ModelOpt.pack("m", &tensor).unwrap();
    let number = |i: usize| f32::from_le_bytes(packed[i].1[..].try_into().unwrap());
    assert_eq!(packed[2].0, TensorSpec::new("m.weight_scale_2", Dtype::F32, []));
    assert_eq!((number(2), tensor.global), (0.25 / 2688.0, Some(2688.0 / 0.25)));
    assert_eq!(number(3), bf16::from_f32(11.3 * 0.25).to_f32() / 2688.0);
}

#[test]
fn configurations() {
    let part = |name: &str| format!("m.{name}");
    let fused = [FusedLinears {
        name: part("gate_up_proj"),
        parts: vec![part("gate_proj"), part("up_proj")],
        absent: vec![],
    }];
    let of = |scheme: &str, float: &[&'static str]| {
        let scheme = scheme.parse().unwrap();
        let quantized = vec![("m.gate_proj", scheme), ("m.up_proj", scheme)];
        let schemes =
            ModuleSchemes { quantized, float: float.to_vec(), fused: &fused, ..ModuleSchemes::default() };
        let files = ModelOpt.companion_files(&schemes);
        (ModelOpt.quantization_config(&schemes), files, ModelOpt.warnings(&schemes))
    };
    let (config, files, notes) = of("wf4af4-g16-nv", &["lm_head", "m.down_proj"]);
    assert_eq!((&config["quant_method"], &config["quant_algo"]), (&json!("modelopt"), &json!("NVFP4")));
    assert_eq!(config["ignore"], json!(["lm_head", "m.down_proj"]));
    let numbers = json!({ "num_bits": 4, "type": "float", "group_size": 16, "dynamic": false });
    let group = json!({ "targets": ["Linear"], "weights": numbers, "input_activations": numbers });
    assert_eq!(config["config_groups"]["group_0"], group);
    let [(name, file)] = &files[..] else { panic!("{files:?}") };
    assert_eq!(*name, "hf_quant_config.json");
    let quantization = json!({ "quant_algo": "NVFP4", "kv_cache_quant_algo": null, "group_size": 16,
                               "exclude_modules": ["lm_head", "m.down_proj"] });
    assert_eq!(file["quantization"], quantization);
    assert_eq!(file["producer"]["name"], json!("modelopt"));
    assert_eq!(notes.len(), 1);

    let (config, _, notes) = of("wf4a16-g16-nv", &["m.gate"]);
    assert_eq!(config["quant_algo"], json!("W4A16_NVFP4"));
    assert!(config["config_groups"]["group_0"].get("input_activations").is_none());
    assert!(notes[1].contains("`m.gate_proj`") && notes[1].contains("`m.gate`"), "{notes:?}");
}

#[test]
fn configurations_of_others_are_read_strictly() {
    let nested = json!({ "quant_method": "modelopt", "producer": { "name": "modelopt", "version": "0.37.0" },
                         "quantization": { "quant_algo": "NVFP4", "kv_cache_quant_algo": null, "group_size": 16,
                                           "exclude_modules": ["lm_head*", "*router*"] } });
    assert!(ModelOpt.reader(&nested).unwrap().is_some());
    assert!(ModelOpt.reader(&json!({ "quant_method": "fp8" })).unwrap().is_none());
    for (change, expected) in [
        (json!({ "quant_algo": "W4A8_AWQ" }), "quant_algo` is W4A8_AWQ"),
        (json!({ "quant_algo": null }), "quant_algo` must be a string"),
        (json!({ "group_size": 32 }), "group_size` is 32"),
        (json!({ "kv_cache_scheme": { "num_bits": 4, "type": "float" } }), "kv_cache_scheme` must be"),
        (json!({ "kv_cache_scheme": "FP8" }), "kv_cache_scheme` must be"),
        (json!({ "kv_cache_quant_algo": "NVFP4" }), "kv_cache_quant_algo` is \"NVFP4\""),
        (json!({ "pre_quant_scale": true }), "pre_quant_scale` must be false"),
        (json!({ "something": 1 }), "something` is an unknown key"),
    ] {
        let mut config = config(&ModelOpt, "wf4a16-g16-nv".parse().unwrap());
        config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let error = ModelOpt.reader(&config).map(|_| ()).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn caches_of_fp8() {
    let schemes = |fp8_cache| ModuleSchemes {
        quantized: vec![("m", "wf4a16-g16-nv".parse().unwrap())],
        fp8_cache,
        ..ModuleSchemes::default()
    };
    let written = ModelOpt.quantization_config(&schemes(true));
    assert_eq!(written["kv_cache_scheme"], json!({ "dynamic": false, "num_bits": 8, "type": "float" }));
    let files = ModelOpt.companion_files(&schemes(true));
    assert_eq!(files[0].1["quantization"]["kv_cache_quant_algo"], json!("FP8"));
    let reads = |config: &Value| ModelOpt.reader(config).unwrap().unwrap().has_fp8_cache();
    assert!(reads(&written) && !reads(&ModelOpt.quantization_config(&schemes(false))));
    let mut nested = files[0].1.clone();
    nested["quant_method"] = json!("modelopt");
    assert!(reads(&nested));
    let name = |linear: &str, part| ModelOpt.cache_scale(linear, part).unwrap().name;
    assert_eq!(name("l.self_attn.k_proj", CachePart::Keys), "l.self_attn.k_proj.k_scale");
    assert_eq!(name("l.self_attn.v_proj", CachePart::Values), "l.self_attn.v_proj.v_scale");
    assert_eq!(name("l.self_attn.qkv_proj", CachePart::Values), "l.self_attn.v_scale");
}

#[test]
fn tensors_are_checked() {
    type Damage = fn(&mut (TensorSpec, Vec<u8>));
    let cases: [(usize, Damage, &str); 7] = [
        (2, |(_, bytes)| bytes.copy_from_slice(&2688.0_f32.to_le_bytes()), "seems to be a divisor"),
        (2, |(_, bytes)| bytes.fill(0), "is 0; a scale and its reciprocal must be"),
        (2, |(_, bytes)| bytes.copy_from_slice(&f32::NAN.to_le_bytes()), "non-finite"),
        (1, |(_, bytes)| bytes[1] = 0x7f, "non-finite"),
        (1, |(_, bytes)| bytes[1] = 0xb8, "negative scale"),
        (1, |(spec, bytes)| (spec.info.dtype, *bytes) = (Dtype::I8, bytes.clone()), "m.weight_scale"),
        (
            0,
            |(spec, bytes)| (spec.info.dtype, *bytes) = (Dtype::I8, bytes.clone()),
            "`m.weight` of type U8 does not",
        ),
    ];
    let tensor = quantized([4, 32], "wf4a16-g16-nv", 0.25);
    for (which, damage, expected) in cases {
        let mut packed = ModelOpt.pack("m", &tensor).unwrap();
        damage(&mut packed[which]);
        let error =
            read(&ModelOpt, &config(&ModelOpt, tensor.scheme), &source(&packed), [4, 32]).unwrap_err();
        assert!(error.to_string().contains(expected), "{expected}: {error}");
    }
    let tensor = quantized([4, 32], "wf4af4-g16-nv", 0.25);
    let mut packed = ModelOpt.pack("m", &tensor).unwrap();
    packed[3].1.copy_from_slice(&1.0_f32.to_le_bytes());
    let back = read(&ModelOpt, &config(&ModelOpt, tensor.scheme), &source(&packed), [4, 32]).unwrap();
    assert_eq!(back.input.map(|input| input.scale), Some(1.0));
}

#[test]
fn other_schemes_are_for_other_formats() {
    for scheme in ["wf8a16-channel", "wf4a16-g32-mx", "w4a16-g128-sym"] {
        let scheme: LinearScheme = scheme.parse().unwrap();
        let refused = ModelOpt.layout("m", [8, 128], scheme, scheme.scale_dtype(Dtype::Bf16));
        assert!(matches!(refused, Err(Error::Usage { .. })), "{scheme}");
    }
    let nvfp4: LinearScheme = "wf4a16-g16-nv".parse().unwrap();
    let refused = ModelOpt.layout("m", [8, 24], nvfp4, Dtype::F8E4M3);
    assert!(matches!(refused, Err(Error::GroupSizeDoesNotDivide(_))));
    let mixed = ModuleSchemes {
        quantized: vec![("a", nvfp4), ("b", "wf8af8-channel".parse().unwrap())],
        ..ModuleSchemes::default()
    };
    assert!(matches!(ModelOpt.check(&mixed), Err(Error::Usage { .. })));
}
