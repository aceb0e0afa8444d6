//! Reads checkpoints with `quant_method: modelopt`: NVFP4, and FP8 through the reader of [`native_fp8`].
//!
//! The dtypes of tensors determine which linears are quantized and how. The configuration must name an algorithm that
//! this version knows, and is read strictly.

use std::collections::BTreeMap;

use quant_kernels_cpu::StaticScale;
use serde_json::Value;

use super::{METHOD, global_scale_name, input_scale_name, reciprocal, scale_name, weight_name};
use crate::checkpoint::{Dtype, TensorInfo, TensorSource, TensorSpec};
use crate::format::native_fp8::NativeFp8;
use crate::format::nibbles::unpack_nibbles;
use crate::format::numbers::{matrix, read_group_scales, read_positive};
use crate::format::{Axis, PackedReader, PackedWeight, TensorPart};
use crate::quantize::QuantizedTensor;
use crate::scheme::{ActivationScheme, FloatFormat, Granularity, LinearScheme, NV_GROUP, WeightFormat};
use crate::{Error, Result};

const KEYS: [&str; 12] = [
    "quant_method",
    "quant_algo",
    "group_size",
    "ignore",
    "exclude_modules",
    "config_groups",
    "kv_cache_scheme",
    "kv_cache_quant_algo",
    "quantized_layers",
    "has_zero_point",
    "pre_quant_scale",
    "producer",
];

const ALGORITHMS: [&str; 6] =
    ["NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MIXED_PRECISION"];

fn is_fp8(name: &str) -> bool {
    name.eq_ignore_ascii_case(super::FP8)
}

/// Whether a `kv_cache_scheme` is FP8 with static scales.
fn is_fp8_scheme(scheme: &Value) -> bool {
    let mut known = super::cache_scheme();
    known["strategy"] = "tensor".into();
    known["symmetric"] = true.into();
    let same = |(key, value): (&String, &Value)| known.get(key) == Some(value);
    scheme.as_object().is_some_and(|map| map.contains_key("num_bits") && map.iter().all(same))
}

#[derive(Debug)]
pub(super) struct Reader {
    fp8: NativeFp8,
    nvfp4: BTreeMap<String, LinearScheme>,
    weight_only: bool,
    fp8_cache: bool,
}

impl Reader {
    /// Returns the reader for a checkpoint with this `quantization_config`; `None` for other methods.
    ///
    /// # Errors
    /// A reason that names the key, when the configuration uses a feature that this reader does not implement.
    pub(super) fn new(config: &Value) -> Result<Option<Self>, String> {
        if config.get("quant_method").and_then(Value::as_str) != Some(METHOD) {
            return Ok(None);
        }
        let (config, path) = match config.get("quantization") {
            None => (config, "quantization_config"),
            Some(nested) => (nested, "quantization_config.quantization"),
        };
        let map = config.as_object().ok_or(format!("`{path}` must be an object"))?;
        if let Some(key) = map.keys().find(|key| !KEYS.contains(&key.as_str())) {
            return Err(format!("`{path}.{key}` is an unknown key"));
        }
        let field = |key: &str| map.get(key).filter(|value| !value.is_null());
        let algorithm = match field("quant_algo").map(Value::as_str) {
            Some(Some(name)) => name.to_uppercase(),
            _ => return Err(format!("`{path}.quant_algo` must be a string")),
        };
        if !ALGORITHMS.contains(&algorithm.as_str()) {
            let known = ALGORITHMS.join(", ");
            return Err(format!("`{path}.quant_algo` is {algorithm}; supported algorithms: {known}"));
        }
        let algorithm_of_cache = field("kv_cache_quant_algo");
        if let Some(other) = algorithm_of_cache.filter(|field| !field.as_str().is_some_and(is_fp8)) {
            return Err(format!("`{path}.kv_cache_quant_algo` is {other}; only FP8 is supported"));
        }
        let scheme_of_cache = field("kv_cache_scheme");
        if scheme_of_cache.is_some_and(|scheme| !is_fp8_scheme(scheme)) {
            return Err(format!("`{path}.kv_cache_scheme` must be {}", super::cache_scheme()));
        }
        for key in ["has_zero_point", "pre_quant_scale"] {
            if field(key).is_some_and(|value| *value != Value::Bool(false)) {
                return Err(format!("`{path}.{key}` must be false"));
            }
        }
        let is_nvfp4 = matches!(algorithm.as_str(), "NVFP4" | "W4A16_NVFP4");
        if let Some(size) = field("group_size").filter(|size| is_nvfp4 && **size != NV_GROUP) {
            return Err(format!("`{path}.group_size` is {size}; it must be {NV_GROUP} for NVFP4"));
        }
        Ok(Some(Self {
            fp8: NativeFp8::new(true),
            nvfp4: BTreeMap::new(),
            weight_only: algorithm == "W4A16_NVFP4",
            fp8_cache: algorithm_of_cache.is_some() || scheme_of_cache.is_some(),
        }))
    }

    /// The tensors of a linear, which must exist with these dtypes and shapes.
    fn specs(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Vec<TensorSpec>> {
        let PackedWeight { module, shape: [n, k], scheme } = weight;
        if !k.is_multiple_of(NV_GROUP) {
            return Err(Error::UnsupportedQuantization {
                path: source.location(&weight_name(module)),
                reason: format!("`{module}` has {k} inputs, which is not a multiple of {NV_GROUP}"),
            });
        }
        let mut specs = vec![
            TensorSpec::new(weight_name(module), Dtype::U8, [n, k / 2]),
            TensorSpec::new(scale_name(module), Dtype::F8E4M3, [n, k / NV_GROUP]),
            TensorSpec::new(global_scale_name(module), Dtype::F32, []),
        ];
        if scheme.activations == ActivationScheme::Nvfp4 {
            specs.push(TensorSpec::new(input_scale_name(module), Dtype::F32, []));
        }
        for spec in &mut specs {
            let TensorInfo { dtype, shape } = source.require(&spec.name)?;
            if *dtype != spec.info.dtype {
                return Err(Error::TensorDtype {
                    path: source.location(&spec.name),
                    tensor: spec.name.clone(),
                    expected: spec.info.dtype.to_string(),
                    got: dtype.to_string(),
                });
            }
            // A scalar may be stored as a vector.
            let is_one = spec.info.shape.is_empty() && *shape == [1];
            if *shape != spec.info.shape && !is_one {
                return Err(Error::TensorShape {
                    path: source.location(&spec.name),
                    tensor: spec.name.clone(),
                    expected: spec.info.shape.clone(),
                    got: shape.clone(),
                });
            }
            spec.info.shape.clone_from(shape);
        }
        Ok(specs)
    }
}

/// Reads the global scale of weights, converted to the divisor of other formats.
fn read_divisor(source: &dyn TensorSource, name: &str) -> Result<f32> {
    let multiplier = read_positive(source, name)?;
    if multiplier < 1.0 {
        return Ok(reciprocal(multiplier));
    }
    Err(Error::UnsupportedQuantization {
        path: source.location(name),
        reason: format!(
            "tensor `{name}` is {multiplier}, which allows weights up to {}: it seems to be a divisor, but \
            this format requires a multiplier less than 1",
            2688.0 * multiplier
        ),
    })
}

impl PackedReader for Reader {
    fn survey(&mut self, source: &dyn TensorSource) -> Result<()> {
        self.fp8.survey(source)?;
        let mut nvfp4 = BTreeMap::new();
        for name in source.names() {
            let Some(module) = name.strip_suffix(".weight_scale_2") else { continue };
            let weight = weight_name(module);
            let is_packed = source.info(&weight).is_some_and(|info| info.dtype == Dtype::U8);
            if !is_packed {
                return Err(Error::UnsupportedQuantization {
                    path: source.location(name),
                    reason: format!("tensor `{name}` exists, but `{weight}` of type U8 does not"),
                });
            }
            let rounds = !self.weight_only && source.info(&input_scale_name(module)).is_some();
            let activations = if rounds { ActivationScheme::Nvfp4 } else { ActivationScheme::Float };
            let weight = WeightFormat::Float(FloatFormat::E2m1);
            let granularity = Granularity::Group(NV_GROUP);
            nvfp4.insert(module.to_owned(), LinearScheme { weight, granularity, activations });
        }
        self.nvfp4 = nvfp4;
        Ok(())
    }

    fn has_fp8_cache(&self) -> bool {
        self.fp8_cache
    }

    fn code_suffixes(&self) -> &'static [&'static str] {
        &[".weight"]
    }

    fn parameter_suffixes(&self) -> &'static [&'static str] {
        &[".weight_scale", ".weight_scale_2"]
    }

    fn scheme(&self, module: &str) -> Option<LinearScheme> {
        self.nvfp4.get(module).copied().or_else(|| self.fp8.scheme(module))
    }

    fn scale_dtype(&self, source: &dyn TensorSource, module: &str) -> Result<Dtype> {
        match self.nvfp4.contains_key(module) {
            true => Ok(Dtype::F8E4M3),
            false => self.fp8.scale_dtype(source, module),
        }
    }

    fn shape(&self, source: &dyn TensorSource, module: &str) -> Result<Option<[usize; 2]>> {
        match self.nvfp4.contains_key(module) {
            true => matrix(source, &weight_name(module), Dtype::U8, [1, 2]),
            false => self.fp8.shape(source, module),
        }
    }

    fn tensors(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<Vec<TensorSpec>> {
        match self.nvfp4.contains_key(weight.module) {
            true => self.specs(source, weight),
            false => self.fp8.tensors(source, weight),
        }
    }

    fn parts(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Option<Vec<TensorPart>> {
        let PackedWeight { module, scheme, .. } = weight;
        if !self.nvfp4.contains_key(module) {
            return self.fp8.parts(source, weight);
        }
        let rows = Some(Axis::new(0, 1, 1));
        Some(vec![
            TensorPart::new(weight_name(module), rows, Some(Axis::new(1, 2, 1))),
            TensorPart::new(scale_name(module), rows, Axis::of_groups(1, scheme)),
        ])
    }

    fn zeros(&self, _source: &dyn TensorSource, _weight: PackedWeight<'_>) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn read(&self, source: &dyn TensorSource, weight: PackedWeight<'_>) -> Result<QuantizedTensor> {
        let PackedWeight { module, shape, scheme } = weight;
        if !self.nvfp4.contains_key(module) {
            return self.fp8.read(source, weight);
        }
        self.specs(source, weight)?;
        let global = read_divisor(source, &global_scale_name(module))?;
        let input = match scheme.activations {
            ActivationScheme::Nvfp4 => {
                // Unlike the multiplier of weights, that of inputs may be 1 or more.
                let scale = reciprocal(read_positive(source, &input_scale_name(module))?);
                Some(StaticScale { scale, zero: 0 })
            }
            _ => None,
        };
        let tensor = QuantizedTensor {
            shape,
            scheme,
            codes: unpack_nibbles(&source.read(&weight_name(module))?)?,
            scales: read_group_scales(source, &scale_name(module), global)?,
            scale_dtype: Dtype::F8E4M3,
            zeros: None,
            levels: None,
            global: Some(global),
            input,
            input_order: None,
        };
        tensor.view()?;
        Ok(tensor)
    }
}
