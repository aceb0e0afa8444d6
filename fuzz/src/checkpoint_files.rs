//! Damaged checkpoints, opened as an engine opens them.

use std::sync::Arc;

use quant_core::checkpoint::{Dtype, MemorySource, parse_strictly};
use quant_core::format::{ModuleSchemes, QuantizedCheckpoint, container};
use quant_core::quantize::quantize_rtn;
use quant_kernels_cpu::Serial;

use crate::input::Input;

/// Format, scheme, and dtype of the scales.
const CHECKPOINTS: [(&str, &str, Dtype); 9] = [
    ("awq", "w4a16-g32-asym", Dtype::F16),
    ("gptq", "w4a16-g32-sym", Dtype::F16),
    ("gptq", "w3a16-channel-asym", Dtype::F16),
    ("compressed-tensors", "w4a16-g32-asym", Dtype::Bf16),
    ("compressed-tensors", "w8a8-channel-sym", Dtype::F32),
    ("compressed-tensors", "fp8", Dtype::F32),
    ("modelopt", "nvfp4a16", Dtype::F8E4M3),
    ("qserve", "w4a8-g128-asym-progressive", Dtype::F16),
    ("qserve", "w4a8-channel-asym", Dtype::F16),
];
const PARTS: [&str; 10] = ["null", "0", "true", "[]", "4", "8", "-1", "1e999", "\"gptq_v2\"", "\"re:(\""];
const MODULES: [&str; 3] = ["a", "b.embed_tokens", "b.a"];

/// Checks that a checkpoint is rejected, or that each of its linears is rejected or read as a weight that can be
/// dequantized.
///
/// # Panics
/// If a property does not hold.
pub fn checkpoint_files(data: &[u8]) {
    run(data);
}

/// Returns which checkpoint it was, and how many weights were read.
fn run(data: &[u8]) -> (usize, usize) {
    let mut input = Input::new(data);
    let which = input.below(CHECKPOINTS.len());
    let (name, scheme, scales) = CHECKPOINTS[which];
    let (container, scheme) =
        (container(name).expect("a known format"), scheme.parse().expect("a valid scheme"));
    let modules = &MODULES[..input.size(MODULES.len())];
    let mut source = MemorySource::new();
    let mut schemes = ModuleSchemes::default();
    for module in modules {
        let shape = [32 * input.size(2), 128 * input.size(2)];
        let values: Vec<f32> =
            input.bytes(shape[0] * shape[1]).iter().map(|&b| f32::from(b as i8) / 64.0).collect();
        let tensor = quantize_rtn(module, &values, shape, scheme, scales, None).expect("values in range");
        for (spec, mut bytes) in container.pack(module, &tensor).expect("a shape that every format supports")
        {
            let (mut dtype, mut shape) = (spec.info.dtype, spec.info.shape);
            match input.below(24) {
                0 => continue,
                1 => dtype = Dtype::ALL[input.below(Dtype::ALL.len())],
                2 => shape.reverse(),
                3 => shape = (0..input.below(4)).map(|_| input.below(40)).collect(),
                4 => bytes = input.bytes(bytes.len()),
                5 if !bytes.is_empty() => {
                    let at = input.below(bytes.len());
                    bytes[at] = input.byte();
                }
                _ => {}
            }
            let len = dtype.byte_len(shape.iter().product::<usize>() as u64);
            if let Some(len) = len {
                bytes.resize(len as usize, 0);
            }
            let _ = source.insert(spec.name, dtype, shape, bytes);
        }
        schemes.quantized.push((module, scheme));
        schemes.shapes.insert(module, shape);
    }
    let mut text = container.quantization_config(&schemes).to_string();
    if input.rarely(6) {
        let colons: Vec<usize> = text.match_indices(':').map(|(at, _)| at).collect();
        let at = colons[input.below(colons.len())] + 1;
        let end = at + text[at..].find([',', '}']).unwrap_or(0);
        text.replace_range(at..end, PARTS[input.below(PARTS.len())]);
    }
    let Ok(config) = parse_strictly(text.as_bytes()) else { return (which, 0) };
    let Ok(checkpoint) = QuantizedCheckpoint::new(Arc::new(source), "config.json".as_ref(), &config) else {
        return (which, 0);
    };
    let mut read = 0;
    for linear in checkpoint.linears() {
        assert!(!linear.name.contains("embed"));
        let Ok(tensor) = checkpoint.read(&linear.name) else { continue };
        read += 1;
        assert_eq!((tensor.shape, tensor.scheme), (linear.shape, linear.scheme));
        let values = tensor.dequantize().expect("a valid weight");
        assert_eq!(values.len(), linear.shape[0] * linear.shape[1]);
        if let Ok(packed) = tensor.pack(None, &Serial) {
            assert_eq!([packed.layout().n(), packed.layout().k()], linear.shape);
        }
    }
    (which, read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_of_every_container_are_reached() {
        let mut read = [0; CHECKPOINTS.len()];
        for seed in 0..300_u32 {
            let (which, count) = run(&seed.wrapping_mul(0x9e37_79b9).to_le_bytes());
            read[which] += count;
        }
        assert!(read.iter().all(|&count| count > 3), "{read:?}");
    }
}
