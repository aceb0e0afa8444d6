//! Round trips, checkpoints of other tools, and errors for invalid ones.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::checkpoint::MemorySource;
use crate::format::qserve::QServe;
use crate::format::{Container, ModuleSchemes};
use crate::quantize::quantize_rtn;

const GROUPS: &str = "w4a8-g128-asym-progressive";
const ALL: [&str; 3] = [GROUPS, "w4a8-channel-asym", "w8a8-channel-sym"];

#[derive(Clone)]
struct File(Vec<(TensorSpec, Vec<u8>)>);

impl File {
    fn of(tensor: &QuantizedTensor) -> Self {
        Self(QServe.pack("m", tensor).unwrap())
    }

    fn tensor(&mut self, name: &str) -> &mut (TensorSpec, Vec<u8>) {
        self.0.iter_mut().find(|(spec, _)| spec.name == name).unwrap()
    }

    fn source(&self) -> MemorySource {
        let mut source = MemorySource::new();
        for (spec, bytes) in &self.0 {
            source.insert(&spec.name, spec.info.dtype, spec.info.shape.clone(), bytes.clone()).unwrap();
        }
        source
    }
}

fn quantized(shape: [usize; 2], scheme: &str, seed: u64) -> QuantizedTensor {
    let noise = |i: usize| (seed.wrapping_add(1).wrapping_mul(2 * i as u64 + 1) >> 40) as f32 / 16_777_216.0;
    // Adjacent groups differ in range and in their zero point.
    let group = |i: usize| ((1 + i / 128 % 5) as f32 * 0.01, (i / 128 % 3) as f32 * 0.3);
    let weights: Vec<f32> =
        (0..shape[0] * shape[1]).map(|i| (noise(i) - group(i).1 - 0.1) * group(i).0).collect();
    quantize_rtn("m", &weights, shape, scheme.parse().unwrap(), Dtype::F16, None).unwrap()
}

fn config(scheme: &str) -> Value {
    let schemes = ModuleSchemes {
        quantized: vec![("m", scheme.parse().unwrap())],
        float: vec!["lm_head", "model.layers.3.mlp.up_proj"],
        ..Default::default()
    };
    QServe.quantization_config(&schemes)
}

fn read_with(config: &Value, file: &File, shape: [usize; 2]) -> Result<QuantizedTensor> {
    let reader = Reader::new(config).unwrap().unwrap();
    let weight = PackedWeight { module: "m", shape, scheme: reader.scheme("m").unwrap() };
    reader.read(&file.source(), weight)
}

fn read(scheme: &str, file: &File) -> Result<QuantizedTensor> {
    read_with(&config(scheme), file, [64, 256])
}

#[test]
fn what_is_written_reads_back() {
    for scheme in ALL {
        let tensor = quantized([64, 256], scheme, 3);
        let file = File::of(&tensor);
        let back = read(scheme, &file).unwrap();
        assert!(back == tensor, "{scheme}");
        assert_eq!(back.dequantize().unwrap(), tensor.dequantize().unwrap());
        assert_eq!(back.scheme.to_string(), scheme);
        let reader = Reader::new(&config(scheme)).unwrap().unwrap();
        for float in ["lm_head", "model.layers.3.mlp.up_proj"] {
            assert_eq!(reader.scheme(float), None);
        }
        assert!(reader.scheme("model.layers.3.mlp.up_proj2").is_some());
        assert_eq!(reader.scale_dtype(&file.source(), "m").unwrap(), Dtype::F16);
        let weight = PackedWeight { module: "m", shape: [64, 256], scheme: tensor.scheme };
        assert_eq!(reader.zeros(&file.source(), weight).unwrap(), tensor.zeros);
    }
}

/// `config.json` has only the keys that users of SGLang added by hand.
#[test]
fn checkpoints_of_other_programs_need_no_keys_of_quant() {
    let tensor = quantized([64, 256], GROUPS, 5);
    let file = File::of(&tensor);
    let theirs = json!({ "quant_method": "qoq", "wbits": 4, "group_size": 128 });
    assert!(read_with(&theirs, &file, [64, 256]).unwrap() == tensor);
    let channel = quantized([64, 256], "w4a8-channel-asym", 5);
    let theirs = json!({ "quant_method": "qoq", "wbits": 4, "group_size": -1 });
    assert!(read_with(&theirs, &File::of(&channel), [64, 256]).unwrap() == channel);
}

#[test]
fn the_order_of_the_other_converter_is_read_by_its_name() {
    let tensor = quantized([64, 256], GROUPS, 7);
    let mut file = File::of(&tensor);
    let levels = tensor.levels.as_ref().unwrap();
    let zeros = tensor.zeros.as_ref().unwrap();
    let scaled: Vec<u8> = zeros.iter().zip(&levels.groups).map(|(z, s)| (z * s).wrapping_neg()).collect();
    file.tensor("m.s2_scales").1 = S2Order::Deepcompressor.store(&levels.groups, 64, 2);
    file.tensor("m.s2_zeros").1 = S2Order::Deepcompressor.store(&scaled, 64, 2);
    let mut theirs = json!({ "quant_method": "qoq", "wbits": 4, "group_size": 128 });
    // Nothing in the file reveals the order unless an integer overflows.
    match read_with(&theirs, &file, [64, 256]) {
        Ok(wrong) => assert!(wrong != tensor),
        Err(error) => {
            assert!(error.remedy().marked().contains("\"s2_order\": \"deepcompressor\""), "{error}")
        }
    }
    theirs["s2_order"] = json!("deepcompressor");
    assert!(read_with(&theirs, &file, [64, 256]).unwrap() == tensor);
    theirs["s2_order"] = json!("kernel");
    assert!(!matches!(read_with(&theirs, &file, [64, 256]), Ok(same) if same == tensor));
}

#[test]
fn configurations() {
    for other in [json!({ "quant_method": "awq" }), json!(null), json!([1])] {
        assert!(Reader::new(&other).unwrap().is_none());
    }
    for (key, value) in [
        ("wbits", json!(3)),
        ("wbits", json!("4")),
        ("wbits", json!(null)),
        ("wbits", json!(8)),
        ("group_size", json!(64)),
        ("group_size", json!("128")),
        ("group_size", json!(null)),
        ("layout_version", json!(2)),
        ("layout_version", json!("1")),
        ("s2_order", json!("Kernel")),
        ("s2_order", json!(1)),
        ("modules_to_not_convert", json!("lm_head")),
        ("modules_to_not_convert", json!([1])),
        ("novelty", json!(true)),
    ] {
        let mut config = config(GROUPS);
        config[key] = value;
        let reason = Reader::new(&config).unwrap_err();
        let expected = if key == "wbits" && config["wbits"] == 8 { "group_size" } else { key };
        assert!(reason.contains(&format!("`quantization_config.{expected}`")), "{reason}");
    }
    let mut channel = config("w4a8-channel-asym");
    channel["s2_order"] = json!("kernel");
    assert!(Reader::new(&channel).unwrap_err().contains("have no groups"));
}

#[test]
fn tensors_are_checked() {
    for scheme in ALL {
        let file = File::of(&quantized([64, 256], scheme, 9));
        for at in 0..file.0.len() {
            let name = file.0[at].0.name.clone();
            let changed = |change: &dyn Fn(&mut TensorSpec, &mut Vec<u8>)| {
                let mut file = file.clone();
                let (spec, bytes) = file.tensor(&name);
                change(spec, bytes);
                read(scheme, &file).unwrap_err()
            };
            let mut without = file.clone();
            without.0.remove(at);
            let error = read(scheme, &without).unwrap_err();
            assert!(matches!(&error, Error::MissingTensor { tensor, .. } if *tensor == name), "{error}");
            let error = changed(&|spec, bytes| {
                (spec.info.dtype, spec.info.shape) = (Dtype::U8, vec![bytes.len()]);
            });
            assert!(matches!(&error, Error::TensorDtype { tensor, .. } if *tensor == name), "{error}");
            let error = changed(&|spec, _| spec.info.shape.push(1));
            assert!(matches!(&error, Error::TensorShape { tensor, .. } if *tensor == name), "{error}");
            let error = changed(&|spec, bytes| {
                let rows = spec.info.shape[0];
                bytes.truncate(bytes.len() / rows * (rows - 1));
                spec.info.shape[0] -= 1;
            });
            assert!(matches!(&error, Error::TensorShape { tensor, .. } if *tensor == name), "{error}");
        }
        for shape in [[64, 128], [32, 256], [usize::MAX, 256], [64, 100], [0, 0]] {
            let error = read_with(&config(scheme), &file, shape).unwrap_err();
            let refused = matches!(error, Error::UnsupportedQuantization { .. } | Error::TensorShape { .. });
            assert!(refused, "{error:?}");
        }
    }
}

fn with_group(scale: u8, zero: u8, code: Option<u8>) -> Result<QuantizedTensor> {
    let mut tensor = quantized([64, 256], GROUPS, 11);
    if let Some(code) = code {
        tensor.codes[9 * 256 + 128..10 * 256].fill(code);
    }
    let mut file = File::of(&tensor);
    let at = 64 + S2Order::Kernel.place(9);
    file.tensor("m.s2_scales").1[at] = scale;
    file.tensor("m.s2_zeros").1[at] = zero;
    read(GROUPS, &file)
}

#[test]
fn groups_that_no_kernel_could_run_are_refused() {
    let refused = |result: Result<QuantizedTensor>, tensor: &str, phrase: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::InputFile { .. }), "{error:?}");
        let message = error.to_string();
        assert!(message.contains(&format!("`m.{tensor}`")) && message.contains(phrase), "{message}");
        assert!(message.contains("output 9, group 1") && !error.remedy().marked().is_empty(), "{message}");
    };
    for scale in [0, 17, 128, 255] {
        refused(with_group(scale, 0, None), "s2_scales", "scales of groups must be from 1 to 16");
    }
    refused(with_group(3, 256_u16.wrapping_sub(4) as u8, None), "s2_zeros", "has -4");
    refused(with_group(1, 256_u16.wrapping_sub(16) as u8, None), "s2_zeros", "a zero point from 0 to 15");
    // 15 · 10 = 150 is more than 127.
    refused(with_group(10, 0, Some(15)), "qweight", "represents the integer 150");
    // −15 · 16 = −240 wraps to 16, and code 0 then has a value below −128.
    refused(with_group(16, 16, Some(0)), "qweight", "represents the integer -240");
    let fits = with_group(16, 16, Some(15)).unwrap();
    assert_eq!((fits.levels.unwrap().groups[19], fits.zeros.unwrap()[19]), (16, 15));
}

#[test]
fn scales_of_rows_are_finite_and_positive() {
    for (scheme, name) in
        [(GROUPS, "s1_scales"), ("w4a8-channel-asym", "s1_scales"), ("w8a8-channel-sym", "dequant_scale")]
    {
        let file = File::of(&quantized([64, 256], scheme, 13));
        let with = |value: f32| {
            let mut file = file.clone();
            let bytes = &mut file.tensor(&format!("m.{name}")).1;
            bytes[10..12].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
            read(scheme, &file).unwrap_err()
        };
        for value in [f32::NAN, f32::INFINITY] {
            assert!(matches!(with(value), Error::NonFinite { first_index: 5, .. }), "{scheme}");
        }
        for value in [0.0, -1.0] {
            let message = with(value).to_string();
            assert!(message.contains(&format!("`m.{name}` has a scale of {value} in row 5")), "{message}");
        }
    }
}

#[test]
fn zeros_of_rows_are_whole_or_refused() {
    const CHANNEL: &str = "w4a8-channel-asym";
    let tensor = quantized([64, 256], CHANNEL, 15);
    let file = File::of(&tensor);
    let with = |value: f32| {
        let mut file = file.clone();
        let bytes = &mut file.tensor("m.s1_szeros").1;
        bytes[10..12].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
        read(CHANNEL, &file)
    };
    for zero in 0..16_u8 {
        let read = with(tensor.scales[5] * f32::from(zero)).unwrap();
        assert_eq!(read.zeros.unwrap()[5], zero);
    }
    for factor in [-1.0, 0.5, 7.01, 16.0, 1000.0] {
        let error = with(tensor.scales[5] * factor).unwrap_err();
        assert!(error.to_string().contains("`m.s1_szeros` has"), "{error}");
        assert!(error.remedy().marked().contains("PreScale"), "{}", error.remedy());
    }
    assert!(matches!(with(f32::NAN), Err(Error::NonFinite { .. })));
}

proptest! {
    #[test]
    fn a_zero_times_any_scale_is_found_again(bits in 1_u16..0x7c00, zero in 0_u8..16) {
        let scale = half::f16::from_bits(bits).to_f32();
        let scaled = Dtype::F16.round(scale * f32::from(zero));
        prop_assume!(scaled.is_finite());
        let mut source = MemorySource::new();
        source.insert_f32("m.s1_scales", Dtype::F16, [1], &[scale]).unwrap();
        source.insert_f32("m.s1_szeros", Dtype::F16, [1], &[scaled]).unwrap();
        prop_assert_eq!(Reader::row_zeros(&source, "m", 1).unwrap(), vec![zero]);
    }

    #[test]
    fn any_weights_come_back(tiles in 1_usize..4, groups in 1_usize..3, which in 0_usize..3, seed: u64) {
        let shape = [32 * tiles, 128 * groups];
        let tensor = quantized(shape, ALL[which], seed);
        let back = read_with(&config(ALL[which]), &File::of(&tensor), shape).unwrap();
        prop_assert!(back == tensor);
    }
}
