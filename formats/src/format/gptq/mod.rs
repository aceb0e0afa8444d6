//! GPTQ v1: the format that AutoGPTQ introduced and gptqmodel, vLLM, SGLang and llama.cpp's converter read as `gptq`.
//!
//! 2, 3, 4 or 8 bits, one scheme for the whole model, scales in F16, always zero points (stored minus one) and a group
//! index. Groups are runs of adjacent inputs, even if they were rounded in a different order, so the index is `i /
//! group_size` and `desc_act` is false. `docs/formats/gptq.md` draws the bytes.

mod layout;
mod reader;

use serde_json::{Map, Value, json};

use super::loaders::{GPTQMODEL, LLAMA_CPP, LoaderRule, SGLANG, VLLM};
use super::{Container, ModuleSchemes, PackedReader};
use crate::checkpoint::{Dtype, TensorSpec};
use crate::quantize::QuantizedTensor;
use crate::scheme::{Granularity, LinearScheme};
use crate::{Error, Result};

/// `quant_method`.
const METHOD: &str = "gptq";
/// `checkpoint_format` for zero points stored minus one.
const V1: &str = "gptq";
/// `checkpoint_format` for zero points stored unchanged; read, not written.
const V2: &str = "gptq_v2";
/// The module that loaders leave float unless `lm_head` is set.
const HEAD: &str = "lm_head";
/// The file with a copy of the configuration, for older loaders.
const CONFIG_FILE: &str = "quantize_config.json";
/// Prefix of the keys of `dynamic` whose modules stay float.
const EXCLUDED: &str = "-:";

static LOADER_RULES: &[LoaderRule] = &[
    LoaderRule::new(
        &[VLLM, SGLANG],
        is_asymmetric,
        "vLLM and SGLang support only symmetric grids in the gptq format; they ignore zero points",
    )
    .refused_by(&[VLLM, SGLANG]),
    LoaderRule::new(
        &[LLAMA_CPP],
        is_asymmetric,
        "llama.cpp's converter misreads groups with a zero point of 0 in the gptq format",
    ),
    LoaderRule::computed(&[VLLM, SGLANG], |schemes| match schemes.quantized.first().map(|(_, s)| s.bits()) {
        None | Some(4 | 8) => Vec::new(),
        Some(bits) => vec![format!("vLLM and SGLang support 4 and 8 bits in the gptq format, not {bits}")],
    })
    .refused_by(&[VLLM, SGLANG]),
    LoaderRule::new(
        &[VLLM, SGLANG, GPTQMODEL],
        |schemes| !schemes.quantized.is_empty() && schemes.float.iter().any(|m| *m != HEAD),
        "linears that stay float are listed in `dynamic`, which vLLM, SGLang and gptqmodel support and older \
        implementations ignore",
    ),
];

/// All linears have one scheme.
fn is_asymmetric(schemes: &ModuleSchemes<'_>) -> bool {
    schemes.quantized.first().is_some_and(|(_, scheme)| !scheme.is_symmetric())
}

/// The format that gptqmodel, vLLM, SGLang and llama.cpp's converter read as `gptq`.
#[derive(Debug, Clone, Copy)]
pub struct GptqV1;

impl Container for GptqV1 {
    fn name(&self) -> &'static str {
        METHOD
    }

    fn summary(&self) -> &'static str {
        "GPTQ v1, for vLLM, SGLang and transformers: 2, 3, 4 or 8 bits, one scheme for all linears"
    }

    fn scale_dtype(&self, _scheme: LinearScheme, _weight: Dtype) -> Dtype {
        Dtype::F16
    }

    fn keeps_activations(&self) -> bool {
        false
    }

    fn layout(
        &self,
        module: &str,
        shape: [usize; 2],
        scheme: LinearScheme,
        scale_dtype: Dtype,
    ) -> Result<Vec<TensorSpec>> {
        layout::layout(module, shape, scheme, scale_dtype)
    }

    fn pack(&self, module: &str, tensor: &QuantizedTensor) -> Result<Vec<(TensorSpec, Vec<u8>)>> {
        layout::pack(module, tensor)
    }

    /// All linears must have one scheme, because loaders differ in how they look up per-module schemes. Head and
    /// embedding stay float, because not all engines support them quantized.
    fn check(&self, schemes: &ModuleSchemes<'_>) -> Result<()> {
        const REMEDY: &str = "leave it float, or write ‹format=compressed-tensors›";
        let head = schemes.head.map(|head| format!("`{head}`"));
        if let Some(module) = head.or(schemes.embedding.map(|_| "the embedding".to_owned())) {
            return Err(Error::usage(
                format!(
                    "{module} cannot be quantized in the {METHOD} format, because not all engines support it"
                ),
                REMEDY,
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

    fn quantization_config(&self, schemes: &ModuleSchemes<'_>) -> Value {
        let scheme = schemes.quantized.first().map(|(_, scheme)| *scheme).unwrap_or_default();
        let group_size = match scheme.granularity {
            Granularity::Group(size) => json!(size),
            _ => json!(-1),
        };
        let mut config = json!({
            "quant_method": METHOD,
            "checkpoint_format": V1,
            "bits": scheme.bits(),
            "group_size": group_size,
            "desc_act": false,
            "sym": scheme.is_symmetric(),
            "lm_head": false,
            "pack_dtype": "int32",
        });
        let float: Vec<&str> = schemes.float.iter().copied().filter(|m| *m != HEAD).collect();
        let names = schemes.all_names(&float).into_iter().map(|module| excluding(&module));
        let outside = schemes.wrapper.into_iter().flat_map(|wrapper| wrapper.outside_patterns());
        let excluded: Map<String, Value> =
            names.chain(outside.map(|p| format!("{EXCLUDED}{p}"))).map(|key| (key, json!({}))).collect();
        if !excluded.is_empty() {
            config["dynamic"] = excluded.into();
        }
        config
    }

    fn companion_files(&self, schemes: &ModuleSchemes<'_>) -> Vec<(&'static str, Value)> {
        vec![(CONFIG_FILE, self.quantization_config(schemes))]
    }

    fn loader_rules(&self) -> &'static [LoaderRule] {
        LOADER_RULES
    }

    fn reader(&self, quantization_config: &Value) -> Result<Option<Box<dyn PackedReader>>, String> {
        Ok(reader::Reader::new(quantization_config)?.map(|r| Box::new(r) as Box<dyn PackedReader>))
    }
}

/// The key that leaves exactly this module float.
fn excluding(module: &str) -> String {
    format!("{EXCLUDED}^{}$", module.replace('.', "\\."))
}
