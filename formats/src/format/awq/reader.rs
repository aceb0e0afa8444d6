//! Reads `gemm` checkpoints, written by quant or by other tools, back into logical order.

use serde_json::Value;

use super::layout::{self, codes_name, scales_name, unpack_transposed, zeros_name};
use super::{BITS, HEAD, METHOD, VERSION};
use crate::allocate::zeros;
use crate::checkpoint::{Dtype, TensorSource, TensorSpec, require_finite};
use crate::format::bits::transpose;
use crate::format::checks::{check_specs, modules_to_not_convert};
use crate::format::numbers::matrix;
use crate::format::{Axis, PackedReader, PackedWeight, TensorPart};
use crate::quantize::QuantizedTensor;
use crate::scheme::{Granularity, LinearScheme, WeightFormat};
use crate::{Error, Result};

#[derive(Debug)]
pub(super) struct Reader {
    granularity: Granularity,
    /// Substrings of the names of modules that stay float.
    float: Vec<String>,
}

impl Reader {
    /// Returns the reader for a checkpoint with this `quantization_config`; `None` for other methods.
    ///
    /// # Errors
    /// A reason that names the key, when the configuration uses a feature that this reader does not implement.
    pub(super) fn new(config: &Value) -> Result<Option<Self>, String> {
        let Some(map) = config.as_object() else { return Ok(None) };
        if map.get("quant_method").and_then(Value::as_str) != Some(METHOD) {
            return Ok(None);
        }
        let get = |key: &str| map.get(key).filter(|v| !v.is_null());
        let refuse = |key: &str, reason: &str| Err(format!("`quantization_config.{key}` {reason}"));
        match get("version").map(|v| v.as_str().map(str::to_lowercase)) {
            None => {}
            Some(Some(version)) if version == VERSION => {}
            Some(_) => return refuse("version", "must be gemm"),
        }
        if get("bits").and_then(Value::as_u64) != Some(u64::from(BITS)) {
            return refuse("bits", "must be 4");
        }
        if get("zero_point").is_some_and(|z| z.as_bool() != Some(true)) {
            return refuse("zero_point", "must be true");
        }
        let granularity = match get("group_size").map(Value::as_i64) {
            Some(Some(-1)) => Granularity::Channel,
            Some(Some(size)) if size > 0 => Granularity::Group(usize::try_from(size).unwrap_or(usize::MAX)),
            _ => return refuse("group_size", "must be positive, or -1"),
        };
        Ok(Some(Self { granularity, float: modules_to_not_convert(map)? }))
    }
}

impl PackedReader for Reader {
    fn code_suffixes(&self) -> &'static [&'static str] {
        &[".qweight"]
    }

    fn parameter_suffixes(&self) -> &'static [&'static str] {
        &[".qzeros", ".scales"]
    }

    fn scheme(&self, module: &str) -> Option<LinearScheme> {
        let float = module == HEAD || self.float.iter().any(|part| module.contains(part.as_str()));
        (!float).then_some(LinearScheme::weight_only(WeightFormat::int(BITS, false), self.granularity))
    }

    fn scale_dtype(&self, source: &dyn TensorSource, module: &str) -> Result<Dtype> {
        Ok(source.require(&scales_name(module))?.dtype)
    }

    fn shape(&self, source: &dyn TensorSource, module: &str) -> Result<Option<[usize; 2]>> {
        const CODES_PER_WORD: usize = 32 / BITS as usize;
        let stored = matrix(source, &codes_name(module), Dtype::I32, [1, CODES_PER_WORD])?;
        Ok(stored.map(|[k, n]| [n, k]))
    }

    fn tensors(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Vec<TensorSpec>> {
        let PackedWeight { module, shape, scheme } = weight;
        let specs = layout::layout(module, shape, scheme, Dtype::F16).map_err(|e| {
            Error::UnsupportedQuantization {
                path: source.location(&codes_name(module)),
                reason: format!("`{module}` cannot have the scheme {scheme}: {e}"),
            }
        })?;
        check_specs(source, &specs, |_, _| false)?;
        Ok(specs)
    }

    fn parts(&self, _source: &dyn TensorSource, weight: PackedWeight<'_>) -> Option<Vec<TensorPart>> {
        let PackedWeight { module, scheme, .. } = weight;
        let (words, groups) = (Some(Axis::of_words(1, BITS)), Axis::of_groups(0, scheme));
        Some(vec![
            TensorPart::new(codes_name(module), words, Some(Axis::new(0, 1, 1))),
            TensorPart::new(zeros_name(module), words, groups),
            TensorPart::new(scales_name(module), Some(Axis::new(1, 1, 1)), groups),
        ])
    }

    fn zeros(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Option<Vec<u8>>> {
        let PackedWeight { module, shape: [n, k], scheme } = weight;
        let groups = k / scheme.granularity.group_size(k);
        unpack_transposed(&source.read(&zeros_name(module))?, n, groups).map(Some)
    }

    fn read(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<QuantizedTensor> {
        self.tensors(source, weight)?;
        let PackedWeight { module, shape, scheme } = weight;
        let [n, k] = shape;
        let groups = k / scheme.granularity.group_size(k);
        let name = scales_name(module);
        let mut stored: Vec<f32> = zeros(n * groups, "the scales of a weight")?;
        Dtype::F16.widen(&source.read(&name)?, &mut stored);
        require_finite(source.location(&name), &name, &stored)?;
        let tensor = QuantizedTensor {
            shape,
            scheme,
            codes: unpack_transposed(&source.read(&codes_name(module))?, n, k)?,
            scales: transpose(&stored, groups, n)?,
            scale_dtype: Dtype::F16,
            zeros: self.zeros(source, weight)?,
            levels: None,
            global: None,
            input: None,
            input_order: None,
        };
        tensor.view()?;
        Ok(tensor)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::checkpoint::MemorySource;
    use crate::format::awq::AutoAwq;
    use crate::format::{Container, ModuleSchemes};
    use crate::quantize::quantize_rtn;

    fn config() -> Value {
        json!({ "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": true, "version": "GEMM",
                "modules_to_not_convert": ["layers.3"] })
    }

    #[test]
    fn what_is_written_reads_back() {
        let weights: Vec<f32> = (0..24 * 96).map(|i| (i as f32 * 0.61).sin() + 0.1).collect();
        for (scheme, size) in [("w4a16-g32-asym", 32), ("w4a16-g32-sym", 32), ("w4a16-channel-asym", -1)] {
            let tensor =
                quantize_rtn("m", &weights, [24, 96], scheme.parse().unwrap(), Dtype::F16, None).unwrap();
            let mut source = MemorySource::new();
            for (spec, bytes) in AutoAwq.pack("m", &tensor).unwrap() {
                source.insert(&spec.name, spec.info.dtype, spec.info.shape.clone(), bytes).unwrap();
            }
            let schemes = ModuleSchemes {
                quantized: vec![("m", tensor.scheme)],
                float: vec!["lm_head"],
                ..Default::default()
            };
            let config = AutoAwq.quantization_config(&schemes);
            assert_eq!(config["group_size"], size);
            let reader = Reader::new(&config).unwrap().unwrap();
            assert!(reader.scheme("lm_head").is_none());
            let of = |module, shape| PackedWeight { module, shape, scheme: reader.scheme("m").unwrap() };
            let back = reader.read(&source, of("m", [24, 96])).unwrap();
            assert_eq!((&back.codes, &back.scales), (&tensor.codes, &tensor.scales));
            assert_eq!(back.dequantize().unwrap(), tensor.dequantize().unwrap(), "{scheme}");
            assert!(reader.tensors(&source, of("m", [24, 64])).is_err());
            assert!(reader.tensors(&source, of("n", [24, 96])).is_err());
        }
    }

    #[test]
    fn two_levels_of_scales_are_read_back_as_one() {
        let weights: Vec<f32> =
            (0..16 * 256).map(|i| ((i as f32 * 0.61).sin() + 0.1) * (1 + i / 128 % 7) as f32).collect();
        let scheme = "w4a16-g128-asym-progressive".parse().unwrap();
        let tensor = quantize_rtn("m", &weights, [16, 256], scheme, Dtype::F16, None).unwrap();
        let mut source = MemorySource::new();
        for (spec, bytes) in AutoAwq.pack("m", &tensor.clone().flattened(Dtype::F16).unwrap()).unwrap() {
            source.insert(&spec.name, spec.info.dtype, spec.info.shape.clone(), bytes).unwrap();
        }
        let stored = AutoAwq.stored_scheme(tensor.scheme);
        let schemes = ModuleSchemes { quantized: vec![("m", stored)], ..Default::default() };
        let reader = Reader::new(&AutoAwq.quantization_config(&schemes)).unwrap().unwrap();
        let of = PackedWeight { module: "m", shape: [16, 256], scheme: reader.scheme("m").unwrap() };
        let back = reader.read(&source, of).unwrap();
        assert_eq!(back.scheme.to_string(), "w4a16-g128-asym");
        assert_eq!((&back.codes, &back.zeros), (&tensor.codes, &tensor.zeros));
        let levels = tensor.levels.unwrap();
        let products = levels.groups.iter().enumerate();
        let products: Vec<f32> = products
            .map(|(i, &group)| half::f16::from_f32(levels.rows[i / 2] * f32::from(group)).to_f32())
            .collect();
        assert_eq!(back.scales, products);
        assert_ne!(back.scales, tensor.scales, "rounding changes some");
        let message = AutoAwq.loses(scheme, Dtype::F16);
        assert!(message[0].contains("F16 scale, with a relative error of up to 2^-11"), "{message:?}");
        assert!(AutoAwq.loses(stored, Dtype::F16).is_empty());
    }

    #[test]
    fn configurations() {
        let reader = Reader::new(&config()).unwrap().unwrap();
        assert!(reader.scheme("model.layers.3.mlp.up_proj").is_none());
        assert_eq!(reader.scheme("model.layers.2.mlp.up_proj").unwrap().to_string(), "w4a16-g32-asym");
        assert!(Reader::new(&json!({ "quant_method": "gptq" })).unwrap().is_none());
        for (key, value) in [
            ("version", json!("gemv")),
            ("bits", json!(8)),
            ("zero_point", json!(false)),
            ("group_size", json!(0)),
            ("group_size", json!("all")),
            ("modules_to_not_convert", json!("lm_head")),
            ("modules_to_not_convert", json!([1])),
        ] {
            let mut config = config();
            config[key] = value;
            let reason = Reader::new(&config).unwrap_err();
            assert!(reason.contains(&format!("`quantization_config.{key}`")), "{reason}");
        }
    }
}
