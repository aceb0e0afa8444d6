//! Tests of the reader: round trips, the scheme of each module, and every rejected feature.

use std::path::PathBuf;

use proptest::prelude::*;
use serde_json::json;

use super::*;

use crate::checkpoint::TensorInfo;
use crate::format::{CompressedTensors, Container, ModuleSchemes};
use crate::quantize::{InputGrid, quantize_rtn};
use crate::scheme::{FLOAT_SCHEMES, Granularity, WeightFormat};

#[derive(Default, Clone)]
struct Memory(std::collections::BTreeMap<String, (TensorInfo, Vec<u8>)>);

impl TensorSource for Memory {
    fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }
    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.0.get(name).map(|(info, _)| info)
    }
    fn read_range(&self, name: &str, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.require(name)?;
        let at = offset as usize;
        buffer.copy_from_slice(&self.0[name].1[at..at + buffer.len()]);
        Ok(())
    }
    fn location(&self, _: &str) -> PathBuf {
        "model.safetensors".into()
    }
}

impl Memory {
    fn of(module: &str, tensor: &QuantizedTensor) -> Self {
        let packed = CompressedTensors.pack(module, tensor).unwrap();
        Self(packed.into_iter().map(|(spec, bytes)| (spec.name, (spec.info, bytes))).collect())
    }
    fn put(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) {
        self.0.insert(name.into(), (TensorInfo { dtype, shape: shape.to_vec() }, bytes));
    }
}

fn read(reader: &dyn PackedReader, source: &dyn TensorSource, shape: [usize; 2]) -> Result<QuantizedTensor> {
    let scheme = reader.scheme("m").expect("a quantized linear");
    reader.read(source, PackedWeight { module: "m", shape, scheme })
}

fn reader(config: &Value) -> Box<dyn PackedReader> {
    CompressedTensors.reader(config).unwrap().unwrap()
}

fn wave(n: usize, k: usize) -> Vec<f32> {
    (0..n * k).map(|i| (i as f32 * 0.7).sin() * 0.05 + 0.01).collect()
}

fn quantized(shape: [usize; 2], scheme: &str) -> QuantizedTensor {
    quantize_rtn("w", &wave(shape[0], shape[1]), shape, scheme.parse().unwrap(), Dtype::F16, None).unwrap()
}

fn config_for(scheme: LinearScheme) -> Value {
    CompressedTensors
        .quantization_config(&ModuleSchemes { quantized: vec![("m", scheme)], ..Default::default() })
}

proptest! {
    #[test]
    fn what_was_packed_is_read(
        n in 0usize..40, groups in 1usize..4, size in 1usize..50, bits in 2u8..=8,
        symmetric: bool, channel: bool, dtype in 0usize..3,
    ) {
        let k = groups * size;
        let granularity = if channel { Granularity::Channel } else { Granularity::Group(size) };
        let scheme = LinearScheme::weight_only(WeightFormat::int(bits, symmetric), granularity);
        let dtype = [Dtype::F16, Dtype::Bf16, Dtype::F32][dtype];
        let tensor = quantize_rtn("w", &wave(n, k), [n, k], scheme, dtype, None).unwrap();
        let back = read(&*reader(&config_for(scheme)), &Memory::of("m", &tensor), [n, k]).unwrap();
        prop_assert_eq!(back, tensor);
    }
}

#[test]
fn padding_bits_and_i32_shapes_are_accepted() {
    let tensor = quantized([3, 9], "w3a16-channel-asym");
    let mut source = Memory::of("m", &tensor);
    for name in ["m.weight_packed", "m.weight_zero_point"] {
        // Padding bits are ignored.
        *source.0.get_mut(name).unwrap().1.last_mut().unwrap() |= 0xf8;
    }
    source.put("m.weight_shape", Dtype::I32, &[2], vec![3, 0, 0, 0, 9, 0, 0, 0]);
    assert_eq!(read(&*reader(&config_for(tensor.scheme)), &source, [3, 9]).unwrap(), tensor);
}

#[test]
fn large_weights_are_read_in_parts() {
    let shape = [4200, 2048];
    let mut tensor = quantized([42, 2048], "w8a16");
    tensor = QuantizedTensor {
        shape,
        codes: tensor.codes.repeat(100),
        scales: tensor.scales.repeat(100),
        ..tensor
    };
    tensor.codes[READ_BYTES - 1] ^= 1;
    assert!(tensor.codes.len() > READ_BYTES);
    let back = read(&*reader(&config_for(tensor.scheme)), &Memory::of("m", &tensor), shape).unwrap();
    assert!(back == tensor);
}

#[test]
fn names_before_expressions_before_the_class() {
    let weights = |bits: u8| json!({"num_bits": bits, "strategy": "channel"});
    let config = json!({
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "class": {"targets": ["Linear"], "weights": weights(2)},
            "expressions": {"targets": ["re:.*experts", "re:model\\.layers\\.[01]\\."], "weights": weights(3)},
            "names": {"targets": ["model.layers.1.mlp.up_proj"], "weights": weights(4)},
            "later": {"targets": ["model.layers.1.mlp.up_proj", "re:.*up_proj$", "Linear"], "weights": weights(8)},
        },
        "ignore": ["lm_head", "re:.*router$", "re:layers\\."],
    });
    let reader = reader(&config);
    let bits = |module| reader.scheme(module).map(|s| s.bits());
    assert_eq!(bits("model.layers.1.mlp.up_proj"), Some(4));
    assert_eq!(bits("model.layers.0.mlp.up_proj"), Some(3), "the first expression that matches");
    assert_eq!(bits("model.layers.9.experts.1.down"), Some(3));
    assert_eq!(bits("model.layers.9.mlp.up_proj"), Some(8));
    assert_eq!(bits("model.layers.9.mlp.down_proj"), Some(2));
    assert_eq!(bits("a.model.layers.0.x"), Some(2), "expressions are anchored at the start");
    assert_eq!(bits("lm_head"), None);
    assert_eq!(bits("lm_head.more"), Some(2));
    assert_eq!(bits("model.layers.1.mlp.router"), None);
    assert_eq!(bits("model.layers.1.mlp.router2"), Some(3));
    assert_eq!(bits("layers.3"), None);
}

#[test]
fn everything_may_be_ignored() {
    let mut config = config_for(LinearScheme::default());
    config["ignore"] = json!(["Linear"]);
    assert_eq!(reader(&config).scheme("m"), None);
}

#[test]
fn what_we_write_gives_each_module_its_scheme() {
    let scheme = |s: &str| s.parse::<LinearScheme>().unwrap();
    let quantized =
        vec![("a.0", scheme("w4a16")), ("a.1", scheme("w8a16-channel-asym")), ("a.2", scheme("w4a16"))];
    let schemes =
        ModuleSchemes { quantized: quantized.clone(), float: vec!["lm_head", "gate"], ..Default::default() };
    let reader = reader(&CompressedTensors.quantization_config(&schemes));
    for (module, scheme) in quantized {
        assert_eq!(reader.scheme(module), Some(scheme));
    }
    assert_eq!((reader.scheme("lm_head"), reader.scheme("gate")), (None, None));
}

#[test]
fn configurations_of_others_are_accepted() {
    // As llm-compressor writes it.
    let config = json!({
        "config_groups": {"group_0": {
            "format": "pack-quantized",
            "input_activations": null,
            "output_activations": null,
            "targets": ["Linear"],
            "weights": {
                "actorder": "static", "block_structure": null, "dynamic": false, "group_size": 128,
                "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "scale_dtype": null,
                "strategy": "group", "symmetric": false, "type": "int", "zp_dtype": "torch.int8",
            },
        }},
        "format": "pack-quantized",
        "global_compression_ratio": null,
        "ignore": ["lm_head"],
        "kv_cache_scheme": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {"config_groups": {}},
        "version": "0.17.0",
    });
    assert_eq!(reader(&config).scheme("m"), Some("w4a16-asym".parse().unwrap()));
    let mut dense = config;
    dense["sparsity_config"] = json!({"format": "dense"});
    dense["transform_config"] = json!({});
    dense["config_groups"]["group_0"]["weights"] = json!({"num_bits": 8, "group_size": -1});
    assert_eq!(reader(&dense).scheme("m"), Some("w8a16-channel".parse().unwrap()));
}

#[test]
fn other_methods_are_left_to_others() {
    for config in [json!({"quant_method": "awq"}), json!({}), json!(null), json!([1])] {
        assert!(CompressedTensors.reader(&config).unwrap().is_none());
        assert!(crate::format::reader(&config).is_err());
    }
}

#[test]
fn what_is_not_understood_is_refused_by_its_path() {
    let weights = "/config_groups/group_0/weights/";
    let group = "/config_groups/group_0/";
    let cases = [
        ("/format", json!("marlin-24"), "format` is \"marlin-24\""),
        ("/format", json!(null), "format` is missing"),
        ("/quantization_status", json!("frozen"), "quantization_status` is \"frozen\""),
        ("/quantization_status", json!(null), "quantization_status` is missing"),
        ("/kv_cache_scheme", json!({"num_bits": 8}), "kv_cache_scheme.type` is missing"),
        ("/sparsity_config", json!({"format": "sparse-24"}), "sparsity_config.format` is"),
        ("/sparsity_config", json!(7), "sparsity_config` must be an object"),
        ("/transform_config", json!({"config_groups": {"R1": {}}}), "transform_config` is not supported"),
        ("/config_groups", json!(null), "config_groups` must be an object"),
        ("/config_groups", json!([]), "config_groups` must be an object"),
        ("/config_groups/group_0", json!("W4A16"), "config_groups.group_0` must be an object"),
        ("/ignore", json!("lm_head"), "ignore` must be an array"),
        ("/ignore", json!(["a", 7]), "ignore[1]` is not a string"),
        ("/ignore", json!(["re:(?=a)"]), "ignore[0]` is not a supported regular expression"),
        ("targets", json!(null), "group_0.targets` must be an array"),
        ("targets", json!([null]), "group_0.targets[0]` is not a string"),
        (
            "targets",
            json!(["Linear", "re:a)|(b"]),
            "group_0.targets[1]` is not a supported regular \
            expression",
        ),
        ("targets", json!(["re:(a{999}){999}"]), "group_0.targets[0]` is not a supported regular expression"),
        ("targets", json!(vec!["re:a"; 300]), "group_0.targets[256]` exceeds the limit of 256"),
        ("input_activations", json!(8), "group_0.input_activations` must be an object"),
        ("input_activations", json!({"num_bits": 8}), "input_activations.strategy` must be token"),
        (
            "input_activations",
            json!({"num_bits": 4, "strategy": "token"}),
            "input_activations.num_bits` must be 8",
        ),
        (
            "input_activations",
            json!({"num_bits": 8, "type": "float"}),
            "input_activations.strategy` and the keys next to it",
        ),
        (
            "input_activations",
            json!({"num_bits": 8, "strategy": "token", "dynamic": true, "symmetric": false}),
            "input_activations.strategy` must be token",
        ),
        (
            "input_activations",
            json!({"num_bits": 8, "strategy": "tensor", "dynamic": false}),
            "group_0.input_activations` are static",
        ),
        (
            "input_activations",
            json!({"num_bits": 8, "strategy": "token", "dynamic": true, "group_size": 128}),
            "input_activations.group_size` is not supported and must be absent",
        ),
        (
            "format",
            json!("int-quantized"),
            "group_0.format` is int-quantized, which supports symmetric 8-bit weights only",
        ),
        ("output_activations", json!({"num_bits": 8}), "group_0.output_activations` is not supported"),
        ("format", json!("float-quantized"), "group_0.format` is"),
        ("novelty", json!(1), "group_0.novelty` is an unknown key"),
        ("weights", json!(null), "group_0.weights` must be an object"),
        ("weights/num_bits", json!(16), "weights.num_bits` must be an integer from 2 to 8"),
        ("weights/num_bits", json!("4"), "weights.num_bits` must be an integer"),
        ("weights/num_bits", json!(null), "weights.num_bits` must be an integer"),
        ("weights/type", json!("float"), "FP4 weights require groups"),
        ("weights/type", json!("uint"), "weights.type` must be int or float"),
        ("weights/symmetric", json!(1), "weights.symmetric` must be true or false"),
        ("weights/dynamic", json!(true), "weights.dynamic` is true"),
        ("weights/dynamic", json!("local"), "weights.dynamic` must be true or false"),
        ("weights/actorder", json!("best"), "weights.actorder` must be"),
        ("weights/actorder", json!(3), "weights.actorder` must be"),
        ("weights/block_structure", json!([128, 128]), "weights.block_structure` is not supported"),
        ("weights/strategy", json!("tensor"), "weights.strategy` is tensor"),
        ("weights/strategy", json!(["group"]), "weights.strategy` is not a string"),
        ("weights/strategy", json!("channel"), "weights.group_size` must be absent"),
        ("weights/group_size", json!(0), "weights.group_size` must be positive"),
        ("weights/group_size", json!(-1), "weights.group_size` must be positive"),
        ("weights/group_size", json!(null), "weights.group_size` must be positive"),
        ("weights/group_size", json!(1.5), "weights.group_size` is not an integer"),
        ("weights/novelty", json!(null), "weights.novelty` is an unknown key"),
    ];
    assert!(weights.starts_with(group));
    for (key, value, expected) in cases {
        let mut config = config_for(LinearScheme::default());
        let pointer = if key.starts_with('/') { key.to_owned() } else { format!("{group}{key}") };
        let (parent, last) = pointer.rsplit_once('/').unwrap();
        config.pointer_mut(parent).unwrap()[last] = value.clone();
        let reason = CompressedTensors.reader(&config).map(|_| ()).unwrap_err();
        assert!(reason.starts_with("`quantization_config."), "{reason}");
        assert!(reason.contains(expected), "{pointer} = {value}: {reason}");
    }
    let mut config = config_for("w3a16".parse().unwrap());
    for (version, accepted) in
        [("0.17.1", false), ("0.9", false), ("0.18.0", true), ("1.0", true), ("dev", true)]
    {
        config["version"] = json!(version);
        assert_eq!(CompressedTensors.reader(&config).is_ok(), accepted, "{version}");
    }
}

#[test]
fn linears_with_activations_of_8_bits_come_back() {
    for scheme in [
        "w8a8",
        "w8a8-static",
        "w8a8-static-asym",
        "w8a8-g8",
        "w8a8-channel-asym",
        "w4a8-g8-asym",
        "w3a8-channel",
    ] {
        let mut tensor = quantized([5, 16], scheme);
        if tensor.scheme.has_static_activations() {
            let zero = if scheme.ends_with("asym") { -7 } else { 0 };
            tensor.input = Some(quant_kernels_cpu::StaticScale { scale: 0.37, zero });
        }
        let back = read(&*reader(&config_for(tensor.scheme)), &Memory::of("m", &tensor), [5, 16]).unwrap();
        assert!(back == tensor, "{scheme}");
    }
}

#[test]
fn static_scales_of_others_are_read_and_bad_ones_refused() {
    let mut tensor = quantized([4, 16], "w8a8-static-asym");
    tensor.input = Some(quant_kernels_cpu::StaticScale { scale: 0.5, zero: 3 });
    let config = config_for(tensor.scheme);
    let with = |dtype: Dtype, scale: f32| {
        let mut source = Memory::of("m", &tensor);
        let info = TensorInfo { dtype, shape: vec![1] };
        source.0.insert("m.input_scale".into(), (info, dtype.narrow(&[scale])));
        read(&*reader(&config), &source, [4, 16])
    };
    assert!(with(Dtype::Bf16, 0.5).unwrap() == tensor);
    for bad in [0.0, -1.0, 1e-40] {
        let message = with(Dtype::F32, bad).unwrap_err().to_string();
        assert!(
            message.contains("m.input_scale")
                && message.contains("an input scale and its reciprocal must be"),
            "{message}"
        );
    }
    assert!(with(Dtype::F32, f32::NAN).is_err());
    // Zero points of symmetric bytes must be 0.
    let symmetric = quantized([4, 16], "w8a8");
    for (zero, accepted) in [(0, true), (1, false)] {
        let mut source = Memory::of("m", &symmetric);
        let info = TensorInfo { dtype: Dtype::I8, shape: vec![4, 1] };
        source.0.insert("m.weight_zero_point".into(), (info, vec![zero; 4]));
        assert_eq!(read(&*reader(&config_for(symmetric.scheme)), &source, [4, 16]).is_ok(), accepted);
    }
}

fn read_changed(scheme: &str, change: impl Fn(&mut Memory)) -> Result<QuantizedTensor> {
    let tensor = quantized([4, 16], scheme);
    let mut source = Memory::of("m", &tensor);
    change(&mut source);
    read(&*reader(&config_for(tensor.scheme)), &source, [4, 16])
}

#[test]
fn tensors_are_checked() {
    let scheme = "w4a16-g8-asym";
    assert!(read_changed(scheme, |_| {}).is_ok());
    for part in ["packed", "scale", "zero_point", "shape"] {
        let name = format!("m.weight_{part}");
        let error = read_changed(scheme, |s| drop(s.0.remove(&name))).unwrap_err();
        assert!(matches!(&error, Error::MissingTensor { tensor, .. } if *tensor == name), "{error}");
        let error = read_changed(scheme, |s| s.0.get_mut(&name).unwrap().0.dtype = Dtype::U8).unwrap_err();
        assert!(matches!(&error, Error::TensorDtype { tensor, .. } if *tensor == name), "{error}");
        let error = read_changed(scheme, |s| s.0.get_mut(&name).unwrap().0.shape[0] += 1).unwrap_err();
        assert!(matches!(&error, Error::TensorShape { tensor, .. } if *tensor == name), "{error}");
        let error = read_changed(scheme, |s| s.0.get_mut(&name).unwrap().0.shape.push(1)).unwrap_err();
        assert!(matches!(&error, Error::TensorShape { tensor, .. } if *tensor == name), "{error}");
    }
}

#[test]
fn another_logical_shape_is_refused() {
    // 15 and 16 columns take the same number of words; only `weight_shape` distinguishes them.
    for (n, k) in [(4i64, 15i64), (5, 16), (-4, 16), (i64::MAX, 16)] {
        let error = read_changed("w4a16-channel", |s| {
            let bytes = [n, k].iter().flat_map(|d| d.to_le_bytes()).collect();
            s.put("m.weight_shape", Dtype::I64, &[2], bytes);
        })
        .unwrap_err();
        assert!(
            error.to_string().contains(&format!("is [{n}, {k}], but config.json implies [4, 16]")),
            "{error}"
        );
    }
}

#[test]
fn scales_must_be_finite() {
    for (half, index) in [(0x7c00u16, 0), (0xfe00, 3)] {
        let error = read_changed("w4a16-g8", |s| {
            let scale = s.0.get_mut("m.weight_scale").unwrap();
            scale.1[index * 2..index * 2 + 2].copy_from_slice(&half.to_le_bytes());
        })
        .unwrap_err();
        match error {
            Error::NonFinite { tensor, count: 1, first_index, .. } => {
                assert_eq!((tensor.as_str(), first_index as usize), ("m.weight_scale", index));
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn tensors_without_a_place_are_refused() {
    let zeros = read_changed("w4a16-g8", |s| s.put("m.weight_zero_point", Dtype::I32, &[1, 2], vec![0; 8]));
    assert!(zeros.unwrap_err().to_string().contains("weight_zero_point"));
    let order = read_changed("w4a16-g8", |s| s.put("m.weight_g_idx", Dtype::I32, &[16], vec![0; 64]));
    assert!(order.unwrap_err().to_string().contains("weight_g_idx"));
}

#[test]
fn shapes_that_the_scheme_cannot_have() {
    let tensor = quantized([4, 16], "w4a16-g8");
    let source = Memory::of("m", &tensor);
    let reader = reader(&config_for(tensor.scheme));
    for shape in [[4, 12], [usize::MAX, 8], [4, 0]] {
        let error = read(&*reader, &source, shape).unwrap_err();
        let refused = matches!(error, Error::UnsupportedQuantization { .. } | Error::TensorShape { .. });
        assert!(refused, "{error:?}");
    }
    let mut config = config_for(tensor.scheme);
    config["ignore"] = json!(["m"]);
    let float = CompressedTensors.reader(&config).unwrap().unwrap();
    assert_eq!(float.scheme("m"), None);
}

#[test]
fn floating_point_weights_come_back() {
    for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32] {
        let scheme: LinearScheme = "wf8a16-channel".parse().unwrap();
        let tensor = quantize_rtn("w", &wave(5, 48), [5, 48], scheme, dtype, None).unwrap();
        let mut source = Memory::of("m", &tensor);
        assert_eq!(source.0["m.weight"].0, TensorInfo { dtype: Dtype::F8E4M3, shape: vec![5, 48] });
        let back = read(&*reader(&config_for(scheme)), &source, [5, 48]).unwrap();
        assert_eq!(back, tensor);
        assert_eq!(back.dequantize().unwrap(), tensor.dequantize().unwrap());
        // A code that is NaN.
        source.0.get_mut("m.weight").unwrap().1[7] = 0xff;
        let error = read(&*reader(&config_for(scheme)), &source, [5, 48]).unwrap_err();
        assert!(matches!(error, Error::NonFinite { count: 1, first_index: 7, .. }), "{error}");
    }
}

#[test]
fn floating_point_weights_that_cannot_be_read() {
    for (key, value, expected) in [
        ("weights/num_bits", json!(4), "FP4 weights require groups"),
        ("weights/num_bits", json!(6), "weights.num_bits` must be 8 or 4"),
        (
            "weights/type",
            json!("int"),
            "group_0.format` is float-quantized, which does not support int weights (w8a16-channel-sym)",
        ),
        ("weights/symmetric", json!(false), "weights.symmetric` must be true"),
        ("weights/strategy", json!("block"), "weights.block_structure` must be [128, 128]"),
        (
            "format",
            json!("pack-quantized"),
            "group_0.format` is pack-quantized, which does not support float weights",
        ),
        (
            "format",
            json!("mxfp8-quantized"),
            "group_0.format` is mxfp8-quantized, which does not support float weights",
        ),
        (
            "input_activations",
            json!({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": true}),
            "floating-point weights cannot be combined with int8 activations",
        ),
    ] {
        let mut config = config_for("wf8a16-channel".parse().unwrap());
        let pointer = format!("/config_groups/group_0/{key}");
        let (parent, last) = pointer.rsplit_once('/').unwrap();
        config.pointer_mut(parent).unwrap()[last] = value.clone();
        let reason = CompressedTensors.reader(&config).map(|_| ()).unwrap_err();
        assert!(reason.contains(expected), "{key} = {value}: {reason}");
    }
    let mut config = config_for("wf8a16-channel".parse().unwrap());
    let weights = config.pointer_mut("/config_groups/group_0/weights").unwrap();
    (weights["strategy"], weights["group_size"]) = (json!("group"), json!(128));
    let reason = CompressedTensors.reader(&config).map(|_| ()).unwrap_err();
    assert!(reason.contains("FP8 weights need one scale per row, tensor or block"), "{reason}");
}

#[path = "reader_float_tests.rs"]
mod floats;
