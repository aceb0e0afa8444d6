//! Reading floating-point schemes, configurations of other tools, and rejected ones.

use super::*;

#[test]
fn every_floating_point_scheme_comes_back() {
    for name in FLOAT_SCHEMES {
        let scheme: LinearScheme = name.parse().unwrap();
        for (n, k) in [(5_usize, 64_usize), (130, 384), (257, 128), (1, 256)] {
            if !k.is_multiple_of(scheme.needed_divisor(k)) {
                continue;
            }
            let dtype = scheme.scale_dtype(Dtype::Bf16);
            let mut tensor = quantize_rtn("w", &wave(n, k), [n, k], scheme, dtype, None).unwrap();
            tensor.input = scheme.has_static_activations().then_some(StaticScale { scale: 0.0625, zero: 0 });
            let source = Memory::of("m", &tensor);
            let back = read(&*reader(&config_for(scheme)), &source, [n, k]).unwrap();
            assert_eq!(back, tensor, "{name} {n} {k}");
            assert_eq!(back.input_grid().unwrap(), tensor.input_grid().unwrap());
        }
    }
    for name in ["wf8a16-b128", "wf8a16-tensor"] {
        // Weight-only schemes allow partial blocks on both sides.
        let scheme: LinearScheme = name.parse().unwrap();
        for (n, k) in [(192, 320), (3, 100), (576, 7), (129, 129)] {
            let tensor = quantize_rtn("w", &wave(n, k), [n, k], scheme, Dtype::Bf16, None).unwrap();
            let source = Memory::of("m", &tensor);
            let expected =
                if name.ends_with("b128") { vec![n.div_ceil(128), k.div_ceil(128)] } else { vec![1] };
            assert_eq!(source.0["m.weight_scale"].0.shape, expected);
            assert_eq!(read(&*reader(&config_for(scheme)), &source, [n, k]).unwrap(), tensor);
            if name.ends_with("b128") {
                // The last group of activations may be smaller, too, in files of others.
                let rounded: LinearScheme = "wf8af8-b128".parse().unwrap();
                let back = read(&*reader(&config_for(rounded)), &source, [n, k]).unwrap();
                assert_eq!((back.scheme, back.input_grid().unwrap()), (rounded, Some(InputGrid::Fp8Group)));
                assert_eq!(back.dequantize().unwrap(), tensor.dequantize().unwrap());
            }
        }
    }
}

#[test]
fn floating_point_configurations_of_others_are_accepted() {
    let of = |group: Value, format: &str| {
        let mut group = group;
        group["targets"] = json!(["Linear"]);
        group["format"] = json!(format);
        let config = json!({
            "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "config_groups": { "group_0": group },
        });
        reader(&config).scheme("m").map(|scheme| scheme.to_string()).unwrap()
    };
    let fp8 =
        |strategy: &str| json!({"num_bits": 8, "type": "float", "strategy": strategy, "zp_dtype": null});
    assert_eq!(of(json!({"weights": fp8("channel")}), "naive-quantized"), "wf8a16-channel");
    assert_eq!(of(json!({"weights": fp8("tensor")}), "float-quantized"), "wf8a16-tensor");
    assert_eq!(of(json!({"weights": {"num_bits": 8, "type": "float"}}), "float-quantized"), "wf8a16-tensor");
    for structure in [json!([128, 128]), json!("128x128")] {
        let mut weights = fp8("block");
        weights["block_structure"] = structure;
        let mut inputs = fp8("group");
        (inputs["group_size"], inputs["dynamic"]) = (json!(128), json!(true));
        let group = json!({"weights": weights, "input_activations": inputs});
        assert_eq!(of(group, "float-quantized"), "wf8af8-b128");
    }
    let nv = |dynamic: Value| {
        json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": dynamic,
               "symmetric": true, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": null,
               "observer": "static_minmax", "observer_kwargs": {}})
    };
    let group = json!({"weights": nv(json!(false)), "input_activations": nv(json!("local"))});
    assert_eq!(of(group, "nvfp4-pack-quantized"), "wf4af4-g16-nv");
    let mx = json!({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32});
    assert_eq!(of(json!({ "weights": mx }), "mxfp4-pack-quantized"), "wf4a16-g32-mx");
}

#[test]
fn quantized_activations_next_to_mxfp4_stay_float() {
    let open = |weights: &Value, inputs: &Value, format: &str| {
        let group = json!({
            "targets": ["Linear"], "format": format, "weights": weights, "input_activations": inputs,
        });
        CompressedTensors.reader(&json!({
            "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "config_groups": { "group_0": group },
        }))
    };
    let mxfp4 = |dynamic: bool| {
        json!({ "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "dynamic": dynamic,
                "symmetric": true, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8" })
    };
    let fp8 = |strategy: &str, group_size: Value| json!({ "num_bits": 8, "type": "float", "strategy": strategy, "group_size": group_size, "dynamic": true });
    let mut mxfp8 = fp8("group", json!(32));
    mxfp8["scale_dtype"] = json!("torch.uint8");
    for (inputs, expected) in [
        (mxfp4(true), "activations in MXFP4"),
        (fp8("group", json!(128)), "activations in FP8 (one scale per token and 128 inputs)"),
        (fp8("token", Value::Null), "activations in FP8 (one scale per token)"),
        (mxfp8, "activations in MXFP8"),
    ] {
        let reader = open(&mxfp4(false), &inputs, "mxfp4-pack-quantized").unwrap().unwrap();
        assert_eq!(reader.scheme("m").unwrap().to_string(), "wf4a16-g32-mx");
        let notes = reader.notes();
        assert_eq!(notes.len(), 1, "{notes:?}");
        for part in ["`config_groups.group_0`", expected, "stay float", "wf4a16-g32-mx"] {
            assert!(notes[0].contains(part), "{notes:?}");
        }
    }
    // Everything else is followed, or refused.
    let float = open(&mxfp4(false), &Value::Null, "mxfp4-pack-quantized").unwrap().unwrap();
    assert!(float.notes().is_empty());
    let refused = |weights: &Value, inputs: Value, format: &str, part: &str| {
        let Err(reason) = open(weights, &inputs, format) else { panic!("{inputs} is accepted") };
        assert!(reason.contains(part), "{reason}");
    };
    let weights = mxfp4(false);
    let packed = "mxfp4-pack-quantized";
    refused(&fp8_weights(), mxfp4(true), "float-quantized", "`quantization_config.config_groups.group_0");
    refused(&weights, mxfp4(false), packed, "input_activations.strategy` and the keys next to it");
    for (key, value) in [
        ("group_size", json!(16)),
        ("scale_dtype", json!("torch.float8_e4m3fn")),
        ("scale_dtype", Value::Null),
        ("strategy", json!("token")),
    ] {
        let mut inputs = mxfp4(true);
        inputs[key] = value;
        refused(&weights, inputs, packed, "input_activations.strategy` and the keys next to it");
    }
    let mut asymmetric = mxfp4(true);
    asymmetric["symmetric"] = json!(false);
    refused(&weights, asymmetric, packed, "symmetric` must be true");
    refused(
        &weights,
        json!({ "num_bits": 8, "strategy": "token", "dynamic": true }),
        packed,
        "int8 activations",
    );
    let mut stored = fp8("tensor", Value::Null);
    stored["dynamic"] = json!(false);
    refused(&weights, stored, packed, "MXFP4 weights need float activations");
}

fn fp8_weights() -> Value {
    json!({ "num_bits": 8, "type": "float", "strategy": "channel" })
}

#[test]
fn floating_point_tensors_are_checked() {
    type Damage = fn(&mut Memory);
    let cases: [(&str, Damage, &str); 9] = [
        (
            "wf4a16-g16-nv",
            |m| m.put("m.weight_global_scale", Dtype::F32, &[1], vec![0; 4]),
            "is 0; a scale and its reciprocal must be",
        ),
        (
            "wf4a16-g16-nv",
            |m| m.put("m.weight_global_scale", Dtype::F32, &[1], f32::NAN.to_le_bytes().into()),
            "non-finite",
        ),
        (
            "wf4a16-g16-nv",
            |m| m.put("m.weight_global_scale", Dtype::F32, &[1], (-1.0_f32).to_le_bytes().into()),
            "is -1",
        ),
        ("wf4a16-g16-nv", |m| drop(m.0.remove("m.weight_global_scale")), "m.weight_global_scale"),
        ("wf4a16-g16-nv", |m| m.0.get_mut("m.weight_scale").unwrap().1[3] = 0x7f, "non-finite"),
        ("wf4a16-g16-nv", |m| m.0.get_mut("m.weight_scale").unwrap().1[3] = 0xb8, "negative scale"),
        ("wf4a16-g32-mx", |m| m.0.get_mut("m.weight_scale").unwrap().1[3] = 255, "non-finite"),
        ("wf8a16-g32-mx", |m| m.0.get_mut("m.weight").unwrap().1[3] = 0x7f, "non-finite"),
        ("wf8a16-b128", |m| m.put("m.weight_scale", Dtype::Bf16, &[3, 1], vec![0; 6]), "m.weight_scale"),
    ];
    for (name, change, expected) in cases {
        let scheme: LinearScheme = name.parse().unwrap();
        let dtype = scheme.scale_dtype(Dtype::Bf16);
        let tensor = quantize_rtn("w", &wave(3, 64), [3, 64], scheme, dtype, None).unwrap();
        let mut source = Memory::of("m", &tensor);
        change(&mut source);
        let error = read(&*reader(&config_for(scheme)), &source, [3, 64]).unwrap_err();
        assert!(error.to_string().contains(expected), "{name}: {error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn hostile_files_are_errors(
        scheme in 0..FLOAT_SCHEMES.len(), key in 0_usize..12, value in 0_usize..14,
        name in 0_usize..8, dtype in 0..Dtype::ALL.len(), shape in prop::collection::vec(0_usize..70, 0..3),
        fill: u8, n in 0_usize..5, k in 0_usize..140,
    ) {
        let scheme: LinearScheme = FLOAT_SCHEMES[scheme].parse().unwrap();
        let mut config = config_for(scheme);
        let keys = ["num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder",
                    "scale_dtype", "zp_dtype", "format", "nothing"];
        let values = [json!(null), json!(0), json!(-1), json!(4), json!(8), json!(16), json!(1e300), json!("group"),
                      json!("tensor"), json!("block"), json!([128, 128]), json!("local"), json!(true), json!({})];
        let group = config.pointer_mut("/config_groups/group_0").unwrap();
        let object = if fill % 2 == 0 { "weights" } else { "input_activations" };
        if keys[key] != "nothing" && group[object].is_object() {
            group[object][keys[key]] = values[value].clone();
        }
        let Ok(Some(reader)) = CompressedTensors.reader(&config) else { return Ok(()) };
        let Some(scheme) = reader.scheme("m") else { return Ok(()) };
        let [n, k] = [n, k / scheme.needed_divisor(k.max(1)) * scheme.needed_divisor(k.max(1))];
        let Ok(mut tensor) = quantize_rtn("w", &wave(n, k), [n, k], scheme, scheme.scale_dtype(Dtype::Bf16), None) else {
            return Ok(());
        };
        tensor.input = scheme.has_static_activations().then_some(StaticScale { scale: 0.5, zero: 0 });
        let mut source = Memory::of("m", &tensor);
        let names = ["weight", "weight_packed", "weight_scale", "weight_global_scale", "input_scale",
                     "input_global_scale", "weight_zero_point", "weight_g_idx"];
        let elements = shape.iter().product::<usize>() as u64;
        if let Some(len) = Dtype::ALL[dtype].byte_len(elements) {
            source.put(&format!("m.{}", names[name]), Dtype::ALL[dtype], &shape, vec![fill; len as usize]);
        }
        if let Ok(tensor) = reader.read(&source, PackedWeight { module: "m", shape: [n, k], scheme }) {
            prop_assert!(tensor.dequantize().is_ok());
            prop_assert!(tensor.input_grid().is_ok());
        }
    }
}
