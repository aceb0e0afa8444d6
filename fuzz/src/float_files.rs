//! Floating-point checkpoints with arbitrary tensors and configurations.

use quant_core::checkpoint::{Dtype, MemorySource, parse_strictly};
use quant_core::format::{self, PackedWeight};

use crate::input::Input;

const CONFIGS: [&str; 6] = [
    r#"{"quant_method":"compressed-tensors","format":"float-quantized","quantization_status":"compressed","config_groups":{"group_0":
       {"targets":["Linear"],"weights":{"num_bits":8,"type":"float","symmetric":true,"strategy":"channel","dynamic":false},
       "format":"float-quantized"}},"ignore":[]}"#,
    r#"{"quant_method":"compressed-tensors","format":"nvfp4-pack-quantized","quantization_status":"compressed","config_groups":
       {"group_0":{"targets":["Linear"],"weights":{"num_bits":4,"type":"float","symmetric":true,"strategy":"tensor_group",
       "group_size":16,"dynamic":false},"format":"nvfp4-pack-quantized"}},"ignore":[]}"#,
    r#"{"quant_method":"compressed-tensors","format":"mxfp4-pack-quantized","quantization_status":"compressed","config_groups":
       {"group_0":{"targets":["Linear"],"weights":{"num_bits":4,"type":"float","symmetric":true,"strategy":"group","group_size":32,
       "dynamic":false,"scale_dtype":"torch.uint8"},"format":"mxfp4-pack-quantized"}},"ignore":[]}"#,
    r#"{"quant_method":"modelopt","quant_algo":"NVFP4","group_size":16,"ignore":[],"config_groups":{}}"#,
    r#"{"quant_method":"modelopt","quant_algo":"FP8","ignore":[]}"#,
    r#"{"quant_method":"fp8","fmt":"e4m3","activation_scheme":"static","weight_block_size":[128,128]}"#,
];
const PARTS: [&str; 16] = [
    "null",
    "0",
    "true",
    "[]",
    "{}",
    "8",
    "4",
    "-1",
    "\"float\"",
    "\"tensor\"",
    "\"local\"",
    "\"FP8\"",
    "\"re:(\"",
    "1e999",
    "{\"num_bits\":8,\"type\":\"float\",\"symmetric\":true,\"strategy\":\"tensor\",\"dynamic\":false}",
    "\"torch.uint8\"",
];
const KEYS: [&str; 8] = [
    "kv_cache_scheme",
    "kv_cache_quant_algo",
    "quant_algo",
    "format",
    "ignore",
    "group_size",
    "quantization",
    "version",
];
const TENSORS: [&str; 8] = [
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "weight_scale_inv",
    "input_scale",
    "input_global_scale",
];

/// Checks that configurations are rejected or read, and that weights are rejected or can be dequantized.
///
/// # Panics
/// If a property does not hold.
pub fn float_files(data: &[u8]) {
    let mut input = Input::new(data);
    let mut text = CONFIGS[input.below(CONFIGS.len())].to_owned();
    if input.flag() {
        let (key, part) = (KEYS[input.below(KEYS.len())], PARTS[input.below(PARTS.len())]);
        text.insert_str(1, &format!("\"{key}\":{part},"));
    }
    if input.rarely(3) {
        // Replaces the value of a random key.
        let colons: Vec<usize> = text.match_indices(':').map(|(at, _)| at).collect();
        let at = colons[input.below(colons.len())] + 1;
        let end = at + text[at..].find([',', '}']).unwrap_or(0);
        text.replace_range(at..end, PARTS[input.below(PARTS.len())]);
    }
    let Ok(config) = parse_strictly(text.as_bytes()) else { return };
    let Ok(mut reader) = format::reader(&config) else { return };
    let _ = reader.has_fp8_cache();
    let [n, k] = [input.size(20), 16 * input.size(18)];
    let mut source = MemorySource::new();
    for name in TENSORS {
        // The valid dtype and shape, which most tensors get.
        let good: (Dtype, Vec<usize>) = match name {
            "weight" if text.contains("NVFP4") => (Dtype::U8, vec![n, k / 2]),
            "weight" => (Dtype::F8E4M3, vec![n, k]),
            "weight_packed" => (Dtype::U8, vec![n, k / 2]),
            "weight_scale" if text.contains("mxfp4") => (Dtype::U8, vec![n, k / 32]),
            "weight_scale" if text.contains("FP4") || text.contains("nvfp4") => {
                (Dtype::F8E4M3, vec![n, k / 16])
            }
            "weight_scale" => (Dtype::F32, vec![n, 1]),
            "weight_scale_inv" => (Dtype::F32, vec![n.div_ceil(128), k.div_ceil(128)]),
            "weight_scale_2" => (Dtype::F32, vec![]),
            _ => (Dtype::F32, vec![1]),
        };
        if input.rarely(6) {
            continue;
        }
        let (dtype, shape) = match input.rarely(5) {
            false => good,
            true => {
                let shape = (0..input.below(4)).map(|_| input.below(40)).collect();
                (Dtype::ALL[input.below(Dtype::ALL.len())], shape)
            }
        };
        let Some(len) = dtype.byte_len(shape.iter().product::<usize>() as u64) else { continue };
        let bytes = match (dtype, input.rarely(3)) {
            (Dtype::F32, false) => 0.001_f32.to_le_bytes().repeat(len as usize / 4),
            (Dtype::F8E4M3, false) => (0..len).map(|_| input.byte() & 0x3f).collect(),
            _ => input.bytes(len as usize),
        };
        let inserted = source.insert(format!("m.{name}"), dtype, shape, bytes);
        assert!(inserted.is_ok(), "the length matches type and shape");
    }
    if reader.survey(&source).is_err() {
        return;
    }
    let Some(scheme) = reader.scheme("m") else { return };
    let weight = PackedWeight { module: "m", shape: [n, k], scheme };
    let _ = reader.tensors(&source, weight);
    if let Ok(tensor) = reader.read(&source, weight) {
        let values = tensor.dequantize().expect("a valid weight");
        assert_eq!(values.len(), n * k);
        assert!(!values.iter().any(|x| x.is_nan()), "a NaN code or scale was accepted");
        assert!(tensor.input_grid().is_ok());
    }
}
