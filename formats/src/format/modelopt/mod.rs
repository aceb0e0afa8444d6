//! ModelOpt's layout of NVFP4, which vLLM, SGLang and TensorRT-LLM load: written and read. Its FP8 is only read.
//!
//! For a module `X` with weight `[n, k]`:
//!
//! | tensor | type | shape | holds |
//! |---|---|---|---|
//! | `X.weight` | U8 | `[n, k/2]` | two codes per byte, with the even column in the low bits |
//! | `X.weight_scale` | F8_E4M3 | `[n, k/16]` | group scales |
//! | `X.weight_scale_2` | F32 | `[]` | the multiplier of the group scales |
//! | `X.input_scale` | F32 | `[]` | the input's global scale, a multiplier; NVFP4 activations only |
//! | `…k_proj.k_scale`, `…v_proj.v_scale` | F32 | `[]` | the multiplier of cached keys and values; FP8 caches only |
//!
//! Codes and group scales are those of compressed-tensors, byte for byte. The global scale is a multiplier here and a
//! divisor in compressed-tensors: [`reciprocal`] converts between them.

mod reader;
mod reciprocal;

use serde_json::{Value, json};

use self::reciprocal::reciprocal;
use super::loaders::{LoaderRule, TRANSFORMERS, VLLM};
use super::nibbles::pack_nibbles;
use super::{Container, ModuleSchemes, PackedReader};
use crate::checkpoint::{Dtype, TensorSpec};
use crate::error::Indivisible;
use crate::quantize::QuantizedTensor;
use crate::scheme::{ActivationScheme, CachePart, LinearScheme, NV_GROUP};
use crate::{Error, Result};

/// `quant_method`, and the name of the format.
const METHOD: &str = "modelopt";
/// Older loaders take the configuration from this file.
const CONFIG_FILE: &str = "hf_quant_config.json";
/// `quant_algo` for quantized weights and activations.
const NVFP4: &str = "NVFP4";
/// `kv_cache_quant_algo` for keys and values in FP8.
const FP8: &str = "FP8";
/// `quant_algo` for quantized weights only.
const WEIGHT_ONLY: &str = "W4A16_NVFP4";

fn weight_name(module: &str) -> String {
    format!("{module}.weight")
}

fn scale_name(module: &str) -> String {
    format!("{module}.weight_scale")
}

fn global_scale_name(module: &str) -> String {
    format!("{module}.weight_scale_2")
}

fn input_scale_name(module: &str) -> String {
    format!("{module}.input_scale")
}

/// The format that ModelOpt writes.
#[derive(Debug, Clone, Copy)]
pub struct ModelOpt;

impl Container for ModelOpt {
    fn name(&self) -> &'static str {
        METHOD
    }

    fn summary(&self) -> &'static str {
        "NVFP4 as written by ModelOpt, for vLLM, SGLang and TensorRT-LLM"
    }

    /// NVFP4 represents MXFP4 exactly.
    fn restated_scheme(&self, scheme: LinearScheme) -> LinearScheme {
        scheme.as_nvfp4().unwrap_or_else(|| self.stored_scheme(scheme))
    }

    fn layout(
        &self,
        module: &str,
        [n, k]: [usize; 2],
        scheme: LinearScheme,
        scale_dtype: Dtype,
    ) -> Result<Vec<TensorSpec>> {
        let is_nvfp4 = scheme.has_global_scale() && scale_dtype == Dtype::F8E4M3;
        if n.checked_mul(k).is_none_or(|elements| elements > isize::MAX as usize / 8) {
            return Err(Error::usage(
                format!("`{module}.weight`: a weight of shape [{n}, {k}] exceeds the address space"),
                "leave it float with ‹ignore›",
            ));
        }
        if !is_nvfp4 {
            return Err(Error::usage(
                format!("`{module}.weight`: the {METHOD} format supports only NVFP4 weights, not {scheme}"),
                "choose ‹scheme=nvfp4› or ‹scheme=nvfp4a16›, or write ‹format=compressed-tensors›",
            ));
        }
        if !k.is_multiple_of(NV_GROUP) {
            let (tensor, group_size) = (weight_name(module), NV_GROUP);
            return Err(Error::GroupSizeDoesNotDivide(vec![Indivisible { tensor, columns: k, group_size }]));
        }
        let mut specs = vec![
            TensorSpec::new(weight_name(module), Dtype::U8, [n, k / 2]),
            TensorSpec::new(scale_name(module), Dtype::F8E4M3, [n, k / NV_GROUP]),
            TensorSpec::new(global_scale_name(module), Dtype::F32, []),
        ];
        if scheme.activations == ActivationScheme::Nvfp4 {
            specs.push(TensorSpec::new(input_scale_name(module), Dtype::F32, []));
        }
        Ok(specs)
    }

    fn pack(&self, module: &str, tensor: &QuantizedTensor) -> Result<Vec<(TensorSpec, Vec<u8>)>> {
        let specs = self.layout(module, tensor.shape, tensor.scheme, tensor.scale_dtype)?;
        tensor.require_storable(module)?;
        let inconsistent = |what: &str| Error::Internal(format!("quantized `{module}.weight`: {what}"));
        let scales = tensor.scale_codes().ok_or_else(|| inconsistent("a scale is not exact in its type"))?;
        let global = tensor.global.ok_or_else(|| inconsistent("it has no global scale"))?;
        let mut bytes = vec![pack_nibbles(&tensor.codes), scales, reciprocal(global).to_le_bytes().to_vec()];
        bytes.extend(tensor.input.map(|input| reciprocal(input.scale).to_le_bytes().to_vec()));
        Ok(specs.into_iter().zip(bytes).collect())
    }

    /// All linears must have one scheme, and the embedding stays float. `MIXED_PRECISION`, which lists every layer, is
    /// not written.
    fn check(&self, schemes: &ModuleSchemes<'_>) -> Result<()> {
        if schemes.embedding.is_some() {
            return Err(Error::usage(
                format!("the {METHOD} format cannot store a quantized embedding"),
                "leave it float, or write ‹format=compressed-tensors›",
            ));
        }
        let Some((first, scheme)) = schemes.quantized.first() else { return Ok(()) };
        match schemes.quantized.iter().find(|(_, other)| other != scheme) {
            None => Ok(()),
            Some((module, other)) => Err(Error::usage(
                format!(
                    "`{module}` has the scheme {other}, but `{first}` has {scheme}; the {METHOD} format \
                    needs one scheme for all modules"
                ),
                "use one scheme, leave modules float with ‹ignore›, or write ‹format=compressed-tensors›",
            )),
        }
    }

    /// Loaders look for the scales below the projections only if keys and values have separate projections.
    fn cache_scale(&self, linear: &str, part: CachePart) -> Option<TensorSpec> {
        let own = match part {
            CachePart::Keys => ".self_attn.k_proj",
            CachePart::Values => ".self_attn.v_proj",
        };
        let name = if linear.ends_with(own) { part.of_linear(linear) } else { part.of_attention(linear) };
        Some(TensorSpec::new(name, Dtype::F32, []))
    }

    fn quantization_config(&self, schemes: &ModuleSchemes<'_>) -> Value {
        let numbers = json!({ "num_bits": 4, "type": "float", "group_size": NV_GROUP, "dynamic": false });
        let mut group = json!({ "targets": ["Linear"], "weights": numbers });
        if algorithm(schemes) == NVFP4 {
            group["input_activations"] = numbers;
        }
        json!({
            "quant_method": METHOD,
            "quant_algo": algorithm(schemes),
            "group_size": NV_GROUP,
            "ignore": excluded(schemes),
            "config_groups": { "group_0": group },
            "kv_cache_scheme": schemes.fp8_cache.then(cache_scheme),
            "producer": producer(),
        })
    }

    fn companion_files(&self, schemes: &ModuleSchemes<'_>) -> Vec<(&'static str, Value)> {
        let config = json!({
            "producer": producer(),
            "quantization": {
                "quant_algo": algorithm(schemes),
                "kv_cache_quant_algo": schemes.fp8_cache.then_some(FP8),
                "group_size": NV_GROUP,
                "exclude_modules": excluded(schemes),
            },
        });
        vec![(CONFIG_FILE, config)]
    }

    fn loader_rules(&self) -> &'static [LoaderRule] {
        LOADER_RULES
    }

    fn reader(&self, quantization_config: &Value) -> Result<Option<Box<dyn PackedReader>>, String> {
        Ok(reader::Reader::new(quantization_config)?.map(|r| Box::new(r) as Box<dyn PackedReader>))
    }
}

static LOADER_RULES: &[LoaderRule] = &[
    LoaderRule::new(&[TRANSFORMERS], |_| true, "transformers 5.23 does not load the modelopt format")
        .refused_by(&[TRANSFORMERS]),
    LoaderRule::computed(&[VLLM], excluded_by_substring),
];

/// vLLM searches for excluded names as substrings of module names.
fn excluded_by_substring(schemes: &ModuleSchemes<'_>) -> Vec<String> {
    let names: Vec<&str> = schemes.quantized.iter().map(|(module, _)| *module).collect();
    let quantized = schemes.all_names(&names);
    let taken = |excluded: &String| quantized.iter().find(|module| module.contains(excluded.as_str()));
    match excluded(schemes).iter().find_map(|float| Some((float.clone(), taken(float)?))) {
        Some((float, module)) => vec![format!(
            "vLLM 0.33 will treat `{module}` as float, too, because its name contains `{float}`: write \
            ‹format=compressed-tensors› instead"
        )],
        None => Vec::new(),
    }
}

fn cache_scheme() -> Value {
    json!({ "dynamic": false, "num_bits": 8, "type": "float" })
}

/// Loaders require the name of the program that defines the layout.
fn producer() -> Value {
    json!({ "name": METHOD, "version": concat!("quant ", env!("CARGO_PKG_VERSION")) })
}

fn algorithm(schemes: &ModuleSchemes<'_>) -> &'static str {
    let rounds = |scheme: LinearScheme| scheme.activations == ActivationScheme::Nvfp4;
    match schemes.quantized.first() {
        Some((_, scheme)) if !rounds(*scheme) => WEIGHT_ONLY,
        _ => NVFP4,
    }
}

/// Modules that stay float, under all their names, and everything outside the decoder.
fn excluded(schemes: &ModuleSchemes<'_>) -> Vec<String> {
    let mut names = schemes.all_names(&schemes.float);
    names.extend(schemes.outside().iter().map(|module| format!("{module}*")));
    names
}

#[cfg(test)]
mod tests;
