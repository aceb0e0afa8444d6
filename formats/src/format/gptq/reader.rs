//! Reads GPTQ checkpoints, written by quant or by other tools, back into logical order.

use regex::Regex;
use serde_json::Value;

use super::layout::{self, codes_name, index_name, scales_name, unpack_codes, unpack_zeros, zeros_name};
use super::{EXCLUDED, HEAD, METHOD, V1, V2};
use crate::allocate::zeros;
use crate::checkpoint::{Dtype, TensorSource, TensorSpec, require_finite};
use crate::format::bits::transpose;
use crate::format::checks::check_specs;
use crate::format::numbers::matrix;
use crate::format::{Axis, Contents, PackedReader, PackedWeight, TensorPart, input_order};
use crate::quantize::QuantizedTensor;
use crate::scheme::{Granularity, LinearScheme, WeightFormat};
use crate::{Error, Result};

#[derive(Debug)]
pub(super) struct Reader {
    scheme: LinearScheme,
    /// Whether zero points are stored minus one.
    less_one: bool,
    /// Whether the head is quantized too.
    head: bool,
    /// Modules that stay float.
    float: Vec<Regex>,
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
        let less_one = match get("checkpoint_format").map(Value::as_str) {
            None | Some(Some(V1)) => true,
            Some(Some(V2)) => false,
            Some(_) => return refuse("checkpoint_format", "must be gptq or gptq_v2"),
        };
        let bits = match get("bits").and_then(Value::as_u64) {
            Some(bits @ (2 | 3 | 4 | 8)) => bits as u8,
            _ => return refuse("bits", "must be 2, 3, 4 or 8"),
        };
        let granularity = match get("group_size").map(Value::as_i64) {
            Some(Some(-1)) => Granularity::Channel,
            Some(Some(size)) if size > 0 => Granularity::Group(usize::try_from(size).unwrap_or(usize::MAX)),
            _ => return refuse("group_size", "must be positive, or -1"),
        };
        let symmetric = match get("sym").map(Value::as_bool) {
            None => true,
            Some(Some(sym)) => sym,
            Some(None) => return refuse("sym", "must be true or false"),
        };
        if get("pack_dtype").is_some_and(|t| t.as_str() != Some("int32")) {
            return refuse("pack_dtype", "must be int32");
        }
        if get("modules_in_block_to_quantize").is_some() {
            return refuse("modules_in_block_to_quantize", "is not supported");
        }
        let mut float = Vec::new();
        match get("dynamic") {
            None => {}
            Some(Value::Object(rules)) => {
                for key in rules.keys() {
                    let Some(pattern) = key.strip_prefix(EXCLUDED) else {
                        return refuse(
                            "dynamic",
                            "changes the scheme of single modules, which is not supported",
                        );
                    };
                    // Matched from the start of a name, as Python's `re.match` does.
                    match Regex::new(&format!("^(?:{pattern})")) {
                        Ok(pattern) => float.push(pattern),
                        Err(_) => return refuse("dynamic", "contains an unsupported regular expression"),
                    }
                }
            }
            Some(_) => return refuse("dynamic", "is not an object"),
        }
        let head = get("lm_head").and_then(Value::as_bool).unwrap_or(false);
        let scheme = LinearScheme::weight_only(WeightFormat::int(bits, symmetric), granularity);
        Ok(Some(Self { scheme, less_one, head, float }))
    }

    fn broken(source: &dyn TensorSource, tensor: &str, reason: &str) -> Error {
        Error::UnsupportedQuantization {
            path: source.location(tensor),
            reason: format!("`{tensor}` {reason}"),
        }
    }
}

impl PackedReader for Reader {
    fn code_suffixes(&self) -> &'static [&'static str] {
        &[".qweight"]
    }

    fn parameter_suffixes(&self) -> &'static [&'static str] {
        &[".qzeros", ".scales", ".g_idx"]
    }

    fn scheme(&self, module: &str) -> Option<LinearScheme> {
        let float =
            (module == HEAD && !self.head) || self.float.iter().any(|pattern| pattern.is_match(module));
        (!float).then_some(self.scheme)
    }

    fn scale_dtype(&self, source: &dyn TensorSource, module: &str) -> Result<Dtype> {
        Ok(source.require(&scales_name(module))?.dtype)
    }

    fn shape(&self, source: &dyn TensorSource, module: &str) -> Result<Option<[usize; 2]>> {
        let Some([words, n]) = matrix(source, &codes_name(module), Dtype::I32, [32, 1])? else {
            return Ok(None);
        };
        Ok(Some([n, words / usize::from(self.scheme.bits())]))
    }

    fn tensors(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Vec<TensorSpec>> {
        let PackedWeight { module, shape, scheme } = weight;
        let specs = layout::layout(module, shape, scheme, Dtype::F16).map_err(|e| {
            Error::UnsupportedQuantization {
                path: source.location(&codes_name(module)),
                reason: format!("`{module}` cannot have the scheme {scheme}: {e}"),
            }
        })?;
        let index = index_name(module);
        check_specs(source, &specs, |spec, dtype| match dtype {
            // Other tools store scales in the model's dtype.
            Dtype::Bf16 | Dtype::F32 => spec.info.dtype == Dtype::F16,
            Dtype::I64 => spec.name == index,
            _ => false,
        })?;
        Ok(specs)
    }

    fn parts(&self, _source: &dyn TensorSource, weight: PackedWeight<'_>) -> Option<Vec<TensorPart>> {
        let PackedWeight { module, scheme, .. } = weight;
        let (outputs, groups) = (Some(Axis::new(1, 1, 1)), Axis::of_groups(0, scheme));
        let index = TensorPart::new(index_name(module), None, Some(Axis::new(0, 1, 1)));
        Some(vec![
            TensorPart::new(codes_name(module), outputs, Some(Axis::of_words(0, scheme.bits()))),
            TensorPart::new(zeros_name(module), Some(Axis::of_words(1, scheme.bits())), groups),
            TensorPart::new(scales_name(module), outputs, groups),
            match scheme.granularity {
                Granularity::Group(size) => index.with_contents(Contents::Groups(size)),
                _ => index,
            },
        ])
    }

    fn input_order(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Option<Vec<u32>>> {
        let (k, granularity) = (weight.shape[1], weight.scheme.granularity);
        input_order::read(source, &index_name(weight.module), k, granularity.group_size(k))
    }

    fn zeros(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Option<Vec<u8>>> {
        let PackedWeight { module, shape: [n, k], scheme } = weight;
        let groups = k / scheme.granularity.group_size(k);
        let name = zeros_name(module);
        let zeros = unpack_zeros(&source.read(&name)?, n, groups, scheme.bits(), self.less_one)?;
        if !scheme.is_symmetric() {
            return Ok(Some(zeros));
        }
        match zeros.iter().all(|&z| z == 1 << (scheme.bits() - 1)) {
            true => Ok(None),
            false => Err(Self::broken(
                source,
                &name,
                "has zero points that differ from the middle code, but `sym` is true, which is its default",
            )),
        }
    }

    fn read(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<QuantizedTensor> {
        self.tensors(source, weight)?;
        let PackedWeight { module, shape, scheme } = weight;
        let [n, k] = shape;
        let groups = k / scheme.granularity.group_size(k);
        let order = self.input_order(source, weight)?;
        let name = scales_name(module);
        let scale_dtype = source.require(&name)?.dtype;
        let mut stored: Vec<f32> = zeros(n * groups, "the scales of a weight")?;
        scale_dtype.widen(&source.read(&name)?, &mut stored);
        require_finite(source.location(&name), &name, &stored)?;
        let tensor = QuantizedTensor {
            shape,
            scheme,
            codes: unpack_codes(&source.read(&codes_name(module))?, shape, scheme.bits())?,
            scales: transpose(&stored, groups, n)?,
            scale_dtype,
            zeros: self.zeros(source, weight)?,
            levels: None,
            global: None,
            input: None,
            input_order: None,
        };
        tensor.view()?;
        Ok(input_order::apply(tensor, order))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::checkpoint::{MemorySource, TensorInfo};
    use crate::format::gptq::GptqV1;
    use crate::format::{Container, ModuleSchemes};
    use crate::quantize::quantize_rtn;

    fn written(scheme: &str) -> (QuantizedTensor, MemorySource, Value) {
        let weights: Vec<f32> = (0..32 * 96).map(|i| (i as f32 * 0.61).sin() + 0.1).collect();
        let tensor =
            quantize_rtn("m", &weights, [32, 96], scheme.parse().unwrap(), Dtype::F16, None).unwrap();
        let mut source = MemorySource::new();
        for (spec, bytes) in GptqV1.pack("m", &tensor).unwrap() {
            source.insert(&spec.name, spec.info.dtype, spec.info.shape.clone(), bytes).unwrap();
        }
        let schemes = ModuleSchemes {
            quantized: vec![("m", tensor.scheme)],
            float: vec!["model.layers.3.mlp.up_proj", "lm_head"],
            ..Default::default()
        };
        (tensor, source, GptqV1.quantization_config(&schemes))
    }

    #[test]
    fn what_is_written_reads_back() {
        for scheme in
            ["w2a16-g32-sym", "w3a16-g32-asym", "w4a16-g32-asym", "w4a16-channel-sym", "w8a16-g48-asym"]
        {
            let (tensor, source, config) = written(scheme);
            let reader = Reader::new(&config).unwrap().unwrap();
            assert!(reader.scheme("lm_head").is_none());
            assert!(reader.scheme("model.layers.3.mlp.up_proj").is_none());
            assert!(reader.scheme("model.layers.13.mlp.up_proj").is_some());
            let of = |module, shape| PackedWeight { module, shape, scheme: reader.scheme("m").unwrap() };
            assert_eq!(reader.read(&source, of("m", [32, 96])).unwrap(), tensor, "{scheme}");
            assert!(reader.tensors(&source, of("m", [32, 64])).is_err());
            assert!(reader.tensors(&source, of("n", [32, 96])).is_err());
        }
    }

    #[test]
    fn zeros_that_contradict_and_groups_of_unequal_sizes_are_refused() {
        let (tensor, source, mut config) = written("w4a16-g32-asym");
        config["sym"] = json!(true);
        let reader = Reader::new(&config).unwrap().unwrap();
        let of = |reader: &Reader| PackedWeight {
            module: "m",
            shape: [32, 96],
            scheme: reader.scheme("m").unwrap(),
        };
        let error = reader.read(&source, of(&reader)).unwrap_err();
        assert!(error.to_string().contains("differ from the middle"), "{error}");
        // In v2, the same words stand for zero points that are one less.
        config["sym"] = json!(false);
        config["checkpoint_format"] = json!("gptq_v2");
        let reader = Reader::new(&config).unwrap().unwrap();
        let zeros = reader.read(&source, of(&reader)).unwrap().zeros.unwrap();
        let less: Vec<u8> = tensor.zeros.unwrap().iter().map(|z| z.wrapping_sub(1) & 15).collect();
        assert_eq!(zeros, less);
        let mut scattered = MemorySource::new();
        for name in source.names() {
            let TensorInfo { dtype, shape } = source.info(name).unwrap().clone();
            let mut bytes = source.read(name).unwrap();
            if name == "m.g_idx" {
                bytes[0] = 1;
            }
            scattered.insert(name, dtype, shape, bytes).unwrap();
        }
        let error = reader.read(&scattered, of(&reader)).unwrap_err();
        assert!(error.to_string().contains("assigns 31 inputs to group 0, but groups have 32"), "{error}");
    }

    #[test]
    fn configurations() {
        let (.., config) = written("w4a16-g32-sym");
        assert_eq!(config["dynamic"], json!({ "-:^model\\.layers\\.3\\.mlp\\.up_proj$": {} }));
        assert!(Reader::new(&json!({ "quant_method": "awq" })).unwrap().is_none());
        for (key, value) in [
            ("checkpoint_format", json!("marlin")),
            ("bits", json!(5)),
            ("group_size", json!(0)),
            ("sym", json!("yes")),
            ("pack_dtype", json!("int16")),
            ("modules_in_block_to_quantize", json!([["q_proj"]])),
            ("dynamic", json!({ "+:.*down.*": { "bits": 8 } })),
            ("dynamic", json!({ "-:(": {} })),
            ("dynamic", json!([1])),
        ] {
            let mut config = config.clone();
            config[key] = value;
            let reason = Reader::new(&config).unwrap_err();
            assert!(reason.contains(&format!("`quantization_config.{key}`")), "{reason}");
        }
    }
}
